#include "coordinator/protocol/known_work.h"

#include <algorithm>

namespace farandole {

void KnownWork::Restore(size_t i, const CachedSignature* cached, Key& key) const {
  key.closed = std::max(key.closed, closed);
  if (used) key.is_idle = false;
  key.pending = i < own;
  if (!key.pending) key.own_cached = nullptr;
  if (votes == 0) return;
  key.round.voted = voted;
  key.round.votes = votes;
  key.round.sent = sent;
  key.round.plain = cached;
  key.round.step = StepCount();
}

bool RepeatedWork::Repeats(std::span<const uint32_t> ids) {
  uint64_t hash = ids.size();
  for (const uint32_t id : ids) hash = (hash ^ id) * 0x9e3779b97f4a7c15;
  hash ^= hash >> 32;
  const auto found = std::ranges::find(seen_, hash, &Seen::hash);
  if (found == seen_.end()) {
    seen_[next_] = {hash};
    next_ = (next_ + 1) % seen_.size();
    return false;
  }
  if (++found->times < found->needed) return false;
  found->times = 0;
  found->needed = std::min(2 * found->needed, kMost);
  return true;
}

}  // namespace farandole
