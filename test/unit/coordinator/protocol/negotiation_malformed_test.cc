// Messages that no correct peer sends are protocol errors that name the field, and messages that a
// correct one sends never exceed a frame.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/control/wire/wire.h"
#include "coordinator/diagnosis/detectors.h"
#include "coordinator/protocol/limits.h"
#include "test/simulation/random.h"
#include "test/support/negotiation_job.h"

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

/// Ranks 2.. hang under rank 1, which hangs under rank 0.
std::vector<int> Chain(int size) {
  std::vector<int> parent(static_cast<size_t>(size), 1);
  parent[0] = -1;
  parent[1] = 0;
  return parent;
}

NegotiationOptions OptionsOf(int rank, const std::vector<int>& parent) {
  NegotiationOptions options;
  options.rank = rank;
  options.size = static_cast<int>(parent.size());
  options.parent = parent;
  options.planes = {0, 0};
  options.stall_ns = 0;
  return options;
}

/// One rank of a job whose other ranks are played by the test. All that it sends fits into frames.
class Node final : public JobRank {
 public:
  Node(int rank, const std::vector<int>& parent) : JobRank(OptionsOf(rank, parent)) {}

  void SendUp(int parent, const UpMessage& message) override {
    Check(message);
    up_records += message.keys.size();
    messages += message.keys.empty() ? 0 : 1;
    if (keeps) JobRank::SendUp(parent, message);
  }
  void SendDown(int child, const DownMessage& message) override {
    Check(message);
    down_records += message.items.size();
    messages += message.items.empty() ? 0 : 1;
    if (keeps) JobRank::SendDown(child, message);
  }
  Status Submit(const std::string& name, const Signature& signature, const Vote& vote = {}) {
    return negotiation.Submit(negotiation.Intern({kGlobalSet, signature.kind, name}), signature,
                              vote);
  }
  size_t up_records = 0;
  size_t down_records = 0;
  int messages = 0;    // with records
  size_t largest = 0;  // of all, in bytes
  bool keeps = true;

 private:
  template <class Message>
  void Check(const Message& message) {
    std::vector<std::byte> bytes;
    Status status = Encode(message, bytes);
    largest = std::max(largest, bytes.size());
    UpMessage up_read;
    DownMessage down_read;
    if (status.ok()) status = FrameReader(bytes).Next(up_read, down_read).status();
    EXPECT_TRUE(status.ok()) << status.message();
  }
};

UpMessage Up(UpType type, int rank = 0) {
  UpMessage message;
  message.type = type;
  message.rank = rank;
  return message;
}

constexpr int kJoined = 4'000;

/// Submits `keys` groups of `tensors`, while thousands of ranks below have joined: lists of these
/// take more than a message in all, which gets no further record then.
void SubmitBeside(Node& node, int first_joined, int keys, int tensors) {
  node.keeps = false;
  for (int r = first_joined; r < first_joined + kJoined; ++r) {
    const int child = first_joined == 1 ? 1 : r;
    ASSERT_TRUE(node.negotiation.ReceiveUp(child, Up(UpType::kJoin, r)).ok());
  }
  for (int k = 0; k < keys; ++k) {
    ASSERT_TRUE(node.Submit("t" + std::to_string(k), Tensors(tensors)).ok());
  }
  node.negotiation.Flush();
}

