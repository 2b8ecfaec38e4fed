// The thread that enqueues a rank's batches on its GPU, in order, and makes all calls of NCCL.
//
// NCCL wants one order of the collectives on a GPU. Its calls on a communicator that does not block
// take 100 us each (a thread of its own) and have to be polled, to abort or destroy one
// waits for the kernels of the stream, and to free memory waits for the whole device. The engine,
// which relays the control messages of other ranks, does none of this itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "ops/gpu/comm_stream.h"

namespace farandole {

/// Something to be done on the launch thread, and its result.
///
/// Thread safety: the launch thread writes `end` and `inputs` before it says `launched`; others
/// read them afterwards.
class LaunchTask {
 public:
  virtual ~LaunchTask() = default;
  /// On the launch thread. What fails ends the queue.
  virtual Status Run() = 0;

  bool launched() const { return launched_.load(std::memory_order_acquire); }
  void SetLaunched() { launched_.store(true, std::memory_order_release); }
  /// To use it again, by its only owner.
  void Reset() { launched_.store(false, std::memory_order_relaxed); }

  std::shared_ptr<DeviceEvent> inputs;  ///< The inputs are there; nullptr: none were waited for.
  std::shared_ptr<DeviceEvent> end;     ///< The result stands, and nothing is read any more.

 private:
  std::atomic<bool> launched_{false};
};

/// Thread safety: any thread, but for `streams`, which belong to the launch thread.
/// Invariants: tasks run one at a time in the order in which they were pushed; after the first
/// failure results are spoiled, then all clients are aborted, and later tasks find `failed`.
/// Lifetime: the device outlives it, and what its clients count in. See Detach.
class LaunchQueue {
 public:
  /// Who has work on the GPU that can fail after its launch, and wait for peers for ever: a
  /// communicator. Called by the launch thread, Abort and End also by a thread beside it.
  class Client {
   public:
    virtual ~Client() = default;
    /// @return Whether work may be in flight; the error that ended it.
    virtual Result<bool> Check() = 0;
    /// Makes its kernels end. May block until the streams have come to them.
    virtual void Abort() = 0;
    /// Gives up what it has on the GPU. May block until its peers end, too.
    virtual void End() = 0;
  };

  /// @param wake  Called after each launch and at a failure; may be empty.
  LaunchQueue(std::unique_ptr<LaunchStreams> streams, std::function<void()> wake);
  ~LaunchQueue();  // Stops without a deadline.
  LaunchQueue(const LaunchQueue&) = delete;
  LaunchQueue& operator=(const LaunchQueue&) = delete;

  void Push(std::shared_ptr<LaunchTask> task);
  /// Ends all that runs and waits, without waiting for it. The first reason counts.
  void Abort(Status why);
  /// After a failure: waits until nothing of ours is left in the streams, `timeout_ns` at most.
  void AwaitRest(int64_t timeout_ns);
  /// OK, or the first failure. Cheap while there is none.
  Status failure() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  /// Runs what was pushed, then ends the thread. What is launched must be complete, or be aborted.
  /// @return false if it has not ended after `timeout_ns` (< 0: no limit): it is inside a call that
  /// waits for a stream, or a client waits for a peer.
  bool Stop(int64_t timeout_ns);
  /// After such a Stop: leaves the thread to itself. The queue must be leaked; the thread touches
  /// nothing but the queue and the device any more.
  void Detach();

  /// For tasks.
  LaunchStreams& streams() { return *streams_; }
  void AddClient(std::shared_ptr<Client> client) { clients_.push_back(std::move(client)); }
  /// Ends a client on a thread of its own, and all of them side by side: peers may have to get on
  /// with what comes later here before they come to the end of theirs.
  void EndClient(std::shared_ptr<Client> client);

  /// How often clients are asked for errors while work is in flight.
  static constexpr int64_t kCheckNs = 100 * kNsPerMs;

 private:
  void Run();
  void Wake();
  std::shared_ptr<LaunchTask> Next();
  void CheckClients();
  void AbortClients();
  void DrainStreams();

  const std::unique_ptr<LaunchStreams> streams_;
  std::atomic<bool> failed_{false};

  mutable std::mutex mutex_;  // what follows, up to the clients
  std::condition_variable changed_;
  std::function<void()> wake_;
  std::deque<std::shared_ptr<LaunchTask>> tasks_;
  Status failure_;
  bool stop_ = false;
  bool rests_ = false;  // after a failure, when the streams are empty
  bool ends_ = false;   // streams and memory are freed
  bool ended_ = false;
  int ending_ = 0;  // clients

  std::vector<std::shared_ptr<Client>> clients_;  // these three: of the launch thread
  bool in_flight_ = false;
  bool aborted_ = false;
  std::thread thread_;
};

}  // namespace farandole
