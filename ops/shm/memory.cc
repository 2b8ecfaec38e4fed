#include "ops/shm/memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

namespace farandole {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr std::align_val_t kAlign{kPage};
// Of a set on one host. With the mailboxes of 64 ranks, 25 MiB, less than 64 MiB.
constexpr int64_t kMostSetBytes = 32 * 1024 * 1024;
// A member reads the flags of all others for each slot: below that, it would do little else.
constexpr int64_t kLeastSlotBytes = 16 * 1024;

/// Cache lines of flags: the first holds the recommended StorePolicy, the second the word of the
/// Agreement, the others the members' flags, each in a line of its own, so that a member that
/// publishes invalidates one line only.
size_t Lines(const SlotLayout& layout) { return 2 + static_cast<size_t>(layout.members) * kStages; }

size_t FlagBytes(const SlotLayout& layout) { return Lines(layout) * kLine; }

/// Of one slot's table, in whole lines.
size_t TableBytes(const SlotLayout& layout) {
  return (static_cast<size_t>(layout.members) * sizeof(int64_t) + kLine - 1) / kLine * kLine;
}

size_t SlotCount(const SlotLayout& layout) {
  return static_cast<size_t>(layout.members) * static_cast<size_t>(layout.slots);
}

}  // namespace

/// The caches are numbered by level, the last one is the largest: "32768K".
int64_t LastLevelCacheBytes(const std::string& folder) {
  constexpr int64_t kUsual = 32 * 1024 * 1024;
  constexpr int kMostCaches = 8;  // of a processor; the first level has two
  for (int index = kMostCaches - 1; index >= 0; --index) {
    std::ifstream file(folder + "/index" + std::to_string(index) + "/size");
    int64_t size = 0;
    char unit = 0;
    if (!(file >> size >> unit) || size <= 0 || size > (int64_t{1} << 30)) continue;
    if (unit == 'K') return size * 1024;
    if (unit == 'M') return size * 1024 * 1024;
  }
  return kUsual;
}

size_t SlotLayout::Bytes() const {
  return HeaderBytes() + static_cast<size_t>(members) * MemberBytes();
}

/// In whole pages, so that the pages of a member's slots are its own.
size_t SlotLayout::HeaderBytes() const {
  const size_t bytes = FlagBytes(*this) + SlotCount(*this) * TableBytes(*this);
  return (bytes + kPage - 1) / kPage * kPage;
}

size_t SlotLayout::MemberBytes() const {
  return static_cast<size_t>(slots) * static_cast<size_t>(slot_bytes);
}

SharedSlots::SharedSlots(std::byte* memory, const SlotLayout& layout, int my_index,
                         std::vector<Doorbell*> bells)
    : memory_(memory),
      layout_(layout),
      header_bytes_(layout.HeaderBytes()),
      my_index_(my_index),
      bells_(std::move(bells)),
      seen_(static_cast<size_t>(layout.members) * kStages, 0) {
  static_assert(sizeof(Flag) == kLine);
  // This member runs now and looks at all flags again before it sleeps.
  bells_[static_cast<size_t>(my_index)] = nullptr;
}

/// Flags, then the tables of sizes of all slots, then the slots: member by member, slot by slot.
std::byte* SharedSlots::Slot(int member, uint64_t chunk) const {
  return memory_ + header_bytes_ + IndexOf(member, chunk) * static_cast<size_t>(layout_.slot_bytes);
}

std::span<int64_t> SharedSlots::Sizes(int member, uint64_t chunk) const {
  std::byte* const table =
      memory_ + FlagBytes(layout_) + IndexOf(member, chunk) * TableBytes(layout_);
  return {reinterpret_cast<int64_t*>(table), static_cast<size_t>(layout_.members)};
}

size_t SharedSlots::IndexOf(int member, uint64_t chunk) const {
  const auto slots = static_cast<size_t>(layout_.slots);
  return static_cast<size_t>(member) * slots + chunk % slots;
}

SharedSlots::Flag& SharedSlots::FlagAt(size_t line) const {
  return *std::launder(reinterpret_cast<Flag*>(memory_ + line * kLine));
}

SharedSlots::Flag& SharedSlots::FlagOf(int member, Stage stage) const {
  return FlagAt(kFlagLine + static_cast<size_t>(member) * kStages + static_cast<size_t>(stage));
}

/// Acquires: what the member wrote before it published is visible afterwards. Flags only grow, so a
/// value seen before need not be read again.
bool SharedSlots::Reached(int member, Stage stage, uint64_t chunks) {
  uint64_t& seen = seen_[static_cast<size_t>(member) * kStages + static_cast<size_t>(stage)];
  if (seen >= chunks) return true;
  seen = FlagOf(member, stage).value.load(std::memory_order_acquire);
  return seen >= chunks;
}

bool SharedSlots::AllReached(Stage stage, uint64_t chunks) {
  for (int member = 0; member < layout_.members; ++member) {
    if (!Reached(member, stage, chunks)) return false;
  }
  return true;
}

bool SharedSlots::AllReached(Stage stage, uint64_t chunks, std::span<const int> members) {
  for (const int member : members) {
    if (!Reached(member, stage, chunks)) return false;
  }
  return true;
}

/// Releases what this member wrote to its slot. The caller rings peers: one ring may cover several
/// stages.
void SharedSlots::Publish(Stage stage, uint64_t chunks) {
  FlagOf(my_index_, stage).value.store(chunks, std::memory_order_release);
}

