// One collective that several devices of a program call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "bindings/xla/call.h"
#include "bindings/xla/call_frame.h"
#include "bindings/xla/watch.h"

namespace farandole::xla {

/// One call that all devices of a program make alike, with copies of the same arrays: the first one
/// starts the collective, whose results the others get copies of. All go on together, so that none
/// is in the next call of this name before all are in this one.
class SharedCall : public std::enable_shared_from_this<SharedCall> {
 public:
  /// The call of this name that not all `devices` of a run have joined yet, or a new one. Another
  /// run of the same program has calls of its own.
  static std::shared_ptr<SharedCall> Find(int64_t run, const std::string& name, int64_t devices);
  explicit SharedCall(int64_t devices) : devices_(static_cast<size_t>(devices)) {}

  XLA_FFI_Error* Join(XLA_FFI_CallFrame* frame, const Attributes& attributes, Arrays arrays);

 private:
  void Begin(const Attributes& attributes, Arrays* first);
  void SetOutcome(const Outcome& outcome);
  /// Once, when all have joined and the collective has ended.
  void EndIfComplete();

  const size_t devices_;
  int64_t found_ = 0;  // of Find's mutex
  std::mutex mutex_;
  std::deque<std::pair<Arrays, Promise>> joined_;  // the first stays where it is
  Outcome outcome_;
  bool has_outcome_ = false;
  bool is_ended_ = false;
  std::shared_ptr<void> in_flight_ = Watch::Get().Enter();
};

}  // namespace farandole::xla
