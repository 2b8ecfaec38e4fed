#include "coordinator/engine/lifecycle.h"

#include <string>

namespace farandole {

// The error comes before the flag: who sees failed() finds it.
void Lifecycle::Fail(const Status& error) {
  {
    std::lock_guard lock(mutex_);
    if (final_error_.ok()) final_error_ = error;
  }
  failed_.store(true);
}

Status Lifecycle::final_error() const {
  std::lock_guard lock(mutex_);
  return final_error_;
}

Status Lifecycle::Refusal() const {
  std::lock_guard lock(mutex_);
  return RefusalLocked();
}

Status Lifecycle::RefusalLocked() const {
  if (!final_error_.ok()) return final_error_;
  if (leaving_) return Aborted("farandole has been shut down on rank " + std::to_string(rank_));
  return {};
}

Status Lifecycle::CheckStart() const {
  if (!failed_.load() && !shut_down_.load()) return {};
  return Refusal();
}

Result<Lifecycle::Change> Lifecycle::Join() {
  std::lock_guard lock(mutex_);
  FARANDOLE_RETURN_IF_ERROR(RefusalLocked());
  if (joining_ && !joining_->done()) return Change{joining_, false};
  joining_ = std::make_shared<Work>();
  return Change{joining_, true};
}

Lifecycle::Change Lifecycle::Leave(Parting parting) {
  std::lock_guard lock(mutex_);
  if (leaving_ && (parting_.is_final || !parting.is_final)) return {leaving_, false};
  parting_ = std::move(parting);
  if (leaving_) return {leaving_, !leaving_->done()};
  leaving_ = std::make_shared<Work>();
  // After a final error there is nothing to announce: the leave ends with that error.
  if (final_error_.ok()) return {leaving_, true};
  (void)leaving_->Finish(final_error_);  // true: nobody else knows it yet
  return {leaving_, false};
}

Lifecycle::Parting Lifecycle::parting() const {
  std::lock_guard lock(mutex_);
  return parting_;
}

bool Lifecycle::IsChanging() const {
  std::lock_guard lock(mutex_);
  return (joining_ && !joining_->done()) || (leaving_ && !leaving_->done());
}

void Lifecycle::EndJoin(const Status& status) {
  std::lock_guard lock(mutex_);
  if (joining_) (void)joining_->Finish(status);  // false: it has ended before
}

void Lifecycle::EndLeave(const Status& status) {
  std::lock_guard lock(mutex_);
  if (leaving_) (void)leaving_->Finish(status);  // likewise
}

// The numbers come first: who waits for the join reads them at its end.
void Lifecycle::OnJoined(int last_rank) {
  last_joined_.store(last_rank);
  joins_.fetch_add(1);
  EndJoin({});
}

void Lifecycle::SetDrained() {
  drained_.store(true);
  EndLeave({});
}

}  // namespace farandole
