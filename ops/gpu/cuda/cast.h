// The kernel that copies, casts and scales tensors: what one launch is given, and what one thread
// of one block does.
//
// Written once for both processors: nvcc makes the kernels of it (kernels.cu), a test runs it
// thread by thread. No thread waits for another, so the order in which they run does not matter.
//
// A table in the parameters needs no memory of its own and no copy before the launch, and a
// captured graph keeps it. Parameters may take 32,764 bytes (since CUDA 12.1).
//
// 16 bytes of the narrower type are a group; groups are loaded and stored by vectors of 16 bytes
// where both sides can be so aligned, and each thread loads several groups before it stores one, so
// that enough is in flight to keep the memory busy. What precedes the first aligned group, and what
// is left after the last, goes element by element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "core/half.h"
#include "core/status.h"
#include "core/types.h"
#include "ops/device.h"

/// Marks what a GPU runs too: the build defines it as `__device__` where nvcc compiles kernels.
/// Elsewhere the same functions are ordinary ones, so that they run, and are tested, without a GPU.
#ifndef FARANDOLE_ON_DEVICE
#define FARANDOLE_ON_DEVICE
#endif

namespace farandole {

template <class T>
struct CastType {
  using Type = T;
};

/// Calls fn(CastType<T>()); bool is taken as uint8.
template <class Fn>
void VisitCastType(DType dtype, const Fn& fn) {
  if (dtype == DType::kFloat16) return fn(CastType<Float16>());
  if (dtype == DType::kBfloat16) return fn(CastType<Bfloat16>());
  if (dtype == DType::kFloat32) return fn(CastType<float>());
  if (dtype == DType::kFloat64) return fn(CastType<double>());
  if (dtype == DType::kInt8) return fn(CastType<int8_t>());
  if (dtype == DType::kInt16) return fn(CastType<int16_t>());
  if (dtype == DType::kInt32) return fn(CastType<int32_t>());
  if (dtype == DType::kInt64) return fn(CastType<int64_t>());
  return fn(CastType<uint8_t>());
}

/// The casts that batches need: between any two floating types; from an integer type to itself; to
/// int64 and back, where NCCL's sums are divided or multiplied; and to int32 and back for int16,
/// which NCCL has not got.
template <class From, class To>
constexpr bool IsCast() {
  if constexpr (!std::is_integral_v<From> || !std::is_integral_v<To>) {
    return std::is_integral_v<From> == std::is_integral_v<To>;
  } else {
    return std::is_same_v<From, To> || sizeof(From) == 8 || sizeof(To) == 8 ||
           (sizeof(From) == 2 && sizeof(To) == 4) || (sizeof(From) == 4 && sizeof(To) == 2);
  }
}

/// Calls fn(CastType<From>(), CastType<To>()). @return false if there is no such cast.
template <class Fn>
bool VisitCast(DType from, DType to, const Fn& fn) {
  bool found = false;
  VisitCastType(from, [&](auto in) {
    using From = typename decltype(in)::Type;
    VisitCastType(to, [&](auto out) {
      if constexpr (IsCast<From, typename decltype(out)::Type>()) {
        fn(in, out);
        found = true;
      }
    });
  });
  return found;
}

/// The numbers of a CastSpec as the kernel uses them.
struct CastFactors {
  double scale = 1.0;
  double rescale = 1.0;
  float scale_float = 1.0f;
  float rescale_float = 1.0f;
  int64_t divisor = 1;
};

/// Threads of one block; all blocks have as many.
inline constexpr int kBlockThreads = 256;

/// An item is cut into slices of `slice` elements; each block does one. Block b works on item m
/// with first_block[m] <= b < first_block[m + 1].
///
/// Invariant: first_block ascends from 0 and every item has at least one block.
template <int kCapacity>
struct CastTable {
  CastFactors factors;
  uint64_t identity = 0;  ///< Fills `out` where `in` is nullptr: eight bytes, repeated.
  int64_t slice = 0;
  const uint32_t* poisoned = nullptr;  ///< CastSpec::poisoned.
  int32_t size = 0;                    ///< Items.
  uint32_t first_block[kCapacity];
  const void* in[kCapacity];
  void* out[kCapacity];
  int64_t count[kCapacity];
};

/// Small enough for the 4 KiB that parameters always could take: cheaper to launch.
inline constexpr int kFewItems = 128;
using SmallCastTable = CastTable<kFewItems>;
using LargeCastTable = CastTable<Device::kItemsPerLaunch>;
static_assert(sizeof(SmallCastTable) <= 4096 && sizeof(LargeCastTable) <= 32764);

/// A checked and simplified request: what to do with every element, and in which unit to count.
struct CastJob {
  CastSpec spec;                ///< Factors that mean nothing are 1; bool is uint8.
  bool raw = false;             ///< Bytes are copied as they are; items are counted in bytes.
  int in_bytes = 1;             ///< Of one element as counted.
  int out_bytes = 1;            ///< Likewise.
  uint64_t identity = 0;        ///< As eight bytes: one element, repeated.
  std::vector<CastItem> items;  ///< Only those with something to do.
};

/// @return InvalidArgument, naming the item, for a cast that there is not (IsCast), a divisor below
/// 1 or one for floating types, a second factor of a cast, a negative count, a missing `out`, or
/// memory that is not aligned to its element where elements are cast.
Result<CastJob> MakeCastJob(std::span<const CastItem> items, const CastSpec& spec);

/// The identity of `op` as bits of a `dtype`, in the low bytes. Sum and average 0, product 1, min
/// the largest value (infinity) and max the lowest; of bool: min and product true, max false.
uint64_t IdentityBits(ReduceOp op, DType dtype);

/// Elements per block: small enough that `total` elements occupy a device of so many
/// multiprocessors, large enough that a block is worth its start. A multiple of 4 KiB of the wider
/// type, so that each slice begins as aligned as the first.
int64_t SliceElements(int64_t total, int wide_bytes, int multiprocessors);

/// Writes `items`, no more than the table holds, with the job's numbers. @return the blocks needed.
template <int kCapacity>
uint32_t FillCastTable(const CastJob& job, std::span<const CastItem> items, int multiprocessors,
                       CastTable<kCapacity>* table);

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;

/// `value`, a float or double, rounded to To once.
template <class Machine, class To, class From>
FARANDOLE_ON_DEVICE inline To RoundTo(From value) {
  if constexpr (kIsHalf<To>) {
    return Machine::Round(To(), value);
  } else {
    return static_cast<To>(value);
  }
}

/// The values that two integer types share.
template <class A, class B>
struct SharedRange {
  static constexpr int64_t kLow =
      std::max<int64_t>(std::numeric_limits<A>::min(), std::numeric_limits<B>::min());
  static constexpr int64_t kHigh =
      std::min<int64_t>(std::numeric_limits<A>::max(), std::numeric_limits<B>::max());
};

/// value * scale, truncated toward zero and clamped to [low, high]; NaN gives 0.
FARANDOLE_ON_DEVICE inline int64_t ScaleInteger(int64_t value, double scale, int64_t low,
                                                int64_t high) {
  if (scale == 1.0) return value;
  const double scaled = static_cast<double>(value) * scale;
  if (scaled != scaled) return 0;
  if (scaled <= static_cast<double>(low)) return low;
  if (scaled >= static_cast<double>(high)) return high;
  return static_cast<int64_t>(scaled);
}

/// value / divisor * scale * rescale; each product as above. A call of its own: rare, and as long
/// as all else together where it is repeated for each element.
[[gnu::noinline]] FARANDOLE_ON_DEVICE inline int64_t DivideAndScale(int64_t value,
                                                                    const CastFactors& factors,
                                                                    int64_t low, int64_t high) {
  if (factors.divisor != 1) value /= factors.divisor;
  value = ScaleInteger(value, factors.scale, low, high);
  return ScaleInteger(value, factors.rescale, low, high);
}

template <class To, class From>
FARANDOLE_ON_DEVICE inline To ConvertInteger(From value, const CastFactors& factors) {
  using Range = SharedRange<From, To>;
  const bool changes = factors.divisor != 1 || factors.scale != 1.0 || factors.rescale != 1.0;
  return static_cast<To>(changes ? DivideAndScale(value, factors, Range::kLow, Range::kHigh)
                                 : value);
}

/// The second factor, which only items of one type have: casts stay as short as they are.
template <class To, class From, class Wide>
FARANDOLE_ON_DEVICE inline Wide Rescale(Wide value, Wide factor) {
  if constexpr (std::is_same_v<From, To>) {
    return value * factor;
  } else {
    return value;
  }
}

template <class Machine, class To, class From>
FARANDOLE_ON_DEVICE inline To Convert(From value, const CastFactors& factors) {
  if constexpr (std::is_integral_v<From>) {
    return ConvertInteger<To>(value, factors);
  } else if constexpr (std::is_same_v<From, double>) {
    return RoundTo<Machine, To>(Rescale<To, From>(value * factors.scale, factors.rescale));
  } else {
    float wide = 0.0f;
    if constexpr (kIsHalf<From>) {
      wide = Machine::Widen(value);
    } else {
      wide = value;
    }
    wide *= factors.scale_float;
    return RoundTo<Machine, To>(Rescale<To, From>(wide, factors.rescale_float));
  }
}

/// kCount elements that lie one after the other; loaded and stored 16 bytes at a time.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) ElementGroup {
  T at[kCount];
};

