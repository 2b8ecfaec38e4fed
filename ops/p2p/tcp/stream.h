// Messages over one connected, non-blocking socket: a header and, if there is one, a payload that
// is read from, and written to, the memory where it belongs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/status.h"

namespace farandole {

/// What precedes every payload on the wire, as it lies in memory (docs/protocol.md).
struct TcpHeader {
  uint16_t set = 0;       ///< Uid modulo kMaxLiveSets.
  uint8_t kind = 0;       ///< P2pLink::Round, or kNoMessage.
  uint8_t reserved = 0;   ///< Zero.
  uint16_t sequence = 0;  ///< Counts the messages of a set, round, sender and receiver.
  uint16_t reserved2 = 0;
  uint32_t bytes = 0;                ///< Of the payload.
  std::array<uint16_t, 2> posted{};  ///< By round: receives posted for the other end's messages.

  static constexpr uint8_t kNoMessage = 2;  ///< Says `posted` alone.
};
static_assert(sizeof(TcpHeader) == 16);

/// Thread safety: none. Lifetime: closes the socket; payloads stay where they are until sent,
/// received, or given up.
class TcpStream {
 public:
  /// Where messages come from. Lifetime: until it has been told, or Forget.
  class Sender {
   public:
    virtual void OnSent(int slot) = 0;

   protected:
    ~Sender() = default;
  };
  /// Where messages go.
  class Receiver {
   public:
    /// @return Where the payload goes; at the latest OnReceived ends its use. Or Internal for a
    /// header that nobody sends who keeps to the protocol.
    virtual Result<std::byte*> OnHeader(const TcpHeader& header) = 0;
    virtual void OnReceived(const TcpHeader& header) = 0;

   protected:
    ~Receiver() = default;
  };
  struct Message {
    TcpHeader header;
    const std::byte* payload = nullptr;
    Sender* sender = nullptr;  ///< May be nullptr.
    int slot = 0;
  };

  TcpStream() = default;
  ~TcpStream();
  TcpStream(const TcpStream&) = delete;
  TcpStream& operator=(const TcpStream&) = delete;

  /// Of what is queued meanwhile nothing is lost. The socket is owned from now on.
  void Connect(int socket) { socket_ = socket; }
  bool is_connected() const { return socket_ >= 0; }
  int socket() const { return socket_; }

  void Queue(const Message& message) { queue_.push_back(message); }
  bool has_output() const { return first_ < queue_.size(); }
  /// Writes as much as the socket takes, several messages at a time. @return Whether that was
  /// anything; Unavailable with the system's text.
  Result<bool> Write();
  /// Reads what has arrived, up to a bound that keeps this short. @return Whether that was
  /// anything; Unavailable with the system's text, or if the other end has closed; what OnHeader
  /// returns.
  Result<bool> Read(Receiver& receiver);

  /// Drops messages of a sender. Of one that is partly written, the rest is copied.
  void Forget(const Sender& sender);
  /// If a payload is being received to `from`, receives the rest to `to`, from there on.
  void Redirect(const std::byte* from, std::byte* to);

 private:
  static constexpr int64_t kHeaderBytes = sizeof(TcpHeader);
  /// Of the next messages, that come with the rest of a payload. Longer ones are read to where they
  /// belong, but for their beginning.
  static constexpr size_t kAheadBytes = 4096;

  void Account(int64_t written);
  Status Parse(Receiver& receiver);

  int socket_ = -1;
  std::vector<Message> queue_;  // from first_ on
  size_t first_ = 0;
  int64_t written_ = 0;  // bytes of queue_[first_], with its header
  std::unique_ptr<std::byte[]> rest_;

  TcpHeader header_;  // of the payload that is being received
  bool in_payload_ = false;
  std::byte* to_ = nullptr;
  int64_t got_ = 0;   // of the payload
  int64_t left_ = 0;  // of the payload
  std::array<std::byte, kAheadBytes> ahead_;
  size_t ahead_bytes_ = 0;
};

}  // namespace farandole
