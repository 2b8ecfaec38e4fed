#include "ops/cpu/adasum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "ops/shm/plane.h"

namespace farandole {
namespace {

class SilentBell final : public Doorbell {
 public:
  void Ring() override {}
};

using Vector = std::vector<float>;

/// Ranks in one thread that share one set, and reduce in place.
class Ranks {
 public:
  explicit Ranks(int size) : ranks_(static_cast<size_t>(size)), bells_(ranks_.size()) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
    std::vector<Doorbell*> bells;
    for (SilentBell& bell : bells_) bells.push_back(&bell);
    const auto hub = std::make_shared<HeapMemory>(bells);
    for (const int rank : ranks_) {
      planes_.push_back(std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()));
      EXPECT_TRUE(planes_.back()->AddSet(0, ranks_, rank).ok());
      operations_.push_back(std::make_unique<AdasumAllreduce>());
    }
    batches_.resize(ranks_.size());
    segments_.resize(ranks_.size());
  }

  /// @param tensors  By rank, each with the same tensors; results take their place.
  void Begin(std::vector<std::vector<Vector>>& tensors) {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      Batch& batch = batches_[rank];
      batch = Batch();
      batch.op = ReduceOp::kAdasum;
      batch.ranks = ranks_;
      batch.my_index = static_cast<int>(rank);
      segments_[rank].clear();
      for (Vector& tensor : tensors[rank]) {
        const auto count = static_cast<int64_t>(tensor.size());
        segments_[rank].push_back({tensor.data(), tensor.data(), count});
        batch.count += count;
      }
      batch.segments = segments_[rank];
      ASSERT_TRUE(operations_[rank]->Begin(*planes_[rank], batch).ok());
    }
  }
  void Finish() {
    std::vector<bool> done(ranks_.size());
    for (size_t left = ranks_.size(); left > 0;) {
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (done[rank]) continue;
        const Progress::State state = operations_[rank]->Step().state;
        ASSERT_NE(state, Progress::State::kFailed);
        done[rank] = state == Progress::State::kDone;
        if (done[rank]) --left;
      }
    }
  }
  /// The result of one tensor of each rank.
  Vector Reduce(const std::vector<Vector>& vectors) {
    std::vector<std::vector<Vector>> tensors;
    for (const Vector& vector : vectors) tensors.push_back({vector});
    Begin(tensors);
    Finish();
    for (const auto& of_rank : tensors) EXPECT_EQ(of_rank, tensors.front());
    return tensors.front().front();
  }
  AdasumAllreduce& operation(size_t rank) { return *operations_[rank]; }
  DataPlane& plane(size_t rank) { return *planes_[rank]; }
  const Batch& batch(size_t rank) const { return batches_[rank]; }

 private:
  std::vector<int> ranks_;
  std::vector<SilentBell> bells_;
  std::vector<std::unique_ptr<SharedMemoryPlane>> planes_;
  std::vector<std::unique_ptr<AdasumAllreduce>> operations_;
  std::vector<Batch> batches_;
  std::vector<std::vector<Segment>> segments_;
};

TEST(AdasumAllreduce, KeepsAVectorThatAllRanksHave) {
  for (const int size : {1, 2, 3, 5, 8}) {
    const Vector vector = {0.1f, -7.3f, 1e-20f, 3e10f, 0.0f};
    const std::vector<Vector> same(static_cast<size_t>(size), vector);
    EXPECT_EQ(Ranks(size).Reduce(same), vector) << size << " ranks";
  }
}

TEST(AdasumAllreduce, AddsOrthogonalVectors) {
  EXPECT_EQ(Ranks(4).Reduce({{1, 0, 0, 0}, {0, -2, 0, 0}, {0, 0, 0.1f, 0}, {0, 0, 0, 5}}),
            (Vector{1, -2, 0.1f, 5}));
  EXPECT_EQ(Ranks(2).Reduce({{1, 1}, {1, -1}}), (Vector{2, 0}));
}

