// Streams, events, memory and contexts of a GPU behind ops/device.h.
#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <thread>

#include "ops/gpu/cuda/cuda_api.h"
#include "test/gpu/gpu.h"

namespace farandole {
namespace {

CUcontext CurrentContext() {
  CUcontext context = nullptr;
  EXPECT_EQ(Must(FindCudaDriver()).get_current(&context), CUDA_SUCCESS);
  return context;
}

bool PassesInTheEnd(DeviceEvent& event) {
  for (int i = 0; i < 10'000'000; ++i) {
    if (Must(event.IsComplete())) return true;
    std::this_thread::yield();
  }
  return false;
}

TEST(CudaDevice, SaysWhatItIs) {
  const DeviceInfo& info = Gpu().info();
  EXPECT_EQ(info.index, 0);
  EXPECT_FALSE(info.name.empty());
  EXPECT_TRUE(std::regex_match(
      info.bus_id, std::regex("[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\\.[0-7]")))
      << info.bus_id;
  EXPECT_GT(info.memory_bytes, int64_t{1} << 30);
}

TEST(CudaRuntime, OpensADeviceOnceAndNoneThatIsNotThere) {
  const std::shared_ptr<DeviceRuntime> runtime = MakeCudaRuntime();
  const int count = Must(runtime->Count());
  ASSERT_GE(count, 1);
  EXPECT_EQ(Must(runtime->Open(0)), Must(runtime->Open(0)));
  EXPECT_EQ(runtime->Open(count).status().code(), Code::kInvalidArgument);
}

TEST(CudaDevice, LeavesAThreadWithoutAContextWithoutOne) {
  Device& gpu = Gpu();
  std::thread([&] {
    const std::shared_ptr<DeviceEvent> event = Must(gpu.CreateEvent());
    const StreamHandle stream = Must(gpu.CreateStream());
    Must(event->Record(stream));
    gpu.Free(Must(gpu.Allocate(1 << 20)));
    gpu.DestroyStream(stream);
    EXPECT_EQ(CurrentContext(), nullptr);
    Must(gpu.MakeCurrent());
    EXPECT_NE(CurrentContext(), nullptr);
  }).join();
}

TEST(CudaDevice, GivesAlignedMemoryAndRefusesTooMuch) {
  Device& gpu = Gpu();
  for (const int64_t size : {0, 1, 1000, 1 << 24}) {
    void* const memory = Must(gpu.Allocate(size));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0U);
    gpu.Free(memory);
  }
  const Status status = gpu.Allocate(int64_t{1} << 50).status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("cudaMalloc of 1125899906842624 bytes on device 0 failed: "
                                  "cudaErrorMemoryAllocation"),
            std::string::npos)
      << status.message();
  gpu.Free(Must(gpu.Allocate(1)));
}

TEST(CudaDevice, CopiesThereAndBackThroughPinnedMemory) {
  Device& gpu = Gpu();
  constexpr int64_t kSize = 1 << 20;
  auto* const host = static_cast<uint8_t*>(Must(gpu.AllocatePinned(2 * kSize)));
  void* const memory = Must(gpu.Allocate(kSize));
  const StreamHandle stream = Must(gpu.CreateStream());
  for (int64_t i = 0; i < kSize; ++i) host[i] = static_cast<uint8_t>(i * 7);
  Must(gpu.Copy(memory, host, kSize, stream));
  Must(gpu.Copy(host + kSize, memory, kSize, stream));
  const std::shared_ptr<DeviceEvent> end = Must(gpu.CreateEvent());
  Must(end->Record(stream));
  EXPECT_TRUE(PassesInTheEnd(*end));
  EXPECT_TRUE(std::equal(host, host + kSize, host + kSize));
  gpu.DestroyStream(stream);
  gpu.Free(memory);
  gpu.FreePinned(host);
}

