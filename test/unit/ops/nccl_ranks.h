// Some ranks over the fake libnccl: each with a fake GPU, a launch queue and an NCCL backend.
#pragma once

#include <dlfcn.h>

#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "ops/gpu/nccl/backend.h"
#include "test/fakes/fake_device.h"

namespace farandole {

/// Thread safety: none; launch threads do the rest. Lifetime: the library outlives it.
class NcclRanks {
 public:
  NcclRanks(const NcclLibrary& library, int size, int64_t slice_bytes = kNcclSliceBytes,
            bool registers = false)
      : runtime_(size) {
    NcclSetOptions options;
    options.registers = registers;
    options.unique_id = library.MakeUniqueId().value();
    options.size = size;
    options.ranks_text = "who is where";
    for (int rank = 0; rank < size; ++rank) {
      Rank& one = *ranks_.emplace_back(std::make_unique<Rank>());
      one.queue = std::make_unique<LaunchQueue>(
          LaunchStreams::Create(runtime_.fake(rank), &one.counters).value(), nullptr);
      options.index = rank;
      one.backend = MakeNcclBackend(library, *one.queue, options, slice_bytes);
    }
  }
  ~NcclRanks() {
    for (int rank = 0; rank < size(); ++rank) device(rank).ReleaseStreams();
    for (const auto& rank : ranks_) rank->backend = nullptr;
  }
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  LaunchQueue& queue(int rank) { return *ranks_[static_cast<size_t>(rank)]->queue; }
  Counters& counters(int rank) { return ranks_[static_cast<size_t>(rank)]->counters; }
  FakeDevice& device(int rank) { return runtime_.fake(rank); }
  FakeStream& collective(int rank) { return *device(rank).streams().at(1); }
  void End(int rank) { ranks_[static_cast<size_t>(rank)]->backend = nullptr; }

  Result<std::shared_ptr<LaunchTask>> Begin(int rank, const Batch& batch) {
    return ranks_[static_cast<size_t>(rank)]->backend->Begin(batch);
  }
  /// Until it is launched, or the rank's queue has failed.
  Status Await(int rank, const LaunchTask& task) {
    while (!task.launched()) {
      if (queue(rank).failed()) return queue(rank).failure();
      std::this_thread::yield();
    }
    return {};
  }
  /// One batch each, until all are complete, or one has failed.
  Status Run(std::span<const Batch> batches) {
    std::vector<std::shared_ptr<LaunchTask>> tasks;
    for (int rank = 0; rank < size(); ++rank) {
      auto task = Begin(rank, batches[static_cast<size_t>(rank)]);
      if (!task.ok()) return task.status();
      tasks.push_back(task.value());
    }
    for (int rank = 0; rank < size(); ++rank) {
      FARANDOLE_RETURN_IF_ERROR(Await(rank, *tasks[static_cast<size_t>(rank)]));
    }
    for (int rank = 0; rank < size(); ++rank) {
      while (!tasks[static_cast<size_t>(rank)]->end->IsComplete().value()) {
        if (queue(rank).failed()) return queue(rank).failure();
        std::this_thread::yield();
      }
    }
    return {};
  }

 private:
  struct Rank {
    Counters counters;
    std::unique_ptr<LaunchQueue> queue;
    std::unique_ptr<GpuBackend> backend;
  };

  FakeDeviceRuntime runtime_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace farandole
