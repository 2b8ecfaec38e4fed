#include "test/fakes/driver.h"

namespace {
thread_local const FarandoleFakeDevice* current_device = nullptr;
}

const FarandoleFakeDevice* farandole_fake_current_device(void) { return current_device; }

void farandole_fake_set_current_device(const FarandoleFakeDevice* device) {
  current_device = device;
}
