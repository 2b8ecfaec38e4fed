#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "core/clock.h"
#include "core/plugin_loader.h"
#include "ops/device.h"
#include "test/fakes/fake_cuda.h"

namespace farandole {
namespace {

template <class Function>
Function InPlugin(const char* name) {
  void* library = dlopen(FARANDOLE_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}
#define FARANDOLE_IN_PLUGIN(function) InPlugin<decltype(&function)>(#function)

TEST(FakeCudaPluginTest, GivesTheEngineTheDevicesWhoseStreamsItsCFunctionsMake) {
  const Services services;
  Result<Backends> loaded = LoadPlugin({FARANDOLE_FAKE_CUDA, ""}, services);
  ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
  const std::shared_ptr<DeviceRuntime> runtime = loaded.value().device;
  ASSERT_NE(runtime, nullptr);
  EXPECT_NE(runtime->version().find("fake"), std::string::npos);
  EXPECT_EQ(runtime->Count().value(), 8);
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_devices_opened)(), 0);
  Device* device = runtime->Open(3).value();
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_devices_opened)(), 1);

  void* producer = FARANDOLE_IN_PLUGIN(farandole_fake_stream_create)(3);
  ASSERT_NE(producer, nullptr);
  const float seven = 7.0f;
  float from = 0.0f, to = 0.0f, seen = 0.0f;
  FARANDOLE_IN_PLUGIN(farandole_fake_stream_hold)(3, producer);
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_stream_write)(3, producer, &from, &seven,
                                                             sizeof from, 100),
            0);
  const auto ready = device->CreateEvent().value();
  const StreamHandle stream = device->CreateStream().value();
  ASSERT_TRUE(ready->Record(producer).ok());
  ASSERT_TRUE(ready->MakeWait(stream).ok());
  ASSERT_TRUE(device->Copy(&to, &from, sizeof to, stream).ok());
  EXPECT_FALSE(ready->IsComplete().value());
  FARANDOLE_IN_PLUGIN(farandole_fake_stream_release)(3, producer);
  FARANDOLE_IN_PLUGIN(farandole_fake_stream_copy)(3, stream, &seen, &to, sizeof to);
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_stream_synchronize)(3, stream), 0);
  EXPECT_EQ(seen, 7.0f);
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_device_count)(3, "copies"), 1);
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_device_count)(3, "no such"), -1);
  device->DestroyStream(stream);
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_stream_destroy)(3, producer), 0);
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_stream_destroy)(3, producer), 1);
  EXPECT_EQ(FARANDOLE_IN_PLUGIN(farandole_fake_stream_create)(8), nullptr);
  FARANDOLE_IN_PLUGIN(farandole_fake_cuda_end)();
}

TEST(FakeCudaPluginTest, RefusesAnotherBuild) {
  const auto entry = InPlugin<PluginEntry>(kPluginEntryName);
  ASSERT_NE(entry, nullptr);
  char error[200] = "";
  EXPECT_NE(entry("another", nullptr, nullptr, error, sizeof error), 0);
  EXPECT_NE(std::string(error).find("\"another\""), std::string::npos);
}

}  // namespace
}  // namespace farandole
