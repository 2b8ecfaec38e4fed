// Measures the plane over TCP between two processes against the sockets themselves in the same run:
// allreduce against what ping-pongs and streams both ways take for the bytes that it has to send.
// Run as: tcp_bench 0 ADDRESS PORT [BYTES ...] and tcp_bench 1 ADDRESS PORT [BYTES ...], on one
// host or two; rank 0 listens at the IPv4 address.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/clock.h"
#include "ops/cpu/kernels.h"
#include "ops/p2p/plane.h"
#include "ops/p2p/tcp/link.h"

namespace farandole {
namespace {

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

void Require(const Status& status) {
  if (!status.ok()) Die(status.ToString());
}

/// Rank 1 tries until rank 0 listens.
int Connect(int rank, const char* host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, host, &address.sin_addr) != 1) Die("not an IPv4 address");
  const auto* const any = reinterpret_cast<const sockaddr*>(&address);
  const int on = 1;
  int connected = -1;
  if (rank == 0) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    (void)setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, any, sizeof address) != 0 || listen(listener, 1) != 0) Die("cannot listen");
    connected = accept(listener, nullptr, nullptr);
    close(listener);
  }
  for (int tries = 0; rank == 1 && connected < 0; ++tries) {
    const int attempt = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(attempt, any, sizeof address) == 0) connected = attempt;
    if (connected < 0) close(attempt);
    if (tries == 100) Die("nobody listens");
    if (connected < 0) usleep(50'000);
  }
  (void)setsockopt(connected, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  (void)fcntl(connected, F_SETFL, O_NONBLOCK);
  return connected;
}

/// The one socket there is; nothing rings, since the bench polls.
class OneStream final : public DataStreams {
 public:
  OneStream(int rank, int socket) : rank_(rank), socket_(socket) {}
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  int streams() const override { return 1; }
  Result<std::optional<int>> Take(const StreamId&) override { return std::optional(socket_); }
  Status Watch(int, bool) override { return Status(); }
  void Unwatch(int) override {}

 private:
  const int rank_;
  const int socket_;
};

int64_t Moved(ssize_t result) {
  if (result == 0 || (result < 0 && errno != EAGAIN)) Die("the connection is lost");
  return std::max<int64_t>(result, 0);
}

/// Both ends send and receive `bytes` at once; with few bytes that is what one round takes.
void Raw(int socket, std::vector<std::byte>& memory, int64_t bytes) {
  int64_t sent = 0;
  int64_t received = 0;
  while (sent < bytes || received < bytes) {
    // Parts of a length that the plane sends, too.
    constexpr int64_t kPart = 128 * 1024;
    const auto part = [&](int64_t done) {
      return static_cast<size_t>(std::min(kPart, bytes - done));
    };
    if (sent < bytes) sent += Moved(send(socket, memory.data(), part(sent), MSG_NOSIGNAL));
    if (received < bytes) received += Moved(recv(socket, memory.data(), part(received), 0));
  }
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

template <class Body>
double MicrosecondsOf(Body body) {
  const int64_t begin = SteadyClock().NowNs();
  body();
  return static_cast<double>(SteadyClock().NowNs() - begin) / 1e3;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// In turn, so that both see the same machine: each begins when both ranks have ended the other.
void Compare(DataPlane& plane, int rank, int raw, int64_t bytes) {
  const int ranks[] = {0, 1};
  std::vector<float> values(static_cast<size_t>(bytes / 4), 1.0f);
  std::vector<std::byte> memory(static_cast<size_t>(bytes));
  const Segment segment{values.data(), values.data(), bytes / 4};
  Batch batch;
  batch.ranks = ranks;
  batch.my_index = rank;
  batch.segments = {&segment, 1};
  batch.count = segment.count;
  const int rounds = bytes > (1 << 20) ? 12 : 2000;
  std::vector<double> ours;
  std::vector<double> theirs;
  for (int i = 0; i < rounds; ++i) {
    std::ranges::fill(values, 1.0f);
    Raw(raw, memory, 1);
    theirs.push_back(MicrosecondsOf([&] { Raw(raw, memory, bytes); }));
    Raw(raw, memory, 1);
    ours.push_back(MicrosecondsOf([&] { Run(plane, batch); }));
  }
  if (rank != 0) return;
  std::printf("%10lld bytes: plane %10.1f us, sockets %10.1f us, ratio %.2f; best %.1f and %.1f\n",
              static_cast<long long>(bytes), Median(ours), Median(theirs),
              Median(ours) / Median(theirs), *std::ranges::min_element(ours),
              *std::ranges::min_element(theirs));
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  if (argc < 4) return 2;
  const int rank = std::atoi(argv[1]);
  const int port = std::atoi(argv[3]);
  const int raw = Connect(rank, argv[2], port);
  OneStream streams(rank, Connect(rank, argv[2], port + 1));
  {
    const auto plane = MakeP2pPlane("tcp", MakeTcpLinks(streams, 0, {}), BestCpuKernels(), nullptr);
    const int ranks[] = {0, 1};
    Require(plane->AddSet(0, ranks, rank));
    std::vector<int64_t> sizes;
    for (int i = 4; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
    if (sizes.empty()) sizes = {4, 4096, 65'536, 1 << 20, 64 << 20};
    for (const int64_t bytes : sizes) Compare(*plane, rank, raw, bytes);
    std::vector<std::byte> last(1);
    Raw(raw, last, 1);  // both have ended
  }
  close(raw);
  return 0;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) { return farandole::Main(argc, argv); }
