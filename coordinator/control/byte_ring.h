// A stream of bytes from one process to another, through memory that both have mapped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace farandole {

/// A ring for one writer and one reader. Both ends are views of the same memory, which holds no
/// addresses; memory of zeros is an empty ring.
///
/// Nobody waits: a writer for whom there is no room leaves a note, and the reader, who finds it
/// when it has made room, rings.
///
/// Thread safety: Write, and AskForRoom, by one thread of one process, Read and TakeRequest by one
/// of another. Lifetime: the memory outlives its views.
class ByteRing {
 public:
  /// @param memory Bytes(capacity) bytes, aligned to 64.
  /// @param capacity A power of two.
  ByteRing(std::byte* memory, size_t capacity)
      : shared_(*reinterpret_cast<Shared*>(memory)),
        bytes_(memory + sizeof(Shared)),
        capacity_(capacity) {}
  static size_t Bytes(size_t capacity) { return sizeof(Shared) + capacity; }

  /// Writes as much of `head` and then `body` as there is room for, which the reader sees at once.
  /// @return how many bytes.
  size_t Write(std::span<const std::byte> head, std::span<const std::byte> body);
  /// The reader is to ring when it has made room. @return false: there is room by now.
  bool AskForRoom();

  /// Reads as many bytes as there are, at most those of `to`. @return how many.
  size_t Read(std::span<std::byte> to);
  /// After a Read: whether the writer has asked for the room. Takes the request away.
  bool TakeRequest();

 private:
  // The writer's line and the reader's: each counts bytes since the beginning.
  struct Shared {
    alignas(64) std::atomic<uint64_t> written;
    std::atomic<uint32_t> asked;  // the writer waits for room
    alignas(64) std::atomic<uint64_t> read;
  };
  static_assert(sizeof(Shared) == 128 && std::atomic<uint64_t>::is_always_lock_free);

  void CopyIn(uint64_t at, std::span<const std::byte> data);

  Shared& shared_;
  std::byte* const bytes_;
  const size_t capacity_;
};

}  // namespace farandole