template <class T>
FARANDOLE_ON_DEVICE constexpr T Smaller(T a, T b) {
  return b < a ? b : a;
}

/// The part of an item that a block works on, in elements: [begin, groups) one by one, then groups,
/// then what is left before `end` one by one.
struct SliceRange {
  int64_t begin;
  int64_t groups;
  int64_t end;
};

/// Slice `number` of an item of `count` elements whose first `head` precede the first aligned
/// group.
FARANDOLE_ON_DEVICE inline SliceRange SliceOf(int64_t number, int64_t slice, int64_t head,
                                              int64_t count) {
  const int64_t groups = Smaller(count, head + number * slice);
  const int64_t end = Smaller(count, head + (number + 1) * slice);
  return {number == 0 ? 0 : groups, groups, end};
}

/// Elements of T before the next multiple of `bytes`.
template <class T>
FARANDOLE_ON_DEVICE inline int ElementsBefore(const void* memory, int bytes) {
  const int past =
      static_cast<int>(reinterpret_cast<uintptr_t>(memory) % static_cast<unsigned>(bytes));
  return past == 0 ? 0 : (bytes - past) / static_cast<int>(sizeof(T));
}

/// Fewer elements than a block has threads: those before the first group, or after the last.
template <class Machine, class From, class To>
FARANDOLE_ON_DEVICE inline void CastFew(const From* in, To* out, int64_t begin, int64_t end,
                                        const CastFactors& factors, int thread) {
  const int64_t i = begin + thread;
  if (i < end) Machine::Store(out + i, Convert<Machine, To>(Machine::Load(in + i), factors));
}

