// What the move kernel's body asks of a GPU: accesses as wide as their type, conversions in
// hardware.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/half.h"

namespace farandole {

struct DeviceMachine {
  template <class T>
  __device__ static T Load(const T* from) {
    return *from;
  }
  template <class T>
  __device__ static void Store(T* to, T value) {
    *to = value;
  }
  __device__ static float Widen(Float16 value) {
    return __half2float(__ushort_as_half(value.bits));
  }
  __device__ static float Widen(Bfloat16 value) {
    return __bfloat162float(__ushort_as_bfloat16(value.bits));
  }
  __device__ static Float16 Round(Float16, float value) {
    return {__half_as_ushort(__float2half_rn(value))};
  }
  __device__ static Float16 Round(Float16, double value) {
    return {__half_as_ushort(__double2half(value))};
  }
  __device__ static Bfloat16 Round(Bfloat16, float value) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
  }
  __device__ static Bfloat16 Round(Bfloat16, double value) {
    return {__bfloat16_as_ushort(__double2bfloat16(value))};
  }
};

}  // namespace farandole
