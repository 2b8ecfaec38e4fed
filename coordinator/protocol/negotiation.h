// The negotiation: which tensors are ready on all members of a set, and in what order they run.
//
// A pure state machine: submissions, messages and the time go in; messages and events come out
// through a NegotiationListener. It knows no thread, no clock, no transport and no tensor memory.
// docs/protocol.md is its specification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "coordinator/protocol/listener.h"
#include "coordinator/protocol/negotiation_observer.h"
#include "coordinator/protocol/options.h"

namespace farandole {

/// Thread safety: none; one holder of the engine lock at a time. Invariants (docs/protocol.md):
/// agreed state changes only by applying a decision; every submission ends exactly once; all
/// members of a set are handed the same work in the same order. No allocation for keys that have an
/// id, once their vectors have grown. A broken rule of the protocol by a peer (second vote, unknown
/// id, ...) is returned as Internal, never ignored.
class Negotiation {
 public:
  Negotiation(NegotiationOptions options, NegotiationListener& listener,
              const ObserveNegotiation& observe = nullptr);
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
  /// What the members of a set may agree on without votes (ops/agreement.h): a key with an id.
  struct Known {
    uint32_t id = kNoId;
    int64_t round = 0;  ///< As Agreement::Propose.
    DecidedKey key;     ///< Until the next call; as a decision would have it.
  };
  /// This rank is about to submit `key`, and has nothing else pending.
  /// @return id kNoId unless an id says all of this vote, and all members are there.
  Known FindKnown(KeyId key, const Signature& signature, const Vote& vote);
  /// The members have agreed on it, and this rank runs it instead of submitting it.
  void NoteAgreed(const Known& known);
  /// This rank is absent for everything it has not submitted, until OnJoinDone. When the global set
  /// ends first (a rank has left), OnJoinDone never comes and the rank stays absent elsewhere.
  /// @return InvalidArgument if joined or left; Aborted if the global set has ended.
  Status Join();
  /// See NegotiationOptions.
  void SetStallShutdown(int64_t age_ns);
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
  /// Observers do what is due here. @return next time it wants to be called, or
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
  struct Components;  // a VoteTally, an Applier, a Decider and the observers
  std::unique_ptr<Components> components_;
};

}  // namespace farandole
