#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <sstream>
#include <string>
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

void Change(PeerCapabilities& peer, const std::string& what, const std::string& value) {
  if (what == "bus") peer.bus_id = Peer(std::stoi(value)).bus_id;
  if (what == "host") peer.host = value + " boot-of-" + value;
  if (what == "share") peer.share_gpu = 1;
  if (what == "nccl") peer.nccl_version = std::stoi(value);
  if (what == "file") peer.nccl = value;
  if (what == "shm_mib") peer.shm_free_bytes = std::stoll(value) * (int64_t{1} << 20);
  if (what == "fails") peer.SetFailure(Unavailable("this process sees no CUDA device"));
}

/// "3 2.bus=1 *.share": so many ranks, then what differs on one of them, or all.
std::vector<PeerCapabilities> PeersIn(const std::string& text) {
  std::istringstream words(text);
  int count = 0;
  words >> count;
  std::vector<PeerCapabilities> peers = Peers(count);
  for (std::string word; words >> word;) {
    const std::string what = word.substr(2, word.find('=') - 2);
    const std::string value = word.substr(std::min(word.size(), what.size() + 3));
    for (PeerCapabilities& peer : peers) {
      if (word[0] == '*' || peer.rank == word[0] - '0') Change(peer, what, value);
    }
  }
  return peers;
}

std::string ChoiceOf(const std::vector<PeerCapabilities>& peers) {
  const Result<BackendChoice> choice = ChooseBackend(peers);
  if (!choice.ok()) return choice.status().ToString();
  const std::map<Kind, std::string> kinds = {{Kind::kSolo, "solo"},
                                             {Kind::kNccl, "nccl"},
                                             {Kind::kNcclShared, "nccl shared"},
                                             {Kind::kStaged, "staged"}};
  std::string text = kinds.at(choice.value().kind);
  for (const std::string& why : {choice.value().why, choice.value().advice}) {
    if (!why.empty()) text += ": " + why;
  }
  return text;
}

/// Ranks, and the choice in the line below, which indented lines may continue.
constexpr char kChoices[] = R"(
# Each rank has a GPU of its own, be it on another host.
4
  nccl
2 1.bus=0 1.host=b
  nccl
# One rank needs no NCCL.
1 *.nccl=0
  solo
3 2.bus=1
  staged: ranks 1 and 2 of host a share the GPU 0000:01:00.0, which NCCL refuses. Give each rank a
    GPU of its own; FARANDOLE_SHARE_GPU=1 lets NCCL 2.30.0 or newer share one
# NCCL shares a GPU where all users asked, and every NCCL can.
2 *.bus=7 *.share *.nccl=23000
  nccl shared
2 *.bus=7 1.share *.nccl=23000
  staged: ranks 0 and 1 of host a share the GPU 0000:07:00.0, which NCCL refuses. Give each rank a
    GPU of its own; FARANDOLE_SHARE_GPU=1 lets NCCL 2.30.0 or newer share one
2 *.share
  nccl
2 *.bus=7 *.share 1.nccl=22907
  staged: ranks 0 and 1 of host a share the GPU 0000:07:00.0, and FARANDOLE_SHARE_GPU needs NCCL
    2.30.0 or newer, but rank 1 (host a) has 2.29.7 (/x/libnccl.so.2). Install a newer one there
# A rank has no NCCL.
3 2.nccl=0 2.file=nowhere
  staged: rank 2 (host a) has no NCCL: nowhere. Install nvidia-nccl-cu13 (or -cu12) there, or name
    the file by FARANDOLE_NCCL
3 2.nccl=0 2.file=nowhere *.share 1.bus=0
  staged: rank 2 (host a) has no NCCL: nowhere. Install nvidia-nccl-cu13 (or -cu12) there, or name
    the file by FARANDOLE_NCCL
# Versions differ: refused, unless NCCL is not used.
4 3.nccl=22304 3.file=/old/libnccl.so.2 3.host=b
  Mismatch: ranks have different NCCL versions: rank 3 (host b): 2.23.4 (/old/libnccl.so.2); rank
    0 (host a) and 2 more: 2.32.3 (/x/libnccl.so.2). Install one version everywhere, or name one
    file by FARANDOLE_NCCL on all ranks
2 1.bus=0 1.nccl=22304
  staged: ranks 0 and 1 of host a share the GPU 0000:00:00.0, which NCCL refuses. Give each rank a
    GPU of its own; FARANDOLE_SHARE_GPU=1 lets NCCL 2.30.0 or newer share one
# A rank cannot use its GPU.
3 1.fails
  Unavailable: rank 1 (host a) cannot use its GPU: this process sees no CUDA device
3 1.fails 2.fails
  Unavailable: rank 1 (host a) cannot use its GPU: this process sees no CUDA device (and 1 more)
# A warning of a small shared memory, but for one rank, which shares with nobody; -1: not known.
3 2.host=b 2.shm_mib=0
  nccl
3 2.host=b 0.shm_mib=63
  nccl: /dev/shm of host a has 63 MiB free; NCCL may need up to 64 MiB for its 2 ranks there.
    Enlarge it (docker run --shm-size, or remount it)
3 2.host=b 0.shm_mib=-1
  nccl
)";

TEST(ChooseBackend, ChoosesAndSaysWhyAsTheTableSays) {
  std::istringstream lines(std::regex_replace(kChoices, std::regex("\n    "), " "));
  for (std::string ranks, choice; std::getline(lines, ranks);) {
    if (ranks.empty() || ranks.starts_with("#")) continue;
    std::getline(lines >> std::ws, choice);
    EXPECT_EQ(ChoiceOf(PeersIn(ranks)), choice) << ranks;
  }
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
