// Calls users back when their works are done.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/status.h"

namespace farandole {

class CallbackThreads;
class Work;

/// What is called once when a work is done.
struct Callback {
  std::function<void(const Status&)> call;
  CallbackThreads* threads = nullptr;  ///< On which, unless the work was done before.
  Status status = {};                  ///< Of the work, once it is done.
  Callback* next = nullptr;            ///< Of the same work, or the same queue.
};

/// The threads of one engine that make these calls. A call may take long, start operations and wait
/// for what another call has yet to do: there are as many threads as calls at a time. One that has
/// no call to make waits for the oldest work, as a caller does who may run the engine: its call
/// then needs no further thread to wake. The first one begins with the first work that has a
/// callback; none ends before the engine.
///
/// Thread safety: any thread, also the holder of the engine lock. Lifetime: outlives the works that
/// are not done; its destructor waits until all calls have returned.
class CallbackThreads {
 public:
  /// @param wait  Returns when a work is done.
  explicit CallbackThreads(std::function<void(const Work&)> wait) : wait_(std::move(wait)) {}
  ~CallbackThreads();
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  /// A callback for a work that is in flight.
  /// @throw std::system_error if there is no thread and none can be had.
  std::unique_ptr<Callback> Make(std::function<void(const Status&)> call);
  /// The work has it now.
  void WaitFor(std::shared_ptr<const Work> work);
  /// The work was done before, so its callback is none of these.
  void Discard();
  /// `work` is done: makes these calls, on some threads.
  void Push(const Work& work, Callback* first);
  /// Sleeps up to `timeout_ns` (< 0: no limit) until no call is due or runs. @return whether that
  /// is so; true at once in one of these calls.
  bool Await(int64_t timeout_ns);
  /// Waits until all calls have returned, and ends the threads.
  void Join();
  /// Whether the calling thread is one of them.
  bool IsHere() const;
  /// No call of this process is due or runs, or may come to be so before a work of this engine is
  /// done. Until then such a call may start what the other ranks wait for.
  bool NoneMayStart() const { return outstanding_.load() == pending_.load(); }

 private:
  void StartThread();
  void Run();
  void MakeCall(std::unique_lock<std::mutex>& lock);
  void WaitForOldest(std::unique_lock<std::mutex>& lock);

  static std::atomic<int64_t> outstanding_;  // of this process: made, and not returned
  std::atomic<int64_t> pending_{0};          // their works are not done
  const std::function<void(const Work&)> wait_;

  std::mutex mutex_;  // of what follows
  std::condition_variable is_wanted_, has_ended_;
  Callback* first_ = nullptr;  // the queue
  Callback** end_ = &first_;
  std::deque<std::shared_ptr<const Work>> works_;  // oldest first; some are done
  size_t most_works_ = 64;                         // then those that are done are dropped
  const Work* waited_ = nullptr;                   // for which one of them waits
  int64_t due_ = 0;                                // in the queue
  int64_t running_ = 0;
  int64_t idle_ = 0;  // threads, with one whose work is done
  bool is_ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace farandole
