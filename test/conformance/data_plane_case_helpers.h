// What several files of conformance cases share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "test/conformance/data_plane_case.h"

namespace farandole {

inline constexpr DType kAllDTypes[] = {
    DType::kBool,  DType::kUint8,   DType::kInt8,     DType::kInt16,   DType::kInt32,
    DType::kInt64, DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64};
inline constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                       ReduceOp::kMax, ReduceOp::kProduct};
inline constexpr ReduceOp kAllBitOps[] = {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor};

/// Planes move elements by their length, whatever these mean, and kernels do not know how many
/// members there are: with four, one dtype of each length with two ops shows as much as all of them
/// do with fewer, and with more two dtypes do. To ThreadSanitizer two always do.
#if defined(FARANDOLE_SANITIZE_THREAD)
inline constexpr int kMembersWithAll = 0, kMembersWithFew = 0;
#else
inline constexpr int kMembersWithAll = 3, kMembersWithFew = 4;
#endif
inline constexpr DType kFewDTypes[] = {DType::kUint8, DType::kFloat16, DType::kFloat32,
                                       DType::kInt64};
inline constexpr DType kTwoDTypes[] = {DType::kFloat32, DType::kInt64};
inline constexpr ReduceOp kFewOps[] = {ReduceOp::kSum, ReduceOp::kAverage};
inline constexpr ReduceOp kFewBitOps[] = {ReduceOp::kBitXor};

inline std::span<const DType> DTypesFor(int members) {
  if (members > kMembersWithFew) return kTwoDTypes;
  return members > kMembersWithAll ? std::span<const DType>(kFewDTypes) : kAllDTypes;
}
inline std::span<const ReduceOp> OpsFor(int members) {
  return members > kMembersWithAll ? std::span<const ReduceOp>(kFewOps) : kAllOps;
}
inline std::span<const ReduceOp> BitOpsFor(int members) {
  return members > kMembersWithAll ? std::span<const ReduceOp>(kFewBitOps) : kAllBitOps;
}

/// SplitMix64's finaliser. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014, doi:10.1145/2660193.2660195.
constexpr uint64_t MixBits(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Sets of positions to be absent, or to drop the result: the first, the last, all but the last.
std::vector<std::vector<int>> SomeMembers(int members);

/// `c` with each of SomeMembers absent, dropping the result or not.
void AddAbsentCases(PlaneCase c, std::vector<PlaneCase>& cases);

}  // namespace farandole
