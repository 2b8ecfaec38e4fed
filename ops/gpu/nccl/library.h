// The process's libnccl, found at run time; never linked, never two. And the part of NCCL's C
// interface that is used here: types by size, enumerators by number, functions by signature. It has
// not changed since 2.19, so no NCCL header is needed to build; test/unit/ops/nccl_abi_test.cc
// compares it with a real one where that is at hand.
#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace farandole {

inline constexpr char kNcclSoname[] = "libnccl.so.2";

/// The oldest version in which a communicator that does not block keeps its promise whatever its
/// peers do. Before 2.23 collectives ran in the calling thread, which in 2.22 connects there, and
/// before 2.27 the jobs of a group belonged to the thread and not to its communicators, so that two
/// threads that abort could join one. README.md, docs/gpu.md and farandole.doctor say it too
/// (test/lint/versions_test.py).
inline constexpr int kOldestNccl = 22700;
/// The version whose ncclConfig_t NcclConfig is.
inline constexpr int kNcclConfigVersion = 21800;

using NcclComm = struct NcclCommOpaque*;  ///< ncclComm_t
using NcclStream = void*;                 ///< cudaStream_t

struct NcclUniqueId {
  char internal[128];
};

enum class NcclResult : int {  ///< ncclResult_t
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  ///< Newer than 2.28.
};

enum class NcclDataType : int {  ///< ncclDataType_t; there is no 16-bit integer
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum class NcclRedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };  ///< ncclRedOp_t

inline constexpr int kNcclUndefined = INT_MIN;

/// ncclConfig_t as it was in 2.18. NCCL copies `size` bytes and gives its own defaults to what
/// `version` did not have yet.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kNcclConfigVersion;
  int blocking = kNcclUndefined;
  int cga_cluster_size = kNcclUndefined;
  int min_ctas = kNcclUndefined;
  int max_ctas = kNcclUndefined;
  const char* net_name = nullptr;
  int split_share = kNcclUndefined;
  int traffic_class = kNcclUndefined;  ///< Padding in 2.18, a field since 2.25.
};

/// The functions, by their names without "nccl". Required ones are never null in a NcclLibrary.
struct NcclApi {
  NcclResult (*GetVersion)(int* version) = nullptr;
  NcclResult (*GetUniqueId)(NcclUniqueId* id) = nullptr;
  const char* (*GetErrorString)(NcclResult result) = nullptr;
  const char* (*GetLastError)(NcclComm comm) = nullptr;
  NcclResult (*CommInitRankConfig)(NcclComm* comm, int size, NcclUniqueId id, int index,
                                   NcclConfig* config) = nullptr;
  NcclResult (*CommGetAsyncError)(NcclComm comm, NcclResult* error) = nullptr;
  NcclResult (*CommFinalize)(NcclComm comm) = nullptr;
  NcclResult (*CommDestroy)(NcclComm comm) = nullptr;
  NcclResult (*CommAbort)(NcclComm comm) = nullptr;
  NcclResult (*AllReduce)(const void* in, void* out, size_t count, NcclDataType type, NcclRedOp op,
                          NcclComm comm, NcclStream stream) = nullptr;
  NcclResult (*Broadcast)(const void* in, void* out, size_t count, NcclDataType type, int root,
                          NcclComm comm, NcclStream stream) = nullptr;
  NcclResult (*AllGather)(const void* in, void* out, size_t count, NcclDataType type, NcclComm comm,
                          NcclStream stream) = nullptr;
  NcclResult (*ReduceScatter)(const void* in, void* out, size_t count, NcclDataType type,
                              NcclRedOp op, NcclComm comm, NcclStream stream) = nullptr;
  NcclResult (*Send)(const void* in, size_t count, NcclDataType type, int peer, NcclComm comm,
                     NcclStream stream) = nullptr;
  NcclResult (*Recv)(void* out, size_t count, NcclDataType type, int peer, NcclComm comm,
                     NcclStream stream) = nullptr;
  NcclResult (*MemAlloc)(void** memory, size_t size) = nullptr;
  NcclResult (*MemFree)(void* memory) = nullptr;
  NcclResult (*CommRegister)(NcclComm comm, void* memory, size_t size, void** handle) = nullptr;
  NcclResult (*GroupStart)() = nullptr;
  NcclResult (*GroupEnd)() = nullptr;
};

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
  /// InvalidArgument for a library of another kind, or too old (kOldestNccl), naming file and
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
