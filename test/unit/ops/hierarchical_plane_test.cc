#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/hierarchical/plane.h"
#include "ops/shm/plane.h"

namespace farandole {
namespace {

/// Shared memory that stands in for the network, and the longest batch that it carried.
class MeasuredPlane final : public DataPlane {
 public:
  MeasuredPlane(std::shared_ptr<SharedMemory> memory, int rank)
      : plane_(std::move(memory), rank, BestCpuKernels()) {}
  const char* name() const override { return plane_.name(); }
  Status AddSet(uint32_t uid, std::span<const int> ranks, int my_index) override {
    return plane_.AddSet(uid, ranks, my_index);
  }
  void RemoveSet(uint32_t uid) override { plane_.RemoveSet(uid); }
  Result<PlaneOperation*> Start(const Batch& batch) override {
    longest_bytes = std::max(longest_bytes, batch.count * SizeOf(batch.dtype));
    return plane_.Start(batch);
  }

  int64_t longest_bytes = 0;

 private:
  SharedMemoryPlane plane_;
};

/// Sums 96 KiB over `hosts` hosts of one rank each, with shards of 4 KiB between few hosts.
/// @return The bytes of the longest shard.
int64_t LongestShard(int hosts) {
  const auto ranks = static_cast<size_t>(hosts);
  std::vector<FutexDoorbell> bells(ranks);
  std::vector<Doorbell*> bell_list;
  for (FutexDoorbell& bell : bells) bell_list.push_back(&bell);
  HeapMemory::Options small;
  small.slot_bytes = 8192;
  const auto flat_memory = std::make_shared<HeapMemory>(bell_list, small);
  const auto cross_memory = std::make_shared<HeapMemory>(bell_list, small);
  std::vector<int> members(ranks);
  std::iota(members.begin(), members.end(), 0);
  std::vector<float> tensor(ranks * 24 * 1024, 1.0f);
  std::vector<Segment> segments(ranks);
  std::vector<Batch> batches(ranks);
  std::vector<std::unique_ptr<DataPlane>> flat;
  std::vector<std::unique_ptr<MeasuredPlane>> cross;
  std::vector<std::unique_ptr<HierarchicalPlane>> planes;
  std::vector<PlaneOperation*> operations;
  for (size_t at = 0; at < ranks; ++at) {
    const int rank = members[at];
    flat.push_back(std::make_unique<SharedMemoryPlane>(flat_memory, rank, BestCpuKernels()));
    cross.push_back(std::make_unique<MeasuredPlane>(cross_memory, rank));
    planes.push_back(std::make_unique<HierarchicalPlane>(
        HierarchicalPlane::Options{members, nullptr, {cross[at].get()}, flat[at].get(), 4096},
        BestCpuKernels()));
    EXPECT_TRUE(planes[at]->AddSet(0, members, rank).ok());
    float* const data = tensor.data() + at * 24 * 1024;
    segments[at] = {data, data, 24 * 1024};
    batches[at].number = 1;
    batches[at].ranks = members;
    batches[at].my_index = rank;
    batches[at].segments = {&segments[at], 1};
    batches[at].count = 24 * 1024;
    operations.push_back(planes[at]->Start(batches[at]).value());
  }
  while (!operations.empty()) {
    std::erase_if(operations, [](PlaneOperation* operation) {
      return operation->Step().state == Progress::State::kDone;
    });
  }
  EXPECT_EQ(tensor, std::vector<float>(tensor.size(), static_cast<float>(hosts)));
  return cross[0]->longest_bytes;
}

TEST(HierarchicalPlane, SendsLongerShardsBetweenManyHosts) {
  EXPECT_EQ(LongestShard(2), 4096);
  EXPECT_EQ(LongestShard(16), 4096);
  EXPECT_EQ(LongestShard(33), 3 * 4096);
  EXPECT_EQ(LongestShard(70), 4 * 4096);
}

}  // namespace
}  // namespace farandole
