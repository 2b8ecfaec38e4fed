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

#include "core/net/address.h"
#include "core/net/frames.h"
#include "core/net/handshake.h"
#include "core/net/listener.h"
#include "core/status.h"

namespace farandole {

/// Listens for messages and sends them.
///
/// To one process they are sent one after the other, each once the one before is answered, and are
/// lost together when one is. At most 64 accepted connections have not proven the key, and each has
/// 2 s for it; the oldest makes way for a further one.
///
/// Thread safety: Wake from any thread, the rest by one. Nothing blocks but Poll.
class MemberMail {
 public:
  /// A process by a number of its own, never 0; 0 as the address's: whoever listens there.
  using Process = uint64_t;

  struct Event {
    enum class Kind : uint8_t {
      kCame,       ///< `text` has come.
      kDelivered,  ///< `to` has `text`.
      kLost,       ///< `to` did not answer within 2 s; `text`: why.
      kGone,       ///< `to` has ended: the kernel of its host says that nobody listens there, or
                   ///< another process does.
    };
    Kind kind = Kind::kCame;
    Process to = 0;
    std::string text = {};
  };

  /// @param party  The job's key and tag alone. @return ResourceExhausted with the system's reason.
  static Result<std::unique_ptr<MemberMail>> Create(const Party& party, Process self,
                                                    Listening listening);
  ~MemberMail();

  /// @param where  Tried in this order.
  void Send(Process to, std::vector<SocketAddress> where, std::string text);
  /// Sleeps until something has happened, Wake, or `until_ns`.
  std::vector<Event> Poll(int64_t until_ns);
  void Wake();
  /// Whether messages are on their way.
  bool IsSending() const { return !outgoing_.empty(); }

 private:
  struct Connection;
  struct Outgoing {
    Process to = 0;
    std::vector<SocketAddress> where = {};
    size_t next = 0;             // address
    bool is_gone = true;         // every address so far says so
    std::string error = {};      // of them
    std::deque<std::string> texts = {};
    std::unique_ptr<Connection> connection = {};
  };

  MemberMail(const Party& party, Process self, Listening listening);
  int64_t NextDeadline() const;
  void Accept(int listener);
  void Advance(Connection& connection);
  bool Read(Connection& connection);
  bool TakeFrames(Connection& connection);
  static void Flush(Connection& connection);
  void Connect(Outgoing& outgoing);
  void Settle(Process to, Outgoing& outgoing);
  void DropEnded();

  const Party party_;
  const Process self_;
  const Listening listening_;
  int wake_ = -1;  // eventfd
  int64_t accept_at_ns_ = 0;  // paused until then, for want of descriptors
  std::vector<std::unique_ptr<Connection>> incoming_;  // oldest first
  std::map<Process, Outgoing> outgoing_;               // with at least one message
  std::vector<Event> events_;
};

}  // namespace farandole
