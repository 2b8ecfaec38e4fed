// How two ends of a new connection prove to each other that they hold the job's key, and agree what
// the connection is for. Bytes only: no sockets, no time.
//
//   connector -> acceptor  hello      32 bytes: version, job, epoch, role, rank, stream, nonce
//   acceptor -> connector  challenge  64 bytes: version, refusal, rank, epoch, nonce; MAC
//   connector -> acceptor  proof      32 bytes: MAC
//   acceptor -> connector  welcome    32 bytes: MAC
//
// A refusal counts with its MAC alone: whoever sends one without it does not hold the key.
// Each MAC is an HMAC-SHA-256 under the job's key over its own name and all before it. So neither
// end interprets more than the other's first message, 64 bytes at most, before the other has proven
// the key. With its proof sent a connector waits for the welcome: an acceptor that had given up the
// connection by then has not accepted it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/net/job_key.h"

namespace farandole {

inline constexpr uint8_t kNetVersion = 4;  ///< Of handshake, frames and their contents.
inline constexpr size_t kMaxUnprovenBytes = 64;

enum class StreamRole : uint8_t {
  kJoin = 1,     ///< To rank 0, by a rank that is not known yet.
  kControl = 2,  ///< Frames, from the connector to the acceptor.
  kData = 3,     ///< Bulk data, both ways; belongs to a link.
  kMember = 4,   ///< A message of membership and its answer; of no generation.
};

/// Why a connection does not come about. On the wire.
enum class Refusal : uint8_t {
  kNone = 0,
  kGarbage = 1,       ///< The other end is not farandole.
  kOtherVersion = 2,  ///< It speaks another version.
  kOtherJob = 3,      ///< The jobs' names differ.
  kWrongKey = 4,
  kOtherEpoch = 5,  ///< It belongs to another generation of the job.
  kNotJoining = 6,  ///< The acceptor is not rank 0, or has not begun to join.
  kOtherRank = 7,   ///< Something else than the connector's peer listens there.
  kNotWanted = 8,   ///< No such rank or stream, or it is connected already.
};
/// "holds another job key", of the other end.
const char* Describe(Refusal refusal);

/// What a connection is for; the connector says it.
struct StreamHello {
  StreamRole role = StreamRole::kControl;
  int from = 0;  ///< The connector's rank.
  uint8_t plane = 0;
  uint8_t number = 0;
};

/// This process, at the time of a handshake.
struct Party {
  JobKey key{};
  uint32_t job = 0;    ///< A hash of the job's name.
  uint32_t epoch = 0;  ///< Tag of this generation of the job; 0 while it is unknown.
  int rank = 0;
  bool joining = false;  ///< Rank 0 once ranks may join, or could.
};

/// One side of a handshake. Thread safety: none. Invariant: once complete or refused it stays so.
class Handshake {
 public:
  /// @param peer  The rank that should answer.
  static Handshake Connect(const Party& self, const StreamHello& hello, int peer);
  static Handshake Accept(const Party& self);

  /// How many more bytes to read before anything can happen; 0: complete or refused.
  size_t wanted() const { return wanted_ - received_.size(); }
  /// The next bytes, `wanted` at most.
  void Take(ByteSpan bytes);
  /// What is to be sent now, also after a refusal; empty the next time.
  std::vector<std::byte> TakeOutput() { return std::exchange(output_, {}); }

  bool complete() const { return stage_ == Stage::kComplete; }
  Refusal refusal() const { return refusal_; }
  bool heard_anything() const { return stage_ != Stage::kHello || !received_.empty(); }
  const StreamHello& hello() const { return hello_; }
  /// Of the acceptor, once complete: the connector adopts it.
  uint32_t epoch() const { return epoch_; }
  /// Once complete: the keys of what this end sends and of what it receives.
  JobKey send_key() const { return DirectionKey(connects_); }
  JobKey receive_key() const { return DirectionKey(!connects_); }

 private:
  // What this end waits for.
  enum class Stage : uint8_t { kHello, kChallenge, kProof, kWelcome, kComplete };

  Handshake(const Party& self, bool connects) : self_(self), hmac_(self.key), connects_(connects) {}
  void Await(Stage stage, size_t bytes);
  void TakeHello();
  void TakeChallenge();
  void TakeProof();
  void TakeWelcome();
  void Refuse(Refusal refusal);
  Refusal Examine() const;
  Digest MacOf(std::string_view name) const;
  JobKey DirectionKey(bool of_connector) const;

  Party self_;
  Hmac hmac_;
  bool connects_;
  int peer_ = -1;
  StreamHello hello_;
  uint32_t epoch_ = 0;
  Stage stage_ = Stage::kHello;
  Refusal refusal_ = Refusal::kNone;
  size_t wanted_ = 0;
  std::vector<std::byte> received_;
  std::vector<std::byte> output_;
  std::array<std::byte, 32> first_{};      // the hello as sent
  std::array<std::byte, 32> challenge_{};  // without its MAC
};

}  // namespace farandole
