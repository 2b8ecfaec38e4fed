// The cast kernel as CUDA's: __global__ functions over the body, one for each pair of types.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/gpu/cuda/cast.h"

namespace farandole {
namespace {

// What the body asks of a GPU: accesses as wide as their type, conversions in hardware.
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

// The tables stay in the constant bank that parameters come in: __grid_constant__ forbids the copy
// to local memory that an indexed access would else make.

template <int kCapacity>
__global__ void __launch_bounds__(kBlockThreads)
    CopyKernel(const __grid_constant__ CastTable<kCapacity> table) {
  CopyBody<DeviceMachine>(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <class From, class To, int kCapacity>
__global__ void __launch_bounds__(kBlockThreads)
    CastKernel(const __grid_constant__ CastTable<kCapacity> table) {
  CastBody<DeviceMachine, From, To>(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

// The host may set the pinned flag at any time.
__global__ void FlagKernel(const uint32_t* pinned, uint32_t* flag) {
  *flag = *static_cast<const volatile uint32_t*>(pinned);
}

template <class From, class To, int kCapacity>
const void* CastKernelOf() {
  return reinterpret_cast<const void*>(&CastKernel<From, To, kCapacity>);
}

}  // namespace

CastKernels KernelsForCopies() {
  return {reinterpret_cast<const void*>(&CopyKernel<kFewItems>),
          reinterpret_cast<const void*>(&CopyKernel<Device::kItemsPerLaunch>)};
}

const void* KernelForFlags() { return reinterpret_cast<const void*>(&FlagKernel); }

CastKernels KernelsForCasts(DType from, DType to) {
  CastKernels found;
  VisitCast(from, to, [&](auto in, auto out) {
    using In = typename decltype(in)::Type;
    using Out = typename decltype(out)::Type;
    // Integers have one size: rare, so that the dearer launch weighs less than the longer build.
    if constexpr (!std::is_integral_v<In>) found.small = CastKernelOf<In, Out, kFewItems>();
    found.large = CastKernelOf<In, Out, Device::kItemsPerLaunch>();
  });
  return found;
}

}  // namespace farandole
