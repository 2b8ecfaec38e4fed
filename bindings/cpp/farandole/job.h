/// @file
/// A training whose result does not depend on how many ranks run it, nor on which of them are lost.
#pragma once

#include <farandole/context.h>
#include <farandole/job_files.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace farandole {

/// What a Job is told when it is made. slots and seed are part of the result.
struct JobOptions {
  int slots = 8;           ///< Parts of a step, for the life of the training; the most ranks.
  std::uint64_t seed = 0;  ///< Slot::seed depends on it.
  /// A folder for checkpoints and the chain of hashes; empty: neither is written.
  std::string checkpoint;
  std::int64_t checkpoint_steps = 100;  ///< From one checkpoint to the next; one at the end.
  int keep = 3;                         ///< How many checkpoints are kept.
  InitOptions init;                     ///< For Context::init(); its slots are those above.
};

/// Which part of which step is to be computed.
struct Slot {
  std::int64_t step;   ///< From 0.
  int number;          ///< 0 <= number < count.
  int count;           ///< JobOptions::slots.
  std::uint64_t seed;  ///< For random numbers: of the Job's seed, the step and the number.
};

/// A step's gradients, in the order of Job::add_gradient(). Borrowed for a call.
using GradientSpans = std::vector<Span<float>>;

/// How Job::run() ended.
enum class JobEnd {
  complete,  ///< All steps were taken.
  stopped,   ///< All ranks stopped after the same step; another run goes on from the checkpoint.
  left  ///< This rank has left, and the others go on: end the process with code 143, as 0 is the
        ///< end of the training for `farandolerun --elastic`.
};

/// @cond internal
namespace detail {

/// Memory that a step depends on.
struct State {
  std::string name;
  std::uint8_t* data;
  std::size_t bytes;
};

/// SHA-256 of each.
inline std::vector<std::string> digests_of(const std::vector<State>& states) {
  std::vector<std::string> digests;
  for (const State& state : states) digests.push_back(sha256(state.data, state.bytes));
  return digests;
}

/// SHA-256 of all states with their names. `tensors`: if not null, gets what the chain has of each.
inline std::string digest_of(const std::vector<State>& states, std::string* tensors = nullptr) {
  const std::vector<std::string> digests = digests_of(states);
  std::string all;
  for (std::size_t i = 0; i < states.size(); ++i) {
    all += states[i].name + " " + digests[i] + "\n";
    if (tensors == nullptr) continue;
    *tensors +=
        (i > 0 ? ", \"" : "\"") + states[i].name + "\": \"" + digests[i].substr(0, 16) + "\"";
  }
  return sha256(all.data(), all.size());
}

/// The finalizer of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014, doi:10.1145/2660193.2660195.
inline std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// 64 bits that change with any bit of the values: a changed value changes its product with an odd
/// number.
inline std::uint64_t hash_of(Span<const float> values) {
  std::uint64_t sum = 0, weight = 0x9e3779b97f4a7c15;  // of the golden ratio
  for (const float value : values) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    sum += bits * weight;
    weight += 0x9e3779b97f4a7c14;  // even: weights stay odd
  }
  return sum;
}

/// While one lives, SIGTERM is noted instead of what it did before.
class TerminationNotice {
 public:
  TerminationNotice() {
    came_ = 0;
    struct sigaction action {};
    action.sa_handler = [](int) { came_ = 1; };
    action.sa_flags = SA_RESTART;
    (void)sigaction(SIGTERM, &action, &before_);  // it cannot fail: signal and handler are valid
  }
  TerminationNotice(const TerminationNotice&) = delete;
  TerminationNotice& operator=(const TerminationNotice&) = delete;
  ~TerminationNotice() { (void)sigaction(SIGTERM, &before_, nullptr); }
  static bool came() { return came_ != 0; }

 private:
  inline static volatile sig_atomic_t came_ = 0;
  struct sigaction before_ {};
};

}  // namespace detail
/// @endcond

