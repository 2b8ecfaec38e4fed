// MPI that somebody else initialised (mpi4py) is used but not taken over:
// mpirun -np 2 mpi_adoption PLUGIN multiple|serialized|funneled|late. Exits 1 and says what is
// wrong. "late": rank 1 comes to the set-up of a link only after rank 0 has given up.
#include <mpi.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"

namespace farandole {
namespace {

class WarningCounter final : public Log {
 public:
  bool Enabled(LogLevel) const override { return true; }
  void Write(LogLevel level, std::string_view) override { warnings += level == LogLevel::kWarning; }
  int warnings = 0;
};

int LevelOf(const char* name) {
  if (std::strcmp(name, "multiple") == 0 || std::strcmp(name, "late") == 0)
    return MPI_THREAD_MULTIPLE;
  return std::strcmp(name, "serialized") == 0 ? MPI_THREAD_SERIALIZED : MPI_THREAD_FUNNELED;
}

bool IsFatalOnWorld() {
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  const bool fatal = handler == MPI_ERRORS_ARE_FATAL;
  MPI_Errhandler_free(&handler);
  return fatal;
}

std::string CheckAdopted(MpiRuntime& mpi, const WarningCounter& log, int level) {
  if (mpi.owns_mpi()) return "it claims to have started MPI";
  if (log.warnings != (level == MPI_THREAD_SERIALIZED ? 1 : 0)) return "wrong number of warnings";
  if (!IsFatalOnWorld()) return "the error handler of MPI_COMM_WORLD was changed";
  struct sigaction action {};
  sigaction(SIGPIPE, nullptr, &action);
  if (action.sa_handler != SIG_IGN) return "SIGPIPE would still kill this rank";
  if (Status s = mpi.CreateTransport({}).status(); !s.ok()) return s.ToString();
  if (Status s = mpi.Finalize(); !s.ok()) return s.ToString();
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized == 0 ? "" : "it finalised somebody else's MPI";
}

std::string CheckLatePeer(MpiRuntime& mpi) {
  char gave_up = 0;
  LinkOptions options;
  options.timeout_ns = 100 * kNsPerMs;
  if (mpi.rank() == 1) {
    MPI_Recv(&gave_up, 1, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    (void)mpi.CreateTransport(options);  // so that MPI can be finalised; either outcome will do
    return "";
  }
  const int64_t begin_ns = SteadyClock().NowNs();
  const Status status = mpi.CreateTransport(options).status();
  const int64_t took_ns = SteadyClock().NowNs() - begin_ns;
  MPI_Send(&gave_up, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
  if (status.code() != Code::kTimeout) return "no time-out but " + status.ToString();
  return took_ns < 1100 * kNsPerMs ? "" : "more than a second after the deadline";
}

std::string Check(const char* plugin, int level, bool late) {
  WarningCounter log;
  const Services services{&SteadyClock(), &BestCpuKernels(), &log};
  Result<Backends> backends = LoadPlugin({plugin, ""}, services);
  if (!backends.ok()) return backends.status().ToString();
  MpiRuntime& mpi = *backends.value().mpi;
  const Status status = mpi.Init();
  if (late) return status.ok() ? CheckLatePeer(mpi) : status.ToString();
  if (level != MPI_THREAD_FUNNELED) {
    return status.ok() ? CheckAdopted(mpi, log, level) : status.ToString();
  }
  const bool named = status.message().find("MPI_THREAD_FUNNELED") != std::string::npos;
  return status.code() == Code::kUnimplemented && named ? "" : "not refused: " + status.ToString();
}

int Main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int level = LevelOf(argv[2]);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, level, &provided);
  std::signal(SIGPIPE, SIG_DFL);  // whatever MPI itself made of it
  std::string wrong = Check(argv[1], level, std::strcmp(argv[2], "late") == 0);
  if (provided != level) wrong = "this MPI does not offer the level that the test needs";
  if (!wrong.empty()) std::printf("FAILED: %s\n", wrong.c_str());
  MPI_Finalize();
  return wrong.empty() ? 0 : 1;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) { return farandole::Main(argc, argv); }
