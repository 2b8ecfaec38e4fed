// libfarandole_cuda.so as built where nvcc was not found. Argument: its path.
#include <gtest/gtest.h>

#include <string>

#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"

namespace farandole {
namespace {

std::string plugin_path;

TEST(CudaPluginStub, SaysWhatToInstall) {
  static const Services services{&SteadyClock(), &BestCpuKernels(), nullptr};
  const Status status = LoadPlugin({plugin_path, ""}, services).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("built without CUDA; install the CUDA toolkit"),
            std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc > 1) farandole::plugin_path = argv[1];
  return RUN_ALL_TESTS();
}
