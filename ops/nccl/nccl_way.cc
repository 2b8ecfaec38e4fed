#include "ops/nccl/nccl_way.h"

#include <chrono>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/nccl/api.h"
#include "ops/nccl/communicator.h"
#include "ops/nccl/fusion_buffer.h"
#include "ops/nccl/plan.h"

namespace farandole {
namespace {

/// Thread safety and lifetime: as CudaWay. Invariant: `stage_` says what of `batch_` is in the
/// stream.
class NcclWay final : public CudaWay {
 public:
  explicit NcclWay(const NcclWayOptions& options)
      : lane_(*options.lane),
        clock_(*options.clock),
        buffer_(
            {&options.library->api(), options.lane, &communicator_, options.counters, options.log}),
        parent_(static_cast<NcclWay*>(options.parent)),
        communicator_({options.library, options.unique_id, options.size, options.index, options.map,
                       options.clock, parent_ == nullptr ? nullptr : &parent_->communicator_,
                       options.excluded}) {}
  ~NcclWay() override;

  const char* name() const override { return "nccl"; }
  Progress Connect() override;
  Status Begin(const Batch& batch) override;
  Progress Step() override;
  std::shared_ptr<DeviceEvent> end() const override { return end_; }
  Status Check() override;
  void Abandon() override;

 private:
  enum class Stage : uint8_t { kIdle, kBegun, kCollective };

  Progress GiveUp(Status why);
  Status EnqueueCollective();
  Status Call();
  Status EnqueueEnd();
  Status Move(const MoveSpec& spec);
  bool IsOverWithin(int64_t timeout_ns) const;

