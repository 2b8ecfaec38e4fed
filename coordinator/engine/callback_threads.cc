#include "coordinator/engine/callback_threads.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "coordinator/engine/caller_threads.h"
#include "coordinator/engine/work.h"

namespace farandole {
namespace {

thread_local const CallbackThreads* of_this_thread = nullptr;

}  // namespace

std::atomic<int64_t> CallbackThreads::outstanding_{0};

CallbackThreads::~CallbackThreads() { Join(); }

void CallbackThreads::Join() {
  (void)Await(-1);  // true: there is no limit
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  is_wanted_.notify_all();
  for (std::thread& thread : std::exchange(threads_, {})) thread.join();
}

bool CallbackThreads::IsHere() const { return of_this_thread == this; }

std::unique_ptr<Callback> CallbackThreads::Make(std::function<void(const Status&)> call) {
  std::unique_ptr<Callback> callback(new Callback{std::move(call), this});
  const std::lock_guard lock(mutex_);
  if (threads_.empty()) StartThread();
  outstanding_.fetch_add(1);
  pending_.fetch_add(1);
  return callback;
}

void CallbackThreads::WaitFor(std::shared_ptr<const Work> work) {
  const std::lock_guard lock(mutex_);
  // Behind a work that does not end, others keep coming and ending.
  if (works_.size() >= most_works_) {
    std::erase_if(works_, [](const auto& one) { return one->done(); });
    most_works_ = std::max<size_t>(64, 2 * works_.size());
  }
  works_.push_back(std::move(work));
  if (waited_ == nullptr) is_wanted_.notify_one();
}

void CallbackThreads::Discard() {
  pending_.fetch_sub(1);
  outstanding_.fetch_sub(1);
}

// A thread for each call at once: one that runs may wait for the next. Who waits for this work is
// about to come, and needs no wake-up; but where the watchdog ends the work, he may be stuck in a
// library. Where no further thread can be had a call waits its turn.
void CallbackThreads::Push(const Work& work, Callback* first) {
  const std::lock_guard lock(mutex_);
  for (Callback* callback = first; callback != nullptr;) {
    Callback* const next = std::exchange(callback->next, nullptr);
    callback->status = work.status();
    *end_ = callback;
    end_ = &callback->next;
    pending_.fetch_sub(1);
    ++due_;
    if (waited_ == &work && (work.status().ok() || IsHere())) {
      waited_ = nullptr;
      ++idle_;
    } else if (due_ <= idle_) {
      is_wanted_.notify_one();
    } else {
      try {
        StartThread();
      } catch (const std::exception&) {
        is_wanted_.notify_one();  // the call waits its turn
      }
    }
    callback = next;
  }
}

// By the holder of the mutex. It counts as idle from now on, so that the next call has another one.
void CallbackThreads::StartThread() {
  threads_.emplace_back([this] { Run(); });
  (void)pthread_setname_np(threads_.back().native_handle(), "farandole-call");
  ++idle_;
}

void CallbackThreads::Run() {
  of_this_thread = this;
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return waited_ == nullptr && !works_.empty(); };
  for (;;) {
    is_wanted_.wait(lock, [&] { return first_ != nullptr || has_work() || is_ending_; });
    if (first_ != nullptr) {
      MakeCall(lock);
    } else if (has_work()) {
      WaitForOldest(lock);
    } else {
      return;
    }
  }
}

void CallbackThreads::MakeCall(std::unique_lock<std::mutex>& lock) {
  std::unique_ptr<Callback> callback(std::exchange(first_, first_->next));
  if (first_ == nullptr) end_ = &first_;
  --due_;
  --idle_;
  ++running_;
  lock.unlock();
  callback->call(callback->status);
  callback.reset();
  CallerThreads::Leave();  // it starts nothing any more, until the next call
  outstanding_.fetch_sub(1);
  lock.lock();
  ++idle_;
  --running_;
  has_ended_.notify_all();
}

void CallbackThreads::WaitForOldest(std::unique_lock<std::mutex>& lock) {
  std::shared_ptr<const Work> work = std::move(works_.front());
  works_.pop_front();
  waited_ = work.get();
  --idle_;
  lock.unlock();
  wait_(*work);
  lock.lock();
  if (waited_ == work.get()) {  // done, but Push is yet to come
    waited_ = nullptr;
    ++idle_;
  }
}

bool CallbackThreads::Await(int64_t timeout_ns) {
  if (IsHere()) return true;
  std::unique_lock lock(mutex_);
  const auto has_ended = [this] { return first_ == nullptr && running_ == 0; };
  if (timeout_ns >= 0)
    return has_ended_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), has_ended);
  has_ended_.wait(lock, has_ended);
  return true;
}

}  // namespace farandole
