#include "coordinator/control/tcp_network.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "coordinator/control/join.h"
#include "coordinator/control/tcp_transport.h"
#include "core/descriptors.h"
#include "core/net/listener.h"
#include "core/net/stream_hub.h"
#include "ops/p2p/tcp/link.h"

namespace farandole {
namespace {

constexpr const char* kStoreKey = "farandole_root";    // its value: the key in hex, addresses
constexpr int64_t kOwnDescriptors = 16;                // of the hub, shared memory, a doorbell
constexpr int64_t kMaxStoreWaitNs = 2 * kNsPerSecond;  // then it is asked again
constexpr int64_t kStoreSliceNs = 50 * kNsPerMs;

using Addresses = std::vector<SocketAddress>;

/// The network of one rank. It keeps the hub of the last start, and at rank 0 an inherited
/// listening socket, so that ranks which join again find somebody there. Lifetime: outlives the
/// links.
class TcpNetwork final : public Network {
 public:
  TcpNetwork(TcpNetworkOptions options, std::vector<HostPort> roots, InterfaceList interfaces)
      : options_(std::move(options)),
        roots_(std::move(roots)),
        root_(roots_.empty() ? std::nullopt : std::optional(roots_.front())),
        interfaces_(std::move(interfaces)),
        adopted_(std::exchange(options_.listen_descriptor, -1)) {}

  const char* name() const override { return "tcp"; }
  std::shared_ptr<StreamHub> hub() const override { return hub_; }

  Result<std::unique_ptr<Transport>> CreateTransport(const LinkOptions& options) override {
    key_ = !options_.key.empty() ? KeyFrom(options_.key)
           : options_.store      ? RandomKey()
                                 : PublicKey(options_.job);
    planes_ = 0;
    deadline_ns_ = options_.clock->NowNs() + options.timeout_ns;
    hub_.reset();
    Reserve(0);
    Result<std::shared_ptr<StreamHub>> hub =
        options_.rank == 0 ? JoinFirst(options) : JoinOther(options);
    if (!hub.ok()) return hub.status();
    hub_ = hub.value();
    return MakeTcpTransport(hub.value(), *options_.clock);
  }

  Result<P2pLinkFactory> CreateLinks(const LinkOptions& options) override {
    if (hub_ == nullptr) return InvalidArgument("TCP: links before the transport");
    Reserve((planes_ + 1) * options_.streams);
    return P2pLinkFactory(
        [hub = hub_, make = MakeTcpLinks(*hub_, planes_++, options)](
            uint32_t uid, std::span<const int> ranks) { return make(uid, ranks); });
  }

 private:
  static JobKey KeyFrom(const std::string& text) {
    JobKey key;
    std::memcpy(key.data(), text.data(), key.size());
    return key;
  }

  // At most: a control stream each way and, in each plane, some to every other rank. What lacks is
  // much the same on all ranks, so one of them warns.
  void Reserve(int data_streams) {
    const int64_t others = options_.size - 1;
    const Status reserved = ReserveDescriptors(kOwnDescriptors + others * (2 + data_streams));
    const LogLevel level = options_.rank == 0 ? LogLevel::kWarning : LogLevel::kInfo;
    Log* const log = options_.log;
    if (reserved.ok() || log == nullptr || !log->Enabled(level)) return;
    if (std::exchange(has_warned_, true)) return;
    log->Write(level, RankName(options_.rank) + ": " + reserved.message());
  }

  Result<std::shared_ptr<StreamHub>> MakeHub(const LinkOptions& options) const {
    Result<std::unique_ptr<StreamHub>> hub = StreamHub::Create(
        {.party = {.key = key_, .job = JobTag(options_.job), .rank = options_.rank},
         .size = options_.size,
         .streams = options_.streams,
         .connect_timeout_ns = options.timeout_ns,
         .patience_ns = options_.patience_ns,
         .stop = options_.stop,
         .clock = options_.clock,
         .log = options_.log,
         .doorbell = options.doorbell,
         .liveness = options.liveness});
    if (!hub.ok()) return hub.status();
    return std::shared_ptr<StreamHub>(std::move(hub.value()));
  }

  JoinOptions HowToJoin(const LinkOptions& options) const {
    const bool is_public =
        options_.key.empty() && options_.store == nullptr && options_.job.empty();
    return {root_ ? Format(*root_) : "the address in the store", options.timeout_ns, options_.clock,
            is_public};
  }

  static Status Take(StreamHub& hub, Listening& listening) {
    for (Listener& listener : listening.sockets) {
      FARANDOLE_RETURN_IF_ERROR(hub.Listen(listener.Release()));
    }
    return Status();
  }

