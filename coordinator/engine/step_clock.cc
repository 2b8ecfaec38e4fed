#include "coordinator/engine/step_clock.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "core/clock.h"

namespace farandole {
namespace {

/// Reading /proc costs some microseconds: steps that are shorter share one look.
constexpr int64_t kLookNs = 5 * kNsPerMs;

/// Longer than any pause: what is more is no time.
constexpr int64_t kMostNs = 1'000'000 * kNsPerSecond;
constexpr int kJoinsBit = 40;  // of the number of a step; below it they are counted

std::atomic<int64_t> collecting_ns = 0;

std::atomic<uint64_t> threads = 0;

struct ThreadTimes {
  uint64_t thread = ++threads;  // a later one may get the address of one that has ended
  int64_t blocked_ns = 0;       // in waits of any engine
  int64_t input_ns = 0;
  int64_t queued_ns = 0;
  int64_t looked_ns = 0;
};

ThreadTimes& OfThisThread() {
  static thread_local ThreadTimes times;
  return times;
}

/// How long this thread could have run and had no processor.
/// @return `known_ns` if the kernel does not count it, or cannot be asked now.
int64_t ReadQueuedNs(int64_t known_ns) {
  const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return known_ns;
  std::array<char, 128> text{};
  const ssize_t bytes = read(file, text.data(), text.size() - 1);
  close(file);
  if (bytes <= 0) return known_ns;
  char* ran = nullptr;  // behind the time that it has run for
  (void)std::strtoll(text.data(), &ran, 10);
  return std::strtoll(ran, nullptr, 10);
}

int64_t QueuedNs(int64_t now_ns) {
  ThreadTimes& times = OfThisThread();
  if (now_ns - times.looked_ns >= kLookNs) {
    times.looked_ns = now_ns;
    times.queued_ns = ReadQueuedNs(times.queued_ns);
  }
  return times.queued_ns;
}

}  // namespace

void NoteTime(TimeOf what, int64_t ns) {
  if (ns <= 0 || ns > kMostNs) return;
  if (what == TimeOf::kInput) OfThisThread().input_ns += ns;
  if (what == TimeOf::kGarbageCollection) collecting_ns.fetch_add(ns);
}

void StepClock::NoteWait(bool is_of_all_ranks, int64_t ns) {
  ThreadTimes& own = OfThisThread();
  own.blocked_ns += ns;
  if (is_of_all_ranks && own.thread == thread_.load(std::memory_order_relaxed))
    waited_ns_.fetch_add(ns, std::memory_order_relaxed);
}

std::optional<StepTimes> StepClock::End(int32_t rank, int joins, const LinkUse& link,
                                        int64_t now_ns) {
  const ThreadTimes& own = OfThisThread();
  const std::lock_guard lock(mutex_);
  StepTimes now{.rank = rank, .ns = now_ns, .blocked_ns = waited_ns_.load()};
  now.input_ns = own.input_ns;
  now.queued_ns = QueuedNs(now_ns);
  now.collecting_ns = collecting_ns.load();
  now.other_groups_ns = own.blocked_ns - now.blocked_ns;
  now.link_ns = link.ns;
  now.link_bytes = link.bytes;
  const StepTimes before = std::exchange(total_, now);
  const uint64_t thread = thread_.exchange(own.thread);
  if (std::exchange(joins_, joins) != joins) steps_ = 0;
  ++steps_;
  if (thread != own.thread) return std::nullopt;
  StepTimes step{rank, (int64_t{joins} << kJoinsBit) + steps_};
  // A child of fork may have read less: no time is negative.
  for (const auto time : kTimesOfStep) step.*time = std::max<int64_t>(now.*time - before.*time, 0);
  step.link_bytes = now.link_bytes - before.link_bytes;
  return step;
}

}  // namespace farandole
