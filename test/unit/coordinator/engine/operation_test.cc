// The request of an operation: ended once, whoever comes first.
#include "coordinator/engine/operation.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace farandole {
namespace {

class NoResults final : public ResultAllocator {
 public:
  Result<void*> Allocate(size_t, std::span<const int64_t>, int64_t) override { return nullptr; }
};

// The engine's thread and the watchdog both end what is in flight when an engine fails.
TEST(Operation, IsEndedByOneOfTwoThreads) {
  for (int round = 0; round < 1000; ++round) {
    Operation operation;
    operation.in_flight = operation.started = true;
    operation.work = std::make_shared<Work>();
    operation.allocator = std::make_shared<NoResults>();
    const std::shared_ptr<Work> work = operation.work;
    bool ended_here = false;
    bool ended_there = false;
    std::thread other([&] { ended_there = operation.Finish(Aborted("there")); });
    ended_here = operation.Finish(Aborted("here"));
    other.join();
    ASSERT_NE(ended_here, ended_there);
    ASSERT_EQ(work->status().message(), ended_here ? "here" : "there");
    ASSERT_EQ(operation.allocator, nullptr);
    ASSERT_FALSE(operation.in_flight.load());
  }
}

}  // namespace
}  // namespace farandole
