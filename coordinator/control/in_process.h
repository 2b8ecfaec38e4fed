// Control messages between ranks that are threads of one process: a single process without a
// launcher, and every test with N ranks.
#pragma once

#include <cstdint>
#include <memory>

#include "core/doorbell.h"
#include "core/liveness.h"
#include "core/status.h"
#include "core/transport.h"

namespace farandole {

/// Messages and bytes sent over one directed link.
struct LinkCount {
  int64_t messages = 0;
  int64_t bytes = 0;
};

/// The mailboxes of `size` ranks. A message is copied into the receiver's mailbox, whose buffers
/// are reused: nothing is allocated once as many and as large messages have been waiting as ever
/// will.
///
/// Thread safety: any thread. Invariant: a transport's messages arrive in the order sent, also
/// those sent before the receiver was created. Lifetime: outlives its transports.
class InProcessHub {
 public:
  explicit InProcessHub(int size);
  ~InProcessHub();
  InProcessHub(const InProcessHub&) = delete;
  InProcessHub& operator=(const InProcessHub&) = delete;

  int size() const;
  /// The endpoint of `rank`; once per rank. A message for it rings `doorbell` (nullptr: nobody is
  /// notified), which outlives the endpoint, as `liveness` does. What is sent to an endpoint that
  /// is gone is dropped.
  std::unique_ptr<Transport> Create(int rank, Doorbell* doorbell, Liveness* liveness = nullptr);
  /// Declares `rank` lost: `why` is noted once in the others' `liveness`, and sending to it fails.
  void Disconnect(int rank, const Status& why);
  /// What `from` has sent to `to` so far.
  LinkCount Sent(int from, int to) const;

 private:
  class Impl;
  class Endpoint;
  std::unique_ptr<Impl> impl_;
};

}  // namespace farandole
