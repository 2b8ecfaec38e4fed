#include "test/fakes/fake_event.h"

namespace farandole {

Status FakeEvent::Record(StreamHandle stream) {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kRecord));
  Result<FakeStream*> found = state_->FindOwn(stream);
  if (!found.ok()) return found.status();
  moment_ = found.value()->Mark();
  return {};
}

Status FakeEvent::MakeWait(StreamHandle stream) {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kMakeWait));
  Result<FakeStream*> found = state_->Find(stream);
  if (!found.ok()) return found.status();
  if (moment_ == nullptr) return {};
  if (moment_->captured() != found.value()->capturing()) {
    return Internal(
        "cudaStreamWaitEvent: dependency created on uncaptured work in another stream "
        "(fake CUDA device)");
  }
  found.value()->WaitFor(moment_);
  return {};
}

Result<bool> FakeEvent::IsComplete() {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kPassed));
  if (moment_ == nullptr) return true;
  if (moment_->captured()) {
    return Internal(
        "cudaEventQuery: operation not permitted on an event last recorded in a capturing stream "
        "(fake CUDA device)");
  }
  return moment_->passed();
}

}  // namespace farandole
