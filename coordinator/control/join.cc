#include "coordinator/control/join.h"

#include <sys/resource.h>

#include <algorithm>
#include <map>
#include <optional>

#include "coordinator/control/gather_text.h"
#include "coordinator/control/graces.h"
#include "coordinator/control/wire/bytes.h"

namespace farandole {
namespace {

constexpr size_t kMaxAddresses = 32;  // of a rank
constexpr size_t kMaxAddressText = 64;
constexpr int64_t kFirstNapNs = 20 * kNsPerMs;
constexpr int64_t kMaxNapNs = 500 * kNsPerMs;
constexpr int64_t kMaxStoreNapNs = 100 * kNsPerMs;  // an earlier job may have left what it says
constexpr int64_t kFlushNs = 2 * kNsPerSecond;
constexpr size_t kMostNamed = 16;
constexpr size_t kMostKept = 1024;  // streams that rank 0 keeps open
constexpr const char* kTwoJobs =
    "; two jobs at one address need a port, or a key (FARANDOLE_KEY_FILE), each of its own";

Status GivenUp() { return Aborted("init was given up"); }

size_t MostKept() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  return std::min<size_t>(kMostKept, limit.rlim_cur / 4);
}

std::string Seconds(int64_t ns) {
  const int64_t tenths = (ns + kNsPerSecond / 20) / (kNsPerSecond / 10);
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
  while (!hub.Drained() && clock.NowNs() < deadline_ns &&
         hub.SleepUntil(clock.NowNs() + kNsPerMs)) {
  }
}

/// Rank 0's side: who has come.
class Registry {
 public:
  Registry(StreamHub& hub, const std::vector<SocketAddress>& own, bool is_public)
      : hub_(hub), is_public_(is_public), most_kept_(MostKept()) {
    ranks_[0] = {{0, own}, "", {}, ThisProcess()};
  }

  bool complete() const { return ranks_.size() == static_cast<size_t>(hub_.size()); }
  const std::string& conflict() const { return conflict_; }
  /// A rank whose time is up; -1: none.
  int late() const { return late_; }

  void Take(const HubEvent& event) {
    const auto known = std::ranges::find_if(ranks_, [&](const auto& one) {
      return event.connection != 0 && one.second.connection == event.connection;
    });
    if (event.kind == HubEvent::Kind::kFrame && event.type == FrameType::kRegister) Admit(event);
    if (known == ranks_.end()) return;
    if (event.kind == HubEvent::Kind::kFrame && event.type == FrameType::kTimeUp) {
      late_ = known->first;
    } else if (event.kind == HubEvent::Kind::kLost) {  // it has ended, or begins once more
      ranks_.erase(known);
      --kept_;
    }
  }

  /// The streams that are open end with this.
  void Dismiss(FrameType type) {
    for (auto& [rank, known] : ranks_) hub_.SendOnJoin(known.connection, type, {}, true);
  }

  std::vector<TableEntry> Table() const {
    std::vector<TableEntry> table;
    for (const auto& [rank, known] : ranks_) table.push_back(known.entry);
    return table;
  }

  /// Whom a rank that comes after the start finds in its place.
  std::function<std::string(int rank)> Places() const {
    std::vector<ProcessName> processes;
    for (const auto& [rank, known] : ranks_) processes.push_back(known.process);
    return [processes](int rank) {
      const std::string first = "rank 0, " + processes[0].ToString() + ", has started its job ";
      const auto at = static_cast<size_t>(rank);
      if (at >= processes.size())
        return first + "of " + std::to_string(processes.size()) + " ranks";
      return first + "with " + processes[at].ToString() + " as " + RankName(rank);
    };
  }

 private:
  struct Known {
    TableEntry entry;
    std::string where;
    std::optional<uint64_t> instance;
    ProcessName process;
    uint64_t connection = 0;  // 0: none is kept
  };

