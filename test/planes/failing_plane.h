// A plane that fails on purpose: what an engine meets when a library or the memory does.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "ops/data_plane.h"

namespace farandole {

/// Wraps a plane; batches chosen by a predicate, and one process set, fail with a given error. All
/// else passes through.
///
/// Thread safety: as the wrapped plane. Lifetime: owns it.
class FailingPlane final : public DataPlane {
 public:
  struct Options {
    std::function<bool(const Batch&)> fails = nullptr;  ///< In Start.
    int64_t refused_set = -1;                           ///< In AddSet; -1: none.
    bool quantizes = false;                             ///< See DataPlane.
    Status error = ResourceExhausted("no memory is left for a buffer");
  };
  FailingPlane(std::unique_ptr<DataPlane> inner, Options options)
      : inner_(std::move(inner)), options_(std::move(options)) {}

  const char* name() const override { return "failing"; }
  bool quantizes() const override { return options_.quantizes; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override {
    return set == options_.refused_set ? options_.error : inner_->AddSet(set, ranks, my_index);
  }
  void RemoveSet(uint32_t set) override { inner_->RemoveSet(set); }
  Result<PlaneOperation*> Start(const Batch& batch) override {
    if (options_.fails && options_.fails(batch)) return options_.error;
    return inner_->Start(batch);
  }

 private:
  const std::unique_ptr<DataPlane> inner_;
  const Options options_;
};

}  // namespace farandole
