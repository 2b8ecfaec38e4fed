// Messages that no correct peer sends are protocol errors that name the field, and messages that a
// correct one sends never exceed a frame.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/control/wire/wire.h"
#include "coordinator/diagnosis/detectors.h"
#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/negotiation.h"
#include "test/simulation/random.h"
#include "test/support/ignoring_listener.h"

namespace farandole {
namespace {

using testing::HasSubstr;

Signature Tensors(int count, std::vector<int64_t> shape = {2}) {
  Signature signature;
  for (int i = 0; i < count; ++i) signature.tensors.push_back({"", DType::kFloat32, shape});
  return signature;
}

Signature OfKind(OpKind kind, Signature signature = Tensors(1)) {
  signature.kind = kind;
  return signature;
}

Mask Bits(uint64_t word) { return {word}; }

/// One rank of a job whose other ranks are played by the test. What it sends goes through frames.
class Node final : public IgnoringListener, private DetectorListener {
 public:
  Node(int rank, std::vector<int> parent)
      : negotiation(Options(rank, std::move(parent)), *this, Detectors(*this)) {}

  void SendUp(int, const UpMessage& message) override { Send(message, up); }
  void SendDown(int, const DownMessage& message) override { Send(message, down); }
  void OnWork(const WorkDecision& work) override {
    ++works;
    number = work.number;
  }
  void OnEnded(KeyId, const Status& status) override { ended.push_back(status); }
  std::vector<std::string> OnStalls(const std::vector<StallFacts>&, int64_t) override { return {}; }

  Status Submit(const std::string& name, const Signature& signature, const Vote& vote = {}) {
    return negotiation.Submit(negotiation.Intern({kGlobalSet, signature.kind, name}), signature,
                              vote);
  }
  /// The frames it sent, parsed as the receiver does; counts the records in them.
  std::vector<std::vector<std::byte>> up, down;
  Status refused;  // the first frame that could not be made or read
  int64_t up_records = 0;
  int64_t down_records = 0;
  int works = 0;
  int64_t number = 0;
  std::vector<Status> ended;
  bool keeps = true;

  Negotiation negotiation;

