#include "test/conformance/data_plane_case.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <string_view>

#include "core/half.h"
#include "ops/cpu/batch.h"
#include "test/conformance/data_plane_case_helpers.h"
#include "test/conformance/data_plane_reference.h"

namespace farandole {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 4096, 65537};

uint64_t FromDouble(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat16:
      return ToFloat16(static_cast<float>(value)).bits;
    case DType::kBfloat16:
      return ToBfloat16(static_cast<float>(value)).bits;
    case DType::kFloat32:
      return std::bit_cast<uint32_t>(static_cast<float>(value));
    case DType::kFloat64:
      return std::bit_cast<uint64_t>(value);
    default:
      return static_cast<uint64_t>(static_cast<int64_t>(value));
  }
}

/// Half of all special values have an exponent at one end of its range.
uint64_t SpecialBits(DType dtype, uint64_t random) {
  const uint64_t bits = MixBits(random);
  const uint64_t extreme = (random & 2u) != 0 ? ~uint64_t{0} : 0;
  if ((random & 1u) == 0) return bits;
  switch (dtype) {
    case DType::kFloat32:
      return (bits & 0x807fffffu) | (extreme & 0x7f800000u);
    case DType::kFloat64:
      return (bits & 0x800fffffffffffffu) | (extreme & 0x7ff0000000000000u);
    default:
      return bits;
  }
}

/// 1e-8 to 1e-4 by whole steps of its logarithm: a table of powers, so that every C library gives
/// the same bits.
double GradientOf(uint64_t random) {
  constexpr double kDecades[] = {1e-8, 1e-7, 1e-6, 1e-5};
  constexpr double kSteps[] = {1.0, 1.3, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 7.9};
  const double jitter = 1.0 + static_cast<double>((random >> 16) & 0xffffu) * 0x1p-18;  // to 1.25
  const double magnitude = kDecades[random & 3u] * kSteps[(random >> 2) % 10] * jitter;
  return (random >> 63) != 0 ? -magnitude : magnitude;
}

/// What a member, or one of its slots, is filled with.
uint64_t FilledBits(const PlaneCase& c, int number, int64_t index) {
  const uint64_t random = MixBits(c.seed * 1'000'003 + static_cast<uint64_t>(number) * 0x51ed2701u +
                                  static_cast<uint64_t>(index) * 0x2545f4914f6cdd1du);
  if (c.dtype == DType::kBool) return random & 1u;
  if (c.fill == Fill::kSpecial) return SpecialBits(c.dtype, random);
  if (c.fill == Fill::kGradient) return FromDouble(c.dtype, GradientOf(MixBits(random)));
  if (c.fill == Fill::kRandom) {
    if (!IsFloating(c.dtype)) return MixBits(random);
    return FromDouble(c.dtype, static_cast<double>(random >> 11) * 0x1p-50 - 4.0);
  }
  const int64_t small = static_cast<int64_t>(random % 17) - 8;
  return FromDouble(c.dtype, static_cast<double>(c.dtype == DType::kUint8 ? small + 8 : small));
}

/// The sum of slots `begin` to `begin` + `width` - 1, as far as there are such, in the tree: two
/// values of a dtype, added up as doubles, are rounded to it once.
double SlotSum(const PlaneCase& c, int begin, int width, int64_t index) {
  if (width == 1) return FloatFromBits(c.dtype, FilledBits(c, begin, index));
  const double left = SlotSum(c, begin, width / 2, index);
  const int middle = begin + width / 2;
  if (middle >= c.slots.back().end) return left;
  const double sum = left + SlotSum(c, middle, width / 2, index);
  return FloatFromBits(c.dtype, FromDouble(c.dtype, sum));
}

PlaneCase Make(int members, DType dtype, ReduceOp op, std::vector<int64_t> counts) {
  PlaneCase c;
  c.members = members;
  c.dtype = dtype;
  c.op = op;
  c.counts = std::move(counts);
  c.in_place = c.counts.size() % 2 == 1 && c.counts[0] % 2 == 1;
  c.seed = static_cast<uint64_t>(c.Count()) + static_cast<uint64_t>(op);
  return c;
}

