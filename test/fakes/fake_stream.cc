#include "test/fakes/fake_stream.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

namespace farandole {
namespace {

int EnqueueCall(FarandoleFakeStream* self, const char* name, void (*run)(void*),
                void (*release)(void*), void* argument) {
  const std::shared_ptr<void> owned(argument, release);
  static_cast<FakeStream*>(self)->Enqueue(name, [run, owned] { run(owned.get()); });
  return 0;
}

/// The handles that may be used.
struct Handles {
  std::mutex mutex;
  std::set<void*> live;
};

Handles& AllHandles() {
  static auto* handles = new Handles;  // streams may be used until the very end
  return *handles;
}

}  // namespace

FakeStream* FakeStream::Find(void* handle) {
  std::lock_guard lock(AllHandles().mutex);
  if (AllHandles().live.count(handle) == 0) return nullptr;
  return static_cast<FakeStream*>(static_cast<FarandoleFakeStream*>(handle));
}

void FakeMoment::Pass() {
  std::lock_guard lock(mutex_);
  passed_ = true;
  changed_.notify_all();
}

bool FakeMoment::passed() const {
  std::lock_guard lock(mutex_);
  return passed_;
}

void FakeMoment::Wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
}

FakeStream::FakeStream(std::string name, const void* owner, std::function<bool()> failed)
    : FarandoleFakeStream{&EnqueueCall},
      name_(std::move(name)),
      owner_(owner),
      failed_(std::move(failed)) {
  {
    std::lock_guard lock(AllHandles().mutex);
    AllHandles().live.insert(handle());
  }
  thread_ = std::thread([this] { Run(); });
}

FakeStream::~FakeStream() { Stop(); }

void FakeStream::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return queue_.empty() ? closed_ : MayBegin(); });
    if (queue_.empty()) break;
    if (held_) --may_pass_;
    Command command = std::move(queue_.front());
    queue_.pop_front();
    running_ = command.name;
    const int64_t delay_us = delay_us_;
    lock.unlock();
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    if (command.marks_order || !failed_()) command.run();
    command = {};
    lock.lock();
    running_ = nullptr;
    ++executed_;
    changed_.notify_all();
  }
  ended_ = true;
  changed_.notify_all();
}

void FakeStream::Enqueue(Command command) {
  std::lock_guard lock(mutex_);
  if (capturing_) {
    captured_.push_back(std::move(command));
    return;
  }
  queue_.push_back(std::move(command));
  changed_.notify_all();
}

std::shared_ptr<FakeMoment> FakeStream::Mark() {
  auto moment = std::make_shared<FakeMoment>(capturing());
  Enqueue({"the record of an event", [moment] { moment->Pass(); }, true});
  return moment;
}

void FakeStream::WaitFor(std::shared_ptr<FakeMoment> moment) {
  Enqueue({"a wait for an event", [moment = std::move(moment)] { moment->Wait(); }, true});
}

void FakeStream::Synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && running_ == nullptr; });
}

bool FakeStream::Idle() const {
  std::lock_guard lock(mutex_);
  return queue_.empty() && running_ == nullptr;
}

int64_t FakeStream::executed() const {
  std::lock_guard lock(mutex_);
  return executed_;
}

void FakeStream::SlowDown(int64_t us) {
  std::lock_guard lock(mutex_);
  delay_us_ = us;
}

void FakeStream::Hold() {
  std::lock_guard lock(mutex_);
  held_ = true;
  may_pass_ = 0;
}

void FakeStream::LetPass(int commands) {
  std::lock_guard lock(mutex_);
  may_pass_ += commands;
  changed_.notify_all();
}

void FakeStream::Release() {
  std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

void FakeStream::BeginCapture() {
  std::lock_guard lock(mutex_);
  capturing_ = true;
}

FakeStream::Graph FakeStream::EndCapture() {
  std::lock_guard lock(mutex_);
  capturing_ = false;
  return std::exchange(captured_, {});
}

bool FakeStream::capturing() const {
  std::lock_guard lock(mutex_);
  return capturing_;
}

void FakeStream::Launch(const Graph& graph) {
  for (const Command& command : graph) Enqueue(command);
}

void FakeStream::Close() {
  {
    std::lock_guard lock(AllHandles().mutex);
    AllHandles().live.erase(handle());
  }
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void FakeStream::Stop() {
  Close();
  {
    std::unique_lock lock(mutex_);
    held_ = false;
    delay_us_ = 0;
    changed_.notify_all();
    if (!changed_.wait_for(lock, std::chrono::minutes(1), [this] { return ended_; })) {
      std::fprintf(stderr, "fake device: %s still runs %s at its end\n", name_.c_str(),
                   running_ == nullptr ? "nothing" : running_);
      std::abort();
    }
  }
  thread_.join();
}

}  // namespace farandole
