#include "ops/shm/plane.h"

#include <string>

namespace farandole {
namespace {

/// By OpKind; CheckBatch refuses later kinds.
constexpr SharedMemoryFactory* kFactories[] = {
    MakeSharedMemoryAllreduce, MakeSharedMemoryBroadcast, MakeSharedMemoryAllgather,
    MakeSharedMemoryReducescatter, MakeSharedMemoryAlltoall};
static_assert(std::size(kFactories) == static_cast<size_t>(OpKind::kAlltoall) + 1);

}  // namespace

Status SharedMemoryPlane::AddSet(uint32_t set, std::span<const int> ranks, int my_index) {
  if (sets_.Find(set) != nullptr) {
    return InvalidArgument("process set " + std::to_string(set) + " was already added");
  }
  if (my_index < 0 || static_cast<size_t>(my_index) >= ranks.size() ||
      ranks[static_cast<size_t>(my_index)] != rank_) {
    return InvalidArgument("rank " + std::to_string(rank_) + " is not at index " +
                           std::to_string(my_index) + " of process set " + std::to_string(set));
  }
  auto fresh = std::make_unique<SharedMemorySet>(set, ranks, my_index, kernels_, counters_,
                                                 *memory_, SteadyClock());
  FARANDOLE_RETURN_IF_ERROR(fresh->Join());
  sets_.Add(std::move(fresh));
  return {};
}

Result<PlaneOperation*> SharedMemoryPlane::Start(const Batch& batch) {
  Result<SharedMemorySet*> set = sets_.For(batch);
  if (!set.ok()) return set.status();
  const auto kind = static_cast<size_t>(batch.kind);
  return pools_[kind].Take(kFactories[kind])->Enqueue(batch, *set.value(), pools_[kind]);
}

Agreement* SharedMemoryPlane::AgreementOf(uint32_t set) {
  SharedMemorySet* const found = sets_.Find(set);
  return found == nullptr || !found->agreement ? nullptr : &*found->agreement;
}

}  // namespace farandole
