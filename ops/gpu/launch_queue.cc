#include "ops/gpu/launch_queue.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace farandole {

void OwnedBatch::Assign(const Batch& batch) {
  batch_ = batch;
  const auto own = [](auto& mine, auto& span) {
    mine.assign(span.begin(), span.end());
    span = mine;
  };
  own(ranks_, batch_.ranks);
  own(absent_, batch_.absent);
  own(segments_, batch_.segments);
  own(splits_, batch_.splits);
  own(sends_, batch_.sends);
  own(receives_, batch_.receives);
  own(ready_, batch_.ready);
}

LaunchQueue::LaunchQueue(std::unique_ptr<LaunchStreams> streams, std::function<void()> wake)
    : streams_(std::move(streams)), wake_(std::move(wake)), thread_([this] { Run(); }) {
  (void)pthread_setname_np(thread_.native_handle(), "farandole-gpu");  // for top and gdb
}

LaunchQueue::~LaunchQueue() {
  if (!thread_.joinable()) return;
  (void)Stop(-1);
}

void LaunchQueue::Push(Work work) {
  std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_all();
}

// Tasks that neither thread nor plane holds any more are used again.
std::shared_ptr<LaunchTask> LaunchQueue::Launch(std::shared_ptr<Client> client,
                                                const Batch& batch) {
  std::shared_ptr<LaunchTask> task;
  {
    std::lock_guard lock(mutex_);
    const auto unused = std::find_if(tasks_.begin(), tasks_.end(),
                                     [](const auto& one) { return one.use_count() == 1; });
    task = unused != tasks_.end() ? *unused : tasks_.emplace_back(std::make_shared<LaunchTask>());
  }
  task->SetLaunched(false);
  task->batch.Assign(batch);
  Push({Work::Kind::kLaunch, std::move(client), task});
  return task;
}

// The flag is set here and not by the thread, which may be inside a call: whoever aborts may go on
// and tell peers, whose aborted kernels could let one of ours end.
void LaunchQueue::Abort(Status why) {
  std::lock_guard lock(mutex_);
  if (!ends_) streams_->Poison();
  if (failure_.ok()) failure_ = std::move(why);
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void LaunchQueue::AwaitDrained(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return drained_; });
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
  while (const std::optional<Work> work = Next()) {
    const Status status = failed() ? failure() : Do(*work);
    if (!status.ok()) Abort(status);
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

Status LaunchQueue::Do(const Work& work) {
  switch (work.kind) {
    case Work::Kind::kConnect:
      clients_.push_back(work.client);
      return work.client->Connect();
    case Work::Kind::kLaunch:
      return LaunchWithFollowers(work);
    case Work::Kind::kEnd:
      EndClient(work.client);
      return {};
  }
  return {};
}

// What follows was decided with it, and the engine starts all of a decision at once.
Status LaunchQueue::LaunchWithFollowers(const Work& first) {
  together_.assign({first.task});
  while (together_.back()->batch.batch().is_followed) {
    std::shared_ptr<LaunchTask> next = NextOf(*first.client);
    if (next == nullptr)
      return failed() ? failure() : Internal("a batch that follows did not come");
    together_.push_back(std::move(next));
  }
  FARANDOLE_RETURN_IF_ERROR(first.client->Launch(together_));
  for (const std::shared_ptr<LaunchTask>& task : together_) task->SetLaunched();
  together_.clear();
  return {};
}

// Waits for the client's next batch, which may not have been pushed yet. @return nullptr: none
// comes any more.
std::shared_ptr<LaunchTask> LaunchQueue::NextOf(const Client& client) {
  std::unique_lock lock(mutex_);
  auto next = work_.end();
  changed_.wait(lock, [&] {
    next = std::find_if(work_.begin(), work_.end(), [&](const Work& one) {
      return one.kind == Work::Kind::kLaunch && one.client.get() == &client;
    });
    return next != work_.end() || stop_ || failed();
  });
  if (next == work_.end()) return nullptr;
  std::shared_ptr<LaunchTask> task = std::move(next->task);
  work_.erase(next);
  return task;
}

// Sleeps until there is work; meanwhile looks after what is in flight. @return nothing at the end.
std::optional<LaunchQueue::Work> LaunchQueue::Next() {
  while (true) {
    if (failed() && !aborted_) AbortClients();
    std::unique_lock lock(mutex_);
    const auto is_wanted = [this] { return !work_.empty() || stop_ || (failed() && !aborted_); };
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
    } else if (!work_.empty()) {
      Work work = std::move(work_.front());
      work_.pop_front();
      return work;
    } else {
      return std::nullopt;
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
  drained_ = true;
  changed_.notify_all();
}

// All that packs and reduces comes before what unpacks, but for a batch that failed half-way.
void LaunchQueue::DrainStreams() {
  for (CommStream* stream :
       {streams_->pack.get(), streams_->collective.get(), streams_->unpack.get()}) {
    std::shared_ptr<DeviceEvent> end;
    const bool is_marked = stream->Record(end).ok();
    while (is_marked) {
      const Result<bool> complete = end->IsComplete();
      if (!complete.ok() || complete.value()) break;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

}  // namespace farandole
