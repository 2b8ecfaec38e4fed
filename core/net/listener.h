// Sockets that listen for other ranks, and where these reach them.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/net/address.h"
#include "core/status.h"

namespace farandole {

/// A socket that listens, and closes itself unless it is released.
class Listener {
 public:
  explicit Listener(int socket) : socket_(socket) {}
  Listener(Listener&& other) noexcept : socket_(std::exchange(other.socket_, -1)) {}
  Listener& operator=(Listener&& other) noexcept {
    std::swap(socket_, other.socket_);
    return *this;
  }
  ~Listener() {
    if (socket_ >= 0) close(socket_);
  }
  int get() const { return socket_; }
  int Release() { return std::exchange(socket_, -1); }
  SocketAddress address() const {
    sockaddr_storage storage{};
    socklen_t size = sizeof storage;
    (void)getsockname(socket_, reinterpret_cast<sockaddr*>(&storage), &size);
    return SocketAddress(storage);
  }

 private:
  int socket_;
};

/// Sockets that listen, and where others reach them, best first.
struct Listening {
  std::vector<Listener> sockets;
  std::vector<SocketAddress> addresses;
};

bool IsAnywhere(const SocketAddress& address);

/// At each of these that can be had, with a port of the range. @return the last reason if none can,
/// as SystemError; it names a range that is used up.
Result<Listening> ListenOn(const std::vector<SocketAddress>& where, const PortRange& ports);
/// At the addresses of the interfaces on the list; everywhere if it is empty.
/// @param names  The list's text, for errors.
/// @param known  An address of this host at which others reach it most likely.
/// @return InvalidArgument if no interface is on the list; else as ListenOn.
Result<Listening> ListenForAll(const PortRange& ports, const InterfaceList& interfaces,
                               const std::string& names,
                               const std::optional<SocketAddress>& known = {});
/// Where others reach a socket that listens anywhere, best first. Errors as SystemError.
Result<std::vector<SocketAddress>> Reachable(uint16_t port, const InterfaceList& interfaces,
                                             const std::optional<SocketAddress>& known = {});

}  // namespace farandole
