// Cases of the variable-size collectives: reducescatter, allgather, alltoall.
#include <algorithm>
#include <numeric>

#include "test/conformance/data_plane_case.h"
#include "test/conformance/data_plane_case_helpers.h"

namespace farandole {
namespace {

constexpr int64_t kOdd = 40'009;
constexpr int64_t kManyChunks = 3 << 18;          // of float32: 3 MiB
constexpr int64_t kBeyondCaches = (1 << 21) + 9;  // of int64: 16 MiB

using Splits = std::vector<int64_t>;

/// As reducescatter divides rows: the first ranks get one more.
Splits Evenly(int64_t count, int members) {
  Splits splits(static_cast<size_t>(members), count / members);
  for (int64_t i = 0; i < count % members; ++i) ++splits[static_cast<size_t>(i)];
  return splits;
}

/// Borders anywhere, some of them the same.
Splits Unevenly(int64_t count, int members) {
  std::vector<int64_t> borders = {0, count};
  for (int i = 1; i < members; ++i) {
    const uint64_t random = MixBits(static_cast<uint64_t>(count * 64 + i));
    borders.push_back(
        random % 5 == 0 ? count : static_cast<int64_t>(random % static_cast<uint64_t>(count + 1)));
  }
  std::sort(borders.begin(), borders.end());
  Splits splits;
  for (size_t i = 1; i < borders.size(); ++i) splits.push_back(borders[i] - borders[i - 1]);
  return splits;
}

Splits AllOf(int64_t count, int members, int member) {
  Splits splits(static_cast<size_t>(members), 0);
  splits[static_cast<size_t>(member)] = count;
  return splits;
}

/// Factors are random where they count, and must not count elsewhere.
PlaneCase VariableSizeCase(OpKind kind, DType dtype, int members, Splits splits) {
  PlaneCase c;
  c.kind = kind;
  c.members = members;
  c.dtype = dtype;
  c.counts = {std::accumulate(splits.begin(), splits.end(), int64_t{0})};
  c.splits = std::move(splits);
  c.seed = static_cast<uint64_t>(c.Count()) + static_cast<uint64_t>(dtype);
  if (kind == OpKind::kReducescatter) {
    c.op = dtype == DType::kBool ? ReduceOp::kMax : ReduceOp::kAverage;
    return c;
  }
  c.fill = dtype == DType::kBool ? Fill::kSmall : Fill::kSpecial;
  c.wire = WireFormat::kFloat16;
  c.op = ReduceOp::kAverage;
  c.prescale = 2.0;
  c.postscale = 3.0;
  return c;
}

void AddDroppedResults(PlaneCase c, std::vector<PlaneCase>& cases) {
  for (const auto& drops : SomeMembers(c.members)) {
    c.drops = drops;
    cases.push_back(c);
  }
}

/// Cases of both reducescatter and allgather.
std::vector<PlaneCase> CasesOfSplits(OpKind kind, int members) {
  std::vector<PlaneCase> cases;
  for (const DType dtype : kAllDTypes) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{members} * 3, int64_t{5003}}) {
      cases.push_back(VariableSizeCase(kind, dtype, members, Evenly(count, members)));
      cases.push_back(VariableSizeCase(kind, dtype, members, Unevenly(count, members)));
    }
  }
  for (const int64_t count : {int64_t{5}, kOdd}) {
    for (const int member : {0, members - 1}) {
      cases.push_back(
          VariableSizeCase(kind, DType::kFloat32, members, AllOf(count, members, member)));
    }
  }
  cases.push_back(VariableSizeCase(kind, DType::kFloat32, members, Evenly(kManyChunks, members)));
  cases.push_back(
      VariableSizeCase(kind, DType::kInt16, members, Unevenly(2 * kManyChunks - 13, members)));
  if (members == 1) return Drawn(std::move(cases));
  for (const int64_t count : {int64_t{100}, kOdd}) {
    AddDroppedResults(VariableSizeCase(kind, DType::kFloat32, members, Unevenly(count, members)),
                      cases);
  }
  return cases;
}

}  // namespace

std::vector<PlaneCase> ReducescatterCases(int members) {
  std::vector<PlaneCase> cases = CasesOfSplits(OpKind::kReducescatter, members);
  for (PlaneCase& c : NumericCases(members)) {
    c.kind = OpKind::kReducescatter;
    c.counts = {c.Count()};
    c.splits = Unevenly(c.Count(), members);
    c.in_place = false;
    cases.push_back(std::move(c));
  }
  PlaneCase own = VariableSizeCase(OpKind::kReducescatter, DType::kFloat32, members,
                                   Evenly(int64_t{members} * 3, members));
  own.op = ReduceOp::kSum;
  own.prescale = 0.5;
  own.own_factors = true;
  cases.push_back(own);
  if (members == 1) return Drawn(std::move(cases));
  for (const int64_t count : {int64_t{100}, kOdd}) {
    PlaneCase c =
        VariableSizeCase(OpKind::kReducescatter, DType::kFloat32, members, Evenly(count, members));
    AddAbsentCases(c, cases);
    c.wire = WireFormat::kBfloat16;
    AddAbsentCases(c, cases);
  }
  return Drawn(std::move(cases));
}

std::vector<PlaneCase> AllgatherCases(int members) {
  std::vector<PlaneCase> cases = CasesOfSplits(OpKind::kAllgather, members);
  if (members == 1) return Drawn(std::move(cases));
  if (members == 2) {  // takes long, and says no more with more members
    cases.push_back(VariableSizeCase(OpKind::kAllgather, DType::kInt64, members,
                                     Unevenly(kBeyondCaches, members)));
  }
  std::vector<PlaneCase> absent;
  for (const int64_t count : {int64_t{100}, kOdd}) {
    AddAbsentCases(
        VariableSizeCase(OpKind::kAllgather, DType::kFloat32, members, Evenly(count, members)),
        absent);
  }
  for (PlaneCase& c : absent) {
    for (const int member : c.absent) c.splits[static_cast<size_t>(member)] = 0;
    c.counts = {std::accumulate(c.splits.begin(), c.splits.end(), int64_t{0})};
    cases.push_back(std::move(c));
  }
  return Drawn(std::move(cases));
}

std::vector<PlaneCase> AlltoallCases(int members) {
  std::vector<PlaneCase> cases;
  const auto of = [&](DType dtype, int64_t largest) {
    PlaneCase c = VariableSizeCase(OpKind::kAlltoall, dtype, members, {largest});
    c.splits = {};
    return c;
  };
  for (const DType dtype : kAllDTypes) {
    for (const int64_t largest : {0, 1, 7, 4099}) cases.push_back(of(dtype, largest));
  }
  cases.push_back(of(DType::kFloat32, kOdd));
  cases.push_back(of(DType::kFloat32, kManyChunks / members));
  cases.push_back(of(DType::kUint8, kManyChunks / members + 11));
  if (members == 1) return Drawn(std::move(cases));
  for (const int64_t largest : {int64_t{9}, kOdd}) {
    AddDroppedResults(of(DType::kFloat64, largest), cases);
  }
  return Drawn(std::move(cases));
}

}  // namespace farandole