TEST(AdasumAllreduce, AveragesParallelVectors) {
  EXPECT_EQ(Ranks(2).Reduce({{1, 2}, {3, 6}}), (Vector{2, 4}));
}

TEST(AdasumAllreduce, TakesAZeroVectorAsNothing) {
  EXPECT_EQ(Ranks(2).Reduce({{0, 0, 0}, {1, 2, 3}}), (Vector{1, 2, 3}));
  EXPECT_EQ(Ranks(2).Reduce({{1, 2, 3}, {0, 0, 0}}), (Vector{1, 2, 3}));
  EXPECT_EQ(Ranks(3).Reduce({{0}, {0}, {0}}), (Vector{0}));
}

// (a, b), then c: of vectors of one element a pair gives the mean.
TEST(AdasumAllreduce, PassesAnOddOneToTheNextLevel) {
  EXPECT_EQ(Ranks(3).Reduce({{2}, {4}, {8}}), (Vector{5.5f}));
  EXPECT_EQ(Ranks(5).Reduce({{2}, {4}, {8}, {16}, {32}}), (Vector{19.75f}));
}

TEST(AdasumAllreduce, SpreadsNanOverItsTensorOnly) {
  Ranks ranks(3);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::vector<Vector>> tensors(3, {{1, 2, 3}, {4, 5}});
  tensors[1][0][2] = nan;
  ranks.Begin(tensors);
  ranks.Finish();
  for (const auto& of_rank : tensors) {
    for (const float x : of_rank[0]) EXPECT_TRUE(std::isnan(x));
    EXPECT_EQ(of_rank[1], (Vector{4, 5}));
  }
}

Vector Waves(size_t count, size_t seed) {
  Vector vector;
  for (size_t i = 0; i < count; ++i) {
    vector.push_back(static_cast<float>(std::sin(static_cast<double>(i * (seed + 1) % 977))));
  }
  return vector;
}

TEST(AdasumAllreduce, GivesATensorTheSameBitsWhateverElseIsInTheBatch) {
  constexpr size_t kCounts[] = {5, 20'001, 1, 333};
  Ranks ranks(3);
  std::vector<std::vector<Vector>> together(3);
  for (size_t rank = 0; rank < 3; ++rank) {
    for (const size_t count : kCounts) together[rank].push_back(Waves(count, rank));
  }
  ranks.Begin(together);
  ranks.Finish();
  for (size_t k = 0; k < std::size(kCounts); ++k) {
    std::vector<Vector> alone;
    for (size_t rank = 0; rank < 3; ++rank) alone.push_back(Waves(kCounts[k], rank));
    EXPECT_EQ(ranks.Reduce(alone), together[0][k]) << kCounts[k];
  }
}

TEST(AdasumAllreduce, LeavesTheTensorsOnceAbandoned) {
  for (int steps : {0, 1, 3}) {
    Ranks ranks(2);
    std::vector<std::vector<Vector>> tensors(2, {Vector(200'000, 1.0f), Vector(3, 1.0f)});
    ranks.Begin(tensors);
    for (int i = 0; i < steps; ++i) (void)ranks.operation(0).Step();
    ranks.operation(0).Abandon();
    EXPECT_EQ(tensors[0][0], Vector(200'000, 1.0f));
  }
}

TEST(AdasumAllreduce, WorksOnAChunkAtATime) {
  Ranks ranks(2);
  std::vector<std::vector<Vector>> tensors(2, {Vector(1'000'000, 1.0f), Vector(1, 1.0f)});
  ranks.Begin(tensors);
  int steps = 1;  // only packing and what others need not wait for
  while (ranks.operation(0).Step().state == Progress::State::kMoved) ++steps;
  EXPECT_GT(steps, 10);
}

TEST(AdasumAllreduce, RefusesIntegers) {
  Ranks ranks(2);
  std::vector<std::vector<Vector>> tensors(2, {{1}});
  ranks.Begin(tensors);
  Batch batch = ranks.batch(0);
  batch.dtype = batch.wire = DType::kInt32;
  EXPECT_EQ(AdasumAllreduce().Begin(ranks.plane(0), batch).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace farandole
