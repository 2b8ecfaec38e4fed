#include "ops/gpu/nccl/backend.h"

#include <cstdlib>
#include <utility>
#include <vector>

#include "ops/cpu/batch.h"
#include "ops/gpu/nccl/communicator.h"
#include "ops/gpu/nccl/library.h"
#include "ops/gpu/nccl/plan.h"

namespace farandole {
namespace {

/// The part of a backend that belongs to the launch thread. The queue holds it, so that it outlives
/// the backend.
///
/// Thread safety: the launch thread; Abort and End by one beside it. Lifetime: the queue outlives
/// it.
class NcclSet final : public LaunchQueue::Client {
 public:
  NcclSet(const NcclLibrary& library, LaunchQueue& queue, const NcclSetOptions& options,
          int64_t slice_bytes)
      : queue_(queue),
        slice_bytes_(slice_bytes),
        communicator_(std::make_unique<NcclCommunicator>(NcclCommunicatorOptions{
            &library, options.unique_id, options.size, options.index, options.shared_gpu,
            options.ranks_text, &SteadyClock(), [&queue] { return queue.failed(); }})) {}

  Status Connect() override { return communicator_->Connect(); }
  Status Launch(const Batch& batch, LaunchTask& task) override;
  Result<bool> Check() override;
  void Abort() override { communicator_->Abort(); }
  void End() override { communicator_ = nullptr; }

 private:
  Status RunSlice(const Batch& slice);
  Status Pack(const Batch& slice, void* buffer);
  Status Call(const Batch& slice, void* buffer);
  Status Unpack(const Batch& slice, void* buffer);
  void ResultsOf(const Batch& slice);
  MoveSpec Spoilable(MoveSpec spec) const {
    spec.spoiled = queue_.streams().spoiled();
    return spec;
  }

  LaunchQueue& queue_;
  const int64_t slice_bytes_;
  std::unique_ptr<NcclCommunicator> communicator_;  // until End
  NcclSlices slices_;
  NcclPlan plan_;
  std::vector<DeviceMove> moves_;
  std::vector<NcclTransfer> transfers_;
  std::shared_ptr<DeviceEvent> end_;  // of the batch launched last
};

// Slice k + 1 is packed, into the other buffer, while slice k travels and slice k - 1 is unpacked.
Status NcclSet::Launch(const Batch& batch, LaunchTask& task) {
  LaunchStreams& streams = queue_.streams();
  FARANDOLE_RETURN_IF_ERROR(streams.pack->WaitFor(batch.ready));
  FARANDOLE_RETURN_IF_ERROR(streams.pack->Mark(task.inputs));
  slices_.Begin(batch, slice_bytes_);
  for (int64_t i = 0; i < slices_.count(); ++i) FARANDOLE_RETURN_IF_ERROR(RunSlice(slices_.Get(i)));
  FARANDOLE_RETURN_IF_ERROR(streams.unpack->Mark(task.end));
  end_ = task.end;
  return {};
}

Status NcclSet::RunSlice(const Batch& slice) {
  LaunchStreams& streams = queue_.streams();
  plan_ = PlanNccl(slice);
  LaunchStreams::FusionBuffer* buffer = nullptr;
  if (plan_.buffer_bytes > 0) {
    Result<LaunchStreams::FusionBuffer*> next = streams.NextBuffer(plan_.buffer_bytes);
    if (!next.ok()) return next.status();
    buffer = next.value();
    FARANDOLE_RETURN_IF_ERROR(streams.pack->WaitFor(buffer->free));
  }
  void* const memory = buffer == nullptr ? nullptr : buffer->memory;
  FARANDOLE_RETURN_IF_ERROR(Pack(slice, memory));
  FARANDOLE_RETURN_IF_ERROR(Call(slice, memory));
  FARANDOLE_RETURN_IF_ERROR(Unpack(slice, memory));
  return buffer == nullptr ? Status() : streams.unpack->Mark(buffer->free);
}

Status NcclSet::Pack(const Batch& slice, void* buffer) {
  LaunchStreams& streams = queue_.streams();
  PackMoves(slice, plan_, buffer, moves_);
  FARANDOLE_RETURN_IF_ERROR(streams.pack->Move(moves_, plan_.pack));
  std::shared_ptr<DeviceEvent> packed;
  FARANDOLE_RETURN_IF_ERROR(streams.pack->Mark(packed));
  return streams.collective->WaitFor(packed);
}

// The communicator returns when NCCL's thread has put its kernel into the stream, which only then
// can be marked.
Status NcclSet::Call(const Batch& slice, void* buffer) {
  LaunchStreams& streams = queue_.streams();
  if (plan_.route != NcclPlan::Route::kNothing) {
    NcclCall call{.kind = plan_.call, .count = plan_.count, .type = plan_.type, .op = plan_.op};
    call.root = slice.root_index;
    if (plan_.call == NcclPlan::Call::kGroup) {
      TransfersOf(slice, plan_, buffer, transfers_);
      call.transfers = transfers_;
    } else {
      const NcclEnds ends = EndsOf(slice, plan_, buffer);
      call.in = ends.in;
      call.out = ends.out;
    }
    FARANDOLE_RETURN_IF_ERROR(communicator_->Run(call, streams.collective->stream()));
  }
  std::shared_ptr<DeviceEvent> reduced;
  FARANDOLE_RETURN_IF_ERROR(streams.collective->Mark(reduced));
  return streams.unpack->WaitFor(reduced);
}

// What NCCL has written where the user sees it is moved to where it is, which does nothing unless
// results are to be spoiled.
Status NcclSet::Unpack(const Batch& slice, void* buffer) {
  UnpackMoves(slice, plan_, buffer, moves_);
  if (plan_.route == NcclPlan::Route::kFused) {
    return queue_.streams().unpack->Move(moves_, Spoilable(plan_.unpack));
  }
  moves_.clear();
  if (plan_.route == NcclPlan::Route::kStraight) ResultsOf(slice);
  return queue_.streams().unpack->Move(moves_, Spoilable(BitwiseMove(slice.dtype)));
}

// NCCL writes nothing to a root that broadcasts in place: what it has stays.
void NcclSet::ResultsOf(const Batch& slice) {
  const bool is_root = slice.kind == OpKind::kBroadcast && slice.my_index == slice.root_index;
  for (const Segment& segment : slice.segments) {
    const int64_t count = OutputCount(slice, segment);
    const bool is_written = segment.out != nullptr && !(is_root && segment.out == segment.in);
    if (is_written && count > 0) moves_.push_back({segment.out, segment.out, count});
  }
}

Result<bool> NcclSet::Check() {
  FARANDOLE_RETURN_IF_ERROR(communicator_->CheckAsync());
  if (end_ == nullptr) return false;
  const Result<bool> complete = end_->IsComplete();
  if (!complete.ok()) return complete.status();
  return !complete.value();
}

class NcclBackend final : public GpuBackend {
 public:
  NcclBackend(const NcclLibrary& library, LaunchQueue& queue, const NcclSetOptions& options,
              int64_t slice_bytes)
      : queue_(queue), set_(std::make_shared<NcclSet>(library, queue, options, slice_bytes)) {
    queue_.Add(set_);
  }
  ~NcclBackend() override { queue_.Remove(set_); }

