// Batches of several ranks over the fake libnccl: results, and what goes wrong between ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "ops/cpu/batch.h"
#include "test/conformance/data_plane_rank.h"
#include "test/fakes/nccl/open.h"
#include "test/unit/ops/nccl_ranks.h"

namespace farandole {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr DType kEveryDType[] = {DType::kBool,    DType::kUint8,  DType::kInt8,    DType::kInt16,
                                 DType::kInt32,   DType::kInt64,  DType::kFloat16, DType::kBfloat16,
                                 DType::kFloat32, DType::kFloat64};

class NcclResultsTest : public ::testing::Test {
 protected:
  static NcclLibrary Library(const char* file) {
    return *NcclLibrary::In(dlopen(file, RTLD_NOW | RTLD_LOCAL), file).value();
  }
  /// Kept by the process, as OfProcess does.
  static const NcclLibrary& Library() {
    static const NcclLibrary library = Library(FARANDOLE_FAKE_NCCL);
    return library;
  }
  static const FakeNcclControl& control() {
    static const FakeNccl fake(FARANDOLE_FAKE_NCCL);
    return fake.control();
  }
  void SetUp() override { control().reset(); }
  void TearDown() override {
    EXPECT_STREQ(control().take_misuses(), "");
    EXPECT_EQ(control().live_comms(), 0);
    EXPECT_EQ(control().registered_bytes(), 0);
    EXPECT_EQ(control().live_memory_bytes(), 0);
  }

  static void RunCase(NcclRanks& ranks, const PlaneCase& c) {
    SCOPED_TRACE(c.ToString());
    const std::vector<std::byte> wanted = ReferenceResult(c);
    std::vector<std::unique_ptr<RankRun>> runs;
    std::vector<Batch> batches;
    std::vector<int64_t> launches;
    for (int rank = 0; rank < c.members; ++rank) {
      runs.push_back(std::make_unique<RankRun>(c, GlobalSet(rank, c.members), 1, wanted));
      batches.push_back(runs.back()->batch());
      ASSERT_TRUE(CheckBatch(batches.back()).ok()) << CheckBatch(batches.back()).message();
      launches.push_back(ranks.counters(rank).Get(Counter::kDeviceLaunches));
    }
    const Status status = ranks.Run(batches);
    ASSERT_TRUE(status.ok()) << status.message();
    for (int rank = 0; rank < c.members; ++rank) {
      const size_t i = static_cast<size_t>(rank);
      EXPECT_LE(ranks.counters(rank).Get(Counter::kDeviceLaunches) - launches[i], 2);
      ASSERT_EQ(runs[i]->Check(), "") << "on rank " << rank;
    }
  }
};

/// Divides a case's first count into splits, of which some may be empty and an absent rank's is.
void DrawSplits(PlaneCase& c, std::mt19937& random) {
  const bool gathers = c.kind == OpKind::kAllgather;
  const bool evenly = random() % 2 == 0;
  c.splits.assign(static_cast<size_t>(c.members), evenly ? c.counts[0] : 0);
  for (int member = 0; member < c.members; ++member) {
    int64_t& split = c.splits[static_cast<size_t>(member)];
    if (!evenly) split = static_cast<int64_t>(random() % 3) * c.counts[0] + member;
    if (gathers && c.IsAbsent(member)) split = 0;
  }
  c.counts = {std::accumulate(c.splits.begin(), c.splits.end(), int64_t{0})};
}

/// A case out of all that there can be.
PlaneCase Draw(int members, std::mt19937& random) {
  const auto one_of = [&](const auto& choices) { return choices[random() % std::size(choices)]; };
  const ReduceOp ops[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                          ReduceOp::kProduct};
  const std::vector<int64_t> counts[] = {
      {1}, {33}, {0, 7}, {17, 3}, {5, 4096, 64, 1}, std::vector<int64_t>(40, 3)};
  const double factors[] = {1.0, 1.0, 1.0, 0.5, 3.0};
  PlaneCase c;
  c.any_order = true;
  c.members = members;
  c.dtype = one_of(kEveryDType);
  c.wire = static_cast<WireFormat>(random() % 3);
  do {
    c.op = one_of(ops);
  } while (!IsDefined(c.op, c.dtype));
  c.counts = one_of(counts);
  c.in_place = random() % 2 == 0;
  if (c.dtype != DType::kBool) {
    const bool may_overflow = c.op == ReduceOp::kProduct && IsFloating(c.dtype);
    if (!may_overflow) c.prescale = one_of(factors);
    c.postscale = one_of(factors);
  }
  const OpKind kinds[] = {OpKind::kAllreduce,     OpKind::kAllreduce,     OpKind::kBroadcast,
                          OpKind::kReducescatter, OpKind::kReducescatter, OpKind::kAllgather,
                          OpKind::kAlltoall};
  c.kind = one_of(kinds);
  c.root = static_cast<int>(random() % static_cast<unsigned>(members));
  if (random() % 2 == 0 && c.kind != OpKind::kAlltoall) c.absent = {(c.root + 1) % members};
  c.absent_drop = random() % 2 == 0;
  if (IsVariableSize(c.kind)) {
    c.in_place = false;
    c.counts.resize(1);
    if (random() % 4 == 0) c.drops = {c.root};
    if (c.kind != OpKind::kAlltoall) DrawSplits(c, random);
  }
  // NCCL has no type in which a sum of any int64 could be divided.
  const bool wraps = c.dtype == DType::kInt64 && c.op == ReduceOp::kAverage;
  c.fill = IsFloating(c.dtype) || wraps ? Fill::kSmall : Fill::kRandom;
  c.seed = random();
  return c;
}

TEST_F(NcclResultsTest, AreThoseOfTheContractWhateverIsDrawn) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int size : {2, 3, 4}) {
    NcclRanks ranks(Library(), size);
    ASSERT_TRUE(ranks.Connect().ok());
    for (int i = 0; i < 150 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(size, random));
  }
}

