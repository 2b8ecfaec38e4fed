#include "coordinator/control/host_transport.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/control/byte_ring.h"
#include "core/clock.h"

namespace farandole {
namespace {

constexpr size_t kMostRingBytes = 64 * 1024;
constexpr size_t kLeastRingBytes = 1024;
constexpr size_t kRingBytesOfRank = 128 * 1024;
// Through its leader a rank learns of what happens on other hosts. Should the leader be stopped,
// the others' final error comes over MPI, for which a rank that waits looks so often.
constexpr int64_t kAroundLeaderNs = 100 * kNsPerMs;

size_t RingBytes(size_t ranks) {
  return std::clamp(kRingBytesOfRank / std::bit_ceil(ranks), kLeastRingBytes, kMostRingBytes);
}

/// What a rank's peers on the host know of it, and who of them has sent it something: a bit for
/// each, by position. In shared memory; zero at first.
struct Presence {
  alignas(64) std::atomic<uint32_t> attached;  // has a transport: its Allgathers have ended
};
struct Pending {
  alignas(64) std::atomic<uint64_t> bits;
};

size_t Words(size_t ranks) { return (ranks + 63) / 64; }

/// Where things are in the mailboxes: the flight recorders' rings, which are found from outside by
/// their first word; each rank's presence, who has sent each rank something, the
/// rings by receiver and sender, and each rank's pulse.
class Mailboxes {
 public:
  explicit Mailboxes(const HostMemory& memory)
      : memory_(memory.mailboxes()), ranks_(memory.ranks().size()) {}
  FlightRing& FlightOf(size_t rank) const { return reinterpret_cast<FlightRing*>(memory_)[rank]; }
  Presence& PresenceOf(size_t rank) const {
    return reinterpret_cast<Presence*>(memory_ + ranks_ * sizeof(FlightRing))[rank];
  }
  Pending* PendingOf(size_t rank) const {
    return reinterpret_cast<Pending*>(memory_ + BeforePendings(ranks_)) + rank * Words(ranks_);
  }
  ByteRing Ring(size_t to, size_t from) const {
    const size_t one = ByteRing::Bytes(RingBytes(ranks_));
    return {memory_ + BeforeRings(ranks_) + (to * ranks_ + from) * one, RingBytes(ranks_)};
  }
  std::span<Pulse> Pulses() const {
    return {reinterpret_cast<Pulse*>(memory_ + BeforePulses(ranks_)), ranks_};
  }
  static size_t BeforePulses(size_t ranks) {
    return BeforeRings(ranks) + ranks * ranks * ByteRing::Bytes(RingBytes(ranks));
  }
  static size_t BeforeRings(size_t ranks) {
    return BeforePendings(ranks) + ranks * Words(ranks) * sizeof(Pending);
  }
  static size_t BeforePendings(size_t ranks) {
    return ranks * (sizeof(FlightRing) + sizeof(Presence));
  }

 private:
  std::byte* const memory_;
  const size_t ranks_;
};

using Header = uint32_t;  // a message's length
constexpr Header kMostBytes = INT32_MAX;

/// The way to a peer.
struct Outbox {
  ByteRing ring;
  std::atomic<uint64_t>& pending;       // of the peer, with the bit of this rank
  Doorbell& bell;                       // of the peer
  std::vector<std::byte> waiting = {};  // what the ring had no room for
  size_t sent = 0;                      // of `waiting`
  bool is_gone = false;                 // the peer, and with it who reads
};

/// The way from a peer, and the message that is coming in.
struct Inbox {
  ByteRing ring;
  Header length = 0;
  size_t received = 0;                  // bytes of the header and then of the message
  std::vector<std::byte> message = {};  // only grows
};

class HostTransport final : public Transport {
 public:
  HostTransport(std::shared_ptr<Transport> between_hosts, std::shared_ptr<HostMemory> memory,
                const Liveness* liveness)
      : between_hosts_(std::move(between_hosts)),
        memory_(std::move(memory)),
        liveness_(liveness),
        boxes_(*memory_),
        position_(static_cast<size_t>(size()), kElsewhere),
        unread_(Words(ranks().size())) {
    for (size_t i = 0; i < ranks().size(); ++i) position_[Index(ranks()[i])] = static_cast<int>(i);
    me_ = static_cast<size_t>(position_[Index(rank())]);
    for (size_t i = 0; i < ranks().size(); ++i) {
      outboxes_.push_back(
          {boxes_.Ring(i, me_), boxes_.PendingOf(i)[me_ / 64].bits, *memory_->bell(ranks()[i])});
      inboxes_.push_back({boxes_.Ring(me_, i)});
    }
    spans_hosts_ = links_hosts_ = static_cast<int>(ranks().size()) < size();
    boxes_.PresenceOf(me_).attached.store(1);
    for (const Outbox& out : outboxes_) out.bell.Ring();
  }

