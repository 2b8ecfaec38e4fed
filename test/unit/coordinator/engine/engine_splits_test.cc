// Allgather, reducescatter and alltoall through the engine, up to what its data plane is handed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/engine/engine.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A plane that moves nothing: it keeps what it was handed last, and is done at once.
class RecordingPlane final : public DataPlane {
 public:
  const char* name() const override { return "recording"; }
  Status AddSet(uint32_t, std::span<const int>, int) override { return {}; }
  void RemoveSet(uint32_t) override {}
  Result<PlaneOperation*> Start(const Batch& batch) override {
    kind = batch.kind;
    segment = batch.segments.front();
    count = batch.count;
    segments = batch.segments.size();
    parts.assign(batch.splits.begin(), batch.splits.end());
    sends.assign(batch.sends.begin(), batch.sends.end());
    receives.assign(batch.receives.begin(), batch.receives.end());
    absent.assign(batch.absent.begin(), batch.absent.end());
    ++batches;
    return &operation_;
  }

  int batches = 0;
  OpKind kind = OpKind::kBarrier;
  Segment segment;
  size_t segments = 0;
  int64_t count = 0;
  std::vector<int64_t> parts, sends, receives;
  std::vector<int> absent;

 private:
  class Done final : public PlaneOperation {
   public:
    Progress Step() override { return Progress::Done(); }
    void Abandon() override {}
  };
  Done operation_;
};

Signature Cut(std::vector<int64_t> shape, std::vector<int64_t> rows = {}) {
  Signature signature;
  signature.members.push_back({"", DType::kFloat32, std::move(shape)});
  signature.rows = std::move(rows);
  return signature;
}

class EngineCuts : public testing::Test {
 protected:
  explicit EngineCuts(int size = 3)
      : planes_(static_cast<size_t>(size)),
        job_(size, SteppedJob::Stepped(), [this](int rank, auto) {
          auto plane = std::make_unique<RecordingPlane>();
          planes_[static_cast<size_t>(rank)] = plane.get();
          return plane;
        }) {}

  Status Start(int rank, OpKind kind, const Signature& signature, const void* in = kInput,
               std::vector<int64_t> splits = {}, uint32_t set = kGlobalSet) {
    Engine& engine = job_.engine(rank);
    const KeyName name{set, kind, "x." + std::string(Name(kind))};
    Result<Operation*> prepared = engine.Prepare(name, signature, nullptr, splits);
    if (!prepared.ok()) return prepared.status();
    void* out = kOutput;
    Result<std::shared_ptr<Work>> work = engine.Start(*prepared.value(), {&in, 1}, {&out, 1});
    if (!work.ok()) return work.status();
    works_.push_back(work.value());
    return {};
  }
  void ExpectDone() {
    for (const std::shared_ptr<Work>& work : works_) {
      ASSERT_TRUE(work->done());
      EXPECT_TRUE(work->status().ok()) << work->status().message();
    }
  }
  const RecordingPlane& plane(int rank) const { return *planes_[static_cast<size_t>(rank)]; }

  static inline float kMemory[64] = {};
  static constexpr float* kInput = kMemory;
  static constexpr float* kOutput = kMemory + 32;
  std::vector<RecordingPlane*> planes_;
  SteppedJob job_;
  std::vector<std::shared_ptr<Work>> works_;
};

TEST_F(EngineCuts, HandsAnAllgatherThePartsOfAllRanks) {
  const Signature signature = Cut({3, 2}, {1, 0, 2});
  for (const int r : {0, 2}) ASSERT_TRUE(Start(r, OpKind::kAllgather, signature).ok());
  ASSERT_TRUE(Start(1, OpKind::kAllgather, signature, nullptr).ok()) << "it has no rows";
  job_.SettleHeld();
  ExpectDone();
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(plane(r).kind, OpKind::kAllgather);
    EXPECT_THAT(plane(r).parts, ElementsAre(2, 0, 4));
    EXPECT_EQ(plane(r).count, 6);
    EXPECT_EQ(plane(r).segments, 1u);
    EXPECT_EQ(plane(r).segment.in, r == 1 ? nullptr : kInput);
    EXPECT_THAT(plane(r).sends, IsEmpty());
  }
}

TEST_F(EngineCuts, RefusesAnAllgatherOfRowsWithoutMemory) {
  const Status refused = Start(2, OpKind::kAllgather, Cut({3, 2}, {1, 0, 2}), nullptr);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("\"x.allgather\": tensor 0 has no input"));
}

TEST_F(EngineCuts, RefusesAnOutputInTheMemoryOfItsInput) {
  const Status refused = Start(2, OpKind::kReducescatter, Cut({3}), kOutput - 2);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("its output in the memory of its input"));
  EXPECT_TRUE(Start(2, OpKind::kReducescatter, Cut({3}), kOutput + 1).ok()) << "they touch";
}

TEST_F(EngineCuts, HandsAReducescatterOneRowMoreToTheFirstRanks) {
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(Start(r, OpKind::kReducescatter, Cut({5, 4})).ok());
  job_.SettleHeld();
  ExpectDone();
  EXPECT_THAT(plane(2).parts, ElementsAre(8, 8, 4));
  EXPECT_EQ(plane(2).count, 20);
}

