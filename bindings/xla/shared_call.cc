#include "bindings/xla/shared_call.h"

#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <system_error>
#include <thread>
#include <vector>

namespace farandole::xla {
namespace {

/// Threads for XLA to go on in, each with one device's part of a program: as many as are busy at a
/// time, kept for the next calls.
class Pool {
 public:
  static Pool& Get() {
    static Pool& pool = *new Pool;  // its threads run until the process ends
    return pool;
  }
  /// In the calling thread where there is no other.
  void Run(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      if (idle_ > tasks_.size() || AddThread()) {
        tasks_.push_back(std::move(task));
        changed_.notify_one();
        return;
      }
    }
    task();
  }

 private:
  // With the mutex.
  bool AddThread() {
    try {
      std::thread([this] { Work(); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    ++idle_;
    return true;
  }
  [[noreturn]] void Work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      --idle_;
      lock.unlock();
      task();
      lock.lock();
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;  // threads that wait for a task
};

}  // namespace

std::shared_ptr<SharedCall> SharedCall::Find(int64_t run, const std::string& name,
                                             int64_t devices) {
  static std::mutex mutex;
  static auto& open = *new std::map<std::pair<int64_t, std::string>, std::shared_ptr<SharedCall>>;
  const std::lock_guard lock(mutex);
  const auto found = open.try_emplace({run, name}).first;
  if (found->second == nullptr) found->second = std::make_shared<SharedCall>(devices);
  std::shared_ptr<SharedCall> call = found->second;
  if (++call->found_ == devices) open.erase(found);
  return call;
}

XLA_FFI_Error* SharedCall::Join(XLA_FFI_CallFrame* frame, const Attributes& attributes,
                                Arrays arrays) {
  Promise promise;
  if (XLA_FFI_Error* error = promise.Begin(frame)) return error;
  Arrays* first = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const bool is_first = joined_.empty();
    Arrays& own = joined_.emplace_back(std::move(arrays), promise).first;
    if (is_first) first = &own;
  }
  if (first != nullptr) Begin(attributes, first);
  EndIfComplete();
  return nullptr;
}

void SharedCall::Begin(const Attributes& attributes, Arrays* first) {
  WorkHandle work;
  Prepared prepared;
  const Outcome outcome = Start(attributes, first, &prepared, &work);
  if (outcome.code == FARANDOLE_OK) return SetOutcome(outcome);
  Continue(attributes, outcome, prepared, work, [self = shared_from_this()](const Outcome& ended) {
    self->SetOutcome(ended);
    self->EndIfComplete();
  });
}

void SharedCall::SetOutcome(const Outcome& outcome) {
  const std::lock_guard lock(mutex_);
  outcome_ = outcome;
  has_outcome_ = true;
}

void SharedCall::EndIfComplete() {
  {
    const std::lock_guard lock(mutex_);
    if (!has_outcome_ || joined_.size() < devices_ || is_ended_) return;
    is_ended_ = true;
  }
  const std::vector<farandole_output>& made = joined_.front().first.out;
  if (outcome_.code == FARANDOLE_OK) Complete(joined_.front().first);
  for (size_t device = 1; outcome_.code == FARANDOLE_OK && device < devices_; ++device)
    for (size_t i = 0; i < made.size(); ++i)
      std::memcpy(joined_[device].first.out[i].data, made[i].data,
                  static_cast<size_t>(made[i].bytes));
  for (const auto& [_, promise] : joined_)
    Pool::Get().Run([promise = promise, outcome = outcome_] { promise.Fulfil(outcome); });
  in_flight_.reset();
}

}  // namespace farandole::xla
