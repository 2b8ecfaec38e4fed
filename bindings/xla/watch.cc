#include "bindings/xla/watch.h"

#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace farandole::xla {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(250);
constexpr auto kLook = std::chrono::milliseconds(10);
/// Of processors, in a slice: 50 ms.
const int64_t kIdleTicks = sysconf(_SC_CLK_TCK) / 20;
/// What a sample adds to the idleness, at which the process is idle: after 2 s, or after 30 s.
constexpr int kIdle = 120;
constexpr int kWaitsForThreads = 15;
constexpr int kWaitsElsewhere = 1;
/// After so long nobody asks any more.
constexpr auto kAsksAgain = std::chrono::seconds(1);

std::string ReadFile(pid_t thread, const char* name) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + name);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Activity {
  std::set<pid_t> running;  // or they would, if they had a processor
  int64_t ticks = 0;        // that all have run
};

/// As /proc has it: "number (name) state ...", where the name may hold anything.
void Add(pid_t thread, Activity* activity) {
  const std::string text = ReadFile(thread, "/stat");
  std::istringstream rest(text.substr(std::min(text.rfind(')'), text.size() - 1) + 1));
  std::string state;
  std::string skipped;
  rest >> state;
  for (int i = 0; i < 10; ++i) rest >> skipped;
  int64_t user = 0;
  int64_t system = 0;
  if (!(rest >> user >> system)) return;  // it has ended
  activity->ticks += user + system;
  if (state == "R" || state == "D") activity->running.insert(thread);
}

/// Of the threads other than the calling one and these. The folder's "." and ".." are read as 0.
Activity ActivityWithout(const std::set<pid_t>& skipped) {
  Activity activity;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/task"), &closedir);
  while (const dirent* entry = folder ? readdir(folder.get()) : nullptr) {
    const auto thread =
        static_cast<pid_t>(std::strtol(static_cast<const char*>(entry->d_name), nullptr, 10));
    if (thread > 0 && thread != gettid() && !skipped.contains(thread)) Add(thread, &activity);
  }
  return activity;
}

/// Whether one runs now and 10 ms later: many wake up briefly.
bool OneRuns(const std::set<pid_t>& before, const std::set<pid_t>& skipped) {
  if (before.empty()) return false;
  std::this_thread::sleep_for(kLook);
  const std::set<pid_t> after = ActivityWithout(skipped).running;
  return std::ranges::any_of(before, [&](pid_t one) { return after.contains(one); });
}

/// The call of the kernel that a thread is in; -1: none. Where the kernel does not tell, another
/// than those that are asked for here.
int64_t CallOf(pid_t thread) {
  constexpr int64_t kUnknown = INT64_MAX;
  const std::string text = ReadFile(thread, "/syscall");
  if (text.empty()) return kUnknown;
  int64_t call = -1;  // it runs
  std::istringstream(text) >> call;
  return call;
}

/// Whether a thread is in a call of the kernel other than a wait for other threads.
bool IsInKernel(pid_t thread) {
  const int64_t call = CallOf(thread);
  return call != SYS_futex && call >= 0;
}

/// Whether a thread waits for data. Not all kernels have the older calls.
bool Reads(pid_t thread) {
  static const std::set<int64_t> calls{
      SYS_read,  SYS_readv,    SYS_pread64,     SYS_recvfrom, SYS_recvmsg,
#ifdef SYS_poll
      SYS_poll,  SYS_select,   SYS_epoll_wait,
#endif
      SYS_ppoll, SYS_pselect6, SYS_epoll_pwait,
  };
  return calls.contains(CallOf(thread));
}

}  // namespace

Watch& Watch::Get() {
  static Watch& watch = *new Watch;  // its thread runs until the process ends
  return watch;
}

std::shared_ptr<void> Watch::Enter() {
  in_flight_.fetch_add(1);
  has_run_ = true;
  return {this, [this](void*) { in_flight_.fetch_sub(1); }};
}

void Watch::Add(const WorkHandle& work) {
  const std::lock_guard lock(mutex_);
  pending_.emplace(work, Clock::now());
  WakeUp();
}

void Watch::Remove(const WorkHandle& work) {
  const std::lock_guard lock(mutex_);
  pending_.erase(work);
}

void Watch::Repeat(std::function<bool()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  WakeUp();
  changed_.notify_all();
}

bool Watch::HasPending() {
  const std::lock_guard lock(mutex_);
  return !pending_.empty() || !tasks_.empty();
}

