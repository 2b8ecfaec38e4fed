#include "coordinator/control/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <fstream>
#include <utility>

#include "core/clock.h"

namespace farandole {
namespace {

// How much longer than a stopped process a frozen one is waited for: its state does not tell it
// from one that waits for a disk.
constexpr int64_t kFrozenFactor = 5;

/// The state of a thread of this host as ps shows it; 'R' if it cannot be read.
char StateOfThread(pid_t process, int32_t thread) {
  std::ifstream file("/proc/" + std::to_string(process) + "/task/" + std::to_string(thread) +
                     "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');  // the name before it may hold anything
  return name_end == std::string::npos || name_end + 2 >= text.size() ? 'R' : text[name_end + 2];
}

std::string InSeconds(int64_t ns) {
  char text[32];
  (void)std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) / kNsPerSecond);
  return text;
}

}  // namespace

PeerWatch::PeerWatch(Doorbell& bell) : bell_(bell), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

PeerWatch::~PeerWatch() {
  for (const Peer& peer : peers_) close(peer.file);
  if (wake_ >= 0) close(wake_);
}

// By number, since the C libraries that are supported do not all have the function.
bool PeerWatch::Add(int rank, pid_t pid) {
  const auto file = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (file < 0 || wake_ < 0) return false;
  peers_.emplace_back(rank, pid, file);
  return true;
}

void PeerWatch::UsePulses(std::span<Pulse> pulses, std::span<const int> ranks, size_t mine,
                          int64_t patience_ns) {
  mine_ = &pulses[mine];
  patience_ns_ = patience_ns;
  for (Peer& peer : peers_) {
    const auto found = std::ranges::find(ranks, peer.rank);
    if (found != ranks.end()) peer.pulse = &pulses[static_cast<size_t>(found - ranks.begin())];
  }
}

void PeerWatch::Watch(int64_t timeout_ns) {
  const int64_t until_ns = SteadyClock().NowNs() + timeout_ns;
  std::vector<pollfd> files = {{wake_, POLLIN, 0}};
  for (const Peer& peer : peers_) {
    const bool has_ended = peer.lost.load(std::memory_order_relaxed) && peer.has_ended;
    files.push_back({has_ended ? -1 : peer.file, POLLIN, 0});
  }
  Beat();
  for (int64_t left_ns = timeout_ns; left_ns > 0; left_ns = until_ns - SteadyClock().NowNs()) {
    const int64_t left_ms = std::min<int64_t>((left_ns + kNsPerMs - 1) / kNsPerMs, INT_MAX);
    if (poll(files.data(), files.size(), static_cast<int>(left_ms)) <= 0) continue;
    if (files[0].revents != 0) return;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (files[i + 1].revents == 0) continue;
      files[i + 1].fd = -1;
      Lose(peers_[i], true, "has died");
    }
  }
  for (Peer& peer : peers_) {
    if (!CheckPulse(peer, timeout_ns)) peer.silent_ns = 0;
  }
}

// One that was stopped may be killed later: what was said first stays.
void PeerWatch::Lose(Peer& peer, bool has_ended, std::string why) {
  if (peer.lost.load(std::memory_order_relaxed)) return;
  peer.has_ended = has_ended;
  peer.why = std::move(why);
  peer.lost.store(true, std::memory_order_release);
  losses_.fetch_add(1, std::memory_order_release);
  bell_.Ring();
}

void PeerWatch::Beat() {
  if (mine_ == nullptr) return;
  mine_->thread.store(static_cast<int32_t>(syscall(SYS_gettid)), std::memory_order_relaxed);
  const uint32_t beats = mine_->beats.load(std::memory_order_relaxed) + 1;
  mine_->beats.store(beats == 0 ? 1 : beats, std::memory_order_release);
}

void PeerWatch::EndPulse() {
  if (mine_ != nullptr) mine_->beats.store(0, std::memory_order_release);
}

void PeerWatch::Report(const Status& error) {
  if (mine_ == nullptr || mine_->failed.load() != 0) return;
  const std::string& text = error.message();
  mine_->error[text.copy(mine_->error, sizeof mine_->error - 1)] = '\0';
  mine_->failed.store(1, std::memory_order_release);
}

// @return whether the peer owes a beat. A starved thread is in state R, a debugger's in state t.
bool PeerWatch::CheckPulse(Peer& peer, int64_t period_ns) {
  if (peer.pulse == nullptr || peer.lost.load(std::memory_order_relaxed)) return false;
  if (peer.pulse->failed.load(std::memory_order_acquire) != 0) {
    Lose(peer, false, std::string("failed: ") + peer.pulse->error);
    return false;
  }
  const uint32_t beats = peer.pulse->beats.load(std::memory_order_acquire);
  const bool is_silent = beats != 0 && beats == peer.beats;
  peer.beats = beats;
  if (!is_silent || patience_ns_ == 0) return false;
  peer.silent_ns += period_ns;
  if (peer.silent_ns < patience_ns_) return true;
  const char state = StateOfThread(peer.pid, peer.pulse->thread.load(std::memory_order_relaxed));
  const std::string since = "; it has not run for " + InSeconds(peer.silent_ns);
  if (state == 'T') Lose(peer, false, "is stopped (SIGSTOP or Ctrl-Z)" + since);
  const bool is_frozen = state == 'S' || state == 'D';
  if (is_frozen && peer.silent_ns >= kFrozenFactor * patience_ns_) {
    Lose(peer, false, std::string("is frozen (state ") + state + ")" + since);
  }
  return state == 'T' || is_frozen;
}

void PeerWatch::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof(one));  // it cannot be full: nobody writes more than once
}

std::string PeerWatch::Describe(size_t position) const {
  char host[256] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  const Peer& peer = peers_[position];
  return "rank " + std::to_string(peer.rank) + " (pid " + std::to_string(peer.pid) + " on host " +
         host + ") " + peer.why;
}

}  // namespace farandole
