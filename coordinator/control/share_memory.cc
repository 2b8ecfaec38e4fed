#include "coordinator/control/share_memory.h"

#include <algorithm>
#include <utility>

#include "coordinator/protocol/request.h"
#include "core/clock.h"

namespace farandole {
namespace {

// Global ranks of one host, ascending.
std::vector<int> RanksOf(std::span<const int> host, int number) {
  std::vector<int> ranks;
  for (size_t r = 0; r < host.size(); ++r) {
    if (host[r] == number) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

// Takes the memory of a set and releases it: a lack of memory, or a system that cannot allocate it
// in advance, is found while MPI can still be chosen.
Status TryMemory(HostMemory& memory, const std::vector<int>& ranks, int rank) {
  const auto me = std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return memory.Join(kGlobalSet, ranks, static_cast<int>(me)).status();
}

}  // namespace

// All ranks exchange twice, also those without a peer on their host.
Result<SharedMemory> ShareMemory(Transport& transport, std::span<const int> host, Doorbell* bell,
                                 int64_t timeout_ns) {
  const int64_t deadline_ns = SteadyClock().NowNs() + timeout_ns;
  const auto left_ns = [&] { return std::max<int64_t>(deadline_ns - SteadyClock().NowNs(), 0); };
  const int rank = transport.rank();
  const std::vector<int> peers = RanksOf(host, host[static_cast<size_t>(rank)]);
  const HostMemory::User user{rank, bell, static_cast<int>(peers.size())};
  const bool creates = peers.size() > 1 && peers.front() == rank;

  Result<std::shared_ptr<HostMemory>> memory = Unavailable("not created");
  if (creates) memory = HostMemory::Create(user);
  Result<std::vector<std::string>> addresses =
      transport.Allgather(memory.ok() ? memory.value()->address() : "", left_ns());
  if (!addresses.ok()) return addresses.status();
  const std::string& address = addresses.value()[static_cast<size_t>(peers.front())];
  if (!creates && !address.empty()) memory = HostMemory::Open(address, user);
  Status tried = memory.ok() ? TryMemory(*memory.value(), peers, rank) : memory.status();
  if (peers.size() == 1) tried = Status();  // has nobody to share memory with
  Result<std::vector<std::string>> failures =
      transport.Allgather(tried.ok() ? "" : tried.message(), left_ns());
  if (!failures.ok()) return failures.status();

  SharedMemory shared;
  std::vector<int> ranks_on(host.size(), 0);  // by host
  std::vector<bool> fails(host.size(), false);
  for (size_t r = 0; r < host.size(); ++r) {
    const auto on = static_cast<size_t>(host[r]);
    ++ranks_on[on];
    const std::string& failure = failures.value()[r];
    if (failure.empty()) continue;
    fails[on] = true;
    if (shared.failure.empty()) shared.failure = "rank " + std::to_string(r) + ": " + failure;
  }
  for (const int number : host) {
    const auto on = static_cast<size_t>(number);
    shared.group.push_back(ranks_on[on] > 1 && !fails[on] ? number : -1);
  }
  if (shared.group[static_cast<size_t>(rank)] >= 0) shared.memory = std::move(memory).value();
  return shared;
}

}  // namespace farandole
