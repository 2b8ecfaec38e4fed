// The memory through which the members of a set pass chunks to each other: slots of bytes, and
// flags that say who may access which slot; buffers of tensors that all members can access; and
// where the planes of the members find both.
//
// The memory holds offsets only, no pointers, so it may be a heap block shared by threads
// (HeapMemory) or a mapping shared by processes (host_memory.h).
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/doorbell.h"
#include "core/status.h"
#include "ops/agreement.h"

namespace farandole {

/// How slots are written. Through the cache is faster for readers that share it (one L3); past the
/// cache is 3.5 times faster when they do not. Virtual processors move between the two.
enum class StorePolicy : uint8_t { kCached = 0, kStreamed = 1 };

/// Size of the last cache of the first processor, which others share; 32 MiB where it is not known.
/// @param folder  Of the processor's caches; tests give their own.
int64_t LastLevelCacheBytes(const std::string& folder = "/sys/devices/system/cpu/cpu0/cache");

/// Shape of one set's memory: a hint, the word of the Agreement, flags of every member, then
/// `slots` tables of sizes and `slots` slots of every member.
struct SlotLayout {
  int members = 1;
  int slots = 4;                    ///< >= 2; a chunk may be packed while older ones are read.
  int64_t slot_bytes = 256 * 1024;  ///< A multiple of 64, at least 64 per member.

  /// Size of the whole memory, whose start is aligned to 64 bytes, and whose header is zero at
  /// first.
  size_t Bytes() const;
  /// Of the flags and tables, with which it begins; the slots of each member follow as one block.
  size_t HeaderBytes() const;
  size_t MemberBytes() const;
};

/// What a member has done with a chunk. Each is a flag holding the number of chunks done so far.
enum class Stage : uint8_t {
  kPacked = 0,    ///< Its contribution is in its slot.
  kReduced = 1,   ///< The result of its shard is in its slot.
  kConsumed = 2,  ///< It no longer reads any slot of that chunk.
};
inline constexpr int kStages = 3;

/// One member's view of the shared memory.
///
/// Chunks of a set are numbered from 0 through all batches, alike on every member; chunk c lies in
/// slot c % slots. A member writes its own slot only, after all members consumed chunk c - slots;
/// it reads a peer's slot only between that peer's kPacked or kReduced flag and its own kConsumed.
/// The flags are released and acquired, so the slot bytes need no atomics.
///
/// Thread safety: one thread per view; views of different members run at once, also in different
/// processes. Lifetime: memory and bells outlive it.
class SharedSlots {
 public:
  /// @param bells  Doorbells by index; this member's own is not rung and may be nullptr.
  SharedSlots(std::byte* memory, const SlotLayout& layout, int my_index,
              std::vector<Doorbell*> bells);

  const SlotLayout& layout() const { return layout_; }
  int my_index() const { return my_index_; }

  /// The slot of `member` that holds chunk number `chunk`.
  std::byte* Slot(int member, uint64_t chunk) const;
  /// One number for each member, written and read under the slot's rules: in an alltoall, whose
  /// splits only two members know, how many elements are sent to each.
  std::span<int64_t> Sizes(int member, uint64_t chunk) const;
  /// Whether `member` has done `stage` for the first `chunks` chunks.
  bool Reached(int member, Stage stage, uint64_t chunks);
  /// Whether all members (or those listed) have.
  bool AllReached(Stage stage, uint64_t chunks);
  bool AllReached(Stage stage, uint64_t chunks, std::span<const int> members);
  /// Reports that this member has done `stage` for the first `chunks` chunks.
  void Publish(Stage stage, uint64_t chunks);
  /// The store policy that member 0 recommends. A hint: results do not depend on it.
  StorePolicy store_policy() const;
  /// Where all members agree.
  Agreement::Word& agreement() const { return FlagAt(kAgreementLine).value; }
  void RecommendStorePolicy(StorePolicy policy);
  /// Wakes the peers that sleep: after a Publish that one of them may wait for. One fence, however
  /// many peers; each that may sleep costs a Ring.
  void RingPeers();

 private:
  /// Lock-free, hence free of addresses: processes map the memory wherever they do.
  struct alignas(64) Flag {
    std::atomic<uint64_t> value;
    static_assert(std::atomic<uint64_t>::is_always_lock_free);
  };
  static constexpr size_t kPolicyLine = 0, kAgreementLine = 1, kFlagLine = 2;
  size_t IndexOf(int member, uint64_t chunk) const;
  Flag& FlagAt(size_t line) const;
  Flag& FlagOf(int member, Stage stage) const;

