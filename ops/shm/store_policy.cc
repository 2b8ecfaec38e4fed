#include "ops/shm/store_policy.h"

#include <algorithm>

namespace farandole {
namespace {

constexpr int kWindowChunks = 4;
constexpr int kSettlingChunks = 4;  // as many as there are slots
constexpr int kFirstWindowsBetweenProbes = 4;
constexpr int kMostWindowsBetweenProbes = 1024;  // 1 GiB in chunks of 256 KiB
constexpr int kSlowWindowsBeforeProbe = 3;

}  // namespace

/// Sums the times of kWindowChunks chunks and compares windows: single chunks vary too much.
void StorePolicyChooser::OnChunk(int64_t elapsed_ns) {
  if (fixed_) return;
  if (settling_ > 0) {
    --settling_;
    return;
  }
  window_ns_ += elapsed_ns;
  if (++timed_ < kWindowChunks) return;
  const int64_t window_ns = window_ns_;
  timed_ = 0;
  window_ns_ = 0;
  if (probing_) {
    EndProbe(window_ns);
  } else {
    EndWindow(window_ns);
  }
}

/// Compares with the fastest window seen. Only several slow windows in a row start a probe early:
/// one may be a descheduled peer.
void StorePolicyChooser::EndWindow(int64_t window_ns) {
  if (usual_ns_ == 0 || window_ns < usual_ns_) usual_ns_ = window_ns;
  const bool slow = window_ns > usual_ns_ + usual_ns_ / 2;
  recent_ns_ = slow_windows_ == 0 ? window_ns : std::min(recent_ns_, window_ns);
  slow_windows_ = slow ? slow_windows_ + 1 : 0;
  const bool became_slower = slow_windows_ == kSlowWindowsBeforeProbe;
  if (became_slower) usual_ns_ = recent_ns_;
  if (++windows_since_probe_ < windows_between_probes_ && !became_slower) return;
  probing_ = true;
  SwitchPolicy();
}

/// Keeps the probed policy if it was a fifth faster; otherwise returns to the former one and probes
/// half as often.
void StorePolicyChooser::EndProbe(int64_t window_ns) {
  probing_ = false;
  slow_windows_ = 0;
  windows_since_probe_ = 0;
  if (window_ns < usual_ns_ - usual_ns_ / 5) {
    usual_ns_ = window_ns;
    windows_between_probes_ = kFirstWindowsBetweenProbes;
    return;
  }
  windows_between_probes_ = std::min(2 * windows_between_probes_, kMostWindowsBetweenProbes);
  SwitchPolicy();
}

/// Chunks in flight were written by the former policy: these are not timed.
void StorePolicyChooser::SwitchPolicy() {
  policy_ = policy_ == StorePolicy::kCached ? StorePolicy::kStreamed : StorePolicy::kCached;
  settling_ = kSettlingChunks;
}

}  // namespace farandole
