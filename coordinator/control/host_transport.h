// Control messages between the processes of one host, through memory that they share.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "coordinator/control/pulse.h"
#include "core/flight_recorder.h"
#include "core/liveness.h"
#include "core/transport.h"
#include "ops/shm/host_memory.h"

namespace farandole {

/// Of the mailboxes of a host with so many ranks: a ring for each pair, either way, smaller the
/// more there are, so that those to one rank take up 128 KiB or, above 128 ranks, 1 KiB each; and
/// 256 KiB for the flight recorder of each.
size_t MailboxBytes(size_t ranks);

/// What the ranks did lately, in the mailboxes, too, and in the same order.
std::vector<FlightRing*> FlightsOf(const HostMemory& memory);

/// The ranks' pulses, which lie in the mailboxes, in the order of memory.ranks().
std::span<Pulse> PulsesOf(const HostMemory& memory);

/// A transport whose links between ranks of this host are rings in shared memory that ring the
/// receiver's doorbell; the other links are those of `between_hosts`, which also gathers.
///
/// Messages longer than a ring pass it slice by slice; what it cannot take waits in the sender.
/// A rank that needs no other link while it works is not polled for and never polls: see
/// PollAfterNs. What is for a rank whose process has ended is dropped.
///
/// @param between_hosts  Has ended its last Allgather on this rank.
/// @param memory  Of this host, with MailboxBytes; all its ranks get such a transport, unless they
///                fail before.
/// @param liveness  Which of them end; nullptr: nobody knows. Outlives the transport.
/// Thread safety: the holder of the engine lock only. Messages of one sender keep their order.
std::unique_ptr<Transport> MakeHostTransport(std::shared_ptr<Transport> between_hosts,
                                             std::shared_ptr<HostMemory> memory,
                                             const Liveness* liveness);

}  // namespace farandole
