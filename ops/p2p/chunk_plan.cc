#include "ops/p2p/chunk_plan.h"

#include <algorithm>

#include "ops/cpu/batch.h"
#include "ops/cpu/quantize.h"

namespace farandole {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kLargestElement = 8;
constexpr int64_t kTinyBroadcastBytes = 16 * 1024;
constexpr int64_t kSmallGatherBytes = 64 * 1024;  // of all members together
constexpr int kOneRoundMembers = 8;               // beyond, messages cost more than rounds
constexpr int64_t kLeastChunkBytes = 256 * 1024;
constexpr int64_t kMostChunkBytes = 1024 * 1024;  // bounds staging: docs/decisions.md
// Of a chunk, for a quantized element and its share of a scale: as many elements as of 16 bits.
constexpr int64_t kQuantizedElementRoom = 2;
constexpr int64_t kWantedShardBytes = 16 * 1024;  // keeps messages long

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Grows with the set, so that shards, and with them messages, keep a length worth sending, as far
/// as the bound on staging lets them.
int64_t ChunkBytes(int members) {
  const int64_t wanted = std::clamp(members * kWantedShardBytes, kLeastChunkBytes, kMostChunkBytes);
  return std::max(wanted, members * kLargestElement);
}

/// At what multiples shards and slices start: cache lines, unless there are more members than
/// lines.
int64_t AlignOf(int members) {
  return ChunkBytes(members) / members >= kCacheLine ? kCacheLine : kLargestElement;
}

/// Elements that `member` puts into a small gather.
int64_t ContributionOf(const Batch& batch, int member) {
  if (batch.kind == OpKind::kAllgather) return batch.splits[static_cast<size_t>(member)];
  return IsAbsent(batch, member) ? 0 : batch.count;
}

}  // namespace

/// A shard is rounded up, so that all members' cover the chunk; a slice down, so that all fit in.
StagingSize StagingFor(int members) {
  const int64_t chunk = ChunkBytes(members);
  const int64_t align = AlignOf(members);
  // The largest shard is that of member 0 in an allreduce. Those of a broadcast are longer, having
  // one owner less, but are received in slot.result.
  // A quantized shard that is not empty has a block.
  const bool quantizes = static_cast<size_t>(members) <= kMostQuantizingRanks;
  const int64_t least = quantizes ? DivideUp(QuantizedBytes(kQuantizedBlock), align) : 0;
  const int64_t inbox = std::max(DivideUp(chunk, members * align), least);
  return {chunk, inbox * align, chunk / members / align * align};
}

void ChunkPlan::Reset(const Batch& batch) {
  members_ = static_cast<int>(batch.ranks.size());
  const int64_t element = SizeOf(WireOf(batch));
  const bool broadcast = batch.kind == OpKind::kBroadcast;
  sharded_ = !broadcast || batch.count * element > kTinyBroadcastBytes;
  root_ = broadcast ? batch.root_index : -1;
  count_ = batch.count;
  const bool quantized = IsQuantized(batch);
  chunk_count_ = ChunkBytes(members_) / (quantized ? kQuantizedElementRoom : element);
  chunks_ = DivideUp(count_, chunk_count_);
  align_ = quantized ? kQuantizedBlock : AlignOf(members_) / element;
}

int64_t ChunkPlan::CountOf(int64_t chunk) const {
  return std::min(chunk_count_, count_ - chunk * chunk_count_);
}

/// The root of a broadcast owns none: the others divide the chunk among themselves.
Slice ChunkPlan::ShardOf(int member, int64_t count) const {
  if (member == root_) return {};
  if (!sharded_) return {0, count};
  const int owners = is_broadcast() ? members() - 1 : members();
  const int owner = is_broadcast() && member > root_ ? member - 1 : member;
  return farandole::ShardOf(count, owners, owner, align_);
}

/// The bound is on what a member receives, and reduces in one step. An allgather takes one round as
/// it is.
bool GatherPlan::Suits(const Batch& batch) {
  const auto members = static_cast<int64_t>(batch.ranks.size());
  const int64_t most = kSmallGatherBytes / SizeOf(WireOf(batch));  // elements of all together
  if (batch.kind == OpKind::kAllreduce) return batch.count <= most / members;
  return batch.kind == OpKind::kAllgather && batch.count <= most && members > kOneRoundMembers;
}

void GatherPlan::Reset(const Batch& batch) {
  const int members = static_cast<int>(batch.ranks.size());
  const int64_t element = SizeOf(WireOf(batch));
  my_index_ = batch.my_index;
  begins_.assign(1, 0);
  for (int place = 0; place < members; ++place) {
    const int64_t count = ContributionOf(batch, (my_index_ + place) % members);
    begins_.push_back(begins_.back() + count * element);
  }
  ports_ = members <= kOneRoundMembers ? members - 1 : 1;
  rounds_ = 0;
  for (int64_t n = 1; n < members && begins_.back() > 0; n *= ports_ + 1) ++rounds_;
}

GatherPlan::Message GatherPlan::Sent(int64_t round, int port) const {
  const Reach reach = ReachOf(round, port);
  return {(my_index_ + members() - reach.distance) % members(), 0, Blocks(0, reach.count).count};
}

GatherPlan::Message GatherPlan::Received(int64_t round, int port) const {
  const Reach reach = ReachOf(round, port);
  const Slice blocks = Blocks(reach.distance, reach.count);
  return {(my_index_ + reach.distance) % members(), blocks.begin, blocks.count};
}

/// All that a member has gathered, or, in the last round, the part that the receiver has not.
GatherPlan::Reach GatherPlan::ReachOf(int64_t round, int port) const {
  int64_t gathered = 1;
  for (int64_t i = 0; i < round; ++i) gathered *= ports_ + 1;
  const int64_t distance = std::min<int64_t>(members(), (port + 1) * gathered);
  return {static_cast<int>(distance), static_cast<int>(std::min(gathered, members() - distance))};
}

Slice GatherPlan::Blocks(int first, int count) const {
  const int64_t begin = begins_[static_cast<size_t>(first)];
  return {begin, begins_[static_cast<size_t>(first + count)] - begin};
}

Slice GatherPlan::BlockOf(int member) const {
  return Blocks((member - my_index_ + members()) % members(), 1);
}

}  // namespace farandole