  // --- Rank 0 ---

  Result<std::shared_ptr<StreamHub>> JoinFirst(const LinkOptions& options) {
    Result<std::shared_ptr<StreamHub>> hub = MakeHub(options);
    if (!hub.ok() || options_.size == 1) return hub;
    Result<Listening> listening = ListenFirst();
    if (!listening.ok()) {
      return Status(listening.status().code(), "rank 0 " + listening.status().message());
    }
    FARANDOLE_RETURN_IF_ERROR(Take(*hub.value(), listening.value()));
    if (options_.store != nullptr) FARANDOLE_RETURN_IF_ERROR(Publish(listening.value().addresses));
    FARANDOLE_RETURN_IF_ERROR(
        JoinAsRoot(*hub.value(), listening.value().addresses, HowToJoin(options)));
    return hub;
  }

  Result<Listening> ListenFirst() {
    if (adopted_.get() >= 0) return ListenAgain();
    const PortRange ports = root_ ? PortRange{root_->port, root_->port} : options_.ports;
    if (root_ && SaysLoopback(*root_)) {
      Result<Addresses> loopback = Resolve(*root_);
      return loopback.ok() ? ListenOn(loopback.value(), ports) : loopback.status();
    }
    return ListenForAll(ports, interfaces_, options_.interfaces);
  }

  // AF_UNSPEC: both. A launcher's socket may be one of IPv4, or of IPv6 alone.
  static int FamilyTakenBy(int socket) {
    int only_v6 = 1;
    socklen_t size = sizeof only_v6;
    const int asked = getsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &only_v6, &size);
    if (asked != 0) return AF_INET;
    return only_v6 != 0 ? AF_INET6 : AF_UNSPEC;
  }

  // The socket from the launcher serves every start of this process.
  Result<Listening> ListenAgain() {
    const int copy = fcntl(adopted_.get(), F_DUPFD_CLOEXEC, 0);
    if (copy < 0 || fcntl(copy, F_SETFL, O_NONBLOCK) != 0) {
      const int error = errno;
      if (copy >= 0) close(copy);
      const Status failed = SystemError(
          "cannot use the inherited listening socket " + std::to_string(adopted_.get()), error);
      return IsExhaustion(error) ? failed : InvalidArgument(failed.message());
    }
    Listening listening;
    listening.sockets.emplace_back(copy);
    const SocketAddress own = listening.sockets.front().address();
    if (!IsAnywhere(own)) {
      listening.addresses = {own};
    } else {
      Result<Addresses> addresses = Reachable(own.port(), interfaces_);
      if (!addresses.ok()) return addresses.status();
      listening.addresses = std::move(addresses.value());
      std::erase_if(listening.addresses, [takes = FamilyTakenBy(copy)](const SocketAddress& one) {
        return takes != AF_UNSPEC && one.family() != takes;
      });
    }
    return listening;
  }

  // With every start; what an earlier one left is replaced, and differs: by the key, or by a number
  // that stands for it where all ranks have one.
  Status Publish(const Addresses& addresses) {
    const bool has_key = !options_.key.empty();
    std::string value = has_key ? "-" : "";
    constexpr char kHex[] = "0123456789abcdef";
    for (const std::byte byte : has_key ? RandomKey() : key_) {
      value += kHex[static_cast<size_t>(byte) >> 4];
      value += kHex[static_cast<size_t>(byte) & 15];
    }
    for (const SocketAddress& one : addresses) value += " " + one.ToString();
    return options_.store->Set(kStoreKey, value);
  }

  // --- The others ---

  Result<std::shared_ptr<StreamHub>> JoinOther(const LinkOptions& options) {
    Result<std::shared_ptr<StreamHub>> hub = MakeHub(options);
    if (!hub.ok()) return hub;
    const auto find_root = [&] { return FindRoot(*hub.value()); };
    const auto listen = [&](const SocketAddress& local) -> Result<Addresses> {
      Result<Listening> listening = ListenBeside(local);
      if (!listening.ok()) {
        return Status(listening.status().code(),
                      "rank " + std::to_string(options_.rank) + " " + listening.status().message());
      }
      FARANDOLE_RETURN_IF_ERROR(Take(*hub.value(), listening.value()));
      return listening.value().addresses;
    };
    FARANDOLE_RETURN_IF_ERROR(
        JoinAsRank(*hub.value(), find_root, listen, options_.store != nullptr, HowToJoin(options)));
    return hub;
  }

