#include "test/support/cast_cases.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>

#include "core/half.h"
#include "ops/gpu/cuda/cast.h"
#include "test/support/cast_on_host.h"

namespace farandole {
namespace {

__extension__ typedef __int128 Wide;

constexpr std::byte kUntouched{0xa5};

int64_t RoundUp(int64_t value) { return (value + 255) / 256 * 256; }

template <class T>
T ReadAs(const std::byte* from) {
  T value;
  std::memcpy(static_cast<void*>(&value), from, sizeof value);
  return value;
}

template <class T>
void Write(std::byte* to, T value) {
  std::memcpy(to, static_cast<const void*>(&value), sizeof value);
}

/// `value` as stored in a 16-bit float, rounded once.
template <class To>
To RoundPlainly(double value) {
  if constexpr (std::is_same_v<To, Float16>) return ToFloat16(RoundToOdd(value));
  if constexpr (std::is_same_v<To, Bfloat16>) return ToBfloat16(RoundToOdd(value));
  if constexpr (std::is_floating_point_v<To>) return static_cast<To>(value);
  return {};
}

template <class From, class To>
To CastFloat(From value, const CastSpec& spec) {
  if constexpr (std::is_same_v<From, double>) {
    return RoundPlainly<To>(value * spec.scale * spec.rescale);
  } else {
    float wide = 0;
    if constexpr (std::is_same_v<From, float>) wide = value;
    if constexpr (!std::is_same_v<From, float>) wide = ToFloat(value);
    wide *= static_cast<float>(spec.scale);
    return RoundPlainly<To>(static_cast<double>(wide * static_cast<float>(spec.rescale)));
  }
}

/// value * factor, truncated, and clamped to what both types hold.
template <class From, class To>
int64_t TimesPlainly(int64_t value, double factor) {
  const Wide low = std::max(Wide{std::numeric_limits<From>::min()},  //
                            Wide{std::numeric_limits<To>::min()});
  const Wide high =
      std::min(Wide{std::numeric_limits<From>::max()}, Wide{std::numeric_limits<To>::max()});
  if (factor == 1.0) return value;
  const double whole = std::trunc(static_cast<double>(value) * factor);
  if (std::isnan(whole)) return 0;
  if (whole <= static_cast<double>(low)) return static_cast<int64_t>(low);
  if (whole >= static_cast<double>(high)) return static_cast<int64_t>(high);
  return static_cast<int64_t>(whole);
}

template <class From, class To>
To CastInteger(From value, const CastSpec& spec) {
  const bool is_bool = spec.from == DType::kBool || spec.to == DType::kBool;
  const Wide quotient = is_bool ? value : static_cast<Wide>(value) / spec.divisor;
  if (is_bool) return static_cast<To>(quotient);
  return static_cast<To>(TimesPlainly<From, To>(
      TimesPlainly<From, To>(static_cast<int64_t>(quotient), spec.scale), spec.rescale));
}

template <class To>
To PlainIdentity(ReduceOp op) {
  if constexpr (std::is_integral_v<To>) {
    if (op == ReduceOp::kProduct) return 1;
    if (op == ReduceOp::kMin) return std::numeric_limits<To>::max();
    if (op == ReduceOp::kMax) return std::numeric_limits<To>::min();
    return 0;
  } else {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (op == ReduceOp::kProduct) return RoundPlainly<To>(1.0);
    if (op == ReduceOp::kMin) return RoundPlainly<To>(kInfinity);
    if (op == ReduceOp::kMax) return RoundPlainly<To>(-kInfinity);
    return RoundPlainly<To>(0.0);
  }
}

template <class To>
To IdentityOf(const CastSpec& spec) {
  if constexpr (std::is_same_v<To, uint8_t>) {
    const bool is_true = spec.op == ReduceOp::kMin || spec.op == ReduceOp::kProduct;
    if (spec.to == DType::kBool) return is_true ? 1 : 0;
  }
  return PlainIdentity<To>(spec.op);
}

/// One cast in a loop. The same type without factors is a copy, signalling NaNs included.
template <class From, class To>
void CastPlainly(const std::byte* in, std::byte* out, int64_t count, const CastSpec& spec) {
  for (int64_t i = 0; i < count; ++i) {
    std::byte* const to = out + i * static_cast<int64_t>(sizeof(To));
    if (in == nullptr) {
      Write(to, IdentityOf<To>(spec));
      continue;
    }
    const From value = ReadAs<From>(in + i * static_cast<int64_t>(sizeof(From)));
    if constexpr (std::is_same_v<From, To>) {
      if (spec.scale == 1.0 && spec.rescale == 1.0 && spec.divisor == 1) {
        Write(to, value);
        continue;
      }
    }
    if constexpr (std::is_integral_v<From>) {
      Write(to, CastInteger<From, To>(value, spec));
    } else {
      Write(to, CastFloat<From, To>(value, spec));
    }
  }
}

bool IsNanAt(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::kFloat16:
      return std::isnan(ToFloat(ReadAs<Float16>(at)));
    case DType::kBfloat16:
      return std::isnan(ToFloat(ReadAs<Bfloat16>(at)));
    case DType::kFloat32:
      return std::isnan(ReadAs<float>(at));
    case DType::kFloat64:
      return std::isnan(ReadAs<double>(at));
    default:
      return false;
  }
}

/// Random bits, every second element of a size that casts and factors do not drive out of range.
CastBytes RandomElements(DType dtype, int64_t size_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  CastBytes bytes(static_cast<size_t>(size_bytes));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  const int64_t element = SizeOf(dtype);
  for (int64_t at = 0; at + element <= size_bytes; at += 2 * element) {
    const double value = static_cast<double>(static_cast<int64_t>(random() % 4001) - 2000) / 16.0;
    VisitCastType(dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      if constexpr (std::is_integral_v<T>) {
        Write(&bytes[static_cast<size_t>(at)], static_cast<T>(static_cast<int64_t>(value)));
      } else {
        Write(&bytes[static_cast<size_t>(at)], RoundPlainly<T>(value));
      }
    });
  }
  return bytes;
}

