// Heap memory behind one process set's SharedSlots.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "ops/local/local_plane.h"
#include "ops/local/shared_slots.h"

namespace farandole {

/// Invariant: `memory` is null, if it could not be had, or initialised for `layout`.
struct LocalHub::Arena {
  Arena(std::span<const int> members, const SlotLayout& shape)
      : ranks(members.begin(), members.end()),
        layout(shape),
        memory(static_cast<std::byte*>(::operator new(shape.Bytes(), kAlign, std::nothrow))) {
    if (memory != nullptr) SharedSlots::Initialize(memory.get(), layout);
  }

  static constexpr std::align_val_t kAlign{4096};
  struct Free {
    void operator()(std::byte* block) const { ::operator delete(block, kAlign); }
  };

  const std::vector<int> ranks;
  const SlotLayout layout;
  const std::unique_ptr<std::byte, Free> memory;
};

}  // namespace farandole
