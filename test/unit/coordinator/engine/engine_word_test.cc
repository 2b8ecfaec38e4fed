// An engine over a transport that must be polled: it leaves the core to others between polls, and
// its last word goes out although it is stopped.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/engine/engine.h"
#include "ops/shm/plane.h"
#include "test/planes/failing_plane.h"
#include "test/support/stepped_job.h"

thread_local int yields = 0;  // of a thread of this program

// In place of the C library's: std::this_thread::yield calls it.
extern "C" int sched_yield() noexcept {
  ++yields;
  return static_cast<int>(syscall(SYS_sched_yield));
}

namespace farandole {
namespace {

// What is sent leaves after some polls, or never.
class SlowTransport final : public Transport {
 public:
  explicit SlowTransport(int polls_needed) : polls_needed_(polls_needed) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  const char* name() const override { return "slow"; }
  Status Send(int, std::span<const std::byte>) override {
    sent_.store(true);
    return {};
  }
  Result<std::optional<Incoming>> Poll() override {
    if (sent_.load()) polls_.fetch_add(1);
    return std::optional<Incoming>();
  }
  int64_t PollAfterNs(bool, int64_t) const override { return 100 * kNsPerUs; }
  Result<std::vector<std::string>> Allgather(const std::string&, int64_t) override {
    return Unimplemented("no start");
  }
  bool Drained() const override { return polls_.load() >= polls_needed_; }
  bool sent() const { return sent_.load(); }

 private:
  const int polls_needed_;
  std::atomic<bool> sent_{false};
  std::atomic<int> polls_{0};
};

// An engine that fails in its first step and is stopped at once.
void FailAndStop(SlowTransport& transport) {
  FailingPlane plane(nullptr, {.refused_set = kGlobalSet});
  FutexDoorbell doorbell;
  Counters counters;
  RecordingLog log;
  EngineOptions options;
  options.negotiation.size = 2;
  options.negotiation.parent = {-1, 0};
  options.negotiation.planes.assign(kDeviceKindCount, 0);
  EngineParts parts{&transport, {&plane}, &doorbell, &SteadyClock(), &counters, &log};
  Engine engine(options, parts);
  while (engine.lifecycle().final_error().ok()) std::this_thread::yield();
  engine.Stop();
}

// Nothing ever arrives, and it asks to be polled again at once.
class SilentTransport final : public Transport {
 public:
  static constexpr int kPolls = 1000;

  int rank() const override { return 0; }
  int size() const override { return 2; }
  const char* name() const override { return "silent"; }
  Status Send(int, std::span<const std::byte>) override { return {}; }
  Result<std::optional<Incoming>> Poll() override {
    if (++polls_ == kPolls) {
      yields_.store(yields);
      yields_.notify_one();
    }
    return std::optional<Incoming>();
  }
  int64_t PollAfterNs(bool, int64_t) const override { return 0; }
  Result<std::vector<std::string>> Allgather(const std::string&, int64_t) override {
    return Unimplemented("no start");
  }
  bool Drained() const override { return true; }
  /// Waits for kPolls polls. @return how often the thread that polls has yielded.
  int Yields() const {
    yields_.wait(-1);
    return yields_.load();
  }

 private:
  int polls_ = 0;
  std::atomic<int> yields_{-1};
};

// As with more ranks than cores: the peer may wait for this very core.
TEST(PolledTransport, LeavesTheCoreToOthersBetweenPolls) {
  SilentTransport transport;
  FutexDoorbell doorbell;
  FutexDoorbell peer;
  SharedMemoryPlane plane(std::make_shared<HeapMemory>(std::vector<Doorbell*>{&doorbell, &peer}), 0,
                          BestCpuKernels());
  Counters counters;
  RecordingLog log;
  EngineOptions options;
  options.negotiation.size = 2;
  options.negotiation.parent = {-1, 0};
  options.negotiation.planes.assign(kDeviceKindCount, 0);
  options.spin_ns = 0;
  Engine engine(options, {&transport, {&plane}, &doorbell, &SteadyClock(), &counters, &log});
  EXPECT_GT(transport.Yields(), SilentTransport::kPolls * 9 / 10);
  engine.Stop();
}

TEST(LastWord, IsOutBeforeAFailedEngineIsStopped) {
  SlowTransport transport(20);
  FailAndStop(transport);
  EXPECT_TRUE(transport.sent());
  EXPECT_TRUE(transport.Drained());
}

TEST(LastWord, KeepsNoEngineWhoseTransportIsStuck) {
  SlowTransport transport(INT32_MAX);
  FailAndStop(transport);  // would never return otherwise
  EXPECT_TRUE(transport.sent());
}

}  // namespace
}  // namespace farandole
