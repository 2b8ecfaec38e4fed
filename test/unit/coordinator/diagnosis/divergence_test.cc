#include "coordinator/diagnosis/divergence.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/diagnosis/detectors.h"
#include "coordinator/protocol/negotiation.h"
#include "test/support/ignoring_listener.h"

namespace farandole {
namespace {

KeyName Named(const std::string& name, uint32_t set = kGlobalSet) {
  return {set, OpKind::kAllreduce, name};
}

bool Everybody(const KeyName&, int32_t) { return true; }

using Positions = std::vector<size_t>;

TEST(CannotGoOn, TwoThatWaitForDifferentKeysAreStuck) {
  const std::vector<WaitingRanks> waiting = {{{0}, {Named("a")}}, {{1, 2}, {Named("b")}}};
  EXPECT_EQ(CannotGoOn(waiting, Everybody), (Positions{0, 1}));
}

TEST(CannotGoOn, ARankThatMaySubmitSavesThoseThatNeedNobodyElse) {
  // Rank 2 is not among them: both wait for it alone.
  const std::vector<WaitingRanks> waiting = {{{0, 1}, {Named("a")}}};
  EXPECT_EQ(CannotGoOn(waiting, Everybody), Positions());
}

TEST(CannotGoOn, ARankThatMaySubmitDoesNotSaveThoseThatNeedOneAnother) {
  const std::vector<WaitingRanks> waiting = {{{0}, {Named("a")}}, {{1}, {Named("b")}}};
  EXPECT_EQ(CannotGoOn(waiting, Everybody), (Positions{0, 1}));  // rank 2 computes
}

TEST(CannotGoOn, OneKeyThatCanBeDecidedIsEnough) {
  const std::vector<WaitingRanks> waiting = {{{0}, {Named("a"), Named("b")}}, {{1}, {Named("b")}}};
  EXPECT_EQ(CannotGoOn(waiting, Everybody), Positions());
}

TEST(CannotGoOn, WhoGoesOnFreesOthers) {
  // Ranks 0 and 1 have "a" in common; rank 2 waits for rank 1, which will have ended "a".
  const std::vector<WaitingRanks> waiting = {
      {{0}, {Named("a")}}, {{1}, {Named("a")}}, {{2}, {Named("c")}}};
  const auto is_awaited = [](const KeyName& key, int32_t rank) {
    return key.name == "a" ? rank < 2 : rank > 0;
  };
  EXPECT_EQ(CannotGoOn(waiting, is_awaited), Positions());
}

TEST(CannotGoOn, RanksOutsideOfTheSetAndJoinedOnesAreNotMissing) {
  const std::vector<WaitingRanks> waiting = {{{0}, {Named("a", 1)}}, {{1}, {Named("b", 2)}}};
  EXPECT_EQ(CannotGoOn(waiting, [](const KeyName&, int32_t) { return false; }), Positions());
}

TEST(CannotGoOn, ACycleOverSetsIsStuck) {
  const std::vector<WaitingRanks> waiting = {
      {{0}, {Named("x", 1)}}, {{1}, {Named("y", 2)}}, {{2}, {Named("z", 3)}}};
  // Set n holds ranks n - 1 and n mod 3.
  const auto is_awaited = [](const KeyName& key, int32_t rank) {
    const auto set = static_cast<int32_t>(key.set);
    return rank == set - 1 || rank == set % 3;
  };
  EXPECT_EQ(CannotGoOn(waiting, is_awaited), (Positions{0, 1, 2}));
}

TEST(CannotGoOn, WhoMayGoOnIsNotStuck) {
  const std::vector<WaitingRanks> waiting = {{{0}, {Named("a")}}, {{1}, {Named("b")}, true}};
  EXPECT_EQ(CannotGoOn(waiting, Everybody), Positions());
}

WaitingRanks InOrder(int32_t rank, const std::vector<std::string>& names) {
  WaitingRanks waiting{{rank}, {}, true, true};
  for (const std::string& name : names) waiting.keys.push_back(Named(name));
  return waiting;
}

TEST(OutOfOrder, WhoHasOnlyFallenBehindIsNot) {
  EXPECT_EQ(OutOfOrder(std::vector{InOrder(0, {"a", "b"}), InOrder(1, {"a"})}), Positions());
  EXPECT_EQ(OutOfOrder(std::vector{InOrder(0, {"a", "b"}), InOrder(1, {})}), Positions());
}

TEST(OutOfOrder, TwoThatHaveEachSubmittedWhatTheOtherOneHasNotAre) {
  const std::vector<WaitingRanks> waiting = {InOrder(0, {"a", "b"}), InOrder(1, {"a"}),
                                             InOrder(2, {"a", "c"})};
  EXPECT_EQ(OutOfOrder(waiting), (Positions{0, 2}));
}

TEST(OutOfOrder, OnlyRanksWithAnOrderAre) {
  std::vector<WaitingRanks> waiting = {InOrder(0, {"a"}), InOrder(1, {"b"})};
  waiting[1].in_order = false;
  EXPECT_EQ(OutOfOrder(waiting), Positions());
}

TEST(DescribeDivergence, SuggestsOneNameForTwoThatAreAlike) {
  EXPECT_EQ(
      DescribeDivergence({{{0}, {Named("loss")}}, {{1, 2, 3}, {Named("losss")}}}, false),
      "ranks wait for different operations, and none can go on: rank 0 waits for allreduce "
      "\"loss\"; ranks 1, 2, 3 wait for allreduce \"losss\"; rank 0 is the odd one out; did you "
      "mean one name by \"loss\" and \"losss\"?");
}

TEST(DescribeDivergence, NumbersInNamesAreMeant) {
  EXPECT_EQ(DescribeDivergence({{{0}, {Named("layer1")}}, {{1}, {Named("layer2")}}}, true),
            "ranks wait for different operations, and none can go on: rank 0 waits for allreduce "
            "\"layer1\"; rank 1 waits for allreduce \"layer2\"; all of them were run before: the "
            "orders of the calls differ");
}

TEST(DescribeDivergence, SaysWhereRanksAreAndWhatCallsInOrderNeed) {
  WaitingRanks first = InOrder(0, {"loss"}), second = InOrder(1, {"losss"});
  first.place = "train.py:12 in main";
  EXPECT_EQ(DescribeDivergence({first, second}, true),
            "ranks wait for different operations, and none can go on: rank 0 waits for allreduce "
            "\"loss\" at train.py:12 in main; rank 1 waits for allreduce \"losss\"; all ranks must "
            "make the same calls in the same order");
}

// Rank 0 may have skipped "loss", or rank 1 backward().
TEST(DescribeDivergence, SaysThatBackwardIsACall) {
  const std::string text = DescribeDivergence(
      {{{0}, {Named("gradients.0.weight"), Named("gradients.0.bias")}}, {{1}, {Named("loss")}}},
      true);
  EXPECT_EQ(text,
            "ranks wait for different operations, and none can go on: rank 0 waits for the "
            "gradients of optimizer 1 (backward()/step()); rank 1 waits for allreduce \"loss\"; "
            "all ranks must make the same calls in the same order; backward() is such a call, or "
            "step() where DistributedOptimizer has complete=\"step\"");
}

TEST(DescribeDivergence, RanksThatWaitForOtherKeysOfOneCallAreOneGroup) {
  const std::string text = DescribeDivergence({{{0, 2}, {Named("gradients.0.weight")}},
                                               {{1}, {Named("loss")}},
                                               {{3}, {Named("gradients.0.bias")}}},
                                              true);
  EXPECT_NE(text.find("ranks 0, 2, 3 wait for the gradients of optimizer 1 (backward()/step()); "
                      "rank 1 waits for allreduce \"loss\"; rank 1 is the odd one out; "),
            std::string::npos)
      << text;
}

TEST(DescribeDivergence, NobodyIsOddBeforeMostRanksAreKnownToWaitForTheSame) {
  const std::vector<WaitingRanks> diverged = {{{0, 1}, {Named("a")}}, {{3}, {Named("b")}}};
  EXPECT_NE(DescribeDivergence(diverged, true).find("rank 3 is the odd one out"),
            std::string::npos);
  const std::string text = DescribeDivergence(diverged, true, {2});
  EXPECT_NE(text.find("\"b\"; rank 2 has not come that far; all of them"), std::string::npos)
      << text;
  // One of the small set waits in it for the others, which need it in the large one.
  const std::string sets =
      DescribeDivergence({{{0, 1}, {Named("a")}}, {{2}, {Named("a", 1)}}}, true);
  EXPECT_EQ(sets.find("odd"), std::string::npos) << sets;
}

/// A rank whose program is blocked when the test says so; messages move in Settle.
struct Node final : IgnoringListener, DetectorListener {
  explicit Node(NegotiationOptions options)
      : negotiation(std::move(options), *this, Detectors(*this)) {}
  void SendUp(int, const UpMessage& message) override { up.push_back(message); }
  void SendDown(int child, const DownMessage& message) override {
    if (message.type == DownType::kWhoWaits) ++questions;
    down.emplace_back(child, message);
  }
  void OnWork(const WorkDecision& work) override { number = work.number; }
  bool Holds(KeyId) const override { return true; }
  bool IsBlocked() const override { return is_blocked; }
  bool KnowsAllThreads() const override { return knows_all_threads; }
  std::vector<std::string> OnStalls(const std::vector<StallFacts>&, int64_t) override { return {}; }
  bool AskActivity(std::vector<uint64_t>, int64_t) override {
    ++place_questions;
    return !place.empty();
  }
  std::optional<Activity> FindActivity(int64_t) override {
    if (!is_place_known) return std::nullopt;
    return Activity{FailureKind::kBlockedInPython, place};
  }
  void OnStallShutdown(const Status& status) override { error = status; }