/// Groups of kCount elements; kFlight of them are loaded before the first is stored.
template <class Machine, int kCount, int kFlight, class From, class To>
FARANDOLE_ON_DEVICE inline void CastGroups(const From* in, To* out, int groups,
                                           const CastFactors& factors, int thread) {
  using Loaded = ElementGroup<From, kCount>;
  using Stored = ElementGroup<To, kCount>;
  const Loaded* const from = reinterpret_cast<const Loaded*>(in);
  Stored* const to = reinterpret_cast<Stored*>(out);
  for (int first = thread; first < groups; first += kBlockThreads * kFlight) {
    Loaded loaded[kFlight] = {};
    for (int k = 0; k < kFlight; ++k) {
      const int group = first + k * kBlockThreads;
      if (group < groups) loaded[k] = Machine::Load(from + group);
    }
    for (int k = 0; k < kFlight; ++k) {
      const int group = first + k * kBlockThreads;
      Stored stored;
      for (int i = 0; i < kCount; ++i)
        stored.at[i] = Convert<Machine, To>(loaded[k].at[i], factors);
      if (group < groups) Machine::Store(to + group, stored);
    }
  }
}

/// How a cast is cut: a group is 16 bytes of the narrower floating type, of the wider integer type
/// (integers are cast seldom, and this is a third of the code).
template <class From, class To>
struct CastShape {
  static constexpr int kIn = static_cast<int>(sizeof(From));
  static constexpr int kOut = static_cast<int>(sizeof(To));
  static constexpr int kNarrow = Smaller(kIn, kOut);
  static constexpr int kWide = kIn + kOut - kNarrow;
  static constexpr int kCount = 16 / (std::is_integral_v<From> ? kWide : kNarrow);
  static constexpr int kFlight = std::is_integral_v<From> ? 2 : 64 / (kCount * kWide);

