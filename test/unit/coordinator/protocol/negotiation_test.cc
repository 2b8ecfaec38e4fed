// One file: a sentence per rule of docs/protocol.md, all on one harness.
#include "coordinator/protocol/negotiation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/control/rendezvous.h"
#include "coordinator/diagnosis/detectors.h"
#include "coordinator/protocol/error_text.h"
#include "coordinator/protocol/known_work.h"
#include "core/clock.h"
#include "test/support/count_allocations.h"
#include "test/support/negotiation_job.h"

// GCC 12 misses members after those that are named.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace farandole {
namespace {

using testing::HasSubstr;
using Job = NegotiationJob;

Signature Group(int tensors) {
  Signature signature;
  for (int t = 0; t < tensors; ++t) {
    signature.tensors.push_back({"t" + std::to_string(t), DType::kFloat32, {4}});
  }
  return signature;
}

/// Of an allgather of floats, four in a row.
Signature Gathered() { return Float({0, 4}); }

Vote Rows(int64_t rows) {
  Vote vote;
  vote.rows = {rows};
  return vote;
}

TEST(Negotiation, NeedsNoMessageAlone) {
  Job job(1);
  job.SubmitAll("x", Float({2}));
  job.Settle();
  EXPECT_EQ(job[0].works, 1);
  EXPECT_EQ(job.messages(), 0);
}

TEST(Negotiation, HandsOutAKeyOnlyWhenAllMembersSubmitted) {
  Job job(3);
  ASSERT_TRUE(job.Submit(0, "x", Float({2})).ok());
  ASSERT_TRUE(job.Submit(2, "x", Float({2})).ok());
  job.Settle();
  EXPECT_EQ(job[0].works, 0);
  ASSERT_TRUE(job.Submit(1, "x", Float({2})).ok());
  job.Settle();
  for (int r = 0; r < 3; ++r) EXPECT_EQ(job[r].works, 1);
}

TEST(Negotiation, SendsATensorByNameTwiceAndThenByIdAlone) {
  Job job(2);
  for (int use = 1; use <= 4; ++use) {
    Vote in_step;
    in_step.step = {use, 1, 0, 1, 0};  // travels beside the id
    job.SubmitAll("x", Float({2}), in_step);
    job.Settle();
    EXPECT_EQ(job.records(), 2 * std::min(use, 2)) << "use " << use;
    job.Finish();
  }
}

TEST(Negotiation, FusesWhatBecomesReadyBehindTheWindow) {
  Job job(2);
  for (const char* name : {"a", "b", "c", "d"}) {
    job.SubmitAll(name, Float({2}));
    job.Settle();
  }
  EXPECT_EQ(job[1].works, 2);
  for (JobRank* rank : {&job[0], &job[1]}) rank->negotiation.BatchDone(1, 0);
  job.Settle();
  EXPECT_EQ(job[1].works, 3);
  EXPECT_EQ(job[1].keys, 2);
}

TEST(Negotiation, StopsFusingAtTheThreshold) {
  Job job(1, {.fusion_threshold_bytes = 16, .window = 10});
  for (const char* name : {"a", "b", "c"}) job.SubmitAll(name, Float({2}));
  job.Settle();
  EXPECT_EQ(job[0].works, 2);
}

TEST(Negotiation, AStoppedSetOccupiesOnlyItsOwnWindow) {
  Job job(2);
  job.AddSet({0});
  for (const char* name : {"a", "b", "c", "d"}) {
    job.SubmitAll(name, Float({2}));
    job.Settle();
  }
  const int before = job[0].works;
  ASSERT_TRUE(job.Submit(0, "own", Float({2}), {}, OpKind::kAllreduce, 1).ok());
  job.Settle();
  EXPECT_EQ(job[0].works, before + 1);
}

TEST(Negotiation, DecidesAllBatchesOfAGroupAtOnce) {
  Job job(2, {.fusion_threshold_bytes = 16, .window = 1});
  job.SubmitAll("group", Group(5));
  job.SubmitAll("next", Float({1}));
  job.Settle();
  EXPECT_EQ(job[1].works, 1);
  job.Finish(4);
  EXPECT_EQ(job[1].works, 1) << "one of five batches is unfinished";
  job[0].negotiation.BatchDone(job[0].number, 4);
  job.Settle();
  EXPECT_EQ(job[1].works, 2);
}

struct Disagreement {
  void (*change)(Signature&);
  const char* sent;  ///< By ranks 0 and 1.
  const char* other;
  const char* what;
};

constexpr Disagreement kDisagreements[] = {
    {[](auto& s) { s.tensors[0].shape[1] = 256; }, "float32 [64,128]", "float32 [64,256]",
     "shapes must be equal"},
    {[](auto& s) { s.tensors[0].dtype = DType::kFloat64; }, "float32 [64,128]", "float64 [64,128]",
     "dtypes must be equal"},
    {[](auto& s) { s.op = ReduceOp::kMax; }, "op sum", "op max", "reduce ops must be equal"},
    {[](auto& s) { s.root = 1; }, "root -1", "root 1", "roots must be equal"},
    {[](auto& s) { s.prescale = 0.5; }, "prescale 1 and postscale 1",
     "prescale 0.5 and postscale 1", "factors must be equal"},
    {[](auto& s) { s.device = DeviceKind::kCuda; }, "a tensor on cpu", "a tensor on cuda",
     "devices must be equal"},
    {[](auto& s) { s.wire_format = WireFormat::kBfloat16; }, "wire dtype as it is",
     "wire dtype bfloat16", "wire dtypes must be equal"},
    {[](auto& s) { s.tensors.push_back(s.tensors[0]); }, "1 tensors", "2 tensors",
     "the tensors of a group must be equal"},
    {[](auto& s) { s.tensors.resize(2), s.tensors[1].name = "bias"; }, "1 tensors", "2 tensors",
     "the tensors of a group must be equal; the first difference: ranks 0, 1 sent nothing, rank 2 "
     "sent \"bias\""},
};

TEST(Negotiation, RefusesOtherSignaturesNamingKeyRanksAndBothValuesEverywhere) {
  for (const Disagreement& one : kDisagreements) {
    Job job(3);
    for (int use = 0; use < 3; ++use) {  // by name, by name, by id
      Signature other = Float({64, 128});
      one.change(other);
      for (const int r : {0, 1}) ASSERT_TRUE(job.Submit(r, "w", Float({64, 128})).ok());
      ASSERT_TRUE(job.Submit(2, "w", other).ok());
      job.Settle();
      job.ExpectEnd(Code::kMismatch, std::string("allreduce \"w\": ranks 0, 1 sent ") + one.sent +
                                         ", rank 2 sent " + one.other + "; " + one.what);
      job.SubmitAll("w", Float({64, 128}));
      job.Settle();
      EXPECT_EQ(job[2].works, use + 1) << "the next use works";
      job.Finish();
    }
  }
}

TEST(Negotiation, RefusesAnotherCollectiveUnderTheSameNameEverywhere) {
  Job job(3, {.parent = {-1, 0, 1}});  // a relay sees both kinds first
  for (int use = 0; use < 3; ++use) {  // by name, by name, by id
    ASSERT_TRUE(job.Submit(0, "k", Float({2})).ok());
    ASSERT_TRUE(job.Submit(1, "k", Float({2})).ok());
    ASSERT_TRUE(job.Submit(2, "k", Gathered(), Rows(1), OpKind::kAllgather).ok());
    job.Settle();
    job.ExpectEnd(
        Code::kMismatch,
        "\"k\": ranks 0, 1 called allreduce, rank 2 called allgather; all ranks must call "
        "the same collective under one name");
    job.SubmitAll("k", Float({2}));
    job.Settle();
    job.Finish();
    job.SubmitAll("k", Gathered(), Rows(1), OpKind::kAllgather);
    job.Settle();
    job.Finish();
    EXPECT_EQ(job[2].works, 2 * use + 2) << "one kind after another works";
  }
}

TEST(Negotiation, NamesWhatUsersCalledWhereCollectivesDiffer) {
  Job job(2);
  Signature step = Float({2});
  step.function = "allgather";
  ASSERT_TRUE(job.Submit(0, "k", Float({2})).ok());
  ASSERT_TRUE(job.Submit(1, "k", step).ok());
  job.Settle();
  job.ExpectEnd(
      Code::kMismatch,
      "\"k\": rank 0 called allreduce, rank 1 called allgather; all ranks must call the same "
      "collective under one name");
  ASSERT_TRUE(job.Submit(0, "k", Gathered(), Rows(1), OpKind::kAllgather).ok());
  ASSERT_TRUE(job.Submit(1, "k", step).ok());
  job.Settle();
  job.ExpectEnd(
      Code::kMismatch,
      "allgather \"k\": rank 0 sent an allgather, rank 1 sent an allreduce; collectives must "
      "be equal");
}

TEST(Negotiation, ABarrierIsNoKeyOfUsers) {
  Job job(2);
  job.SubmitAll("k", Float({2}));
  job.SubmitAll("k", {}, {}, OpKind::kBarrier);
  job.Settle();
  EXPECT_EQ(job[1].works, 2);
}

TEST(Negotiation, RefusesAFailedBackwardByNameOnceAllVoted) {
  Job job(2);
  Vote failed;
  failed.failed = "ValueError: bad batch";
  ASSERT_TRUE(job.Submit(1, "w", Float({2}), failed).ok());
  job.Settle();
  EXPECT_TRUE(job[1].ended.empty());
  ASSERT_TRUE(job.Submit(0, "w", Float({2})).ok());
  job.Settle();
  job.ExpectEnd(Code::kAborted, "allreduce \"w\": rank 1 failed: ValueError: bad batch");
}

/// The vote of a gradient in `step`, after so many backward passes in it and in the step before.
Vote InStep(int64_t step, int32_t passes, int32_t previous = 1) {
  Vote vote;
  vote.step = {step, passes, 0, previous, 0};
  return vote;
}

TEST(Negotiation, RefusesGradientsOfDifferentStepsWithWhatEachRankDid) {
  NegotiationOptions options;
  options.parent = {-1, 0, 1, 1};  // ranks 2 and 3 below rank 1
  for (const bool known : {false, true}) {
    Job job(4, options);
    for (int use = 0; known && use < 3; ++use) {
      job.SubmitAll("w", Float({2}), InStep(6, 1));
      job.Settle();
      job.Finish();
    }
    for (int r = 0; r < 4; ++r) {
      ASSERT_TRUE(job.Submit(r, "w", Float({2}), r == 2 ? InStep(7, 2) : InStep(8, 1)).ok());
      job.Settle();
    }
    job.ExpectEnd(Code::kMismatch,
                  "allreduce \"w\": in step 7 ranks 0, 1, 3 ran 1 backward pass and called step(), "
                  "rank 2 ran 2; all ranks must run the same number of backward passes between two "
                  "calls of step()");
  }
}

TEST(Negotiation, SaysNothingOfARefusalInLaterMessages) {
  Job job(2);
  Vote failed;
  failed.failed = "ValueError: bad batch";
  ASSERT_TRUE(job.Submit(0, "w", Float({2}), {}, OpKind::kReducescatter).ok());
  ASSERT_TRUE(job.Submit(1, "w", Float({2}), failed, OpKind::kReducescatter).ok());
  job.Settle();
  const DownMessage& sent = job[0].down.front().second;
  ASSERT_EQ(sent.type, DownType::kRefuse);
  ASSERT_NE(sent.facts.cause, "");
  ASSERT_TRUE(job.At(0).Join().ok());
  ASSERT_TRUE(job.At(1).Join().ok());
  job.Settle();
  ASSERT_EQ(sent.type, DownType::kJoinDone);
  EXPECT_EQ(sent.facts.cause, "");
  EXPECT_EQ(sent.facts.tensor, "");
  EXPECT_EQ(sent.key, KeyName{});
}

TEST(Negotiation, RefusesUnequalBackwardPassesOfOneStep) {
  Job job(2);
  Vote quiet = InStep(7, 2);
  quiet.step.no_sync_passes = 1;
  ASSERT_TRUE(job.Submit(0, "w", Float({2}), quiet).ok());
  ASSERT_TRUE(job.Submit(1, "w", Float({2}), InStep(7, 1)).ok());
  job.Settle();
  job.ExpectEnd(
      Code::kMismatch,
      "allreduce \"w\": in step 7 rank 0 ran 2 backward passes (1 in no_sync()), rank 1 ran 1; "
      "all ranks must run the same number of backward passes between two calls of step()");
}

TEST(Negotiation, SaysOnlyTheStepOfRanksThatCountNoBackwardPasses) {
  Job job(2);
  ASSERT_TRUE(job.Submit(0, "w", Float({2}), InStep(3, 0, 0)).ok());
  ASSERT_TRUE(job.Submit(1, "w", Float({2}), InStep(2, 0, 0)).ok());
  job.Settle();
  job.ExpectEnd(Code::kMismatch,
                "allreduce \"w\": rank 0 is in step 3, rank 1 is in step 2; all ranks must reduce "
                "gradients as often between two calls of step()");
}

TEST(Negotiation, ReducesWithARankThatRanNoBackwardPassInTheStep) {
  Job job(3);
  for (int use = 1; use <= 3; ++use) {
    for (int r = 0; r < 3; ++r) {
      ASSERT_TRUE(job.Submit(r, "w", Float({2}), InStep(use, r == 1 ? 0 : 1)).ok());
    }
    job.Settle();
    EXPECT_EQ(job[2].works, use);
    job.Finish();
  }
}

TEST(Negotiation, SkipsMembersNobodyContributesAndTellsWhoIsAbsent) {
  Job job(2);
  Vote zero;
  zero.absent = Bits(0b001);
  zero.clean = Bits(0b110);
  Vote one;
  one.clean = Bits(0b011);
  ASSERT_TRUE(job.Submit(0, "g", Group(3), zero).ok());
  ASSERT_TRUE(job.Submit(1, "g", Group(3), one).ok());
  job.Settle();
  EXPECT_EQ(job[0].works, 1);
  EXPECT_EQ(job[0].skipped, Bits(0b011));
  EXPECT_TRUE(job[0].absent.empty()) << "clean counts as present where rank 1 is present";
}

TEST(Negotiation, EndsWithoutWorkWhatNobodyContributes) {
  Job job(2);
  Vote absent;
  absent.absent = Bits(1);
  Vote clean;
  clean.clean = Bits(1);
  ASSERT_TRUE(job.Submit(0, "x", Float({2}), absent).ok());
  ASSERT_TRUE(job.Submit(1, "x", Float({2}), clean).ok());
  job.Settle();
  EXPECT_EQ(job[1].works, 0);
  ASSERT_EQ(job[1].ended.size(), 1u);
  EXPECT_TRUE(job[1].ended.front().ok());
}

TEST(Negotiation, RefusesABroadcastWhoseRootIsAbsent) {
  Job job(2);
  Signature signature = Float({2});
  signature.root = 1;
  Vote absent;
  absent.absent = Bits(1);
  ASSERT_TRUE(job.Submit(0, "x", signature, {}, OpKind::kBroadcast).ok());
  ASSERT_TRUE(job.Submit(1, "x", signature, absent, OpKind::kBroadcast).ok());
  job.Settle();
  job.ExpectEnd(Code::kMismatch, HasSubstr("root rank 1"));
}

TEST(Negotiation, DecidesAnAllgatherWithTheRowsOfAllRanks) {
  Job job(3);
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(job.Submit(r, "x", Gathered(), Rows(10 + r), OpKind::kAllgather).ok());
  }
  job.Settle();
  for (int r = 0; r < 3; ++r) EXPECT_EQ(job[r].rows, std::vector<int64_t>({10, 11, 12}));
}

