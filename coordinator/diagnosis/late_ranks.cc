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
/// A link is slow that carries less than this of what the others do: rates of equal ones differ.
constexpr double kSlow = 0.5;
/// A link is slow in each step that is so in as many of kSteps: TCP's rate is that of its last
/// round trips, and differs by more than a half from step to step where cores are few.
constexpr size_t kLinkSteps = LateSteps::kSteps - 2;
constexpr size_t kNetworkSteps = LateSteps::kSteps / 2 + 1;  // without others to compare with
/// Who is late by at least so much of what another one is, is so by about the same.
constexpr double kAlike = 0.75;
/// Ranks are at most a step apart, and their reports on the way.
constexpr size_t kMostOpen = 8;

/// The first one counts that explains so much of the lateness. Who computes for longer is also
/// without a processor for longer, where there are too few.
struct Cause {
  LateBy cause;
  int64_t StepTimes::*field;
  double least;
};
constexpr std::array<Cause, 4> kCauses = {{{LateBy::kCollecting, &StepTimes::collecting_ns, 0.5},
                                           {LateBy::kInput, &StepTimes::input_ns, 0.5},
                                           {LateBy::kOtherGroups, &StepTimes::other_groups_ns, 0.5},
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

/// "12.3 MB/s"
std::string MegabytesPerSecond(double rate) {
  const auto tenths = std::llround(rate / 1e5);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MB/s";
}

/// Of at least one; changes their order.
template <typename Number>
Number Middle(std::vector<Number>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// What somebody is late by who is named.
double LeastNs(int64_t step_ns) {
  return std::max(kLeastNs, kLeastShare * static_cast<double>(step_ns));
}

/// What at least as many of the steps have.
int64_t InSteps(size_t count, std::array<int64_t, LateSteps::kSteps> values) {
  std::ranges::sort(values, std::greater());
  return values.at(count - 1);
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
    case LateBy::kOtherGroups:
      return text + "it is in operations of other groups for " + more;
    case LateBy::kLink:
      return text + "its link carries " + MegabytesPerSecond(late.rate) + ", the others' " +
             MegabytesPerSecond(late.others_rate);
    case LateBy::kNetwork:
      return text + "a connection carries " + MegabytesPerSecond(late.rate);
    case LateBy::kComputing:
      break;
  }
  return text + "its computing takes " + longer;
}

LateSteps::LateSteps(int ranks, bool has_two_hosts)
    : ranks_(static_cast<size_t>(ranks)),
      has_two_hosts_(has_two_hosts),
      rows_(kSteps + kMostOpen),
      sorted_(ranks_),
      rates_(ranks_) {
  for (Row& row : rows_) row.times.resize(ranks_);
  spread_.resize(ranks_);
  sorted_rates_.reserve(ranks_);
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
    row.medians.*field = Middle(sorted_);
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

int64_t LateSteps::StepNs() const {
  int64_t steps_ns = 0;
  for (const Row* row : last_) steps_ns += row->medians.ns;
  return steps_ns / static_cast<int64_t>(kSteps);
}

std::optional<LateRank> LateSteps::JudgeRank(size_t rank) const {
  std::array<double, kSteps> late{};
  for (size_t i = 0; i < kSteps; ++i)
    late.at(i) = -static_cast<double>(LongerNs(*last_[i], rank, &StepTimes::blocked_ns));
  LateRank found{static_cast<int32_t>(rank), LateBy::kComputing, 0, 0, 0};
  found.step_ns = StepNs();
  found.late_ns = -MeanNs(rank, &StepTimes::blocked_ns);
  found.longer_ns = found.late_ns;
  const double least = LeastNs(found.step_ns);
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

/// @return the middle one of those that send anything to another host; 0: none does.
double LateSteps::FindRates() {
  sorted_rates_.clear();
  for (size_t rank = 0; rank < ranks_; ++rank) {
    int64_t bytes = 0, ns = 0;
    for (const Row* row : last_) {
      bytes += row->times[rank].link_bytes;
      ns += row->times[rank].link_ns;
    }
    rates_[rank] = ns > 0 ? static_cast<double>(bytes) * kNsPerSecond / static_cast<double>(ns) : 0;
    if (ns > 0) sorted_rates_.push_back(rates_[rank]);
  }
  return sorted_rates_.empty() ? 0 : Middle(sorted_rates_);
}

std::optional<LateRank> LateSteps::JudgeLink(size_t rank, double others_rate) const {
  LateRank found{.rank = static_cast<int32_t>(rank), .cause = LateBy::kLink};
  found.step_ns = StepNs();
  found.rate = rates_[rank];
  found.others_rate = others_rate;
  if (found.rate == 0 || found.rate >= kSlow * others_rate) return std::nullopt;
  std::array<int64_t, kSteps> longer{};
  for (size_t i = 0; i < kSteps; ++i) {
    const StepTimes& times = last_[i]->times[rank];
    const double others_ns = static_cast<double>(times.link_bytes) * kNsPerSecond / others_rate;
    longer.at(i) = std::min(times.link_ns - static_cast<int64_t>(others_ns), times.blocked_ns);
  }
  found.late_ns = found.longer_ns = InSteps(kLinkSteps, longer);
  const bool is_late = static_cast<double>(found.late_ns) > LeastNs(found.step_ns);
  return is_late ? std::optional(found) : std::nullopt;
}

/// No rank's link is slower than the others', so the slowest one says how fast the network is.
std::optional<LateRank> LateSteps::JudgeNetwork() const {
  LateRank found{.cause = LateBy::kNetwork, .step_ns = StepNs()};
  std::array<int64_t, kSteps> waits{};
  waits.fill(INT64_MAX);
  for (size_t rank = 0; rank < ranks_; ++rank) {
    if (rates_[rank] == 0) continue;
    if (found.rate == 0 || rates_[rank] < found.rate) found.rate = rates_[rank];
    for (size_t i = 0; i < kSteps; ++i) {
      const StepTimes& times = last_[i]->times[rank];
      waits.at(i) = std::min({waits.at(i), times.link_ns, times.blocked_ns});
    }
  }
  found.late_ns = found.longer_ns = InSteps(kNetworkSteps, waits);
  const bool is_slow = found.rate > 0 && found.late_ns > found.step_ns / 2;
  return is_slow ? std::optional(found) : std::nullopt;
}

/// In operations of another group with one that is late itself, so about as late.
bool LateSteps::WaitsForAnother(const LateRank& found) const {
  return found.cause == LateBy::kOtherGroups &&
         std::ranges::any_of(found_, [&](const LateRank& other) {
           return other.cause != LateBy::kOtherGroups &&
                  static_cast<double>(other.late_ns) >= kAlike * static_cast<double>(found.late_ns);
         });
}

std::optional<LateRank> LateSteps::Judge() {
  found_.clear();
  const double rate = FindRates();
  for (size_t rank = 0; rank < ranks_; ++rank) {
    if (const auto found = JudgeRank(rank)) found_.push_back(*found);
    if (const auto found = JudgeLink(rank, rate)) found_.push_back(*found);
  }
  if (found_.empty() && has_two_hosts_)
    if (const auto found = JudgeNetwork()) found_.push_back(*found);
  const LateRank* latest = nullptr;
  for (const LateRank& one : found_) {
    if (named_.contains({one.rank, one.cause}) || WaitsForAnother(one)) continue;
    if (latest == nullptr || one.late_ns > latest->late_ns) latest = &one;
  }
  if (latest == nullptr) return std::nullopt;
  named_.insert({latest->rank, latest->cause});
  return *latest;
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
  return Judge();
}

LateRanks::LateRanks(NodeState& node, DetectorListener& listener, size_t hosts)
    : node_(node), listener_(listener), steps_(node.IsRoot() ? node.options.size : 0, hosts == 2) {}

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