constexpr int kMostMembersByPairs = 3;

const char* Variable(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

bool AsksForPairs(int members) {
#if defined(FARANDOLE_SANITIZE_THREAD)
  return members < 0;
#else
  return members <= kMostMembersByPairs;
#endif
}

/// Each property with its value, as text.
std::vector<std::string> PropertiesOf(const PlaneCase& c) {
  const auto list = [](char name, const std::vector<int>& positions, bool drop = false) {
    std::string text = std::string(1, name) + (drop ? "!" : "=");
    for (const int position : positions) text += std::to_string(position) + " ";
    return text;
  };
  const auto number = [](char name, double value) { return name + std::to_string(value); };
  const auto code = [](auto value) { return static_cast<double>(value); };
  const int64_t most = c.splits.empty() ? -1 : *std::max_element(c.splits.begin(), c.splits.end());
  return {number('k', code(c.kind)),
          number('d', code(c.dtype)),
          number('o', code(c.op)),
          number('w', code(c.wire)),
          number('f', code(c.fill)),
          number('n', code(c.Count())),
          number('g', code(c.counts.size())),
          number('s', code(most)),
          number('i', c.in_place),
          number('x', c.prescale) + number('y', c.postscale) + number('z', c.own_factors),
          number('r', c.root),
          number('v', c.slots.empty() ? 0 : c.slots.back().end),
          list('a', c.absent, c.absent_drop),
          list('t', c.drops)};
}

/// Whether `c` has a pair of values, or a value, that is not yet in `seen`, which then has it.
bool ShowsMore(const PlaneCase& c, std::set<std::string>& seen) {
  const std::vector<std::string> values = PropertiesOf(c);
  const bool by_pairs = AsksForPairs(c.members);
  bool shows = false;
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t j = by_pairs ? i + 1 : i; j < (by_pairs ? values.size() : i + 1); ++j) {
      shows = seen.insert(values[i] + values[j]).second || shows;
    }
  }
  return shows;
}

void AddFactorCases(int members, DType dtype, ReduceOp op, std::vector<PlaneCase>& cases) {
  const double factors[][2] = {{0.5, 1.0}, {1.0, 0.3}, {1.7, -2.25}};
  for (const auto& factor : factors) {
    PlaneCase c = Make(members, dtype, op, {3, 1029});
    c.prescale = factor[0];
    c.postscale = factor[1];
    c.fill = Fill::kRandom;
    cases.push_back(c);
  }
}

/// As a premul_sum arrives: of all dtypes but bool, and on a 16-bit wire.
void AddOwnFactorCases(int members, DType dtype, std::vector<PlaneCase>& cases) {
  PlaneCase c = Make(members, dtype, ReduceOp::kSum, {3, 1029});
  c.prescale = 0.5;
  c.own_factors = true;
  c.fill = IsFloating(dtype) ? Fill::kRandom : Fill::kSmall;
  cases.push_back(c);
  c.wire = WireFormat::kBfloat16;
  if (dtype == DType::kFloat32) cases.push_back(c);
}

void AddBitCases(int members, DType dtype, std::vector<PlaneCase>& cases) {
  for (const ReduceOp op : kAllBitOps) {
    PlaneCase c = Make(members, dtype, op, {5, 1029});
    c.fill = Fill::kRandom;
    cases.push_back(c);
  }
}

void AddWireCases(int members, DType dtype, ReduceOp op, std::vector<PlaneCase>& cases) {
  for (const WireFormat wire : {WireFormat::kFloat16, WireFormat::kBfloat16}) {
    for (const Fill fill : {Fill::kSmall, Fill::kRandom, Fill::kSpecial, Fill::kGradient}) {
      PlaneCase c = Make(members, dtype, op, {2055, 12000});
      c.wire = wire;
      c.fill = fill;
      c.prescale = fill == Fill::kRandom ? 0.75 : 1.0;
      cases.push_back(c);
    }
  }
}

}  // namespace