TEST_F(EngineCuts, HandsEachRankOfAnAlltoallItsOwnSplits) {
  const std::vector<int64_t> splits[] = {
      {0, 1, 2, 0, 3, 0}, {3, 0, 0, 1, 0, 1}, {0, 1, 1, 2, 0, 1}};
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(Start(r, OpKind::kAlltoall, Cut({3, 2}), kInput, splits[r]).ok());
  }
  job_.SettleHeld();
  ExpectDone();
  EXPECT_THAT(plane(0).sends, ElementsAre(0, 2, 4));
  EXPECT_THAT(plane(0).receives, ElementsAre(0, 6, 0));
  EXPECT_THAT(plane(1).sends, ElementsAre(6, 0, 0));
  EXPECT_THAT(plane(2).receives, ElementsAre(4, 0, 2));
  EXPECT_EQ(plane(2).count, 6);
  EXPECT_THAT(plane(2).parts, IsEmpty());
}

TEST_F(EngineCuts, RefusesOtherSplitsWhileInFlight) {
  const std::vector<int64_t> splits = {0, 1, 1, 0, 1, 1};
  ASSERT_TRUE(Start(0, OpKind::kAlltoall, Cut({3, 2}), kInput, splits).ok());
  const Status refused = Start(0, OpKind::kAlltoall, Cut({3, 2}), kInput, {0, 1, 1, 0, 1, 2});
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("in flight with another shape"));
  const Status same = Start(0, OpKind::kAlltoall, Cut({3, 2}), kInput, splits);
  EXPECT_THAT(same.message(), HasSubstr("already in flight"));
}

TEST_F(EngineCuts, DescribesAnAlltoallAnewForOtherSplits) {
  Engine& engine = job_.engine(0);
  const KeyName name{kGlobalSet, OpKind::kAlltoall, "x"};
  uint32_t first = 0, same = 0, other = 0;
  const std::vector<int64_t> splits = {0, 1, 1, 0, 1, 1}, others = {0, 1, 1, 0, 2, 1};
  ASSERT_TRUE(engine.Prepare(name, Cut({3}), &first, splits).ok());
  ASSERT_TRUE(engine.Prepare(name, Cut({3}), &same, splits).ok());
  ASSERT_TRUE(engine.Prepare(name, Cut({3}), &other, others).ok());
  EXPECT_EQ(same, first);
  EXPECT_EQ(other, first + 1);
}

TEST_F(EngineCuts, LetsAJoinedRankServeWithoutMemory) {
  ASSERT_TRUE(job_.engine(1).Join().ok());
  for (const int r : {0, 2}) {
    ASSERT_TRUE(Start(r, OpKind::kAllgather, Cut({3}, {1, 0, 2})).ok());
    ASSERT_TRUE(Start(r, OpKind::kReducescatter, Cut({2})).ok());
  }
  job_.SettleHeld();
  ExpectDone();
  EXPECT_EQ(plane(1).batches, 2);
  EXPECT_EQ(plane(1).segment.in, nullptr);
  EXPECT_EQ(plane(1).segment.out, nullptr);
  EXPECT_THAT(plane(0).absent, ElementsAre(1));
}

TEST_F(EngineCuts, CutsAmongTheRanksOfAProcessSet) {
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(job_.engine(r).AddSet({0, 2}).ok());
  job_.SettleHeld();
  const uint32_t set = job_.engine(0).SetOf({0, 2}).value().uid;
  for (const int r : {0, 2}) {
    ASSERT_TRUE(Start(r, OpKind::kReducescatter, Cut({3}), kInput, {}, set).ok());
  }
  job_.SettleHeld();
  ExpectDone();
  EXPECT_THAT(plane(2).parts, ElementsAre(2, 1));
}

TEST_F(EngineCuts, RunsNothingWhereThereIsNothing) {
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(Start(r, OpKind::kAllgather, Cut({0, 2}, {0, 0, 0}), nullptr).ok());
    ASSERT_TRUE(Start(r, OpKind::kAlltoall, Cut({0, 2}), nullptr, {0, 0, 0, 0, 0, 0}).ok());
    ASSERT_TRUE(Start(r, OpKind::kReducescatter, Cut({4, 0}), nullptr).ok());
  }
  job_.SettleHeld();
  ExpectDone();
  EXPECT_EQ(plane(0).batches, 0);
}

TEST_F(EngineCuts, AllocatesNothingOnTheEngineThreadOnceKnown) {
  int64_t allocations = 0;
  for (int use = 0; use < 50; ++use) {
    works_.clear();
    for (int r = 0; r < 3; ++r) {
      ASSERT_TRUE(Start(r, OpKind::kAllgather, Cut({3}, {1, 0, 2})).ok());
      ASSERT_TRUE(Start(r, OpKind::kReducescatter, Cut({4})).ok());
      ASSERT_TRUE(Start(r, OpKind::kAlltoall, Cut({1}), kInput, {1, 1, 1, 1, 1, 1}).ok());
    }
    const int64_t now = job_.SettleHeld();
    if (use >= 40) allocations += now;  // by then every batch that is reused has had every kind
    ExpectDone();
  }
  EXPECT_EQ(allocations, 0);
}

}  // namespace
}  // namespace farandole
