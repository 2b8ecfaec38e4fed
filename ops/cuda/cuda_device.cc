#include "ops/cuda/cuda_device.h"

#include <algorithm>
#include <array>
#include <string>

#include "ops/cuda/cuda_event.h"
#include "ops/cuda/cuda_status.h"
#include "ops/cuda/move_kernels.h"
#include "ops/cuda/move_table.h"

namespace farandole {
namespace {

Result<DeviceInfo> ReadInfo(int index) {
  cudaDeviceProp properties;
  FARANDOLE_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties", index));
  std::array<char, 32> bus_id{};
  FARANDOLE_RETURN_IF_ERROR(
      CudaStatus(cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), index),
                 "cudaDeviceGetPCIBusId", index));
  return DeviceInfo{index, properties.name, bus_id.data(),
                    static_cast<int64_t>(properties.totalGlobalMem)};
}

size_t Bytes(int64_t size_bytes) { return static_cast<size_t>(std::max<int64_t>(size_bytes, 1)); }

std::string Amount(const char* call, int64_t size_bytes) {
  return std::string(call) + " of " + std::to_string(size_bytes) + " bytes";
}

MoveKernels KernelsForCasts(DType from, DType to) {
  return IsFloating(from) ? KernelsForFloats(from, to) : KernelsForIntegers(from, to);
}

Status LoadKernels(const MoveKernels& kernels, int device) {
  for (const void* kernel : {kernels.small, kernels.large}) {
    cudaFuncAttributes ignored;
    if (kernel == nullptr) continue;
    FARANDOLE_RETURN_IF_ERROR(
        CudaStatus(cudaFuncGetAttributes(&ignored, kernel), "loading the move kernels", device));
  }
  return {};
}

/// Loads all kernels now. CUDA loads each at its first launch (since 11.7), which may wait for
/// whatever runs on the device: for a collective, say, whose peers wait for us. It also tells a GPU
/// that there is no code for.
Status LoadAllKernels(int device) {
  FARANDOLE_RETURN_IF_ERROR(LoadKernels(KernelsForCopies(), device));
  for (int from = 0; from < kReducibleDTypeCount; ++from) {
    for (int to = 0; to < kReducibleDTypeCount; ++to) {
      const auto in = static_cast<DType>(from);
      const auto out = static_cast<DType>(to);
      if (IsFloating(in) != IsFloating(out)) continue;
      FARANDOLE_RETURN_IF_ERROR(LoadKernels(KernelsForCasts(in, out), device));
    }
  }
  return {};
}

/// One launch, for no more moves than Table holds.
template <class Table>
cudaError_t LaunchMoves(const void* kernel, const MoveJob& job, std::span<const DeviceMove> moves,
                        int multiprocessors, StreamHandle stream) {
  Table table;
  const uint32_t blocks = FillMoveTable(job, moves, multiprocessors, &table);
  void* parameters[] = {&table};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kMoveThreads), parameters, 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace

Result<std::unique_ptr<CudaDevice>> CudaDevice::Create(int index) {
  const Result<CudaContext> context = CudaContext::Create(index);
  if (!context.ok()) return context.status();
  Result<DeviceInfo> info = ReadInfo(index);
  if (!info.ok()) return info.status();
  const CudaScope scope(context.value());
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  FARANDOLE_RETURN_IF_ERROR(LoadAllKernels(index));
  int multiprocessors = 0;
  FARANDOLE_RETURN_IF_ERROR(
      CudaStatus(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index),
                 "cudaDeviceGetAttribute", index));
  return std::unique_ptr<CudaDevice>(
      new CudaDevice(context.value(), std::move(info).value(), multiprocessors));
}

Status CudaDevice::MakeCurrent() {
  return CudaStatus(cudaSetDevice(info_.index), "cudaSetDevice", info_.index);
}

Result<StreamHandle> CudaDevice::CreateStream() {
  const CudaScope scope(context_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  int least = 0;
  int greatest = 0;
  FARANDOLE_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                                       "cudaDeviceGetStreamPriorityRange", info_.index));
  cudaStream_t stream = nullptr;
  FARANDOLE_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
                 "cudaStreamCreateWithPriority", info_.index));
  return static_cast<StreamHandle>(stream);
}

void CudaDevice::DestroyStream(StreamHandle stream) {
  const CudaScope scope(context_);
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));  // what fails, failed before
  (void)cudaGetLastError();
}

Result<std::shared_ptr<DeviceEvent>> CudaDevice::CreateEvent() {
  return CudaEvent::Create(context_);
}

Result<bool> CudaDevice::IsCapturing(StreamHandle stream) {
  const CudaScope scope(context_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  const cudaError_t answer = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &state);
  if (answer == cudaErrorStreamCaptureImplicit) {
    // The legacy stream, while a stream that it waits for is captured: as unusable as that one.
    (void)cudaGetLastError();
    return true;
  }
  FARANDOLE_RETURN_IF_ERROR(CudaStatus(answer, "cudaStreamIsCapturing", info_.index));
  return state != cudaStreamCaptureStatusNone;
}

Result<void*> CudaDevice::Allocate(int64_t size_bytes) {
  const CudaScope scope(context_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, Bytes(size_bytes));
  if (error != cudaSuccess) return CudaStatus(error, Amount("cudaMalloc", size_bytes), info_.index);
  return memory;
}

void CudaDevice::Free(void* memory) {
  const CudaScope scope(context_);
  (void)cudaFree(memory);  // reports failures of earlier work, which its events report too
  (void)cudaGetLastError();
}

Result<void*> CudaDevice::AllocatePinned(int64_t size_bytes) {
  const CudaScope scope(context_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, Bytes(size_bytes), cudaHostAllocPortable);
  if (error != cudaSuccess) {
    return CudaStatus(error, Amount("cudaHostAlloc", size_bytes), info_.index);
  }
  return memory;
}

void CudaDevice::FreePinned(void* memory) {
  const CudaScope scope(context_);
  (void)cudaFreeHost(memory);  // as above
  (void)cudaGetLastError();
}

Status CudaDevice::Copy(void* to, const void* from, int64_t size_bytes, StreamHandle stream) {
  if (size_bytes <= 0) return {};
  const CudaScope scope(context_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  return CudaStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), cudaMemcpyDefault,
                                    static_cast<cudaStream_t>(stream)),
                    "cudaMemcpyAsync", info_.index);
}

Status CudaDevice::Move(std::span<const DeviceMove> moves, const MoveSpec& spec,
                        StreamHandle stream, int* launches) {
  *launches = 0;
  const Result<MoveJob> job = MakeMoveJob(moves, spec);
  if (!job.ok()) return job.status();
  std::span<const DeviceMove> rest = job.value().moves;
  if (rest.empty()) return {};
  const CudaScope scope(context_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  const MoveKernels kernels = job.value().raw
                                  ? KernelsForCopies()
                                  : KernelsForCasts(job.value().spec.from, job.value().spec.to);
  while (!rest.empty()) {
    const auto now = rest.first(std::min(rest.size(), size_t{kMovesPerLaunch}));
    rest = rest.subspan(now.size());
    const bool few = now.size() <= kFewMoves && kernels.small != nullptr;
    const cudaError_t error =
        few ? LaunchMoves<SmallMoveTable>(kernels.small, job.value(), now, multiprocessors_, stream)
            : LaunchMoves<LargeMoveTable>(kernels.large, job.value(), now, multiprocessors_,
                                          stream);
    FARANDOLE_RETURN_IF_ERROR(CudaStatus(error, "launching the move kernel", info_.index));
    ++*launches;
  }
  return {};
}

}  // namespace farandole
