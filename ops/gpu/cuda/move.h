// The kernel that moves tensors: what one launch is given, and what one thread of one block does.
//
// Written once for both processors: nvcc makes the kernels of it (kernels.cu), MoveOnHost runs it
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
struct MoveType {
  using Type = T;
};

/// Calls fn(MoveType<T>()); bool is moved as uint8.
template <class Fn>
void VisitMoveType(DType dtype, const Fn& fn) {
  if (dtype == DType::kFloat16) return fn(MoveType<Float16>());
  if (dtype == DType::kBfloat16) return fn(MoveType<Bfloat16>());
  if (dtype == DType::kFloat32) return fn(MoveType<float>());
  if (dtype == DType::kFloat64) return fn(MoveType<double>());
  if (dtype == DType::kInt8) return fn(MoveType<int8_t>());
  if (dtype == DType::kInt16) return fn(MoveType<int16_t>());
  if (dtype == DType::kInt32) return fn(MoveType<int32_t>());
  if (dtype == DType::kInt64) return fn(MoveType<int64_t>());
  return fn(MoveType<uint8_t>());
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
           sizeof(From) * sizeof(To) == 8;
  }
}

/// Calls fn(MoveType<From>(), MoveType<To>()). @return false if there is no such cast.
template <class Fn>
bool VisitCast(DType from, DType to, const Fn& fn) {
  bool found = false;
  VisitMoveType(from, [&](auto in) {
    VisitMoveType(to, [&](auto out) {
      if constexpr (IsCast<typename decltype(in)::Type, typename decltype(out)::Type>()) {
        fn(in, out);
        found = true;
      }
    });
  });
  return found;
}

/// The numbers of a MoveSpec as the kernel uses them.
struct MoveFactors {
  double scale = 1.0;
  double rescale = 1.0;
  float scale_float = 1.0f;
  float rescale_float = 1.0f;
  int64_t divisor = 1;
};

/// Threads of one block; all blocks have as many.
inline constexpr int kMoveThreads = 256;

/// A move is cut into slices of `slice` elements; each block moves one. Block b works on move m
/// with first_block[m] <= b < first_block[m + 1].
///
/// Invariant: first_block ascends from 0 and every move has at least one block.
template <int kCapacity>
struct MoveTable {
  MoveFactors factors;
  uint64_t identity = 0;  ///< Fills `out` where `in` is nullptr: eight bytes, repeated.
  int64_t slice = 0;
  const uint32_t* spoiled = nullptr;  ///< MoveSpec::spoiled.
  int32_t size = 0;                   ///< Moves.
  uint32_t first_block[kCapacity];
  const void* in[kCapacity];
  void* out[kCapacity];
  int64_t count[kCapacity];
};

/// Small enough for the 4 KiB that parameters always could take: cheaper to launch.
inline constexpr int kFewMoves = 128;
using SmallMoveTable = MoveTable<kFewMoves>;
using LargeMoveTable = MoveTable<Device::kMovesPerLaunch>;
static_assert(sizeof(SmallMoveTable) <= 4096 && sizeof(LargeMoveTable) <= 32764);

/// A checked and simplified request: what to do with every element, and in which unit to count.
struct MoveJob {
  MoveSpec spec;                  ///< Factors that mean nothing are 1; bool is uint8.
  bool raw = false;               ///< Bytes are copied as they are; moves are counted in bytes.
  int in_bytes = 1;               ///< Of one element as counted.
  int out_bytes = 1;              ///< Likewise.
  uint64_t identity = 0;          ///< As eight bytes: one element, repeated.
  std::vector<DeviceMove> moves;  ///< Only those with something to do.
};

/// @return InvalidArgument, naming the move, for a cast that there is not (IsCast), a divisor below
/// 1 or one for floating types, a second factor of a cast, a negative count, a missing `out`, or
/// memory that is not aligned to its element where elements are cast.
Result<MoveJob> MakeMoveJob(std::span<const DeviceMove> moves, const MoveSpec& spec);

/// The identity of `op` as bits of a `dtype`, in the low bytes. Sum and average 0, product 1, min
/// the largest value (infinity) and max the lowest; of bool: min and product true, max false.
uint64_t IdentityBits(ReduceOp op, DType dtype);

/// Elements per block: small enough that `total` elements occupy a device of so many
/// multiprocessors, large enough that a block is worth its start. A multiple of 4 KiB of the wider
/// type, so that each slice begins as aligned as the first.
int64_t SliceElements(int64_t total, int wide_bytes, int multiprocessors);

