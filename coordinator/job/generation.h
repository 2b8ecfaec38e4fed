// The composition root: one rank in one start of a job, from the join to the leave. It builds the
// engine over what joining gave it, and takes it down again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/diagnosis/diagnosis.h"
#include "coordinator/engine/engine.h"
#include "coordinator/gradients/wrap_comparison.h"
#include "coordinator/job/bootstrap.h"
#include "coordinator/job/member_service.h"
#include "core/config.h"
#include "core/launcher.h"
#include "core/timeline.h"
#include "ops/data_plane.h"
#include "ops/gpu/rank_device.h"

namespace farandole {

/// One rank in one start of a job, of a fixed list of ranks: what a farandole_context stands for.
///
/// Thread safety: once Joined, any thread. Lifetime: parts are destroyed in reverse order of their
/// use; if given_up(), never.
class Generation {
 public:
  ~Generation();

  /// The rank that the launcher and `init` say; see farandole_init. Only Joined and Shutdown may be
  /// called before Joined said true.
  static Result<std::unique_ptr<Generation>> Begin(const InitOptions& init);
  /// That of an elastic job after `ended`, for which EndForNext has said true: its members agree
  /// who they are, and Joined then gives Halted if this process is not among them, for good.
  /// @return InvalidArgument for a job that is not elastic, or that this process has left.
  static Result<std::unique_ptr<Generation>> BeginNext(Generation& ended);
  /// Waits up to `timeout_ns` (< 0: no limit) until all ranks have joined, then starts the engine.
  /// One thread at a time. @return false: not yet; Timeout once the init timeout has passed.
  Result<bool> Joined(int64_t timeout_ns);
  /// `size` ranks in this process.
  static Result<std::vector<std::unique_ptr<Generation>>> InProcess(int size);

  /// InitOptions::timeout_s from now on, of what waits already too, and of the next generations.
  /// Not beside a call that reads settings.
  void SetTimeout(double timeout_s);
  Engine& engine();
  const Engine& engine() const;
  WrapComparison& wraps() { return *wraps_; }
  const Config& config() const { return config_; }
  const Rendezvous& rendezvous() const { return joined_->rendezvous; }
  Timeline& timeline() { return *timeline_; }
  /// Host memory of this rank, zero in all bytes, that the ranks it shares memory with reduce in
  /// where it lies. nullptr: there are none, or no such memory is left.
  std::shared_ptr<std::byte> AllocateShared(int64_t bytes);
  /// Brings the wake-up counter up to date; the doorbell counts for itself.
  void CountWakeUps();
  /// Leaves and waits up to `timeout_ns` (< 0: as long as the other ranks live) until they have
  /// left too, then stops the threads and waits until the works' callbacks have returned, unless
  /// it is one of them that calls. Idempotent.
  /// @return whether that is over; shutdown_status() is then the final error, if there was one.
  /// @param parting  At the exit of the program: why it ends.
  bool Shutdown(int64_t timeout_ns, Lifecycle::Parting parting = {});
  /// Of an elastic job: ends this generation, if it has not ended, as the others do, and stops its
  /// threads. Waits up to `timeout_ns` (< 0: 2 s for the others). @return whether that is over.
  bool EndForNext(int64_t timeout_ns);
  /// Of an elastic job, else 1: its generations have numbers that grow, alike on all ranks.
  uint64_t number_in_job() const { return std::max<uint64_t>(list_.generation.number, 1); }
  /// See MemberService; false for a job that is not elastic.
  bool change_is_due() const { return service_ != nullptr && service_->change_is_due(); }
  /// Where `rank`, or -1: all ranks, of an elastic job listen, as FARANDOLE_MEMBERS has it; else
  /// empty.
  std::string members(int rank) const;
  /// Of an elastic job that has begun: tells farandolerun, if that started this process, where it
  /// listens, for the ranks that are started later.
  void NotifyLauncher() const;
  /// Shutdown; but ranks of one process stop after FARANDOLE_SHUTDOWN_TIMEOUT_S without the others,
  /// and shutdown_status() is then a Timeout.
  void Close();
  /// The process ends. With exit code 0 this is Close; else a rank that has begun to leave says its
  /// code to the others and stops without waiting for them, and one that has not does nothing.
  void EndAtExit(int exit_code);
  Status shutdown_status();
  /// What a call through a handle of this generation has failed with. Once this generation has
  /// ended and init() has begun another one, it is Aborted, and says so.
  struct Explained {
    Status status;
    bool is_of_the_past = false;
  };
  Explained Explain(const Status& failure);
  /// Whether Explain was given the final error: the user knows it.
  bool has_told() const { return has_told_.load(); }
  /// The generation of an engine, which Generation made as every engine behind a handle.
  static Generation& Of(const Engine& engine);
  /// How many handles of works, gradients and operations name it: as long as there are any it stays
  /// in memory, see World::Retire.
  int64_t handles() const { return handles_.load(std::memory_order_acquire); }
  void CountHandles(int64_t change) { handles_.fetch_add(change, std::memory_order_acq_rel); }
  /// From 1; of all generations that this process has begun.
  uint64_t number() const { return number_; }
  /// The calling thread is in a callback of a work, and returns into this.
  bool IsInCallback() const;
  /// A thread that is stuck inside a library was left behind. It may return at any later time and
  /// uses this object then: do not destroy it.
  bool given_up() const { return given_up_; }