TEST(Negotiation, VotesForSteadyRowsByIdAlone) {
  Job job(3);
  const auto records_of = [&](std::vector<int64_t> rows) {
    const int64_t before = job.records();
    for (int r = 0; r < 3; ++r) {
      const Vote vote = Rows(rows[static_cast<size_t>(r)]);
      EXPECT_TRUE(job.Submit(r, "x", Gathered(), vote, OpKind::kAllgather).ok());
    }
    job.Settle();
    for (int r = 0; r < 3; ++r) EXPECT_EQ(job[r].rows, rows);
    job.Finish();
    return job.records() - before;
  };
  EXPECT_GT(records_of({1, 2, 3}), 0) << "by name";
  EXPECT_GT(records_of({1, 2, 3}), 0) << "bound to an id";
  EXPECT_EQ(records_of({1, 2, 3}), 0);
  EXPECT_EQ(records_of({1, 2, 3}), 0);
  const int64_t changed = records_of({1, 7, 3});
  EXPECT_GT(changed, 0);
  EXPECT_LE(changed, 3) << "rank 1's vote, and the decision to two ranks";
  EXPECT_EQ(records_of({1, 7, 3}), 0) << "the changed rows are the known ones";
}

TEST(Negotiation, ComparesAllButTheRowsOfAnAllgather) {
  Job job(2);
  ASSERT_TRUE(job.Submit(0, "x", Float({0, 4}), Rows(2), OpKind::kAllgather).ok());
  ASSERT_TRUE(job.Submit(1, "x", Float({0, 5}), Rows(3), OpKind::kAllgather).ok());
  job.Settle();
  job.ExpectEnd(Code::kMismatch,
                "allgather \"x\": rank 0 sent float32 [0,4], rank 1 sent float32 [0,5]; only the "
                "first dimension, shown as 0, may differ");
}