  // A second try of one process is accepted again: the first answer may have been lost.
  void Admit(const HubEvent& event) {
    Result<Registration> came = DecodeRegistration(event.data);
    if (!came.ok()) return Reject(event, came.status().message());
    const ProcessName& process = came.value().process;
    const std::string name = RankName(event.from);
    const std::string who = event.address.ToString() + ", " + process.ToString() + ",";
    if (came.value().size != hub_.size() || event.from >= hub_.size()) {
      return Reject(event,
                    who + " says it is " + name + " of " + std::to_string(came.value().size) +
                        ", but rank 0's job has " + std::to_string(hub_.size()) + " ranks",
                    FrameType::kOtherSize);
    }
    if (is_public_ && AreOfOtherJobs(process, ranks_.at(0).process)) {
      return Reject(event, who + " says it is " + name + ", but rank 0 is " +
                               ranks_.at(0).process.ToString());
    }
    const auto [at, is_new] =
        ranks_.try_emplace(event.from, Known{{event.from, came.value().addresses},
                                             event.address.ToString(),
                                             came.value().instance,
                                             process});
    Known& known = at->second;
    if (!is_new && known.instance != came.value().instance) {
      return Reject(event, name + " has joined from " + known.where + " already, " +
                               known.process.ToString() + "; " + who + " says it is " + name +
                               ", too");
    }
    if (known.connection == 0 && kept_ < most_kept_) ++kept_, known.connection = event.connection;
    const bool is_kept = known.connection != 0;
    if (is_kept) known.connection = event.connection;
    const auto keeps = static_cast<std::byte>(is_kept);
    hub_.SendOnJoin(event.connection, FrameType::kAccepted, {&keeps, 1}, !is_kept);
  }

  void Reject(const HubEvent& event, const std::string& why,
              FrameType type = FrameType::kRejected) {
    conflict_ = why + (is_public_ ? kTwoJobs : "");
    hub_.SendOnJoin(event.connection, type, TextBytes(conflict_), true);
  }

  StreamHub& hub_;
  const bool is_public_;
  const size_t most_kept_;
  std::map<int, Known> ranks_;
  size_t kept_ = 0;
  int late_ = -1;
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
    registration_.process = ThisProcess();
    registration_.size = hub.size();
  }

  Status Run() {
    const int64_t max_nap_ns = keeps_trying_ ? kMaxStoreNapNs : kMaxNapNs;
    for (int64_t nap_ns = kFirstNapNs;; nap_ns = std::min(2 * nap_ns, max_nap_ns)) {
      Result<bool> done = Try();
      if (done.ok() && done.value()) done = AwaitTable();
      if (!done.ok()) return done.status();
      if (done.value()) return Status();
      const int64_t now_ns = options_.clock->NowNs();
      if (!hub_.SleepUntil(std::min(now_ns + nap_ns, deadline_ns_))) return GivenUp();
      if (now_ns >= deadline_ns_) return Late();
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
    if (answer->type == FrameType::kOtherSize) {
      reason_ = TextOf(answer->data);
      if (keeps_trying_) return false;
      return Mismatch(reason_);
    }
    if (answer->type == FrameType::kStarted) {
      started_ = WhyStarted(*answer);
      return reason_.clear(), false;
    }
    const bool is_kept = !answer->data.empty() && answer->data[0] != std::byte{0};
    connection_ = is_kept ? opened->connection : 0;
    return true;
  }

  // The job that this process has left, where rank 0 stays on, is no other one.
  std::string WhyStarted(const HubEvent& answer) const {
    const std::string text = TextOf(answer.data);
    const bool is_own = text.find(registration_.process.ToString()) != std::string::npos;
    return text + (is_own || !options_.is_public ? "" : kTwoJobs);
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
      const bool is_old = event->kind != HubEvent::Kind::kJoined && event->connection != 0 &&
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
                   (started_.empty() ? "" : ": " + started_) +
                   (reason_.empty() ? "" : (started_.empty() ? ": " : "; then ") + reason_));
  }

  // @return false if rank 0 begins once more.
  Result<bool> AwaitTable() {
    hub_.PutBack(std::exchange(early_, {}));
    for (bool is_late = false;;) {
      std::optional<HubEvent> event =
          Next(deadline_ns_ + (is_late ? kTableGraceNs : 0), connection_);
      if (hub_.is_stopped()) return GivenUp();
      if (!event && is_late) break;
      if (!event) {
        is_late = true;
        hub_.SendOnJoin(connection_, FrameType::kTimeUp, {}, false);
        continue;
      }
      if (event->connection != 0) {
        // Rank 0 may have ended the stream while this rank wrote to it.
        const bool is_loss = event->kind == HubEvent::Kind::kLost;
        if (is_loss && !is_late) return RootIsGone(event->status);
        connection_ = 0;
        if (event->type == FrameType::kComeAgain) return reason_ = "it begins once more", false;
        continue;
      }
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
      if (missing.empty()) return hub_.PutBack(std::move(early_)), true;
      Flush(hub_, *options_.clock);
      return Timeout(missing + " did not join rank 0 at " + options_.where + " in time");
    }
    return Timeout(RankName(hub_.rank()) + " has joined rank 0 at " + options_.where +
                   ", but not all ranks have within " + Seconds(options_.timeout_ns));
  }

