// Watches a run from outside: what each rank submitted, was handed and was told; and judges.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "coordinator/protocol/batching.h"
#include "coordinator/protocol/negotiation.h"
#include "test/simulation/scenario.h"

namespace farandole::simulation {

/// One submission of one rank, from Submit to its end.
struct Submission {
  enum class State : uint8_t { kPending, kRunning, kDone, kEnded };
  int op = 0;
  Signature signature;
  Vote vote;
  State state = State::kPending;
  Status ended;  ///< kEnded.
  uint32_t set = kGlobalSet;
  int64_t number = 0;  ///< The Work of that set that took it; 0: none.
  int batches = 0;     ///< That it still waits for.
};

/// Thread safety: none. The first failure is kept; see failure().
class Oracle {
 public:
  explicit Oracle(const Scenario& scenario);

  void Fail(const std::string& what);
  const std::optional<std::string>& failure() const { return failure_; }

  // Told while the run goes on.
  Submission& Submitted(int rank, int op, Signature signature, Vote vote);
  /// Compares with what other members were handed at the same place of the set's sequence.
  void Handed(int rank, const WorkDecision& work, const std::vector<BatchPlan>& plans,
              size_t count);
  void SetAdded(int rank, const ProcessSetInfo& set);
  void SetEnded(int rank, uint32_t set, const Status& why);
  void JoinDone(int rank, int last);
  void Left(int rank, int left);
  void Report(int rank, const std::string& text);
  void RecordSent(int from, int to, const KeyName& key, uint64_t signature);
  void RoundEnded(const KeyName& key, int64_t number);
  void ShutDown(int rank) { shut_down_.insert(rank); }
  void Crashed(int rank) { crashed_.insert(rank); }
  /// The work of `rank` has ended with this final error.
  void Failed(int rank, const Status& why);

  /// Whether `rank` has a submission of that operation.
  bool Has(int rank, int op) const { return submissions_.count({op, rank}) != 0; }
  const std::vector<int32_t>* RanksOf(uint32_t set) const;

  /// At the end: outcomes, contributors, messages.
  void ValidateRound();
  /// Instead, where ranks have crashed or were told that they diverged: each submission of the
  /// others has ended. After Shutdown, batches with a crashed rank are the data planes' to end,
  /// which are not played.
  void ValidateSurvivors();

 private:
  using KeyTuple = std::tuple<uint32_t, OpKind, std::string>;
  struct DecidedCopy {
    KeyName name;
    Signature signature;
    std::vector<RankMask> absent;
    Mask skipped;
    std::vector<int64_t> rows;
    bool operator==(const DecidedCopy&) const = default;
  };
  struct WorkCopy {
    int64_t number = 0;
    std::vector<DecidedCopy> keys;
    std::vector<std::pair<std::vector<std::pair<int32_t, int32_t>>, std::vector<int32_t>>> plans;
    bool operator==(const WorkCopy&) const = default;
  };
  using Group = std::vector<std::pair<int, const Submission*>>;  // (rank, submission)

  template <class Value>
  void Agree(std::map<int, std::vector<Value>>& log, std::map<std::pair<int, int>, size_t>& at,
             int topic, int rank, Value value, const char* what);
  void JudgeGroup(int op, const Group& group);
  void JudgeResult(const Op& op, const Group& group);
  void JudgeEnded(const Op& op, const Group& group);
  Code Expected(const Op& op, const Group& group, bool* runs) const;
  bool NeedsAbsent(const Op& op, const Group& group) const;
  void JudgeRecords();

  const Scenario& scenario_;
  std::optional<std::string> failure_;
  std::map<std::pair<int, int>, Submission> submissions_;  // by (op, rank)
  std::map<int, std::vector<WorkCopy>> works_;             // by set
  std::map<std::pair<int, int>, size_t> works_at_;
  std::map<int, std::vector<std::string>> events_;  // by topic
  std::map<std::pair<int, int>, size_t> events_at_;
  std::map<uint32_t, ProcessSetInfo> sets_;
  std::set<uint32_t> ended_;
  std::set<int> crashed_;
  std::set<int> shut_down_;
  std::map<std::tuple<int, int, KeyTuple, uint64_t>, int> records_;  // per link
  std::map<KeyTuple, std::set<int64_t>> ended_rounds_;
};

}  // namespace farandole::simulation
