// Ranks of a job over TCP that are threads of a test, over real sockets on loopback.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/control/tcp_network.h"
#include "coordinator/liveness/table.h"
#include "core/clock.h"
#include "core/doorbell.h"
#include "core/net/address.h"

namespace farandole {

/// A socket that listens on loopback at a port of the kernel's choice, and its address.
struct LoopbackListener {
  explicit LoopbackListener(bool ipv6 = false) {
    sockaddr_storage storage{};
    storage.ss_family = ipv6 ? AF_INET6 : AF_INET;
    if (ipv6) {
      reinterpret_cast<sockaddr_in6&>(storage).sin6_addr = in6addr_loopback;
    } else {
      reinterpret_cast<sockaddr_in&>(storage).sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    }
    const SocketAddress any(storage);
    descriptor = socket(any.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(descriptor, any.data(), any.size()) != 0 || listen(descriptor, 4096) != 0) return;
    socklen_t size = sizeof storage;
    (void)getsockname(descriptor, reinterpret_cast<sockaddr*>(&storage), &size);
    address = SocketAddress(storage);
  }
  int descriptor = -1;
  SocketAddress address;
};

/// What a rank of a test job has.
struct TcpRank {
  FutexDoorbell doorbell;
  LivenessTable liveness{&doorbell};
  std::unique_ptr<Network> network;
  std::unique_ptr<Transport> transport;
};

inline TcpNetworkOptions TestNetwork(int rank, int size, const LoopbackListener& root) {
  TcpNetworkOptions options;
  options.rank = rank;
  options.size = size;
  options.address = root.address.ToString();
  options.listen_descriptor = rank == 0 ? root.descriptor : -1;
  options.key = std::string(32, 'k');
  options.clock = &SteadyClock();
  return options;
}

inline Status JoinTestJob(TcpRank& rank, TcpNetworkOptions options,
                          int64_t timeout_ns = 120 * kNsPerSecond) {
  Result<std::unique_ptr<Network>> network = MakeTcpNetwork(std::move(options));
  if (!network.ok()) return network.status();
  rank.network = std::move(network.value());
  Result<std::unique_ptr<Transport>> transport = rank.network->CreateTransport(
      {.doorbell = &rank.doorbell, .liveness = &rank.liveness, .timeout_ns = timeout_ns});
  if (!transport.ok()) return transport.status();
  rank.transport = std::move(transport.value());
  return Status();
}

/// Runs `body` on a thread for each of `size` ranks. @return what each of them returned.
inline std::vector<Status> OnThreads(int size, const std::function<Status(int rank)>& body) {
  std::vector<Status> outcomes(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { outcomes[static_cast<size_t>(rank)] = body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

}  // namespace farandole
