#include "test/support/stepped_job.h"

#include "coordinator/control/rendezvous.h"
#include "ops/cpu/kernels.h"
#include "test/support/count_allocations.h"

namespace farandole {

EngineOptions SteppedJob::Stepped() {
  EngineOptions options;
  options.threads = false;
  return options;
}

SteppedJob::SteppedJob(int size, EngineOptions base, const WrapPlane& wrap,
                       const std::function<RankDevice*(int rank)>& gpus,
                       const std::function<BorrowedMemory*(int rank)>& memory)
    : hub_(std::make_unique<InProcessHub>(size)),
      parent_(MakeTree(std::vector<int>(static_cast<size_t>(size), 0))),
      ranks_(static_cast<size_t>(size)) {
  std::vector<Doorbell*> bells;
  for (Rank& rank : ranks_) {
    rank.doorbell = std::make_unique<FutexDoorbell>();
    bells.push_back(rank.doorbell.get());
  }
  local_ = std::make_shared<HeapMemory>(bells);
  const Clock& clock = base.threads ? SteadyClock() : static_cast<const Clock&>(clock_);
  base.negotiation.size = size;
  base.negotiation.parent = parent_;
  base.negotiation.planes.assign(kDeviceKindCount, 0);
  for (int r = 0; r < size; ++r) {
    Rank& rank = ranks_[static_cast<size_t>(r)];
    rank.counters = std::make_unique<Counters>();
    rank.log = std::make_unique<RecordingLog>();
    rank.liveness = std::make_unique<LivenessTable>(rank.doorbell.get());
    rank.transport = hub_->Create(r, rank.doorbell.get(), rank.liveness.get());
    rank.plane = std::make_unique<SharedMemoryPlane>(local_, r, BestCpuKernels());
    if (wrap) rank.plane = wrap(r, std::move(rank.plane));
    base.negotiation.rank = r;
    EngineParts parts{rank.transport.get(), {rank.plane.get()}, rank.doorbell.get(),     &clock,
                      rank.counters.get(),  rank.log.get(),     gpus ? gpus(r) : nullptr};
    parts.liveness = rank.liveness.get();
    if (memory) parts.memory = memory(r);
    rank.diagnosis =
        std::make_unique<Diagnosis>(Diagnosis::Options{.rank = r, .log = rank.log.get()});
    rank.diagnosis->Observe(parts);
    rank.engine = std::make_unique<Engine>(base, parts);
  }
}

int64_t SteppedJob::Settle() {
  int64_t allocations = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (Rank& rank : ranks_) {
      const CountAllocations counting;
      moved |= rank.engine->RunOnce().moved;
      allocations += counting.count();
    }
  }
  return allocations;
}

int64_t SteppedJob::SettleHeld() {
  int64_t allocations = Settle();
  clock_.Advance(kNsPerMs);
  return allocations + Settle();
}

}  // namespace farandole
