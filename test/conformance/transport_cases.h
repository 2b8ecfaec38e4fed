// What every Transport must do, as bodies that all ranks run: as threads of one test process, or
// one per MPI process.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "core/transport.h"

namespace farandole {

struct TransportCase {
  const char* name;
  /// Run by every rank at the same time. @return what went wrong on this rank.
  Status (*body)(Transport& transport);
};

/// In this order; each leaves the transport empty, the last one unusable.
std::span<const TransportCase> TransportCases();

// Steps of cases.

constexpr int64_t kTransportPatienceNs = 30 * kNsPerSecond;

/// The `sequence`-th message of `from` to `to`: every byte depends on all three.
std::vector<std::byte> ContentOf(int from, int to, int sequence, size_t size);

std::vector<int> OthersThan(int rank, int size);

/// Polls until a message comes. The result is valid until the next Poll.
Result<Transport::Incoming> NextMessage(Transport& transport);

/// Polls until all sends have left; nothing may arrive meanwhile.
Status DrainSends(Transport& transport);

/// Receives `count` messages from each of `senders` and compares order and content.
Status ExpectInOrder(Transport& transport, const std::vector<int>& senders, int count,
                     size_t (*size_of)(int sequence));

}  // namespace farandole
