#include "coordinator/control/join.h"

#include <algorithm>
#include <map>
#include <optional>
#include <thread>

#include "coordinator/control/gather_text.h"
#include "coordinator/control/wire/bytes.h"

namespace farandole {
namespace {

constexpr size_t kMaxAddresses = 32;  // of a rank
constexpr size_t kMaxAddressText = 64;
constexpr int64_t kFirstNapNs = 20 * kNsPerMs;
constexpr int64_t kMaxNapNs = 500 * kNsPerMs;
constexpr int64_t kTableGraceNs = 2 * kNsPerSecond;  // rank 0's time is up first
constexpr int64_t kFlushNs = 2 * kNsPerSecond;
constexpr size_t kMostNamed = 16;

void PutText(const std::string& text, std::vector<std::byte>& out) {
  Put(static_cast<uint8_t>(text.size()), out);
  for (const char c : text) out.push_back(static_cast<std::byte>(c));
}

void PutAddresses(const std::vector<SocketAddress>& addresses, std::vector<std::byte>& out) {
  const size_t count = std::min(addresses.size(), kMaxAddresses);
  Put(static_cast<uint8_t>(count), out);
  for (size_t i = 0; i < count; ++i) PutText(addresses[i].ToString(), out);
}

Result<std::vector<SocketAddress>> GetAddresses(ByteReader& reader) {
  std::vector<SocketAddress> addresses;
  const auto count = reader.Get<uint8_t>("number of addresses");
  if (count > kMaxAddresses) return Internal("join: too many addresses");
  for (int i = 0; i < count; ++i) {
    std::string text(reader.Get<uint8_t>("length of an address"), ' ');
    if (text.size() > kMaxAddressText) return Internal("join: an address is too long");
    for (char& c : text) c = reader.Get<char>("address");
    Result<SocketAddress> address = ParseSocketAddress(text);
    if (!address.ok()) return Internal("join: " + address.status().message());
    addresses.push_back(address.value());
  }
  return addresses;
}

std::string Seconds(int64_t ns) {
  const int64_t tenths = ns / (kNsPerSecond / 10);
  return std::to_string(tenths / 10) + (tenths % 10 == 0 ? "" : "." + std::to_string(tenths % 10)) +
         " s";
}

// Of the ranks that are not in the table; empty: all are.
std::string Missing(const std::vector<TableEntry>& table, int size) {
  std::string names;
  size_t count = 0;
  size_t at = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (at < table.size() && table[at].rank == rank) {
      ++at;
    } else if (++count <= kMostNamed) {
      names += (names.empty() ? "" : ", ") + RankName(rank);
    }
  }
  if (count > kMostNamed) names += " and " + std::to_string(count - kMostNamed) + " more";
  return names;
}

// Passes the table on to those below `rank` in the tree over the ranks that are in it.
void SendToChildren(StreamHub& hub, const std::vector<TableEntry>& table, ByteSpan encoded) {
  const auto me = std::ranges::find(table, hub.rank(), &TableEntry::rank);
  const auto size = static_cast<int>(table.size());
  const RankRange below = AnswerChildren(static_cast<int>(me - table.begin()), size);
  for (int at = below.first; at < below.last; ++at) {
    (void)hub.Send(table[static_cast<size_t>(at)].rank, FrameType::kTable, encoded);
  }
}

// An address that is valid on one link alone is reached by this host's interface to that link.
void SetPeers(StreamHub& hub, const std::vector<TableEntry>& table, uint32_t scope) {
  for (const TableEntry& entry : table) {
    std::vector<SocketAddress> addresses;
    if (entry.rank == 0) addresses = hub.Peer(0);  // the one that has proven good
    for (const SocketAddress& one : entry.addresses) {
      const SocketAddress address = one.IsLinkLocal() ? one.WithScope(scope) : one;
      if (std::ranges::find(addresses, address) == addresses.end()) addresses.push_back(address);
    }
    hub.SetPeer(entry.rank, std::move(addresses));
  }
}

// An error goes down the tree before this rank ends.
void Flush(StreamHub& hub, const Clock& clock) {
  const int64_t deadline_ns = clock.NowNs() + kFlushNs;
  while (!hub.Drained() && clock.NowNs() < deadline_ns) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kNsPerMs));
  }
}

/// Rank 0's side: who has come.
class Registry {
 public:
  Registry(StreamHub& hub, const std::vector<SocketAddress>& own) : hub_(hub) {
    ranks_[0] = {{0, own}, "", {}};
  }

  bool complete() const { return ranks_.size() == static_cast<size_t>(hub_.size()); }
  const std::string& conflict() const { return conflict_; }

  // A second try of one process is accepted again: the first answer may have been lost.
  void Admit(const HubEvent& event) {
    Result<Registration> came = DecodeRegistration(event.data);
    if (!came.ok()) return Reject(event, came.status().message());
    const std::string where = event.address.ToString();
    const auto [known, is_new] = ranks_.try_emplace(
        event.from, Known{{event.from, came.value().addresses}, where, came.value().instance});
    if (!is_new && known->second.instance != came.value().instance) {
      return Reject(event, RankName(event.from) + " has joined from " + known->second.where +
                               " already; " + where + " says it is " + RankName(event.from) +
                               ", too");
    }
    hub_.SendOnJoin(event.connection, FrameType::kAccepted, {}, true);
  }

