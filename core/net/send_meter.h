// How fast the network takes what a rank sends, as the kernel measures it.
#pragma once

#include <cstdint>
#include <vector>

namespace farandole {

/// What one connection has carried, and for how long at the rate at which it carries data.
struct LinkUse {
  int64_t bytes = 0;
  int64_t ns = 0;
};

/// What the busiest connection has carried counts at the rate of the fastest of those that carry
/// much: where the link of a host is slow, all of its connections are; where a peer's is, only
/// those to that peer. The rate is that of TCP's acknowledgements while there was enough to send
/// (tcpi_delivery_rate of Linux 4.9), so peers that are late do not count, and neither do
/// acknowledgements that are delayed. Where the kernel says none, nothing is counted.
///
/// Thread safety: none.
class SendMeter {
 public:
  /// A connected TCP socket, until Remove.
  void Add(int socket) { streams_.push_back({socket}); }
  void Remove(int socket);
  /// @return the totals. A look costs a microsecond for each socket, and is taken so seldom that
  /// this is no more than a thousandth of the time: of 1,000 sockets once a second.
  const LinkUse& Look(int64_t now_ns);

 private:
  struct Stream {
    int socket = -1;
    int64_t acked = 0;    // bytes, ever
    int64_t carried = 0;  // of those, since the look before
    int64_t rate = 0;     // bytes a second, of the network; 0: unknown
  };

  std::vector<Stream> streams_;
  LinkUse total_;
  int64_t next_look_ns_ = 0;
};

}  // namespace farandole