TEST(Negotiation, RefusesAnAllgatherOfTooManyRowsByName) {
  Job job(2);
  for (int r = 0; r < 2; ++r) {
    const Vote vote = Rows(int64_t{1} << 60);
    ASSERT_TRUE(job.Submit(r, "x", Gathered(), vote, OpKind::kAllgather).ok());
  }
  job.Settle();
  job.ExpectEnd(Code::kInvalidArgument, HasSubstr("allgather \"x\": [1152921504606846976,"));
}

TEST(Negotiation, RefusesAVoteWithoutItsRowsOnThisRank) {
  Job job(2);
  const Status refused = job.Submit(0, "x", Gathered(), {}, OpKind::kAllgather);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_EQ(refused.message(), "allgather \"x\": rows [] of 1 tensors");
}

TEST(Negotiation, GathersNoRowsOfAJoinedRank) {
  Job job(3);
  for (int use = 0; use < 3; ++use) {
    for (int r = 0; r < 3; ++r) {
      ASSERT_TRUE(job.Submit(r, "x", Gathered(), Rows(2 + r), OpKind::kAllgather).ok());
    }
    job.Settle();
    job.Finish();
  }
  ASSERT_TRUE(job.At(2).Join().ok());
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(job.Submit(r, "x", Gathered(), Rows(2 + r), OpKind::kAllgather).ok());
  }
  job.Settle();
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(job[r].works, 4);
    EXPECT_EQ(job[r].rows, std::vector<int64_t>({2, 3, 0}));
  }
}

TEST(Negotiation, RefusesAnAlltoallWhileARankHasJoined) {
  Job job(3);
  ASSERT_TRUE(job.At(1).Join().ok());
  for (const int r : {0, 2}) {
    ASSERT_TRUE(job.Submit(r, "x", Float({0, 4}), {}, OpKind::kAlltoall).ok());
  }
  job.Settle();
  EXPECT_EQ(job[2].ended.at(0).message(),
            "alltoall \"x\": rank 1 has joined or voted absent; alltoall is not possible while a "
            "rank has joined");
}

TEST(Negotiation, RefusesAllButAllreducesWhileARankHasJoinedIfAskedTo) {
  Job job(2, {.join_allreduce_only = true});
  ASSERT_TRUE(job.At(1).Join().ok());
  ASSERT_TRUE(job.Submit(0, "sum", Float({4})).ok());
  ASSERT_TRUE(job.Submit(0, "gather", Gathered(), Rows(2), OpKind::kAllgather).ok());
  job.Settle();
  EXPECT_EQ(job[0].works, 1);
  EXPECT_EQ(
      job[0].ended.at(0).message(),
      "allgather \"gather\": rank 1 has joined or voted absent; allgather is not possible while "
      "a rank has joined");
}

TEST(Negotiation, ReducesAndScattersWithoutAJoinedRank) {
  Job job(2);
  ASSERT_TRUE(job.At(1).Join().ok());
  ASSERT_TRUE(job.Submit(0, "x", Float({5}), {}, OpKind::kReducescatter).ok());
  job.Settle();
  EXPECT_EQ(job[0].works, 1);
}

TEST(Negotiation, BindsNoMoreThanSixtyFourIdsToAKey) {
  Job job(2, {.window = 1000});
  const auto records_of = [&](int64_t extent) {
    const int64_t before = job.records();
    job.SubmitAll("x", Float({extent, 1}));
    job.Settle();
    return job.records() - before;
  };
  for (int64_t extent = 0; extent < 65; ++extent) {
    for (int use = 0; use < 2; ++use) (void)records_of(extent);
  }
  EXPECT_EQ(records_of(63), 0) << "has an id";
  EXPECT_EQ(records_of(64), 2) << "goes by name";
  EXPECT_TRUE(job[0].reports.empty());
}

TEST(Negotiation, CountsAJoinedRankAsAbsentAndLetsTheLowestPresentRankReport) {
  Job job(3);
  ASSERT_TRUE(job.At(0).Join().ok());
  ASSERT_TRUE(job.Submit(1, "x", Float({2})).ok());
  ASSERT_TRUE(job.Submit(2, "x", Float({2})).ok());
  job.Settle();
  EXPECT_EQ(job[0].works, 1);
  EXPECT_FALSE(job[0].mine);
  EXPECT_EQ(job[2].absent, std::vector<RankMask>({{0, Bits(1)}}));
  job[2].negotiation.BatchDone(job[2].number, 0);
  job[2].negotiation.Flush();
  EXPECT_EQ(job[2].up_used, 0u);
  job[1].negotiation.BatchDone(job[1].number, 0);
  EXPECT_EQ(job[1].up_used, 1u);
}

