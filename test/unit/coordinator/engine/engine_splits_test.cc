// Allgather, reducescatter and alltoall through the engine, up to what its data plane is handed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
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

/// The real plane, of which it keeps the last batch of floats: sizes are exchanged as integers.
class RecordingPlane final : public DataPlane {
 public:
  explicit RecordingPlane(std::unique_ptr<DataPlane> plane) : plane_(std::move(plane)) {
    kinds.reserve(1000);  // a test counts allocations
  }
  const char* name() const override { return "recording"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override {
    return plane_->AddSet(set, ranks, my_index);
  }
  void RemoveSet(uint32_t set) override { plane_->RemoveSet(set); }
  Result<PlaneOperation*> Start(const Batch& batch) override {
    ++(batch.dtype == DType::kInt64 ? exchanges : batches);
    if (batch.dtype == DType::kInt64) return plane_->Start(batch);
    kind = batch.kind;
    kinds.push_back(kind);
    segment = batch.segments.front();
    count = batch.count;
    segments = batch.segments.size();
    splits.assign(batch.splits.begin(), batch.splits.end());
    sends.assign(batch.sends.begin(), batch.sends.end());
    receives.assign(batch.receives.begin(), batch.receives.end());
    absent.assign(batch.absent.begin(), batch.absent.end());
    return plane_->Start(batch);
  }

  int batches = 0;
  int exchanges = 0;
  OpKind kind = OpKind::kBarrier;
  std::vector<OpKind> kinds;  // of all of them
  Segment segment;
  size_t segments = 0;
  int64_t count = 0;
  std::vector<int64_t> splits, sends, receives;
  std::vector<int> absent;

 private:
  const std::unique_ptr<DataPlane> plane_;
};

/// Memory that is there already, or none.
class FixedMemory final : public ResultAllocator {
 public:
  explicit FixedMemory(void* memory) : memory_(memory) {}
  Result<void*> Allocate(size_t, std::span<const int64_t>, int64_t bytes) override {
    if (memory_ == nullptr) return ResourceExhausted("no " + std::to_string(bytes) + " bytes");
    return memory_;
  }

 private:
  void* const memory_;
};

Signature Tensor(std::vector<int64_t> shape) {
  Signature signature;
  signature.tensors.push_back({"", DType::kFloat32, std::move(shape)});
  return signature;
}

class EngineSplits : public testing::Test {
 protected:
  explicit EngineSplits(int size = 3)
      : planes_(static_cast<size_t>(size)),
        job_(size, SteppedJob::Stepped(), [this](int rank, std::unique_ptr<DataPlane> real) {
          auto plane = std::make_unique<RecordingPlane>(std::move(real));
          planes_[static_cast<size_t>(rank)] = plane.get();
          return plane;
        }) {}

  /// Results of allgather and alltoall go to `out` whatever their size is.
  Status Start(int rank, OpKind kind, const Signature& signature, const void* in = kInput,
               std::vector<int64_t> splits = {}, uint32_t set = kGlobalSet) {
    const bool allocates = RowsMayDiffer(kind);
    return Start(rank, kind, signature, in, splits, set,
                 allocates ? std::make_shared<FixedMemory>(OutputOf(rank)) : nullptr);
  }
  Status Start(int rank, OpKind kind, const Signature& signature, const void* in,
               const std::vector<int64_t>& splits, uint32_t set,
               std::shared_ptr<ResultAllocator> allocator) {
    Engine& engine = job_.engine(rank);
    const KeyName name{set, kind, "x." + std::string(Name(kind))};
    uint32_t version = 0;
    Result<Operation*> prepared = engine.operations().Prepare(name, signature, &version, splits);
    if (!prepared.ok()) return prepared.status();
    FARANDOLE_RETURN_IF_ERROR(engine.operations().Claim(*prepared.value(), version));
    ClaimedOperation claimed(*prepared.value());
    void* out = OutputOf(rank);
    const size_t outputs = allocator == nullptr ? 1 : 0;
    Result<std::shared_ptr<Work>> work =
        engine.StartClaimed(claimed, {&in, 1}, {&out, outputs}, {}, true, {}, std::move(allocator));
    if (!work.ok()) return work.status();
    works_.push_back(work.value());
    return {};
  }
  /// On all ranks.
  void StartAll(OpKind kind, const std::vector<int64_t>& shape, const void* in = kInput) {
    for (int r = 0; r < 3; ++r) ASSERT_TRUE(Start(r, kind, Tensor(shape), in).ok());
  }
  void ExpectRefused(const Status& status, const char* text) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(text));
  }
  float* OutputOf(int rank) { return kOutput + 64 * rank; }
  void ExpectDone() {
    allocations_ = job_.SettleHeld();
    for (const std::shared_ptr<Work>& work : works_) {
      ASSERT_TRUE(work->done());
      EXPECT_TRUE(work->status().ok()) << work->status().message();
    }
  }
  const RecordingPlane& plane(int rank) const { return *planes_[static_cast<size_t>(rank)]; }

  static inline float kMemory[256] = {};
  static constexpr float* kInput = kMemory;
  static constexpr float* kOutput = kMemory + 32;
  std::vector<RecordingPlane*> planes_;
  SteppedJob job_;
  std::vector<std::shared_ptr<Work>> works_;
  int64_t allocations_ = 0;  // of the engines, until all was done
};

