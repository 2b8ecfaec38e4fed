#include "ops/hierarchical/plane.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "ops/cpu/batch.h"
#include "ops/cpu/partition.h"

namespace farandole {
namespace {

// Slices whose shards lie in memory at a time. With two the link would wait whenever a host is late
// with the slice after the one that travels.
constexpr int64_t kAhead = 3;
// After so many bytes the engine relays messages.
constexpr int64_t kStepBytes = 256 * 1024;
// Contributions of all members together that are sent to all of them at once: then the latency of
// three rounds counts more than the bytes on the link.
constexpr int64_t kOneShotBytes = 64 * 1024;
// Nothing rings when the batch before ends, so the engine asks again.
constexpr int64_t kGentlePollNs = 50'000;

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Free>;

Memory Allocate(int64_t bytes) {
  return Memory(static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
}

/// A message between hosts is a shard's part for one host, so shards are longer where hosts are
/// many; but at most 4 times as long, and less on hosts of many members, each of which packs whole
/// slices.
int64_t ShardBytes(int64_t least_bytes, const Topology& topology) {
  constexpr int64_t kHostsPerShard = 16;
  constexpr int64_t kMostShards = 64;  // of a slice, counted in the least length
  const auto hosts = static_cast<int64_t>(topology.host.size());
  const int64_t most = std::clamp<int64_t>(kMostShards / topology.shards, 1, 4);
  return least_bytes * std::clamp<int64_t>((hosts + kHostsPerShard - 1) / kHostsPerShard, 1, most);
}

/// How a batch is run; alike on all members.
enum class Path : uint8_t { kFlat, kComposed, kOneShot };

/// Flat: integers whose result does not follow from the hosts' results in their own type; and what
/// is tiny and has the same bits in any order.
Path PathOf(const Batch& batch) {
  const bool broadcast = batch.kind == OpKind::kBroadcast;
  if (!broadcast && batch.kind != OpKind::kAllreduce) return Path::kFlat;
  const int64_t bytes = batch.count * SizeOf(TravelDType(batch));
  const bool tiny = bytes * static_cast<int64_t>(batch.ranks.size()) <= kOneShotBytes;
  if (broadcast) return tiny ? Path::kFlat : Path::kComposed;
  if (IsFloating(batch.dtype)) return tiny ? Path::kOneShot : Path::kComposed;
  const bool exact = batch.op != ReduceOp::kAverage && batch.postscale == 1.0;
  return exact && !tiny ? Path::kComposed : Path::kFlat;
}

}  // namespace

struct HierarchicalPlane::Set {
  Set(std::span<const int> ranks, int my_index, const Options& options)
      : topology(ranks, my_index, options.memory),
        shard_bytes(ShardBytes(options.shard_bytes, topology)) {
    for (const int p : topology.mine()) local_ranks.push_back(ranks[static_cast<size_t>(p)]);
    if (!topology.has_shard()) return;
    for (const std::vector<int>& host : topology.host) {
      const int p = host[static_cast<size_t>(topology.my_local)];
      cross_ranks.push_back(ranks[static_cast<size_t>(p)]);
    }
  }

  const Topology topology;
  const int64_t shard_bytes;
  std::vector<int> local_ranks;  // of my host
  std::vector<int> cross_ranks;  // by host: the member with my shard; empty if I have none
  Memory packed;                 // a slice on its way into the host's collectives, or out of them
  std::array<Memory, kAhead> shards;
  std::vector<Operation*> queue;  // started and not ended; the first one runs
  bool broken = false;            // by a failure or an Abandon; for good
};

/// Each member of a host starts the same collectives on the local plane in the same order, one at a
/// time: the reduce-scatters of the first kAhead slices, then an allgather and a reduce-scatter in
/// turn. Those between hosts start in the order of the slices.
class HierarchicalPlane::Operation final : public PlaneOperation {
 public:
  explicit Operation(HierarchicalPlane& plane) : plane_(plane) {}

  void Reset(Set& set, const Batch& batch) {
    set_ = &set;
    batch_ = &batch;
    begun_ = false;
  }
  Progress Step() override;
  void Abandon() override;
  Set& set() const { return *set_; }

 private:
  enum class Phase : uint8_t { kNone, kPack, kScatter, kGather, kUnpack };
  /// A collective of a plane, and what it points to.
  struct Part {
    Batch batch;
    Segment segment;
    PlaneOperation* operation = nullptr;  // while it runs
  };

