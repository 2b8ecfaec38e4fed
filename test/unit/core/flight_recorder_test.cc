#include "core/flight_recorder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace farandole {
namespace {

/// A ring of zeros and its writer.
class FlightRecorderTest : public testing::Test {
 protected:
  FlightRecorderTest() { recorder_ = Recorder(); }

  std::unique_ptr<FlightRecorder> Recorder(const std::string& folder = {}) {
    FlightRecorder::Options options;
    options.rank = 2;
    options.size = 4;
    options.folder = folder;
    options.job = "test";
    options.rings = {ring_.get()};
    options.memory = ring_;
    Result<std::unique_ptr<FlightRecorder>> made = FlightRecorder::Create(std::move(options));
    EXPECT_TRUE(made.ok());
    return std::move(made).value();
  }
  void Submit(const std::string& name, int64_t at_ns = 0) {
    (void)recorder_->Record({.step = FlightStep::kSubmitted, .at_ns = at_ns}, name);
  }

  const std::shared_ptr<FlightRing> ring_ = std::make_shared<FlightRing>();
  std::unique_ptr<FlightRecorder> recorder_;
};

TEST_F(FlightRecorderTest, GivesBackWhatWasRecorded) {
  const FlightFacts facts{FlightStep::kSubmitted, OpKind::kAlltoall, DType::kFloat64, 7,
                          int64_t{1} << 40,       int64_t{1} << 41};
  const uint64_t number = recorder_->Record(facts, "layer.weight");
  recorder_->NoteDecided(number, 5);
  recorder_->NoteFinished(number, Code::kMismatch, 6);
  const std::vector<FlightEvent> events = ReadFlight(*ring_);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].step, facts.step);
  EXPECT_EQ(events[0].kind, facts.kind);
  EXPECT_EQ(events[0].dtype, facts.dtype);
  EXPECT_EQ(events[0].set, facts.set);
  EXPECT_EQ(events[0].at_ns, facts.at_ns);
  EXPECT_EQ(events[0].bytes, facts.bytes);
  EXPECT_EQ(events[0].decided_ns, 5);
  EXPECT_EQ(events[0].finished_ns, 6);
  EXPECT_EQ(events[0].code, Code::kMismatch);
  EXPECT_EQ(events[0].name, "layer.weight");
}

TEST_F(FlightRecorderTest, NotesNothingInTheEventThatCameInItsPlace) {
  const uint64_t number = recorder_->Record({.step = FlightStep::kSubmitted}, "old");
  for (size_t i = 0; i < FlightRing::kEvents; ++i) Submit("new");
  recorder_->NoteDecided(number, 5);
  recorder_->NoteFinished(number, Code::kMismatch, 6);
  for (const FlightEvent& event : ReadFlight(*ring_)) {
    ASSERT_EQ(event.name, "new");
    ASSERT_EQ(event.decided_ns + event.finished_ns, 0);
  }
}

TEST_F(FlightRecorderTest, CountsTheCallsOfTheSetOfAllRanks) {
  Submit("a");
  (void)recorder_->Record({.step = FlightStep::kSubmitted, .set = 3}, "of a smaller set");
  (void)recorder_->Record({.step = FlightStep::kSubmitted, .kind = OpKind::kStep}, "nobody's call");
  Submit("b");
  const std::vector<FlightEvent> events = ReadFlight(*ring_);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].call, 1u);
  EXPECT_EQ(events[1].call, 0u);
  EXPECT_EQ(events[2].call, 0u);
  EXPECT_EQ(events[3].call, 2u);
}

TEST_F(FlightRecorderTest, KeepsTheEndOfLongNames) {
  for (size_t size = 0; size <= FlightRing::kEvents; ++size) Submit(std::string(100, 'o'));
  const std::string whole(FlightRing::kNameBytes, 'w');
  for (size_t size = 0; size <= whole.size(); ++size) Submit(whole.substr(0, size));
  Submit(whole + "end");
  const std::vector<FlightEvent> events = ReadFlight(*ring_);
  const size_t first = events.size() - whole.size() - 2;
  for (size_t size = 0; size <= whole.size(); ++size) {
    ASSERT_EQ(events[first + size].name, whole.substr(0, size));
  }
  EXPECT_EQ(events.back().name, ".." + whole.substr(5) + "end");
}