TEST_F(EngineSplits, HandsAnAllgatherTheRowsOfAllRanks) {
  const int64_t rows[] = {1, 0, 2};
  for (int r = 0; r < 3; ++r) {
    const void* const in = r == 1 ? nullptr : kInput;
    ASSERT_TRUE(Start(r, OpKind::kAllgather, Tensor({rows[r], 2}), in).ok());
  }
  ExpectDone();
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(plane(r).kind, OpKind::kAllgather);
    EXPECT_THAT(plane(r).splits, ElementsAre(2, 0, 4));
    EXPECT_EQ(plane(r).count, 6);
    EXPECT_EQ(plane(r).segments, 1u);
    EXPECT_EQ(plane(r).segment.in, r == 1 ? nullptr : kInput);
    EXPECT_THAT(plane(r).sends, IsEmpty());
    EXPECT_THAT(works_[static_cast<size_t>(r)]->rows(0), ElementsAre(1, 0, 2));
  }
}

TEST_F(EngineSplits, FailsOnlyTheRankThatHasNoMemoryForItsResult) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall}) {
    works_.clear();
    for (int r = 0; r < 3; ++r) {
      float* const memory = r == 1 ? nullptr : OutputOf(r);
      ASSERT_TRUE(Start(r, kind, Tensor({3, 2}), kInput, {}, kGlobalSet,
                        std::make_shared<FixedMemory>(memory))
                      .ok());
    }
    job_.SettleHeld();
    for (size_t r = 0; r < 3; ++r) ASSERT_TRUE(works_[r]->done());
    EXPECT_TRUE(works_[0]->status().ok());
    EXPECT_EQ(works_[1]->status().code(), Code::kResourceExhausted);
    EXPECT_EQ(works_[1]->status().message(),
              std::string(Name(kind)) + " \"x." + std::string(Name(kind)) + "\": no " +
                  (kind == OpKind::kAllgather ? "72" : "24") + " bytes");
    EXPECT_TRUE(works_[2]->status().ok());
  }
}

TEST_F(EngineSplits, FailsWhereOtherRowsComeThanTheOutputHasRoomFor) {
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(
        Start(r, OpKind::kAllgather, Tensor({r == 0 ? 2 : 1, 2}), kInput, {}, kGlobalSet, nullptr)
            .ok());
  }
  job_.SettleHeld();
  for (const std::shared_ptr<Work>& work : works_) {
    ASSERT_TRUE(work->done());
    EXPECT_EQ(work->status().code(), Code::kMismatch);
    EXPECT_THAT(work->status().message(), HasSubstr("the same number of rows; the ranks gave "
                                                    "[2,1,1]"));
  }
}

TEST_F(EngineSplits, StartsNoLaterBatchOfASetBetweenSizesAndPayload) {
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(Start(r, OpKind::kAlltoall, Tensor({3}), kInput, {r, 1, 0}).ok());
    ASSERT_TRUE(Start(r, OpKind::kReducescatter, Tensor({4})).ok());
    ASSERT_TRUE(Start(r, OpKind::kAllgather, Tensor({r})).ok());
  }
  ExpectDone();
  EXPECT_EQ(plane(2).exchanges, 1);
  EXPECT_EQ(plane(2).batches, 3);
}

