// The gradients of one optimizer, from backward passes to results: the one state machine of every
// frontend.
//
// Gradients are grouped at the source: as they are accumulated, full groups start at once. Holding
// single tensors back by time either costs latency or still flushes dozens of times in one
// backward pass; the order learned in the first round needs no clock (docs/decisions.md).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/engine/engine.h"
#include "coordinator/gradients/group_tuner.h"
#include "coordinator/gradients/wrap_comparison.h"

namespace farandole {

enum class GradientVote : uint8_t { kPresent = 0, kAbsent = 1, kClean = 2 };

/// Divides tensors, given in the order they become ready, into consecutive groups of about
/// `group_bytes`: the last group is the tail of at most group_bytes / 8 (at least one tensor),
/// because it cannot hide behind the backward pass any more.
/// @return the tensors' numbers by group.
std::vector<std::vector<int32_t>> FormGroups(std::span<const int32_t> order,
                                             std::span<const int64_t> bytes, int64_t group_bytes);

/// The gradients of one optimizer on one rank, round after round: each is accumulated, marked once,
/// and reduced when the round has ended.
///
///   [CountPass] Open -> Accumulated ... Mark ... -> Compare -> End -> Wait -> [Stepped]
///
/// In the first round all tensors are one group, and the set's first rank tells its marking order,
/// the tensors' sizes and that of groups; from then on that order's groups are one key each. With a
/// tuner it does so again every few rounds, so that all ranks change their groups after the same
/// round. The last group is held until End even when full, so that a backward pass that raises
/// after its last gradient still fails the round on every rank. Tensors that no rank contributed in
/// the first round stand at its end.
///
/// A rank without a gradient gives no memory (`out` is nullptr): where another rank has one, the
/// result is allocated when the decision is executed.
///
/// It lives as long as its optimizer, and goes on with another engine after Rebind: tensors, how
/// often each is accumulated, counts of rounds and the last failure stay; groups, their order and
/// the count of steps begin anew, as a rank that has just come knows none of them.
/// Thread safety: one thread at a time. Lifetime: the engine outlives it, or Unbind came before.
class GradientRound {
 public:
  struct Options {
    uint32_t set = kGlobalSet;
    Signature common;    ///< op, factors, wire, device; no tensors.
    std::string prefix;  ///< Of the keys' names, distinct per optimizer; empty: the ranks' wraps
                         ///< are numbered and compared.
    int64_t group_bytes = int64_t{4} << 20;  ///< The first rank's counts.
    std::optional<GroupTuner> tuner;         ///< Finds group_bytes, from that; likewise.
    std::string tuning_file;                 ///< For its report; empty: none.
    bool has_flag = false;                   ///< Ranks raise flags, see RaiseFlag.
    bool overlaps = true;  ///< Gradients are due during the backward pass, otherwise at its end.
    int passes = 1;        ///< Backward passes per round: its window.
  };
  /// @param labels   One per tensor: what ranks compare at the wrap; empty: names, dtypes, shapes.
  /// @param wraps    For an empty prefix; outlives this.
  /// @param results  Gives memory to results of gradient i where this rank marks none; nullptr:
  ///                 `out` of Mark is never nullptr for a tensor with elements.
  GradientRound(Engine& engine, Options options, std::vector<TensorSignature> tensors,
                std::vector<std::string> labels = {}, WrapComparison* wraps = nullptr,
                std::shared_ptr<ResultAllocator> results = nullptr);

  /// Ends the time with this engine, before its own end; what was open or ended is forgotten. Until
  /// Rebind only const functions and Forget may be called.
  /// @return InvalidArgument while something is in flight.
  Status Unbind();
  /// Goes on with `engine`, in its process set `set`, as after the constructor: on all ranks in the
  /// same order, those included that wrap an optimizer for the first time.
  Status Rebind(Engine& engine, WrapComparison* wraps, uint32_t set,
                std::vector<std::string> labels = {});
  bool is_bound() const { return now_ != nullptr; }
  Engine& engine() const { return *now_->engine; }

  /// Gives the tensors new shapes and dtypes, and all of them a device, between two rounds; the
  /// groups stay as they are. So a change on all ranks goes on at once, and one on some ranks is a
  /// mismatch that names the tensor.
  /// @return InvalidArgument for another number of tensors, or in a round; the engine's final
  /// error.
  Status Redefine(std::vector<TensorSignature> tensors, DeviceKind device);
  /// More tensors, at the end of the last group; the same on every rank, or the round is a
  /// mismatch. Not between End and Wait. @return InvalidArgument; the engine's final error.
  Status Add(std::vector<TensorSignature> tensors);

  // ---- A backward pass ----

