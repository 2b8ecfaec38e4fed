#include "ops/cuda/cuda_line.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/cpu/batch.h"
#include "ops/cuda/cuda_set.h"

namespace farandole {
namespace {

/// How often the device is asked whether a batch is over.
constexpr int64_t kEndPollNs = 50'000;

/// Batches of all sets stand in one line: those that are launched, then those that are not. The
/// first that is not launched is the only one that steps; the first of the line is the only one
/// asked for its end, which comes before that of all others of the stream.
///
/// Invariant: once something failed, or was abandoned, nothing runs any more: `broken_` says why.
class CudaLine final : public DataPlane {
 public:
  CudaLine(CudaPlaneParts parts, int distance) : home_(std::move(parts), distance) {}
  ~CudaLine() override;

  const char* name() const override { return "cuda"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override;
  Result<PlaneOperation*> Start(const Batch& batch) override;

 private:
  class Operation;

  Operation* Take();
  Progress Step(Operation& operation);
  Progress Launch(Operation& operation);
  Progress AskForEnd(Operation& operation);
  Progress WaitInLine(Operation& operation);
  Progress Tell(Operation& operation, Progress progress);
  Progress Fail(Operation& operation, Status status);
  void Remove(Operation& operation);
  void Break(const std::string& why);
  Operation* FirstToLaunch() const;

  CudaHome home_;
  std::unordered_map<uint32_t, std::unique_ptr<CudaSet>> sets_;
  std::vector<std::unique_ptr<Operation>> operations_;  // all there are
  std::vector<Operation*> free_;
  std::vector<Operation*> line_;
  int64_t moves_ = 0;              // how often anything of the line got on
  bool waits_for_inputs_ = false;  // the one that the others wait for does
  Status broken_;
};

class CudaLine::Operation final : public PlaneOperation {
 public:
  explicit Operation(CudaLine& line) : line_(line) {}

  Progress Step() override { return line_.Step(*this); }
  std::shared_ptr<DeviceEvent> end() const override { return end_; }
  void Abandon() override {
    line_.Break("a batch was given up");
    line_.Remove(*this);
  }

 private:
  friend class CudaLine;