TEST_F(EngineSplits, StartsNoLaterBatchOfASetAmongThePartsOfAnAdasum) {
  Signature delta = Tensor({4});
  delta.op = ReduceOp::kAdasum;
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(Start(r, OpKind::kAllreduce, delta).ok());
    ASSERT_TRUE(Start(r, OpKind::kReducescatter, Tensor({4})).ok());
  }
  ExpectDone();
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(plane(r).kinds,
                ElementsAre(OpKind::kAlltoall, OpKind::kAllreduce, OpKind::kAllreduce,
                            OpKind::kAllgather, OpKind::kReducescatter));
  }
}

TEST_F(EngineSplits, RefusesAnAllgatherOfRowsWithoutMemory) {
  ExpectRefused(Start(2, OpKind::kAllgather, Tensor({2, 2}), nullptr),
                "\"x.allgather\": tensor 0 has no input");
}

TEST_F(EngineSplits, RefusesAnOutputInTheMemoryOfItsInput) {
  ExpectRefused(Start(2, OpKind::kReducescatter, Tensor({3}), OutputOf(2) - 2),
                "its output in the memory of its input");
  EXPECT_TRUE(Start(2, OpKind::kReducescatter, Tensor({3}), OutputOf(2) + 1).ok()) << "they touch";
}

TEST_F(EngineSplits, HandsAReducescatterOneRowMoreToTheFirstRanks) {
  StartAll(OpKind::kReducescatter, {5, 4});
  ExpectDone();
  EXPECT_THAT(plane(2).splits, ElementsAre(8, 8, 4));
  EXPECT_EQ(plane(2).count, 20);
}

TEST_F(EngineSplits, HandsEachRankOfAnAlltoallItsOwnSplits) {
  const std::vector<int64_t> splits[] = {{0, 1, 2}, {3, 0, 0}, {0, 1, 1}};
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(Start(r, OpKind::kAlltoall, Tensor({3, 2}), kInput, splits[r]).ok());
  }
  ExpectDone();
  EXPECT_THAT(plane(0).sends, ElementsAre(0, 2, 4));
  EXPECT_THAT(plane(0).receives, ElementsAre(0, 6, 0));
  EXPECT_THAT(plane(1).sends, ElementsAre(6, 0, 0));
  EXPECT_THAT(plane(2).receives, ElementsAre(4, 0, 2));
  EXPECT_EQ(plane(2).count, 6);
  EXPECT_THAT(plane(2).splits, IsEmpty());
  EXPECT_THAT(works_[2]->rows(0), ElementsAre(2, 0, 1));
}

// Planes do not know the type: its bytes arrive as integers.
TEST_F(EngineSplits, MovesAComplexNumberAsTwoIntegers) {
  Signature pairs = Tensor({3, 2});
  pairs.tensors[0].dtype = DType::kComplex128;
  Signature rows = Tensor({1, 2});
  rows.tensors[0].dtype = DType::kComplex128;
  std::vector<std::vector<double>> given, got, gathered;
  for (int r = 0; r < 3; ++r) {
    given.emplace_back(12);
    std::iota(given.back().begin(), given.back().end(), 100.0 * r);
    got.emplace_back(12);
    gathered.emplace_back(12);
  }
  for (int r = 0; r < 3; ++r) {
    const auto at = static_cast<size_t>(r);
    ASSERT_TRUE(Start(r, OpKind::kAlltoall, pairs, given[at].data(), {}, kGlobalSet,
                      std::make_shared<FixedMemory>(got[at].data()))
                    .ok());
    ASSERT_TRUE(Start(r, OpKind::kAllgather, rows, given[at].data(), {}, kGlobalSet,
                      std::make_shared<FixedMemory>(gathered[at].data()))
                    .ok());
  }
  ExpectDone();
  EXPECT_THAT(got[1], ElementsAre(4, 5, 6, 7, 104, 105, 106, 107, 204, 205, 206, 207));
  EXPECT_THAT(gathered[2], ElementsAre(0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203));
  EXPECT_THAT(works_[0]->rows(0), ElementsAre(1, 1, 1));
}

