// The threads of this rank's program that start operations, and which of them wait.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "coordinator/engine/work.h"

namespace farandole {

/// A rank cannot go on by itself while each of these threads waits, without a limit, for work that
/// has not ended. A thread counts from its first call until it ends; one that has called nothing
/// yet is not known here.
///
/// Thread safety: any thread.
class CallerThreads {
 public:
  CallerThreads() : state_(std::make_shared<State>()) {}

  /// The calling thread, which starts an operation, is one of them. Cheap after the first time.
  void Enter();
  /// The calling thread is one of no engine's any more, until it enters again.
  static void Leave();
  /// From here on a thread of this process counts only while it waits, as a library's threads call
  /// in place of those that wait for it.
  static void CountOnlyWaiting();
  /// There are some, and all wait for work that is not done.
  bool AllWait() const;
  /// Each says how many threads the program has, as those with WaitInSlices do, and so many are
  /// known: no other one can start something.
  bool KnowsAll() const;
  /// Their numbers, as pthread_self gives them.
  std::vector<uint64_t> Ids() const;

  /// One wait of the calling thread, which may be a slice of a longer one.
  class Waiting {
   public:
    Waiting(CallerThreads& threads, const Work& work, bool is_unlimited);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    /// From here on the wait counts; no cost for one that ends before.
    void Sleeps();

   private:
    CallerThreads& threads_;
    const Work& work_;
    const bool counts_;
    bool sleeps_ = false;
  };

  /// The calling thread makes its waits in slices, between which it looks for signals: until
  /// `threads` is 0, a wait with a time limit counts as one without, and goes on between two
  /// slices.
  /// @param threads  Of the program, so many may start operations: with fewer known ones, others
  /// may still make their first call.
  /// @param helpers  Further threads of the program, which are not expected to, but may.
  static void WaitInSlices(int threads, int helpers);

 private:
  struct State {
    struct Caller {
      std::weak_ptr<const Work> work;  // that it waits for; empty: it does not wait
      int threads = 0;                 // see WaitInSlices
      int helpers = 0;
      uint64_t id = 0;  // as pthread_self gives it
    };
    mutable std::mutex mutex;
    std::map<const void*, Caller> callers;  // by an address of the thread's own
  };
  struct Thread;
  static Thread& ThisThread();
  void Add();
  void Set(std::weak_ptr<const Work> work);

  const std::shared_ptr<State> state_;
};

}  // namespace farandole
