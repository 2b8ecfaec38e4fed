#include "ops/p2p/tcp/link.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/liveness.h"
#include "ops/data_plane.h"
#include "ops/p2p/tcp/stream.h"

namespace farandole {
namespace {

/// A sleeper takes some 50 us to wake; a peer that reduces a chunk answers in less than this.
constexpr int64_t kHotNs = kNsPerMs;
constexpr int64_t kGentlePollNs = 50 * kNsPerUs;
/// With several sockets to a rank, longer messages take them in turn.
constexpr int64_t kStripedBytes = 32 * 1024;
/// No message is longer: it is as much as a set has of staging memory.
constexpr int64_t kMostBytes = 16 << 20;
constexpr size_t kRounds = 2;

class TcpLink;

/// How far `a` is ahead of `b`; counters wrap.
int Ahead(uint16_t a, uint16_t b) { return static_cast<int16_t>(static_cast<uint16_t>(a - b)); }

/// A message from a rank, from what comes first, its receive or its header, to the other and its
/// end.
struct Incoming {
  TcpLink* link = nullptr;  ///< Whose receive is posted; nullptr: none is.
  int slot = 0;
  P2pLink::Group round = P2pLink::Group::kContributions;
  int member = 0;  ///< Of the link: the sender.
  std::byte* data = nullptr;
  int64_t room = 0;
  int64_t bytes = -1;  ///< From the header; -1: it has not come.
  bool is_complete = false;
  std::unique_ptr<std::byte[]> aside;  ///< Where the payload goes that came first.

  bool is_free() const { return link == nullptr && bytes < 0; }
};

/// Messages of one round between this rank and another in one set, or in sets one after the other
/// that share a number: counting goes on.
struct Counts {
  uint16_t sent = 0;      ///< Messages given to Send.
  uint16_t granted = 0;   ///< Receives that the other end has reported as posted.
  uint16_t posted = 0;    ///< Receives given to Receive.
  uint16_t reported = 0;  ///< Of those, reported to the other end.
};

/// What is in flight of them, besides.
struct Channel : Counts {
  /// By sequence. Receives that are not complete are the last kLinkSlots posted, since each has a
  /// slot, and so many messages may come ahead.
  std::array<Incoming, 2 * kLinkSlots> incoming;
  /// Messages that would be too far ahead, in order: no more than there are slots.
  std::vector<TcpStream::Message> held;

  Incoming& At(uint16_t sequence) { return incoming[sequence % incoming.size()]; }
  bool MaySend(uint16_t sequence) const { return Ahead(sequence, granted) < kLinkSlots; }
  bool is_idle() const { return held.empty() && std::ranges::all_of(incoming, &Incoming::is_free); }
};

/// Of one set.
struct Channels : std::array<Channel, kRounds> {
  int links = 0;  ///< That use them.
};

/// Another rank: the sockets to it, and the messages of all sets.
///
/// Lifetime: from the first link of a set with the rank to the end of the plane.
class TcpPeer final : public TcpStream::Receiver {
 public:
  TcpPeer(DataStreams& streams, int plane, int rank)
      : streams_(streams), id_{plane, rank, 0}, sockets_(static_cast<size_t>(streams.streams())) {}
  ~TcpPeer();

  int rank() const { return id_.peer; }
  const Status& failure() const { return failure_; }
  /// For a link of a set, by uid modulo kMaxLiveSets, until Close.
  Channels& Open(uint16_t set);
  void Close(uint16_t set);

  Status Send(Channels& channels, const TcpStream::Message& message);
  Status Receive(Channels& channels, size_t round, const Incoming& posted);
  /// Moves what can be moved. @return Whether there was anything, a failure included.
  bool Move(Channels& channels, uint16_t set);
  /// Rings when Move has something to do. @return false if that cannot be had.
  bool Watch();
  /// Ends what a link has in flight: nothing of its memory is used afterwards.
  void Cancel(TcpLink& link, Channels& channels);

 private:
  Result<std::byte*> OnHeader(const TcpHeader& header) override;
  void OnReceived(const TcpHeader& header) override;

