// Kernels that pass every call on: a test's own ones see, or count, those that it is about.
#pragma once

#include "ops/cpu/kernels.h"

namespace farandole {

/// The best ones of this machine.
class ForwardedKernels : public CpuKernels {
 public:
  void Pack(void* dst, DType wire, const void* src, DType dtype, int64_t count,
            double prescale) const override {
    best_.Pack(dst, wire, src, dtype, count, prescale);
  }
  void Reduce(void* dst, std::span<const void* const> sources, int64_t count,
              const ReduceSpec& spec) const override {
    best_.Reduce(dst, sources, count, spec);
  }
  void Unpack(void* dst, DType dtype, const void* src, DType wire, int64_t count) const override {
    best_.Unpack(dst, dtype, src, wire, count);
  }
  void Scale(void* dst, const void* src, DType dtype, int64_t count, double prescale,
             double postscale) const override {
    best_.Scale(dst, src, dtype, count, prescale, postscale);
  }
  ScalarProducts MultiplyAndSum(const void* a, const void* b, DType dtype,
                                int64_t count) const override {
    return best_.MultiplyAndSum(a, b, dtype, count);
  }
  void Combine(void* a, const void* b, DType dtype, int64_t count, double p,
               double q) const override {
    best_.Combine(a, b, dtype, count, p, q);
  }
  int64_t FindNonFinite(const void* src, DType dtype, int64_t count) const override {
    return best_.FindNonFinite(src, dtype, count);
  }
  void Quantize(void* dst, const float* src, float* residual, int64_t count,
                double prescale) const override {
    best_.Quantize(dst, src, residual, count, prescale);
  }
  void Dequantize(float* dst, const void* src, int64_t count, float factor,
                  bool adds) const override {
    best_.Dequantize(dst, src, count, factor, adds);
  }
  void Stream(void* dst, const void* src, int64_t size_bytes) const override {
    best_.Stream(dst, src, size_bytes);
  }
  const char* name() const override { return best_.name(); }

 private:
  const CpuKernels& best_ = BestCpuKernels();
};

}  // namespace farandole