/// A copy of bytes at an address divisible by 256.
class AlignedCopy {
 public:
  explicit AlignedCopy(const CastBytes& bytes) : memory_(bytes.size() + 256) {
    void* start = memory_.data();
    size_t space = memory_.size();
    data_ = static_cast<std::byte*>(std::align(256, bytes.size() + 1, start, space));
    if (!bytes.empty()) std::memcpy(data_, bytes.data(), bytes.size());
  }
  std::byte* data() { return data_; }

 private:
  CastBytes memory_;
  std::byte* data_;
};

std::string Hex(const std::byte* bytes, int64_t count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (int64_t i = count - 1; i >= 0; --i) {
    text += kDigits[std::to_integer<int>(bytes[i] >> 4)];
    text += kDigits[std::to_integer<int>(bytes[i] & std::byte{15})];
  }
  return text;
}

/// Replaces every NaN by the same one, so that what is left can be compared as bytes.
void AlikeNans(const CastCase& wanted, const CastLayout& layout, CastBytes* out) {
  const int64_t element = SizeOf(wanted.spec.to);
  for (size_t k = 0; k < wanted.items.size(); ++k) {
    for (int64_t i = 0; i < wanted.items[k].count; ++i) {
      std::byte* const at = out->data() + layout.out_offsets[k] + i * element;
      if (IsNanAt(wanted.spec.to, at)) std::memset(at, 0xff, static_cast<size_t>(element));
    }
  }
}

std::string FirstDifference(const CastCase& wanted, const CastLayout& layout, const CastBytes& got,
                            const CastBytes& expected) {
  const int64_t element = SizeOf(wanted.spec.to);
  for (size_t k = 0; k < wanted.items.size(); ++k) {
    for (int64_t i = 0; i < wanted.items[k].count; ++i) {
      const auto at = static_cast<size_t>(layout.out_offsets[k] + i * element);
      if (std::memcmp(&got[at], &expected[at], static_cast<size_t>(element)) == 0) continue;
      return ToText(wanted) + ": item " + std::to_string(k) + ", element " + std::to_string(i) +
             " is " + Hex(&got[at], element) + ", should be " + Hex(&expected[at], element);
    }
  }
  return ToText(wanted) + ": bytes between the outputs were touched";
}

}  // namespace

std::string ToText(const CastCase& wanted) {
  const CastSpec& spec = wanted.spec;
  std::string text = std::string(Name(spec.from)) + " -> " + std::string(Name(spec.to)) +
                     ", scale " + std::to_string(spec.scale) + " and " +
                     std::to_string(spec.rescale) + ", divisor " + std::to_string(spec.divisor) +
                     ", " + std::string(Name(spec.op)) + ", " +
                     std::to_string(wanted.items.size()) + " items";
  if (wanted.items.size() != 1) return text;
  const CastTensor& item = wanted.items[0];
  return text + " of " + std::to_string(item.count) + " elements, shifted by " +
         std::to_string(item.in_shift) + " and " + std::to_string(item.out_shift);
}

