// One file: the one class whose thread and mutex all sockets of a rank share.
#include "core/net/stream_hub.h"

#include <linux/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "core/descriptors.h"
#include "core/threads.h"

namespace farandole {

namespace {

constexpr uint64_t kWakeId = 0,
                   kWatchId = 1;  // in epoll; all others are of listeners and connections
constexpr size_t kMaxPending = 64;
constexpr int64_t kProofNs = 2 * kNsPerSecond;
constexpr int64_t kAttemptNs = 5 * kNsPerSecond;   // for one address, until its challenge has come
constexpr int64_t kWelcomeNs = 60 * kNsPerSecond;  // from then on: who is accepted is not in doubt
constexpr int64_t kRetryNs = 100 * kNsPerMs;
constexpr int64_t kPauseNs = 10 * kNsPerMs;
// Who spins has polled not longer ago. The hub's thread then leaves the sockets to it, and looks
// again after a while: woken by each frame, it would take a core from those who wait.
constexpr int64_t kPolledNs = 20 * kNsPerUs;
constexpr int64_t kLeaveNs = 100 * kNsPerUs;
constexpr int64_t kExhaustedNs = 5 * kNsPerSecond;  // in which the program may close descriptors
constexpr int64_t kSilenceNs = 100 * kNsPerMs;      // after which a connection may have to make way
constexpr int kPeerTimeoutMs = 30'000;              // for data that nobody acknowledges
constexpr size_t kReadBytes = size_t{64} << 10;
constexpr int kReadsAtOnce = 8;  // so that one peer does not keep the others waiting
constexpr size_t kMostRefused = 8;

constexpr std::string_view kClosed = "the connection was closed";

std::string ErrorText(int error) { return std::strerror(error); }

void SetOption(int socket, int level, int name, int value) {
  (void)setsockopt(socket, level, name, &value, sizeof value);  // an optimisation, or a safety net
}

// A host that has died acknowledges nothing: found out after 30 s, with or without data in flight.
void SetOptions(int socket) {
  SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kPeerTimeoutMs);
  SetOption(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

SocketAddress OwnAddress(int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  (void)getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &size);
  return SocketAddress(storage);
}

// A rank of this host is at an address of this host, from which it is reached, too.
bool LeavesHost(int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return false;
  return SocketAddress(storage).bytes() != OwnAddress(socket).bytes();
}

// "rank 3 (host b)", or without a host that is not known.
std::string RankAt(int rank, const std::string& host) {
  return RankName(rank) + (host.empty() ? "" : " (host " + host + ")");
}

}  // namespace

struct StreamHub::Connection {
  enum class Stage : uint8_t { kConnecting, kHandshake, kOpen };

  uint64_t id = 0;
  int socket = -1;
  bool outgoing = false;
  int peer = 0;  // rank, once it has said so
  Stage stage = Stage::kConnecting;
  int64_t deadline_ns = kNever;  // of the handshake
  SocketAddress remote = {};
  Key attempt = 0;  // outgoing, until it is open
  std::optional<Handshake> handshake = {};
  std::optional<StreamReader> reader = {};
  std::optional<StreamWriter> writer = {};
  std::vector<std::byte> out = {};  // what the kernel has not taken begins at out_at
  size_t out_at = 0;
  uint32_t armed = 0;     // events asked of epoll; 0: none yet
  bool has_sent = false;  // since the last beat
  bool ends_when_sent = false;

  const StreamHello& hello() const { return handshake->hello(); }
  bool pending() const { return !outgoing && stage != Stage::kOpen; }
};

// Of an outgoing stream: its addresses, tried one after the other, again and again until time is
// up.
struct StreamHub::Attempt {
  Key key = 0;
  StreamHello hello = {};
  int peer = 0;
  std::vector<SocketAddress> addresses = {};
  size_t next = 0;
  int64_t give_up_ns = 0;
  int64_t retry_ns = kNever;
  std::string error = {};    // of this round
  int64_t exhausted_ns = 0;  // since when this rank lacks descriptors or memory; 0: it does not
  Status exhausted = {};
  bool definite = true;  // nothing in this round that time may cure
  Refusal refusal = Refusal::kNone;
  // Of a control stream.
  std::vector<std::pair<FrameType, std::vector<std::byte>>> waiting = {};
};

struct StreamHub::PeerState {
  std::vector<SocketAddress> addresses = {};
  uint64_t out = 0;  // control streams, by their connection: 0: none
  uint64_t in = 0;
  bool left = false;
  Status lost = {};
  bool watched = false;
  bool is_expected = false;  // to connect
  std::string host = {};
  int64_t period_ns = 0;  // of its signs of life; 0: it has not sent any
  int64_t silent_ns = 0;
};

Result<std::unique_ptr<StreamHub>> StreamHub::Create(const HubOptions& options) {
  std::unique_ptr<StreamHub> hub(new StreamHub(options));
  hub->epoll_ = epoll_create1(EPOLL_CLOEXEC);
  hub->wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{EPOLLIN, {.u64 = kWakeId}};
  if (hub->epoll_ < 0 || hub->wake_ < 0 ||
      epoll_ctl(hub->epoll_, EPOLL_CTL_ADD, hub->wake_, &event) != 0) {
    return SystemError("the network's event queue cannot be made", errno);
  }
  FARANDOLE_RETURN_IF_ERROR(
      StartThread(hub->thread_, "farandole-net", [h = hub.get()] { h->Run(); }));
  return hub;
}

StreamHub::StreamHub(const HubOptions& options)
    : options_(options),
      received_(kReadBytes),
      peers_(static_cast<size_t>(options.size)),
      host_(HostName()),
      on_stop_(options.stop, [this] {
        const std::lock_guard lock(mutex_);
        has_event_.notify_all();
      }) {}

StreamHub::~StreamHub() {
  Shutdown();
  if (wake_ >= 0) close(wake_);
  if (epoll_ >= 0) close(epoll_);
}

// What a peer has sent is read before the end, because the kernel resets a connection with unread
// data, and with that what is still on its way to the peer is gone, too.
void StreamHub::Shutdown() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    Wake();
  }
  thread_.join();
  const std::lock_guard lock(mutex_);  // an engine that was left behind may go on
  for (const auto& [id, connection] : connections_) {
    (void)Flush(*connection);
    (void)shutdown(connection->socket, SHUT_WR);
    for (int reads = 0; reads < kReadsAtOnce; ++reads) {
      if (recv(connection->socket, received_.data(), received_.size(), MSG_DONTWAIT) <= 0) break;
    }
    close(connection->socket);
  }
  for (const auto& [id, socket] : listeners_) close(socket);
  for (const auto& [key, entry] : data_) {
    if (entry.socket >= 0 && !entry.taken) close(entry.socket);
  }
  connections_.clear();
  listeners_.clear();
  data_.clear();
  attempts_.clear();
}

