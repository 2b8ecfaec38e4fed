#include "coordinator/protocol/in_flight_batches.h"

#include <utility>

namespace farandole {

/// Indices ascend within a decision: resize drops what is above.
void InFlightBatches::Add(int64_t number, uint32_t tag, int32_t index) {
  if (used_ == 0 || entries_[used_ - 1].number != number) {
    if (++used_ > entries_.size()) entries_.emplace_back();
    Entry& fresh = entries_[used_ - 1];
    fresh.number = number;
    fresh.tag = tag;
    fresh.open = 0;
    fresh.listed.clear();
  }
  Entry& entry = entries_[used_ - 1];
  entry.listed.resize(static_cast<size_t>(index) + 1, 0);
  entry.listed.back() = 1;
  ++entry.open;
}

/// A decision that is done changes places with the last one in use and keeps its memory for the
/// next one. So entries are in no order.
bool InFlightBatches::Take(int64_t number, int32_t index, uint32_t* tag) {
  for (size_t i = 0; i < used_; ++i) {
    Entry& entry = entries_[i];
    const auto at = static_cast<size_t>(index);
    if (entry.number != number) continue;
    if (index < 0 || at >= entry.listed.size() || entry.listed[at] == 0) return false;
    entry.listed[at] = 0;
    *tag = entry.tag;
    if (--entry.open == 0) std::swap(entry, entries_[--used_]);
    return true;
  }
  return false;
}

}  // namespace farandole
