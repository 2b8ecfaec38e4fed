#include "test/conformance/data_plane_reference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "core/half.h"
#include "ops/cpu/batch.h"

namespace farandole {
namespace {

__extension__ typedef __int128 Wide;

/// The rounding error relative to the value, and the least step near zero.
struct FloatFormat {
  double half_ulp;
  double least;
};

FloatFormat FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {0x1p-11, 0x1p-24};
    case DType::kBfloat16:
      return {0x1p-8, 0x1p-133};
    case DType::kFloat32:
      return {0x1p-24, 0x1p-149};
    default:
      return {0x1p-53, 0x1p-1074};
  }
}

uint64_t FloatToBits(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat16:
      return ToFloat16(RoundToOdd(value)).bits;
    case DType::kBfloat16:
      return ToBfloat16(RoundToOdd(value)).bits;
    case DType::kFloat32:
      return std::bit_cast<uint32_t>(static_cast<float>(value));
    default:
      return std::bit_cast<uint64_t>(value);
  }
}

/// Arithmetic in double when `wide`, else every step rounded to float.
struct Arithmetic {
  bool wide;
  double Round(double x) const { return wide ? x : static_cast<double>(static_cast<float>(x)); }
  double Multiply(double a, double b) const { return Round(a * Round(b)); }
  double Divide(double a, double b) const { return Round(a / b); }
  double Combine(ReduceOp op, double a, double b) const {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
      case ReduceOp::kPreMulSum:
        return Round(a + b);
      case ReduceOp::kProduct:
        return Round(a * b);
      case ReduceOp::kMin:
        return std::isnan(a) ? a : (b < a || std::isnan(b) ? b : a);
      case ReduceOp::kMax:
        return std::isnan(a) ? a : (b > a || std::isnan(b) ? b : a);
      case ReduceOp::kBitAnd:
      case ReduceOp::kBitOr:
      case ReduceOp::kBitXor:
      case ReduceOp::kAdasum:
        break;  // not of floats, and not of elements
    }
    return a;
  }
};

/// Some values of one element, a member's or a host's each; on the stack, as there are millions of
/// elements.
template <typename T>
class Few {
 public:
  void Add(T value) { values_.at(count_++) = value; }
  bool Has(T value) const { return std::find(begin(), end(), value) != end(); }
  const T* begin() const { return values_.data(); }
  const T* end() const { return values_.data() + count_; }
  T operator[](size_t index) const { return values_.at(index); }
  size_t size() const { return count_; }

 private:
  std::array<T, 32> values_;
  size_t count_ = 0;
};

/// Contributions, hosts' results: combined in order, divided, scaled and rounded to `wire`.
double ReduceFloats(const PlaneCase& c, DType wire, const Few<double>& sources, size_t divisor,
                    double postscale) {
  const Arithmetic summing{wire == DType::kFloat64};
  double total = sources[0];
  for (size_t i = 1; i < sources.size(); ++i) total = summing.Combine(c.op, total, sources[i]);
  if (c.op == ReduceOp::kAverage) total = summing.Divide(total, static_cast<double>(divisor));
  return FloatFromBits(wire, FloatToBits(wire, summing.Multiply(total, postscale)));
}

/// Host by host, in the order of their first members; then the hosts' results. Averages are those
/// of the hosts' averages, weighted by how many members a host has.
double ReduceHosts(const PlaneCase& c, DType wire, const Few<double>& sent) {
  const Arithmetic summing{wire == DType::kFloat64};
  Few<int> hosts;
  for (const int host : c.hosts) {
    if (!hosts.Has(host)) hosts.Add(host);
  }
  Few<double> results;
  for (const int host : hosts) {
    Few<double> sources;
    for (size_t member = 0; member < sent.size(); ++member) {
      if (c.hosts[member] == host && !c.IsAbsent(static_cast<int>(member))) {
        sources.Add(sent[member]);
      }
    }
    if (sources.size() == 0) continue;
    const auto members = static_cast<size_t>(std::ranges::count(c.hosts, host));
    const double result = ReduceFloats(c, wire, sources, members, 1.0);
    const double weight =
        static_cast<double>(members * hosts.size()) / static_cast<double>(sent.size());
    const double weighted = summing.Multiply(result, c.op == ReduceOp::kAverage ? weight : 1.0);
    results.Add(FloatFromBits(wire, FloatToBits(wire, weighted)));
  }
  return ReduceFloats(c, wire, results, hosts.size(), c.postscale);
}

