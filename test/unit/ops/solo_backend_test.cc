// Batches of a set with one member on a fake GPU: what the conformance suite does not see of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>
#include <vector>

#include "ops/gpu/backend.h"
#include "test/fakes/fake_device.h"

namespace farandole {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

class SoloBackendTest : public ::testing::Test {
 protected:
  SoloBackendTest() : queue_(LaunchStreams::Create(device(), &counters_).value(), {}) {
    segment_ = {in_.data(), out_.data(), 4};
    batch_.ranks = ranks_;
    batch_.segments = {&segment_, 1};
    batch_.count = 4;
    batch_.device = DeviceKind::kCuda;
  }
  FakeDevice& device() { return runtime_.fake(0); }
  void Run() {
    const std::unique_ptr<GpuBackend> backend = MakeSoloBackend(queue_);
    const std::shared_ptr<LaunchTask> task = backend->Begin(batch_).value();
    while (!task->launched()) std::this_thread::yield();
    while (!task->end->IsComplete().value()) std::this_thread::yield();
    EXPECT_EQ(device().counts().host_waits, 0);
  }

  FakeDeviceRuntime runtime_{1};
  Counters counters_;
  LaunchQueue queue_;
  const std::array<int, 1> ranks_ = {0};
  std::array<float, 4> in_ = {1.0f, 2.0f, 3.0f, 4.0f};
  std::array<float, 4> out_ = {};
  Segment segment_;
  Batch batch_;
};

TEST_F(SoloBackendTest, MultipliesByBothFactorsInOneLaunchWhateverTheType) {
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kInt32}) {
    std::vector<std::byte> memory(size_t{1 << 20} * 4);
    segment_ = {memory.data(), memory.data(), 1 << 20};
    batch_.dtype = batch_.wire = dtype;
    batch_.count = segment_.count;
    batch_.prescale = 3.0;
    batch_.postscale = 0.25;
    const int64_t before = counters_.Get(Counter::kDeviceLaunches);
    Run();
    EXPECT_EQ(counters_.Get(Counter::kDeviceLaunches) - before, 1) << Name(dtype);
  }
  EXPECT_EQ(device().counts().live_blocks, 1) << "no fusion buffer, the plane's flag alone";
}

TEST_F(SoloBackendTest, LeavesAloneWhatStaysWhereItIs) {
  segment_.out = in_.data();
  Run();
  EXPECT_EQ(counters_.Get(Counter::kDeviceLaunches), 0);
  EXPECT_EQ(counters_.Get(Counter::kBytesCopied), 0);
}

TEST_F(SoloBackendTest, ScalesWhatItScatters) {
  const std::array<int64_t, 1> parts = {4};
  batch_.kind = OpKind::kReducescatter;
  batch_.splits = parts;
  batch_.prescale = 2.0;
  Run();
  EXPECT_THAT(out_, ElementsAre(2.0f, 4.0f, 6.0f, 8.0f));
}

TEST_F(SoloBackendTest, GathersAndExchangesWithoutAFactor) {
  const std::array<int64_t, 1> parts = {4};
  const std::array<int64_t, 1> pieces = {3};
  batch_.prescale = 2.0;
  batch_.kind = OpKind::kAllgather;
  batch_.splits = parts;
  Run();
  EXPECT_EQ(out_, in_);
  out_ = {};
  batch_.kind = OpKind::kAlltoall;
  batch_.splits = {};
  batch_.sends = batch_.receives = pieces;
  Run();
  EXPECT_THAT(out_, ElementsAre(1.0f, 2.0f, 3.0f, 0.0f));
}

TEST_F(SoloBackendTest, LaunchesNothingForAResultThatIsDropped) {
  segment_.out = nullptr;
  Run();
  EXPECT_EQ(counters_.Get(Counter::kDeviceLaunches), 0);
  EXPECT_THAT(out_, Each(0.0f));
}

}  // namespace
}  // namespace farandole