  /// How many passes the coming windows have.
  void set_passes(int passes) { options_.passes = passes; }
  /// A backward pass begins, whose number ranks compare. @param is_no_sync  It only accumulates.
  void CountPass(bool is_no_sync);
  /// That pass is the last of its window: a round is to be opened.
  bool is_window_full() const { return is_window_full_; }
  /// Gradients of earlier passes wait for a round, or one is open.
  bool has_window() const { return window_passes_ > 0 || round_.is_open; }
  /// Opens a round, if none is, and forgets the last failure: gradients accumulated from now on
  /// belong to it. Reports to the
  /// other ranks which step it is in: without that a rank that has gone on to another collective
  /// and one that waits for its gradients would wait for ever.
  /// @return InvalidArgument if the last round has not been waited for; the engine's final error.
  Status Open();
  bool is_open() const { return round_.is_open; }
  /// The round has ended, and nobody has waited for it.
  bool is_pending() const { return round_.is_ended; }
  /// Autograd has accumulated gradient i. @return the gradient that is to be marked now, which is
  /// one that was accumulated before (hooks of the user that follow ours have run by then), as
  /// often as in earlier rounds; kNone; kNoRound: none is open.
  /// InvalidArgument if i was marked in this round: the message says what to do.
  Result<int32_t> Accumulated(int32_t i);
  static constexpr int32_t kNone = -1, kNoRound = -2;
  /// How often gradient i was accumulated in the open round.
  int accumulations(int32_t i) const { return gradients_[static_cast<size_t>(i)].accumulations; }
  /// The next gradient that is not marked yet, accumulated ones first; -1: all are.
  int32_t NextUnmarked() const;

  // ---- A round ----

  /// Gradient i takes part in the open round; opens one. `in` may be nullptr when absent, and `out`
  /// with an allocator. A gradient that was accumulated in this round is never clean. On a GPU
  /// `producer` is the stream in which it is made.
  /// @return InvalidArgument for a bad i, a second mark, or a round that has ended and was not
  /// waited for.
  Status Mark(int32_t i, const void* in, void* out, GradientVote vote,
              const ProducerStream* producer = nullptr);
  bool Marked(int32_t i) const;
  /// @return InvalidArgument unless there is a gradient i.
  Status CheckNumber(int32_t i) const;
  /// Something was marked in the open round.
  bool has_marked() const { return !round_.order.empty(); }
  /// Raises a flag for all ranks, of an optimizer with flags; see flag(). Before End.
  void RaiseFlag() { round_.is_flag_raised = true; }
  /// Before the first End: waits until all ranks have wrapped as many optimizers, and compares
  /// them. Later it does nothing.
  /// @return false while it goes on after `timeout_ns` (< 0: no limit); else sets `*outcome`. After
  /// a Mismatch the open round is dropped: no rank can begin it.
  bool Compare(int64_t timeout_ns, Status* outcome);
  /// Starts what is left. With `failed` (not empty) the unstarted rest is refused on all ranks with
  /// that text, and there need be no open round.
  /// @return InvalidArgument naming the first unmarked gradient; the engine's final error.
  Status End(std::string_view failed);
  /// Waits for the ended round. @return false while it goes on after `timeout_ns`; then `*outcome`
  /// is untouched. After a failure all ranks count their steps anew.
  bool Wait(int64_t timeout_ns, Status* outcome);
  /// What became of the gradients, until the next Open or Forget: empty, or why they are not
  /// reduced. A round that fails, or is ended as failed, says so itself.
  const std::string& failure() const { return failure_; }
  /// The round went on on the other ranks, and nobody used its results here.
  bool is_interrupted() const { return is_interrupted_; }
  /// What failed outside of this: the use of the results; empty: the wait was interrupted. The
  /// first failure counts.
  void NoteFailure(std::string_view why);
  /// The gradients are given up: neither a failure nor an open window counts.
  void Forget();
  /// The reduced gradients were used, on all ranks: the coming rounds are those of the next step,
  /// which is reported to the other ranks. Without effect if no round succeeded since the last
  /// call. @return the engine's final error.
  Status Stepped();

  /// GPU: what is put into the stream from now on comes after the round last waited for.
  Status MakeWait(const ProducerStream& stream);
  /// How many rounds have been waited for, failed ones included.
  int64_t rounds() const { return rounds_; }
  /// How many of them succeeded.
  int64_t succeeded() const { return succeeded_; }
  /// Gradients were accumulated that no successful round has reduced.
  bool has_unreduced() const { return has_unreduced_; }
  /// How many rounds are complete, from the first: on a GPU those whose events are, on the CPU all.
  Result<int64_t> CompletedRounds();
  /// Nobody contributed gradient i in the round last waited for.
  bool Skipped(int32_t i) const;
  /// Some rank raised its flag in the round last waited for.
  bool flag() const { return is_flag_up_; }
  /// Something of this round has been started and not waited for.
  bool InFlight() const;
  /// 0 before the order is known.
  int32_t group_count() const {
    return is_bound() && now_->has_order ? static_cast<int32_t>(now_->groups.size()) : 0;
  }
  /// Of the wrap, from 0; -1: a prefix was given, or there is no engine.
  int32_t number() const { return is_bound() ? now_->number : -1; }

