#include "ops/gpu/plane.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "ops/cpu/batch.h"
#include "ops/gpu/backend_selection.h"

namespace farandole {
namespace {

/// How soon the device is asked again whether a batch is complete: at first, and at the latest.
constexpr int64_t kEndPollNs = 50 * kNsPerUs;
constexpr int64_t kMostEndPollNs = kNsPerMs;
/// As a part of the time that has been waited, so that a long batch costs few questions and its end
/// is noticed little later.
constexpr int64_t kPollShare = 32;
/// After a failure users release their tensors, to which kernels of ours may still write: most
/// often they have ended by then. Once in a job, so that the engine may wait for it.
constexpr int64_t kDrainNs = 200 * kNsPerMs;

/// Negative if it is not known.
int64_t FreeSharedMemory() {
  struct statvfs facts {};
  if (statvfs("/dev/shm", &facts) != 0) return -1;
  return static_cast<int64_t>(facts.f_bavail) * static_cast<int64_t>(facts.f_frsize);
}

/// In `batches_` come those of all sets that their backends have taken, then those that are not.
/// The first that is not is the only one that its backend steps; the first of all is the only one
/// asked whether it is complete, which it is before all others.
///
/// Invariant: once something failed, or was abandoned, nothing runs any more: `broken_` says why.
class GpuPlane final : public DataPlane {
 public:
  explicit GpuPlane(GpuPlaneOptions options) : options_(std::move(options)) {}
  ~GpuPlane() override;

  const char* name() const override { return "cuda"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override { sets_.erase(set); }
  Result<PlaneOperation*> Start(const Batch& batch) override;

 private:
  class Operation;

  /// A process set and, from its first batch on, how its batches run.
  struct Set {
    uint32_t uid = 0;
    std::vector<int> ranks;
    int my_index = 0;
    std::unique_ptr<HostSet> host;  // with more than one member; staging uses it to the end
    std::unique_ptr<BackendSelection> selection;
    std::unique_ptr<GpuBackend> backend;
  };

  Progress Step(Operation& operation);
  Progress Dispatch(Operation& operation);
  Progress Prepare(Set& set);
  Progress AwaitEnd(Operation& operation);
  Progress AwaitTurn(Operation& operation);
  Progress Report(Operation& operation, Progress progress);
  Progress Fail(Operation& operation, Status status);
  void Remove(Operation& operation);
  void Break(const Status& why);

  Status Open();
  Status BeginSelection(Set& set);
  PeerCapabilities Capabilities(const Set& set, const Status& opened);
  Status MakeBackend(Set& set);
  void LogChoice(const Set& set);
  void LogLine(const Set& set, LogLevel level, const std::string& what);

  const GpuPlaneOptions options_;
  Device* device_ = nullptr;  // these two: from the first batch on
  std::unique_ptr<LaunchQueue> queue_;
  std::shared_ptr<StagingBuffers> staging_;  // of all sets that are staged, one batch at a time
  std::unordered_map<uint32_t, Set> sets_;
  ReusePool<Operation> pool_;
  std::vector<Operation*> batches_;
  int64_t moves_ = 0;              // how often any batch got on
  bool waits_for_inputs_ = false;  // the one that the others wait for does
  Status broken_;
};

class GpuPlane::Operation final : public PlaneOperation {
 public:
  explicit Operation(GpuPlane& plane) : plane_(plane) {}

  Progress Step() override { return plane_.Step(*this); }
  std::shared_ptr<DeviceEvent> end() const override { return task_->end; }
  void Abandon() override {
    plane_.Break(Aborted("a batch was given up"));
    plane_.Remove(*this);
  }

 private:
  friend class GpuPlane;
  enum class Stage : uint8_t { kQueued, kBegun, kDispatched, kLaunched };

