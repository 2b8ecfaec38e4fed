#include "coordinator/control/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "core/clock.h"

namespace farandole {

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

void PeerWatch::Watch(int64_t timeout_ns) {
  const int64_t until_ns = SteadyClock().NowNs() + timeout_ns;
  std::vector<pollfd> files = {{wake_, POLLIN, 0}};
  for (const Peer& peer : peers_) {
    files.push_back({peer.dead.load(std::memory_order_relaxed) ? -1 : peer.file, POLLIN, 0});
  }
  for (int64_t left_ns = timeout_ns; left_ns > 0; left_ns = until_ns - SteadyClock().NowNs()) {
    const int64_t left_ms = std::min<int64_t>((left_ns + kNsPerMs - 1) / kNsPerMs, INT_MAX);
    if (poll(files.data(), files.size(), static_cast<int>(left_ms)) <= 0) continue;
    if (files[0].revents != 0) return;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (files[i + 1].revents == 0) continue;
      files[i + 1].fd = -1;
      peers_[i].dead.store(true, std::memory_order_release);
      deaths_.fetch_add(1, std::memory_order_release);
    }
    bell_.Ring();
  }
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
         host + ")";
}

}  // namespace farandole
