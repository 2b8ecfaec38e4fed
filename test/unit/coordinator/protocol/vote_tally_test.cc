// One node's rounds without the rest of a negotiation: who has voted, what goes up, and when.
#include "coordinator/protocol/vote_tally.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "test/support/ignoring_listener.h"

namespace farandole {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// Keeps what goes up.
class Sent final : public IgnoringListener {
 public:
  void SendUp(int, const UpMessage& message) override { messages.push_back(message); }
  std::vector<UpMessage> messages;
};

Signature Floats() {
  Signature signature;
  signature.tensors.push_back({"", DType::kFloat32, {4}});
  return signature;
}

NegotiationOptions ChainOfThree(int rank) {
  NegotiationOptions options;
  options.rank = rank;
  options.size = 3;
  options.parent = {-1, 0, 1};
  return options;
}

/// Rank 1 of three in a chain, with keys that have the ids 10, 11, 12, ...
class SeveralKeys : public testing::Test {
 protected:
  explicit SeveralKeys(int rank = 1) : node(ChainOfThree(rank), sent), tally(node) {
    for (uint32_t i = 0; i < 6; ++i) {
      keys.push_back(node.keys.Intern({kGlobalSet, OpKind::kAllreduce, std::to_string(i)}));
      cached.push_back(node.keys.Bind(10 + i, keys.back(), Floats()));
    }
  }
  Status VoteHere(size_t key, const StepCount& step = {}) {
    return tally.CountOwn(keys[key], *cached[key], step);
  }
  Status VoteBelow(std::vector<uint32_t> ids) {
    UpMessage votes;
    votes.ids = std::move(ids);
    return tally.ReceiveVotes(0, votes);
  }
  Status Close(size_t key) {
    return tally.CloseRound(node.keys.At(keys[key]), *node.sets.Find(kGlobalSet));
  }
  /// What goes up now.
  std::vector<uint32_t> Ids() {
    sent.messages.clear();
    tally.SendVotes();
    return sent.messages.empty() ? std::vector<uint32_t>() : sent.messages.front().ids;
  }

