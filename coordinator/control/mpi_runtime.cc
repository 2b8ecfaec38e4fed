// The process's MPI behind the interface that the library sees, and the entry of
// libfarandole_mpi.so, its only exported symbol.
#include <dlfcn.h>
#include <mpi.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <csignal>
#include <thread>

#include "coordinator/control/mpi_transport.h"
#include "core/plugin_entry.h"
#include "ops/p2p/mpi/link.h"

namespace farandole {
namespace {

const char* LevelName(int level) {
  if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
  if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
  if (level == MPI_THREAD_SERIALIZED) return "MPI_THREAD_SERIALIZED";
  return "MPI_THREAD_MULTIPLE";
}

// A peer's death breaks sockets inside MPI; by default that signal would kill this rank too.
// Anything but the default action is somebody's choice and stays.
void IgnoreSigpipeIfDefault() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) != 0) return;
  const bool is_default = (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
  if (is_default) std::signal(SIGPIPE, SIG_IGN);
}

class Runtime final : public MpiRuntime {
 public:
  /// `services` outlive it.
  explicit Runtime(const Services& services) : services_(services) {}

  // Asks MPI_Finalized first, because MPI_Initialized goes on saying yes after MPI_Finalize, and
  // such an MPI must not be adopted. initialised_ is set last, because the exit handler may ask for
  // it while another thread is still in here.
  Status Init() override {
    if (initialised_) return Status();
    int finalized = 0;
    int level = MPI_THREAD_SINGLE;
    MPI_Finalized(&finalized);
    if (finalized != 0) {
      return Aborted("MPI was finalised in this process and cannot be initialised again");
    }
    FARANDOLE_RETURN_IF_ERROR(StartOrAdopt(level));
    FARANDOLE_RETURN_IF_ERROR(CheckLevel(level));
    FARANDOLE_RETURN_IF_ERROR(FromMpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), {"MPI_Comm_rank"}));
    FARANDOLE_RETURN_IF_ERROR(FromMpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), {"MPI_Comm_size"}));
    IgnoreSigpipeIfDefault();
    initialised_ = true;
    return Status();
  }

  bool initialised() const override { return initialised_; }
  bool owns_mpi() const override { return owns_mpi_; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::string library_version() const override {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING + 1> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);
    std::string version = text.data();  // `length` counts the terminator in some versions
    version.resize(std::min(version.size(), version.find('\n')));
    // The file shows which libmpi was loaded where several are installed.
    Dl_info info{};
    const bool found = dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &info) != 0;
    return found && info.dli_fname != nullptr ? version + " (" + info.dli_fname + ")" : version;
  }

  const char* name() const override { return "mpi"; }

  // Transport and links have a communicator each, so that a receive of control messages never
  // takes a message of the data plane, nor one of the user's.
  Result<std::unique_ptr<Transport>> CreateTransport(const LinkOptions& options) override {
    Result<MPI_Comm> communicator = Duplicate(options.timeout_ns, "the control plane");
    if (!communicator.ok()) return communicator.status();
    return MakeMpiTransport(communicator.value(), *services_.clock);
  }

  Result<P2pLinkFactory> CreateLinks(const LinkOptions& options) override {
    Result<MPI_Comm> communicator = Duplicate(options.timeout_ns, "the data plane");
    if (!communicator.ok()) return communicator.status();
    return MakeMpiLinks(communicator.value(), options.memory);
  }

  Status Finalize() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!initialised_ || !owns_mpi_ || finalized != 0) return Status();
    // MPI wants the thread that initialised it. A process at its end may not have that one any
    // more; libraries that offer MPI_THREAD_MULTIPLE take any, and a launcher calls a missing end a
    // crash.
    return FromMpi(MPI_Finalize(), {"MPI_Finalize"});
  }

  // MPI_Abort is defined between MPI_Init and MPI_Finalize only; MPI answers the two questions at
  // any time.
  void Abort(int exit_code) override {
    int up = 0;
    int finalized = 0;
    MPI_Initialized(&up);
    MPI_Finalized(&finalized);
    if (up != 0 && finalized == 0) MPI_Abort(MPI_COMM_WORLD, exit_code);
  }

 private:
  // An MPI that is up belongs to whoever initialised it (mpi4py, say): its error handlers stay, and
  // it is not finalised here.
  Status StartOrAdopt(int& level) {
    int up = 0;
    MPI_Initialized(&up);
    if (up != 0) return FromMpi(MPI_Query_thread(&level), {"MPI_Query_thread"});
    const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    if (code != MPI_SUCCESS) return FromMpi(code, {"MPI_Init_thread"});
    owns_mpi_ = true;
    // An error outside any communicator of ours is charged to one of these two.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    return Status();
  }

  // Farandole's threads call MPI under the engine lock, one at a time, so SERIALIZED is enough for
  // them. Whether others in the process call MPI too is not known here: hence the warning.
  Status CheckLevel(int level) {
    if (level == MPI_THREAD_MULTIPLE) return Status();
    const std::string who = owns_mpi_ ? "this MPI library" : "MPI, initialised by somebody else,";
    if (level != MPI_THREAD_SERIALIZED) {
      return Unimplemented(who + " offers only " + LevelName(level) +
                           "; farandole calls MPI from its own thread and needs "
                           "MPI_THREAD_MULTIPLE (mpi4py: mpi4py.rc.thread_level = \"multiple\")");
    }
    if (services_.log != nullptr) {
      services_.log->Write(LogLevel::kWarning,
                           who +
                               " offers only MPI_THREAD_SERIALIZED: no other thread may call MPI "
                               "between farandole's init and shutdown");
    }
    return Status();
  }

  // A communicator that nobody else sends on, whose errors return. Not blocking, so that a rank
  // that never comes is noticed.
  Result<MPI_Comm> Duplicate(int64_t timeout_ns, const std::string& purpose) {
    if (!initialised_) return InvalidArgument("MPI is not initialised");
    // On the heap: when the deadline passes, MPI may still write to it one day.
    auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
    MPI_Request request = MPI_REQUEST_NULL;
    FARANDOLE_RETURN_IF_ERROR(
        FromMpi(MPI_Comm_idup(MPI_COMM_WORLD, copy.get(), &request), {"MPI_Comm_idup"}));
    const int64_t deadline_ns = services_.clock->NowNs() + timeout_ns;
    for (int done = 0; done == 0; sched_yield()) {
      FARANDOLE_RETURN_IF_ERROR(
          FromMpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), {"MPI_Comm_idup"}));
      if (done == 0 && services_.clock->NowNs() > deadline_ns) {
        // MPI has no way to cancel a collective that has begun (MPI_Cancel is for point to point).
        (void)copy.release();  // given up
        return Timeout("start of " + purpose + ": not all " + std::to_string(size_) +
                       " ranks have called init() in time (FARANDOLE_INIT_TIMEOUT_S)");
      }
    }
    FARANDOLE_RETURN_IF_ERROR(
        FromMpi(MPI_Comm_set_errhandler(*copy, MPI_ERRORS_RETURN), {"MPI_Comm_set_errhandler"}));
    return *copy;
  }

  const Services services_;
  // Of these two the exit handler asks while another thread may still be in Init.
  std::atomic<bool> initialised_{false};
  std::atomic<bool> owns_mpi_{false};
  // In MPI_COMM_WORLD, from Init on.
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace
}  // namespace farandole

FARANDOLE_PLUGIN_ENTRY {
  return farandole::EnterPlugin(build_id, error, error_size, [&] {
    backends->mpi = std::make_unique<farandole::Runtime>(*services);
  });
}
