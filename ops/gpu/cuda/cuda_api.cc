#include "ops/gpu/cuda/cuda_api.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/gpu/cuda/cast.h"

namespace farandole {
namespace {

/// CUDA's documentation says of these that the process must be started again.
bool IsFinal(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

Code CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return Code::kResourceExhausted;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return Code::kUnavailable;
    default:
      return Code::kInternal;
  }
}

/// OK, or why the call failed. Takes the error off the record of the calling thread. That record is
/// this plug-in's own, since its CUDA runtime is: nobody else's error is lost.
/// @param call    What was called, with what a reader needs to know: "cudaMalloc of 512 bytes".
/// @param device  Its number, or -1 for a call that concerns none.
/// @return ResourceExhausted for want of memory, Unavailable where driver or device are missing,
/// else Internal.
Status CudaStatus(cudaError_t error, const std::string& call, int device = -1) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // the same error again, or an older one of ours already reported
  std::string text = call;
  if (device >= 0) text += " on device " + std::to_string(device);
  text +=
      " failed: " + std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
  if (IsFinal(error)) {
    text +=
        "; it may stem from any kernel run before, and this process cannot use the device again";
  }
  return {CodeOf(error), text};
}

/// The same; the text is put together only on failure.
Status CudaStatus(cudaError_t error, const char* call, int device = -1) {
  return error == cudaSuccess ? Status() : CudaStatus(error, std::string(call), device);
}

constexpr char kDriver[] = "libcuda.so.1";

Result<CudaDriver> Find() {
  void* const library = dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const text = dlerror();
    return Unavailable("no NVIDIA driver: " + std::string(text != nullptr ? text : kDriver));
  }
  CudaDriver driver;
  driver.get_current =
      reinterpret_cast<decltype(driver.get_current)>(dlsym(library, "cuCtxGetCurrent"));
  driver.set_current =
      reinterpret_cast<decltype(driver.set_current)>(dlsym(library, "cuCtxSetCurrent"));
  if (driver.get_current == nullptr || driver.set_current == nullptr) {
    return Unavailable("\"" + std::string(kDriver) + "\" is no CUDA driver: it has no contexts");
  }
  return driver;
}

}  // namespace

Result<CudaDriver> FindCudaDriver() {
  static const Result<CudaDriver> driver = Find();
  return driver;
}

namespace {

Status DriverStatus(CUresult result, const char* call, int device) {
  if (result == CUDA_SUCCESS) return {};
  return Internal(std::string(call) + " on device " + std::to_string(device) +
                  " failed: driver error " + std::to_string(static_cast<int>(result)));
}

/// The context of `device`, made current.
Result<CUcontext> EnterDevice(const CudaDriver& driver, int device) {
  FARANDOLE_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device), "cudaSetDevice", device));
  // Before CUDA 12 the context came with the first call that needs it.
  FARANDOLE_RETURN_IF_ERROR(CudaStatus(cudaFree(nullptr), "making a context", device));
  CUcontext context = nullptr;
  FARANDOLE_RETURN_IF_ERROR(DriverStatus(driver.get_current(&context), "cuCtxGetCurrent", device));
  return context;
}

/// The primary context of one device: a value.
struct CudaContext {
  CudaDriver driver;
  CUcontext handle = nullptr;
  int device = -1;

  /// Makes the context if the device has none yet; what the thread's current context was, it stays.
  static Result<CudaContext> Create(int device) {
    const Result<CudaDriver> driver = FindCudaDriver();
    if (!driver.ok()) return driver.status();
    // The runtime starts the driver, which answers nothing before.
    int count = 0;
    FARANDOLE_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
    CUcontext before = nullptr;
    FARANDOLE_RETURN_IF_ERROR(
        DriverStatus(driver.value().get_current(&before), "cuCtxGetCurrent", device));
    const Result<CUcontext> context = EnterDevice(driver.value(), device);
    FARANDOLE_RETURN_IF_ERROR(
        DriverStatus(driver.value().set_current(before), "cuCtxSetCurrent", device));
    if (!context.ok()) return context.status();
    return CudaContext{driver.value(), context.value(), device};
  }
};

