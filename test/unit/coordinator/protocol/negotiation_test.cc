// What the scripts of negotiation.txt cannot say: tables of signatures, messages that were made by
// hand or are under way, memory.
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

using Job = NegotiationJob;

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

/// Removes a set of ranks 0 and 1. @return a vote of rank 1 by an id in it, from before.
UpMessage RemoveASet(Job& job) {
  job.AddSet({0, 1});
  BindInSet(job, 1, {0, 1}, "t");
  UpMessage late;
  late.ids = {0};
  late.number = job.At(1).last_number();
  Signature set;
  set.ranks = {1};
  job.SubmitAll("remove", set, {}, OpKind::kRemoveSet);
  job.Settle();
  return late;
}

TEST(Negotiation, TakesAVoteUnderWayWhenItsSetEndedForNoOtherKey) {
  Job job(3);
  const UpMessage late = RemoveASet(job);
  EXPECT_TRUE(job.At(0).ReceiveUp(1, late).ok()) << "the id is free";
  UpMessage early = late;
  early.number = job.At(1).last_number();
  EXPECT_EQ(job.At(0).ReceiveUp(1, early).code(), Code::kInternal) << "no such id any more";
}

TEST(Negotiation, CountsNoLateVoteForTheKeyThatHasItsIdByNow) {
  Job job(3);
  const UpMessage late = RemoveASet(job);
  job.AddSet({0, 1});
  BindInSet(job, 2, {0, 1}, "u");
  ASSERT_EQ(job.At(0).Sizes().ids, 1u) << "the id is another key's";
  ASSERT_TRUE(job.At(0).ReceiveUp(1, late).ok());
  for (int r = 0, works = job[0].works; r < 2; ++r) {
    ASSERT_TRUE(job.Submit(r, "u", Float({2}), {}, OpKind::kAllreduce, 2).ok());
    job.Settle();
    EXPECT_EQ(job[0].works, works + r) << "both have to vote";
  }
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

TEST(Negotiation, RefusesAStranger) {
  Job job(3);
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
