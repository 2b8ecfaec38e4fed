// Rounds of gradients between ranks in one thread: what is learned, what is allocated, what is
// compared.
#include "coordinator/gradients/gradient_round.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "test/support/stepped_job.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(FormGroups, ClosesWithTheTensorThatFillsAndKeepsAShortTail) {
  const std::vector<int32_t> order = {3, 1, 0, 2, 4};
  const std::vector<int64_t> bytes = {60, 50, 10, 60, 2};  // by tensor
  EXPECT_THAT(FormGroups(order, bytes, 100),
              ElementsAre(ElementsAre(3, 1), ElementsAre(0), ElementsAre(2, 4)));
  EXPECT_THAT(FormGroups(order, bytes, 0), ::testing::SizeIs(5));
  EXPECT_TRUE(FormGroups({}, {}, 100).empty());
}

/// Gives memory by the number of the gradient, and notes for which.
class Results final : public ResultAllocator {
 public:
  Result<void*> Allocate(size_t tensor, std::span<const int64_t>, int64_t bytes) override {
    std::vector<float>& memory = given[tensor];
    memory.assign(static_cast<size_t>(bytes) / sizeof(float), -1.0f);
    return memory.data();
  }
  bool IsInStreamOrder() const override { return false; }
  std::map<size_t, std::vector<float>> given;
};

/// One optimizer on every rank, of tensors "0", "1", ... of two floats each.
class GradientRounds : public ::testing::Test {
 protected:
  void Open(int size, int tensors) {
    job_ = std::make_unique<SteppedJob>(size);
    data_.assign(static_cast<size_t>(size),
                 std::vector<std::vector<float>>(static_cast<size_t>(tensors), {0.0f, 0.0f}));
    for (int rank = 0; rank < size; ++rank) {
      results_.push_back(std::make_shared<Results>());
      wraps_.push_back(std::make_unique<WrapComparison>(job_->engine(rank)));
      rounds_.push_back(Wrap(rank, tensors));
    }
  }

  std::unique_ptr<GradientRound> Wrap(int rank, int tensors,
                                      const std::vector<std::string>& labels = {}) {
    std::vector<TensorSignature> signatures;
    for (int i = 0; i < tensors; ++i)
      signatures.push_back({std::to_string(i), DType::kFloat32, {2}});
    return std::make_unique<GradientRound>(job_->engine(rank), options_, signatures, labels,
                                           wraps_[static_cast<size_t>(rank)].get(),
                                           results_[static_cast<size_t>(rank)]);
  }

  GradientRound& round(int rank) { return *rounds_[static_cast<size_t>(rank)]; }
  std::vector<float>& data(int rank, int i) {
    return data_[static_cast<size_t>(rank)][static_cast<size_t>(i)];
  }

  void Mark(int rank, int32_t i, float value) {
    data(rank, i).assign(2, value);
    ASSERT_TRUE(round(rank)
                    .Mark(i, data(rank, i).data(), data(rank, i).data(), GradientVote::kPresent)
                    .ok());
  }
  void MarkAbsent(int rank, int32_t i) {
    ASSERT_TRUE(round(rank).Mark(i, nullptr, nullptr, GradientVote::kAbsent).ok());
  }

  /// Compares, ends and waits on every rank.
  std::vector<Status> End(const std::string& failed_on_0 = {}) {
    std::vector<Status> outcomes(rounds_.size());
    for (size_t rank = 0; rank < rounds_.size(); ++rank) {
      job_->SettleHeld();
      if (!rounds_[rank]->Compare(0, &outcomes[rank])) ADD_FAILURE() << "Compare waits";
    }
    for (size_t rank = 0; rank < rounds_.size(); ++rank)
      if (outcomes[rank].ok()) (void)rounds_[rank]->End(rank == 0 ? failed_on_0 : std::string());
    job_->SettleHeld();
    for (size_t rank = 0; rank < rounds_.size(); ++rank) {
      if (outcomes[rank].ok() && !rounds_[rank]->Wait(0, &outcomes[rank]))
        ADD_FAILURE() << "Wait waits";
    }
    return outcomes;
  }

