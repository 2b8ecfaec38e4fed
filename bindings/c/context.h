// The composition root: builds one rank's engine over what joining the job gave it, and takes it
// down again.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "bindings/c/bootstrap.h"
#include "coordinator/engine/engine.h"
#include "coordinator/gradients/wrap_comparison.h"
#include "core/config.h"
#include "core/launcher.h"
#include "core/timeline.h"
#include "ops/data_plane.h"
#include "ops/gpu/rank_device.h"

namespace farandole {

/// One rank: everything the C ABI's farandole_context stands for.
///
/// Thread safety: once Joined, any thread. Lifetime: parts are destroyed in reverse order of their
/// use; if given_up(), never.
class Context {
 public:
  ~Context();

  /// The rank that the launcher and `init` say; see farandole_init. Only Joined and Shutdown may be
  /// called before Joined said true.
  static Result<std::unique_ptr<Context>> Begin(const InitOptions& init);
  /// Waits up to `timeout_ns` (< 0: no limit) until all ranks have joined, then starts the engine.
  /// One thread at a time. @return false: not yet; Timeout once the init timeout has passed.
  Result<bool> Joined(int64_t timeout_ns);
  /// `size` ranks in this process.
  static Result<std::vector<std::unique_ptr<Context>>> InProcess(int size);

  Engine& engine() { return *engine_; }
  const Engine& engine() const { return *engine_; }
  WrapComparison& wraps() { return *wraps_; }
  const Config& config() const { return config_; }
  const Rendezvous& rendezvous() const { return joined_->rendezvous; }
  Timeline& timeline() { return *timeline_; }
  /// Host memory of this rank, zero in all bytes, that the ranks it shares memory with reduce in
  /// where it lies. Where there are none, or no such memory is left, it is ordinary memory.
  /// @return ResourceExhausted.
  Result<std::shared_ptr<std::byte>> AllocateBuffer(int64_t bytes);
  /// Brings the wake-up counter up to date; the doorbell counts for itself.
  void CountWakeUps();
  /// Leaves and waits up to `timeout_ns` (< 0: as long as the other ranks live) until they have
  /// left too, then stops the threads and waits until the works' callbacks have returned, unless
  /// it is one of them that calls. Idempotent.
  /// @return whether that is over; shutdown_status() is then the final error, if there was one.
  /// @param parting  At the exit of the program: why it ends.
  bool Shutdown(int64_t timeout_ns, Lifecycle::Parting parting = {});
  /// Shutdown; but ranks of one process stop after FARANDOLE_SHUTDOWN_TIMEOUT_S without the others,
  /// and shutdown_status() is then a Timeout.
  void Close();
  /// The process ends. With exit code 0 this is Close; else a rank that has begun to leave says its
  /// code to the others and stops without waiting for them, and one that has not does nothing.
  void EndAtExit(int exit_code);
  Status shutdown_status();
  /// The calling thread is in a callback of a work, and returns into this.
  bool IsInCallback() const { return engine_ != nullptr && engine_->IsInCallback(); }
  /// A thread that is stuck inside a library was left behind. It may return at any later time and
  /// uses this context then: do not destroy it.
  bool given_up() const { return given_up_; }

 private:
  Context() = default;
  bool LeaveAndStop(int64_t timeout_ns, Lifecycle::Parting parting);
  void LeaveAndStop();
  Status JoinInProcess(std::shared_ptr<InProcessJob> job, int rank);
  void StopEngine();
  void AddRecorder();
  void AddGpuPlane();
  void AddMemoryPlanes(NegotiationOptions& options);
  void StartEngine(std::unique_ptr<Connections> joined);

  Config config_;
  int compute_threads_ = 1;               // of the program, as far as it is known
  bool in_order_ = false;                 // see NegotiationOptions
  std::shared_ptr<Bootstrap> bootstrap_;  // until the rank has joined
  std::unique_ptr<Connections> joined_;   // from then on
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<FlightRecorder> recorder_;  // nullptr: there is no memory for it
  std::unique_ptr<RankDevice> gpu_;
  // Of the CPU, best first; then the CUDA plane; then the hierarchical plane, if there is one on
  // all ranks; then that of memory shared with other processes, if there is any.
  std::vector<std::unique_ptr<DataPlane>> planes_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<WrapComparison> wraps_;
  bool given_up_ = false;

  std::mutex shutdown_;
  std::shared_ptr<Work> leaving_;
  bool down_ = false;
  Status shutdown_status_;
  std::mutex wake_ups_;
  int64_t wake_ups_counted_ = 0;
};

}  // namespace farandole
