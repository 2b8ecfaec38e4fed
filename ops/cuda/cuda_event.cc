#include "ops/cuda/cuda_event.h"

#include "ops/cuda/cuda_status.h"

namespace farandole {

Result<std::shared_ptr<DeviceEvent>> CudaEvent::Create(const CudaContext& context) {
  const CudaScope scope(context);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  std::shared_ptr<CudaEvent> created(new CudaEvent(context));
  FARANDOLE_RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&created->event_, cudaEventDisableTiming),
                 "cudaEventCreateWithFlags", context.device));
  return std::shared_ptr<DeviceEvent>(std::move(created));
}

CudaEvent::~CudaEvent() {
  if (event_ == nullptr) return;
  const CudaScope scope(context_);
  (void)cudaEventDestroy(event_);  // fails at process exit, when CUDA has gone before us
}

Status CudaEvent::Record(StreamHandle stream) {
  const CudaScope scope(context_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  return CudaStatus(cudaEventRecord(event_, static_cast<cudaStream_t>(stream)), "cudaEventRecord",
                    context_.device);
}

Status CudaEvent::MakeWait(StreamHandle stream) {
  const CudaScope scope(context_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  return CudaStatus(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_, 0),
                    "cudaStreamWaitEvent", context_.device);
}

Result<bool> CudaEvent::IsComplete() {
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

}  // namespace farandole
