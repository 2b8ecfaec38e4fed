// Which launcher started this process, and as which rank, according to its environment.
#pragma once

#include <cstdint>
#include <string>

#include "core/config.h"
#include "core/status.h"

namespace farandole {

/// What the launcher says about this process.
struct Launcher {
  /// "farandole", "horovod", "torchrun", "openmpi", "mvapich2", "pmi", "pmix", "slurm"; "single"
  /// when nobody says anything.
  std::string source = "single";
  int rank = 0;
  int size = 1;
  int local_rank = -1;  ///< -1: not said.
  int local_size = -1;  ///< -1: not said.
  /// The libmpi that belongs to the mpirun that started this process, where it says so (Open MPI
  /// 5); else empty.
  std::string mpi_library;
  /// The variable that says the rank: "OMPI_COMM_WORLD_RANK".
  std::string variable;
  /// "rank/size" and the job's ids. Processes of one host that share it are one rank to MPI.
  std::string identity;
};

/// A rank that has joined sets this variable, and what it starts inherits it: "process identity".
inline constexpr const char* kRankProcess = "FARANDOLE_RANK_PROCESS";

/// Finds the launcher, in this order: FARANDOLE_*, HOROVOD_*, torchrun, Open MPI, MVAPICH2, PMI,
/// PMIx under Slurm, Slurm's own step, else a single process.
///
/// Slurm's variables count only when nobody else speaks: on several nodes Open MPI and Hydra start
/// their daemons with srun, so a rank sees the daemon's SLURM_PROCID. They count only in a numeric
/// step: a batch script's own step ("batch") is one process however many tasks the job has.
/// @return InvalidArgument when two launchers disagree on the size (both are named with their
/// values), or a number is junk or out of range.
Result<Launcher> DetectLauncher(const Environment& environment);

/// The value of kRankProcess for a rank with this process id.
std::string RankProcess(const Launcher& launcher, int64_t process_id);

/// @return Unimplemented if another process, from which this one inherited its environment, has
/// joined as the rank that `launcher` says: MPI would take the two for one and fail in both. A
/// process that a launcher of its own started has another identity and is let in.
Status RefuseDescendant(const Environment& environment, const Launcher& launcher);

}  // namespace farandole
