// The composition root: builds one rank's engine and all it uses from the environment, and takes it
// down again.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coordinator/bootstrap.h"
#include "coordinator/engine.h"
#include "core/config.h"
#include "core/counters.h"
#include "core/doorbell.h"
#include "core/launcher.h"
#include "core/log.h"
#include "core/transport.h"
#include "ops/cuda/rank_gpus.h"
#include "ops/data_plane.h"

namespace farandole {

/// Ranks of one process share this; see InProcessJob::Create.
class InProcessJob;

/// One rank: everything the C ABI's farandole_context stands for.
///
/// Thread safety: after Start, any thread. Lifetime: parts are destroyed in reverse order of their
/// use.
class Context {
 public:
  ~Context();

  /// The rank this process was launched as; see farandole_init.
  static Result<std::unique_ptr<Context>> FromEnvironment();
  /// `size` ranks in this process.
  static Result<std::vector<std::unique_ptr<Context>>> InProcess(int size);

  Engine& engine() { return *engine_; }
  const Engine& engine() const { return *engine_; }
  const Config& config() const { return config_; }
  const Meeting& meeting() const { return meeting_; }
  Timeline& timeline() { return *timeline_; }
  /// Brings the wake-up counter up to date; the doorbell counts for itself.
  void CountWakeUps();
  /// Leaves, waits for the others up to the shutdown timeout, stops the threads. Idempotent.
  /// @return the final error, Timeout naming what is missing.
  Status Shutdown();

 private:
  Context() = default;
  Status UseInProcess(std::shared_ptr<InProcessJob> job, int rank);
  Status UseMpi(const Launcher& launcher);
  Introduction MyIntroduction() const;
  void AddCudaPlane();
  void StartEngine();

  Config config_;
  Meeting meeting_;
  std::shared_ptr<InProcessJob> job_;
  std::shared_ptr<FutexDoorbell> doorbell_;
  Counters counters_;
  std::unique_ptr<Log> log_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<RankGpus> gpus_;
  std::unique_ptr<DataPlane> host_plane_;           // of the CUDA plane alone
  std::vector<std::unique_ptr<DataPlane>> planes_;  // of the CPU, best first; last the CUDA plane
  std::unique_ptr<Engine> engine_;
  bool uses_mpi_ = false;
  std::mutex shutdown_;
  Status shutdown_status_;
  std::mutex wake_ups_;
  int64_t wake_ups_counted_ = 0;
};

}  // namespace farandole