/// Makes a context the calling thread's current one until the end of the scope. Also lets the
/// thread do what CUDA forbids while somebody else captures a graph (ask for events, allocate):
/// none of that is captured, and without leave it would break the capture.
///
/// The context is restored and not the device, because cudaSetDevice makes a context (since CUDA
/// 12) on a device that the thread may never have used.
class CudaScope {
 public:
  explicit CudaScope(const CudaContext& context) : context_(context) {
    (void)cudaThreadExchangeStreamCaptureMode(&mode_);  // fails for a null pointer only
    status_ = DriverStatus(context.driver.get_current(&before_), "cuCtxGetCurrent", context.device);
    if (!status_.ok() || before_ == context.handle) return;
    status_ =
        DriverStatus(context.driver.set_current(context.handle), "cuCtxSetCurrent", context.device);
  }
  ~CudaScope() {
    // Can fail only if the context was destroyed meanwhile; then there is nothing to go back to.
    if (before_ != context_.handle) (void)context_.driver.set_current(before_);
    (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

  const Status& status() const { return status_; }

 private:
  const CudaContext& context_;
  CUcontext before_ = nullptr;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  Status status_;
};

/// A cudaEvent_t without timing, which would make recording dearer.
class CudaEvent final : public DeviceEvent {
 public:
  /// @param context  Of the device whose streams it is recorded in.
  static Result<std::shared_ptr<DeviceEvent>> Create(const CudaContext& context) {
    const CudaScope scope(context);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    std::shared_ptr<CudaEvent> created(new CudaEvent(context));
    FARANDOLE_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&created->event_, cudaEventDisableTiming),
                   "cudaEventCreateWithFlags", context.device));
    return std::shared_ptr<DeviceEvent>(std::move(created));
  }
  ~CudaEvent() override {
    if (event_ == nullptr) return;
    const CudaScope scope(context_);
    (void)cudaEventDestroy(event_);  // fails at process exit, when CUDA has gone before us
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  int device() const override { return context_.device; }
  Status Record(StreamHandle stream) override {
    const CudaScope scope(context_);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    return CudaStatus(cudaEventRecord(event_, static_cast<cudaStream_t>(stream)), "cudaEventRecord",
                      context_.device);
  }
  Status MakeWait(StreamHandle stream) override {
    const CudaScope scope(context_);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    return CudaStatus(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_, 0),
                      "cudaStreamWaitEvent", context_.device);
  }
  Result<bool> IsComplete() override {
    const CudaScope scope(context_);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    const cudaError_t answer = cudaEventQuery(event_);
    if (answer == cudaErrorNotReady) {
      (void)cudaGetLastError();  // an answer, no error; the thread's record would keep it
      return false;
    }
    FARANDOLE_RETURN_IF_ERROR(CudaStatus(answer, "cudaEventQuery", context_.device));
    return true;
  }

 private:
  explicit CudaEvent(const CudaContext& context) : context_(context) {}

  const CudaContext context_;
  cudaEvent_t event_ = nullptr;
};

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

Status LoadKernels(const CastKernels& kernels, int device) {
  for (const void* kernel : {kernels.small, kernels.large}) {
    cudaFuncAttributes ignored;
    if (kernel == nullptr) continue;
    FARANDOLE_RETURN_IF_ERROR(
        CudaStatus(cudaFuncGetAttributes(&ignored, kernel), "loading the cast kernels", device));
  }
  return {};
}

/// Loads all kernels now. CUDA loads each at its first launch (since 11.7), which may wait for
/// whatever runs on the device: for a collective, say, whose peers wait for us. It also tells a GPU
/// that there is no code for.
Status LoadAllKernels(int device) {
  FARANDOLE_RETURN_IF_ERROR(LoadKernels(KernelsForCopies(), device));
  FARANDOLE_RETURN_IF_ERROR(LoadKernels({KernelForFlags(), nullptr}, device));
  for (int from = 0; from < kReducibleDTypeCount; ++from) {
    for (int to = 0; to < kReducibleDTypeCount; ++to) {
      const auto kernels = KernelsForCasts(static_cast<DType>(from), static_cast<DType>(to));
      FARANDOLE_RETURN_IF_ERROR(LoadKernels(kernels, device));
    }
  }
  return {};
}

/// One launch, for no more items than Table holds.
template <class Table>
cudaError_t LaunchTable(const void* kernel, const CastJob& job, std::span<const CastItem> items,
                        int multiprocessors, StreamHandle stream) {
  Table table;
  const uint32_t blocks = FillCastTable(job, items, multiprocessors, &table);
  void* parameters[] = {&table};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kBlockThreads), parameters, 0,
                          static_cast<cudaStream_t>(stream));
}