void StreamHub::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof one);  // full: it is awake already
}

void StreamHub::Ring() {
  if (options_.doorbell != nullptr && !polls_) options_.doorbell->Ring();
}

// The mutex is free while the thread sleeps. To know that there are events takes none of them.
void StreamHub::Run() {
  pollfd any{epoll_, POLLIN, 0};
  std::unique_lock lock(mutex_);
  while (!stops_) {
    timer_ns_ = NextTimer();
    const int64_t wait_ns = timer_ns_ - options_.clock->NowNs();
    const bool forever = timer_ns_ == kNever;
    const int wait_ms =
        forever ? -1 : static_cast<int>(std::clamp<int64_t>(wait_ns / kNsPerMs + 1, 0, 60'000));
    lock.unlock();
    (void)poll(&any, 1, wait_ms);
    lock.lock();
    if (options_.clock->NowNs() - polled_ns_ < kPolledNs) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::nanoseconds(kLeaveNs));
      lock.lock();
    }
    uint64_t count = 0;
    (void)!read(wake_, &count, sizeof count);
    HandleEvents();
    RunTimers(options_.clock->NowNs());
  }
}

// Events carry numbers, not pointers: a connection that an earlier event of the same round has
// closed is not found. The thread alone takes what wakes it.
bool StreamHub::HandleEvents() {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    HandleEvent(events[static_cast<size_t>(i)].data.u64, events[static_cast<size_t>(i)].events);
  }
  return count > 0;
}

// Who polls takes the first event at once and looks at its links after that: only further events
// ring. The thread sleeps until its next timer, and may not know of a sooner one.
void StreamHub::Poll() {
  polls_ = true;
  const bool moved = HandleEvents();
  polls_ = false;
  polled_ns_ = options_.clock->NowNs();
  if (events_.size() > 1) Ring();
  if (moved && NextTimer() < timer_ns_) Wake();
}

void StreamHub::HandleEvent(uint64_t id, uint32_t events) {
  if (id == kWatchId) return Ring();
  if (id == kWakeId) return;
  if (const auto listener = listeners_.find(id); listener != listeners_.end()) {
    return AcceptFrom(listener->second);
  }
  const auto found = connections_.find(id);
  if (found != connections_.end()) Advance(*found->second, events);
}

int64_t StreamHub::NextTimer() const {
  int64_t next_ns = std::min(paused_until_ns_ > 0 ? paused_until_ns_ : kNever, beat_ns_);
  for (const auto& [id, one] : connections_) next_ns = std::min(next_ns, one->deadline_ns);
  for (const auto& [key, one] : attempts_) next_ns = std::min(next_ns, one->retry_ns);
  return next_ns;
}

void StreamHub::RunTimers(int64_t now_ns) {
  if (paused_until_ns_ > 0 && now_ns >= paused_until_ns_) PauseAccepting(0);
  std::vector<uint64_t> late;
  for (const auto& [id, one] : connections_) {
    if (now_ns >= one->deadline_ns) late.push_back(id);
  }
  for (const uint64_t id : late) Break(id, "no answer in time", false);
  std::vector<Key> due;
  for (const auto& [key, one] : attempts_) {
    if (now_ns >= one->retry_ns) due.push_back(key);
  }
  for (const Key key : due) TryNext(*attempts_.at(key));
  if (now_ns >= beat_ns_) Beat();
}

// --- Accepting ---

Status StreamHub::Listen(int socket) {
  const std::lock_guard lock(mutex_);
  const uint64_t id = next_id_++;
  listeners_[id] = socket;
  SetOption(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  epoll_event event{EPOLLIN, {.u64 = id}};
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event) != 0) {
    return ResourceExhausted("a listening socket cannot be watched: " + ErrorText(errno));
  }
  return Status();
}

void StreamHub::OpenToJoins(bool open, uint32_t epoch) {
  const std::lock_guard lock(mutex_);
  options_.party.joining = true;
  options_.party.epoch = epoch;
  joins_are_open_ = open;
}

void StreamHub::AnswerLate(std::function<std::string(int rank)> answer) {
  const std::lock_guard lock(mutex_);
  late_answer_ = std::move(answer);
}

void StreamHub::AcceptFrom(int listener) {
  for (size_t count = 0; count < kMaxPending; ++count) {
    if (!MakeRoom()) return PauseAccepting(options_.clock->NowNs() + kPauseNs);
    sockaddr_storage storage{};
    socklen_t size = sizeof storage;
    const int socket = accept4(listener, reinterpret_cast<sockaddr*>(&storage), &size,
                               SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      const bool is_no_more = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
      return is_no_more ? void() : CannotAccept(errno);
    }
    exhausted_ns_ = 0;
    Connection& connection = Add(socket, false, options_.clock->NowNs() + kProofNs);
    connection.remote = SocketAddress(storage);
    connection.stage = Connection::Stage::kHandshake;
    connection.handshake = Handshake::Accept(options_.party);
    Arm(connection);
  }
}

