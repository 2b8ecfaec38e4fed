#include "test/support/loopback_streams.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace farandole {
namespace {

/// Both ends of a connection, the lower rank's first; -1: nobody's, or taken.
using Pair = std::array<int, 2>;

void SetUp(int socket, int send_buffer_bytes) {
  const int on = 1;
  (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (send_buffer_bytes == 0) return;
  (void)setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof send_buffer_bytes);
}

/// What fails leaves -1, with which no link can do anything.
Pair Connect(int send_buffer_bytes) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  (void)bind(listener, any, length);
  (void)listen(listener, 1);
  (void)getsockname(listener, any, &length);
  Pair pair = {socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), -1};
  SetUp(pair[0], send_buffer_bytes);
  (void)connect(pair[0], any, length);
  pair[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  SetUp(pair[1], send_buffer_bytes);
  close(listener);
  for (const int end : pair) (void)fcntl(end, F_SETFL, O_NONBLOCK);
  return pair;
}

/// Thread safety: any thread.
class Hub {
 public:
  Hub(std::vector<Doorbell*> bells, const LoopbackOptions& options)
      : bells_(std::move(bells)), options_(options), thread_([this] { Run(); }) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = stop_;
    (void)epoll_ctl(epoll_, EPOLL_CTL_ADD, stop_, &event);
  }
  ~Hub() {
    (void)eventfd_write(stop_, 1);
    thread_.join();
    for (const auto& [id, pair] : pairs_) {
      for (const int end : pair) {
        if (end >= 0) close(end);
      }
    }
    close(epoll_);
    close(stop_);
  }

  int size() const { return static_cast<int>(bells_.size()); }
  const LoopbackOptions& options() const { return options_; }

  /// The lower rank's first call connects; nobody has the socket before the next one.
  std::optional<int> Take(int rank, const StreamId& stream) {
    const std::lock_guard lock(mutex_);
    const int low = std::min(rank, stream.peer);
    const int high = std::max(rank, stream.peer);
    const auto id = std::array{stream.plane, low, high, stream.number};
    const auto found = pairs_.find(id);
    if (found != pairs_.end()) {
      return std::exchange(found->second[rank == low ? 0 : 1], -1);
    }
    if (rank == low) {
      pairs_[id] = Connect(options_.send_buffer_bytes);
      for (const int end : {low, high}) bells_[static_cast<size_t>(end)]->Ring();
    }
    return std::nullopt;
  }

  Status Watch(int rank, int socket, bool writable) {
    const std::lock_guard lock(mutex_);
    const bool is_new = !watched_.contains(socket);
    watched_[socket] = bells_[static_cast<size_t>(rank)];
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT | (writable ? EPOLLOUT : 0u);
    event.data.fd = socket;
    const int what = is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    return epoll_ctl(epoll_, what, socket, &event) == 0 ? Status() : Internal("epoll_ctl");
  }

  void Unwatch(int socket) {
    const std::lock_guard lock(mutex_);
    if (watched_.erase(socket) > 0) (void)epoll_ctl(epoll_, EPOLL_CTL_DEL, socket, nullptr);
  }

 private:
  void Run() {
    for (;;) {
      epoll_event event{};
      if (epoll_wait(epoll_, &event, 1, -1) != 1) continue;
      if (event.data.fd == stop_) return;
      const std::lock_guard lock(mutex_);
      const auto found = watched_.find(event.data.fd);
      if (found != watched_.end()) found->second->Ring();
    }
  }

  const std::vector<Doorbell*> bells_;
  const LoopbackOptions options_;
  const int epoll_ = epoll_create1(EPOLL_CLOEXEC);
  const int stop_ = eventfd(0, EFD_CLOEXEC);
  std::mutex mutex_;
  std::map<std::array<int, 4>, Pair> pairs_;  // by plane, ranks and number
  std::map<int, Doorbell*> watched_;
  std::thread thread_;
};

class LoopbackStreams final : public DataStreams {
 public:
  LoopbackStreams(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  int streams() const override { return hub_->options().streams; }
  Result<std::optional<int>> Take(const StreamId& stream) override {
    return hub_->Take(rank_, stream);
  }
  Status Watch(int socket, bool writable) override { return hub_->Watch(rank_, socket, writable); }
  void Unwatch(int socket) override { hub_->Unwatch(socket); }

 private:
  const std::shared_ptr<Hub> hub_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<DataStreams>> MakeLoopbackStreams(const std::vector<Doorbell*>& bells,
                                                              const LoopbackOptions& options) {
  const auto hub = std::make_shared<Hub>(bells, options);
  std::vector<std::unique_ptr<DataStreams>> streams;
  for (int rank = 0; rank < hub->size(); ++rank) {
    streams.push_back(std::make_unique<LoopbackStreams>(hub, rank));
  }
  return streams;
}

}  // namespace farandole