/// Writes `moves`, no more than the table holds, with the job's numbers. @return the blocks needed.
template <int kCapacity>
uint32_t FillMoveTable(const MoveJob& job, std::span<const DeviceMove> moves, int multiprocessors,
                       MoveTable<kCapacity>* table);

template <class T>
inline constexpr bool kIsMoveHalf = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;

/// `value`, a float or double, rounded to To once.
template <class Machine, class To, class From>
FARANDOLE_ON_DEVICE inline To RoundTo(From value) {
  if constexpr (kIsMoveHalf<To>) {
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
                                                                    const MoveFactors& factors,
                                                                    int64_t low, int64_t high) {
  if (factors.divisor != 1) value /= factors.divisor;
  value = ScaleInteger(value, factors.scale, low, high);
  return ScaleInteger(value, factors.rescale, low, high);
}

template <class To, class From>
FARANDOLE_ON_DEVICE inline To ConvertInteger(From value, const MoveFactors& factors) {
  using Range = SharedRange<From, To>;
  const bool changes = factors.divisor != 1 || factors.scale != 1.0 || factors.rescale != 1.0;
  return static_cast<To>(changes ? DivideAndScale(value, factors, Range::kLow, Range::kHigh)
                                 : value);
}

/// The second factor, which only moves from a type to itself have: casts stay as short as they are.
template <class To, class From, class Wide>
FARANDOLE_ON_DEVICE inline Wide Rescale(Wide value, Wide factor) {
  if constexpr (std::is_same_v<From, To>) {
    return value * factor;
  } else {
    return value;
  }
}

template <class Machine, class To, class From>
FARANDOLE_ON_DEVICE inline To Convert(From value, const MoveFactors& factors) {
  if constexpr (std::is_integral_v<From>) {
    return ConvertInteger<To>(value, factors);
  } else if constexpr (std::is_same_v<From, double>) {
    return RoundTo<Machine, To>(Rescale<To, From>(value * factors.scale, factors.rescale));
  } else {
    float wide = 0.0f;
    if constexpr (kIsMoveHalf<From>) {
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
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) MoveGroup {
  T at[kCount];
};

template <class T>
FARANDOLE_ON_DEVICE constexpr T MoveMin(T a, T b) {
  return b < a ? b : a;
}

/// The part of a move that a block works on, in elements: [begin, groups) one by one, then groups,
/// then what is left before `end` one by one.
struct MoveSlice {
  int64_t begin;
  int64_t groups;
  int64_t end;
};

/// Slice `number` of a move of `count` elements whose first `head` precede the first aligned group.
FARANDOLE_ON_DEVICE inline MoveSlice SliceOf(int64_t number, int64_t slice, int64_t head,
                                             int64_t count) {
  const int64_t groups = MoveMin(count, head + number * slice);
  const int64_t end = MoveMin(count, head + (number + 1) * slice);
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
FARANDOLE_ON_DEVICE inline void MoveFew(const From* in, To* out, int64_t begin, int64_t end,
                                        const MoveFactors& factors, int thread) {
  const int64_t i = begin + thread;
  if (i < end) Machine::Store(out + i, Convert<Machine, To>(Machine::Load(in + i), factors));
}

/// Groups of kCount elements; kFlight of them are loaded before the first is stored.
template <class Machine, int kCount, int kFlight, class From, class To>
FARANDOLE_ON_DEVICE inline void MoveGroups(const From* in, To* out, int groups,
                                           const MoveFactors& factors, int thread) {
  using Loaded = MoveGroup<From, kCount>;
  using Stored = MoveGroup<To, kCount>;
  const Loaded* const from = reinterpret_cast<const Loaded*>(in);
  Stored* const to = reinterpret_cast<Stored*>(out);
  for (int first = thread; first < groups; first += kMoveThreads * kFlight) {
    Loaded loaded[kFlight] = {};
    for (int k = 0; k < kFlight; ++k) {
      const int group = first + k * kMoveThreads;
      if (group < groups) loaded[k] = Machine::Load(from + group);
    }
    for (int k = 0; k < kFlight; ++k) {
      const int group = first + k * kMoveThreads;
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
  static constexpr int kNarrow = MoveMin(kIn, kOut);
  static constexpr int kWide = kIn + kOut - kNarrow;
  static constexpr int kCount = 16 / (std::is_integral_v<From> ? kWide : kNarrow);
  static constexpr int kFlight = std::is_integral_v<From> ? 2 : 64 / (kCount * kWide);

  /// Elements before the first group that is aligned on the narrower side.
  FARANDOLE_ON_DEVICE static int Head(const From* in, const To* out) {
    constexpr int kBytes = kCount * kNarrow;
    return kIn < kOut ? ElementsBefore<From>(in, kBytes) : ElementsBefore<To>(out, kBytes);
  }
  FARANDOLE_ON_DEVICE static bool IsAligned(const From* in, const To* out) {
    return ElementsBefore<From>(in, alignof(MoveGroup<From, kCount>)) == 0 &&
           ElementsBefore<To>(out, alignof(MoveGroup<To, kCount>)) == 0;
  }
};

/// Casts one slice. Where no group is aligned on both sides, a group is one element.
template <class Machine, class From, class To>
FARANDOLE_ON_DEVICE void CastSlice(const From* in, To* out, int64_t count, int64_t number,
                                   int64_t slice, const MoveFactors& factors, int thread) {
  using Shape = CastShape<From, To>;
  constexpr int kCount = Shape::kCount;
  const int head = Shape::Head(in, out);
  const bool aligned = Shape::IsAligned(in + head, out + head);
  const MoveSlice part = SliceOf(number, slice, aligned ? head : 0, count);
  if (!aligned) {
    return MoveGroups<Machine, 1, Shape::kFlight * 2>(in + part.begin, out + part.begin,
                                                      static_cast<int>(part.end - part.begin),
                                                      factors, thread);
  }
  const int groups = static_cast<int>((part.end - part.groups) / kCount);
  MoveFew<Machine>(in, out, part.begin, part.groups, factors, thread);
  MoveGroups<Machine, kCount, Shape::kFlight>(in + part.groups, out + part.groups, groups, factors,
                                              thread);
  MoveFew<Machine>(in, out, part.groups + int64_t{groups} * kCount, part.end, factors, thread);
}

/// Copies one slice of bytes by units as wide as both sides' alignment allows.
template <class Machine, class Unit, int kFlight>
FARANDOLE_ON_DEVICE inline void CopyUnits(const uint8_t* in, uint8_t* out, int64_t count,
                                          int64_t number, int64_t slice, int thread) {
  const MoveSlice part = SliceOf(number, slice, ElementsBefore<uint8_t>(out, sizeof(Unit)), count);
  const int units = static_cast<int>((part.end - part.groups) / static_cast<int>(sizeof(Unit)));
  const Unit* const from = reinterpret_cast<const Unit*>(in + part.groups);
  Unit* const to = reinterpret_cast<Unit*>(out + part.groups);
  const MoveFactors none;
  MoveFew<Machine>(in, out, part.begin, part.groups, none, thread);
  for (int first = thread; first < units; first += kMoveThreads * kFlight) {
    Unit loaded[kFlight] = {};
    for (int k = 0; k < kFlight; ++k) {
      const int unit = first + k * kMoveThreads;
      if (unit < units) loaded[k] = Machine::Load(from + unit);
    }
    for (int k = 0; k < kFlight; ++k) {
      const int unit = first + k * kMoveThreads;
      if (unit < units) Machine::Store(to + unit, loaded[k]);
    }
  }
  const int64_t rest = part.groups + int64_t{units} * static_cast<int>(sizeof(Unit));
  MoveFew<Machine>(in, out, rest, part.end, none, thread);
}

template <class Machine>
FARANDOLE_ON_DEVICE void CopySlice(const uint8_t* in, uint8_t* out, int64_t count, int64_t number,
                                   int64_t slice, int thread) {
  const uintptr_t apart = reinterpret_cast<uintptr_t>(in) ^ reinterpret_cast<uintptr_t>(out);
  if (apart % 16 == 0) {
    CopyUnits<Machine, MoveGroup<uint32_t, 4>, 4>(in, out, count, number, slice, thread);
  } else if (apart % 4 == 0) {
    CopyUnits<Machine, uint32_t, 8>(in, out, count, number, slice, thread);
  } else if (apart % 2 == 0) {
    CopyUnits<Machine, uint16_t, 8>(in, out, count, number, slice, thread);
  } else {
    CopyUnits<Machine, uint8_t, 8>(in, out, count, number, slice, thread);
  }
}

/// Fills one slice of bytes with `pattern`, eight bytes that begin at every address divisible by 8.
template <class Machine>
FARANDOLE_ON_DEVICE void FillSlice(uint8_t* out, int64_t count, int64_t number, int64_t slice,
                                   uint64_t pattern, int thread) {
  const MoveSlice part = SliceOf(number, slice, ElementsBefore<uint8_t>(out, 16), count);
  const int groups = static_cast<int>((part.end - part.groups) / 16);
  const MoveGroup<uint64_t, 2> group{{pattern, pattern}};
  MoveGroup<uint64_t, 2>* const to = reinterpret_cast<MoveGroup<uint64_t, 2>*>(out + part.groups);
  const auto fill_bytes = [&](int64_t begin, int64_t end) {
    const int64_t i = begin + thread;
    const auto place = static_cast<unsigned>(reinterpret_cast<uintptr_t>(out + i) % 8);
    if (i < end) Machine::Store(out + i, static_cast<uint8_t>(pattern >> (8 * place)));
  };
  fill_bytes(part.begin, part.groups);
  for (int i = thread; i < groups; i += kMoveThreads) Machine::Store(to + i, group);
  fill_bytes(part.groups + int64_t{groups} * 16, part.end);
}

/// The last move whose first block is not after `block`.
template <int kCapacity>
FARANDOLE_ON_DEVICE inline int FindMove(const MoveTable<kCapacity>& table, uint32_t block) {
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

/// Whether results are spoiled by now; the host may set the flag at any time.
template <class Machine, int kCapacity>
FARANDOLE_ON_DEVICE inline bool IsSpoiled(const MoveTable<kCapacity>& table) {
  return table.spoiled != nullptr && Machine::LoadFresh(table.spoiled) != 0;
}

inline constexpr uint64_t kEveryBit = ~uint64_t{0};

/// The kernel for casts and factors.
template <class Machine, class From, class To, int kCapacity>
FARANDOLE_ON_DEVICE void CastBody(const MoveTable<kCapacity>& table, uint32_t block, int thread) {
  const int move = FindMove(table, block);
  const int64_t number = block - table.first_block[move];
  const int64_t count = table.count[move];
  To* const out = static_cast<To*>(table.out[move]);
  const bool spoiled = IsSpoiled<Machine>(table);
  if (table.in[move] == nullptr || spoiled) {
    constexpr int kBytes = static_cast<int>(sizeof(To));
    FillSlice<Machine>(reinterpret_cast<uint8_t*>(out), count * kBytes, number,
                       table.slice * kBytes, spoiled ? kEveryBit : table.identity, thread);
  } else {
    CastSlice<Machine>(static_cast<const From*>(table.in[move]), out, count, number, table.slice,
                       table.factors, thread);
  }
}

/// The kernel for copies; counts are bytes.
template <class Machine, int kCapacity>
FARANDOLE_ON_DEVICE void CopyBody(const MoveTable<kCapacity>& table, uint32_t block, int thread) {
  const int move = FindMove(table, block);
  const int64_t number = block - table.first_block[move];
  const auto* const in = static_cast<const uint8_t*>(table.in[move]);
  auto* const out = static_cast<uint8_t*>(table.out[move]);
  const bool spoiled = IsSpoiled<Machine>(table);
  if (in == nullptr || spoiled) {
    FillSlice<Machine>(out, table.count[move], number, table.slice,
                       spoiled ? kEveryBit : table.identity, thread);
  } else if (in != out) {
    CopySlice<Machine>(in, out, table.count[move], number, table.slice, thread);
  }
}

/// Runs the very body that the GPU runs, block after block, thread after
/// thread, over host memory. What the numbers mean: see MoveSpec. `out` may equal `in` where
/// elements of both have one size; otherwise nothing overlaps.
///
/// It is the specification made runnable, several times slower than the CPU kernels.
/// @return InvalidArgument as Device::Move. Thread safety: pure.
Status MoveOnHost(std::span<const DeviceMove> moves, const MoveSpec& spec);

/// Functions for cudaLaunchKernel; the one parameter is a SmallMoveTable or a LargeMoveTable. The
/// small one may be missing.
struct MoveKernels {
  const void* small = nullptr;
  const void* large = nullptr;
};

MoveKernels KernelsForCopies();
/// None if there is no such cast.
MoveKernels KernelsForCasts(DType from, DType to);

}  // namespace farandole
