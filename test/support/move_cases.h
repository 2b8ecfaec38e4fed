// Moves of tensors as values: laid out in two buffers, filled, and compared byte by byte with a
// plain reference. For the move kernel on the host (unit tests) and on a device (test/gpu).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ops/device.h"

namespace farandole {

using MoveBytes = std::vector<std::byte>;

/// One tensor; shifts are elements past an address divisible by 256.
struct MoveItem {
  int64_t count = 0;
  int in_shift = 0;
  int out_shift = 0;
  bool absent = false;
};

struct MoveCase {
  MoveSpec spec;
  std::vector<MoveItem> items;
};

std::string ToText(const MoveCase& wanted);

/// Where a case's tensors lie; between any two are bytes that nobody may touch.
struct MoveLayout {
  std::vector<int64_t> in_offsets;
  std::vector<int64_t> out_offsets;
  int64_t in_bytes = 0;
  int64_t out_bytes = 0;

  explicit MoveLayout(const MoveCase& wanted);
  std::vector<DeviceMove> MovesAt(const MoveCase& wanted, const void* in, void* out) const;
};

/// Runs the moves on copies of `in` and `out` and gives `out` afterwards. Copies begin at addresses
/// divisible by 256.
using MoveRunner = std::function<Result<MoveBytes>(const MoveCase& wanted, const MoveLayout& layout,
                                                   const MoveBytes& in, const MoveBytes& out)>;

/// MoveOnHost as a runner.
Result<MoveBytes> RunMovesOnHost(const MoveCase& wanted, const MoveLayout& layout,
                                 const MoveBytes& in, const MoveBytes& out);
/// Element by element, as plainly as can be.
Result<MoveBytes> RunMovesPlainly(const MoveCase& wanted, const MoveLayout& layout,
                                  const MoveBytes& in, const MoveBytes& out);

/// Empty if both runners give the same bytes for random input (any NaN equals any other), else what
/// differs first.
std::string CompareMoves(const MoveCase& wanted, const MoveRunner& runner,
                         const MoveRunner& reference, uint64_t seed);
/// The same for a given input.
std::string CompareMovesOf(const MoveCase& wanted, const MoveBytes& in, const MoveRunner& runner,
                           const MoveRunner& reference);

/// Every pair of types that can be cast, with factors that are 1, fractions, beyond the range, and
/// divisors.
std::vector<MoveSpec> AllMoveSpecs();
/// Types of every ratio of sizes, for tests of alignment and tails.
std::vector<MoveSpec> MoveSpecsByShape();
/// Tensors without elements, with one, odd and prime numbers of them, more than a block moves.
std::vector<MoveItem> ItemsOfEverySize();
/// All 65,536 halves, or for wider floats: limits, subnormals, ties, NaNs, infinities.
MoveBytes SpecialElements(DType dtype);

}  // namespace farandole