  void ExpectAllOk(const std::vector<Status>& outcomes) {
    for (const Status& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.message();
  }

  void RunRound(const std::vector<int32_t>& order) {
    for (int rank = 0; rank < job_->size(); ++rank) {
      ASSERT_TRUE(round(rank).Open().ok());
      for (const int32_t i : order) Mark(rank, i, 1.0f);
    }
    ExpectAllOk(End());
  }

  GradientRound::Options options_;
  std::unique_ptr<SteppedJob> job_;
  std::vector<std::shared_ptr<Results>> results_;
  std::vector<std::unique_ptr<WrapComparison>> wraps_;
  std::vector<std::unique_ptr<GradientRound>> rounds_;
  std::vector<std::vector<std::vector<float>>> data_;
};

TEST_F(GradientRounds, BeginWithOneGroupAndFormGroupsInTheFirstRanksOrder) {
  options_.group_bytes = 8;
  Open(2, 3);
  EXPECT_EQ(round(0).group_count(), 0);
  for (int rank = 0; rank < 2; ++rank) {
    for (const int32_t i :
         rank == 0 ? std::vector<int32_t>{2, 0, 1} : std::vector<int32_t>{0, 1, 2})
      Mark(rank, i, 1.0f + static_cast<float>(rank));
    EXPECT_FALSE(round(rank).InFlight()) << "nothing starts before the order is known";
  }
  ExpectAllOk(End());
  EXPECT_THAT(data(1, 2), ElementsAre(3.0f, 3.0f));
  EXPECT_EQ(round(0).group_count(), 3);
  EXPECT_EQ(round(1).group_count(), 3);

  for (int rank = 0; rank < 2; ++rank) Mark(rank, 2, 1.0f);
  EXPECT_TRUE(round(0).InFlight()) << "2 is first in the order of rank 0, and fills its group";
  for (int rank = 0; rank < 2; ++rank) {
    Mark(rank, 1, 1.0f);
    Mark(rank, 0, 1.0f);
  }
  ExpectAllOk(End());
}

TEST_F(GradientRounds, PutWhatNobodyContributesAtTheEndOfTheLastGroup) {
  options_.group_bytes = 8;
  Open(2, 3);
  for (int rank = 0; rank < 2; ++rank) {
    MarkAbsent(rank, 0);
    Mark(rank, 1, 1.0f);
    Mark(rank, 2, 1.0f);
  }
  ExpectAllOk(End());
  EXPECT_TRUE(round(0).Skipped(0));
  EXPECT_FALSE(round(0).Skipped(1));
  EXPECT_EQ(round(0).group_count(), 2) << "{1}, {2, 0}";
}

TEST_F(GradientRounds, AllocateResultsOfAbsentGradientsOnly) {
  Open(3, 2);
  for (int step = 0; step < 2; ++step) {
    for (int rank = 0; rank < 3; ++rank) {
      Mark(rank, 0, 1.0f);
      rank == 1 ? Mark(rank, 1, 5.0f) : MarkAbsent(rank, 1);
    }
    ExpectAllOk(End());
    EXPECT_TRUE(results_[1]->given.empty());
    for (const size_t rank : {size_t{0}, size_t{2}}) {
      EXPECT_THAT(results_[rank]->given, ::testing::SizeIs(1));
      EXPECT_THAT(results_[rank]->given[1], ElementsAre(5.0f, 5.0f));
    }
  }
}

TEST_F(GradientRounds, AllocateNothingThatNobodyContributes) {
  Open(2, 2);
  for (int rank = 0; rank < 2; ++rank) {
    Mark(rank, 0, 1.0f);
    MarkAbsent(rank, 1);
  }
  ExpectAllOk(End());
  EXPECT_TRUE(results_[0]->given.empty());
}

TEST_F(GradientRounds, TellWhatIsDueAfterAsManyAccumulationsAsLearned) {
  Open(1, 2);
  EXPECT_EQ(round(0).Accumulated(0).value(), GradientRound::kNoRound);
  for (int step = 0; step < 2; ++step) {
    ASSERT_TRUE(round(0).Open().ok());
    EXPECT_EQ(round(0).Accumulated(0).value(), -1);
    EXPECT_EQ(round(0).Accumulated(0).value(), -1) << "0 is due with the next gradient";
    EXPECT_EQ(round(0).Accumulated(1).value(), step == 0 ? -1 : 0);
    EXPECT_EQ(round(0).NextUnmarked(), 0);
    Mark(0, 0, 1.0f);
    EXPECT_EQ(round(0).NextUnmarked(), 1);
    Mark(0, 1, 1.0f);
    EXPECT_EQ(round(0).NextUnmarked(), -1);
    ExpectAllOk(End());
  }
  ASSERT_TRUE(round(0).Open().ok());
  (void)round(0).Accumulated(0);
  (void)round(0).Accumulated(0);
  EXPECT_EQ(round(0).Accumulated(1).value(), 0);
  const Result<int32_t> again = round(0).Accumulated(0);
  ASSERT_FALSE(again.ok());
  EXPECT_THAT(again.status().message(), HasSubstr("\"0\" was accumulated again after it was sent"));
}

TEST_F(GradientRounds, GoOnWithTheEngineOfAnotherJobOfOtherSize) {
  options_.group_bytes = 8;
  Open(3, 2);
  RunRound({1, 0});
  const auto before = std::move(job_);
  job_ = std::make_unique<SteppedJob>(2);
  for (size_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(rounds_[rank]->Unbind().ok());
  rounds_.pop_back();
  rounds_.erase(rounds_.begin());  // its first rank is gone
  rounds_.push_back(nullptr);      // and one has come
  wraps_.clear();
  for (int rank = 0; rank < 2; ++rank)
    wraps_.push_back(std::make_unique<WrapComparison>(job_->engine(rank)));
  EXPECT_FALSE(round(0).is_bound());
  ASSERT_TRUE(round(0).Rebind(job_->engine(0), wraps_[0].get(), kGlobalSet).ok());
  ASSERT_TRUE(round(0).Stepped().ok()) << "the round of before was not stepped, and counts no more";
  rounds_[1] = Wrap(1, 2);
  EXPECT_EQ(round(0).group_count(), 0) << "the newcomer knows no order";
  RunRound({0, 1});
  EXPECT_THAT(data(1, 0), ElementsAre(2.0f, 2.0f));
  EXPECT_EQ(round(0).succeeded(), 2);
  EXPECT_EQ(round(0).group_count(), 2);
  EXPECT_EQ(round(1).group_count(), 2);
  RunRound({0, 1});
}

TEST_F(GradientRounds, TakeMoreTensorsInAnOpenRound) {
  Open(2, 1);
  RunRound({0});
  std::vector<std::vector<float>> added(2, {2.0f, 2.0f});
  for (int rank = 0; rank < 2; ++rank) {
    Mark(rank, 0, 1.0f);
    ASSERT_TRUE(round(rank).Add({{"1", DType::kFloat32, {2}}}).ok());
    void* const memory = added[static_cast<size_t>(rank)].data();
    ASSERT_TRUE(round(rank).Mark(1, memory, memory, GradientVote::kPresent).ok());
  }
  ExpectAllOk(End());
  EXPECT_THAT(data(0, 0), ElementsAre(2.0f, 2.0f));
  EXPECT_THAT(added[1], ElementsAre(4.0f, 4.0f));
}

TEST_F(GradientRounds, RaiseAFlagOnAllRanksForOneRound) {
  options_.has_flag = true;
  Open(3, 1);
  for (const int raising : {-1, 2, -1}) {
    for (int rank = 0; rank < 3; ++rank) {
      Mark(rank, 0, 1.0f);
      if (rank == raising) round(rank).RaiseFlag();
    }
    ExpectAllOk(End());
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(round(rank).flag(), raising >= 0);
  }
}

TEST_F(GradientRounds, NameTheOptimizerThatRanksWrapDifferently) {
  Open(2, 1);
  for (int rank = 0; rank < 2; ++rank)
    rounds_[static_cast<size_t>(rank)] =
        Wrap(rank, 1, {rank == 0 ? "weight float32 [2]" : "bias float32 [2]"});
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(round(rank).number(), 1);
    Mark(rank, 0, 1.0f);
  }
  for (const Status& outcome : End()) {
    EXPECT_EQ(outcome.code(), Code::kMismatch);
    EXPECT_THAT(outcome.message(), HasSubstr("weight float32 [2]"));
    EXPECT_THAT(outcome.message(), HasSubstr("bias float32 [2]"));
    EXPECT_THAT(outcome.message(), HasSubstr("wrapped optimizer 2"));
  }
  EXPECT_FALSE(round(0).is_open()) << "no rank can begin it";
}

TEST_F(GradientRounds, FailOnAllRanksWithTheReasonOfOneAndGoOn) {
  Open(2, 2);
  RunRound({0, 1});
  Mark(0, 0, 1.0f);
  for (const int32_t i : {0, 1}) Mark(1, i, 1.0f);
  for (const Status& outcome : End("ValueError: no loss")) {
    EXPECT_EQ(outcome.code(), Code::kAborted);
    EXPECT_THAT(outcome.message(), HasSubstr("ValueError: no loss"));
  }
  EXPECT_EQ(round(0).rounds(), 2);
  EXPECT_EQ(round(0).succeeded(), 1);
  RunRound({0, 1});
  EXPECT_THAT(data(1, 1), ElementsAre(2.0f, 2.0f));
}

// The first rank is a program of another kind.
TEST_F(GradientRounds, RefuseAnOrderThatHasNotEachGradientOnce) {
  options_.prefix = "p.";
  Open(2, 2);
  for (const int32_t i : {0, 1}) Mark(1, i, 1.0f);
  ASSERT_TRUE(round(1).End({}).ok());
  int32_t order[] = {1, 7};
  int64_t bytes[] = {8, 8};
  int64_t groups[] = {8, kNever};
  const auto start = [&](const char* name, const std::vector<TensorSignature>& tensors,
                         const std::vector<void*>& memory) {
    Signature signature;
    signature.tensors = tensors;
    OperationRegistry& operations = job_->engine(0).operations();
    const HeldOperation held(
        operations.Prepare({kGlobalSet, OpKind::kAllreduce, name}, signature).value());
    const std::vector<const void*> in(memory.begin(), memory.end());
    EXPECT_TRUE(job_->engine(0).Start(*held, in, memory).ok());
  };
  start("p.group 0 of 1", {{"0", DType::kFloat32, {2}}, {"1", DType::kFloat32, {2}}},
        {data(0, 0).data(), data(0, 1).data()});
  start("p.number and order",
        {{"order", DType::kInt32, {2}},
         {"bytes", DType::kInt64, {2}},
         {"groups", DType::kInt64, {2}},
         {"number of wrapped optimizers", DType::kInt32, {0, 0}}},
        {order, bytes, groups, nullptr});
  job_->SettleHeld();
  Status outcome;
  ASSERT_TRUE(round(1).Wait(0, &outcome));
  EXPECT_TRUE(outcome.ok()) << outcome.message();
  EXPECT_EQ(round(1).group_count(), 0);
  for (const int32_t i : {0, 1}) Mark(1, i, 1.0f);
  const Status refused = round(1).End({});
  EXPECT_EQ(refused.code(), Code::kInternal);
  EXPECT_THAT(refused.message(), HasSubstr("sent an order of gradients that does not have each"));
}

TEST_F(GradientRounds, RefuseWhatIsOutOfTurn) {
  Open(1, 2);
  EXPECT_EQ(round(0).Mark(2, nullptr, nullptr, GradientVote::kAbsent).code(),
            Code::kInvalidArgument);
  Mark(0, 0, 1.0f);
  EXPECT_THAT(round(0).Mark(0, nullptr, nullptr, GradientVote::kAbsent).message(),
              HasSubstr("\"0\" was already sent in this round"));
  EXPECT_THAT(round(0).Redefine({{"0", DType::kFloat32, {2}}}, DeviceKind::kCpu).message(),
              HasSubstr("1 gradients redefined; expected 2"));
  Status outcome;
  EXPECT_TRUE(round(0).Wait(0, &outcome));
  EXPECT_EQ(outcome.code(), Code::kInvalidArgument);
  EXPECT_EQ(round(0).End({}).code(), Code::kInvalidArgument) << "before the wraps were compared";
  job_->SettleHeld();
  ASSERT_TRUE(round(0).Compare(0, &outcome));
  EXPECT_THAT(round(0).End({}).message(), HasSubstr("without gradient \"1\""));
  Mark(0, 1, 1.0f);
  ExpectAllOk(End());
}

TEST(StepAnnouncement, GoesWithWhatIsStartedNextWhereCoresAreFilled) {
  EngineOptions options = SteppedJob::Stepped();
  options.fills_cores = true;
  SteppedJob job(2, options);
  ASSERT_TRUE(job.engine(1).AnnounceStep(kGlobalSet, "p.", {.step = 1}).ok());
  job.SettleHeld();
  EXPECT_EQ(job.hub().Sent(1, 0).messages, 0);
  const HeldOperation barrier(
      job.engine(1).operations().Prepare({kGlobalSet, OpKind::kBarrier, "b"}, {}).value());
  ASSERT_TRUE(job.engine(1).Start(*barrier, {}, {}).ok());
  job.SettleHeld();
  EXPECT_EQ(job.hub().Sent(1, 0).messages, 1);
}

/// Steps of which the first rank's tuner decides, of three tensors: with groups of 8 bytes each is
/// one, with those of the grid there is one group.
class TunedRounds : public GradientRounds {
 protected:
  void OpenTuned(int size) {
    options_.group_bytes = 8;
    options_.tuner.emplace(8);
    Open(size, 3);
  }
  /// @return how many groups each rank has then.
  std::vector<int32_t> Step(const std::string& failed_on_0 = {}) {
    job_->clock().Advance((round(0).group_count() == 3 ? ms_of_three_ : 8) * kNsPerMs);
    std::vector<int32_t> counts;
    for (int rank = 0; rank < job_->size(); ++rank) {
      EXPECT_TRUE(round(rank).Open().ok());
      for (const int32_t i : {2, 0, 1}) Mark(rank, i, static_cast<float>(rank + i));
    }
    const bool is_ok = failed_on_0.empty();
    for (const Status& outcome : End(failed_on_0)) EXPECT_EQ(outcome.ok(), is_ok);
    for (int rank = 0; rank < job_->size(); ++rank) {
      if (is_ok) {
        EXPECT_THAT(data(rank, 2), ElementsAre(5.0f, 5.0f));
      }
      EXPECT_TRUE(round(rank).Stepped().ok());
      counts.push_back(round(rank).group_count());
    }
    EXPECT_THAT(counts, ::testing::Each(counts.front()));
    return counts;
  }
  /// Steps until the log says that it has ended. @return whether both numbers of groups were seen.
  bool Tune() {
    std::set<int32_t> seen;
    for (size_t i = 0; i < kMostRounds && job_->log(0).empty(); ++i) seen.insert(Step().front());
    return seen.size() == 2;
  }

