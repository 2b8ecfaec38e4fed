#include "ops/gpu/nccl/backend.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "ops/gpu/nccl/communicator.h"
#include "ops/gpu/nccl/library.h"
#include "ops/gpu/nccl/plan.h"

namespace farandole {
namespace {

/// Batches of one decision that are launched together have no more: what takes longer than a launch
/// gains nothing by it, and would be packed before the first is reduced.
constexpr int64_t kTogetherBytes = int64_t{8} << 20;

/// Whether the batch goes through a buffer on every member.
bool FusesEverywhere(const Batch& batch) {
  const auto tensors = std::ranges::count_if(
      batch.segments, [](const Segment& segment) { return segment.count > 0; });
  return batch.kind == OpKind::kAllreduce && tensors > 1;
}

/// What an allreduce takes in a fusion buffer at most, in any type and with the gaps: alike on all
/// members, and a multiple of what a buffer is aligned to.
int64_t MostPackedBytes(const Batch& batch) {
  constexpr int64_t kAlignBytes = 256;
  const int64_t bytes = batch.count * 8 + std::ssize(batch.segments) * 16;
  return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
}

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
        registers_(options.registers),
        communicator_(std::make_unique<NcclCommunicator>(library, options,
                                                         [&queue] { return queue.failed(); })),
        registered_(
            [this](int64_t size_bytes) { return communicator_->AllocateRegistered(size_bytes); },
            [&library](void* memory) { NcclCommunicator::FreeRegistered(library, memory); }) {}
  ~NcclSet() override { NcclSet::End(); }

  Status Connect() override { return communicator_->Connect(); }
  Status Launch(std::span<const std::shared_ptr<LaunchTask>> tasks) override;
  Result<bool> Check() override;
  void Abort() override { communicator_->Abort(); }
  void End() override;

 private:
  Status LaunchOne(LaunchTask& task);
  Status LaunchTogether(std::span<const std::shared_ptr<LaunchTask>> tasks);
  Status PackTogether(std::span<const std::shared_ptr<LaunchTask>> tasks,
                      FusionBuffers::Buffer& buffer);
  size_t CountTogether(std::span<const std::shared_ptr<LaunchTask>> tasks) const;
  Status RunSlice(const Batch& slice);
  FusionBuffers& BuffersFor(const Batch& slice);
  /// What comes next in a stream waits for what the other one holds now.
  static Status Follow(CommStream& earlier, CommStream& later) {
    std::shared_ptr<DeviceEvent> event;
    FARANDOLE_RETURN_IF_ERROR(earlier.Record(event));
    return later.WaitFor(event);
  }

