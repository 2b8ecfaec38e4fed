#include "coordinator/engine/step_announcer.h"

namespace farandole {

Status StepAnnouncer::Announce(uint32_t set, const std::string& prefix, const StepCount& step,
                               bool notify) {
  uint32_t version = 0;
  Result<Operation*> prepared =
      operations_.Prepare({set, OpKind::kStep, prefix}, Signature(), &version, {});
  FARANDOLE_RETURN_IF_ERROR(prepared.status());
  const HeldOperation held(prepared.value());
  Operation& operation = *prepared.value();
  std::lock_guard lock(mutex_);
  if (operation.in_flight.load() || !operation.later_steps.empty()) {
    operation.later_steps.push_back(step);
    return {};
  }
  return Start(operation, step, version, notify);
}

Status StepAnnouncer::Start(Operation& operation, const StepCount& step, uint32_t version,
                            bool notify) {
  FARANDOLE_RETURN_IF_ERROR(operations_.Claim(operation, version));
  ClaimedOperation claimed(operation);
  FARANDOLE_RETURN_IF_ERROR(lifecycle_.CheckStart());
  Vote vote;
  vote.step = step;
  (void)submissions_.Submit(claimed, {}, {}, vote, notify);
  return {};
}

// Either the successor is seen here, or Announce sees that none is in flight.
void StepAnnouncer::StartLater(Operation& operation) {
  std::lock_guard lock(mutex_);
  if (operation.later_steps.empty()) return;
  const StepCount step = operation.later_steps.front();
  operation.later_steps.pop_front();
  // Fails only after a final error, which is reported to whoever asks next.
  (void)Start(operation, step, operation.version, true);
}

}  // namespace farandole
