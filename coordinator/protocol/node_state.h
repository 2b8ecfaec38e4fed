// What the components of one rank's negotiation share: the tables, and the little that several of
// them read and one of them writes.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "coordinator/protocol/negotiation_observer.h"
#include "coordinator/protocol/options.h"
#include "coordinator/protocol/process_sets.h"
#include "coordinator/protocol/signature_cache.h"

namespace farandole {

/// Owned by Negotiation; outlives the components, which keep a reference. Any of them may intern a
/// key and name it after a use. Beyond that, who writes what:
///
/// - agreed state, that is ids bound, keys released, sets, ended joins: Applier alone, by
///   applying a decision;
/// - a Key's round, and which ranks have joined: VoteTally;
/// - a Key's own submission (`pending`, `own_*`): Negotiation enters it, Applier clears it;
/// - `stalled` of a Key and a Round, Round::asked, Key::since_ns: observers; Key::seen: Decider.
struct NodeState {
  NodeState(NegotiationOptions with_tree, NegotiationListener& to)
      : options(std::move(with_tree)),
        listener(to),
        sets(options.rank, options.parent, options.max_live_sets),
        last_numbers(static_cast<size_t>(sets.depth()) + 1) {
    options.parent = std::vector<int>();
  }

  bool IsRoot() const { return options.rank == 0; }
  void SendUp(const UpMessage& message) { listener.SendUp(sets.parent(), message); }
  /// Of rank 0's decisions, which all ranks are sent that end a set.
  int64_t last_number() const { return last_numbers.front(); }

  NegotiationOptions options;  // without the tree, which `sets` has digested
  NegotiationListener& listener;
  std::vector<std::unique_ptr<NegotiationObserver>> observers;  // since Negotiation is made
  SignatureCache keys;
  ProcessSets sets;
  std::vector<int64_t> last_numbers;  // of the last decisions applied, by level; Applier
  int64_t pending = 0;                // own submissions that a caller waits for; with Key::pending
  int64_t now_ns = 0;                 // the last time set; Negotiation
  // AnnounceLeave or Leave was called here; and Leave. Negotiation
  bool leaves = false;
  bool left = false;
};

}  // namespace farandole