  Result<Listening> ListenBeside(const SocketAddress& local) const {
    const bool one_host = local.IsLoopback() && (!root_ || SaysLoopback(*root_));
    if (one_host && interfaces_.empty()) return ListenOn({local}, options_.ports);
    return ListenForAll(options_.ports, interfaces_, options_.interfaces, local);
  }

  Result<Addresses> FindRoot(StreamHub& hub) {
    if (options_.store == nullptr) return ResolveRoots();
    Result<std::string> value = AskStore();
    if (!value.ok()) return value.status();
    const Status malformed =
        Unavailable("the store's " + std::string(kStoreKey) + " is not what rank 0 writes");
    std::string_view left = value.value();
    const std::string_view key = left.substr(0, left.find(' '));
    left.remove_prefix(key.size());
    if (options_.key.empty() && !ReadKey(key)) return malformed;
    hub.SetKey(key_);
    if (root_) return Resolve(*root_);
    Addresses addresses;
    while (!left.empty()) {
      left.remove_prefix(1);
      const std::string_view word = left.substr(0, left.find(' '));
      left.remove_prefix(word.size());
      Result<SocketAddress> address = ParseSocketAddress(word);
      if (!address.ok()) return malformed;
      addresses.push_back(address.value());
    }
    return addresses;
  }

  // Those that can be resolved, or why the last one cannot.
  Result<Addresses> ResolveRoots() const {
    Addresses all;
    Status failed;
    for (const HostPort& root : roots_) {
      const Result<Addresses> found = Resolve(root);
      if (!found.ok()) failed = found.status();
      if (found.ok()) all.insert(all.end(), found.value().begin(), found.value().end());
    }
    return all.empty() ? Result<Addresses>(failed) : all;
  }

  // In slices, for who stops the join.
  Result<std::string> AskStore() {
    const int64_t until_ns = std::min(options_.clock->NowNs() + kMaxStoreWaitNs, deadline_ns_);
    for (;;) {
      Result<std::string> value = options_.store->Get(kStoreKey, kStoreSliceNs);
      const bool waits = value.status().code() == Code::kTimeout &&
                         options_.clock->NowNs() < until_ns && !options_.stop.stop_requested();
      if (!waits) return value;
    }
  }

  bool ReadKey(std::string_view hex) {
    if (hex.size() != 2 * key_.size()) return false;
    const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
    for (size_t i = 0; i < key_.size(); ++i) {
      const int value = 16 * digit(hex[2 * i]) + digit(hex[2 * i + 1]);
      if (value < 0 || value > 255) return false;
      key_[i] = static_cast<std::byte>(value);
    }
    return true;
  }

  TcpNetworkOptions options_;
  const std::vector<HostPort> roots_;
  const std::optional<HostPort> root_;  // the first
  const InterfaceList interfaces_;
  const Listener adopted_;
  JobKey key_{};
  int planes_ = 0;
  bool has_warned_ = false;
  int64_t deadline_ns_ = 0;         // of the last start's join
  std::shared_ptr<StreamHub> hub_;  // of the last start
};

}  // namespace

Result<std::unique_ptr<Network>> MakeTcpNetwork(TcpNetworkOptions options) {
  Listener adopted(options.listen_descriptor);  // taken over, whatever follows
  Result<std::vector<HostPort>> roots = ParseHostPorts(options.address);
  if (!roots.ok()) return roots.status();
  const HostPort* const root = roots.value().empty() ? nullptr : &roots.value().front();
  if (root == nullptr && options.store == nullptr && options.size > 1) {
    return InvalidArgument("TCP: neither an address nor a store says where rank 0 is");
  }
  if (root != nullptr && root->port == 0 && options.listen_descriptor < 0 && options.size > 1) {
    return InvalidArgument("TCP: address \"" + options.address + "\": the port is 0");
  }
  if (!options.key.empty() && options.key.size() != sizeof(JobKey)) {
    return InvalidArgument("TCP: the job's key has " + std::to_string(options.key.size()) +
                           " bytes; it must have 32");
  }
  if (options.rank < 0 || options.rank >= options.size) {
    return InvalidArgument("TCP: rank " + std::to_string(options.rank) + " of " +
                           std::to_string(options.size));
  }
  if (options.streams < 1 || options.streams > 64) {
    return InvalidArgument("TCP: " + std::to_string(options.streams) +
                           " streams between two ranks; 1 to 64 are possible");
  }
  Result<InterfaceList> interfaces = ParseInterfaces(options.interfaces);
  if (!interfaces.ok()) return interfaces.status();
  options.listen_descriptor = adopted.Release();
  return std::unique_ptr<Network>(std::make_unique<TcpNetwork>(
      std::move(options), std::move(roots.value()), std::move(interfaces.value())));
}

}  // namespace farandole
