// Who runs the engine when: its own thread, or a caller that waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

#include "coordinator/engine/engine_loop.h"

namespace farandole {

/// The engine thread and the engine lock, under which every iteration of the engine loop runs.
///
/// A waiting caller takes the engine lock when the engine thread sleeps, and runs the loop itself:
/// that saves two wake-ups between cores. What it leaves undone is the engine thread's again.
///
/// Thread safety: Wait from any thread; the rest by the engine's owner. Lifetime: the loop outlives
/// its threads.
class ProgressThread {
 public:
  ProgressThread(EngineLoop& loop, const EngineParts& parts, const SharedParts& shared,
                 const EngineOptions& options);
  ~ProgressThread();

  void Start();
  bool IsRunning() const { return thread_.joinable(); }
  /// Sleeps or runs the engine until `work` is done or `timeout_ns` (< 0: no limit) has passed.
  /// @param starts  The calling thread is one of the program, which may start operations.
  /// @return done?
  bool Wait(const Work& work, int64_t timeout_ns, bool starts = true);
  /// The caller has submitted something without notifying the engine, and will wait for it, after
  /// what else it has to compute: takes it along, and what is there to do, and leaves the rest to
  /// the next call and the wait. The engine thread stands by.
  void RunBriefly();
  /// Joins the thread. The loop was asked to stop, and the doorbell is closed.
  /// @param waited_ns  Receives for how long this took.
  /// @return false if the thread has not ended after `timeout_ns` (< 0: no limit).
  bool Stop(int64_t timeout_ns, int64_t* waited_ns);
  /// Leaves a thread behind that has not stopped.
  void Detach();
  /// The engine lock, which a waiting caller may have; not owned if it was not to be had within
  /// `timeout_ns` (< 0: no limit).
  std::unique_lock<std::mutex> LockWithin(int64_t timeout_ns);

 private:
  void Loop();
  void RunAsCaller(const Work& work, int64_t deadline_ns, CallerThreads::Waiting& waiting);
  int64_t DueNs(int64_t sleep_ns) const;
  void HandBack(uint32_t ticket, int64_t sleep_ns);
  bool TakesEngineLock();
  bool MayStandBy() const;
  bool IsWanted() const;

  EngineLoop& loop_;
  FutexDoorbell& doorbell_;
  const Clock& clock_;
  const Lifecycle& lifecycle_;
  const RankDevice& gpu_;
  SubmissionQueue& submissions_;
  StepClock& steps_;
  CallerThreads& callers_;
  CallerThreads others_;   // that wait and start nothing
  const int64_t spin_ns_;  // whoever runs the loop spins so long
  const bool fills_cores_;

  std::mutex engine_lock_;
  std::atomic<int> engine_lock_wanted_{0};
  std::atomic<int> sleepers_{0};      // callers that wait for the engine thread
  std::atomic<int64_t> looks_ns_{0};  // when the engine thread does next, unless it is woken
  // Under the engine lock:
  bool stands_by_ = false;          // the engine thread looks every kStandByNs, and is not rung
  int64_t brief_ns_ = 0;            // of the last RunBriefly
  std::atomic<uint32_t> ended_{0};  // the engine thread touches nothing here any more
  std::thread thread_;
};

}  // namespace farandole
