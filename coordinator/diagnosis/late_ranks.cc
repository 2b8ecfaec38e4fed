#include "coordinator/diagnosis/late_ranks.h"

#include <algorithm>
#include <cmath>

#include "coordinator/protocol/limits.h"

namespace farandole {
namespace {

constexpr double kLeastShare = 0.05;  // of a step
/// Who is woken first, and on which core, makes as much of a difference.
constexpr double kLeastNs = kNsPerMs;
/// Of the mean by its standard error. Where steps differ by a fifth by chance, as a normal
/// distribution has it, somebody is called late once in about 100,000 of them.
constexpr double kSure = 7;
constexpr double kForget = 1.0 / 32;  // what a step counts in the spread of a rank
/// Of a normal distribution: how much two values differ on average, by its standard deviation.
constexpr double kDifference = 1.128;
/// Ranks are at most a step apart, and their reports on the way.
constexpr size_t kMostOpen = 8;

/// The first one counts that explains so much of the lateness. Who computes for longer is also
/// without a processor for longer, where there are too few.
struct Cause {
  LateBy cause;
  int64_t StepTimes::*field;
  double least;
};
constexpr std::array<Cause, 3> kCauses = {{{LateBy::kCollecting, &StepTimes::collecting_ns, 0.5},
                                           {LateBy::kInput, &StepTimes::input_ns, 0.5},
                                           {LateBy::kProcessor, &StepTimes::queued_ns, 0.75}}};

/// Without the least and the greatest.
struct Trimmed {
  explicit Trimmed(std::array<double, LateSteps::kSteps> values) {
    std::ranges::sort(values);
    constexpr size_t kLeft = LateSteps::kSteps - 2;
    for (size_t i = 1; i <= kLeft; ++i) mean += values.at(i) / kLeft;
    double squares = 0;
    for (size_t i = 1; i <= kLeft; ++i) squares += std::pow(values.at(i) - mean, 2);
    deviation = std::sqrt(squares / (kLeft - 1));
  }
  double Error(double other_deviation) const {
    return std::max(deviation, other_deviation) / std::sqrt(LateSteps::kSteps - 2);
  }
  double mean = 0;
  double deviation = 0;
};

/// "8 ms", "0.31 ms".
std::string Milliseconds(int64_t ns) {
  const int64_t us = ns / kNsPerUs;
  if (us >= 10'000) return std::to_string((us + 500) / 1000);
  const std::string part = std::to_string(us % 1000 / 10);
  return std::to_string(us / 1000) + "." + (part.size() < 2 ? "0" : "") + part;
}

}  // namespace

std::string Describe(const LateRank& late) {
  const std::string longer = Milliseconds(late.longer_ns) + " ms longer than the others'";
  const std::string more = Milliseconds(late.longer_ns) + " ms more than the others";
  const std::string text =
      Milliseconds(late.late_ns) + " ms of " + Milliseconds(late.step_ns) + " in each step: ";
  switch (late.cause) {
    case LateBy::kInput:
      return text + "its input takes " + longer;
    case LateBy::kProcessor:
      return text + "it is without a processor for " + more;
    case LateBy::kCollecting:
      return text + "its garbage collection takes " + longer;
    case LateBy::kComputing:
      break;
  }
  return text + "its computing takes " + longer;
}

LateSteps::LateSteps(int ranks)
    : ranks_(static_cast<size_t>(ranks)), rows_(kSteps + kMostOpen), sorted_(ranks_) {
  for (Row& row : rows_) row.times.resize(ranks_);
  spread_.resize(ranks_);
  last_.reserve(kSteps + 1);
}

/// In place of the oldest row that is not needed.
LateSteps::Row& LateSteps::Find(int64_t step) {
  const auto found = std::ranges::find(rows_, step, &Row::step);
  if (found != rows_.end()) return *found;
  Row& row = *std::ranges::min_element(
      rows_, {}, [](const Row& one) { return one.is_last ? INT64_MAX : one.step; });
  row.step = step;
  row.known = 0;
  std::ranges::fill(row.times, StepTimes());
  return row;
}

/// Of two ranks none is the middle one: LongerNs compares each with the other.
void LateSteps::FindMedians(Row& row) {
  for (const Field field : kTimesOfStep) {
    std::ranges::transform(row.times, sorted_.begin(), field);
    const auto middle = sorted_.begin() + static_cast<std::ptrdiff_t>(ranks_ / 2);
    std::ranges::nth_element(sorted_, middle);
    row.medians.*field = *middle;
  }
}

int64_t LateSteps::LongerNs(const Row& row, size_t rank, Field field) const {
  const int64_t others = ranks_ == 2 ? row.times[1 - rank].*field : row.medians.*field;
  return row.times[rank].*field - others;
}

int64_t LateSteps::MeanNs(size_t rank, Field field) const {
  int64_t sum = 0;
  for (const Row* row : last_) sum += LongerNs(*row, rank, field);
  return sum / static_cast<int64_t>(kSteps);
}

/// A few steps may be alike by chance, so all before them count as well; by their differences, of
/// which one that stands out does not weigh much, and a rank that has become late only one.
void LateSteps::AddToSpread(const Row& before, const Row& row) {
  ++spread_steps_;
  const double weight = std::max(kForget, 1.0 / static_cast<double>(spread_steps_));
  for (size_t rank = 0; rank < ranks_; ++rank) {
    const int64_t change_ns = LongerNs(row, rank, &StepTimes::blocked_ns) -
                              LongerNs(before, rank, &StepTimes::blocked_ns);
    const double deviation = std::abs(static_cast<double>(change_ns)) / kDifference;
    spread_[rank] += weight * (deviation - spread_[rank]);
  }
}

std::optional<LateRank> LateSteps::Judge(size_t rank) const {
  std::array<double, kSteps> late{};
  int64_t steps_ns = 0;
  for (size_t i = 0; i < kSteps; ++i) {
    late.at(i) = -static_cast<double>(LongerNs(*last_[i], rank, &StepTimes::blocked_ns));
    steps_ns += last_[i]->medians.ns;
  }
  LateRank found{static_cast<int32_t>(rank), LateBy::kComputing, 0, 0, 0};
  found.step_ns = steps_ns / static_cast<int64_t>(kSteps);
  found.late_ns = -MeanNs(rank, &StepTimes::blocked_ns);
  found.longer_ns = found.late_ns;
  const double least = std::max(kLeastNs, kLeastShare * static_cast<double>(found.step_ns));
  if (static_cast<double>(found.late_ns) <= least) return std::nullopt;
  for (const Cause& one : kCauses) {
    const int64_t longer_ns = MeanNs(rank, one.field);
    if (static_cast<double>(longer_ns) < one.least * static_cast<double>(found.late_ns)) continue;
    found.cause = one.cause;
    found.longer_ns = longer_ns;
    break;
  }
  const Trimmed trimmed(late);
  // A collector comes and goes, which is no chance; but once is not in each step.
  if (found.cause == LateBy::kCollecting && trimmed.mean > least) return found;
  const double error = trimmed.Error(spread_[rank]);
  const bool is_sure = trimmed.mean > least && trimmed.mean > kSure * error;
  return is_sure ? std::optional(found) : std::nullopt;
}

std::optional<LateRank> LateSteps::Add(const StepTimes& times) {
  Row& row = Find(times.step);
  StepTimes& mine = row.times[static_cast<size_t>(times.rank)];
  row.known += mine.step == 0 ? 1 : 0;
  mine = times;
  if (row.known < ranks_ || row.is_last) return std::nullopt;
  FindMedians(row);
  if (!last_.empty()) AddToSpread(*last_.back(), row);
  row.is_last = true;
  last_.push_back(&row);
  if (last_.size() <= kSteps) return std::nullopt;  // the first one is like no other
  last_.front()->is_last = false;
  last_.erase(last_.begin());
  std::optional<LateRank> latest;
  for (size_t rank = 0; rank < ranks_; ++rank) {
    const std::optional<LateRank> found = Judge(rank);
    if (found && (!latest || found->late_ns > latest->late_ns)) latest = found;
  }
  const bool is_news = latest && named_.insert({latest->rank, latest->cause}).second;
  return is_news ? latest : std::nullopt;
}

/// Rank 0 compares; others keep it for what they send next.
void LateRanks::Take(const StepTimes& times) {
  const auto ranks = static_cast<size_t>(node_.options.size);
  if (!node_.IsRoot()) {
    // A rank that has joined sends nothing for long; by then nobody needs them any more.
    if (next_.times.size() >= std::min(kMaxStepTimes, kMostOpen * ranks)) next_.times.clear();
    next_.times.push_back(times);
  } else if (const std::optional<LateRank> late = steps_.Add(times)) {
    listener_.OnLate(*late);
  }
}

void LateRanks::OnSubmitted(KeyId) {
  while (const std::optional<StepTimes> times = listener_.TakeStep()) Take(*times);
  if (next_.times.empty()) return;
  next_.type = UpType::kSteps;
  node_.SendUp(next_);
  next_.times.clear();
}

Status LateRanks::ReceiveUp(int child, const UpMessage& message) {
  if (message.type != UpType::kSteps) return {};
  for (const StepTimes& times : message.times) {
    if (times.rank >= node_.options.size ||
        node_.sets.ContributorOf(times.rank) != ContributorOfChild(child)) {
      return Internal("protocol: step times of rank " + std::to_string(times.rank) +
                      ", which is not in the branch");
    }
    Take(times);
  }
  return {};
}

}  // namespace farandole