// The oldest that has not said a word goes first, else the oldest: a rank says its hello at once.
// The youngest may be ranks, of which many come at a time; others wait in the kernel meanwhile.
bool StreamHub::MakeRoom() {
  const int64_t now_ns = options_.clock->NowNs();
  size_t count = 0;
  Connection* oldest = nullptr;
  for (const auto& [id, one] : connections_) {
    if (!one->pending()) continue;
    ++count;
    if (now_ns < one->deadline_ns - kProofNs + kSilenceNs) continue;
    const bool is_silent = !one->handshake->heard_anything();
    if (oldest == nullptr || (is_silent && oldest->handshake->heard_anything())) oldest = one.get();
  }
  if (count < kMaxPending) return true;
  if (oldest == nullptr) return false;
  Refuse(*oldest, "made way for a further connection before it had proven the job's key");
  Close(oldest->id);
  return true;
}

// Peers that wait to be accepted would take this rank for dead, so it says in time what it lacks:
// once to the user, and, if it waits for one of them itself, as its error. Who comes may be a
// stranger, for whom no job ends.
void StreamHub::CannotAccept(int error) {
  const int64_t now_ns = options_.clock->NowNs();
  PauseAccepting(now_ns + kRetryNs);
  const Status failed = SystemError(RankName(rank()) + " cannot accept a connection", error);
  // As long as somebody waits it is tried again and again; after a gap this is another lack.
  const bool has_lasted = now_ns - last_exhausted_ns_ < kExhaustedNs / 2;
  if (exhausted_ns_ == 0 || !has_lasted) exhausted_ns_ = now_ns;
  last_exhausted_ns_ = now_ns;
  const bool is_new = !std::exchange(has_warned_of_accepting_, true);
  if (is_new && options_.log != nullptr) {
    options_.log->Write(LogLevel::kWarning, failed.message() + "; it tries again");
  }
  const bool lasts = IsExhaustion(error) && now_ns - exhausted_ns_ >= kExhaustedNs;
  if (lasts && AwaitsConnection()) FailHere(failed);
}

void StreamHub::FailHere(const Status& why) {
  if (options_.only_watches || std::exchange(has_failed_, true)) return;
  Lose(FailedOn(rank(), why));
}

bool StreamHub::AwaitsConnection() const {
  const auto is_awaited = [](const PeerState& peer) {
    return peer.is_expected && peer.in == 0 && !peer.left && peer.lost.ok();
  };
  return joins_are_open_ || std::ranges::any_of(peers_, is_awaited) ||
         std::ranges::any_of(data_, [](const auto& one) { return one.second.awaited; });
}

// Without a pause epoll would report a connection that cannot be accepted for ever. 0: no pause.
void StreamHub::PauseAccepting(int64_t until_ns) {
  paused_until_ns_ = until_ns;
  for (const auto& [id, socket] : listeners_) {
    epoll_event event{until_ns > 0 ? 0u : uint32_t{EPOLLIN}, {.u64 = id}};
    (void)epoll_ctl(epoll_, EPOLL_CTL_MOD, socket, &event);
  }
}

void StreamHub::Refuse(const Connection& connection, const std::string& why) {
  refused_.push_back(connection.remote.ToString() + " " + why);
  if (refused_.size() > kMostRefused) refused_.pop_front();
  if (options_.log != nullptr && options_.log->Enabled(LogLevel::kDebug)) {
    options_.log->Write(LogLevel::kDebug, "connection refused: " + refused_.back());
  }
}

std::string StreamHub::Refused() {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const std::string& one : refused_) text += (text.empty() ? "" : "; ") + one;
  return text;
}

// --- Connections ---

StreamHub::Connection& StreamHub::Add(int socket, bool outgoing, int64_t deadline_ns) {
  auto owned = std::make_unique<Connection>();
  Connection& connection = *owned;
  connection.id = next_id_++;
  connection.socket = socket;
  connection.outgoing = outgoing;
  connection.deadline_ns = deadline_ns;
  SetOptions(socket);
  connections_.emplace(connection.id, std::move(owned));
  return connection;
}

void StreamHub::Arm(Connection& connection) {
  const bool writes = connection.stage == Connection::Stage::kConnecting || !connection.out.empty();
  const uint32_t wanted = writes ? EPOLLIN | EPOLLOUT : EPOLLIN;
  if (wanted == connection.armed) return;
  epoll_event event{wanted, {.u64 = connection.id}};
  const int what = connection.armed == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  if (epoll_ctl(epoll_, what, connection.socket, &event) != 0) {
    FailHere(
        ResourceExhausted(RankName(rank()) + " cannot watch a connection: " + ErrorText(errno)));
  }
  connection.armed = wanted;
}

void StreamHub::Close(uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  // A forked child may hold the socket, too, which would keep it in epoll and open for the peer.
  (void)epoll_ctl(epoll_, EPOLL_CTL_DEL, found->second->socket, nullptr);
  (void)shutdown(found->second->socket, SHUT_RDWR);
  close(found->second->socket);
  connections_.erase(found);
}

