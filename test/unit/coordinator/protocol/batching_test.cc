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

constexpr auto kFloat = DType::kFloat32, kInt = DType::kInt64;

struct Row {
  const char* rule;
  void (*fill)(Decision&);
  int64_t threshold_bytes;
  const char* batches;
};

/// Two tensors with a value and an empty one between them.
void AddThree(Decision& d, OpKind kind) { d.Add({{kFloat}, {kFloat, 0}, {kFloat}}, {}, {}, kind); }
void AddThreeOfTwo(Decision& d) {
  for (int i = 0; i < 3; ++i) d.Add({{kFloat, 2}});
}

constexpr Row kRows[] = {
    {"up to the limit exactly", AddThreeOfTwo, 24, "0.0 1.0 2.0"},
    {"the next tensor would exceed the limit", AddThreeOfTwo, 23, "0.0 1.0|2.0"},
    {"a tensor beyond the limit has a batch of its own",
     [](Decision& d) {
       d.Add({{kFloat}}), d.Add({{kFloat, 100}}), d.Add({{kFloat}});
     },
     8, "0.0|1.0|2.0"},
    {"nothing is fused without a limit",
     [](Decision& d) {
       d.Add({{kFloat}, {kFloat}});
     },
     0, "0.0|0.1"},
    {"dtypes are apart, and it goes on with each",
     [](Decision& d) {
       d.Add({{kFloat}, {kInt}, {kFloat}, {kInt}});
     },
     1000, "0.0 0.2|0.1 0.3"},
    {"reduce ops are apart",
     [](Decision& d) {
       d.Add({{kFloat}}), d.Add({{kFloat}});
       d.last().op = ReduceOp::kAverage;
     },
     1000, "0.0|1.0"},
    {"a batch has one factor, and ranks do not know each other's",
     [](Decision& d) {
       d.Add({{kFloat}, {kFloat}}), d.last().op = ReduceOp::kPreMulSum;
       d.Add({{kFloat}, {kFloat}}), d.last().op = ReduceOp::kPreMulSum;
     },
     1000, "0.0 0.1|1.0 1.1"},
    {"roots of broadcasts are apart",
     [](Decision& d) {
       for (const int root : {0, 1, 0}) {
         d.Add({{kFloat}}, {}, {}, OpKind::kBroadcast), d.last().root = root;
       }
     },
     1000, "0.0 2.0|1.0"},
    {"skipped and empty tensors are left out",
     [](Decision& d) {
       d.Add({{kFloat}, {kFloat, 0}, {kFloat}}, {}, {0b001});
     },
     1000, "0.2"},
    {"an allgather fuses nothing", [](Decision& d) { AddThree(d, OpKind::kAllgather); }, 1000,
     "0.0|0.2"},
    {"a reducescatter fuses nothing", [](Decision& d) { AddThree(d, OpKind::kReducescatter); },
     1000, "0.0|0.2"},
    {"an alltoall fuses nothing", [](Decision& d) { AddThree(d, OpKind::kAlltoall); }, 1000,
     "0.0|0.2"},
};

TEST(FormBatches, FusesWhatMayBeFusedAgainAndAgain) {
  for (const Row& row : kRows) {
    Decision work;
    row.fill(work);
    EXPECT_EQ(work.Batches(row.threshold_bytes), row.batches) << row.rule;
    EXPECT_EQ(work.Batches(row.threshold_bytes), row.batches) << "reused: " << row.rule;
    EXPECT_EQ(row.threshold_bytes == 24, work.plan(0).bytes == 24) << row.rule;
  }
}

TEST(FormBatches, SplitsAGroupByAbsentSet) {
  Decision work;
  work.Add({{kFloat}, {kFloat}, {kFloat}}, {{4, {0b010}}});
  EXPECT_EQ(work.Batches(1000), "0.0 0.2|0.1");
  EXPECT_EQ(work.plan(0).absent, std::vector<int32_t>());
  EXPECT_EQ(work.plan(1).absent, std::vector<int32_t>({4}));
}

}  // namespace
}  // namespace farandole
