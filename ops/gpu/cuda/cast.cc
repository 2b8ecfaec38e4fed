#include "ops/gpu/cuda/cast.h"

#include <bit>
#include <string>

namespace farandole {
namespace {

/// One step of a block: each thread holds 64 bytes of the wider type.
constexpr int64_t kStepBytes = int64_t{kBlockThreads} * 64;
/// Blocks of a step that a multiprocessor holds at once.
constexpr int64_t kResident = 8;

std::string Text(const CastSpec& spec) {
  return std::string(Name(spec.from)) + " -> " + std::string(Name(spec.to));
}

Status CheckSpec(const CastSpec& spec) {
  if (!VisitCast(spec.from, spec.to, [](auto, auto) {})) {
    return InvalidArgument("there is no kernel that casts " + Text(spec));
  }
  if (spec.divisor < 1 || (spec.divisor != 1 && IsFloating(spec.from))) {
    return InvalidArgument("a cast of tensors, " + Text(spec) + ", divides by " +
                           std::to_string(spec.divisor) +
                           "; integers are divided by 1 or more, floating types by 1 alone");
  }
  if (spec.rescale != 1.0 && spec.from != spec.to) {
    return InvalidArgument("a cast of tensors, " + Text(spec) +
                           ", has a second factor; there is none where the type changes");
  }
  return {};
}

bool IsAligned(const void* memory, int64_t size_bytes) {
  return std::bit_cast<uintptr_t>(memory) % static_cast<uintptr_t>(size_bytes) == 0;
}

/// What is wrong with one item, or empty.
std::string Fault(const CastItem& item, const CastJob& job) {
  if (item.count < 0) return std::to_string(item.count) + " elements";
  if (item.count == 0) return "";
  if (item.out == nullptr) return "no memory to write to";
  // Absent inputs are filled by elements even where present ones are copied as bytes.
  const bool fills = item.in == nullptr;
  if ((fills || !job.raw) && !IsAligned(item.out, SizeOf(job.spec.to))) {
    return "output memory that is not aligned to its elements";
  }
  if (!fills && !job.raw && !IsAligned(item.in, job.in_bytes)) {
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
  VisitCastType(dtype, [&](auto tag) { bits = Bits(Identity<typename decltype(tag)::Type>(op)); });
  return bits;
}

Result<CastJob> MakeCastJob(std::span<const CastItem> items, const CastSpec& spec) {
  FARANDOLE_RETURN_IF_ERROR(CheckSpec(spec));
  CastJob job;
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
  job.items.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const CastItem& item = items[i];
    if (const std::string fault = Fault(item, job); !fault.empty()) {
      return InvalidArgument("a cast of tensors, " + Text(spec) + ", has " + fault + " at number " +
                             std::to_string(i));
    }
    if (item.count == 0 || (job.raw && item.in == item.out && spec.poisoned == nullptr)) continue;
    job.items.push_back({item.in, item.out, item.count * unit});
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
uint32_t FillCastTable(const CastJob& job, std::span<const CastItem> items, int multiprocessors,
                       CastTable<kCapacity>* table) {
  int64_t total = 0;
  for (const CastItem& item : items) total += item.count;
  table->factors = {.scale = job.spec.scale,
                    .rescale = job.spec.rescale,
                    .scale_float = static_cast<float>(job.spec.scale),
                    .rescale_float = static_cast<float>(job.spec.rescale),
                    .divisor = job.spec.divisor};
  table->identity = job.identity;
  table->poisoned = job.spec.poisoned;
  table->slice = SliceElements(total, std::max(job.in_bytes, job.out_bytes), multiprocessors);
  table->size = static_cast<int32_t>(items.size());
  int64_t blocks = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    table->first_block[i] = static_cast<uint32_t>(blocks);
    table->in[i] = items[i].in;
    table->out[i] = items[i].out;
    table->count[i] = items[i].count;
    blocks += CeilDivide(items[i].count, table->slice);
  }
  return static_cast<uint32_t>(blocks);
}

template uint32_t FillCastTable(const CastJob&, std::span<const CastItem>, int, SmallCastTable*);
template uint32_t FillCastTable(const CastJob&, std::span<const CastItem>, int, LargeCastTable*);

}  // namespace farandole
