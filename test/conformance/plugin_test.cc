// The border to plug-ins, seen from the library. Argument: the path of the MPI plug-in.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"

namespace farandole {
namespace {

std::string plugin_path;

const Services& TestServices() {
  static const Services services{&SteadyClock(), &BestCpuKernels(), nullptr};
  return services;
}

TEST(LoadPlugin, SaysWhyAMissingFileCannotBeLoaded) {
  const Status status = LoadPlugin({"/nowhere/libabsent.so", ""}, TestServices()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.message().find("/nowhere/libabsent.so"), std::string::npos);
  EXPECT_NE(status.message().find("No such file"), std::string::npos) << status.message();
}

TEST(LoadPlugin, NamesAMissingThirdPartyLibraryBeforeThePlugin) {
  const Status status = LoadPlugin({plugin_path, "/nowhere/libmpi.so.40"}, TestServices()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.message().find("/nowhere/libmpi.so.40"), std::string::npos);
}

TEST(LoadPlugin, RefusesALibraryWithoutTheEntry) {
  const Status status = LoadPlugin({"libm.so.6", ""}, TestServices()).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("no farandole plug-in"), std::string::npos);
}

TEST(LoadPlugin, FindsTheMpiBackend) {
  Result<Backends> backends = LoadPlugin({plugin_path, ""}, TestServices());
  ASSERT_TRUE(backends.ok()) << backends.status().ToString();
  ASSERT_NE(backends.value().mpi, nullptr);
  EXPECT_FALSE(backends.value().mpi->initialised());
}

TEST(LoadPlugin, MpiRefusesLinksBeforeInit) {
  Result<Backends> backends = LoadPlugin({plugin_path, ""}, TestServices());
  ASSERT_TRUE(backends.ok()) << backends.status().ToString();
  const Status status = backends.value().mpi->CreateTransport({}).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
}

TEST(PluginEntry, RefusesAnotherBuildNamingBoth) {
  void* const handle = dlopen(plugin_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(handle, nullptr) << dlerror();
  const auto entry = reinterpret_cast<PluginEntry>(dlsym(handle, kPluginEntryName));
  ASSERT_NE(entry, nullptr);
  std::array<char, 512> error{};
  EXPECT_NE(entry("another build", nullptr, nullptr, error.data(), error.size()), 0);
  const std::string text = error.data();
  EXPECT_NE(text.find("another build"), std::string::npos) << text;
  EXPECT_NE(text.find(kBuildId), std::string::npos) << text;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc > 1) farandole::plugin_path = argv[1];
  return RUN_ALL_TESTS();
}
