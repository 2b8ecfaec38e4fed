#include "core/net/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "core/descriptors.h"

namespace farandole {
namespace {

const sockaddr_in& V4(const sockaddr_storage& s) { return reinterpret_cast<const sockaddr_in&>(s); }
const sockaddr_in6& V6(const sockaddr_storage& s) {
  return reinterpret_cast<const sockaddr_in6&>(s);
}

sockaddr_storage FromV4(const in_addr& address, in_port_t port) {
  sockaddr_storage storage{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
  v4.sin_family = AF_INET;
  v4.sin_addr = address;
  v4.sin_port = port;
  return storage;
}

// A numeric address without a port.
std::optional<SocketAddress> ParseAddress(const std::string& text) {
  in_addr v4{};
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return SocketAddress(FromV4(v4, 0));
  sockaddr_storage storage{};
  auto& v6 = reinterpret_cast<sockaddr_in6&>(storage);
  v6.sin6_family = AF_INET6;
  const size_t percent = text.find('%');
  if (inet_pton(AF_INET6, text.substr(0, percent).c_str(), &v6.sin6_addr) != 1) return {};
  if (percent != std::string::npos) {
    v6.sin6_scope_id = if_nametoindex(text.c_str() + percent + 1);
    if (v6.sin6_scope_id == 0) return {};
  }
  return SocketAddress(storage);
}

std::optional<int> ParseNumber(std::string_view text, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size() && !text.empty();
  return whole && value >= 0 && value <= most ? std::optional(value) : std::nullopt;
}

bool SameNetwork(const InterfaceList::Network& network, const SocketAddress& address) {
  const std::string_view a = network.address.bytes();
  const std::string_view b = address.bytes();
  if (a.size() != b.size()) return false;
  for (int bit = 0; bit < network.bits; ++bit) {
    const auto at = static_cast<size_t>(bit / 8);
    if ((((a[at] ^ b[at]) >> (7 - bit % 8)) & 1) != 0) return false;
  }
  return true;
}

}  // namespace

SocketAddress::SocketAddress(const sockaddr_storage& storage) : storage_(storage) {
  if (family() != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&V6(storage).sin6_addr)) return;
  in_addr v4{};
  std::memcpy(&v4, V6(storage).sin6_addr.s6_addr + 12, sizeof v4);
  storage_ = FromV4(v4, V6(storage).sin6_port);
}

socklen_t SocketAddress::size() const {
  return family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

uint16_t SocketAddress::port() const {
  return ntohs(family() == AF_INET6 ? V6(storage_).sin6_port : V4(storage_).sin_port);
}

SocketAddress SocketAddress::WithPort(uint16_t port) const {
  SocketAddress copy = *this;
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(copy.storage_).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(copy.storage_).sin_port = htons(port);
  }
  return copy;
}

bool SocketAddress::IsLoopback() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&V6(storage_).sin6_addr);
  return family() == AF_INET && bytes().front() == 127;
}

bool SocketAddress::IsLinkLocal() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_LINKLOCAL(&V6(storage_).sin6_addr);
  return family() == AF_INET && bytes().starts_with("\xa9\xfe");
}

uint32_t SocketAddress::scope() const {
  return family() == AF_INET6 ? V6(storage_).sin6_scope_id : 0;
}

SocketAddress SocketAddress::WithScope(uint32_t scope) const {
  SocketAddress copy = *this;
  if (family() == AF_INET6) reinterpret_cast<sockaddr_in6&>(copy.storage_).sin6_scope_id = scope;
  return copy;
}

std::string_view SocketAddress::bytes() const {
  if (family() == AF_INET6) {
    return {reinterpret_cast<const char*>(&V6(storage_).sin6_addr), sizeof(in6_addr)};
  }
  return {reinterpret_cast<const char*>(&V4(storage_).sin_addr), sizeof(in_addr)};
}

std::string SocketAddress::ToString() const {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family(), bytes().data(), text, sizeof text);
  return Format(HostPort{text, port()});
}

Result<SocketAddress> ParseSocketAddress(std::string_view text) {
  Result<HostPort> split = ParseHostPort(text);
  if (!split.ok()) return split.status();
  const std::optional<SocketAddress> address = ParseAddress(split.value().host);
  if (!address) return InvalidArgument("\"" + std::string(text) + "\" is not a numeric address");
  return address->WithPort(split.value().port);
}

