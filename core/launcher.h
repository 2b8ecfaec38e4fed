// Which launcher started this process, as which rank, and where rank 0 is to be found, according to
// its environment and to what the caller of init says.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/config.h"
#include "core/status.h"
#include "core/store.h"

namespace farandole {

class Listener;

/// What the caller of init says; what it leaves out the launcher says.
struct InitOptions {
  int rank = -1;  ///< -1: not said; nor are the two below.
  int size = -1;
  int local_rank = -1;
  /// "host:port", where rank 0 listens, also after "tcp://"; "file:///folder", which all ranks see;
  /// "env://": MASTER_ADDR and MASTER_PORT. Empty: not said.
  std::string address;
  std::shared_ptr<Store> store;  ///< Instead of an address; nullptr: none.
  bool apart = false;  ///< No launcher is asked: the job may be one of some of a launcher's ranks.
  double timeout_s = 0;     ///< The job's Config::stall_shutdown_s where the environment has none.
  bool in_order = false;    ///< See NegotiationOptions::in_order.
  bool is_elastic = false;  ///< Config::is_elastic is true, whatever the environment says.
  std::string members;      ///< Config::members, if it is not empty.
  int slots = 0;            ///< Config::slots; 0: as the environment says, if not apart.
};

/// What is known of this process's place in the job.
struct Launcher {
  /// "farandole", "horovod", "torchrun", "env://", "openmpi", "mvapich2", "pmi", "pmix", "slurm";
  /// "init" where the caller says the rank himself; "single" when nobody says anything.
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
  /// "rank/size" and the job's ids. Processes of one host that share it are one rank of the job.
  std::string identity;
  /// The job's id, if the launcher has one; alike on all ranks.
  std::string job;
  bool has_mpi = false;    ///< An MPI launcher announced the ranks.
  bool is_apart = false;   ///< As InitOptions::apart: MPI knows nothing of this job.
  bool is_chosen = false;  ///< `address`, `folder` or `store` was given for Farandole by name.
  /// Where rank 0 listens, "host:port"; empty: nobody says it, or `folder` or `store` does.
  std::string address;
  std::string folder;            ///< Where ranks leave each other their addresses, or empty.
  std::shared_ptr<Store> store;  ///< As InitOptions::store.
  /// torchrun's own store listens at its MASTER_PORT, so rank 0 cannot: a store has to be given.
  bool is_taken = false;
  int pmi_descriptor = -1;     ///< Of the launcher's key-value space (PmiStore); -1: none.
  int listen_descriptor = -1;  ///< Of rank 0, a socket that listens at `address`; -1: none.
  int key_descriptor = -1;     ///< Holds the job's key, to be read once; -1: none.
  std::string key_file;        ///< Holds the job's key; or empty.
  std::string key;             ///< Itself, of a job whose generations go on; else empty.
  /// Likewise of rank 0, in the place of listen_descriptor: the join takes it over.
  std::shared_ptr<Listener> listener;
};

/// A rank that has joined sets this variable, and what it starts inherits it: "process identity".
inline constexpr const char* kRankProcess = "FARANDOLE_RANK_PROCESS";

/// Finds the launcher, in this order: FARANDOLE_*, HOROVOD_*, torchrun, env://, Open MPI, MVAPICH2,
/// PMI, PMIx under Slurm, Slurm's own step, else a single process. What `options` say wins over a
/// launcher that says one rank, as a Slurm step with a shell does; others have to agree.
///
/// Where rank 0 is: `options`, FARANDOLE_ADDRESS, the key-value space of PMI, MASTER_ADDR and
/// MASTER_PORT, or in a Slurm step the first of its nodes, with a port that follows from the job's
/// and the step's number.
///
/// Slurm's variables count only when nobody else speaks: on several nodes Open MPI and Hydra start
/// their daemons with srun, so a rank sees the daemon's SLURM_PROCID. They count only in a numeric
/// step: a batch script's own step ("batch") is one process however many tasks the job has.
/// @return InvalidArgument when two launchers, or a launcher and `options`, disagree (both are
/// named with their values), a number is junk or out of range, or something is missing, as rank and
/// size of a job apart are.
Result<Launcher> DetectLauncher(const Environment& environment, const InitOptions& options = {});

/// The network that the job is to use: "mpi" or "tcp". `setting` is FARANDOLE_NETWORK; "auto" is
/// TCP where somebody said for Farandole where rank 0 is or the launcher speaks PMI, else MPI under
/// an MPI launcher, else TCP.
/// @return InvalidArgument if `setting` is none of the three, or nobody says where rank 0 is.
Result<std::string> ChooseNetwork(const Launcher& launcher, const std::string& setting);

/// The value of kRankProcess for a rank with this process id.
std::string RankProcess(const Launcher& launcher, int64_t process_id);

/// @return Unimplemented if another process, from which this one inherited its environment, has
/// joined as the rank that `launcher` says: the job would take the two for one and fail. A
/// process that a launcher of its own started has another identity and is let in.
Status RefuseDescendant(const Environment& environment, const Launcher& launcher);

}  // namespace farandole