  void Begin();
  void DescribeParts();
  bool StepCross();
  bool StepLocal();
  bool NextPhase();
  void BeginScatter();
  void BeginGather();
  void Pack();
  void Scatter(const std::byte* in);
  void Scattered();
  void Gather(std::byte* out);
  void Unpack();
  void Gathered();
  void StartPart(DataPlane& plane, Part& part);
  bool StepPart(Part& part);
  void DropParts();

  int64_t SliceCount(int64_t slice) const {
    return std::min(slice_elements_, batch_->count - slice * slice_elements_);
  }
  /// Of a slice; a host has more members than shards where another one has fewer.
  Slice ShardOfLocal(int local, int64_t slice) const {
    const int shards = set_->topology.shards;
    const int64_t count = SliceCount(slice);
    return local < shards ? ShardOf(count, shards, local, kAnyElementAlign) : Slice{count, 0};
  }
  Slice MyShard(int64_t slice) const { return ShardOfLocal(set_->topology.my_local, slice); }
  std::byte* Shard(int64_t slice) const {
    return set_->shards[static_cast<size_t>(slice % kAhead)].get();
  }
  /// Where a slice lies end to end. A rank that is alone on its host has all of it in its shard.
  std::byte* Packed(int64_t slice) const {
    return set_->topology.alone() ? Shard(slice) : set_->packed.get();
  }
  Part& Cross(int64_t slice) { return cross_[static_cast<size_t>(slice % kAhead)]; }
  void SetSplits(int64_t slice);

  HierarchicalPlane& plane_;
  Set* set_ = nullptr;
  const Batch* batch_ = nullptr;
  bool begun_ = false;

  // Of the batch.
  DType travel_ = DType::kFloat32;
  int64_t element_bytes_ = 4;  // of travel_
  int64_t width_ = 1;          // elements of the parts in one of travel_
  double prescale_ = 1.0;
  bool casts_ = false;  // contributions change before they travel
  bool contributes_ = false;
  bool takes_result_ = false;
  bool host_contributes_ = false;  // some member of my host does
  SegmentCursor in_;
  SegmentCursor out_;
  std::vector<int> local_absent_;
  std::vector<int> cross_absent_;
  std::vector<int64_t> splits_;

  // Slices: how many there are, and how many have passed each stage.
  int64_t slice_elements_ = 0;
  int64_t slices_ = 0;
  int64_t scattered_ = 0;
  int64_t started_ = 0;  // between hosts
  int64_t crossed_ = 0;
  int64_t gathered_ = 0;
  Phase phase_ = Phase::kNone;
  int64_t done_elements_ = 0;  // packed or unpacked of the current slice
  Part scatter_;
  Part gather_;
  std::array<Part, kAhead> cross_;  // by slice modulo kAhead