  Channels& ChannelsOf(uint16_t set);
  void DropIfIdle(uint16_t set);
  void Queue(Channels& channels, TcpStream::Message message);
  Status Connect();
  Result<bool> MoveAll();
  void TakeReport(Channels& channels, const TcpHeader& header);
  void Finish(Incoming& incoming);
  Status Fail(const Status& status);
  Status Broken(const std::string& what) const;
  bool is_needed() const {
    return awaited_ > 0 || std::ranges::any_of(sockets_, &TcpStream::has_output);
  }

  DataStreams& streams_;
  const StreamId id_;  // of the first socket
  std::vector<TcpStream> sockets_;
  size_t next_socket_ = 0;                                  // for a long message
  std::unordered_map<uint16_t, Channels> sets_;             // with a link, or messages on their way
  std::vector<std::array<Counts, kRounds>> counts_of_set_;  // of the others
  int awaited_ = 0;  // receives posted, and messages held, that are not complete
  Status failure_;
};

/// The ranks of a plane that links were made for.
struct TcpPeers {
  TcpPeers(DataStreams& data_streams, int number, Doorbell* doorbell)
      : streams(data_streams), plane(number), bell(doorbell) {}

  DataStreams& streams;
  const int plane;
  Doorbell* const bell;  ///< May be nullptr.
  int64_t moved_ns = 0;  ///< When anything moved last.
  std::unordered_map<int, std::unique_ptr<TcpPeer>> by_rank;

  TcpPeer* Get(int rank) {
    std::unique_ptr<TcpPeer>& peer = by_rank[rank];
    if (peer == nullptr) peer = std::make_unique<TcpPeer>(streams, plane, rank);
    return peer.get();
  }
};

class TcpLink final : public P2pLink, public TcpStream::Sender {
 public:
  TcpLink(std::shared_ptr<TcpPeers> peers, uint32_t uid, std::span<const int> ranks);
  ~TcpLink() override;

  Status Send(int slot, Round round, int to, const std::byte* data, int64_t bytes) override;
  Status Receive(int slot, Round round, int from, std::byte* data, int64_t bytes) override;
  Result<bool> AllComplete(int slot, Group group) override;
  int64_t BytesFrom(int member) const override { return last_bytes_[Member(member)]; }
  int64_t PollAfterNs() override;
  Doorbell* bell() const override { return peers_->bell; }
  bool Cancel() override;

  void OnSent(int slot) override { Complete(slot, Group::kSends); }
  void OnReceived(int slot, Group group, int member, int64_t bytes) {
    slots_[Slot(slot)].bytes[static_cast<size_t>(group)][Member(member)] = bytes;
    Complete(slot, group);
  }

 private:
  struct SetMember {
    TcpPeer* rank = nullptr;  ///< nullptr: this rank.
    Channels* channels = nullptr;
  };
  struct SlotState {
    std::array<int, kGroups> pending{};
    std::array<std::vector<int64_t>, kRounds> bytes;  ///< By member.
  };

  static size_t Slot(int slot) { return static_cast<size_t>(slot); }
  static size_t Member(int member) { return static_cast<size_t>(member); }
  int& Pending(int slot, Group group) {
    return slots_[Slot(slot)].pending[static_cast<size_t>(group)];
  }
  void Complete(int slot, Group group);
  bool Watch();

