// Whether this rank's engine takes work: its final error, its join and its leave.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "coordinator/engine/work.h"
#include "core/status.h"

namespace farandole {

/// Thread safety: any thread. Invariants: the first final error stands; each Work of a join or a
/// leave ends once.
class Lifecycle {
 public:
  explicit Lifecycle(int rank) : rank_(rank) {}

  /// Nothing runs any more; see final_error.
  bool failed() const { return failed_.load(); }
  /// Fails the engine, unless it has failed before.
  void Fail(const Status& error);
  /// OK, or the first final error.
  Status final_error() const;
  /// Why nothing can be started any more, or OK.
  Status Refusal() const;
  /// As Refusal, but takes no lock while all is well, and allows the rank's last operations until
  /// all ranks have left.
  Status CheckStart() const;

  struct Change {
    std::shared_ptr<Work> work;
    bool is_new = false;  ///< The engine does not know of it yet.
  };
  /// The join in flight, or a new one. @return Refusal.
  Result<Change> Join();
  /// How this rank leaves; see Negotiation::Leave.
  struct Parting {
    bool is_final = true;  ///< false: it announces that it will.
    FailureFacts failure = {};
  };
  /// The rank's only leave; done already after a final error. New again when it becomes final.
  Change Leave(Parting parting);
  Parting parting() const;
  /// A join or a leave has not ended.
  bool IsChanging() const;

  /// Ends the join in flight, if any. An end that came earlier stands; so below.
  void EndJoin(const Status& status);
  void EndLeave(const Status& status);
  /// All ranks have joined.
  void OnJoined(int last_rank);
  int last_joined() const { return last_joined_.load(); }
  /// How many joins of all ranks have ended.
  int joins() const { return joins_.load(); }

  /// All ranks have left.
  void ShutDown() { shut_down_.store(true); }
  bool is_shut_down() const { return shut_down_.load(); }
  /// This rank's last messages are on their way: the leave is complete.
  void SetDrained();
  bool is_drained() const { return drained_.load(); }

 private:
  Status RefusalLocked() const;

  const int rank_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> shut_down_{false};
  std::atomic<bool> drained_{false};
  std::atomic<int> last_joined_{-1};
  std::atomic<int> joins_{0};

  mutable std::mutex mutex_;  // of those below
  Status final_error_;
  std::shared_ptr<Work> joining_;
  std::shared_ptr<Work> leaving_;
  Parting parting_;  // if leaving_
};

}  // namespace farandole