/// A training loop over slots, which goes on with the same bits whatever ranks are lost, join or
/// leave. All ranks make one alike.
/// @code
/// farandole::Job job;
/// job.add_state("weight", weight);  // in place
/// job.add_gradient("weight", weight.size());
/// job.run(1000, [&](const Slot& slot, const GradientSpans& gradients) { ... },
///         [&](std::int64_t step, const GradientSpans& means) { ... });
/// @endcode
/// A step is divided into slots. What a slot computes depends on the states and on its Slot alone;
/// sums over slots are taken in a fixed tree, by the ranks and between them. So the states have the
/// same bits for any number of ranks up to that of slots. A step that a loss interrupted runs
/// again, with the slots dealt out anew; the rank that has applied most steps gives its states to
/// those behind, of which only what differs by its SHA-256 travels. Newcomers are let in after a
/// step. docs/uninterrupted.md explains it.
///
/// SIGTERM during run() makes a rank of an elastic job leave after the step, and all ranks of
/// another job stop. Thread safety: stop() and leave() from any thread, the rest from one.
/// Lifetime: of the training, over all changes of ranks; states outlive it.
class Job {
 public:
  /// Adds a slot's gradients to zeroes. It changes no state and calls no collective; it may be
  /// called again for the same step.
  using ComputeFunction = std::function<void(const Slot&, const GradientSpans&)>;
  /// Changes states by the means over all slots, which it may overwrite. It is called once for a
  /// step that this rank takes, alike on all ranks, and calls no collective.
  using ApplyFunction = std::function<void(std::int64_t step, const GradientSpans&)>;

  /// Joins the job of this process. @throws Error as Context::init(); invalid_argument for an
  /// option out of its range.
  explicit Job(const JobOptions& options = {})
      : options_(checked(options)),
        context_(Context::init(options_.init)),
        is_elastic_(!context_.members().empty()),
        checkpoints_(options_.checkpoint, options_.keep) {}

  /// What steps depend on and apply changes: parameters, what the optimizer remembers. Any
  /// container or Span of trivially copyable elements, which stay where they are. With the same
  /// values on all ranks; rank 0's are everyone's. Before run(). @throws Error invalid_argument for
  /// a name that is empty, twice, or has quotes or control characters.
  template <class Data>
  void add_state(const std::string& name, Data&& data) {
    const Span span(data);
    using Element = typename decltype(span)::element_type;
    static_assert(std::is_trivially_copyable_v<Element> && !std::is_const_v<Element>,
                  "a state is copied as bytes, to other ranks too");
    auto* const bytes = reinterpret_cast<std::uint8_t*>(span.data());
    states_.push_back({checked(name, states_), bytes, span.size() * sizeof(Element)});
  }
  /// `count` numbers of which each slot computes a contribution and apply gets the mean: the
  /// gradient of a parameter, or one number such as a loss. Before run(). @throws Error as
  /// add_state().
  void add_gradient(const std::string& name, std::size_t count) {
    gradients_.push_back({checked(name, gradients_), count});
    floats_ += count;
  }

  /// Trains until `steps` steps were applied since the training began. Once; what is to happen in
  /// between, such as an evaluation, belongs into `apply`: a rank that joins later begins in the
  /// middle.
  /// @throws Error mismatch: ranks have other options, states or gradients, or the means of a step
  /// differ between them, as after a bit flip, which is noticed in the next one.
  /// invalid_argument: no gradient was added, or the checkpoint is of another job. halted: others
  /// may go on without this process, which should end with exit code 75. Others: the job cannot go
  /// on.
  JobEnd run(std::int64_t steps, ComputeFunction compute, ApplyFunction apply) {
    begin(std::move(compute), std::move(apply));
    const detail::TerminationNotice notice;
    recovering([] {});  // joins
    while (step_ < steps && !is_stopped_) {
      recovering([this, before = step_] {
        // Unless a rank that was ahead gave this one the step, or said that all have stopped.
        if (step_ == before && !is_stopped_) take_step();
      });
      if (has_left_) return JobEnd::left;
      if (step_ % options_.checkpoint_steps == 0) write_checkpoint();
    }
    recovering([this] {
      write_checkpoint();
      wait_for_checkpoint();
      context_.barrier(named("job.end"));  // so that a rank that is behind still finds one ahead
    });
    return step_ >= steps ? JobEnd::complete : JobEnd::stopped;
  }

  /// Makes all ranks stop after the same step.
  void stop() { wants_stop_ = true; }
  /// Makes this rank leave after a step; if all want to leave, or the job is not elastic, all stop.
  void leave() { wants_leave_ = true; }
  /// How many steps were applied since the training began.
  std::int64_t steps() const { return step_; }
  /// SHA-256 of all states with their names, 64 digits.
  std::string digest() const { return detail::digest_of(states_); }
  /// This rank, in the present generation of ranks.
  Context& context() { return context_; }