  /// Elements before the first group that is aligned on the narrower side.
  FARANDOLE_ON_DEVICE static int Head(const From* in, const To* out) {
    constexpr int kBytes = kCount * kNarrow;
    return kIn < kOut ? ElementsBefore<From>(in, kBytes) : ElementsBefore<To>(out, kBytes);
  }
  FARANDOLE_ON_DEVICE static bool IsAligned(const From* in, const To* out) {
    return ElementsBefore<From>(in, alignof(ElementGroup<From, kCount>)) == 0 &&
           ElementsBefore<To>(out, alignof(ElementGroup<To, kCount>)) == 0;
  }
};

/// Casts one slice. Where no group is aligned on both sides, a group is one element.
template <class Machine, class From, class To>
FARANDOLE_ON_DEVICE void CastSlice(const From* in, To* out, int64_t count, int64_t number,
                                   int64_t slice, const CastFactors& factors, int thread) {
  using Shape = CastShape<From, To>;
  constexpr int kCount = Shape::kCount;
  const int head = Shape::Head(in, out);
  const bool aligned = Shape::IsAligned(in + head, out + head);
  const SliceRange part = SliceOf(number, slice, aligned ? head : 0, count);
  if (!aligned) {
    return CastGroups<Machine, 1, Shape::kFlight * 2>(in + part.begin, out + part.begin,
                                                      static_cast<int>(part.end - part.begin),
                                                      factors, thread);
  }
  const int groups = static_cast<int>((part.end - part.groups) / kCount);
  CastFew<Machine>(in, out, part.begin, part.groups, factors, thread);
  CastGroups<Machine, kCount, Shape::kFlight>(in + part.groups, out + part.groups, groups, factors,
                                              thread);
  CastFew<Machine>(in, out, part.groups + int64_t{groups} * kCount, part.end, factors, thread);
}

/// Copies one slice of bytes by units of kCount Ts, as wide as both sides' alignment allows.
template <class Machine, class T, int kCount, int kFlight>
FARANDOLE_ON_DEVICE inline void CopyUnits(const uint8_t* in, uint8_t* out, int64_t count,
                                          int64_t number, int64_t slice, int thread) {
  constexpr int kBytes = static_cast<int>(sizeof(T)) * kCount;
  const SliceRange part = SliceOf(number, slice, ElementsBefore<uint8_t>(out, kBytes), count);
  const int units = static_cast<int>((part.end - part.groups) / kBytes);
  const CastFactors none;
  CastFew<Machine>(in, out, part.begin, part.groups, none, thread);
  CastGroups<Machine, kCount, kFlight>(reinterpret_cast<const T*>(in + part.groups),
                                       reinterpret_cast<T*>(out + part.groups), units, none,
                                       thread);
  CastFew<Machine>(in, out, part.groups + int64_t{units} * kBytes, part.end, none, thread);
}

template <class Machine>
FARANDOLE_ON_DEVICE void CopySlice(const uint8_t* in, uint8_t* out, int64_t count, int64_t number,
                                   int64_t slice, int thread) {
  const uintptr_t apart = reinterpret_cast<uintptr_t>(in) ^ reinterpret_cast<uintptr_t>(out);
  if (apart % 16 == 0) {
    CopyUnits<Machine, uint32_t, 4, 4>(in, out, count, number, slice, thread);
  } else if (apart % 4 == 0) {
    CopyUnits<Machine, uint32_t, 1, 8>(in, out, count, number, slice, thread);
  } else if (apart % 2 == 0) {
    CopyUnits<Machine, uint16_t, 1, 8>(in, out, count, number, slice, thread);
  } else {
    CopyUnits<Machine, uint8_t, 1, 8>(in, out, count, number, slice, thread);
  }
}

