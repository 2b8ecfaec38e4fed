#include "ops/hierarchical/plane.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "ops/cpu/quantize.h"
#include "ops/hierarchical/slice_plan.h"

namespace farandole {
namespace {

// After so many bytes the engine relays messages.
constexpr int64_t kStepBytes = 256 * 1024;
// A quantized shard has up to four times as many elements, so that as many bytes cross at a time;
// where several ranks of a host share the link, their shards cross at the same time.
int64_t QuantizedShardBytes(int64_t shard_bytes, const Topology& topology) {
  return shard_bytes * std::clamp<int64_t>(8 / topology.shards, 1, 4);
}

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Free>;

Memory Allocate(int64_t bytes) {
  return Memory(static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
}

}  // namespace

struct HierarchicalPlane::Set final : CpuSet {
  Set(uint32_t set, std::span<const int> members_ranks, int index, const CpuKernels& cpu,
      const Options& options)
      : CpuSet(set, members_ranks, index, cpu), topology(members_ranks, index, options.memory) {
    for (const int p : topology.mine()) local_ranks.push_back(ranks[static_cast<size_t>(p)]);
    if (!topology.has_shard()) return;
    for (const std::vector<int>& host : topology.host) {
      const int p = host[static_cast<size_t>(topology.my_local)];
      cross_ranks.push_back(ranks[static_cast<size_t>(p)]);
    }
  }

  /// Memory for slices.
  struct Staging {
    int64_t shard_bytes = 0;
    Memory packed;  // a slice on its way into the host's collectives, or out of them
    std::array<Memory, SlicePlan::kAhead> shards;
  };
  Status Reserve(Staging& staging, int64_t shard_bytes) const;

  const Topology topology;
  std::vector<int> local_ranks;  // of my host
  std::vector<int> cross_ranks;  // by host: the member with my shard; empty if I have none
  Staging usual;
  Staging quantized;  // empty until a batch is
};

Status HierarchicalPlane::Set::Reserve(Staging& staging, int64_t shard_bytes) const {
  const int64_t slice = shard_bytes * topology.shards;
  bool allocated = true;
  for (Memory& memory : staging.shards) allocated &= (memory = Allocate(shard_bytes)) != nullptr;
  if (!topology.alone()) allocated &= (staging.packed = Allocate(slice)) != nullptr;
  staging.shard_bytes = shard_bytes;
  if (allocated) return {};
  staging = {};
  return ResourceExhausted("cannot allocate " +
                           std::to_string(slice + SlicePlan::kAhead * shard_bytes) +
                           " bytes for process set " + std::to_string(uid));
}

/// Runs the collectives of a batch on the local plane in the order of the SlicePlan; those between
/// hosts start in the order of the slices.
class HierarchicalPlane::Collective final : public CpuCollective {
 public:
  explicit Collective(const Options& options) : options_(options) {}

 private:
  enum class Phase : uint8_t { kNone, kPack, kScatter, kGather, kUnpack };

  void Begin() override;
  Progress Advance() override;
  void Cancel() override;
  void DescribeCross(InnerBatch& cross) const;
  bool StepCross();
  Status StartCross(int64_t slice, DataPlane& plane);
  bool StepLocal();
  bool NextPhase();
  void BeginScatter();
  void BeginGather();
  void Pack();
  void Scatter(const std::byte* in);
  void Scattered();
  void DivideByTensor(int64_t slice, const Slice& shard);
  void Gather(std::byte* out);
  void Unpack();
  void Gathered();
  void StartLocal(OpKind kind, std::span<const int> absent, int64_t slice);
  bool StepInner(InnerBatch& inner);

  Set& set() const { return static_cast<Set&>(*set_); }
  const Topology& topology() const { return set().topology; }
  std::byte* Shard(int64_t slice) const {
    return staging_->shards[static_cast<size_t>(slice % SlicePlan::kAhead)].get();
  }
  /// Where a slice lies end to end. A rank that is alone on its host has all of it in its shard.
  std::byte* Packed(int64_t slice) const {
    return topology().alone() ? Shard(slice) : staging_->packed.get();
  }
  InnerBatch& Cross(int64_t slice) {
    return cross_[static_cast<size_t>(slice % SlicePlan::kAhead)];
  }