 private:
  struct Gradient {
    std::string name;
    std::size_t count;
  };

  static Options named(const std::string& name, Op op = Op::sum, std::size_t row = 1) {
    Options options;
    options.name = name;
    options.op = op;
    options.row = static_cast<std::int64_t>(row);
    return options;
  }

  static JobOptions checked(JobOptions options) {
    if (options.checkpoint_steps < 1 || options.keep < 1 || options.slots < 1) {
      throw Error(Code::invalid_argument,
                  "Job: slots=" + std::to_string(options.slots) +
                      ", checkpoint_steps=" + std::to_string(options.checkpoint_steps) +
                      ", keep=" + std::to_string(options.keep) + "; expected at least 1 of each");
    }
    options.init.slots = options.slots;
    return options;
  }

  template <class Known>
  const std::string& checked(const std::string& name, const std::vector<Known>& known) const {
    bool is_good = !name.empty() && !is_begun_;
    for (const char c : name) is_good = is_good && (c < 0 || c >= ' ') && c != '"' && c != '\\';
    for (const Known& one : known) is_good = is_good && one.name != name;
    if (is_good) return name;
    throw Error(Code::invalid_argument,
                "Job: \"" + name +
                    "\" was added; expected, before run(), a name that is new and has neither "
                    "quotes, backslashes nor control characters");
  }

  void begin(ComputeFunction compute, ApplyFunction apply) {
    if (gradients_.empty() || is_begun_)
      throw Error(Code::invalid_argument, "Job: run() twice, or without a gradient");
    is_begun_ = true;
    compute_ = std::move(compute);
    apply_ = std::move(apply);
    std::string states, gradients, names;
    for (const auto& [name, data, bytes] : states_)
      states += (states.empty() ? "\"" : ", \"") + name + "\": " + std::to_string(bytes);
    for (const auto& [name, count] : gradients_) {
      names += (names.empty() ? "\"" : ", \"") + name + '"';
      gradients += (gradients.empty() ? "\"" : ", \"") + name + "\": " + std::to_string(count);
    }
    settings_ = "{\"slots\": " + std::to_string(options_.slots) +
                ", \"seed\": " + std::to_string(options_.seed) + ", \"states\": {" + states +
                "}, \"gradients\": {" + gradients + "}}\n";
    chain_ = std::make_unique<detail::Chain>(
        options_.checkpoint,
        "{\"chain\": 1, \"settings\": " + settings_.substr(0, settings_.size() - 1) +
            ", \"tensors\": [" + names + "]}");
  }

  // Generations of ranks.

  /// Does work in step with the other ranks; after a loss again, with those that are left.
  template <class Call>
  void recovering(Call work) {
    while (true) {
      if (std::exchange(changes_, false)) regroup();
      try {
        if (!is_joined_) join();
        return work();
      } catch (const Error& error) {
        const bool is_loss = error.code() == Code::unavailable || error.code() == Code::aborted ||
                             error.code() == Code::timeout;
        if (!is_loss || !is_elastic_) throw;
      }
      regroup();
    }
  }

  void regroup() {
    is_joined_ = false;
    hash_ = 0;
    context_.reinit();
  }

  /// Takes the states of the rank that has applied most steps, with the ranks of this generation.
  void join() {
    std::vector<std::int64_t> steps = steps_of_ranks();
    if (*std::max_element(steps.begin(), steps.end()) < 0) {
      restore();
      steps = context_.allgather(std::vector<std::int64_t>{step_}, named("job.steps"));
    }
    const auto most = std::max_element(steps.begin(), steps.end());
    if (is_fresh_ || *std::min_element(steps.begin(), steps.end()) < *most)
      take_states(static_cast<int>(most - steps.begin()), *most);
    is_fresh_ = false;
    chain_->start(context_.rank() == 0, step_, context_.size());
    is_joined_ = true;
  }

