// Whatever becomes of processes, one generation at most goes on; and membership's messages as
// bytes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "coordinator/membership/encoding.h"
#include "test/simulation/membership_world.h"

namespace farandole::simulation {
namespace {

#if defined(FARANDOLE_SANITIZE_ADDRESS) || defined(FARANDOLE_SANITIZE_THREAD)
constexpr uint64_t kSeeds = 300;
#else
constexpr uint64_t kSeeds = 5000;
#endif

void Play(uint64_t first, uint64_t seeds, MembershipTotals& totals) {
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const std::optional<std::string> failure = RunMembershipSeed(seed, &totals);
    ASSERT_FALSE(failure) << *failure << "\nagain: simulate --membership 1 --seeds 1 --first "
                          << seed;
  }
}

TEST(Membership, LetsOneGenerationGoOnAtMostAndAMajorityAlways) {
  MembershipTotals totals;
  Play(0, kSeeds, totals);
  // Otherwise the schedules have become too tame to prove anything.
  const auto seeds = static_cast<int64_t>(kSeeds);
  EXPECT_GT(totals.went_on, seeds / 2);
  EXPECT_GT(totals.halted, seeds / 2);
  EXPECT_GT(totals.told, seeds / 4);
  EXPECT_GT(totals.failed_joins, seeds / 2);
  EXPECT_GT(totals.split_joins, seeds / 20);
  EXPECT_GT(totals.generations, seeds);
  EXPECT_GT(totals.leavers, seeds / 50);
}

TEST(Membership, DoesSoWithSeedsDrawnAnew) {
  const uint64_t first = std::random_device{}();
  std::printf("simulate --membership 1 --seeds %llu --first %llu\n",
              static_cast<unsigned long long>(kSeeds), static_cast<unsigned long long>(first));
  MembershipTotals totals;
  Play(first, kSeeds, totals);
}

MemberList List(std::set<MemberId> ids) {
  MemberList list = {.generation = {1, 0}};
  for (const MemberId id : ids) list.members.push_back({id, "a:" + std::to_string(id), "a"});
  return list;
}

/// The newest message of a kind, or of none, among the actions.
std::optional<MembershipAction> Last(Membership& machine, MembershipAction::Kind kind) {
  std::optional<MembershipAction> found;
  for (MembershipAction& action : machine.TakeActions()) {
    if (action.kind == kind) found = std::move(action);
  }
  return found;
}

TEST(Quorum, IsAMajorityOrHalfWithTheFirstOrAllThatLive) {
  const MemberList list = List({1, 2, 3, 4});
  EXPECT_TRUE(IsQuorum({2, 3, 4}, list, {}, true));
  EXPECT_TRUE(IsQuorum({1, 4}, list, {}, true));
  EXPECT_FALSE(IsQuorum({3, 4}, list, {}, true));
  EXPECT_TRUE(IsQuorum({4}, list, {1, 2, 3}, true));
  EXPECT_FALSE(IsQuorum({3, 4}, list, {2}, true)) << "1 may have gone on with 2 while that lived";
  EXPECT_FALSE(IsQuorum({}, list, {1, 2, 3, 4}, true));
}

TEST(Membership, JoinsWithoutWaitingOnceAllOthersAreDead) {
  Membership machine({.self = {2, "a:2", "a"}}, List({1, 2}));
  machine.Tick(1);
  machine.Ended({1});
  ASSERT_TRUE(Last(machine, MembershipAction::Kind::kOpen));
  machine.Opened("a:9");
  const auto join = Last(machine, MembershipAction::Kind::kJoin);
  ASSERT_TRUE(join);
  EXPECT_EQ(join->rank, 0);
  EXPECT_EQ(join->list.root, "a:9");
  EXPECT_EQ(join->list.generation, (GenerationNumber{2, 2}));
}

// The program has released its engine, another rank's report comes, and only then what the engine
// has missed is told.
TEST(Membership, LeavesOutWhomItsEngineMissedUnlessThatOneReports) {
  for (const bool reports : {false, true}) {
    const MemberList list = List({1, 2, 3});
    Membership machine({.self = {2, "a:2", "a"}}, list);
    machine.Tick(1);
    MembershipMessage report = {.kind = MembershipMessage::Kind::kReport,
                                .sender = {3, "a:3", "a"},
                                .started = list,
                                .accepted = list.generation,
                                .suspects = {1}};
    machine.Received(report);
    machine.Ended();
    EXPECT_FALSE(Last(machine, MembershipAction::Kind::kOpen)) << "1 is to lead";
    report.sender = {1, "a:1", "a"};
    report.suspects = {};
    if (reports) machine.Received(report);
    machine.Ended({}, {1});
    EXPECT_EQ(Last(machine, MembershipAction::Kind::kOpen).has_value(), !reports);
  }
}

TEST(Membership, HaltsAsAMinorityAndSaysHowMany) {
  Membership machine({.self = {3, "a:3", "a"}}, List({1, 2, 3}));
  machine.Tick(1);
  machine.Ended({}, {1, 2});
  machine.TakeActions();
  for (int64_t s = 1; s <= 11; ++s) machine.Tick(s * 1'000'000'000);
  const auto halt = Last(machine, MembershipAction::Kind::kHalt);
  ASSERT_TRUE(halt);
  EXPECT_EQ(halt->text, "1 of 3 ranks is left, and the other 2 may go on without it");
}

TEST(Membership, HaltsAtOnceIfNobodyWithAVoteIsLeft) {
  MemberList list = List({1, 2, 3});
  list.without_vote = {3};
  Membership machine({.self = {3, "a:3", "a"}}, list);
  machine.Tick(1);
  machine.Ended({1, 2});
  const auto halt = Last(machine, MembershipAction::Kind::kHalt);
  ASSERT_TRUE(halt);
  EXPECT_EQ(halt->text,
            "1 of 3 ranks is left, 2 ended, and no rank that is left has a vote in who goes on");
}

// Else they would be let in without one for ever, as the job asks for no other generation.
TEST(Membership, GivesVotesOnceThoseLeftOutHaveEnded) {
  MemberList list = List({1, 2});
  list.without_vote = {2};
  list.left_out = {{3, {3, "a:3", "a"}}};
  Membership machine({.self = {1, "a:1", "a"}}, list);
  machine.Tick(1);
  const auto ping = Last(machine, MembershipAction::Kind::kSend);
  ASSERT_TRUE(ping);
  EXPECT_EQ(ping->to.id, MemberId{3});
  EXPECT_FALSE(machine.IsChangeDue());
  machine.Died({3});
  EXPECT_TRUE(machine.IsChangeDue());
}

TEST(Membership, WaitsAnewForOthersIfItWasStoppedItself) {
  Membership machine({.self = {1, "a:1", "a"}}, List({1, 2, 3}));
  machine.Tick(1);
  machine.Ended({3});
  machine.Tick(20'000'000'000);
  EXPECT_FALSE(machine.has_halted());
  machine.Received({.kind = MembershipMessage::Kind::kReport,
                    .sender = {2, "a:2", "a"},
                    .started = List({1, 2, 3}),
                    .accepted = {1, 0}});
  EXPECT_TRUE(Last(machine, MembershipAction::Kind::kOpen));
}

TEST(Membership, RefusesAProposalThatRestsOnAnOldReport) {
  Membership machine({.self = {2, "a:2", "a"}}, List({1, 2}));
  machine.Tick(1);
  machine.Ended();
  MembershipMessage proposal = {.kind = MembershipMessage::Kind::kProposal,
                                .sender = {1, "a:1", "a"},
                                .started = List({1, 2}),
                                .accepted = {2, 1},
                                .proposal = List({1, 2})};
  proposal.proposal.generation = {2, 1};
  proposal.proposal.rests_on = {{1, {1, 0}}, {2, {}}};
  machine.Received(proposal);
  auto answer = Last(machine, MembershipAction::Kind::kSend);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->message.kind, MembershipMessage::Kind::kRefusal);
  proposal.proposal.rests_on[2] = {1, 0};
  machine.Received(proposal);
  EXPECT_TRUE(Last(machine, MembershipAction::Kind::kJoin));
}

MembershipMessage Sample() {
  MemberList list = List({1, 2, 3});
  list.root = "b:7";
  list.left_out = {{9, {9, "a:9", "a"}}};
  list.newcomers = {3};
  list.without_vote = {2};
  list.rests_on = {{1, {4, 2}}, {3, {}}};
  return {.kind = MembershipMessage::Kind::kProposal,
          .sender = {1, "a:1", "a"},
          .started = List({1, 2}),
          .has_computed = true,
          .pending = {list},
          .accepted = {4, 2},
          .dead = {7},
          .suspects = {8},
          .proposal = list};
}

Status Decoded(const std::string& bytes) {
  return DecodeMembership(std::as_bytes(std::span(bytes.data(), bytes.size()))).status();
}

TEST(MembershipEncoding, GivesBackWhatItWasGiven) {
  const std::string bytes = EncodeMembership(Sample());
  const auto decoded = DecodeMembership(std::as_bytes(std::span(bytes.data(), bytes.size())));
  ASSERT_TRUE(decoded.ok()) << decoded.status().message();
  EXPECT_EQ(decoded.value(), Sample());
}

// A host may have dozens of networks, each with addresses of its own.
TEST(MembershipEncoding, HoldsAllAddressesOfAHost) {
  MembershipMessage message = Sample();
  for (int i = 0; i < 40; ++i)
    message.sender.address += ",[fd00:1234:5678:9abc::" + std::to_string(i) + "]:65535";
  EXPECT_TRUE(Decoded(EncodeMembership(message)).ok());
}

TEST(MembershipEncoding, RefusesWhatNoMachineSends) {
  const std::string bytes = EncodeMembership(Sample());
  EXPECT_EQ(Decoded(bytes.substr(0, bytes.size() - 1)).code(), Code::kInternal);
  EXPECT_EQ(Decoded("").code(), Code::kInternal);
  const auto refusal = [](auto change) {
    MembershipMessage message = Sample();
    change(message);
    return Decoded(EncodeMembership(message)).message();
  };
  using testing::HasSubstr;
  EXPECT_THAT(refusal([](auto& m) { m.kind = MembershipMessage::Kind{9}; }), HasSubstr("kind 9"));
  EXPECT_THAT(refusal([](auto& m) { m.sender.id = 0; }), HasSubstr("without an id"));
  EXPECT_THAT(refusal([](auto& m) { m.sender.host.assign(4097, 'h'); }), HasSubstr("host"));
  EXPECT_THAT(refusal([](auto& m) { m.proposal.members[1].id = 1; }),
              HasSubstr("proposal has a member twice"));
  EXPECT_THAT(refusal([](auto& m) { m.pending.resize(1025); }), HasSubstr("1025 pending lists"));
}

}  // namespace
}  // namespace farandole::simulation
