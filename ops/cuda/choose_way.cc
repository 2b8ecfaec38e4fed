#include "ops/cuda/choose_way.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "ops/nccl/library.h"

namespace farandole {
namespace {

/// Ranks named in one text; more are counted.
constexpr size_t kRanksNamed = 16;

std::string RankText(const RankCard& card) {
  return "rank " + std::to_string(card.rank) + " (host " + card.HostName() + ")";
}

/// The first two ranks that sit on one GPU; nullptr where each has its own.
std::pair<const RankCard*, const RankCard*> FindSharedGpu(std::span<const RankCard> cards) {
  std::map<std::pair<std::string, std::string>, const RankCard*> seen;
  for (const RankCard& card : cards) {
    const auto [at, fresh] = seen.try_emplace({card.host, card.bus_id}, &card);
    if (!fresh) return {at->second, &card};
  }
  return {nullptr, nullptr};
}

const RankCard* FindWithoutNccl(std::span<const RankCard> cards) {
  const auto found = std::find_if(cards.begin(), cards.end(),
                                  [](const RankCard& card) { return card.nccl_version == 0; });
  return found == cards.end() ? nullptr : &*found;
}

Status CheckFailures(std::span<const RankCard> cards) {
  const auto failed = [](const RankCard& card) { return !card.failure.ok(); };
  const auto first = std::find_if(cards.begin(), cards.end(), failed);
  if (first == cards.end()) return {};
  const auto others = std::count_if(first + 1, cards.end(), failed);
  std::string text = RankText(*first) + " cannot use its GPU: " + first->failure.message();
  if (others > 0) text += " (and " + std::to_string(others) + " more)";
  return {first->failure.code(), std::move(text)};
}

/// One version everywhere, or who has which.
Status CheckVersions(std::span<const RankCard> cards) {
  std::map<int32_t, std::vector<const RankCard*>> by_version;
  for (const RankCard& card : cards) by_version[card.nccl_version].push_back(&card);
  if (by_version.size() == 1) return {};
  std::string text = "ranks have different NCCL versions";
  for (const auto& [version, ranks] : by_version) {
    text += text.find(':') == std::string::npos ? ": " : "; ";
    text += RankText(*ranks.front());
    if (ranks.size() > 1) text += " and " + std::to_string(ranks.size() - 1) + " more";
    text += ": " + NcclVersionText(version) + " (" + ranks.front()->nccl + ")";
  }
  return Mismatch(text +
                  ". Install one version everywhere, or name one file by FARANDOLE_NCCL on all "
                  "ranks");
}

std::string SharedText(const RankCard& one, const RankCard& other) {
  return "ranks " + std::to_string(one.rank) + " and " + std::to_string(other.rank) + " of host " +
         one.HostName() + " share the GPU " + one.bus_id;
}

WayChoice Staged(std::string why) { return {WayChoice::Way::kStaged, std::move(why), {}}; }

WayChoice WithoutNccl(const RankCard& card) {
  return Staged(RankText(card) + " has no NCCL: " + card.nccl +
                ". Install nvidia-nccl-cu13 (or -cu12) there, or name the file by FARANDOLE_NCCL");
}

/// Of a set in which `one` and `other` sit on one GPU.
WayChoice ChooseForShared(std::span<const RankCard> cards, const RankCard& one,
                          const RankCard& other) {
  const std::string shared = SharedText(one, other);
  const bool asked =
      std::all_of(cards.begin(), cards.end(), [](const RankCard& card) { return card.share_gpu; });
  if (!asked) {
    return Staged(shared +
                  ", which NCCL refuses. Give each rank a GPU of its own; FARANDOLE_SHARE_GPU=1 "
                  "lets NCCL " +
                  NcclVersionText(kNcclOfSharedGpus) + " or newer share one");
  }
  if (const RankCard* lacking = FindWithoutNccl(cards)) return WithoutNccl(*lacking);
  const auto old = std::find_if(cards.begin(), cards.end(), [](const RankCard& card) {
    return card.nccl_version < kNcclOfSharedGpus;
  });
  if (old != cards.end()) {
    return Staged(shared + ", and FARANDOLE_SHARE_GPU needs NCCL " +
                  NcclVersionText(kNcclOfSharedGpus) + " or newer, but " + RankText(*old) +
                  " has " + NcclVersionText(old->nccl_version) + " (" + old->nccl +
                  "). Install a newer one there");
  }
  return {WayChoice::Way::kNcclShared, {}, {}};
}

/// The host whose /dev/shm may be too small for its ranks' NCCL, as a sentence; or nothing.
std::string AdviseShm(std::span<const RankCard> cards) {
  struct Host {
    int64_t ranks = 0;
    int64_t free_bytes = -1;
  };
  std::map<std::string, Host> hosts;
  for (const RankCard& card : cards) {
    Host& host = hosts[card.host];
    ++host.ranks;
    if (card.shm_free_bytes < 0) continue;
    host.free_bytes =
        host.free_bytes < 0 ? card.shm_free_bytes : std::min(host.free_bytes, card.shm_free_bytes);
  }
  for (const auto& [name, host] : hosts) {
    const int64_t wanted = host.ranks * kNcclShmBytesPerRank;
    if (host.ranks < 2 || host.free_bytes < 0 || host.free_bytes >= wanted) continue;
    return "/dev/shm of host " + name.substr(0, name.find(' ')) + " has " +
           std::to_string(host.free_bytes >> 20) + " MiB free; NCCL may need up to " +
           std::to_string(wanted >> 20) + " MiB for its " + std::to_string(host.ranks) +
           " ranks there. Enlarge it (docker run --shm-size, or remount it)";
  }
  return {};
}

}  // namespace

Result<WayChoice> ChooseWay(std::span<const RankCard> cards) {
  FARANDOLE_RETURN_IF_ERROR(CheckFailures(cards));
  if (cards.size() == 1) return WayChoice{WayChoice::Way::kSolo, {}, {}};
  WayChoice choice{WayChoice::Way::kNccl, {}, {}};
  if (const auto [one, other] = FindSharedGpu(cards); one != nullptr) {
    choice = ChooseForShared(cards, *one, *other);
  } else if (const RankCard* lacking = FindWithoutNccl(cards)) {
    choice = WithoutNccl(*lacking);
  }
  if (choice.way == WayChoice::Way::kStaged) return choice;
  FARANDOLE_RETURN_IF_ERROR(CheckVersions(cards));
  choice.advice = AdviseShm(cards);
  return choice;
}

std::string DescribeRanks(std::span<const RankCard> cards) {
  std::string text;
  for (const RankCard& card : cards.first(std::min(cards.size(), kRanksNamed))) {
    if (!text.empty()) text += "; ";
    text +=
        "rank " + std::to_string(card.rank) + ": host " + card.HostName() + ", GPU " + card.bus_id;
  }
  if (cards.size() > kRanksNamed) {
    text += "; and " + std::to_string(cards.size() - kRanksNamed) + " more ranks";
  }
  return text;
}

}  // namespace farandole
