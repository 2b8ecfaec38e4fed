// Decides by measuring whether slots are written through the cache or past it.
//
// Which is faster depends on whether the members' cores share an L3, and a hypervisor may change
// that at any time, so a measurement at start would not do.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/shm/memory.h"

namespace farandole {

/// Compares the two policies by how long chunks take, and keeps the faster one.
///
/// Windows of a few chunks are timed. The other policy is probed for one window now and then, ever
/// more rarely while it loses, and at once when chunks have become slower. A probe wins when it is
/// a fifth faster.
///
/// Thread safety: none. It reads no clock: the same times give the same choices.
class StorePolicyChooser {
 public:
  /// @param always If given, the choice, whatever is measured.
  explicit StorePolicyChooser(std::optional<StorePolicy> always = {})
      : fixed_(always.has_value()), policy_(always.value_or(StorePolicy::kCached)) {}

  /// How the next chunk should be written.
  StorePolicy policy() const { return policy_; }
  /// Reports how long a full chunk took while chunks followed one another.
  void OnChunk(int64_t elapsed_ns);

 private:
  void EndWindow(int64_t window_ns);
  void EndProbe(int64_t window_ns);
  void SwitchPolicy();

  bool fixed_;
  StorePolicy policy_;
  bool probing_ = false;
  int settling_ = 0;       // chunks that still meet slots written by the former policy
  int timed_ = 0;          // chunks in the current window
  int64_t window_ns_ = 0;  // their time
  int64_t usual_ns_ = 0;   // fastest window of the policy kept; 0: none yet
  int64_t recent_ns_ = 0;  // fastest of the slow windows in a row
  int slow_windows_ = 0;   // windows in a row that took far longer than usual
  int windows_since_probe_ = 0;
  int windows_between_probes_ = 4;
};

}  // namespace farandole