  Result<std::shared_ptr<LaunchTask>> Begin(const Batch& batch) override {
    if (Reduces(batch.kind) && IsBitwise(batch.op)) {
      return Unimplemented(std::string(Name(batch.kind)) + " on a GPU: NCCL has no " +
                           std::string(Name(batch.op)) + "; pass the tensor in host memory");
    }
    return queue_.Launch(set_, batch);
  }

 private:
  LaunchQueue& queue_;
  const std::shared_ptr<NcclSet> set_;
};

/// For NCCL to read, unless the user set it.
void SetDefault(const char* variable, const char* value) {
  (void)setenv(variable, value, 0);  // fails for lack of memory only; then NCCL says why it refuses
}

class ProcessNccl final : public NcclProvider {
 public:
  ProcessNccl(std::string path, bool share_gpu) : path_(std::move(path)), share_gpu_(share_gpu) {}

  // ncclConfig_t has no fields for these two; the limit of blocks it has (NcclCommunicator).
  Result<NcclFound> Find() override {
    if (share_gpu_) {
      SetDefault("NCCL_MULTI_RANK_GPU_ENABLE", "1");
      SetDefault("NCCL_NVLS_ENABLE", "0");
    }
    Result<const NcclLibrary*> library = NcclLibrary::OfProcess(path_);
    if (!library.ok()) return library.status();
    library_ = library.value();
    return NcclFound{library_->version(), library_->file()};
  }
  Result<std::string> MakeUniqueId() override { return library_->MakeUniqueId(); }
  std::unique_ptr<GpuBackend> Make(LaunchQueue& queue, NcclSetOptions options) override {
    return MakeNcclBackend(*library_, queue, options);
  }

 private:
  const std::string path_;
  const bool share_gpu_;
  const NcclLibrary* library_ = nullptr;
};

}  // namespace

std::unique_ptr<GpuBackend> MakeNcclBackend(const NcclLibrary& library, LaunchQueue& queue,
                                            const NcclSetOptions& options, int64_t slice_bytes) {
  return std::make_unique<NcclBackend>(library, queue, options, slice_bytes);
}

std::unique_ptr<NcclProvider> MakeNcclProvider(const std::string& path, bool share_gpu) {
  return std::make_unique<ProcessNccl>(path, share_gpu);
}

}  // namespace farandole