TEST(Negotiation, EndsAJoinWhenAllRanksJoinedAndTellsTheLast) {
  Job job(3);
  ASSERT_TRUE(job.Submit(2, "x", Float({2})).ok());
  for (const int r : {1, 2, 0}) {
    ASSERT_TRUE(job.At(r).Join().ok());
    job.Settle();
  }
  EXPECT_EQ(job[2].works, 1) << "what rank 2 had submitted runs";
  for (int r = 0; r < 3; ++r) EXPECT_EQ(job[r].last_joined, 0);
  EXPECT_TRUE(job.Submit(1, "x", Float({2})).ok());
}

TEST(Negotiation, RefusesSubmissionsOfAJoinedRank) {
  Job job(2);
  ASSERT_TRUE(job.At(1).Join().ok());
  EXPECT_EQ(job.Submit(1, "x", Float({2})).code(), Code::kInvalidArgument);
  EXPECT_EQ(job.At(1).Join().code(), Code::kInvalidArgument);
}

TEST(Negotiation, RefusesASecondSubmissionOfAPendingKey) {
  Job job(2);
  ASSERT_TRUE(job.Submit(1, "x", Float({2})).ok());
  EXPECT_EQ(job.Submit(1, "x", Float({2})).code(), Code::kInvalidArgument);
}

TEST(Negotiation, RefusesANameThatOtherRanksWouldNotRead) {
  Job job(2);
  EXPECT_EQ(job.Submit(1, std::string(5000, 'x'), Float({2})).code(), Code::kInvalidArgument);
  EXPECT_EQ(job.At(1).Pending(), 0);
}

TEST(Negotiation, RecyclesUserNumbersOfProcessSetsButNoUids) {
  Job job(3);
  job.AddSet({0, 1});
  job.AddSet({1, 2});
  Signature first;
  first.ranks = {1};
  job.SubmitAll("remove", first, {}, OpKind::kRemoveSet);
  job.Settle();
  job.AddSet({0, 2});
  for (int r = 0; r < 3; ++r) {
    ASSERT_EQ(job[r].added.size(), 3u);
    EXPECT_EQ(job[r].added[2].uid, 3u);
    EXPECT_EQ(job[r].added[2].user_id, 1);
    EXPECT_TRUE(job[r].over.front().second.ok());
  }
}

Signature OfRanks(std::vector<int32_t> ranks) {
  Signature signature;
  signature.ranks = std::move(ranks);
  return signature;
}

/// Uses `name` in the set until it has an id.
void BindInSet(Job& job, uint32_t set, const std::vector<int32_t>& ranks, const std::string& name) {
  for (int use = 0; use < 2; ++use) {
    for (const int32_t r : ranks) {
      ASSERT_TRUE(job.Submit(r, name, Float({2}), {}, OpKind::kAllreduce, set).ok());
    }
    job.Settle();
    for (const int32_t r : ranks) job.At(r).BatchDone(job[r].number, 0);
    job.Settle();
  }
}

TEST(Negotiation, TakesAVoteUnderWayWhenItsSetEndedForNoOtherKey) {
  Job job(3);
  job.AddSet({0, 1});
  BindInSet(job, 1, {0, 1}, "t");
  UpMessage late;
  late.ids = {0};
  late.number = job.At(1).last_number();
  job.SubmitAll("remove", OfRanks({1}), {}, OpKind::kRemoveSet);
  job.Settle();
  EXPECT_TRUE(job.At(0).ReceiveUp(1, late).ok()) << "the id is free";
  UpMessage early = late;
  early.number = job.At(1).last_number();
  EXPECT_EQ(job.At(0).ReceiveUp(1, early).code(), Code::kInternal) << "no such id any more";
}

TEST(Negotiation, CountsNoLateVoteForTheKeyThatHasItsIdByNow) {
  Job job(3);
  job.AddSet({0, 1});
  BindInSet(job, 1, {0, 1}, "t");
  UpMessage late;
  late.ids = {0};
  late.number = job.At(1).last_number();
  job.SubmitAll("remove", OfRanks({1}), {}, OpKind::kRemoveSet);
  job.Settle();
  job.AddSet({0, 1});
  BindInSet(job, 2, {0, 1}, "u");
  ASSERT_EQ(job.At(0).Sizes().ids, 1u) << "the id is another key's";
  ASSERT_TRUE(job.At(0).ReceiveUp(1, late).ok());
  const int works = job[0].works;
  ASSERT_TRUE(job.Submit(0, "u", Float({2}), {}, OpKind::kAllreduce, 2).ok());
  job.Settle();
  EXPECT_EQ(job[0].works, works) << "rank 1 has not voted";
  ASSERT_TRUE(job.Submit(1, "u", Float({2}), {}, OpKind::kAllreduce, 2).ok());
  job.Settle();
  EXPECT_EQ(job[0].works, works + 1);
}

TEST(Negotiation, GivesUidsThatDifferFromLiveOnesModuloTheLimit) {
  Job job(3, {.max_live_sets = 4});
  const auto remove = [&](uint32_t uid) {
    job.SubmitAll("remove", OfRanks({static_cast<int32_t>(uid)}), {}, OpKind::kRemoveSet);
    job.Settle();
  };
  job.AddSet({0, 1});  // uid 1 stays
  for (const uint32_t uid : {2u, 3u, 6u, 7u, 10u}) {
    job.AddSet({0, 2});
    ASSERT_EQ(job[1].added.back().uid, uid);
    remove(uid);
  }
  job.AddSet({0});
  job.AddSet({1});
  job.AddSet({2});
  EXPECT_EQ(job[1].added.size(), 8u);
  job.ExpectEnd(Code::kResourceExhausted, HasSubstr("4 process sets are live"));
}

TEST(Negotiation, AgreesOnASetOfTenThousandRanks) {
  constexpr int kRanks = 10'000;
  NegotiationOptions options;
  options.size = kRanks + 1;
  options.parent.assign(kRanks + 1, 1);  // all hang under rank 1
  options.parent[0] = -1;
  options.parent[1] = 0;
  options.planes = {0, 0};
  JobRank root(options);
  UpMessage votes;
  KeyVotes& add = votes.keys.emplace_back();
  add.key = {kGlobalSet, OpKind::kAddSet, "0"};
  add.signatures.emplace_back();
  add.signatures[0].signature.kind = OpKind::kAddSet;
  for (int r = 0; r < kRanks; ++r) add.signatures[0].signature.ranks.push_back(r);
  ASSERT_TRUE(
      root.negotiation.Submit(root.negotiation.Intern(add.key), add.signatures[0].signature, {})
          .ok());
  ASSERT_TRUE(root.negotiation.ReceiveUp(1, votes).ok());
  root.negotiation.Flush();
  ASSERT_EQ(root.added.size(), 1u);
  EXPECT_EQ(root.added[0].ranks.size(), static_cast<size_t>(kRanks));
  EXPECT_TRUE(root.ended.at(0).ok());
}

TEST(Negotiation, NamesBothSetsWhereRanksRemoveDifferentOnes) {
  Job job(3);
  job.AddSet({0, 1});
  job.AddSet({1, 2});
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(job.Submit(r, "0", OfRanks({r == 1 ? 2 : 1}), {}, OpKind::kRemoveSet).ok());
  }
  job.Settle();
  job.ExpectEnd(Code::kMismatch,
                HasSubstr("ranks 0, 2 sent process set 1, rank 1 sent process set 2"));
}