std::vector<PlaneCase> Drawn(std::vector<PlaneCase> cases) {
  if (Variable("FARANDOLE_TEST_FULL", "0") == std::string_view("1")) return cases;
  std::vector<size_t> order(cases.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(),
               std::mt19937_64(std::stoull(Variable("FARANDOLE_TEST_SEED", "1"))));
  std::set<std::string> seen;
  std::erase_if(order, [&](size_t at) { return !ShowsMore(cases[at], seen); });
  std::sort(order.begin(), order.end());
  std::vector<PlaneCase> drawn;
  for (const size_t at : order) drawn.push_back(std::move(cases[at]));
  return drawn;
}

std::vector<std::vector<int>> SomeMembers(int members) {
  std::vector<int> all_but_one(static_cast<size_t>(members - 1));
  std::iota(all_but_one.begin(), all_but_one.end(), 0);
  return {{0}, {members - 1}, all_but_one};
}

void AddAbsentCases(PlaneCase c, std::vector<PlaneCase>& cases) {
  for (const auto& absent : SomeMembers(c.members)) {
    for (const bool drop : {true, false}) {
      c.absent = absent;
      c.absent_drop = drop;
      cases.push_back(c);
    }
  }
}

int64_t PlaneCase::Count() const {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

bool PlaneCase::IsAbsent(int member) const {
  return std::find(absent.begin(), absent.end(), member) != absent.end();
}

bool PlaneCase::TakesResult(int member) const {
  if (IsAbsent(member)) return !absent_drop;
  return std::find(drops.begin(), drops.end(), member) == drops.end();
}

double PlaneCase::PrescaleOf(int member) const {
  return own_factors && member % 2 == 1 ? 1.0 : prescale;
}

bool PlaneCase::CombinesAdaptively() const {
  return kind == OpKind::kAllreduce && op == ReduceOp::kAdasum &&
         members - static_cast<int>(absent.size()) > 1;
}

int64_t PlaneCase::InputCount(int member) const {
  if (kind == OpKind::kAllgather) return splits[static_cast<size_t>(member)];
  if (kind != OpKind::kAlltoall) return Count();
  int64_t sum = 0;
  for (int to = 0; to < members; ++to) sum += SplitOf(member, to);
  return sum;
}

int64_t PlaneCase::SplitOf(int from, int to) const {
  if (from == 0 && to == members - 1) return Count();
  const uint64_t random = MixBits(seed * 31 + static_cast<uint64_t>(from * members + to));
  if (random % 4 == 0) return 0;
  if (random % 4 == 1) return Count();
  return static_cast<int64_t>((random >> 2) % static_cast<uint64_t>(Count() + 1));
}

std::string PlaneCase::ToString() const {
  std::ostringstream text;
  text << Name(kind) << ' ' << Name(op) << ' ' << Name(dtype) << " wire " << static_cast<int>(wire)
       << ", " << members << " members, counts";
  for (const int64_t count : counts) text << ' ' << count;
  if (!splits.empty()) text << ", splits";
  for (const int64_t split : splits) text << ' ' << split;
  text << ", absent";
  for (const int member : absent) text << ' ' << member;
  text << (absent_drop ? " (drop)" : "");
  if (!drops.empty()) text << ", drops";
  for (const int member : drops) text << ' ' << member;
  if (!slots.empty()) text << ", " << slots.back().end << " slots";
  text << (in_place ? ", in place" : "") << ", factors " << prescale
       << (own_factors ? " (odd positions 1) " : " ") << postscale << ", root " << root << ", fill "
       << static_cast<int>(fill) << ", seed " << seed;
  return text.str();
}

uint64_t InputBits(const PlaneCase& c, int member, int64_t index) {
  if (c.slots.empty()) return FilledBits(c, member, index);
  const SlotRange mine = c.slots[static_cast<size_t>(member)];
  const auto width = static_cast<int>(std::bit_ceil(static_cast<unsigned>(mine.count())));
  return FromDouble(c.dtype, SlotSum(c, mine.begin, width, index));
}

std::vector<PlaneCase> AllreduceCases(int members) {
  std::vector<PlaneCase> cases;
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : kAllOps) {
      if (!IsDefined(op, dtype)) continue;
      for (const int64_t size : kSizes) cases.push_back(Make(members, dtype, op, {size}));
    }
  }
  return Drawn(std::move(cases));
}

