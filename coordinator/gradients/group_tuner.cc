#include "coordinator/gradients/group_tuner.h"

#include <algorithm>
#include <cstdio>
#include <span>

namespace farandole {
namespace {

/// Of at least one; of two, the greater.
int64_t Median(std::vector<int64_t> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

std::string Milliseconds(int64_t ns) {
  char text[32];
  (void)std::snprintf(text, sizeof text, "%.2f ms", static_cast<double>(ns) / 1e6);
  return text;
}

/// "4 MiB", or in bytes.
std::string Size(int64_t bytes) {
  if (bytes % (1 << 20) == 0 && bytes > 0) return std::to_string(bytes >> 20) + " MiB";
  if (bytes % (1 << 10) == 0 && bytes > 0) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " bytes";
}

}  // namespace

std::vector<int64_t> GroupTuner::Sizes(int64_t default_bytes) {
  std::vector<int64_t> sizes = {int64_t{256} << 10, int64_t{1} << 20, int64_t{4} << 20,
                                int64_t{16} << 20, int64_t{64} << 20};
  if (std::ranges::find(sizes, default_bytes) == sizes.end()) sizes.push_back(default_bytes);
  std::ranges::sort(sizes);
  return sizes;
}

GroupTuner::GroupTuner(int64_t default_bytes) {
  for (const int64_t bytes : Sizes(default_bytes)) {
    if (bytes == default_bytes) default_ = sizes_.size();
    sizes_.push_back({bytes, {}});
  }
}

GroupTuner::Trials& GroupTuner::InUse() {
  const size_t of_sweeps = kSweeps * sizes_.size();
  if (is_done_) return sizes_[best_];
  if (trials_ < of_sweeps) return sizes_[trials_ % sizes_.size()];
  return sizes_[(trials_ - of_sweeps) % 2 == 0 ? default_ : best_];
}

int64_t GroupTuner::Next() {
  if (!is_done_ && steps_ns_.size() >= kLeastSteps) {
    InUse().ns.push_back(Median({steps_ns_.begin() + kSettling, steps_ns_.end()}));
    ++trials_;
    Finish();
  }
  steps_ns_.clear();
  return InUse().bytes;
}

/// The sweeps, or all trials, if they are over.
void GroupTuner::Finish() {
  const size_t of_sweeps = kSweeps * sizes_.size();
  if (trials_ == of_sweeps) {
    const auto best =
        std::ranges::min_element(sizes_, {}, [](const Trials& one) { return Median(one.ns); });
    best_ = static_cast<size_t>(best - sizes_.begin());
    is_done_ = best_ == default_;
  } else if (trials_ == of_sweeps + 2 * kPairs) {
    if (!IsClearlyBetter()) best_ = default_;
    is_done_ = true;
  }
}

bool GroupTuner::IsClearlyBetter() const {
  const std::span pairs = std::span(sizes_[default_].ns).subspan(kSweeps);
  const std::span others = std::span(sizes_[best_].ns).subspan(kSweeps);
  size_t wins = 0;
  for (size_t i = 0; i < kPairs; ++i) wins += others[i] < pairs[i] ? 1 : 0;
  const auto default_ns = static_cast<double>(Median({pairs.begin(), pairs.end()}));
  const auto best_ns = static_cast<double>(Median({others.begin(), others.end()}));
  return wins + 1 >= kPairs && best_ns <= (1 - kLeastGain) * default_ns;
}

std::string GroupTuner::Describe() const {
  const std::string default_ms = Milliseconds(Median(sizes_[default_].ns)) + " a step";
  if (best_ == default_)
    return "groups of " + Size(sizes_[best_].bytes) + ", as set: " + default_ms +
           ", and no other size is clearly better";
  return "groups of " + Size(sizes_[best_].bytes) + ": " + Milliseconds(Median(sizes_[best_].ns)) +
         " a step, with " + Size(sizes_[default_].bytes) + ", as set, " + default_ms;
}

std::string GroupTuner::Report() const {
  std::string text =
      "# " + Describe() + "\n# group bytes: milliseconds of a step, trial by trial\n";
  for (const Trials& size : sizes_) {
    text += "# " + std::to_string(size.bytes) + ":";
    for (const int64_t ns : size.ns) text += " " + Milliseconds(ns);
    text += '\n';
  }
  return text + "FARANDOLE_GROUP_BYTES=" + std::to_string(sizes_[best_].bytes) + "\n";
}

}  // namespace farandole