TEST(CudaEvent, PassesOnlyWhenWhatCameBeforeIsDone) {
  Device& gpu = Gpu();
  GpuStream producer(cudaStreamNonBlocking);
  const std::shared_ptr<DeviceEvent> event = Must(gpu.CreateEvent());
  EXPECT_TRUE(Must(event->IsComplete())) << "never recorded";
  producer.HoldUp();
  Must(event->Record(producer.get()));
  EXPECT_FALSE(Must(event->IsComplete()));
  producer.Release();
  EXPECT_TRUE(PassesInTheEnd(*event));
}

TEST(CudaEvent, MakesAnotherStreamWaitAndKeepsTheMomentOfThen) {
  Device& gpu = Gpu();
  GpuStream producer(cudaStreamNonBlocking);
  GpuStream other(cudaStreamNonBlocking);
  GpuStream consumer(cudaStreamNonBlocking);
  const std::shared_ptr<DeviceEvent> moment = Must(gpu.CreateEvent());
  const std::shared_ptr<DeviceEvent> end = Must(gpu.CreateEvent());
  Must(moment->MakeWait(consumer.get()));  // never recorded: nothing to wait for
  producer.HoldUp();
  Must(moment->Record(producer.get()));
  Must(moment->MakeWait(consumer.get()));
  Must(end->Record(consumer.get()));
  Must(moment->Record(other.get()));  // a later moment; the wait keeps the earlier one
  EXPECT_TRUE(PassesInTheEnd(*moment));
  EXPECT_FALSE(Must(end->IsComplete()));
  producer.Release();
  EXPECT_TRUE(PassesInTheEnd(*end));
}

TEST(CudaDevice, CopiesWhatAnEventOfTheProducerAnnounced) {
  Device& gpu = Gpu();
  constexpr int64_t kCount = 1 << 22;
  const GpuBytes in(4 * kCount);
  const GpuBytes out(4 * kCount);
  MustCuda(cudaMemset(in.data(), 0, 4 * kCount), "cudaMemset");
  MustCuda(cudaMemset(out.data(), 0, 4 * kCount), "cudaMemset");
  MustCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  GpuStream producer(cudaStreamNonBlocking);
  GpuStream lane(cudaStreamNonBlocking);
  const std::shared_ptr<DeviceEvent> ready = Must(gpu.CreateEvent());
  producer.HoldUp();
  MustCuda(cudaMemsetAsync(in.data(), 1, 4 * kCount, producer.get()), "cudaMemsetAsync");
  Must(ready->Record(producer.get()));
  Must(ready->MakeWait(lane.get()));
  const CastItem item{in.data(), out.data(), kCount};
  int launches = 0;
  Must(gpu.Cast({&item, 1}, {DType::kInt32, DType::kInt32, 2.0}, lane.get(), &launches));
  producer.Release();
  lane.Wait();
  EXPECT_TRUE(out.Read() == std::vector<std::byte>(4 * kCount, std::byte{2}));
}

TEST(CudaDevice, SeesACaptureAndDoesNotDisturbIt) {
  Device& gpu = Gpu();
  GpuStream captured;
  GpuStream other(cudaStreamNonBlocking);
  const std::shared_ptr<DeviceEvent> event = Must(gpu.CreateEvent());
  EXPECT_FALSE(Must(gpu.IsCapturing(captured.get())));
  EXPECT_FALSE(Must(gpu.IsCapturing(nullptr)));
  MustCuda(cudaStreamBeginCapture(captured.get(), cudaStreamCaptureModeGlobal),
           "cudaStreamBeginCapture");
  EXPECT_TRUE(Must(gpu.IsCapturing(captured.get())));
  EXPECT_TRUE(Must(gpu.IsCapturing(nullptr)));
  EXPECT_FALSE(Must(gpu.IsCapturing(other.get())));
  std::thread([&] {  // as the engine does, for other streams
    Must(event->Record(other.get()));
    EXPECT_TRUE(PassesInTheEnd(*event));
    gpu.Free(Must(gpu.Allocate(1 << 20)));
    Must(gpu.CreateEvent());
  })
      .join();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(captured.get(), &graph), cudaSuccess);
  EXPECT_FALSE(Must(gpu.IsCapturing(captured.get())));
  if (graph != nullptr) MustCuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

}  // namespace
}  // namespace farandole
