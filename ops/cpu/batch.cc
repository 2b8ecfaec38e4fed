#include "ops/cpu/batch.h"

#include <cmath>
#include <numeric>
#include <string>

namespace farandole {
namespace {

/// Bytes per step of a solo run: about one chunk.
constexpr int64_t kSoloStepBytes = 256 * 1024;

Status Refuse(const Batch& batch, const std::string& why) {
  return InvalidArgument(std::string(Name(batch.kind)) + " of " + std::string(Name(batch.dtype)) +
                         ": " + why);
}

int64_t Sum(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

bool IsWireOf(DType wire, DType dtype) {
  return wire == dtype || wire == WireDType(dtype, WireFormat::kFloat16) ||
         wire == WireDType(dtype, WireFormat::kBfloat16);
}

/// The op must be defined for the dtype, the wire type one of the dtype's, the factors finite.
Status CheckReduction(const Batch& batch) {
  const bool arrives_otherwise =
      batch.op == ReduceOp::kPreMulSum || batch.op == ReduceOp::kAdasum;  // see Batch
  if (arrives_otherwise || batch.op > kLastReduceOp) return Refuse(batch, "unknown reduce op");
  if (!IsWireOf(batch.wire, batch.dtype)) {
    return Refuse(batch, "cannot travel as " + std::string(Name(batch.wire)));
  }
  if (!std::isfinite(batch.prescale) || !std::isfinite(batch.postscale)) {
    return Refuse(batch, "prescale is " + std::to_string(batch.prescale) + ", postscale is " +
                             std::to_string(batch.postscale) + "; both must be finite");
  }
  if (!IsDefined(batch.op, batch.dtype)) {
    return Refuse(batch, std::string(Name(batch.op)) + " is not defined");
  }
  const bool scales = batch.prescale != 1.0 || batch.postscale != 1.0;
  if (scales && (batch.dtype == DType::kBool || IsBitwise(batch.op))) {
    return Refuse(batch, std::string(Name(batch.op)) + " with a factor");
  }
  return {};
}

/// Indices must be in the set, a rank must contribute, and a root must not be absent.
Status CheckMembers(const Batch& batch) {
  const int members = static_cast<int>(batch.ranks.size());
  const auto outside = [&](int index) { return index < 0 || index >= members; };
  if (outside(batch.my_index)) return Refuse(batch, "this rank's index is not in the set");
  if (std::any_of(batch.absent.begin(), batch.absent.end(), outside)) {
    return Refuse(batch, "an absent rank's index is not in the set");
  }
  if (batch.absent.size() >= batch.ranks.size()) return Refuse(batch, "no rank contributes");
  if (!batch.slots.empty() && batch.slots.size() != batch.ranks.size()) {
    return Refuse(batch, "slots are given for " + std::to_string(batch.slots.size()) +
                             " members of " + std::to_string(batch.ranks.size()));
  }
  if (batch.kind != OpKind::kBroadcast) return {};
  if (outside(batch.root_index)) return Refuse(batch, "the root's index is not in the set");
  if (IsAbsent(batch, batch.root_index)) return Refuse(batch, "the root is absent");
  return {};
}

/// One count per member, none of them negative.
Status CheckCounts(const Batch& batch, const char* what, std::span<const int64_t> counts) {
  if (counts.size() != batch.ranks.size()) {
    return Refuse(batch, std::string(what) + " are given for " + std::to_string(counts.size()) +
                             " members of " + std::to_string(batch.ranks.size()));
  }
  for (size_t member = 0; member < counts.size(); ++member) {
    if (counts[member] >= 0) continue;
    return Refuse(batch, std::string(what) + ": that of rank " +
                             std::to_string(batch.ranks[member]) + " is " +
                             std::to_string(counts[member]) + "; it must not be negative");
  }
  return {};
}

/// Allgather, reducescatter: splits add up to the count, and an absent member gives an allgather
/// nothing.
Status CheckSplits(const Batch& batch) {
  FARANDOLE_RETURN_IF_ERROR(CheckCounts(batch, "splits", batch.splits));
  if (const int64_t sum = Sum(batch.splits); sum != batch.count) {
    return Refuse(batch, "splits hold " + std::to_string(sum) + " elements, the batch says " +
                             std::to_string(batch.count));
  }
  if (batch.kind == OpKind::kReducescatter) return {};
  for (const int index : batch.absent) {
    const auto member = static_cast<size_t>(index);
    if (batch.splits[member] == 0) continue;
    return Refuse(batch, "rank " + std::to_string(batch.ranks[member]) + " is absent, but " +
                             std::to_string(batch.splits[member]) +
                             " elements are expected from it");
  }
  return {};
}

/// Alltoall: `count` bounds every split, so that all members divide the batch into as many chunks,
/// though each knows its own sends and receives only.
Status CheckSendsAndReceives(const Batch& batch) {
  if (!batch.absent.empty()) return Refuse(batch, "is not possible while a rank is absent");
  for (const auto& [what, counts] :
       {std::pair{"sends", batch.sends}, std::pair{"receives", batch.receives}}) {
    FARANDOLE_RETURN_IF_ERROR(CheckCounts(batch, what, counts));
    const int64_t largest = *std::max_element(counts.begin(), counts.end());
    if (largest <= batch.count) continue;
    return Refuse(batch, std::string(what) + " hold " + std::to_string(largest) +
                             " elements for one rank, the batch says at most " +
                             std::to_string(batch.count));
  }
  const auto me = static_cast<size_t>(batch.my_index);
  if (batch.sends[me] == batch.receives[me]) return {};
  return Refuse(batch, "rank " + std::to_string(batch.ranks[me]) + " sends itself " +
                           std::to_string(batch.sends[me]) + " elements and receives " +
                           std::to_string(batch.receives[me]));
}

Status CheckVariableSize(const Batch& batch) {
  if (!IsVariableSize(batch.kind)) return {};
  if (batch.segments.size() != 1) {
    return Refuse(batch, "takes one segment, got " + std::to_string(batch.segments.size()));
  }
  return batch.kind == OpKind::kAlltoall ? CheckSendsAndReceives(batch) : CheckSplits(batch);
}

/// Inputs are required of contributors only; outputs never, since a rank may drop the result.
Status CheckSegments(const Batch& batch) {
  const bool reads = Contributes(batch, batch.my_index);
  int64_t count = 0;
  for (const Segment& segment : batch.segments) {
    if (segment.count < 0) return Refuse(batch, "a segment's count is negative");
    if (reads && segment.in == nullptr && InputCount(batch, segment) > 0) {
      return Refuse(batch, "a contributing segment has no input");
    }
    count += segment.count;
  }
  if (count == batch.count) return {};
  return Refuse(batch, "segments hold " + std::to_string(count) + " elements, the batch says " +
                           std::to_string(batch.count));
}

}  // namespace

/// The order matters: CheckSegments indexes the splits by this rank's index, so the index and
/// the number of splits are checked before.
Status CheckBatch(const Batch& batch) {
  if (!IsReducible(batch.dtype) || !IsReducible(batch.wire)) {
    return InvalidArgument("unknown dtype");  // what is only moved arrives as its carrier
  }
  if (batch.kind > OpKind::kAlltoall) {
    return Unimplemented(std::string(Name(batch.kind)) + " is not offered by this data plane");
  }
  if (Reduces(batch.kind)) FARANDOLE_RETURN_IF_ERROR(CheckReduction(batch));
  FARANDOLE_RETURN_IF_ERROR(CheckMembers(batch));
  FARANDOLE_RETURN_IF_ERROR(CheckVariableSize(batch));
  return CheckSegments(batch);
}

/// Of an alltoall in O(members), since the batch has no sum of this rank's sends.
int64_t InputCount(const Batch& batch, const Segment& segment) {
  if (batch.kind == OpKind::kAlltoall) return Sum(batch.sends);
  if (batch.kind != OpKind::kAllgather) return segment.count;
  return batch.splits[static_cast<size_t>(batch.my_index)];
}

int64_t OutputCount(const Batch& batch, const Segment& segment) {
  if (batch.kind == OpKind::kAlltoall) return Sum(batch.receives);
  if (batch.kind != OpKind::kReducescatter) return segment.count;
  return batch.splits[static_cast<size_t>(batch.my_index)];
}

/// Skips ended segments first, so that empty ones never give an empty run before the end.
Run SegmentCursor::Next(int64_t limit) {
  while (segment_ < segments_.size() && offset_ == segments_[segment_].count) {
    ++segment_;
    offset_ = 0;
  }
  if (segment_ == segments_.size()) return {};
  const Segment& segment = segments_[segment_];
  const int64_t offset_bytes = offset_ * element_bytes_;
  Run run;
  // `in` and `out` advance together, which is right for kinds whose segments are as long on both
  // sides. Variable-size collectives use a Partition instead, or have one member (SoloRun).
  run.count = std::min(limit, segment.count - offset_);
  if (segment.in != nullptr) run.in = static_cast<const std::byte*>(segment.in) + offset_bytes;
  if (segment.out != nullptr) run.out = static_cast<std::byte*>(segment.out) + offset_bytes;
  if (segment.residual != nullptr) run.residual = segment.residual + offset_;
  offset_ += run.count;
  return run;
}

void SegmentCursor::Skip(int64_t count) {
  while (count > 0) {
    const Run run = Next(count);
    if (run.count == 0) return;
    count -= run.count;
  }
}

void PackRuns(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor, std::byte* to,
              int64_t count) {
  const DType wire = WireOf(batch);
  while (count > 0) {
    const Run run = cursor.Next(count);
    kernels.Pack(to, wire, run.in, batch.dtype, run.count, PrescaleOf(batch));
    to += run.count * SizeOf(wire);
    count -= run.count;
  }
}

void UnpackRuns(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor,
                const std::byte* from, int64_t count) {
  const DType wire = WireOf(batch);
  const bool has_own = batch.kind == OpKind::kBroadcast && Contributes(batch, batch.my_index);
  while (count > 0) {
    const Run run = cursor.Next(count);
    if (run.out != nullptr && !(has_own && run.out == run.in)) {
      kernels.Unpack(run.out, batch.dtype, from, wire, run.count);
    }
    from += run.count * SizeOf(wire);
    count -= run.count;
  }
}

void InnerBatch::Describe(const Batch& outer, OpKind kind, DType dtype) {
  batch = Batch();
  batch.kind = kind;
  batch.number = outer.number;
  batch.index = outer.index;
  batch.set = outer.set;
  batch.ranks = outer.ranks;
  batch.my_index = outer.my_index;
  batch.dtype = batch.wire = dtype;
}

Status InnerBatch::Start(DataPlane& plane, const Segment& tensor) {
  segment = tensor;
  batch.segments = {&segment, 1};
  batch.count = segment.count;
  return Start(plane);
}

Status InnerBatch::Start(DataPlane& plane) {
  Result<PlaneOperation*> started = plane.Start(batch);
  if (started.ok()) operation = started.value();
  return started.status();
}

/// The one member sends itself everything: an alltoall's only split, or all of the batch. Copies
/// are not scaled.
SoloRun::SoloRun(const Batch& batch)
    : batch_(&batch),
      cursor_(batch.segments, batch.dtype),
      left_(batch.kind == OpKind::kAlltoall ? batch.sends[0] : batch.count) {}

/// Runs that have nothing to do (in place, no factor; result dropped) cost no share of the step.
bool SoloRun::Step(const CpuKernels& kernels) {
  const double prescale = PrescaleOf(*batch_);
  const double postscale = Reduces(batch_->kind) ? batch_->postscale : 1.0;
  const bool scales = prescale != 1.0 || postscale != 1.0;
  int64_t now = kSoloStepBytes / SizeOf(batch_->dtype);
  while (left_ > 0) {
    if (now == 0) return false;
    const Run run = cursor_.Next(std::min(now, left_));
    left_ -= run.count;
    if (run.out == nullptr || (run.out == run.in && !scales)) continue;
    kernels.Scale(run.out, run.in, batch_->dtype, run.count, prescale, postscale);
    now -= run.count;
  }
  return true;
}

}  // namespace farandole
