// The contract of `class DataPlane`, asked of every backend whose ranks can share a process.
#include <gtest/gtest.h>

#include "test/conformance/data_plane_backends.h"
#include "test/conformance/data_plane_harness.h"
#include "test/conformance/data_plane_reference.h"

namespace farandole {
namespace {

class DataPlaneTest : public ::testing::TestWithParam<PlaneParam> {
 protected:
  int ranks() const { return GetParam().ranks; }
  PlaneGroup Make() const { return GetParam().backend.make(ranks()); }
  std::string Threaded(const std::vector<PlaneCase>& cases) const {
    PlaneGroup group = Make();
    return RunThreaded(group,
                       OnHosts(GetParam().any_order ? InAnyOrder(cases) : cases, group.hosts));
  }
};

TEST_P(DataPlaneTest, ReducesEveryDTypeWithEveryOpAtEverySize) {
  EXPECT_EQ(Threaded(AllreduceCases(ranks())), "");
}

TEST_P(DataPlaneTest, RoundsAndScalesAsTheContractSays) {
  EXPECT_EQ(Threaded(NumericCases(ranks())), "");
}

TEST_P(DataPlaneTest, HandlesFusedSegmentsAbsentRanksAndLargeTensors) {
  EXPECT_EQ(Threaded(ShapeCases(ranks())), "");
}

TEST_P(DataPlaneTest, AddsUpInTheOrderOfSlots) {
  if (GetParam().backend.name.starts_with("Cuda")) return;  // refused before they come to a plane
  EXPECT_EQ(Threaded(SlotCases(ranks())), "");
}

TEST(SlotCases, HaveOneSumForAnyNumberOfMembers) {
  for (const int slots : {6, 8, 16}) {
    PlaneCase c{.counts = {100}, .fill = Fill::kRandom, .slots = {{0, slots}}};
    const std::vector<std::byte> alone = ReferenceResult(c);
    for (c.members = 2; c.members <= slots; ++c.members) {
      c.slots = SlotRanges(slots, c.members);
      EXPECT_EQ(ReferenceResult(c), alone) << c.members << " members of " << slots << " slots";
    }
    c.slots = {};
    c.members = slots;
    EXPECT_NE(ReferenceResult(c), alone) << "rank order";
  }
}

TEST_P(DataPlaneTest, BroadcastsUnroundedFromEveryRoot) {
  EXPECT_EQ(Threaded(BroadcastCases(ranks())), "");
}

TEST_P(DataPlaneTest, GivesEachMemberItsPartOfTheReduction) {
  EXPECT_EQ(Threaded(ReducescatterCases(ranks())), "");
}

TEST_P(DataPlaneTest, GathersTheMembersPartsUnrounded) {
  EXPECT_EQ(Threaded(AllgatherCases(ranks())), "");
}

TEST_P(DataPlaneTest, ExchangesUnroundedPartsOfAllSizes) {
  EXPECT_EQ(Threaded(AlltoallCases(ranks())), "");
}

/// Batches of several sets, three of each, all started before any is stepped.
std::string RunSetsTogether(PlaneGroup& group, int rank, const std::vector<SetView>& sets,
                            const std::vector<PlaneCase>& cases) {
  const size_t at = static_cast<size_t>(rank);
  std::vector<std::vector<std::byte>> expected;
  for (const SetView& set : sets) {
    const Status added = group.planes[at]->AddSet(set.set, set.ranks, set.my_index);
    if (!added.ok()) return added.ToString();
  }
  for (size_t k = 0; k < sets.size(); ++k) expected.push_back(ReferenceResult(cases[k]));
  std::vector<std::unique_ptr<RankRun>> runs;
  for (int64_t number = 1; number <= 3; ++number) {
    for (size_t k = 0; k < sets.size(); ++k) {
      runs.push_back(std::make_unique<RankRun>(cases[k], sets[k], number, expected[k]));
    }
  }
  std::vector<RankRun*> started;
  for (const auto& run : runs) started.push_back(run.get());
  return DriveAllToEnd(*group.planes[at], *group.bells[at], started);
}

TEST_P(DataPlaneTest, RunsSeveralSetsSideBySideAndQueuesBatchesOfEach) {
  PlaneGroup group = Make();
  OnEveryRank(ranks(), [&](int rank) {
    std::vector<SetView> sets = {GlobalSet(rank, ranks()), GlobalSet(rank, ranks())};
    sets[1].set = 9;
    SetView parity;  // the even ranks, or the odd ones
    parity.set = rank % 2 == 0 ? 20 : 21;
    parity.my_index = rank / 2;
    for (int r = rank % 2; r < ranks(); r += 2) parity.ranks.push_back(r);
    sets.push_back(parity);
    std::vector<PlaneCase> cases;
    for (const SetView& set : sets) {
      PlaneCase c;
      c.members = static_cast<int>(set.ranks.size());
      c.counts = {70'000, static_cast<int64_t>(set.set) * 1000};
      c.seed = set.set;
      c.fill = Fill::kRandom;
      c.any_order = GetParam().any_order;
      for (const int r : set.ranks) {
        if (!group.hosts.empty()) c.hosts.push_back(group.hosts[static_cast<size_t>(r)]);
      }
      cases.push_back(c);
    }
    EXPECT_EQ(RunSetsTogether(group, rank, sets, cases), "") << "rank " << rank;
  });
}

INSTANTIATE_TEST_SUITE_P(Planes, DataPlaneTest, ::testing::ValuesIn(PlanesUnderTest()),
                         [](const auto& test) { return test.param.Name(); });

}  // namespace
}  // namespace farandole
