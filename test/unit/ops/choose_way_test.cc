#include "ops/cuda/choose_way.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace farandole {
namespace {

using Way = WayChoice::Way;

/// Rank `rank` on host a, each with a GPU of its own and NCCL 2.32.3.
RankCard Card(int rank) {
  RankCard card;
  card.rank = rank;
  card.host = "a boot-of-a";
  card.device_index = rank;
  card.bus_id = "0000:0" + std::to_string(rank) + ":00.0";
  card.device_name = "NVIDIA H100 80GB HBM3";
  card.runtime = "CUDA runtime 13.0, driver 13.0";
  card.nccl_version = 23203;
  card.nccl = "/x/libnccl.so.2";
  card.shm_free_bytes = int64_t{8} << 30;
  return card;
}

std::vector<RankCard> Cards(int count) {
  std::vector<RankCard> cards;
  for (int rank = 0; rank < count; ++rank) cards.push_back(Card(rank));
  return cards;
}

WayChoice Choose(const std::vector<RankCard>& cards) {
  Result<WayChoice> choice = ChooseWay(cards);
  EXPECT_TRUE(choice.ok()) << choice.status().ToString();
  return choice.ok() ? choice.value() : WayChoice{};
}

TEST(ChooseWay, TakesNcclWhereEveryRankHasAGpuOfItsOwn) {
  const WayChoice choice = Choose(Cards(4));
  EXPECT_EQ(choice.way, Way::kNccl);
  EXPECT_EQ(choice.why, "");
  EXPECT_EQ(choice.advice, "");
}

TEST(ChooseWay, TakesNcclWhereBusIdsAreEqualOnDifferentHosts) {
  std::vector<RankCard> cards = Cards(2);
  cards[1].bus_id = cards[0].bus_id;
  cards[1].host = "b boot-of-b";
  EXPECT_EQ(Choose(cards).way, Way::kNccl);
}

TEST(ChooseWay, NeedsNoNcclForOneMember) {
  std::vector<RankCard> cards = Cards(1);
  cards[0].nccl_version = 0;
  EXPECT_EQ(Choose(cards).way, Way::kSolo);
}

TEST(ChooseWay, StagesRanksThatShareAGpu) {
  std::vector<RankCard> cards = Cards(3);
  cards[2].bus_id = cards[1].bus_id;
  const WayChoice choice = Choose(cards);
  EXPECT_EQ(choice.way, Way::kStaged);
  EXPECT_EQ(choice.why,
            "ranks 1 and 2 of host a share the GPU 0000:01:00.0, which NCCL refuses. Give each "
            "rank a GPU of its own; FARANDOLE_SHARE_GPU=1 lets NCCL 2.30.0 or newer share one");
}

TEST(ChooseWay, SharesAGpuOverNcclWhereTheUserAskedAndEveryNcclCan) {
  std::vector<RankCard> cards = Cards(2);
  for (RankCard& card : cards) {
    card.bus_id = "0000:17:00.0";
    card.share_gpu = true;
    card.nccl_version = 23000;
  }
  EXPECT_EQ(Choose(cards).way, Way::kNcclShared);
  cards[0].share_gpu = false;
  EXPECT_EQ(Choose(cards).way, Way::kStaged);
}

TEST(ChooseWay, AskedToShareUsesPlainNcclWhereNobodyShares) {
  std::vector<RankCard> cards = Cards(2);
  for (RankCard& card : cards) card.share_gpu = true;
  EXPECT_EQ(Choose(cards).way, Way::kNccl);
}

TEST(ChooseWay, StagesASharedGpuWhoseNcclIsTooOldNamingVersionAndRank) {
  std::vector<RankCard> cards = Cards(2);
  for (RankCard& card : cards) {
    card.bus_id = "0000:17:00.0";
    card.share_gpu = true;
  }
  cards[1].nccl_version = 22907;
  const WayChoice choice = Choose(cards);
  EXPECT_EQ(choice.way, Way::kStaged);
  EXPECT_EQ(choice.why,
            "ranks 0 and 1 of host a share the GPU 0000:17:00.0, and FARANDOLE_SHARE_GPU needs "
            "NCCL 2.30.0 or newer, but rank 1 (host a) has 2.29.7 (/x/libnccl.so.2). Install a "
            "newer one there");
}

TEST(ChooseWay, StagesWhereARankHasNoNcclNamingItAndWhy) {
  for (const bool shared : {false, true}) {
    std::vector<RankCard> cards = Cards(3);
    cards[2].nccl_version = 0;
    cards[2].nccl = "libnccl.so.2 was found nowhere";
    for (RankCard& card : cards) card.share_gpu = shared;
    if (shared) cards[1].bus_id = cards[0].bus_id;
    const WayChoice choice = Choose(cards);
    EXPECT_EQ(choice.way, Way::kStaged);
    EXPECT_EQ(choice.why,
              "rank 2 (host a) has no NCCL: libnccl.so.2 was found nowhere. Install "
              "nvidia-nccl-cu13 (or -cu12) there, or name the file by FARANDOLE_NCCL");
  }
}

TEST(ChooseWay, RefusesDifferentNcclVersionsNamingRanksVersionsAndFiles) {
  std::vector<RankCard> cards = Cards(4);
  cards[3].nccl_version = 22304;
  cards[3].nccl = "/old/libnccl.so.2";
  cards[3].host = "b boot-of-b";
  const Status status = ChooseWay(cards).status();
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_EQ(status.message(),
            "ranks have different NCCL versions: rank 3 (host b): 2.23.4 (/old/libnccl.so.2); rank "
            "0 (host a) and 2 more: 2.32.3 (/x/libnccl.so.2). Install one version everywhere, or "
            "name one file by FARANDOLE_NCCL on all ranks");
}

TEST(ChooseWay, LetsVersionsDifferWhereNcclIsNotUsed) {
  std::vector<RankCard> cards = Cards(2);
  cards[1].bus_id = cards[0].bus_id;
  cards[1].nccl_version = 22304;
  EXPECT_EQ(Choose(cards).way, Way::kStaged);
}

TEST(ChooseWay, RefusesWhereARankCannotUseItsGpuWithItsSentence) {
  std::vector<RankCard> cards = Cards(3);
  cards[1].failure = Unavailable("this process sees no CUDA device");
  Status status = ChooseWay(cards).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.message(),
            "rank 1 (host a) cannot use its GPU: this process sees no CUDA device");
  cards[2].failure = Internal("cudaStreamCreate: out of memory");
  status = ChooseWay(cards).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.message(),
            "rank 1 (host a) cannot use its GPU: this process sees no CUDA device (and 1 more)");
}

