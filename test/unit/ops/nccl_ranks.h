// Some ranks over the fake libnccl in one thread: each with a fake GPU, a lane and a NcclWay.
#pragma once

#include <dlfcn.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "ops/nccl/nccl_way.h"
#include "test/fakes/fake_device.h"

namespace farandole {

/// Thread safety: none; nothing here blocks, so that one thread drives all. Lifetime: the library
/// outlives it.
class NcclRanks {
 public:
  NcclRanks(const NcclLibrary& library, int size) : runtime_(size) {
    NcclWayOptions options;
    options.library = &library;
    options.unique_id = library.MakeUniqueId().value();
    options.size = size;
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Rank>());
      Rank& one = *ranks_.back();
      one.lane = CudaLane::Create(runtime_.fake(rank), &one.counters).value();
      options.lane = one.lane.get();
      options.index = rank;
      options.map = "the map";
      options.counters = &one.counters;
      one.way = MakeNcclWay(options);
    }
  }
  ~NcclRanks() {
    for (int rank = 0; rank < size(); ++rank) End(rank);
  }
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  CudaWay& way(int rank) { return *ranks_[static_cast<size_t>(rank)]->way; }
  Counters& counters(int rank) { return ranks_[static_cast<size_t>(rank)]->counters; }
  FakeDevice& device(int rank) { return runtime_.fake(rank); }
  FakeStream& stream(int rank) {
    return *FakeStream::Find(ranks_[static_cast<size_t>(rank)]->lane->stream());
  }
  void Use(int rank) { (void)device(rank).MakeCurrent(); }  // a fake that does not fail
  void End(int rank) {
    Use(rank);
    ranks_[static_cast<size_t>(rank)]->way.reset();
  }

  Status Connect() {
    return StepAll([](CudaWay& way) { return way.Connect(); }, Progress::State::kDone);
  }
  /// Until it is launched on all ranks; one batch each.
  Status Launch(std::span<const Batch> batches) {
    for (int rank = 0; rank < size(); ++rank) {
      Use(rank);
      FARANDOLE_RETURN_IF_ERROR(way(rank).Begin(batches[static_cast<size_t>(rank)]));
    }
    return StepAll([](CudaWay& way) { return way.Step(); }, Progress::State::kLaunched);
  }
  /// Until what was launched last is over on all ranks, or one of them tells of an error.
  Status Finish() {
    for (int rank = 0; rank < size(); ++rank) {
      Use(rank);
      while (!way(rank).end()->IsComplete().value()) {
        FARANDOLE_RETURN_IF_ERROR(way(rank).Check());
        std::this_thread::yield();
      }
    }
    return {};
  }
  Status Run(std::span<const Batch> batches) {
    FARANDOLE_RETURN_IF_ERROR(Launch(batches));
    return Finish();
  }

 private:
  struct Rank {
    Counters counters;
    std::unique_ptr<CudaLane> lane;
    std::unique_ptr<CudaWay> way;
  };

  Status StepAll(const std::function<Progress(CudaWay&)>& step, Progress::State last) {
    std::vector<bool> there(ranks_.size());
    for (size_t left = there.size(); left > 0;) {
      for (int rank = 0; rank < size(); ++rank) {
        if (there[static_cast<size_t>(rank)]) continue;
        Use(rank);
        const Progress progress = step(way(rank));
        if (progress.state == Progress::State::kFailed) return progress.status;
        if (progress.state != last) continue;
        there[static_cast<size_t>(rank)] = true;
        --left;
      }
      std::this_thread::yield();
    }
    return {};
  }

  FakeDeviceRuntime runtime_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace farandole