/// One GPU: see Device.
class CudaDevice final : public Device {
 public:
  /// Makes the device's context and loads the kernels. @return Internal or Unavailable with CUDA's
  /// text.
  static Result<std::unique_ptr<CudaDevice>> Create(int index) {
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

  const DeviceInfo& info() const override { return info_; }
  Status MakeCurrent() override {
    return CudaStatus(cudaSetDevice(info_.index), "cudaSetDevice", info_.index);
  }
  Result<StreamHandle> CreateStream() override {
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
  void DestroyStream(StreamHandle stream) override {
    const CudaScope scope(context_);
    (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));  // what fails, failed before
    (void)cudaGetLastError();
  }
  Result<std::shared_ptr<DeviceEvent>> CreateEvent() override {
    return CudaEvent::Create(context_);
  }
  Result<bool> IsCapturing(StreamHandle stream) override {
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
  Result<void*> Allocate(int64_t size_bytes) override {
    const CudaScope scope(context_);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, Bytes(size_bytes));
    if (error != cudaSuccess)
      return CudaStatus(error, Amount("cudaMalloc", size_bytes), info_.index);
    return memory;
  }
  void Free(void* memory) override {
    const CudaScope scope(context_);
    (void)cudaFree(memory);  // reports failures of earlier work, which its events report too
    (void)cudaGetLastError();
  }
  Result<void*> AllocatePinned(int64_t size_bytes) override {
    const CudaScope scope(context_);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    void* memory = nullptr;
    const cudaError_t error = cudaHostAlloc(&memory, Bytes(size_bytes), cudaHostAllocPortable);
    if (error != cudaSuccess) {
      return CudaStatus(error, Amount("cudaHostAlloc", size_bytes), info_.index);
    }
    return memory;
  }
  void FreePinned(void* memory) override {
    const CudaScope scope(context_);
    (void)cudaFreeHost(memory);  // as above
    (void)cudaGetLastError();
  }
  Status Copy(void* to, const void* from, int64_t size_bytes, StreamHandle stream) override {
    if (size_bytes <= 0) return {};
    const CudaScope scope(context_);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    return CudaStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), cudaMemcpyDefault,
                                      static_cast<cudaStream_t>(stream)),
                      "cudaMemcpyAsync", info_.index);
  }
  Status Cast(std::span<const CastItem> items, const CastSpec& spec, StreamHandle stream,
              int* launches) override {
    *launches = 0;
    const Result<CastJob> job = MakeCastJob(items, spec);
    if (!job.ok()) return job.status();
    std::span<const CastItem> rest = job.value().items;
    if (rest.empty()) return {};
    const CudaScope scope(context_);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    const CastKernels kernels = job.value().raw
                                    ? KernelsForCopies()
                                    : KernelsForCasts(job.value().spec.from, job.value().spec.to);
    while (!rest.empty()) {
      const auto now = rest.first(std::min(rest.size(), size_t{kItemsPerLaunch}));
      rest = rest.subspan(now.size());
      const bool few = now.size() <= kFewItems && kernels.small != nullptr;
      const cudaError_t error = few ? LaunchTable<SmallCastTable>(kernels.small, job.value(), now,
                                                                  multiprocessors_, stream)
                                    : LaunchTable<LargeCastTable>(kernels.large, job.value(), now,
                                                                  multiprocessors_, stream);
      FARANDOLE_RETURN_IF_ERROR(CudaStatus(error, "launching the cast kernel", info_.index));
      ++*launches;
    }
    return {};
  }
  Status CopyFlag(const uint32_t* pinned, uint32_t* flag, StreamHandle stream) override {
    const CudaScope scope(context_);
    FARANDOLE_RETURN_IF_ERROR(scope.status());
    void* parameters[] = {&pinned, &flag};
    return CudaStatus(cudaLaunchKernel(KernelForFlags(), dim3(1), dim3(1), parameters, 0,
                                       static_cast<cudaStream_t>(stream)),
                      "launching the flag's kernel", info_.index);
  }

 private:
  CudaDevice(const CudaContext& context, DeviceInfo info, int multiprocessors)
      : context_(context), info_(std::move(info)), multiprocessors_(multiprocessors) {}

  const CudaContext context_;
  const DeviceInfo info_;
  const int multiprocessors_;
};

/// 13000 -> "13.0"
std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

class CudaRuntime final : public DeviceRuntime {
 public:
  std::string version() const override {
    int runtime = 0;
    int driver = 0;
    // Neither needs a device; 0 is no driver.
    if (cudaRuntimeGetVersion(&runtime) != cudaSuccess ||
        cudaDriverGetVersion(&driver) != cudaSuccess) {
      (void)cudaGetLastError();
    }
    return "CUDA runtime " + VersionText(runtime) + ", " +
           (driver == 0 ? "no driver" : "driver " + VersionText(driver));
  }
  Result<int> Count() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorNoDevice) {
      (void)cudaGetLastError();
      return 0;
    }
    if (error == cudaErrorInsufficientDriver) {
      (void)cudaGetLastError();
      const Status missing = FindCudaDriver().status();
      if (!missing.ok()) return missing;
      return Unavailable("the NVIDIA driver is too old for farandole's CUDA: " + version() +
                         "; update the driver, or build farandole with an older CUDA toolkit");
    }
    FARANDOLE_RETURN_IF_ERROR(CudaStatus(error, "cudaGetDeviceCount"));
    return count;
  }
  Result<Device*> Open(int index) override {
    const Result<int> count = Count();
    if (!count.ok()) return count.status();
    if (index < 0 || index >= count.value()) {
      return InvalidArgument("CUDA device " + std::to_string(index) +
                             " is not there; this process has " + std::to_string(count.value()) +
                             " devices, numbered from 0");
    }
    const std::lock_guard lock(mutex_);
    devices_.resize(static_cast<size_t>(count.value()));
    std::unique_ptr<CudaDevice>& device = devices_[static_cast<size_t>(index)];
    if (device == nullptr) {
      Result<std::unique_ptr<CudaDevice>> created = CudaDevice::Create(index);
      if (!created.ok()) return created.status();
      device = std::move(created).value();
    }
    return static_cast<Device*>(device.get());
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;  // by index; nullptr until opened
};

}  // namespace

std::shared_ptr<DeviceRuntime> MakeCudaRuntime() { return std::make_shared<CudaRuntime>(); }

}  // namespace farandole
