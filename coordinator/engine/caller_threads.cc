#include "coordinator/engine/caller_threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

namespace farandole {

namespace {
std::atomic<bool> only_waiting = false;  // see CountOnlyWaiting
}  // namespace

/// What a thread knows of the engines that it has called. They may end before it, and it before
/// them.
struct CallerThreads::Thread {
  const State* last = nullptr;  // entered last
  std::vector<std::shared_ptr<State>> entered;
  int slices = 0;  // see WaitInSlices
  int helpers = 0;

  ~Thread() { Leave(); }
  void Leave() {
    for (const auto& state : entered) {
      const std::lock_guard lock(state->mutex);
      state->callers.erase(this);
    }
    entered.clear();
    last = nullptr;
  }
};

CallerThreads::Thread& CallerThreads::ThisThread() {
  static thread_local Thread thread;
  return thread;
}

void CallerThreads::Enter() {
  if (!only_waiting) Add();
}

void CallerThreads::Add() {
  Thread& thread = ThisThread();
  if (thread.last == state_.get()) return;
  const bool is_known = std::ranges::find(thread.entered, state_) != thread.entered.end();
  if (!is_known) {
    std::erase_if(thread.entered, [](const auto& state) { return state.use_count() == 1; });
    thread.entered.push_back(state_);
    const std::lock_guard lock(state_->mutex);
    state_->callers.try_emplace(&thread, State::Caller{{}, 0, 0, pthread_self()});
  }
  thread.last = state_.get();
}

void CallerThreads::Leave() { ThisThread().Leave(); }

void CallerThreads::CountOnlyWaiting() {
  only_waiting = true;
  Leave();
}

bool CallerThreads::AllWait() const {
  const std::lock_guard lock(state_->mutex);
  const auto known = static_cast<int>(state_->callers.size());
  return known > 0 && std::ranges::all_of(state_->callers, [known](const auto& one) {
           const State::Caller& caller = one.second;
           const std::shared_ptr<const Work> work = caller.work.lock();
           return work != nullptr && !work->done() && caller.threads <= known;
         });
}

void CallerThreads::Set(std::weak_ptr<const Work> work) {
  const Thread& thread = ThisThread();
  const std::lock_guard lock(state_->mutex);
  state_->callers[&thread] = {std::move(work), thread.slices, thread.helpers, pthread_self()};
}

bool CallerThreads::KnowsAll() const {
  const std::lock_guard lock(state_->mutex);
  const auto known = static_cast<int64_t>(state_->callers.size());
  return std::ranges::all_of(state_->callers, [known](const auto& one) {
    const State::Caller& caller = one.second;
    return caller.threads > 0 && int64_t{caller.threads} + caller.helpers <= known;
  });
}

std::vector<uint64_t> CallerThreads::Ids() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<uint64_t> ids;
  for (const auto& [_, caller] : state_->callers) ids.push_back(caller.id);
  return ids;
}

/// Between two slices nothing changes: the work that the last one waited for stays noted, and may
/// end meanwhile.
void CallerThreads::WaitInSlices(int threads, int helpers) {
  Thread& thread = ThisThread();
  const bool ends = threads == 0 && thread.slices != 0;
  thread.slices = threads;
  thread.helpers = helpers;
  if (ends && only_waiting) thread.Leave();
  for (size_t i = 0; ends && i < thread.entered.size(); ++i) {
    const std::lock_guard lock(thread.entered[i]->mutex);
    thread.entered[i]->callers[&thread].work.reset();
  }
}

CallerThreads::Waiting::Waiting(CallerThreads& threads, const Work& work, bool is_unlimited)
    : threads_(threads), work_(work), counts_(is_unlimited || ThisThread().slices > 0) {
  threads_.Add();
}

void CallerThreads::Waiting::Sleeps() {
  if (!counts_ || sleeps_) return;
  sleeps_ = true;
  threads_.Set(work_.weak_from_this());
}

CallerThreads::Waiting::~Waiting() {
  const bool goes_on = ThisThread().slices > 0 && !work_.done();
  if (only_waiting && work_.done()) {
    Leave();
  } else if (sleeps_ && !goes_on) {
    threads_.Set({});
  }
}

}  // namespace farandole
