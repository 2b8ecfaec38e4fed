#include "coordinator/control/gather_text.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

TEST(GatherText, GivesBackWhatWasEncoded) {
  const Result<std::vector<std::string>> decoded =
      DecodeGathered(EncodeGathered({"zero", "", std::string("a\0b", 3)}));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded.value(), (std::vector<std::string>{"zero", "", std::string("a\0b", 3)}));
}

TEST(GatherText, NamesAllSilentRanks) {
  const Status status =
      DecodeGathered(EncodeGathered({"zero", std::nullopt, "two", std::nullopt})).status();
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_NE(status.message().find("rank 1, rank 3"), std::string::npos) << status.message();
}

TEST(GatherText, RefusesAnAnswerCutShortAtAnyByte) {
  const std::string whole = EncodeGathered({"zero", "one"});
  for (size_t length : {1u, 3u, 5u, 7u, 9u, 14u}) {
    EXPECT_EQ(DecodeGathered(whole.substr(0, length)).status().code(), Code::kInternal) << length;
  }
}

}  // namespace
}  // namespace farandole
