// A plane whose library call does not return: what an engine meets when MPI or a driver hangs.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "core/borrowed_memory.h"
#include "ops/data_plane.h"

namespace farandole {

/// Wraps a plane. Before it passes a Start or a Step on, it is inside a library call that returns
/// at once, or, where a predicate says so, only when the test opens the gate. As planes must, it
/// ends an operation whose call has returned too late.
///
/// Thread safety: as the wrapped plane; Open and stuck from any thread. Lifetime: owns the wrapped
/// plane, and must live until every call has returned.
class BlockingPlane final : public DataPlane {
 public:
  enum class Where : uint8_t { kStart, kStep };
  using Predicate = std::function<bool(Where)>;

  BlockingPlane(std::unique_ptr<DataPlane> inner, BorrowedMemory& memory, Predicate blocks);
  ~BlockingPlane() override;

  const char* name() const override { return "blocking"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override;
  Result<PlaneOperation*> Start(const Batch& batch) override;

  /// Whether a call was blocked, and has not returned.
  bool stuck() const { return stuck_.load(); }
  /// Lets the blocked call and all later ones return.
  void Open() { open_.store(true); }

 private:
  class Operation;

  bool CallLibrary(Where where);

  const std::unique_ptr<DataPlane> inner_;
  BorrowedMemory& memory_;
  const Predicate blocks_;
  std::atomic<bool> stuck_{false};
  std::atomic<bool> open_{false};
  std::vector<std::unique_ptr<Operation>> operations_;
};

}  // namespace farandole
