#include "coordinator/liveness/listen_beside.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "core/net/listener.h"

namespace farandole {
namespace {

constexpr char kFailed = '!';      // before why there are no sockets
constexpr char kBeforeKey = '\n';  // rank 0's, behind its addresses
constexpr char kBeforeOne = ' ';   // of the addresses

std::vector<SocketAddress> AddressesIn(std::string_view text) {
  std::vector<SocketAddress> addresses;
  text = text.substr(0, text.find(kBeforeKey));
  while (!text.empty() && text.front() == kBeforeOne) {
    text.remove_prefix(1);
    const std::string_view word = text.substr(0, text.find(kBeforeOne));
    text.remove_prefix(word.size());
    Result<SocketAddress> address = ParseSocketAddress(word);
    if (address.ok()) addresses.push_back(address.value());
  }
  return addresses;
}

bool ReadKey(const std::string& text, JobKey& key) {
  const size_t at = text.find(kBeforeKey);
  if (at == std::string::npos || text.size() - at - 1 != key.size()) return false;
  std::memcpy(key.data(), text.data() + at + 1, key.size());
  return true;
}

Result<Listening> ListenAsConfigured(const Config& config) {
  const Result<InterfaceList> list = ParseInterfaces(config.interfaces);
  return list.ok() ? ListenForAll(config.ports, list.value(), config.interfaces) : list.status();
}

// What a rank tells the others; empty where it does not listen.
std::string Describe(const Result<Listening>& listening, bool is_root) {
  if (!listening.ok()) return kFailed + listening.status().message();
  std::string text;
  for (const SocketAddress& one : listening.value().addresses) text += kBeforeOne + one.ToString();
  if (!is_root) return text;
  const JobKey key = RandomKey();
  return text + kBeforeKey + std::string(reinterpret_cast<const char*>(key.data()), key.size());
}

// All ranks come to the same: sockets everywhere, or nowhere.
std::string WhyNone(const std::vector<std::string>& texts) {
  const auto failed =
      std::ranges::find_if(texts, [](const auto& text) { return text.starts_with(kFailed); });
  if (failed == texts.end()) return "";
  return RankName(static_cast<int>(failed - texts.begin())) + " " + failed->substr(1);
}

void Warn(Log& log, const std::string& why) {
  log.Write(LogLevel::kWarning,
            "ranks of other hosts are not watched (FARANDOLE_LIVENESS_TIMEOUT_S): " + why);
}

Result<std::unique_ptr<StreamHub>> MakeHub(const HubOptions& options, Listening& listening) {
  Result<std::unique_ptr<StreamHub>> hub = StreamHub::Create(options);
  if (!hub.ok()) return hub;
  for (Listener& listener : listening.sockets) {
    FARANDOLE_RETURN_IF_ERROR(hub.value()->Listen(listener.Release()));
  }
  return hub;
}

}  // namespace

Result<std::shared_ptr<StreamHub>> ListenBeside(Transport& transport,
                                                std::span<const int> elsewhere, HubOptions options,
                                                const Config& config, int64_t timeout_ns) {
  Result<Listening> listening = Listening();
  if (!elsewhere.empty()) listening = ListenAsConfigured(config);
  const Result<std::vector<std::string>> texts =
      transport.Allgather(Describe(listening, transport.rank() == 0), timeout_ns);
  if (!texts.ok()) return texts.status();
  const std::string why = WhyNone(texts.value());
  if (!why.empty() && transport.rank() == 0) Warn(*options.log, why);
  if (!why.empty() || elsewhere.empty() || !ReadKey(texts.value()[0], options.party.key)) {
    return std::shared_ptr<StreamHub>();
  }
  Result<std::unique_ptr<StreamHub>> hub = MakeHub(options, listening.value());
  if (!hub.ok()) {
    Warn(*options.log, RankName(transport.rank()) + ": " + hub.status().message());
    return std::shared_ptr<StreamHub>();
  }
  for (const int peer : elsewhere) {
    hub.value()->SetPeer(peer, AddressesIn(texts.value()[static_cast<size_t>(peer)]));
    hub.value()->Connect(peer);
  }
  return std::shared_ptr<StreamHub>(std::move(hub.value()));
}

}  // namespace farandole
