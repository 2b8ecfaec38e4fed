// Moves of tensors as values: laid out in two buffers, filled, and compared byte by byte with a
// plain reference. For the cast kernel on the host (unit tests) and on a device (test/gpu).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ops/device.h"

namespace farandole {

using CastBytes = std::vector<std::byte>;

/// One tensor; shifts are elements past an address divisible by 256.
struct CastTensor {
  int64_t count = 0;
  int in_shift = 0;
  int out_shift = 0;
  bool absent = false;
};

struct CastCase {
  CastSpec spec;
  std::vector<CastTensor> items;
};

std::string ToText(const CastCase& wanted);

/// Where a case's tensors lie; between any two are bytes that nobody may touch.
struct CastLayout {
  std::vector<int64_t> in_offsets;
  std::vector<int64_t> out_offsets;
  int64_t in_bytes = 0;
  int64_t out_bytes = 0;

  explicit CastLayout(const CastCase& wanted);
  std::vector<CastItem> ItemsAt(const CastCase& wanted, const void* in, void* out) const;
};

/// Runs the casts on copies of `in` and `out` and gives `out` afterwards. Copies begin at addresses
/// divisible by 256.
using CastRunner = std::function<Result<CastBytes>(const CastCase& wanted, const CastLayout& layout,
                                                   const CastBytes& in, const CastBytes& out)>;

/// CastOnHost as a runner.
Result<CastBytes> RunCastsOnHost(const CastCase& wanted, const CastLayout& layout,
                                 const CastBytes& in, const CastBytes& out);
/// Element by element, as plainly as can be.
Result<CastBytes> RunCastsPlainly(const CastCase& wanted, const CastLayout& layout,
                                  const CastBytes& in, const CastBytes& out);

/// Empty if both runners give the same bytes for random input (any NaN equals any other), else what
/// differs first.
std::string CompareCasts(const CastCase& wanted, const CastRunner& runner,
                         const CastRunner& reference, uint64_t seed);
/// The same for a given input.
std::string CompareCastsOf(const CastCase& wanted, const CastBytes& in, const CastRunner& runner,
                           const CastRunner& reference);

/// Every pair of types that can be cast, with factors that are 1, fractions, beyond the range, and
/// divisors.
std::vector<CastSpec> AllCastSpecs();
/// Types of every ratio of sizes, for tests of alignment and tails.
std::vector<CastSpec> CastSpecsByShape();
/// Every one of AllCastSpecs, with tensors of every size.
std::vector<CastCase> CasesOfEveryPair();
/// From every alignment to every other.
std::vector<CastCase> CasesOfEveryAlignment();
/// One tensor to more than two launches take.
std::vector<CastCase> CasesOfAnyNumber();
/// Absent inputs, filled with the identity of every type and op.
std::vector<CastCase> CasesOfAbsentInputs();
/// Of every half and the edges of every float, as CompareCastsOf says it.
std::string CompareCastsOfSpecialElements(const CastRunner& runner, const CastRunner& reference);
/// Tensors without elements, with one, odd and prime numbers of them, more than a block does.
std::vector<CastTensor> ItemsOfEverySize();
/// All 65,536 halves, or for wider floats: limits, subnormals, ties, NaNs, infinities.
CastBytes SpecialElements(DType dtype);

}  // namespace farandole