 private:
  Generation() = default;
  static bool TakeElastic(const InitOptions& init, Config& config);
  Status MakeService(const Launcher& launcher);
  void BeginAlone();
  Result<bool> JoinedAsMember(int64_t timeout_ns);
  Result<bool> TakeAssignment(int64_t until_ns);
  Result<bool> JoinedAt(MemberAssignment& assignment, int64_t until_ns);
  void BeginTogether();
  Result<bool> HasBegun(int64_t timeout_ns);
  Losses FindLosses() const;
  RunningGeneration Running();
  bool LeaveAndStop(int64_t timeout_ns, Lifecycle::Parting parting);
  bool LeaveTogether(int64_t timeout_ns, Lifecycle::Parting parting, const Status& why);
  void LeaveAndStop();
  Status JoinInProcess(std::shared_ptr<InProcessJob> job, int rank, uint64_t number);
  void StopEngine();
  void AddRecorder();
  void AddGpuPlane();
  void AddMemoryPlanes(NegotiationOptions& options);
  void StartEngine(std::unique_ptr<Connections> joined, uint64_t number);

  Config config_;
  int compute_threads_ = 1;               // of the program, as far as it is known
  bool has_timeout_ = false;              // of init, not of the environment
  bool in_order_ = false;                 // see NegotiationOptions
  std::shared_ptr<Bootstrap> bootstrap_;  // until the rank has joined
  std::unique_ptr<Connections> joined_;   // from then on
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<FlightRecorder> recorder_;  // nullptr: there is no memory for it
  std::unique_ptr<RankDevice> gpu_;
  // Of the CPU, best first; then the CUDA plane; then the hierarchical plane, if there is one on
  // all ranks; then that of memory shared with other processes, if there is any.
  std::vector<std::unique_ptr<DataPlane>> planes_;
  std::unique_ptr<Diagnosis> diagnosis_;
  struct OwnedEngine;
  std::unique_ptr<OwnedEngine> engine_;
  std::unique_ptr<WrapComparison> wraps_;
  bool given_up_ = false;
  uint64_t number_ = 0;
  // Of an elastic job: alike in all generations of the process, the last of which leaves it.
  std::shared_ptr<MemberService> service_;
  bool is_succeeded_ = false;
  MemberList list_;
  std::optional<MemberAssignment> assignment_;  // where it joins
  std::shared_ptr<Work> beginning_;             // the first collective
  int64_t let_in_by_ns_ = kNever;               // of a newcomer
  int64_t leave_by_ns_ = 0;                     // 0: it has not begun to leave
  std::atomic<uint64_t> ended_at_{0};           // World::generations then; 0: it has not
  std::atomic<bool> has_told_{false};
  std::atomic<int64_t> handles_{0};

  std::mutex shutdown_;
  std::shared_ptr<Work> leaving_;
  bool down_ = false;
  Status shutdown_status_;
  std::mutex wake_ups_;
  int64_t wake_ups_counted_ = 0;
};

}  // namespace farandole