void StreamHub::Advance(Connection& connection, uint32_t events) {
  const uint64_t id = connection.id;
  if (connection.stage == Connection::Stage::kConnecting) {
    if ((events & ~uint32_t{EPOLLIN}) != 0) FinishConnect(connection);
    return;
  }
  if ((events & EPOLLOUT) != 0 && !Flush(connection)) return;
  if ((events & ~uint32_t{EPOLLOUT}) == 0) return;
  if (connection.stage == Connection::Stage::kHandshake) ReadHandshake(connection);
  // The first frames may have come with the last bytes of the handshake.
  const auto found = connections_.find(id);
  if (found != connections_.end() && found->second->stage == Connection::Stage::kOpen) {
    ReadFrames(*found->second);
  }
}

void StreamHub::FinishConnect(Connection& connection) {
  int error = 0;
  socklen_t size = sizeof error;
  (void)getsockopt(connection.socket, SOL_SOCKET, SO_ERROR, &error, &size);
  Attempt& attempt = *attempts_.at(connection.attempt);
  if (IsExhaustion(error)) NoteExhaustion(attempt, connection.remote, error);
  if (error != 0) return Break(connection.id, ErrorText(error), error == ECONNREFUSED);
  connection.stage = Connection::Stage::kHandshake;
  connection.handshake = Handshake::Connect(options_.party, attempt.hello, attempt.peer);
  connection.out = connection.handshake->TakeOutput();
  (void)Flush(connection);
}

// Not a byte more than the handshake takes: what follows on a data stream is its link's.
void StreamHub::ReadHandshake(Connection& connection) {
  Handshake& handshake = *connection.handshake;
  const uint64_t id = connection.id;
  while (handshake.wanted() > 0) {
    const ssize_t count = recv(connection.socket, received_.data(),
                               std::min(handshake.wanted(), received_.size()), MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count <= 0) {
      const std::string why = count == 0 ? "the connection was closed" : ErrorText(errno);
      return Break(id, why + " before both ends had proven the job's key", false);
    }
    handshake.Take(ByteSpan(received_).first(static_cast<size_t>(count)));
    const std::vector<std::byte> output = handshake.TakeOutput();
    const bool unwanted = handshake.complete() && !connection.outgoing && !IsWanted(connection);
    if (unwanted) return Break(id, Describe(Refusal::kNotWanted), true);
    connection.out.insert(connection.out.end(), output.begin(), output.end());
    if (!connection.out.empty() && !Flush(connection)) return;
    if (connection.outgoing && !output.empty()) {
      connection.deadline_ns = options_.clock->NowNs() + kWelcomeNs;
    }
  }
  if (handshake.complete()) return HandshakeDone(connection);
  if (connection.outgoing) attempts_.at(connection.attempt)->refusal = handshake.refusal();
  const bool temporary = handshake.refusal() == Refusal::kNotJoining;
  Break(id, Describe(handshake.refusal()), !temporary);
}

// Whether a connection, whose other end has proven the key, is one that this rank can expect.
bool StreamHub::IsWanted(const Connection& connection) {
  const StreamHello& hello = connection.hello();
  if (hello.from == rank()) return false;
  if (hello.role == StreamRole::kJoin) return true;  // also of a job of another size: it is told so
  if (hello.from >= options_.size) return false;
  switch (hello.role) {
    case StreamRole::kJoin:
    case StreamRole::kMember:
      break;
    case StreamRole::kControl: {
      const PeerState& peer = peers_[static_cast<size_t>(hello.from)];
      return peer.in == 0 && peer.lost.ok() && !peer.left;
    }
    case StreamRole::kData: {
      if (hello.from > rank() || hello.number >= options_.streams) return false;
      const DataEntry& entry = Entry({hello.plane, hello.from, hello.number});
      return entry.socket < 0 && entry.failed.ok();
    }
  }
  return false;
}

void StreamHub::HandshakeDone(Connection& connection) {
  connection.deadline_ns = kNever;
  const StreamHello hello = connection.hello();
  if (!connection.outgoing) connection.peer = hello.from;
  if (hello.role == StreamRole::kData) return ReleaseToLink(connection);
  connection.stage = Connection::Stage::kOpen;
  connection.reader.emplace(connection.handshake->receive_key());
  connection.writer.emplace(connection.handshake->send_key());
  if (!connection.outgoing) {
    if (hello.role == StreamRole::kControl) {
      peers_[static_cast<size_t>(hello.from)].in = connection.id;
    } else if (!joins_are_open_) {
      connection.deadline_ns = options_.clock->NowNs() + kProofNs;
    }
    return;
  }
  const std::unique_ptr<Attempt> attempt =
      std::move(attempts_.extract(connection.attempt).mapped());
  if (hello.role == StreamRole::kJoin) {
    options_.party.epoch = connection.handshake->epoch();
    peers_[0].addresses = {connection.remote};
    return Push({.kind = HubEvent::Kind::kJoined,
                 .connection = connection.id,
                 .address = OwnAddress(connection.socket)});
  }
  PeerState& peer = peers_[static_cast<size_t>(attempt->peer)];
  peer.out = connection.id;
  if (peer.watched) SendSign(connection);
  for (const auto& [type, payload] : attempt->waiting) Append(connection, type, payload);
  (void)Flush(connection);
}

// A data stream leaves the hub: its socket waits for Take.
void StreamHub::ReleaseToLink(Connection& connection) {
  const StreamHello& hello = connection.hello();
  if (connection.outgoing) attempts_.erase(connection.attempt);
  (void)epoll_ctl(epoll_, EPOLL_CTL_DEL, connection.socket, nullptr);
  DataEntry& entry = Entry({hello.plane, connection.peer, hello.number});
  entry.socket = connection.socket;
  entry.awaited = false;
  connections_.erase(connection.id);
  Ring();
}