/// Of what the members in the node of slots `begin` to `begin` + `width` - 1 sent; nullopt:
/// nothing.
std::optional<double> SumOfNode(const PlaneCase& c, const Arithmetic& summing,
                                const Few<double>& sent, int begin, int width) {
  const int end = std::min(begin + width, c.slots.back().end);
  const auto whole = std::ranges::find(c.slots, SlotRange{begin, end});
  if (whole != c.slots.end()) {
    const auto member = whole - c.slots.begin();
    if (c.IsAbsent(static_cast<int>(member))) return {};
    return sent[static_cast<size_t>(member)];
  }
  const int middle = begin + width / 2;
  const std::optional<double> left = SumOfNode(c, summing, sent, begin, width / 2);
  if (middle >= end) return left;
  const std::optional<double> right = SumOfNode(c, summing, sent, middle, width / 2);
  if (left && right) return summing.Combine(c.op, *left, *right);
  return left ? left : right;
}

uint64_t ReferenceFloat(const PlaneCase& c, int64_t index) {
  const Arithmetic scaling{c.dtype == DType::kFloat64};
  if (c.members == 1) {
    const double x = FloatFromBits(c.dtype, InputBits(c, 0, index));
    return FloatToBits(c.dtype,
                       scaling.Multiply(scaling.Multiply(x, c.PrescaleOf(0)), c.postscale));
  }
  const DType wire = WireDType(c.dtype, c.wire);
  Few<double> sent;     // by member
  Few<double> present;  // of those that contribute, or of Adasum's only one
  for (int member = 0; member < c.members; ++member) {
    const double x = FloatFromBits(c.dtype, InputBits(c, member, index));
    const double value =
        FloatFromBits(wire, FloatToBits(wire, scaling.Multiply(x, c.PrescaleOf(member))));
    sent.Add(value);
    const bool enough = c.op == ReduceOp::kAdasum && present.size() == 1;
    if (!c.IsAbsent(member) && !enough) present.Add(value);
  }
  if (!c.slots.empty()) {
    const auto width = std::bit_ceil(static_cast<unsigned>(c.slots.back().end));
    const Arithmetic summing{wire == DType::kFloat64};
    present = {};
    present.Add(*SumOfNode(c, summing, sent, 0, static_cast<int>(width)));
  }
  const bool by_host = c.slots.empty() && c.kind == OpKind::kAllreduce && !c.hosts.empty();
  const double result = by_host ? ReduceHosts(c, wire, sent)
                                : ReduceFloats(c, wire, present, sent.size(), c.postscale);
  return FloatToBits(c.dtype, result);
}

struct IntegerRange {
  Wide low;
  Wide high;
};

IntegerRange RangeOf(DType dtype) {
  if (dtype == DType::kUint8) return {0, 255};
  const int bits = static_cast<int>(SizeOf(dtype)) * 8;
  const Wide half = static_cast<Wide>(1) << (bits - 1);
  return {-half, half - 1};
}

/// The value of the low bits of `x`.
Wide WrapTo(DType dtype, Wide x) {
  if (dtype == DType::kUint8) return static_cast<uint8_t>(x);
  const auto above = 64 - 8 * SizeOf(dtype);
  return static_cast<int64_t>(static_cast<uint64_t>(x) << above) >> above;
}

Wide ScaleInteger(DType dtype, Wide x, double factor) {
  if (factor == 1.0) return x;
  const IntegerRange range = RangeOf(dtype);
  const double scaled = std::trunc(static_cast<double>(x) * factor);
  if (scaled >= static_cast<double>(range.high)) return range.high;
  if (scaled <= static_cast<double>(range.low)) return range.low;
  return static_cast<Wide>(scaled);
}

Wide CombineInteger(ReduceOp op, Wide a, Wide b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kPreMulSum:
      return a + b;
    case ReduceOp::kProduct:
      return WrapTo(DType::kInt64, a * b);
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return b > a ? b : a;
    case ReduceOp::kBitAnd:
      return a & b;
    case ReduceOp::kBitOr:
      return a | b;
    case ReduceOp::kBitXor:
      return a ^ b;
    case ReduceOp::kAdasum:
      break;  // not of integers
  }
  return a;
}