TEST_F(FlightRecorderTest, KeepsTheLastEvents) {
  for (int i = 0; i < 10'000; ++i) Submit(std::to_string(i));
  const std::vector<FlightEvent> events = ReadFlight(*ring_);
  ASSERT_EQ(events.size(), FlightRing::kEvents);
  EXPECT_EQ(events.front().name, std::to_string(10'000 - FlightRing::kEvents));
  EXPECT_EQ(events.back().name, "9999");
}

TEST_F(FlightRecorderTest, SkipsWhatAWriterThatDiedLeftHalfWritten) {
  Submit("a");
  Submit("b");
  Submit("c");
  ring_->events[1][0].store(0);  // as Record leaves it until the event is whole
  const std::vector<FlightEvent> events = ReadFlight(*ring_);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].name, "a");
  EXPECT_EQ(events[1].name, "c");
}

TEST_F(FlightRecorderTest, SaysWhatWasSubmittedLast) {
  int64_t age_ns = 0;
  EXPECT_EQ(DescribeLast(*ring_, 10, &age_ns), "");
  EXPECT_EQ(age_ns, -1);
  Submit("a", 100);
  (void)recorder_->Record({.step = FlightStep::kStalled, .at_ns = 300}, "b");
  EXPECT_EQ(DescribeLast(*ring_, 1100, &age_ns), "allreduce \"a\"");
  EXPECT_EQ(age_ns, 1000);
}

// Each event says the same thing in all of its words, so a mixture of two would show.
TEST_F(FlightRecorderTest, GivesWholeEventsOnlyBesideItsWriter) {
  std::atomic<bool> is_reading{false};
  std::atomic<bool> is_done{false};
  std::thread writer([&] {
    while (!is_reading.load()) std::this_thread::yield();
    for (int i = 0; !is_done.load() || i < 1000; ++i) {
      const FlightFacts facts{
          .step = FlightStep::kSubmitted, .set = static_cast<uint32_t>(i), .at_ns = i, .bytes = i};
      (void)recorder_->Record(facts, std::to_string(i));
    }
  });
  int64_t read = 0;
  for (int i = 0; i < 20 || read == 0; ++i) {
    is_reading.store(true);
    for (const FlightEvent& event : ReadFlight(*ring_)) {
      ++read;
      ASSERT_EQ(event.at_ns, event.bytes);
      ASSERT_EQ(event.at_ns, event.set);
      ASSERT_EQ(event.name, std::to_string(event.at_ns));
    }
  }
  is_done.store(true);
  writer.join();
  EXPECT_GT(read, 0);
}

TEST_F(FlightRecorderTest, WritesAFileWhenAsked) {
  std::string folder = std::filesystem::temp_directory_path() / "farandole-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  recorder_ = Recorder(folder);
  Submit("a \"quoted\" name");
  FailureFacts facts;
  facts.ranks = {1};
  facts.kind = FailureKind::kKilled;
  facts.number = 9;
  recorder_->Dump("final error", Status(Code::kUnavailable, "rank 1 was killed", facts));
  recorder_->FinishDumps();
  std::ifstream file(folder + "/farandole-test-rank2.json");
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find(R"("rank": 2, "size": 4)"), std::string::npos) << text.str();
  EXPECT_NE(text.str().find(R"("name": "a \"quoted\" name")"), std::string::npos) << text.str();
  EXPECT_NE(text.str().find(R"("kind": "killed", "number": 9)"), std::string::npos) << text.str();
  std::filesystem::remove_all(folder);
}

// As in a folder of mode 1777, where another user has been before.
TEST_F(FlightRecorderTest, WritesThroughNoLinkAndForItsUserAlone) {
  std::string folder = std::filesystem::temp_directory_path() / "farandole-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/farandole-test-rank2.json";
  const std::string others = folder + "/other";
  for (const std::string& name : {path, path + ".part"}) {
    std::ofstream(others) << "kept";
    std::filesystem::create_symlink(others, name);
  }
  recorder_ = Recorder(folder);
  recorder_->Dump("final error");
  recorder_->FinishDumps();
  std::ostringstream text;
  text << std::ifstream(others).rdbuf();
  EXPECT_EQ(text.str(), "kept");
  struct stat found {};
  ASSERT_EQ(lstat(path.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode, S_IFREG | 0600u);
  std::filesystem::remove_all(folder);
}

TEST_F(FlightRecorderTest, WritesAFileAtASignalThatComesAsSoonAsItIsThere) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "flight_signal";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  for (int round = 0; round < 200; ++round) {
    recorder_ = Recorder(folder.string());
    ASSERT_EQ(raise(SIGUSR1), 0);
    const std::filesystem::path path = folder / "farandole-test-rank2.json";
    for (int i = 0; i < 500 && !std::filesystem::exists(path); ++i) usleep(10000);
    ASSERT_TRUE(std::filesystem::remove(path)) << "round " << round;
    recorder_.reset();
  }
}

TEST_F(FlightRecorderTest, HasMemoryOfItsOwnWithoutSharedMemory) {
  Result<std::unique_ptr<FlightRecorder>> made = FlightRecorder::Create({});
  ASSERT_TRUE(made.ok());
  (void)made.value()->Record({.step = FlightStep::kSubmitted}, "a");
}

}  // namespace
}  // namespace farandole
