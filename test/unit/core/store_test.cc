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

TEST_F(FileStoreTest, RefusesAFolderThatOthersMayWriteTo) {
  for (const mode_t mode : {mode_t{0770}, mode_t{0707}, mode_t{01777}}) {
    ASSERT_EQ(chmod(folder_.c_str(), mode), 0);
    const Status status = OpenFileStore(folder_).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), testing::HasSubstr(folder_ + " may be written by other users"));
  }
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  EXPECT_TRUE(OpenFileStore(folder_).ok());
}

TEST_F(FileStoreTest, RefusesAFolderAndAValueOfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const auto store = std::move(OpenFileStore(folder_).value());
  ASSERT_TRUE(store->Set("key", "value").ok());
  ASSERT_EQ(chown((folder_ + "/key").c_str(), 12345, 12345), 0);
  EXPECT_THAT(store->Get("key", 0).status().message(),
              testing::HasSubstr(folder_ + "/key belongs to user 12345, and not to user 0"));
  ASSERT_EQ(chown(folder_.c_str(), 12345, 12345), 0);
  EXPECT_THAT(OpenFileStore(folder_).status().message(),
              testing::HasSubstr(folder_ + " belongs to user 12345, and not to user 0"));
}

TEST_F(FileStoreTest, RefusesAValueThatIsNoPrivateFile) {
  const auto store = std::move(OpenFileStore(folder_).value());
  ASSERT_TRUE(store->Set("key", "value").ok());
  ASSERT_EQ(chmod((folder_ + "/key").c_str(), 0666), 0);
  EXPECT_THAT(store->Get("key", 0).status().message(),
              testing::HasSubstr(folder_ + "/key may be written by other users"));
  ASSERT_EQ(symlink((folder_ + "/key").c_str(), (folder_ + "/link").c_str()), 0);
  EXPECT_THAT(store->Get("link", 0).status().message(), testing::HasSubstr("cannot be read"));
  ASSERT_EQ(mkfifo((folder_ + "/fifo").c_str(), 0600), 0);  // nobody ever writes to it
  EXPECT_THAT(store->Get("fifo", 0).status().message(), testing::HasSubstr("is not a file"));
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
