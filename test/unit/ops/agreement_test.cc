// Every order in which members can propose, look and decline: what one member does, all do.
#include "ops/agreement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace farandole {
namespace {

using State = Agreement::State;

/// A member that calls operations one after the other, and votes where there is no agreement.
struct Caller {
  Agreement view;
  std::vector<uint32_t> ids;  // of the operations that it calls
  std::string outcome = {};   // 'a': they agreed; 'v': they voted
  int64_t round = 1;          // of votes
  bool has_proposed = false;
  bool votes = false;

  bool is_done() const { return outcome.size() == ids.size(); }
  void Note(State state) {
    has_proposed = state == State::kOpen;
    votes = state == State::kDeclined;
    if (state == State::kAgreed) outcome += 'a';
  }
};

/// Follows all that can happen from here on. Callers are taken by value: each branch has its own.
class Orders {
 public:
  explicit Orders(const std::vector<std::vector<uint32_t>>& ids) {
    std::vector<Caller> callers;
    for (const auto& of_one : ids) {
      callers.push_back({Agreement(word_, static_cast<int>(ids.size())), of_one});
    }
    Follow(callers);
  }

  int64_t ends() const { return ends_; }
  int64_t agreed() const { return agreed_; }
  const std::string& fault() const { return fault_; }

 private:
  void Follow(std::vector<Caller> callers) {
    if (!fault_.empty()) return;
    Check(callers);
    if (std::ranges::all_of(callers, &Caller::is_done)) {
      ++ends_;
      agreed_ += std::ranges::count(callers.front().outcome, 'a');
      return;
    }
    if (std::ranges::all_of(callers, &Caller::votes)) return Follow(Vote(callers));
    const uint64_t before = word_.load();
    bool has_moved = false;
    for (size_t i = 0; i < callers.size(); ++i) {
      for (const bool declines : {false, true}) {
        std::vector<Caller> next = callers;
        word_.store(before);
        if (!Move(next[i], declines)) continue;
        has_moved = true;
        Follow(std::move(next));
      }
    }
    if (!has_moved) fault_ = "nobody can go on" + Texts(callers);
  }

  /// What changes nothing is not followed.
  static bool Move(Caller& one, bool declines) {
    if (one.votes || one.is_done() || (declines && !one.has_proposed)) return false;
    const State state = declines ? one.view.Decline()
                        : one.has_proposed
                            ? one.view.Look()
                            : one.view.Propose(one.round, one.ids[one.outcome.size()]);
    if (one.has_proposed && state == State::kOpen) return false;
    one.Note(state);
    return true;
  }

  static std::vector<Caller> Vote(std::vector<Caller> callers) {
    for (Caller& one : callers) {
      one.outcome += 'v';
      ++one.round;
      one.votes = false;
    }
    return callers;
  }

  /// As far as two have come, they have done the same; and they have agreed on one operation.
  void Check(const std::vector<Caller>& callers) {
    for (const Caller& one : callers) {
      const Caller& first = callers.front();
      for (size_t k = 0; k < std::min(one.outcome.size(), first.outcome.size()); ++k) {
        const bool is_wrong = one.outcome[k] != first.outcome[k] ||
                              (one.outcome[k] == 'a' && one.ids[k] != first.ids[k]);
        if (is_wrong) fault_ = "they do not do the same" + Texts(callers);
      }
    }
  }

  static std::string Texts(const std::vector<Caller>& callers) {
    std::string text;
    for (const Caller& one : callers) text += ", " + one.outcome;
    return text;
  }

  Agreement::Word word_{0};
  int64_t ends_ = 0, agreed_ = 0;
  std::string fault_;
};

TEST(Agreement, IsTheSameForAllInEveryOrder) {
  const Orders two({{1, 2, 1}, {1, 2, 1}});
  EXPECT_EQ(two.fault(), "");
  EXPECT_GT(two.agreed(), 0);
  EXPECT_LT(two.agreed(), 3 * two.ends()) << "somebody declines in some orders";
  const Orders three({{7, 7}, {7, 7}, {7, 7}});
  EXPECT_EQ(three.fault(), "");
  EXPECT_GT(three.agreed(), 0);
}

TEST(Agreement, WhoCallsOtherOperationsVotes) {
  const Orders differ({{1, 2}, {1, 3}});
  EXPECT_EQ(differ.fault(), "");
  EXPECT_LE(differ.agreed(), differ.ends()) << "never on the second one";
  const Orders one_of_three({{4}, {4}, {5}});
  EXPECT_EQ(one_of_three.fault(), "");
  EXPECT_EQ(one_of_three.agreed(), 0);
}

// More often than the word can count, and ids that it has no room for.
TEST(Agreement, VotesWhereTheWordIsTooSmall) {
  Agreement::Word word{0};
  Agreement a(word, 2), b(word, 2);
  int agreed = 0;
  while (a.Propose(1, 1) == State::kOpen) {
    ASSERT_EQ(b.Propose(1, 1), State::kAgreed);
    ASSERT_EQ(a.Look(), State::kAgreed);
    ++agreed;
  }
  EXPECT_EQ(agreed, 255);
  EXPECT_EQ(b.Propose(1, 1), State::kDeclined);
  EXPECT_EQ(a.Propose(2, 1 << 16), State::kDeclined);
  EXPECT_EQ(b.Propose(3, 1), State::kOpen);
  EXPECT_EQ(a.Propose(3, 1), State::kAgreed);
}

// One that never comes is waited for ever more rarely, and who does not propose says so.
TEST(Agreement, IsNotTriedOftenInVain) {
  Agreement::Word word{0};
  Agreement a(word, 2), b(word, 2);
  int waits = 0;
  int64_t round = 1;
  for (; round <= 200; ++round) {
    if (a.Propose(round, 1) != State::kOpen) {
      EXPECT_EQ(b.Propose(round, 1), State::kDeclined) << "at once";
      continue;
    }
    ++waits;
    EXPECT_EQ(a.Decline(), State::kDeclined);
  }
  EXPECT_EQ(waits, 8);  // after 1, 3, 7, 15, 31, 63 and 63 rounds
  while (a.Propose(round, 1) == State::kDeclined) ++round;
  EXPECT_EQ(b.Propose(round, 1), State::kAgreed);
  EXPECT_EQ(a.Look(), State::kAgreed);
  EXPECT_EQ(a.Propose(++round, 1), State::kOpen) << "in the next round";
}

// Two threads, each of which gives up now and then.
TEST(Agreement, HoldsBetweenThreads) {
  Agreement::Word word{0};
  constexpr int kCalls = 20'000;
  std::atomic<int> votes[2] = {1, 1};
  std::string outcomes[2];
  const auto run = [&](size_t me) {
    Agreement view(word, 2);
    for (int call = 0, round = 1; call < kCalls; ++call) {
      State state = view.Propose(round, 3);
      for (int looks = 0; state == State::kOpen; ++looks) {
        state = looks < 1000 + 7 * (call % 13) ? view.Look() : view.Decline();
      }
      outcomes[me] += state == State::kAgreed ? 'a' : 'v';
      if (state == State::kAgreed) continue;
      ++round;
      votes[me].store(round);
      while (votes[1 - me].load() < round) std::this_thread::yield();
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(outcomes[0], outcomes[1]);
}

}  // namespace
}  // namespace farandole
