#include "core/net/handshake.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace farandole {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire format is little endian");

constexpr uint16_t kMagic = 0xFA4D;

struct HelloBytes {
  uint16_t magic = kMagic;
  uint8_t version = kNetVersion;
  uint8_t role = 0;
  uint32_t job = 0;
  uint32_t epoch = 0;
  uint32_t from = 0;
  uint8_t plane = 0;
  uint8_t number = 0;
  std::array<std::byte, 14> nonce{};
};
static_assert(sizeof(HelloBytes) == 32);

struct ChallengeBytes {
  uint16_t magic = kMagic;
  uint8_t version = kNetVersion;
  uint8_t refusal = 0;
  uint32_t rank = 0;
  uint32_t epoch = 0;
  uint32_t reserved = 0;
  std::array<std::byte, 16> nonce{};
};
static_assert(sizeof(ChallengeBytes) == 32);

template <class Struct>
Struct Read(ByteSpan bytes) {
  Struct value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

}  // namespace

const char* Describe(Refusal refusal) {
  switch (refusal) {
    case Refusal::kNone:
      return "does not refuse";
    case Refusal::kGarbage:
      return "does not speak farandole's protocol";
    case Refusal::kOtherVersion:
      return "runs another version of farandole";
    case Refusal::kOtherJob:
      return "belongs to another job";
    case Refusal::kWrongKey:
      return "holds another job key, or belongs to another job";
    case Refusal::kOtherEpoch:
      return "belongs to another start of the job";
    case Refusal::kNotJoining:
      return "lets no rank join now";
    case Refusal::kOtherRank:
      return "is another rank";
    case Refusal::kNotWanted:
      return "has no use for the connection";
  }
  return "refuses for an unknown reason";
}

Handshake Handshake::Connect(const Party& self, const StreamHello& hello, int peer) {
  Handshake handshake(self, true);
  handshake.hello_ = hello;
  handshake.peer_ = peer;
  HelloBytes bytes;
  bytes.role = static_cast<uint8_t>(hello.role);
  bytes.job = self.job;
  bytes.epoch = self.epoch;
  bytes.from = static_cast<uint32_t>(hello.from);
  bytes.plane = hello.plane;
  bytes.number = hello.number;
  FillRandom(bytes.nonce);
  std::memcpy(handshake.first_.data(), &bytes, sizeof bytes);
  handshake.output_.assign(handshake.first_.begin(), handshake.first_.end());
  handshake.Await(Stage::kChallenge, sizeof(ChallengeBytes) + sizeof(Digest));
  return handshake;
}

Handshake Handshake::Accept(const Party& self) {
  Handshake handshake(self, false);
  handshake.epoch_ = self.epoch;
  handshake.Await(Stage::kHello, sizeof(HelloBytes));
  return handshake;
}

void Handshake::Await(Stage stage, size_t bytes) {
  stage_ = stage;
  wanted_ = bytes;
  received_.clear();
}

// Whoever sends something else altogether, an HTTP request say, is found out by the magic number;
// a message of another version may have another length.
void Handshake::Take(ByteSpan bytes) {
  received_.insert(received_.end(), bytes.begin(),
                   bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), wanted())));
  const bool opens = stage_ == Stage::kHello || stage_ == Stage::kChallenge;
  if (opens && received_.size() >= 2 && Read<uint16_t>(received_) != kMagic) {
    return Refuse(Refusal::kGarbage);
  }
  if (stage_ == Stage::kChallenge && received_.size() >= sizeof(ChallengeBytes)) {
    const auto challenge = Read<ChallengeBytes>(received_);
    if (challenge.version != kNetVersion) return Refuse(Refusal::kOtherVersion);
  }
  if (wanted() > 0) return;
  switch (stage_) {
    case Stage::kHello:
      return TakeHello();
    case Stage::kChallenge:
      return TakeChallenge();
    case Stage::kProof:
      return TakeProof();
    case Stage::kWelcome:
      return TakeWelcome();
    case Stage::kComplete:
      return;
  }
}

Refusal Handshake::Examine() const {
  const auto hello = Read<HelloBytes>(first_);
  if (hello.version != kNetVersion) return Refusal::kOtherVersion;
  if (hello.job != self_.job) return Refusal::kOtherJob;
  if (hello.role < 1 || hello.role > static_cast<uint8_t>(StreamRole::kMember) ||
      hello.from > INT32_MAX)
    return Refusal::kGarbage;
  if (hello.role == static_cast<uint8_t>(StreamRole::kJoin)) {
    return self_.joining ? Refusal::kNone : Refusal::kNotJoining;
  }
  return hello.epoch == self_.epoch ? Refusal::kNone : Refusal::kOtherEpoch;
}

// The connector learns why, and only then the connection ends.
void Handshake::TakeHello() {
  std::memcpy(first_.data(), received_.data(), sizeof first_);
  const auto hello = Read<HelloBytes>(first_);
  const Refusal refusal = Examine();
  hello_ = {static_cast<StreamRole>(hello.role), static_cast<int>(hello.from), hello.plane,
            hello.number};
  ChallengeBytes challenge;
  challenge.refusal = static_cast<uint8_t>(refusal);
  challenge.rank = static_cast<uint32_t>(self_.rank);
  challenge.epoch = self_.epoch;
  FillRandom(challenge.nonce);
  std::memcpy(challenge_.data(), &challenge, sizeof challenge);
  const Digest mac = MacOf("challenge");
  output_.assign(challenge_.begin(), challenge_.end());
  output_.insert(output_.end(), mac.begin(), mac.end());
  if (refusal != Refusal::kNone) return Refuse(refusal);
  Await(Stage::kProof, sizeof(Digest));
}

// With the wrong key the proof is sent, too: so the acceptor can say what was wrong.
void Handshake::TakeChallenge() {
  const auto challenge = Read<ChallengeBytes>(received_);
  std::memcpy(challenge_.data(), received_.data(), sizeof challenge_);
  const bool proven =
      EqualDigests(ByteSpan(received_).subspan(sizeof challenge), MacOf("challenge"));
  if (proven && challenge.refusal != 0) {
    const bool known = challenge.refusal <= static_cast<uint8_t>(Refusal::kNotWanted);
    return Refuse(known ? static_cast<Refusal>(challenge.refusal) : Refusal::kGarbage);
  }
  const bool wrong_rank = proven && challenge.rank != static_cast<uint32_t>(peer_);
  if (wrong_rank) return Refuse(Refusal::kOtherRank);
  const Digest proof = MacOf("proof");
  output_.assign(proof.begin(), proof.end());
  if (!proven) return Refuse(Refusal::kWrongKey);
  epoch_ = challenge.epoch;
  Await(Stage::kWelcome, sizeof(Digest));
}

void Handshake::TakeProof() {
  if (!EqualDigests(received_, MacOf("proof"))) return Refuse(Refusal::kWrongKey);
  const Digest welcome = MacOf("welcome");
  output_.assign(welcome.begin(), welcome.end());
  Await(Stage::kComplete, 0);
}

void Handshake::TakeWelcome() {
  if (!EqualDigests(received_, MacOf("welcome"))) return Refuse(Refusal::kGarbage);
  Await(Stage::kComplete, 0);
}

void Handshake::Refuse(Refusal refusal) {
  refusal_ = refusal;
  wanted_ = 0;
  received_.clear();
}

Digest Handshake::MacOf(std::string_view name) const {
  return hmac_.Of({TextBytes(name), first_, challenge_});
}

JobKey Handshake::DirectionKey(bool of_connector) const {
  return MacOf(of_connector ? "key of the connector" : "key of the acceptor");
}

}  // namespace farandole
