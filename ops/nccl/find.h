// Where a process's libnccl may be.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace farandole {

inline constexpr char kNcclSoname[] = "libnccl.so.2";

/// The files to try, best first, once it is known that none is mapped: in the directory of each
/// Python package folder that this process has mapped something from (`own_directory`'s parent
/// first: there this library was installed), where the wheel nvidia-nccl-cu* puts it, then where
/// conda does; the CUDA toolkit's; what the loader finds by name. Pure.
/// @param own_directory  Where libfarandole.so is.
/// @param mapped_files   Paths of the libraries in this process.
std::vector<std::string> NcclFiles(const std::string& own_directory,
                                   std::span<const std::string> mapped_files);

/// dlopen's handle of the one libnccl, which is mapped if it was not yet.
/// @param path  A file to use, or empty.
/// @return InvalidArgument if `path` names another file than the one that is mapped, or one of
/// another soname; Unavailable with every place and the loader's answer.
Result<void*> FindNccl(const std::string& path);

}  // namespace farandole
