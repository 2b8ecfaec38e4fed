#include "coordinator/protocol/batching.h"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

namespace farandole {
namespace {

/// Builds a decision key by key.
class Decision {
 public:
  struct Tensor {
    DType dtype = DType::kFloat32;
    int64_t count = 1;
  };
  void Add(std::vector<Tensor> tensors, std::vector<RankMask> absent = {}, Mask skipped = {},
           OpKind kind = OpKind::kAllreduce) {
    names_.push_back({kGlobalSet, kind, "k" + std::to_string(names_.size())});
    Signature& signature = signatures_.emplace_back();
    for (const Tensor& tensor : tensors)
      signature.tensors.push_back({"", tensor.dtype, {tensor.count}});
    absent_.push_back(std::move(absent));
    skipped_.push_back(std::move(skipped));
    keys_.push_back({0, true, &names_.back(), &signature, absent_.back(), &skipped_.back()});
  }
  Signature& last() { return signatures_.back(); }

  /// "0.0 0.1|1.0": key.tensor by batch.
  std::string Batches(int64_t threshold_bytes) {
    size_t count = 0;
    FormBatches({1, kGlobalSet, keys_}, threshold_bytes, plans_, &count);
    std::string text;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) text += "|";
      for (const BatchEntry& entry : plans_[i].entries) {
        if (text.size() > 0 && text.back() != '|') text += " ";
        text += std::to_string(entry.key) + "." + std::to_string(entry.tensor);
      }
    }
    return text;
  }
  const BatchPlan& plan(size_t i) const { return plans_[i]; }

 private:
  std::deque<KeyName> names_;
  std::deque<Signature> signatures_;
  std::deque<std::vector<RankMask>> absent_;
  std::deque<Mask> skipped_;
  std::vector<DecidedKey> keys_;
  std::vector<BatchPlan> plans_;
};

TEST(FormBatches, FusesUpToTheLimitExactly) {
  Decision work;
  for (int i = 0; i < 3; ++i) work.Add({{DType::kFloat32, 2}});
  EXPECT_EQ(work.Batches(24), "0.0 1.0 2.0");
  EXPECT_EQ(work.plan(0).bytes, 24);
}

TEST(FormBatches, SplitsWhenNextTensorWouldExceedTheLimit) {
  Decision work;
  for (int i = 0; i < 3; ++i) work.Add({{DType::kFloat32, 2}});
  EXPECT_EQ(work.Batches(23), "0.0 1.0|2.0");
}

TEST(FormBatches, GivesATensorBeyondTheLimitABatchOfItsOwn) {
  Decision work;
  work.Add({{DType::kFloat32, 1}});
  work.Add({{DType::kFloat32, 100}});
  work.Add({{DType::kFloat32, 1}});
  EXPECT_EQ(work.Batches(8), "0.0|1.0|2.0");
}

TEST(FormBatches, FusesNothingWithoutALimit) {
  Decision work;
  work.Add({{DType::kFloat32, 1}, {DType::kFloat32, 1}});
  EXPECT_EQ(work.Batches(0), "0.0|0.1");
}

TEST(FormBatches, KeepsDtypesApartAndGoesOnWithEach) {
  Decision work;
  work.Add({{DType::kFloat32, 1}, {DType::kInt64, 1}, {DType::kFloat32, 1}, {DType::kInt64, 1}});
  EXPECT_EQ(work.Batches(1000), "0.0 0.2|0.1 0.3");
}

TEST(FormBatches, KeepsReduceOpsApart) {
  Decision work;
  work.Add({{DType::kFloat32, 1}});
  work.Add({{DType::kFloat32, 1}});
  work.last().op = ReduceOp::kAverage;
  EXPECT_EQ(work.Batches(1000), "0.0|1.0");
}

// A batch has one factor, and ranks do not know each other's.
TEST(FormBatches, FusesTensorsOfOnePreMulSumOnly) {
  Decision work;
  for (int i = 0; i < 2; ++i) {
    work.Add({{DType::kFloat32, 1}, {DType::kFloat32, 1}});
    work.last().op = ReduceOp::kPreMulSum;
  }
  EXPECT_EQ(work.Batches(1000), "0.0 0.1|1.0 1.1");
}

TEST(FormBatches, KeepsBroadcastRootsApart) {
  Decision work;
  for (const int root : {0, 1, 0}) {
    work.Add({{DType::kFloat32, 1}}, {}, {}, OpKind::kBroadcast);
    work.last().root = root;
  }
  EXPECT_EQ(work.Batches(1000), "0.0 2.0|1.0");
}

TEST(FormBatches, SplitsAGroupByAbsentSet) {
  Decision work;
  work.Add({{DType::kFloat32, 1}, {DType::kFloat32, 1}, {DType::kFloat32, 1}}, {{4, {0b010}}});
  EXPECT_EQ(work.Batches(1000), "0.0 0.2|0.1");
  EXPECT_EQ(work.plan(0).absent, std::vector<int32_t>());
  EXPECT_EQ(work.plan(1).absent, std::vector<int32_t>({4}));
}

TEST(FormBatches, LeavesOutSkippedAndEmptyTensors) {
  Decision work;
  work.Add({{DType::kFloat32, 1}, {DType::kFloat32, 0}, {DType::kFloat32, 1}}, {}, {0b001});
  EXPECT_EQ(work.Batches(1000), "0.2");
}

class CutKinds : public testing::TestWithParam<OpKind> {};

TEST_P(CutKinds, AreABatchForEachTensorThatIsNotEmpty) {
  Decision work;
  work.Add({{DType::kFloat32, 1}, {DType::kFloat32, 0}, {DType::kFloat32, 1}}, {}, {}, GetParam());
  EXPECT_EQ(work.Batches(1000), "0.0|0.2");
}

INSTANTIATE_TEST_SUITE_P(Kinds, CutKinds,
                         testing::Values(OpKind::kAllgather, OpKind::kReducescatter,
                                         OpKind::kAlltoall),
                         [](const auto& kind) { return std::string(Name(kind.param)); });

TEST(FormBatches, ReusesWhatEarlierDecisionsLeft) {
  Decision work;
  work.Add({{DType::kFloat32, 1}, {DType::kInt64, 1}});
  EXPECT_EQ(work.Batches(1000), "0.0|0.1");
  EXPECT_EQ(work.Batches(1000), "0.0|0.1");
}

}  // namespace
}  // namespace farandole
