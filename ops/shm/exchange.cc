#include "ops/shm/exchange.h"

#include <algorithm>

namespace farandole {
namespace {

constexpr int64_t kOneShotBytes = 16 * 1024;
constexpr int64_t kStepBytes = 256 * 1024;
/// Shards start at multiples of this, so that two members never write one cache line.
constexpr int64_t kShardAlign = 64;

}  // namespace

Exchange::Exchange(SharedSlots slots, const CpuKernels& kernels, const Clock& clock,
                   StorePolicyChooser chooser)
    : slots_(std::move(slots)), kernels_(kernels), clock_(clock), scratch_(kOneShotBytes) {
  choosers_.fill(chooser);
  if (slots_.my_index() == 0) slots_.RecommendStorePolicy(chooser.policy());
  static_assert(kInCacheBytes <= kOneShotBytes);
  present_.reserve(static_cast<size_t>(slots_.layout().members));
  sources_.resize(static_cast<size_t>(slots_.layout().members));
}

void Exchange::Begin(const Batch& batch) {
  batch_ = &batch;
  wire_ = TravelDType(batch);
  wire_bytes_ = SizeOf(wire_);
  spec_ = {wire_, batch.op, static_cast<int64_t>(batch.ranks.size()), batch.postscale};
  contributes_ = !IsAbsent(batch, batch.my_index);
  present_.clear();
  for (int i = 0; i < slots_.layout().members; ++i) {
    if (!IsAbsent(batch, i)) present_.push_back(i);
  }
  const int64_t tiny_bytes = std::min(kOneShotBytes, slots_.layout().slot_bytes);
  mode_ = IsVariableSize(batch.kind)                ? Mode::kVariableSize
          : batch.kind == OpKind::kBroadcast        ? Mode::kBroadcast
          : batch.count * wire_bytes_ <= tiny_bytes ? Mode::kOneShot
                                                    : Mode::kSharded;
  prescale_ = Reduces(batch.kind) ? batch.prescale : 1.0;
  reads_input_ = contributes_ && wire_ == batch.dtype && prescale_ == 1.0;
  const auto own = std::lower_bound(present_.begin(), present_.end(), batch.my_index);
  own_source_ = static_cast<size_t>(own - present_.begin());
  chunk_ended_ns_ = 0;
  if (slots_.my_index() == 0) RecommendStorePolicy();
  pack_cursor_ = reduce_cursor_ = out_cursor_ = SegmentCursor(batch.segments, batch.dtype);
  chunk_elements_ = slots_.layout().slot_bytes / wire_bytes_;
  step_bytes_ = std::min(batch.count, chunk_elements_) * wire_bytes_;
  first_ = packed_ = reduced_ = consumed_ = end_;
  if (mode_ == Mode::kVariableSize) return BeginVariableSize();
  end_ = first_ + static_cast<uint64_t>((batch.count + chunk_elements_ - 1) / chunk_elements_);
}

Exchange::State Exchange::Step() {
  int64_t budget = kStepBytes;
  bool moved = false;
  while (consumed_ < end_) {
    if (budget <= 0) return State::kMoved;
    if (!Advance()) return moved ? State::kMoved : State::kWaiting;
    if (!failure_.ok()) return State::kFailed;
    moved = true;
    budget -= step_bytes_;
  }
  return State::kDone;
}

bool Exchange::Advance() {
  switch (mode_) {
    case Mode::kSharded:
      return AdvanceSharded();
    case Mode::kOneShot:
      return AdvanceOneShot();
    case Mode::kBroadcast:
      return AdvanceBroadcast();
    case Mode::kVariableSize:
      return AdvanceVariableSize();
  }
  return false;
}

/// The latest stage that can go on goes first: what was just written is still in the cache.
bool Exchange::AdvanceSharded() {
  if (consumed_ < reduced_ && slots_.AllReached(Stage::kReduced, consumed_ + 1)) {
    CopyResultOut();
    slots_.Publish(Stage::kConsumed, ++consumed_);
    if (slots_.my_index() == 0) TimeChunk();
  } else if (reduced_ < packed_ && slots_.AllReached(Stage::kPacked, reduced_ + 1, present_)) {
    ReduceShard();
    slots_.Publish(Stage::kReduced, ++reduced_);
  } else if (packed_ < end_ && SlotIsFree()) {
    PackChunk();
    slots_.Publish(Stage::kPacked, ++packed_);
  } else {
    return false;
  }
  slots_.RingPeers();
  return true;
}

bool Exchange::AdvanceOneShot() {
  if (packed_ < end_) {
    if (!SlotIsFree()) return false;
    if (contributes_) PackRange(slots_.Slot(slots_.my_index(), packed_), {0, batch_->count});
    slots_.Publish(Stage::kPacked, ++packed_);
  } else {
    if (!slots_.AllReached(Stage::kPacked, packed_, present_)) return false;
    ReduceWholeBatch();
    slots_.Publish(Stage::kReduced, ++reduced_);
    slots_.Publish(Stage::kConsumed, ++consumed_);
  }
  slots_.RingPeers();
  return true;
}

/// The root's slots are the road; every other member reads them. Flags of the others only keep up.
bool Exchange::AdvanceBroadcast() {
  const bool is_root = batch_->my_index == batch_->root_index;
  if (is_root ? !SlotIsFree() : !slots_.Reached(batch_->root_index, Stage::kPacked, packed_ + 1)) {
    return false;
  }
  if (is_root) {
    ForwardFromRoot();
  } else {
    UnpackRange(slots_.Slot(batch_->root_index, packed_), {0, ChunkCount(packed_)});
  }
  slots_.Publish(Stage::kPacked, ++packed_);
  slots_.Publish(Stage::kReduced, ++reduced_);
  slots_.Publish(Stage::kConsumed, ++consumed_);
  slots_.RingPeers();
  return true;
}

bool Exchange::SlotIsFree() {
  const uint64_t slots = static_cast<uint64_t>(slots_.layout().slots);
  return packed_ < slots || slots_.AllReached(Stage::kConsumed, packed_ + 1 - slots);
}

/// What peers will read of this member's contribution: all of it but the own shard, unless that has
/// to be cast or scaled first.
void Exchange::PackChunk() {
  if (!contributes_) return;
  std::byte* slot = slots_.Slot(slots_.my_index(), packed_);
  const int64_t count = ChunkCount(packed_);
  if (!reads_input_) return PackRange(slot, {0, count});
  const Range own = ShardOf(slots_.my_index(), count);
  PackRange(slot, {0, own.begin});
  pack_cursor_.Skip(own.end - own.begin);
  PackRange(slot, {own.end, count});
}

void Exchange::PackRange(std::byte* slot, Range range) {
  for (int64_t at = range.begin; at < range.end;) {
    const Run run = pack_cursor_.Next(range.end - at);
    WriteSlot(slot + at * wire_bytes_, run);
    at += run.count;
  }
}

/// Casts and scales a run of the tensor into a slot.
void Exchange::WriteSlot(std::byte* to, const Run& run) {
  const bool streams = slots_.store_policy() == StorePolicy::kStreamed && mode_ != Mode::kOneShot;
  if (!streams) {
    return kernels_.Pack(to, wire_, run.in, batch_->dtype, run.count, prescale_);
  }
  if (reads_input_) return kernels_.Stream(to, run.in, run.count * wire_bytes_);
  const int64_t block = kInCacheBytes / wire_bytes_;
  for (int64_t at = 0; at < run.count; at += block) {
    const int64_t count = std::min(block, run.count - at);
    const std::byte* from = run.in + at * SizeOf(batch_->dtype);
    kernels_.Pack(scratch_.data(), wire_, from, batch_->dtype, count, prescale_);
    kernels_.Stream(to + at * wire_bytes_, scratch_.data(), count * wire_bytes_);
  }
}

void Exchange::ReduceShard() {
  const int64_t count = ChunkCount(reduced_);
  const Range shard = ShardOf(slots_.my_index(), count);
  std::byte* slot = slots_.Slot(slots_.my_index(), reduced_);
  const int64_t block = kInCacheBytes / wire_bytes_;
  reduce_cursor_.Skip(shard.begin);
  for (int64_t at = shard.begin; at < shard.end;) {
    Run run;
    run.count = std::min(block, shard.end - at);
    if (reads_input_) run = reduce_cursor_.Next(run.count);
    ReduceRun(slot + at * wire_bytes_, at, run);
    at += run.count;
  }
  reduce_cursor_.Skip(count - shard.end);
}

/// Reduces elements from `at` on into the own slot; and into the tensor, if `own` says where.
void Exchange::ReduceRun(std::byte* to, int64_t at, const Run& own) {
  const std::span<const void*> sources = Sources(reduced_, at);
  if (own.in != nullptr) sources[own_source_] = own.in;
  const bool streams = slots_.store_policy() == StorePolicy::kStreamed;
  std::byte* result = streams ? scratch_.data() : to;
  kernels_.Reduce(result, sources, own.count, spec_);
  if (own.out != nullptr) kernels_.Unpack(own.out, wire_, result, wire_, own.count);
  if (streams) kernels_.Stream(to, result, own.count * wire_bytes_);
}

/// Member 0 times chunks that follow one another in a batch, and tells all how to write slots.
void Exchange::TimeChunk() {
  const int64_t now_ns = clock_.NowNs();
  if (chunk_ended_ns_ != 0 && consumed_ < end_) chooser().OnChunk(now_ns - chunk_ended_ns_);
  chunk_ended_ns_ = now_ns;
  RecommendStorePolicy();
}

void Exchange::RecommendStorePolicy() {
  if (slots_.store_policy() != chooser().policy()) slots_.RecommendStorePolicy(chooser().policy());
}

void Exchange::CopyResultOut() {
  const int64_t count = ChunkCount(consumed_);
  for (int member = 0; member < slots_.layout().members; ++member) {
    const Range shard = ShardOf(member, count);
    if (member == slots_.my_index() && reads_input_) {
      out_cursor_.Skip(shard.end - shard.begin);  // ReduceRun did it
    } else {
      UnpackRange(slots_.Slot(member, consumed_), shard);
    }
  }
}

void Exchange::UnpackRange(const std::byte* slot, Range range) {
  for (int64_t at = range.begin; at < range.end;) {
    const Run run = out_cursor_.Next(range.end - at);
    if (run.out != nullptr) {
      kernels_.Unpack(run.out, batch_->dtype, slot + at * wire_bytes_, wire_, run.count);
    }
    at += run.count;
  }
}

void Exchange::ReduceWholeBatch() {
  for (int64_t at = 0; at < batch_->count;) {
    const Run run = out_cursor_.Next(batch_->count - at);
    const bool casts = wire_ != batch_->dtype;
    void* result = casts ? scratch_.data() : run.out;
    if (run.out != nullptr) {
      kernels_.Reduce(result, Sources(reduced_, at), run.count, spec_);
      if (casts) kernels_.Unpack(run.out, batch_->dtype, result, wire_, run.count);
    }
    at += run.count;
  }
}

void Exchange::ForwardFromRoot() {
  std::byte* slot = slots_.Slot(slots_.my_index(), packed_);
  const int64_t count = ChunkCount(packed_);
  for (int64_t at = 0; at < count;) {
    const Run run = pack_cursor_.Next(count - at);
    WriteSlot(slot + at * wire_bytes_, run);
    if (run.out != nullptr) kernels_.Scale(run.out, run.in, batch_->dtype, run.count, 1.0, 1.0);
    at += run.count;
  }
}

int64_t Exchange::ChunkCount(uint64_t chunk) const {
  const int64_t begin = static_cast<int64_t>(chunk - first_) * chunk_elements_;
  return std::min(chunk_elements_, batch_->count - begin);
}

Exchange::Range Exchange::ShardOf(int member, int64_t chunk_count) const {
  const int64_t members = slots_.layout().members;
  const int64_t each = (chunk_count + members - 1) / members;
  const int64_t aligned = (each + kShardAlign - 1) / kShardAlign * kShardAlign;
  return {std::min(chunk_count, member * aligned), std::min(chunk_count, (member + 1) * aligned)};
}

std::span<const void*> Exchange::Sources(uint64_t chunk, int64_t offset) {
  for (size_t k = 0; k < present_.size(); ++k) {
    sources_[k] = slots_.Slot(present_[k], chunk) + offset * wire_bytes_;
  }
  return std::span(sources_).first(present_.size());
}

}  // namespace farandole
