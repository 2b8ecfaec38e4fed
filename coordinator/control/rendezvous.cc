#include "coordinator/control/rendezvous.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <unordered_map>
#include <utility>

#include "coordinator/control/wire/hello.pb.h"
#include "core/clock.h"

namespace farandole {
namespace {

std::string Has(int rank) { return ", rank " + std::to_string(rank) + " has \""; }

Status Differ(const std::string& what, int rank, const std::string& here,
              const std::string& there) {
  return Mismatch(what + " differs between ranks: rank 0 has \"" + here + "\"" + Has(rank) + there +
                  "\"; it must be equal on all ranks");
}

// With rank 0 alone: that is enough, and all ranks name the same difference. The version comes
// first, because equal versions list the same settings in the same order, and those are compared by
// position.
Status Compare(const std::vector<wire::Hello>& hellos) {
  const wire::Hello& first = hellos.front();
  for (size_t r = 1; r < hellos.size(); ++r) {
    const wire::Hello& other = hellos[r];
    const int rank = static_cast<int>(r);
    if (other.version() != first.version()) {
      return Differ("the version of farandole", rank, first.version(), other.version());
    }
    for (int i = 0; i < std::min(first.settings_size(), other.settings_size()); ++i) {
      if (other.settings(i).value() != first.settings(i).value()) {
        return Differ(first.settings(i).name(), rank, first.settings(i).value(),
                      other.settings(i).value());
      }
    }
  }
  return {};
}

// The best plane of rank 0 that everybody has; planes are numbered alike on all ranks because
// versions are equal.
Result<uint8_t> ChoosePlane(const std::vector<wire::Hello>& hellos) {
  const wire::Hello& first = hellos.front();
  for (int i = 0; i < first.planes_size(); ++i) {
    const bool common = std::all_of(hellos.begin(), hellos.end(), [&](const wire::Hello& hello) {
      return i < hello.planes_size() && hello.planes(i) == first.planes(i);
    });
    if (common) return static_cast<uint8_t>(i);
  }
  return Unavailable("no data plane is available on all ranks");
}

// By first appearance in the order of ranks, so all ranks number alike.
std::vector<int> NumberHosts(const std::vector<wire::Hello>& hellos) {
  std::map<std::string, int> numbers;
  std::vector<int> host;
  for (const wire::Hello& hello : hellos) {
    host.push_back(numbers.emplace(hello.host(), static_cast<int>(numbers.size())).first->second);
  }
  return host;
}

// As Horovod defines them: the local rank counts the ranks of a host, and the cross rank the hosts
// that have a rank with this local rank. cross_size differs between local ranks where hosts have
// different numbers of ranks.
void FindLocalRank(const std::vector<int>& host, int rank, Rendezvous& rendezvous) {
  std::map<int, int> ranks_on;  // host -> ranks seen so far
  std::vector<int> local(host.size());
  for (size_t r = 0; r < host.size(); ++r) local[r] = ranks_on[host[r]]++;
  const auto me = static_cast<size_t>(rank);
  rendezvous.local_rank = local[me];
  rendezvous.local_size = ranks_on[host[me]];
  rendezvous.cross_size = 0;
  for (size_t r = 0; r < host.size(); ++r) {
    if (local[r] != local[me]) continue;
    if (r < me) ++rendezvous.cross_rank;
    ++rendezvous.cross_size;
  }
}

}  // namespace

// The first rank of a host is its leader. Position p of a heap hangs under (p - 1) / fan_out, and
// leaders take their positions in ascending order, so the parent of a leader is known already.
std::vector<int> MakeTree(std::span<const int> host, int fan_out) {
  std::vector<int> parent(host.size(), -1);
  std::vector<int> leaders;  // in order of first appearance: rank 0's host is the heap's root
  std::unordered_map<int, int> leader_of;
  for (int rank = 0; rank < static_cast<int>(host.size()); ++rank) {
    const auto [it, first] = leader_of.emplace(host[static_cast<size_t>(rank)], rank);
    if (!first) {
      parent[static_cast<size_t>(rank)] = it->second;
      continue;
    }
    if (!leaders.empty()) {
      const auto position = static_cast<int>(leaders.size());
      parent[static_cast<size_t>(rank)] = leaders[static_cast<size_t>((position - 1) / fan_out)];
    }
    leaders.push_back(rank);
  }
  return parent;
}

std::vector<int> Neighbours(std::span<const int> parent, int rank) {
  std::vector<int> neighbours;
  if (const int up = parent[static_cast<size_t>(rank)]; up >= 0) neighbours.push_back(up);
  for (size_t r = 0; r < parent.size(); ++r) {
    if (parent[r] == rank) neighbours.push_back(static_cast<int>(r));
  }
  return neighbours;
}

std::vector<int> WatchedRanks(std::span<const int> host, std::span<const int> parent, int rank) {
  std::vector<int> leaders;
  for (size_t r = 0; r < parent.size(); ++r) {
    const int up = parent[r];
    if (up < 0 || host[static_cast<size_t>(up)] != host[r]) leaders.push_back(static_cast<int>(r));
  }
  std::vector<int> watched = Neighbours(parent, rank);
  const bool leads = std::ranges::find(leaders, rank) != leaders.end();
  if (!leads || leaders.size() > kWatchedHosts) return watched;
  for (const int leader : leaders) {
    const bool is_known = std::ranges::find(watched, leader) != watched.end();
    if (leader != rank && !is_known) watched.push_back(leader);
  }
  return watched;
}

std::string EncodeHello(const Hello& mine) {
  wire::Hello hello;
  hello.set_version(mine.version);
  hello.set_host(mine.host);
  for (const std::string& plane : mine.planes) hello.add_planes(plane);
  // In the order in which Compare expects them on all ranks.
  for (const SettingText& setting : Describe(mine.config)) {
    if (!setting.agreed) continue;
    wire::Setting* out = hello.add_settings();
    out->set_name(setting.name);
    out->set_value(setting.value);
  }
  return hello.SerializeAsString();
}

// Every rank evaluates this on the same bytes and so comes to the same result or error. Nobody has
// to distribute it.
Result<Rendezvous> Agree(const std::vector<std::string>& encoded, int rank) {
  std::vector<wire::Hello> hellos(encoded.size());
  for (size_t r = 0; r < hellos.size(); ++r) {
    if (!hellos[r].ParseFromString(encoded[r])) {
      return Internal("the hello of rank " + std::to_string(r) + " cannot be read");
    }
  }
  FARANDOLE_RETURN_IF_ERROR(Compare(hellos));
  Result<uint8_t> plane = ChoosePlane(hellos);
  if (!plane.ok()) return plane.status();
  Rendezvous rendezvous;
  rendezvous.host = NumberHosts(hellos);
  for (const wire::Hello& hello : hellos)
    rendezvous.host_names.push_back(hello.host().substr(0, hello.host().find(' ')));
  rendezvous.parent = MakeTree(rendezvous.host);
  // By DeviceKind; the CUDA plane has the number after those of all CPU planes.
  rendezvous.planes = {plane.value(), static_cast<uint8_t>(hellos.front().planes_size())};
  FindLocalRank(rendezvous.host, rank, rendezvous);
  return rendezvous;
}

bool DiffersFromFirst(const Status& status, int rank) {
  return status.code() == Code::kMismatch && status.message().find(Has(rank)) != std::string::npos;
}

Result<Rendezvous> RunRendezvous(Transport& transport, const Hello& mine, int64_t timeout_ns) {
  Result<std::vector<std::string>> gathered = transport.Allgather(EncodeHello(mine), timeout_ns);
  if (!gathered.ok()) return gathered.status();
  Result<Rendezvous> agreed = Agree(gathered.value(), transport.rank());
  if (agreed.ok()) FARANDOLE_RETURN_IF_ERROR(CheckSlots(mine.config, transport.size()));
  return agreed;
}

Status CheckSlots(const Config& config, int ranks) {
  if (config.slots == 0 || config.slots >= ranks) return {};
  return Mismatch("init: the job has " + std::to_string(config.slots) + " slots and " +
                  std::to_string(ranks) + " ranks; expected a slot for each rank");
}

std::string ThisHost() {
  std::string boot;
  // Where there is no /proc it stays empty, and the name alone decides.
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return HostName() + " " + boot;
}

}  // namespace farandole