  Negotiation negotiation;
  std::vector<UpMessage> up;
  std::vector<std::pair<int, DownMessage>> down;
  int64_t number = 0;  // of the last decision
  bool is_blocked = false;
  bool knows_all_threads = true;
  std::string place;
  bool is_place_known = true;
  int questions = 0;
  int place_questions = 0;
  Status error;
};

class Job {
 public:
  /// @param parent  Of each rank, a lower one.
  explicit Job(std::vector<int> parent, bool check = true, bool in_order = false)
      : parent_(std::move(parent)) {
    NegotiationOptions options;
    options.size = static_cast<int>(parent_.size());
    options.parent = parent_;
    options.planes = {0, 0};
    options.divergence_check = check;
    options.in_order = in_order;
    for (; options.rank < options.size; ++options.rank)
      nodes_.push_back(std::make_unique<Node>(options));
  }
  Node& operator[](int rank) { return *nodes_[static_cast<size_t>(rank)]; }
  void Submit(int rank, const std::string& name, uint32_t set = kGlobalSet,
              const std::string& function = "") {
    Negotiation& negotiation = (*this)[rank].negotiation;
    Signature signature;
    signature.function = function;
    signature.tensors = {{"", DType::kFloat32, {2}}};
    ASSERT_TRUE(negotiation.Submit(negotiation.Intern(Named(name, set)), signature, {}).ok());
  }
  void AddSet(const std::vector<int32_t>& ranks) {
    for (const auto& node : nodes_) {
      Signature signature;
      signature.kind = OpKind::kAddSet;
      signature.ranks = ranks;
      const KeyId key = node->negotiation.Intern({kGlobalSet, OpKind::kAddSet, "add"});
      ASSERT_TRUE(node->negotiation.Submit(key, signature, {}).ok());
    }
    Settle();
  }
  void SubmitAndWait(int rank, const std::string& name, uint32_t set = kGlobalSet) {
    Submit(rank, name, set);
    (*this)[rank].is_blocked = true;
  }
  void Pass(int64_t ms) {
    for (int64_t i = 0; i < ms; i += 10) {
      now_ns_ += 10 * kNsPerMs;
      for (const auto& node : nodes_) (void)node->negotiation.Tick(now_ns_);
      Settle();
    }
  }
  void Settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < nodes_.size(); ++r) {
        nodes_[r]->negotiation.Flush();
        for (const UpMessage& message : std::exchange(nodes_[r]->up, {})) {
          Expect(nodes_[static_cast<size_t>(parent_[r])]->negotiation.ReceiveUp(static_cast<int>(r),
                                                                                message));
          moved = true;
        }
        for (const auto& [child, message] : std::exchange(nodes_[r]->down, {})) {
          Expect((*this)[child].negotiation.ReceiveDown(static_cast<int>(r), message));
          moved = true;
        }
      }
    }
  }
  void ExpectOk() {
    for (const auto& node : nodes_) EXPECT_TRUE(node->error.ok()) << node->error.ToString();
  }
  void ExpectDiverged(const std::vector<int32_t>& ranks) {
    for (const auto& node : nodes_) {
      EXPECT_EQ(node->error.code(), Code::kMismatch);
      EXPECT_EQ(node->error.facts().kind, FailureKind::kDiverged);
      EXPECT_EQ(node->error.facts().ranks, ranks);
      EXPECT_EQ(node->error.message(), (*this)[0].error.message());
    }
  }

 private:
  static void Expect(const Status& status) { EXPECT_TRUE(status.ok()) << status.ToString(); }
  std::vector<int> parent_;
  std::vector<std::unique_ptr<Node>> nodes_;
  int64_t now_ns_ = kNsPerSecond;
};

