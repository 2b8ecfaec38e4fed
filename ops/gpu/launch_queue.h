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
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "ops/data_plane.h"
#include "ops/gpu/comm_stream.h"

namespace farandole {

/// A batch with all that it points to, so that it outlives the one who started it: the launch
/// thread may still look at it when the engine has given it up.
class OwnedBatch {
 public:
  void Assign(const Batch& batch);
  const Batch& batch() const { return batch_; }

 private:
  Batch batch_;
  std::vector<int> ranks_, absent_;
  std::vector<Segment> segments_;
  std::vector<int64_t> splits_, sends_, receives_;
  std::vector<std::shared_ptr<DeviceEvent>> ready_;
};

/// A batch to be enqueued, and the events that tell how far the GPU is with it.
///
/// Thread safety: whoever enqueues writes `end` and `inputs` before it says `launched`; others read
/// them afterwards.
struct LaunchTask {
  OwnedBatch batch;                     ///< Of the launch queue's tasks.
  std::shared_ptr<DeviceEvent> inputs;  ///< The inputs are there; nullptr: none were waited for.
  std::shared_ptr<DeviceEvent> end;     ///< The result stands, and nothing is read any more.

  bool launched() const { return launched_.load(std::memory_order_acquire); }
  void SetLaunched(bool launched = true) { launched_.store(launched, std::memory_order_release); }

 private:
  std::atomic<bool> launched_{false};
};

/// Thread safety: any thread, but for `streams`, which belong to the launch thread.
/// Invariants: clients are connected, launch and end one at a time in the order in which that was
/// asked for; after the first failure results are poisoned, then all clients are aborted, and what
/// comes later is skipped.
/// Lifetime: the device outlives it, and what its clients count in. See Detach.
class LaunchQueue {
 public:
  /// Who enqueues the batches of a process set. One that is added has work on the GPU that can fail
  /// after its launch, and wait for peers for ever: a communicator. Called by the launch thread,
  /// Abort and End also by a thread beside it. A failure ends the queue.
  class Client {
   public:
    virtual ~Client() = default;
    /// Batches of one decision, in order, all members' launches of them alike. Sets the tasks'
    /// events.
    virtual Status Launch(std::span<const std::shared_ptr<LaunchTask>> tasks) = 0;
    /// Before the first batch.
    virtual Status Connect() { return {}; }
    /// @return Whether work may be in flight; the error that ended it.
    virtual Result<bool> Check() { return false; }
    /// Makes its kernels end. May block until the streams have come to them.
    virtual void Abort() {}
    /// Gives up what it has on the GPU. May block until its peers end, too.
    virtual void End() {}
  };

  /// @param wake  Called after each launch and at a failure; may be empty.
  LaunchQueue(std::unique_ptr<LaunchStreams> streams, std::function<void()> wake);
  ~LaunchQueue();  // Stops without a deadline.
  LaunchQueue(const LaunchQueue&) = delete;
  LaunchQueue& operator=(const LaunchQueue&) = delete;

  /// Connects the client, and looks after it until it is removed. Then it ends on a thread of its
  /// own, and all of them side by side: peers may have to get on with what comes later here before
  /// they come to the end of theirs.
  void Add(std::shared_ptr<Client> client) { Push({Work::Kind::kConnect, std::move(client), {}}); }
  void Remove(std::shared_ptr<Client> client) { Push({Work::Kind::kEnd, std::move(client), {}}); }
  /// Lets the client launch a batch, of which a copy is taken. One that is followed is launched
  /// with the one that follows.
  std::shared_ptr<LaunchTask> Launch(std::shared_ptr<Client> client, const Batch& batch);
  /// Ends all that runs and waits, without waiting for it. The first reason counts.
  void Abort(Status why);
  /// After a failure: waits until nothing of ours is left in the streams, `timeout_ns` at most.
  void AwaitDrained(int64_t timeout_ns);
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

  /// For clients.
  LaunchStreams& streams() { return *streams_; }

  /// How often clients are asked for errors while work is in flight.
  static constexpr int64_t kCheckNs = 100 * kNsPerMs;

 private:
  struct Work {
    enum class Kind { kConnect, kLaunch, kEnd } kind;
    std::shared_ptr<Client> client;
    std::shared_ptr<LaunchTask> task;  // of kLaunch
  };
  void Push(Work work);
  void Run();
  Status Do(const Work& work);
  Status LaunchWithFollowers(const Work& first);
  std::shared_ptr<LaunchTask> NextOf(const Client& client);
  void EndClient(std::shared_ptr<Client> client);
  void Wake();
  std::optional<Work> Next();
  void CheckClients();
  void AbortClients();
  void DrainStreams();

  const std::unique_ptr<LaunchStreams> streams_;
  std::atomic<bool> failed_{false};

  mutable std::mutex mutex_;  // what follows, up to the clients
  std::condition_variable changed_;
  std::function<void()> wake_;
  std::deque<Work> work_;
  std::vector<std::shared_ptr<LaunchTask>> tasks_;  // all there are; some in use outside
  Status failure_;
  bool stop_ = false;
  bool drained_ = false;  // after a failure, when the streams are empty
  bool ends_ = false;     // streams and memory are freed
  bool ended_ = false;
  int ending_ = 0;  // clients

  std::vector<std::shared_ptr<Client>> clients_;  // these four: of the launch thread
  std::vector<std::shared_ptr<LaunchTask>> together_;
  bool in_flight_ = false;
  bool aborted_ = false;
  std::thread thread_;
};

}  // namespace farandole
