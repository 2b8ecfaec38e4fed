/// @file
/// The handle of one collective in flight.
#pragma once

#include <farandole/result.h>

#include <memory>

namespace farandole {

/// A started collective. The memory it was given is borrowed until it has finished, so the
/// destructor waits for that.
///
/// Thread safety: one thread at a time. Lifetime: ends before its Context.
class Work {
 public:
  /// Nothing in flight: finished.
  Work() = default;
  /// The other one then holds nothing.
  Work(Work&&) = default;
  /// Waits for what it held before.
  Work& operator=(Work&& other) {
    if (this != &other) {
      finish();
      work_ = std::move(other.work_);
    }
    return *this;
  }
  ~Work() { finish(); }

  /// Whether wait() would return at once.
  bool done() const { return work_ == nullptr || farandole_poll(work_.get()) == 1; }
  /// Blocks until the result is there. May be called again.
  /// @throws Error mismatch, aborted, timeout, unavailable: the collective failed.
  void wait() { try_wait().value(); }
  /// As wait(), with the failure as a value.
  Result<void> try_wait() {
    return work_ == nullptr ? Result<void>() : detail::check(farandole_wait(work_.get(), -1));
  }
  /// Blocks for at most `timeout_s` seconds.
  /// @return false if it goes on. @throws Error as wait().
  bool wait_for(double timeout_s) {
    if (work_ == nullptr) return true;
    const int code = farandole_wait(work_.get(), timeout_s);
    if (code == FARANDOLE_PENDING) return false;
    detail::check(code).value();
    return true;
  }

  /// @cond internal
  explicit Work(farandole_work* work) : work_(work) {}
  /// @endcond

 private:
  void finish() {
    if (work_ != nullptr)
      (void)farandole_wait(work_.get(), -1);  // told by wait(), or of no interest
    work_.reset();
  }

  struct Release {
    void operator()(farandole_work* work) const { farandole_work_release(work); }
  };
  std::unique_ptr<farandole_work, Release> work_;
};

}  // namespace farandole
