// One NCCL communicator in non-blocking mode: every call is made, and asked about, in steps.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "ops/data_plane.h"
#include "ops/nccl/api.h"
#include "ops/nccl/library.h"
#include "ops/nccl/transfer.h"

namespace farandole {

struct NcclCommunicatorOptions {
  const NcclLibrary* library = nullptr;
  std::string unique_id;
  int size = 1;
  int index = 0;
  std::string map;               ///< Ends every error message.
  const Clock* clock = nullptr;  ///< For the pace of CheckAsync and the end.
  /// In place of a unique id: a communicator that has all members of this one, in the same order,
  /// and at the positions `excluded` others, which have nothing to do with it. Settled, and all it
  /// was given to do over, when Connect is first called; left alone until that is done.
  class NcclCommunicator* parent = nullptr;
  std::vector<int> excluded = {};
};

/// Thread safety: one thread at a time, whose current device is the communicator's. Invariants: no
/// call follows one that is in progress before Settle said kDone; after the first failure NCCL has
/// been told to abort, and only that failure is answered. Lifetime: the library outlives it.
class NcclCommunicator {
 public:
  explicit NcclCommunicator(NcclCommunicatorOptions options);
  /// Finalizes and destroys; aborts where that takes longer than kCloseNs.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Joins the others: kWaiting (ask again after kPollNs), kDone or kFailed.
  Progress Connect();
  /// Whether the last call is over: kDone, kWaiting (ask again after kPollNs) or kFailed.
  Progress Settle();

  /// One call each; what it enqueues is in the stream once Settle says kDone. `type`, `op` and
  /// `count` are equal on all members.
  Status AllReduce(const void* in, void* out, int64_t count, NcclDataType type, NcclRedOp op,
                   NcclStream stream);
  Status Broadcast(const void* in, void* out, int64_t count, NcclDataType type, int root,
                   NcclStream stream);
  /// `count` is what each member gives; `out` takes that of all, end to end.
  Status AllGather(const void* in, void* out, int64_t count, NcclDataType type, NcclStream stream);
  /// `count` is what each member takes; `in` holds that for all, end to end.
  Status ReduceScatter(const void* in, void* out, int64_t count, NcclDataType type, NcclRedOp op,
                       NcclStream stream);
  /// All of these as one call of NCCL, side by side; it is over, or fails, as a whole.
  Status Group(std::span<const NcclTransfer> transfers, NcclStream stream);
  /// Lets NCCL reach `memory` without copies, until Deregister or the end of the communicator.
  /// @return The text of a refusal, after which the communicator is as before; a null handle.
  Status Register(void* memory, int64_t size_bytes, void** handle);
  void Deregister(void* handle);

  /// An error that came after a call. Asks NCCL at most every kCheckNs.
  Status CheckAsync();
  /// Ends what runs and what waits, here and now. Further calls answer Aborted.
  void Abort();
  bool usable() const { return comm_ != nullptr; }
  bool settled() const { return in_progress_ == nullptr; }

  static constexpr int64_t kPollNs = 50 * kNsPerUs;
  static constexpr int64_t kCheckNs = 100 * kNsPerMs;
  static constexpr int64_t kCloseNs = 2 * kNsPerSecond;

 private:
  Status Begin();
  Status BeginFromParent();
  NcclResult Enqueue(const NcclTransfer& transfer, NcclStream stream);
  Status Took(const char* call, NcclResult result);
  Status Fail(const char* call, NcclResult result);
  std::string Describe(const char* call, NcclResult result) const;
  bool FinalizeInTime();
  const NcclApi& api() const { return options_.library->api(); }

  NcclCommunicatorOptions options_;
  NcclComm comm_ = nullptr;
  const char* in_progress_ = nullptr;  // the call's name
  bool started_ = false;
  bool awaits_parent_ = false;  // it is busy making this one
  int64_t checked_ns_ = 0;
  Status failure_;
};

}  // namespace farandole
