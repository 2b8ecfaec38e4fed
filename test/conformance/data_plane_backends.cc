#include "test/conformance/data_plane_backends.h"

#include <numeric>
#include <span>

#include "ops/cpu/kernels.h"
#include "ops/hierarchical/plane.h"
#include "ops/p2p/plane.h"
#include "ops/p2p/tcp/link.h"
#include "ops/shm/host_memory.h"
#include "ops/shm/plane.h"
#include "test/support/loopback_streams.h"

namespace farandole {
namespace {

/// Where the tensors of allreduces lie.
enum class Tensors {
  kOnHeap,
  kInBuffers,
  kMixed,  ///< On each rank by turns, which are no two ranks' alike.
};

BufferSource BuffersOf(const std::shared_ptr<SharedMemory>& memory, int rank, Tensors tensors) {
  return [=, turn = rank](size_t bytes) mutable -> std::shared_ptr<std::byte> {
    if (tensors == Tensors::kMixed && ++turn % (rank + 2) == 0) return nullptr;
    return memory->Allocate(bytes).value();
  };
}

/// One for each of `count` ranks.
std::vector<Doorbell*> AddBells(PlaneGroup& group, size_t count) {
  std::vector<Doorbell*> bells;
  for (size_t rank = 0; rank < count; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    bells.push_back(group.bells.back().get());
  }
  return bells;
}

PlaneGroup MakeSharedMemory(int ranks, HeapMemory::Options options, Tensors tensors) {
  PlaneGroup group;
  const std::vector<Doorbell*> bells = AddBells(group, static_cast<size_t>(ranks));
  const auto hub = std::make_shared<HeapMemory>(bells, options);
  for (int rank = 0; rank < ranks; ++rank) {
    group.planes.push_back(std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()));
    if (tensors != Tensors::kOnHeap) group.buffers.push_back(BuffersOf(hub, rank, tensors));
  }
  return group;
}

/// As processes have it: each rank maps the file for itself, also the doorbells. No file: the tests
/// of the group fail.
PlaneGroup MakeHostMemory(int ranks, Tensors tensors) {
  PlaneGroup group;
  std::string address;
  std::vector<int> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  for (int rank = 0; rank < ranks; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    const HostMemory::User user{rank, all};
    Result<std::shared_ptr<HostMemory>> memory =
        rank == 0 ? HostMemory::Create(user) : HostMemory::Open(address, user);
    if (!memory.ok()) return {};
    if (rank == 0) address = memory.value()->address();
    memory.value()->UseBell(*group.bells.back());
    group.planes.push_back(
        std::make_unique<SharedMemoryPlane>(memory.value(), rank, BestCpuKernels()));
    if (tensors == Tensors::kOnHeap) continue;
    group.buffers.push_back(BuffersOf(memory.value(), rank, tensors));
  }
  return group;
}

/// A hub for each first rank: sets of different ranks may have one uid, as on different hosts.
class HubByFirstRank final : public SharedMemory {
 public:
  explicit HubByFirstRank(const std::vector<Doorbell*>& bells)
      : SharedMemory(Options{}), bells_(bells) {
    for (size_t rank = 0; rank < bells.size(); ++rank) {
      hubs_.push_back(std::make_unique<HeapMemory>(bells));
    }
  }
  const char* name() const override { return "local"; }
  Result<std::shared_ptr<std::byte>> Join(uint32_t set, std::span<const int> ranks,
                                          int my_index) override {
    return hubs_[static_cast<size_t>(ranks.front())]->Join(set, ranks, my_index);
  }
  Doorbell* bell(int rank) const override { return bells_[static_cast<size_t>(rank)]; }

 protected:
  Result<int64_t> Take(const Buffers&, size_t) override { return ResourceExhausted("no buffers"); }
  void Free(int64_t, size_t) override {}

 private:
  const std::vector<Doorbell*> bells_;
  std::vector<std::unique_ptr<HeapMemory>> hubs_;
};

/// Hosts are played: one of `hosts` for each rank. Shared memory stands in for the network too.
PlaneGroup MakeHierarchical(const std::vector<int>& hosts, int64_t shard_bytes) {
  PlaneGroup group;
  group.hosts = hosts;
  const std::vector<Doorbell*> bells = AddBells(group, hosts.size());
  const auto local = std::make_shared<HubByFirstRank>(bells);
  const auto cross = std::make_shared<HubByFirstRank>(bells);
  const auto second = std::make_shared<HubByFirstRank>(bells);
  const auto flat = std::make_shared<HeapMemory>(bells);
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    const auto use = [&](const std::shared_ptr<SharedMemory>& memory) {
      group.used.push_back(std::make_unique<SharedMemoryPlane>(memory, rank, BestCpuKernels()));
      return group.used.back().get();
    };
    HierarchicalPlane::Options options{hosts, use(local), {use(cross), use(second)}, use(flat)};
    options.shard_bytes = shard_bytes;
    group.planes.push_back(std::make_unique<HierarchicalPlane>(options, BestCpuKernels()));
  }
  return group;
}

/// As processes have it: sockets of each pair of ranks, over the loopback interface.
PlaneGroup MakeTcp(int ranks, const LoopbackOptions& options) {
  PlaneGroup group;
  const std::vector<Doorbell*> bells = AddBells(group, static_cast<size_t>(ranks));
  group.streams = MakeLoopbackStreams(bells, options);
  for (size_t rank = 0; rank < bells.size(); ++rank) {
    LinkOptions link;
    link.doorbell = bells[rank];
    group.planes.push_back(MakeP2pPlane("tcp", MakeTcpLinks(*group.streams[rank], 0, link),
                                        BestCpuKernels(), nullptr));
  }
  return group;
}

