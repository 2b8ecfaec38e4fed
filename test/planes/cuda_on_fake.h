// A GPU plane of one rank with all that it stands on: a fake GPU of its own, where host memory
// poses as device memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/gpu/plane.h"
#include "test/fakes/fake_device.h"

namespace farandole {

/// What a test says about NCCL; `version` 0: there is none.
struct FakeNcclFacts {
  int version = 0;
  std::string text = "a test takes it away";  ///< File, or why there is none.
};

/// No NCCL is behind it: it is found, or not, and no further.
class NcclByWord : public NcclProvider {
 public:
  explicit NcclByWord(FakeNcclFacts facts) : facts_(std::move(facts)) {}
  Result<NcclFound> Find() override {
    ++finds;
    if (facts_.version == 0) return Unavailable(facts_.text);
    return NcclFound{facts_.version, facts_.text};
  }
  Result<std::string> MakeUniqueId() override { return std::string("an id"); }
  std::unique_ptr<GpuBackend> Make(LaunchQueue&, NcclSetOptions) override { return nullptr; }

  int finds = 0;

 private:
  const FakeNcclFacts facts_;
};

/// Ends the planes of several ranks side by side, as processes do: the end of a communicator waits
/// for its peers'.
template <class Planes>
void EndTogether(Planes& planes) {
  std::vector<std::thread> ends;
  for (auto& plane : planes) ends.emplace_back([&plane] { plane = nullptr; });
  for (std::thread& end : ends) end.join();
  planes.clear();
}

/// Thread safety and lifetime: as those of a plane. Its streams run what they hold at its end.
class CudaOnFake final : public DataPlane {
 public:
  struct Options {
    std::string bus_id = "0000:01:00.0";
    /// nullptr: the process's, from `nccl_library`.
    std::shared_ptr<NcclProvider> nccl = std::make_shared<NcclByWord>(FakeNcclFacts{});
    std::string nccl_library;
    int64_t staging_slot_bytes = kStagingSlotBytes;
    bool share_gpu = false;
    Log* log = nullptr;
    std::function<void()> wake;
  };

  CudaOnFake(std::unique_ptr<DataPlane> host, Options options);

  const char* name() const override { return plane_->name(); }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override {
    return plane_->AddSet(set, ranks, my_index);
  }
  void RemoveSet(uint32_t set) override { plane_->RemoveSet(set); }
  Result<PlaneOperation*> Start(const Batch& batch) override { return plane_->Start(batch); }

  FakeDevice& device() { return runtime_->fake(0); }
  /// The stream of the collectives. There is one after the first batch.
  FakeStream& collective() { return *device().streams().at(1); }
  /// Waits until all that the plane's streams hold has run.
  void Synchronize() {
    for (int round = 0; round < 2; ++round) {
      for (FakeStream* stream : device().streams()) stream->Synchronize();
    }
  }
  void HoldStreams() {
    for (FakeStream* stream : device().streams()) stream->Hold();
  }
  int loads() const { return loads_; }
  /// The next load fails.
  void FailLoading(Status status) { failure_ = std::move(status); }
  const Counters& counters() const { return counters_; }
  RankDevice& gpu() { return gpu_; }
  /// Ends the plane itself; the device stays.
  void EndPlane() { plane_ = nullptr; }

 private:
  Result<std::shared_ptr<DeviceRuntime>> Load();

  const std::shared_ptr<FakeDeviceRuntime> runtime_;
  RankDevice gpu_;
  Counters counters_;
  const std::unique_ptr<DataPlane> host_;
  std::unique_ptr<DataPlane> plane_;
  int loads_ = 0;
  Status failure_;
};

}  // namespace farandole
