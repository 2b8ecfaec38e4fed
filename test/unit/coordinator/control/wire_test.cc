// One file: frames of every kind are judged by the same helpers.
#include "coordinator/control/wire/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "coordinator/protocol/limits.h"
#include "test/simulation/random.h"

namespace farandole {
namespace {

using testing::HasSubstr;

std::vector<std::byte> Bytes(const auto& message) {
  std::vector<std::byte> out;
  EXPECT_TRUE(Encode(message, out).ok());
  return out;
}

std::vector<std::byte> Bytes(const AbortMessage& message) {
  std::vector<std::byte> out;
  Encode(message, out);
  return out;
}

AbortMessage SomeAbort() {
  FailureFacts facts = {{5, 7}, "made no progress"};
  facts.kind = FailureKind::kKilled;
  facts.number = 9;
  facts.host = "node7";
  facts.pid = 4711;
  facts.last = "allreduce \"x\"";
  facts.last_age_ns = int64_t{1} << 40;
  facts.tensor = "x";
  return {3, Code::kTimeout, "made no progress", facts};
}

Status Decode(const std::vector<std::byte>& bytes, UpMessage& up, DownMessage& down) {
  FrameReader reader(bytes);
  while (true) {
    const Result<FrameReader::Kind> kind = reader.Next(up, down);
    if (!kind.ok()) return kind.status();
    if (kind.value() == FrameReader::Kind::kEnd) return {};
  }
}

struct Messages {
  UpMessage up;
  DownMessage down;
};

/// What is read of the frame of a message.
Messages Read(const auto& message) {
  Messages read;
  const Status status = Decode(Bytes(message), read.up, read.down);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return read;
}

std::string Refusal(const std::vector<std::byte>& bytes) {
  Messages read;
  return Decode(bytes, read.up, read.down).message();
}

std::string RefusalOf(const auto& message) { return Refusal(Bytes(message)); }

Signature SomeSignature() {
  Signature signature;
  signature.kind = OpKind::kBroadcast;
  signature.function = "broadcast_object";
  signature.op = ReduceOp::kAverage;
  signature.prescale = 0.25;
  signature.root = 2;
  signature.device = DeviceKind::kCuda;
  signature.wire_format = WireFormat::kBfloat16;
  signature.tensors = {{"a", DType::kFloat32, {64, 128}}, {"b", DType::kInt8, {}}};
  return signature;
}

Signature Gathered() {
  Signature signature;
  signature.kind = OpKind::kAllgather;
  signature.tensors = {{"", DType::kFloat32, {0, 4}}};
  return signature;
}

UpMessage Records() {
  KeyVotes one;
  one.key = {5, OpKind::kBroadcast, "layer1.weight"};
  one.signatures.push_back({kNoId, SomeSignature(), {}});
  one.absent = {{1, {1}}, {4, {3}}};
  one.clean = {{2, {2}}};
  one.failed = {{3, "out of memory"}};
  one.steps = {{{7, 2, 1, 3, 0}, {1, 2}}, {{8, 1, 0, 2, 1}, {3}}};
  KeyVotes mixed;
  mixed.signatures.push_back({17, {}, {0, 2}});
  mixed.signatures.push_back({kNoId, SomeSignature(), {1}});
  KeyVotes gather;
  gather.key = {5, OpKind::kAllgather, "embedding.rows"};
  gather.signatures.push_back({kNoId, Gathered(), {}});
  gather.rows = {{1, {7}}, {3, {0}}, {4, {int64_t{1} << 40}}};
  KeyVotes mixed_gather;
  mixed_gather.signatures.push_back({18, {}, {0}});
  mixed_gather.signatures.push_back({kNoId, Gathered(), {1}});
  UpMessage message;
  message.ids = {1, 2, 300};
  message.steps = {{2, {7, 1, 0, 1, 0}}};
  message.keys = {one, mixed, gather, mixed_gather};
  return message;
}

DownMessage WorkWithItems() {
  WorkItem by_name;
  by_name.key = {5, OpKind::kBroadcast, "bias"};
  by_name.signature = SomeSignature();
  by_name.bind = 12;
  WorkItem by_id;
  by_id.id = 4;
  by_id.absent = {{1, {1}}};
  by_id.skipped = {2};
  WorkItem gather;
  gather.key = {5, OpKind::kAllgather, "embedding.rows"};
  gather.signature = Gathered();
  gather.rows = {2, 0, 3};
  DownMessage message;
  message.number = 77;
  message.set = 5;
  message.ids = {9, 8};
  message.items = {by_name, by_id, gather};
  return message;
}

DownMessage NewSet() {
  DownMessage message;
  message.type = DownType::kAddSet;
  message.number = 78;
  message.set = 6;
  message.key = {kGlobalSet, OpKind::kAddSet, "evens"};
  message.ranks = {0, 2, 4};
  message.planes = {1, 0};
  return message;
}

UpMessage SomeAnswers() {
  UpMessage message;
  message.type = UpType::kAnswer;
  message.number = 5;
  message.answers.push_back({3, true, "float32 [2]", "allreduce \"x\"", 12'000, 7, {"w", "b"}});
  message.answers.push_back({4, false, "", "", 0, 0, {}, {FailureKind::kBlockedInC, "it sleeps"}});
  return message;
}

DownMessage SomeRetirement() {
  DownMessage message;
  message.type = DownType::kRetire;
  message.number = (int64_t{2} << kNumberLevelBit) + 9;
  message.set = 5;
  message.ids = {300, 7, 8, 9, (2u << kIdLevelBit) + 1};
  return message;
}

UpMessage SomeUnused() {
  UpMessage message;
  message.type = UpType::kUnused;
  message.number = (int64_t{2} << kNumberLevelBit) + 9;
  message.index = 5;
  return message;
}

TEST(Wire, ReadsRetirementsAndTheirAnswersAsTheyWereWritten) {
  UpMessage up = Records();  // nothing of it stays
  DownMessage down = WorkWithItems();
  ASSERT_TRUE(Decode(Bytes(SomeRetirement()), up, down).ok());
  ASSERT_TRUE(Decode(Bytes(SomeUnused()), up, down).ok());
  EXPECT_EQ(down.type, DownType::kRetire);
  EXPECT_EQ(down.number, SomeRetirement().number);
  EXPECT_EQ(down.set, 5u);
  EXPECT_EQ(down.ids, SomeRetirement().ids);
  EXPECT_TRUE(down.items.empty());
  EXPECT_EQ(up.type, UpType::kUnused);
  EXPECT_EQ(up.number, SomeUnused().number);
  EXPECT_EQ(up.index, 5);
  EXPECT_TRUE(up.ids.empty() && up.keys.empty());
}

TEST(Wire, RefusesRetirementsAndTheirAnswersInAnotherForm) {
  UpMessage up;
  DownMessage down;
  for (const std::vector<std::byte>& frame : {Bytes(SomeRetirement()), Bytes(SomeUnused())}) {
    std::vector<std::byte> bytes = frame;
    bytes[3] ^= std::byte{0x40};
    EXPECT_THAT(Refusal(bytes), HasSubstr("unknown type"));
    bytes = frame;
    bytes.push_back(std::byte{0});
    const auto length = static_cast<uint32_t>(bytes.size() - 8);
    std::memcpy(bytes.data() + 4, &length, sizeof length);
    EXPECT_EQ(Decode(bytes, up, down).code(), Code::kInternal);
  }
}

TEST(Wire, ReadsRecordsAsTheyWereWritten) {
  const auto [up, down] = Read(Records());
  EXPECT_EQ(up.ids, Records().ids);
  EXPECT_EQ(up.keys, Records().keys);
  EXPECT_EQ(up.steps, Records().steps);
}

TEST(Wire, ReadsTheStepCountsOfKnownKeys) {
  UpMessage votes;
  votes.ids = {1, 2, 3, 4};
  votes.steps = {{1, {}}, {2, {int64_t{1} << 40, 2, 1, 4, 3}}};
  const auto [up, down] = Read(votes);
  EXPECT_EQ(up.ids, votes.ids);
  EXPECT_EQ(up.steps, votes.steps);
}

TEST(Wire, RefusesStepCountsThatNoOptimizerTells) {
  UpMessage votes;
  votes.ids = {1};
  votes.steps = {{1, {-1, 0, 0, 0, 0}}};
  EXPECT_EQ(RefusalOf(votes), "frame: step -1");
  votes.steps = {{1, {1, 0, -2, 0, 0}}};
  EXPECT_EQ(RefusalOf(votes), "frame: -2 backward passes");
  votes.steps = {{1, {1, 1, 0, 0, 0}}, {1, {2, 1, 0, 0, 0}}};
  EXPECT_EQ(RefusalOf(votes), "frame: 2 runs of step counts for 1 ids");
}

TEST(Wire, ReadsWorkAsItWasWritten) {
  const auto [up, down] = Read(WorkWithItems());
  EXPECT_EQ(down.number, 77);
  EXPECT_EQ(down.set, 5u);
  EXPECT_EQ(down.ids, WorkWithItems().ids);
  EXPECT_EQ(down.items, WorkWithItems().items);
}

TEST(Wire, ReadsNoticesAsTheyWereWritten) {
  const auto [up, down] = Read(NewSet());
  EXPECT_EQ(down.type, DownType::kAddSet);
  EXPECT_EQ(down.key, NewSet().key);
  EXPECT_EQ(down.ranks, NewSet().ranks);
  EXPECT_EQ(down.planes, NewSet().planes);
}

TEST(Wire, ReadsRefusalsAsTheyWereWrittenAndKeepsNothingForTheNext) {
  DownMessage refusal;
  refusal.type = DownType::kRefuse;
  refusal.key = {0, OpKind::kAllreduce, "group"};
  refusal.code = static_cast<int32_t>(Code::kAborted);
  refusal.text = "allreduce \"group\": rank 2 failed: why";
  refusal.ranks = {2, 4};
  refusal.facts.cause = "why";
  refusal.facts.tensor = "layer1.weight";
  auto [up, down] = Read(refusal);
  EXPECT_EQ(down.text, refusal.text);
  EXPECT_EQ(down.ranks, refusal.ranks);
  EXPECT_EQ(down.facts.cause, refusal.facts.cause);
  EXPECT_EQ(down.facts.tensor, refusal.facts.tensor);
  ASSERT_TRUE(Decode(Bytes(NewSet()), up, down).ok());
  EXPECT_EQ(down.facts.cause + down.facts.tensor, "");
}

TEST(Wire, ReadsReportsAsTheyWereWrittenAndRefusesTooLongOnes) {
  DownMessage report;
  report.type = DownType::kReport;
  report.number = (int64_t{1} << kNumberLevelBit) + 9;
  report.text = "stalled for 10 s: ...\nstalled for 11 s: ...";
  report.ranks = {1, 3};
  const auto [up, down] = Read(report);
  EXPECT_EQ(down.type, DownType::kReport);
  EXPECT_EQ(down.number, report.number);
  EXPECT_EQ(down.text, report.text);
  EXPECT_EQ(down.ranks, report.ranks);
  report.text.assign(kMaxTextBytes + 1, 'x');
  EXPECT_NE(RefusalOf(report), "");
}

TEST(Wire, ReadsAnswersAsTheyWereWritten) {
  const auto [up, down] = Read(SomeAnswers());
  EXPECT_EQ(up.answers, SomeAnswers().answers);
}

TEST(Wire, ReadsStallsAsTheyWereWritten) {
  UpMessage stall;
  stall.type = UpType::kStall;
  stall.number = 41;
  stall.key = {5, OpKind::kBroadcast, "bias"};
  const UpMessage up = Read(stall).up;
  EXPECT_EQ(up.type, UpType::kStall);
  EXPECT_EQ(up.number, 41);
  EXPECT_EQ(up.key, stall.key);
}

TEST(Wire, ReadsLeavesWithAndWithoutAReason) {
  UpMessage leave;
  leave.type = UpType::kLeave;
  leave.rank = 3;
  DownMessage left;
  left.type = DownType::kLeft;
  left.number = 9;
  left.rank = 4;
  for (const char* text : {"", "ValueError: no data"}) {
    leave.facts = left.facts = {.cause = text};
    if (*text != '\0') {
      left.facts.kind = leave.facts.kind = FailureKind::kExited;
      left.facts.number = leave.facts.number = 3;
      left.facts.host = leave.facts.host = "a";
      left.facts.pid = leave.facts.pid = 77;
    }
    const UpMessage up = Read(leave).up;
    const DownMessage down = Read(left).down;
    EXPECT_EQ(up.rank, 3);
    EXPECT_EQ(up.facts, leave.facts);
    EXPECT_EQ(down.rank, 4);
    EXPECT_EQ(down.number, 9);
    EXPECT_EQ(down.facts, left.facts);
  }
}

TEST(Wire, ReadsAbortsAsTheyWereWritten) {
  const std::vector<std::byte> bytes = Bytes(SomeAbort());
  FrameReader reader(bytes);
  UpMessage up;
  DownMessage down;
  ASSERT_EQ(reader.Next(up, down).value(), FrameReader::Kind::kAbort);
  EXPECT_EQ(reader.abort(), SomeAbort());
}

TEST(Wire, KeepsTheCauseOfWhatWasDecidedApartFromItsText) {
  AbortMessage abort = SomeAbort();
  abort.rank = -1;
  abort.text = "the job ends, as ranks 5 and 7 made no progress";
  const std::vector<std::byte> bytes = Bytes(abort);
  FrameReader reader(bytes);
  UpMessage up;
  DownMessage down;
  ASSERT_TRUE(reader.Next(up, down).ok());
  EXPECT_EQ(reader.abort(), abort);
}

TEST(Wire, CutsTheCauseOfAnAbortBetweenCharacters) {
  AbortMessage abort = SomeAbort();
  abort.text.assign(kMaxAbortBytes - 1, 'x');
  const std::string kept = abort.text;
  abort.text += "\u00e9 and more";  // two bytes, of which one would fit
  const std::vector<std::byte> bytes = Bytes(abort);
  FrameReader reader(bytes);
  UpMessage up;
  DownMessage down;
  ASSERT_TRUE(reader.Next(up, down).ok());
  EXPECT_EQ(reader.abort().text, kept);
}

TEST(Wire, ChecksEveryFieldOfAnAbort) {
  const auto with = [](int32_t rank, int code, int32_t failed = 1) {
    return Bytes(AbortMessage{rank, static_cast<Code>(code), "why", {{failed}}});
  };
  const auto of_kind = [](int kind) {
    AbortMessage abort = SomeAbort();
    abort.facts.kind = static_cast<FailureKind>(kind);
    return Bytes(abort);
  };
  EXPECT_EQ(Refusal(with(-1, 3)), "") << "nobody's";
  EXPECT_THAT(Refusal(with(-2, 3)), HasSubstr("rank is -2"));
  EXPECT_THAT(Refusal(with(1 << 24, 3)), HasSubstr("rank is 16777216"));
  EXPECT_THAT(Refusal(with(3, 3, 1 << 24)), HasSubstr("rank is 16777216"));
  EXPECT_THAT(Refusal(with(3, 0)), HasSubstr("code is 0"));
  EXPECT_THAT(Refusal(with(3, 9)), HasSubstr("code is 9"));
  EXPECT_THAT(Refusal(of_kind(-1)), HasSubstr("kind of failure is -1"));
  EXPECT_THAT(Refusal(of_kind(11)), HasSubstr("kind of failure is 11"));
  const auto resized = [](std::vector<std::byte> bytes, size_t size) {
    bytes.resize(size);
    const auto length = static_cast<uint32_t>(size - 8);
    std::memcpy(bytes.data() + 4, &length, sizeof length);
    return bytes;
  };
  const std::vector<std::byte> whole = Bytes(SomeAbort());
  const size_t text = std::string("made no progress").size();
  EXPECT_THAT(Refusal(resized(whole, whole.size() - text + kMaxAbortBytes + 1)),
              HasSubstr("cause is 1025 bytes, limit 1024"));
  std::vector<std::byte> host = whole;
  const auto most = static_cast<uint16_t>(kMaxAbortFact + 1);
  std::memcpy(host.data() + 8 + 28, &most, sizeof most);
  EXPECT_THAT(Refusal(host), HasSubstr("host is 257 bytes, limit 256"));
  for (size_t size = 8; size < whole.size() - text; ++size) {
    EXPECT_NE(Refusal(resized(whole, size)), "") << size;
  }
}

TEST(Wire, ReadsSeveralFramesOneAfterTheOther) {
  UpMessage done;
  done.type = UpType::kDone;
  done.number = int64_t{1} << 40;
  done.index = 3;
  std::vector<std::byte> bytes = Bytes(Records());
  ASSERT_TRUE(Encode(done, bytes).ok());
  ASSERT_TRUE(Encode(NewSet(), bytes).ok());
  FrameReader reader(bytes);
  UpMessage up;
  DownMessage down;
  EXPECT_EQ(reader.Next(up, down).value(), FrameReader::Kind::kUp);
  EXPECT_EQ(reader.Next(up, down).value(), FrameReader::Kind::kUp);
  EXPECT_EQ(up.number, int64_t{1} << 40);
  EXPECT_EQ(up.index, 3);
  EXPECT_TRUE(up.keys.empty());
  EXPECT_EQ(reader.Next(up, down).value(), FrameReader::Kind::kDown);
  EXPECT_EQ(reader.Next(up, down).value(), FrameReader::Kind::kEnd);
}

TEST(Wire, TakesEightBytesForKnownKeysInARow) {
  UpMessage none;
  UpMessage many;
  for (uint32_t id = 70; id < 10'070; ++id) many.ids.push_back(id);
  EXPECT_EQ(Bytes(many).size() - Bytes(none).size(), 8u);
  many.ids.insert(many.ids.begin(), {3, 1});
  EXPECT_EQ(Bytes(many).size() - Bytes(none).size(), 24u);
  const auto [up, down] = Read(many);
  EXPECT_EQ(up.ids, many.ids);
}

TEST(Wire, RefusesARunOfIdsBeyondTheLimit) {
  UpMessage votes;
  votes.ids = {5, 6, 7, 8};
  std::vector<std::byte> bytes = Bytes(votes);
  const size_t length_at = bytes.size() - 2 * sizeof(uint32_t);  // before the number of step runs
  const auto refusal = [&](uint32_t first, uint32_t length) {
    std::memcpy(bytes.data() + length_at - sizeof first, &first, sizeof first);
    std::memcpy(bytes.data() + length_at, &length, sizeof length);
    return Refusal(bytes);
  };
  EXPECT_EQ(refusal(5, 1 << 20), "");
  EXPECT_EQ(refusal(5, (1 << 20) + 1),
            "frame: a run of 1048577 ids from 5 on, after 0 ids; limit 1048576");
  EXPECT_EQ(refusal(UINT32_MAX - 1, 2),
            "frame: a run of 2 ids from 4294967294 on, after 0 ids; limit 1048576");
}

TEST(Wire, TakesFourBytesForAKnownKey) {
  UpMessage one;
  one.ids = {1};
  UpMessage hundred;
  hundred.ids.assign(101, 7);
  EXPECT_EQ(Bytes(hundred).size() - Bytes(one).size(), 400u);
}

TEST(Wire, RefusesAnotherVersionByName) {
  std::vector<std::byte> bytes = Bytes(NewSet());
  bytes[2] = std::byte{99};
  EXPECT_THAT(Refusal(bytes), HasSubstr("version is 99"));
}

TEST(Wire, RefusesEveryTruncation) {
  for (const std::vector<std::byte>& whole :
       {Bytes(Records()), Bytes(WorkWithItems()), Bytes(SomeRetirement()), Bytes(SomeUnused())}) {
    for (size_t size = 1; size < whole.size(); ++size) {
      const std::vector<std::byte> part(whole.begin(),
                                        whole.begin() + static_cast<std::ptrdiff_t>(size));
      UpMessage up;
      DownMessage down;
      EXPECT_FALSE(Decode(part, up, down).ok()) << size;
    }
  }
}

TEST(Wire, RefusesANameBeyondTheLimit) {
  UpMessage message = Records();
  message.keys.front().key.name.assign(4097, 'x');
  EXPECT_THAT(RefusalOf(message), HasSubstr("name is 4097, limit 4096"));
}

TEST(Wire, RefusesAShapeWhoseSizeOverflows) {
  UpMessage message = Records();
  message.keys.front().signatures.front().signature.tensors.front().shape = {
      std::numeric_limits<int64_t>::max(), 0, 8};
  EXPECT_THAT(RefusalOf(message), HasSubstr("exceed 1152921504606846976 bytes"));
}

TEST(Wire, RefusesRowsThatAreNegative) {
  UpMessage message = Records();
  message.keys[2].rows[1].rows = {-4};
  EXPECT_THAT(RefusalOf(message), HasSubstr("negative number -4"));
  DownMessage work = WorkWithItems();
  work.items[2].rows = {2, -1, 3};
  EXPECT_THAT(RefusalOf(work), HasSubstr("negative number -1"));
}

TEST(Wire, RefusesTensorsThatCannotBeDivided) {
  UpMessage message = Records();
  Signature& signature = message.keys[2].signatures.front().signature;
  signature.tensors.front().shape = {5, 4};
  EXPECT_THAT(RefusalOf(message), HasSubstr("rows in its signature; expected 0"));
  signature.kind = message.keys[2].key.kind = OpKind::kReducescatter;
  signature.tensors.front().shape.clear();
  EXPECT_THAT(RefusalOf(message), HasSubstr("a scalar, which has no rows"));
}

TEST(Wire, RefusesMoreThanSixtyFourDimensions) {
  UpMessage message = Records();
  message.keys.front().signatures.front().signature.tensors.front().shape.assign(65, 1);
  EXPECT_THAT(RefusalOf(message), HasSubstr("limit 64"));
}

/// Flips, inserts, removes and repeats bytes; also in the lengths.
void Mutate(simulation::Random& random, std::vector<std::byte>& bytes) {
  for (int i = random.Between(1, 4); i > 0 && !bytes.empty(); --i) {
    const auto at = random.Below(static_cast<int>(bytes.size()));
    const auto value = static_cast<std::byte>(random.Below(256));
    switch (random.Below(4)) {
      case 0:
        bytes[static_cast<size_t>(at)] = value;
        break;
      case 1:
        bytes.insert(bytes.begin() + at, value);
        break;
      case 2:
        bytes.erase(bytes.begin() + at);
        break;
      default:
        bytes[static_cast<size_t>(at)] ^= std::byte{1} << random.Below(8);
    }
  }
  if (bytes.size() < 8 || random.Percent(50)) return;
  const auto length = static_cast<uint32_t>(bytes.size() - 8);  // past the length check
  std::memcpy(bytes.data() + 4, &length, sizeof length);
}

TEST(Wire, AnswersMutatedFramesWithAStatus) {
  const std::vector<std::byte> seeds[] = {
      Bytes(Records()),   Bytes(WorkWithItems()),  Bytes(NewSet()),    Bytes(SomeAnswers()),
      Bytes(SomeAbort()), Bytes(SomeRetirement()), Bytes(SomeUnused())};
  int refused = 0;
  constexpr int kRounds = 40'000;
  for (int seed = 0; seed < kRounds; ++seed) {
    simulation::Random random(static_cast<uint64_t>(seed));
    std::vector<std::byte> bytes = seeds[random.Below(7)];
    Mutate(random, bytes);
    UpMessage up;
    DownMessage down;
    const Status status = Decode(bytes, up, down);
    if (status.ok()) continue;
    ++refused;
    ASSERT_EQ(status.code(), Code::kInternal) << "seed " << seed;
  }
  EXPECT_GT(refused, kRounds / 4);
}

}  // namespace
}  // namespace farandole
