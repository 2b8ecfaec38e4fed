#include "coordinator/control/byte_ring.h"

#include <algorithm>
#include <cstring>

namespace farandole {

/// `at` counts from the beginning of the stream; what passes the end of the ring goes to its start.
void ByteRing::CopyIn(uint64_t at, std::span<const std::byte> data) {
  if (data.empty()) return;
  const size_t begin = at & (capacity_ - 1);
  const size_t before_end = std::min(data.size(), capacity_ - begin);
  std::memcpy(bytes_ + begin, data.data(), before_end);
  if (before_end == data.size()) return;
  std::memcpy(bytes_, data.data() + before_end, data.size() - before_end);
}

/// The bytes are released with the count of those written, and the room that the reader has made is
/// acquired with its count, so they need no atomics.
size_t ByteRing::Write(std::span<const std::byte> head, std::span<const std::byte> body) {
  const uint64_t written = shared_.written.load(std::memory_order_relaxed);
  const size_t used = written - shared_.read.load(std::memory_order_acquire);
  const size_t room = capacity_ - std::min<size_t>(used, capacity_);
  const size_t of_head = std::min(head.size(), room);
  const size_t of_body = std::min(body.size(), room - of_head);
  CopyIn(written, head.first(of_head));
  CopyIn(written + of_head, body.first(of_body));
  shared_.written.store(written + of_head + of_body, std::memory_order_release);
  return of_head + of_body;
}

/// Sequentially consistent, as the reader's side: the writer writes its note and then reads the
/// count, the reader writes the count and then reads the note. So one of them sees the other's.
bool ByteRing::AskForRoom() {
  shared_.asked.store(1);
  return shared_.written.load(std::memory_order_relaxed) - shared_.read.load() == capacity_;
}

size_t ByteRing::Read(std::span<std::byte> to) {
  const uint64_t read = shared_.read.load(std::memory_order_relaxed);
  const uint64_t written = shared_.written.load(std::memory_order_acquire);
  const size_t count = std::min({to.size(), static_cast<size_t>(written - read), capacity_});
  if (count == 0) return 0;
  const size_t begin = read & (capacity_ - 1);
  const size_t before_end = std::min(count, capacity_ - begin);
  std::memcpy(to.data(), bytes_ + begin, before_end);
  std::memcpy(to.data() + before_end, bytes_, count - before_end);
  shared_.read.store(read + count);
  return count;
}

bool ByteRing::TakeRequest() { return shared_.asked.load() != 0 && shared_.asked.exchange(0) != 0; }

}  // namespace farandole