  /// The ranks that are left go on in another job, of two, with a newcomer if there is one only.
  void GoOnAsTwo() {
    for (const auto& one : rounds_) ASSERT_TRUE(one->Unbind().ok());
    const auto before = std::exchange(job_, std::make_unique<SteppedJob>(2));
    const auto wraps = std::exchange(wraps_, {});
    data_.resize(2, data_.front());
    results_.resize(2, results_.front());
    for (int rank = 0; rank < 2; ++rank) {
      wraps_.push_back(std::make_unique<WrapComparison>(job_->engine(rank)));
      if (rank == static_cast<int>(rounds_.size()))
        rounds_.push_back(Wrap(rank, 3));
      else
        ASSERT_TRUE(round(rank).Rebind(job_->engine(rank), wraps_.back().get(), kGlobalSet).ok());
    }
  }

  static constexpr size_t kMostRounds =
      1 + GroupTuner::kRounds * (GroupTuner::kSweeps * 6 + 2 * GroupTuner::kPairs);
  int ms_of_three_ = 10;
};

TEST_F(TunedRounds, ChangeTheirGroupsOnAllRanksAfterTheSameRoundAndKeepTheBest) {
  OpenTuned(2);
  EXPECT_TRUE(Tune());
  EXPECT_THAT(job_->log(0),
              ElementsAre(::testing::AllOf(HasSubstr("autotuning has ended: groups of 256 KiB: "),
                                           HasSubstr(" a step, with 8 bytes, as set, "))));
  EXPECT_TRUE(job_->log(1).empty());
  EXPECT_EQ(Step().front(), 1);
}

TEST_F(TunedRounds, EndWithTheSizeThatIsSetIfNoneIsBetter) {
  ms_of_three_ = 7;
  OpenTuned(2);
  EXPECT_TRUE(Tune());
  EXPECT_THAT(job_->log(0), ElementsAre(HasSubstr("no other size is clearly better")));
  EXPECT_EQ(Step().front(), 3);
}

TEST_F(TunedRounds, GoOnAfterAFailedRoundWhicheverItIs) {
  OpenTuned(2);
  for (size_t i = 0; i < 2 * GroupTuner::kRounds; ++i) {
    for (int failing = 0; failing < 2; ++failing) Step("ValueError: no loss");
    Step();  // each third, so that rounds fail that tell of other groups
  }
  EXPECT_TRUE(Tune());
  EXPECT_EQ(Step().front(), 1);
}

TEST_F(TunedRounds, FollowTheFirstRankAlone) {
  options_.prefix = "p.";
  OpenTuned(2);
  options_.tuner.reset();
  options_.group_bytes = 1000;
  rounds_[1] = Wrap(1, 3);
  EXPECT_TRUE(Tune());
  EXPECT_EQ(Step().front(), 1);
}

TEST_F(TunedRounds, GoOnInAnotherJobWithWhatWasFound) {
  OpenTuned(2);
  EXPECT_TRUE(Tune());
  GoOnAsTwo();
  for (size_t i = 0; i < 2 * GroupTuner::kRounds; ++i) EXPECT_EQ(Step().front(), 1);
  EXPECT_TRUE(job_->log(0).empty());
}

TEST_F(TunedRounds, GoBackToTheSizeThatIsSetIfTheRankThatTriesIsLost) {
  options_.prefix = "p.";
  OpenTuned(2);
  options_.tuner.reset();
  rounds_[1] = Wrap(1, 3);
  for (size_t i = 0; i < 2 * GroupTuner::kRounds; ++i) Step();
  ASSERT_EQ(round(1).group_count(), 1) << "another size is tried";
  rounds_.erase(rounds_.begin());
  GoOnAsTwo();
  EXPECT_EQ(Step().front(), 3);
}

TEST_F(TunedRounds, BeginWhenASecondRankComes) {
  OpenTuned(1);
  for (size_t i = 0; i < 2 * GroupTuner::kRounds; ++i) RunRound({2, 0, 1});
  GoOnAsTwo();
  EXPECT_TRUE(Tune());
  EXPECT_EQ(Step().front(), 1);
}

// Else each would wait for groups that the other does not have.
TEST_F(TunedRounds, AreTheSameGroupsOnARankWhoseGradientsHaveAnotherSize) {
  OpenTuned(2);
  std::vector<TensorSignature> halves;
  for (int i = 0; i < 3; ++i) halves.push_back({std::to_string(i), DType::kFloat16, {2}});
  ASSERT_TRUE(round(1).Redefine(halves, DeviceKind::kCpu).ok());
  for (size_t i = 0; i < 2 * GroupTuner::kRounds; ++i) {
    for (int rank = 0; rank < 2; ++rank)
      for (const int32_t tensor : {2, 0, 1}) Mark(rank, tensor, 1.0f);
    for (const Status& outcome : End()) ASSERT_EQ(outcome.code(), Code::kMismatch);
    for (int rank = 0; rank < 2; ++rank) ASSERT_EQ(round(rank).group_count(), 3);
  }
  ASSERT_TRUE(round(0).Redefine(halves, DeviceKind::kCpu).ok());
  RunRound({2, 0, 1});
}

TEST_F(TunedRounds, OfOneRankAreNotTuned) {
  OpenTuned(1);
  for (size_t i = 0; i < kMostRounds; ++i) RunRound({2, 0, 1});
  EXPECT_EQ(round(0).group_count(), 3);
  EXPECT_TRUE(job_->log(0).empty());
}

/// Two ranks with threads of their own, whose host has no core for the engine threads.
class RoundsOnFilledCores : public ::testing::Test {
 protected:
  static EngineOptions Filled() {
    EngineOptions options;
    options.fills_cores = true;
    return options;
  }

