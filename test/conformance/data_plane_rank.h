// One rank's body of a conformance case: its buffers, its batch, and the check of its result.
//
// Runs the same with N ranks as threads, N ranks stepped by one thread, or one rank per process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/doorbell.h"
#include "ops/cpu/adasum.h"
#include "ops/data_plane.h"
#include "test/conformance/data_plane_case.h"
#include "test/conformance/data_plane_reference.h"

namespace farandole {

/// Gives memory for tensors, or nullptr: they lie on the heap.
using BufferSource = std::function<std::shared_ptr<std::byte>(size_t bytes)>;

/// A process set in a test: uid, global ranks, and this rank's position.
struct SetView {
  uint32_t set = 0;
  std::vector<int> ranks;
  int my_index = 0;
  BufferSource buffers = {};  ///< Where this rank's allreduces lie, which are then in place.
};

/// The set of all `size` ranks, with uid 0, as `rank` sees it.
SetView GlobalSet(int rank, int size);

/// Buffers and batch of one rank for one case. Segments lie at odd offsets between guard bytes.
class RankRun {
 public:
  /// @param expected ReferenceResult(c), kept by the caller.
  RankRun(const PlaneCase& c, const SetView& set, int64_t number,
          std::span<const std::byte> expected);
  RankRun(const RankRun&) = delete;
  RankRun& operator=(const RankRun&) = delete;

  const Batch& batch() const { return batch_; }
  /// As the engine does: an adasum as several batches of the plane.
  Result<PlaneOperation*> Start(DataPlane& plane);
  /// What is wrong with the result, the inputs or the guard bytes; empty if all is well.
  std::string Check() const;
  /// A hash of the results' bytes, equal on all members that take the result; 0 on others, and
  /// where members get different results.
  uint64_t Fingerprint() const;
  bool takes_result() const { return takes_result_; }

 private:
  void PlaceSegments();
  void AllocateInput(size_t bytes);
  void FillInputs();
  /// Elements of `segment` at its `in`, and at its `out`.
  int64_t InputCount(size_t segment) const;
  int64_t OutputCount(size_t segment) const;
  std::string CheckSegment(size_t segment, int64_t first_element) const;
  bool IsCloseEnough(size_t segment, int64_t first_element) const;

  PlaneCase case_;
  SetView set_;
  std::span<const std::byte> expected_;
  size_t element_bytes_;
  bool contributes_;
  bool reads_;
  bool takes_result_;
  ResultRange mine_;            // of expected_, in elements
  std::vector<int64_t> sends_;  // alltoall
  std::vector<int64_t> receives_;
  std::vector<std::byte> in_heap_;
  std::shared_ptr<std::byte> in_buffer_;
  std::span<std::byte> in_;  // one of these
  std::vector<std::byte> in_before_;
  std::vector<std::byte> out_;
  std::vector<size_t> offsets_;  // of each segment in in_ and out_
  std::vector<Segment> segments_;
  Batch batch_;
  AdasumAllreduce adasum_;
};

/// Starts `run` on the plane and steps it until it ends, sleeping on the bell when the plane says
/// so.
/// @return What went wrong: a failed Status, no progress for `patience_ns`, or run.Check().
std::string DriveToEnd(DataPlane& plane, FutexDoorbell& bell, RankRun& run,
                       int64_t patience_ns = 20'000'000'000);
/// The same for several batches started together, of one set or of several.
std::string DriveAllToEnd(DataPlane& plane, FutexDoorbell& bell, std::span<RankRun* const> runs,
                          int64_t patience_ns = 20'000'000'000);

/// Runs every case in turn as one rank, over a set the plane must not have yet. This is all that a
/// launcher with one rank per process needs.
///
/// @param fingerprints If given, gets one per case (0 where this rank drops the result), to be
/// compared between ranks; of a case whose result they have alike one rank knows the reference.
/// @return Failures, one line each; empty if there are none.
std::string RunCasesOnRank(DataPlane& plane, FutexDoorbell& bell, const SetView& set,
                           std::span<const PlaneCase> cases,
                           std::vector<uint64_t>* fingerprints = nullptr);
/// The same for ranks that share `expected`, which is ReferenceResults(cases).
std::string RunCasesOnRank(DataPlane& plane, FutexDoorbell& bell, const SetView& set,
                           std::span<const PlaneCase> cases,
                           std::span<const std::vector<std::byte>> expected,
                           std::vector<uint64_t>* fingerprints);

}  // namespace farandole
