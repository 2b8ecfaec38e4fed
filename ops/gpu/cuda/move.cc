#include "ops/gpu/cuda/move.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace farandole {
namespace {

/// One step of a block: each thread holds 64 bytes of the wider type.
constexpr int64_t kStepBytes = int64_t{kMoveThreads} * 64;
/// Blocks of a step that a multiprocessor holds at once.
constexpr int64_t kResident = 8;

std::string Text(const MoveSpec& spec) {
  return std::string(Name(spec.from)) + " -> " + std::string(Name(spec.to));
}

Status CheckSpec(const MoveSpec& spec) {
  if (!VisitCast(spec.from, spec.to, [](auto, auto) {})) {
    return InvalidArgument("there is no kernel that casts " + Text(spec));
  }
  if (spec.divisor < 1 || (spec.divisor != 1 && IsFloating(spec.from))) {
    return InvalidArgument("a move of tensors, " + Text(spec) + ", divides by " +
                           std::to_string(spec.divisor) +
                           "; integers are divided by 1 or more, floating types by 1 alone");
  }
  if (spec.rescale != 1.0 && spec.from != spec.to) {
    return InvalidArgument("a move of tensors, " + Text(spec) +
                           ", has a second factor; only moves from a type to itself have one");
  }
  return {};
}

bool IsAligned(const void* memory, int64_t size_bytes) {
  return std::bit_cast<uintptr_t>(memory) % static_cast<uintptr_t>(size_bytes) == 0;
}

/// What is wrong with one move, or empty.
std::string Fault(const DeviceMove& move, const MoveJob& job) {
  if (move.count < 0) return std::to_string(move.count) + " elements";
  if (move.count == 0) return "";
  if (move.out == nullptr) return "no memory to write to";
  // Absent inputs are filled by elements even where present ones are copied as bytes.
  const bool fills = move.in == nullptr;
  if ((fills || !job.raw) && !IsAligned(move.out, SizeOf(job.spec.to))) {
    return "output memory that is not aligned to its elements";
  }
  if (!fills && !job.raw && !IsAligned(move.in, job.in_bytes)) {
    return "input memory that is not aligned to its elements";
  }
  return "";
}

template <class T>
uint64_t Bits(T value) {
  if constexpr (sizeof(T) == 8) {
    return std::bit_cast<uint64_t>(value);
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<uint32_t>(value);
  } else if constexpr (sizeof(T) == 2) {
    return std::bit_cast<uint16_t>(value);
  } else {
    return std::bit_cast<uint8_t>(value);
  }
}

/// `value` as T, of which every T knows at least infinities, 0 and 1.
template <class T>
T Exactly(float value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return ToFloat16(value);
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    return ToBfloat16(value);
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
T Extreme(bool largest) {
  if constexpr (std::is_integral_v<T>) {
    return largest ? std::numeric_limits<T>::max() : std::numeric_limits<T>::min();
  } else {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return Exactly<T>(largest ? kInfinity : -kInfinity);
  }
}

template <class T>
T Identity(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kPreMulSum:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return T{};
    case ReduceOp::kBitAnd:  // not offered by NCCL, for which absent contributions are filled in
    case ReduceOp::kAdasum:  // nor is this
      return T{};
    case ReduceOp::kProduct:
      return Exactly<T>(1.0f);
    case ReduceOp::kMin:
      return Extreme<T>(true);
    case ReduceOp::kMax:
      return Extreme<T>(false);
  }
  return T{};
}

/// The lowest `size_bytes` of `bits`, repeated to eight bytes.
uint64_t Repeated(uint64_t bits, int64_t size_bytes) {
  for (int64_t known = size_bytes; known < 8; known *= 2) bits |= bits << (8 * known);
  return bits;
}

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace

uint64_t IdentityBits(ReduceOp op, DType dtype) {
  if (dtype == DType::kBool) return op == ReduceOp::kMin || op == ReduceOp::kProduct ? 1 : 0;
  uint64_t bits = 0;
  VisitMoveType(dtype, [&](auto tag) { bits = Bits(Identity<typename decltype(tag)::Type>(op)); });
  return bits;
}

Result<MoveJob> MakeMoveJob(std::span<const DeviceMove> moves, const MoveSpec& spec) {
  FARANDOLE_RETURN_IF_ERROR(CheckSpec(spec));
  MoveJob job;
  job.spec = spec;
  job.identity = Repeated(IdentityBits(spec.op, spec.to), SizeOf(spec.to));
  if (spec.from == DType::kBool || spec.to == DType::kBool) {
    job.spec.scale = 1.0;
    job.spec.rescale = 1.0;
    job.spec.divisor = 1;
  }
  job.raw = spec.from == spec.to && job.spec.scale == 1.0 && job.spec.rescale == 1.0 &&
            job.spec.divisor == 1;
  const int64_t unit = job.raw ? SizeOf(spec.to) : 1;
  job.in_bytes = job.raw ? 1 : static_cast<int>(SizeOf(spec.from));
  job.out_bytes = job.raw ? 1 : static_cast<int>(SizeOf(spec.to));
  job.moves.reserve(moves.size());
  for (size_t i = 0; i < moves.size(); ++i) {
    const DeviceMove& move = moves[i];
    if (const std::string fault = Fault(move, job); !fault.empty()) {
      return InvalidArgument("a move of tensors, " + Text(spec) + ", has " + fault + " at number " +
                             std::to_string(i));
    }
    if (move.count == 0 || (job.raw && move.in == move.out && spec.spoiled == nullptr)) continue;
    job.moves.push_back({move.in, move.out, move.count * unit});
  }
  return job;
}

int64_t SliceElements(int64_t total, int wide_bytes, int multiprocessors) {
  const int64_t step = kStepBytes / wide_bytes;
  int64_t slice = step / 4;
  const auto more_than = [&](int64_t blocks) { return CeilDivide(total, slice) > blocks; };
  while (slice < step && more_than(kResident * multiprocessors)) slice *= 2;
  while (slice < 4 * step && more_than(8 * kResident * multiprocessors)) slice *= 2;
  while (more_than(int64_t{1} << 30)) slice *= 2;
  return slice;
}

template <int kCapacity>
uint32_t FillMoveTable(const MoveJob& job, std::span<const DeviceMove> moves, int multiprocessors,
                       MoveTable<kCapacity>* table) {
  int64_t total = 0;
  for (const DeviceMove& move : moves) total += move.count;
  table->factors = {.scale = job.spec.scale,
                    .rescale = job.spec.rescale,
                    .scale_float = static_cast<float>(job.spec.scale),
                    .rescale_float = static_cast<float>(job.spec.rescale),
                    .divisor = job.spec.divisor};
  table->identity = job.identity;
  table->spoiled = job.spec.spoiled;
  table->slice = SliceElements(total, std::max(job.in_bytes, job.out_bytes), multiprocessors);
  table->size = static_cast<int32_t>(moves.size());
  int64_t blocks = 0;
  for (size_t i = 0; i < moves.size(); ++i) {
    table->first_block[i] = static_cast<uint32_t>(blocks);
    table->in[i] = moves[i].in;
    table->out[i] = moves[i].out;
    table->count[i] = moves[i].count;
    blocks += CeilDivide(moves[i].count, table->slice);
  }
  return static_cast<uint32_t>(blocks);
}

template uint32_t FillMoveTable(const MoveJob&, std::span<const DeviceMove>, int, SmallMoveTable*);
template uint32_t FillMoveTable(const MoveJob&, std::span<const DeviceMove>, int, LargeMoveTable*);

namespace {

/// As many as an H100 has, so that work is cut as it is there.
constexpr int kMultiprocessors = 132;

/// A GPU stops at an access that is not aligned to its width; so does this, lest the body go wrong
/// unseen where memcpy does not care.
template <class T>
void MustBeAligned(const T* memory) {
  if (std::bit_cast<uintptr_t>(memory) % alignof(T) != 0) std::abort();
}

struct HostMachine {
  template <class T>
  static T Load(const T* from) {
    MustBeAligned(from);
    T value;
    std::memcpy(static_cast<void*>(&value), from, sizeof value);
    return value;
  }
  template <class T>
  static void Store(T* to, T value) {
    MustBeAligned(to);
    std::memcpy(static_cast<void*>(to), &value, sizeof value);
  }
  static uint32_t LoadFresh(const uint32_t* flag) {
    return __atomic_load_n(flag, __ATOMIC_SEQ_CST);
  }
  static float Widen(Float16 value) { return ToFloat(value); }
  static float Widen(Bfloat16 value) { return ToFloat(value); }
  static Float16 Round(Float16, float value) { return ToFloat16(value); }
  static Float16 Round(Float16, double value) { return ToFloat16(RoundToOdd(value)); }
  static Bfloat16 Round(Bfloat16, float value) { return ToBfloat16(value); }
  static Bfloat16 Round(Bfloat16, double value) { return ToBfloat16(RoundToOdd(value)); }
};

template <class Body>
void RunBlocks(uint32_t blocks, const Body& body) {
  for (uint32_t block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kMoveThreads; ++thread) body(block, thread);
  }
}

void RunCopies(const LargeMoveTable& table, uint32_t blocks) {
  RunBlocks(blocks,
            [&](uint32_t block, int thread) { CopyBody<HostMachine>(table, block, thread); });
}

void RunCasts(const MoveSpec& spec, const LargeMoveTable& table, uint32_t blocks) {
  VisitCast(spec.from, spec.to, [&](auto from, auto to) {
    RunBlocks(blocks, [&](uint32_t block, int thread) {
      CastBody<HostMachine, typename decltype(from)::Type, typename decltype(to)::Type>(
          table, block, thread);
    });
  });
}

}  // namespace

Status MoveOnHost(std::span<const DeviceMove> moves, const MoveSpec& spec) {
  const Result<MoveJob> job = MakeMoveJob(moves, spec);
  if (!job.ok()) return job.status();
  const auto table = std::make_unique<LargeMoveTable>();
  std::span<const DeviceMove> rest = job.value().moves;
  while (!rest.empty()) {
    const auto now = rest.first(std::min(rest.size(), size_t{Device::kMovesPerLaunch}));
    const uint32_t blocks = FillMoveTable(job.value(), now, kMultiprocessors, table.get());
    job.value().raw ? RunCopies(*table, blocks) : RunCasts(spec, *table, blocks);
    rest = rest.subspan(now.size());
  }
  return {};
}

}  // namespace farandole
