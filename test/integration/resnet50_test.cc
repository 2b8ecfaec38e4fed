// A steady backward of ResNet-50, its recorded hook times replayed on a fake clock, 8 ranks in
// process.
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "coordinator/gradients/gradient_round.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

constexpr int kRanks = 8;

struct Recorded {
  std::vector<TensorSignature> tensors;
  std::vector<int64_t> ready_ns;
};

Recorded ReadRecording() {
  std::ifstream file(FARANDOLE_TEST_DATA "/resnet50_backward.csv");
  Recorded recorded;
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string name, elements, ready_us;
    std::getline(fields, name, ',');
    std::getline(fields, elements, ',');
    std::getline(fields, ready_us, ',');
    recorded.tensors.push_back({name, DType::kFloat32, {std::stoll(elements)}});
    recorded.ready_ns.push_back(std::stoll(ready_us) * kNsPerUs);
  }
  return recorded;
}

class ResNet50 : public ::testing::Test {
 protected:
  ResNet50() : recorded_(ReadRecording()), job_(kRanks) {
    int64_t elements = 0;
    for (const TensorSignature& tensor : recorded_.tensors) elements += tensor.Count();
    GradientRound::Options options;
    options.common.op = ReduceOp::kAverage;
    options.prefix = "grad.";
    for (int r = 0; r < kRanks; ++r) {
      values_.emplace_back(static_cast<size_t>(elements), static_cast<float>(r));
      gradients_.push_back(
          std::make_unique<GradientRound>(job_.engine(r), options, recorded_.tensors));
    }
  }

  // One backward: every rank's hooks at the recorded times. @return operator new calls inside the
  // engines.
  int64_t Backward() {
    int64_t allocations = 0, now_ns = 0;
    size_t offset = 0;
    for (size_t i = 0; i < recorded_.tensors.size(); ++i) {
      job_.clock().Advance(recorded_.ready_ns[i] - now_ns);
      now_ns = recorded_.ready_ns[i];
      for (int r = 0; r < kRanks; ++r) {
        float* data = values_[static_cast<size_t>(r)].data() + offset;
        EXPECT_TRUE(gradients_[static_cast<size_t>(r)]
                        ->Mark(static_cast<int32_t>(i), data, data, GradientVote::kPresent)
                        .ok());
      }
      offset += static_cast<size_t>(recorded_.tensors[i].Count());
      allocations += job_.Settle();
    }
    for (auto& gradients : gradients_) EXPECT_TRUE(gradients->End("").ok());
    allocations += job_.SettleHeld();
    for (auto& gradients : gradients_) {
      Status outcome;
      EXPECT_TRUE(gradients->Wait(0, &outcome));
      EXPECT_TRUE(outcome.ok()) << outcome.message();
    }
    return allocations;
  }

  int64_t LinkMessages() const {
    int64_t messages = 0;
    for (int r = 1; r < kRanks; ++r) {
      const int parent = job_.parent()[static_cast<size_t>(r)];
      messages += job_.hub().Sent(r, parent).messages + job_.hub().Sent(parent, r).messages;
    }
    return messages;
  }

  Recorded recorded_;
  SteppedJob job_;
  std::vector<std::vector<float>> values_;
  std::vector<std::unique_ptr<GradientRound>> gradients_;
};

TEST_F(ResNet50, SteadyBackwardIsFewBatchesFewMessagesAndNoAllocation) {
  ASSERT_EQ(recorded_.tensors.size(), 161u);
  for (int warm = 0; warm < 4; ++warm) (void)Backward();
  const int64_t batches = job_.counters(0).Get(Counter::kBatches);
  const int64_t messages = LinkMessages();
  const int64_t allocations = Backward();
  const int64_t new_batches = job_.counters(0).Get(Counter::kBatches) - batches;
  const double per_link_and_batch = static_cast<double>(LinkMessages() - messages) /
                                    static_cast<double>(new_batches * (kRanks - 1));
  RecordProperty("batches", static_cast<int>(new_batches));
  std::printf("groups %d, batches %ld, messages per link and batch %.2f, operator new %ld\n",
              gradients_[0]->group_count(), static_cast<long>(new_batches), per_link_and_batch,
              static_cast<long>(allocations));
  EXPECT_LE(new_batches, 25);
  EXPECT_LE(per_link_and_batch, 2.5);
  EXPECT_EQ(allocations, 0);
}

TEST_F(ResNet50, AveragesEveryGradientOnEveryRank) {
  for (int round = 0; round < 2; ++round) (void)Backward();
  for (const std::vector<float>& values : values_) {
    EXPECT_EQ(values, std::vector<float>(values.size(), 3.5f));
  }
}

}  // namespace
}  // namespace farandole
