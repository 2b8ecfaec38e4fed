#include "ops/cpu/quantize.h"

#include <algorithm>
#include <cstring>

namespace farandole {
namespace {

/// Elements that are worked on before they leave the L1 cache: whole blocks.
constexpr int64_t kTile = 8 * kQuantizedBlock;

/// What the dequantized sum is multiplied by.
float ResultFactor(const Batch& batch) {
  const bool averages = batch.op == ReduceOp::kAverage;
  const double divisor = averages ? static_cast<double>(batch.ranks.size()) : 1.0;
  return static_cast<float>(batch.postscale / divisor);
}

/// The residuals of the next `count` elements, one after the other: where they are, or a copy in
/// scratch memory that Store writes back. Zeros where there are none.
class Residuals {
 public:
  Residuals(SegmentCursor cursor, int64_t count) : cursor_(cursor), count_(count) {
    SegmentCursor ahead = cursor;
    const Run run = ahead.Next(count);
    if (run.count == count && run.residual != nullptr) {
      data_ = run.residual;
      return;
    }
    ForEachRun([](float* residual, float* copy, size_t bytes) {
      residual != nullptr ? std::memcpy(copy, residual, bytes) : std::memset(copy, 0, bytes);
    });
  }
  float* data() { return data_; }
  void Store() {
    if (data_ != copy_) return;
    ForEachRun([](float* residual, const float* copy, size_t bytes) {
      if (residual != nullptr) std::memcpy(residual, copy, bytes);
    });
  }

 private:
  template <class Move>
  void ForEachRun(const Move& move) {
    SegmentCursor ahead = cursor_;
    for (int64_t at = 0; at < count_;) {
      const Run run = ahead.Next(count_ - at);
      move(run.residual, copy_ + at, static_cast<size_t>(run.count) * sizeof(float));
      at += run.count;
    }
  }

  const SegmentCursor cursor_;
  const int64_t count_;
  float copy_[kTile];
  float* data_ = copy_;
};

/// Calls work(at, to or from, count) for kTile elements at a time.
template <class Byte, class Work>
void ForEachTile(Byte* quantized, int64_t count, const Work& work) {
  for (int64_t at = 0; at < count; at += kTile) {
    work(at, quantized + QuantizedBytes(at), std::min(kTile, count - at));
  }
}

}  // namespace

/// To a plane a premul_sum is a sum.
bool IsQuantized(const Collective& collective, DType dtype, size_t ranks) {
  return collective.kind == OpKind::kAllreduce && collective.wire_format == WireFormat::kInt8 &&
         dtype == DType::kFloat32 && collective.device == DeviceKind::kCpu &&
         ranks <= kMostQuantizingRanks && AddsUp(collective);
}

bool IsQuantized(const Batch& batch) { return IsQuantized(batch, batch.dtype, batch.ranks.size()); }

/// Straight from the tensor where a tile lies in one; else by way of scratch memory.
void QuantizeRuns(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor,
                  std::byte* to, int64_t count) {
  ForEachTile(to, count, [&](int64_t, std::byte* quantized, int64_t n) {
    Residuals residuals(cursor, n);
    SegmentCursor ahead = cursor;
    const Run run = ahead.Next(n);
    if (run.count == n) {
      cursor = ahead;
      kernels.Quantize(quantized, reinterpret_cast<const float*>(run.in), residuals.data(), n,
                       batch.prescale);
    } else {
      float values[kTile];
      PackRuns(kernels, batch, cursor, reinterpret_cast<std::byte*>(values), n);
      kernels.Quantize(quantized, values, residuals.data(), n, 1.0);
    }
    residuals.Store();
  });
}

void DequantizeRuns(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor,
                    const std::byte* from, int64_t count) {
  const float factor = ResultFactor(batch);
  ForEachTile(from, count, [&](int64_t, const std::byte* quantized, int64_t n) {
    SegmentCursor ahead = cursor;
    const Run run = ahead.Next(n);
    if (run.count == n) {
      cursor = ahead;
      if (run.out == nullptr) return;
      kernels.Dequantize(reinterpret_cast<float*>(run.out), quantized, n, factor, false);
    } else {
      float values[kTile];
      kernels.Dequantize(values, quantized, n, factor, false);
      UnpackRuns(kernels, batch, cursor, reinterpret_cast<const std::byte*>(values), n);
    }
  });
}

void ReduceQuantized(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor,
                     std::span<const void* const> sources, std::byte* to, int64_t count) {
  const ReduceSpec sum;
  ForEachTile(to, count, [&](int64_t at, std::byte* quantized, int64_t n) {
    float values[kTile];
    float own[kTile];
    bool is_first = true;
    for (const void* const source : sources) {
      if (source != nullptr) {
        const std::byte* const from = static_cast<const std::byte*>(source) + QuantizedBytes(at);
        kernels.Dequantize(values, from, n, 1.0f, !is_first);
      } else {
        SegmentCursor inputs = cursor;
        float* const mine = is_first ? values : own;
        PackRuns(kernels, batch, inputs, reinterpret_cast<std::byte*>(mine), n);
        const void* const both[] = {values, own};
        if (!is_first) kernels.Reduce(values, both, n, sum);
      }
      is_first = false;
    }
    Residuals residuals(cursor, n);
    kernels.Quantize(quantized, values, residuals.data(), n, 1.0);
    residuals.Store();
    DequantizeRuns(kernels, batch, cursor, quantized, n);
  });
}

}  // namespace farandole
