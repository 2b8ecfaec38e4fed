#include "ops/nccl/plan_parts.h"

#include <algorithm>
#include <cstddef>

#include "ops/cpu/batch.h"
#include "ops/cuda/lane.h"
#include "ops/nccl/reduction.h"

namespace farandole {
namespace {

using Call = NcclPlan::Call;
using Route = NcclPlan::Route;
using Kind = NcclTransfer::Kind;

std::byte* At(void* base, int64_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* At(const void* base, int64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

const Segment& Only(const Batch& batch) { return batch.segments.front(); }
int64_t Members(const Batch& batch) { return static_cast<int64_t>(batch.ranks.size()); }
int64_t PartOf(const Batch& batch, int member) { return batch.splits[static_cast<size_t>(member)]; }
int64_t LongestPart(const Batch& batch) {
  return *std::max_element(batch.splits.begin(), batch.splits.end());
}
bool PartsAreEqual(const Batch& batch) {
  return LongestPart(batch) * Members(batch) == batch.count;
}

/// Where a result lies that is not wanted, but has to be somewhere, is the buffer.
void* OutOf(const Batch& batch, void* buffer) {
  return Only(batch).out != nullptr ? Only(batch).out : buffer;
}

// ---- reducescatter ----

/// From a part's begin in the buffer to that of the next.
int64_t PartStrideBytes(const NcclPlan& plan) { return plan.count * SizeOf(plan.pack.to); }

/// The count must not depend on the route, which a rank's own prescale may decide: so equal parts
/// are not aligned in the buffer either.
NcclPlan PlanReducescatter(const Batch& batch) {
  const NcclReduction reduction = PlanReduction(batch, !PartsAreEqual(batch));
  NcclPlan plan;
  plan.call = Call::kReduceScatter;
  plan.type = reduction.type;
  plan.op = reduction.op;
  plan.pack = reduction.pack;
  plan.unpack = reduction.unpack;
  plan.route = reduction.as_it_is ? Route::kStraight : Route::kFused;
  plan.count = LongestPart(batch);
  if (!PartsAreEqual(batch)) plan.count = NcclStride(plan.count, reduction.travels);
  const bool gives = NcclContribution(batch, Only(batch)) != nullptr;
  if (plan.route == Route::kFused || !gives) {
    plan.buffer_bytes = Members(batch) * PartStrideBytes(plan);
  } else if (Only(batch).out == nullptr) {
    plan.buffer_bytes = PartStrideBytes(plan);
  }
  return plan;
}

NcclEnds EndsOfReducescatter(const Batch& batch, const NcclPlan& plan, void* buffer) {
  const auto mine = [&] { return At(buffer, batch.my_index * PartStrideBytes(plan)); };
  if (plan.route == Route::kFused) return {buffer, mine()};
  const void* const in = NcclContribution(batch, Only(batch));
  if (in != nullptr) return {in, OutOf(batch, buffer)};
  return {buffer, Only(batch).out != nullptr ? Only(batch).out : mine()};
}

// ---- allgather and alltoall ----

NcclPlan PlanCopies(const Batch& batch) {
  const bool gathers = batch.kind == OpKind::kAllgather;
  NcclPlan plan;
  plan.route = Route::kStraight;
  plan.call = gathers && PartsAreEqual(batch) ? Call::kAllGather : Call::kGroup;
  if (plan.call == Call::kAllGather) plan.count = LongestPart(batch) * SizeOf(batch.dtype);
  plan.pack = plan.unpack = BitwiseMove(batch.dtype);
  if (Only(batch).out == nullptr) {
    plan.buffer_bytes = OutputCount(batch, Only(batch)) * SizeOf(batch.dtype);
  }
  return plan;
}

void BroadcastParts(const Batch& batch, void* out, std::vector<NcclTransfer>& transfers) {
  int64_t offset = 0;
  for (int member = 0; member < Members(batch); ++member) {
    const int64_t size_bytes = PartOf(batch, member) * SizeOf(batch.dtype);
    if (size_bytes == 0) continue;
    std::byte* const to = At(out, offset);
    const void* const from = member == batch.my_index ? Only(batch).in : to;
    transfers.push_back({Kind::kBroadcast, member, from, to, size_bytes});
    offset += size_bytes;
  }
}

void ExchangePieces(const Batch& batch, void* out, std::vector<NcclTransfer>& transfers) {
  int64_t sent = 0;
  int64_t received = 0;
  for (int member = 0; member < Members(batch); ++member) {
    const int64_t to = batch.sends[static_cast<size_t>(member)] * SizeOf(batch.dtype);
    const int64_t from = batch.receives[static_cast<size_t>(member)] * SizeOf(batch.dtype);
    if (to > 0) {
      transfers.push_back({Kind::kSend, member, At(Only(batch).in, sent), nullptr, to});
    }
    if (from > 0) {
      transfers.push_back({Kind::kReceive, member, nullptr, At(out, received), from});
    }
    sent += to;
    received += from;
  }
}

}  // namespace

NcclPlan PlanParts(const Batch& batch) {
  return batch.kind == OpKind::kReducescatter ? PlanReducescatter(batch) : PlanCopies(batch);
}

void PackParts(const Batch& batch, const NcclPlan& plan, void* buffer,
               std::vector<DeviceMove>& moves) {
  if (batch.kind != OpKind::kReducescatter) return;
  const void* const in = NcclContribution(batch, Only(batch));
  if (in == nullptr) {
    moves.push_back({nullptr, buffer, Members(batch) * plan.count});
    return;
  }
  if (plan.route == Route::kStraight) return;
  int64_t begin = 0;
  for (int member = 0; member < Members(batch); ++member) {
    const int64_t count = PartOf(batch, member);
    moves.push_back(
        {At(in, begin * SizeOf(batch.dtype)), At(buffer, member * PartStrideBytes(plan)), count});
    begin += count;
  }
}

void UnpackParts(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<DeviceMove>& moves) {
  const int64_t count = OutputCount(batch, Only(batch));
  if (plan.route != Route::kFused || Only(batch).out == nullptr || count == 0) return;
  moves.push_back({At(buffer, batch.my_index * PartStrideBytes(plan)), Only(batch).out, count});
}

NcclEnds EndsOfParts(const Batch& batch, const NcclPlan& plan, void* buffer) {
  if (batch.kind == OpKind::kReducescatter) return EndsOfReducescatter(batch, plan, buffer);
  return {Only(batch).in, OutOf(batch, buffer)};
}

void TransfersOf(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<NcclTransfer>& transfers) {
  transfers.clear();
  if (plan.route == Route::kNothing || plan.call != Call::kGroup) return;
  void* const out = OutOf(batch, buffer);
  if (batch.kind == OpKind::kAllgather) {
    BroadcastParts(batch, out, transfers);
  } else {
    ExchangePieces(batch, out, transfers);
  }
}

}  // namespace farandole
