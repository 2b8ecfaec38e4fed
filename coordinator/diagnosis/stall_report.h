// What users read about stalls: who waits for whom, in the names and calls of their program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "coordinator/protocol/messages.h"

namespace farandole {

/// Lines of one report.
inline constexpr size_t kMostStallLines = 20;

/// What the decider knows about a stalled key when a query ends.
struct StallFacts {
  KeyName key;
  int64_t waited_ns = 0;        ///< At least so long.
  std::vector<Answer> answers;  ///< Any order.
  std::vector<int32_t> silent;  ///< Members that gave no answer.
  std::vector<int32_t> joined;  ///< Members that need not submit.
};

/// Whether some rank waits and another one is missing; else the key was decided meanwhile.
bool IsStall(const StallFacts& facts);

/// The call of the user's program that submitted this key: allgather "x", an allreduce without a
/// name, the gradients of optimizer 1 (backward()/step()).
std::string DescribeCall(const KeyName& key);
/// Whether an optimizer submitted the key.
bool IsOfGradients(const KeyName& key);
/// The advice where ranks differ in whether they wait for gradients: which of them has skipped a
/// call, or made one more, is not known.
inline constexpr char kBackwardIsACall[] =
    "all ranks must make the same calls in the same order; backward() is such a call, or step() "
    "where DistributedOptimizer has complete=\"step\"";
/// Tensors of gradients in a key that DescribeCall does not distinguish, for an Answer.
void NameGradients(const KeyName& key, const Signature& signature, Answer& answer);

/// One line about `keys` stalls of this rank that nobody above it asks about; `key` is the oldest.
std::string DescribeUnheard(const KeyName& key, size_t keys, int64_t waited_ns, int rank,
                            int parent);

/// One line about one stall, or about several for which the same ranks are missing.
std::string DescribeStall(const std::vector<const StallFacts*>& stalls);
std::string DescribeStall(const StallFacts& stall);
/// One line per group of stalls for which the same ranks are missing; at most `most` of them.
std::vector<std::string> DescribeStalls(const std::vector<StallFacts>& stalls, size_t most);

/// The ranks that are missing and of which it is known what they do instead; the rest is about the
/// first of them. Without ranks if there are none.
FailureFacts BlockedRanks(const std::vector<StallFacts>& stalls);

/// Chooses what of the stalls is printed. A group is printed again when it has waited much longer
/// than ever before, or after an interval that doubles each time: a rank that is late in every step
/// is no news, and one that hangs at last is.
///
/// Thread safety: none.
class StallReport {
 public:
  /// At most kMostStallLines.
  std::vector<std::string> Lines(const std::vector<StallFacts>& stalls, int64_t now_ns);

 private:
  struct Printed {
    int64_t longest_ns = 0;   // of all waits printed so far
    int64_t interval_ns = 0;  // to the next time
    int64_t next_ns = 0;
  };
  bool IsDue(const std::string& group, int64_t waited_ns, int64_t now_ns);
  std::map<std::string, Printed> printed_;  // by the missing ranks
};

}  // namespace farandole
