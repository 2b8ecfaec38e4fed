#include "ops/mpi/plane.h"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "ops/device.h"
#include "ops/mpi/collective.h"
#include "ops/mpi/staging.h"

namespace farandole {
namespace {

/// By OpKind, of which CheckBatch refuses later ones; the last is for small batches of some kinds.
using Factory = std::unique_ptr<MpiCollective>();
constexpr Factory* kFactories[] = {MakeMpiAllreduce,     MakeMpiBroadcast, MakeMpiAllgather,
                                   MakeMpiReducescatter, MakeMpiAlltoall,  MakeMpiSmallGather};
constexpr size_t kSmallGather = std::size(kFactories) - 1;
static_assert(kSmallGather == static_cast<size_t>(OpKind::kAlltoall) + 1);

class MpiPlane final : public DataPlane {
 public:
  MpiPlane(const CpuKernels& kernels, const MpiBulk& bulk) : kernels_(kernels), bulk_(bulk) {}

  const char* name() const override { return "mpi"; }

  /// A set may share its tags with one that was removed on other members already: `earlier`.
  Status AddSet(uint32_t uid, std::span<const int> ranks, int my_index) override {
    auto set = std::make_unique<MpiSet>(uid, ranks, my_index, kernels_, bulk_);
    for (const auto& [other_uid, other] : sets_) {
      if (other->SharesTagsWith(uid)) set->earlier = other.get();  // the last of them
    }
    sets_.Add(std::move(set));
    return Status();
  }

  /// Sets with the same tags form a chain; one that waited for the ended set waits for what that
  /// one waited for.
  void RemoveSet(uint32_t uid) override {
    const MpiSet* const ended = sets_.Find(uid);
    for (const auto& [other_uid, other] : sets_) {
      if (ended != nullptr && other->earlier == ended) other->earlier = ended->earlier;
    }
    sets_.Remove(uid);
  }

  Result<PlaneOperation*> Start(const Batch& batch) override {
    Result<MpiSet*> set = sets_.For(batch);
    if (!set.ok()) return set.status();
    FARANDOLE_RETURN_IF_ERROR(set.value()->AllocateStaging());
    const size_t which = GatherPlan::Suits(batch) ? kSmallGather : static_cast<size_t>(batch.kind);
    CpuCollective* const collective = pools_[which].Take(kFactories[which]);
    collective->Enqueue(batch, *set.value(), pools_[which]);
    return collective;
  }

 private:
  const CpuKernels& kernels_;
  const MpiBulk bulk_;
  CpuSets<MpiSet> sets_;
  std::array<CpuCollective::Pool, std::size(kFactories)> pools_;
};

}  // namespace

std::unique_ptr<DataPlane> MakeMpiPlane(MPI_Comm communicator, const CpuKernels& kernels,
                                        Counters* counters, BorrowedMemory* memory) {
  return std::make_unique<MpiPlane>(kernels, MpiBulk{communicator, counters, memory});
}

}  // namespace farandole
