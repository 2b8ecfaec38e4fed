#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/gpu/nccl/library.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;

TEST(NcclFiles, NamesWheelsThenCondaThenToolkitThenTheLoader) {
  const std::vector<std::string> mapped = {
      "/env/lib/python3.11/site-packages/numpy/core/x.so",
      "/lib/x86_64-linux-gnu/libc.so.6",
      "/env/lib/python3.11/site-packages/farandole/libfarandole.so",
      "/usr/lib/python3/dist-packages/y.so",
  };
  EXPECT_THAT(NcclFiles("/env/lib/python3.11/site-packages/farandole", mapped),
              ElementsAre("/env/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
                          "/usr/lib/python3/dist-packages/nvidia/nccl/lib/libnccl.so.2",
                          "/env/lib/libnccl.so.2", "/usr/lib/libnccl.so.2",
                          "/usr/local/cuda/lib64/libnccl.so.2", "libnccl.so.2"));
}

TEST(NcclFiles, LooksBesideAPackageThatIsInstalledElsewhere) {
  EXPECT_THAT(NcclFiles("/target/farandole", {}),
              ElementsAre("/target/nvidia/nccl/lib/libnccl.so.2",
                          "/usr/local/cuda/lib64/libnccl.so.2", "libnccl.so.2"));
}

}  // namespace
}  // namespace farandole