Result<HostPort> ParseHostPort(std::string_view text) {
  const auto wrong = [text](const char* why) {
    return InvalidArgument("address \"" + std::string(text.substr(0, 300)) + "\": " + why +
                           "; expected host:port, [IPv6]:port");
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return wrong("no port");
  std::string_view host = text.substr(0, colon);
  const std::optional<int> port = ParseNumber(text.substr(colon + 1), UINT16_MAX);
  if (!port) return wrong("the port is not a number from 0 to 65535");
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (host.empty() || host.size() > 255) return wrong("no host of at most 255 characters");
  if (bracketed != (host.find(':') != std::string_view::npos)) {
    return wrong("an IPv6 address stands in brackets, and nothing else does");
  }
  const auto bad = [](unsigned char c) { return c <= ' ' || c > '~' || c == '[' || c == ']'; };
  if (std::ranges::any_of(host, bad)) return wrong("the host has characters of no host's name");
  return HostPort{std::string(host), static_cast<uint16_t>(*port)};
}

Result<std::vector<HostPort>> ParseHostPorts(std::string_view texts) {
  std::vector<HostPort> all;
  while (!texts.empty()) {
    const std::string_view text = texts.substr(0, texts.find(','));
    texts.remove_prefix(std::min(texts.size(), text.size() + 1));
    Result<HostPort> parsed = ParseHostPort(text);
    if (!parsed.ok()) return parsed.status();
    all.push_back(std::move(parsed).value());
  }
  return all;
}

std::string Format(const HostPort& host_port) {
  const bool is_v6 = host_port.host.find(':') != std::string::npos;
  return (is_v6 ? "[" + host_port.host + "]" : host_port.host) + ":" +
         std::to_string(host_port.port);
}

bool SaysLoopback(const HostPort& host_port) {
  if (host_port.host == "localhost") return true;
  const std::optional<SocketAddress> address = ParseAddress(host_port.host);
  return address && address->IsLoopback();
}

Result<std::vector<SocketAddress>> Resolve(const HostPort& host_port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const std::string port = std::to_string(host_port.port);
  const int code = getaddrinfo(host_port.host.c_str(), port.c_str(), &hints, &list);
  if (code != 0) {
    const std::string what = "the host name \"" + host_port.host + "\" cannot be resolved";
    // Without a descriptor the library says that there is no such name.
    const int probe = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (probe < 0 && IsExhaustion(errno)) return SystemError(what, errno);
    if (probe >= 0) close(probe);
    return Unavailable(what + ": " + gai_strerror(code));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    sockaddr_storage storage{};
    std::memcpy(&storage, one->ai_addr, one->ai_addrlen);
    const SocketAddress address(storage);
    if (std::ranges::find(addresses, address) == addresses.end()) addresses.push_back(address);
  }
  if (addresses.empty()) {
    return Unavailable("the host name \"" + host_port.host + "\" has no IP address");
  }
  return addresses;
}

std::optional<PortRange> ParsePortRange(std::string_view text) {
  const size_t dash = text.find('-');
  if (dash == std::string_view::npos) return std::nullopt;
  const std::optional<int> first = ParseNumber(text.substr(0, dash), UINT16_MAX);
  const std::optional<int> last = ParseNumber(text.substr(dash + 1), UINT16_MAX);
  if (!first || !last || *first < 1 || *last < *first) return std::nullopt;
  return PortRange{static_cast<uint16_t>(*first), static_cast<uint16_t>(*last)};
}

std::string Format(const PortRange& ports) {
  return ports.first == 0 ? "" : std::to_string(ports.first) + "-" + std::to_string(ports.last);
}

Result<InterfaceList> ParseInterfaces(std::string_view text) {
  InterfaceList list;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string entry(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
    const size_t slash = entry.find('/');
    if (slash == std::string::npos) {
      if (entry.empty() || entry.size() >= IFNAMSIZ) {
        return InvalidArgument("interfaces: \"" + entry + "\" is not the name of an interface");
      }
      list.names.push_back(entry);
      continue;
    }
    const std::optional<SocketAddress> address = ParseAddress(entry.substr(0, slash));
    const int most = address && address->family() == AF_INET ? 32 : 128;
    const std::optional<int> bits = ParseNumber(entry.substr(slash + 1), most);
    if (!address || !bits) {
      return InvalidArgument("interfaces: \"" + entry + "\" is not a network such as 10.1.0.0/16");
    }
    list.networks.push_back({*address, *bits});
  }
  return list;
}

bool Contains(const InterfaceList& list, const std::string& name, const SocketAddress& address) {
  if (list.empty()) return !address.IsLoopback() && !address.IsLinkLocal();
  return std::ranges::find(list.names, name) != list.names.end() ||
         std::ranges::any_of(list.networks, [&](const InterfaceList::Network& network) {
           return SameNetwork(network, address);
         });
}

Result<std::vector<SocketAddress>> InterfaceAddresses(const InterfaceList& list) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) {
    return SystemError("the interfaces of this host cannot be listed", errno);
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, freeifaddrs);
  std::vector<SocketAddress> addresses;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    sockaddr_storage storage{};
    std::memcpy(&storage, one->ifa_addr,
                family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    const SocketAddress address(storage);
    if (Contains(list, one->ifa_name, address)) addresses.push_back(address);
  }
  return addresses;
}

}  // namespace farandole
