// A peer that stops in the middle of a batch on a GPU: the others' wait ends by the deadline, and
// their streams go on. The GPUs and NCCL are fakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "test/planes/cuda_on_fake.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

constexpr int64_t kDeadlineNs = 5 * kNsPerSecond;

struct Kind {
  const char* name;
  bool nccl;
};

class StoppedGpuPeer : public ::testing::TestWithParam<Kind> {
 protected:
  StoppedGpuPeer()
      : job_(
            2, Options(),
            [this](int rank, std::unique_ptr<DataPlane> plane) {
              return Wrap(rank, std::move(plane));
            },
            [this](int rank) { return &planes_[rank]->gpu(); }) {
    Start("warm");
    SettleUntil([this] { return works_[0]->done() && works_[1]->done(); });
  }
  ~StoppedGpuPeer() override {
    for (CudaOnFake* plane : planes_) plane->device().ReleaseStreams();
  }

  static EngineOptions Options() {
    EngineOptions options = SteppedJob::Stepped();
    options.cuda_progress_timeout_ns = kDeadlineNs;
    options.negotiation.stall_ns = 0;
    return options;
  }

  std::unique_ptr<DataPlane> Wrap(int rank, std::unique_ptr<DataPlane> host) {
    CudaOnFake::Options options;
    options.bus_id = std::to_string(rank);
    if (GetParam().nccl) {
      options.nccl = nullptr;
      options.nccl_library = FARANDOLE_FAKE_NCCL;
    }
    auto plane = std::make_unique<CudaOnFake>(std::move(host), std::move(options));
    planes_[rank] = plane.get();
    return plane;
  }

  Result<std::shared_ptr<Work>> StartOn(int rank, const std::string& name) {
    Signature signature;
    signature.device = DeviceKind::kCuda;
    signature.tensors.push_back({"", DType::kFloat32, {4}});
    Result<Operation*> operation =
        job_.engine(rank).operations().Prepare({kGlobalSet, OpKind::kAllreduce, name}, signature);
    if (!operation.ok()) return operation.status();
    const void* in = values_[rank];
    void* out = values_[rank];
    const ProducerStream here{0, nullptr};
    return job_.engine(rank).Start(*operation.value(), {&in, 1}, {&out, 1}, {}, true, {&here, 1});
  }
  void Start(const std::string& name) {
    for (int rank = 0; rank < 2; ++rank) {
      Result<std::shared_ptr<Work>> work = StartOn(rank, name);
      ASSERT_TRUE(work.ok()) << work.status().message();
      works_[rank] = work.value();
    }
  }

  // Streams are threads, which need a while; the clock stands then, so that no deadline passes.
  void SettleUntil(const std::function<bool()>& reached) {
    for (int i = 0; i < 1'000'000 && !reached(); ++i) {
      i < 100 ? job_.SettleHeld() : job_.Settle();
      std::this_thread::yield();
    }
    ASSERT_TRUE(reached());
  }
  /// Rank 1 has voted and is stepped no more. Ends when all that can happen has.
  void SettleFirstAlone() {
    for (int i = 0; i < 20; ++i) {
      for (int k = 0; k < 20; ++k) (void)job_.engine(0).RunOnce();
      planes_[0]->device().default_stream()->Synchronize();
      if (!GetParam().nccl) planes_[0]->Synchronize();
      std::this_thread::yield();
    }
  }
  bool HasFailed() {
    return StartOn(0, "probe " + std::to_string(probes_++)).status().code() == Code::kTimeout;
  }

  CudaOnFake* planes_[2] = {};
  SteppedJob job_;
  std::shared_ptr<Work> works_[2];
  int probes_ = 0;
  float values_[2][4] = {{1, 1, 1, 1}, {2, 2, 2, 2}};
};

TEST_P(StoppedGpuPeer, IsAnErrorByTheDeadlineAndTheStreamGoesOn) {
  Start("stopped");
  for (int i = 0; i < 2; ++i) {  // a submission is held back a little
    (void)job_.engine(1).RunOnce();
    job_.clock().Advance(kNsPerMs);
  }
  // Over NCCL the launch thread needs a while, and no peer.
  for (int i = 0; i < 1'000'000 && GetParam().nccl && !works_[0]->done(); ++i) {
    (void)job_.engine(0).RunOnce();
    if (i < 10) job_.clock().Advance(kNsPerMs);
    std::this_thread::yield();
  }
  int64_t waited_s = 0;
  for (; waited_s < 1000 && !HasFailed(); ++waited_s) {
    SettleFirstAlone();
    job_.clock().Advance(waited_s == 0 ? kNsPerMs : kNsPerSecond);
  }
  EXPECT_GE(waited_s * kNsPerSecond, kDeadlineNs);
  const Status later = StartOn(0, "later").status();
  EXPECT_EQ(later.code(), Code::kTimeout);
  EXPECT_THAT(std::string(later.message()), ::testing::HasSubstr("cuda plane"));
  // Staged, it was not launched; over NCCL it was, and the stream waits for the peer no more.
  ASSERT_TRUE(works_[0]->done());
  EXPECT_EQ(works_[0]->status().code(), GetParam().nccl ? Code::kOk : Code::kTimeout);
  planes_[0]->Synchronize();
}

INSTANTIATE_TEST_SUITE_P(Backends, StoppedGpuPeer,
                         ::testing::Values(Kind{"Staged", false}, Kind{"FakeNccl", true}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace farandole