CastLayout::CastLayout(const CastCase& wanted) {
  const int64_t in_element = SizeOf(wanted.spec.from);
  const int64_t out_element = SizeOf(wanted.spec.to);
  for (const CastTensor& item : wanted.items) {
    in_offsets.push_back(in_bytes + item.in_shift * in_element);
    out_offsets.push_back(out_bytes + item.out_shift * out_element);
    in_bytes = RoundUp(in_offsets.back() + item.count * in_element);
    out_bytes = RoundUp(out_offsets.back() + item.count * out_element + 1);
  }
}

std::vector<CastItem> CastLayout::ItemsAt(const CastCase& wanted, const void* in, void* out) const {
  std::vector<CastItem> items;
  for (size_t k = 0; k < wanted.items.size(); ++k) {
    const CastTensor& item = wanted.items[k];
    items.push_back({item.absent ? nullptr : static_cast<const std::byte*>(in) + in_offsets[k],
                     static_cast<std::byte*>(out) + out_offsets[k], item.count});
  }
  return items;
}

Result<CastBytes> RunCastsOnHost(const CastCase& wanted, const CastLayout& layout,
                                 const CastBytes& in, const CastBytes& out) {
  AlignedCopy from(in);
  AlignedCopy to(out);
  FARANDOLE_RETURN_IF_ERROR(
      CastOnHost(layout.ItemsAt(wanted, from.data(), to.data()), wanted.spec));
  return CastBytes(to.data(), to.data() + out.size());
}

Result<CastBytes> RunCastsPlainly(const CastCase& wanted, const CastLayout& layout,
                                  const CastBytes& in, const CastBytes& out) {
  CastBytes result = out;
  for (const CastItem& item : layout.ItemsAt(wanted, in.data(), result.data())) {
    VisitCast(wanted.spec.from, wanted.spec.to, [&](auto from, auto to) {
      CastPlainly<typename decltype(from)::Type, typename decltype(to)::Type>(
          static_cast<const std::byte*>(item.in), static_cast<std::byte*>(item.out), item.count,
          wanted.spec);
    });
  }
  return result;
}

std::string CompareCastsOf(const CastCase& wanted, const CastBytes& in, const CastRunner& runner,
                           const CastRunner& reference) {
  const CastLayout layout(wanted);
  const CastBytes out(static_cast<size_t>(layout.out_bytes), kUntouched);
  Result<CastBytes> got = runner(wanted, layout, in, out);
  Result<CastBytes> expected = reference(wanted, layout, in, out);
  if (!got.ok()) return ToText(wanted) + ": " + got.status().ToString();
  if (!expected.ok()) return ToText(wanted) + ": " + expected.status().ToString();
  if (got.value() == expected.value()) return "";
  AlikeNans(wanted, layout, &got.value());
  AlikeNans(wanted, layout, &expected.value());
  if (got.value() == expected.value()) return "";
  return FirstDifference(wanted, layout, got.value(), expected.value());
}

std::string CompareCasts(const CastCase& wanted, const CastRunner& runner,
                         const CastRunner& reference, uint64_t seed) {
  const CastBytes in = RandomElements(wanted.spec.from, CastLayout(wanted).in_bytes, seed);
  return CompareCastsOf(wanted, in, runner, reference);
}

std::vector<CastSpec> AllCastSpecs() {
  std::vector<CastSpec> specs;
  for (int from = 0; from < kReducibleDTypeCount; ++from) {
    for (int to = 0; to < kReducibleDTypeCount; ++to) {
      CastSpec spec{static_cast<DType>(from), static_cast<DType>(to)};
      if (!VisitCast(spec.from, spec.to, [](auto, auto) {})) continue;
      for (const double scale : {1.0, 0.5, 1.0 / 3, -2.75, 1e30}) {
        for (const int64_t divisor : {int64_t{1}, int64_t{3}, int64_t{1000}}) {
          spec.scale = scale;
          spec.divisor = IsFloating(spec.from) ? 1 : divisor;
          if (spec.divisor == divisor) specs.push_back(spec);
        }
      }
      spec.scale = 0.3;
      spec.divisor = 1;
      spec.rescale = -7.0;
      if (spec.from == spec.to) specs.push_back(spec);
    }
  }
  return specs;
}

