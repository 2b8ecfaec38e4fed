#include "core/status.h"

#include <gtest/gtest.h>

#include <memory>

namespace farandole {
namespace {

Status FailWhenNegative(int x) {
  return x < 0 ? InvalidArgument("x is " + std::to_string(x)) : Status();
}

Status CheckBoth(int x, int y) {
  FARANDOLE_RETURN_IF_ERROR(FailWhenNegative(x));
  FARANDOLE_RETURN_IF_ERROR(FailWhenNegative(y));
  return {};
}

TEST(Status, CarriesItsCodeAndMessageAndIsOkByDefault) {
  const Status status = Mismatch("rank 0 sent float32");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kMismatch);
  EXPECT_EQ(status.message(), "rank 0 sent float32");
  EXPECT_EQ(status.ToString(), "Mismatch: rank 0 sent float32");
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status().code(), Code::kOk);
  EXPECT_EQ(Status().message() + Status().ToString(), "OK");
}

TEST(Status, CarriesWhatIsKnownOfTheFailure) {
  const Status status(Code::kAborted, "x: rank 2 failed: why", {{2}, "why", "x"});
  EXPECT_EQ(status.facts().ranks, std::vector<int32_t>{2});
  EXPECT_EQ(status.facts().cause, "why");
  EXPECT_EQ(status.facts().tensor, "x");
  for (const Status& nothing : {Status(), Mismatch("y")}) {
    EXPECT_TRUE(nothing.facts().ranks.empty());
    EXPECT_EQ(nothing.facts().cause + nothing.facts().tensor, "");
  }
}

TEST(FailedOn, NamesTheRankAndKeepsWhoeverIsNamed) {
  const Status own = FailedOn(3, Status(Code::kTimeout, "rank 3: stuck", {.tensor = "x"}));
  EXPECT_EQ(own.message(), "rank 3: stuck");
  EXPECT_EQ(own.facts().ranks, std::vector<int32_t>{3});
  EXPECT_EQ(own.facts().cause, "stuck");
  EXPECT_EQ(own.facts().tensor, "x");
  EXPECT_EQ(FailedOn(1, own).facts().ranks, std::vector<int32_t>{3});
  EXPECT_EQ(FailedOn(1, Timeout("rank 3: stuck")).facts().cause, "rank 3: stuck");
  EXPECT_TRUE(FailedOn(1, Status()).ok());
}

TEST(Status, SharesTheMessageWithItsCopies) {
  const Status status = Internal("broken");
  const Status copy = status;  // NOLINT: the copy is what is tested
  EXPECT_EQ(&copy.message(), &status.message());
}

TEST(Status, ReturnIfErrorStopsAtTheFirstFailure) {
  EXPECT_TRUE(CheckBoth(1, 2).ok());
  EXPECT_EQ(CheckBoth(-1, -2).message(), "x is -1");
  EXPECT_EQ(CheckBoth(1, -2).message(), "x is -2");
}

TEST(CodeName, NamesEveryCode) {
  const Code codes[] = {
      Code::kOk,          Code::kInvalidArgument, Code::kMismatch,          Code::kTimeout,
      Code::kUnavailable, Code::kAborted,         Code::kResourceExhausted, Code::kUnimplemented,
      Code::kInternal};
  const char* names[] = {"OK",      "InvalidArgument",   "Mismatch",      "Timeout", "Unavailable",
                         "Aborted", "ResourceExhausted", "Unimplemented", "Internal"};
  for (size_t i = 0; i < std::size(codes); ++i) {
    EXPECT_STREQ(CodeName(codes[i]), names[i]);
    EXPECT_EQ(static_cast<size_t>(codes[i]), i) << "the numbers are part of the C ABI";
  }
}

TEST(Result, HoldsAValueThatCanBeMovedOutOrTheFailure) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  ASSERT_TRUE(result.ok() && result.status().ok());
  EXPECT_EQ(*std::move(result).value(), 7);
  const Result<int> failed(Timeout("no progress"));
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.status().code(), Code::kTimeout);
}

}  // namespace
}  // namespace farandole