std::vector<PlaneCase> NumericCases(int members) {
  std::vector<PlaneCase> cases;
  for (const DType dtype : kAllDTypes) {
    if (!IsFloating(dtype)) AddBitCases(members, dtype, cases);
    if (dtype != DType::kBool) AddOwnFactorCases(members, dtype, cases);
    for (const ReduceOp op : kAllOps) {
      if (!IsDefined(op, dtype)) continue;
      PlaneCase random = Make(members, dtype, op, {1031});
      random.fill = Fill::kRandom;
      cases.push_back(random);
      PlaneCase special = Make(members, dtype, op, {9000});
      special.fill = Fill::kSpecial;
      cases.push_back(special);
      if (dtype != DType::kBool) AddFactorCases(members, dtype, op, cases);
      const bool narrows = dtype == DType::kFloat32 || dtype == DType::kFloat64;
      if (narrows) AddWireCases(members, dtype, op, cases);
    }
  }
  return Drawn(std::move(cases));
}

std::vector<PlaneCase> ShapeCases(int members) {
  std::vector<PlaneCase> cases;
  const std::vector<int64_t> mixed = {1, 0, 513, 64, 100'000, 3, 0, 7, 2};
  const std::vector<int64_t> many(300, 17);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kUint8, DType::kInt64}) {
    for (const bool in_place : {false, true}) {
      PlaneCase c = Make(members, dtype, ReduceOp::kSum, mixed);
      c.in_place = in_place;
      cases.push_back(c);
      c.counts = many;
      c.op = ReduceOp::kAverage;
      cases.push_back(c);
      if (members > 1) AddAbsentCases(c, cases);
    }
  }
  PlaneCase large = Make(members, DType::kFloat32, ReduceOp::kAverage, {3 << 18});  // 3 MiB
  cases.push_back(large);
  large.absent = {members - 1};
  if (members > 1) cases.push_back(large);
  return Drawn(std::move(cases));
}