// @return false if the connection is gone.
bool StreamHub::Flush(Connection& connection) {
  while (connection.out_at < connection.out.size()) {
    const ssize_t count =
        send(connection.socket, connection.out.data() + connection.out_at,
             connection.out.size() - connection.out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      connection.out_at += static_cast<size_t>(count);
      continue;
    }
    // What breaks a stream is found by reading, after all that has come.
    if (errno == EINTR) continue;
    // A stream that is never empty does not keep what it has sent.
    if (connection.out_at > connection.out.size() / 2) {
      const auto begin = connection.out.begin();
      connection.out.erase(begin, begin + static_cast<std::ptrdiff_t>(connection.out_at));
      connection.out_at = 0;
    }
    return Arm(connection), true;
  }
  connection.out.clear();
  connection.out_at = 0;
  if (connection.ends_when_sent) return Close(connection.id), false;
  Arm(connection);
  return true;
}

void StreamHub::Append(Connection& connection, FrameType type, ByteSpan payload) {
  connection.writer->Append(type, payload, connection.out);
  connection.has_sent = true;
}

void StreamHub::ReadFrames(Connection& connection) {
  const uint64_t id = connection.id;
  for (int reads = 0; reads < kReadsAtOnce; ++reads) {
    const ssize_t count = recv(connection.socket, received_.data(), received_.size(), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count == 0) return Break(id, std::string(kClosed), true);
    if (count < 0) {
      const int error = errno;
      if (IsExhaustion(error)) FailHere(SystemError(RankName(rank()) + " cannot receive", error));
      return Break(id, ErrorText(error), true);
    }
    connection.reader->Take(ByteSpan(received_).first(static_cast<size_t>(count)));
    if (connection.hello().role != StreamRole::kJoin) {
      peers_[static_cast<size_t>(connection.peer)].silent_ns = -period_ns();  // not this period
    }
    if (!TakeFrames(connection)) return;
  }
}

// @return false if the connection is gone.
bool StreamHub::TakeFrames(Connection& connection) {
  const uint64_t id = connection.id;
  for (;;) {
    Result<std::optional<StreamReader::Frame>> frame = connection.reader->Next();
    if (!frame.ok()) return Break(id, frame.status().message(), true), false;
    if (!frame.value()) return true;
    const bool is_late = connection.hello().role == StreamRole::kJoin &&
                         frame.value()->type == FrameType::kRegister && !joins_are_open_;
    if (is_late && late_answer_) {
      Append(connection, FrameType::kStarted, TextBytes(late_answer_(connection.peer)));
      connection.ends_when_sent = true;
      return Flush(connection);
    }
    if (!TakeFrame(connection, *frame.value())) {
      return Break(id, "a frame that does not belong there", true), false;
    }
  }
}

// @return false if a frame of this type does not come on this stream.
bool StreamHub::TakeFrame(Connection& connection, const StreamReader::Frame& frame) {
  const bool is_join = connection.hello().role == StreamRole::kJoin;
  const bool is_of_join =
      (frame.type >= FrameType::kRegister && frame.type <= FrameType::kRejected) ||
      (frame.type >= FrameType::kTimeUp && frame.type <= FrameType::kOtherSize);
  if (is_join != is_of_join) return false;
  if (!is_join && frame.type == FrameType::kGoodbye) {
    peers_[static_cast<size_t>(connection.peer)].left = true;
    return true;
  }
  if (!is_join && connection.outgoing) return false;
  if (!is_join && !peers_[static_cast<size_t>(connection.peer)].lost.ok()) return true;
  if (frame.type == FrameType::kAlive) return TakeSign(connection.peer, frame.payload), true;
  if (frame.type == FrameType::kAbort) {
    if (options_.liveness != nullptr) options_.liveness->Hear(frame.payload);
    return true;
  }
  HubEvent event{
      .from = connection.peer, .connection = is_join ? connection.id : 0, .type = frame.type};
  event.data = std::exchange(spare_, {});
  event.data.assign(frame.payload.begin(), frame.payload.end());
  if (is_join) event.address = connection.remote;
  Push(std::move(event));
  return true;
}

void StreamHub::Push(HubEvent event) {
  events_.push_back(std::move(event));
  has_event_.notify_all();
  Ring();
}

// A connection ends: what that means depends on what it was. `definite`: trying again is no use.
void StreamHub::Break(uint64_t id, const std::string& why, bool definite) {
  Connection& connection = *connections_.at(id);
  const bool open = connection.stage == Connection::Stage::kOpen;
  const std::string at = connection.remote.ToString();
  const std::string where = at + ": " + why;
  if (!open && connection.outgoing) {
    Attempt& attempt = *attempts_.at(connection.attempt);
    attempt.error += (attempt.error.empty() ? "" : "; ") + where;
    attempt.definite = attempt.definite && definite;
    Close(id);
    return TryNext(attempt);
  }
  if (!open) {
    Refuse(connection, why);
    return Close(id);
  }
  const int peer = connection.peer;
  if (connection.hello().role == StreamRole::kJoin) {
    Close(id);
    return Push({.kind = HubEvent::Kind::kLost,
                 .from = peer,
                 .connection = id,
                 .status = Unavailable(where)});
  }
  PeerState& state = peers_[static_cast<size_t>(peer)];
  (state.in == id ? state.in : state.out) = 0;
  Close(id);
  if (why != kClosed) return LosePeer(peer, LostConnection(peer, rank(), "connection", where));
  LosePeer(peer, Unavailable(RankName(peer) + " unexpectedly closed its connection to " +
                             RankName(rank()) + " (" + at + ")"));
}

