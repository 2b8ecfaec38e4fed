// The process's libnccl, found at run time; never linked, never two.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace farandole {

inline constexpr char kNcclSoname[] = "libnccl.so.2";

struct NcclApi;  // ops/gpu/nccl/api.h: the functions that were found in it

/// The files to try, best first, once it is known that none is mapped: in the directory of each
/// Python package folder that this process has mapped something from (`own_directory`'s parent
/// first: there this library was installed), where the wheel nvidia-nccl-cu* puts it, then where
/// conda does; the CUDA toolkit's; what the loader finds by name. Pure.
/// @param own_directory  Where libfarandole.so is.
/// @param mapped_files   Paths of the libraries in this process.
std::vector<std::string> NcclFiles(const std::string& own_directory,
                                   std::span<const std::string> mapped_files);

/// Thread safety: any thread. Lifetime: until process exit; libnccl is never unloaded.
class NcclLibrary {
 public:
  /// Opens it, once per process: `path` if given; the copy that is mapped already (the
  /// framework's); the PyPI wheel's; the toolkit's; the loader's. When one is mapped already and
  /// `path` names another file, that is refused: two copies corrupt each other.
  /// @return Unavailable saying where it was looked for and what each place answered;
  /// InvalidArgument for a library of another kind, or too old (before 2.18), naming file and
  /// version. A failure is not kept: the next call looks again.
  static Result<const NcclLibrary*> OfProcess(const std::string& path);
  /// What a handle from dlopen holds, checked as above. For OfProcess, and for tests, which know
  /// more than one.
  static Result<std::shared_ptr<const NcclLibrary>> In(void* handle, const std::string& name);

  NcclLibrary(NcclApi api, int version, std::string file);

  const NcclApi& api() const { return *api_; }
  int version() const { return version_; }  ///< ncclGetVersion: 23203 is 2.32.3.
  const std::string& file() const { return file_; }
  /// "NCCL 2.32.3 (/path/libnccl.so.2)"
  std::string Describe() const;
  /// The bytes of a fresh ncclUniqueId.
  Result<std::string> MakeUniqueId() const;

 private:
  std::shared_ptr<const NcclApi> api_;
  int version_ = 0;
  std::string file_;
};

}  // namespace farandole
