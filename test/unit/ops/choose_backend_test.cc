#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "ops/gpu/backend_selection.h"

namespace farandole {
namespace {

using Kind = BackendChoice::Kind;

/// Rank `rank` on host a, each with a GPU of its own and NCCL 2.32.3.
PeerCapabilities Peer(int rank) {
  PeerCapabilities peer;
  peer.rank = rank;
  peer.host = "a boot-of-a";
  peer.bus_id = "0000:0" + std::to_string(rank) + ":00.0";
  peer.runtime = "CUDA runtime 13.0, driver 13.0";
  peer.nccl_version = 23203;
  peer.nccl = "/x/libnccl.so.2";
  peer.shm_free_bytes = int64_t{8} << 30;
  return peer;
}

std::vector<PeerCapabilities> Peers(int count) {
  std::vector<PeerCapabilities> peers;
  for (int rank = 0; rank < count; ++rank) peers.push_back(Peer(rank));
  return peers;
}

BackendChoice Choose(const std::vector<PeerCapabilities>& peers) {
  Result<BackendChoice> choice = ChooseBackend(peers);
  EXPECT_TRUE(choice.ok()) << choice.status().ToString();
  return choice.ok() ? choice.value() : BackendChoice{};
}

TEST(ChooseBackend, TakesNcclWhereEveryRankHasAGpuOfItsOwn) {
  const BackendChoice choice = Choose(Peers(4));
  EXPECT_EQ(choice.kind, Kind::kNccl);
  EXPECT_EQ(choice.why, "");
  EXPECT_EQ(choice.advice, "");
}

TEST(ChooseBackend, TakesNcclWhereBusIdsAreEqualOnDifferentHosts) {
  std::vector<PeerCapabilities> peers = Peers(2);
  peers[1].bus_id = peers[0].bus_id;
  peers[1].host = "b boot-of-b";
  EXPECT_EQ(Choose(peers).kind, Kind::kNccl);
}

TEST(ChooseBackend, NeedsNoNcclForOneMember) {
  std::vector<PeerCapabilities> peers = Peers(1);
  peers[0].nccl_version = 0;
  EXPECT_EQ(Choose(peers).kind, Kind::kSolo);
}

TEST(ChooseBackend, StagesRanksThatShareAGpu) {
  std::vector<PeerCapabilities> peers = Peers(3);
  peers[2].bus_id = peers[1].bus_id;
  const BackendChoice choice = Choose(peers);
  EXPECT_EQ(choice.kind, Kind::kStaged);
  EXPECT_EQ(choice.why,
            "ranks 1 and 2 of host a share the GPU 0000:01:00.0, which NCCL refuses. Give each "
            "rank a GPU of its own; FARANDOLE_SHARE_GPU=1 lets NCCL 2.30.0 or newer share one");
}

TEST(ChooseBackend, SharesAGpuOverNcclWhereTheUserAskedAndEveryNcclCan) {
  std::vector<PeerCapabilities> peers = Peers(2);
  for (PeerCapabilities& peer : peers) {
    peer.bus_id = "0000:17:00.0";
    peer.share_gpu = 1;
    peer.nccl_version = 23000;
  }
  EXPECT_EQ(Choose(peers).kind, Kind::kNcclShared);
  peers[0].share_gpu = 0;
  EXPECT_EQ(Choose(peers).kind, Kind::kStaged);
}

TEST(ChooseBackend, AskedToShareUsesPlainNcclWhereNobodyShares) {
  std::vector<PeerCapabilities> peers = Peers(2);
  for (PeerCapabilities& peer : peers) peer.share_gpu = 1;
  EXPECT_EQ(Choose(peers).kind, Kind::kNccl);
}

TEST(ChooseBackend, StagesASharedGpuWhoseNcclIsTooOldNamingVersionAndRank) {
  std::vector<PeerCapabilities> peers = Peers(2);
  for (PeerCapabilities& peer : peers) {
    peer.bus_id = "0000:17:00.0";
    peer.share_gpu = 1;
  }
  peers[1].nccl_version = 22907;
  const BackendChoice choice = Choose(peers);
  EXPECT_EQ(choice.kind, Kind::kStaged);
  EXPECT_EQ(choice.why,
            "ranks 0 and 1 of host a share the GPU 0000:17:00.0, and FARANDOLE_SHARE_GPU needs "
            "NCCL 2.30.0 or newer, but rank 1 (host a) has 2.29.7 (/x/libnccl.so.2). Install a "
            "newer one there");
}

TEST(ChooseBackend, StagesWhereARankHasNoNcclNamingItAndWhy) {
  for (const bool shared : {false, true}) {
    std::vector<PeerCapabilities> peers = Peers(3);
    peers[2].nccl_version = 0;
    peers[2].nccl = "libnccl.so.2 was found nowhere";
    for (PeerCapabilities& peer : peers) peer.share_gpu = shared;
    if (shared) peers[1].bus_id = peers[0].bus_id;
    const BackendChoice choice = Choose(peers);
    EXPECT_EQ(choice.kind, Kind::kStaged);
    EXPECT_EQ(choice.why,
              "rank 2 (host a) has no NCCL: libnccl.so.2 was found nowhere. Install "
              "nvidia-nccl-cu13 (or -cu12) there, or name the file by FARANDOLE_NCCL");
  }
}

TEST(ChooseBackend, RefusesDifferentNcclVersionsNamingRanksVersionsAndFiles) {
  std::vector<PeerCapabilities> peers = Peers(4);
  peers[3].nccl_version = 22304;
  peers[3].nccl = "/old/libnccl.so.2";
  peers[3].host = "b boot-of-b";
  const Status status = ChooseBackend(peers).status();
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_EQ(status.message(),
            "ranks have different NCCL versions: rank 3 (host b): 2.23.4 (/old/libnccl.so.2); rank "
            "0 (host a) and 2 more: 2.32.3 (/x/libnccl.so.2). Install one version everywhere, or "
            "name one file by FARANDOLE_NCCL on all ranks");
}

TEST(ChooseBackend, LetsVersionsDifferWhereNcclIsNotUsed) {
  std::vector<PeerCapabilities> peers = Peers(2);
  peers[1].bus_id = peers[0].bus_id;
  peers[1].nccl_version = 22304;
  EXPECT_EQ(Choose(peers).kind, Kind::kStaged);
}

TEST(ChooseBackend, RefusesWhereARankCannotUseItsGpuWithItsMessage) {
  std::vector<PeerCapabilities> peers = Peers(3);
  peers[1].SetFailure(Unavailable("this process sees no CUDA device"));
  Status status = ChooseBackend(peers).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.message(),
            "rank 1 (host a) cannot use its GPU: this process sees no CUDA device");
  peers[2].SetFailure(Internal("cudaStreamCreate: out of memory"));
  status = ChooseBackend(peers).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.message(),
            "rank 1 (host a) cannot use its GPU: this process sees no CUDA device (and 1 more)");
}

