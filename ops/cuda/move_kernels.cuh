// The move kernel as CUDA's: __global__ functions over the body, one for each pair of types.
#pragma once

#include "ops/cuda/device_machine.cuh"
#include "ops/cuda/move_body.h"
#include "ops/cuda/move_table.h"

namespace farandole {

// The tables stay in the constant bank that parameters come in: __grid_constant__ forbids the copy
// to local memory that an indexed access would else make.

template <int kCapacity>
__global__ void __launch_bounds__(kMoveThreads)
    CopyKernel(const __grid_constant__ MoveTable<kCapacity> table) {
  CopyBody<DeviceMachine>(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <class From, class To, int kCapacity>
__global__ void __launch_bounds__(kMoveThreads)
    CastKernel(const __grid_constant__ MoveTable<kCapacity> table) {
  CastBody<DeviceMachine, From, To>(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <class From, class To, int kCapacity>
const void* CastKernelOf() {
  return reinterpret_cast<const void*>(&CastKernel<From, To, kCapacity>);
}

}  // namespace farandole
