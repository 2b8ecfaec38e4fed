/// @file
/// The handle of one collective in flight.
#pragma once

#include <farandole/device.h>
#include <farandole/result.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

namespace farandole {

/// @cond internal
namespace detail {

/// Asks `is_complete` until it does not answer FARANDOLE_PENDING or the time has passed, and sleeps
/// longer and longer between, at most a millisecond. @return its last answer.
template <class IsComplete>
int poll_until_complete(IsComplete is_complete, double timeout_s) {
  using std::chrono::duration;
  using std::chrono::microseconds;
  const auto start = std::chrono::steady_clock::now();
  microseconds pause(20);
  int code = is_complete();
  while (code == FARANDOLE_PENDING) {
    const duration<double> passed = std::chrono::steady_clock::now() - start;
    if (timeout_s >= 0 && passed.count() >= timeout_s) break;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, microseconds(1000));
    code = is_complete();
  }
  return code;
}

}  // namespace detail
/// @endcond

/// A started collective. It borrows the caller's memory until it is complete, so the destructor
/// waits for that.
///
/// On the CPU done and complete are the same. On a GPU the collective is done when it is launched
/// in a stream of its own: wait(stream) orders another stream after it while the host goes on. It
/// is complete when the device has executed it. Thread safety: one thread at
/// a time. Lifetime: ends before its Context.
class Work {
 public:
  /// Nothing in flight: complete.
  Work() = default;
  /// The other one is empty afterwards.
  Work(Work&&) = default;
  /// Waits for the collective that it held before.
  Work& operator=(Work&& other) {
    if (this != &other) {
      finish();
      work_ = std::move(other.work_);
    }
    return *this;
  }
  ~Work() { finish(); }

  /// Whether the collective is done: failed, or finished (CPU), or launched (GPU), so that
  /// wait(stream) would return at once.
  bool done() const { return work_ == nullptr || farandole_poll(work_.get()) == 1; }
  /// Whether wait() would return at once: the library no longer uses the memory.
  bool is_complete() const {
    return work_ == nullptr || farandole_is_complete(work_.get()) != FARANDOLE_PENDING;
  }
  /// Blocks the host until the result is ready, also on a GPU. May be called again.
  /// @throws Error mismatch, aborted, timeout, unavailable: the collective failed.
  void wait() { try_wait().value(); }
  /// As wait(), but returns the failure.
  Result<void> try_wait() {
    return work_ == nullptr ? Result<void>() : detail::check(wait_until_complete(-1));
  }
  /// Blocks for at most `timeout_s` seconds.
  /// @return false if it has not finished. @throws Error as wait().
  bool wait_for(double timeout_s) {
    if (work_ == nullptr) return true;
    const int code = wait_until_complete(timeout_s);
    if (code == FARANDOLE_PENDING) return false;
    detail::check(code).value();
    return true;
  }

  /// Calls `call` exactly once with the outcome when the collective is done. If it is done already,
  /// this thread calls now; otherwise a thread of the library, so `call` may take long, start
  /// collectives and wait for them. It must not throw. The call may come after this Work has ended;
  /// the end of the Context waits until it has returned. @throws Error resource_exhausted: no
  /// thread could be created.
  void when_done(std::function<void(Result<void>)> call) {
    if (work_ == nullptr) return call(Result<void>());
    auto held = std::make_unique<std::function<void(Result<void>)>>(std::move(call));
    detail::check(farandole_when_finished(work_.get(), &call_back, held.get())).value();
    (void)held.release();  // call_back's
  }

  /// GPU: blocks until the collective is launched; work put into `stream` from then on runs after
  /// it. The host does not wait for the device. May be called for several streams.
  /// @throws Error as wait(); invalid_argument: a stream of another device.
  void wait(const Stream& stream) { try_wait(stream).value(); }
  /// As wait(stream), but returns the failure.
  Result<void> try_wait(const Stream& stream) {
    if (work_ == nullptr) return {};
    const farandole_stream waiting = detail::to_c(stream);
    return detail::check(farandole_wait_on(work_.get(), &waiting, -1));
  }
  /// As wait(stream), and releases the collective: afterwards this is empty, and the memory may be
  /// written or freed in the order of `stream`. If it fails, this still holds the collective.
  /// @throws Error as wait(stream).
  void hand_over(const Stream& stream) { try_hand_over(stream).value(); }
  /// As hand_over(), but returns the failure.
  Result<void> try_hand_over(const Stream& stream) {
    Result<void> ordered = try_wait(stream);
    if (ordered.ok()) work_.reset();
    return ordered;
  }

  /// @cond internal
  explicit Work(farandole_work* work) : work_(work) {}
  /// @endcond

 private:
  int wait_until_complete(double timeout_s) {
    const auto start = std::chrono::steady_clock::now();
    const int code = farandole_wait(work_.get(), timeout_s);
    if (code != FARANDOLE_OK) return code;
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    const double left = timeout_s < 0 ? -1 : std::max(0.0, timeout_s - passed.count());
    return detail::poll_until_complete([this] { return farandole_is_complete(work_.get()); }, left);
  }

  static void call_back(void* call, int code) {
    const std::unique_ptr<std::function<void(Result<void>)>> held(
        static_cast<std::function<void(Result<void>)>*>(call));
    (*held)(detail::check(code));
  }

  void finish() {
    if (work_ != nullptr) (void)wait_until_complete(-1);  // reported by wait(), or of no interest
    work_.reset();
  }

  struct Release {
    void operator()(farandole_work* work) const { farandole_work_release(work); }
  };
  std::unique_ptr<farandole_work, Release> work_;
};

}  // namespace farandole
