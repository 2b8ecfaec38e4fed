// What every CPU plane does with a Batch before moving a byte: check it, walk its segments, and
// reuse what runs it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"

namespace farandole {

/// Whether a CPU plane can run `batch`.
///
/// @return InvalidArgument, saying what is wrong, for an op the dtype has not got (sum of bool), a
/// factor that is not finite (or not 1, for bool), a wire type that is not one of the dtype's, a
/// index outside `ranks`, an absent root, nobody present, segments that do not add up to
/// `count`, or, for a variable-size collective, sizes that do not fit together; Unimplemented for
/// kinds that move no data.
Status CheckBatch(const Batch& batch);

/// Elements of a segment's `in`, and of its `out`, on this rank.
int64_t InputCount(const Batch& batch, const Segment& segment);
int64_t OutputCount(const Batch& batch, const Segment& segment);

/// Whether member `index` of the batch's ranks contributes nothing.
inline bool IsAbsent(const Batch& batch, int index) {
  return std::binary_search(batch.absent.begin(), batch.absent.end(), index);
}

/// Whether member `index` contributes; to a broadcast its root alone does.
inline bool Contributes(const Batch& batch, int index) {
  return batch.kind == OpKind::kBroadcast ? index == batch.root_index : !IsAbsent(batch, index);
}

/// Type and factor of elements on the wire: what is not reduced is neither rounded nor scaled.
inline DType WireOf(const Batch& batch) { return Reduces(batch.kind) ? batch.wire : batch.dtype; }
inline double PrescaleOf(const Batch& batch) { return Reduces(batch.kind) ? batch.prescale : 1.0; }

/// Consecutive elements of one segment.
struct Run {
  const std::byte* in = nullptr;  ///< nullptr when this rank contributes nothing.
  std::byte* out = nullptr;       ///< nullptr when this rank drops the result.
  int64_t count = 0;
  float* residual = nullptr;  ///< Segment::residual.
};

/// Walks the elements of a batch from first to last, one contiguous run at a time.
///
/// Thread safety: none. Lifetime: the segments outlive it.
class SegmentCursor {
 public:
  SegmentCursor() = default;
  SegmentCursor(std::span<const Segment> segments, DType dtype)
      : segments_(segments), element_bytes_(SizeOf(dtype)) {}

  /// The next run, of at most `limit` elements (> 0), and moves past it. Empty (count 0) at the
  /// end.
  Run Next(int64_t limit);
  /// Moves past `count` elements, or to the end.
  void Skip(int64_t count);

 private:
  std::span<const Segment> segments_;
  int64_t element_bytes_ = 1;
  size_t segment_ = 0;
  int64_t offset_ = 0;  // elements of segments_[segment_] already passed
};

/// Packs the next `count` elements of the batch's inputs, cast and scaled, end to end; and writes
/// as many results from there to its outputs, those that are wanted: the root of a broadcast in
/// place has its own already. Both move the cursor, which is the batch's, past them.
void PackRuns(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor, std::byte* to,
              int64_t count);
void UnpackRuns(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor,
                const std::byte* from, int64_t count);

/// One of the collectives that a batch is composed of, on some plane.
struct InnerBatch {
  /// Describes it as far as it does not differ from `outer`.
  void Describe(const Batch& outer, OpKind kind, DType dtype);
  /// As it stands, or over one tensor. @return As DataPlane::Start.
  Status Start(DataPlane& plane);
  Status Start(DataPlane& plane, const Segment& tensor);
  void Abandon() {
    if (operation != nullptr) std::exchange(operation, nullptr)->Abandon();
  }

  Batch batch;
  Segment segment;
  PlaneOperation* operation = nullptr;  ///< While it runs.
};

/// Objects that are used again and again: none is allocated once as many exist as are ever in use.
///
/// Thread safety: none. Lifetime: owns them all, in use or not.
template <class T>
class ReusePool {
 public:
  /// One that is not in use, or a new one, which `make` returns as a std::unique_ptr.
  template <class Make>
  T* Take(Make make) {
    if (free_.empty()) {
      all_.push_back(make());
      free_.reserve(all_.size());  // so that Return never allocates
      return all_.back().get();
    }
    T* const object = free_.back();
    free_.pop_back();
    return object;
  }
  void Return(T* object) { free_.push_back(object); }

 private:
  std::vector<std::unique_ptr<T>> all_;
  std::vector<T*> free_;
};

/// Runs a batch of a set with one member, 256 KiB at a time: copies, and scales in the tensor's own
/// precision; touches nothing when in == out and there is nothing to scale.
class SoloRun {
 public:
  SoloRun() = default;
  /// `batch` stays valid until Step returned true.
  explicit SoloRun(const Batch& batch);
  /// Copies the next 256 KiB. @return true when all is done.
  bool Step(const CpuKernels& kernels);

 private:
  const Batch* batch_ = nullptr;
  SegmentCursor cursor_;
  int64_t left_ = 0;  // elements
};

}  // namespace farandole
