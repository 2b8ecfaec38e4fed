// What this process has for as long as it takes part, however many generations it joins: MPI, which
// can be initialised once and not again and is finalised at exit if every generation ended well;
// what its launcher handed over; the plug-in for its GPUs; and what earlier joins have left.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/launcher.h"
#include "core/log.h"
#include "core/plugin.h"
#include "core/status.h"
#include "ops/device.h"

namespace farandole {

class Bootstrap;
class Generation;
class MemberService;

/// Thread safety: any thread. Lifetime: for ever, as exit handlers and threads that were left
/// behind may look at it, and CUDA may be gone before it. In a forked child it says that it has no
/// rank, no thread and no MPI.
class World {
 public:
  /// That of this process.
  static World& Get();

  /// Loads the plug-in beside libfarandole.so (or config.mpi_plugin) and initialises MPI on the
  /// calling thread, on the first call; later calls give the same. May never return, see
  /// MpiRuntime::Init. Which libmpi: config.mpi_library; the one that this process has
  /// loaded already (mpi4py); the launcher's own, if it named one; else what the dynamic loader
  /// finds.
  /// @return Unavailable with the loader's text, or what MpiRuntime::Init returns.
  Result<MpiRuntime*> Mpi(const Config& config, const Launcher& launcher, Log& log);
  /// How many generations use MPI: it is finalised at exit only if as many have ended well as have
  /// started.
  void MpiGenerationStarted() { mpi_generations_.fetch_add(1); }
  void MpiGenerationEnded() { mpi_generations_.fetch_sub(1); }
  void MpiGenerationFailed() { mpi_failed_.store(true); }
  /// MPI was started once and not all ranks came: other ranks count on calls that this process
  /// began, and it can join no job over MPI any more.
  void MpiTimedOut() { mpi_timed_out_.store(true); }
  bool has_mpi_timed_out() const { return mpi_timed_out_.load(); }
  /// A join over MPI that its caller has abandoned, and that goes on.
  struct AbandonedJoin {
    std::mutex mutex;  ///< Of those below.
    std::shared_ptr<Bootstrap> join;
    pid_t process = 0;  ///< A forked child has no thread that joins.
  };
  AbandonedJoin& abandoned() { return abandoned_; }

  /// This process is the rank that `launcher` says, and says so to what it starts: see
  /// kRankProcess.
  void NoteRank(const Launcher& launcher);
  /// Whether this process, not one that it was forked from, has called NoteRank.
  bool is_rank() const;

  /// The job's key, 32 bytes, or empty. What the launcher handed over is read once, and its
  /// variable is removed from the environment; later calls give the same.
  /// @return InvalidArgument saying what is wrong with the descriptor or the file; Timeout if a
  /// pipe does not give it until `deadline_ns`; Aborted if stopped: a later call then reads on.
  Result<std::string> Key(const Launcher& launcher, int64_t deadline_ns,
                          const std::stop_token& stop);
  /// A copy, which is the caller's, of the launcher's listening socket for rank 0; -1: none. The
  /// process keeps the socket, so that nobody else gets the port while it is in no job.
  /// @return InvalidArgument for what is no open descriptor; else as SystemError.
  Result<int> Listener(const Launcher& launcher);
  /// Whether this process has joined a job by this value of a store, of the last few.
  bool HasUsed(const std::string& value);
  void NoteUsed(const std::string& value);

  /// Generations with other processes whose engines run: the process may end without a
  /// farandole_shutdown, and an exit handler then ends them.
  void List(Generation* generation);
  void Unlist(Generation* generation);

  /// Those of this process, one for each elastic job it is in, while their threads run. In a forked
  /// child their sockets go.
  void AddService(MemberService* service);
  void RemoveService(MemberService* service);

  /// The number of a generation whose engine starts, from 1.
  uint64_t CountGeneration() { return generations_.fetch_add(1) + 1; }
  /// That of the last one.
  uint64_t generations() const { return generations_.load(); }
  /// Takes a generation that has ended. It goes, at the next call at the latest, once no handle
  /// names it, or if it is the oldest of more than 64.
  void Retire(std::shared_ptr<Generation> ended);

  /// Around the time in which a thread that exit() does not wait for may be inside a library. If
  /// the process ends then, it ends with its exit code, but without the destructors of libraries.
  void UnwaitedThreadBegins();
  void UnwaitedThreadEnds() { unwaited_threads_.fetch_sub(1); }

  /// The process's GPUs. Loads the plug-in beside libfarandole.so (or config.cuda_plugin) on the
  /// first call, which comes with the first tensor on a GPU; later calls give the same.
  /// @return Unavailable saying what is missing.
  Result<std::shared_ptr<DeviceRuntime>> Devices(const Config& config);

 private:
  World() = default;
  static void FinaliseMpi();
  static void LeaveAtExit(int exit_code, void*);
  static void ForgetServicesInChild();
  static void EndWithoutDestructors(int status, void*);

  std::mutex mpi_mutex_;  // of those below, but FinaliseMpi takes it not
  Services mpi_services_;
  std::unique_ptr<MpiRuntime> mpi_;
  std::atomic<pid_t> mpi_owner_{0};      // a forked child must not finalise its parent's MPI
  std::atomic<int> mpi_generations_{0};  // started and not yet ended well
  std::atomic<bool> mpi_failed_{false};
  std::atomic<bool> mpi_timed_out_{false};
  AbandonedJoin abandoned_;

  std::mutex devices_mutex_;
  Services device_services_;
  std::shared_ptr<DeviceRuntime> devices_;

  std::atomic<pid_t> rank_process_{0};  // it has joined a job, over any network

  std::mutex key_mutex_;  // a pipe may be slow
  std::string key_;
  std::string received_;  // of it, by a join that was given up: the next one reads on

  std::mutex mutex_;  // of those below
  int listener_ = -1;
  std::string listener_address_;
  std::deque<std::string> used_;  // values of stores
  std::vector<Generation*> open_;
  std::vector<std::shared_ptr<Generation>> retired_;  // oldest first
  std::atomic<uint64_t> generations_{0};

  std::mutex services_mutex_;  // held while this process forks
  std::vector<MemberService*> services_;
  std::atomic<int> unwaited_threads_{0};
  std::atomic<pid_t> unwaited_in_{0};  // a forked child has none of them
};

}  // namespace farandole
