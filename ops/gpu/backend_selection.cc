#include "ops/gpu/backend_selection.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <type_traits>
#include <utility>

namespace farandole {
namespace {

static_assert(std::is_trivially_copyable_v<PeerCapabilities>);

/// Member 0's answer: the id, or why there is none.
struct WrittenId {
  int32_t code;
  int32_t size;
  char text[1016];
};

/// Ranks named in one text; more are counted.
constexpr size_t kRanksNamed = 16;

std::string RankText(const PeerCapabilities& peer) {
  return "rank " + std::to_string(peer.rank) + " (host " + peer.HostName() + ")";
}

/// The first two ranks that are on one GPU; nullptr where each has its own.
std::pair<const PeerCapabilities*, const PeerCapabilities*> FindSharedGpu(
    std::span<const PeerCapabilities> peers) {
  std::map<std::pair<std::string, std::string>, const PeerCapabilities*> seen;
  for (const PeerCapabilities& peer : peers) {
    const auto [at, fresh] = seen.try_emplace({peer.host.text(), peer.bus_id.text()}, &peer);
    if (!fresh) return {at->second, &peer};
  }
  return {nullptr, nullptr};
}

const PeerCapabilities* FindWithoutNccl(std::span<const PeerCapabilities> peers) {
  const auto found = std::find_if(peers.begin(), peers.end(), [](const PeerCapabilities& peer) {
    return peer.nccl_version == 0;
  });
  return found == peers.end() ? nullptr : &*found;
}

Status CheckFailures(std::span<const PeerCapabilities> peers) {
  const auto failed = [](const PeerCapabilities& peer) { return peer.failure_code != 0; };
  const auto first = std::find_if(peers.begin(), peers.end(), failed);
  if (first == peers.end()) return {};
  const auto others = std::count_if(first + 1, peers.end(), failed);
  std::string text = RankText(*first) + " cannot use its GPU: " + first->failure.text();
  if (others > 0) text += " (and " + std::to_string(others) + " more)";
  return {static_cast<Code>(first->failure_code), std::move(text)};
}

/// One version everywhere, or who has which.
Status CheckVersions(std::span<const PeerCapabilities> peers) {
  std::map<int32_t, std::vector<const PeerCapabilities*>> by_version;
  for (const PeerCapabilities& peer : peers) by_version[peer.nccl_version].push_back(&peer);
  if (by_version.size() == 1) return {};
  std::string text = "ranks have different NCCL versions";
  for (const auto& [version, ranks] : by_version) {
    text += text.find(':') == std::string::npos ? ": " : "; ";
    text += RankText(*ranks.front());
    if (ranks.size() > 1) text += " and " + std::to_string(ranks.size() - 1) + " more";
    text += ": " + NcclVersionText(version) + " (" + ranks.front()->nccl.text() + ")";
  }
  return Mismatch(text +
                  ". Install one version everywhere, or name one file by FARANDOLE_NCCL on all "
                  "ranks");
}

std::string SharedText(const PeerCapabilities& one, const PeerCapabilities& other) {
  return "ranks " + std::to_string(one.rank) + " and " + std::to_string(other.rank) + " of host " +
         one.HostName() + " share the GPU " + one.bus_id.text();
}

BackendChoice Staged(std::string why) { return {BackendChoice::Kind::kStaged, std::move(why), {}}; }

BackendChoice WithoutNccl(const PeerCapabilities& peer) {
  return Staged(RankText(peer) + " has no NCCL: " + peer.nccl.text() +
                ". Install nvidia-nccl-cu13 (or -cu12) there, or name the file by FARANDOLE_NCCL");
}

/// Of a set in which `one` and `other` are on one GPU.
BackendChoice ChooseForShared(std::span<const PeerCapabilities> peers, const PeerCapabilities& one,
                              const PeerCapabilities& other) {
  const std::string shared = SharedText(one, other);
  const bool asked = std::all_of(peers.begin(), peers.end(),
                                 [](const PeerCapabilities& peer) { return peer.share_gpu != 0; });
  if (!asked) {
    return Staged(shared +
                  ", which NCCL refuses. Give each rank a GPU of its own; FARANDOLE_SHARE_GPU=1 "
                  "lets NCCL " +
                  NcclVersionText(kNcclOfSharedGpus) + " or newer share one");
  }
  if (const PeerCapabilities* lacking = FindWithoutNccl(peers)) return WithoutNccl(*lacking);
  const auto old = std::find_if(peers.begin(), peers.end(), [](const PeerCapabilities& peer) {
    return peer.nccl_version < kNcclOfSharedGpus;
  });
  if (old != peers.end()) {
    return Staged(shared + ", and FARANDOLE_SHARE_GPU needs NCCL " +
                  NcclVersionText(kNcclOfSharedGpus) + " or newer, but " + RankText(*old) +
                  " has " + NcclVersionText(old->nccl_version) + " (" + old->nccl.text() +
                  "). Install a newer one there");
  }
  return {BackendChoice::Kind::kNcclShared, {}, {}};
}

/// The host whose /dev/shm may be too small for its ranks' NCCL; or nothing.
std::string AdviseShm(std::span<const PeerCapabilities> peers) {
  struct Host {
    int64_t ranks = 0;
    int64_t free_bytes = -1;
  };
  std::map<std::string, Host> hosts;
  for (const PeerCapabilities& peer : peers) {
    Host& host = hosts[peer.host.text()];
    ++host.ranks;
    if (peer.shm_free_bytes < 0) continue;
    host.free_bytes =
        host.free_bytes < 0 ? peer.shm_free_bytes : std::min(host.free_bytes, peer.shm_free_bytes);
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

std::string NcclVersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void PeerCapabilities::SetFailure(const Status& status) {
  failure_code = static_cast<int32_t>(status.code());
  failure = status.message();
}

Result<BackendChoice> ChooseBackend(std::span<const PeerCapabilities> peers) {
  FARANDOLE_RETURN_IF_ERROR(CheckFailures(peers));
  if (peers.size() == 1) return BackendChoice{BackendChoice::Kind::kSolo, {}, {}};
  BackendChoice choice{BackendChoice::Kind::kNccl, {}, {}};
  if (const auto [one, other] = FindSharedGpu(peers); one != nullptr) {
    choice = ChooseForShared(peers, *one, *other);
  } else if (const PeerCapabilities* lacking = FindWithoutNccl(peers)) {
    choice = WithoutNccl(*lacking);
  }
  if (choice.kind == BackendChoice::Kind::kStaged) return choice;
  FARANDOLE_RETURN_IF_ERROR(CheckVersions(peers));
  choice.advice = AdviseShm(peers);
  return choice;
}

std::string DescribeRanks(std::span<const PeerCapabilities> peers) {
  std::string text;
  for (const PeerCapabilities& peer : peers.first(std::min(peers.size(), kRanksNamed))) {
    if (!text.empty()) text += "; ";
    text += "rank " + std::to_string(peer.rank) + ": host " + peer.HostName() + ", GPU " +
            peer.bus_id.text();
  }
  if (peers.size() > kRanksNamed) {
    text += "; and " + std::to_string(peers.size() - kRanksNamed) + " more ranks";
  }
  return text;
}

BackendSelection::BackendSelection(HostSet* host, const PeerCapabilities& mine, NcclProvider& nccl)
    : host_(host), mine_(mine), nccl_(nccl) {}

Progress BackendSelection::Step() {
  if (operation_ != nullptr) {
    const Progress progress = operation_->Step();
    if (progress.state == Progress::State::kFailed) operation_ = nullptr;
    if (progress.state != Progress::State::kDone) return progress;
    operation_ = nullptr;
  }
  if (Status status = Advance(); !status.ok()) return Progress::Failed(std::move(status));
  return stage_ == Stage::kDone ? Progress::Done() : Progress::Moved();
}

void BackendSelection::Abandon() {
  if (operation_ != nullptr) operation_->Abandon();
  operation_ = nullptr;
}

Status BackendSelection::Advance() {
  switch (stage_) {
    case Stage::kBegin:
      stage_ = Stage::kPeers;
      return SendMine();
    case Stage::kPeers:
      FARANDOLE_RETURN_IF_ERROR(Choose());
      stage_ = choice_.UsesNccl() ? Stage::kId : Stage::kDone;
      return choice_.UsesNccl() ? SendId() : Status();
    case Stage::kId:
      stage_ = Stage::kDone;
      return ReadId();
    case Stage::kDone:
      return {};
  }
  return {};
}

// Every member fills its own slot among zeros; the maximum is what all of them wrote.
Status BackendSelection::SendMine() {
  const size_t size = host_ == nullptr ? 1 : static_cast<size_t>(host_->size());
  const size_t index = host_ == nullptr ? 0 : static_cast<size_t>(host_->my_index());
  bytes_.assign(size * sizeof mine_, std::byte{0});
  std::memcpy(&bytes_[index * sizeof mine_], &mine_, sizeof mine_);
  return host_ == nullptr ? Status() : StartExchange(OpKind::kAllreduce);
}

Status BackendSelection::StartExchange(OpKind kind) {
  segment_ = {bytes_.data(), bytes_.data(), static_cast<int64_t>(bytes_.size())};
  batch_ = Batch();
  batch_.kind = kind;
  batch_.dtype = DType::kUint8;
  batch_.wire = DType::kUint8;
  batch_.op = ReduceOp::kMax;
  batch_.segments = {&segment_, 1};
  batch_.count = segment_.count;
  Result<PlaneOperation*> started = host_->Start(batch_);
  if (started.ok()) operation_ = started.value();
  return started.status();
}

Status BackendSelection::Choose() {
  peers_.resize(bytes_.size() / sizeof mine_);
  std::memcpy(static_cast<void*>(peers_.data()), bytes_.data(), bytes_.size());
  const auto is_damaged = [](const PeerCapabilities& peer) {
    return peer.mark != PeerCapabilities::kMark || peer.failure_code < 0 ||
           peer.failure_code > static_cast<int32_t>(Code::kInternal);
  };
  if (std::any_of(peers_.begin(), peers_.end(), is_damaged)) {
    return Internal("what a rank reported about its GPU is damaged");
  }
  Result<BackendChoice> choice = ChooseBackend(peers_);
  if (choice.ok()) choice_ = choice.value();
  return choice.status();
}

Status BackendSelection::SendId() {
  WrittenId written{};
  if (host_->my_index() == 0) {
    const Result<std::string> id = nccl_.MakeUniqueId();
    const std::string text = id.ok() ? id.value() : id.status().message();
    written.code = static_cast<int32_t>(id.status().code());
    written.size = static_cast<int32_t>(std::min(text.size(), sizeof written.text));
    std::memcpy(written.text, text.data(), static_cast<size_t>(written.size));
  }
  bytes_.resize(sizeof written);
  std::memcpy(bytes_.data(), &written, sizeof written);
  return StartExchange(OpKind::kBroadcast);
}

Status BackendSelection::ReadId() {
  WrittenId written;
  std::memcpy(&written, bytes_.data(), sizeof written);
  std::string text(written.text, static_cast<size_t>(written.size));
  if (written.code == static_cast<int32_t>(Code::kOk)) {
    unique_id_ = std::move(text);
    return {};
  }
  return {static_cast<Code>(written.code), "rank " + std::to_string(peers_.front().rank) +
                                               " (host " + peers_.front().HostName() +
                                               ") could not begin NCCL's set-up: " + text};
}

}  // namespace farandole