TEST(Negotiation, SaysWhereLongListsOfRanksDiffer) {
  Job job(40);
  std::vector<int32_t> ranks(30);
  for (int32_t r = 0; r < 30; ++r) ranks[static_cast<size_t>(r)] = r;
  for (int r = 0; r < 40; ++r) {
    if (r == 7) ranks.back() = 39;
    ASSERT_TRUE(job.Submit(r, "0", OfRanks(ranks), {}, OpKind::kAddSet).ok());
    ranks.back() = 29;
  }
  job.Settle();
  job.ExpectEnd(Code::kMismatch, HasSubstr("they differ from position 29 on"));
}

TEST(Negotiation, RefusesAProcessSetThatExists) {
  Job job(2);
  job.AddSet({0, 1});
  EXPECT_TRUE(job[1].added.empty());
  EXPECT_EQ(job[1].ended.front().code(), Code::kInvalidArgument);
}

TEST(Negotiation, AbortsWhatIsIncompleteInARemovedSetAndLaterSubmissions) {
  Job job(2);
  Signature set;
  set.ranks = {0};
  job.AddSet({0});
  job.AddSet({1});
  ASSERT_TRUE(job.Submit(1, "ready", Float({2}), {}, OpKind::kAllreduce, 2).ok());
  Signature uid;
  uid.ranks = {2};
  job.SubmitAll("remove", uid, {}, OpKind::kRemoveSet);
  job.Settle();
  EXPECT_EQ(job[1].works, 1) << "ready keys of the set are decided first";
  ASSERT_TRUE(job.Submit(1, "late", Float({2}), {}, OpKind::kAllreduce, 2).ok());
  EXPECT_EQ(job[1].ended.back().code(), Code::kAborted);
}

TEST(Negotiation, EndsTheSetsOfARankThatLeftAndKeepsTheOthers) {
  Job job(3);
  job.AddSet({0, 1});
  ASSERT_TRUE(job.Submit(0, "global", Float({2})).ok());
  ASSERT_TRUE(job.At(2).Leave().ok());
  job.Settle();
  EXPECT_EQ(job[0].ended.back().ToString(), "Aborted: allreduce \"global\": rank 2 has left");
  EXPECT_EQ(job.At(0).Join().code(), Code::kAborted);
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(job.Submit(r, "own", Float({2}), {}, OpKind::kAllreduce, 1).ok());
  }
  job.Settle();
  EXPECT_EQ(job[1].works, 1);
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(job.At(r).Leave().ok());
  job.Settle();
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(job[r].shut_down);
}

TEST(Negotiation, ARankThatLeavesWithAnUntoldFailureSaysWhatFailed) {
  Job job(3);
  Vote failed;
  failed.failed = "ValueError: no data";
  ASSERT_TRUE(job.Submit(2, "t", Float({2}), failed).ok());
  ASSERT_TRUE(job.At(2).Leave().ok());
  job.Settle();
  ASSERT_TRUE(job.Submit(1, "t", Float({2})).ok());
  const std::string expected =
      "Aborted: allreduce \"t\": rank 2 has left after it failed: ValueError: no data";
  EXPECT_EQ(job[1].ended.back().ToString(), expected);
}

TEST(Negotiation, ALeaveThatIsAnnouncedEndsNothingUntilItSaysWhy) {
  Job job(3);
  ASSERT_TRUE(job.Submit(0, "t", Float({2})).ok());
  ASSERT_TRUE(job.At(2).AnnounceLeave().ok());
  job.Settle();
  EXPECT_TRUE(job[0].ended.empty());
  EXPECT_EQ(job.Submit(2, "t", Float({2})).code(), Code::kInvalidArgument);
  FailureFacts failure = {.cause = "has exited with code 3", .kind = FailureKind::kExited};
  failure.host = "a";
  failure.pid = 77;
  ASSERT_TRUE(job.At(2).Leave(failure).ok());
  job.Settle();
  const Status why = job[0].ended.back();
  EXPECT_EQ(why.ToString(),
            "Aborted: allreduce \"t\": rank 2 (pid 77 on host a) has exited with code 3");
  EXPECT_EQ(why.facts().ranks, std::vector<int32_t>{2});
  EXPECT_EQ(why.facts().kind, FailureKind::kExited);
}

TEST(Negotiation, WhenAllRanksLeaveOrHaveAnnouncedItNobodyWaitsForTheRest) {
  Job job(3);
  ASSERT_TRUE(job.At(0).AnnounceLeave().ok());
  ASSERT_TRUE(job.At(1).AnnounceLeave().ok());
  job.Settle();
  EXPECT_FALSE(job[0].shut_down);
  ASSERT_TRUE(job.At(2).Leave().ok());
  job.Settle();
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(job[r].shut_down) << "rank " << r;
  ASSERT_TRUE(job.At(1).Leave().ok()) << "it was on its way";
  job.Settle();
  EXPECT_TRUE(job.At(1).fault().ok() && job.At(0).fault().ok());
}

TEST(Negotiation, ALeaveByAnotherRanksFailureBlamesNobody) {
  Job job(2);
  ASSERT_TRUE(job.Submit(0, "t", Float({2})).ok());
  ASSERT_TRUE(job.At(1).Leave({.cause = "rank 7 was killed"}).ok());
  job.Settle();
  const Status why = job[0].ended.back();
  EXPECT_THAT(why.message(), HasSubstr("after it failed: rank 7 was killed"));
  EXPECT_TRUE(why.facts().ranks.empty());
}

TEST(Negotiation, NamesWhoIsMissingInAStallAndWhatItDidLast) {
  Job job(3, {.stall_ns = 10 * kNsPerSecond});
  job.Tick(kNsPerSecond);
  ASSERT_TRUE(job.Submit(2, "y", Float({3}), {}, OpKind::kBroadcast).ok());
  ASSERT_TRUE(job.Submit(0, "x", Float({2})).ok());
  job.Tick(10 * kNsPerSecond);
  EXPECT_TRUE(job[0].reports.empty());
  job.Tick(11 * kNsPerSecond);
  job.Tick(12 * kNsPerSecond);  // a moment later, for what stalls at about the same time
  const std::string expected =
      "stalled for 10 s: allreduce \"x\": rank 0 waits with float32 [2]; missing: rank 1 (has "
      "submitted nothing yet), rank 2 (last: broadcast \"y\", 10 s ago)";
  for (int r = 0; r < 3; ++r) {
    ASSERT_EQ(job[r].reports.size(), 2u) << "rank " << r;
    EXPECT_EQ(job[r].reports.front(), expected);
  }
}