TEST(Divergence, EndsTheJobWithin100Ms) {
  Job job({-1, 0, 0, 1});
  for (int r = 0; r < 4; ++r) job.SubmitAndWait(r, r == 2 ? "losss" : "loss");
  job.Pass(60);
  job.ExpectDiverged({0, 1, 2, 3});
}

TEST(Divergence, GivesThreadsThatHaveMadeNoCallASecond) {
  Job job({-1, 0, 1});
  job[2].knows_all_threads = false;
  for (int step = 0; step < 3; ++step) {  // a second in all, in which the ranks are found twice
    for (int r = 0; r < 3; ++r) job.SubmitAndWait(r, r == 2 ? "b" : "a");
    job.Pass(600);
    job.ExpectOk();
    for (int r = 0; r < 3; ++r) job.Submit(r, r == 2 ? "a" : "b");  // by such a thread
    job.Settle();
    for (int r = 0; r < 3; ++r) {
      job[r].is_blocked = false;
      for (int64_t number = 1; number <= job[r].number; ++number)
        job[r].negotiation.BatchDone(number, 0);
    }
  }
  for (int r = 0; r < 3; ++r) job.SubmitAndWait(r, r == 2 ? "c" : "a");
  job.Pass(1000);
  job.ExpectOk();
  job.Pass(1100);
  job.ExpectDiverged({0, 1, 2});
}

