// Whether this process's XLA programs can go on by themselves.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "bindings/c/farandole.h"

namespace farandole::xla {

using WorkHandle = std::shared_ptr<farandole_work>;

/// As the kernel numbers them.
struct PythonThreads {
  std::set<pid_t> daemons;
  std::set<pid_t> others;
  bool has_callback = false;  ///< One of XLA's runs Python code.
};

/// XLA does not say what it has yet to run, so threads are looked at, those of the whole process:
/// one that computes, or waits for a processor, may start what another rank waits for. Not Python's
/// daemon threads, which may run for ever.
///
/// Two questions. Idle: for two seconds none has run, so that what this process waits for is all
/// that it will; ranks that wait for different works have then diverged. A program that sleeps or
/// reads goes on by itself, so this takes half a minute while one of Python's threads does, of its
/// daemons one that reads.
/// Quiet: right now none runs, so that no call comes that is not there already.
///
/// Thread safety: any thread.
class Watch {
 public:
  static Watch& Get();

  /// While the token exists, a call is in flight.
  std::shared_ptr<void> Enter();
  /// Nobody waits for this work in a thread: while the process is idle, the watch does.
  void Add(const WorkHandle& work);
  void Remove(const WorkHandle& work);
  /// Calls `task` every 10 ms in a thread of its own, until it is true.
  void Repeat(std::function<bool()> task);
  bool IsInFlight() const { return in_flight_.load() > 0; }
  /// Whether there are works or tasks that have not ended.
  bool HasPending();
  /// Whether a call was ever made.
  bool HasRun() const { return has_run_.load(); }
  /// Whether no call is in flight and no thread but the asking one runs.
  bool IsQuiet();
  /// False: the process is idle. True for the first seconds in which this is asked.
  bool MayRun();
  /// Python's threads, from one of them; returns when they are asked for again.
  void SetThreads(PythonThreads threads);

 private:
  using Clock = std::chrono::steady_clock;

  Watch() = default;
  void WakeUp();
  [[noreturn]] void Run();
  bool IsWanted() const;
  bool IsToSample() const;
  WorkHandle FindPending();
  void MakeTasks();
  void Sample();
  bool IsIdle() const;
  /// Whether a program sleeps, or waits for something that is no other thread's.
  bool WaitsElsewhere();
  std::set<pid_t> Daemons();
  void WaitWhileIdle();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<WorkHandle, Clock::time_point> pending_;  // since when
  std::vector<std::function<bool()>> tasks_;
  bool is_running_ = false;
  bool is_asleep_ = false;   // until something is wanted
  Clock::time_point asked_;  // MayRun, last
  std::set<pid_t> askers_;   // MayRun's, while they go on asking
  PythonThreads threads_;
  std::condition_variable threads_asked_;
  std::atomic<int> in_flight_ = 0;
  std::atomic<bool> has_run_ = false;
  std::atomic<int> idleness_ = 0;  // see Sample
  // Of Run's thread:
  Clock::time_point sampled_;
  int64_t ticks_ = 0;  // that the threads have run
};

}  // namespace farandole::xla
