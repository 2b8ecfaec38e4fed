#include "core/net/listener.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>

#include "core/descriptors.h"

namespace farandole {
namespace {

constexpr int kBacklog = 4096;

using Addresses = std::vector<SocketAddress>;

SocketAddress Anywhere(int family, uint16_t port) {
  sockaddr_storage storage{};
  storage.ss_family = static_cast<sa_family_t>(family);
  return SocketAddress(storage).WithPort(port);
}

// One of IPv6's that says anywhere takes IPv4 as well.
Result<Listener> ListenAt(const SocketAddress& address) {
  const std::string what = "cannot listen at " + address.ToString();
  Listener listener(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (listener.get() < 0) return SystemError(what, errno);
  const int one = 1;
  const int zero = 0;
  (void)setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (address.family() == AF_INET6) {
    const int only = IsAnywhere(address) ? zero : one;
    (void)setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
  }
  if (bind(listener.get(), address.data(), address.size()) != 0 ||
      listen(listener.get(), kBacklog) != 0) {
    return SystemError(what, errno);
  }
  return listener;
}

// Begins where this process has come to: a port that it has just given up would soon be another
// socket's, and who comes late for the first one would find the second.
// Those that are to be named come last.
Result<Listener> ListenWithin(const PortRange& ports,
                              const std::function<Result<Listener>(uint16_t)>& listen_at) {
  static std::atomic<uint32_t> turn = static_cast<uint32_t>(getpid());
  const uint32_t count = ports.last - ports.first + 1u;
  const uint32_t named = NamedPorts(ports);
  const auto listen_at_next = [&](uint32_t tried) {
    const bool has_others = tried < count - named;
    const uint32_t place = has_others ? named + turn++ % (count - named) : turn++ % named;
    return listen_at(static_cast<uint16_t>(ports.first + place));
  };
  Result<Listener> listener = listen_at_next(0);
  for (uint32_t tried = 1; tried < count && !listener.ok(); ++tried) {
    if (errno != EADDRINUSE && errno != EACCES) break;  // EACCES: one below 1024
    listener = listen_at_next(tried);
  }
  if (listener.ok() || count == 1 || errno != EADDRINUSE) return listener;
  return Status(
      listener.status().code(),
      listener.status().message() + ", as are all ports of FARANDOLE_PORTS=" + Format(ports));
}

Result<Listener> ListenAnywhere(uint16_t port) {
  Result<Listener> both = ListenAt(Anywhere(AF_INET6, port));
  if (both.ok() || errno == EADDRINUSE || IsExhaustion(errno)) return both;
  return ListenAt(Anywhere(AF_INET, port));  // a kernel without IPv6
}

void Announce(SocketAddress address, uint16_t port, Addresses& addresses) {
  address = address.WithPort(port);
  if (std::ranges::find(addresses, address) == addresses.end()) addresses.push_back(address);
}

}  // namespace

bool IsAnywhere(const SocketAddress& address) {
  return std::ranges::all_of(address.bytes(), [](char c) { return c == 0; });
}

Result<Listening> ListenOn(const Addresses& where, const PortRange& ports) {
  Listening listening;
  Status failed;
  for (const SocketAddress& one : where) {
    Result<Listener> listener =
        ListenWithin(ports, [&](uint16_t port) { return ListenAt(one.WithPort(port)); });
    if (!listener.ok()) {
      failed = listener.status();
      continue;
    }
    listening.addresses.push_back(one.WithPort(listener.value().address().port()));
    listening.sockets.push_back(std::move(listener.value()));
  }
  if (listening.sockets.empty()) return failed;
  return listening;
}

Result<Addresses> Reachable(uint16_t port, const InterfaceList& interfaces,
                            const std::optional<SocketAddress>& known) {
  Result<Addresses> own = InterfaceAddresses(interfaces);
  if (!own.ok()) return own;
  Addresses addresses;
  if (known && !known->IsLoopback()) Announce(*known, port, addresses);
  for (const SocketAddress& one : own.value()) Announce(one, port, addresses);
  // The last resort, and all there is on a host without a network.
  sockaddr_storage storage{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (addresses.empty()) Announce(known.value_or(SocketAddress(storage)), port, addresses);
  return addresses;
}

Result<Listening> ListenForAll(const PortRange& ports, const InterfaceList& interfaces,
                               const std::string& names,
                               const std::optional<SocketAddress>& known) {
  if (!interfaces.empty()) {
    const Result<Addresses> chosen = InterfaceAddresses(interfaces);
    if (!chosen.ok()) return chosen.status();
    if (chosen.value().empty()) {
      return InvalidArgument("cannot listen: no interface of this host is one of \"" + names +
                             "\" (FARANDOLE_INTERFACE)");
    }
    return ListenOn(chosen.value(), ports);
  }
  Result<Listener> listener = ListenWithin(ports, ListenAnywhere);
  if (!listener.ok()) return listener.status();
  const uint16_t chosen_port = listener.value().address().port();
  Result<Addresses> addresses = Reachable(chosen_port, interfaces, known);
  if (!addresses.ok()) return addresses.status();
  Listening listening;
  listening.addresses = std::move(addresses.value());
  listening.sockets.push_back(std::move(listener.value()));
  return listening;
}

}  // namespace farandole
