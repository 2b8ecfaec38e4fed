// Measures the MPI plug-in: the plane's collectives against MPI's own in the same run, and the
// transport's ping-pong and its polls. Run as: mpirun -np 2 mpi_bench PLUGIN [BYTES ...]; 0: only
// the transport.
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

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
#include "ops/p2p/plane.h"

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

void Run(DataPlane& plane, const Batch& batch) {
  Result<PlaneOperation*> operation = plane.Start(batch);
  Require(operation.status());
  for (;;) {
    const Progress progress = operation.value()->Step();
    if (progress.state == Progress::State::kDone) return;
    Require(progress.status);
  }
}

// Microseconds of each of `rounds` runs of `body` on the slowest rank, ranks starting together.
// Only rank 0 gets them.
template <class Body>
std::vector<double> Time(int rounds, Body body) {
  std::vector<double> us;
  for (int i = 0; i < rounds; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const int64_t begin = NowNs();
    body();
    us.push_back(static_cast<double>(NowNs() - begin) / 1e3);
  }
  std::vector<double> slowest(us.size());
  MPI_Reduce(us.data(), slowest.data(), rounds, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  return slowest;
}

/// One collective of float32 over all ranks, as the plane and as MPI run it. `bytes` are what each
/// rank puts in, cut evenly.
class Contest {
 public:
  Contest(OpKind kind, int rank, int size, int64_t bytes)
      : kind_(kind), ranks_(static_cast<size_t>(size)), count_(bytes / 4) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
    const bool gathers = kind == OpKind::kAllgather;
    const int64_t part = gathers ? count_ : count_ / size;
    parts_.assign(ranks_.size(), part);
    for (int i = 0; i < size; ++i) {
      counts_.push_back(static_cast<int>(part));
      places_.push_back(static_cast<int>(i * part));
    }
    in_.assign(static_cast<size_t>(count_), 0.0f);
    out_.assign(static_cast<size_t>(gathers ? count_ * size : count_), 0.0f);
    const bool in_place = kind == OpKind::kAllreduce;
    segment_ = {in_.data(), in_place ? in_.data() : out_.data(), gathers ? count_ * size : count_};
    if (kind == OpKind::kAlltoall) segment_.count = part;
    batch_.kind = kind;
    batch_.ranks = ranks_;
    batch_.my_index = rank;
    batch_.segments = {&segment_, 1};
    batch_.count = segment_.count;
    batch_.splits = batch_.sends = batch_.receives = parts_;
  }
  Contest(const Contest&) = delete;
  Contest& operator=(const Contest&) = delete;

  void Ours(DataPlane& plane) { Run(plane, batch_); }
  void Theirs() {
    const MPI_Comm world = MPI_COMM_WORLD;
    const int count = static_cast<int>(count_);
    if (kind_ == OpKind::kAllreduce) {
      MPI_Allreduce(MPI_IN_PLACE, in_.data(), count, MPI_FLOAT, MPI_SUM, world);
    } else if (kind_ == OpKind::kAllgather) {
      MPI_Allgatherv(in_.data(), count, MPI_FLOAT, out_.data(), counts_.data(), places_.data(),
                     MPI_FLOAT, world);
    } else if (kind_ == OpKind::kReducescatter) {
      MPI_Reduce_scatter(in_.data(), out_.data(), counts_.data(), MPI_FLOAT, MPI_SUM, world);
    } else {
      MPI_Alltoallv(in_.data(), counts_.data(), places_.data(), MPI_FLOAT, out_.data(),
                    counts_.data(), places_.data(), MPI_FLOAT, world);
    }
  }

 private:
  const OpKind kind_;
  std::vector<int> ranks_;
  const int64_t count_;
  std::vector<int64_t> parts_;
  std::vector<int> counts_;  // the same for MPI
  std::vector<int> places_;
  std::vector<float> in_;
  std::vector<float> out_;
  Segment segment_;
  Batch batch_;
};

