// Allreduces whose elements travel as 8-bit integers (ops/cpu/quantize.h), over every plane that
// has links: all ranks get the same bits, near the sum, and over several rounds nothing is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "test/conformance/data_plane_backends.h"
#include "test/conformance/data_plane_harness.h"

namespace farandole {
namespace {

using Values = std::vector<float>;
constexpr float kMost = 4.0f;  // magnitude of a contribution

/// One tensor on one rank.
struct Tensor {
  Values in, out, residual;
};

/// All tensors of one rank, which are reduced as one batch.
class Rank {
 public:
  Rank(int rank, const std::vector<int64_t>& counts) {
    std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
    std::uniform_real_distribution<float> uniform(-kMost, kMost);
    for (const int64_t count : counts) {
      const auto size = static_cast<size_t>(count);
      tensors_.push_back({Values(size), Values(size), Values(size)});
      for (float& value : tensors_.back().in) value = uniform(random);
    }
  }

  Tensor& tensor(size_t t) { return tensors_[t]; }

  /// The tensors in the batch follow one another from `first` on, around.
  void Describe(const SetView& set, size_t first, ReduceOp op, std::vector<int> absent = {}) {
    absent_ = std::move(absent);
    batch_ = Batch();
    batch_.wire_format = WireFormat::kInt8;
    batch_.op = op;
    batch_.set = set.set;
    batch_.ranks = set.ranks;
    batch_.my_index = set.my_index;
    batch_.absent = absent_;
    const bool contributes = std::ranges::find(absent_, set.my_index) == absent_.end();
    segments_.clear();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      Tensor& t = tensors_[(first + i) % tensors_.size()];
      segments_.push_back({contributes ? t.in.data() : nullptr, t.out.data(),
                           static_cast<int64_t>(t.in.size()), t.residual.data()});
      batch_.count += segments_.back().count;
    }
    batch_.segments = segments_;
  }

  /// @return What went wrong.
  std::string Reduce(DataPlane& plane, FutexDoorbell& bell) {
    Result<PlaneOperation*> started = plane.Start(batch_);
    if (!started.ok()) return started.status().ToString();
    for (;;) {
      const uint32_t ticket = bell.Ticket();
      const Progress progress = started.value()->Step();
      if (progress.state == Progress::State::kDone) return {};
      if (progress.state == Progress::State::kFailed) return progress.status.ToString();
      if (progress.state != Progress::State::kWaiting) continue;
      const int64_t most_ns = progress.poll_after_ns == kByDoorbell ? 5'000'000 : 50'000;
      bell.Sleep(FutexDoorbell::Listener::kEngine, ticket, most_ns);
    }
  }

 private:
  std::vector<Tensor> tensors_;
  std::vector<int> absent_;
  std::vector<Segment> segments_;
  Batch batch_;
};

class QuantizedAllreduce : public ::testing::TestWithParam<PlaneParam> {
 protected:
  QuantizedAllreduce() : group_(GetParam().backend.make(ranks())) {
    for (int rank = 0; rank < ranks(); ++rank) {
      views_.push_back(group_.Set(rank));
      ranks_.emplace_back(rank, counts_);
    }
    OnEveryRank(ranks(), [this](int rank) {
      const SetView& set = views_[Index(rank)];
      ASSERT_TRUE(group_.planes[Index(rank)]->AddSet(set.set, set.ranks, set.my_index).ok());
    });
  }

  static int ranks() { return GetParam().ranks; }
  static size_t Index(int rank) { return static_cast<size_t>(rank); }

  /// One round on all ranks, after which all have the same bits.
  void Reduce(size_t first, ReduceOp op, const std::vector<int>& absent = {}) {
    OnEveryRank(ranks(), [&](int rank) {
      Rank& mine = ranks_[Index(rank)];
      mine.Describe(views_[Index(rank)], first, op, absent);
      EXPECT_EQ(mine.Reduce(*group_.planes[Index(rank)], *group_.bells[Index(rank)]), "");
    });
    for (size_t t = 0; t < counts_.size(); ++t) {
      const Values& expected = ranks_[0].tensor(t).out;
      for (Rank& rank : ranks_) {
        const Values& got = rank.tensor(t).out;
        ASSERT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << t;
      }
    }
  }

  double Sum(size_t t, size_t i, const std::vector<int>& absent = {}) {
    double sum = 0;
    for (int rank = 0; rank < ranks(); ++rank) {
      if (std::ranges::find(absent, rank) != absent.end()) continue;
      sum += static_cast<double>(ranks_[Index(rank)].tensor(t).in[i]);
    }
    return sum;
  }

  /// What all residuals together may hold: half a scale of every contribution and of the sum, each
  /// of which has grown by a residual.
  static double Bound() { return 2.2 * ranks() * static_cast<double>(kMost) / 254; }