uint64_t ReferenceInteger(const PlaneCase& c, int64_t index) {
  bool first = true;
  Wide total = 0;
  for (int member = 0; member < c.members; ++member) {
    if (c.IsAbsent(member)) continue;
    const Wide x = WrapTo(c.dtype, static_cast<Wide>(InputBits(c, member, index)));
    const Wide sent = ScaleInteger(c.dtype, x, c.PrescaleOf(member));
    total = first ? sent : CombineInteger(c.op, total, sent);
    first = false;
  }
  if (c.op == ReduceOp::kAverage) total /= c.members;
  if (c.members > 1) total = WrapTo(DType::kInt64, total);
  return static_cast<uint64_t>(WrapTo(c.dtype, ScaleInteger(c.dtype, total, c.postscale)));
}

uint64_t ReferenceBool(const PlaneCase& c, int64_t index) {
  const bool any = c.op == ReduceOp::kMax || c.op == ReduceOp::kBitOr;
  const bool odd = c.op == ReduceOp::kBitXor;
  bool result = !any && !odd;
  for (int member = 0; member < c.members; ++member) {
    if (c.IsAbsent(member)) continue;
    const bool x = InputBits(c, member, index) != 0;
    result = odd ? result != x : any ? result || x : result && x;
  }
  return result ? 1 : 0;
}

double Product(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

/// The formula of ops/cpu/adasum.h.
std::vector<double> Adasum(const std::vector<double>& a, const std::vector<double>& b) {
  const double aa = Product(a, a), bb = Product(b, b), ab = Product(a, b);
  const double p = aa == 0 ? 1 : 1 - ab / (2 * aa);
  const double q = bb == 0 ? 1 : 1 - ab / (2 * bb);
  std::vector<double> sum(a.size());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = p * a[i] + q * b[i];
  return sum;
}

/// One level of the tree after the other.
std::vector<double> Adasum(std::vector<std::vector<double>> vectors) {
  while (vectors.size() > 1) {
    std::vector<std::vector<double>> next;
    for (size_t i = 0; i < vectors.size(); i += 2) {
      next.push_back(i + 1 < vectors.size() ? Adasum(vectors[i], vectors[i + 1]) : vectors[i]);
    }
    vectors = std::move(next);
  }
  return vectors.front();
}

/// Elements end to end.
class Elements {
 public:
  explicit Elements(DType dtype) : size_(static_cast<size_t>(SizeOf(dtype))) {}
  void Add(uint64_t bits) {  // little-endian: the low bytes come first
    const auto* bytes = reinterpret_cast<const std::byte*>(&bits);
    bytes_.insert(bytes_.end(), bytes, bytes + size_);
  }
  void AddInputs(const PlaneCase& c, int member, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; ++i) Add(InputBits(c, member, begin + i));
  }
  std::vector<std::byte> bytes() && { return std::move(bytes_); }

 private:
  const size_t size_;
  std::vector<std::byte> bytes_;
};

int64_t ReceivedBy(const PlaneCase& c, int member) {
  int64_t count = 0;
  for (int from = 0; from < c.members; ++from) count += c.SplitOf(from, member);
  return count;
}

void AddExchanged(const PlaneCase& c, Elements& result) {
  for (int to = 0; to < c.members; ++to) {
    for (int from = 0; from < c.members; ++from) {
      int64_t begin = 0;
      for (int before = 0; before < to; ++before) begin += c.SplitOf(from, before);
      result.AddInputs(c, from, begin, c.SplitOf(from, to));
    }
  }
}

/// Vectors between the levels are float, or double as scalar products are, whose sums round too.
/// @param size  What the contributions add up to, signs aside.
double AdasumBound(const PlaneCase& c, double size) {
  const DType wire = WireDType(c.dtype, c.wire);
  const bool is_double = wire == DType::kFloat64;
  const FloatFormat between = FormatOf(is_double ? DType::kFloat64 : DType::kFloat32);
  const FloatFormat format = FormatOf(wire);
  const double roundings = is_double ? 65'536 : 64;
  const double error = size * (roundings * between.half_ulp + 4 * format.half_ulp);
  return (error + 64 * between.least) * std::max(1.0, std::abs(c.postscale)) + 2 * format.least;
}

/// Only contributions and results are rounded.
void AddAdasums(const PlaneCase& c, Elements& result) {
  const DType wire = WireDType(c.dtype, c.wire);
  int64_t begin = 0;
  for (const int64_t count : c.counts) {
    std::vector<std::vector<double>> vectors;
    for (int member = 0; member < c.members; ++member) {
      if (c.IsAbsent(member)) continue;
      vectors.emplace_back();
      for (int64_t i = begin; i < begin + count; ++i) {
        const double x = FloatFromBits(c.dtype, InputBits(c, member, i)) * c.PrescaleOf(member);
        vectors.back().push_back(FloatFromBits(wire, FloatToBits(wire, x)));
      }
    }
    for (const double x : Adasum(std::move(vectors))) {
      const uint64_t rounded = FloatToBits(wire, x * c.postscale);
      result.Add(FloatToBits(c.dtype, FloatFromBits(wire, rounded)));
    }
    begin += count;
  }
}

