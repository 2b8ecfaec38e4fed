// How the members of a set that share memory agree, without a message, to run the same known
// operation next.
#pragma once

#include <atomic>
#include <cstdint>

namespace farandole {

/// One member's view of a word that all members share. The members' calls are numbered by the last
/// decision that ended what they may wait for, the round, and by how often they have agreed since:
/// where no member has anything in flight these are alike on all of them. Each member proposes an
/// operation for that number, and adds one to the count in the word; with the last one all have
/// agreed. Who waits no longer declines, unless all have: then nobody agrees, and all vote.
///
/// A member that has waited in vain proposes nothing for some rounds, ever more each time, up to
/// 63, and says so in the word: whoever never comes costs the others little.
///
/// Why this decides alike for all: the count and the sign that somebody has declined are one word,
/// so one change comes first. The next number is proposed only by who knows that all have agreed,
/// so a member that finds it there knows it, too; nobody comes further without that member.
///
/// Thread safety: one thread per view; those of different members run at once, also in different
/// processes. Lifetime: the word outlives it.
class Agreement {
 public:
  using Word = std::atomic<uint64_t>;  ///< Zero at first.
  static_assert(Word::is_always_lock_free);
  enum class State : uint8_t { kOpen, kAgreed, kDeclined };

  Agreement(Word& word, int members) : word_(word), members_(static_cast<uint64_t>(members)) {}

  /// This member will run the operation `id` as soon as all members say so.
  /// @param round  Number of the last decision that ended what members may wait for.
  State Propose(int64_t round, uint32_t id);
  /// What has become of it.
  State Look();
  /// This member votes instead, unless all have agreed. @return kAgreed or kDeclined.
  State Decline();

 private:
  // From the lowest bit: how many members have proposed; somebody has declined; the id; how often
  // they have agreed since the round; the round.
  static constexpr int kIdBit = 9, kTimeBit = 25, kRoundBit = 33;
  static constexpr uint64_t kDeclinedBit = 1u << 8, kCountMask = kDeclinedBit - 1;
  static constexpr uint64_t kMostId = (1u << (kTimeBit - kIdBit)) - 1;
  static constexpr uint64_t kMostTimes = (1u << (kRoundBit - kTimeBit)) - 1;

  static uint64_t CallOf(uint64_t word) { return word >> kTimeBit; }
  static uint64_t TagOf(uint64_t word) { return word >> kIdBit; }
  State Settle(State state);

  Word& word_;
  const uint64_t members_;
  int64_t round_ = -1;
  uint64_t times_ = 0;         // agreed since the round
  bool has_declined_ = false;  // the members vote next
  int misses_ = 0;             // proposals in a row for which this member waited in vain
  int rounds_to_skip_ = 0;
  uint64_t tag_ = 0;  // of the proposal
};

}  // namespace farandole
