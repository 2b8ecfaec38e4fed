// The real libnccl through our own declarations: a communicator of one rank, in non-blocking mode.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "ops/nccl/communicator.h"
#include "ops/nccl/library.h"
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

  /// Runs until the last call is over; its failure, or OK.
  template <class Ask>
  Status Finish(const Ask& ask) {
    for (;;) {
      Progress progress = ask();
      if (progress.state == Progress::State::kFailed) return progress.status;
      if (progress.state == Progress::State::kDone) return {};
      std::this_thread::yield();
    }
  }

  std::unique_ptr<NcclCommunicator> Connect() {
    NcclCommunicatorOptions options;
    options.library = library_;
    options.unique_id = library_->MakeUniqueId().value();
    options.map = "rank 0: this GPU";
    options.clock = &SteadyClock();
    auto communicator = std::make_unique<NcclCommunicator>(options);
    const Status connected = Finish([&] { return communicator->Connect(); });
    EXPECT_TRUE(connected.ok()) << connected.ToString();
    return communicator;
  }

  Status Sum(NcclCommunicator& communicator, void* in, void* out) {
    FARANDOLE_RETURN_IF_ERROR(
        communicator.AllReduce(in, out, kCount, NcclDataType::kFloat32, NcclRedOp::kSum, stream_));
    return WaitForEnd(communicator);
  }
  /// Until the stream has passed what was called last.
  Status WaitForEnd(NcclCommunicator& communicator) {
    FARANDOLE_RETURN_IF_ERROR(Finish([&] { return communicator.Settle(); }));
    const std::shared_ptr<DeviceEvent> end = device_->CreateEvent().value();
    FARANDOLE_RETURN_IF_ERROR(end->Record(stream_));
    while (!end->IsComplete().value()) std::this_thread::yield();
    return communicator.CheckAsync();
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
    const Status again = Sum(*communicator, in, in);  // the copy is over, too, with its end
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
    const auto went = [&](const Status& called) {
      return called.ok() ? WaitForEnd(*communicator) : called;
    };
    const Status gathered =
        went(communicator->AllGather(at(0), at(1), kBytes, NcclDataType::kUint8, stream_));
    EXPECT_TRUE(gathered.ok()) << gathered.ToString();
    const Status scattered = went(communicator->ReduceScatter(
        at(1), at(2), kCount, NcclDataType::kFloat32, NcclRedOp::kAvg, stream_));
    EXPECT_TRUE(scattered.ok()) << scattered.ToString();
    using Kind = NcclTransfer::Kind;
    const NcclTransfer exchange[] = {{Kind::kSend, 0, at(2), nullptr, kBytes},
                                     {Kind::kReceive, 0, nullptr, at(3), kBytes}};
    const Status exchanged = went(communicator->Group(exchange, stream_));
    EXPECT_TRUE(exchanged.ok()) << exchanged.ToString();
    const NcclTransfer broadcasts[] = {{Kind::kBroadcast, 0, at(3), at(4), 8},
                                       {Kind::kBroadcast, 0, at(3) + 2, at(4) + 2, kBytes - 8}};
    const Status sent = went(communicator->Group(broadcasts, stream_));
    EXPECT_TRUE(sent.ok()) << sent.ToString();
    ASSERT_TRUE(device_->Copy(host + kCount, at(4), kBytes, stream_).ok());
    EXPECT_TRUE(went(Status()).ok());
  }
  EXPECT_EQ(std::memcmp(host, host + kCount, static_cast<size_t>(kBytes)), 0);
  device_->Free(memory);
  device_->FreePinned(host);
}

TEST_F(NcclAlone, RegistersItsOwnMemoryAndForgetsItAgain) {
  const NcclApi& api = library_->api();
  if (!api.CanRegister()) GTEST_SKIP() << "this NCCL has no registered memory";
  const auto communicator = Connect();
  void* memory = nullptr;
  ASSERT_EQ(api.MemAlloc(&memory, 1 << 20), NcclResult::kSuccess);
  void* handle = nullptr;
  const Status registered = communicator->Register(memory, 1 << 20, &handle);
  EXPECT_TRUE(registered.ok()) << registered.ToString();
  EXPECT_TRUE(Finish([&] { return communicator->Settle(); }).ok());
  if (handle != nullptr) communicator->Deregister(handle);
  EXPECT_TRUE(Finish([&] { return communicator->Settle(); }).ok());
  EXPECT_EQ(api.MemFree(memory), NcclResult::kSuccess);
}

TEST_F(NcclAlone, AnAbortEndsItAtOnce) {
  const auto communicator = Connect();
  communicator->Abort();
  EXPECT_FALSE(communicator->usable());
  EXPECT_FALSE(
      communicator->AllReduce(nullptr, nullptr, 1, NcclDataType::kFloat32, NcclRedOp::kSum, stream_)
          .ok());
}

}  // namespace
}  // namespace farandole