TEST(ChooseWay, WarnsOfASmallSharedMemoryOfAHostButGoesOn) {
  std::vector<RankCard> cards = Cards(3);
  cards[2].host = "b boot-of-b";  // one rank: nobody to share memory with
  cards[2].shm_free_bytes = 0;
  EXPECT_EQ(Choose(cards).advice, "");
  cards[0].shm_free_bytes = int64_t{63} << 20;
  const WayChoice choice = Choose(cards);
  EXPECT_EQ(choice.way, Way::kNccl);
  EXPECT_EQ(choice.advice,
            "/dev/shm of host a has 63 MiB free; NCCL may need up to 64 MiB for its 2 ranks there. "
            "Enlarge it (docker run --shm-size, or remount it)");
  cards[0].shm_free_bytes = -1;
  EXPECT_EQ(Choose(cards).advice, "");
}

TEST(DescribeRanks, SaysWhoSitsWhereAndCutsTheList) {
  EXPECT_EQ(DescribeRanks(Cards(2)),
            "rank 0: host a, GPU 0000:00:00.0; rank 1: host a, GPU 0000:01:00.0");
  const std::string many = DescribeRanks(Cards(40));
  EXPECT_NE(many.find("rank 15:"), std::string::npos);
  EXPECT_EQ(many.find("rank 16:"), std::string::npos);
  EXPECT_TRUE(many.ends_with("; and 24 more ranks")) << many;
}

TEST(Card, SurvivesBeingWrittenAndRead) {
  RankCard card = Card(5);
  card.failure = ResourceExhausted("no memory");
  card.share_gpu = true;
  std::vector<std::byte> bytes(kCardBytes, std::byte{0xff});
  WriteCard(card, bytes);
  const Result<RankCard> read = ReadCard(bytes);
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  const RankCard& got = read.value();
  EXPECT_EQ(got.rank, 5);
  EXPECT_EQ(got.host, card.host);
  EXPECT_EQ(got.device_index, card.device_index);
  EXPECT_EQ(got.bus_id, card.bus_id);
  EXPECT_EQ(got.device_name, card.device_name);
  EXPECT_EQ(got.runtime, card.runtime);
  EXPECT_EQ(got.nccl_version, card.nccl_version);
  EXPECT_EQ(got.nccl, card.nccl);
  EXPECT_EQ(got.shm_free_bytes, card.shm_free_bytes);
  EXPECT_TRUE(got.share_gpu);
  EXPECT_EQ(got.failure.ToString(), card.failure.ToString());
}

TEST(Card, CutsLongTexts) {
  RankCard card = Card(0);
  card.nccl.assign(10'000, 'x');
  std::vector<std::byte> bytes(kCardBytes);
  WriteCard(card, bytes);
  EXPECT_EQ(ReadCard(bytes).value().nccl, std::string(511, 'x'));
}

TEST(Card, IsNotReadFromZeros) {
  const std::vector<std::byte> bytes(kCardBytes);
  EXPECT_EQ(ReadCard(bytes).status().code(), Code::kInternal);
}

}  // namespace
}  // namespace farandole
