// What looks on at the negotiation of a rank, and speaks about it with its like on other ranks.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "coordinator/protocol/listener.h"

namespace farandole {

class Decider;
struct NodeState;
struct SetState;

/// Changes nothing that is agreed. What it sends goes up by NodeState::SendUp and down by
/// Decider::Send; the negotiation carries it, and only observers read it. Each gets all such
/// messages, and takes no notice of those of others.
class NegotiationObserver {
 public:
  virtual ~NegotiationObserver() = default;
  /// This rank has submitted the key, now.
  virtual void OnSubmitted(KeyId key) = 0;
  /// The set's keys are about to be released.
  virtual void OnSetEnded(const SetState&) {}
  virtual void OnKeyReleased(KeyId) {}
  /// From a child. @return Internal for what no correct child sends.
  virtual Status ReceiveUp(int child, const UpMessage& message) = 0;
  /// From above or of this node, to be forwarded next. What it asks the ranks below, by
  /// Decider::Send, has to wait for the next call.
  virtual Status ReceiveDown(const DownMessage& message) = 0;
  /// Does what is due. @return when the next thing is, or kNever.
  virtual int64_t Tick() = 0;
  /// When Tick has something to do that has come up since the last one, or kNever.
  virtual int64_t due_ns() const = 0;
  /// It looks into the key, which is not to be forgotten.
  virtual bool Knows(KeyId) const { return false; }
  /// Somebody has to be asked, or to answer.
  virtual bool Busy() const { return false; }
};

/// Makes those of one negotiation, in the order in which they are called; both outlive their last
/// call.
using ObserveNegotiation =
    std::function<std::vector<std::unique_ptr<NegotiationObserver>>(NodeState&, Decider&)>;

}  // namespace farandole
