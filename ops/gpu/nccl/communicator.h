// One NCCL communicator, called by the launch thread, and at its end by a thread of its own.
//
// It does not block: NCCL may abort such a communicator at any time, while an abort of a blocking
// one frees it under a thread that is inside a call (connecting to peers at the first use of an
// algorithm, or while NCCL's queue is full). The price, a thread of NCCL's own for each call, is
// paid by the launch thread, which polls until the call is complete.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include "core/clock.h"
#include "core/status.h"
#include "ops/gpu/backend.h"
#include "ops/gpu/nccl/library.h"
#include "ops/gpu/nccl/plan.h"

namespace farandole {

/// Thread safety: one thread at a time, whose current device is the communicator's.
/// Invariants: a call that returned OK is complete, and what it enqueued is in the stream; after
/// the first failure only that failure is returned. Lifetime: the library outlives it.
class NcclCommunicator {
 public:
  /// @param is_given_up  Asked while a call is in progress; may be empty.
  /// @param clock        For the end.
  NcclCommunicator(const NcclLibrary& library, NcclSetOptions options,
                   std::function<bool()> is_given_up = {}, const Clock& clock = SteadyClock())
      : library_(library),
        options_(std::move(options)),
        is_given_up_(std::move(is_given_up)),
        clock_(clock) {}
  /// Finalizes, then destroys, which waits until the peers on this host have finalized, for ever if
  /// one is gone. Aborts where the streams take longer than kCloseNs to finalize.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Joins the others, and waits for them.
  Status Connect();
  /// One call, or several as a group. Waits for the peers' calls at the first use of one of
  /// NCCL's algorithms only.
  Status Run(std::span<const NcclCall> calls, NcclStream stream);
  /// Memory of the GPU by ncclMemAlloc, registered here until the communicator ends.
  /// @return ResourceExhausted if there is none; Internal if it cannot be registered: as on a peer
  /// it may be, this must not go on.
  Result<void*> AllocateRegistered(int64_t size_bytes);
  /// What that gave, once the communicator has ended. From any thread.
  static void FreeRegistered(const NcclLibrary& library, void* memory);
  /// An error that came after a call.
  Status CheckAsync();
  /// Makes its kernels end. Blocks until the streams have come to them. Later calls return Aborted.
  void Abort();

  /// How often a wait slept, which makes a launch late by the time the system takes to wake up.
  int64_t sleeps() const { return sleeps_; }

  /// The waiting between two questions: nothing at first, for a call is complete within 100 us,
  /// and a sleep of 20 us takes 70.
  static constexpr int64_t kSpinNs = 100 * kNsPerUs;
  static constexpr int64_t kPollNs = 20 * kNsPerUs;
  static constexpr int64_t kCloseNs = 2 * kNsPerSecond;

 private:
  NcclResult Enqueue(const NcclCall& call, NcclStream stream);
  Status Complete(const char* call, NcclResult result, int64_t deadline_ns = -1);
  Status Fail(const char* call, NcclResult result);
  const NcclApi& api() const { return library_.api(); }

  const NcclLibrary& library_;
  const NcclSetOptions options_;
  const std::function<bool()> is_given_up_;
  const Clock& clock_;
  NcclComm comm_ = nullptr;
  int64_t sleeps_ = 0;
  Status failure_;
};

}  // namespace farandole
