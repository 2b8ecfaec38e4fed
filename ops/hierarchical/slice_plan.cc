#include "ops/hierarchical/slice_plan.h"

#include "ops/cpu/batch.h"

namespace farandole {

SlotRange SlotsOf(const Batch& batch, std::span<const int> members) {
  return {batch.slots[static_cast<size_t>(members.front())].begin,
          batch.slots[static_cast<size_t>(members.back())].end};
}

Topology::Topology(std::span<const int> ranks, int my_index, std::span<const int> memory) {
  std::vector<int> names;  // by number of the host
  for (size_t p = 0; p < ranks.size(); ++p) {
    const int name = memory[static_cast<size_t>(ranks[p])];
    auto found = name < 0 ? names.end() : std::find(names.begin(), names.end(), name);
    const auto number = static_cast<size_t>(found - names.begin());
    if (found == names.end()) {
      names.push_back(name);
      host.emplace_back();
    }
    host_of.push_back(static_cast<int>(number));
    host[number].push_back(static_cast<int>(p));
  }
  my_host = host_of[static_cast<size_t>(my_index)];
  my_local = static_cast<int>(std::ranges::find(mine(), my_index) - mine().begin());
  shards = static_cast<int>(std::ranges::min_element(host, {}, &std::vector<int>::size)->size());
}

/// Whether the tree over the batch's slots can be evaluated within each host first: each host's
/// members hold one node of it, and its sum is what crosses, not a rounded one.
bool HostsAreNodes(const Batch& batch, const Topology& topology) {
  if (SizeOf(batch.wire) < SizeOf(DType::kFloat32)) return false;
  return std::ranges::all_of(topology.host, [&](const std::vector<int>& host) {
    const bool is_contiguous = host.back() - host.front() + 1 == std::ssize(host);
    return is_contiguous && IsSlotNode(SlotsOf(batch, host), batch.slots.back().end);
  });
}

/// Flat: integers whose result does not follow from the hosts' results in their own type; and what
/// is tiny and has the same bits there, as integers have and what has slots.
Path PathOf(const Batch& batch, const Topology& topology) {
  // Of all members together, sent to all of them at once: then the latency of three rounds counts
  // more than the bytes on the link.
  constexpr int64_t kOneShotBytes = 64 * 1024;
  const bool broadcast = batch.kind == OpKind::kBroadcast;
  if (!broadcast && batch.kind != OpKind::kAllreduce) return Path::kFlat;
  const int64_t bytes = batch.count * SizeOf(WireOf(batch));
  const bool tiny = bytes * static_cast<int64_t>(batch.ranks.size()) <= kOneShotBytes;
  if (broadcast) return tiny ? Path::kFlat : Path::kComposed;
  if (!batch.slots.empty()) {
    return tiny || !HostsAreNodes(batch, topology) ? Path::kFlat : Path::kComposed;
  }
  if (IsFloating(batch.dtype)) return tiny ? Path::kOneShot : Path::kComposed;
  const bool exact = batch.op != ReduceOp::kAverage && batch.postscale == 1.0;
  return exact && !tiny ? Path::kComposed : Path::kFlat;
}

int64_t SlicePlan::ShardBytes(int64_t least_bytes, const Topology& topology) {
  constexpr int64_t kHostsPerShard = 16;
  constexpr int64_t kMostShards = 64;  // of a slice, counted in the least length
  const auto hosts = static_cast<int64_t>(topology.host.size());
  const int64_t most = std::clamp<int64_t>(kMostShards / topology.shards, 1, 4);
  return least_bytes * std::clamp<int64_t>((hosts + kHostsPerShard - 1) / kHostsPerShard, 1, most);
}

Slice SlicePlan::ShardOf(int local, int64_t slice) const {
  const int64_t count = CountOf(slice);
  if (local >= shards_) return {count, 0};
  return farandole::ShardOf(count, shards_, local, kAnyElementAlign);
}

SlicePlan::Next SlicePlan::After(int64_t scattered, int64_t crossed, int64_t gathered) const {
  if (scattered < slices() && scattered < gathered + kAhead) return Next::kScatter;
  return gathered < crossed ? Next::kGather : Next::kNothing;
}

}  // namespace farandole
