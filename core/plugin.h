// The border between libfarandole and a backend library found at run time: one entry, pure
// interfaces.
//
// A plug-in is compiled against the headers alone and needs no symbol of libfarandole: what it uses
// comes in through Services, what it offers goes out through Backends. So one build serves machines
// with and without MPI, no internal symbol is exported, and nothing exists twice. Plug-ins are
// never unloaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/clock.h"
#include "core/log.h"
#include "core/network.h"
#include "core/status.h"
#include "core/transport.h"

/// The build sets one text for all libraries of a build (version and revision).
#ifndef FARANDOLE_BUILD_ID
#define FARANDOLE_BUILD_ID "unversioned"
#endif

namespace farandole {

class CpuKernels;     // ops/cpu/kernels.h
class DeviceRuntime;  // ops/device.h

/// Equal in two libraries only if they may exchange C++ objects: the build, the compiler and its
/// std::string.
inline constexpr char kBuildId[] = FARANDOLE_BUILD_ID " (gcc " __VERSION__ ")";

/// Services of the library for a plug-in. Thread safety: every member may be used from any thread.
/// Lifetime: outlives every object the plug-in made.
struct Services {
  const Clock* clock = nullptr;
  const CpuKernels* kernels = nullptr;
  Log* log = nullptr;  ///< May be nullptr.
};

/// The process's MPI. One per process; engines come and go, MPI can be initialised once.
///
/// What it creates has a communicator of its own.
///
/// Thread safety: Init, Create and Finalize one after the other, from any thread
/// (docs/decisions.md); initialised and owns_mpi at any time. Lifetime: until process exit;
/// transports and links must be gone before Finalize.
class MpiRuntime : public Network {
 public:
  /// Initialises MPI on the calling thread with MPI_THREAD_MULTIPLE, or adopts one that is
  /// initialised already (mpi4py), which is then never finalised by us nor are the error handlers
  /// of its predefined communicators changed. SERIALIZED is accepted with a warning, less is
  /// refused. Sets SIGPIPE to "ignore" where it has the default action (Open MPI's tcp BTL would
  /// kill a healthy survivor). A second call is OK and does nothing. MPI_Init itself has no
  /// deadline: MPI offers none, and some wait in it until every rank has come. So call it on a
  /// thread that can be left behind.
  /// @return Unimplemented for too low a thread level, Aborted if MPI was finalised before,
  ///         Internal with the library's text.
  virtual Status Init() = 0;
  virtual bool initialised() const = 0;
  /// True if Init started MPI, false if it was adopted.
  virtual bool owns_mpi() const = 0;
  /// In MPI_COMM_WORLD; 0 and 1 before Init. The caller compares size() with what its launcher
  /// announced: a foreign libmpi says 1 there.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// First line of MPI_Get_library_version, and the file it was loaded from.
  virtual std::string library_version() const = 0;

  /// MPI_Finalize if we own MPI; call it at process exit, and only if all ranks announced shutdown:
  /// it waits for all of them. Does nothing if MPI was adopted, is finalised, or if Init has not
  /// returned.
  virtual Status Finalize() = 0;
  /// Ends the job: MPI_Abort with `exit_code`. Does not return if MPI is up.
  virtual void Abort(int exit_code) = 0;
};

/// What a plug-in offers; members it does not have stay empty.
struct Backends {
  std::unique_ptr<MpiRuntime> mpi;
  std::shared_ptr<DeviceRuntime> device;
};

/// The one exported symbol of a plug-in, "farandole_plugin". Nothing but C types is touched before
/// `build_id` is found equal to the plug-in's own kBuildId, because layouts may differ until then.
/// Throws nothing. @return 0, or another number with an error message in `error` (cut at
/// `error_size`).
using PluginEntry = int (*)(const char* build_id, const Services* services, Backends* backends,
                            char* error, std::size_t error_size);
inline constexpr char kPluginEntryName[] = "farandole_plugin";

}  // namespace farandole
