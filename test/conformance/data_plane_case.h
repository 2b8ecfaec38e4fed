// What the conformance suite checks of a data plane: cases as values, and their inputs.
//
// Everything here is a pure function of the case, so N threads of one process and N processes under
// mpirun build the same inputs and expect the same results without talking.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/slots.h"
#include "core/types.h"

namespace farandole {

/// What the tensors are filled with.
enum class Fill : uint8_t {
  kSmall,     ///< Whole numbers from -8 to 8: exact in every dtype, sums included.
  kRandom,    ///< Reals between -4 and 4; integers of all bit patterns.
  kSpecial,   ///< Any bit pattern: NaN, infinities, subnormals, both zeros.
  kGradient,  ///< Magnitudes from 1e-8 to 1e-4, evenly by their logarithm, of both signs.
};

/// One collective over all ranks of a set.
struct PlaneCase {
  int members = 1;
  OpKind kind = OpKind::kAllreduce;
  DType dtype = DType::kFloat32;
  WireFormat wire = WireFormat::kSame;
  ReduceOp op = ReduceOp::kSum;
  std::vector<int64_t> counts = {1};  ///< One segment each. Alltoall: the most any member sends.
  std::vector<int64_t> splits =
      {};                        ///< Allgather, reducescatter: by member, adding up to counts[0].
  std::vector<int> absent = {};  ///< Positions, ascending.
  bool absent_drop = true;       ///< Absent ranks pass out == nullptr.
  std::vector<int> drops = {};   ///< Positions that contribute and pass out == nullptr.
  bool in_place = false;
  double prescale = 1.0;
  bool own_factors = false;  ///< Members at odd positions do not multiply by `prescale`.
  double postscale = 1.0;
  int root = 0;
  Fill fill = Fill::kSmall;
  uint64_t seed = 1;
  /// Floats are reduced in the wire type and in any order, so results are compared within the
  /// roundings of that (ErrorBound). They are equal on all members all the same.
  bool any_order = false;
  /// By member: the number of its host, where floats are reduced within hosts and then between them
  /// (HierarchicalPlane). Empty: in rank order.
  std::vector<int> hosts = {};
  /// By member: the slots whose sum it contributes, each filled as a member's tensor is otherwise;
  /// floats are added up in the order of the tree over them. Empty: no slots.
  std::vector<SlotRange> slots = {};

  int64_t Count() const;
  bool IsAbsent(int member) const;
  bool TakesResult(int member) const;
  double PrescaleOf(int member) const;
  /// Whether it is an adasum of several contributions.
  bool CombinesAdaptively() const;
  /// Elements that `member` passes in.
  int64_t InputCount(int member) const;
  /// Alltoall: elements that `from` sends to `to`; some none, some the most.
  int64_t SplitOf(int from, int to) const;
  /// For failure messages.
  std::string ToString() const;
};

/// Element `index` (counted through all segments) of what `member` contributes, as bits.
uint64_t InputBits(const PlaneCase& c, int member, int64_t index);

/// Drawn (see there) of every dtype with every op at 0, 1, 7, 4096 and 65537 elements. All the
/// others are drawn likewise.
std::vector<PlaneCase> AllreduceCases(int members);
/// Factors, averages of integers, bitwise ops, 16-bit wires, special values.
std::vector<PlaneCase> NumericCases(int members);
/// Fused segments, absent ranks, dropped results, 3 MiB tensors.
std::vector<PlaneCase> ShapeCases(int members);
/// Every root, dtype and size; with a 16-bit wire, which a broadcast must ignore.
std::vector<PlaneCase> BroadcastCases(int members);
/// Those of NumericCases, and every kind of splits: even, uneven, splits without elements, absent
/// ranks, dropped results, 3 MiB tensors. The next two too.
std::vector<PlaneCase> ReducescatterCases(int members);
/// With a 16-bit wire and factors, which they must ignore.
std::vector<PlaneCase> AllgatherCases(int members);
std::vector<PlaneCase> AlltoallCases(int members);
/// Every floating dtype at many sizes, fused segments, absent ranks, dropped results, factors and
/// 16-bit wires. Compared within roundings: `any_order`.
std::vector<PlaneCase> AdasumCases(int members);
/// Floats of every type, with more slots than members and with fewer than a power of two.
std::vector<PlaneCase> SlotCases(int members);
/// All of the above but those of adasums, which are no single batch of a plane.
std::vector<PlaneCase> AllPlaneCases(int members);
/// With PlaneCase::hosts by member.
std::vector<PlaneCase> OnHosts(std::vector<PlaneCase> cases, const std::vector<int>& hosts);
/// Those of `cases` that have an answer on a plane that reduces in any order, as NCCL does: without
/// reductions of floats that may overflow, or of NaN, without averages whose sum leaves 64 bits,
/// and without bitwise ops.
std::vector<PlaneCase> InAnyOrder(std::vector<PlaneCase> cases);

}  // namespace farandole
