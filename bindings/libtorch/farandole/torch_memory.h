/// @file
/// Gradients that autograd allocates in memory where ranks reduce them without a copy. Included by
/// farandole/torch.h; by itself it needs torch and nothing of Farandole.
#pragma once

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace farandole::torch {

/// @cond internal
namespace detail {

/// torch's allocator of host memory, with blocks that are offered to gradients before all others.
///
/// In a backward pass an allocation of exactly a block's size gets the block, if it is free: so
/// fresh gradients lie in memory that was chosen for them. Whatever else has that size may get it
/// as well, say a convolution's gradient in another memory order; of small sizes there is a block
/// more for that. Where none is free, the allocator that was there before gives memory, as it does
/// for all else. A block is freed with the tensor that has it and never given away earlier.
///
/// Thread safety: any thread; a forked child has blocks and lock as they were. Lifetime: that of
/// the process, as torch may free a tensor at any time.
class GradientAllocator final : public c10::Allocator {
 public:
  /// Multiples of it are where blocks begin; what torch aligns its memory to.
  static constexpr std::size_t kAlign = 64;
  /// Bytes. Of larger gradients the blocks are as many as these.
  static constexpr std::size_t kLargestSpare = std::size_t{1} << 20;

  /// The process's. The first call installs it.
  static GradientAllocator& instance() {
    static GradientAllocator* const made = [] {
      auto* const allocator = new GradientAllocator(c10::GetCPUAllocator());
      pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] { instance().mutex_.unlock(); });
      c10::SetCPUAllocator(allocator, /*priority=*/1);
      return allocator;
    }();
    return *made;
  }

  /// Bytes that the blocks for gradients of these sizes take up.
  static std::size_t bytes_for(const std::vector<std::size_t>& sizes) {
    std::size_t bytes = 0;
    for (const std::size_t size : blocks_for(sizes)) bytes += spaced(size);
    return bytes;
  }

  /// Offers the blocks for gradients of these sizes, one after the other in `memory`, which is
  /// aligned, has bytes_for(sizes), and lives until it was withdrawn and no tensor has a block of
  /// it.
  void offer(const std::shared_ptr<void>& memory, const std::vector<std::size_t>& sizes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* next = static_cast<std::byte*>(memory.get());
    for (const std::size_t size : blocks_for(sizes)) {
      if (size == 0) continue;
      blocks_.emplace(next, Block{size, memory, true});
      free_[size].push_back(next);
      next += spaced(size);
    }
    offered_ = true;
  }

  /// No tensor gets a block of the memory at `memory` any more.
  void withdraw(const void* memory) {
    std::vector<Block> gone;  // freed after the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [address, block] : blocks_)
      if (block.memory.get() == memory) block.is_offered = false;
    for (auto& [size, addresses] : free_) {
      const auto is_gone = [&](void* address) {
        const auto block = blocks_.find(address);
        if (block->second.is_offered) return false;
        gone.push_back(std::move(block->second));
        blocks_.erase(block);
        return true;
      };
      addresses.erase(std::remove_if(addresses.begin(), addresses.end(), is_gone), addresses.end());
    }
  }

  // Of c10::Allocator. In older versions `allocate` is const and there is no `copy_data`; so none
  // of them says `override`.

  c10::DataPtr allocate(std::size_t bytes) { return as_const().allocate(bytes); }
  c10::DataPtr allocate(std::size_t bytes) const {
    const bool is_backward = offered_.load(std::memory_order_relaxed) &&
                             ::torch::autograd::get_current_graph_task_id() >= 0;
    void* const block = is_backward ? const_cast<GradientAllocator*>(this)->take(bytes) : nullptr;
    if (block == nullptr) return previous_->allocate(bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  /// Of blocks, and of what the previous allocator gave.
  c10::DeleterFnPtr raw_deleter() const {
    return previous_->raw_deleter() == nullptr ? nullptr : &release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const {
    std::memcpy(to, from, bytes);
  }

 private:
  struct Block {
    std::size_t bytes;
    std::shared_ptr<void> memory;
    bool is_offered;
  };

  explicit GradientAllocator(c10::Allocator* previous) : previous_(previous) {}
  const GradientAllocator& as_const() const { return *this; }
  /// Their sizes: of each gradient, and one more of each that is small.
  static std::vector<std::size_t> blocks_for(std::vector<std::size_t> sizes) {
    const std::set<std::size_t> distinct(sizes.begin(), sizes.end());
    sizes.insert(sizes.end(), distinct.begin(), distinct.upper_bound(kLargestSpare));
    return sizes;
  }
  static std::size_t spaced(std::size_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

  /// nullptr: no such block is free. The one that was freed last, which may be in the cache.
  void* take(std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = free_.find(bytes);
    if (found == free_.end() || found->second.empty()) return nullptr;
    void* const block = found->second.back();
    found->second.pop_back();
    return block;
  }

  static void release(void* address) {
    GradientAllocator& self = instance();
    Block gone{};  // freed after the lock
    std::unique_lock<std::mutex> lock(self.mutex_);
    const auto block = self.blocks_.find(address);
    if (block == self.blocks_.end()) {
      lock.unlock();
      self.previous_->raw_deleter()(address);
    } else if (block->second.is_offered) {
      self.free_[block->second.bytes].push_back(address);
    } else {
      gone = std::move(block->second);
      self.blocks_.erase(block);
    }
  }

  c10::Allocator* const previous_;
  std::atomic<bool> offered_{false};  // at some time
  std::mutex mutex_;                  // over all below
  std::unordered_map<void*, Block> blocks_;
  std::unordered_map<std::size_t, std::vector<void*>> free_;
};

}  // namespace detail
/// @endcond

}  // namespace farandole::torch