/// Fills one slice of bytes with `pattern`, eight bytes that begin at every address divisible by 8.
template <class Machine>
FARANDOLE_ON_DEVICE void FillSlice(uint8_t* out, int64_t count, int64_t number, int64_t slice,
                                   uint64_t pattern, int thread) {
  const SliceRange part = SliceOf(number, slice, ElementsBefore<uint8_t>(out, 16), count);
  const int groups = static_cast<int>((part.end - part.groups) / 16);
  const ElementGroup<uint64_t, 2> group{{pattern, pattern}};
  ElementGroup<uint64_t, 2>* const to =
      reinterpret_cast<ElementGroup<uint64_t, 2>*>(out + part.groups);
  const auto fill_bytes = [&](int64_t begin, int64_t end) {
    const int64_t i = begin + thread;
    const auto place = static_cast<unsigned>(reinterpret_cast<uintptr_t>(out + i) % 8);
    if (i < end) Machine::Store(out + i, static_cast<uint8_t>(pattern >> (8 * place)));
  };
  fill_bytes(part.begin, part.groups);
  for (int i = thread; i < groups; i += kBlockThreads) Machine::Store(to + i, group);
  fill_bytes(part.groups + int64_t{groups} * 16, part.end);
}

/// The last item whose first block is not after `block`.
template <int kCapacity>
FARANDOLE_ON_DEVICE inline int FindItem(const CastTable<kCapacity>& table, uint32_t block) {
  int low = 0;
  int high = table.size;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Whether results are poisoned; no flag changes while a kernel runs.
template <class Machine, int kCapacity>
FARANDOLE_ON_DEVICE inline bool IsPoisoned(const CastTable<kCapacity>& table) {
  return table.poisoned != nullptr && Machine::Load(table.poisoned) != 0;
}

inline constexpr uint64_t kEveryBit = ~uint64_t{0};

/// The kernel for casts and factors.
template <class Machine, class From, class To, int kCapacity>
FARANDOLE_ON_DEVICE void CastBody(const CastTable<kCapacity>& table, uint32_t block, int thread) {
  const int item = FindItem(table, block);
  const int64_t number = block - table.first_block[item];
  const int64_t count = table.count[item];
  To* const out = static_cast<To*>(table.out[item]);
  const bool poisoned = IsPoisoned<Machine>(table);
  if (table.in[item] == nullptr || poisoned) {
    constexpr int kBytes = static_cast<int>(sizeof(To));
    FillSlice<Machine>(reinterpret_cast<uint8_t*>(out), count * kBytes, number,
                       table.slice * kBytes, poisoned ? kEveryBit : table.identity, thread);
  } else {
    CastSlice<Machine>(static_cast<const From*>(table.in[item]), out, count, number, table.slice,
                       table.factors, thread);
  }
}

/// The kernel for copies; counts are bytes.
template <class Machine, int kCapacity>
FARANDOLE_ON_DEVICE void CopyBody(const CastTable<kCapacity>& table, uint32_t block, int thread) {
  const int item = FindItem(table, block);
  const int64_t number = block - table.first_block[item];
  const auto* const in = static_cast<const uint8_t*>(table.in[item]);
  auto* const out = static_cast<uint8_t*>(table.out[item]);
  const bool poisoned = IsPoisoned<Machine>(table);
  if (in == nullptr || poisoned) {
    FillSlice<Machine>(out, table.count[item], number, table.slice,
                       poisoned ? kEveryBit : table.identity, thread);
  } else if (in != out) {
    CopySlice<Machine>(in, out, table.count[item], number, table.slice, thread);
  }
}

/// Functions for cudaLaunchKernel; the one parameter is a SmallCastTable or a LargeCastTable. The
/// small one may be missing.
struct CastKernels {
  const void* small = nullptr;
  const void* large = nullptr;
};

CastKernels KernelsForCopies();
/// None if there is no such cast.
CastKernels KernelsForCasts(DType from, DType to);
/// Device::CopyFlag's; its parameters are the two pointers.
const void* KernelForFlags();

}  // namespace farandole