  /// Where elements change their owners, every rank may hold that much of one.
  static double BoundOf(size_t turn) { return turn == 0 ? Bound() : ranks() * Bound(); }

  /// Sums of several rounds against as many times the exact one.
  void ExpectNothingLost(int rounds, ReduceOp op, size_t turn,
                         const std::vector<int>& absent = {}) {
    const double divisor = op == ReduceOp::kAverage ? ranks() : 1;
    std::vector<std::vector<double>> totals;
    for (const int64_t count : counts_) totals.emplace_back(static_cast<size_t>(count));
    for (int round = 1; round <= rounds; ++round) {
      ASSERT_NO_FATAL_FAILURE(Reduce(turn * static_cast<size_t>(round), op, absent));
      for (size_t t = 0; t < counts_.size(); ++t) {
        for (size_t i = 0; i < totals[t].size(); ++i) {
          totals[t][i] += static_cast<double>(ranks_[0].tensor(t).out[i]);
          const double lost = totals[t][i] - round * Sum(t, i, absent) / divisor;
          ASSERT_LE(std::fabs(lost), BoundOf(turn) / divisor + round * 1e-5) << round << ", " << t;
        }
      }
    }
  }

  // Blocks, shards and slices begin within tensors; some are shorter than a block.
  const std::vector<int64_t> counts_ = {70'001, 3, 100, 30'000, 1};
  PlaneGroup group_;
  std::vector<SetView> views_;
  std::vector<Rank> ranks_;
};

TEST_P(QuantizedAllreduce, LosesNothingOverManyRounds) { ExpectNothingLost(20, ReduceOp::kSum, 0); }

/// What the tests around this one would find.
TEST_P(QuantizedAllreduce, LosesWhatItHasNoResidualFor) {
  ASSERT_NO_FATAL_FAILURE(Reduce(0, ReduceOp::kSum));
  double most = 0;
  for (size_t i = 0; i < ranks_[0].tensor(0).out.size(); ++i) {
    const double error = static_cast<double>(ranks_[0].tensor(0).out[i]) - Sum(0, i);
    most = std::max(most, std::fabs(error));
  }
  for (Rank& rank : ranks_) {
    for (size_t i = 0; i < counts_.size(); ++i) {
      std::ranges::fill(rank.tensor(i).residual, 0.0f);
    }
  }
  const Values first = ranks_[0].tensor(0).out;
  ASSERT_NO_FATAL_FAILURE(Reduce(0, ReduceOp::kSum));
  EXPECT_EQ(ranks_[0].tensor(0).out, first);  // so each of 20 rounds would add the same error
  EXPECT_GT(20 * most, 2 * Bound());
}

/// Elements change their owners.
TEST_P(QuantizedAllreduce, LosesNothingWhereBatchesChange) {
  ExpectNothingLost(8, ReduceOp::kSum, 1);
}

TEST_P(QuantizedAllreduce, AveragesOverAllRanks) {
  if (GetParam().Name() == "HierarchicalOneHasOne3Ranks") {
    // Contributions of the host of one rank weigh half as much again before they are divided.
    ExpectNothingLost(1, ReduceOp::kAverage, 0);
  } else {
    ExpectNothingLost(4, ReduceOp::kAverage, 0, {ranks() - 1});
  }
}

/// Something was rounded: else the tests above would pass without an 8-bit wire.
TEST_P(QuantizedAllreduce, RoundsWhatItSends) {
  Reduce(0, ReduceOp::kSum);
  int64_t exact = 0;
  const Values& out = ranks_[0].tensor(0).out;
  for (size_t i = 0; i < out.size(); ++i) {
    exact += std::fabs(static_cast<double>(out[i]) - Sum(0, i)) < 1e-5 ? 1 : 0;
  }
  EXPECT_LT(exact, std::ssize(out) / 100);
}

TEST_P(QuantizedAllreduce, ShowsNanOnAllRanksAndRecovers) {
  Values& in = ranks_.back().tensor(0).in;
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const float good = std::exchange(in[5000], bad);
    Reduce(0, ReduceOp::kSum);
    EXPECT_TRUE(std::isnan(ranks_[0].tensor(0).out[5000]));
    EXPECT_FALSE(std::isnan(ranks_[0].tensor(0).out[60'000]));
    in[5000] = good;
    Reduce(0, ReduceOp::kSum);
    for (const float value : ranks_[0].tensor(0).out) ASSERT_TRUE(std::isfinite(value));
  }
}

INSTANTIATE_TEST_SUITE_P(Planes, QuantizedAllreduce, ::testing::ValuesIn(BackendsOverTcp()),
                         [](const auto& test) { return test.param.Name(); });

}  // namespace
}  // namespace farandole
