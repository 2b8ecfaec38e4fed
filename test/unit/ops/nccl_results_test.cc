// Batches of several ranks over the fake libnccl: results, and what goes wrong between ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "ops/cpu/batch.h"
#include "test/conformance/data_plane_rank.h"
#include "test/fakes/nccl/open.h"
#include "test/unit/ops/nccl_ranks.h"

namespace farandole {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kFlagBlocks = 1;  // of device memory, beside fusion buffers

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
  }

  static void RunCase(NcclRanks& ranks, const PlaneCase& c, int64_t most_launches = 3) {
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
      // Pack, copy the flag that poisons results, and unpack, or look at the flag.
      EXPECT_LE(ranks.counters(rank).Get(Counter::kDeviceLaunches) - launches[i], most_launches);
      ASSERT_EQ(runs[i]->Check(), "") << "on rank " << rank;
      EXPECT_EQ(ranks.device(rank).counts().host_waits, 0) << "on rank " << rank;
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
    for (int i = 0; i < 150 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(size, random));
  }
}

TEST_F(NcclResultsTest, AreTheSameWhenEveryCallIsInProgressForAWhile) {
  std::mt19937 random(1);
  control().set("INIT_POLLS", "3");
  control().set("BUSY_US", "2000");
  NcclRanks ranks(Library(), 2);
  for (int i = 0; i < 40 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(2, random));
}

TEST_F(NcclResultsTest, AreTheSameInSlicesThatPassThroughTwoBuffers) {
  std::mt19937 random(2);
  NcclRanks ranks(Library(), 3, /*slice_bytes=*/64);
  for (int i = 0; i < 150 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(3, random), 10'000);
  PlaneCase large;
  large.members = 3;
  large.any_order = true;
  large.counts = {50'000, 3};
  large.wire = WireFormat::kFloat16;
  large.fill = Fill::kSmall;
  RunCase(ranks, large, 10'000);
  // 100 KB on the wire went through pages of 2 MiB that hold a slice each.
  EXPECT_EQ(ranks.device(0).counts().live_blocks, kFlagBlocks + 2);
}

TEST_F(NcclResultsTest, AreTheSameInRegisteredBuffers) {
  std::mt19937 random(3);
  {
    NcclRanks ranks(Library(), 3, /*slice_bytes=*/64, /*registers=*/true);
    for (int i = 0; i < 100 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(3, random), 10'000);
  }
  std::map<int, int64_t> registrations;  // by rank
  for (size_t i = 0; i < control().calls(); ++i) {
    const FakeNcclCall call = control().call(i);
    if (std::string(call.name) == "ncclCommRegister") ++registrations[call.rank];
  }
  EXPECT_EQ(registrations, (std::map<int, int64_t>{{0, 2}, {1, 2}, {2, 2}})) << "as on the peers";
  EXPECT_EQ(control().times("ncclMemAlloc"), 6);
  EXPECT_EQ(control().times("ncclMemFree"), 6);
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
  /// One rank alone, until it is launched.
  static std::shared_ptr<LaunchTask> Launch(NcclRanks& ranks, int rank, const Batch& batch) {
    std::shared_ptr<LaunchTask> task = ranks.Begin(rank, batch).value();
    EXPECT_TRUE(ranks.Await(rank, *task).ok());
    return task;
  }

  PlaneCase case_;
  std::vector<std::byte> wanted_;
  std::vector<std::unique_ptr<RankRun>> runs_;
  std::vector<Batch> batches_;
};

TEST_F(NcclRanksTest, ALaunchWaitsForNoPeerAfterTheFirst) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Run(batches_).ok());
  const auto first = Launch(ranks, 0, batches_[0]);
  EXPECT_FALSE(first->end->IsComplete().value());
  const auto second = Launch(ranks, 1, batches_[1]);
  while (!first->end->IsComplete().value()) std::this_thread::yield();
}

TEST_F(NcclRanksTest, TheNextSliceIsPackedWhileThisOneTravels) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Run(batches_).ok());
  ranks.collective(0).Hold();
  const int64_t launches = ranks.device(0).counts().launches;
  for (int batch = 0; batch < 2; ++batch) Launch(ranks, 0, batches_[0]);
  ranks.device(0).streams().at(0)->Synchronize();
  EXPECT_EQ(ranks.device(0).counts().live_blocks, kFlagBlocks + 2) << "each in a buffer of its own";
  EXPECT_EQ(ranks.device(0).counts().launches - launches, 6);
  EXPECT_FALSE(ranks.collective(0).Idle());
  for (int batch = 0; batch < 2; ++batch) Launch(ranks, 1, batches_[1]);
  ranks.collective(0).Release();
}

/// A batch of another type that was decided with the one before.
class DecidedTogether : public NcclRanksTest {
 protected:
  DecidedTogether() {
    doubles_.members = 2;
    doubles_.dtype = DType::kFloat64;
    doubles_.counts = {3, 40, 1};
    doubles_.any_order = true;
    wanted_doubles_ = ReferenceResult(doubles_);
    for (int rank : {0, 1}) {
      second_runs_.push_back(
          std::make_unique<RankRun>(doubles_, GlobalSet(rank, 2), 1, wanted_doubles_));
      batches_[static_cast<size_t>(rank)].is_followed = true;
    }
  }