std::vector<PlaneCase> BroadcastCases(int members) {
  std::vector<PlaneCase> cases;
  for (int root = 0; root < members; ++root) {
    for (const DType dtype : kAllDTypes) {
      for (const int64_t size : kSizes) {
        PlaneCase c = Make(members, dtype, ReduceOp::kSum, {size, 5});
        c.kind = OpKind::kBroadcast;
        c.root = root;
        c.wire = WireFormat::kFloat16;
        c.fill = Fill::kSpecial;
        c.in_place = size % 2 == 0;
        cases.push_back(c);
      }
    }
    if (members == 1) continue;
    PlaneCase c = Make(members, DType::kFloat32, ReduceOp::kSum, {300'000});
    c.kind = OpKind::kBroadcast;
    c.root = root;
    c.absent = {(root + 1) % members};
    cases.push_back(c);
  }
  return Drawn(std::move(cases));
}

std::vector<PlaneCase> AdasumCases(int members) {
  std::vector<PlaneCase> cases;
  const std::vector<int64_t> mixed = {1, 0, 513, 64, 100'000, 3, 0, 7, 2};
  for (const DType dtype : kAllDTypes) {
    if (!IsFloating(dtype)) continue;
    const size_t first = cases.size();
    for (const int64_t size : {0, 1, 7, 4096, 65537, 300'001}) {
      cases.push_back(Make(members, dtype, ReduceOp::kAdasum, {size}));
      cases.back().fill = size == 7 ? Fill::kSmall : Fill::kRandom;
    }
    for (const bool in_place : {false, true}) {
      PlaneCase grouped = Make(members, dtype, ReduceOp::kAdasum, mixed);
      grouped.fill = Fill::kRandom;
      grouped.in_place = in_place;
      cases.push_back(grouped);
      grouped.drops = {members - 1};
      cases.push_back(grouped);
    }
    PlaneCase many = Make(members, dtype, ReduceOp::kAdasum, std::vector<int64_t>(300, 17));
    many.fill = Fill::kRandom;
    cases.push_back(many);
    if (members > 1) AddAbsentCases(many, cases);
    PlaneCase alone = Make(members, dtype, ReduceOp::kAdasum, {9001});
    if (members > 1) AddAbsentCases(alone, cases);
    AddFactorCases(members, dtype, ReduceOp::kAdasum, cases);
    if (dtype == DType::kFloat32 || dtype == DType::kFloat64) {
      AddWireCases(members, dtype, ReduceOp::kAdasum, cases);
    }
    // Any bit pattern is mostly NaN, or a square beyond the range of double: a unit test has NaN.
    cases.erase(std::remove_if(cases.begin() + static_cast<std::ptrdiff_t>(first), cases.end(),
                               [](const PlaneCase& c) { return c.fill == Fill::kSpecial; }),
                cases.end());
  }
  for (PlaneCase& c : cases) c.any_order = true;
  return Drawn(std::move(cases));
}

std::vector<PlaneCase> SlotCases(int members) {
  constexpr int64_t kLarge = 20'001;  // composed between hosts, unless of 16 bits
  std::vector<PlaneCase> cases, always;
  for (const int slots : {6, 8, 16}) {
    if (slots < members) continue;
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBfloat16}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        for (const int64_t count : {int64_t{7}, kLarge}) {
          PlaneCase c = Make(members, dtype, op, {count, 3});
          c.fill = Fill::kRandom;
          c.slots = SlotRanges(slots, members);
          (dtype == DType::kFloat32 && count == kLarge ? always : cases).push_back(c);
          AddFactorCases(members, dtype, op, cases);
          cases.back().slots = c.slots;
          c.wire = WireFormat::kFloat16;
          if (members > 1) AddAbsentCases(c, cases);
          c.wire = WireFormat::kSame;
          if (members > 1) AddAbsentCases(c, cases);
          c.kind = OpKind::kReducescatter;
          c.in_place = false;
          c.counts = {count};
          c.splits.assign(static_cast<size_t>(members), count / members);
          c.splits.back() += count % members;
          cases.push_back(c);
        }
      }
    }
  }
  std::erase_if(cases, [](const PlaneCase& c) { return c.slots.empty(); });
  cases = Drawn(std::move(cases));
  cases.insert(cases.end(), always.begin(), always.end());
  return cases;
}

std::vector<PlaneCase> OnHosts(std::vector<PlaneCase> cases, const std::vector<int>& hosts) {
  for (PlaneCase& c : cases) c.hosts = hosts;
  return cases;
}

std::vector<PlaneCase> InAnyOrder(std::vector<PlaneCase> cases) {
  std::erase_if(cases, [](const PlaneCase& c) {
    if (!Reduces(c.kind) || c.members == 1) return false;
    const bool special_floats = IsFloating(c.dtype) && c.fill == Fill::kSpecial;
    const bool sum_overflows = c.dtype == DType::kInt64 && c.op == ReduceOp::kAverage &&
                               (c.fill == Fill::kSpecial || c.fill == Fill::kRandom);
    return special_floats || sum_overflows || IsBitwise(c.op);
  });
  for (PlaneCase& c : cases) c.any_order = true;
  return cases;
}

std::vector<PlaneCase> AllPlaneCases(int members) {
  std::vector<PlaneCase> all = AllreduceCases(members);
  for (auto make : {NumericCases, ShapeCases, BroadcastCases, ReducescatterCases, AllgatherCases,
                    AlltoallCases, SlotCases}) {
    for (PlaneCase& c : make(members)) all.push_back(std::move(c));
  }
  return all;
}

}  // namespace farandole