TEST(Divergence, NamesTheRanksThatDoNotWaitYet) {
  Job job({-1, 0, 0, 1});
  job.SubmitAndWait(0, "a");
  job.SubmitAndWait(3, "b");
  job.Submit(1, "a");
  job.Pass(60);
  job.ExpectDiverged({0, 3});
  const std::string& text = job[0].error.message();
  EXPECT_NE(text.find("; ranks 1, 2 have not come that far; "), std::string::npos) << text;
}

TEST(Divergence, WaitsForARankThatMaySubmit) {
  Job job({-1, 0, 0, 1});
  for (int r = 0; r < 3; ++r) job.SubmitAndWait(r, "a");
  job.Pass(5000);
  job.ExpectOk();
  EXPECT_LT(job[0].questions, 2 * 30);  // to two children: after 30 ms, 60 ms, ... of three ranks
  job.SubmitAndWait(3, "b");            // an hour later, the moment is when the last one waits
  job.Pass(60);
  job.ExpectDiverged({0, 1, 2, 3});
}

TEST(Divergence, DoesNotMindARankThatSubmitsInTime) {
  Job job({-1, 0, 1});
  for (int step = 0; step < 5; ++step) {
    for (int r = 0; r < 2; ++r) job.SubmitAndWait(r, "a");
    job.Pass(200);
    job.SubmitAndWait(2, "a");
    job.Settle();
    for (int r = 0; r < 3; ++r) {
      job[r].negotiation.BatchDone(job[r].number, 0);
      job[r].is_blocked = false;
    }
    job.Pass(50);
  }
  job.ExpectOk();
}