  std::vector<TableEntry> Table() const {
    std::vector<TableEntry> table;
    for (const auto& [rank, known] : ranks_) table.push_back(known.entry);
    return table;
  }

 private:
  struct Known {
    TableEntry entry;
    std::string where;
    std::optional<uint64_t> instance;
  };

  void Reject(const HubEvent& event, const std::string& why) {
    conflict_ = why;
    hub_.SendOnJoin(event.connection, FrameType::kRejected, TextBytes(why), true);
  }

  StreamHub& hub_;
  std::map<int, Known> ranks_;
  std::string conflict_;  // the last one
};

/// A rank's side.
class Joiner {
 public:
  using FindRoot = std::function<Result<std::vector<SocketAddress>>()>;
  using Listen = std::function<Result<std::vector<SocketAddress>>(const SocketAddress&)>;

  Joiner(StreamHub& hub, const FindRoot& find_root, const Listen& listen, bool keeps_trying,
         const JoinOptions& options)
      : hub_(hub),
        find_root_(find_root),
        listen_(listen),
        keeps_trying_(keeps_trying),
        options_(options),
        deadline_ns_(options.clock->NowNs() + options.timeout_ns) {
    FillRandom(std::as_writable_bytes(std::span(&registration_.instance, 1)));
  }

  Status Run() {
    for (int64_t nap_ns = kFirstNapNs;; nap_ns = std::min(2 * nap_ns, kMaxNapNs)) {
      Result<bool> accepted = Try();
      if (!accepted.ok()) return accepted.status();
      if (accepted.value()) return AwaitTable();
      const int64_t left_ns = deadline_ns_ - options_.clock->NowNs();
      if (left_ns <= 0) return Late();
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(nap_ns, left_ns)));
    }
  }

 private:
  // @return false if it is worth another try.
  Result<bool> Try() {
    Result<std::vector<SocketAddress>> root = find_root_();
    if (root.status().code() == Code::kResourceExhausted) return root.status();
    if (!root.ok()) return reason_ = root.status().message(), false;
    hub_.Join(root.value());
    const std::optional<HubEvent> opened = NextOfJoin();
    if (!opened) return false;
    if (opened->kind != HubEvent::Kind::kJoined) return Refused(*opened);
    if (registration_.addresses.empty()) {
      Result<std::vector<SocketAddress>> own = listen_(opened->address);
      if (!own.ok()) return own.status();
      registration_.addresses = own.value();
      scope_ = opened->address.scope();
    }
    const std::string text = EncodeRegistration(registration_);
    hub_.SendOnJoin(opened->connection, FrameType::kRegister, TextBytes(text), false);
    const std::optional<HubEvent> answer = NextOfJoin(opened->connection);
    if (!answer) return false;
    if (answer->kind != HubEvent::Kind::kFrame) return reason_ = answer->status.message(), false;
    if (answer->type == FrameType::kRejected) return InvalidArgument(TextOf(answer->data));
    return true;
  }

  Result<bool> Refused(const HubEvent& event) {
    if (event.status.code() == Code::kResourceExhausted) return event.status;
    reason_ = event.status.message();
    const bool differs = event.refusal == Refusal::kOtherVersion ||
                         event.refusal == Refusal::kOtherJob || event.refusal == Refusal::kWrongKey;
    if (differs && !keeps_trying_) {
      return Mismatch(reason_ + "; is that rank 0 of the same job?");
    }
    return false;
  }

  // The end of a stream to rank 0 is news of that stream alone.
  std::optional<HubEvent> Next(int64_t deadline_ns, uint64_t connection = 0) {
    while (hub_.WaitForEvent(deadline_ns)) {
      std::optional<HubEvent> event = hub_.Next();
      if (!event) continue;
      const bool is_old = event->kind == HubEvent::Kind::kLost && event->connection != 0 &&
                          event->connection != connection;
      if (!is_old) return event;
    }
    return std::nullopt;
  }

  // Frames of ranks that have the table already may overtake rank 0's answer.
  std::optional<HubEvent> NextOfJoin(uint64_t connection = 0) {
    for (;;) {
      std::optional<HubEvent> event = Next(deadline_ns_, connection);
      const bool is_early =
          event && event->kind == HubEvent::Kind::kFrame && event->connection == 0;
      if (!is_early) return event;
      early_.push_back(std::move(*event));
    }
  }

  Status Late() const {
    return Timeout(RankName(hub_.rank()) + " did not reach rank 0 at " + options_.where +
                   " within " + Seconds(options_.timeout_ns) +
                   (reason_.empty() ? "" : ": " + reason_));
  }

  Status AwaitTable() {
    hub_.PutBack(std::exchange(early_, {}));
    for (;;) {
      std::optional<HubEvent> event = Next(deadline_ns_ + kTableGraceNs);
      if (!event) break;
      if (event->kind == HubEvent::Kind::kLost) return event->status;
      if (event->type != FrameType::kTable) {
        early_.push_back(std::move(*event));
        continue;
      }
      Result<std::vector<TableEntry>> table = DecodeTable(event->data, hub_.size());
      if (!table.ok()) return table.status();
      SetPeers(hub_, table.value(), scope_);
      SendToChildren(hub_, table.value(), event->data);
      const std::string missing = Missing(table.value(), hub_.size());
      if (missing.empty()) return hub_.PutBack(std::move(early_)), Status();
      Flush(hub_, *options_.clock);
      return Timeout(missing + " did not join rank 0 at " + options_.where + " in time");
    }
    return Timeout(RankName(hub_.rank()) + " has joined rank 0 at " + options_.where +
                   ", but not all ranks have within " + Seconds(options_.timeout_ns));
  }

  StreamHub& hub_;
  const FindRoot& find_root_;
  const Listen& listen_;
  const bool keeps_trying_;
  const JoinOptions& options_;
  const int64_t deadline_ns_;
  Registration registration_;
  uint32_t scope_ = 0;
  std::string reason_;           // of the last try
  std::vector<HubEvent> early_;  // frames of ranks that have the table already
};

}  // namespace