  const std::shared_ptr<TcpPeers> peers_;
  const uint16_t set_;
  std::vector<SetMember> members_;
  std::array<SlotState, kLinkSlots> slots_;
  std::span<const int64_t> last_bytes_;  // of the group that was complete last
  bool has_news_ = false;                // a message is complete since the last poll
  bool sleeps_ = false;                  // until the bell rings
};

TcpPeer::~TcpPeer() {
  for (const TcpStream& stream : sockets_) {
    if (stream.is_connected()) streams_.Unwatch(stream.socket());
  }
}

Channels& TcpPeer::Open(uint16_t set) {
  Channels& channels = ChannelsOf(set);
  ++channels.links;
  return channels;
}

void TcpPeer::Close(uint16_t set) {
  --ChannelsOf(set).links;
  DropIfIdle(set);
}

Channels& TcpPeer::ChannelsOf(uint16_t set) {
  const auto [found, is_new] = sets_.try_emplace(set);
  if (is_new && set < counts_of_set_.size()) {
    const std::array<Counts, kRounds>& counts = counts_of_set_[set];
    for (size_t round = 0; round < kRounds; ++round)
      static_cast<Counts&>(found->second[round]) = counts[round];
  }
  return found->second;
}

/// A job may use every number in turn, so of a set that has ended no more than its counts are kept.
void TcpPeer::DropIfIdle(uint16_t set) {
  const Channels& channels = sets_.at(set);
  if (channels.links > 0 || !std::ranges::all_of(channels, &Channel::is_idle)) return;
  if (set >= counts_of_set_.size()) counts_of_set_.resize(size_t{set} + 1);
  std::ranges::copy(channels, counts_of_set_[set].begin());
  sets_.erase(set);
}

Status TcpPeer::Send(Channels& channels, const TcpStream::Message& message) {
  if (!failure_.ok()) return failure_;
  Channel& channel = channels[message.header.kind];
  TcpStream::Message numbered = message;
  numbered.header.sequence = channel.sent++;
  if (!channel.MaySend(numbered.header.sequence)) {
    channel.held.push_back(numbered);
    ++awaited_;
    return Status();
  }
  Queue(channels, numbered);
  if (Status connected = Connect(); !connected.ok()) return Fail(connected);
  for (TcpStream& stream : sockets_) {
    const Result<bool> written = stream.Write();
    if (!written.ok()) return Fail(written.status());
  }
  return Status();
}

/// Behind what is queued already; Write moves it.
void TcpPeer::Queue(Channels& channels, TcpStream::Message message) {
  for (size_t round = 0; round < kRounds; ++round) {
    channels[round].reported = message.header.posted[round] = channels[round].posted;
  }
  const bool is_long = message.header.bytes >= kStripedBytes;
  if (is_long) next_socket_ = (next_socket_ + 1) % sockets_.size();
  sockets_[is_long ? next_socket_ : 0].Queue(message);
}

Status TcpPeer::Receive(Channels& channels, size_t round, const Incoming& posted) {
  if (!failure_.ok()) return failure_;
  Channel& channel = channels[round];
  Incoming& incoming = channel.At(channel.posted++);
  if (incoming.link != nullptr) return Internal("tcp: a slot was used before it was complete");
  incoming.link = posted.link;
  incoming.slot = posted.slot;
  incoming.round = posted.round;
  incoming.member = posted.member;
  incoming.data = posted.data;
  incoming.room = posted.room;
  ++awaited_;
  if (incoming.bytes > incoming.room) return Fail(Broken("a message of too many bytes"));
  if (incoming.is_complete) Finish(incoming);
  return Status();
}

/// A report alone is for one-sided traffic: where messages go both ways, they take it along.
bool TcpPeer::Move(Channels& channels, uint16_t set) {
  if (!failure_.ok()) return false;
  const auto is_due = [](const Channel& channel) {
    return Ahead(channel.posted, channel.reported) >= kLinkSlots / 2;
  };
  if (std::ranges::any_of(channels, is_due)) {
    TcpHeader report;
    report.set = set;
    report.kind = TcpHeader::kNoMessage;
    Queue(channels, {report});
  }
  if (!is_needed()) return false;
  const Result<bool> moved = MoveAll();
  if (!moved.ok()) (void)Fail(moved.status());  // which the next AllComplete returns
  return !moved.ok() || moved.value();
}

/// Reads first, because what is reported releases messages.
Result<bool> TcpPeer::MoveAll() {
  FARANDOLE_RETURN_IF_ERROR(Connect());
  bool moved = false;
  for (TcpStream& stream : sockets_) {
    const Result<bool> read = awaited_ > 0 ? stream.Read(*this) : false;
    if (!read.ok()) return read;
    moved |= read.value();
  }
  for (TcpStream& stream : sockets_) {
    const Result<bool> written = stream.Write();
    if (!written.ok()) return written;
    moved |= written.value();
  }
  return moved;
}

Status TcpPeer::Connect() {
  StreamId id = id_;
  for (TcpStream& stream : sockets_) {
    if (!stream.is_connected()) {
      const Result<std::optional<int>> socket = streams_.Take(id);
      if (!socket.ok()) return socket.status();
      if (socket.value()) stream.Connect(*socket.value());
    }
    ++id.number;
  }
  return Status();
}

bool TcpPeer::Watch() {
  if (!failure_.ok() || !is_needed()) return true;
  return std::ranges::all_of(sockets_, [this](const TcpStream& stream) {
    return !stream.is_connected() || streams_.Watch(stream.socket(), stream.has_output()).ok();
  });
}

/// The header comes from another process: nothing in it is taken for granted.
Result<std::byte*> TcpPeer::OnHeader(const TcpHeader& header) {
  const bool is_message = header.kind != TcpHeader::kNoMessage;
  if (header.set >= kMaxLiveSets || header.kind > TcpHeader::kNoMessage ||
      header.bytes > kMostBytes || (!is_message && header.bytes > 0)) {
    return Broken("a header that means nothing");
  }
  Channels& channels = ChannelsOf(header.set);
  for (size_t round = 0; round < kRounds; ++round) {
    if (Ahead(header.posted[round], channels[round].sent) > kLinkSlots) {
      return Broken("more receives than there are slots");
    }
  }
  TakeReport(channels, header);
  if (!is_message) {
    DropIfIdle(header.set);
    return static_cast<std::byte*>(nullptr);
  }
  Channel& channel = channels[header.kind];
  Incoming& incoming = channel.At(header.sequence);
  const int ahead = Ahead(header.sequence, channel.posted);
  const bool is_posted = ahead < 0 && ahead >= -kLinkSlots && incoming.link != nullptr;
  if (incoming.bytes >= 0 || (!is_posted && (ahead < 0 || ahead >= kLinkSlots))) {
    return Broken("a message that is not expected");
  }
  if (is_posted && header.bytes > incoming.room) return Broken("a message of too many bytes");
  incoming.bytes = header.bytes;
  if (is_posted) return incoming.data;
  incoming.aside = std::make_unique<std::byte[]>(header.bytes);
  return incoming.aside.get();
}

/// With several sockets, reports come in any order.
void TcpPeer::TakeReport(Channels& channels, const TcpHeader& header) {
  for (size_t round = 0; round < kRounds; ++round) {
    Channel& channel = channels[round];
    if (Ahead(header.posted[round], channel.granted) <= 0) continue;
    channel.granted = header.posted[round];
    size_t released = 0;
    for (; released < channel.held.size(); ++released) {
      if (!channel.MaySend(channel.held[released].header.sequence)) break;
      Queue(channels, channel.held[released]);
      --awaited_;
    }
    channel.held.erase(channel.held.begin(),
                       channel.held.begin() + static_cast<std::ptrdiff_t>(released));
  }
}

void TcpPeer::OnReceived(const TcpHeader& header) {
  if (header.kind == TcpHeader::kNoMessage) return;
  Incoming& incoming = ChannelsOf(header.set)[header.kind].At(header.sequence);
  incoming.is_complete = true;
  if (incoming.link != nullptr) Finish(incoming);
}

void TcpPeer::Finish(Incoming& incoming) {
  Incoming done = std::exchange(incoming, Incoming());
  if (done.aside != nullptr && done.bytes > 0) {
    std::memcpy(done.data, done.aside.get(), static_cast<size_t>(done.bytes));
  }
  --awaited_;
  done.link->OnReceived(done.slot, done.round, done.member, done.bytes);
}

void TcpPeer::Cancel(TcpLink& link, Channels& channels) {
  for (TcpStream& stream : sockets_) stream.Forget(link);
  for (Channel& channel : channels) {
    awaited_ -= static_cast<int>(channel.held.size());
    channel.held.clear();
    for (Incoming& incoming : channel.incoming) {
      if (incoming.link != &link) continue;
      --awaited_;
      incoming.link = nullptr;
      if (incoming.bytes < 0 || incoming.aside != nullptr) continue;
      incoming.aside = std::make_unique<std::byte[]>(static_cast<size_t>(incoming.bytes));
      for (TcpStream& stream : sockets_) stream.Redirect(incoming.data, incoming.aside.get());
    }
  }
}

/// For good: what is queued goes nowhere any more.
Status TcpPeer::Fail(const Status& status) {
  if (!status.facts().ranks.empty()) return failure_ = status;  // the hub knows more
  if (status.code() == Code::kResourceExhausted) {              // this rank's, not the peer's
    return failure_ = FailedOn(streams_.rank(), status);
  }
  const std::string& why = status.message();
  if (status.code() == Code::kUnavailable) {
    return failure_ = LostConnection(rank(), streams_.rank(), "data connection", why);
  }
  const std::string text = "data connection to " + RankName(rank()) + ": " + why;
  return failure_ = FailedOn(rank(), Status(status.code(), text));
}

Status TcpPeer::Broken(const std::string& what) const {
  return Internal("rank " + std::to_string(rank()) + " sent " + what);
}

TcpLink::TcpLink(std::shared_ptr<TcpPeers> peers, uint32_t uid, std::span<const int> ranks)
    : peers_(std::move(peers)), set_(static_cast<uint16_t>(uid % kMaxLiveSets)) {
  for (const int rank : ranks) {
    SetMember member;
    if (rank != peers_->streams.rank()) {
      member.rank = peers_->Get(rank);
      member.channels = &member.rank->Open(set_);
    }
    members_.push_back(member);
  }
  for (SlotState& slot : slots_) slot.bytes.fill(std::vector<int64_t>(ranks.size()));
  last_bytes_ = slots_[0].bytes[0];
}

TcpLink::~TcpLink() {
  (void)Cancel();
  for (const SetMember& peer : members_) {
    if (peer.rank != nullptr) peer.rank->Close(set_);
  }
}

Status TcpLink::Send(int slot, Round round, int to, const std::byte* data, int64_t bytes) {
  peers_->moved_ns = SteadyClock().NowNs();
  TcpStream::Message message;
  message.header.set = set_;
  message.header.kind = static_cast<uint8_t>(round);
  message.header.bytes = static_cast<uint32_t>(bytes);
  message.payload = data;
  message.sender = this;
  message.slot = slot;
  ++Pending(slot, Group::kSends);
  const SetMember& peer = members_[Member(to)];
  return peer.rank->Send(*peer.channels, message);
}

Status TcpLink::Receive(int slot, Round round, int from, std::byte* data, int64_t bytes) {
  peers_->moved_ns = SteadyClock().NowNs();
  Incoming posted;
  posted.link = this;
  posted.slot = slot;
  posted.round = static_cast<Group>(round);
  posted.member = from;
  posted.data = data;
  posted.room = bytes;
  ++Pending(slot, posted.round);
  const SetMember& peer = members_[Member(from)];
  return peer.rank->Receive(*peer.channels, static_cast<size_t>(round), posted);
}

Result<bool> TcpLink::AllComplete(int slot, Group group) {
  if (Pending(slot, group) == 0) {
    if (group != Group::kSends) last_bytes_ = slots_[Slot(slot)].bytes[static_cast<size_t>(group)];
    return true;
  }
  for (const SetMember& peer : members_) {
    if (peer.rank != nullptr && !peer.rank->failure().ok()) return peer.rank->failure();
  }
  return false;
}

/// Messages of other sets move along, too: their links are woken.
void TcpLink::Complete(int slot, Group group) {
  --Pending(slot, group);
  has_news_ = true;
  if (sleeps_) peers_->bell->Ring();
  sleeps_ = false;
}

int64_t TcpLink::PollAfterNs() {
  sleeps_ = false;
  bool moved = false;
  for (const SetMember& peer : members_) {
    if (peer.rank != nullptr) moved |= peer.rank->Move(*peer.channels, set_);
  }
  const int64_t now_ns = SteadyClock().NowNs();
  if (moved) peers_->moved_ns = now_ns;
  if (std::exchange(has_news_, false) || now_ns - peers_->moved_ns < kHotNs) return 0;
  if (peers_->bell == nullptr || !Watch()) return kGentlePollNs;
  sleeps_ = true;
  return kByDoorbell;
}

bool TcpLink::Watch() {
  return std::ranges::all_of(
      members_, [](const SetMember& peer) { return peer.rank == nullptr || peer.rank->Watch(); });
}

bool TcpLink::Cancel() {
  for (const SetMember& peer : members_) {
    if (peer.rank != nullptr) peer.rank->Cancel(*this, *peer.channels);
  }
  return true;
}

}  // namespace

P2pLinkFactory MakeTcpLinks(DataStreams& streams, int plane, const LinkOptions& options) {
  const auto peers = std::make_shared<TcpPeers>(streams, plane, options.doorbell);
  return [peers](uint32_t uid, std::span<const int> ranks) {
    return std::make_unique<TcpLink>(peers, uid, ranks);
  };
}

}  // namespace farandole