bool Watch::IsQuiet() { return !IsInFlight() && ActivityWithout(Daemons()).running.empty(); }

bool Watch::MayRun() {
  const std::lock_guard lock(mutex_);
  asked_ = Clock::now();
  askers_.insert(gettid());
  WakeUp();
  return !IsIdle();
}

void Watch::SetThreads(PythonThreads threads) {
  std::unique_lock lock(mutex_);
  threads_ = std::move(threads);
  threads_asked_.wait(lock);
}

std::set<pid_t> Watch::Daemons() {
  const std::lock_guard lock(mutex_);
  threads_asked_.notify_all();
  return threads_.daemons;
}

// With the mutex.
void Watch::WakeUp() {
  try {
    if (!std::exchange(is_running_, true)) std::thread([this] { Run(); }).detach();
  } catch (const std::system_error&) {
    is_running_ = false;  // no thread: the next call tries again
  }
  if (std::exchange(is_asleep_, false)) changed_.notify_all();
}

// With the mutex.
bool Watch::IsWanted() const {
  return !pending_.empty() || !tasks_.empty() || Clock::now() - asked_ < kAsksAgain;
}

// With the mutex: whether something was wanted for longer than works take.
bool Watch::IsToSample() const {
  const auto now = Clock::now();
  return now - asked_ < kAsksAgain || std::ranges::any_of(pending_, [now](const auto& entry) {
           return now - entry.second >= kSlice;
         });
}

WorkHandle Watch::FindPending() {
  const std::lock_guard lock(mutex_);
  return pending_.empty() ? nullptr : pending_.begin()->first;
}

void Watch::Run() {
  for (;;) {
    bool samples = false;
    {
      std::unique_lock lock(mutex_);
      is_asleep_ = !IsWanted();
      if (is_asleep_) idleness_ = 0;  // what follows is not known
      changed_.wait(lock, [this] { return !is_asleep_; });
      const bool has_tasks = !tasks_.empty();
      changed_.wait_for(lock, has_tasks ? kLook : kSlice,
                        [&] { return tasks_.empty() == has_tasks; });
      samples = IsToSample();
      if (!samples) idleness_ = 0;
    }
    MakeTasks();
    if (samples) Sample();
    if (IsIdle()) WaitWhileIdle();
  }
}

void Watch::MakeTasks() {
  std::vector<std::function<bool()>> due;
  {
    const std::lock_guard lock(mutex_);
    due.swap(tasks_);
  }
  std::erase_if(due, [](const auto& task) { return task(); });
  const std::lock_guard lock(mutex_);
  tasks_.insert(tasks_.begin(), due.begin(), due.end());
}

// Once in a slice.
void Watch::Sample() {
  const auto now = Clock::now();
  if (now - sampled_ < kSlice) return;
  const bool has_gap = now - sampled_ > 2 * kSlice;
  const std::set<pid_t> daemons = Daemons();
  const Activity activity = ActivityWithout(daemons);
  const int64_t before = std::exchange(ticks_, activity.ticks);
  const bool is_idle =
      !has_gap && std::abs(ticks_ - before) < kIdleTicks && !OneRuns(activity.running, daemons);
  sampled_ = now;
  const int more = WaitsElsewhere() ? kWaitsElsewhere : kWaitsForThreads;
  idleness_ = is_idle ? std::min(idleness_.load() + more, kIdle) : 0;
}

bool Watch::IsIdle() const { return idleness_.load() >= kIdle; }

bool Watch::WaitsElsewhere() {
  const std::lock_guard lock(mutex_);
  if (Clock::now() - asked_ >= kAsksAgain) askers_.clear();
  return threads_.has_callback || std::ranges::any_of(threads_.daemons, &Reads) ||
         std::ranges::any_of(threads_.others, [this](pid_t one) {
           return !askers_.contains(one) && IsInKernel(one);
         });
}

// As a thread that waits without a limit.
void Watch::WaitWhileIdle() {
  const WorkHandle work = FindPending();
  while (work != nullptr && IsIdle() && farandole_poll(work.get()) == 0) {
    farandole_wait_in_slices(1, 1 << 20);  // others may start something, too
    farandole_wait(work.get(), std::chrono::duration<double>(kSlice).count());
    Sample();
    const std::lock_guard lock(mutex_);
    if (!tasks_.empty()) break;
  }
  farandole_wait_in_slices(0, 0);
  farandole_leave_thread();
}

}  // namespace farandole::xla
