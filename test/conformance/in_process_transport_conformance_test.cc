// The transport's conformance cases with N ranks as threads.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/control/in_process.h"
#include "test/conformance/transport_cases.h"

namespace farandole {
namespace {

struct Parameter {
  TransportCase test;
  int ranks;
};

class InProcessConformance : public testing::TestWithParam<Parameter> {};

TEST_P(InProcessConformance, Holds) {
  const int ranks = GetParam().ranks;
  InProcessHub hub(ranks);
  std::vector<Status> outcomes(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<Transport> transport = hub.Create(rank, nullptr);
      outcomes[static_cast<size_t>(rank)] = GetParam().test.body(*transport);
    });
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
    for (const int ranks : {1, 2, 3, 4, 7}) parameters.push_back({test, ranks});
  }
  return parameters;
}

INSTANTIATE_TEST_SUITE_P(Transport, InProcessConformance, testing::ValuesIn(Parameters()),
                         [](const testing::TestParamInfo<Parameter>& one) {
                           return std::string(one.param.test.name) + "_" +
                                  std::to_string(one.param.ranks) + "Ranks";
                         });

}  // namespace
}  // namespace farandole
