// The negotiation: which tensors are ready on all members of a set, and in what order they run.
//
// A pure state machine: submissions, messages and the time go in; messages and events come out
// through a NegotiationListener. It knows no thread, no clock, no transport and no tensor memory.
// docs/protocol.md is its specification.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "coordinator/protocol/request.h"
#include "coordinator/protocol/stall_report.h"
#include "core/status.h"
#include "ops/data_plane.h"

namespace farandole {

/// A rank's own dense number of a key; local, never sent. Free again when the key is forgotten.
using KeyId = uint32_t;

/// One key of a Work decision as the executor sees it. Valid during the call that hands it over.
struct DecidedKey {
  KeyId key = 0;
  bool mine = false;  ///< This rank submitted it (false: it joined; it takes part as absent and
                      ///< drops the result).
  const KeyName* name = nullptr;
  const Signature* signature = nullptr;
  std::span<const RankMask> absent;
  const Mask* skipped = nullptr;  ///< Never nullptr; may be empty.
  /// Allgather: rows of each rank of the set by position, tensor after tensor.
  std::span<const int64_t> rows = {};
};

struct BatchPlan;

/// A Work decision, the same on every member of the set.
struct WorkDecision {
  int64_t number = 0;
  uint32_t set = kGlobalSet;
  std::span<const DecidedKey> keys;
  /// Its batches, where they are known from the last time (FormBatches); or empty.
  std::span<const BatchPlan> plans = {};

  /// Where all its tensors are: device kinds are decided apart.
  DeviceKind device() const {
    return keys.empty() ? DeviceKind::kCpu : keys.front().signature->device;
  }
};

struct ProcessSetInfo {
  uint32_t uid = kGlobalSet;   ///< Ascending, never reused; see kMaxLiveSets.
  int32_t user_id = 0;         ///< The smallest free number when it was added; 0 is the global set.
  std::vector<int32_t> ranks;  ///< Ascending.
  std::vector<uint8_t> planes;  ///< Per DeviceKind.
};

/// Where the negotiation speaks to. Calls come from inside Submit, Receive, BatchDone, Tick and
/// Flush, in the order that all members share (events) or in link order (sends). The listener must
/// not call back into the negotiation.
class NegotiationListener {
 public:
  virtual ~NegotiationListener() = default;
  virtual void SendUp(int parent, const UpMessage& message) = 0;
  virtual void SendDown(int child, const DownMessage& message) = 0;
  /// Run these (this rank is a member of the set). Submissions in it finish when their batches do.
  virtual void OnWork(const WorkDecision& work) = 0;
  /// This rank's pending submission of `key` ended without running: refused, aborted, or (OK)
  /// skipped because no rank contributed anything.
  virtual void OnEnded(KeyId key, const Status& status) = 0;
  /// A set exists from here on; also reported to non-members. The adder's submission ends by
  /// OnEnded(OK) just after.
  virtual void OnSetAdded(const ProcessSetInfo& set) = 0;
  /// No batch of the set is decided after this. `why` is OK for a removal, Aborted when a member
  /// left.
  virtual void OnSetEnded(uint32_t set, const Status& why) = 0;
  /// Whether this rank still has something of that number: the key is not forgotten then, and if
  /// this rank decides for it, it keeps its ids.
  virtual bool Holds(KeyId) const { return false; }
  /// The key is forgotten, or its set has ended, and the number will be another key's. Comes after
  /// OnEnded.
  virtual void OnKeyReleased(KeyId) {}
  virtual void OnJoinDone(int last_rank) = 0;
  virtual void OnLeft(int rank) = 0;
  virtual void OnShutdown() = 0;
  /// A line for the user: on the node that has something to say, and, of a stall, on all members.
  virtual void OnReport(const std::string& text) = 0;
  /// Such lines about a stall have come: on all members, and where it was decided or missed.
  virtual void OnStallReported() {}
  /// What has stalled at about the same time, where the sets are decided for.
  /// @return what the members shall read about it, by OnReport; may be empty.
  virtual std::vector<std::string> OnStalls(const std::vector<StallFacts>& stalls) = 0;
  /// The job ends, on every rank: a tensor has waited longer than stall_shutdown_ns, or no rank of
  /// several can ever go on. `error` names the tensors and the ranks.
  virtual void OnStallShutdown(const Status& error) = 0;
  /// Whether this rank submits nothing before an operation of its own has ended: all threads that
  /// do wait for such, without a limit, and nothing is executed or about to be submitted.
  virtual bool IsBlocked() const { return false; }
  /// Whether IsBlocked knows of all threads of the program that may submit something.
  virtual bool KnowsAllThreads() const { return true; }
  /// Begins to find out what this rank's program does, which submits nothing. @return false if that
  /// cannot be known.
  virtual bool AskActivity() { return false; }
  /// What has been found out, after AskActivity; nullopt: not yet.
  virtual std::optional<Activity> FindActivity() { return std::nullopt; }
};

struct NegotiationOptions {
  int rank = 0;
  int size = 1;
  std::vector<int>
      parent;  ///< parent[r] of every rank r; parent[0] = -1; parent[r] < r is not required.
  int64_t fusion_threshold_bytes = int64_t{128} << 20;      ///< 0: every tensor is its own batch.
  int64_t cuda_fusion_threshold_bytes = int64_t{25} << 20;  ///< The same for tensors on a GPU.
  int window = 2;  ///< Unfinished batches per (set, device kind).
  uint32_t max_ids = 65'536;
  /// Work of at least so many ids is remembered, to be handled as one when it comes again.
  size_t least_known_ids = 16;
  /// What idle ids may take before they are retired, on every rank, and how many keys without
  /// one are kept before idle ones are forgotten, on this rank. 0: they are looked for at each
  /// Flush.
  size_t idle_id_bytes = size_t{256} << 10;
  size_t idle_keys = 1024;
  bool join_allreduce_only = false;  ///< Other collectives are refused while a rank has joined.
  uint32_t max_live_sets = kMaxLiveSets;
  int64_t stall_ns = 10'000'000'000;  ///< Age at which an incomplete key is reported; <= 0: never.
  int64_t stall_shutdown_ns = 0;      ///< Age at which one ends the job; <= 0: never.
  int64_t answer_wait_ns =
      5'000'000'000;             ///< After this a query is published with the silent ranks listed.
  bool divergence_check = true;  ///< Ranks none of which can go on end the job.
  /// All ranks submit the keys of the global set in the same order, but for those with a function
  /// of their own. Ranks that do not end the job, too.
  bool in_order = false;
  std::vector<uint8_t> planes;  ///< Per DeviceKind, of sets whose ranks share no memory.
  std::vector<int> memory;      ///< By rank: equal and >= 0 if they share memory. Empty: none do.
  uint8_t memory_plane = 0;     ///< For the CPU, of sets whose ranks all share memory.
  uint8_t hosts_plane = 0;      ///< For the CPU, of those of which some ranks do.

