// Batches over NCCL: pack, one collective per slice, unpack, in three streams.
#pragma once

#include <memory>
#include <string>

#include "ops/gpu/backend.h"
#include "ops/gpu/nccl/library.h"

namespace farandole {

/// Bytes of a slice on the wire, and so of each of the two fusion buffers, as a rule.
inline constexpr int64_t kNcclSliceBytes = int64_t{32} << 20;

/// A backend over this library. At most three launches of ours per slice of up to
/// Device::kItemsPerLaunch tensors, one of them of a single thread.
///
/// Begin returns Unimplemented for bitwise reductions. The first failure of NCCL ends the queue:
/// Unavailable if a peer is gone, else Internal, with call, reason, version, file and ranks.
std::unique_ptr<GpuBackend> MakeNcclBackend(const NcclLibrary& library, LaunchQueue& queue,
                                            const NcclSetOptions& options,
                                            int64_t slice_bytes = kNcclSliceBytes);

/// The process's libnccl.
/// @param path        FARANDOLE_NCCL, or empty: found.
/// @param share_gpu   FARANDOLE_SHARE_GPU: before NCCL's first call, as it reads its environment
///                    once, it is told to let ranks share a GPU, unless the user has said
///                    otherwise.
/// @param registers   FARANDOLE_NCCL_REGISTER, alike on all ranks: fused allreduces go through
///                    buffers that are registered with NCCL, unless ranks share a GPU.
std::unique_ptr<NcclProvider> MakeNcclProvider(const std::string& path, bool share_gpu,
                                               bool registers = false);

}  // namespace farandole
