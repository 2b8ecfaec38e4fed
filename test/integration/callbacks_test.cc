// farandole_when_finished: each call comes exactly once, with the outcome, and holds up nobody.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bindings/c/farandole.h"

namespace {

using ::testing::HasSubstr;

constexpr auto kLimit = std::chrono::seconds(60);

/// What a call was told, and a place to wait for it.
class Outcome {
 public:
  explicit Outcome(std::function<void()> then = {}) : then_(std::move(then)) {}

  static void Call(void* user, int code) {
    auto& self = *static_cast<Outcome*>(user);
    const std::string text = farandole_last_error();
    if (self.then_) self.then_();
    const std::lock_guard lock(self.mutex_);
    self.code_ = code;
    self.text_ = text;
    self.thread_ = std::this_thread::get_id();
    ++self.calls_;
    self.changed_.notify_all();
  }
  /// Waits until `calls` have returned.
  bool Await(int calls = 1) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kLimit, [&] { return calls_ >= calls; });
  }
  int calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  int code() {
    const std::lock_guard lock(mutex_);
    return code_;
  }
  std::string text() {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  std::thread::id thread() {
    const std::lock_guard lock(mutex_);
    return thread_;
  }

 private:
  const std::function<void()> then_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int calls_ = 0;
  int code_ = -1;
  std::string text_;
  std::thread::id thread_;
};

/// Two ranks in this process.
class Callbacks : public ::testing::Test {
 protected:
  Callbacks() { EXPECT_EQ(farandole_init_in_process(2, contexts.data()), FARANDOLE_OK); }
  ~Callbacks() override { Close(); }

  void Close() {
    for (farandole_work* const work : works) farandole_work_release(work);
    works.clear();
    // Each waits for the other to leave.
    std::thread first([&] { farandole_release(contexts[0]); });
    farandole_release(contexts[1]);
    first.join();
    contexts = {};
  }

  /// An allreduce of `data`, which stays until the end.
  farandole_work* Start(int rank, const std::string& name, float* data, int64_t count = 4) {
    farandole_params params{};
    params.struct_size = sizeof params;
    params.kind = FARANDOLE_ALLREDUCE;
    params.op = FARANDOLE_SUM;
    params.prescale = params.postscale = 1;
    params.root = -1;
    const farandole_tensor tensor = {nullptr, FARANDOLE_FLOAT32, 1, &count};
    farandole_operation* operation = nullptr;
    EXPECT_EQ(farandole_prepare(contexts[static_cast<size_t>(rank)], &params, name.c_str(), &tensor,
                                1, &operation, nullptr),
              FARANDOLE_OK);
    const void* in = data;
    void* out = data;
    farandole_work* work = nullptr;
    EXPECT_EQ(farandole_start(operation, 0, &in, &out, nullptr, nullptr, &work), FARANDOLE_OK);
    farandole_operation_release(operation);
    const std::lock_guard lock(works_mutex);
    works.push_back(work);
    return work;
  }

  static void When(farandole_work* work, Outcome& outcome) {
    ASSERT_EQ(farandole_when_finished(work, &Outcome::Call, &outcome), FARANDOLE_OK);
  }

