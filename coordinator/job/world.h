// What the process has once, however many contexts it makes: MPI, which can be initialised once and
// not again and is finalised at exit if every context ended well; what its launcher handed over;
// and the plug-in for its GPUs.
#pragma once

#include <memory>
#include <stop_token>
#include <string>

#include "core/config.h"
#include "core/launcher.h"
#include "core/log.h"
#include "core/plugin.h"
#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Loads the plug-in beside libfarandole.so (or config.mpi_plugin) and initialises MPI on the
/// calling thread, on the first call; later calls give the same. May never return, see
/// MpiRuntime::Init. Which libmpi: config.mpi_library; the one that this process has
/// loaded already (mpi4py); the launcher's own, if it named one; else what the dynamic loader
/// finds.
/// @return Unavailable with the loader's text, or what MpiRuntime::Init returns.
Result<MpiRuntime*> MpiOfProcess(const Config& config, const Launcher& launcher, Log& log);

/// This process is the rank that `launcher` says, and says so to what it starts: see kRankProcess.
void NoteRankProcess(const Launcher& launcher);
/// Whether this process, not one that it was forked from, has called NoteRankProcess.
bool IsRankProcess();

/// The job's key, 32 bytes, or empty. What the launcher handed over is read once, and its variable
/// is removed from the environment; later calls give the same.
/// @return InvalidArgument saying what is wrong with the descriptor or the file; Timeout if a pipe
/// does not give it until `deadline_ns`; Aborted if stopped: a later call then reads on.
Result<std::string> KeyOfProcess(const Launcher& launcher, int64_t deadline_ns,
                                 const std::stop_token& stop);
/// A copy, which is the caller's, of the launcher's listening socket for rank 0; -1: none. The
/// process keeps the socket, so that nobody else gets the port while it is in no job.
/// @return InvalidArgument for what is no open descriptor; else as SystemError.
Result<int> ListenerOfProcess(const Launcher& launcher);

/// How many contexts use MPI: it is finalised at exit only if as many have ended well as have
/// started.
void MpiContextStarted();
void MpiContextEnded();
void MpiContextFailed();

/// Around the time in which a thread that exit() does not wait for may be inside a library. If the
/// process ends then, it ends with its exit code, but without the destructors of libraries.
void UnwaitedThreadBegins();
void UnwaitedThreadEnds();

/// The process's GPUs. Loads the plug-in beside libfarandole.so (or config.cuda_plugin) on the
/// first call, which comes with the first tensor on a GPU; later calls give the same. Thread
/// safety: any thread.
/// @return Unavailable saying what is missing.
Result<std::shared_ptr<DeviceRuntime>> DevicesOfProcess(const Config& config);

}  // namespace farandole
