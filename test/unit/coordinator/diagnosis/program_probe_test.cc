#include "coordinator/diagnosis/program_probe.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>

#include "core/clock.h"

namespace farandole {
namespace {

std::mutex interpreter_lock;
std::atomic<int> calls{0};

void Describe(const uint64_t* threads, size_t count, char* text, size_t capacity) {
  ++calls;
  calls.notify_all();
  const std::lock_guard lock(interpreter_lock);
  const std::string place = "a.py:1 in f of " + std::to_string(count > 0 ? threads[0] : 0);
  place.copy(text, capacity);
}

class ProbeOfProgram : public testing::Test {
 protected:
  ProbeOfProgram() {
    calls = 0;
    SetDescribeProgram(&Describe);
  }
  ~ProbeOfProgram() override { SetDescribeProgram(nullptr); }
  ProgramProbe probe_;
};

TEST_F(ProbeOfProgram, TellsCFromPythonByTheInterpretersLock) {
  {
    const std::lock_guard lock(interpreter_lock);
    ASSERT_TRUE(probe_.Ask({7}, 0));
    calls.wait(0);
    EXPECT_FALSE(probe_.Find(kNsPerSecond).has_value());  // its thread came late
    EXPECT_FALSE(probe_.Find(kNsPerSecond + 299 * kNsPerMs).has_value());
    const std::optional<Activity> found = probe_.Find(kNsPerSecond + 300 * kNsPerMs);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->kind, FailureKind::kBlockedInC);
    ASSERT_TRUE(probe_.Ask({7}, 10 * kNsPerSecond));  // the first call goes on: none besides it
  }
  SetDescribeProgram(nullptr);  // returns after the call
  const std::optional<Activity> found = probe_.Find(301 * kNsPerMs);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(*found, (Activity{FailureKind::kBlockedInPython, "a.py:1 in f of 7"}));
  EXPECT_EQ(calls, 1);
}

TEST_F(ProbeOfProgram, AsksOnceAboutStallsThatComeTogether) {
  ASSERT_TRUE(probe_.Ask({}, 0));
  calls.wait(0);
  while (!probe_.Find(0)) std::this_thread::yield();
  ASSERT_TRUE(probe_.Ask({}, 100 * kNsPerMs));
  EXPECT_TRUE(probe_.Find(100 * kNsPerMs).has_value());
  ASSERT_TRUE(probe_.Ask({}, kNsPerSecond));
  calls.wait(1);
  EXPECT_EQ(calls, 2);
}

TEST_F(ProbeOfProgram, HasNobodyToAskAtTheEnd) {
  SetDescribeProgram(nullptr);
  EXPECT_FALSE(probe_.Ask({}, 0));
  EXPECT_EQ(calls, 0);
}

}  // namespace
}  // namespace farandole