TEST(Frames, HoldTheVotesOfManyTensorsWithThousandsOfJoinedRanks) {
  for (const auto& [keys, tensors] : {std::pair(120, 1), std::pair(4, 5'000)}) {
    Node relay(1, Chain(kJoined + 2));
    SubmitBeside(relay, 2, keys, tensors);
    EXPECT_EQ(relay.up_records, static_cast<size_t>(keys));
    const size_t record = tensors == 1 ? size_t{1} << 17 : size_t{4} << 20;
    EXPECT_GT(relay.messages, 1) << "more than one has room for";
    EXPECT_LT(relay.largest, kMessageBytes + record);
  }
}

TEST(Frames, HoldTheDecisionsOfManyTensorsWithThousandsOfJoinedRanks) {
  Node root(0, Chain(kJoined + 1));
  SubmitBeside(root, 1, 120, 1);
  for (int before = 0; before != root.works;) {
    before = root.works;
    root.negotiation.BatchDone(root.number, 0);
    root.negotiation.Flush();
  }
  EXPECT_EQ(root.down_records, 120u);
  EXPECT_GT(root.messages, 1) << "more than one has room for";
  EXPECT_LT(root.largest, kMessageBytes + (size_t{1} << 17));
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
  EXPECT_EQ(relay.up_records, 1u);
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
  EXPECT_EQ(relay.up_records, 1u);
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
  EXPECT_EQ(relay.up_used, 1u);
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

template <class Message>
struct Bad {
  void (*change)(Message&);
  const char* refusal;
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

WorkItem& Item(DownMessage& m) { return m.items.front(); }

DownMessage& As(DownMessage& m, DownType type, OpKind kind = OpKind::kAllreduce,
                const char* name = "") {
  m = DownMessage();
  m.type = type;
  m.number = 5;
  m.key = {kGlobalSet, kind, name};
  return m;
}
/// About "x".
DownMessage& X(DownMessage& m, DownType type) { return As(m, type, OpKind::kAllreduce, "x"); }
template <class... Ranks>
DownMessage& AddSet(DownMessage& m, Ranks... ranks) {
  As(m, DownType::kAddSet, OpKind::kAddSet, "add").set = 1;
  m.ranks = {ranks...};
  return m;
}
template <class... Ranks>
void Absent(DownMessage& m, Ranks... ranks) {
  for (const int32_t rank : {ranks...}) Item(m).absent.push_back({rank, Bits(1)});
}
int64_t OfLevel(int level) { return (int64_t{level} << kNumberLevelBit) + 1; }

constexpr Bad<DownMessage> kBadDecisions[] = {
    {[](auto& m) { Item(m).signature = Tensors(2, {9}); },
     "allreduce \"x\": decided as allreduce of 2 tensors"},
    {[](auto& m) { Item(m).signature.kind = OpKind::kReducescatter; },
     "decided as reducescatter of 2 tensors"},
    {[](auto& m) { Item(m).signature = Tensors(1); },
     "but this rank submitted allreduce of 2 tensors"},
    {[](auto& m) { Item(m).signature = OfKind(OpKind::kBarrier, {}); }, "decided as barrier"},
    {[](auto& m) { Item(m).key.set = 1; }, "work for another set"},
    {[](auto& m) { m.set = 7; }, "which is not live"},
    {[](auto& m) { m.number = OfLevel(2); }, "is of no node above"},
    {[](auto& m) { m.number = OfLevel(1); }, "which another node decides for"},
    {[](auto& m) { m.ids = {3}; }, "unknown id 3"},
    {[](auto& m) { Item(m).id = 3; }, "unknown id 3"},
    {[](auto& m) { Item(m).bind = 65'536; }, "id 65536 cannot be bound"},
    {[](auto& m) { m.items.push_back(m.items.front()); }, "decided twice at once"},
    {[](auto& m) { Item(m).key.name = "y"; }, "decided but not submitted"},
    {[](auto& m) { Absent(m, 9); }, "absent rank 9 is no member"},
    {[](auto& m) { Absent(m, 3, 2); },
     "absent rank 2 is no member of the process set, or out of order"},
    {[](auto& m) { Absent(m, 2), Item(m).absent[0].mask = Bits(4); },
     "absent beyond the last tensor"},
    {[](auto& m) { Item(m).skipped = Bits(4); }, "beyond the last is skipped"},
    {[](auto& m) { Absent(m, 1); }, "other contributions of rank 1"},
    {[](auto& m) { Item(m).key.name = "a"; }, "other contributions of rank 1"},
    {[](auto& m) { X(m, DownType::kQuery).set = 7; }, "process set number 7"},
    {[](auto& m) { X(m, DownType::kQuery).key.set = 7; }, "not that key's"},
    {[](auto& m) { X(m, DownType::kRefuse); }, "refused with code 0"},
    {[](auto& m) { X(m, DownType::kRefuse).set = 1; }, "refused or skipped in another process set"},
    {[](auto& m) { AddSet(m, 2, 0); }, "expected ascending ranks below 4"},
    {[](auto& m) { AddSet(m, 0, 4); }, "expected ascending ranks below 4"},
    {[](auto& m) { AddSet(m); }, "expected ascending ranks below 4"},
    {[](auto& m) { AddSet(m, 0, 3); },
     "decided for ranks 0, 3, but this rank submitted ranks 0, 2"},
    {[](auto& m) { AddSet(m, 0, 2).planes.resize(3); }, "with 3 data planes"},
    {[](auto& m) { AddSet(m, 0, 2).key = Decided("x").items[0].key; },
     "process set 1 is changed by allreduce \"x\""},
    {[](auto& m) { As(m, DownType::kRemoveSet, OpKind::kRemoveSet, "set 0"); },
     "process set 0 cannot be removed"},
    {[](auto& m) { As(m, DownType::kJoinDone).rank = 1; },
     "a join is done that a rank has not asked for"},
    {[](auto& m) { As(m, DownType::kJoinDone).rank = 4; }, "about rank 4 of 4"},
    {[](auto& m) { As(m, DownType::kLeft).rank = 4; }, "about rank 4 of 4"},
    {[](auto& m) { As(m, DownType::kLeft).rank = 1; }, "this rank is said to have left"},
    {[](auto& m) { As(m, DownType::kLeft).number = OfLevel(1); }, "is of no node above"},
    {[](auto& m) { As(m, DownType::kReport).number = OfLevel(2); }, "is of no node above"},
    {[](auto& m) { As(m, DownType::kRetire); }, "ids retired while others are"},
    {[](auto& m) { As(m, DownType::kRetire).ids = {1}; }, "id 1 cannot be retired"},
    {[](auto& m) { As(m, DownType::kRetire).ids = {kNoId}; }, "id 4294967295 cannot be retired"},
    {[](auto& m) { As(m, DownType::kRetire).set = 7, m.ids = {1}; },
     "a decision about process set 7, which is not live"},
    {[](auto& m) { As(m, DownType::kShutdown); }, "this rank has not left"},
};

TEST(Negotiation, RefusesBadDecisionsByNameBeforeAnythingRuns) {
  for (const auto& bad : kBadDecisions) {
    const auto node = Waiting();
    DownMessage message = Decided("x");
    bad.change(message);
    const Status status = node->negotiation.ReceiveDown(0, message);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_THAT(status.message(), HasSubstr(bad.refusal));
    EXPECT_TRUE(node->works == 0 && node->ended.empty()) << bad.refusal;
  }
}

TEST(Negotiation, RefusesWorkThatCountsOnARankThatHasJoinedAndABroadcastFromAStrangerToIt) {
  Node node(1, {-1, 0});
  ASSERT_TRUE(node.negotiation.Join().ok());
  DownMessage message = Decided("x");
  EXPECT_THAT(node.negotiation.ReceiveDown(0, message).message(),
              HasSubstr("decided with rank 1, which has joined"));
  message.number = 6;
  message.items[0].key.kind = OpKind::kBroadcast;
  message.items[0].signature = OfKind(OpKind::kBroadcast);
  message.items[0].signature.root = 2;
  message.items[0].absent = {{1, Bits(1)}};
  EXPECT_THAT(node.negotiation.ReceiveDown(0, message).message(), HasSubstr("root rank 2"));
}

UpMessage& As(UpMessage& m, UpType type, int64_t number = 0) {
  m.type = type;
  m.number = number;
  return m;
}
Signature& First(UpMessage& m) { return m.keys[0].signatures[0].signature; }
void Add(std::vector<RankMask>& masks, int32_t rank, uint64_t word = 1) {
  masks.push_back({rank, Bits(word)});
}

constexpr Bad<UpMessage> kBadVotes[] = {
    {[](auto& m) { m.keys[0].key.set = 7; }, "unknown process set 7"},
    {[](auto& m) { m.ids = {1}; }, "unknown id 1"},
    {[](auto& m) { m.keys[0].signatures.clear(); }, "without a signature"},
    {[](auto& m) { First(m) = OfKind(OpKind::kBarrier, {}); },
     "a signature of another kind of key"},
    {[](auto& m) {
       m.keys[0].signatures = {{kNoId, Tensors(1), {1}}, {kNoId, Tensors(2), {3}}};
     },
     "a signature of a rank not in the branch"},
    {[](auto& m) { Add(m.keys[0].absent, 3); }, "a mask of a rank not in the branch"},
    {[](auto& m) { Add(m.keys[0].absent, 2), Add(m.keys[0].absent, 2); },
     "a list of ranks that does not ascend"},
    {[](auto& m) { Add(m.keys[0].clean, 2, 4); }, "a mask beyond the last tensor"},
    {[](auto& m) { m.keys[0].failed.emplace_back().rank = 0; },
     "a failure of a rank not in the branch"},
    {[](auto& m) { m = Up(UpType::kJoin, 3); }, "not in the branch"},
    {[](auto& m) { As(m, UpType::kStall).key.set = 7; }, "a stall in an unknown process set"},
    {[](auto& m) { As(m, UpType::kDone); }, "batch 0 of decision 0 is not unfinished"},
    {[](auto& m) { As(m, UpType::kUnused); }, "ids of decision 0 are unused, unasked"},
    {[](auto& m) { As(m, UpType::kUnused).index = -1; }, "are unused, unasked"},
    {[](auto& m) { As(m, UpType::kDone, OfLevel(1)); }, "which no node above has made"},
};

TEST(Negotiation, RefusesBadVotesByName) {
  for (const auto& bad : kBadVotes) {
    Node root(0, {-1, 0, 1, 0});  // 2 hangs under 1
    UpMessage message;
    message.keys.push_back(VotesOn("x", Tensors(2)));
    bad.change(message);
    const Status status = root.negotiation.ReceiveUp(1, message);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_THAT(status.message(), HasSubstr(bad.refusal));
  }
}

constexpr uint32_t kBound = 3;
constexpr int64_t kRetirement = 6;

/// Rank 1 of Waiting, with an id for "x", which has run.
std::unique_ptr<Node> Bound() {
  auto node = Waiting();
  DownMessage message = Decided("x");
  Item(message).bind = kBound;
  EXPECT_TRUE(node->negotiation.ReceiveDown(0, message).ok());
  EXPECT_EQ(node->works, 1);
  node->up_used = 0;
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
  EXPECT_EQ(node.up_used, 1u);
  return node.up.front().second;
}

TEST(Negotiation, SaysThatRetiredIdsAreUnusedOnceEachBranchHasSaidSo) {
  const auto node = Bound();
  ASSERT_TRUE(Retire(*node, {kBound}).ok());
  UpMessage late;  // it crossed the decision
  late.ids = {kBound};
  EXPECT_TRUE(node->negotiation.ReceiveUp(3, late).ok());
  ASSERT_TRUE(SayUnused(*node, 2).ok());
  EXPECT_EQ(node->up_used, 0u);
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
  leaf.up_used = 0;
  ASSERT_TRUE(Retire(leaf, {kBound}).ok());
  leaf.negotiation.Flush();
  EXPECT_EQ(OnlyUp(leaf).type, UpType::kUnused);
  leaf.up_used = 0;
  leaf.up_records = 0;
  ASSERT_TRUE(leaf.Submit("x", Tensors(2)).ok());
  leaf.negotiation.Flush();
  EXPECT_EQ(leaf.up_records, 1u);  // in full, and not by the id
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
    X(query, DownType::kQuery);
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
  AddSet(message, 0, 2);
  message.planes = {0, 0};
  seeds.push_back(BytesOf(message));
  seeds.push_back(BytesOf(X(message, DownType::kQuery)));
  X(message, DownType::kRefuse).code = 2;
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
