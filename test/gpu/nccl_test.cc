// The real libnccl through our own declarations: a communicator of one rank, in non-blocking mode.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "ops/gpu/nccl/communicator.h"
#include "ops/gpu/nccl/library.h"
#include "test/gpu/plug_in.h"

namespace farandole {
namespace {

constexpr int64_t kCount = 100'003;

class NcclAlone : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* named = std::getenv("FARANDOLE_NCCL");
    Result<const NcclLibrary*> library = NcclLibrary::OfProcess(named == nullptr ? "" : named);
    ASSERT_TRUE(library.ok()) << library.status().ToString();
    library_ = library.value();
    Result<Device*> device = GpuRuntime()->Open(0);
    ASSERT_TRUE(device.ok()) << device.status().ToString();
    device_ = device.value();
    ASSERT_TRUE(device_->MakeCurrent().ok());
    stream_ = device_->CreateStream().value();
    std::printf("%s\n", library_->Describe().c_str());
  }
  void TearDown() override {
    if (stream_ != nullptr) device_->DestroyStream(stream_);
  }

  std::unique_ptr<NcclCommunicator> Connect() {
    NcclSetOptions options{.unique_id = library_->MakeUniqueId().value(), .size = 1};
    options.ranks_text = "rank 0: this GPU";
    auto communicator = std::make_unique<NcclCommunicator>(*library_, options);
    const Status connected = communicator->Connect();
    EXPECT_TRUE(connected.ok()) << connected.ToString();
    return communicator;
  }

  Status Sum(NcclCommunicator& communicator, void* in, void* out) {
    const NcclCall sum{.in = in, .out = out, .count = kCount, .type = NcclDataType::kFloat32};
    return Run(communicator, {sum});
  }
  /// Until the stream has come to its end.
  Status Run(NcclCommunicator& communicator, const std::vector<NcclCall>& calls) {
    FARANDOLE_RETURN_IF_ERROR(communicator.Run(calls, stream_));
    WaitForEnd();
    return communicator.CheckAsync();
  }
  void WaitForEnd() {
    const std::shared_ptr<DeviceEvent> end = device_->CreateEvent().value();
    ASSERT_TRUE(end->Record(stream_).ok());
    while (!end->IsComplete().value()) std::this_thread::yield();
  }

  const NcclLibrary* library_ = nullptr;
  Device* device_ = nullptr;
  StreamHandle stream_ = nullptr;
};

TEST_F(NcclAlone, ConnectsReducesAndEnds) {
  const int64_t bytes = kCount * 4;
  auto* host = static_cast<float*>(device_->AllocatePinned(2 * bytes).value());
  for (int64_t i = 0; i < kCount; ++i) host[i] = static_cast<float>(i);
  auto* in = static_cast<float*>(device_->Allocate(2 * bytes).value());
  ASSERT_TRUE(device_->Copy(in, host, bytes, stream_).ok());
  {
    const auto communicator = Connect();
    const Status summed = Sum(*communicator, in, in + kCount);
    ASSERT_TRUE(summed.ok()) << summed.ToString();
    ASSERT_TRUE(device_->Copy(host + kCount, in + kCount, bytes, stream_).ok());
    const Status again = Sum(*communicator, in, in);  // the copy is complete, too, at its end
    ASSERT_TRUE(again.ok()) << again.ToString();
  }
  EXPECT_EQ(std::memcmp(host, host + kCount, static_cast<size_t>(bytes)), 0);
  device_->Free(in);
  device_->FreePinned(host);
}

TEST_F(NcclAlone, GathersScattersAndTakesAGroupAsOneCall) {
  constexpr int64_t kBytes = 4 * kCount;
  constexpr int kCopies = 5;
  auto* host = static_cast<float*>(device_->AllocatePinned(2 * kBytes).value());
  for (int64_t i = 0; i < kCount; ++i) host[i] = static_cast<float>(i);
  auto* memory = static_cast<float*>(device_->Allocate(kCopies * kBytes).value());
  const auto at = [&](int copy) { return memory + copy * kCount; };
  ASSERT_TRUE(device_->Copy(memory, host, kBytes, stream_).ok());
  {
    const auto communicator = Connect();
    using Kind = NcclCall::Kind;
    const Status gathered = Run(*communicator, {{.kind = Kind::kAllGather,
                                                 .in = at(0),
                                                 .out = at(1),
                                                 .count = kBytes,
                                                 .type = NcclDataType::kUint8}});
    EXPECT_TRUE(gathered.ok()) << gathered.ToString();
    const Status scattered = Run(*communicator, {{.kind = Kind::kReduceScatter,
                                                  .in = at(1),
                                                  .out = at(2),
                                                  .count = kCount,
                                                  .type = NcclDataType::kFloat32,
                                                  .op = NcclRedOp::kAvg}});
    EXPECT_TRUE(scattered.ok()) << scattered.ToString();
    const Status exchanged =
        Run(*communicator, {{.kind = Kind::kSend, .in = at(2), .count = kBytes},
                            {.kind = Kind::kReceive, .out = at(3), .count = kBytes}});
    EXPECT_TRUE(exchanged.ok()) << exchanged.ToString();
    const Status sent =
        Run(*communicator,
            {{.kind = Kind::kBroadcast, .in = at(3), .out = at(4), .count = 8},
             {.kind = Kind::kBroadcast, .in = at(3) + 2, .out = at(4) + 2, .count = kBytes - 8}});
    EXPECT_TRUE(sent.ok()) << sent.ToString();
    ASSERT_TRUE(device_->Copy(host + kCount, at(4), kBytes, stream_).ok());
    WaitForEnd();
  }
  EXPECT_EQ(std::memcmp(host, host + kCount, static_cast<size_t>(kBytes)), 0);
  device_->Free(memory);
  device_->FreePinned(host);
}

TEST_F(NcclAlone, IsAborted) {
  const auto communicator = Connect();
  communicator->Abort();
  EXPECT_EQ(Sum(*communicator, nullptr, nullptr).code(), Code::kAborted);
}

}  // namespace
}  // namespace farandole