// What has come from the rank before is read first: it may be its goodbye.
void StreamHub::LosePeer(int rank, const Status& why) {
  PeerState& peer = peers_[static_cast<size_t>(rank)];
  if (!peer.lost.ok()) return;
  const Key key = KeyOf(StreamRole::kControl, rank, 0, 0);
  std::vector<uint64_t> ids = {peer.in, peer.out};
  for (const auto& [id, one] : connections_) {
    if (one->stage != Connection::Stage::kOpen && one->attempt == key) ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    const auto found = connections_.find(id);
    if (found != connections_.end() && found->second->reader) ReadRest(*found->second);
    Close(id);
  }
  peer.in = peer.out = 0;
  attempts_.erase(key);
  peer.lost = FailedOn(rank, why);
  if (!peer.left) NoteLoss(rank, peer.lost);
}

void StreamHub::NoteLoss(int rank, const Status& why) {
  for (auto& [data_key, entry] : data_) {
    const bool is_open = entry.socket >= 0;
    if (!is_open && PeerOf(data_key) == rank) entry.failed = why;
  }
  Lose(why);
}

// The event wakes who waits for this rank at start.
void StreamHub::Lose(const Status& why) {
  if (options_.liveness != nullptr) options_.liveness->Note(why);
  Push({.kind = HubEvent::Kind::kLost, .from = why.facts().ranks.front(), .status = why});
}

void StreamHub::ReadRest(Connection& connection) {
  for (;;) {
    const ssize_t count = recv(connection.socket, received_.data(), received_.size(), MSG_DONTWAIT);
    if (count <= 0) return;
    connection.reader->Take(ByteSpan(received_).first(static_cast<size_t>(count)));
    Result<std::optional<StreamReader::Frame>> frame = connection.reader->Next();
    for (; frame.ok() && frame.value(); frame = connection.reader->Next()) {
      if (!TakeFrame(connection, *frame.value())) return;
    }
  }
}

// --- Signs of life ---

int64_t StreamHub::period_ns() const {
  if (options_.patience_ns == 0) return 0;
  return std::max<int64_t>(options_.patience_ns / kSignsInPatience, kNsPerMs);
}

void StreamHub::WarnOf(const Status& unwatched) {
  if (std::exchange(has_warned_, true) || options_.log == nullptr) return;
  options_.log->Write(LogLevel::kWarning,
                      unwatched.message() +
                          "; a rank there that is stopped, or whose link is cut, "
                          "is not noticed (FARANDOLE_LIVENESS_TIMEOUT_S)");
}

void StreamHub::TakeSign(int from, ByteSpan payload) {
  uint32_t period_ms = 0;
  if (payload.size() < sizeof period_ms) return;
  std::memcpy(&period_ms, payload.data(), sizeof period_ms);
  PeerState& peer = peers_[static_cast<size_t>(from)];
  peer.period_ns = period_ms * kNsPerMs;
  const ByteSpan host = payload.subspan(sizeof period_ms);
  peer.host.assign(reinterpret_cast<const char*>(host.data()), host.size());
}

void StreamHub::SendSign(Connection& connection) {
  const auto period_ms = static_cast<uint32_t>(std::min<int64_t>(
      (period_ns() + kNsPerMs - 1) / kNsPerMs, std::numeric_limits<uint32_t>::max()));
  std::vector<std::byte> sign(sizeof period_ms);
  std::memcpy(sign.data(), &period_ms, sizeof period_ms);
  const ByteSpan name = TextBytes(host_);
  sign.insert(sign.end(), name.begin(), name.end());
  Append(connection, FrameType::kAlive, sign);
  (void)Flush(connection);  // true: it is no stream that ends
}

// One period after the last one, as far as this thread knows: after a time in which it stood still
// nobody is judged by what he did meanwhile.
void StreamHub::Beat() {
  beat_ns_ = options_.clock->NowNs() + period_ns();
  for (const int rank : watched_) {
    const PeerState& peer = peers_[static_cast<size_t>(rank)];
    if (peer.left || !peer.lost.ok()) continue;
    if (peer.out != 0) {
      Connection& connection = *connections_.at(peer.out);
      const bool is_silent = !connection.has_sent && connection.out.empty();
      if (is_silent) SendSign(connection);
      connection.has_sent = false;
    }
    CheckSilence(rank);
  }
}

// One sign more than fit into the patience: where the rank's host has another rank, that one sees
// in the meantime whether the process is stopped, and says so.
void StreamHub::CheckSilence(int rank) {
  PeerState& peer = peers_[static_cast<size_t>(rank)];
  peer.silent_ns += period_ns();
  const int64_t longest_ns = (kSignsInPatience + 1) * std::max(period_ns(), peer.period_ns);
  if (peer.period_ns == 0 || peer.silent_ns < longest_ns) return;
  if (peer.in != 0) ReadFrames(*connections_.at(peer.in));
  if (peer.silent_ns < longest_ns || peer.left || !peer.lost.ok()) return;
  char seconds[32];
  (void)std::snprintf(seconds, sizeof seconds, "%.1f s",
                      static_cast<double>(peer.silent_ns) / kNsPerSecond);
  const std::string why = RankAt(rank, peer.host) + " cannot be reached from " +
                          RankAt(this->rank(), host_) + ": nothing has come for " + seconds +
                          "; it is stopped or cut off";
  peer.lost =
      Status(Code::kUnavailable, why,
             {.ranks = {rank}, .cause = why, .kind = FailureKind::kLinkDown, .host = peer.host});
  NoteLoss(rank, peer.lost);
}

void StreamHub::Report(ByteSpan abort) {
  const std::lock_guard lock(mutex_);
  if (stops_) return;
  for (const int rank : watched_) {
    const PeerState& peer = peers_[static_cast<size_t>(rank)];
    if (peer.out == 0) continue;
    Append(*connections_.at(peer.out), FrameType::kAbort, abort);
    (void)Flush(*connections_.at(peer.out));
  }
}

// --- Connecting ---