  /// One rank's rounds of tensors of 3, 40,000 and 5 elements.
  struct Rank {
    explicit Rank(Engine& engine) : round(engine, Groups(), Tensors()) {}
    static GradientRound::Options Groups() {
      GradientRound::Options options;
      options.prefix = "p.";
      options.group_bytes = 1000;
      return options;
    }
    static std::vector<TensorSignature> Tensors() {
      return {{"0", DType::kFloat32, {3}},
              {"1", DType::kFloat32, {40'000}},
              {"2", DType::kFloat32, {5}}};
    }
    void Begin(float value) {
      for (int32_t i = 0; i < 3; ++i) {
        std::vector<float>& tensor = data[static_cast<size_t>(i)];
        tensor.assign(tensor.size(), value);
        EXPECT_TRUE(round.Mark(i, tensor.data(), tensor.data(), GradientVote::kPresent).ok());
      }
      EXPECT_TRUE(round.End({}).ok());
    }
    void Finish(float sum) {
      Status outcome;
      EXPECT_TRUE(round.Wait(-1, &outcome));
      EXPECT_TRUE(outcome.ok()) << outcome.message();
      for (const std::vector<float>& tensor : data) EXPECT_THAT(tensor, ::testing::Each(sum));
      EXPECT_TRUE(round.Stepped().ok());
    }
    GradientRound round;
    std::vector<std::vector<float>> data{std::vector<float>(3), std::vector<float>(40'000),
                                         std::vector<float>(5)};
  };

  void RunRounds(int count) {
    const auto run = [count](Rank& rank, float value) {
      for (int i = 0; i < count; ++i) {
        rank.Begin(value);
        rank.Finish(3.0f);
      }
    };
    std::thread other([&] { run(one_, 2.0f); });
    run(zero_, 1.0f);
    other.join();
  }

  SteppedJob job_{2, Filled()};
  Rank zero_{job_.engine(0)}, one_{job_.engine(1)};
};

TEST_F(RoundsOnFilledCores, HaveTheirSumsFromCallersThatRunTheEngines) {
  RunRounds(100);
  EXPECT_EQ(zero_.round.succeeded(), 100);
}

TEST_F(RoundsOnFilledCores, EndWhileACallerComputesForLong) {
  RunRounds(3);
  zero_.Begin(1.0f);
  std::thread other([&] {
    one_.Begin(2.0f);
    one_.Finish(3.0f);
  });
  other.join();  // rank 0 does not wait meanwhile
  zero_.Finish(3.0f);
}

TEST_F(RoundsOnFilledCores, LetTheEngineThreadsRunWhatNobodyWaitsFor) {
  RunRounds(3);
  std::vector<std::shared_ptr<Work>> works;
  std::vector<HeldOperation> barriers;
  for (int rank = 0; rank < 2; ++rank) {
    Engine& engine = job_.engine(rank);
    barriers.emplace_back(
        engine.operations().Prepare({kGlobalSet, OpKind::kBarrier, "b"}, {}).value());
    works.push_back(engine.Start(*barriers.back(), {}, {}).value());
  }
  for (const auto& work : works) EXPECT_TRUE(work->SleepUntilDoneFor(-1));
  RunRounds(3);
}

}  // namespace
}  // namespace farandole