  Status RootIsGone(const Status& why) const {
    const std::string cause = "rank 0 at " + options_.where + " is gone: it had accepted " +
                              RankName(hub_.rank()) + ", and before all ranks had joined " +
                              why.message();
    return Status(Code::kUnavailable, cause, {.ranks = {0}, .cause = cause});
  }

  StreamHub& hub_;
  const FindRoot& find_root_;
  const Listen& listen_;
  const bool keeps_trying_;
  const JoinOptions& options_;
  const int64_t deadline_ns_;
  Registration registration_;
  uint32_t scope_ = 0;
  uint64_t connection_ = 0;      // to rank 0, which has accepted this one; 0: none is kept
  std::string started_;          // what rank 0 of a job that has started has said last
  std::string reason_;           // of the last try
  std::vector<HubEvent> early_;  // frames of ranks that have the table already
};

}  // namespace

template <class Archive>
void Fields(Archive& archive, Of<Archive, SocketAddress>& address) {
  std::string text = Archive::kReads ? "" : address.ToString();
  archive.Text("address", text, kMaxAddressText);
  if constexpr (Archive::kReads) {
    const Result<SocketAddress> parsed = ParseSocketAddress(text);
    if (!parsed.ok()) return archive.Refuse(parsed.status().message());
    address = parsed.value();
  }
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, TableEntry>& entry) {
  archive.Number("rank", entry.rank, 0);
  archive.List("addresses", entry.addresses, kMaxAddresses);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, Registration>& registration) {
  archive.Number("instance", registration.instance);
  archive.Number("process", registration.process.pid);
  archive.Number("user", registration.process.user);
  archive.Text("host", registration.process.host, UINT8_MAX);
  archive.Text("program", registration.process.program, UINT8_MAX);
  archive.List("addresses", registration.addresses, kMaxAddresses);
  archive.Number("number of ranks", registration.size);
}

std::string EncodeRegistration(const Registration& registration) {
  std::vector<std::byte> out;
  ByteWriter writer(out);
  Fields(writer, registration);
  return TextOf(out);
}

Result<Registration> DecodeRegistration(ByteSpan bytes) {
  ByteReader reader(bytes);
  Registration registration;
  Fields(reader, registration);
  FARANDOLE_RETURN_IF_ERROR(reader.Finish());
  return registration;
}

std::string EncodeTable(const std::vector<TableEntry>& table) {
  std::vector<std::byte> out;
  ByteWriter(out).List("ranks", table, table.size());
  return TextOf(out);
}

Result<std::vector<TableEntry>> DecodeTable(ByteSpan bytes, int size) {
  ByteReader reader(bytes);
  std::vector<TableEntry> table;
  reader.List("ranks", table, static_cast<size_t>(size));
  FARANDOLE_RETURN_IF_ERROR(reader.Finish());
  const bool ascends =
      std::ranges::adjacent_find(table, std::greater_equal<>(), &TableEntry::rank) == table.end();
  if (!ascends || (!table.empty() && table.back().rank >= size)) {
    return Internal("join: a table's ranks");
  }
  return table;
}

Status JoinAsRoot(StreamHub& hub, const std::vector<SocketAddress>& own,
                  const JoinOptions& options) {
  const int64_t deadline_ns = options.clock->NowNs() + options.timeout_ns;
  uint32_t epoch = 0;
  FillRandom(std::as_writable_bytes(std::span(&epoch, 1)));
  epoch |= 1;  // 0 says that a rank does not know it yet
  Registry registry(hub, own, options.is_public);
  hub.OpenToJoins(true, epoch);
  while (!registry.complete() && registry.late() < 0 && hub.WaitForEvent(deadline_ns)) {
    const std::optional<HubEvent> event = hub.Next();
    if (event && event->status.code() == Code::kResourceExhausted) return event->status;
    if (event) registry.Take(*event);
  }
  hub.OpenToJoins(false, epoch);
  if (hub.is_stopped()) return registry.Dismiss(FrameType::kComeAgain), GivenUp();
  const std::vector<TableEntry> table = registry.Table();
  SetPeers(hub, table, own.empty() ? 0 : own.front().scope());
  const std::string text = EncodeTable(table);
  SendToChildren(hub, table, TextBytes(text));
  registry.Dismiss(FrameType::kComplete);
  const std::string missing = Missing(table, hub.size());
  if (missing.empty()) return hub.AnswerLate(registry.Places()), Status();
  Flush(hub, *options.clock);
  const std::string refused = hub.Refused();
  const std::string since =
      registry.late() < 0 ? "" : " since " + RankName(registry.late()) + " began to join";
  return Timeout(missing + " did not join rank 0 at " + options.where + " within " +
                 Seconds(options.timeout_ns) + since +
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
