// How ranks that know where rank 0 listens come to know where all others do.
//
// Each opens a stream to rank 0, says where it listens itself, and is accepted. When all have come
// rank 0 sends the table of all addresses down a tree over streams that it and the others open.
// Meanwhile the stream stays open, so each end learns at once of the other's death; but no more of
// them than 1,024, or a quarter of rank 0's descriptors: further ranks learn it when time is up. A
// rank whose time is up says so, and the join ends for all, with an error that names who is
// missing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "coordinator/control/process_name.h"
#include "core/clock.h"
#include "core/net/address.h"
#include "core/net/stream_hub.h"
#include "core/status.h"

namespace farandole {

/// What a rank that joins tells rank 0.
struct Registration {
  uint64_t instance = 0;  ///< Random: tells a second process of this rank from a second try.
  ProcessName process;
  std::vector<SocketAddress> addresses;  ///< Where it listens, best first.
  int32_t size = 0;                      ///< How many ranks it expects, itself among them.
};
std::string EncodeRegistration(const Registration& registration);
/// @return Internal if `bytes` is malformed.
Result<Registration> DecodeRegistration(ByteSpan bytes);

/// A rank that has come, and where it listens.
struct TableEntry {
  int rank = 0;
  std::vector<SocketAddress> addresses;
};
/// By ascending rank.
std::string EncodeTable(const std::vector<TableEntry>& table);
/// @return Internal if `bytes` is malformed, or names a rank that is not below `size`.
Result<std::vector<TableEntry>> DecodeTable(ByteSpan bytes, int size);

struct JoinOptions {
  std::string where;  ///< Rank 0's address, or what says it, for errors.
  int64_t timeout_ns = 0;
  const Clock* clock = nullptr;
  /// Neither a key nor a name keeps the ranks of another job out: users and programs have to.
  bool is_public = false;
};

/// Rank 0, which listens already. Who registers after the join is told who has his place.
/// @return Timeout naming the ranks that did not come; all that came get it. Aborted if the hub was
/// stopped: then they try again.
Status JoinAsRoot(StreamHub& hub, const std::vector<SocketAddress>& own,
                  const JoinOptions& options);

/// All others.
///
/// @param find_root  Where rank 0 may listen; asked again before every try.
/// @param listen  Listens for other ranks, and says where; given this host's end of the first
///                stream to rank 0. Once.
/// @param keeps_trying  Also when the other end has another key, job or version: what find_root
/// says
///                      may be out of date.
/// @return Timeout naming both ends and the last reason, or the ranks that did not come; Mismatch
/// saying what differs from rank 0, as the number of ranks; InvalidArgument if this rank has joined
/// from elsewhere, or belongs to another job; Unavailable if rank 0 is gone after it has accepted
/// this rank; Aborted if the hub was stopped.
Status JoinAsRank(
    StreamHub& hub, const std::function<Result<std::vector<SocketAddress>>()>& find_root,
    const std::function<Result<std::vector<SocketAddress>>(const SocketAddress&)>& listen,
    bool keeps_trying, const JoinOptions& options);

}  // namespace farandole
