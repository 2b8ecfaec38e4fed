// libfarandole_cuda.so on whatever machine this is: with a GPU, with a driver alone, with neither.
// Argument: its path.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"
#include "ops/device.h"

namespace farandole {
namespace {

std::string plugin_path;

Result<Backends> Load() {
  static const Services services{&SteadyClock(), &BestCpuKernels(), nullptr};
  return LoadPlugin({plugin_path, ""}, services);
}

class CudaPlugin : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<Backends> backends = Load();
    ASSERT_TRUE(backends.ok()) << backends.status().ToString();
    runtime_ = backends.value().device;
    ASSERT_NE(runtime_, nullptr);
  }
  std::shared_ptr<DeviceRuntime> runtime_;
};

TEST(CudaPluginEntry, RefusesAnotherBuildNamingBoth) {
  void* const handle = dlopen(plugin_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(handle, nullptr) << dlerror();
  const auto entry = reinterpret_cast<PluginEntry>(dlsym(handle, kPluginEntryName));
  ASSERT_NE(entry, nullptr);
  std::array<char, 512> error{};
  EXPECT_NE(entry("another build", nullptr, nullptr, error.data(), error.size()), 0);
  EXPECT_NE(std::string(error.data()).find("another build"), std::string::npos) << error.data();
  EXPECT_NE(std::string(error.data()).find(kBuildId), std::string::npos) << error.data();
}

TEST_F(CudaPlugin, NamesRuntimeAndDriver) {
  EXPECT_EQ(runtime_->version().find("CUDA runtime 1"), 0U) << runtime_->version();
  EXPECT_NE(runtime_->version().find("driver"), std::string::npos) << runtime_->version();
}

TEST_F(CudaPlugin, CountsDevicesOrSaysWhyItCannot) {
  const Result<int> count = runtime_->Count();
  if (count.ok()) {
    EXPECT_GE(count.value(), 0);
  } else {
    EXPECT_EQ(count.status().code(), Code::kUnavailable) << count.status().ToString();
    const bool says_why = count.status().message().find("NVIDIA driver") != std::string::npos ||
                          count.status().message().find("cudaGetDeviceCount") == 0;
    EXPECT_TRUE(says_why) << count.status().message();
  }
}

TEST_F(CudaPlugin, OpensNoDeviceThatIsNotThere) {
  const Result<int> count = runtime_->Count();
  for (const int index : {-1, count.ok() ? count.value() : 0}) {
    const Result<Device*> device = runtime_->Open(index);
    EXPECT_EQ(device.status().code(), count.ok() ? Code::kInvalidArgument : count.status().code())
        << device.status().ToString();
  }
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc > 1) farandole::plugin_path = argv[1];
  return RUN_ALL_TESTS();
}
