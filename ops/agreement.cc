#include "ops/agreement.h"

#include <algorithm>

namespace farandole {
namespace {

constexpr int kMostMisses = 6;

}  // namespace

/// A word of an earlier call is done with: all have agreed, or somebody has declined. Of one that
/// looks like this call's and is complete, 2^31 rounds ago, nobody makes use.
Agreement::State Agreement::Propose(int64_t round, uint32_t id) {
  bool skips = false;
  if (round != round_) {
    round_ = round;
    times_ = 0;
    has_declined_ = false;
    skips = rounds_to_skip_ > 0;
    if (skips) --rounds_to_skip_;
  }
  if (has_declined_ || times_ == kMostTimes || id > kMostId || members_ >= kCountMask)
    return Settle(State::kDeclined);
  const uint64_t call = static_cast<uint64_t>(round) << (kRoundBit - kTimeBit) | times_;
  tag_ = TagOf(call << kTimeBit | uint64_t{id} << kIdBit);
  uint64_t word = word_.load(std::memory_order_acquire);
  for (;;) {
    const bool is_this_call = CallOf(word) == CallOf(tag_ << kIdBit);
    const uint64_t count = is_this_call ? word & kCountMask : 0;
    if (is_this_call && ((word & kDeclinedBit) != 0 || count >= members_))
      return Settle(State::kDeclined);
    const bool declines = skips || (is_this_call && TagOf(word) != tag_);
    const uint64_t base = is_this_call ? word : tag_ << kIdBit;
    const uint64_t next = declines ? base | kDeclinedBit : base + 1;
    if (!word_.compare_exchange_weak(word, next, std::memory_order_acq_rel)) continue;
    if (declines) return Settle(State::kDeclined);
    return count + 1 == members_ ? Settle(State::kAgreed) : State::kOpen;
  }
}

Agreement::State Agreement::Look() {
  const uint64_t word = word_.load(std::memory_order_acquire);
  if (TagOf(word) != tag_) {
    const bool is_next = CallOf(word) == CallOf(tag_ << kIdBit) + 1;
    return Settle(is_next ? State::kAgreed : State::kDeclined);
  }
  if ((word & kDeclinedBit) != 0) return Settle(State::kDeclined);
  return (word & kCountMask) == members_ ? Settle(State::kAgreed) : State::kOpen;
}

Agreement::State Agreement::Decline() {
  uint64_t word = word_.load(std::memory_order_acquire);
  while (TagOf(word) == tag_ && (word & kCountMask) < members_) {
    if (!word_.compare_exchange_weak(word, word | kDeclinedBit, std::memory_order_acq_rel))
      continue;
    misses_ = std::min(misses_ + 1, kMostMisses);
    rounds_to_skip_ = (1 << misses_) - 1;
    return Settle(State::kDeclined);
  }
  return Look();
}

Agreement::State Agreement::Settle(State state) {
  if (state == State::kAgreed) {
    ++times_;
    misses_ = 0;
  }
  if (state == State::kDeclined) has_declined_ = true;
  return state;
}

}  // namespace farandole