  GpuPlane& plane_;
  Set* set_ = nullptr;
  const Batch* batch_ = nullptr;
  Stage stage_ = Stage::kQueued;
  int64_t moves_seen_ = 0;
  std::shared_ptr<LaunchTask> task_;     // once begun
  std::shared_ptr<DeviceEvent> inputs_;  // once launched, until they are there
  int64_t asked_ns_ = 0;                 // when the device was first asked about these; 0: not yet
};

// Communicators end on the launch thread. One that does not, since a stream is stuck, keeps all it
// may touch.
GpuPlane::~GpuPlane() {
  sets_.clear();
  if (queue_ == nullptr || queue_->Stop(options_.stop_timeout_ns)) return;
  queue_->Abort(Aborted("the GPU plane has ended"));
  if (queue_->Stop(options_.stop_timeout_ns)) return;
  queue_->Detach();
  options_.counters->Add(Counter::kQuarantinedBytes, queue_->streams().buffers.size_bytes());
  (void)queue_.release();
}

Status GpuPlane::AddSet(uint32_t uid, std::span<const int> ranks, int my_index) {
  if (my_index < 0 || static_cast<size_t>(my_index) >= ranks.size()) {
    return InvalidArgument("this rank is not in process set " + std::to_string(uid));
  }
  const auto [at, fresh] = sets_.try_emplace(uid);
  if (!fresh) return InvalidArgument("process set " + std::to_string(uid) + " was already added");
  at->second.uid = uid;
  at->second.ranks.assign(ranks.begin(), ranks.end());
  at->second.my_index = my_index;
  return {};
}

Result<PlaneOperation*> GpuPlane::Start(const Batch& batch) {
  const auto found = sets_.find(batch.set);
  if (found == sets_.end()) {
    return Internal("batch for unknown process set " + std::to_string(batch.set));
  }
  Set& set = found->second;
  if (batch.my_index != set.my_index || batch.ranks.size() != set.ranks.size()) {
    return Internal("batch names other members than process set " + std::to_string(batch.set));
  }
  if (!broken_.ok()) return broken_;
  FARANDOLE_RETURN_IF_ERROR(CheckBatch(batch));
  Operation* operation = pool_.Take([this] { return std::make_unique<Operation>(*this); });
  operation->set_ = &set;
  operation->batch_ = &batch;
  operation->stage_ = Operation::Stage::kQueued;
  operation->moves_seen_ = moves_;
  batches_.push_back(operation);
  return operation;
}

Progress GpuPlane::Step(Operation& operation) {
  if (!broken_.ok()) {
    Remove(operation);
    return Progress::Failed(broken_);
  }
  if (queue_ != nullptr && queue_->failed()) return Fail(operation, queue_->failure());
  switch (operation.stage_) {
    case Operation::Stage::kQueued:
    case Operation::Stage::kBegun:
      return Dispatch(operation);
    case Operation::Stage::kDispatched:
      if (!operation.task_->launched()) return AwaitTurn(operation);
      operation.stage_ = Operation::Stage::kLaunched;
      operation.inputs_ = operation.task_->inputs;
      return Report(operation, Progress::Launched());
    case Operation::Stage::kLaunched:
      break;
  }
  return AwaitEnd(operation);
}

Progress GpuPlane::Dispatch(Operation& operation) {
  const auto first = std::find_if(batches_.begin(), batches_.end(), [](const Operation* one) {
    return one->stage_ < Operation::Stage::kDispatched;
  });
  if (*first != &operation) return AwaitTurn(operation);
  Set& set = *operation.set_;
  if (set.backend == nullptr) return Report(operation, Prepare(set));
  if (operation.stage_ == Operation::Stage::kQueued) {
    Result<std::shared_ptr<LaunchTask>> task = set.backend->Begin(*operation.batch_);
    if (!task.ok()) return Fail(operation, task.status());
    operation.task_ = std::move(task).value();
    operation.stage_ = Operation::Stage::kBegun;
  }
  Progress progress = set.backend->Step();
  if (progress.state == Progress::State::kDone) {
    operation.stage_ = Operation::Stage::kDispatched;
    operation.batch_ = nullptr;
    progress = Progress::Moved();
  }
  return Report(operation, std::move(progress));
}

Progress GpuPlane::AwaitEnd(Operation& operation) {
  if (&operation != batches_.front()) return AwaitTurn(operation);
  const int64_t now_ns = SteadyClock().NowNs();
  if (operation.asked_ns_ == 0) operation.asked_ns_ = now_ns;
  const Result<bool> complete = operation.task_->end->IsComplete();
  if (!complete.ok()) return Fail(operation, complete.status());
  if (complete.value()) {
    Remove(operation);
    ++moves_;
    return Progress::Done();
  }
  if (operation.inputs_ != nullptr) {
    const Result<bool> there = operation.inputs_->IsComplete();
    if (!there.ok()) return Fail(operation, there.status());
    if (there.value()) {
      operation.inputs_ = nullptr;
      operation.asked_ns_ = now_ns;
    }
  }
  const int64_t poll_ns =
      std::clamp((now_ns - operation.asked_ns_) / kPollShare, kEndPollNs, kMostEndPollNs);
  return Report(operation, operation.inputs_ == nullptr ? Progress::Waiting(poll_ns)
                                                        : Progress::WaitingForInputs(poll_ns));
}

// Whoever it waits for says when to ask again. That the batches before it get on is its own
// progress too.
Progress GpuPlane::AwaitTurn(Operation& operation) {
  const bool moved = operation.moves_seen_ != moves_;
  operation.moves_seen_ = moves_;
  if (moved) return Progress::Moved();
  return waits_for_inputs_ ? Progress::WaitingForInputs(kByDoorbell) : Progress::Waiting();
}

Progress GpuPlane::Report(Operation& operation, Progress progress) {
  if (progress.state == Progress::State::kFailed) return Fail(operation, progress.status);
  if (progress.state != Progress::State::kWaiting) ++moves_;
  if (&operation == batches_.front()) waits_for_inputs_ = progress.for_inputs;
  operation.moves_seen_ = moves_;
  return progress;
}

Progress GpuPlane::Fail(Operation& operation, Status status) {
  Break(status);
  Remove(operation);
  return Progress::Failed(std::move(status));
}

void GpuPlane::Remove(Operation& operation) {
  std::erase(batches_, &operation);
  operation.task_ = nullptr;
  operation.inputs_ = nullptr;
  operation.asked_ns_ = 0;
  pool_.Return(&operation);
}

// Communicators are aborted by the launch thread, since an abort waits for what streams hold.
void GpuPlane::Break(const Status& why) {
  if (!broken_.ok()) return;
  broken_ = Aborted("the CUDA plane has ended: " + why.message());
  if (queue_ != nullptr) {
    queue_->Abort(why);
    queue_->AwaitDrained(kDrainNs);
  }
  for (auto& [uid, set] : sets_) {
    if (set.selection != nullptr) set.selection->Abandon();
    if (set.backend != nullptr) set.backend->Abandon();
  }
}

// ---- a set's first batch ----

Progress GpuPlane::Prepare(Set& set) {
  if (set.selection == nullptr) {
    if (Status status = BeginSelection(set); !status.ok())
      return Progress::Failed(std::move(status));
  }
  Progress progress = set.selection->Step();
  if (progress.state != Progress::State::kDone) return progress;
  if (Status status = MakeBackend(set); !status.ok()) return Progress::Failed(std::move(status));
  LogChoice(set);
  return Progress::Moved();
}

// What fails on one rank in opening its device fails on all members, by its message.
Status GpuPlane::BeginSelection(Set& set) {
  const Status opened = Open();
  if (set.ranks.size() > 1) {
    Result<std::unique_ptr<HostSet>> host =
        HostSet::Create(*options_.host, set.uid, set.ranks, set.my_index);
    if (!host.ok()) return host.status();
    set.host = std::move(host).value();
  }
  set.selection =
      std::make_unique<BackendSelection>(set.host.get(), Capabilities(set, opened), *options_.nccl);
  return {};
}

Status GpuPlane::Open() {
  if (queue_ != nullptr) return {};
  Result<Device*> device = options_.device->Get();
  if (!device.ok()) return device.status();
  Result<std::unique_ptr<LaunchStreams>> streams =
      LaunchStreams::Create(*device.value(), options_.counters);
  if (!streams.ok()) return streams.status();
  device_ = device.value();
  queue_ = std::make_unique<LaunchQueue>(std::move(streams).value(), options_.wake);
  return {};
}

PeerCapabilities GpuPlane::Capabilities(const Set& set, const Status& opened) {
  PeerCapabilities mine;
  mine.rank = set.ranks[static_cast<size_t>(set.my_index)];
  mine.host = options_.host_name;
  mine.share_gpu = options_.share_gpu ? 1 : 0;
  mine.SetFailure(opened);
  if (!opened.ok()) return mine;
  mine.bus_id = device_->info().bus_id;
  mine.runtime = options_.device->RuntimeVersion();
  mine.shm_free_bytes = FreeSharedMemory();
  if (set.ranks.size() == 1) return mine;
  const Result<NcclFound> nccl = options_.nccl->Find();
  if (nccl.ok()) mine.nccl_version = nccl.value().version;
  mine.nccl = nccl.ok() ? nccl.value().file : nccl.status().message();
  return mine;
}

Status GpuPlane::MakeBackend(Set& set) {
  const BackendChoice& choice = set.selection->choice();
  if (choice.kind == BackendChoice::Kind::kSolo) {
    set.backend = MakeSoloBackend(*queue_);
    return {};
  }
  if (choice.kind == BackendChoice::Kind::kStaged) {
    if (staging_ == nullptr) {
      Result<std::shared_ptr<StagingBuffers>> made =
          MakeStagingBuffers(*device_, options_.counters, options_.staging_slot_bytes);
      if (!made.ok()) return made.status();
      staging_ = std::move(made).value();
    }
    set.backend = MakeStagedBackend(*set.host, staging_);
    return {};
  }
  set.backend =
      options_.nccl->Make(*queue_, {.unique_id = set.selection->unique_id(),
                                    .size = static_cast<int>(set.ranks.size()),
                                    .index = set.my_index,
                                    .shared_gpu = choice.kind == BackendChoice::Kind::kNcclShared,
                                    .ranks_text = DescribeRanks(set.selection->peers())});
  return {};
}

void GpuPlane::LogChoice(const Set& set) {
  const BackendChoice& choice = set.selection->choice();
  if (set.my_index != 0 || choice.kind == BackendChoice::Kind::kSolo) return;
  if (choice.kind == BackendChoice::Kind::kStaged) {
    return LogLine(set, LogLevel::kWarning,
                   "go through host memory, which is slower than NCCL: " + choice.why + ".");
  }
  const PeerCapabilities& mine = set.selection->peers().front();
  std::string text = "go over NCCL " + NcclVersionText(mine.nccl_version) + " (" +
                     mine.nccl.text() + ", " + mine.runtime.text() +
                     "): " + DescribeRanks(set.selection->peers());
  if (choice.kind == BackendChoice::Kind::kNcclShared) {
    text += "; ranks that share a GPU take turns on it, so do not judge the speed";
  }
  LogLine(set, LogLevel::kInfo, text);
  if (choice.advice.empty()) return;
  LogLine(set, LogLevel::kWarning, "go over NCCL, but " + choice.advice + ".");
}

void GpuPlane::LogLine(const Set& set, LogLevel level, const std::string& what) {
  if (options_.log == nullptr) return;
  options_.log->Write(level, "CUDA tensors of process set " + std::to_string(set.uid) + " (" +
                                 std::to_string(set.ranks.size()) + " ranks) " + what);
}

}  // namespace

std::unique_ptr<DataPlane> MakeGpuPlane(GpuPlaneOptions options) {
  return std::make_unique<GpuPlane>(std::move(options));
}

}  // namespace farandole
