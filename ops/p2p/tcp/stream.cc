#include "ops/p2p/tcp/stream.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/descriptors.h"

namespace farandole {
namespace {

static_assert(std::endian::native == std::endian::little, "headers travel as they lie in memory");

/// Parts of one sendmsg: header and payload of eight messages.
constexpr size_t kParts = 16;
/// Read in one call, which shares a thread with the control plane: about a chunk.
constexpr int64_t kReadBytes = 256 * 1024;

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

/// Header and payload but for their first `skip` bytes. @return The bytes that are left.
int64_t AddParts(const TcpStream::Message& message, int64_t skip, iovec* parts, size_t* count) {
  int64_t total = 0;
  const auto add = [&](const void* data, int64_t bytes) {
    const int64_t skipped = std::min(skip, bytes);
    skip -= skipped;
    if (skipped == bytes) return;
    // sendmsg only reads, but shares its type with recvmsg.
    auto* const begin = static_cast<std::byte*>(const_cast<void*>(data)) + skipped;
    parts[(*count)++] = {begin, static_cast<size_t>(bytes - skipped)};
    total += bytes - skipped;
  };
  add(&message.header, int64_t{sizeof message.header});
  add(message.payload, int64_t{message.header.bytes});
  return total;
}

}  // namespace

TcpStream::~TcpStream() {
  if (socket_ >= 0) close(socket_);
}

Result<bool> TcpStream::Write() {
  bool moved = false;
  while (has_output() && is_connected()) {
    iovec parts[kParts];
    size_t count = 0;
    int64_t asked = 0;
    for (size_t i = first_; i < queue_.size() && count + 2 <= kParts; ++i) {
      asked += AddParts(queue_[i], i == first_ ? written_ : 0, parts, &count);
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t written = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0 && WouldBlock()) break;
    if (written < 0) return SystemError("send", errno);
    moved = true;
    Account(written);
    if (written < asked) break;
  }
  return moved;
}

/// Memory of the queue is used again; it does not grow without end where it is never empty.
void TcpStream::Account(int64_t written) {
  written_ += written;
  while (has_output() && written_ >= kHeaderBytes + int64_t{queue_[first_].header.bytes}) {
    const Message done = queue_[first_++];
    written_ -= kHeaderBytes + int64_t{done.header.bytes};
    rest_.reset();
    if (done.sender != nullptr) done.sender->OnSent(done.slot);
  }
  if (first_ == queue_.size() || first_ > 64) {
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
  }
}

Result<bool> TcpStream::Read(Receiver& receiver) {
  int64_t total = 0;
  while (is_connected() && total < kReadBytes) {
    iovec parts[2] = {{to_ + got_, static_cast<size_t>(left_)},
                      {ahead_.data() + ahead_bytes_, ahead_.size() - ahead_bytes_}};
    const bool direct = left_ > 0;
    const size_t asked = parts[1].iov_len + (direct ? parts[0].iov_len : 0);
    const ssize_t got = readv(socket_, direct ? parts : parts + 1, direct ? 2 : 1);
    if (got < 0 && WouldBlock()) break;
    if (got < 0) return SystemError("receive", errno);
    if (got == 0) return Unavailable("the other end has closed the connection");
    total += got;
    const int64_t placed = std::min<int64_t>(left_, got);
    got_ += placed;
    left_ -= placed;
    ahead_bytes_ += static_cast<size_t>(got - placed);
    FARANDOLE_RETURN_IF_ERROR(Parse(receiver));
    if (static_cast<size_t>(got) < asked) break;
  }
  return total > 0;
}

/// Everything that was read ahead goes where it belongs; at most a part of a header stays.
Status TcpStream::Parse(Receiver& receiver) {
  size_t at = 0;
  for (;;) {
    const size_t copied = std::min(static_cast<size_t>(left_), ahead_bytes_ - at);
    if (copied > 0) std::memcpy(to_ + got_, ahead_.data() + at, copied);
    at += copied;
    got_ += static_cast<int64_t>(copied);
    left_ -= static_cast<int64_t>(copied);
    if (left_ > 0) break;
    if (in_payload_) receiver.OnReceived(header_);
    in_payload_ = false;
    if (ahead_bytes_ - at < sizeof header_) break;
    std::memcpy(&header_, ahead_.data() + at, sizeof header_);
    at += sizeof header_;
    Result<std::byte*> where = receiver.OnHeader(header_);
    if (!where.ok()) return where.status();
    to_ = where.value();
    got_ = 0;
    left_ = header_.bytes;
    in_payload_ = true;
  }
  ahead_bytes_ -= at;
  std::memmove(ahead_.data(), ahead_.data() + at, ahead_bytes_);
  return Status();
}

/// The payload of the first message may be partly written: its copy begins where the payload would.
void TcpStream::Forget(const Sender& sender) {
  if (has_output() && written_ > 0 && queue_[first_].sender == &sender) {
    Message& begun = queue_[first_];
    rest_ = std::make_unique<std::byte[]>(begun.header.bytes);
    if (begun.header.bytes > 0) std::memcpy(rest_.get(), begun.payload, begun.header.bytes);
    begun.payload = rest_.get();
    begun.sender = nullptr;
  }
  const auto begin = queue_.begin() + static_cast<std::ptrdiff_t>(first_);
  const auto is_forgotten = [&](const Message& message) { return message.sender == &sender; };
  queue_.erase(std::remove_if(begin, queue_.end(), is_forgotten), queue_.end());
}

void TcpStream::Redirect(const std::byte* from, std::byte* to) {
  if (in_payload_ && to_ == from) to_ = to;
}

}  // namespace farandole
