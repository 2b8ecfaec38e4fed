// A plane some of whose batches never complete: what an engine meets when a peer hangs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ops/data_plane.h"

namespace farandole {

/// Wraps a plane; batches chosen by a predicate never reach it: their Step returns kWaiting, by
/// doorbell, until Abandon. All others pass through.
///
/// Thread safety: as the wrapped plane. Lifetime: owns it.
class StoppingPlane final : public DataPlane {
 public:
  using Predicate = std::function<bool(const Batch&)>;

  /// @param on_abandon  Called in each Abandon of a stopped batch.
  StoppingPlane(std::unique_ptr<DataPlane> inner, Predicate stops,
                std::function<void()> on_abandon = nullptr);
  ~StoppingPlane() override;

  /// Batches of one process set.
  static Predicate Set(uint32_t set);
  /// The batches of one Decision.
  static Predicate Decision(int64_t number);

  const char* name() const override { return "stopping"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override;
  Result<PlaneOperation*> Start(const Batch& batch) override;

  /// Batches that are stopped and not abandoned.
  int stopped() const { return static_cast<int>(stopped_.size()); }
  /// Stopped batches that were abandoned.
  int abandoned() const { return abandoned_; }

 private:
  class Stopped;

  const std::unique_ptr<DataPlane> inner_;
  const Predicate stops_;
  const std::function<void()> on_abandon_;
  std::vector<std::unique_ptr<Stopped>> stopped_;
  int abandoned_ = 0;
};

}  // namespace farandole
