#include "ops/shm/host_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace farandole {
namespace {

/// Both ends of a file, as two processes of a host have them.
class HostMemoryTest : public ::testing::Test {
 protected:
  HostMemoryTest() {
    ends_.push_back(HostMemory::Create({0, members_, kMailboxBytes}).value());
    ends_.push_back(HostMemory::Open(ends_[0]->address(), {1, members_, kMailboxBytes}).value());
    for (size_t rank = 0; rank < 2; ++rank) ends_[rank]->UseBell(bells_[rank]);
  }

  std::shared_ptr<std::byte> Join(uint32_t set, size_t rank) {
    return ends_[rank]->Join(set, members_, static_cast<int>(rank)).value();
  }
  /// Bytes of memory that the file takes up.
  int64_t Used() const {
    const std::string address = ends_[0]->address();
    struct stat file {};
    EXPECT_EQ(stat(address.substr(0, address.find(' ')).c_str(), &file), 0);
    return file.st_blocks * 512;
  }

  static constexpr size_t kMailboxBytes = 10'000;
  const std::vector<int> members_ = {0, 1};
  FutexDoorbell bells_[2];
  std::vector<std::shared_ptr<HostMemory>> ends_;
};

TEST_F(HostMemoryTest, GivesAllMembersOfASetTheSameZeroes) {
  const auto mine = Join(0, 0);
  const auto theirs = Join(0, 1);
  EXPECT_NE(mine.get(), theirs.get());
  EXPECT_EQ(*theirs, std::byte{0});
  *mine = std::byte{42};
  EXPECT_EQ(*theirs, std::byte{42});
}

TEST_F(HostMemoryTest, GivesSetsPartsOfTheirOwnHoweverLargeTheirUids) {
  const auto first = Join(7, 0);
  const auto last = Join(UINT32_MAX, 0);
  *first = std::byte{1};
  *last = std::byte{2};
  EXPECT_EQ(*Join(7, 1), std::byte{1});
  EXPECT_EQ(*Join(UINT32_MAX, 1), std::byte{2});
}

TEST_F(HostMemoryTest, AllocatesTheSlotsOfWhoHasJoined) {
  const SlotLayout layout = ends_[0]->LayoutOf(2);
  const auto slots = static_cast<int64_t>(layout.MemberBytes());
  const int64_t rest = Used() + static_cast<int64_t>(layout.HeaderBytes()) + 4096;
  const auto mine = Join(0, 0);
  EXPECT_EQ(Used(), rest + slots);
  const auto theirs = Join(0, 1);
  EXPECT_EQ(Used(), rest + 2 * slots);
}

TEST_F(HostMemoryTest, FreesASetWhenAllHaveReleasedIt) {
  const int64_t before = Used();
  auto mine = Join(3, 0);
  std::memset(mine.get(), 1, ends_[0]->LayoutOf(2).HeaderBytes());
  mine.reset();
  auto theirs = Join(3, 1);
  EXPECT_EQ(*theirs, std::byte{1});  // the first one has left: others may still need what it wrote
  theirs.reset();
  EXPECT_EQ(Used(), before);
}

TEST_F(HostMemoryTest, RingsTheRankThatIsNamed) {
  const uint32_t tickets[] = {bells_[0].Ticket(), bells_[1].Ticket()};
  ends_[0]->bell(1)->Ring();
  EXPECT_EQ(bells_[0].Ticket(), tickets[0]);
  EXPECT_NE(bells_[1].Ticket(), tickets[1]);
  ends_[1]->bell(0)->Ring();
  EXPECT_NE(bells_[0].Ticket(), tickets[0]);
}

TEST_F(HostMemoryTest, GivesAllTheSameMailboxesApartFromBellsAndSets) {
  std::memset(ends_[0]->mailboxes(), 1, kMailboxBytes);
  EXPECT_EQ(ends_[1]->mailboxes()[kMailboxBytes - 1], std::byte{1});
  EXPECT_EQ(*Join(0, 0), std::byte{0});
  EXPECT_EQ(bells_[0].Ticket(), 0u);
}

TEST_F(HostMemoryTest, RefusesMembersThatDoNotShareIt) {
  const std::vector<int> other = {0, 2};
  EXPECT_EQ(ends_[0]->Join(0, other, 0).status().code(), Code::kInvalidArgument);
}

TEST_F(HostMemoryTest, DoesNotOpenAnotherFile) {
  const auto other = HostMemory::Create({0, members_}).value();
  const std::string path = ends_[0]->address().substr(0, ends_[0]->address().find(' '));
  const std::string identity = other->address().substr(other->address().find(' '));
  EXPECT_EQ(HostMemory::Open(path + identity, {}).status().message(), path + " is another file");
  EXPECT_EQ(HostMemory::Open("/proc/0/fd/0 1:1", {}).status().code(), Code::kUnavailable);
}

TEST_F(HostMemoryTest, IsNeitherCreatedNorOpenedWhereFilesMustStaySmall) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status created = HostMemory::Create({0, members_}).status();
  const Status opened = HostMemory::Open(ends_[0]->address(), {1, members_}).status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(created.message(), "the size of files is limited (ulimit -f)");
  EXPECT_EQ(opened.message(), created.message());
}

}  // namespace
}  // namespace farandole