StreamHub::Key StreamHub::KeyOf(StreamRole role, int peer, int plane, int number) {
  return (uint64_t{static_cast<uint8_t>(role)} << 48) |
         (uint64_t{static_cast<uint32_t>(peer)} << 16) |
         (uint64_t{static_cast<uint8_t>(plane)} << 8) | static_cast<uint8_t>(number);
}

int StreamHub::PeerOf(Key key) { return static_cast<int>((key >> 16) & UINT32_MAX); }

void StreamHub::SetKey(const JobKey& key) {
  const std::lock_guard lock(mutex_);
  options_.party.key = key;
}

void StreamHub::Join(const std::vector<SocketAddress>& root) {
  const std::lock_guard lock(mutex_);
  Start({.role = StreamRole::kJoin, .from = rank()}, 0, root);
}

void StreamHub::SetPeer(int rank, std::vector<SocketAddress> addresses) {
  const std::lock_guard lock(mutex_);
  peers_[static_cast<size_t>(rank)].addresses = std::move(addresses);
}

JobKey StreamHub::key() {
  const std::lock_guard lock(mutex_);
  return options_.party.key;
}

std::vector<SocketAddress> StreamHub::Peer(int rank) {
  const std::lock_guard lock(mutex_);
  return peers_[static_cast<size_t>(rank)].addresses;
}

void StreamHub::Start(const StreamHello& hello, int peer, std::vector<SocketAddress> addresses) {
  auto owned = std::make_unique<Attempt>();
  Attempt& attempt = *owned;
  attempt.key = KeyOf(hello.role, peer, hello.plane, hello.number);
  attempt.hello = hello;
  attempt.peer = peer;
  attempt.addresses = std::move(addresses);
  attempt.give_up_ns = options_.clock->NowNs() + options_.connect_timeout_ns;
  attempt.retry_ns = 0;  // at once, by the thread
  attempts_[attempt.key] = std::move(owned);
  Wake();
}

void StreamHub::TryNext(Attempt& attempt) {
  attempt.retry_ns = kNever;
  while (attempt.next < attempt.addresses.size()) {
    const SocketAddress address = attempt.addresses[attempt.next++];
    const int socket =
        ::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
    const bool begun = socket >= 0 && (connect(socket, address.data(), address.size()) == 0 ||
                                       errno == EINPROGRESS);
    if (begun) {
      Connection& connection = Add(socket, true, options_.clock->NowNs() + kAttemptNs);
      connection.remote = address;
      connection.peer = attempt.peer;
      connection.attempt = attempt.key;
      return Arm(connection);
    }
    const int error = errno;
    if (socket >= 0) close(socket);
    attempt.error +=
        (attempt.error.empty() ? "" : "; ") + address.ToString() + ": " + ErrorText(error);
    attempt.definite = attempt.definite && error == ECONNREFUSED;
    if (IsExhaustion(error)) NoteExhaustion(attempt, address, error);
  }
  EndRound(attempt);
}

// Ranks that have joined listen: one that refuses is dead. Joining is repeated by who asked for it.
void StreamHub::EndRound(Attempt& attempt) {
  const int64_t now_ns = options_.clock->NowNs();
  const bool is_exhausted = !attempt.exhausted.ok();
  if (!is_exhausted || attempt.exhausted_ns == 0) attempt.exhausted_ns = is_exhausted ? now_ns : 0;
  const bool ends = attempt.hello.role == StreamRole::kJoin || attempt.definite ||
                    now_ns >= attempt.give_up_ns ||
                    (is_exhausted && now_ns - attempt.exhausted_ns >= kExhaustedNs);
  if (ends) return Fail(attempt);
  attempt.exhausted = {};
  attempt.next = 0;
  attempt.error.clear();
  attempt.definite = true;
  attempt.retry_ns = now_ns + kRetryNs;
}

// Of this rank, not of the peer.
void StreamHub::NoteExhaustion(Attempt& attempt, const SocketAddress& address, int error) {
  attempt.exhausted =
      FailedOn(rank(), SystemError(RankName(rank()) + " cannot connect to " +
                                       RankName(attempt.peer) + " at " + address.ToString(),
                                   error));
}

void StreamHub::Fail(const Attempt& attempt) {
  const std::unique_ptr<Attempt> owned = std::move(attempts_.extract(attempt.key).mapped());
  const Status unreachable =
      Unavailable(RankName(rank()) + " cannot reach " + RankName(owned->peer) + " at " +
                  (owned->error.empty() ? "no address" : owned->error));
  const Status& status = owned->exhausted.ok() ? unreachable : owned->exhausted;
  switch (owned->hello.role) {
    case StreamRole::kJoin:
      return Push({.kind = HubEvent::Kind::kLost, .refusal = owned->refusal, .status = status});
    case StreamRole::kControl:
      return options_.only_watches ? WarnOf(status) : LosePeer(owned->peer, status);
    case StreamRole::kData:
      Entry({owned->hello.plane, owned->peer, owned->hello.number}).failed = status;
      return Ring();
    case StreamRole::kMember:
      return;  // a hub opens none
  }
}

// --- Control streams ---

void StreamHub::Expect(int from) {
  const std::lock_guard lock(mutex_);
  peers_[static_cast<size_t>(from)].is_expected = true;
}

void StreamHub::Connect(int to) {
  const std::lock_guard lock(mutex_);
  PeerState& peer = peers_[static_cast<size_t>(to)];
  if (!peer.watched) watched_.push_back(to);
  peer.watched = peer.is_expected = true;
  if (options_.patience_ns > 0 && beat_ns_ == kNever) {
    beat_ns_ = options_.clock->NowNs() + period_ns();
    Wake();
  }
  if (peer.out != 0) SendSign(*connections_.at(peer.out));
  const bool exists = peer.out != 0 || attempts_.contains(KeyOf(StreamRole::kControl, to, 0, 0));
  if (exists || peer.left || !peer.lost.ok()) return;
  Start({.role = StreamRole::kControl, .from = rank()}, to, peer.addresses);
}

