// What a rank's negotiation tells the engine: decisions, ends, and messages to be sent.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "coordinator/protocol/request.h"
#include "core/status.h"

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
  int32_t slots = 0;            ///< Of the job, in the global set: see core/slots.h. 0: rank order.
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
  /// A submission of this rank goes up in full: no id says it all.
  virtual void OnVoteByName() {}
  virtual void OnJoinDone(int last_rank) = 0;
  virtual void OnLeft(int rank) = 0;
  virtual void OnShutdown() = 0;
  /// A line for the user: on the node that has something to say, and, of a stall, on all members.
  virtual void OnReport(const std::string& text) = 0;
  /// The job ends, on every rank: a tensor has waited longer than stall_shutdown_ns, or no rank of
  /// several can ever go on. `error` names the tensors and the ranks.
  virtual void OnStallShutdown(const Status& error) = 0;
  /// Whether this rank submits nothing before an operation of its own has ended: all threads that
  /// do wait for such, without a limit, and nothing is executed or about to be submitted.
  virtual bool IsBlocked() const { return false; }
  /// Whether IsBlocked knows of all threads of the program that may submit something.
  virtual bool KnowsAllThreads() const { return true; }
  /// The threads that submit (numbers as pthread_self gives them).
  virtual std::vector<uint64_t> CallerIds() const { return {}; }
};

}  // namespace farandole
