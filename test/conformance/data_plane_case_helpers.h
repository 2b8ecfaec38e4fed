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

/// SplitMix64's finaliser. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014, doi:10.1145/2660193.2660195.
constexpr uint64_t MixBits(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Of `cases`, in their order, as many as show each pair of values of two properties (dtype, op,
/// size, fill, wire, factors, ...) that any of them has; with more than three members, or under
/// ThreadSanitizer, each value: kernels do not know how many members there are. Which,
/// FARANDOLE_TEST_SEED decides, a number that is 1 where it is not set. With FARANDOLE_TEST_FULL=1:
/// all.
std::vector<PlaneCase> Drawn(std::vector<PlaneCase> cases);

/// Sets of positions to be absent, or to drop the result: the first, the last, all but the last.
std::vector<std::vector<int>> SomeMembers(int members);

/// `c` with each of SomeMembers absent, dropping the result or not.
void AddAbsentCases(PlaneCase c, std::vector<PlaneCase>& cases);

}  // namespace farandole
