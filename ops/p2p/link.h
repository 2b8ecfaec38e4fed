// What collectives over messages need of a network.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/doorbell.h"
#include "core/network.h"
#include "core/status.h"

namespace farandole {

/// Chunks of a set that are in flight at a time. Each has a slot: messages and staging of its own.
inline constexpr int kLinkSlots = 4;

/// The messages between this rank and the other members of one process set. A network is a link and
/// nothing else; collectives send, receive, and ask what is complete.
///
/// The messages of one sender, receiver and round arrive in the order sent, each where the receive
/// of the same number was posted. A slot has at most one message of a round to, and from, each
/// member. Memory is the caller's: it is used until AllComplete has returned true, or Cancel, and
/// else, after an error, for ever. Nothing blocks. Thread safety: the holder of the engine lock
/// only.
class P2pLink {
 public:
  /// Which of a chunk's two kinds of message. A link tells them apart, because contributions of
  /// later chunks are sent before results of earlier ones.
  enum class Round : uint8_t { kContribution = 0, kResult = 1 };
  /// Messages of a slot that complete together.
  enum class Group : uint8_t { kContributions = 0, kResults = 1, kSends = 2 };
  static constexpr size_t kGroups = 3;

  virtual ~P2pLink() = default;
  virtual Status Send(int slot, Round round, int to, const std::byte* data, int64_t bytes) = 0;
  /// A message of at most `bytes`.
  virtual Status Receive(int slot, Round round, int from, std::byte* data, int64_t bytes) = 0;
  /// Whether all messages of a group, of which there is one, are complete.
  virtual Result<bool> AllComplete(int slot, Group group) = 0;
  /// The length of the message that came from a member, of the group that was complete last.
  virtual int64_t BytesFrom(int member) const = 0;
  /// Called when no pending group is complete; may move messages along. @return When to ask again:
  /// after so many ns, 0 at once, or kByDoorbell.
  virtual int64_t PollAfterNs() = 0;
  /// This rank's, which the link rings; nullptr: a link that has to be polled.
  virtual Doorbell* bell() const { return nullptr; }
  /// Gives up the messages in flight; the link is not used again. @return Whether their memory is
  /// the caller's again. No library has a reliable way to cancel a send.
  virtual bool Cancel() { return false; }
};

}  // namespace farandole
