// The transports' conformance cases with N ranks as threads.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "coordinator/control/host_transport.h"
#include "coordinator/control/in_process.h"
#include "coordinator/control/rendezvous.h"
#include "coordinator/control/share_memory.h"
#include "coordinator/liveness/peer_watch.h"
#include "coordinator/liveness/table.h"
#include "core/clock.h"
#include "test/conformance/transport_cases.h"

namespace farandole {
namespace {

/// 0 hosts: ranks of one process. Otherwise each rank maps the memory of its host for itself, as
/// processes do, and what it has to say to other hosts goes the first way.
struct Parameter {
  TransportCase test;
  int ranks;
  int hosts;
};

class TransportConformance : public testing::TestWithParam<Parameter> {
 protected:
  /// What one rank does.
  Status Run(InProcessHub& hub, int rank) {
    std::unique_ptr<Transport> transport = hub.Create(rank, nullptr);
    FutexDoorbell bell;
    LivenessTable liveness;
    PeerWatch peers(liveness);
    const auto watch = [&](int peer, pid_t pid) { (void)peers.Add(peer, pid); };
    HostGroup shared;
    if (GetParam().hosts > 0) {
      std::vector<int> host;
      for (int r = 0; r < GetParam().ranks; ++r) host.push_back(r % GetParam().hosts);
      shared = ShareMemory(*transport, host, bell, watch, 60 * kNsPerSecond).value();
      if (!shared.failure.empty()) return Internal(shared.failure);
      if (shared.memory != nullptr) {
        transport = MakeHostTransport(std::move(transport), shared.memory, &liveness);
        transport->SetNeighbours(Neighbours(MakeTree(host), rank));
      }
    }
    return GetParam().test.body(*transport);
  }
};

TEST_P(TransportConformance, Holds) {
  const int ranks = GetParam().ranks;
  InProcessHub hub(ranks);
  std::vector<Status> outcomes(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { outcomes[static_cast<size_t>(rank)] = Run(hub, rank); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_TRUE(outcomes[static_cast<size_t>(rank)].ok())
        << "rank " << rank << ": " << outcomes[static_cast<size_t>(rank)].ToString();
  }
}

std::vector<Parameter> Parameters() {
  std::vector<Parameter> parameters;
  for (const TransportCase& test : TransportCases()) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      parameters.push_back({test, ranks, 0});
      if (ranks > 1) parameters.push_back({test, ranks, 1});
    }
    parameters.push_back({test, 7, 2});
  }
  return parameters;
}

INSTANTIATE_TEST_SUITE_P(Transport, TransportConformance, testing::ValuesIn(Parameters()),
                         [](const testing::TestParamInfo<Parameter>& one) {
                           const int hosts = one.param.hosts;
                           return std::string(one.param.test.name) + "_" +
                                  std::to_string(one.param.ranks) + "Ranks" +
                                  (hosts > 0 ? "On" + std::to_string(hosts) + "Hosts" : "");
                         });

}  // namespace
}  // namespace farandole