  CudaLane& lane_;
  const Clock& clock_;
  NcclFusionBuffer buffer_;
  NcclWay* parent_;                // until connected
  NcclCommunicator communicator_;  // ends before the buffer's memory
  Stage stage_ = Stage::kIdle;
  const Batch* batch_ = nullptr;
  NcclPlan plan_;
  std::vector<DeviceMove> moves_;
  std::vector<NcclTransfer> transfers_;
  std::shared_ptr<DeviceEvent> end_;       // of the batch launched last
  std::shared_ptr<DeviceEvent> last_use_;  // of the buffer: end_, or the end of what was given up
  Status failure_;                         // the first; from then on nothing is enqueued
};

// NCCL makes a communicator from another only while that one rests.
Progress NcclWay::Connect() {
  if (parent_ != nullptr && parent_->last_use_ != nullptr) {
    const Result<bool> over = parent_->last_use_->IsComplete();
    if (!over.ok()) return Progress::Failed(over.status());
    if (!over.value()) return Progress::Waiting(NcclCommunicator::kPollNs);
  }
  Progress progress = communicator_.Connect();
  if (progress.state == Progress::State::kDone) parent_ = nullptr;
  return progress;
}

NcclWay::~NcclWay() {
  bool over = IsOverWithin(NcclCommunicator::kCloseNs);
  if (!over) {
    Abandon();
    over = IsOverWithin(NcclCommunicator::kCloseNs);
  }
  buffer_.Detach();
  if (!over) buffer_.Quarantine();
}

bool NcclWay::IsOverWithin(int64_t timeout_ns) const {
  if (last_use_ == nullptr) return true;
  const int64_t deadline_ns = clock_.NowNs() + timeout_ns;
  while (true) {
    const Result<bool> passed = last_use_->IsComplete();
    if (!passed.ok()) return false;
    if (passed.value()) return true;
    if (clock_.NowNs() >= deadline_ns) return false;
    std::this_thread::sleep_for(std::chrono::nanoseconds(NcclCommunicator::kPollNs));
  }
}

Status NcclWay::Begin(const Batch& batch) {
  if (!failure_.ok()) return failure_;
  if (Reduces(batch.kind) && IsBitwise(batch.op)) {
    return Unimplemented(std::string(Name(batch.kind)) + " on a GPU: NCCL has no " +
                         std::string(Name(batch.op)) + "; pass the tensor in host memory");
  }
  plan_ = PlanNccl(batch);
  if (plan_.buffer_bytes > 0) {
    FARANDOLE_RETURN_IF_ERROR(buffer_.Reserve(plan_.buffer_bytes));
  }
  batch_ = &batch;
  stage_ = Stage::kBegun;
  return {};
}

Progress NcclWay::Step() {
  if (!failure_.ok()) return Progress::Failed(failure_);
  const Progress settled = communicator_.Settle();
  if (settled.state == Progress::State::kFailed) return GiveUp(settled.status);
  if (settled.state != Progress::State::kDone) return settled;
  if (stage_ == Stage::kBegun) {
    if (Status status = EnqueueCollective(); !status.ok()) return GiveUp(status);
    stage_ = Stage::kCollective;
    const Progress enqueued = communicator_.Settle();  // usually at once
    if (enqueued.state == Progress::State::kFailed) return GiveUp(enqueued.status);
    if (enqueued.state != Progress::State::kDone) return Progress::Moved();
  }
  if (stage_ != Stage::kCollective) return GiveUp(Internal("NCCL: a step without a batch"));
  if (Status status = EnqueueEnd(); !status.ok()) return GiveUp(status);
  stage_ = Stage::kIdle;
  return Progress::Launched();
}

// Everything up to NCCL's call, whose kernel may reach the stream later.
Status NcclWay::EnqueueCollective() {
  const Batch& batch = *batch_;
  FARANDOLE_RETURN_IF_ERROR(lane_.WaitFor(batch.ready));
  PackMoves(batch, plan_, buffer_.data(), moves_);
  FARANDOLE_RETURN_IF_ERROR(Move(plan_.pack));
  return plan_.route == NcclPlan::Route::kNothing ? Status() : Call();
}

Status NcclWay::Call() {
  const StreamHandle stream = lane_.stream();
  if (plan_.call == NcclPlan::Call::kGroup) {
    TransfersOf(*batch_, plan_, buffer_.data(), transfers_);
    return communicator_.Group(transfers_, stream);
  }
  const auto& [in, out] = EndsOf(*batch_, plan_, buffer_.data());
  const auto& [count, type, op] = std::tie(plan_.count, plan_.type, plan_.op);
  switch (plan_.call) {
    case NcclPlan::Call::kAllReduce:
      return communicator_.AllReduce(in, out, count, type, op, stream);
    case NcclPlan::Call::kBroadcast:
      return communicator_.Broadcast(in, out, count, type, batch_->root_index, stream);
    case NcclPlan::Call::kAllGather:
      return communicator_.AllGather(in, out, count, type, stream);
    case NcclPlan::Call::kReduceScatter:
      return communicator_.ReduceScatter(in, out, count, type, op, stream);
    case NcclPlan::Call::kGroup:
      break;
  }
  return {};
}

Status NcclWay::EnqueueEnd() {
  UnpackMoves(*batch_, plan_, buffer_.data(), moves_);
  FARANDOLE_RETURN_IF_ERROR(Move(plan_.unpack));
  Result<std::shared_ptr<DeviceEvent>> end = lane_.MarkEnd();
  if (!end.ok()) return end.status();
  end_ = last_use_ = end.value();
  return {};
}

Status NcclWay::Move(const MoveSpec& spec) {
  return moves_.empty() ? Status() : lane_.Move(moves_, spec);
}

Status NcclWay::Check() {
  if (!failure_.ok()) return failure_;
  Status status = communicator_.CheckAsync();
  return status.ok() ? status : GiveUp(status).status;
}

void NcclWay::Abandon() {
  if (failure_.ok()) (void)GiveUp(Aborted("batches over NCCL were given up"));
}

Progress NcclWay::GiveUp(Status why) {
  failure_ = std::move(why);
  communicator_.Abort();
  // The stream may hold a pack that no end event covers yet.
  Result<std::shared_ptr<DeviceEvent>> end = lane_.MarkEnd();
  if (end.ok()) last_use_ = end.value();
  return Progress::Failed(failure_);
}

}  // namespace

std::unique_ptr<CudaWay> MakeNcclWay(const NcclWayOptions& options) {
  return std::make_unique<NcclWay>(options);
}

}  // namespace farandole
