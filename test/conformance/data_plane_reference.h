// The result contract of `class DataPlane`, written once more as plainly as possible: what every
// plane must give, bit for bit.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "test/conformance/data_plane_case.h"

namespace farandole {

/// Expected elements of `c`, all segments end to end: of every member that takes the result, or,
/// where members get different ones, of all members end to end.
std::vector<std::byte> ReferenceResult(const PlaneCase& c);
/// The elements of ReferenceResult that `member` gets.
struct ResultRange {
  int64_t begin = 0;
  int64_t count = 0;
};
ResultRange ResultOf(const PlaneCase& c, int member);
/// The same for each of `cases`.
std::vector<std::vector<std::byte>> ReferenceResults(std::span<const PlaneCase> cases);

/// By how much element `index` of `c` may be off where the order and the type of the reduction are
/// the plane's own: some roundings in the wire type, relative to what was added up or multiplied.
/// 0: not at all.
double ErrorBound(const PlaneCase& c, int64_t index);

/// The value of an element with these bits, of a floating dtype.
double FloatFromBits(DType dtype, uint64_t bits);

/// How many of the elements in `got` differ from `expected`; any NaN equals any NaN. Writes the
/// first that does to `first`.
int64_t CountDifferences(DType dtype, const std::byte* got, const std::byte* expected,
                         int64_t count, int64_t* first);

}  // namespace farandole
