// Ranks that reach each other by TCP, without MPI: one thread that sleeps in epoll, control
// messages and sockets for bulk data (core/net/).
#pragma once

#include <memory>
#include <stop_token>
#include <string>

#include "core/clock.h"
#include "core/log.h"
#include "core/net/address.h"
#include "core/network.h"
#include "core/status.h"
#include "core/store.h"

namespace farandole {

struct TcpNetworkOptions {
  int rank = 0;
  int size = 1;
  /// Where rank 0 listens: "node7:29500", "[fe80::1%eth0]:29500"; several, separated by commas, are
  /// tried in this order. Empty where a store says it.
  std::string address;
  /// Rank 0 only: a socket that listens at `address` already, and that is taken over; -1: none.
  int listen_descriptor = -1;
  /// Where rank 0 leaves its address and, without `key`, a random key; nullptr: none.
  std::shared_ptr<Store> store;
  /// The job's key, 32 bytes; empty: the store's, else derived from `job`, which protects nobody.
  std::string key;
  /// Distinguishes jobs that meet at one port; alike on all ranks.
  std::string job;
  /// Names of interfaces, or networks ("10.1.0.0/16"), separated by commas, that ranks listen on
  /// and announce; empty: all, or loopback alone where rank 0's address says so itself.
  std::string interfaces;
  PortRange ports;  ///< Where ranks listen but at the port in `address`.
  /// Sockets between two ranks for each plane; alike on all ranks.
  int streams = 1;
  int64_t patience_ns = 0;    ///< See HubOptions.
  std::stop_token stop = {};  ///< Ends CreateTransport early, which is then Aborted.
  const Clock* clock = nullptr;
  Log* log = nullptr;  ///< May be nullptr.
};

/// Opens nothing yet: CreateTransport joins the job.
/// @return InvalidArgument for an address or interfaces that cannot be read, naming them.
Result<std::unique_ptr<Network>> MakeTcpNetwork(TcpNetworkOptions options);

}  // namespace farandole
