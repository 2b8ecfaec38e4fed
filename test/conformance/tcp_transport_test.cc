// The transports' conformance cases over TCP: ranks as threads that join by real sockets.
#include <gtest/gtest.h>

#include "test/conformance/transport_cases.h"
#include "test/support/tcp_ranks.h"

namespace farandole {
namespace {

struct Parameter {
  TransportCase test;
  int ranks;
  bool ipv6;
};

class TcpTransportConformance : public testing::TestWithParam<Parameter> {};

TEST_P(TcpTransportConformance, Holds) {
  const int ranks = GetParam().ranks;
  const LoopbackListener root(GetParam().ipv6);
  if (root.address.port() == 0) GTEST_SKIP() << "this host has no IPv6";
  const std::vector<Status> outcomes = OnThreads(ranks, [&](int rank) {
    TcpRank me;
    const Status joined = JoinTestJob(me, TestNetwork(rank, ranks, root));
    return joined.ok() ? GetParam().test.body(*me.transport) : joined;
  });
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_TRUE(outcomes[static_cast<size_t>(rank)].ok())
        << "rank " << rank << ": " << outcomes[static_cast<size_t>(rank)].ToString();
  }
}

std::vector<Parameter> Parameters() {
  std::vector<Parameter> parameters;
  for (const TransportCase& test : TransportCases()) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      for (const bool ipv6 : {false, true}) parameters.push_back({test, ranks, ipv6});
    }
  }
  return parameters;
}

INSTANTIATE_TEST_SUITE_P(Tcp, TcpTransportConformance, testing::ValuesIn(Parameters()),
                         [](const testing::TestParamInfo<Parameter>& one) {
                           return std::string(one.param.test.name) + "_" +
                                  std::to_string(one.param.ranks) + "Ranks" +
                                  (one.param.ipv6 ? "IPv6" : "IPv4");
                         });

}  // namespace
}  // namespace farandole
