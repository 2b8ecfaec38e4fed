#include "ops/gpu/launch_queue.h"

#include <pthread.h>

#include <chrono>
#include <utility>

namespace farandole {

LaunchQueue::LaunchQueue(std::unique_ptr<LaunchStreams> streams, std::function<void()> wake)
    : streams_(std::move(streams)), wake_(std::move(wake)), thread_([this] { Run(); }) {
  (void)pthread_setname_np(thread_.native_handle(), "farandole-gpu");  // for top and gdb
}

LaunchQueue::~LaunchQueue() {
  if (!thread_.joinable()) return;
  (void)Stop(-1);
}

void LaunchQueue::Push(std::shared_ptr<LaunchTask> task) {
  std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

// The flag is set here and not by the thread, which may be inside a call: whoever aborts may go on
// and tell peers, whose aborted kernels could let one of ours end.
void LaunchQueue::Abort(Status why) {
  std::lock_guard lock(mutex_);
  if (!ends_) streams_->Spoil();
  if (failure_.ok()) failure_ = std::move(why);
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void LaunchQueue::AwaitRest(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return rests_; });
}

Status LaunchQueue::failure() const {
  if (!failed()) return {};
  std::lock_guard lock(mutex_);
  return failure_;
}

bool LaunchQueue::Stop(int64_t timeout_ns) {
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    changed_.notify_all();
    const auto has_ended = [this] { return ended_; };
    if (timeout_ns < 0) {
      changed_.wait(lock, has_ended);
    } else if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), has_ended)) {
      return false;
    }
  }
  if (thread_.joinable()) thread_.join();
  return true;
}

void LaunchQueue::Detach() {
  std::lock_guard lock(mutex_);
  wake_ = nullptr;
  thread_.detach();
}

// Under the lock, because who is woken may go once the thread is detached.
void LaunchQueue::Wake() {
  std::lock_guard lock(mutex_);
  if (wake_) wake_();
}

void LaunchQueue::EndClient(std::shared_ptr<Client> client) {
  std::erase(clients_, client);
  {
    std::lock_guard lock(mutex_);
    ++ending_;
  }
  std::thread([this, client = std::move(client)]() mutable {
    if (streams_->pack->device().MakeCurrent().ok()) client->End();
    client = nullptr;
    std::lock_guard lock(mutex_);
    --ending_;
    changed_.notify_all();
  }).detach();
}

void LaunchQueue::Run() {
  if (Status status = streams_->pack->device().MakeCurrent(); !status.ok()) Abort(status);
  while (const std::shared_ptr<LaunchTask> task = Next()) {
    const Status status = task->Run();
    if (!status.ok()) Abort(status);
    if (status.ok()) task->SetLaunched();
    in_flight_ = true;
    Wake();
  }
  clients_.clear();
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ending_ == 0; });
    ends_ = true;
  }
  streams_->End();
  std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

// Sleeps until there is a task; meanwhile looks after what is in flight. @return nullptr at the
// end.
std::shared_ptr<LaunchTask> LaunchQueue::Next() {
  while (true) {
    if (failed() && !aborted_) AbortClients();
    std::unique_lock lock(mutex_);
    const auto is_wanted = [this] { return !tasks_.empty() || stop_ || (failed() && !aborted_); };
    bool wanted = true;
    if (in_flight_ && !aborted_) {
      wanted = changed_.wait_for(lock, std::chrono::nanoseconds(kCheckNs), is_wanted);
    } else {
      changed_.wait(lock, is_wanted);
    }
    if (!wanted) {
      lock.unlock();
      CheckClients();
    } else if (failed() && !aborted_) {
      continue;
    } else if (!tasks_.empty()) {
      std::shared_ptr<LaunchTask> task = std::move(tasks_.front());
      tasks_.pop_front();
      return task;
    } else {
      return nullptr;
    }
  }
}

void LaunchQueue::CheckClients() {
  in_flight_ = false;
  for (const std::shared_ptr<Client>& client : clients_) {
    const Result<bool> busy = client->Check();
    if (!busy.ok()) return Abort(busy.status());
    in_flight_ = in_flight_ || busy.value();
  }
}

// A thread for each: kernels of several communicators lie in one stream, and each abort waits for
// all kernels before its own. (Since 2.24 one group would do; this does for every version.)
void LaunchQueue::AbortClients() {
  aborted_ = true;
  std::vector<std::thread> aborts;
  for (const std::shared_ptr<Client>& client : clients_) {
    aborts.emplace_back([client, this] {
      if (streams_->pack->device().MakeCurrent().ok()) client->Abort();
    });
  }
  Wake();
  for (std::thread& abort : aborts) abort.join();
  DrainStreams();
  std::lock_guard lock(mutex_);
  rests_ = true;
  changed_.notify_all();
}

// All that packs and reduces comes before what unpacks, but for a batch that failed half-way.
void LaunchQueue::DrainStreams() {
  for (CommStream* stream :
       {streams_->pack.get(), streams_->collective.get(), streams_->unpack.get()}) {
    std::shared_ptr<DeviceEvent> end;
    const bool is_marked = stream->Mark(end).ok();
    while (is_marked) {
      const Result<bool> complete = end->IsComplete();
      if (!complete.ok() || complete.value()) break;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

}  // namespace farandole
