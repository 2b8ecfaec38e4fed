#include "ops/cpu/adasum.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <string>

namespace farandole {
namespace {

/// The elements whose products are summed at a time are part of the result's definition.
constexpr int64_t kBlockElements = 8192;
/// What one Step works on: about a chunk.
constexpr int64_t kStepElements = 65'536;
/// What the smallest block is counted as.
constexpr int64_t kLeastElements = 64;

/// The factor of a vector whose square is `square`, and its scalar product with the other
/// `product`.
double FactorOf(double product, double square) {
  return square == 0 ? 1 : 1 - product / (2 * square);
}

}  // namespace

// The old memory goes first: what it holds is of no use, and both together might not fit.
Status AdasumAllreduce::Buffer::Reserve(int64_t bytes) {
  if (bytes <= bytes_) return {};
  memory_.reset();
  bytes_ = 0;
  memory_.reset(new (std::nothrow) std::byte[static_cast<size_t>(bytes)]);
  if (memory_ == nullptr) {
    return ResourceExhausted("adasum: no memory for " + std::to_string(bytes) + " bytes");
  }
  bytes_ = bytes;
  return {};
}

void AdasumAllreduce::Buffer::Trim() {
  if (bytes_ <= kKeptBytes) return;
  memory_.reset();
  bytes_ = 0;
}

// A contribution that nobody else's is added to is a sum of one, so the plane does it alone. With
// more, each rank owns a shard of every segment. A single tensor that needs neither another type
// nor a factor is read and written where it lies; others are packed shard by shard first, so that
// what one member gets is contiguous.
Status AdasumAllreduce::Begin(DataPlane& plane, const Batch& batch) {
  if (!IsDefined(batch.op, batch.dtype)) {
    return InvalidArgument("adasum of " + std::string(Name(batch.dtype)) + " is not defined");
  }
  plane_ = &plane;
  batch_ = &batch;
  contributions_ = static_cast<int64_t>(batch.ranks.size() - batch.absent.size());
  if (contributions_ <= 1) {
    phase_ = Phase::kUnpack;  // the last one
    inner_.batch = batch;
    inner_.batch.op = ReduceOp::kSum;
    return inner_.Start(plane);
  }
  values_dtype_ = batch.wire == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  widens_ = batch.wire != values_dtype_;
  const bool is_whole = batch.segments.size() == 1 && batch.wire == batch.dtype;
  reads_input_ = is_whole && batch.prescale == 1.0;
  writes_output_ = is_whole;
  takes_result_ = std::ranges::any_of(
      batch.segments, [](const Segment& segment) { return segment.out != nullptr; });
  stride_ = 1;
  shards_.assign(batch.ranks.size(), 0);
  starts_.assign(batch.ranks.size(), 0);
  for (size_t member = 0; member < shards_.size(); ++member) {
    for (const Segment& segment : batch.segments) {
      shards_[member] += ShardOf(segment.count, static_cast<int64_t>(member)).count;
    }
    if (member > 0) starts_[member] = starts_[member - 1] + shards_[member - 1];
  }
  FARANDOLE_RETURN_IF_ERROR(Reserve());
  phase_ = batch.count > 0 ? Phase::kPack : Phase::kUnpack;
  const bool packs = !IsAbsent(batch, batch.my_index) && !reads_input_ && batch.count > 0;
  WalkAgain(packs ? static_cast<int64_t>(shards_.size()) : 0);
  return {};
}

// A shard of every contribution is received, and widened to the type of the vectors between levels.
Status AdasumAllreduce::Reserve() {
  const int64_t elements = contributions_ * ShardElements();
  if (!reads_input_ || !writes_output_) {
    FARANDOLE_RETURN_IF_ERROR(packed_.Reserve(batch_->count * SizeOf(batch_->wire)));
  }
  FARANDOLE_RETURN_IF_ERROR(received_.Reserve(elements * SizeOf(batch_->wire)));
  return widens_ ? widened_.Reserve(elements * SizeOf(values_dtype_)) : Status();
}

// Either a collective of the plane runs, or this rank works on blocks, a chunk's worth in each
// call, since the engine's thread relays messages in between. All members pass the same phases, so
// they start the same collectives in the same order.
Progress AdasumAllreduce::Step() {
  using State = Progress::State;
  if (inner_.operation != nullptr) {
    Progress progress = inner_.operation->Step();
    if (progress.state != State::kDone && progress.state != State::kFailed) return progress;
    inner_.operation = nullptr;
    if (progress.state == State::kFailed) {
      End();
      return progress;
    }
  } else if (!WorkOnBlocks()) {
    return Progress::Moved();
  }
  if (Status status = NextPhase(); !status.ok()) {
    End();
    return Progress::Failed(std::move(status));
  }
  if (phase_ != Phase::kDone) return Progress::Moved();
  End();
  return Progress::Done();
}

// The plane's operation first: it still reads and writes the buffers that End may free.
void AdasumAllreduce::Abandon() {
  inner_.Abandon();
  End();
}

void AdasumAllreduce::End() {
  phase_ = Phase::kDone;
  for (Buffer* buffer : {&packed_, &received_, &widened_}) buffer->Trim();
}

// Multiply, AddUp and Combine are repeated for each level of the tree, ceil(log2(contributions))
// times; absent ranks are no leaves of it. A phase without work, as packing what lies in the tensor
// in the right order, walks over nothing.
Status AdasumAllreduce::NextPhase() {
  const Batch& batch = *batch_;
  if (phase_ == Phase::kCombine) stride_ *= 2;
  const bool goes_up = phase_ == Phase::kCombine && stride_ < contributions_;
  phase_ = goes_up ? Phase::kMultiply : static_cast<Phase>(static_cast<int>(phase_) + 1);
  switch (phase_) {
    case Phase::kScatter:
      return StartScatter();
    case Phase::kWiden:
      WalkAgain(widens_ ? contributions_ : 0);
      return {};
    case Phase::kMultiply:
      products_.assign(static_cast<size_t>(Pairs()) * batch.segments.size(), ScalarProducts());
      WalkAgain(Pairs());
      return {};
    case Phase::kAddUp: {
      static_assert(sizeof(ScalarProducts) == 3 * sizeof(double));
      return Start(OpKind::kAllreduce, products_.data(), products_.data(),
                   static_cast<int64_t>(3 * products_.size()), DType::kFloat64);
    }
    case Phase::kCombine:
      WalkAgain(Pairs());
      return {};
    case Phase::kNarrow:
      WalkAgain(widens_ || batch.postscale != 1.0 ? 1 : 0);
      return {};
    case Phase::kGather: {
      void* out = writes_output_ ? batch.segments[0].out : packed_.data();
      return Start(OpKind::kAllgather, received_.data(), takes_result_ ? out : nullptr, batch.count,
                   batch.wire);
    }
    case Phase::kUnpack:
      WalkAgain(takes_result_ && !writes_output_ ? static_cast<int64_t>(shards_.size()) : 0);
      return {};
    case Phase::kPack:
    case Phase::kDone:
      break;
  }
  return {};
}

// An alltoall: to each member its shard of this rank's contribution. An absent rank sends nothing
// but receives, as it combines its shard like the others.
Status AdasumAllreduce::StartScatter() {
  const bool contributes = !IsAbsent(*batch_, batch_->my_index);
  sends_.assign(shards_.size(), 0);
  receives_.assign(shards_.size(), 0);
  for (size_t member = 0; member < shards_.size(); ++member) {
    if (contributes) sends_[member] = shards_[member];
    if (!IsAbsent(*batch_, static_cast<int>(member))) receives_[member] = ShardElements();
  }
  const void* in = reads_input_ ? batch_->segments[0].in : packed_.data();
  return Start(OpKind::kAlltoall, in, received_.data(), *std::ranges::max_element(shards_),
               batch_->wire);
}

// Nobody is absent from these: who contributes nothing has a shard all the same.
Status AdasumAllreduce::Start(OpKind kind, const void* in, void* out, int64_t count, DType dtype) {
  inner_.Describe(*batch_, kind, dtype);
  if (kind == OpKind::kAlltoall) {
    inner_.batch.sends = sends_;
    inner_.batch.receives = receives_;
  }
  if (kind == OpKind::kAllgather) inner_.batch.splits = shards_;
  return inner_.Start(*plane_, {in, out, count});
}

void AdasumAllreduce::WalkAgain(int64_t outers) {
  outers_ = outers;
  next_ = Block();
  done_ = 0;
}

// Packing and unpacking walk over all shards of the segments, the rest over this rank's.
bool AdasumAllreduce::NextBlock(Block* block) {
  const bool by_member = phase_ == Phase::kPack || phase_ == Phase::kUnpack;
  while (next_.outer < outers_) {
    if (next_.segment == batch_->segments.size()) {
      next_ = {next_.outer + 1, 0, {}, 0};
      continue;
    }
    const Slice shard =
        ShardOf(batch_->segments[next_.segment].count, by_member ? next_.outer : batch_->my_index);
    const int64_t count = std::min(kBlockElements, shard.count - done_);
    if (count == 0) {
      ++next_.segment;
      done_ = 0;
      continue;
    }
    next_.slice = {shard.begin + done_, count};
    *block = next_;
    next_.at += count;
    done_ += count;
    return true;
  }
  return false;
}

// Small tensors count as kLeastElements, so that thousands of them do not make one long step.
bool AdasumAllreduce::WorkOnBlocks() {
  Block block;
  for (int64_t budget = kStepElements; budget > 0;) {
    if (!NextBlock(&block)) return true;
    WorkOn(block);
    budget -= std::max(block.slice.count, kLeastElements);
  }
  return false;
}

// The vectors of a pair lie `stride_` apart, in the order of the contributing ranks; the first one
// is overwritten by the combination, so that the result is the vector 0 in the end.
void AdasumAllreduce::WorkOn(const Block& block) {
  const Batch& batch = *batch_;
  const Segment& segment = batch.segments[block.segment];
  const int64_t count = block.slice.count;
  const int64_t tensor_at = block.slice.begin * SizeOf(batch.dtype);
  const int64_t first = 2 * stride_ * block.outer;  // of a pair
  switch (phase_) {
    case Phase::kPack: {
      const auto* in = static_cast<const std::byte*>(segment.in) + tensor_at;
      return kernels_.Pack(Packed(block.outer, block.at), batch.wire, in, batch.dtype, count,
                           batch.prescale);
    }
    case Phase::kWiden:
      return kernels_.Unpack(Value(block.outer, block.at), values_dtype_,
                             Received(block.outer, block.at), batch.wire, count);
    case Phase::kMultiply: {
      const ScalarProducts more = kernels_.MultiplyAndSum(
          Value(first, block.at), Value(first + stride_, block.at), values_dtype_, count);
      ScalarProducts& sums = ProductsOf(block);
      sums.ab += more.ab;
      sums.aa += more.aa;
      sums.bb += more.bb;
      return;
    }
    case Phase::kCombine: {
      const ScalarProducts& sums = ProductsOf(block);
      return kernels_.Combine(Value(first, block.at), Value(first + stride_, block.at),
                              values_dtype_, count, FactorOf(sums.ab, sums.aa),
                              FactorOf(sums.ab, sums.bb));
    }
    case Phase::kNarrow: {
      std::byte* const result = Received(0, block.at);
      if (!widens_) return kernels_.Scale(result, result, batch.wire, count, batch.postscale, 1.0);
      return kernels_.Pack(result, batch.wire, Value(0, block.at), values_dtype_, count,
                           batch.postscale);
    }
    case Phase::kUnpack: {
      if (segment.out == nullptr) return;
      auto* out = static_cast<std::byte*>(segment.out) + tensor_at;
      return kernels_.Unpack(out, batch.dtype, Packed(block.outer, block.at), batch.wire, count);
    }
    case Phase::kScatter:
    case Phase::kAddUp:
    case Phase::kGather:
    case Phase::kDone:
      return;
  }
}

// The first (count % size) members have one element more.
Slice AdasumAllreduce::ShardOf(int64_t count, int64_t member) const {
  const auto size = static_cast<int64_t>(batch_->ranks.size());
  const int64_t rest = count % size;
  return {member * (count / size) + std::min(member, rest), count / size + (member < rest ? 1 : 0)};
}

std::byte* AdasumAllreduce::Packed(int64_t member, int64_t at) const {
  return packed_.data() + (starts_[static_cast<size_t>(member)] + at) * SizeOf(batch_->wire);
}

std::byte* AdasumAllreduce::Received(int64_t contribution, int64_t at) const {
  return received_.data() + (contribution * ShardElements() + at) * SizeOf(batch_->wire);
}

std::byte* AdasumAllreduce::Value(int64_t contribution, int64_t at) const {
  if (!widens_) return Received(contribution, at);
  return widened_.data() + (contribution * ShardElements() + at) * SizeOf(values_dtype_);
}

ScalarProducts& AdasumAllreduce::ProductsOf(const Block& block) {
  return products_[static_cast<size_t>(block.outer) * batch_->segments.size() + block.segment];
}

int64_t AdasumAllreduce::Pairs() const {
  return (contributions_ - stride_ + 2 * stride_ - 1) / (2 * stride_);
}

}  // namespace farandole