  /// The planes of a set, per DeviceKind. Rank 0 decides those of new sets.
  std::vector<uint8_t> PlanesOf(std::span<const int32_t> ranks) const;
  int64_t FusionThreshold(DeviceKind device) const {
    return device == DeviceKind::kCuda ? cuda_fusion_threshold_bytes : fusion_threshold_bytes;
  }
};

/// Thread safety: none; one holder of the engine lock at a time. Invariants (docs/protocol.md):
/// agreed state changes only by applying a decision; every submission ends exactly once; all
/// members of a set are handed the same work in the same order. No allocation for keys that have an
/// id, once their vectors have grown. A broken rule of the protocol by a peer (second vote, unknown
/// id, ...) is returned as Internal, never ignored.
class Negotiation {
 public:
  Negotiation(NegotiationOptions options, NegotiationListener& listener);
  ~Negotiation();
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  /// The number of a key on this rank, until OnKeyReleased; registers it on first use. Allowed for
  /// sets not (yet) known, and for ended ones if it is submitted next, which releases it.
  KeyId Intern(const KeyName& name);
  const KeyName& NameOf(KeyId key) const;

  /// This rank takes part in `key` now. At most one submission of a key is pending at a time.
  /// For a set that has ended, the submission ends by OnEnded(Aborted) within this call.
  /// @return InvalidArgument if this rank is no member of the set, has joined or left, or the key
  /// is pending, or the signature exceeds coordinator/protocol/limits.h; Internal if the protocol
  /// is broken.
  Status Submit(KeyId key, const Signature& signature, const Vote& vote);
  /// This rank is absent for everything it has not submitted, until OnJoinDone. When the global set
  /// ends first (a rank has left), OnJoinDone never comes and the rank stays absent elsewhere.
  /// @return InvalidArgument if joined or left; Aborted if the global set has ended.
  Status Join();
  /// This rank submits nothing any more, and Leave will follow, unless all other ranks leave or
  /// announce it, too.
  Status AnnounceLeave();
  /// This rank submits nothing any more; its sets end when rank 0 says so. It goes on relaying
  /// until OnShutdown.
  /// @param failure  `cause` is why its program ends, else what failed here and nobody knows of;
  /// empty: it has ended well. `kind` kUnknown: another rank's failure.
  Status Leave(FailureFacts failure = {});
  /// The batch `index` of decision `number` has finished here.
  void BatchDone(int64_t number, int32_t index);

  Status ReceiveUp(int from, const UpMessage& message);
  Status ReceiveDown(int from, const DownMessage& message);

  /// Decides what is ready and the window allows, of sets decided here; sends what else has added
  /// up, in one Votes message to the parent. Call it after a run of Submit/Receive/BatchDone calls,
  /// before sleeping.
  void Flush();
  /// Sets the time alone: ages in answers and stamps of submissions follow it.
  void SetTime(int64_t now_ns);
  /// Sets the time; call it before Submit too, which stamps submissions with the last time set.
  /// Stall reports and query deadlines happen here. @return next time it wants to be called, or
  /// kNever.
  int64_t Tick(int64_t now_ns);

  /// When Tick has something to do that has come up since the last one, or kNever.
  int64_t due_ns() const;
  /// Something of this rank's own is pending, or it holds votes waiting for others.
  bool Busy() const;
  /// Own submissions pending (neither handed out as work nor ended).
  int64_t Pending() const;
  /// How many lines its tables have; what grows with the work ever done is a leak.
  struct TableSizes {
    size_t sets = 0;
    size_t keys = 0;
    size_t numbers = 0;  ///< Of keys, free ones included.
    size_t ids = 0;      ///< Handed out here.
    size_t queues = 0;   ///< Of what is decided here.
    size_t known = 0;    ///< Decisions known as one.
    bool operator==(const TableSizes&) const = default;
  };
  TableSizes Sizes() const;
  /// Of the last decision about the set that has been applied here.
  int64_t last_number(uint32_t set = kGlobalSet) const;
  /// Not OK once a decision of this rank's own could not be applied, in Flush or BatchDone: as
  /// final as an error of Receive.
  Status fault() const;

 private:
  struct Components;  // a VoteTally, a Decider, an Applier, a StallMonitor and a Divergence
  std::unique_ptr<Components> components_;
};

}  // namespace farandole
