#include "coordinator/engine/watchdog.h"

#include <pthread.h>

#include <algorithm>
#include <string>
#include <utility>

#include "coordinator/control/frame_coalescer.h"
#include "coordinator/engine/engine_observer.h"
#include "core/futex.h"

namespace farandole {
namespace {

constexpr int64_t kLongestPeriodNs = 250 * kNsPerMs;
constexpr int64_t kRevokeTimeoutNs = kNsPerSecond;  // far more than a chunk's copy takes
// For the loop to end what a library has in flight; a GPU takes longest.
constexpr int64_t kFailingNs = 5 * kNsPerSecond;

}  // namespace

Watchdog::Watchdog(const EngineLoop& loop, const EngineOptions& options, const EngineParts& parts,
                   const SharedParts& shared)
    : loop_(loop),
      rank_(options.negotiation.rank),
      progress_timeout_ns_(options.progress_timeout_ns),
      shutdown_timeout_ns_(options.shutdown_timeout_ns),
      peers_(parts.peers),
      hub_(parts.hub),
      observers_(parts.observers.all),
      lifecycle_(shared.lifecycle),
      operations_(shared.operations),
      memory_(shared.memory),
      liveness_(shared.liveness) {}

// The pulse begins here, as the process may be stopped before its thread runs.
void Watchdog::Start() {
  if (peers_ != nullptr) peers_->BeginPulse();
  thread_ = std::thread([this] { Loop(); });
  (void)pthread_setname_np(thread_.native_handle(), "farandole-watch");  // for top and gdb
}

void Watchdog::Stop() {
  stop_.store(1);
  FutexWake(stop_, 1);
  if (peers_ != nullptr) peers_->Wake();
  thread_.join();
}

void Watchdog::Fail(const Status& error) {
  const Status failed = FailedHere(rank_, error);
  liveness_.Note(failed);
  FailWith(failed, false);
}

// The engine may never send the error to others, who hear of it by other roads.
void Watchdog::FailWith(const Status& error, bool is_shared) {
  // Before the engine counts as failed: from then on Loop ends works, and users may free tensors.
  (void)memory_.Revoke(kRevokeTimeoutNs);  // false: stuck in a plane that does not release it
  lifecycle_.Fail(error);
  const std::vector<std::byte> report = EncodeFailure(rank_, error, is_shared);
  if (peers_ != nullptr) peers_->Report(report);
  if (hub_ != nullptr) hub_->Report(report);
  for (EngineObserver* const one : observers_) one->OnStuck(lifecycle_.final_error());
}

// An engine that is not stuck has taken a peer's error by the next period; it may need longer to
// act on it.
void Watchdog::HeedPeers(int64_t stuck_ns) {
  const bool loop_acts = loop_.is_failing() && stuck_ns < kFailingNs;
  if (liveness_.news() == 0 || loop_acts || lifecycle_.failed() || lifecycle_.is_shut_down())
    return;
  const LivenessTable::Cause cause = liveness_.Judge();
  if (std::exchange(has_heard_, cause.is_shared) && cause.is_shared) {
    FailWith(cause.error, true);
  }
}

// The engine's thread may have failed the engine just now and not yet abandoned its planes: they
// are kept off the tensors before these are released to their users.
void Watchdog::EndOperations() {
  if (!memory_.revoked()) (void)memory_.Revoke(kRevokeTimeoutNs);
  operations_.FailInFlight(lifecycle_.final_error());
}

// A join or a leave has its own deadline: it may wait to be taken, or the iteration that took it is
// stuck.
int64_t Watchdog::LimitNs() const {
  return lifecycle_.IsChanging() ? std::min(progress_timeout_ns_, shutdown_timeout_ns_)
                                 : progress_timeout_ns_;
}

void Watchdog::SleepFor(int64_t period_ns) {
  if (peers_ != nullptr) return peers_->Watch(period_ns);
  FutexWait(stop_, 0, period_ns);
}

// Counts in periods that this thread has lived through: a process that was stopped and continued as
// a whole is not stuck. Works are ended in every period after a failure, because one may have been
// started while the error was being recorded.
void Watchdog::Loop() {
  const int64_t shortest_ns = std::min(progress_timeout_ns_, shutdown_timeout_ns_);
  const int64_t period_ns =
      std::min(kLongestPeriodNs, std::max<int64_t>(shortest_ns / 4, kNsPerMs));
  int64_t same_iteration = 0;
  int64_t watched = 0;
  while (stop_.load() == 0) {
    SleepFor(period_ns);
    const int64_t began = loop_.began_ns();
    same_iteration = began != 0 && began == watched ? same_iteration + 1 : 0;
    watched = began;
    const int64_t stuck_ns = same_iteration * period_ns;
    if (stuck_ns > LimitNs() && !lifecycle_.failed()) {
      Fail(Timeout("rank " + std::to_string(rank_) +
                   ": the engine has been inside one library call for " +
                   std::to_string(stuck_ns / kNsPerMs) + " ms"));
    }
    HeedPeers(stuck_ns);
    if (lifecycle_.failed()) EndOperations();
    StderrSink().Flush();
  }
  if (peers_ != nullptr) peers_->EndPulse();
}

}  // namespace farandole
