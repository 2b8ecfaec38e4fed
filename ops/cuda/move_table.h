// What one launch of the move kernel is told, passed by value among the kernel's parameters.
//
// A table in the parameters needs no memory of its own and no copy before the launch, and a
// captured graph keeps it. Parameters may take 32,764 bytes (since CUDA 12.1).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// The numbers of a MoveSpec as the kernel uses them.
struct MoveFactors {
  double scale = 1.0;
  double rescale = 1.0;
  float scale_float = 1.0f;
  float rescale_float = 1.0f;
  int64_t divisor = 1;
};

/// Threads of one block; all blocks have as many.
inline constexpr int kMoveThreads = 256;

/// A move is cut into pieces of `piece` elements; each block moves one. Block b works on move m
/// with first_block[m] <= b < first_block[m + 1].
///
/// Invariant: first_block ascends from 0 and every move has at least one block.
template <int kCapacity>
struct MoveTable {
  MoveFactors factors;
  uint64_t identity = 0;  ///< Fills `out` where `in` is nullptr: eight bytes, repeated.
  int64_t piece = 0;
  int32_t size = 0;  ///< Moves.
  uint32_t first_block[kCapacity];
  const void* in[kCapacity];
  void* out[kCapacity];
  int64_t count[kCapacity];
};

/// Small enough for the 4 KiB that parameters always could take: cheaper to launch.
inline constexpr int kFewMoves = 128;
using SmallMoveTable = MoveTable<kFewMoves>;
using LargeMoveTable = MoveTable<Device::kMovesPerLaunch>;
static_assert(sizeof(SmallMoveTable) <= 4096 && sizeof(LargeMoveTable) <= 32764);

/// A checked and simplified request: what to do with every element, and in which unit to count.
struct MoveJob {
  MoveSpec spec;                  ///< Factors that mean nothing are 1; bool is uint8.
  bool raw = false;               ///< Bytes are copied as they are; moves are counted in bytes.
  int in_bytes = 1;               ///< Of one element as counted.
  int out_bytes = 1;              ///< Likewise.
  uint64_t identity = 0;          ///< As eight bytes: one element, repeated.
  std::vector<DeviceMove> moves;  ///< Only those with something to do.
};

/// @return InvalidArgument, naming the move, for a cast between floating and integer types, a
/// divisor below 1 or one for floating types, a second factor of a cast, a negative count, a
/// missing `out`, or memory that is not aligned to its element where elements are cast.
Result<MoveJob> MakeMoveJob(std::span<const DeviceMove> moves, const MoveSpec& spec);

/// The identity of `op` as bits of a `dtype`, in the low bytes. Sum and average 0, product 1, min
/// the largest value (infinity) and max the lowest; of bool: min and product true, max false.
uint64_t IdentityBits(ReduceOp op, DType dtype);

/// Elements per block: small enough that `total` elements occupy a device of so many
/// multiprocessors, large enough that a block is worth its start. A multiple of 4 KiB of the wider
/// type, so that each piece begins as aligned as the first.
int64_t PieceElements(int64_t total, int wide_bytes, int multiprocessors);

/// Writes `moves`, no more than the table holds, with the job's numbers. @return the blocks needed.
template <int kCapacity>
uint32_t FillMoveTable(const MoveJob& job, std::span<const DeviceMove> moves, int multiprocessors,
                       MoveTable<kCapacity>* table);

}  // namespace farandole
