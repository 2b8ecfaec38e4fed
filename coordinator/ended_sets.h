// Why the process sets that ended last have ended.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "core/status.h"

namespace farandole {

/// One process set that has ended.
struct EndedSet {
  uint32_t uid = 0;
  int32_t user_id = 0;
  Status why;
};

/// Remembers the last kKept of them: that a set has ended is known from its uid for ever, why it
/// did only for so long. A job may make sets without limit, so no table may keep a line for each.
///
/// Thread safety: none; its owner's lock.
class EndedSets {
 public:
  static constexpr size_t kKept = 256;

  void Add(EndedSet set) {
    if (sets_.size() == kKept) sets_.pop_front();
    sets_.push_back(std::move(set));
  }
  /// nullptr: it has not ended, or long ago.
  const EndedSet* Find(uint32_t uid) const {
    const auto it = std::find_if(sets_.rbegin(), sets_.rend(),
                                 [uid](const EndedSet& set) { return set.uid == uid; });
    return it == sets_.rend() ? nullptr : &*it;
  }

 private:
  std::deque<EndedSet> sets_;  // oldest first
};

}  // namespace farandole
