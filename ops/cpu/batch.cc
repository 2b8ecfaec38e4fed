#include "ops/cpu/batch.h"

#include <cmath>
#include <string>

namespace farandole {
namespace {

/// Per step of a solo run: about one chunk.
constexpr int64_t kSoloStepBytes = 256 * 1024;

Status Refuse(const Batch& batch, const std::string& why) {
  return InvalidArgument(std::string(Name(batch.kind)) + " of " + std::string(Name(batch.dtype)) +
                         ": " + why);
}

bool IsKnown(DType dtype) { return static_cast<int>(dtype) < kDTypeCount; }

bool IsWireOf(DType wire, DType dtype) {
  return wire == dtype || wire == WireDType(dtype, WireFormat::kFloat16) ||
         wire == WireDType(dtype, WireFormat::kBfloat16);
}

Status CheckReduction(const Batch& batch) {
  if (batch.op > ReduceOp::kProduct) return Refuse(batch, "unknown reduce op");
  if (!IsWireOf(batch.wire, batch.dtype)) {
    return Refuse(batch, "cannot travel as " + std::string(Name(batch.wire)));
  }
  if (!std::isfinite(batch.prescale) || !std::isfinite(batch.postscale)) {
    return Refuse(batch, "prescale is " + std::to_string(batch.prescale) + ", postscale is " +
                             std::to_string(batch.postscale) + "; both must be finite");
  }
  if (batch.dtype != DType::kBool) return {};
  if (batch.op == ReduceOp::kSum || batch.op == ReduceOp::kAverage) {
    return Refuse(batch, std::string(Name(batch.op)) + " is not defined; use min, max or product");
  }
  if (batch.prescale != 1.0 || batch.postscale != 1.0) {
    return Refuse(batch, "cannot be multiplied by a factor");
  }
  return {};
}

Status CheckMembers(const Batch& batch) {
  const int members = static_cast<int>(batch.ranks.size());
  const auto outside = [&](int position) { return position < 0 || position >= members; };
  if (outside(batch.my_index)) return Refuse(batch, "this rank's position is not in the set");
  if (std::any_of(batch.absent.begin(), batch.absent.end(), outside)) {
    return Refuse(batch, "an absent rank's position is not in the set");
  }
  if (batch.absent.size() >= batch.ranks.size()) return Refuse(batch, "no rank contributes");
  if (batch.kind != OpKind::kBroadcast) return {};
  if (outside(batch.root_index)) return Refuse(batch, "the root's position is not in the set");
  if (IsAbsent(batch, batch.root_index)) return Refuse(batch, "the root is absent");
  return {};
}

Status CheckSegments(const Batch& batch) {
  const bool broadcast = batch.kind == OpKind::kBroadcast;
  const bool reads =
      broadcast ? batch.my_index == batch.root_index : !IsAbsent(batch, batch.my_index);
  int64_t count = 0;
  for (const Segment& segment : batch.segments) {
    if (segment.count < 0) return Refuse(batch, "a segment's count is negative");
    if (reads && segment.in == nullptr && segment.count > 0) {
      return Refuse(batch, "a contributing segment has no input");
    }
    count += segment.count;
  }
  if (count == batch.count) return {};
  return Refuse(batch, "segments hold " + std::to_string(count) + " elements, the batch says " +
                           std::to_string(batch.count));
}

}  // namespace

Status CheckBatch(const Batch& batch) {
  if (!IsKnown(batch.dtype) || !IsKnown(batch.wire)) return InvalidArgument("unknown dtype");
  if (batch.kind != OpKind::kAllreduce && batch.kind != OpKind::kBroadcast) {
    return Unimplemented(std::string(Name(batch.kind)) + " is not offered by this data plane");
  }
  if (batch.kind == OpKind::kAllreduce) FARANDOLE_RETURN_IF_ERROR(CheckReduction(batch));
  FARANDOLE_RETURN_IF_ERROR(CheckMembers(batch));
  return CheckSegments(batch);
}

Run SegmentCursor::Next(int64_t limit) {
  while (segment_ < segments_.size() && offset_ == segments_[segment_].count) {
    ++segment_;
    offset_ = 0;
  }
  if (segment_ == segments_.size()) return {};
  const Segment& segment = segments_[segment_];
  const int64_t offset_bytes = offset_ * element_bytes_;
  Run run;
  run.count = std::min(limit, segment.count - offset_);
  if (segment.in != nullptr) run.in = static_cast<const std::byte*>(segment.in) + offset_bytes;
  if (segment.out != nullptr) run.out = static_cast<std::byte*>(segment.out) + offset_bytes;
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

SoloRun::SoloRun(const Batch& batch) : cursor_(batch.segments, batch.dtype), dtype_(batch.dtype) {
  if (batch.kind == OpKind::kBroadcast) return;
  prescale_ = batch.prescale;
  postscale_ = batch.postscale;
}

bool SoloRun::Step(const CpuKernels& kernels) {
  const bool scales = prescale_ != 1.0 || postscale_ != 1.0;
  int64_t left = kSoloStepBytes / SizeOf(dtype_);
  while (left > 0) {
    const Run run = cursor_.Next(left);
    if (run.count == 0) return true;
    if (run.out == nullptr || (run.out == run.in && !scales)) continue;
    kernels.Scale(run.out, run.in, dtype_, run.count, prescale_, postscale_);
    left -= run.count;
  }
  return false;
}

}  // namespace farandole