StorePolicy SharedSlots::store_policy() const {
  return static_cast<StorePolicy>(FlagAt(kPolicyLine).value.load(std::memory_order_relaxed));
}

void SharedSlots::RecommendStorePolicy(StorePolicy policy) {
  FlagAt(kPolicyLine).value.store(static_cast<uint64_t>(policy), std::memory_order_relaxed);
}

void SharedSlots::RingPeers() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (Doorbell* bell : bells_) {
    if (bell != nullptr) bell->RingIfAsleep();
  }
}

/// A power of two. About two of a member's four slots are in use at any time, so all of them may be
/// as large as the cache. Small slots that somebody asked for stay as they are.
SlotLayout SharedMemory::LayoutOf(size_t members) const {
  const auto count = static_cast<int64_t>(std::max<size_t>(members, 1));
  const int64_t fair = std::min(options_.cache_bytes, kMostSetBytes) / (count * options_.slots);
  const auto fitting = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(fair)));
  const int64_t least = std::max(kLeastSlotBytes, static_cast<int64_t>(kLine) * count);
  return {static_cast<int>(members), options_.slots,
          std::min(options_.slot_bytes, std::max(fitting, least))};
}

/// To fill fresh pages takes milliseconds, for which the engine must not wait in OffsetOf.
Result<std::shared_ptr<std::byte>> SharedMemory::Allocate(size_t bytes) {
  const size_t pages = std::max<size_t>((bytes + kPage - 1) / kPage, 1);
  const std::lock_guard one_at_a_time(allocation_mutex_);
  Result<int64_t> offset = Take(buffers_, pages * kPage);  // which only this thread may change
  if (!offset.ok()) return offset.status();
  const std::lock_guard lock(buffers_mutex_);
  buffers_[offset.value()] = pages * kPage;
  const auto release = [self = shared_from_this(), at = offset.value()](std::byte*) {
    self->Release(at);
  };
  return std::shared_ptr<std::byte>(At(offset.value()), release);
}

std::optional<int64_t> SharedMemory::OffsetOf(const void* begin, size_t bytes) const {
  const std::lock_guard lock(buffers_mutex_);
  const auto offset =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin) - base_.load());  // of any sign
  auto buffer = buffers_.upper_bound(offset);
  if (buffer == buffers_.begin()) return std::nullopt;
  --buffer;
  const auto before = static_cast<size_t>(offset - buffer->first);
  if (before > buffer->second || bytes > buffer->second - before) return std::nullopt;
  return offset;
}

size_t SharedMemory::QuarantineBuffers() {
  const std::lock_guard lock(buffers_mutex_);
  if (is_quarantined_) return 0;
  is_quarantined_ = true;
  size_t bytes = 0;
  for (const auto& [offset, size] : buffers_) bytes += size;
  return bytes;
}

void SharedMemory::Release(int64_t offset) {
  if (IsForked()) return;
  const std::lock_guard one_at_a_time(allocation_mutex_);
  const std::lock_guard lock(buffers_mutex_);
  if (is_quarantined_) return;
  const auto buffer = buffers_.find(offset);
  Free(buffer->first, buffer->second);
  buffers_.erase(buffer);
}

void SharedMemory::FreeBuffers() {
  if (IsForked()) return;
  for (const auto& [offset, size] : buffers_) Free(offset, size);
  buffers_.clear();
}

HeapMemory::HeapMemory(std::span<Doorbell* const> bells, Options options)
    : SharedMemory(options), bells_(bells.begin(), bells.end()) {}

/// Holds weak references only: the memory of a set is freed by its last member, and a later set of
/// the same uid gets fresh memory.
Result<std::shared_ptr<std::byte>> HeapMemory::Join(uint32_t set, std::span<const int> ranks, int) {
  const std::string which = "process set " + std::to_string(set);
  for (const int rank : ranks) {
    if (rank >= 0 && static_cast<size_t>(rank) < bells_.size()) continue;
    return InvalidArgument(which + " names rank " + std::to_string(rank) + "; there are " +
                           std::to_string(bells_.size()));
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(sets_, [](const auto& entry) { return entry.second.memory.expired(); });
  Set& joined = sets_[set];
  // Null if the last member, on another thread, has removed the set since the line above.
  if (std::shared_ptr<std::byte> memory = joined.memory.lock()) {
    if (std::ranges::equal(ranks, joined.ranks)) return memory;
    return InvalidArgument(which + " was added with other ranks by another member");
  }
  const SlotLayout layout = LayoutOf(ranks.size());
  auto* const block = static_cast<std::byte*>(::operator new(layout.Bytes(), kAlign, std::nothrow));
  if (block == nullptr) {
    return ResourceExhausted(which + ": cannot allocate " + std::to_string(layout.Bytes()) +
                             " bytes of slots");
  }
  std::memset(block, 0, layout.HeaderBytes());
  std::shared_ptr<std::byte> memory(block, [](std::byte* b) { ::operator delete(b, kAlign); });
  joined = {{ranks.begin(), ranks.end()}, memory};
  return memory;
}

Result<int64_t> HeapMemory::Take(const Buffers&, size_t bytes) {
  void* const memory = ::operator new(bytes, kAlign, std::nothrow);
  if (memory == nullptr) {
    return ResourceExhausted("cannot allocate " + std::to_string(bytes) + " bytes");
  }
  std::memset(memory, 0, bytes);
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
}

void HeapMemory::Free(int64_t offset, size_t) { ::operator delete(At(offset), kAlign); }

}  // namespace farandole
