// The key-value space that a launcher keeps for its processes, by PMI's first protocol: that of
// Hydra, which starts the ranks of MPICH and Intel MPI, and of Slurm's plug-in pmi2. Each process
// has a socket to the launcher, whose number is in PMI_FD, and sends lines such as
// "cmd=barrier_in". The source of the protocol: MPICH, src/pmi; P. Balaji et al., "PMI: A Scalable
// Parallel Process-Management Interface for Extreme-Scale Systems", EuroMPI 2010.
#pragma once

#include <memory>

#include "core/store.h"

namespace farandole {

/// For one value, which one rank sets and all others get, over the socket `descriptor`, of which a
/// process has one. The value is there after a barrier of all ranks: Set and the first Get return
/// Timeout until all have begun to. Each join of a job takes another store, and all ranks as many.
///
/// The process may use MPI, whose library speaks over the same socket. At exit the launcher is told
/// that the process ends by itself (Intel MPI's takes what does not say so for a crash), unless MPI
/// does that.
/// @return a store whose errors are Unavailable with what the launcher said.
std::shared_ptr<Store> PmiStore(int descriptor);

}  // namespace farandole
