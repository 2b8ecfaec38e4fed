// One node's rounds without the rest of a negotiation: who has voted, what goes up, and when.
#include "coordinator/protocol/vote_tally.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
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

/// Rank 0 or 1 of a chain of three ranks, with one key that has id 5.
class Tally : public testing::Test {
 protected:
  void Open(int rank) {
    node = std::make_unique<NodeState>(ChainOfThree(rank), sent);
    tally = std::make_unique<VoteTally>(*node);
    key = node->keys.Intern({kGlobalSet, OpKind::kAllreduce, "x"});
    cached = node->keys.Bind(5, key, Floats());
  }
  Status VoteHere() { return tally->CountOwn(key, *cached, {}); }
  Status VoteBelow() {
    UpMessage votes;
    votes.ids = {5};
    return tally->ReceiveVotes(0, votes);
  }

  Sent sent;
  std::unique_ptr<NodeState> node;
  std::unique_ptr<VoteTally> tally;
  KeyId key = 0;
  const CachedSignature* cached = nullptr;
};

TEST_F(Tally, SendsAKeyUpOnceAllBelowHaveVoted) {
  Open(1);
  ASSERT_TRUE(VoteHere().ok());
  tally->SendVotes();
  EXPECT_THAT(sent.messages, IsEmpty());
  ASSERT_TRUE(VoteBelow().ok());
  tally->SendVotes();
  ASSERT_EQ(sent.messages.size(), 1U);
  EXPECT_THAT(sent.messages[0].ids, ElementsAre(5));
}

TEST_F(Tally, ListsCompleteKeysOnRankZero) {
  Open(0);
  ASSERT_TRUE(VoteBelow().ok());
  EXPECT_THAT(tally->complete(), IsEmpty());
  EXPECT_EQ(tally->open_rounds(), 1);
  ASSERT_TRUE(VoteHere().ok());
  EXPECT_THAT(tally->complete(), ElementsAre(key));
  EXPECT_THAT(sent.messages, IsEmpty());
}

TEST_F(Tally, ClosesNoRoundBeforeItIsComplete) {
  Open(1);
  const SetState& global = *node->sets.Find(kGlobalSet);
  ASSERT_TRUE(VoteHere().ok());
  EXPECT_THAT(tally->CloseRound(node->keys.At(key), global).message(),
              HasSubstr("decided before it was complete"));
  ASSERT_TRUE(VoteBelow().ok());
  ASSERT_TRUE(tally->CloseRound(node->keys.At(key), global).ok());
  EXPECT_EQ(tally->open_rounds(), 0);
  EXPECT_TRUE(VoteHere().ok());
}

TEST_F(Tally, SendsWhatAJoinCompletesAheadOfTheJoin) {
  Open(1);
  ASSERT_TRUE(VoteHere().ok());
  ASSERT_TRUE(tally->Join(2).ok());
  ASSERT_EQ(sent.messages.size(), 2U);
  EXPECT_EQ(sent.messages[0].type, UpType::kVotes);
  ASSERT_EQ(sent.messages[0].keys.size(), 1U);
  EXPECT_EQ(sent.messages[0].keys[0].absent, std::vector<RankMask>({{2, {1}}}));
  EXPECT_EQ(sent.messages[1].type, UpType::kJoin);
  EXPECT_EQ(sent.messages[1].rank, 2);
  EXPECT_EQ(tally->last_joined(), 2);
}

}  // namespace
}  // namespace farandole
