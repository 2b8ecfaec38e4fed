#include "ops/local/arena.h"
#include "ops/local/local_plane.h"

namespace farandole {

LocalHub::LocalHub(std::span<Doorbell* const> bells, Options options)
    : bells_(bells.begin(), bells.end()), options_(options) {}

LocalHub::~LocalHub() = default;

Result<std::shared_ptr<LocalHub::Arena>> LocalHub::Join(uint32_t set, std::span<const int> ranks) {
  const std::string which = "process set " + std::to_string(set);
  for (const int rank : ranks) {
    if (rank >= 0 && static_cast<size_t>(rank) < bells_.size()) continue;
    return InvalidArgument(which + " names rank " + std::to_string(rank) + "; there are " +
                           std::to_string(bells_.size()));
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(arenas_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto found = arenas_.find(set); found != arenas_.end()) {
    // Not null: only a member's RemoveSet on another thread could have dropped it since.
    if (std::shared_ptr<Arena> arena = found->second.lock()) {
      if (std::equal(ranks.begin(), ranks.end(), arena->ranks.begin(), arena->ranks.end())) {
        return arena;
      }
      return InvalidArgument(which + " was added with other ranks by another member");
    }
  }
  const SlotLayout layout{static_cast<int>(ranks.size()), options_.slots, options_.slot_bytes};
  auto arena = std::make_shared<Arena>(ranks, layout);
  if (arena->memory == nullptr) {
    return ResourceExhausted(which + ": cannot allocate " + std::to_string(layout.Bytes()) +
                             " bytes of exchange slots");
  }
  arenas_[set] = arena;
  return arena;
}

}  // namespace farandole