  // Of the current step.
  int64_t poll_after_ns_ = kByDoorbell;
  Status failure_;
};

/// With the first step, when earlier batches of the set have ended and their memory is free.
void HierarchicalPlane::Operation::Begin() {
  begun_ = true;
  const Batch& batch = *batch_;
  const Topology& topology = set_->topology;
  const bool broadcast = batch.kind == OpKind::kBroadcast;
  travel_ = TravelDType(batch);
  element_bytes_ = SizeOf(travel_);
  width_ = broadcast ? element_bytes_ : 1;
  prescale_ = broadcast ? 1.0 : batch.prescale;
  casts_ = travel_ != batch.dtype || prescale_ != 1.0;
  const auto contributes = [&](int position) {
    return broadcast ? position == batch.root_index : !IsAbsent(batch, position);
  };
  contributes_ = contributes(batch.my_index);
  takes_result_ = std::ranges::any_of(batch.segments, [](const Segment& s) { return s.out; });
  local_absent_.clear();
  for (size_t i = 0; i < topology.mine().size(); ++i) {
    if (!contributes(topology.mine()[i])) local_absent_.push_back(static_cast<int>(i));
  }
  host_contributes_ = local_absent_.size() < topology.mine().size();
  cross_absent_.clear();
  for (size_t h = 0; h < topology.host.size(); ++h) {
    if (std::ranges::none_of(topology.host[h], contributes)) {
      cross_absent_.push_back(static_cast<int>(h));
    }
  }
  in_ = out_ = SegmentCursor(batch.segments, batch.dtype);
  slice_elements_ = set_->shard_bytes / element_bytes_ * topology.shards;
  slices_ = (batch.count + slice_elements_ - 1) / slice_elements_;
  scattered_ = started_ = crossed_ = gathered_ = 0;
  phase_ = Phase::kNone;
  failure_ = Status();
  DescribeParts();
}

/// What all slices have in common. The bytes of a broadcast are reduced as they are: of its one
/// contribution any bitwise op gives itself.
void HierarchicalPlane::Operation::DescribeParts() {
  const Topology& topology = set_->topology;
  const bool broadcast = batch_->kind == OpKind::kBroadcast;
  Batch common;
  common.number = batch_->number;
  common.index = batch_->index;
  common.set = batch_->set;
  common.op = broadcast ? ReduceOp::kBitOr : batch_->op;
  common.dtype = common.wire = broadcast ? DType::kUint8 : travel_;

  scatter_.batch = common;
  scatter_.batch.kind = OpKind::kReducescatter;
  scatter_.batch.ranks = set_->local_ranks;
  scatter_.batch.my_index = topology.my_local;
  gather_.batch = scatter_.batch;
  scatter_.batch.absent = local_absent_;
  gather_.batch.kind = OpKind::kAllgather;
  for (Part& cross : cross_) {
    cross.batch = common;
    cross.batch.kind = batch_->kind;
    cross.batch.ranks = set_->cross_ranks;
    cross.batch.my_index = topology.my_host;
    if (broadcast) {
      cross.batch.root_index = topology.host_of[static_cast<size_t>(batch_->root_index)];
    } else {
      cross.batch.absent = cross_absent_;
      if (batch_->op == ReduceOp::kAverage)
        cross.batch.prescale = topology.WeightOf(static_cast<size_t>(topology.my_host));
      cross.batch.postscale = batch_->postscale;
    }
  }
}

/// The link first: what it waits for is what the batch waits for.
Progress HierarchicalPlane::Operation::Step() {
  if (set_->broken) {
    plane_.Finish(this);
    return Progress::Failed(Aborted("an earlier batch of this process set was abandoned"));
  }
  if (set_->queue.front() != this) return Progress::Waiting(kGentlePollNs);
  if (!begun_) Begin();
  poll_after_ns_ = kByDoorbell;
  const bool crossed = StepCross();
  const bool moved = failure_.ok() && StepLocal();
  if (!failure_.ok()) {
    const Status failure = failure_;
    Abandon();
    return Progress::Failed(failure);
  }
  if (gathered_ == slices_) {
    plane_.Finish(this);
    return Progress::Done();
  }
  return crossed || moved ? Progress::Moved() : Progress::Waiting(poll_after_ns_);
}

void HierarchicalPlane::Operation::Abandon() {
  set_->broken = true;
  DropParts();
  plane_.Finish(this);
}

void HierarchicalPlane::Operation::DropParts() {
  const auto drop = [](Part& part) {
    if (part.operation != nullptr) part.operation->Abandon();
    part.operation = nullptr;
  };
  drop(scatter_);
  drop(gather_);
  for (Part& cross : cross_) drop(cross);
}

/// One slice at a time on each plane, so that none has to queue the next; that is started in the
/// step in which the one before ends.
bool HierarchicalPlane::Operation::StepCross() {
  bool moved = false;
  for (int64_t slice = crossed_; slice < started_ && failure_.ok(); ++slice) {
    if (Cross(slice).operation != nullptr) moved |= StepPart(Cross(slice));
  }
  while (crossed_ < started_ && Cross(crossed_).operation == nullptr) ++crossed_;
  const auto planes = static_cast<int64_t>(plane_.options_.cross.size());
  const auto is_free = [&] {
    return started_ < planes || Cross(started_ - planes).operation == nullptr;
  };
  while (failure_.ok() && started_ < scattered_ && is_free()) {
    Part& cross = Cross(started_);
    DataPlane& plane = *plane_.options_.cross[static_cast<size_t>(started_++ % planes)];
    if (cross.segment.count > 0) StartPart(plane, cross);
    moved = true;
  }
  return moved;
}

bool HierarchicalPlane::Operation::StepLocal() {
  switch (phase_) {
    case Phase::kNone:
      return NextPhase();
    case Phase::kPack:
      Pack();
      return true;
    case Phase::kScatter:
      if (!StepPart(scatter_)) return false;
      if (scatter_.operation == nullptr) Scattered();
      return true;
    case Phase::kGather:
      if (!StepPart(gather_)) return false;
      if (gather_.operation == nullptr) Gathered();
      return true;
    case Phase::kUnpack:
      Unpack();
      return true;
  }
  return false;
}

/// The order that all members of the host keep: it depends on the number of slices alone.
bool HierarchicalPlane::Operation::NextPhase() {
  if (scattered_ < slices_ && scattered_ < gathered_ + kAhead) {
    BeginScatter();
  } else if (gathered_ < crossed_) {
    BeginGather();
  } else {
    return false;
  }
  return true;
}

/// A slice that lies in one tensor and travels as it is needs no packing.
void HierarchicalPlane::Operation::BeginScatter() {
  done_elements_ = 0;
  if (!contributes_) return Scatter(nullptr);
  const int64_t count = SliceCount(scattered_);
  SegmentCursor ahead = in_;
  const Run run = ahead.Next(count);
  if (!casts_ && run.count == count) {
    in_ = ahead;
    return Scatter(run.in);
  }
  phase_ = Phase::kPack;
}

void HierarchicalPlane::Operation::Pack() {
  const int64_t count = SliceCount(scattered_);
  std::byte* const packed = Packed(scattered_);
  const int64_t end = std::min(count, done_elements_ + kStepBytes / element_bytes_);
  while (done_elements_ < end) {
    const Run run = in_.Next(end - done_elements_);
    plane_.kernels_.Pack(packed + done_elements_ * element_bytes_, travel_, run.in, batch_->dtype,
                         run.count, prescale_);
    done_elements_ += run.count;
  }
  if (done_elements_ == count) Scatter(packed);
}

/// `in`: this member's contribution to the slice, or nullptr.
void HierarchicalPlane::Operation::Scatter(const std::byte* in) {
  phase_ = Phase::kScatter;
  scatter_.segment = {in, Shard(scattered_), SliceCount(scattered_) * width_};
  if (set_->topology.alone() || !host_contributes_) return Scattered();
  SetSplits(scattered_);
  StartPart(*plane_.options_.local, scatter_);
}

/// My shard of the slice may cross; it is empty if I have none.
void HierarchicalPlane::Operation::Scattered() {
  phase_ = Phase::kNone;
  const int64_t slice = scattered_++;
  const void* in = set_->topology.alone() ? scatter_.segment.in : Shard(slice);
  if (!host_contributes_) in = nullptr;
  Cross(slice).segment = {in, Shard(slice), MyShard(slice).count * width_};
}

void HierarchicalPlane::Operation::BeginGather() {
  done_elements_ = 0;
  if (!takes_result_) return Gather(nullptr);
  const int64_t count = SliceCount(gathered_);
  SegmentCursor ahead = out_;
  const Run run = ahead.Next(count);
  if (travel_ == batch_->dtype && run.count == count && !set_->topology.alone()) {
    out_ = ahead;
    return Gather(run.out);
  }
  Gather(Packed(gathered_));
}

/// `out`: where the slice goes, or nullptr.
void HierarchicalPlane::Operation::Gather(std::byte* out) {
  phase_ = Phase::kGather;
  gather_.segment = {Shard(gathered_), out, SliceCount(gathered_) * width_};
  if (set_->topology.alone()) return Gathered();
  SetSplits(gathered_);
  StartPart(*plane_.options_.local, gather_);
}

void HierarchicalPlane::Operation::Gathered() {
  if (gather_.segment.out != nullptr && gather_.segment.out == Packed(gathered_)) {
    phase_ = Phase::kUnpack;
    return;
  }
  phase_ = Phase::kNone;
  ++gathered_;
}

void HierarchicalPlane::Operation::Unpack() {
  const int64_t count = SliceCount(gathered_);
  const std::byte* const packed = Packed(gathered_);
  const int64_t end = std::min(count, done_elements_ + kStepBytes / element_bytes_);
  while (done_elements_ < end) {
    const Run run = out_.Next(end - done_elements_);
    if (run.out != nullptr) {
      plane_.kernels_.Unpack(run.out, batch_->dtype, packed + done_elements_ * element_bytes_,
                             travel_, run.count);
    }
    done_elements_ += run.count;
  }
  if (done_elements_ < count) return;
  phase_ = Phase::kNone;
  ++gathered_;
}

void HierarchicalPlane::Operation::SetSplits(int64_t slice) {
  splits_.clear();
  for (size_t i = 0; i < set_->local_ranks.size(); ++i) {
    splits_.push_back(ShardOfLocal(static_cast<int>(i), slice).count * width_);
  }
  scatter_.batch.splits = gather_.batch.splits = splits_;
}

/// `part.segment` is filled.
void HierarchicalPlane::Operation::StartPart(DataPlane& plane, Part& part) {
  part.batch.segments = {&part.segment, 1};
  part.batch.count = part.segment.count;
  Result<PlaneOperation*> started = plane.Start(part.batch);
  if (started.ok()) {
    part.operation = started.value();
  } else {
    failure_ = started.status();
  }
}

/// @return Whether it moved. It is gone when it has ended.
bool HierarchicalPlane::Operation::StepPart(Part& part) {
  const Progress progress = part.operation->Step();
  if (progress.state == Progress::State::kWaiting) {
    if (poll_after_ns_ == kByDoorbell ||
        (progress.poll_after_ns != kByDoorbell && progress.poll_after_ns < poll_after_ns_)) {
      poll_after_ns_ = progress.poll_after_ns;
    }
    return false;
  }
  if (progress.state == Progress::State::kMoved) return true;
  part.operation = nullptr;
  failure_ = progress.status;
  return true;
}

HierarchicalPlane::HierarchicalPlane(Options options, const CpuKernels& kernels)
    : options_(std::move(options)), kernels_(kernels) {}

HierarchicalPlane::~HierarchicalPlane() = default;

/// An error leaves sets behind in the planes: it is final.
Status HierarchicalPlane::AddSet(uint32_t uid, std::span<const int> ranks, int my_index) {
  auto set = std::make_unique<Set>(ranks, my_index, options_);
  const Topology& topology = set->topology;
  FARANDOLE_RETURN_IF_ERROR(options_.flat->AddSet(uid, ranks, my_index));
  if (topology.has_shard()) {
    for (DataPlane* const cross : options_.cross) {
      FARANDOLE_RETURN_IF_ERROR(cross->AddSet(uid, set->cross_ranks, topology.my_host));
    }
  }
  const int64_t shard = set->shard_bytes;
  const int64_t slice = shard * topology.shards;
  bool allocated = true;
  for (Memory& memory : set->shards) allocated &= (memory = Allocate(shard)) != nullptr;
  if (!topology.alone()) {
    FARANDOLE_RETURN_IF_ERROR(options_.local->AddSet(uid, set->local_ranks, topology.my_local));
    allocated &= (set->packed = Allocate(slice)) != nullptr;
  }
  if (!allocated) {
    return ResourceExhausted("cannot allocate " + std::to_string(slice + kAhead * shard) +
                             " bytes for process set " + std::to_string(uid));
  }
  sets_.emplace(uid, std::move(set));
  return {};
}

void HierarchicalPlane::RemoveSet(uint32_t uid) {
  const auto found = sets_.find(uid);
  if (found == sets_.end()) return;
  options_.flat->RemoveSet(uid);
  if (found->second->topology.has_shard()) {
    for (DataPlane* const cross : options_.cross) cross->RemoveSet(uid);
  }
  if (!found->second->topology.alone()) options_.local->RemoveSet(uid);
  sets_.erase(found);
}

Result<PlaneOperation*> HierarchicalPlane::Start(const Batch& batch) {
  const auto found = sets_.find(batch.set);
  if (found == sets_.end()) {
    return Internal("batch for unknown process set " + std::to_string(batch.set));
  }
  Set& set = *found->second;
  if (set.broken) return Aborted("an earlier batch of this process set was abandoned");
  const Path path = PathOf(batch);
  if (path == Path::kFlat) return options_.flat->Start(batch);
  FARANDOLE_RETURN_IF_ERROR(CheckBatch(batch));
  if (path == Path::kOneShot) {
    OneShotAllreduce& one_shot = FreeOneShot();
    FARANDOLE_RETURN_IF_ERROR(one_shot.Begin(batch, set.topology, *options_.flat));
    return &one_shot;
  }
  Operation* operation = operations_.Take(*this);
  operation->Reset(set, batch);
  set.queue.push_back(operation);
  return operation;
}

/// One that is not in use; allocates only when more than ever run side by side.
OneShotAllreduce& HierarchicalPlane::FreeOneShot() {
  for (const std::unique_ptr<OneShotAllreduce>& one_shot : one_shots_) {
    if (!one_shot->in_use()) return *one_shot;
  }
  one_shots_.push_back(std::make_unique<OneShotAllreduce>(kernels_));
  return *one_shots_.back();
}

void HierarchicalPlane::Finish(Operation* operation) {
  std::vector<Operation*>& queue = operation->set().queue;
  queue.erase(std::find(queue.begin(), queue.end(), operation));
  operations_.Return(operation);
}

}  // namespace farandole
