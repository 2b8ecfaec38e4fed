// Messages between the processes of a job that outlive its generations: each is a connection of its
// own, which proves the job's key, carries one message and its answer, and ends.
#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/membership/membership.h"
#include "core/net/address.h"
#include "core/net/frames.h"
#include "core/net/handshake.h"
#include "core/net/listener.h"
#include "core/status.h"

namespace farandole {

/// Listens for messages and sends them.
///
/// To one process they are sent one after the other, each once the one before is answered, and are
/// lost together when one is. Its addresses share the time to connect; whoever listens at one of
/// them has all that is left for its answer. At most 64 accepted connections have not proven the
/// key, and each has 2 s for it; the oldest makes way for a further one.
///
/// Thread safety: Wake from any thread, the rest by one. Nothing blocks but Poll.
class MemberMail {
 public:
  struct Event {
    enum class Kind : uint8_t {
      kCame,       ///< `text` has come.
      kDelivered,  ///< `to` has `text`.
      kLost,       ///< `to` did not answer within 2 s; `text`: why.
      kGone,       ///< `to` has ended: its host resets each connection, as nobody listens there, or
                   ///< another process does.
    };
    Kind kind = Kind::kCame;
    Member to = {};
    std::string text = {};
  };

  /// @param party  The job's key and tag alone. @return ResourceExhausted with the system's reason.
  static Result<std::unique_ptr<MemberMail>> Create(const Party& party, MemberId self,
                                                    Listening listening);
  ~MemberMail();

  /// @param to  Its address may be several, separated by commas, which are tried in this order.
  /// With the id 0 whoever listens there is meant.
  void Send(const Member& to, std::string text);
  /// Sleeps until something has happened, Wake, or `until_ns`.
  std::vector<Event> Poll(int64_t until_ns);
  void Wake();
  /// In a forked child: its copies of the sockets go.
  void CloseInChild();
  /// Whether messages are on their way.
  bool IsSending() const { return !outgoing_.empty(); }

 private:
  struct Connection;
  struct Outgoing {
    Member to = {};
    std::vector<SocketAddress> where = {};
    size_t next = 0;         // address
    int64_t until_ns = 0;    // for an answer, from the first one on
    bool is_gone = true;     // every address so far says so
    std::string error = {};  // of them
    std::deque<std::string> texts = {};
    std::unique_ptr<Connection> connection;
  };

  MemberMail(const Party& party, MemberId self, Listening listening);
  int64_t NextDeadline() const;
  void Accept(int listener);
  void Advance(Connection& connection);
  bool Read(Connection& connection);
  bool TakeFrames(Connection& connection);
  static void Flush(Connection& connection);
  void Connect(Outgoing& outgoing);
  void Settle(Outgoing& outgoing);
  void DropEnded();

  const Party party_;
  const MemberId self_;
  const Listening listening_;
  int wake_ = -1;                                      // eventfd
  int64_t accept_at_ns_ = 0;                           // paused until then, for want of descriptors
  std::vector<std::unique_ptr<Connection>> incoming_;  // oldest first
  /// With at least one message each; by id, or of an id that is not known by address.
  std::map<std::pair<MemberId, std::string>, Outgoing> outgoing_;
  std::vector<Event> events_;
};

}  // namespace farandole
