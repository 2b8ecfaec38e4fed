// Measures the MPI plug-in: the plane's allreduce against MPI_Allreduce in the same run, and the
// transport's ping-pong. Run as: mpirun -np 2 mpi_bench PLUGIN [MIB]
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"

namespace farandole {
namespace {

int64_t NowNs() { return SteadyClock().NowNs(); }

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

double Percentile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

void Reduce(DataPlane& plane, const Batch& batch) {
  Result<PlaneOperation*> operation = plane.Start(batch);
  Require(operation.status());
  for (;;) {
    const Progress progress = operation.value()->Step();
    if (progress.state == Progress::State::kDone) return;
    Require(progress.status);
  }
}

// Microseconds of each of `rounds` runs of `body`, ranks starting together.
template <class Body>
std::vector<double> Time(int rounds, Body body) {
  std::vector<double> us;
  for (int i = 0; i < rounds; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const int64_t begin = NowNs();
    body();
    us.push_back(static_cast<double>(NowNs() - begin) / 1e3);
  }
  return us;
}

void CompareAllreduce(DataPlane& plane, int rank, int size, int64_t bytes) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const int64_t count = bytes / 4;
  std::vector<float> mine(static_cast<size_t>(count), 0.0f);
  const Segment segment{mine.data(), mine.data(), count};
  Batch batch;
  batch.ranks = ranks;
  batch.my_index = rank;
  batch.segments = {&segment, 1};
  batch.count = count;
  const int rounds = bytes > (4 << 20) ? 30 : 500;
  std::vector<double> ours;
  std::vector<double> theirs;
  for (int repeat = 0; repeat < 3; ++repeat) {  // interleaved, so that both see the same machine
    for (double us : Time(rounds, [&] { Reduce(plane, batch); })) ours.push_back(us);
    for (double us : Time(rounds, [&] {
           MPI_Allreduce(MPI_IN_PLACE, mine.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                         MPI_COMM_WORLD);
         })) {
      theirs.push_back(us);
    }
  }
  if (rank != 0) return;
  std::printf("allreduce float32 %10lld bytes, %d ranks:", static_cast<long long>(bytes), size);
  for (const auto& [name, q] : {std::pair{"p50", 0.5}, std::pair{"best", 0.0}}) {
    const double mpi_us = Percentile(theirs, q);
    const double our_us = Percentile(ours, q);
    std::printf("  %s: plane %9.1f us, MPI_Allreduce %9.1f us, ratio %.2f", name, our_us, mpi_us,
                mpi_us / our_us);
  }
  std::printf("\n");
}

void AwaitMessage(Transport& transport) {
  for (;;) {
    Result<std::optional<Transport::Incoming>> polled = transport.Poll();
    Require(polled.status());
    if (polled.value()) return;
  }
}

void PingPong(Transport& transport) {
  const std::byte message[4] = {};
  std::vector<double> us;
  for (int i = 0; i < 5000 && transport.rank() < 2; ++i) {
    const int64_t begin = NowNs();
    if (transport.rank() == 0) Require(transport.Send(1, message));
    AwaitMessage(transport);
    if (transport.rank() == 1) Require(transport.Send(0, message));
    us.push_back(static_cast<double>(NowNs() - begin) / 2e3);
  }
  if (transport.rank() != 0) return;
  std::printf("transport ping-pong, 4 bytes, one way: p50 %.2f us, p99 %.2f us\n",
              Percentile(us, 0.5), Percentile(us, 0.99));
}

int Main(int argc, char** argv) {
  if (argc < 2) return 2;
  const Services services{&SteadyClock(), &BestCpuKernels(), nullptr};
  Result<Backends> backends = LoadPlugin({argv[1], ""}, services);
  if (!backends.ok()) std::fprintf(stderr, "%s\n", backends.status().ToString().c_str());
  if (!backends.ok()) return 1;
  MpiRuntime& mpi = *backends.value().mpi;
  Require(mpi.Init());
  if (mpi.rank() == 0)
    std::printf("%s, kernels %s\n", mpi.library_version().c_str(), services.kernels->name());
  auto transport = mpi.CreateTransport({});
  Require(transport.status());
  auto plane = mpi.CreatePlane({});
  Require(plane.status());
  std::vector<int> ranks(static_cast<size_t>(mpi.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  Require(plane.value()->AddSet(0, ranks, mpi.rank()));
  if (mpi.size() > 1) PingPong(*transport.value());
  std::vector<int64_t> sizes = {4, 4096, 16384, 65536, 262'144, 1 << 20, 4 << 20, 64 << 20};
  if (argc > 2) sizes = {std::atoll(argv[2]) << 20};
  for (const int64_t bytes : sizes) {
    CompareAllreduce(*plane.value(), mpi.rank(), mpi.size(), bytes);
  }
  plane.value().reset();
  transport.value().reset();
  Require(mpi.Finalize());
  return 0;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) { return farandole::Main(argc, argv); }