  std::array<farandole_context*, 2> contexts{};
  std::mutex works_mutex;
  std::vector<farandole_work*> works;
  float mine[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  float others[8] = {2, 2, 2, 2, 2, 2, 2, 2};
};

TEST_F(Callbacks, ComeOnThisThreadIfTheWorkHasFinished) {
  farandole_work* const work = Start(0, "t", mine);
  Start(1, "t", others);
  ASSERT_EQ(farandole_wait(work, -1), FARANDOLE_OK);
  for (int i = 0; i < 2; ++i) {
    Outcome outcome;
    When(work, outcome);
    EXPECT_EQ(outcome.calls(), 1);
    EXPECT_EQ(outcome.code(), FARANDOLE_OK);
    EXPECT_EQ(outcome.thread(), std::this_thread::get_id());
  }
}

TEST_F(Callbacks, ComeOnAnotherThreadIfItHasNotAlsoAfterTheHandleIsReleased) {
  Outcome outcome([this] { EXPECT_EQ(mine[3], 3); });
  Outcome another;
  farandole_work* const work = Start(0, "t", mine);
  When(work, outcome);
  When(work, another);
  farandole_work_release(work);
  works.clear();
  EXPECT_EQ(outcome.calls(), 0);
  Start(1, "t", others);
  ASSERT_TRUE(outcome.Await() && another.Await());
  EXPECT_EQ(outcome.code(), FARANDOLE_OK);
  EXPECT_NE(outcome.thread(), std::this_thread::get_id());
  Close();
  EXPECT_EQ(outcome.calls() + another.calls(), 2);
}

TEST_F(Callbacks, HaveTheErrorAndItsMessage) {
  Outcome outcome;
  When(Start(0, "of another shape", mine, 4), outcome);
  Start(1, "of another shape", others, 5);
  ASSERT_TRUE(outcome.Await());
  EXPECT_EQ(outcome.code(), FARANDOLE_MISMATCH);
  EXPECT_THAT(outcome.text(), HasSubstr("of another shape"));
}

// As futures of torch, of which one's callback waits for another one's.
TEST_F(Callbacks, MayWaitForOneAnother) {
  constexpr int kWorks = 8;
  std::mutex mutex;
  std::condition_variable changed;
  int begun = 0;
  Outcome outcome([&] {
    std::unique_lock lock(mutex);
    ++begun;
    changed.notify_all();
    EXPECT_TRUE(changed.wait_for(lock, kLimit, [&] { return begun == kWorks; }));
  });
  for (int i = 0; i < kWorks; ++i) {
    const std::string name = "t" + std::to_string(i);
    When(Start(0, name, mine + i, 1), outcome);
  }
  for (int i = kWorks; i-- > 0;) Start(1, "t" + std::to_string(i), others + i, 1);
  EXPECT_TRUE(outcome.Await(kWorks));
}

TEST_F(Callbacks, MayStartWorkAndWaitForIt) {
  Outcome outcome([this] {
    farandole_work* const next = Start(0, "next", mine);
    EXPECT_EQ(farandole_wait(next, 60), FARANDOLE_OK);
  });
  When(Start(0, "t", mine), outcome);
  Start(1, "t", others);
  EXPECT_EQ(farandole_wait(Start(1, "next", others), 60), FARANDOLE_OK);
  ASSERT_TRUE(outcome.Await());
  EXPECT_EQ(mine[0], 6);
}

TEST_F(Callbacks, OfWhatIsInFlightAtTheEndSayThatItWasAborted) {
  Outcome outcome([] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
  farandole_work* const work = Start(0, "nobody else's", mine);
  When(work, outcome);
  std::thread other([&] { EXPECT_EQ(farandole_shutdown(contexts[1]), FARANDOLE_OK); });
  EXPECT_EQ(farandole_shutdown(contexts[0]), FARANDOLE_OK);
  other.join();
  EXPECT_EQ(outcome.calls(), 1) << "the end waits for them";
  EXPECT_EQ(outcome.code(), FARANDOLE_ABORTED);
  Outcome late;
  When(work, late);
  EXPECT_EQ(late.code(), FARANDOLE_ABORTED);
}

TEST_F(Callbacks, AreWaitedForNoLongerThanTheShutdownMayTake) {
  std::atomic<bool> may_end{false};
  Outcome outcome([&] {
    while (!may_end.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  When(Start(0, "t", mine), outcome);
  Start(1, "t", others);
  std::thread other([&] { EXPECT_EQ(farandole_shutdown(contexts[1]), FARANDOLE_OK); });
  EXPECT_EQ(farandole_shutdown_for(contexts[0], 0.2), FARANDOLE_PENDING);
  may_end.store(true);
  EXPECT_EQ(farandole_shutdown_for(contexts[0], 60), FARANDOLE_OK);
  EXPECT_EQ(outcome.calls(), 1);
  other.join();
}

TEST_F(Callbacks, MayShutTheContextDown) {
  Outcome outcome([this] { EXPECT_EQ(farandole_shutdown(contexts[0]), FARANDOLE_OK); });
  When(Start(0, "t", mine), outcome);
  Start(1, "t", others);
  EXPECT_EQ(farandole_shutdown(contexts[1]), FARANDOLE_OK);
  EXPECT_TRUE(outcome.Await());
}

// Half of them are asked for while their work ends. TSan runs this.
TEST_F(Callbacks, ComeOnceEachFromManyThreads) {
  constexpr int kThreads = 4, kWorks = 100;
  std::vector<float> memory(size_t{2} * kThreads);
  Outcome outcome;
  const auto run = [&](int rank, int thread) {
    float* const data = &memory[static_cast<size_t>(rank * kThreads + thread)];
    for (int i = 0; i < kWorks; ++i) {
      farandole_work* const work = Start(rank, "t" + std::to_string(thread), data, 1);
      When(work, outcome);
      When(work, outcome);
      EXPECT_EQ(farandole_wait(work, -1), FARANDOLE_OK);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(run, rank, thread);
  }
  for (std::thread& thread : threads) thread.join();
  Close();
  EXPECT_EQ(outcome.calls(), 2 * kThreads * kWorks * 2);
}

TEST_F(Callbacks, OfAContextThatHasEndedAreForeseen) {
  EXPECT_EQ(farandole_check(contexts[0]), FARANDOLE_OK);
  std::thread other([&] { EXPECT_EQ(farandole_shutdown(contexts[1]), FARANDOLE_OK); });
  EXPECT_EQ(farandole_shutdown(contexts[0]), FARANDOLE_OK);
  other.join();
  EXPECT_EQ(farandole_check(contexts[0]), FARANDOLE_ABORTED);
  EXPECT_THAT(farandole_last_error(), HasSubstr("shut down"));
}

}  // namespace