/// Rank 1, which is in between and is missing itself, sends no answers without its own.
TEST(Negotiation, WaitsForWhatTheProgramOfAMissingRankDoes) {
  Job job(3, {.parent = {-1, 0, 1},
              .stall_ns = 10 * kNsPerSecond,
              .stall_shutdown_ns = 30 * kNsPerSecond,
              .divergence_check = false});
  job[1].tells_activity = true;
  job.Tick(0);
  for (const int r : {0, 2}) ASSERT_TRUE(job.Submit(r, "x", Float({2})).ok());
  for (int second = 10; second <= 11; ++second) job.Tick(second * kNsPerSecond - 1);
  job.Tick(10 * kNsPerSecond);
  job.Tick(10 * kNsPerSecond + 900 * kNsPerMs);
  EXPECT_TRUE(job[1].is_asked);
  EXPECT_FALSE(job[0].is_asked || job[2].is_asked);
  EXPECT_TRUE(job[0].reports.empty());
  job[1].activity = {FailureKind::kBlockedInPython, "a.py:1 in f"};
  for (int i = 0; i < 30; ++i) job.Tick((11 + i) * kNsPerSecond);
  ASSERT_FALSE(job[2].reports.empty());
  const std::string does =
      "missing: rank 1 (has submitted nothing yet) is in Python code: a.py:1 in f";
  EXPECT_TRUE(job[2].reports.front().ends_with(does)) << job[2].reports.front();
  ASSERT_EQ(job[0].shutdowns.size(), 1u);
  EXPECT_TRUE(job[0].shutdowns.front().ends_with(does)) << job[0].shutdowns.front();
  for (const int r : {0, 1, 2}) {
    EXPECT_EQ(job[r].failed.ranks, std::vector<int32_t>{1}) << "rank " << r;
    EXPECT_EQ(job[r].failed.kind, FailureKind::kBlockedInPython) << "rank " << r;
    EXPECT_EQ(job[r].failed.tensor, "x") << "rank " << r;
  }
}

TEST(Negotiation, AnswersWithoutWhatAProgramDoesThatDoesNotTell) {
  Job job(3, {.stall_ns = 10 * kNsPerSecond});
  job[1].tells_activity = true;
  job[2].tells_activity = job[2].is_blocked = true;  // it waits for an operation: nothing to ask
  job.Tick(0);
  ASSERT_TRUE(job.Submit(0, "x", Float({2})).ok());
  for (int second = 10; second < 15; ++second) job.Tick(second * kNsPerSecond);
  EXPECT_TRUE(job[1].is_asked);
  EXPECT_FALSE(job[2].is_asked);
  ASSERT_FALSE(job[0].reports.empty());
  EXPECT_TRUE(
      job[0].reports.front().ends_with("missing: rank 1 (has submitted nothing yet), rank "
                                       "2 (has submitted nothing yet)"))
      << job[0].reports.front();
}

TEST(Negotiation, ReportsAStallOfASetToItsMembersAndWhereItIsDecided) {
  Job job(5, {.parent = {-1, 0, 1, 1, 1}, .stall_ns = 10 * kNsPerSecond});
  job.AddSet({2, 3});
  const uint32_t set = job[2].added.front().uid;
  ASSERT_TRUE(job.Submit(2, "x", Float({2}), {}, OpKind::kAllreduce, set).ok());
  for (int second = 1; second < 15; ++second) job.Tick(second * kNsPerSecond);
  for (const int r : {1, 2, 3}) EXPECT_EQ(job[r].reports.size(), 1u) << "rank " << r;
  for (const int r : {0, 4}) EXPECT_TRUE(job[r].reports.empty()) << "rank " << r;
}

/// A rank that hears nothing, not even that it was heard.
TEST(Negotiation, SaysOnceThatNobodyAboveAsksAboutAStallAndEndsByItself) {
  Job job(3, {.parent = {-1, 0, 1},
              .stall_ns = 10 * kNsPerSecond,
              .stall_shutdown_ns = 30 * kNsPerSecond});
  for (const char* name : {"x", "y"}) ASSERT_TRUE(job.Submit(2, name, Float({2})).ok());
  for (int second = 1; second < 30; ++second) (void)job.At(2).Tick(second * kNsPerSecond);
  const std::string waits =
      "allreduce \"x\" and 1 more: rank 2 waits; no answer from rank 1 or, above it, rank 0, which "
      "would report who is missing";
  ASSERT_EQ(job[2].reports.size(), 1u);
  EXPECT_EQ(job[2].reports.front(), "stalled for 15 s: " + waits);
  EXPECT_TRUE(job[2].shutdowns.empty());
  for (int second = 30; second < 40; ++second) (void)job.At(2).Tick(second * kNsPerSecond);
  ASSERT_EQ(job[2].shutdowns.size(), 1u);
  EXPECT_TRUE(job[2].shutdowns.front().ends_with("stalled for 30 s: " + waits));
}

TEST(Negotiation, ReportsNoStallOfStepsForWhichNobodyWaits) {
  Job job(2, {.stall_ns = 10 * kNsPerSecond});
  job.Tick(0);
  ASSERT_TRUE(job.Submit(0, "gradients.0.", {}, InStep(1, 1), OpKind::kStep).ok());
  for (int second = 1; second <= 30; ++second) job.Tick(second * kNsPerSecond);
  EXPECT_TRUE(job[0].reports.empty());
  ASSERT_TRUE(job.Submit(1, "x", Float({2})).ok());
  for (int second = 31; second <= 50; ++second) job.Tick(second * kNsPerSecond);
  ASSERT_FALSE(job[0].reports.empty());
  EXPECT_NE(job[0].reports.front().find("missing: rank 0 (has submitted nothing yet)"),
            std::string::npos)
      << job[0].reports.front();
}

TEST(Negotiation, ReportsAStallThatLastsAgainAndEverMoreRarely) {
  Job job(2, {.stall_ns = 10 * kNsPerSecond});
  job.Tick(0);
  ASSERT_TRUE(job.Submit(0, "x", Float({2})).ok());
  for (int second = 1; second <= 100; ++second) job.Tick(second * kNsPerSecond);
  EXPECT_EQ(job[0].reports.size(), 4u) << "after 10, 20, 40 and 80 s";
  ASSERT_TRUE(job.Submit(1, "x", Float({2})).ok());
  job.Settle();
  for (int second = 101; second <= 400; ++second) job.Tick(second * kNsPerSecond);
  EXPECT_EQ(job[0].reports.size(), 4u) << "it is over";
  EXPECT_TRUE(job[0].shutdowns.empty());
}

TEST(Negotiation, EndsTheJobOnAllRanksAfterTheShutdownTimeOfAStall) {
  Job job(3, {.parent = {-1, 0, 1},
              .stall_ns = 10 * kNsPerSecond,
              .stall_shutdown_ns = 30 * kNsPerSecond});
  job.Tick(0);
  ASSERT_TRUE(job.Submit(0, "x", Float({2})).ok());
  ASSERT_TRUE(job.Submit(1, "x", Float({2})).ok());
  for (int second = 1; second < 30; ++second) job.Tick(second * kNsPerSecond);
  EXPECT_TRUE(job[0].shutdowns.empty());
  for (int second = 30; second < 33; ++second) job.Tick(second * kNsPerSecond);
  for (int r = 0; r < 3; ++r) {
    ASSERT_EQ(job[r].shutdowns.size(), 1u) << "rank " << r;
    EXPECT_EQ(
        job[r].shutdowns.front(),
        "the job ends, as a tensor waits for longer than 30 s (FARANDOLE_STALL_SHUTDOWN_S); "
        "stalled for 30 s: allreduce \"x\": ranks 0, 1 wait with float32 [2]; missing: rank 2 "
        "(has submitted nothing yet)");
  }
}

TEST(DescribeShort, SpellsOutASmallGroupAndCountsALargeOne) {
  Signature signature;
  signature.tensors = {{"rows", DType::kInt64, {2, 1}}, {"x", DType::kFloat32, {0, 4}}};
  EXPECT_EQ(DescribeShort(signature), "2 tensors: \"rows\" int64 [2,1], \"x\" float32 [0,4]");
  signature.tensors.push_back({"", DType::kFloat32, {3}});
  EXPECT_EQ(DescribeShort(signature),
            "3 tensors: \"rows\" int64 [2,1], \"x\" float32 [0,4], float32 [3]");
  signature.tensors.push_back({"", DType::kFloat32, {3}});
  EXPECT_EQ(DescribeShort(signature), "4 tensors");
}