  int rank() const override { return between_hosts_->rank(); }
  int size() const override { return between_hosts_->size(); }
  const char* name() const override { return "shm"; }

  Status Send(int to, std::span<const std::byte> data) override {
    if (!IsHere(to)) return between_hosts_->Send(to, data);
    const auto position = static_cast<size_t>(position_[Index(to)]);
    if (data.size() > kMostBytes) {
      return InvalidArgument("control message of " + std::to_string(data.size()) + " bytes");
    }
    Outbox& out = outboxes_[position];
    if (out.is_gone) return {};
    const auto length = static_cast<Header>(data.size());
    const std::span<const std::byte> head = std::as_bytes(std::span(&length, 1));
    const size_t taken = out.waiting.empty() ? out.ring.Write(head, data) : 0;
    if (taken > 0) Notify(out);
    if (taken < head.size() + data.size()) Keep(out, head, data, taken);
    return {};
  }

  Result<std::optional<Incoming>> Poll() override {
    if (waiting_ > 0) SendWaiting();
    if (liveness_ != nullptr && liveness_->ends() != ends_) NoteEnds();
    for (size_t word = 0; word < unread_.size(); ++word) {
      std::atomic<uint64_t>& pending = boxes_.PendingOf(me_)[word].bits;
      if (pending.load(std::memory_order_relaxed) != 0) unread_[word] |= pending.exchange(0);
      while (unread_[word] != 0) {
        const auto bit = static_cast<size_t>(std::countr_zero(unread_[word]));
        Result<std::optional<Incoming>> taken = Take(64 * word + bit);
        if (!taken.ok() || taken.value()) return taken;
        unread_[word] &= unread_[word] - 1;
      }
    }
    if (NeedsMpi()) return between_hosts_->Poll();
    return std::optional<Incoming>();
  }

  // MPI is polled by who has links to other hosts, and by everybody until all ranks of this host
  // have ended their start, in which MPI may still have to move answers to them along.
  int64_t PollAfterNs(bool busy, int64_t idle_ns) const override {
    if (links_hosts_ || !HasStarted() || !between_hosts_->Drained()) {
      return between_hosts_->PollAfterNs(busy, idle_ns);
    }
    return spans_hosts_ && busy ? kAroundLeaderNs : kByDoorbell;
  }

  Result<std::vector<std::string>> Allgather(const std::string& mine, int64_t timeout_ns) override {
    return between_hosts_->Allgather(mine, timeout_ns);
  }

  void SetNeighbours(std::span<const int> neighbours) override {
    std::vector<int> elsewhere;
    std::ranges::copy_if(neighbours, std::back_inserter(elsewhere),
                         [this](int neighbour) { return !IsHere(neighbour); });
    links_hosts_ = !elsewhere.empty();
    between_hosts_->SetNeighbours(elsewhere);
  }

  void Leave() override {
    boxes_.Pulses()[me_].left.store(1);
    between_hosts_->Leave();
  }

  bool Drained() const override { return waiting_ == 0 && between_hosts_->Drained(); }

 private:
  static constexpr int kElsewhere = -1;
  static size_t Index(int rank) { return static_cast<size_t>(rank); }
  const std::vector<int>& ranks() const { return memory_->ranks(); }
  bool IsHere(int rank) const { return position_[Index(rank)] != kElsewhere; }

  bool NeedsMpi() const { return spans_hosts_ || !HasStarted() || !between_hosts_->Drained(); }

  bool HasStarted() const {
    while (started_ < ranks().size() && boxes_.PresenceOf(started_).attached.load() != 0) {
      ++started_;
    }
    return started_ == ranks().size();
  }

  // The bit comes after the bytes, and the receiver takes it before it reads them.
  void Notify(Outbox& out) {
    out.pending.fetch_or(uint64_t{1} << me_ % 64);
    out.bell.Ring();
  }

  // Behind what waits already: the order is kept.
  void Keep(Outbox& out, std::span<const std::byte> head, std::span<const std::byte> body,
            size_t taken) {
    if (out.waiting.empty()) ++waiting_;
    const size_t of_head = std::min(taken, head.size());
    out.waiting.insert(out.waiting.end(), head.begin() + static_cast<ptrdiff_t>(of_head),
                       head.end());
    out.waiting.insert(out.waiting.end(), body.begin() + static_cast<ptrdiff_t>(taken - of_head),
                       body.end());
    SendWaiting(out);
  }

