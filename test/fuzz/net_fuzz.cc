// What strangers and broken peers can send a rank over TCP: each input is one of the parsers'
// below. Built with libFuzzer, once for each: FARANDOLE_FUZZ names the function.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "coordinator/control/join.h"
#include "core/net/address.h"
#include "core/net/frames.h"
#include "core/net/handshake.h"

namespace farandole {
namespace {

void Require(bool holds) {
  if (!holds) std::abort();
}

// The first byte says which end; the rest comes in slices whose lengths it decides, too. Without
// the key nothing gets to the end.
[[maybe_unused]] void FuzzHandshake(ByteSpan input) {
  if (input.empty()) return;
  const auto choice = static_cast<uint8_t>(input[0]);
  const Party party{.key = RandomKey(), .job = choice, .rank = 1, .joining = (choice & 2) != 0};
  Handshake handshake = (choice & 1) != 0
                            ? Handshake::Accept(party)
                            : Handshake::Connect(party, {StreamRole::kControl, 1, 0, 0}, 2);
  const size_t slice = 1 + choice / 4;
  for (ByteSpan left = input.subspan(1); !left.empty() && handshake.wanted() > 0;) {
    const size_t count = std::min({slice, left.size(), handshake.wanted()});
    handshake.Take(left.first(count));
    left = left.subspan(count);
    Require(handshake.TakeOutput().size() <= 96);
  }
  Require(!handshake.complete());
}

// Frames with the right key and a changed tail, in slices; and bytes that never were a frame. The
// first input has one byte and must reach the reader: libFuzzer gives up otherwise.
[[maybe_unused]] void FuzzFrames(ByteSpan input) {
  if (input.empty()) return;
  static const JobKey key = RandomKey();
  const size_t slice = 1 + static_cast<size_t>(input[0]) / 4;
  const size_t valid = static_cast<size_t>(input[0]) % 4;
  const ByteSpan rest = input.subspan(1);
  StreamWriter writer(key);
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < valid; ++i) writer.Append(FrameType::kMessage, rest, bytes);
  bytes.insert(bytes.end(), rest.begin(), rest.end());
  StreamReader reader(key);
  size_t frames = 0;
  for (size_t at = 0; at < bytes.size(); at += slice) {
    reader.Take(ByteSpan(bytes).subspan(at, std::min(slice, bytes.size() - at)));
    auto frame = reader.Next();
    for (; frame.ok() && frame.value(); frame = reader.Next()) {
      Require(frame.value()->payload.size() == rest.size());
      ++frames;
    }
  }
  Require(frames == valid);  // nobody forges a MAC
}

// What is understood comes out as it went in.
[[maybe_unused]] void FuzzAddress(ByteSpan input) {
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  const Result<HostPort> host_port = ParseHostPort(text);
  if (host_port.ok()) {
    const Result<HostPort> again = ParseHostPort(Format(host_port.value()));
    Require(again.ok() && again.value().host == host_port.value().host);
    (void)SaysLoopback(host_port.value());
  }
  const Result<SocketAddress> address = ParseSocketAddress(text);
  if (address.ok()) {
    Require(ParseSocketAddress(address.value().ToString()).value() == address.value());
    (void)Contains({}, "eth0", address.value());
  }
  const Result<InterfaceList> list = ParseInterfaces(text);
  if (list.ok() && address.ok()) (void)Contains(list.value(), "eth0", address.value());
}

// The contents of the frames of a join.
[[maybe_unused]] void FuzzJoin(ByteSpan input) {
  const Result<Registration> registration = DecodeRegistration(input);
  if (registration.ok()) {
    const std::string again = EncodeRegistration(registration.value());
    Require(DecodeRegistration(TextBytes(again)).ok());
  }
  const Result<std::vector<TableEntry>> table = DecodeTable(input, 1000);
  if (table.ok()) {
    Require(DecodeTable(TextBytes(EncodeTable(table.value())), 1000).ok());
  }
}

}  // namespace
}  // namespace farandole

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  farandole::FARANDOLE_FUZZ(std::as_bytes(std::span(data, size)));
  return 0;
}