uint64_t ReferenceElement(const PlaneCase& c, int64_t index) {
  if (c.kind == OpKind::kBroadcast) return InputBits(c, c.root, index);
  if (c.dtype == DType::kBool) return ReferenceBool(c, index);
  return IsFloating(c.dtype) ? ReferenceFloat(c, index) : ReferenceInteger(c, index);
}

}  // namespace

double FloatFromBits(DType dtype, uint64_t bits) {
  switch (dtype) {
    case DType::kFloat16:
      return static_cast<double>(ToFloat(Float16{static_cast<uint16_t>(bits)}));
    case DType::kBfloat16:
      return static_cast<double>(ToFloat(Bfloat16{static_cast<uint16_t>(bits)}));
    case DType::kFloat32:
      return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    default:
      return std::bit_cast<double>(bits);
  }
}

double ErrorBound(const PlaneCase& c, int64_t index) {
  if (!Reduces(c.kind) || !c.any_order || c.members == 1 || !IsFloating(c.dtype)) {
    return 0;
  }
  const bool multiplies = c.op == ReduceOp::kProduct;
  double size = multiplies ? 1 : 0;  // of what is added up, signs aside, or of the product
  for (int member = 0; member < c.members; ++member) {
    if (c.IsAbsent(member)) continue;
    const double x =
        std::abs(FloatFromBits(c.dtype, InputBits(c, member, index)) * c.PrescaleOf(member));
    size = multiplies ? size * x : size + x;
  }
  if (c.CombinesAdaptively()) return AdasumBound(c, size);
  if (c.op == ReduceOp::kAverage) size /= c.members;
  const FloatFormat format = FormatOf(WireDType(c.dtype, c.wire));
  // One rounding per contribution, one per reduction, one at the end.
  const double roundings = 2.0 * c.members + 1;
  return roundings * (size * format.half_ulp + format.least) * std::max(1.0, std::abs(c.postscale));
}

ResultRange ResultOf(const PlaneCase& c, int member) {
  if (c.kind != OpKind::kReducescatter && c.kind != OpKind::kAlltoall) return {0, c.Count()};
  ResultRange range;
  for (int before = 0; before <= member; ++before) {
    range.begin += range.count;
    range.count =
        c.kind == OpKind::kAlltoall ? ReceivedBy(c, before) : c.splits[static_cast<size_t>(before)];
  }
  return range;
}

std::vector<std::byte> ReferenceResult(const PlaneCase& c) {
  Elements result(c.dtype);
  if (c.kind == OpKind::kAllgather) {
    for (int from = 0; from < c.members; ++from) result.AddInputs(c, from, 0, c.InputCount(from));
  } else if (c.kind == OpKind::kAlltoall) {
    AddExchanged(c, result);
  } else if (c.CombinesAdaptively()) {
    AddAdasums(c, result);
  } else {
    for (int64_t i = 0; i < c.Count(); ++i) result.Add(ReferenceElement(c, i));
  }
  return std::move(result).bytes();
}

std::vector<std::vector<std::byte>> ReferenceResults(std::span<const PlaneCase> cases) {
  std::vector<std::vector<std::byte>> results;
  for (const PlaneCase& c : cases) results.push_back(ReferenceResult(c));
  return results;
}

int64_t CountDifferences(DType dtype, const std::byte* got, const std::byte* expected,
                         int64_t count, int64_t* first) {
  const size_t size = static_cast<size_t>(SizeOf(dtype));
  if (std::equal(got, got + static_cast<size_t>(count) * size, expected)) return 0;
  int64_t differences = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t a = 0;
    uint64_t b = 0;
    std::memcpy(&a, got + static_cast<size_t>(i) * size, size);
    std::memcpy(&b, expected + static_cast<size_t>(i) * size, size);
    if (a == b) continue;
    if (IsFloating(dtype) && std::isnan(FloatFromBits(dtype, a)) &&
        std::isnan(FloatFromBits(dtype, b))) {
      continue;
    }
    if (differences++ == 0) *first = i;
  }
  return differences;
}

}  // namespace farandole