  /// How many each rank has applied; -1: it has no states of the job yet.
  std::vector<std::int64_t> steps_of_ranks() {
    const auto hash = static_cast<std::int64_t>(
        std::stoull(detail::sha256(settings_.data(), settings_.size()).substr(0, 16), nullptr, 16));
    const std::vector<std::int64_t> mine = {is_fresh_ ? -1 : step_, is_stopped_ ? 1 : 0, hash};
    const std::vector<std::int64_t> all = context_.allgather(mine, named("job.ranks", Op::sum, 3));
    std::vector<std::int64_t> steps;
    for (std::size_t at = 0; at < all.size(); at += 3) {
      steps.push_back(all[at]);
      is_stopped_ = is_stopped_ || all[at + 1] != 0;
      if (all[at + 2] == all[2]) continue;
      throw Error(Code::mismatch, "Job: rank " + std::to_string(at / 3) +
                                      " has other settings than rank 0; those of rank " +
                                      std::to_string(context_.rank()) + ": " + settings_);
    }
    return steps;
  }

  /// Of what differs by its digest. If the leader is lost on the way, this rank's own states are
  /// still whole.
  void take_states(int leader, std::int64_t step) {
    std::string mine;
    for (const std::string& digest : detail::digests_of(states_)) mine += digest;
    std::string theirs = mine;
    context_.broadcast(theirs, leader, named("job.digests"));
    detail::Bytes lacks(states_.size() + 1);  // one more, so that there is something to reduce
    for (std::size_t i = 0; i < mine.size(); ++i)
      if (mine[i] != theirs[i]) lacks[i / 64] = 1;
    detail::Bytes needed = lacks;
    context_.allreduce(needed, named("job.lacking", Op::max));
    std::vector<detail::Bytes> received(states_.size());
    std::vector<Work> copies;
    for (std::size_t i = 0; i < states_.size(); ++i) {
      if (needed[i] == 0) continue;
      Span<std::uint8_t> bytes(states_[i].data, states_[i].bytes);
      if (context_.rank() != leader) {
        received[i].resize(bytes.size());
        bytes = received[i];
      }
      const Options options = named("job.state." + states_[i].name);
      copies.push_back(context_.broadcast_async(bytes, leader, options));
    }
    for (Work& copy : copies) copy.wait();
    for (std::size_t i = 0; i < states_.size(); ++i) {
      if (lacks[i] == 0) continue;
      std::copy(received[i].begin(), received[i].end(), states_[i].data);
      if (step == 0)
        detail::warn("state \"" + states_[i].name + "\" was not that of rank " +
                     std::to_string(leader) + ": the result depends on whose values are taken");
    }
    step_ = step;
  }

  // Steps.

  bool wants_leave() const { return wants_leave_ || detail::TerminationNotice::came(); }

  void take_step() {
    const auto [begin, end] = context_.slot_range();
    std::vector<float> sums = sum_over(begin, end);
    const bool leaves = is_elastic_ && wants_leave();
    const bool stops = wants_stop_ || (!is_elastic_ && wants_leave());
    const bool is_due = context_.rank() == 0 && context_.change_is_due();
    const auto hash = static_cast<std::int64_t>(hash_);
    std::vector<std::int64_t> notes = {stops, leaves, !leaves, is_due, hash, ~hash};
    Work summed = context_.allreduce_async(sums, named("job.gradients"));
    Work noted = context_.allreduce_async(notes, named("job.notes", Op::max));
    noted.wait();
    summed.wait();
    if (notes[4] != ~notes[5])
      throw Error(Code::mismatch, "Job: the means of step " + std::to_string(step_ - 1) +
                                      " have other bits on some ranks than on others");
    apply_mean(sums);
    is_stopped_ = notes[0] != 0 || notes[2] == 0;  // nobody would be left
    if (is_stopped_) return;
    if (leaves) return leave_now();
    changes_ = notes[1] != 0 || notes[3] != 0;
  }

  /// The sum in the tree over slots, of a node of it; few vectors are alive at once.
  std::vector<float> sum_over(int begin, int end) {
    int half = 1;
    while (2 * half < end - begin) half *= 2;
    if (end - begin == 1) return compute(begin);
    std::vector<float> sum = sum_over(begin, begin + half);
    const std::vector<float> right = sum_over(begin + half, end);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += right[i];
    return sum;
  }

  std::vector<float> compute(int slot) {
    std::vector<float> sums(floats_);
    const auto step = static_cast<std::uint64_t>(step_), number = static_cast<std::uint64_t>(slot);
    const std::uint64_t seed =
        detail::mixed(detail::mixed(detail::mixed(options_.seed) ^ step) ^ number);
    compute_({step_, slot, options_.slots, seed}, spans_of(sums));
    return sums;
  }