TEST(Divergence, AJoinedRankIsNotMissing) {
  Job job({-1, 0, 0});
  EXPECT_TRUE(job[1].negotiation.Join().ok());
  job[1].is_blocked = true;
  job.SubmitAndWait(0, "a");
  job.Pass(100);
  job.ExpectOk();
  job.SubmitAndWait(2, "b");
  job.Pass(60);
  job.ExpectDiverged({0, 2});
}

TEST(Divergence, SeesACycleOverProcessSetsDecidedElsewhere) {
  Job job({-1, 0, 1, 1});
  job.AddSet({1, 2});  // decided by rank 1
  job.AddSet({1, 3});
  job.AddSet({2, 3});
  job.SubmitAndWait(1, "x", 1);
  job.SubmitAndWait(3, "y", 2);
  job.SubmitAndWait(2, "z", 3);
  job.Pass(60);  // rank 0 takes part in none of them
  job.ExpectDiverged({1, 2, 3});
}

TEST(Divergence, SaysWhereTheRanksAreAsSoonAsTheySay) {
  Job job({-1, 0, 1});
  for (int r = 0; r < 3; ++r) {
    job[r].place = r == 0 ? "train.py:1" : "train.py:2";
    job.SubmitAndWait(r, r == 0 ? "a" : "b");
  }
  job[2].is_place_known = false;
  job.Pass(100);
  job.ExpectOk();
  job[2].is_place_known = true;
  job.Pass(20);
  job.ExpectDiverged({0, 1, 2});
  const std::string& text = job[0].error.message();
  EXPECT_NE(text.find("\"a\" at train.py:1; ranks 1, 2 wait for allreduce \"b\" at train.py:2"),
            std::string::npos)
      << text;
}

TEST(Divergence, GoesWithoutAPlaceThatNobodyTells) {
  Job job({-1, 0});
  for (int r = 0; r < 2; ++r) {
    job[r].place = "never told";
    job[r].is_place_known = false;
    job.SubmitAndWait(r, r == 0 ? "a" : "b");
  }
  job.Pass(1100);
  job.ExpectDiverged({0, 1});
  EXPECT_EQ(job[0].error.message().find("never told"), std::string::npos);
}

TEST(Divergence, AsksForNoPlaceOfRanksThatCanGoOn) {
  Job job({-1, 0, 0});
  for (int r = 0; r < 2; ++r) job.SubmitAndWait(r, "a");
  job.Pass(5000);
  EXPECT_GT(job[0].questions, 0);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(job[r].place_questions, 0);
}

TEST(Divergence, RanksInOrderNeedNotBeBlocked) {
  Job job({-1, 0, 1}, true, true);
  job.Submit(0, "a");
  job.Submit(1, "a");
  job.Pass(1000);
  job.ExpectOk();
  job.Submit(2, "b");
  job.Pass(900);
  job.ExpectOk();  // a thread may yet start the other one
  job.Pass(200);
  job.ExpectDiverged({0, 1, 2});
}

TEST(Divergence, OperationsWithAFunctionOfTheirOwnHaveNoOrder) {
  Job job({-1, 0}, true, true);
  job.Submit(0, "a", kGlobalSet, "send");
  job.Submit(1, "b", kGlobalSet, "send");
  job.Pass(1000);
  job.ExpectOk();
  for (int r = 0; r < 2; ++r) job[r].is_blocked = true;
  job.Pass(3000);  // the time to the next look has grown
  job.ExpectDiverged({0, 1});
}

TEST(Divergence, CanBeSwitchedOff) {
  Job job({-1, 0}, false);
  job.SubmitAndWait(0, "a");
  job.SubmitAndWait(1, "b");
  job.Pass(5000);
  job.ExpectOk();
}

}  // namespace
}  // namespace farandole
