#include "coordinator/job/member_mail.h"

#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/clock.h"
#include "core/descriptors.h"

namespace farandole {
namespace {

constexpr size_t kMostUnproven = 64;
constexpr int64_t kAnswerNs = 2 * kNsPerSecond;  // for a message, or a stranger's proof
constexpr int64_t kPauseNs = 100 * kNsPerMs;
constexpr uint32_t kMostTextBytes = uint32_t{16} << 20;

/// Numeric ones; what is none is left out.
std::vector<SocketAddress> AddressesOf(std::string_view texts) {
  std::vector<SocketAddress> all;
  while (!texts.empty()) {
    const std::string_view text = texts.substr(0, texts.find(','));
    texts.remove_prefix(std::min(texts.size(), text.size() + 1));
    const Result<SocketAddress> address = ParseSocketAddress(text);
    if (address.ok()) all.push_back(address.value());
  }
  return all;
}

/// Why a connection was not made. ECONNREFUSED is left where it has been reset, as a host does if
/// nobody listens there. By ICMP a firewall refuses, which says nothing of a process; Linux keeps
/// that message with the socket.
int WhyNot(int socket, int error) {
  if (error != ECONNREFUSED) return error;
  std::array<std::byte, 512> control;
  msghdr message{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  return recvmsg(socket, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0 ? error : EHOSTUNREACH;
}

}  // namespace

struct MemberMail::Connection {
  Connection(int connected, Handshake proof) : socket(connected), handshake(std::move(proof)) {}
  ~Connection() {
    if (socket >= 0) close(socket);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int socket;
  Handshake handshake;
  bool is_connecting = false;
  std::string message = {};  // of who has connected, with its addressee
  std::optional<StreamReader> reader = {};
  std::optional<StreamWriter> writer = {};
  std::vector<std::byte> out = {};
  int64_t deadline_ns = SteadyClock().NowNs() + kAnswerNs;
  int64_t connected_until_ns = 0;  // its deadline from then on
  bool has_ended = false;
  int error = 0;  // of the system, if it has ended by one
  std::optional<bool> taken = {};

  bool is_open() const { return reader.has_value(); }
  short wanted() const {
    return static_cast<short>(is_connecting || !out.empty() ? POLLIN | POLLOUT : POLLIN);
  }
  void End(int why = 0) {
    has_ended = true;
    error = why;
    deadline_ns = 0;  // of Poll
  }
};

MemberMail::MemberMail(const Party& party, MemberId self, Listening listening)
    : party_(party),
      self_(self),
      listening_(std::move(listening)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

MemberMail::~MemberMail() {
  if (wake_ >= 0) close(wake_);
}

Result<std::unique_ptr<MemberMail>> MemberMail::Create(const Party& party, MemberId self,
                                                       Listening listening) {
  std::unique_ptr<MemberMail> mail(new MemberMail(party, self, std::move(listening)));
  if (mail->wake_ < 0) return SystemError("an event for messages of membership", errno);
  return mail;
}

// Nothing but close is allowed there.
void MemberMail::CloseInChild() {
  for (const Listener& one : listening_.sockets) close(one.get());
}

void MemberMail::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof one);  // full: it is awake already
}

int64_t MemberMail::NextDeadline() const {
  int64_t next_ns = accept_at_ns_ > 0 ? accept_at_ns_ : kNever;
  for (const auto& one : incoming_) next_ns = std::min(next_ns, one->deadline_ns);
  for (const auto& [to, one] : outgoing_) next_ns = std::min(next_ns, one.connection->deadline_ns);
  return next_ns;
}

// Connections are only marked as ended while their list is walked.
std::vector<MemberMail::Event> MemberMail::Poll(int64_t until_ns) {
  std::vector<pollfd> files = {{wake_, POLLIN, 0}};
  std::vector<Connection*> connections;
  const int64_t now_ns = SteadyClock().NowNs();
  if (accept_at_ns_ <= now_ns) accept_at_ns_ = 0;
  for (const Listener& one : listening_.sockets)
    files.push_back({accept_at_ns_ > 0 ? -1 : one.get(), POLLIN, 0});
  for (const auto& one : incoming_) connections.push_back(one.get());
  for (const auto& [to, one] : outgoing_) connections.push_back(one.connection.get());
  for (const Connection* const one : connections) files.push_back({one->socket, one->wanted(), 0});
  const int64_t next_ns = std::min(until_ns, NextDeadline());
  const int64_t wait_ms = std::clamp<int64_t>((next_ns - now_ns) / kNsPerMs + 1, 0, 60'000);
  (void)poll(files.data(), files.size(), next_ns == kNever ? -1 : static_cast<int>(wait_ms));
  uint64_t count = 0;
  if (files[0].revents != 0) (void)!read(wake_, &count, sizeof count);
  const size_t first = files.size() - connections.size();
  for (size_t i = 0; i < connections.size(); ++i) {
    if (files[first + i].revents != 0) Advance(*connections[i]);
    const bool is_late = SteadyClock().NowNs() >= connections[i]->deadline_ns;
    if (is_late && !connections[i]->has_ended) connections[i]->End(ETIMEDOUT);
  }
  for (size_t i = 1; i < first; ++i) {
    if (files[i].revents != 0) Accept(files[i].fd);
  }
  DropEnded();
  return std::exchange(events_, {});
}

void MemberMail::Accept(int listener) {
  const int socket = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (socket < 0) {
    if (IsExhaustion(errno)) accept_at_ns_ = SteadyClock().NowNs() + kPauseNs;
    return;
  }
  size_t unproven = 0;
  Connection* oldest = nullptr;
  for (const auto& one : incoming_) {
    if (one->is_open() || one->has_ended) continue;
    if (++unproven == 1) oldest = one.get();
  }
  if (unproven >= kMostUnproven) oldest->End();
  incoming_.push_back(std::make_unique<Connection>(socket, Handshake::Accept(party_)));
}

void MemberMail::Advance(Connection& connection) {
  if (connection.has_ended) return;
  if (std::exchange(connection.is_connecting, false)) {
    int error = 0;
    socklen_t size = sizeof error;
    (void)getsockopt(connection.socket, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return connection.End(WhyNot(connection.socket, error));
    connection.deadline_ns = connection.connected_until_ns;
    connection.out = connection.handshake.TakeOutput();
  }
  Flush(connection);
  while (!connection.has_ended && Read(connection)) {
  }
  Flush(connection);
}

// Not a byte more than the handshake takes before it is complete.
// @return whether there may be more.
bool MemberMail::Read(Connection& connection) {
  std::array<std::byte, 4096> bytes;
  Handshake& handshake = connection.handshake;
  const size_t most =
      connection.is_open() ? bytes.size() : std::min(handshake.wanted(), bytes.size());
  const ssize_t count = recv(connection.socket, bytes.data(), most, MSG_DONTWAIT);
  if (count < 0 && errno == EINTR) return true;
  if (count < 0 && errno == EAGAIN) return false;
  if (count <= 0) return connection.End(count < 0 ? errno : 0), false;
  const ByteSpan came = ByteSpan(bytes).first(static_cast<size_t>(count));
  if (connection.is_open()) {
    connection.reader->Take(came);
    return TakeFrames(connection);
  }
  handshake.Take(came);
  const std::vector<std::byte> output = handshake.TakeOutput();
  connection.out.insert(connection.out.end(), output.begin(), output.end());
  if (handshake.refusal() != Refusal::kNone) {
    Flush(connection);
    return connection.End(EPROTO), false;
  }
  if (!handshake.complete()) return true;
  connection.reader.emplace(handshake.receive_key());
  connection.writer.emplace(handshake.send_key());
  if (!connection.message.empty())
    connection.writer->Append(FrameType::kMember, TextBytes(connection.message), connection.out);
  return true;
}

// @return whether there may be more.
bool MemberMail::TakeFrames(Connection& connection) {
  const Result<std::optional<StreamReader::Frame>> frame = connection.reader->Next();
  if (!frame.ok()) return connection.End(EPROTO), false;
  if (!frame.value()) return true;
  const ByteSpan payload = frame.value()->payload;
  if (!connection.message.empty()) {
    const bool is_answer = frame.value()->type == FrameType::kTaken && payload.size() == 1;
    if (is_answer) connection.taken = payload[0] != std::byte{0};
    return connection.End(is_answer ? 0 : EPROTO), false;
  }
  if (frame.value()->type != FrameType::kMember || payload.size() < sizeof(MemberId))
    return connection.End(), false;
  MemberId to = 0;
  std::memcpy(&to, payload.data(), sizeof to);
  const bool is_mine = to == self_ || to == 0;
  const auto* const text = reinterpret_cast<const char*>(payload.data()) + sizeof to;
  if (is_mine) events_.push_back({.text = std::string(text, payload.size() - sizeof to)});
  const auto answer = static_cast<std::byte>(is_mine);
  connection.writer->Append(FrameType::kTaken, {&answer, 1}, connection.out);
  return true;  // who has connected closes first
}

void MemberMail::Flush(Connection& connection) {
  if (connection.out.empty() || connection.is_connecting) return;
  const ssize_t count = send(connection.socket, connection.out.data(), connection.out.size(),
                             MSG_NOSIGNAL | MSG_DONTWAIT);
  // What breaks a connection is found by reading.
  if (count > 0) connection.out.erase(connection.out.begin(), connection.out.begin() + count);
}

void MemberMail::Send(const Member& to, std::string text) {
  if (text.size() > kMostTextBytes) return;  // of more members than a job can have
  Outgoing& outgoing = outgoing_[{to.id, to.id == 0 ? to.address : ""}];
  outgoing.to = to;
  outgoing.texts.push_back(std::move(text));
  if (outgoing.connection != nullptr) return;
  outgoing.where = AddressesOf(to.address);
  Connect(outgoing);
}

// With no address left the connection stands for the failure, see DropEnded.
void MemberMail::Connect(Outgoing& outgoing) {
  const SocketAddress address =
      outgoing.next < outgoing.where.size() ? outgoing.where[outgoing.next] : SocketAddress();
  const int64_t now_ns = SteadyClock().NowNs();
  if (outgoing.next++ == 0) outgoing.until_ns = now_ns + kAnswerNs;
  const int socket =
      ::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
  const int error = socket < 0 ? errno : 0;
  const int one = 1;
  if (address.family() == AF_INET6)  // else the socket does not keep what ICMPv6 says: WhyNot
    (void)setsockopt(socket, IPPROTO_IPV6, IPV6_RECVERR, &one, sizeof one);
  outgoing.connection = std::make_unique<Connection>(
      socket, Handshake::Connect(party_, {.role = StreamRole::kMember}, party_.rank));
  Connection& connection = *outgoing.connection;
  const auto count = static_cast<int64_t>(std::max<size_t>(outgoing.where.size(), 1));
  connection.deadline_ns = std::min(now_ns + kAnswerNs / count, outgoing.until_ns);
  connection.connected_until_ns = outgoing.until_ns;
  connection.message.assign(reinterpret_cast<const char*>(&outgoing.to.id), sizeof(MemberId));
  connection.message += outgoing.texts.front();
  connection.is_connecting = true;
  if (error != 0) return connection.End(error);
  if (connect(socket, address.data(), address.size()) != 0 && errno != EINPROGRESS)
    connection.End(WhyNot(socket, errno));
}

// The outcome of a connection that has ended, and the next one.
void MemberMail::Settle(Outgoing& outgoing) {
  Connection& connection = *outgoing.connection;
  if (connection.taken == std::optional(true)) {
    events_.push_back({Event::Kind::kDelivered, outgoing.to, std::move(outgoing.texts.front())});
    outgoing.texts.pop_front();
    outgoing.next = 0;
    outgoing.is_gone = true;
    outgoing.error.clear();
    if (!outgoing.texts.empty()) Connect(outgoing);
    return;
  }
  const Refusal refusal = connection.handshake.refusal();
  const bool is_other = connection.taken == std::optional(false);
  outgoing.is_gone = outgoing.is_gone && (connection.error == ECONNREFUSED || is_other);
  if (outgoing.next <= outgoing.where.size()) {
    const std::string why = is_other                    ? "another process listens there"
                            : refusal != Refusal::kNone ? Describe(refusal)
                            : connection.error == 0     ? "the connection was closed"
                                                        : std::strerror(connection.error);
    outgoing.error += (outgoing.error.empty() ? "" : "; ") +
                      outgoing.where[outgoing.next - 1].ToString() + ": " + why;
  }
  const bool has_time = SteadyClock().NowNs() < outgoing.until_ns;
  if (outgoing.next < outgoing.where.size() && has_time) return Connect(outgoing);
  const bool is_gone =
      outgoing.next >= outgoing.where.size() && outgoing.is_gone && !outgoing.where.empty();
  events_.push_back({is_gone ? Event::Kind::kGone : Event::Kind::kLost, outgoing.to,
                     outgoing.error.empty() ? "it has no address" : outgoing.error});
  outgoing.texts.clear();
}

void MemberMail::DropEnded() {
  std::erase_if(incoming_, [](const auto& one) { return one->has_ended; });
  for (auto& [to, outgoing] : outgoing_) {
    while (!outgoing.texts.empty() && outgoing.connection->has_ended) Settle(outgoing);
  }
  std::erase_if(outgoing_, [](const auto& one) { return one.second.texts.empty(); });
}

}  // namespace farandole
