// What the ranks of one fake communicator share: POSIX shared memory with a slot per rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace farandole {

inline constexpr int kFakeNcclRanks = 8;
inline constexpr int64_t kFakeNcclSlotBytes = 64 * 1024;
inline constexpr int64_t kFakeNcclChannelBytes = 16 * 1024;
inline constexpr int64_t kFakeNcclSmallBytes = int64_t{1} << 20;  ///< Beyond, another algorithm.

/// All zero is the state at the beginning.
struct FakeNcclShared {
  /// One direction of one pair: of one writer and one reader.
  struct Channel {
    std::atomic<uint64_t> written;
    std::atomic<uint64_t> read;
    int64_t count;  ///< These two: of the send that was written last.
    int datatype;
    char bytes[kFakeNcclChannelBytes];
  };
  struct Rank {
    std::atomic<uint32_t> taken;
    std::atomic<uint32_t> arrived;  ///< What follows may be read.
    int size;
    int version;
    int max_ctas;                      ///< 0: NCCL's own choice.
    std::atomic<uint32_t> algorithms;  ///< Bits: those it has called.
    std::atomic<uint32_t> sends_to;    ///< Bits: ranks, as below.
    std::atomic<uint32_t> receives_from;
    std::atomic<uint32_t> closed;  ///< It needs its peers' proxies no more.
    char bus_id[16];
    std::atomic<uint64_t> posted;    ///< Chunks whose contribution lies in the slot.
    std::atomic<uint64_t> consumed;  ///< Chunks of everybody that were read.
    uint64_t what;                   ///< Describes the collective of the posted chunk.
    alignas(64) char slot[kFakeNcclSlotBytes];
    Channel to[kFakeNcclRanks];
  };
  std::atomic<uint32_t> arrived;
  Rank ranks[kFakeNcclRanks];
};

/// Thread safety: none; what it points to is made of atomics. Lifetime: the memory is unmapped at
/// its end, its name is gone once all ranks are in or one gives up.
class FakeNcclSegment {
 public:
  /// Opens it, or makes it. @return nullptr with errno.
  static std::shared_ptr<FakeNcclSegment> Open(const std::string& name);
  ~FakeNcclSegment();
  FakeNcclSegment(const FakeNcclSegment&) = delete;
  FakeNcclSegment& operator=(const FakeNcclSegment&) = delete;

  FakeNcclShared& shared() { return *shared_; }
  void Unlink();

 private:
  FakeNcclSegment(std::string name, FakeNcclShared* shared);

  const std::string name_;
  FakeNcclShared* const shared_;
};

}  // namespace farandole
