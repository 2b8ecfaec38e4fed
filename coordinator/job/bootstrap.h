// How a rank joins its job: over MPI or TCP, on a thread that can be left behind, or within one
// process. It ends with all that an engine stands on.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/control/rendezvous.h"
#include "coordinator/control/share_memory.h"
#include "coordinator/job/member_service.h"
#include "coordinator/liveness/peer_watch.h"
#include "coordinator/liveness/table.h"
#include "core/borrowed_memory.h"
#include "core/config.h"
#include "core/counters.h"
#include "core/doorbell.h"
#include "core/launcher.h"
#include "core/log.h"
#include "core/net/stream_hub.h"
#include "core/network.h"
#include "core/transport.h"
#include "ops/data_plane.h"

namespace farandole {

/// What the ranks of one process share; see JobInProcess.
class InProcessJob;

/// What a rank has once it has joined. Members are used by those below them.
struct Connections {
  Counters counters;
  BorrowedMemory memory;
  Rendezvous rendezvous;
  std::shared_ptr<InProcessJob> job;  ///< nullptr: of other processes.
  std::string job_name;               ///< The launcher's; empty: it has none.
  std::shared_ptr<FutexDoorbell> doorbell;
  std::unique_ptr<LivenessTable> liveness;
  std::unique_ptr<Log> log;
  std::unique_ptr<Network> network;          ///< nullptr: the process's MPI, or none.
  std::shared_ptr<Transport> between_hosts;  ///< Below a transport in shared memory.
  std::unique_ptr<Transport> transport;
  std::shared_ptr<StreamHub> hub;         ///< Below the transport; nullptr: none.
  HostGroup shared;                       ///< With other processes.
  std::unique_ptr<PeerWatch> peers;       ///< Of those; nullptr: without memory.
  std::shared_ptr<SharedMemory> buffers;  ///< Where ranks reduce in place; nullptr: nowhere.
  std::unique_ptr<DataPlane> flat;        ///< The CPU plane between all ranks.
  std::unique_ptr<DataPlane> host_plane;  ///< Of the CUDA plane alone.
  /// Of the hierarchical plane alone, if there is one.
  std::array<std::unique_ptr<DataPlane>, 2> cross_planes;
  bool uses_mpi = false;
  /// Of the first generation of an elastic job: what this process has for the next ones, too.
  std::shared_ptr<MemberService> service;
  MemberList first;

  /// Ends what is left, once nothing else uses it. @param clean  All ranks have left: else objects
  /// of MPI, which may hold requests, are leaked.
  void Close(bool clean);
};

/// How long members of an elastic job that have called reinit wait for one that lives and has not.
inline constexpr double kLongestJoinS = 300;
/// How processes of a job listen for each other. @param where  Addresses of this one.
MemberService::Options MemberOptions(const Config& config, std::string key, std::string job,
                                     std::vector<SocketAddress> where);

/// `size` ranks in this process share it. All are built from one config by one thread.
std::shared_ptr<InProcessJob> JobInProcess(int size);
/// @return What Agree returns.
Result<std::unique_ptr<Connections>> ConnectInProcess(std::shared_ptr<InProcessJob> job, int rank,
                                                      const Config& config);

/// Thread safety: one thread at a time. Lifetime: the thread that joins shares it.
class Bootstrap : public std::enable_shared_from_this<Bootstrap> {
 public:
  /// Begins to join, or goes on with a join over MPI that was abandoned. @param launcher  Announces
  /// several ranks.
  /// @return Unavailable if an earlier join over MPI timed out, or goes on with other arguments;
  /// Unimplemented for a descendant of a rank; InvalidArgument as ChooseNetwork.
  static Result<std::shared_ptr<Bootstrap>> Begin(const Environment& environment,
                                                  const Config& config, const Launcher& launcher);
  /// Waits up to `timeout_ns` (< 0: no limit) until all ranks have joined, and calls the user's
  /// store meanwhile. @return nullptr: not yet; Timeout once the init timeout has passed.
  Result<std::unique_ptr<Connections>> Joined(int64_t timeout_ns);
  /// Nobody calls Joined any more. Over TCP the join ends, and with it all that it has opened. MPI
  /// can be initialized once: over MPI it goes on, for the next Begin.
  void Abandon();

 private:
  class RelayedStore;
  class RenewedStore;

  Bootstrap(const Config& config, const Launcher& launcher, std::string network);
  void BeginJoining();
  Status Join();
  Result<Network*> StartMpi();
  Result<Network*> StartTcp();
  Status Connect(Network& network);
  Status CreatePlane(Network& network, std::unique_ptr<DataPlane>& plane);
  Status MeetMembers();
  Status WatchOtherHosts();
  Status ShareHostMemory();
  Status AddCrossPlanes(Network& network);
  LinkOptions Links();
  int64_t TimeLeftNs() const;
  Status GiveUp();
  void Cancel();

  const Config config_;
  const Launcher launcher_;
  const std::string network_;  // "mpi" or "tcp"
  std::atomic<int64_t> deadline_ns_;
  std::unique_ptr<Connections> connections_;
  std::shared_ptr<RelayedStore> store_;    // the user's; nullptr: none
  std::shared_ptr<RenewedStore> renewed_;  // likewise, or a folder
  std::stop_source stop_;                  // of a join over TCP
  std::thread joiner_;
  std::atomic<bool> in_mpi_init_{false};
  std::atomic<bool> is_done_{false};  // the joiner touches nothing here any more
  std::atomic<uint32_t> news_{0};     // grows when is_done_ or store_ has changed
  Status status_;                     // of the joiner
};

}  // namespace farandole