  void SendWaiting() {
    for (Outbox& out : outboxes_) {
      if (!out.waiting.empty()) SendWaiting(out);
    }
  }

  // Until all has left or the peer is asked to ring when it has made room.
  void SendWaiting(Outbox& out) {
    do {
      const size_t taken = out.ring.Write({}, std::span(out.waiting).subspan(out.sent));
      out.sent += taken;
      if (taken > 0) Notify(out);
      if (out.sent == out.waiting.size()) return DropWaiting(out);
      if (out.sent >= kMostRingBytes) {  // else it would grow as long as something waits
        out.waiting.erase(out.waiting.begin(),
                          out.waiting.begin() + static_cast<ptrdiff_t>(std::exchange(out.sent, 0)));
      }
    } while (!out.ring.AskForRoom());
  }

  void DropWaiting(Outbox& out) {
    out.waiting.clear();
    out.sent = 0;
    --waiting_;
  }

  // The next message of a peer, if it is complete.
  Result<std::optional<Incoming>> Take(size_t from) {
    Inbox& in = inboxes_[from];
    const bool complete = Receive(in);
    if (in.length > kMostBytes) {
      return Internal("control message from rank " + std::to_string(ranks()[from]) + ": " +
                      std::to_string(in.length) + " bytes");
    }
    if (in.ring.TakeRequest()) outboxes_[from].bell.Ring();
    if (!complete) return std::optional<Incoming>();
    in.received = 0;
    return std::optional(Incoming{ranks()[from], {in.message.data(), in.length}});
  }

  // Goes on with the message that is coming in. @return Whether it is complete.
  static bool Receive(Inbox& in) {
    const std::span<std::byte> head = std::as_writable_bytes(std::span(&in.length, 1));
    if (in.received < head.size()) {
      in.received += in.ring.Read(head.subspan(in.received));
      if (in.received < head.size() || in.length > kMostBytes) return false;
      if (in.message.size() < in.length) in.message.resize(in.length);
    }
    const size_t before = in.received - head.size();
    in.received += in.ring.Read(std::span(in.message.data(), in.length).subspan(before));
    return in.received == head.size() + in.length;
  }

  // What they have sent before is read once more, as who dies may not come to say that it is there.
  void NoteEnds() {
    ends_ = liveness_->ends();
    for (size_t i = 0; i < ranks().size(); ++i) {
      Outbox& out = outboxes_[i];
      if (out.is_gone || !liveness_->HasEnded(ranks()[i])) continue;
      out.is_gone = true;
      unread_[i / 64] |= uint64_t{1} << i % 64;
      if (!out.waiting.empty()) DropWaiting(out);
    }
  }

  const std::shared_ptr<Transport> between_hosts_;  // MPI
  const std::shared_ptr<HostMemory> memory_;
  const Liveness* const liveness_;
  const Mailboxes boxes_;
  std::vector<int> position_;     // by rank: among the ranks of this host, or kElsewhere
  size_t me_ = 0;                 // the position of this rank
  bool spans_hosts_ = false;      // there are ranks elsewhere
  bool links_hosts_ = false;      // and neighbours of this rank may be among them
  std::vector<Outbox> outboxes_;  // by position
  std::vector<Inbox> inboxes_;    // by position
  std::vector<uint64_t> unread_;  // whose rings may hold something: a bit for each position
  int waiting_ = 0;               // outboxes that have something waiting
  int ends_ = 0;                  // of processes, that have been noted
  mutable size_t started_ = 0;    // so many ranks, in order, are known to have ended their start
};

}  // namespace

size_t MailboxBytes(size_t ranks) { return Mailboxes::BeforePulses(ranks) + ranks * sizeof(Pulse); }

std::vector<FlightRing*> FlightsOf(const HostMemory& memory) {
  std::vector<FlightRing*> rings;
  for (size_t i = 0; i < memory.ranks().size(); ++i)
    rings.push_back(&Mailboxes(memory).FlightOf(i));
  return rings;
}

std::span<Pulse> PulsesOf(const HostMemory& memory) { return Mailboxes(memory).Pulses(); }

std::unique_ptr<Transport> MakeHostTransport(std::shared_ptr<Transport> between_hosts,
                                             std::shared_ptr<HostMemory> memory,
                                             const Liveness* liveness) {
  return std::make_unique<HostTransport>(std::move(between_hosts), std::move(memory), liveness);
}

}  // namespace farandole
