#include "coordinator/gradients/wrap_comparison.h"

#include <algorithm>

namespace farandole {
namespace {

constexpr size_t kCompared = 10'000;  // labels; of a larger optimizer the first round compares all

}  // namespace

std::string GradientPrefix(int32_t number) { return "gradients." + std::to_string(number) + "."; }

bool WaitUntil(Engine& engine, const std::shared_ptr<Work>& work, int64_t deadline_ns) {
  if (work == nullptr || work->done()) return true;
  if (deadline_ns == kNever) return engine.Wait(*work, -1);
  return engine.Wait(*work, std::max<int64_t>(deadline_ns - SteadyClock().NowNs(), 0));
}

int64_t DeadlineIn(int64_t timeout_ns) {
  return timeout_ns < 0 ? kNever : SteadyClock().NowNs() + timeout_ns;
}

int32_t WrapComparison::Add(uint32_t set, const std::vector<std::string>& labels) {
  const std::lock_guard lock(mutex_);
  Wraps& of_set = wraps_[set];
  std::deque<Wrap>& wraps = of_set.others;
  const int32_t number = of_set.count();
  Signature signature;
  signature.tensors.push_back({std::to_string(labels.size()) + " parameters", DType::kUint8, {0}});
  for (size_t i = 0; i < std::min(labels.size(), kCompared); ++i)
    signature.tensors.push_back({labels[i], DType::kUint8, {0}});
  const std::vector<const void*> in(signature.tensors.size());
  const std::vector<void*> out(signature.tensors.size());
  Result<std::shared_ptr<Work>> started = std::shared_ptr<Work>();
  Result<Operation*> prepared = engine_.operations().Prepare(
      {set, OpKind::kAllreduce, GradientPrefix(number) + "parameters at the wrap"}, signature);
  const HeldOperation held(prepared.ok() ? prepared.value() : nullptr);
  if (prepared.ok()) started = engine_.Start(*held, in, out);
  // What cannot be started is told by the first round, if there is one.
  if (!prepared.ok()) {
    wraps.push_back({nullptr, prepared.status()});
  } else if (!started.ok()) {
    wraps.push_back({nullptr, started.status()});
  } else {
    wraps.push_back({started.value(), Status()});
  }
  return number;
}

int32_t WrapComparison::count(uint32_t set) const {
  const std::lock_guard lock(mutex_);
  const auto wraps = wraps_.find(set);
  return wraps == wraps_.end() ? 0 : wraps->second.count();
}

// One after the other; what is alike is forgotten. Threads with an optimizer each may wait for the
// same wraps; the lock is not held meanwhile.
bool WrapComparison::Wait(uint32_t set, int32_t number, int64_t timeout_ns, Status* outcome) {
  const int64_t deadline_ns = DeadlineIn(timeout_ns);
  std::unique_lock lock(mutex_);
  Wraps& wraps = wraps_[set];
  while (wraps.alike <= number) {
    const int32_t first = wraps.alike;
    const std::shared_ptr<Work> work = wraps.others.front().work;
    if (work == nullptr) {
      *outcome = wraps.others.front().outcome;
      return true;
    }
    lock.unlock();
    if (!WaitUntil(engine_, work, deadline_ns)) return false;
    lock.lock();
    if (wraps.alike != first || wraps.others.front().work == nullptr) {
      continue;  // another thread has seen it
    }
    Wrap& wrap = wraps.others.front();
    const Status& status = work->status();
    if (status.ok()) {
      wraps.others.pop_front();
      ++wraps.alike;
      continue;
    }
    wrap.outcome = status.code() != Code::kMismatch
                       ? status
                       : Status(status.code(),
                                status.message() + "; it is wrapped optimizer " +
                                    std::to_string(first + 1) + kWrapAlike,
                                status.facts());
    wrap.work = nullptr;
  }
  *outcome = Status();
  return true;
}

}  // namespace farandole