TEST_F(NcclResultsTest, AreTheSameWhenEveryCallIsInProgressForAWhile) {
  std::mt19937 random(1);
  control().set("INIT_POLLS", "3");
  control().set("BUSY_POLLS", "2");
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  for (int i = 0; i < 40 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(2, random));
}

TEST_F(NcclResultsTest, AreTheSameWithALibraryThatRegistersNothing) {
  const NcclLibrary old = Library(FARANDOLE_FAKE_NCCL_OLD);
  std::mt19937 random(2);
  NcclRanks ranks(old, 3);
  ASSERT_TRUE(ranks.Connect().ok());
  for (int i = 0; i < 40 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(3, random));
  EXPECT_EQ(ranks.counters(0).Get(Counter::kRegisteredBytes), 0);
}

/// Four floats per rank, launched by a test itself.
class NcclRanksTest : public NcclResultsTest {
 protected:
  NcclRanksTest() {
    case_.members = 2;
    case_.counts = {4, 4};
    case_.any_order = true;
    wanted_ = ReferenceResult(case_);
    for (int rank : {0, 1}) {
      runs_.push_back(std::make_unique<RankRun>(case_, GlobalSet(rank, 2), 1, wanted_));
      batches_.push_back(runs_.back()->batch());
    }
  }
  /// One rank alone.
  static void Launch(NcclRanks& ranks, int rank, const Batch& batch) {
    ranks.Use(rank);
    ASSERT_TRUE(ranks.way(rank).Begin(batch).ok());
    Progress progress;
    do {
      progress = ranks.way(rank).Step();
    } while (progress.state == Progress::State::kMoved ||
             progress.state == Progress::State::kWaiting);
    ASSERT_EQ(progress.state, Progress::State::kLaunched);
  }

  PlaneCase case_;
  std::vector<std::byte> wanted_;
  std::vector<std::unique_ptr<RankRun>> runs_;
  std::vector<Batch> batches_;
};

TEST_F(NcclRanksTest, ALaunchWaitsForNoPeer) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  Launch(ranks, 0, batches_[0]);
  EXPECT_FALSE(ranks.way(0).end()->IsComplete().value());
  Launch(ranks, 1, batches_[1]);
  EXPECT_TRUE(ranks.Finish().ok());
  EXPECT_EQ(runs_[0]->Check(), "");
}

TEST_F(NcclRanksTest, AbandonFreesAStreamThatWaitsForAPeer) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  Launch(ranks, 0, batches_[0]);
  ranks.Use(0);
  ranks.way(0).Abandon();
  ranks.stream(0).Synchronize();
  EXPECT_TRUE(ranks.way(0).end()->IsComplete().value());
}

TEST_F(NcclRanksTest, AnErrorAfterTheLaunchIsFoundWithItsText) {
  control().set("ERROR_AT", "1");
  control().set("ERROR_TEXT", "the peer hung up");
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  ASSERT_TRUE(ranks.Launch(batches_).ok());
  const Status status = ranks.Finish();
  ranks.way(1).Abandon();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("the peer hung up"), HasSubstr("NCCL 2.32.3 ("),
                                      HasSubstr("libnccl.so.2"), HasSubstr("the map")));
}

TEST_F(NcclRanksTest, ACommunicatorThatNeverComesUpIsAborted) {
  control().set("INIT_HANGS", "1");
  NcclRanks ranks(Library(), 2);
  ranks.Use(0);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(ranks.way(0).Connect().state, Progress::State::kWaiting);
  }
  ranks.End(0);
  EXPECT_EQ(control().times("ncclCommAbort"), 1);
}

TEST_F(NcclRanksTest, AFailedStartNamesItsCall) {
  control().set("INIT_ERROR", "5");
  NcclRanks ranks(Library(), 2);
  EXPECT_THAT(ranks.Connect().message(), HasSubstr("ncclCommInitRankConfig: "));
}

TEST_F(NcclRanksTest, TheBufferIsRegisteredOnceAndCounted) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(ranks.Run(batches_).ok());
  EXPECT_EQ(control().times("ncclCommRegister"), 2);  // of two ranks
  const int64_t bytes = ranks.counters(0).Get(Counter::kRegisteredBytes);
  EXPECT_GT(bytes, 0);
  EXPECT_EQ(control().registered_bytes(), 2 * bytes);
}

TEST_F(NcclRanksTest, OneLargeTensorUsesNoBufferAndNoKernel) {
  case_.counts = {100'000};
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  RunCase(ranks, case_);
  EXPECT_EQ(control().times("ncclMemAlloc"), 0);
  EXPECT_EQ(ranks.counters(0).Get(Counter::kDeviceLaunches), 0);
}

}  // namespace
}  // namespace farandole
