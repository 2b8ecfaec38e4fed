// A doorbell that counts.
#pragma once

#include <atomic>

#include "core/doorbell.h"

namespace farandole {

/// Thread safety: any thread.
class CountingDoorbell final : public Doorbell {
 public:
  void Ring() override { rings_.fetch_add(1); }
  int rings() const { return rings_.load(); }

 private:
  std::atomic<int> rings_{0};
};

}  // namespace farandole