 private:
  struct Gradient {
    TensorSignature tensor;
    int32_t group = 0;
    int32_t position = 0;  // in the group
    int expected = 0;      // the most accumulations in earlier rounds; 0: never yet
    // Of the round.
    int accumulations = 0;
    bool is_marked = false;
    GradientVote vote = GradientVote::kPresent;
    bool is_skipped = false;  // of the round last waited for
  };
  struct Group {
    std::vector<int32_t> tensors;
    HeldOperation operation;
    uint32_t version = 0;  // of its description
    size_t marked = 0;
    std::shared_ptr<Work> work;  // of this round; nullptr before its start
    std::shared_ptr<ResultAllocator> results;
    std::vector<const void*> in;
    std::vector<void*> out;
    std::vector<ProducerStream> producers;  // different ones
  };
  struct RoundEnd {
    int64_t round = 0;  // from 1
    std::shared_ptr<DeviceEvent> event;
  };

  /// What belongs to one engine.
  struct EngineState {
    Engine* engine = nullptr;
    WrapComparison* wraps = nullptr;
    std::string prefix;       // of the operations' names
    int32_t number = -1;      // of the wrap; -1: ranks compare none
    bool is_compared = true;  // the wraps were
    bool has_order = false;
    int64_t rounds_to_order = 0;  // until the order is told again; kNever: it is not
    int64_t closed_ns = 0;        // when the last round was
    int joins = 0;  // that the context had seen when the groups, and the steps, were begun
    std::vector<Group> groups;
    StepCount step{.step = 1};
    std::pair<int64_t, int> announced{-1, 0};  // rounds_ and joins of the last announcement
    Status first_error;                        // of the round, or of what was done after the last
    std::deque<RoundEnd> ends;                 // that are not complete yet, oldest first
  };
  /// What is over when the round has been waited for.
  struct Round {
    bool is_open = false;
    bool is_ended = false;
    bool is_flag_raised = false;
    std::vector<int32_t> arrival;             // of the first accumulation
    int32_t due = kNone;                      // to be marked when the next gradient is accumulated
    std::vector<int32_t> order;               // this rank's marking order
    std::vector<int32_t> learned_order;       // the first rank's
    std::vector<int64_t> learned_bytes;       // likewise: of the tensors
    std::array<int64_t, 2> learned_groups{};  // likewise: group_bytes and rounds_to_order
    std::shared_ptr<Work> order_work;
  };

  bool Has(int32_t i) const { return i >= 0 && static_cast<size_t>(i) < gradients_.size(); }
  void Bind(Engine& engine, WrapComparison* wraps, std::vector<std::string> labels);
  Status UseGroups(std::vector<std::vector<int32_t>> groups, bool has_order);
  Status PrepareGroups();
  Result<Group> Prepare(std::vector<int32_t> tensors, size_t number, size_t count);
  void Start(Group& group, std::string_view failed);
  Vote VoteOf(const Group& group, std::string_view failed) const;
  bool LacksMemory(const Group& group) const;
  Result<std::shared_ptr<Work>> Submit(Group& group, const Vote& vote, bool notifies);
  bool IsOrderDue() const { return !now_->has_order || now_->rounds_to_order == 0; }
  bool IsFirstRank() const;
  bool IsTuning() const { return options_.tuner && now_->engine->size() > 1; }
  void ChooseGroups();
  void KeepTuned(int64_t group_bytes);
  void StartOrder(std::string_view failed);
  Result<std::shared_ptr<Work>> SubmitOrder(std::string_view failed);
  void LearnOrder();
  void CloseRound(Status* outcome);
  void CloseGroup(Group& group);
  void ResetRound();
  Status Announce();
  void CountStepsAnew();
  void NoteError(const Status& error);

  // Of the optimizer.
  Options options_;
  const std::shared_ptr<ResultAllocator> results_;
  std::vector<Gradient> gradients_;
  bool is_window_full_ = false;
  int window_passes_ = 0;  // of the window, without those that only accumulate
  int64_t stepped_ = 0;    // succeeded_ at the last Stepped
  int64_t rounds_ = 0;
  int64_t succeeded_ = 0;
  bool has_unreduced_ = false;
  bool is_flag_up_ = false;
  std::string failure_;
  bool is_interrupted_ = false;

  Round round_;
  std::unique_ptr<EngineState> now_;  // nullptr: unbound
};

}  // namespace farandole