// Written at once by the thread that sends, unless earlier frames wait.
Status StreamHub::Send(int to, FrameType type, ByteSpan payload) {
  if (payload.size() > kMaxFramePayloadBytes) {
    return InvalidArgument("control message of " + std::to_string(payload.size()) + " bytes");
  }
  const std::lock_guard lock(mutex_);
  const PeerState& peer = peers_[static_cast<size_t>(to)];
  if (peer.left || stops_) return Status();
  if (!peer.lost.ok() && peer.out == 0) return peer.lost;
  if (peer.out != 0) {
    Connection& connection = *connections_.at(peer.out);
    const bool waits = !connection.out.empty();
    Append(connection, type, payload);
    if (!waits) (void)Flush(connection);
    return Status();
  }
  const Key key = KeyOf(StreamRole::kControl, to, 0, 0);
  if (!attempts_.contains(key)) {
    Start({.role = StreamRole::kControl, .from = rank()}, to, peer.addresses);
  }
  attempts_.at(key)->waiting.emplace_back(type, std::vector(payload.begin(), payload.end()));
  return Status();
}

void StreamHub::SendOnJoin(uint64_t connection, FrameType type, ByteSpan payload, bool last) {
  const std::lock_guard lock(mutex_);
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  Append(*found->second, type, payload);
  found->second->ends_when_sent = last;
  (void)Flush(*found->second);
}

std::optional<HubEvent> StreamHub::Next(std::vector<std::byte> reuse) {
  const std::lock_guard lock(mutex_);
  if (reuse.capacity() > spare_.capacity()) spare_ = std::move(reuse);
  if (events_.empty() && !watched_.empty() && !stops_) Poll();
  if (events_.empty()) return std::nullopt;
  HubEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void StreamHub::PutBack(std::vector<HubEvent> events) {
  const std::lock_guard lock(mutex_);
  events_.insert(events_.begin(), std::make_move_iterator(events.begin()),
                 std::make_move_iterator(events.end()));
}

bool StreamHub::WaitForEvent(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  const int64_t wait_ns = std::max<int64_t>(deadline_ns - options_.clock->NowNs(), 0);
  return has_event_.wait_for(lock, std::chrono::nanoseconds(wait_ns), [this] {
    return !events_.empty() || is_stopped();
  }) && !is_stopped();
}

bool StreamHub::SleepUntil(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  const int64_t wait_ns = std::max<int64_t>(deadline_ns - options_.clock->NowNs(), 0);
  return !has_event_.wait_for(lock, std::chrono::nanoseconds(wait_ns),
                              [this] { return is_stopped(); });
}

bool StreamHub::Drained() {
  const std::lock_guard lock(mutex_);
  const bool waits =
      std::ranges::any_of(attempts_, [](const auto& one) { return !one.second->waiting.empty(); });
  return !waits &&
         std::ranges::all_of(connections_, [](const auto& one) { return one.second->out.empty(); });
}

void StreamHub::Leave() {
  const std::lock_guard lock(mutex_);
  for (const PeerState& peer : peers_) {
    for (const uint64_t id : {peer.in, peer.out}) {
      if (id == 0) continue;
      Append(*connections_.at(id), FrameType::kGoodbye, {});
      (void)Flush(*connections_.at(id));
    }
  }
  for (auto& [key, attempt] : attempts_) {
    if (attempt->hello.role == StreamRole::kControl) {
      attempt->waiting.emplace_back(FrameType::kGoodbye, std::vector<std::byte>());
    }
  }
}

// --- Data streams ---

StreamHub::DataEntry& StreamHub::Entry(const StreamId& stream) {
  return data_[KeyOf(StreamRole::kData, stream.peer, stream.plane, stream.number)];
}

Result<std::optional<int>> StreamHub::Take(const StreamId& stream) {
  const std::lock_guard lock(mutex_);
  DataEntry& entry = Entry(stream);
  const PeerState& peer = peers_[static_cast<size_t>(stream.peer)];
  if (entry.socket >= 0) {
    if (std::exchange(entry.taken, true)) return Internal("a data stream was taken twice");
    if (LeavesHost(entry.socket)) sent_.Add(entry.socket);
    return std::optional(entry.socket);
  }
  if (!entry.failed.ok()) return entry.failed;
  if (!peer.lost.ok()) return peer.lost;
  const Key key = KeyOf(StreamRole::kData, stream.peer, stream.plane, stream.number);
  entry.awaited = rank() > stream.peer;
  if (rank() < stream.peer && !attempts_.contains(key)) {
    Start({StreamRole::kData, rank(), static_cast<uint8_t>(stream.plane),
           static_cast<uint8_t>(stream.number)},
          stream.peer, peer.addresses);
  }
  return std::optional<int>();
}

Status StreamHub::Watch(int socket, bool writable) {
  const uint32_t events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT | (writable ? uint32_t{EPOLLOUT} : 0);
  epoll_event event{events, {.u64 = kWatchId}};
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, socket, &event) == 0) return Status();
  if (errno == ENOENT && epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event) == 0) return Status();
  return ResourceExhausted("a socket cannot be watched: " + ErrorText(errno));
}

void StreamHub::Unwatch(int socket) {
  (void)epoll_ctl(epoll_, EPOLL_CTL_DEL, socket, nullptr);
  const std::lock_guard lock(mutex_);
  sent_.Remove(socket);
}

LinkUse StreamHub::Use(int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  return sent_.Look(now_ns);
}

}  // namespace farandole
