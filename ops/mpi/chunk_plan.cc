#include "ops/mpi/chunk_plan.h"

#include <algorithm>

#include "ops/cpu/batch.h"

namespace farandole {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kTinyBytes = 16 * 1024;
constexpr int kOneShotMembers = 8;  // beyond, P^2 messages cost more than the second round
constexpr int64_t kChunkBytes = 256 * 1024;
constexpr int64_t kLeastShardBytes = 16 * 1024;  // keeps messages long in large sets

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Grows with the set, so that shards, and with them messages, keep a length worth sending.
int64_t ChunkBytes(int members) { return std::max(kChunkBytes, members * kLeastShardBytes); }

}  // namespace

StagingSize StagingFor(int members) {
  const int64_t chunk = ChunkBytes(members);
  // The largest shard: of an allreduce chunk that of member 0, of a one-shot batch all of it.
  // Those of a broadcast are longer, having one owner less, but are received in slot.result.
  const int64_t shard = DivideUp(chunk, int64_t{members} * kCacheLine) * kCacheLine;
  return {chunk, members <= kOneShotMembers ? std::max(shard, kTinyBytes) : shard};
}

/// Tiny batches are not sharded, unless an allreduce has too many members for one-shot: then each
/// would send its whole contribution to all others.
void ChunkPlan::Reset(const Batch& batch) {
  const int members = static_cast<int>(batch.ranks.size());
  const int64_t element = SizeOf(TravelDType(batch));
  const bool broadcast = batch.kind == OpKind::kBroadcast;
  const bool tiny = batch.count * element <= kTinyBytes;
  sharded_ = !tiny || (!broadcast && members > kOneShotMembers);
  forwards_ = sharded_;
  root_ = broadcast ? batch.root_index : -1;
  count_ = batch.count;
  chunk_count_ = ChunkBytes(members) / element;
  chunks_ = DivideUp(count_, chunk_count_);
  align_ = kCacheLine / element;
  contributes_.resize(static_cast<size_t>(members));
  for (int i = 0; i < members; ++i) {
    contributes_[static_cast<size_t>(i)] = broadcast ? i == root_ : !IsAbsent(batch, i);
  }
}

int64_t ChunkPlan::CountOf(int64_t chunk) const {
  return std::min(chunk_count_, count_ - chunk * chunk_count_);
}

/// Shards start at cache lines; the last ones may be shorter or empty. The root of a broadcast owns
/// none: the others divide the chunk among themselves.
Slice ChunkPlan::ShardOf(int member, int64_t count) const {
  if (member == root_) return {};
  if (!sharded_) return {0, count};
  const int owners = is_broadcast() ? members() - 1 : members();
  const int position = is_broadcast() && member > root_ ? member - 1 : member;
  const int64_t shard = DivideUp(DivideUp(count, owners), align_) * align_;
  const int64_t begin = std::min(count, position * shard);
  return {begin, std::min(count, begin + shard) - begin};
}

}  // namespace farandole