  CudaLine& line_;
  CudaSet* set_ = nullptr;
  const Batch* batch_ = nullptr;
  bool begun_ = false;
  bool launched_ = false;
  int64_t moves_seen_ = 0;
  std::shared_ptr<DeviceEvent> end_;     // these two: once launched
  std::shared_ptr<DeviceEvent> inputs_;  // nullptr: it waited for none
};

Status CudaLine::AddSet(uint32_t set, std::span<const int> ranks, int my_index) {
  if (my_index < 0 || static_cast<size_t>(my_index) >= ranks.size()) {
    return InvalidArgument("this rank is not in process set " + std::to_string(set));
  }
  const bool fresh =
      sets_.try_emplace(set, std::make_unique<CudaSet>(home_, set, ranks, my_index)).second;
  if (fresh) return {};
  return InvalidArgument("process set " + std::to_string(set) + " was already added");
}

// What NCCL is told at a set's end, it is told on its device.
void CudaLine::RemoveSet(uint32_t set) {
  if (home_.lane != nullptr) (void)home_.lane->device().MakeCurrent();  // then NCCL fails too
  sets_.erase(set);
}

CudaLine::~CudaLine() {
  while (!sets_.empty()) RemoveSet(sets_.begin()->first);
}

Result<PlaneOperation*> CudaLine::Start(const Batch& batch) {
  const auto found = sets_.find(batch.set);
  if (found == sets_.end()) {
    return Internal("batch for unknown process set " + std::to_string(batch.set));
  }
  CudaSet& set = *found->second;
  if (batch.my_index != set.my_index() || static_cast<int>(batch.ranks.size()) != set.size()) {
    return Internal("batch names other members than process set " + std::to_string(batch.set));
  }
  if (!broken_.ok()) return broken_;
  FARANDOLE_RETURN_IF_ERROR(CheckBatch(batch));
  Operation* operation = Take();
  operation->set_ = &set;
  operation->batch_ = &batch;
  operation->begun_ = operation->launched_ = false;
  operation->moves_seen_ = moves_;
  line_.push_back(operation);
  return operation;
}

CudaLine::Operation* CudaLine::Take() {
  if (free_.empty()) {
    operations_.push_back(std::make_unique<Operation>(*this));
    free_.reserve(operations_.size());
    return operations_.back().get();
  }
  Operation* operation = free_.back();
  free_.pop_back();
  return operation;
}

Progress CudaLine::Step(Operation& operation) {
  if (!broken_.ok()) {
    Remove(operation);
    return Progress::Failed(broken_);
  }
  if (operation.launched_) return AskForEnd(operation);
  return &operation == FirstToLaunch() ? Launch(operation) : WaitInLine(operation);
}

CudaLine::Operation* CudaLine::FirstToLaunch() const {
  const auto first = std::find_if(line_.begin(), line_.end(),
                                  [](const Operation* one) { return !one->launched_; });
  return first == line_.end() ? nullptr : *first;
}

Progress CudaLine::Launch(Operation& operation) {
  CudaSet& set = *operation.set_;
  if (home_.lane != nullptr) {
    if (Status status = home_.lane->device().MakeCurrent(); !status.ok()) {
      return Fail(operation, std::move(status));
    }
  }
  if (!set.prepared()) {
    Progress progress = set.Prepare();
    if (progress.state == Progress::State::kDone) progress = Progress::Moved();
    return Tell(operation, std::move(progress));
  }
  if (!operation.begun_) {
    if (Status status = set.way().Begin(*operation.batch_); !status.ok()) {
      return Fail(operation, std::move(status));
    }
    operation.begun_ = true;
  }
  Progress progress = set.way().Step();
  if (progress.state == Progress::State::kLaunched) {
    operation.launched_ = true;
    operation.batch_ = nullptr;
    operation.end_ = set.way().end();
    operation.inputs_ = home_.lane->TakeInputs();
  }
  return Tell(operation, std::move(progress));
}

Progress CudaLine::AskForEnd(Operation& operation) {
  if (Status status = operation.set_->Check(); !status.ok()) {
    return Fail(operation, std::move(status));
  }
  if (&operation != line_.front()) return WaitInLine(operation);
  const Result<bool> passed = operation.end_->IsComplete();
  if (!passed.ok()) return Fail(operation, passed.status());
  if (passed.value()) {
    Remove(operation);
    ++moves_;
    return Progress::Done();
  }
  if (operation.inputs_ != nullptr) {
    const Result<bool> there = operation.inputs_->IsComplete();
    if (!there.ok()) return Fail(operation, there.status());
    if (there.value()) operation.inputs_ = nullptr;
  }
  return Tell(operation, operation.inputs_ == nullptr ? Progress::Waiting(kEndPollNs)
                                                      : Progress::WaitingForInputs(kEndPollNs));
}

// Whoever it waits for says when to ask again. That the line gets on is its own progress too.
Progress CudaLine::WaitInLine(Operation& operation) {
  const bool moved = operation.moves_seen_ != moves_;
  operation.moves_seen_ = moves_;
  if (moved) return Progress::Moved();
  return waits_for_inputs_ ? Progress::WaitingForInputs(kByDoorbell) : Progress::Waiting();
}

Progress CudaLine::Tell(Operation& operation, Progress progress) {
  if (progress.state == Progress::State::kFailed) return Fail(operation, progress.status);
  if (progress.state != Progress::State::kWaiting) ++moves_;
  if (&operation == line_.front()) {
    waits_for_inputs_ = progress.for_inputs;
  } else if (progress.state == Progress::State::kWaiting && waits_for_inputs_) {
    progress.for_inputs = true;  // a communicator is made from another only when that one rests
  }
  operation.moves_seen_ = moves_;
  return progress;
}

Progress CudaLine::Fail(Operation& operation, Status status) {
  Break(status.message());
  Remove(operation);
  return Progress::Failed(std::move(status));
}

void CudaLine::Remove(Operation& operation) {
  std::erase(line_, &operation);
  operation.end_ = operation.inputs_ = nullptr;
  free_.push_back(&operation);
}

void CudaLine::Break(const std::string& why) {
  if (!broken_.ok()) return;
  broken_ = Aborted("the CUDA plane has ended: " + why);
  if (home_.lane != nullptr) (void)home_.lane->device().MakeCurrent();  // the first error counts
  for (const auto& [uid, set] : sets_) set->Abandon();
}

}  // namespace

std::unique_ptr<DataPlane> MakeCudaLine(CudaPlaneParts parts, int distance) {
  return std::make_unique<CudaLine>(std::move(parts), distance);
}

}  // namespace farandole
