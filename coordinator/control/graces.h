// How much longer than the init timeout the steps of a join wait. What is further out waits longer,
// so the first error is the innermost, which names the ranks that are missing.
#pragma once

#include <cstdint>

#include "core/clock.h"

namespace farandole {

/// A rank that gathers texts, for each level of the tree below it.
inline constexpr int64_t kGracePerLevelNs = 200 * kNsPerMs;
inline constexpr int kMostLevels = 6;  ///< Of a tree of 8^6 ranks.
/// A rank that has sent its text, for the answer of rank 0, beside that of the levels.
inline constexpr int64_t kAnswerGraceNs = 1 * kNsPerSecond;
/// Over MPI: all but rank 0, which says who is missing.
inline constexpr int64_t kGatherGraceNs = 500 * kNsPerMs;
/// A rank that rank 0 has accepted, once it has said that its time is up, for the table.
inline constexpr int64_t kTableGraceNs = 2 * kNsPerSecond;
/// Whoever waits for the thread that joins.
inline constexpr int64_t kInitGraceNs = 4 * kNsPerSecond;

static_assert(kInitGraceNs > kTableGraceNs && kInitGraceNs > kGatherGraceNs);
static_assert(kInitGraceNs > kAnswerGraceNs + kMostLevels * kGracePerLevelNs);

}  // namespace farandole
