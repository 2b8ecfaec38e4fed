// Gradients grouped at the source: hooks mark tensors as they become ready, full groups start at
// once.
//
// Shared by all framework adapters. Holding single tensors back by time either costs latency or
// still flushes dozens of times in one backward; the order learned in the first round needs no
// clock (docs/decisions.md).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/engine/engine.h"

namespace farandole {

enum class GradientVote : uint8_t { kPresent = 0, kAbsent = 1, kClean = 2 };

/// Divides tensors, given in the order they become ready, into consecutive groups of about
/// `group_bytes`: the last group is the tail of at most group_bytes / 8 (at least one tensor),
/// because it cannot hide behind the backward any more.
/// @return the tensors' numbers by group.
std::vector<std::vector<int32_t>> FormGroups(std::span<const int32_t> order,
                                             std::span<const int64_t> bytes, int64_t group_bytes);

/// The gradients of one optimizer on one rank, round after round: Mark each once, End, Wait.
///
/// The first round runs tensor by tensor and broadcasts the set's first rank's marking order; from
/// then on that order's groups are one key each. The last group is held until End even when full,
/// so that a backward that raises after its last gradient still fails the round on every rank.
/// Thread safety: one thread at a time. Lifetime: the engine outlives it.
class GradientBuckets {
 public:
  struct Options {
    uint32_t set = kGlobalSet;
    Signature common;    ///< op, factors, wire; no tensors.
    std::string prefix;  ///< Of the keys' names; distinct per optimizer.
    int64_t group_bytes = int64_t{4} << 20;
  };
  GradientBuckets(Engine& engine, Options options, std::vector<TensorSignature> tensors);

  /// Gives the tensors new shapes and dtypes, between two rounds; the groups stay as they are. So a
  /// change on all ranks goes on at once, and one on some ranks is a mismatch that names the
  /// tensor.
  /// @return InvalidArgument for another number of tensors, or in a round; the engine's final
  /// error.
  Status Redefine(std::vector<TensorSignature> tensors);

  /// Gradient i takes part in the open round. `in` may be nullptr when absent. On a GPU `producer`
  /// is the stream in which it is made.
  /// @return InvalidArgument for a bad i, a second mark, or a round that has ended and was not
  /// waited for.
  Status Mark(int32_t i, const void* in, void* out, GradientVote vote,
              const ProducerStream* producer = nullptr);
  bool Marked(int32_t i) const;
  /// Which step the open round, or the next one, belongs to; the other ranks' must agree. Call it
  /// before the round's first Mark or End.
  void InStep(const StepCount& step) { step_ = step; }
  /// Reports to the other ranks what InStep said of the coming round; see Engine::AnnounceStep.
  /// Without it a rank that has gone on to another collective and one that waits for its gradients
  /// would wait for ever. To be called on all ranks, when the gradients of a round have been used
  /// and at the beginning of each round; once per round and join it has an effect.
  /// @return the engine's final error.
  Status AnnounceStep();
  /// Starts what is left. With `failed` (not empty) the unstarted rest is refused on all ranks with
  /// that text.
  /// @return InvalidArgument naming the first unmarked gradient; the engine's final error.
  Status End(std::string_view failed);
  /// Waits for the ended round. @return false while it goes on after `timeout_ns`; then `*outcome`
  /// is untouched.
  bool Wait(int64_t timeout_ns, Status* outcome);
  /// GPU: what is put into the stream from now on comes after the round last waited for.
  Status MakeWait(const ProducerStream& stream);
  /// How many rounds have been waited for, failed ones included.
  int64_t rounds() const { return rounds_; }
  /// How many of them are complete, from the first: on a GPU those whose events are, on the CPU
  /// all.
  Result<int64_t> CompletedRounds();
  /// Nobody contributed gradient i in the round last waited for.
  bool Skipped(int32_t i) const;
  /// Something of this round has been started and not waited for.
  bool InFlight() const;
  /// 0 before the order is known.
  int32_t group_count() const { return grouped_ ? static_cast<int32_t>(groups_.size()) : 0; }

 private:
  struct Group {
    std::vector<int32_t> tensors;
    Operation* operation = nullptr;
    uint32_t version = 0;  // of its description
    size_t marked = 0;
    std::shared_ptr<Work> work;  // of this round; nullptr before its start
    std::vector<const void*> in;
    std::vector<void*> out;
    std::vector<ProducerStream> producers;  // different ones
  };
  struct RoundEnd {
    int64_t round = 0;  // from 1
    std::shared_ptr<DeviceEvent> event;
  };
  struct Position {
    int32_t group = 0;
    int32_t position = 0;
  };

  Status UseGroups(const std::vector<std::vector<int32_t>>& groups, bool single);
  Status PrepareGroups();
  void SetTensors(std::vector<TensorSignature> tensors);
  void Start(Group& group, std::string_view failed);
  void StartOrder(std::string_view failed);
  void LearnOrder();
  void CloseRound(Status* outcome);

  Engine& engine_;
  const Options options_;
  std::vector<TensorSignature> tensors_;
  std::vector<int64_t> bytes_;
  bool grouped_ = false;
  int joins_ = 0;  // that the context had seen when groups_ began with single tensors
  std::vector<Group> groups_;
  std::vector<Position> positions_;

  // The round.
  bool ended_ = false;
  StepCount step_;
  std::pair<int64_t, int> announced_{-1, 0};  // rounds_ and joins of the last announcement
  std::vector<bool> marked_;
  std::vector<GradientVote> votes_;
  std::vector<bool> skipped_;
  std::vector<int32_t> order_;          // this rank's marking order
  std::vector<int32_t> learned_order_;  // the first rank's
  std::shared_ptr<Work> order_work_;
  Status first_error_;
  int64_t rounds_ = 0;
  std::deque<RoundEnd> ends_;  // that are not complete yet, oldest first
};

}  // namespace farandole
