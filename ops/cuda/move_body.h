// The body of the move kernel: what one thread of one block does.
//
// Written once for both processors: nvcc makes the kernels of it, and MoveOnHost runs it thread by
// thread. No thread waits for another, so the order in which they run does not matter.
//
// 16 bytes of the narrower type are a group; groups are loaded and stored by vectors of 16 bytes
// where both sides can be so aligned, and each thread loads several groups before it stores one, so
// that enough is in flight to keep the memory busy. What precedes the first aligned group, and what
// is left after the last, goes element by element.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/cuda/move_convert.h"
#include "ops/cuda/move_table.h"
#include "ops/cuda/on_device.h"

namespace farandole {

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
struct MovePiece {
  int64_t begin;
  int64_t groups;
  int64_t end;
};

/// Piece `number` of a move of `count` elements whose first `head` precede the first aligned group.
FARANDOLE_ON_DEVICE inline MovePiece PieceOf(int64_t number, int64_t piece, int64_t head,
                                             int64_t count) {
  const int64_t groups = MoveMin(count, head + number * piece);
  const int64_t end = MoveMin(count, head + (number + 1) * piece);
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

/// Casts one piece. Where no group is aligned on both sides, a group is one element.
template <class Machine, class From, class To>
FARANDOLE_ON_DEVICE void CastPiece(const From* in, To* out, int64_t count, int64_t number,
                                   int64_t piece, const MoveFactors& factors, int thread) {
  using Shape = CastShape<From, To>;
  constexpr int kCount = Shape::kCount;
  const int head = Shape::Head(in, out);
  const bool aligned = Shape::IsAligned(in + head, out + head);
  const MovePiece part = PieceOf(number, piece, aligned ? head : 0, count);
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

/// Copies one piece of bytes by units as wide as both sides' alignment allows.
template <class Machine, class Unit, int kFlight>
FARANDOLE_ON_DEVICE inline void CopyUnits(const uint8_t* in, uint8_t* out, int64_t count,
                                          int64_t number, int64_t piece, int thread) {
  const MovePiece part = PieceOf(number, piece, ElementsBefore<uint8_t>(out, sizeof(Unit)), count);
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
FARANDOLE_ON_DEVICE void CopyPiece(const uint8_t* in, uint8_t* out, int64_t count, int64_t number,
                                   int64_t piece, int thread) {
  const uintptr_t apart = reinterpret_cast<uintptr_t>(in) ^ reinterpret_cast<uintptr_t>(out);
  if (apart % 16 == 0) {
    CopyUnits<Machine, MoveGroup<uint32_t, 4>, 4>(in, out, count, number, piece, thread);
  } else if (apart % 4 == 0) {
    CopyUnits<Machine, uint32_t, 8>(in, out, count, number, piece, thread);
  } else if (apart % 2 == 0) {
    CopyUnits<Machine, uint16_t, 8>(in, out, count, number, piece, thread);
  } else {
    CopyUnits<Machine, uint8_t, 8>(in, out, count, number, piece, thread);
  }
}

/// Fills one piece of bytes with `pattern`, eight bytes that begin at every address divisible by 8.
template <class Machine>
FARANDOLE_ON_DEVICE void FillPiece(uint8_t* out, int64_t count, int64_t number, int64_t piece,
                                   uint64_t pattern, int thread) {
  const MovePiece part = PieceOf(number, piece, ElementsBefore<uint8_t>(out, 16), count);
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

/// The kernel for casts and factors.
template <class Machine, class From, class To, int kCapacity>
FARANDOLE_ON_DEVICE void CastBody(const MoveTable<kCapacity>& table, uint32_t block, int thread) {
  const int move = FindMove(table, block);
  const int64_t number = block - table.first_block[move];
  const int64_t count = table.count[move];
  To* const out = static_cast<To*>(table.out[move]);
  if (table.in[move] == nullptr) {
    constexpr int kBytes = static_cast<int>(sizeof(To));
    FillPiece<Machine>(reinterpret_cast<uint8_t*>(out), count * kBytes, number,
                       table.piece * kBytes, table.identity, thread);
  } else {
    CastPiece<Machine>(static_cast<const From*>(table.in[move]), out, count, number, table.piece,
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
  if (in == nullptr) {
    FillPiece<Machine>(out, table.count[move], number, table.piece, table.identity, thread);
  } else {
    CopyPiece<Machine>(in, out, table.count[move], number, table.piece, thread);
  }
}

}  // namespace farandole
