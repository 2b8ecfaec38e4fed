#include "core/net/send_meter.h"

#include <linux/tcp.h>  // and not netinet/tcp.h, whose tcp_info is older
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>

#include "core/clock.h"

namespace farandole {
namespace {

/// Steps that are shorter share a look.
constexpr int64_t kLeastNs = 5 * kNsPerMs;
constexpr int64_t kLookNs = kNsPerMs;  // for each socket: a thousand times what it costs
/// Of what the busiest connection carries: less says little about a rate. A half would leave one
/// peer where each of them gets another part.
constexpr int64_t kShares = 8;

}  // namespace

void SendMeter::Remove(int socket) {
  std::erase_if(streams_, [socket](const Stream& one) { return one.socket == socket; });
}

const LinkUse& SendMeter::Look(int64_t now_ns) {
  if (streams_.empty() || now_ns < next_look_ns_) return total_;
  next_look_ns_ = now_ns + std::max(kLeastNs, static_cast<int64_t>(streams_.size()) * kLookNs);
  int64_t most = 0;
  for (Stream& one : streams_) {
    one.carried = one.rate = 0;
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(one.socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
        size < offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate) {
      continue;
    }
    const auto acked = static_cast<int64_t>(info.tcpi_bytes_acked);
    one.carried = acked - one.acked;
    one.acked = acked;
    // Else it is the rate at which the rank had something to send.
    const bool is_network = info.tcpi_delivery_rate_app_limited == 0;
    if (is_network) one.rate = static_cast<int64_t>(info.tcpi_delivery_rate);
    most = std::max(most, one.carried);
  }
  int64_t rate = 0;
  for (const Stream& one : streams_)
    if (kShares * one.carried >= most) rate = std::max(rate, one.rate);
  if (rate == 0) return total_;
  total_.bytes += most;
  total_.ns +=
      static_cast<int64_t>(static_cast<double>(most) * kNsPerSecond / static_cast<double>(rate));
  return total_;
}

}  // namespace farandole