TEST(ChooseBackend, WarnsOfASmallSharedMemoryOfAHostButGoesOn) {
  std::vector<PeerCapabilities> peers = Peers(3);
  peers[2].host = "b boot-of-b";  // one rank: nobody to share memory with
  peers[2].shm_free_bytes = 0;
  EXPECT_EQ(Choose(peers).advice, "");
  peers[0].shm_free_bytes = int64_t{63} << 20;
  const BackendChoice choice = Choose(peers);
  EXPECT_EQ(choice.kind, Kind::kNccl);
  EXPECT_EQ(choice.advice,
            "/dev/shm of host a has 63 MiB free; NCCL may need up to 64 MiB for its 2 ranks there. "
            "Enlarge it (docker run --shm-size, or remount it)");
  peers[0].shm_free_bytes = -1;
  EXPECT_EQ(Choose(peers).advice, "");
}

TEST(DescribeRanks, SaysWhoIsWhereAndCutsTheList) {
  EXPECT_EQ(DescribeRanks(Peers(2)),
            "rank 0: host a, GPU 0000:00:00.0; rank 1: host a, GPU 0000:01:00.0");
  const std::string many = DescribeRanks(Peers(40));
  EXPECT_NE(many.find("rank 15:"), std::string::npos);
  EXPECT_EQ(many.find("rank 16:"), std::string::npos);
  EXPECT_TRUE(many.ends_with("; and 24 more ranks")) << many;
}

TEST(PeerCapabilities, SendsFailuresAndCutsLongTexts) {
  PeerCapabilities peer = Peer(0);
  peer.SetFailure(ResourceExhausted("no memory"));
  EXPECT_EQ(peer.failure_code, static_cast<int32_t>(Code::kResourceExhausted));
  EXPECT_EQ(peer.failure.text(), "no memory");
  peer.nccl = std::string(10'000, 'x');
  EXPECT_EQ(peer.nccl.text(), std::string(511, 'x'));
  peer.nccl = "short";
  EXPECT_EQ(peer.nccl.text(), "short");
}

}  // namespace
}  // namespace farandole
