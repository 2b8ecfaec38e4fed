// Batches through host memory: down from the GPU, over a CPU plane, up again.
#pragma once

#include <cstdint>
#include <memory>

#include "ops/gpu/backend.h"

namespace farandole {

/// Pinned and device memory through which all sets of a GPU stage their batches, one at a time: so
/// many slots of so many bytes on either side, allocated when first wanted.
inline constexpr int kStagingSlots = 3;
inline constexpr int64_t kStagingSlotBytes = int64_t{4} << 20;

/// Works where NCCL does not: ranks that share a GPU, no library. A batch is divided into slices of
/// one staging slot (slices.h); while one is on the host plane, others are copied. The result is
/// bitwise that of the CPU plane, whose collective it is; the GPU casts and multiplies by the
/// prescale, with the same rounding.
///
/// It is driven by the holder of the engine lock, to whom the host plane belongs, and never blocks.
/// Begin returns ResourceExhausted if a slot is too small for as many ranks. Abandon leaves
/// commands in the streams that may touch the batch's tensors.
///
/// @param counters    May be nullptr.
/// @param slot_bytes  Equal on all ranks.
std::unique_ptr<StagedProvider> MakeStagedProvider(Counters* counters,
                                                   int64_t slot_bytes = kStagingSlotBytes);

}  // namespace farandole
