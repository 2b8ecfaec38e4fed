// The CPU data plane between processes: MPI carries bytes, the kernels reduce.
//
// No MPI datatypes and no MPI_Op: all dtypes, 16-bit sums in float, counts beyond 2^31, absent
// ranks and one order of summation come for free, and it is faster (docs/decisions.md).
#pragma once

#include <mpi.h>

#include <memory>

#include "core/borrowed_memory.h"
#include "core/counters.h"
#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"

namespace farandole {

/// @param communicator  Over all ranks, used by nobody else; errors must return. Never freed, see
///                      MakeMpiTransport.
/// @param kernels   Outlives the plane.
/// @param counters  May be nullptr. Counts bytes copied, bulk bytes sent, quarantined bytes.
/// @param memory    Of the users' tensors; released around calls of MPI. May be nullptr; outlives
///                  the plane.
/// Thread safety and contract: `class DataPlane`. Lifetime: ends before MPI_Finalize.
std::unique_ptr<DataPlane> MakeMpiPlane(MPI_Comm communicator, const CpuKernels& kernels,
                                        Counters* counters, BorrowedMemory* memory = nullptr);

}  // namespace farandole
