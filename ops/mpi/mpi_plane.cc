#include "ops/mpi/mpi_plane.h"

#include <algorithm>
#include <new>
#include <vector>

#include "ops/mpi/mpi_operation.h"
#include "ops/mpi/mpi_set.h"

namespace farandole {
namespace {

class MpiPlane final : public DataPlane {
 public:
  explicit MpiPlane(const MpiBulk& bulk) : bulk_(bulk) {}

  const char* name() const override { return "mpi"; }

  Status AddSet(uint32_t uid, std::span<const int> ranks, int my_index) override {
    for (const std::unique_ptr<MpiSet>& other : sets_) {
      if (other->uid() % MpiSet::kTagSlots != uid % MpiSet::kTagSlots) continue;
      return ResourceExhausted("process sets " + std::to_string(other->uid()) + " and " +
                               std::to_string(uid) + " would share a message tag; remove one");
    }
    Result<std::unique_ptr<MpiSet>> set = MpiSet::Create(uid, ranks, my_index, bulk_);
    if (!set.ok()) return set.status();
    sets_.push_back(std::move(set).value());
    return Status();
  }

  void RemoveSet(uint32_t uid) override {
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
    MpiOperation& operation = FreeOperation();
    operation.Begin(batch, *set);
    return &operation;
  }

 private:
  MpiSet* Find(uint32_t uid) {
    const auto at = std::find_if(sets_.begin(), sets_.end(),
                                 [uid](const auto& set) { return set->uid() == uid; });
    return at == sets_.end() ? nullptr : at->get();
  }

  MpiOperation& FreeOperation() {
    for (const std::unique_ptr<MpiOperation>& operation : operations_) {
      if (!operation->in_use()) return *operation;
    }
    operations_.push_back(std::make_unique<MpiOperation>());
    return *operations_.back();
  }

  const MpiBulk bulk_;
  std::vector<std::unique_ptr<MpiSet>> sets_;
  std::vector<std::unique_ptr<MpiOperation>> operations_;  // as many as ever ran side by side
};

}  // namespace

std::unique_ptr<DataPlane> MakeMpiPlane(MPI_Comm communicator, const CpuKernels& kernels,
                                        Counters* counters, BorrowedMemory* memory) {
  return std::make_unique<MpiPlane>(MpiBulk{communicator, &kernels, counters, memory});
}

}  // namespace farandole
