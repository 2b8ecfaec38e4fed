#include "ops/cuda/cuda_set.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <utility>

#include "ops/cuda/solo_way.h"
#include "ops/nccl/library.h"
#include "ops/staged/staged_way.h"

namespace farandole {
namespace {

/// Negative if it cannot be told.
int64_t FreeSharedMemory() {
  struct statvfs told {};
  if (statvfs("/dev/shm", &told) != 0) return -1;
  return static_cast<int64_t>(told.f_bavail) * static_cast<int64_t>(told.f_frsize);
}

constexpr uint32_t kAllRanks = 0;

/// Sets of the host plane are of one GPU each.
uint32_t HostUid(uint32_t uid, int distance) {
  constexpr int kDistances = 2 * kMaxGpuOffset + 1;
  return uid * kDistances + static_cast<uint32_t>(distance + kMaxGpuOffset);
}

}  // namespace

Status CudaHome::Open() {
  if (lane != nullptr) return {};
  Result<Device*> device = parts.options.gpus->At(distance);
  if (!device.ok()) return device.status();
  FARANDOLE_RETURN_IF_ERROR(device.value()->MakeCurrent());
  Result<std::unique_ptr<CudaLane>> created =
      CudaLane::Create(*device.value(), parts.options.counters);
  if (!created.ok()) return created.status();
  lane = std::move(created).value();
  staging = std::make_unique<Staging>(*lane, parts.options.counters, parts.staging_slot_bytes);
  return {};
}

CudaSet::CudaSet(CudaHome& home, uint32_t uid, std::span<const int> ranks, int my_index)
    : home_(home), uid_(uid), ranks_(ranks.begin(), ranks.end()), my_index_(my_index) {}

CudaSet::~CudaSet() {
  if (home_.all_over_nccl == this) home_.all_over_nccl = nullptr;
}

Progress CudaSet::Prepare() {
  if (set_up_ == nullptr) {
    if (Status status = BeginSetUp(); !status.ok()) return Progress::Failed(std::move(status));
  }
  if (way_ == nullptr) {
    Progress progress = set_up_->Step();
    if (progress.state != Progress::State::kDone) return progress;
    MakeWay();
    return Progress::Moved();
  }
  Progress progress = way_->Connect();
  if (progress.state != Progress::State::kDone) return progress;
  prepared_ = true;
  parent_ = nullptr;
  const WayChoice::Way way = set_up_->choice().way;
  const bool over_nccl = way == WayChoice::Way::kNccl || way == WayChoice::Way::kNcclShared;
  if (over_nccl && uid_ == kAllRanks) home_.all_over_nccl = this;
  SayWay();
  return progress;
}

Status CudaSet::BeginSetUp() {
  const Status opened = home_.Open();
  if (size() > 1) {
    Result<std::unique_ptr<HostSet>> host = HostSet::Create(
        *home_.parts.options.host, HostUid(uid_, home_.distance), ranks_, my_index_);
    if (!host.ok()) return host.status();
    host_ = std::move(host).value();
  }
  const RankCard card = MakeCard(opened);
  parent_ = FindParent();
  set_up_ = std::make_unique<WaySetUp>(host_.get(), card, *home_.parts.nccl, /*wants_id=*/!parent_);
  return {};
}

RankCard CudaSet::MakeCard(const Status& opened) {
  const CudaPlaneOptions& options = home_.parts.options;
  RankCard card;
  card.rank = ranks_[static_cast<size_t>(my_index_)];
  card.host = options.host_name;
  card.share_gpu = options.share_gpu;
  card.failure = opened;
  if (!opened.ok()) return card;
  const DeviceInfo& info = home_.lane->device().info();
  card.device_index = info.index;
  card.bus_id = info.bus_id;
  card.device_name = info.name;
  card.runtime = options.gpus->RuntimeVersion();
  card.shm_free_bytes = FreeSharedMemory();
  if (size() == 1) return card;
  const Result<NcclFound> nccl = home_.parts.nccl->Find();
  if (nccl.ok()) card.nccl_version = nccl.value().version;
  nccl_shrinks_ = nccl.ok() && nccl.value().shrinks;
  card.nccl = nccl.ok() ? nccl.value().file : nccl.status().message();
  return card;
}

// The set of all ranks, which is never removed. All members of this set find the same: each has
// prepared that one at the same place of its line, or not yet, and all have one version of NCCL, or
// it would not be over NCCL.
CudaSet* CudaSet::FindParent() const {
  CudaSet* const all = home_.all_over_nccl;
  return nccl_shrinks_ && all != nullptr && all->size() > size() ? all : nullptr;
}

void CudaSet::MakeWay() {
  switch (set_up_->choice().way) {
    case WayChoice::Way::kSolo:
      way_ = MakeSoloWay(*home_.lane);
      return;
    case WayChoice::Way::kStaged:
      way_ = MakeStagedWay({home_.lane.get(), host_.get(), home_.staging.get()});
      return;
    case WayChoice::Way::kNccl:
    case WayChoice::Way::kNcclShared:
      break;
  }
  way_ = home_.parts.nccl->MakeWay(OptionsOfNccl());
}

NcclWayOptions CudaSet::OptionsOfNccl() const {
  NcclWayOptions options;
  options.lane = home_.lane.get();
  options.unique_id = set_up_->unique_id();
  options.size = size();
  options.index = my_index_;
  options.map = DescribeRanks(set_up_->cards());
  options.counters = home_.parts.options.counters;
  options.log = home_.parts.options.log;
  if (parent_ == nullptr) return options;
  options.parent = parent_->way_.get();
  for (size_t i = 0; i < parent_->ranks_.size(); ++i) {
    if (!std::binary_search(ranks_.begin(), ranks_.end(), parent_->ranks_[i])) {
      options.excluded.push_back(static_cast<int>(i));
    }
  }
  return options;
}

void CudaSet::SayWay() {
  if (my_index_ != 0) return;
  const WayChoice& choice = set_up_->choice();
  const RankCard& mine = set_up_->cards().front();
  switch (choice.way) {
    case WayChoice::Way::kSolo:
      return;
    case WayChoice::Way::kStaged:
      Say(LogLevel::kWarning,
          "go through host memory, which is slower than NCCL: " + choice.why + ".");
      return;
    case WayChoice::Way::kNccl:
    case WayChoice::Way::kNcclShared:
      break;
  }
  std::string text = "go over NCCL " + NcclVersionText(mine.nccl_version) + " (" + mine.nccl +
                     ", " + mine.runtime + "): " + DescribeRanks(set_up_->cards());
  if (choice.way == WayChoice::Way::kNcclShared) {
    text += "; ranks that share a GPU take turns on it, so do not judge the speed";
  }
  Say(LogLevel::kInfo, text);
  if (!choice.advice.empty()) Say(LogLevel::kWarning, "go over NCCL, but " + choice.advice + ".");
}

void CudaSet::Say(LogLevel level, const std::string& what) {
  Log* const log = home_.parts.options.log;
  if (log == nullptr) return;
  log->Write(level, "CUDA tensors of process set " + std::to_string(uid_) + " (" +
                        std::to_string(size()) + " ranks) " + what);
}

void CudaSet::Abandon() {
  if (set_up_ != nullptr) set_up_->Abandon();
  if (way_ != nullptr) way_->Abandon();
}

}  // namespace farandole