std::vector<CastSpec> CastSpecsByShape() {
  return {{DType::kUint8, DType::kUint8},     {DType::kInt16, DType::kInt16},
          {DType::kFloat32, DType::kFloat32}, {DType::kFloat64, DType::kFloat64},
          {DType::kFloat32, DType::kFloat16}, {DType::kFloat16, DType::kFloat32, 3.0},
          {DType::kFloat64, DType::kFloat16}, {DType::kBfloat16, DType::kFloat64},
          {DType::kInt8, DType::kInt64},      {DType::kInt64, DType::kInt8, 2.0},
          {DType::kInt16, DType::kInt32},     {DType::kFloat32, DType::kFloat32, 0.25}};
}

std::vector<CastTensor> ItemsOfEverySize() {
  std::vector<CastTensor> items;
  for (const int64_t count : {0, 1, 2, 3, 7, 16, 31, 127, 257, 1021, 2503}) {
    items.push_back({count});
    items.push_back({count, 1, 0});
    items.push_back({count, 3, 2});
    items.push_back({count, 5, 5});
  }
  return items;
}

CastBytes SpecialElements(DType dtype) {
  std::vector<uint64_t> patterns;
  if (SizeOf(dtype) == 2) {
    for (uint64_t bits = 0; bits < 0x10000; ++bits) patterns.push_back(bits);
  } else {
    // Around every power of two, where the roundings of narrower types turn, and the fractions that
    // are ties for 7, 10 and 23 bits, with a last bit more or less.
    const int fraction = dtype == DType::kFloat64 ? 52 : 23;
    const int exponents = dtype == DType::kFloat64 ? 2048 : 256;
    for (uint64_t high = 0; high < static_cast<uint64_t>(2 * exponents); ++high) {
      for (const int kept : {0, 6, 7, 9, 10, 22}) {
        const uint64_t tie = uint64_t{1} << (fraction - 1 - kept);
        const uint64_t base = high << fraction;
        for (const uint64_t low : {uint64_t{0}, uint64_t{1}, tie - 1, tie, tie + 1, 3 * tie}) {
          patterns.push_back(base + low);
        }
      }
    }
  }
  const int64_t size = SizeOf(dtype);
  CastBytes bytes(patterns.size() * static_cast<size_t>(size));
  for (size_t i = 0; i < patterns.size(); ++i) {
    std::memcpy(&bytes[i * static_cast<size_t>(size)], &patterns[i], static_cast<size_t>(size));
  }
  return bytes;
}

std::vector<CastCase> CasesOfEveryPair() {
  std::vector<CastCase> cases;
  for (const CastSpec& spec : AllCastSpecs()) cases.push_back({spec, ItemsOfEverySize()});
  return cases;
}

std::vector<CastCase> CasesOfEveryAlignment() {
  std::vector<CastCase> cases;
  for (const CastSpec& spec : CastSpecsByShape()) {
    CastCase& wanted = cases.emplace_back(CastCase{spec, {}});
    for (int shifts = 0; shifts < 16 * 16; ++shifts) {
      for (const int64_t count : {1, 5, 37, 1201}) {
        wanted.items.push_back({count, shifts / 16, shifts % 16});
      }
    }
  }
  return cases;
}

std::vector<CastCase> CasesOfAnyNumber() {
  std::vector<CastCase> cases;
  for (const int items :
       {1, kFewItems, kFewItems + 1, Device::kItemsPerLaunch, Device::kItemsPerLaunch + 1, 2500}) {
    CastCase& wanted = cases.emplace_back(CastCase{{DType::kFloat32, DType::kBfloat16, 0.5}, {}});
    for (int i = 0; i < items; ++i) wanted.items.push_back({i % 67, i % 3, i % 2, i % 11 == 0});
  }
  return cases;
}

std::vector<CastCase> CasesOfAbsentInputs() {
  std::vector<CastCase> cases;
  for (int i = 0; i < 5 * kReducibleDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i / 5);
    for (const double scale : {1.0, 0.5}) {
      cases.push_back({{dtype, dtype, scale, 1, static_cast<ReduceOp>(i % 5)},
                       {{1, 0, 1, true}, {1021, 0, 3, true}, {5, 1, 1}, {40000, 0, 7, true}}});
    }
  }
  return cases;
}

std::string CompareCastsOfSpecialElements(const CastRunner& runner, const CastRunner& reference) {
  constexpr DType kFloats[] = {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64};
  for (const DType from : kFloats) {
    const CastBytes in = SpecialElements(from);
    const int64_t count = static_cast<int64_t>(in.size()) / SizeOf(from);
    for (const DType to : kFloats) {
      for (const double scale : {1.0, 0.1, 3e4}) {
        const std::string difference =
            CompareCastsOf({{from, to, scale}, {{count}}}, in, runner, reference);
        if (!difference.empty()) return difference;
      }
    }
  }
  return "";
}

}  // namespace farandole