TEST(Negotiation, ListsTheSilentWhenTheWaitIsOver) {
  Job job(2, {.stall_ns = kNsPerSecond,
              .answer_wait_ns = 5 * kNsPerSecond,
              .divergence_check = false});  // it has times of its own
  ASSERT_TRUE(job.Submit(0, "x", Float({2})).ok());
  Negotiation& root = job.At(0);
  EXPECT_EQ(root.Tick(0), kNsPerSecond);
  EXPECT_EQ(root.Tick(kNsPerSecond), 6 * kNsPerSecond);
  const int64_t next = root.Tick(6 * kNsPerSecond);
  EXPECT_GT(next, 6 * kNsPerSecond);
  EXPECT_LT(next, 7 * kNsPerSecond);
  (void)root.Tick(next);  // nothing more is wanted before it has waited twice as long
  ASSERT_EQ(job[0].reports.size(), 1u);
  EXPECT_NE(job[0].reports.front().find("no answer from rank 1"), std::string::npos);
}

TEST(Negotiation, ReportsNoStallOfAKeyThatWaitsForTheWindow) {
  Job job(2, {.window = 1, .stall_ns = kNsPerSecond});
  job.SubmitAll("a", Float({2}));
  job.Settle();
  job.SubmitAll("b", Float({2}));
  job.Settle();
  for (int second = 5; second < 30; ++second) job.Tick(second * kNsPerSecond);
  for (int r = 0; r < 2; ++r) EXPECT_TRUE(job[r].reports.empty()) << "rank " << r;
}

TEST(Negotiation, SaysOnceThatTheTableOfIdsIsFull) {
  Job job(2, {.window = 100, .max_ids = 1});
  for (int use = 0; use < 5; ++use) {
    for (const char* name : {"a", "b"}) {
      job.SubmitAll(name, Float({2}));
      job.Settle();
    }
  }
  EXPECT_EQ(job[1].works, 10);
  EXPECT_EQ(job[0].reports.size(), 1u);
}

TEST(Negotiation, KeepsNoMoreThanSixtyFourMebibytesOfSignatures) {
  Job job(1);
  Signature large;
  for (int m = 0; m < 2000; ++m) {
    large.tensors.push_back({std::string(4000, 'x'), DType::kFloat32, {1}});
  }
  const auto use_twice = [&](int key) {
    for (int use = 0; use < 2; ++use) {
      job.SubmitAll("g" + std::to_string(key), large);
      job.Settle();
      job.Finish();
    }
  };
  for (int key = 0; key < 8; ++key) use_twice(key);
  EXPECT_TRUE(job[0].reports.empty()) << "8 times 8 MB have a place";
  use_twice(8);
  EXPECT_EQ(job[0].reports.size(), 1u);
  EXPECT_EQ(job[0].works, 18);
}

TEST(Negotiation, ServesMoreChildrenThanAWordHasBits) {
  Job job(130);
  for (int use = 0; use < 3; ++use) {
    for (int r = 129; r >= 0; --r) ASSERT_TRUE(job.Submit(r, "x", Float({2})).ok());
    job.Settle();
    EXPECT_EQ(job[77].works, use + 1);
    job.Finish();
  }
}

UpMessage VoteById(uint32_t id) {
  UpMessage message;
  message.ids = {id};
  return message;
}

TEST(Negotiation, RefusesASecondVote) {
  Job job(3);
  for (int use = 0; use < 2; ++use) {
    job.SubmitAll("x", Float({2}));
    job.Settle();
    job.Finish();
  }
  EXPECT_TRUE(job.At(0).ReceiveUp(1, VoteById(0)).ok());
  EXPECT_EQ(job.At(0).ReceiveUp(1, VoteById(0)).code(), Code::kInternal);
}

TEST(Negotiation, RefusesAnUnknownIdAndAStranger) {
  Job job(3);
  EXPECT_EQ(job.At(0).ReceiveUp(1, VoteById(5)).code(), Code::kInternal);
  EXPECT_EQ(job.At(1).ReceiveUp(2, UpMessage()).code(), Code::kInternal);
}

TEST(Negotiation, RefusesANumberThatDoesNotAscend) {
  Job job(2);
  DownMessage report;
  report.type = DownType::kStallShutdown;
  report.number = 4;
  EXPECT_TRUE(job.At(1).ReceiveDown(0, report).ok());
  EXPECT_EQ(job.At(1).ReceiveDown(0, report).code(), Code::kInternal);
}

TEST(Negotiation, RefusesABatchThatIsNotUnfinished) {
  Job job(2);
  UpMessage done;
  done.type = UpType::kDone;
  done.number = 1;
  EXPECT_EQ(job.At(0).ReceiveUp(1, done).code(), Code::kInternal);
}

TEST(Negotiation, AllocatesNothingForKeysThatHaveIds) {
  Job job(3);
  std::vector<std::string> names;
  for (int i = 0; i < 50; ++i) names.push_back("t" + std::to_string(i));
  const Signature signature = Float({8});
  for (int r = 0; r < 3; ++r) job[r].log_works = false;
  std::vector<std::vector<KeyId>> keys(3);
  for (int r = 0; r < 3; ++r) {
    for (const std::string& name : names) {
      keys[static_cast<size_t>(r)].push_back(
          job.At(r).Intern({kGlobalSet, OpKind::kAllreduce, name}));
    }
  }
  Vote vote;
  vote.step.passes = 1;
  const auto step = [&] {
    ++vote.step.step;
    for (int r = 0; r < 3; ++r) {
      for (const KeyId key : keys[static_cast<size_t>(r)]) {
        ASSERT_TRUE(job.At(r).Submit(key, signature, vote).ok());
      }
    }
    job.Settle();
    job.Finish();
  };
  for (int warm = 0; warm < 4; ++warm) step();
  const CountAllocations allocations;
  for (int i = 0; i < 10; ++i) step();
  EXPECT_EQ(allocations.count(), 0);
  EXPECT_EQ(job[2].number, job[0].number);
}

TEST(MakeTree, HangsAHostsRanksUnderItsLowestAndHostsIntoAHeap) {
  const std::vector<int> hosts = {7, 7, 3, 3, 9, 7, 1};
  EXPECT_EQ(MakeTree(hosts, 2), std::vector<int>({-1, 0, 0, 2, 0, 0, 2}));
}

TEST(NegotiationOptions, ChooseThePlaneOfASetByWhoSharesMemory) {
  NegotiationOptions options;
  options.planes = {0, 1};
  const std::vector<int32_t> pair = {0, 2};
  EXPECT_EQ(options.PlanesOf(pair), (std::vector<uint8_t>{0, 1}));  // nobody shares any
  options.memory = {0, 1, 0, -1, 1, -1};
  options.memory_plane = 3;
  options.hosts_plane = 2;
  EXPECT_EQ(options.PlanesOf(pair), (std::vector<uint8_t>{3, 1}));
  const std::vector<int32_t> alone = {4}, two_hosts = {0, 1, 2}, one_without = {0, 2, 3};
  EXPECT_EQ(options.PlanesOf(alone), (std::vector<uint8_t>{3, 1}));
  EXPECT_EQ(options.PlanesOf(two_hosts), (std::vector<uint8_t>{2, 1}));
  EXPECT_EQ(options.PlanesOf(one_without), (std::vector<uint8_t>{2, 1}));
  const std::vector<int32_t> without = {3, 5}, one_of_each = {0, 1, 3};
  EXPECT_EQ(options.PlanesOf(without), (std::vector<uint8_t>{0, 1}));
  EXPECT_EQ(options.PlanesOf(one_of_each), (std::vector<uint8_t>{0, 1}));
}