void Compare(DataPlane& plane, const Counters& counters, OpKind kind, int rank, int size,
             int64_t bytes) {
  Contest contest(kind, rank, size, bytes);
  const int rounds = bytes > (4 << 20) ? 30 : std::max(50, 1000 / size);
  const int64_t messages_before = counters.Get(Counter::kBulkMessagesSent);
  std::vector<double> ours;
  std::vector<double> theirs;
  for (int repeat = 0; repeat < 3; ++repeat) {  // interleaved, so that both see the same machine
    for (double us : Time(rounds, [&] { contest.Ours(plane); })) ours.push_back(us);
    for (double us : Time(rounds, [&] { contest.Theirs(); })) theirs.push_back(us);
  }
  if (rank != 0) return;
  const int64_t messages = counters.Get(Counter::kBulkMessagesSent) - messages_before;
  std::printf("%-13s float32 %10lld bytes, %d ranks, %lld messages of rank 0:",
              std::string(Name(kind)).c_str(), static_cast<long long>(bytes), size,
              static_cast<long long>(messages / (3 * rounds)));
  for (const auto& [name, q] : {std::pair{"p50", 0.5}, std::pair{"best", 0.0}}) {
    const double mpi_us = Percentile(theirs, q);
    const double our_us = Percentile(ours, q);
    std::printf("  %s: plane %9.1f us, MPI %9.1f us, ratio %.2f", name, our_us, mpi_us,
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

// Rank 0's, while the other ranks sleep: the least of 200 times a thousand polls.
void EmptyPolls(Transport& transport) {
  MPI_Request all_done = MPI_REQUEST_NULL;
  double best_ns = 1e9;
  for (int repeat = 0; repeat < 200 && transport.rank() == 0; ++repeat) {
    const int64_t begin = NowNs();
    for (int i = 0; i < 1000; ++i) Require(transport.Poll().status());
    best_ns = std::min(best_ns, static_cast<double>(NowNs() - begin) / 1e3);
  }
  MPI_Ibarrier(MPI_COMM_WORLD, &all_done);
  for (int done = 0; done == 0; usleep(10'000)) MPI_Test(&all_done, &done, MPI_STATUS_IGNORE);
  if (transport.rank() == 0)
    std::printf("transport, a poll that finds nothing: %.0f ns\n", best_ns);
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
  Counters counters;
  auto plane = CreateP2pPlane(mpi, {nullptr, nullptr, &counters}, *services.kernels);
  Require(plane.status());
  std::vector<int> ranks(static_cast<size_t>(mpi.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  Require(plane.value()->AddSet(0, ranks, mpi.rank()));
  // Ranks 0 and 1 are neighbours, and rank 0 has as many as in a tree of hosts.
  const int known = std::min(mpi.size(), 9);
  std::vector<int> neighbours;
  if (mpi.rank() == 0) neighbours.assign(ranks.begin() + 1, ranks.begin() + known);
  if (mpi.rank() > 0 && mpi.rank() < known) neighbours = {0};
  transport.value()->SetNeighbours(neighbours);
  if (mpi.size() > 1) PingPong(*transport.value());
  EmptyPolls(*transport.value());
  std::vector<int64_t> sizes;
  for (int i = 2; i < argc; ++i) {
    if (std::atoll(argv[i]) > 0) sizes.push_back(std::atoll(argv[i]));
  }
  if (argc <= 2) {
    sizes = {4, 256, 1024, 4096, 16384, 65536, 262'144, 1 << 20, 4 << 20, 64 << 20};
  }
  for (const OpKind kind :
       {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    if (argc <= 2 && kind != OpKind::kAllreduce) sizes = {1024, 1 << 20, 64 << 20};
    for (const int64_t bytes : sizes) {
      Compare(*plane.value(), counters, kind, mpi.rank(), mpi.size(), bytes);
    }
  }
  plane.value().reset();
  transport.value().reset();
  Require(mpi.Finalize());
  return 0;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) { return farandole::Main(argc, argv); }