std::string EncodeRegistration(const Registration& registration) {
  std::vector<std::byte> out;
  Put(registration.instance, out);
  PutAddresses(registration.addresses, out);
  return TextOf(out);
}

Result<Registration> DecodeRegistration(ByteSpan bytes) {
  ByteReader reader(bytes);
  Registration registration;
  registration.instance = reader.Get<uint64_t>("instance");
  Result<std::vector<SocketAddress>> addresses = GetAddresses(reader);
  if (!addresses.ok()) return addresses.status();
  FARANDOLE_RETURN_IF_ERROR(reader.Finish());
  registration.addresses = std::move(addresses.value());
  return registration;
}

std::string EncodeTable(const std::vector<TableEntry>& table) {
  std::vector<std::byte> out;
  Put(static_cast<uint32_t>(table.size()), out);
  for (const TableEntry& entry : table) {
    Put(static_cast<uint32_t>(entry.rank), out);
    PutAddresses(entry.addresses, out);
  }
  return TextOf(out);
}

Result<std::vector<TableEntry>> DecodeTable(ByteSpan bytes, int size) {
  ByteReader reader(bytes);
  std::vector<TableEntry> table;
  const auto count = reader.Get<uint32_t>("number of ranks");
  if (count > static_cast<uint32_t>(size)) return Internal("join: a table of too many ranks");
  for (uint32_t i = 0; i < count; ++i) {
    const auto rank = reader.Get<uint32_t>("rank");
    const bool ascends = table.empty() || static_cast<int64_t>(rank) > table.back().rank;
    if (rank >= static_cast<uint32_t>(size) || !ascends) return Internal("join: a table's ranks");
    Result<std::vector<SocketAddress>> addresses = GetAddresses(reader);
    if (!addresses.ok()) return addresses.status();
    table.push_back({static_cast<int>(rank), std::move(addresses.value())});
  }
  FARANDOLE_RETURN_IF_ERROR(reader.Finish());
  return table;
}

Status JoinAsRoot(StreamHub& hub, const std::vector<SocketAddress>& own,
                  const JoinOptions& options) {
  const int64_t deadline_ns = options.clock->NowNs() + options.timeout_ns;
  uint32_t epoch = 0;
  FillRandom(std::as_writable_bytes(std::span(&epoch, 1)));
  epoch |= 1;  // 0 says that a rank does not know it yet
  Registry registry(hub, own);
  hub.OpenToJoins(true, epoch);
  while (!registry.complete() && hub.WaitForEvent(deadline_ns)) {
    const std::optional<HubEvent> event = hub.Next();
    if (event && event->status.code() == Code::kResourceExhausted) return event->status;
    const bool registers =
        event && event->kind == HubEvent::Kind::kFrame && event->type == FrameType::kRegister;
    if (registers) registry.Admit(*event);
  }
  hub.OpenToJoins(false, epoch);
  const std::vector<TableEntry> table = registry.Table();
  SetPeers(hub, table, own.empty() ? 0 : own.front().scope());
  const std::string text = EncodeTable(table);
  SendToChildren(hub, table, TextBytes(text));
  const std::string missing = Missing(table, hub.size());
  if (missing.empty()) return Status();
  Flush(hub, *options.clock);
  const std::string refused = hub.Refused();
  return Timeout(missing + " did not join rank 0 at " + options.where + " within " +
                 Seconds(options.timeout_ns) +
                 (registry.conflict().empty() ? "" : "; " + registry.conflict()) +
                 (refused.empty() ? "" : "; refused meanwhile: " + refused));
}

Status JoinAsRank(
    StreamHub& hub, const std::function<Result<std::vector<SocketAddress>>()>& find_root,
    const std::function<Result<std::vector<SocketAddress>>(const SocketAddress&)>& listen,
    bool keeps_trying, const JoinOptions& options) {
  return Joiner(hub, find_root, listen, keeps_trying, options).Run();
}

}  // namespace farandole
