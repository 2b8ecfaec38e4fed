// A clock that stands still until a test moves it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/clock.h"

namespace farandole {

/// Thread safety: any thread.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(int64_t now_ns = kNsPerSecond) : now_ns_(now_ns) {}
  int64_t NowNs() const override { return now_ns_.load(); }
  void Advance(int64_t ns) { now_ns_.fetch_add(ns); }

 private:
  std::atomic<int64_t> now_ns_;
};

}  // namespace farandole
