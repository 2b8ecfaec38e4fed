// Addresses of sockets, IPv4 and IPv6: texts, names, those of this host's interfaces; and ports.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace farandole {

/// Ports among which a socket that listens may have any that is free, both ends included.
struct PortRange {
  uint16_t first = 0;  ///< 0 to 0: the system chooses.
  uint16_t last = 0;
};
/// "50000-50100", 1 to 65535; nothing if it is not that.
std::optional<PortRange> ParsePortRange(std::string_view text);
/// As it is parsed; empty where the system chooses.
std::string Format(const PortRange& ports);
/// How many of its first ports, a quarter, are for those that are named before somebody listens
/// there; whoever takes any port takes one of the others, as long as there are some.
inline uint32_t NamedPorts(const PortRange& ports) { return (ports.last - ports.first + 1u) / 4; }

/// A numeric address with its port. A value.
class SocketAddress {
 public:
  SocketAddress() = default;
  /// What the kernel gave: AF_INET or AF_INET6. An IPv4 address mapped into IPv6 becomes IPv4.
  explicit SocketAddress(const sockaddr_storage& storage);

  int family() const { return storage_.ss_family; }
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const;
  uint16_t port() const;
  SocketAddress WithPort(uint16_t port) const;
  bool IsLoopback() const;
  /// Valid on one link alone, so that hosts name it with interfaces of their own.
  bool IsLinkLocal() const;
  /// Of an IPv6 address that is link-local: the number of this host's interface; else 0.
  uint32_t scope() const;
  SocketAddress WithScope(uint32_t scope) const;
  /// The 4 or 16 bytes of the address.
  std::string_view bytes() const;
  /// "10.0.0.1:29500", "[fe80::1]:29500", without a scope.
  std::string ToString() const;
  bool operator==(const SocketAddress& other) const {
    return family() == other.family() && port() == other.port() && bytes() == other.bytes();
  }

 private:
  sockaddr_storage storage_{};
};

/// "10.0.0.1:29500" or "[fd00::1]:29500". @return InvalidArgument naming the text.
Result<SocketAddress> ParseSocketAddress(std::string_view text);

struct HostPort {
  std::string
      host;  ///< A name, or an address; IPv6 without brackets, with a scope: "fe80::1%eth0".
  uint16_t port = 0;
};
/// "node7:29500", "[::1]:29500". @return InvalidArgument saying what is wrong with the text.
Result<HostPort> ParseHostPort(std::string_view text);
/// Several, separated by commas; of an empty text none. Errors as of one.
Result<std::vector<HostPort>> ParseHostPorts(std::string_view texts);
std::string Format(const HostPort& host_port);
/// Whether it says loopback itself, and is not a name that may lead there on one host alone, as a
/// host's own name does on Debian (127.0.1.1).
bool SaysLoopback(const HostPort& host_port);

/// May ask name servers, and then blocks for as long as they take.
/// @return At least one; Unavailable with the resolver's reason.
Result<std::vector<SocketAddress>> Resolve(const HostPort& host_port);

/// Interfaces by name, and networks in which they have an address.
struct InterfaceList {
  struct Network {
    SocketAddress address;
    int bits = 0;
  };
  std::vector<std::string> names;
  std::vector<Network> networks;
  bool empty() const { return names.empty() && networks.empty(); }
};
/// "eth0,10.1.0.0/16,fd00::/8". @return InvalidArgument naming the entry.
Result<InterfaceList> ParseInterfaces(std::string_view text);
/// Whether an address, of an interface of this name, is on the list.
bool Contains(const InterfaceList& list, const std::string& name, const SocketAddress& address);

/// Addresses of this host's interfaces that are up, port 0: those on the list; for an empty list
/// all but loopback and link-local ones.
Result<std::vector<SocketAddress>> InterfaceAddresses(const InterfaceList& list);

}  // namespace farandole
