#include "coordinator/control/share_memory.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <sstream>
#include <utility>

#include "coordinator/control/host_transport.h"
#include "coordinator/protocol/request.h"
#include "core/clock.h"

namespace farandole {
namespace {

using Cores = std::bitset<8192>;  // more than a kernel can be built for

/// What a rank says about its process.
struct ProcessHello {
  pid_t pid = 0;
  std::string pids;     // which numbers of processes it speaks of: its PID namespace
  Cores cores;          // that it may use
  std::string address;  // of the memory that it has created; or empty
};

std::string PidNamespace() {
  char name[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", name, sizeof(name) - 1);
  return length > 0 ? name : "unknown";
}

Cores CoresOfThread() {
  Cores cores;
  unsigned long words[Cores().size() / (8 * sizeof(unsigned long))] = {};
  if (sched_getaffinity(0, sizeof(words), reinterpret_cast<cpu_set_t*>(words)) != 0) return cores;
  constexpr size_t kBits = 8 * sizeof(words[0]);
  for (size_t core = 0; core < cores.size(); ++core) {
    cores[core] = ((words[core / kBits] >> core % kBits) & 1) != 0;
  }
  return cores;
}

// First what ranks have in common, mostly, since an allgather sends only what differs. The cores
// are a list of numbers that ends with -1; the address, which has spaces, is last.
std::string Encode(const std::string& address) {
  std::ostringstream text;
  text << PidNamespace() << ' ';
  const Cores cores = CoresOfThread();
  for (size_t core = 0; core < cores.size(); ++core) {
    if (cores[core]) text << core << ' ';
  }
  text << "-1 " << getpid() << ' ' << address;
  return text.str();
}

ProcessHello Decode(const std::string& text) {
  ProcessHello from;
  std::istringstream words(text);
  words >> from.pids;
  for (int core = 0; words >> core && core >= 0;) from.cores.set(static_cast<size_t>(core));
  words >> from.pid;
  std::getline(words >> std::ws, from.address);
  return from;
}

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
Status TryMemory(HostMemory& memory, const std::vector<int>& ranks, size_t me) {
  return memory.Join(kGlobalSet, ranks, static_cast<int>(me)).status();
}

// Between the two exchanges: each peer waits in the second one for this rank, so it is alive, and
// no other process has its number. In another PID namespace the number would mean another process.
void WatchPeers(const std::vector<ProcessHello>& here, const std::vector<int>& ranks, size_t me,
                const std::function<void(int rank, pid_t pid)>& watch) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i == me || (me != 0 && i != 0)) continue;
    if (here[i].pids == here[me].pids) watch(ranks[i], here[i].pid);
  }
}

// From what each rank says of its attempt: empty, or why it failed.
void FormGroups(const std::vector<std::string>& failures, std::span<const int> host,
                HostGroup& shared) {
  std::vector<int> ranks_on(host.size(), 0);  // by host
  std::vector<bool> fails(host.size(), false);
  for (size_t r = 0; r < host.size(); ++r) {
    const auto on = static_cast<size_t>(host[r]);
    ++ranks_on[on];
    if (failures[r].empty()) continue;
    fails[on] = true;
    if (shared.failure.empty()) shared.failure = "rank " + std::to_string(r) + ": " + failures[r];
  }
  for (const int number : host) {
    const auto on = static_cast<size_t>(number);
    shared.group.push_back(ranks_on[on] > 1 && !fails[on] ? number : -1);
  }
}

}  // namespace

// All ranks exchange twice, also those without a peer on their host.
Result<HostGroup> ShareMemory(Transport& transport, std::span<const int> host, FutexDoorbell& bell,
                              const std::function<void(int rank, pid_t pid)>& watch,
                              int64_t timeout_ns) {
  const int64_t deadline_ns = SteadyClock().NowNs() + timeout_ns;
  const auto left_ns = [&] { return std::max<int64_t>(deadline_ns - SteadyClock().NowNs(), 0); };
  const int rank = transport.rank();
  const std::vector<int> ranks = RanksOf(host, host[static_cast<size_t>(rank)]);
  const HostMemory::User user{rank, ranks, MailboxBytes(ranks.size())};
  const auto me = static_cast<size_t>(std::ranges::lower_bound(ranks, rank) - ranks.begin());
  const bool creates = ranks.size() > 1 && me == 0;

  Result<std::shared_ptr<HostMemory>> memory = Unavailable("not created");
  if (creates) memory = HostMemory::Create(user);
  Result<std::vector<std::string>> texts =
      transport.Allgather(Encode(memory.ok() ? memory.value()->address() : ""), left_ns());
  if (!texts.ok()) return texts.status();
  std::vector<ProcessHello> here;  // as `ranks`; those of other hosts nobody needs
  for (const int peer : ranks) here.push_back(Decode(texts.value()[static_cast<size_t>(peer)]));
  const std::string& address = here.front().address;
  if (!creates && !address.empty()) memory = HostMemory::Open(address, user);
  Status tried = memory.ok() ? TryMemory(*memory.value(), ranks, me) : memory.status();
  if (ranks.size() == 1) tried = Status();  // has nobody to share memory with
  WatchPeers(here, ranks, me, watch);
  Result<std::vector<std::string>> failures =
      transport.Allgather(tried.ok() ? "" : tried.message(), left_ns());
  if (!failures.ok()) return failures.status();

  HostGroup shared;
  FormGroups(failures.value(), host, shared);
  if (shared.group[static_cast<size_t>(rank)] < 0) return shared;
  shared.memory = std::move(memory).value();
  shared.memory->UseBell(bell);
  Cores cores;
  for (const ProcessHello& peer : here) cores |= peer.cores;
  shared.cores = static_cast<int>(cores.count());
  return shared;
}

}  // namespace farandole
