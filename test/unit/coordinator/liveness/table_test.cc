#include "coordinator/liveness/table.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "coordinator/control/frame_coalescer.h"

namespace farandole {
namespace {

Status Lost(int rank, const std::string& why, FailureKind kind = FailureKind::kUnknown) {
  return {Code::kUnavailable, why, {.ranks = {rank}, .cause = why, .kind = kind}};
}

TEST(LivenessTable, OfAllFindingsTheClearestCountsAndThenTheFirst) {
  const std::vector<Status> from_the_vaguest = {
      Timeout("no progress"),
      Lost(2, "silent", FailureKind::kLinkDown),
      Lost(1, "a closed connection"),
      Internal("a library failed"),
      Lost(1, "killed", FailureKind::kKilled),
  };
  LivenessTable up;
  LivenessTable down;
  const auto clearest = [](const LivenessTable& table) { return table.Judge().error.message(); };
  for (size_t i = 0; i < from_the_vaguest.size(); ++i) {
    up.Note(from_the_vaguest[i]);
    EXPECT_EQ(clearest(up), from_the_vaguest[i].message());
    down.Note(from_the_vaguest[from_the_vaguest.size() - 1 - i]);
    EXPECT_EQ(clearest(down), "killed");
  }
  up.Note(Lost(1, "again", FailureKind::kKilled));
  EXPECT_EQ(clearest(up), "killed");
  up.Note(Lost(2, "stopped", FailureKind::kStopped));
  EXPECT_EQ(clearest(up), "stopped") << "it fell silent before rank 1 lost its connection";
  EXPECT_FALSE(up.Judge().is_shared);
  for (const char* text : {"told", "told later"}) {
    up.Hear(EncodeFailure(3, Internal(text), false));
    EXPECT_EQ(clearest(up), "rank 3 failed: told");
  }
  EXPECT_TRUE(up.Judge().is_shared);
}

TEST(LivenessTable, OnlyAConnectionAwaitsABetterExplanation) {
  LivenessTable table(nullptr, 3600 * kNsPerSecond);
  table.Note(Lost(1, "silent", FailureKind::kLinkDown));
  EXPECT_TRUE(table.Judge().is_final);
  table.Note(Lost(1, "a closed connection"));
  EXPECT_FALSE(table.Judge().is_final);
  table.Note(Lost(1, "killed", FailureKind::kKilled));
  EXPECT_TRUE(table.Judge().is_final);
  LivenessTable alone;
  alone.Note(Lost(1, "a closed connection"));
  EXPECT_TRUE(alone.Judge().is_final);
}

TEST(LivenessTable, WhatARankSaidAsItLeftExplainsItsEndAndNoOther) {
  LivenessTable table;
  table.NoteParting(Status(Code::kAborted, "it raised an error", {.ranks = {1}}));
  EXPECT_TRUE(table.Judge().error.ok());
  table.Note(Lost(2, "a closed connection"));
  EXPECT_EQ(table.Judge().error.message(), "a closed connection");
  table.Note(Lost(1, "exited", FailureKind::kExited));
  EXPECT_EQ(table.Judge().error.message(), "it raised an error");
}

TEST(LivenessTable, WhatIsPassedOnStaysAsItIs) {
  for (const Status& error : {Internal("the cause"), Lost(2, "rank 2 died")}) {
    LivenessTable first;
    LivenessTable second;
    first.Hear(EncodeFailure(1, error, false));
    second.Hear(EncodeFailure(0, first.Judge().error, true));
    EXPECT_EQ(second.Judge().error.ToString(), first.Judge().error.ToString());
    EXPECT_EQ(second.Judge().error.facts(), first.Judge().error.facts());
  }
}

}  // namespace
}  // namespace farandole