 private:
  static NegotiationOptions Options(int rank, std::vector<int> parent) {
    NegotiationOptions options;
    options.rank = rank;
    options.size = static_cast<int>(parent.size());
    options.parent = std::move(parent);
    options.planes = {0, 0};
    options.stall_ns = 0;
    return options;
  }
  template <class Message>
  void Send(const Message& message, std::vector<std::vector<std::byte>>& box) {
    std::vector<std::byte> bytes;
    Status status = Encode(message, bytes);
    UpMessage up_read;
    DownMessage down_read;
    FrameReader reader(bytes);
    if (status.ok()) status = reader.Next(up_read, down_read).status();
    if (!status.ok() && refused.ok()) refused = status;
    up_records += static_cast<int64_t>(up_read.keys.size());
    down_records += static_cast<int64_t>(down_read.items.size());
    if (keeps) box.push_back(std::move(bytes));
  }
};

/// Ranks 2.. hang under rank 1, which hangs under rank 0.
std::vector<int> Chain(int size) {
  std::vector<int> parent(static_cast<size_t>(size), 1);
  parent[0] = -1;
  parent[1] = 0;
  return parent;
}

UpMessage JoinOf(int rank) {
  UpMessage message;
  message.type = UpType::kJoin;
  message.rank = rank;
  return message;
}

constexpr int kJoined = 4'000;
constexpr int kKeys = 1'200;

TEST(Frames, HoldTheVotesOfManyTensorsWithThousandsOfJoinedRanks) {
  Node relay(1, Chain(kJoined + 2));
  relay.keeps = false;
  for (int r = 2; r < kJoined + 2; ++r) ASSERT_TRUE(relay.negotiation.ReceiveUp(r, JoinOf(r)).ok());
  for (int k = 0; k < kKeys; ++k) {
    ASSERT_TRUE(relay.Submit("t" + std::to_string(k), Tensors(1)).ok());
  }
  relay.negotiation.Flush();
  EXPECT_TRUE(relay.refused.ok()) << relay.refused.message();
  EXPECT_EQ(relay.up_records, kKeys);
}

TEST(Frames, HoldTheDecisionsOfManyTensorsWithThousandsOfJoinedRanks) {
  Node root(0, Chain(kJoined + 1));
  root.keeps = false;
  for (int r = 1; r <= kJoined; ++r) ASSERT_TRUE(root.negotiation.ReceiveUp(1, JoinOf(r)).ok());
  for (int k = 0; k < kKeys; ++k) {
    ASSERT_TRUE(root.Submit("t" + std::to_string(k), Tensors(1)).ok());
  }
  root.negotiation.Flush();
  for (int before = 0; root.refused.ok() && before != root.works;) {
    before = root.works;
    root.negotiation.BatchDone(root.number, 0);
    root.negotiation.Flush();
  }
  EXPECT_TRUE(root.refused.ok()) << root.refused.message();
  EXPECT_EQ(root.down_records, kKeys);
}

TEST(Frames, HoldTheVotesOfLargeGroupsWithThousandsOfJoinedRanks) {
  Node relay(1, Chain(kJoined + 2));
  relay.keeps = false;
  for (int r = 2; r < kJoined + 2; ++r) ASSERT_TRUE(relay.negotiation.ReceiveUp(r, JoinOf(r)).ok());
  for (int k = 0; k < 40; ++k) {
    ASSERT_TRUE(relay.Submit("g" + std::to_string(k), Tensors(5'000)).ok());
  }
  relay.negotiation.Flush();
  EXPECT_TRUE(relay.refused.ok()) << relay.refused.message();
  EXPECT_EQ(relay.up_records, 40);
}

TEST(Frames, AGroupWhoseListsCouldExceedOneIsRefusedWhereItIsSubmitted) {
  Node relay(1, Chain(kJoined + 2));
  const Status refused = relay.Submit("g", Tensors(65'536, {1}));
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("a group of 65536 tensors among 4002 ranks"));
}

KeyVotes VotesOn(const std::string& name, const Signature& signature) {
  KeyVotes votes;
  votes.key = {kGlobalSet, signature.kind, name};
  votes.signatures.push_back({kNoId, signature, {}});
  return votes;
}

/// Votes of ranks 2.. under rank 1, each different.
UpMessage VoteOf(int rank, const std::function<void(KeyVotes&)>& change) {
  UpMessage message;
  KeyVotes& votes = message.keys.emplace_back();
  votes.key = {kGlobalSet, OpKind::kAllreduce, "k"};
  votes.signatures.push_back({kNoId, Tensors(1, {rank}), {}});
  change(votes);
  return message;
}

TEST(Frames, HoldTheDisagreementOfManyRanksOverLargeGroups) {
  constexpr int kSize = 40;
  Node relay(1, Chain(kSize));
  for (int r = 2; r < kSize; ++r) {
    Signature large = Tensors(1000, {r});
    for (TensorSignature& tensor : large.tensors) tensor.name.assign(4000, 'x');
    const auto vote = VoteOf(r, [&](KeyVotes& votes) { votes.signatures[0].signature = large; });
    ASSERT_TRUE(relay.negotiation.ReceiveUp(r, vote).ok());
  }
  ASSERT_TRUE(relay.Submit("k", Tensors(1)).ok());
  relay.negotiation.Flush();
  EXPECT_TRUE(relay.refused.ok()) << relay.refused.message();
  EXPECT_EQ(relay.up_records, 1);
}

TEST(Frames, HoldTheFailuresOfManyRanks) {
  constexpr int kSize = 20'000;  // 4 KiB each: more than a frame
  Node relay(1, Chain(kSize));
  for (int r = 2; r < kSize; ++r) {
    const auto vote = VoteOf(r, [&](KeyVotes& votes) {
      votes.signatures[0].signature = Tensors(1);
      votes.failed = {{r, std::string(4000, 'f')}};
    });
    ASSERT_TRUE(relay.negotiation.ReceiveUp(r, vote).ok());
  }
  ASSERT_TRUE(relay.Submit("k", Tensors(1)).ok());
  relay.negotiation.Flush();
  EXPECT_TRUE(relay.refused.ok()) << relay.refused.message();
  EXPECT_EQ(relay.up_records, 1);
}

TEST(Frames, HoldTheAnswersOfManyRanks) {
  constexpr int kSize = 20'000;
  Node relay(1, Chain(kSize));
  DownMessage query;
  query.type = DownType::kQuery;
  query.number = 1;
  query.key = {kGlobalSet, OpKind::kAllreduce, "k"};
  ASSERT_TRUE(relay.negotiation.ReceiveDown(0, query).ok());
  for (int r = 2; r < kSize; ++r) {
    UpMessage answer;
    answer.type = UpType::kAnswer;
    answer.number = 1;
    answer.answers = {{r, true, std::string(2000, 's'), std::string(2000, 'l'), 0}};
    ASSERT_TRUE(relay.negotiation.ReceiveUp(r, answer).ok());
  }
  EXPECT_TRUE(relay.refused.ok()) << relay.refused.message();
  EXPECT_EQ(relay.up.size(), 1u);
}

TEST(Frames, AreRefusedByTheSenderBeyondTheLimit) {
  DownMessage report;
  report.type = DownType::kStallShutdown;
  report.text.assign(kMaxFrameBytes + 1, 'x');
  std::vector<std::byte> bytes(3);
  const Status status = Encode(report, bytes);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("limit 67108864"));
  EXPECT_EQ(bytes.size(), 3u);
}

// Decisions that reach rank 1 of ranks 0..3, 2 and 3 below it. It has submitted "x" as present and
// "a" as absent; both are complete here.

struct BadDecision {
  const char* name;
  void (*change)(DownMessage&);
  const char* text;
};

DownMessage Decided(const std::string& name) {
  DownMessage message;
  message.number = 5;
  WorkItem& item = message.items.emplace_back();
  item.key = {kGlobalSet, OpKind::kAllreduce, name};
  item.signature = Tensors(2);
  return message;
}

std::unique_ptr<Node> Waiting() {
  auto node = std::make_unique<Node>(1, Chain(4));
  Vote absent;
  absent.absent = Bits(1);
  EXPECT_TRUE(node->Submit("x", Tensors(2)).ok());
  EXPECT_TRUE(node->Submit("a", Tensors(2), absent).ok());
  Signature set = OfKind(OpKind::kAddSet, {});
  set.ranks = {0, 2};
  EXPECT_TRUE(node->Submit("add", set).ok());
  for (const int r : {2, 3}) {
    UpMessage votes;
    for (const char* name : {"x", "a"}) {
      votes.keys.push_back(VotesOn(name, Tensors(2)));
    }
    votes.keys.push_back(VotesOn("add", set));
    EXPECT_TRUE(node->negotiation.ReceiveUp(r, votes).ok());
  }
  node->negotiation.Flush();
  return node;
}

class BadDecisions : public testing::TestWithParam<BadDecision> {};

TEST_P(BadDecisions, AreRefusedBeforeAnythingRuns) {
  const auto node = Waiting();
  DownMessage message = Decided("x");
  GetParam().change(message);
  const Status status = node->negotiation.ReceiveDown(0, message);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_THAT(status.message(), HasSubstr(GetParam().text));
  EXPECT_EQ(node->works, 0);
  EXPECT_TRUE(node->ended.empty());
}

WorkItem& Item(DownMessage& m) { return m.items.front(); }

DownMessage& As(DownMessage& m, DownType type, OpKind kind, const char* name) {
  m = DownMessage();
  m.type = type;
  m.number = 5;
  m.key = {kGlobalSet, kind, name};
  return m;
}

INSTANTIATE_TEST_SUITE_P(
    Fields, BadDecisions,
    testing::Values(
        BadDecision{"AnotherShape", [](DownMessage& m) { Item(m).signature = Tensors(2, {9}); },
                    "allreduce \"x\": decided as allreduce of 2 tensors"},
        BadDecision{"AnotherKind",
                    [](DownMessage& m) { Item(m).signature.kind = OpKind::kReducescatter; },
                    "decided as reducescatter of 2 tensors"},
        BadDecision{"FewerTensors", [](DownMessage& m) { Item(m).signature = Tensors(1); },
                    "but this rank submitted allreduce of 2 tensors"},
        BadDecision{"ABarrier",
                    [](DownMessage& m) { Item(m).signature = OfKind(OpKind::kBarrier, {}); },
                    "decided as barrier"},
        BadDecision{"AnotherSet", [](DownMessage& m) { Item(m).key.set = 1; },
                    "work for another set"},
        BadDecision{"UnknownSet", [](DownMessage& m) { m.set = 7; }, "which is not live"},
        BadDecision{"OfANodeBelow",
                    [](DownMessage& m) { m.number = int64_t{2} << kNumberLevelBit; },
                    "is of no node above"},
        BadDecision{"OfThisNode",
                    [](DownMessage& m) { m.number = (int64_t{1} << kNumberLevelBit) + 1; },
                    "which another node decides for"},
        BadDecision{"UnknownId", [](DownMessage& m) { m.ids = {3}; }, "unknown id 3"},
        BadDecision{"UnknownIdOfItem", [](DownMessage& m) { Item(m).id = 3; }, "unknown id 3"},
        BadDecision{"BindBeyondTheTable", [](DownMessage& m) { Item(m).bind = 65'536; },
                    "id 65536 cannot be bound"},
        BadDecision{"Twice", [](DownMessage& m) { m.items.push_back(m.items.front()); },
                    "decided twice at once"},
        BadDecision{"NotSubmitted", [](DownMessage& m) { Item(m).key.name = "y"; },
                    "decided but not submitted"},
        BadDecision{"AbsentStranger",
                    [](DownMessage& m) {
                      Item(m).absent = {{9, Bits(1)}};
                    },
                    "absent rank 9 is no member"},
        BadDecision{"AbsentOutOfOrder",
                    [](DownMessage& m) {
                      Item(m).absent = {{3, Bits(1)}, {2, Bits(1)}};
                    },
                    "absent rank 2 is no member of the process set, or out of order"},
        BadDecision{"AbsentBeyondTheLast",
                    [](DownMessage& m) {
                      Item(m).absent = {{2, Bits(4)}};
                    },
                    "absent beyond the last tensor"},
        BadDecision{"SkippedBeyondTheLast", [](DownMessage& m) { Item(m).skipped = Bits(4); },
                    "beyond the last is skipped"},
        BadDecision{"AbsentThoughPresent",
                    [](DownMessage& m) {
                      Item(m).absent = {{1, Bits(1)}};
                    },
                    "other contributions of rank 1"},
        BadDecision{"PresentThoughAbsent", [](DownMessage& m) { Item(m).key.name = "a"; },
                    "other contributions of rank 1"},
        BadDecision{
            "QueryOfAnUnknownSet",
            [](DownMessage& m) { As(m, DownType::kQuery, OpKind::kAllreduce, "x").set = 7; },
            "process set number 7"},
        BadDecision{
            "QueryAboutAnotherSet",
            [](DownMessage& m) { As(m, DownType::kQuery, OpKind::kAllreduce, "x").key.set = 7; },
            "not that key's"},
        BadDecision{"RefusalWithoutACode",
                    [](DownMessage& m) { As(m, DownType::kRefuse, OpKind::kAllreduce, "x"); },
                    "refused with code 0"},
        BadDecision{
            "RefusalInAnotherSet",
            [](DownMessage& m) { As(m, DownType::kRefuse, OpKind::kAllreduce, "x").set = 1; },
            "refused or skipped in another process set"},
        BadDecision{"SetOfDescendingRanks",
                    [](DownMessage& m) {
                      As(m, DownType::kAddSet, OpKind::kAddSet, "add").set = 1;
                      m.ranks = {2, 0};
                    },
                    "expected ascending ranks below 4"},
        BadDecision{"SetOfRanksBeyondTheJob",
                    [](DownMessage& m) {
                      As(m, DownType::kAddSet, OpKind::kAddSet, "add").set = 1;
                      m.ranks = {0, 4};
                    },
                    "expected ascending ranks below 4"},
        BadDecision{
            "SetWithoutRanks",
            [](DownMessage& m) { As(m, DownType::kAddSet, OpKind::kAddSet, "add").set = 1; },
            "expected ascending ranks below 4"},
        BadDecision{"SetOfOtherRanks",
                    [](DownMessage& m) {
                      As(m, DownType::kAddSet, OpKind::kAddSet, "add").set = 1;
                      m.ranks = {0, 3};
                    },
                    "decided for ranks 0, 3, but this rank submitted ranks 0, 2"},
        BadDecision{"SetWithTooManyPlanes",
                    [](DownMessage& m) {
                      As(m, DownType::kAddSet, OpKind::kAddSet, "add").set = 1;
                      m.ranks = {0, 2};
                      m.planes = {0, 0, 0};
                    },
                    "with 3 data planes"},
        BadDecision{"SetAddedByAnAllreduce",
                    [](DownMessage& m) {
                      As(m, DownType::kAddSet, OpKind::kAllreduce, "x").set = 1;
                      m.ranks = {0, 2};
                    },
                    "process set 1 is changed by allreduce \"x\""},
        BadDecision{
            "RemovedGlobalSet",
            [](DownMessage& m) { As(m, DownType::kRemoveSet, OpKind::kRemoveSet, "set 0"); },
            "process set 0 cannot be removed"},
        BadDecision{
            "JoinNobodyAskedFor",
            [](DownMessage& m) { As(m, DownType::kJoinDone, OpKind::kAllreduce, "").rank = 1; },
            "a join is done that a rank has not asked for"},
        BadDecision{
            "LastJoinedStranger",
            [](DownMessage& m) { As(m, DownType::kJoinDone, OpKind::kAllreduce, "").rank = 4; },
            "about rank 4 of 4"},
        BadDecision{"LeftStranger",
                    [](DownMessage& m) { As(m, DownType::kLeft, OpKind::kAllreduce, "").rank = 4; },
                    "about rank 4 of 4"},
        BadDecision{"LeftItself",
                    [](DownMessage& m) { As(m, DownType::kLeft, OpKind::kAllreduce, "").rank = 1; },
                    "this rank is said to have left"},
        BadDecision{"LeftByAnotherThanRankZero",
                    [](DownMessage& m) {
                      m.type = DownType::kLeft;
                      m.number = (int64_t{1} << kNumberLevelBit) + 1;
                    },
                    "is of no node above"},
        BadDecision{"ReportOfANodeBelow",
                    [](DownMessage& m) {
                      m.type = DownType::kReport;
                      m.number = (int64_t{2} << kNumberLevelBit) + 1;
                    },
                    "is of no node above"},
        BadDecision{"RetiredNothing",
                    [](DownMessage& m) { As(m, DownType::kRetire, OpKind::kAllreduce, ""); },
                    "ids retired while others are"},
        BadDecision{
            "RetiredUnknownId",
            [](DownMessage& m) { As(m, DownType::kRetire, OpKind::kAllreduce, "").ids = {1}; },
            "id 1 cannot be retired"},
        BadDecision{
            "RetiredIdOfAHighLevel",
            [](DownMessage& m) { As(m, DownType::kRetire, OpKind::kAllreduce, "").ids = {kNoId}; },
            "id 4294967295 cannot be retired"},
        BadDecision{"RetiredInUnknownSet",
                    [](DownMessage& m) {
                      As(m, DownType::kRetire, OpKind::kAllreduce, "").set = 7;
                      m.ids = {1};
                    },
                    "a decision about process set 7, which is not live"},
        BadDecision{"Shutdown",
                    [](DownMessage& m) { As(m, DownType::kShutdown, OpKind::kAllreduce, ""); },
                    "this rank has not left"}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(Negotiation, RefusesABroadcastFromAStrangerToARankThatHasJoined) {
  Node node(1, {-1, 0});
  ASSERT_TRUE(node.negotiation.Join().ok());
  DownMessage message = Decided("x");
  message.items[0].key.kind = OpKind::kBroadcast;
  message.items[0].signature = OfKind(OpKind::kBroadcast);
  message.items[0].signature.root = 2;
  message.items[0].absent = {{1, Bits(1)}};
  EXPECT_THAT(node.negotiation.ReceiveDown(0, message).message(), HasSubstr("root rank 2"));
}

TEST(Negotiation, RefusesWorkThatCountsOnARankThatHasJoined) {
  Node node(1, {-1, 0});
  ASSERT_TRUE(node.negotiation.Join().ok());
  EXPECT_THAT(node.negotiation.ReceiveDown(0, Decided("x")).message(),
              HasSubstr("decided with rank 1, which has joined"));
}

struct BadVote {
  const char* name;
  void (*change)(UpMessage&);
  const char* text;
};

class BadVotes : public testing::TestWithParam<BadVote> {};

TEST_P(BadVotes, AreRefused) {
  Node root(0, {-1, 0, 1, 0});  // 2 hangs under 1
  UpMessage message;
  message.keys.push_back(VotesOn("x", Tensors(2)));
  GetParam().change(message);
  const Status status = root.negotiation.ReceiveUp(1, message);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_THAT(status.message(), HasSubstr(GetParam().text));
}

INSTANTIATE_TEST_SUITE_P(
    Fields, BadVotes,
    testing::Values(
        BadVote{"UnknownSet", [](UpMessage& m) { m.keys[0].key.set = 7; }, "unknown process set 7"},
        BadVote{"UnknownId", [](UpMessage& m) { m.ids = {1}; }, "unknown id 1"},
        BadVote{"NoSignature", [](UpMessage& m) { m.keys[0].signatures.clear(); },
                "without a signature"},
        BadVote{
            "ABarrierUnderAUsersName",
            [](UpMessage& m) { m.keys[0].signatures[0].signature = OfKind(OpKind::kBarrier, {}); },
            "a signature of another kind of key"},
        BadVote{"SignatureOfAStranger",
                [](UpMessage& m) {
                  m.keys[0].signatures = {{kNoId, Tensors(1), {1}}, {kNoId, Tensors(2), {3}}};
                },
                "a signature of a rank not in the branch"},
        BadVote{"AbsentStranger",
                [](UpMessage& m) {
                  m.keys[0].absent = {{3, Bits(1)}};
                },
                "a mask of a rank not in the branch"},
        BadVote{"AbsentTwice",
                [](UpMessage& m) {
                  m.keys[0].absent = {{2, Bits(1)}, {2, Bits(2)}};
                },
                "a list of ranks that does not ascend"},
        BadVote{"CleanBeyondTheLast",
                [](UpMessage& m) {
                  m.keys[0].clean = {{2, Bits(4)}};
                },
                "a mask beyond the last tensor"},
        BadVote{"FailedStranger",
                [](UpMessage& m) {
                  m.keys[0].failed = {{0, "no"}};
                },
                "a failure of a rank not in the branch"},
        BadVote{"JoinOfAStranger", [](UpMessage& m) { m = JoinOf(3); }, "not in the branch"},
        BadVote{"StallInAnUnknownSet",
                [](UpMessage& m) {
                  m.type = UpType::kStall;
                  m.key.set = 7;
                },
                "a stall in an unknown process set"},
        BadVote{"DoneOfNoBatch", [](UpMessage& m) { m.type = UpType::kDone; },
                "batch 0 of decision 0 is not unfinished"},
        BadVote{"UnusedUnasked", [](UpMessage& m) { m.type = UpType::kUnused; },
                "ids of decision 0 are unused, unasked"},
        BadVote{"UnusedInAnUnknownSet",
                [](UpMessage& m) {
                  m.type = UpType::kUnused;
                  m.index = -1;
                },
                "are unused, unasked"},
        BadVote{"DoneOfANodeBelow",
                [](UpMessage& m) {
                  m.type = UpType::kDone;
                  m.number = int64_t{1} << kNumberLevelBit;
                },
                "which no node above has made"}),
    [](const auto& one) { return std::string(one.param.name); });

constexpr uint32_t kBound = 3;
constexpr int64_t kRetirement = 6;

/// Rank 1 of Waiting, with an id for "x", which has run.
std::unique_ptr<Node> Bound() {
  auto node = Waiting();
  DownMessage message = Decided("x");
  Item(message).bind = kBound;
  EXPECT_TRUE(node->negotiation.ReceiveDown(0, message).ok());
  EXPECT_EQ(node->works, 1);
  node->up.clear();
  return node;
}

Status Retire(Node& node, std::vector<uint32_t> ids, int64_t number = kRetirement) {
  DownMessage message;
  message.type = DownType::kRetire;
  message.number = number;
  message.ids = std::move(ids);
  return node.negotiation.ReceiveDown(0, message);
}

Status SayUnused(Node& node, int child, int64_t number = kRetirement, int32_t set = 0) {
  UpMessage message;
  message.type = UpType::kUnused;
  message.number = number;
  message.index = set;
  const Status status = node.negotiation.ReceiveUp(child, message);
  node.negotiation.Flush();
  return status;
}

/// The one message that it sent up.
UpMessage OnlyUp(const Node& node) {
  UpMessage up;
  DownMessage down;
  EXPECT_EQ(node.up.size(), 1u);
  for (const auto& bytes : node.up) EXPECT_TRUE(FrameReader(bytes).Next(up, down).ok());
  return up;
}

TEST(Negotiation, SaysThatRetiredIdsAreUnusedOnceEachBranchHasSaidSo) {
  const auto node = Bound();
  ASSERT_TRUE(Retire(*node, {kBound}).ok());
  UpMessage late;  // it crossed the decision
  late.ids = {kBound};
  EXPECT_TRUE(node->negotiation.ReceiveUp(3, late).ok());
  ASSERT_TRUE(SayUnused(*node, 2).ok());
  EXPECT_TRUE(node->up.empty());
  ASSERT_TRUE(SayUnused(*node, 3).ok());
  EXPECT_EQ(OnlyUp(*node).type, UpType::kUnused);
  EXPECT_EQ(OnlyUp(*node).number, kRetirement);
  EXPECT_EQ(OnlyUp(*node).index, 0);
  EXPECT_THAT(node->negotiation.ReceiveUp(2, late).message(), HasSubstr("unknown id 3"));
}

TEST(Negotiation, ARankWithNobodyBelowSaysAtOnceThatRetiredIdsAreUnused) {
  Node leaf(1, {-1, 0});
  ASSERT_TRUE(leaf.Submit("x", Tensors(2)).ok());
  leaf.negotiation.Flush();
  DownMessage message = Decided("x");
  Item(message).bind = kBound;
  ASSERT_TRUE(leaf.negotiation.ReceiveDown(0, message).ok());
  leaf.up.clear();
  ASSERT_TRUE(Retire(leaf, {kBound}).ok());
  leaf.negotiation.Flush();
  EXPECT_EQ(OnlyUp(leaf).type, UpType::kUnused);
  leaf.up.clear();
  leaf.up_records = 0;
  ASSERT_TRUE(leaf.Submit("x", Tensors(2)).ok());
  leaf.negotiation.Flush();
  EXPECT_EQ(leaf.up_records, 1);  // in full, and not by the id
}

TEST(Negotiation, RefusesToRetireAnIdTwiceAndOthersBeforeItIsUnused) {
  EXPECT_THAT(Retire(*Bound(), {kBound, kBound}).message(), HasSubstr("id 3 cannot be retired"));
  const auto node = Bound();
  ASSERT_TRUE(Retire(*node, {kBound}).ok());
  EXPECT_THAT(Retire(*node, {kBound}, kRetirement + 1).message(),
              HasSubstr("ids retired while others are"));
}

TEST(Negotiation, RefusesABranchThatSaysAnythingElseOfRetiredIdsThanItIsAsked) {
  const auto refusal = [](const std::function<Status(Node&)>& say) {
    const auto node = Bound();
    EXPECT_TRUE(Retire(*node, {kBound}).ok());
    const Status status = say(*node);
    EXPECT_EQ(status.code(), Code::kInternal);
    return status.message();
  };
  const auto is_refused = HasSubstr("are unused, unasked");
  EXPECT_THAT(refusal([](Node& node) { return SayUnused(node, 2, kRetirement - 1); }), is_refused);
  EXPECT_THAT(refusal([](Node& node) { return SayUnused(node, 2, kRetirement, 1); }), is_refused);
  EXPECT_THAT(refusal([](Node& node) {
                EXPECT_TRUE(SayUnused(node, 2).ok());
                return SayUnused(node, 2);
              }),
              is_refused);
}

TEST(Negotiation, RefusesAnswersOfStrangersAndOfOneRankTwice) {
  for (const std::vector<int>& ranks : {std::vector<int>{3}, {2, 2}, {-1}}) {
    Node node(1, Chain(4));
    DownMessage query;
    As(query, DownType::kQuery, OpKind::kAllreduce, "x");
    ASSERT_TRUE(node.negotiation.ReceiveDown(0, query).ok());
    UpMessage answer;
    answer.type = UpType::kAnswer;
    answer.number = 5;
    for (const int rank : ranks) answer.answers.emplace_back().rank = rank;
    EXPECT_THAT(node.negotiation.ReceiveUp(2, answer).message(), HasSubstr("answer of rank"));
  }
}

/// Overwrites one byte of a frame's payload; lengths stay, so that most frames still parse.
void Mutate(simulation::Random& random, std::vector<std::byte>& bytes) {
  for (int i = random.Between(1, 3); i > 0; --i) {
    const int at = random.Between(8, static_cast<int>(bytes.size()) - 1);
    bytes[static_cast<size_t>(at)] =
        static_cast<std::byte>(random.Percent(70) ? random.Below(8) : random.Below(256));
  }
}

template <class Message>
std::vector<std::byte> BytesOf(const Message& message) {
  std::vector<std::byte> bytes;
  EXPECT_TRUE(Encode(message, bytes).ok());
  return bytes;
}

TEST(Negotiation, AnswersMutatedDecisionsWithAStatus) {
  std::vector<std::vector<std::byte>> seeds;
  DownMessage message = Decided("x");
  message.items[0].bind = 0;
  message.items.push_back(Decided("a").items[0]);
  message.items[1].absent = {{1, Bits(1)}, {2, Bits(1)}};
  seeds.push_back(BytesOf(message));
  As(message, DownType::kAddSet, OpKind::kAddSet, "add").set = 1;
  message.ranks = {0, 2};
  message.planes = {0, 0};
  seeds.push_back(BytesOf(message));
  seeds.push_back(BytesOf(As(message, DownType::kQuery, OpKind::kAllreduce, "x")));
  As(message, DownType::kRefuse, OpKind::kAllreduce, "x").code = 2;
  seeds.push_back(BytesOf(message));
  int accepted = 0;
  constexpr int kRounds = 6'000;
  for (int seed = 0; seed < kRounds; ++seed) {
    simulation::Random random(static_cast<uint64_t>(seed));
    std::vector<std::byte> bytes = seeds[static_cast<size_t>(random.Below(4))];
    if (seed >= 4) Mutate(random, bytes);
    UpMessage up;
    DownMessage down;
    FrameReader reader(bytes);
    const Result<FrameReader::Kind> read = reader.Next(up, down);
    if (!read.ok() || read.value() != FrameReader::Kind::kDown) continue;
    const auto node = Waiting();
    const Status status = node->negotiation.ReceiveDown(0, down);
    accepted += status.ok() ? 1 : 0;
    ASSERT_TRUE(status.ok() || status.code() == Code::kInternal) << "seed " << seed;
  }
  EXPECT_GT(accepted, 4);
  EXPECT_LT(accepted, kRounds / 2);
}

}  // namespace
}  // namespace farandole
