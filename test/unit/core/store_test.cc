#include "core/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>

#include "core/clock.h"

namespace farandole {
namespace {

class FileStoreTest : public testing::Test {
 protected:
  ~FileStoreTest() override { std::filesystem::remove_all(folder_); }
  std::array<char, 32> name_ = {"/tmp/farandole_store_XXXXXX"};
  const std::string folder_ = mkdtemp(name_.data());
};

TEST_F(FileStoreTest, GivesWhatWasSetLast) {
  const auto one = std::move(OpenFileStore(folder_ + "/new").value());
  const auto two = std::move(OpenFileStore(folder_ + "/new").value());
  EXPECT_TRUE(one->Set("a/b", "first").ok());
  EXPECT_EQ(two->Get("a/b", 0).value(), "first");
  EXPECT_TRUE(one->Set("a/b", std::string("sec\0ond", 7)).ok());
  EXPECT_EQ(two->Get("a/b", 0).value(), std::string("sec\0ond", 7));
}

TEST_F(FileStoreTest, OtherUsersReadNothing) {
  const std::string folder = folder_ + "/new";
  EXPECT_TRUE(OpenFileStore(folder).value()->Set("key", "secret").ok());
  struct stat found {};
  ASSERT_EQ(stat(folder.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0700u);
  ASSERT_EQ(stat((folder + "/key").c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 077, 0u);
}

TEST_F(FileStoreTest, NamesTheFileThatNobodyWrites) {
  const Status status = OpenFileStore(folder_).value()->Get("absent", kNsPerMs).status();
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_THAT(status.message(), testing::HasSubstr(folder_ + "/absent"));
}

TEST_F(FileStoreTest, NamesAFolderThatCannotBe) {
  EXPECT_THAT(OpenFileStore(folder_ + "/no/where").status().message(),
              testing::HasSubstr(folder_ + "/no/where cannot be made: No such file"));
}

}  // namespace
}  // namespace farandole
