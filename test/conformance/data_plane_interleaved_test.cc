// The contract of `class DataPlane` when one thread steps all ranks in a random order.
#include <gtest/gtest.h>

#include "test/conformance/data_plane_backends.h"
#include "test/conformance/data_plane_harness.h"

namespace farandole {
namespace {

constexpr uint64_t kSeed = 42;

class InterleavedDataPlaneTest : public ::testing::TestWithParam<PlaneParam> {};

TEST_P(InterleavedDataPlaneTest, GivesTheSameWhateverTheOrderOfSteps) {
  for (const auto make : {ShapeCases, BroadcastCases, ReducescatterCases, AllgatherCases,
                          AlltoallCases, AdasumCases, SlotCases}) {
    PlaneGroup group = GetParam().backend.make(GetParam().ranks);
    const std::vector<PlaneCase> cases = OnHosts(make(GetParam().ranks), group.hosts);
    EXPECT_EQ(RunInterleaved(group, cases, kSeed), "") << "seed " << kSeed;
  }
}

/// Steps are taken by hand, so what differs between memory on the heap and mapped memory, and from
/// four ranks to seven, does not matter here. Sockets take their own time, which steps do not
/// count.
std::vector<PlaneParam> Backends() {
  std::vector<PlaneParam> params = BackendsInOneProcess();
  std::erase_if(params, [](const PlaneParam& param) {
    return param.ranks > 4 || param.backend.name.starts_with("HostMemory") ||
           param.backend.name.starts_with("Tcp");
  });
  return params;
}

INSTANTIATE_TEST_SUITE_P(Backends, InterleavedDataPlaneTest, ::testing::ValuesIn(Backends()),
                         [](const auto& test) { return test.param.Name(); });

}  // namespace
}  // namespace farandole
