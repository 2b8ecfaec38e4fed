// The contract of AdasumAllreduce (ops/cpu/adasum.h) over every plane that it is run on.
#include <gtest/gtest.h>

#include "test/conformance/data_plane_backends.h"
#include "test/conformance/data_plane_harness.h"

namespace farandole {
namespace {

class AdasumTest : public ::testing::TestWithParam<PlaneParam> {};

TEST_P(AdasumTest, CombinesEveryTensorAsTheFormulaSays) {
  PlaneGroup group = GetParam().backend.make(GetParam().ranks);
  EXPECT_EQ(RunThreaded(group, AdasumCases(GetParam().ranks)), "");
}

INSTANTIATE_TEST_SUITE_P(Planes, AdasumTest, ::testing::ValuesIn(BackendsInOneProcess()),
                         [](const auto& test) { return test.param.Name(); });

}  // namespace
}  // namespace farandole
