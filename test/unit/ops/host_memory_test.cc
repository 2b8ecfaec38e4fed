#include "ops/shm/host_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
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

TEST_F(HostMemoryTest, GivesSetsPartsOfTheirOwnAlsoIfFewerRanksHaveLargerSlots) {
  std::vector<int> ranks(33);
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::vector<int> fewer(ranks.begin(), ranks.end() - 1);
  HostMemory::Options options;
  options.cache_bytes = 32 * 1024 * 1024;
  const auto memory = HostMemory::Create({31, ranks}, options).value();
  const size_t bytes = memory->LayoutOf(33).Bytes();
  ASSERT_LT(bytes, memory->LayoutOf(32).Bytes());
  const auto large = memory->Join(0, fewer, 31).value();
  const auto next = memory->Join(1, ranks, 32).value();  // so that the file reaches that far
  std::memset(large.get() + memory->LayoutOf(32).Bytes() - 4096, 42, 4096);
  EXPECT_EQ(std::count(next.get(), next.get() + bytes, std::byte{0}),
            static_cast<ptrdiff_t>(bytes));
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

TEST_F(HostMemoryTest, LetsARankFindItsPeersBuffers) {
  const auto mine = ends_[0]->Allocate(10'000).value();
  const auto theirs = ends_[1]->Allocate(10'000).value();
  EXPECT_EQ(mine.get()[9'999], std::byte{0});
  const int64_t offset = ends_[0]->OffsetOf(mine.get() + 9'000, 1'000).value();
  mine.get()[9'000] = std::byte{42};
  EXPECT_EQ(*ends_[1]->At(offset), std::byte{42});
  EXPECT_NE(ends_[1]->At(offset), mine.get() + 9'000);
  EXPECT_EQ(theirs.get()[9'000], std::byte{0});
}

TEST_F(HostMemoryTest, KnowsWhatLiesInABuffer) {
  const auto buffer = ends_[0]->Allocate(4096).value();
  const auto next = ends_[0]->Allocate(4096).value();
  EXPECT_TRUE(ends_[0]->OffsetOf(buffer.get(), 4096));
  EXPECT_FALSE(ends_[0]->OffsetOf(buffer.get(), 4097));  // goes on in the next one
  EXPECT_FALSE(ends_[0]->OffsetOf(buffer.get() - 1, 1));
  EXPECT_FALSE(ends_[0]->OffsetOf(members_.data(), 1));
  EXPECT_FALSE(ends_[1]->OffsetOf(buffer.get(), 1));
}

TEST_F(HostMemoryTest, FreesBuffersAndUsesTheirAddressesAgain) {
  const int64_t before = Used();
  auto first = ends_[1]->Allocate(1 << 20).value();
  const auto second = ends_[1]->Allocate(1 << 20).value();
  const std::byte* const address = first.get();
  *first = std::byte{1};
  first.reset();
  EXPECT_EQ(Used(), before + (1 << 20));
  first = ends_[1]->Allocate(4096).value();
  EXPECT_EQ(first.get(), address);
  EXPECT_EQ(*first, std::byte{0});
}

TEST_F(HostMemoryTest, AllocatesALargeBufferUnderAProfilersTimer) {
  struct sigaction before {};
  struct sigaction profiler {};
  profiler.sa_handler = [](int) {};
  ASSERT_EQ(sigaction(SIGPROF, &profiler, &before), 0);
  const itimerval often = {{0, 500}, {0, 500}};
  ASSERT_EQ(setitimer(ITIMER_PROF, &often, nullptr), 0);
  const Result<std::shared_ptr<std::byte>> buffer = ends_[0]->Allocate(200 << 20);
  const itimerval never{};
  (void)setitimer(ITIMER_PROF, &never, nullptr);
  (void)sigaction(SIGPROF, &before, nullptr);
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  EXPECT_GT(Used(), 200 << 20);
}

TEST_F(HostMemoryTest, KeepsBuffersInQuarantine) {
  const int64_t before = Used();
  auto buffer = ends_[0]->Allocate(4096).value();
  EXPECT_EQ(ends_[0]->QuarantineBuffers(), 4096u);
  const std::byte* const address = buffer.get();
  buffer.reset();
  EXPECT_EQ(Used(), before + 4096);
  EXPECT_NE(ends_[0]->Allocate(4096).value().get(), address);
}

TEST_F(HostMemoryTest, HasNoBuffersWhereAddressesAreLimited) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  const rlimit small{rlim_t{64} << 30, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &small), 0);
  const Status allocated = ends_[0]->Allocate(4096).status();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_EQ(allocated.code(), Code::kResourceExhausted);
  EXPECT_TRUE(ends_[0]->Allocate(4096).ok());
}

/// What the kernel has been told of the mapping that holds `address`: two letters each, see
/// proc(5).
std::string FlagsOf(const void* address) {
  std::ifstream smaps("/proc/self/smaps");
  bool holds = false;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      holds = begin <= reinterpret_cast<uintptr_t>(address) &&
              reinterpret_cast<uintptr_t>(address) < end;
    }
    if (holds && line.starts_with("VmFlags:")) return line + " ";
  }
  return "none";
}

// Dumping a hole of the file would allocate it, and the holes are far larger than any memory.
TEST_F(HostMemoryTest, KeepsBuffersOutOfCoreDumps) {
  const auto buffer = ends_[0]->Allocate(4096).value();
  EXPECT_NE(FlagsOf(buffer.get()).find(" dd "), std::string::npos) << FlagsOf(buffer.get());
}

/// Runs `body` in a forked child. @return Whether it ended well.
template <typename Body>
bool InChild(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

TEST_F(HostMemoryTest, KeepsWhatAForkedChildWritesToBuffersFromOthers) {
  const auto mine = ends_[0]->Allocate(8192).value();
  const auto theirs = ends_[1]->Allocate(4096).value();
  mine.get()[0] = std::byte{1};
  EXPECT_TRUE(InChild([&] {
    if (mine.get()[0] != std::byte{1}) _exit(1);  // it finds what its parent had
    mine.get()[0] = mine.get()[8191] = std::byte{2};
    *ends_[0]->At(ends_[1]->OffsetOf(theirs.get(), 1).value()) = std::byte{2};
    if (mine.get()[0] != std::byte{2}) _exit(2);
  }));
  EXPECT_EQ(mine.get()[0], std::byte{1});
  EXPECT_EQ(mine.get()[8191], std::byte{0});
  EXPECT_EQ(*theirs, std::byte{0});
  EXPECT_EQ(FlagsOf(mine.get()).find(" dc "), std::string::npos) << "the next child finds it too";
}

TEST_F(HostMemoryTest, FreesNothingInAForkedChild) {
  auto buffer = ends_[0]->Allocate(4096).value();
  auto mine = Join(3, 0);
  const auto theirs = Join(3, 1);
  *buffer = *mine = std::byte{1};
  EXPECT_TRUE(InChild([&] {
    buffer.reset();
    mine.reset();
    ends_.clear();
  }));
  EXPECT_EQ(*buffer, std::byte{1});
  mine.reset();  // as the first of two members
  EXPECT_EQ(*theirs, std::byte{1});
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