  LaunchQueue& queue_;
  const int64_t slice_bytes_;
  const bool registers_;
  std::unique_ptr<NcclCommunicator> communicator_;  // until End
  FusionBuffers registered_;
  NcclSlices slices_;
  NcclPlan plan_;
  std::vector<NcclPlan> plans_;  // these two: of batches that are launched together
  std::vector<NcclCall> calls_;
  std::shared_ptr<DeviceEvent> end_;  // of the batch launched last
};

Status NcclSet::Launch(std::span<const std::shared_ptr<LaunchTask>> tasks) {
  while (!tasks.empty()) {
    const size_t count = CountTogether(tasks);
    FARANDOLE_RETURN_IF_ERROR(count == 1 ? LaunchOne(*tasks.front())
                                         : LaunchTogether(tasks.first(count)));
    tasks = tasks.subspan(count);
  }
  return {};
}

// How many, from the first, share one group. Alike on all members: NCCL sorts what is in a group
// and chooses its algorithm by all of it.
size_t NcclSet::CountTogether(std::span<const std::shared_ptr<LaunchTask>> tasks) const {
  size_t count = 0;
  for (int64_t bytes = 0; count < tasks.size(); ++count) {
    const Batch& batch = tasks[count]->batch.batch();
    bytes += batch.count * SizeOf(batch.dtype);
    if (bytes > std::min(kTogetherBytes, slice_bytes_)) break;
  }
  return std::max<size_t>(count, 1);
}

// All packed into one buffer, reduced by one group, then all unpacked.
Status NcclSet::LaunchTogether(std::span<const std::shared_ptr<LaunchTask>> tasks) {
  LaunchStreams& streams = queue_.streams();
  int64_t size_bytes = 0;
  for (const auto& task : tasks) size_bytes += MostPackedBytes(task->batch.batch());
  const bool fuses = std::ranges::all_of(
      tasks, [](const auto& task) { return FusesEverywhere(task->batch.batch()); });
  Result<FusionBuffers::Buffer*> next =
      (registers_ && fuses ? registered_ : streams.buffers).Next(size_bytes);
  if (!next.ok()) return next.status();
  FusionBuffers::Buffer& buffer = *next.value();
  FARANDOLE_RETURN_IF_ERROR(PackTogether(tasks, buffer));
  calls_.clear();
  for (const NcclPlan& plan : plans_)
    calls_.insert(calls_.end(), plan.calls.begin(), plan.calls.end());
  FARANDOLE_RETURN_IF_ERROR(Follow(*streams.pack, *streams.collective));
  FARANDOLE_RETURN_IF_ERROR(communicator_->Run(calls_, streams.collective->stream()));
  FARANDOLE_RETURN_IF_ERROR(Follow(*streams.collective, *streams.unpack));
  FARANDOLE_RETURN_IF_ERROR(streams.LookForPoison());
  for (NcclPlan& plan : plans_) {
    plan.unpack_spec.poisoned = streams.poisoned();
    FARANDOLE_RETURN_IF_ERROR(streams.unpack->Cast(plan.unpack, plan.unpack_spec));
  }
  FARANDOLE_RETURN_IF_ERROR(streams.unpack->Record(end_));
  for (const auto& task : tasks) task->end = end_;
  buffer.free = end_;
  return {};
}

// Plans the batches, each in a part of the buffer.
Status NcclSet::PackTogether(std::span<const std::shared_ptr<LaunchTask>> tasks,
                             FusionBuffers::Buffer& buffer) {
  CommStream& pack = *queue_.streams().pack;
  for (const auto& task : tasks) {
    FARANDOLE_RETURN_IF_ERROR(pack.WaitFor(task->batch.batch().ready));
  }
  std::shared_ptr<DeviceEvent> inputs;
  FARANDOLE_RETURN_IF_ERROR(pack.Record(inputs));
  FARANDOLE_RETURN_IF_ERROR(pack.WaitFor(buffer.free));
  plans_.resize(tasks.size());
  auto* part = static_cast<std::byte*>(buffer.memory);
  for (size_t i = 0; i < tasks.size(); ++i) {
    const Batch& batch = tasks[i]->batch.batch();
    tasks[i]->inputs = inputs;
    const auto source = [&](int64_t) { return Result<void*>(part); };
    FARANDOLE_RETURN_IF_ERROR(PlanNccl(batch, source, plans_[i]));
    FARANDOLE_RETURN_IF_ERROR(pack.Cast(plans_[i].pack, plans_[i].pack_spec));
    part += MostPackedBytes(batch);
  }
  return {};
}

// Slice k + 1 is packed, into the other buffer, while slice k travels and slice k - 1 is unpacked.
Status NcclSet::LaunchOne(LaunchTask& task) {
  const Batch& batch = task.batch.batch();
  LaunchStreams& streams = queue_.streams();
  FARANDOLE_RETURN_IF_ERROR(streams.pack->WaitFor(batch.ready));
  FARANDOLE_RETURN_IF_ERROR(streams.pack->Record(task.inputs));
  slices_.Begin(batch, slice_bytes_);
  while (const Batch* slice = slices_.Next()) FARANDOLE_RETURN_IF_ERROR(RunSlice(*slice));
  FARANDOLE_RETURN_IF_ERROR(streams.unpack->Record(task.end));
  end_ = task.end;
  return {};
}

// The communicator returns when NCCL's thread has put its kernel into the stream, whose end can
// only then be marked.
Status NcclSet::RunSlice(const Batch& slice) {
  LaunchStreams& streams = queue_.streams();
  FusionBuffers::Buffer* buffer = nullptr;
  const auto next_buffer = [&](int64_t size_bytes) -> Result<void*> {
    Result<FusionBuffers::Buffer*> next = BuffersFor(slice).Next(size_bytes);
    if (!next.ok()) return next.status();
    buffer = next.value();
    FARANDOLE_RETURN_IF_ERROR(streams.pack->WaitFor(buffer->free));
    return buffer->memory;
  };
  FARANDOLE_RETURN_IF_ERROR(PlanNccl(slice, next_buffer, plan_));
  FARANDOLE_RETURN_IF_ERROR(streams.pack->Cast(plan_.pack, plan_.pack_spec));
  FARANDOLE_RETURN_IF_ERROR(Follow(*streams.pack, *streams.collective));
  FARANDOLE_RETURN_IF_ERROR(communicator_->Run(plan_.calls, streams.collective->stream()));
  FARANDOLE_RETURN_IF_ERROR(Follow(*streams.collective, *streams.unpack));
  if (!plan_.unpack.empty()) {
    FARANDOLE_RETURN_IF_ERROR(streams.LookForPoison());
    plan_.unpack_spec.poisoned = streams.poisoned();
    FARANDOLE_RETURN_IF_ERROR(streams.unpack->Cast(plan_.unpack, plan_.unpack_spec));
  }
  return buffer == nullptr ? Status() : streams.unpack->Record(buffer->free);
}

// NCCL's ranks meet to use registered memory, and hang where some use another: so it is used only
// for what goes through a buffer on every rank, by what all know alike, and by one set alone, whose
// members then use the same one of the two, of the same size.
FusionBuffers& NcclSet::BuffersFor(const Batch& slice) {
  return registers_ && FusesEverywhere(slice) ? registered_ : queue_.streams().buffers;
}

// The last results may still be unpacked from registered memory, also after a failure of another
// set. Where a launch here has failed half-way, the queue has drained its streams before this.
void NcclSet::End() {
  communicator_ = nullptr;
  while (registers_ && end_ != nullptr) {
    const Result<bool> complete = end_->IsComplete();
    if (!complete.ok() || complete.value()) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  registered_.End();
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
  ProcessNccl(std::string path, bool share_gpu, bool registers)
      : path_(std::move(path)), share_gpu_(share_gpu), registers_(registers) {}

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
    options.registers = registers_ && !options.shared_gpu;
    return MakeNcclBackend(*library_, queue, options);
  }

 private:
  const std::string path_;
  const bool share_gpu_;
  const bool registers_;
  const NcclLibrary* library_ = nullptr;
};

}  // namespace

std::unique_ptr<GpuBackend> MakeNcclBackend(const NcclLibrary& library, LaunchQueue& queue,
                                            const NcclSetOptions& options, int64_t slice_bytes) {
  return std::make_unique<NcclBackend>(library, queue, options, slice_bytes);
}

std::unique_ptr<NcclProvider> MakeNcclProvider(const std::string& path, bool share_gpu,
                                               bool registers) {
  return std::make_unique<ProcessNccl>(path, share_gpu, registers);
}

}  // namespace farandole