  const Options& options_;

  // Of the batch.
  int64_t width_ = 1;  // elements of the inner batches in one of wire_
  bool takes_result_ = false;
  bool quantized_ = false;  // between hosts
  const Set::Staging* staging_ = nullptr;
  bool host_contributes_ = false;  // some member of my host does
  SegmentCursor in_;
  SegmentCursor residuals_;
  SegmentCursor out_;
  std::vector<int> local_absent_;
  std::vector<int> cross_absent_;
  std::vector<SlotRange> cross_slots_;  // by host; empty: rank order
  std::vector<int64_t> splits_;

  // Slices: how many have passed each stage.
  SlicePlan plan_;
  int64_t scattered_ = 0;
  int64_t started_ = 0;  // between hosts
  int64_t crossed_ = 0;
  int64_t gathered_ = 0;
  Phase phase_ = Phase::kNone;
  int64_t done_elements_ = 0;  // packed or unpacked of the current slice
  InnerBatch local_;           // the reduce-scatter or allgather of the current slice
  std::array<InnerBatch, SlicePlan::kAhead> cross_;  // by slice modulo kAhead
  // Of those, where quantized: a segment for each tensor that the shard is of.
  std::array<std::vector<Segment>, SlicePlan::kAhead> shards_;

  int64_t poll_after_ns_ = kByDoorbell;  // of the current step
};

void HierarchicalPlane::Collective::Begin() {
  const Batch& batch = *batch_;
  quantized_ = IsQuantized(batch);
  staging_ = quantized_ ? &set().quantized : &set().usual;
  width_ = batch.kind == OpKind::kBroadcast ? wire_bytes_ : 1;
  takes_result_ = std::ranges::any_of(batch.segments, [](const Segment& s) { return s.out; });
  const auto contributes = [&](int index) { return Contributes(batch, index); };
  local_absent_.clear();
  for (size_t i = 0; i < topology().mine().size(); ++i) {
    if (!contributes(topology().mine()[i])) local_absent_.push_back(static_cast<int>(i));
  }
  host_contributes_ = local_absent_.size() < topology().mine().size();
  cross_absent_.clear();
  for (size_t h = 0; h < topology().host.size(); ++h) {
    if (std::ranges::none_of(topology().host[h], contributes)) {
      cross_absent_.push_back(static_cast<int>(h));
    }
  }
  cross_slots_.clear();
  for (size_t h = 0; h < topology().host.size() && !batch.slots.empty(); ++h) {
    cross_slots_.push_back(SlotsOf(batch, topology().host[h]));
  }
  in_ = residuals_ = out_ = SegmentCursor(batch.segments, batch.dtype);
  plan_ = SlicePlan(batch.count, staging_->shard_bytes / wire_bytes_, topology());
  scattered_ = started_ = crossed_ = gathered_ = 0;
  phase_ = Phase::kNone;
  for (InnerBatch& cross : cross_) DescribeCross(cross);
}

/// What all slices have in common. The bytes of a broadcast are reduced as they are: of its one
/// contribution any bitwise op gives itself.
void HierarchicalPlane::Collective::DescribeCross(InnerBatch& cross) const {
  const bool broadcast = batch_->kind == OpKind::kBroadcast;
  cross.Describe(*batch_, batch_->kind, broadcast ? DType::kUint8 : wire_);
  cross.batch.op = broadcast ? ReduceOp::kBitOr : batch_->op;
  cross.batch.ranks = set().cross_ranks;
  cross.batch.my_index = topology().my_host;
  if (broadcast) {
    cross.batch.root_index = topology().host_of[static_cast<size_t>(batch_->root_index)];
    return;
  }
  cross.batch.absent = cross_absent_;
  if (quantized_) cross.batch.wire_format = WireFormat::kInt8;
  cross.batch.postscale = batch_->postscale;
  cross.batch.slots = cross_slots_;
  if (batch_->op != ReduceOp::kAverage) return;
  if (!cross_slots_.empty()) {
    cross.batch.divisor = members();  // hosts send sums
    return;
  }
  cross.batch.prescale = topology().WeightOf(static_cast<size_t>(topology().my_host));
}

/// The link first: what it waits for is what the batch waits for.
Progress HierarchicalPlane::Collective::Advance() {
  poll_after_ns_ = kByDoorbell;
  const bool crossed = StepCross();
  const bool moved = failure_.ok() && StepLocal();
  if (gathered_ == plan_.slices()) return Progress::Done();
  return crossed || moved ? Progress::Moved() : Progress::Waiting(poll_after_ns_);
}

void HierarchicalPlane::Collective::Cancel() {
  local_.Abandon();
  for (InnerBatch& cross : cross_) cross.Abandon();
}

/// One slice at a time on each plane, so that none has to queue the next; that is started in the
/// step in which the one before ends.
bool HierarchicalPlane::Collective::StepCross() {
  bool moved = false;
  for (int64_t slice = crossed_; slice < started_ && failure_.ok(); ++slice) {
    if (Cross(slice).operation != nullptr) moved |= StepInner(Cross(slice));
  }
  while (crossed_ < started_ && Cross(crossed_).operation == nullptr) ++crossed_;
  const auto planes = static_cast<int64_t>(options_.cross.size());
  const auto is_free = [&] {
    return started_ < planes || Cross(started_ - planes).operation == nullptr;
  };
  while (failure_.ok() && started_ < scattered_ && is_free()) {
    const int64_t slice = started_++;
    failure_ = StartCross(slice, *options_.cross[static_cast<size_t>(slice % planes)]);
    moved = true;
  }
  return moved;
}

Status HierarchicalPlane::Collective::StartCross(int64_t slice, DataPlane& plane) {
  InnerBatch& cross = Cross(slice);
  if (cross.segment.count == 0) return {};
  if (!quantized_) return cross.Start(plane, cross.segment);
  cross.batch.segments = shards_[static_cast<size_t>(slice % SlicePlan::kAhead)];
  cross.batch.count = cross.segment.count;
  return cross.Start(plane);
}

bool HierarchicalPlane::Collective::StepLocal() {
  switch (phase_) {
    case Phase::kNone:
      return NextPhase();
    case Phase::kPack:
      Pack();
      return true;
    case Phase::kScatter:
    case Phase::kGather:
      if (!StepInner(local_)) return false;
      if (local_.operation == nullptr) phase_ == Phase::kScatter ? Scattered() : Gathered();
      return true;
    case Phase::kUnpack:
      Unpack();
      return true;
  }
  return false;
}

bool HierarchicalPlane::Collective::NextPhase() {
  const SlicePlan::Next next = plan_.After(scattered_, crossed_, gathered_);
  done_elements_ = 0;
  if (next == SlicePlan::Next::kScatter) BeginScatter();
  if (next == SlicePlan::Next::kGather) BeginGather();
  return next != SlicePlan::Next::kNothing;
}

/// A slice that lies in one tensor and is neither cast nor scaled needs no packing.
void HierarchicalPlane::Collective::BeginScatter() {
  if (!contributes_) return Scatter(nullptr);
  const int64_t count = plan_.CountOf(scattered_);
  SegmentCursor ahead = in_;
  const Run run = ahead.Next(count);
  if (!casts_ && run.count == count) {
    in_ = ahead;
    return Scatter(run.in);
  }
  phase_ = Phase::kPack;
}

void HierarchicalPlane::Collective::Pack() {
  std::byte* const packed = Packed(scattered_);
  const int64_t left = plan_.CountOf(scattered_) - done_elements_;
  const int64_t now = std::min(left, kStepBytes / wire_bytes_);
  PackRuns(kernels(), *batch_, in_, packed + done_elements_ * wire_bytes_, now);
  done_elements_ += now;
  if (now == left) Scatter(packed);
}

/// `in`: this member's contribution to the slice, or nullptr.
void HierarchicalPlane::Collective::Scatter(const std::byte* in) {
  phase_ = Phase::kScatter;
  local_.segment = {in, Shard(scattered_), plan_.CountOf(scattered_) * width_};
  if (topology().alone() || !host_contributes_) return Scattered();
  StartLocal(OpKind::kReducescatter, local_absent_, scattered_);
}

/// My shard of the slice may cross; it is empty if I have none.
void HierarchicalPlane::Collective::Scattered() {
  phase_ = Phase::kNone;
  const int64_t slice = scattered_++;
  const void* in = topology().alone() ? local_.segment.in : Shard(slice);
  if (!host_contributes_) in = nullptr;
  const Slice mine = plan_.ShardOf(topology().my_local, slice);
  Cross(slice).segment = {in, Shard(slice), mine.count * width_};
  if (quantized_) DivideByTensor(slice, mine);
}

/// What a rank's roundings leave over is kept by tensor.
void HierarchicalPlane::Collective::DivideByTensor(int64_t slice, const Slice& shard) {
  const Segment whole = Cross(slice).segment;
  std::vector<Segment>& parts = shards_[static_cast<size_t>(slice % SlicePlan::kAhead)];
  parts.clear();
  residuals_.Skip(shard.begin);
  for (int64_t at = 0; at < shard.count;) {
    const Run run = residuals_.Next(shard.count - at);
    Segment part{nullptr, static_cast<float*>(whole.out) + at, run.count, run.residual};
    if (whole.in != nullptr) part.in = static_cast<const float*>(whole.in) + at;
    parts.push_back(part);
    at += run.count;
  }
  residuals_.Skip(plan_.CountOf(slice) - shard.begin - shard.count);
}

void HierarchicalPlane::Collective::BeginGather() {
  if (!takes_result_) return Gather(nullptr);
  const int64_t count = plan_.CountOf(gathered_);
  SegmentCursor ahead = out_;
  const Run run = ahead.Next(count);
  if (wire_ == batch_->dtype && run.count == count && !topology().alone()) {
    out_ = ahead;
    return Gather(run.out);
  }
  Gather(Packed(gathered_));
}

/// `out`: where the slice goes, or nullptr.
void HierarchicalPlane::Collective::Gather(std::byte* out) {
  phase_ = Phase::kGather;
  local_.segment = {Shard(gathered_), out, plan_.CountOf(gathered_) * width_};
  if (topology().alone()) return Gathered();
  StartLocal(OpKind::kAllgather, {}, gathered_);
}

void HierarchicalPlane::Collective::Gathered() {
  if (local_.segment.out != nullptr && local_.segment.out == Packed(gathered_)) {
    phase_ = Phase::kUnpack;
    return;
  }
  phase_ = Phase::kNone;
  ++gathered_;
}

void HierarchicalPlane::Collective::Unpack() {
  const int64_t left = plan_.CountOf(gathered_) - done_elements_;
  const int64_t now = std::min(left, kStepBytes / wire_bytes_);
  UnpackRuns(kernels(), *batch_, out_, Packed(gathered_) + done_elements_ * wire_bytes_, now);
  done_elements_ += now;
  if (now < left) return;
  phase_ = Phase::kNone;
  ++gathered_;
}

void HierarchicalPlane::Collective::StartLocal(OpKind kind, std::span<const int> absent,
                                               int64_t slice) {
  splits_.clear();
  for (size_t i = 0; i < set().local_ranks.size(); ++i) {
    splits_.push_back(plan_.ShardOf(static_cast<int>(i), slice).count * width_);
  }
  local_.Describe(*batch_, kind, cross_[0].batch.dtype);
  local_.batch.op = cross_slots_.empty() ? cross_[0].batch.op : ReduceOp::kSum;
  if (kind == OpKind::kReducescatter && !cross_slots_.empty()) {
    const std::vector<int>& mine = topology().mine();
    local_.batch.slots = batch_->slots.subspan(static_cast<size_t>(mine.front()), mine.size());
  }
  local_.batch.ranks = set().local_ranks;
  local_.batch.my_index = topology().my_local;
  local_.batch.absent = absent;
  local_.batch.splits = splits_;
  failure_ = local_.Start(*options_.local, local_.segment);
}

/// @return Whether it moved. Its operation is gone when it has ended.
bool HierarchicalPlane::Collective::StepInner(InnerBatch& inner) {
  const Progress progress = inner.operation->Step();
  if (progress.state == Progress::State::kWaiting) {
    if (poll_after_ns_ == kByDoorbell ||
        (progress.poll_after_ns != kByDoorbell && progress.poll_after_ns < poll_after_ns_)) {
      poll_after_ns_ = progress.poll_after_ns;
    }
    return false;
  }
  if (progress.state == Progress::State::kMoved) return true;
  inner.operation = nullptr;
  failure_ = progress.status;
  return true;
}

HierarchicalPlane::HierarchicalPlane(Options options, const CpuKernels& kernels)
    : options_(std::move(options)), kernels_(kernels) {}

HierarchicalPlane::~HierarchicalPlane() = default;

/// An error leaves sets behind in the planes: it is final.
Status HierarchicalPlane::AddSet(uint32_t uid, std::span<const int> ranks, int my_index) {
  auto set = std::make_unique<Set>(uid, ranks, my_index, kernels_, options_);
  const Topology& topology = set->topology;
  FARANDOLE_RETURN_IF_ERROR(options_.flat->AddSet(uid, ranks, my_index));
  if (topology.has_shard()) {
    for (DataPlane* const cross : options_.cross) {
      FARANDOLE_RETURN_IF_ERROR(cross->AddSet(uid, set->cross_ranks, topology.my_host));
    }
  }
  if (!topology.alone()) {
    FARANDOLE_RETURN_IF_ERROR(options_.local->AddSet(uid, set->local_ranks, topology.my_local));
  }
  FARANDOLE_RETURN_IF_ERROR(
      set->Reserve(set->usual, SlicePlan::ShardBytes(options_.shard_bytes, topology)));
  sets_.Add(std::move(set));
  return {};
}

void HierarchicalPlane::RemoveSet(uint32_t uid) {
  const Set* const set = sets_.Find(uid);
  if (set == nullptr) return;
  options_.flat->RemoveSet(uid);
  if (set->topology.has_shard()) {
    for (DataPlane* const cross : options_.cross) cross->RemoveSet(uid);
  }
  if (!set->topology.alone()) options_.local->RemoveSet(uid);
  sets_.Remove(uid);
}

Result<PlaneOperation*> HierarchicalPlane::Start(const Batch& batch) {
  Result<Set*> set = sets_.For(batch);
  if (!set.ok()) return set.status();
  const Path path = PathOf(batch, set.value()->topology);
  if (path == Path::kFlat) return options_.flat->Start(batch);
  if (path == Path::kOneShot) {
    OneShotAllreduce* const one_shot = one_shots_.Take(
        [this] { return std::make_unique<OneShotAllreduce>(kernels_, one_shots_); });
    FARANDOLE_RETURN_IF_ERROR(one_shot->Begin(batch, set.value()->topology, *options_.flat));
    return one_shot;
  }
  Set::Staging& quantized = set.value()->quantized;
  if (IsQuantized(batch) && quantized.shard_bytes == 0) {
    const int64_t usual = set.value()->usual.shard_bytes;
    const int64_t shard_bytes = QuantizedShardBytes(usual, set.value()->topology);
    FARANDOLE_RETURN_IF_ERROR(set.value()->Reserve(quantized, shard_bytes));
  }
  return collectives_.Take([this] { return std::make_unique<Collective>(options_); })
      ->Enqueue(batch, *set.value(), collectives_);
}

}  // namespace farandole