/// Played hosts, between which there are sockets.
PlaneGroup MakeHierarchicalOverTcp(const std::vector<int>& hosts, int64_t shard_bytes) {
  PlaneGroup group;
  group.hosts = hosts;
  const std::vector<Doorbell*> bells = AddBells(group, hosts.size());
  group.streams = MakeLoopbackStreams(bells);
  const auto local = std::make_shared<HubByFirstRank>(bells);
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto own = [&](std::unique_ptr<DataPlane> plane) {
      group.used.push_back(std::move(plane));
      return group.used.back().get();
    };
    LinkOptions link;
    link.doorbell = bells[rank];
    const auto tcp = [&](int number) {
      return own(MakeP2pPlane("tcp", MakeTcpLinks(*group.streams[rank], number, link),
                              BestCpuKernels(), nullptr));
    };
    DataPlane* const in_host =
        own(std::make_unique<SharedMemoryPlane>(local, static_cast<int>(rank), BestCpuKernels()));
    HierarchicalPlane::Options options{hosts, in_host, {tcp(0), tcp(1)}, tcp(2)};
    options.shard_bytes = shard_bytes;
    group.planes.push_back(std::make_unique<HierarchicalPlane>(options, BestCpuKernels()));
  }
  return group;
}

PlaneBackend OverTcp(const char* name, const LoopbackOptions& options) {
  return {name, [options](int ranks) { return MakeTcp(ranks, options); }};
}

PlaneParam Hierarchical(const std::string& name, const std::vector<int>& hosts,
                        int64_t shard_bytes) {
  const auto make = [=](int) { return MakeHierarchical(hosts, shard_bytes); };
  return {{name, make}, static_cast<int>(hosts.size())};
}

PlaneBackend OverSlots(const char* name, Tensors tensors) {
  return {name,
          [tensors](int ranks) { return MakeSharedMemory(ranks, HeapMemory::Options(), tensors); }};
}

PlaneBackend OfHost(const char* name, Tensors tensors) {
  return {name, [tensors](int ranks) { return MakeHostMemory(ranks, tensors); }};
}

/// Two small slots: every tensor takes many chunks, and every chunk waits for a slot.
PlaneBackend SharedMemoryWithSmallSlots(const char* name, StorePolicy store_policy,
                                        Tensors tensors) {
  return {name, [store_policy, tensors](int ranks) {
            HeapMemory::Options options;
            options.slots = 2;
            options.slot_bytes = 2048;
            options.store_policy = store_policy;
            return MakeSharedMemory(ranks, options, tensors);
          }};
}

}  // namespace

std::vector<PlaneParam> BackendsOverTcp() {
  std::vector<PlaneParam> params;
  for (const int ranks : {2, 3, 4}) params.push_back({OverTcp("Tcp", {}), ranks});
  params.push_back({OverTcp("TcpStripedSmallBuffers", {2, 4096}), 3});
  const auto hierarchical = [&](const char* name, const std::vector<int>& hosts) {
    const auto make = [=](int) { return MakeHierarchicalOverTcp(hosts, 16 * 1024); };
    params.push_back({{name, make}, static_cast<int>(hosts.size())});
  };
  hierarchical("HierarchicalOneEach", {0, 1});
  hierarchical("HierarchicalOneHasOne", {0, 0, 1});
  hierarchical("HierarchicalEven", {0, 0, 1, 1});
  return params;
}

std::vector<PlaneParam> BackendsInOneProcess() {
  std::vector<PlaneParam> params;
  for (const int ranks : {1, 2, 3, 4, 7}) {
    params.push_back({OverSlots("SharedMemory", Tensors::kOnHeap), ranks});
  }
  for (const int ranks : {2, 3, 7}) {
    params.push_back({OverSlots("SharedMemoryInBuffers", Tensors::kInBuffers), ranks});
  }
  // Between processes mpi_conformance has all these numbers of ranks.
  params.push_back({OfHost("HostMemory", Tensors::kOnHeap), 3});
  params.push_back({OfHost("HostMemoryInBuffers", Tensors::kInBuffers), 3});
  params.push_back({OfHost("HostMemoryMixed", Tensors::kMixed), 2});
  for (const int ranks : {1, 2, 3, 4, 7}) params.push_back({OverTcp("Tcp", {}), ranks});
  // Every long message is written and read in many parts, by turns on two sockets.
  params.push_back({OverTcp("TcpStripedSmallBuffers", {2, 4096}), 3});
  const auto with_small_slots = [&](const char* name, StorePolicy policy, Tensors tensors,
                                    int ranks) {
    params.push_back({SharedMemoryWithSmallSlots(name, policy, tensors), ranks});
  };
  with_small_slots("SharedMemoryCachedMixed", StorePolicy::kCached, Tensors::kMixed, 3);
  with_small_slots("SharedMemoryCached", StorePolicy::kCached, Tensors::kOnHeap, 2);
  with_small_slots("SharedMemoryStreamed", StorePolicy::kStreamed, Tensors::kOnHeap, 5);
  params.push_back(Hierarchical("HierarchicalOneHasOne", {0, 0, 1}, 256 * 1024));
  params.push_back(Hierarchical("HierarchicalEven", {0, 0, 1, 1}, 256 * 1024));
  params.push_back(Hierarchical("HierarchicalSmallSlices", {0, 0, 1, 1}, 1024));
  // Two of the first host, interleaved with three of another, and two without shared memory.
  params.push_back(Hierarchical("HierarchicalUneven", {4, 2, 2, -1, 4, 2, -2}, 32'768));
  // With 8 or 16 slots each host holds a node of their tree, within the first and between all of
  // which sums take another order than that of ranks.
  params.push_back(Hierarchical("HierarchicalNodes", {0, 0, 0, 0, 1, 2, 3}, 32'768));
  return params;
}

}  // namespace farandole
