// The composition root: builds one rank's engine and all it uses from the environment, and takes it
// down again.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/control/rendezvous.h"
#include "coordinator/control/share_memory.h"
#include "coordinator/engine/engine.h"
#include "coordinator/engine/gradient_round.h"
#include "core/borrowed_memory.h"
#include "core/config.h"
#include "core/counters.h"
#include "core/doorbell.h"
#include "core/launcher.h"
#include "core/log.h"
#include "core/plugin.h"
#include "core/transport.h"
#include "ops/data_plane.h"
#include "ops/gpu/rank_device.h"

namespace farandole {

/// Ranks of one process share this; see InProcessJob::Create.
class InProcessJob;

/// One rank: everything the C ABI's farandole_context stands for.
///
/// Thread safety: once Joined, any thread. Lifetime: parts are destroyed in reverse order of their
/// use; if given_up(), never.
class Context {
 public:
  ~Context();

  /// The rank this process was launched as; see farandole_init. Only Joined and Shutdown may be
  /// called before Joined said true.
  static Result<std::unique_ptr<Context>> FromEnvironment();
  /// Waits up to `timeout_ns` (< 0: no limit) until all ranks have joined, then starts the engine.
  /// One thread at a time. @return false: not yet; Timeout once the init timeout has passed.
  Result<bool> Joined(int64_t timeout_ns);
  /// `size` ranks in this process.
  static Result<std::vector<std::unique_ptr<Context>>> InProcess(int size);

  Engine& engine() { return *engine_; }
  const Engine& engine() const { return *engine_; }
  WrapComparison& wraps() { return *wraps_; }
  const Config& config() const { return config_; }
  const Rendezvous& rendezvous() const { return rendezvous_; }
  Timeline& timeline() { return *timeline_; }
  /// Host memory of this rank, zero in all bytes, that the ranks it shares memory with reduce in
  /// where it lies. Where there are none, or no such memory is left, it is ordinary memory.
  /// @return ResourceExhausted.
  Result<std::shared_ptr<std::byte>> AllocateBuffer(int64_t bytes);
  /// Brings the wake-up counter up to date; the doorbell counts for itself.
  void CountWakeUps();
  /// Leaves and waits up to `timeout_ns` (< 0: as long as the other ranks live) until they have
  /// left too, then stops the threads. Idempotent.
  /// @return whether that is over; shutdown_status() is then the final error, if there was one.
  bool Shutdown(int64_t timeout_ns);
  /// Shutdown; but ranks of one process stop after FARANDOLE_SHUTDOWN_TIMEOUT_S without the others,
  /// and shutdown_status() is then a Timeout.
  void Close();
  /// The process ends. With exit code 0 this is Close; else a rank that has begun to leave stops
  /// without waiting, and one that has not does nothing.
  void EndAtExit(int exit_code);
  Status shutdown_status();
  /// A thread that is stuck inside a library was left behind. It may return at any later time and
  /// uses this context then: do not destroy it.
  bool given_up() const { return given_up_; }

 private:
  Context() = default;
  Status UseInProcess(std::shared_ptr<InProcessJob> job, int rank);
  void BeginMpi(const Launcher& launcher);
  Status UseMpi(const Launcher& launcher);
  Status ShareHostMemory();
  Status AddCrossPlanes(Network& network);
  LinkOptions Links();
  Status GiveUpJoining();
  int64_t InitTimeLeftNs() const;
  void StopEngine();
  Hello MyHello() const;
  void AddGpuPlane();
  void AddMemoryPlanes(NegotiationOptions& options);
  void StartEngine();

  Config config_;
  Rendezvous rendezvous_;
  std::shared_ptr<InProcessJob> job_;
  std::shared_ptr<FutexDoorbell> doorbell_;
  Counters counters_;
  BorrowedMemory memory_;
  std::unique_ptr<Log> log_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Transport> network_;  // MPI's, below a transport_ in shared memory
  std::unique_ptr<RankDevice> gpu_;
  HostGroup shared_;                       // with other processes
  std::unique_ptr<DataPlane> host_plane_;  // of the CUDA plane alone
  // Of the hierarchical plane alone, if there is one.
  std::array<std::unique_ptr<DataPlane>, 2> cross_planes_;
  // Of the CPU, best first; then the CUDA plane; then the hierarchical plane, if there is one on
  // all ranks; then that of shared_, if there is any.
  std::vector<std::unique_ptr<DataPlane>> planes_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<WrapComparison> wraps_;
  bool uses_mpi_ = false;
  bool given_up_ = false;

  // While the job is joined over MPI.
  std::thread joiner_;
  std::atomic<bool> in_mpi_init_{false};
  std::atomic<uint32_t> joiner_done_{0};  // the joiner touches nothing here any more
  Status join_status_;
  int64_t init_deadline_ns_ = 0;
  int launched_size_ = 1;

  std::mutex shutdown_;
  std::shared_ptr<Work> leaving_;
  bool down_ = false;
  Status shutdown_status_;
  std::mutex wake_ups_;
  int64_t wake_ups_counted_ = 0;
};

}  // namespace farandole