  /// Both batches on both ranks; the first use of an algorithm waits for the peer.
  bool Finish(NcclRanks& ranks) {
    std::vector<std::shared_ptr<LaunchTask>> tasks;
    for (size_t rank : {0u, 1u}) {
      const int r = static_cast<int>(rank);
      tasks.push_back(ranks.Begin(r, batches_[rank]).value());
      tasks.push_back(ranks.Begin(r, second_runs_[rank]->batch()).value());
    }
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (!ranks.Await(static_cast<int>(i / 2), *tasks[i]).ok()) return false;
      while (!tasks[i]->end->IsComplete().value()) std::this_thread::yield();
    }
    return true;
  }

  PlaneCase doubles_;
  std::vector<std::byte> wanted_doubles_;
  std::vector<std::unique_ptr<RankRun>> second_runs_;
};

TEST_F(DecidedTogether, AreLaunchedByOneGroup) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(Finish(ranks));
  for (size_t rank : {0u, 1u}) {
    EXPECT_EQ(runs_[rank]->Check(), "");
    EXPECT_EQ(second_runs_[rank]->Check(), "");
    EXPECT_EQ(ranks.counters(static_cast<int>(rank)).Get(Counter::kDeviceLaunches), 5)
        << "two packs, the flag, two unpacks";
  }
  EXPECT_EQ(control().times("ncclGroupEnd"), 2) << "one on each rank";
  EXPECT_EQ(control().times("ncclAllReduce"), 4);
}

TEST_F(DecidedTogether, AreNotLaunchedWhenTheSecondDoesNotCome) {
  NcclRanks ranks(Library(), 2);
  const std::shared_ptr<LaunchTask> task = ranks.Begin(0, batches_[0]).value();
  ranks.queue(0).Abort(Aborted("given up"));
  EXPECT_EQ(ranks.Await(0, *task).code(), Code::kAborted);
  ranks.queue(1).Abort(Aborted("given up"));
  EXPECT_EQ(control().times("ncclAllReduce"), 0);
}

TEST_F(DecidedTogether, AreLaunchedOneByOneWhereTheyAreLarge) {
  NcclRanks ranks(Library(), 2, /*slice_bytes=*/256);
  ASSERT_TRUE(Finish(ranks));
  for (size_t rank : {0u, 1u}) EXPECT_EQ(second_runs_[rank]->Check(), "");
  EXPECT_EQ(control().times("ncclGroupEnd"), 0);
}

TEST_F(NcclRanksTest, AnAbortEndsACommunicatorWithABatchInAnyState) {
  const auto abort = [&](const char* setting, const char* value, bool connects) {
    SCOPED_TRACE(setting);
    control().reset();
    NcclRanks ranks(Library(), 2);
    if (connects) {
      ASSERT_TRUE(ranks.Run(batches_).ok());
    }
    control().set(setting, value);
    const auto task = ranks.Begin(0, batches_[0]).value();
    // The state of the case is reached soon after both communicators are there.
    for (int i = 0; i < 10'000 && control().live_comms() < 2; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ranks.queue(0).Abort(Aborted("given up"));
    ranks.queue(1).Abort(Aborted("given up"));
    for (int i = 0; i < 10'000 && control().live_comms() > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(control().live_comms(), 0);
    EXPECT_EQ(control().times("ncclCommAbort"), 2);
  };
  abort("INIT_HANGS", "1", false);   // it connects
  abort("BUSY_US", "100000", true);  // a call is in progress
  abort("BUSY_US", "0", true);       // its kernel waits for the peer
  abort("RANK", "0", false);         // its first collective waits for the peer's
}

TEST_F(NcclRanksTest, AnErrorAfterTheLaunchIsFoundWithItsText) {
  control().set("ERROR_AT", "1");
  control().set("ERROR_TEXT", "the peer hung up");
  NcclRanks ranks(Library(), 2);
  const Status status = ranks.Run(batches_);
  ranks.queue(1).Abort(Aborted("the test ends"));
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("the peer hung up"), HasSubstr("NCCL 2.32.3 ("),
                                      HasSubstr("libnccl.so.2"), HasSubstr("who is where")));
}

TEST_F(NcclRanksTest, AFailedStartNamesItsCall) {
  control().set("INIT_ERROR", "5");
  NcclRanks ranks(Library(), 2);
  EXPECT_THAT(ranks.Run(batches_).message(), HasSubstr("ncclCommInitRankConfig: "));
}

TEST_F(NcclRanksTest, OneLargeTensorUsesNoBuffer) {
  case_.counts = {100'000};
  NcclRanks ranks(Library(), 2);
  RunCase(ranks, case_);
  EXPECT_EQ(ranks.device(0).counts().live_blocks, kFlagBlocks);
}

}  // namespace
}  // namespace farandole