  GradientSpans spans_of(Span<float> all) const {
    GradientSpans spans;
    float* next = all.data();
    for (const Gradient& gradient : gradients_) {
      spans.emplace_back(next, gradient.count);
      next += gradient.count;
    }
    return spans;
  }

  void apply_mean(std::vector<float>& sums) {
    for (float& sum : sums) sum /= static_cast<float>(options_.slots);
    const GradientSpans means = spans_of(sums);
    hash_ = 0;
    std::string tensors;
    char text[17];
    for (const Span<float>& mean : means) {
      const unsigned long long hash = detail::hash_of(mean);
      hash_ = detail::mixed(hash_ ^ hash);
      std::snprintf(text, sizeof text, "%04llx", hash >> 48);
      tensors += text;
    }
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash_));
    apply_(step_, means);
    chain_->append(step_, "{\"step\": " + std::to_string(step_) + ", \"gradients\": \"" + text +
                              "\", \"tensors\": \"" + tensors + "\"}");
    ++step_;
  }

  void leave_now() {
    has_left_ = true;
    wait_for_checkpoint();
    (void)farandole_shutdown(context_.handle());  // whatever has become of the others
  }

  // Checkpoints: the settings, a line; then the states, one after the other.

  /// Loads the newest checkpoint that this rank can read, if there is one.
  void restore() {
    if (options_.checkpoint.empty()) return;
    const detail::Bytes content = checkpoints_.newest();
    if (content.empty()) return;
    const auto end = std::find(content.begin(), content.end(), '\n') + 1;
    const std::string settings(content.begin(), end);
    if (settings != settings_) {
      throw Error(Code::invalid_argument, "the checkpoint is of a Job with " + settings +
                                              "this one has " + settings_ +
                                              "go on with the same, or choose another folder");
    }
    const std::uint8_t* next = content.data() + settings.size();
    for (const detail::State& state : states_) {
      std::copy(next, next + state.bytes, state.data);
      next += state.bytes;
    }
    step_ = checkpoints_.last_step();
  }

  /// On rank 0: copies the states, and begins to write them.
  void write_checkpoint() {
    if (options_.checkpoint.empty() || context_.rank() != 0) return;
    wait_for_checkpoint();
    if (step_ == checkpoints_.last_step()) return;
    detail::Bytes content(settings_.begin(), settings_.end());
    for (const detail::State& state : states_)
      content.insert(content.end(), state.data, state.data + state.bytes);
    writing_ = std::async(
        std::launch::async,
        [this, step = step_, copy = std::move(content)]() mutable { write(step, copy); });
  }

  void write(std::int64_t step, detail::Bytes& content) {
    if (!checkpoints_.write(step, content)) return;
    std::vector<detail::State> copies = states_;
    std::uint8_t* next = content.data() + settings_.size();
    for (detail::State& copy : copies) next = (copy.data = next) + copy.bytes;
    std::string tensors;
    const std::string digest = detail::digest_of(copies, &tensors);
    chain_->write("{\"state\": " + std::to_string(step) + ", \"sha256\": \"" + digest +
                  "\", \"tensors\": {" + tensors + "}}");
  }

  void wait_for_checkpoint() {
    if (writing_.valid()) writing_.get();
  }

  const JobOptions options_;
  Context context_;
  const bool is_elastic_;
  detail::Checkpoints checkpoints_;
  std::unique_ptr<detail::Chain> chain_;
  std::vector<detail::State> states_;
  std::vector<Gradient> gradients_;
  std::size_t floats_ = 0;  // of all gradients
  std::string settings_;    // what must be alike on all ranks, a line of JSON
  ComputeFunction compute_;
  ApplyFunction apply_;
  std::int64_t step_ = 0;   // how many were applied
  std::uint64_t hash_ = 0;  // of the last step's means, if these ranks took it
  bool is_begun_ = false, is_stopped_ = false, has_left_ = false;
  bool is_fresh_ = true;    // it has no states of the job yet
  bool is_joined_ = false;  // with the ranks of this generation
  bool changes_ = false;    // ranks asked for another generation with the last step
  std::atomic<bool> wants_stop_{false}, wants_leave_{false};
  std::future<void> writing_;  // the last member: it ends first
};

}  // namespace farandole
