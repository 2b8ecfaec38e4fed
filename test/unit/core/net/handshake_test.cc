#include "core/net/handshake.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace farandole {
namespace {

std::string Hex(ByteSpan bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[static_cast<size_t>(byte) >> 4];
    text += "0123456789abcdef"[static_cast<size_t>(byte) & 15];
  }
  return text;
}

// FIPS 180-4's example; RFC 4231, test case 2, whose key is shorter than a block and so the same
// with zeros behind it.
TEST(JobKey, HashesAsTheStandardsSay) {
  EXPECT_EQ(Hex(Sha256({TextBytes("a"), TextBytes("bc")})),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  JobKey key{};
  std::ranges::copy(TextBytes("Jefe"), key.begin());
  EXPECT_EQ(Hex(Hmac(key).Of({TextBytes("what do ya want "), TextBytes("for nothing?")})),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

struct Ends {
  Party connector{.key = PublicKey("a"), .job = 7, .epoch = 5, .rank = 3};
  Party acceptor{.key = PublicKey("a"), .job = 7, .epoch = 5, .rank = 1};
  StreamHello hello{StreamRole::kControl, 3, 2, 1};
  int peer = 1;
};

struct Outcome {
  Handshake connector;
  Handshake acceptor;
};

// Byte by byte, until nothing moves any more.
Outcome Play(const Ends& ends) {
  Outcome both{Handshake::Connect(ends.connector, ends.hello, ends.peer),
               Handshake::Accept(ends.acceptor)};
  const auto move = [](Handshake& from, Handshake& to) {
    const std::vector<std::byte> bytes = from.TakeOutput();
    for (const std::byte byte : bytes) {
      if (to.wanted() > 0) to.Take({&byte, 1});
    }
    return !bytes.empty();
  };
  while (move(both.connector, both.acceptor) || move(both.acceptor, both.connector)) {
  }
  return both;
}

TEST(Handshake, ProvesTheKeyBothWaysAndMakesAKeyForEachDirection) {
  const Outcome both = Play({});
  ASSERT_TRUE(both.connector.complete());
  ASSERT_TRUE(both.acceptor.complete());
  EXPECT_EQ(both.acceptor.hello().from, 3);
  EXPECT_EQ(both.acceptor.hello().plane, 2);
  EXPECT_EQ(both.acceptor.hello().number, 1);
  EXPECT_EQ(both.connector.epoch(), 5u);
  EXPECT_EQ(both.connector.send_key(), both.acceptor.receive_key());
  EXPECT_EQ(both.acceptor.send_key(), both.connector.receive_key());
  EXPECT_NE(both.connector.send_key(), both.connector.receive_key());
  EXPECT_NE(both.connector.send_key(), Play({}).connector.send_key());
}

TEST(Handshake, NamesWhatDiffersAtBothEnds) {
  const auto expect = [](Refusal refusal, void (*change)(Ends&)) {
    Ends ends;
    change(ends);
    const Outcome both = Play(ends);
    EXPECT_EQ(both.connector.refusal(), refusal) << Describe(both.connector.refusal());
    EXPECT_EQ(both.acceptor.refusal(), refusal) << Describe(both.acceptor.refusal());
    EXPECT_FALSE(both.connector.complete());
    EXPECT_FALSE(both.acceptor.complete());
  };
  expect(Refusal::kWrongKey, [](Ends& ends) { ends.connector.key = PublicKey("b"); });
  expect(Refusal::kOtherJob, [](Ends& ends) { ends.connector.job = 8; });
  expect(Refusal::kOtherEpoch, [](Ends& ends) { ends.connector.epoch = 4; });
  expect(Refusal::kNotJoining, [](Ends& ends) { ends.hello.role = StreamRole::kJoin; });
}

// Anybody could say so.
TEST(Handshake, ARefusalCountsOnlyWithItsMac) {
  for (uint8_t refusal = 1; refusal <= static_cast<uint8_t>(Refusal::kNotWanted); ++refusal) {
    const Ends ends;
    Handshake connector = Handshake::Connect(ends.connector, ends.hello, ends.peer);
    Handshake acceptor = Handshake::Accept(ends.acceptor);
    acceptor.Take(connector.TakeOutput());
    std::vector<std::byte> challenge = acceptor.TakeOutput();
    challenge[3] = std::byte{refusal};
    connector.Take(challenge);
    EXPECT_EQ(connector.refusal(), Refusal::kWrongKey);
  }
}

TEST(Handshake, FindsAnotherRankThere) {
  Ends ends;
  ends.peer = 2;
  EXPECT_EQ(Play(ends).connector.refusal(), Refusal::kOtherRank);
}

TEST(Handshake, ARankThatJoinsNeedNotKnowTheEpoch) {
  Ends ends;
  ends.hello.role = StreamRole::kJoin;
  ends.connector.epoch = 0;
  ends.acceptor.joining = true;
  const Outcome both = Play(ends);
  EXPECT_TRUE(both.acceptor.complete());
  EXPECT_EQ(both.connector.epoch(), 5u);
}

TEST(Handshake, TakesNothingThatWasChangedOnItsWay) {
  for (size_t at = 0; at < 32 + 64 + 32 + 32; ++at) {
    const Ends ends;
    Handshake connector = Handshake::Connect(ends.connector, ends.hello, ends.peer);
    Handshake acceptor = Handshake::Accept(ends.acceptor);
    size_t sent = 0;
    const auto move = [&](Handshake& from, Handshake& to) {
      std::vector<std::byte> bytes = from.TakeOutput();
      if (at >= sent && at < sent + bytes.size()) bytes[at - sent] ^= std::byte{1};
      sent += bytes.size();
      if (to.wanted() > 0) to.Take(bytes);
      return !bytes.empty();
    };
    while (move(connector, acceptor) || move(acceptor, connector)) {
    }
    EXPECT_FALSE(connector.complete() && acceptor.complete()) << "byte " << at;
  }
}

TEST(Handshake, KnowsAnotherVersionAndWhatIsNoHandshakeAtAll) {
  const Ends ends;
  Handshake connector = Handshake::Connect(ends.connector, ends.hello, ends.peer);
  std::vector<std::byte> hello = connector.TakeOutput();
  hello[2] = std::byte{kNetVersion + 1};
  Handshake acceptor = Handshake::Accept(ends.acceptor);
  acceptor.Take(hello);
  EXPECT_EQ(acceptor.refusal(), Refusal::kOtherVersion);
  std::vector<std::byte> challenge = acceptor.TakeOutput();
  challenge[2] = std::byte{kNetVersion + 1};
  connector.Take(challenge);
  EXPECT_EQ(connector.refusal(), Refusal::kOtherVersion);

  Handshake other = Handshake::Accept(ends.acceptor);
  other.Take(TextBytes("GET / HTTP/1.1\r\n"));
  EXPECT_EQ(other.refusal(), Refusal::kGarbage);
  EXPECT_TRUE(other.TakeOutput().empty());
}

// Whatever was recorded of another connection: the acceptor's nonce is new each time.
TEST(Handshake, RefusesWhatWasRecorded) {
  const Ends ends;
  Handshake connector = Handshake::Connect(ends.connector, ends.hello, ends.peer);
  const std::vector<std::byte> hello = connector.TakeOutput();
  Handshake first = Handshake::Accept(ends.acceptor);
  first.Take(hello);
  connector.Take(first.TakeOutput());
  const std::vector<std::byte> proof = connector.TakeOutput();
  first.Take(proof);
  EXPECT_TRUE(first.complete());
  Handshake second = Handshake::Accept(ends.acceptor);
  second.Take(hello);
  second.Take(proof);
  EXPECT_EQ(second.refusal(), Refusal::kWrongKey);
}

TEST(Handshake, ReadsAtMost64BytesBeforeTheProof) {
  const Ends ends;
  EXPECT_LE(Handshake::Accept(ends.acceptor).wanted(), kMaxUnprovenBytes);
  EXPECT_LE(Handshake::Connect(ends.connector, ends.hello, 1).wanted() - sizeof(Digest),
            kMaxUnprovenBytes);
}

}  // namespace
}  // namespace farandole