  Sent sent;
  NodeState node;
  VoteTally tally;
  std::vector<KeyId> keys;
  std::vector<const CachedSignature*> cached;
};

class OnRankZero : public SeveralKeys {
 protected:
  OnRankZero() : SeveralKeys(0) {}
};

TEST_F(OnRankZero, AreListedOnceComplete) {
  ASSERT_TRUE(VoteBelow({10}).ok());
  EXPECT_THAT(tally.complete(), IsEmpty());
  EXPECT_EQ(tally.open_rounds(), 1);
  ASSERT_TRUE(VoteHere(0).ok());
  ASSERT_EQ(tally.complete().size(), 1U);
  EXPECT_EQ(tally.complete()[0].key, keys[0]);
  EXPECT_THAT(sent.messages, IsEmpty());
}

TEST_F(SeveralKeys, HaveNoRoundClosedBeforeItIsComplete) {
  ASSERT_TRUE(VoteHere(0).ok());
  EXPECT_THAT(Ids(), IsEmpty());
  EXPECT_THAT(Close(0).message(), HasSubstr("decided before it was complete"));
  ASSERT_TRUE(VoteBelow({10}).ok());
  ASSERT_TRUE(Close(0).ok());
  EXPECT_EQ(tally.open_rounds(), 0);
  EXPECT_TRUE(VoteHere(0).ok());
}

TEST_F(SeveralKeys, GoAheadOfTheJoinThatCompletesThem) {
  ASSERT_TRUE(VoteHere(0).ok());
  ASSERT_TRUE(tally.Join(2).ok());
  ASSERT_EQ(sent.messages.size(), 2U);
  EXPECT_EQ(sent.messages[0].type, UpType::kVotes);
  ASSERT_EQ(sent.messages[0].keys.size(), 1U);
  EXPECT_EQ(sent.messages[0].keys[0].absent, std::vector<RankMask>({{2, {1}}}));
  EXPECT_EQ(sent.messages[1].type, UpType::kJoin);
  EXPECT_EQ(sent.messages[1].rank, 2);
  EXPECT_EQ(tally.last_joined(), 2);
}

TEST_F(SeveralKeys, GoUpInTheOrderInWhichTheyAreComplete) {
  ASSERT_TRUE(VoteBelow({13, 14, 10, 11}).ok());
  EXPECT_EQ(tally.open_rounds(), 4);
  for (const size_t key : {0u, 1u, 3u, 4u}) ASSERT_TRUE(VoteHere(key).ok());
  EXPECT_THAT(Ids(), ElementsAre(10, 11, 13, 14));
  EXPECT_EQ(tally.open_rounds(), 4);
  for (const size_t key : {0u, 1u, 3u, 4u}) ASSERT_TRUE(Close(key).ok());
  EXPECT_EQ(tally.open_rounds(), 0);
}

TEST_F(SeveralKeys, AreHeldBackForNoOther) {
  ASSERT_TRUE(VoteBelow({10, 11, 12, 13}).ok());
  ASSERT_TRUE(VoteHere(0).ok());
  ASSERT_TRUE(VoteHere(1).ok());
  EXPECT_THAT(Ids(), ElementsAre(10, 11));
  ASSERT_TRUE(VoteHere(3).ok());
  EXPECT_THAT(Ids(), ElementsAre(13));
  ASSERT_TRUE(VoteHere(2).ok());
  EXPECT_THAT(Ids(), ElementsAre(12));
  EXPECT_EQ(tally.open_rounds(), 4);
}

TEST_F(SeveralKeys, RefuseASecondVoteForOneOfThem) {
  ASSERT_TRUE(VoteBelow({10, 11, 12}).ok());
  EXPECT_THAT(VoteBelow({11}).message(), HasSubstr("a second vote"));
}

TEST_F(SeveralKeys, GoByIdThoughOneIsOfAnotherStep) {
  ASSERT_TRUE(VoteBelow({10, 11, 12}).ok());
  const StepCount third{.step = 3, .passes = 1};
  ASSERT_TRUE(VoteHere(0).ok());
  ASSERT_TRUE(VoteHere(1, third).ok());
  ASSERT_TRUE(VoteHere(2).ok());
  EXPECT_THAT(Ids(), ElementsAre(10, 12));
  ASSERT_EQ(sent.messages.front().keys.size(), 1U);
  EXPECT_EQ(sent.messages.front().keys.front().key.name, "1");
}

TEST_F(SeveralKeys, GoByIdThoughOneHasTwoSignatures) {
  Signature larger = Floats();
  larger.tensors.front().shape = {8};
  const CachedSignature* const second = node.keys.Bind(16, keys[1], larger);
  ASSERT_TRUE(VoteBelow({10, 11, 12}).ok());
  ASSERT_TRUE(tally.CountOwn(keys[1], *second, {}).ok());
  ASSERT_TRUE(VoteHere(0).ok());
  EXPECT_THAT(Ids(), ElementsAre(10));
  ASSERT_EQ(sent.messages.front().keys.size(), 1U);
  EXPECT_EQ(sent.messages.front().keys.front().signatures.size(), 2U);
}

TEST_F(SeveralKeys, AreSentBeforeAJoinOnceComplete) {
  ASSERT_TRUE(VoteBelow({10, 11, 12}).ok());
  ASSERT_TRUE(VoteHere(0).ok());
  ASSERT_TRUE(tally.Join(2).ok());
  ASSERT_EQ(sent.messages.size(), 2U);
  EXPECT_THAT(sent.messages[0].ids, ElementsAre(10));
  EXPECT_EQ(sent.messages[1].type, UpType::kJoin);
  ASSERT_TRUE(VoteHere(1).ok());
  EXPECT_THAT(Ids(), ElementsAre(11));
}

TEST_F(SeveralKeys, GoWithTheirSet) {
  ASSERT_TRUE(VoteBelow({10, 11, 12}).ok());
  for (const KeyId key : keys) tally.DropRound(node.keys.At(key));
  EXPECT_EQ(tally.open_rounds(), 0);
  ASSERT_TRUE(VoteHere(0).ok());
  EXPECT_THAT(Ids(), IsEmpty());
}

}  // namespace
}  // namespace farandole