/// Two ranks that run the same tensors again and again, which makes them known work.
class KnownWorkTest : public testing::Test {
 protected:
  static constexpr int kTensors = 20;
  static std::string NameOf(int tensor) { return "t" + std::to_string(tensor); }

  KnownWorkTest() : job(2, WithStalls()) {
    for (int round = 0; round < 4; ++round) Round();  // two by record, two by id
  }
  static NegotiationOptions WithStalls() {
    NegotiationOptions options;
    options.stall_ns = 1000;
    options.window = 1;
    return options;
  }
  void Submit(int rank, int begin = 0, int end = kTensors) {
    for (int t = begin; t < end; ++t) ASSERT_TRUE(job.Submit(rank, NameOf(t), Float({2})).ok());
  }
  void Round() {
    for (int rank = 0; rank < 2; ++rank) Submit(rank);
    job.Settle();
    job.Finish();
  }
  size_t known(int rank) { return job.At(rank).Sizes().known; }
  /// Nothing of the disturbance is left: a further round runs whole, and a few on it is known.
  void ExpectRoundsAsBefore() {
    for (int round = 0; round < 6; ++round) {
      const int works = job[0].works;
      Round();
      for (int rank = 0; rank < 2; ++rank) {
        EXPECT_EQ(job[rank].works, works + 1);
        EXPECT_EQ(job[rank].keys, kTensors);
        EXPECT_EQ(job.At(rank).Pending(), 0);
      }
    }
    for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(job[rank].plans, 1) << "rank " << rank;
  }

  Job job;
};

TEST_F(KnownWorkTest, IsHandedOutWithItsBatches) {
  EXPECT_EQ(job[0].plans, 0);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(known(rank), 1U);
  ExpectRoundsAsBefore();
  for (int rank = 0; rank < 2; ++rank) EXPECT_FALSE(job.At(rank).Busy());
}

TEST_F(KnownWorkTest, HoldsBackNoKeyOfARoundThatIsNotWhole) {
  for (int rank = 0; rank < 2; ++rank) Submit(rank, 0, 3);
  job.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(job[rank].keys, 3);
    EXPECT_EQ(known(rank), 0U);
  }
  job.Finish();
  for (int rank = 0; rank < 2; ++rank) Submit(rank, 3);
  job.Settle();
  EXPECT_EQ(job[1].keys, kTensors - 3);
  job.Finish();
  ExpectRoundsAsBefore();
}

TEST_F(KnownWorkTest, ComesInAnyOrder) {
  Submit(0);
  for (int t = kTensors; t-- > 0;) Submit(1, t, t + 1);
  job.Settle();
  job.Finish();
  ExpectRoundsAsBefore();
}

TEST_F(KnownWorkTest, RefusesAKeyThatIsPending) {
  Submit(0, 0, 2);
  EXPECT_THAT(job.Submit(0, NameOf(1), Float({2})).message(), HasSubstr("already pending"));
  Submit(0, 2);
  EXPECT_THAT(job.Submit(0, NameOf(1), Float({2})).message(), HasSubstr("already pending"));
  Submit(1);
  job.Settle();
  job.Finish();
  ExpectRoundsAsBefore();
}

TEST_F(KnownWorkTest, TakesANewSignatureOfOneKey) {
  for (int rank = 0; rank < 2; ++rank) {
    Submit(rank, 0, 7);
    ASSERT_TRUE(job.Submit(rank, NameOf(7), Float({3})).ok());
    Submit(rank, 8);
  }
  job.Settle();
  EXPECT_EQ(job[0].keys, kTensors);
  EXPECT_EQ(job[0].plans, 0) << "the batches of other tensors";
  job.Finish();
  ExpectRoundsAsBefore();
}

TEST_F(KnownWorkTest, RefusesTheOneKeyThatFailed) {
  Vote failed;
  failed.failed = "out of memory";
  Submit(0);
  Submit(1, 0, 7);
  ASSERT_TRUE(job.Submit(1, NameOf(7), Float({2}), failed).ok());
  Submit(1, 8);
  job.Settle();
  EXPECT_EQ(job[0].keys, kTensors - 1);
  ASSERT_EQ(job[0].ended.size(), 1U);
  EXPECT_THAT(job[0].ended[0].message(), HasSubstr("out of memory"));
  job.Finish();
  ExpectRoundsAsBefore();
}

TEST_F(KnownWorkTest, RunsWithoutARankThatHasJoined) {
  Submit(0);
  ASSERT_TRUE(job.At(1).Join().ok());
  job.Settle();
  EXPECT_EQ(job[0].keys, kTensors);
  EXPECT_THAT(job[0].absent, testing::ElementsAre(RankMask{1, {1}}));
  job.Finish();
  ASSERT_TRUE(job.At(0).Join().ok());
  job.Settle();
  ExpectRoundsAsBefore();
}

TEST_F(KnownWorkTest, EndsWithARankThatLeaves) {
  Submit(0);
  ASSERT_TRUE(job.At(1).Leave().ok());
  job.Settle();
  EXPECT_EQ(job[0].ended.size(), size_t{kTensors});
  EXPECT_EQ(job.At(0).Pending(), 0);
}

TEST_F(KnownWorkTest, IsReportedWhenItStalls) {
  Submit(0);
  job.Settle();
  EXPECT_EQ(known(0), 1U);
  job.Tick(2000);
  job.Tick(10'000'000'000);
  EXPECT_EQ(known(0), 0U);
  ASSERT_FALSE(job[0].reports.empty());
  EXPECT_THAT(job[0].reports[0], HasSubstr("t0"));
  Submit(1);
  job.Settle();
  EXPECT_EQ(job[0].keys, kTensors);
  job.Finish();
  ExpectRoundsAsBefore();
}

/// The window is full, and the decider's queue has what is dissolved meanwhile.
TEST_F(KnownWorkTest, IsDecidedThoughItIsDissolvedInTheQueue) {
  job.SubmitAll("first", Float({1000}));
  job.Settle();
  const int works = job[0].works;
  for (int rank = 0; rank < 2; ++rank) Submit(rank);
  job.Settle();
  EXPECT_EQ(job[0].works, works) << "the window is full";
  job.Tick(2000);
  EXPECT_EQ(known(0), 0U);
  job.Finish();
  EXPECT_EQ(job[1].works, works + 1);
  EXPECT_EQ(job[1].keys, kTensors);
  job.Finish();
  ExpectRoundsAsBefore();
}

TEST(RepeatedWork, PaysLessOftenForWhatIsDissolvedAgainAndAgain) {
  RepeatedWork repeated;
  const std::vector<uint32_t> ids = {4, 5, 6};
  std::vector<int> yes;
  for (int i = 0; i < 16; ++i)
    if (repeated.Repeats(ids)) yes.push_back(i);
  EXPECT_THAT(yes, testing::ElementsAre(1, 3, 7, 15));
  EXPECT_FALSE(repeated.Repeats(std::vector<uint32_t>{6, 5, 4}));
}

}  // namespace
}  // namespace farandole
