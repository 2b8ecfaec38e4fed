// A plane that finishes late: what an engine meets when batches of several sets end out of order.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "ops/data_plane.h"

namespace farandole {

/// Wraps a plane; each batch reports done only after some further Steps, drawn from a seed. Batches
/// of one set still end in order; those of different sets overtake each other.
///
/// Thread safety: as the wrapped plane. Lifetime: owns it.
class LatePlane final : public DataPlane {
 public:
  struct Options {
    uint64_t seed = 1;
    int max_extra_steps = 50;
    int64_t poll_after_ns = 0;  ///< What a held-back operation answers.
  };

  LatePlane(std::unique_ptr<DataPlane> inner, Options options);
  ~LatePlane() override;

  const char* name() const override { return "late"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override;
  Result<PlaneOperation*> Start(const Batch& batch) override;

 private:
  class Operation;

  bool IsOldestOfItsSet(const Operation& operation) const;
  void Finish(const Operation& operation);

  const std::unique_ptr<DataPlane> inner_;
  const Options options_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Operation>> in_flight_;  // in the order started
};

}  // namespace farandole
