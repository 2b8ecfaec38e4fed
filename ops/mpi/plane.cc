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
  explicit MpiPlane(const MpiBulk& bulk) : bulk_(bulk) {}

  const char* name() const override { return "mpi"; }

  /// A set may share its tags with one that was removed on other members already: `earlier`.
  Status AddSet(uint32_t uid, std::span<const int> ranks, int my_index) override {
    auto set = std::make_unique<MpiSet>(uid, ranks, my_index, bulk_);
    for (const std::unique_ptr<MpiSet>& other : sets_) {
      if (other->SharesTagsWith(uid)) set->earlier = other.get();  // the last of them
    }
    sets_.push_back(std::move(set));
    return Status();
  }

  void RemoveSet(uint32_t uid) override {
    MpiSet* const ended = Find(uid);
    for (const std::unique_ptr<MpiSet>& other : sets_) {
      // Sets with the same tags form a chain; one that waited for the ended set waits for what that
      // one waited for.
      if (ended != nullptr && other->earlier == ended) other->earlier = ended->earlier;
    }
    std::erase_if(sets_, [uid](const std::unique_ptr<MpiSet>& set) { return set->uid() == uid; });
  }

  Result<PlaneOperation*> Start(const Batch& batch) override {
    MpiSet* const set = Find(batch.set);
    if (set == nullptr) return Internal("unknown process set " + std::to_string(batch.set));
    if (set->broken()) {
      return Internal("an earlier batch of process set " + std::to_string(batch.set) +
                      " failed or was abandoned");
    }
    FARANDOLE_RETURN_IF_ERROR(CheckBatch(batch));
    FARANDOLE_RETURN_IF_ERROR(set->AllocateStaging());
    const bool small = GatherPlan::Suits(batch);
    MpiCollective& collective =
        FreeCollective(small ? kSmallGather : static_cast<size_t>(batch.kind));
    collective.Begin(batch, *set);
    return &collective;
  }

 private:
  MpiSet* Find(uint32_t uid) {
    const auto at = std::find_if(sets_.begin(), sets_.end(),
                                 [uid](const auto& set) { return set->uid() == uid; });
    return at == sets_.end() ? nullptr : at->get();
  }

  /// One that is not in use; allocates only when more than ever run side by side.
  MpiCollective& FreeCollective(size_t index) {
    std::vector<std::unique_ptr<MpiCollective>>& pool = pools_[index];
    for (const std::unique_ptr<MpiCollective>& collective : pool) {
      if (!collective->in_use()) return *collective;
    }
    pool.push_back(kFactories[index]());
    return *pool.back();
  }

  const MpiBulk bulk_;
  std::vector<std::unique_ptr<MpiSet>> sets_;  // in the order added
  std::array<std::vector<std::unique_ptr<MpiCollective>>, std::size(kFactories)> pools_;
};

}  // namespace

std::unique_ptr<DataPlane> MakeMpiPlane(MPI_Comm communicator, const CpuKernels& kernels,
                                        Counters* counters, BorrowedMemory* memory) {
  return std::make_unique<MpiPlane>(MpiBulk{communicator, &kernels, counters, memory});
}

}  // namespace farandole
