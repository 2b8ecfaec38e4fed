// One process set of a CUDA plane: how it gets its way, and what all sets of the plane share.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/cuda/cuda_plane_parts.h"
#include "ops/cuda/host_set.h"
#include "ops/cuda/lane.h"
#include "ops/cuda/set_up.h"
#include "ops/cuda/way.h"

namespace farandole {

/// One GPU's lane and staging memory, had at the first batch.
struct CudaHome {
  CudaHome(CudaPlaneParts given, int gpu) : parts(std::move(given)), distance(gpu) {}

  CudaPlaneParts parts;
  const int distance;  ///< Which GPU: RankGpu.
  std::unique_ptr<CudaLane> lane;
  std::unique_ptr<Staging> staging;
  /// The set of all ranks, once it is connected over NCCL.
  class CudaSet* all_over_nccl = nullptr;

  /// Does nothing once it succeeded. @return What RankGpus::At or the device returns.
  Status Open();
};

/// Thread safety: the holder of the engine lock. Lifetime: `home` outlives it.
class CudaSet {
 public:
  CudaSet(CudaHome& home, uint32_t uid, std::span<const int> ranks, int my_index);
  ~CudaSet();
  CudaSet(const CudaSet&) = delete;
  CudaSet& operator=(const CudaSet&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  int my_index() const { return my_index_; }

  /// Before the first batch: opens the device, exchanges, chooses, connects; kDone when the way is
  /// there, and says it in the log of the set's first rank. What fails on one rank in opening its
  /// device fails on all members, by its sentence.
  Progress Prepare();
  bool prepared() const { return prepared_; }
  /// Once prepared.
  CudaWay& way() { return *way_; }
  /// An error that came after a launch.
  Status Check() { return way_ == nullptr ? Status() : way_->Check(); }
  /// Gives up all that is under way.
  void Abandon();

 private:
  Status BeginSetUp();
  RankCard MakeCard(const Status& opened);
  CudaSet* FindParent() const;
  void MakeWay();
  NcclWayOptions OptionsOfNccl() const;
  void SayWay();
  void Say(LogLevel level, const std::string& what);

  CudaHome& home_;
  const uint32_t uid_;
  const std::vector<int> ranks_;
  const int my_index_;
  std::unique_ptr<HostSet> host_;  // with more than one member, until the end: staging uses it
  bool nccl_shrinks_ = false;
  CudaSet* parent_ = nullptr;  // until prepared: the set whose communicator mine is made from
  std::unique_ptr<WaySetUp> set_up_;
  std::unique_ptr<CudaWay> way_;
  bool prepared_ = false;
};

}  // namespace farandole
