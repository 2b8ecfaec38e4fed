// The first rendezvous of all ranks: compare versions and settings, learn who shares a host, agree
// on planes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/status.h"
#include "core/transport.h"

namespace farandole {

/// What this rank says about itself.
struct Hello {
  std::string version;
  std::string host;                 ///< Equal for ranks that share a machine; see ThisHost.
  std::vector<std::string> planes;  ///< CPU data planes by name, best first.
  Config config;
};

/// What all ranks agree on afterwards, and this rank's place among them.
struct Rendezvous {
  std::vector<int> parent;              ///< The control tree; see MakeTree.
  std::vector<int> host;                ///< By rank: the number of its host, from 0.
  std::vector<std::string> host_names;  ///< By rank.
  /// Plane number per DeviceKind. CPU: position in rank 0's `Hello::planes`; CUDA: the one
  /// after all of these, which every rank has and which finds out by itself what can be used.
  std::vector<uint8_t> planes;
  int local_rank = 0, local_size = 1;
  int cross_rank = 0, cross_size = 1;
};

/// This rank's hello as bytes for all others.
std::string EncodeHello(const Hello& mine);

/// What follows from everybody's hellos, by rank; the same on all ranks but for `rank`'s
/// place. Pure.
/// @return Mismatch naming setting, ranks and both values; Unavailable if no data plane is common
/// to all ranks.
Result<Rendezvous> Agree(const std::vector<std::string>& encoded, int rank);

/// Whether an error of Agree says that `rank` has another version or setting than rank 0.
bool DiffersFromFirst(const Status& status, int rank);

/// @return Mismatch for a job of more ranks than slots, if it has any.
Status CheckSlots(const Config& config, int ranks);

/// EncodeHello, exchange, Agree, CheckSlots. Collective over all ranks; blocks up to `timeout_ns`.
/// @return As Agree and CheckSlots; Timeout naming the silent ranks.
Result<Rendezvous> RunRendezvous(Transport& transport, const Hello& mine, int64_t timeout_ns);

/// Parents of a tree in which a host's ranks hang under its lowest rank and the hosts' leaders form
/// a `fan_out`-ary heap rooted at the host of rank 0, in order of their first ranks. host[r] is any
/// number equal for ranks that share a host. O(size).
inline constexpr int kFanOut = 8;  // 6 to 12 differ by less than a tenth at 10,240 ranks
std::vector<int> MakeTree(std::span<const int> host, int fan_out = kFanOut);

/// The parent of `rank`, if it has one, and its children: with whom it exchanges messages. O(size).
std::vector<int> Neighbours(std::span<const int> parent, int rank);

/// Whom `rank` is to watch: its neighbours, and the leader of a host the leaders of all others, if
/// there are no more than kWatchedHosts. The tree uses few of the links between hosts, the data may
/// use all, and a cut one makes both ends wait. Symmetric. O(size).
inline constexpr int kWatchedHosts = 64;
std::vector<int> WatchedRanks(std::span<const int> host, std::span<const int> parent, int rank);

/// Host name and boot id: cloned host names and containers do not confuse it.
std::string ThisHost();

}  // namespace farandole