TEST_F(EngineSplits, RefusesOtherSplitsWhileInFlight) {
  const std::vector<int64_t> splits = {0, 1, 1};
  ASSERT_TRUE(Start(0, OpKind::kAlltoall, Tensor({3, 2}), kInput, splits).ok());
  ExpectRefused(Start(0, OpKind::kAlltoall, Tensor({3, 2}), kInput, {0, 1, 2}),
                "in flight with another shape");
  ExpectRefused(Start(0, OpKind::kAlltoall, Tensor({3, 2}), kInput, splits), "already in flight");
}

TEST_F(EngineSplits, RedefinesAnOperationForOtherRowsOrSplits) {
  Engine& engine = job_.engine(0);
  const KeyName name{kGlobalSet, OpKind::kAlltoall, "x"};
  const std::vector<int64_t> splits = {0, 1, 1}, others = {0, 1, 2};
  const auto version_of = [&](int64_t rows, const std::vector<int64_t>& to_each) {
    uint32_t version = 0;
    EXPECT_TRUE(engine.operations().Prepare(name, Tensor({rows}), &version, to_each).ok());
    return version;
  };
  const uint32_t first = version_of(3, splits);
  EXPECT_EQ(version_of(3, splits), first);
  EXPECT_EQ(version_of(3, others), first + 1);
  EXPECT_EQ(version_of(4, others), first + 2);
}

TEST_F(EngineSplits, LetsAJoinedRankServeWithoutMemory) {
  ASSERT_TRUE(job_.engine(1).Join().ok());
  for (const int r : {0, 2}) {
    ASSERT_TRUE(Start(r, OpKind::kAllgather, Tensor({r + 1})).ok());
    ASSERT_TRUE(Start(r, OpKind::kReducescatter, Tensor({2})).ok());
  }
  ExpectDone();
  EXPECT_EQ(plane(1).batches, 2);
  EXPECT_EQ(plane(1).segment.in, nullptr);
  EXPECT_EQ(plane(1).segment.out, nullptr);
  EXPECT_THAT(plane(0).absent, ElementsAre(1));
}

TEST_F(EngineSplits, CutsAmongTheRanksOfAProcessSet) {
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(job_.engine(r).AddSet({0, 2}).ok());
  job_.SettleHeld();
  const uint32_t set = job_.engine(0).operations().SetOf({0, 2}).value().uid;
  for (const int r : {0, 2}) {
    ASSERT_TRUE(Start(r, OpKind::kReducescatter, Tensor({3}), kInput, {}, set).ok());
  }
  ExpectDone();
  EXPECT_THAT(plane(2).splits, ElementsAre(2, 1));
}

TEST_F(EngineSplits, RunsNothingWhereThereIsNothing) {
  StartAll(OpKind::kAllgather, {0, 2}, nullptr);
  StartAll(OpKind::kAlltoall, {0, 2}, nullptr);
  StartAll(OpKind::kReducescatter, {4, 0}, nullptr);
  ExpectDone();
  EXPECT_EQ(plane(0).batches, 0);
}

TEST_F(EngineSplits, ExchangesTheRowsOfAnAlltoallWhoseRowsAreEmpty) {
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(Start(r, OpKind::kAlltoall, Tensor({3, 0}), nullptr, {r, 0, 1}).ok());
  }
  ExpectDone();
  EXPECT_THAT(works_[0]->rows(0), ElementsAre(0, 1, 2));
  EXPECT_EQ(plane(0).batches, 0);
}

TEST_F(EngineSplits, AllocatesNothingOnTheEngineThreadOnceKnown) {
  int64_t allocations = 0;
  for (int use = 0; use < 50; ++use) {
    works_.clear();
    for (int r = 0; r < 3; ++r) {
      ASSERT_TRUE(Start(r, OpKind::kAllgather, Tensor({r})).ok());
      ASSERT_TRUE(Start(r, OpKind::kReducescatter, Tensor({4})).ok());
      ASSERT_TRUE(Start(r, OpKind::kAlltoall, Tensor({3})).ok());
    }
    ExpectDone();
    if (use >= 40) allocations += allocations_;  // by then each reused batch has had every kind
  }
  EXPECT_EQ(allocations, 0);
}

}  // namespace
}  // namespace farandole