  std::byte* memory_;
  SlotLayout layout_;
  size_t header_bytes_;
  int my_index_;
  std::vector<Doorbell*> bells_;
  std::vector<uint64_t> seen_;  // last value read of each flag: spares a cache miss per check
};

/// Where the planes of the members of a process set find the memory of the set, and each rank gets
/// buffers that its peers can access where they lie.
///
/// An offset says where something lies in buffers, to every rank alike: the address relative to
/// where that rank has them mapped.
///
/// Thread safety: any thread. Lifetime: planes and buffers hold it; it outlives the memory it gave.
class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  /// Shape of every set's memory. Small slots give tests many chunks.
  struct Options {
    int slots = 4;
    int64_t slot_bytes = 256 * 1024;               ///< At most: see LayoutOf.
    std::optional<StorePolicy> store_policy = {};  ///< None: measured, see StorePolicyChooser.
    int64_t cache_bytes = LastLevelCacheBytes();   ///< That cores share.
  };

  explicit SharedMemory(Options options) : options_(options) {}
  virtual ~SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Names the plane over it, in error messages.
  virtual const char* name() const = 0;
  /// The memory of a set, with the layout LayoutOf, for the member at index `my_index`. It may
  /// be used as long as the pointer lives, and is freed when all members have released it.
  /// @return ResourceExhausted if it cannot be had; InvalidArgument for ranks that do not fit.
  virtual Result<std::shared_ptr<std::byte>> Join(uint32_t set, std::span<const int> ranks,
                                                  int my_index) = 0;
  /// A buffer of this rank, zero in all bytes, at a page. Freed with the pointer, which also holds
  /// this object.
  /// @return ResourceExhausted if it cannot be had.
  Result<std::shared_ptr<std::byte>> Allocate(size_t bytes);
  /// The offset of memory that lies in one buffer of this rank; nullopt for other memory.
  std::optional<int64_t> OffsetOf(const void* begin, size_t bytes) const;
  /// Where a rank's offset is on this rank, which has had a buffer itself.
  std::byte* At(int64_t offset) const {
    return reinterpret_cast<std::byte*>(base_.load(std::memory_order_relaxed) +
                                        static_cast<uintptr_t>(offset));
  }
  /// A peer may go on writing to this rank's buffers: from now on they are neither freed nor used
  /// for others. @return Bytes of those there are, the first time.
  size_t QuarantineBuffers();

  /// What rings the engine of a rank that shares this memory.
  virtual Doorbell* bell(int rank) const = 0;

  const Options& options() const { return options_; }
  /// The more members, the smaller are their slots: all together fit into the cache that cores
  /// share, and into 32 MiB.
  SlotLayout LayoutOf(size_t members) const;

 protected:
  /// Sizes of buffers by offset: the live ones, and those in quarantine.
  using Buffers = std::map<int64_t, size_t>;

  /// Gets `bytes`, whole pages of zeroes, apart from `buffers`; the first time, sets base_. One
  /// call at a time. @return Their offset; ResourceExhausted.
  virtual Result<int64_t> Take(const Buffers& buffers, size_t bytes) = 0;
  virtual void Free(int64_t offset, size_t bytes) = 0;
  /// For the destructor of a subclass, when only quarantined ones are left.
  void FreeBuffers();
  /// Whether this process was forked from the one that made this object, which goes on using all
  /// there is: nothing is freed then, and no lock is taken that another thread of the parent held.
  bool IsForked() const { return getpid() != owner_; }

  std::atomic<uintptr_t> base_ = 0;  ///< Address of offset 0.

 private:
  void Release(int64_t offset);

  const Options options_;
  const pid_t owner_ = getpid();
  std::mutex allocation_mutex_;  // of whoever changes buffers_; taken before the next one
  mutable std::mutex buffers_mutex_;
  Buffers buffers_;
  bool is_quarantined_ = false;
};

/// Memory of the heap, for planes of one process.
///
/// Buffers are those of all ranks, and a offset is an address. Lifetime: the doorbells outlive
/// it. Memory of a set is freed when its last member has removed the set or is destroyed.
class HeapMemory final : public SharedMemory {
 public:
  /// @param bells One doorbell per rank, by global rank.
  explicit HeapMemory(std::span<Doorbell* const> bells) : HeapMemory(bells, Options()) {}
  HeapMemory(std::span<Doorbell* const> bells, Options options);
  ~HeapMemory() override { FreeBuffers(); }

  const char* name() const override { return "local"; }
  /// The first member to ask creates it. InvalidArgument if `ranks` differ from those of the member
  /// who created it, or name a rank without a doorbell.
  Result<std::shared_ptr<std::byte>> Join(uint32_t set, std::span<const int> ranks,
                                          int my_index) override;
  Doorbell* bell(int rank) const override { return bells_[static_cast<size_t>(rank)]; }

 protected:
  Result<int64_t> Take(const Buffers& buffers, size_t bytes) override;
  void Free(int64_t offset, size_t bytes) override;

 private:
  struct Set {
    std::vector<int> ranks;
    std::weak_ptr<std::byte> memory;
  };

  const std::vector<Doorbell*> bells_;
  std::mutex mutex_;
  std::unordered_map<uint32_t, Set> sets_;
};

}  // namespace farandole
