// A fake stream: what is put into it runs later, in order, on a thread of its own.
//
// It shows order errors that a stream run at once would hide: a test can slow it down, or hold it
// and let commands pass one by one.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "test/fakes/driver.h"

namespace farandole {

/// A place in a stream. Thread safety: any thread.
class FakeMoment {
 public:
  explicit FakeMoment(bool captured) : captured_(captured) {}
  void Pass();
  bool passed() const;
  void Wait() const;
  /// It belongs to a graph that is being captured, and never passes.
  bool captured() const { return captured_; }

 private:
  const bool captured_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
};

/// What a StreamHandle of the fake device points to.
///
/// Thread safety: any thread. Invariant: commands run one at a time, in the order they were put in.
/// Lifetime: owned by the device, until the runtime's end; a destroyed stream still runs what it
/// holds.
class FakeStream final : public FarandoleFakeStream {
 public:
  struct Command {
    const char* name = "";
    std::function<void()> run;
    bool marks_order = false;  ///< Runs even on a failed device, so that nothing waits for ever.
  };
  using Graph = std::vector<Command>;

  /// @param owner   Whose stream it is.
  /// @param failed  Asked before each command: then it is dropped.
  FakeStream(std::string name, const void* owner, std::function<bool()> failed);
  ~FakeStream();  // Stops.

  /// The stream with this handle, of any device; nullptr if there is none, or none any more.
  static FakeStream* Find(void* handle);
  void* handle() { return static_cast<FarandoleFakeStream*>(this); }
  const void* owner() const { return owner_; }
  const std::string& name() const { return name_; }

  void Enqueue(Command command);
  void Enqueue(const char* name, std::function<void()> run) {
    Enqueue({name, std::move(run), false});
  }
  /// The place after all that it holds now.
  std::shared_ptr<FakeMoment> Mark();
  /// What is put in from now on waits for `moment`.
  void WaitFor(std::shared_ptr<FakeMoment> moment);
  /// The host waits until all that was put in has run.
  void Synchronize();
  bool Idle() const;
  int64_t executed() const;

  /// Every command first sleeps so long.
  void SlowDown(int64_t us);
  /// No further command begins until Release, except as many as LetPass allows.
  void Hold();
  void LetPass(int commands);
  void Release();

  /// Until EndCapture what is put in is recorded, not run.
  void BeginCapture();
  Graph EndCapture();
  bool capturing() const;
  /// Puts a captured graph in.
  void Launch(const Graph& graph);

  /// Takes nothing more and ends after what it holds. For the device.
  void Close();

 private:
  /// Closes, releases, and waits for the end of the thread; after a minute it says which command
  /// does not end, and aborts the program.
  void Stop();
  void Run();
  bool MayBegin() const { return !held_ || may_pass_ > 0; }

  const std::string name_;
  const void* const owner_;
  const std::function<bool()> failed_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Command> queue_;
  Graph captured_;
  const char* running_ = nullptr;
  int64_t executed_ = 0;
  int64_t delay_us_ = 0;
  int may_pass_ = 0;
  bool held_ = false;
  bool capturing_ = false;
  bool closed_ = false;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace farandole
