// One file: what travels, and what is refused, of the frames of every type of message.
#include "coordinator/control/wire/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "coordinator/control/wire/records.h"
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

/// The last messages of each direction among the frames of `bytes`.
struct Messages {
  UpMessage up;
  DownMessage down;
  AbortMessage abort;

  Status Read(const std::vector<std::byte>& bytes) {
    FrameReader reader(bytes);
    while (true) {
      const Result<FrameReader::Kind> kind = reader.Next(up, down);
      if (!kind.ok()) return kind.status();
      if (kind.value() == FrameReader::Kind::kAbort) abort = reader.abort();
      if (kind.value() == FrameReader::Kind::kEnd) return {};
    }
  }
  const UpMessage& Like(const UpMessage&) const { return up; }
  const DownMessage& Like(const DownMessage&) const { return down; }
  const AbortMessage& Like(const AbortMessage&) const { return abort; }
};

std::string Refusal(const std::vector<std::byte>& bytes) {
  const Status status = Messages().Read(bytes);
  EXPECT_TRUE(status.ok() || status.code() == Code::kInternal);
  return status.message();
}

std::string RefusalOf(const auto& message) { return Refusal(Bytes(message)); }

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
  message.number = 76;
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

/// One of each type, with something in all that the type has.
std::vector<UpMessage> SomeUps() {
  std::vector<UpMessage> messages;
  const auto add = [&](UpType type, int64_t number) -> UpMessage& {
    messages.emplace_back().type = type;
    messages.back().number = number;
    return messages.back();
  };
  messages.push_back(Records());
  add(UpType::kVotes, 3).ids = {1, 2, 3, 4};
  messages.back().steps = {{1, {}}, {2, {int64_t{1} << 40, 2, 1, 4, 3}}};
  for (const UpType type : {UpType::kJoin, UpType::kLeaving, UpType::kBlocked, UpType::kLeave}) {
    add(type, 0).rank = 3;
  }
  add(UpType::kLeave, 0).facts.cause = "ValueError: no data";
  messages.back().facts = SomeAbort().facts;
  messages.back().facts.ranks.clear();
  add(UpType::kDone, int64_t{1} << 40).index = 3;
  add(UpType::kUnused, (int64_t{2} << kNumberLevelBit) + 9).index = 5;
  add(UpType::kStall, 41).key = {5, OpKind::kBroadcast, "bias"};
  add(UpType::kAnswer, 5).answers = {
      {3, true, "float32 [2]", "allreduce \"x\"", 12'000, 7, {"w", "b"}},
      {4, false, "", "", 0, 0, {}, {FailureKind::kBlockedInC, "it sleeps"}}};
  add(UpType::kWaits, 6).waiting = {
      {{1, 2}, {{5, OpKind::kBroadcast, "bias"}, {}}, true, false, true, "a.py:3"},
      {{3}, {}, false, true, false, ""}};
  add(UpType::kSteps, 0).times = {{3, 1, 40, 7, 6, 5, 4, 3, 2, 1}, {4, int64_t{1} << 40, 9}};
  return messages;
}

std::vector<DownMessage> SomeDowns() {
  std::vector<DownMessage> messages;
  const auto add = [&](DownType type, uint32_t set = kGlobalSet) -> DownMessage& {
    messages.emplace_back().type = type;
    messages.back().number = (int64_t{1} << kNumberLevelBit) + 9;
    messages.back().set = set;
    return messages.back();
  };
  messages.push_back(WorkWithItems());
  add(DownType::kWork, 5).ids = {9, 8};
  add(DownType::kRetire, 5).ids = {300, 7, 8, 9, (2u << kIdLevelBit) + 1};
  for (const DownType type : {DownType::kJoinDone, DownType::kShutdown, DownType::kWhoWaits}) {
    add(type).rank = 1;
  }
  add(DownType::kLeft).rank = 4;
  messages.back().facts = SomeUps()[6].facts;
  for (const DownType type : {DownType::kSkip, DownType::kQuery, DownType::kRemoveSet}) {
    add(type, 5).key = {5, OpKind::kBroadcast, "bias"};
  }
  add(DownType::kAddSet, 6).key = {kGlobalSet, OpKind::kAddSet, "evens"};
  messages.back().ranks = {0, 2, 4};
  messages.back().planes = {1, 0};
  add(DownType::kReport).text = "stalled for 10 s: ...\nstalled for 11 s: ...";
  messages.back().ranks = {1, 3};
  for (const DownType type : {DownType::kRefuse, DownType::kStallShutdown}) {
    DownMessage& refusal = add(type);
    refusal.key = {0, OpKind::kAllreduce, "group"};
    refusal.code = static_cast<int32_t>(Code::kAborted);
    refusal.text = "allreduce \"group\": rank 2 failed: why";
    refusal.ranks = {2, 4};
    refusal.facts = messages[6].facts;
  }
  return messages;
}

void ForEachMessage(const auto& check) {
  for (const UpMessage& message : SomeUps()) check(message);
  for (const DownMessage& message : SomeDowns()) check(message);
  check(SomeAbort());
}

TEST(Wire, ReadsEachTypeAsItWasWrittenAndKeepsNothingOfTheLast) {
  Messages read;
  ASSERT_TRUE(read.Read(Bytes(Records())).ok());
  ASSERT_TRUE(read.Read(Bytes(WorkWithItems())).ok());
  ForEachMessage([&](const auto& message) {
    const Status status = read.Read(Bytes(message));
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(read.Like(message) == message) << static_cast<int>(Bytes(message)[3]);
  });
}

TEST(Wire, ReadsSeveralFramesOneAfterTheOther) {
  std::vector<std::byte> bytes = Bytes(Records());
  ASSERT_TRUE(Encode(SomeUps()[7], bytes).ok());
  ASSERT_TRUE(Encode(WorkWithItems(), bytes).ok());
  FrameReader reader(bytes);
  Messages read;
  EXPECT_EQ(reader.Next(read.up, read.down).value(), FrameReader::Kind::kUp);
  EXPECT_EQ(reader.Next(read.up, read.down).value(), FrameReader::Kind::kUp);
  EXPECT_EQ(read.up, SomeUps()[7]);
  EXPECT_EQ(reader.Next(read.up, read.down).value(), FrameReader::Kind::kDown);
  EXPECT_EQ(reader.Next(read.up, read.down).value(), FrameReader::Kind::kEnd);
}

TEST(Wire, KeepsTheCauseOfWhatWasDecidedApartFromItsText) {
  AbortMessage abort = SomeAbort();
  abort.rank = -1;
  abort.text = "the job ends, as ranks 5 and 7 made no progress";
  Messages read;
  ASSERT_TRUE(read.Read(Bytes(abort)).ok());
  EXPECT_EQ(read.abort, abort);
}

TEST(Wire, CutsTheCauseOfAnAbortBetweenCharacters) {
  AbortMessage abort = SomeAbort();
  abort.text.assign(kMaxAbortBytes - 1, 'x');
  const std::string kept = abort.text;
  abort.text += "\u00e9 and more";  // two bytes, of which one would fit
  Messages read;
  ASSERT_TRUE(read.Read(Bytes(abort)).ok());
  EXPECT_EQ(read.abort.text, kept);
}

TEST(Wire, TakesEightBytesForKnownKeysInARow) {
  UpMessage none;
  UpMessage many;
  for (uint32_t id = 70; id < 10'070; ++id) many.ids.push_back(id);
  EXPECT_EQ(Bytes(many).size() - Bytes(none).size(), 8u);
  many.ids.insert(many.ids.begin(), {3, 1});
  EXPECT_EQ(Bytes(many).size() - Bytes(none).size(), 24u);
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

TEST(Wire, RefusesAnotherVersionAndAnUnknownTypeByName) {
  std::vector<std::byte> bytes = Bytes(SomeAbort());
  bytes[2] = std::byte{99};
  EXPECT_THAT(Refusal(bytes), HasSubstr("version is 99"));
  bytes = Bytes(SomeUps()[1]);
  for (const int type : {11, 0x80 + 13, 0x80 + 0x3F, 0x40}) {
    bytes[3] = static_cast<std::byte>(type);
    EXPECT_THAT(Refusal(bytes), HasSubstr("unknown type " + std::to_string(type)));
  }
}

std::vector<std::byte> Resized(std::vector<std::byte> bytes, size_t size) {
  bytes.resize(size);
  const auto length = static_cast<uint32_t>(size - 8);
  std::memcpy(bytes.data() + 4, &length, sizeof length);
  return bytes;
}

TEST(Wire, RefusesEveryTruncationAndFixedFieldsWithMoreBehindThem) {
  ForEachMessage([](const auto& message) {
    const std::vector<std::byte> whole = Bytes(message);
    for (size_t size = 1; size < whole.size(); ++size) {
      EXPECT_NE(Refusal({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}), "");
    }
    EXPECT_NE(Refusal(Resized(whole, whole.size() + 1)), "");  // 0 is no tag of a record either
  });
  const std::vector<std::byte> abort = Bytes(SomeAbort());
  for (size_t size = 8; size < abort.size(); ++size) EXPECT_NE(Refusal(Resized(abort, size)), "");
}

/// Counts the limits of a message's fields, and exceeds one of them.
struct Break {
  int which = 0;
  int seen = 0;
  std::string field;

  bool Now(const char* name) {
    if (seen++ != which) return false;
    field = name;
    return true;
  }
  template <class Held, class Value>
  Held Number(const char* name, Value value, Held, int64_t least, int64_t most) {
    if (least > kLowest<Held> && Now(name)) return static_cast<Held>(least - 1);
    if (most < kHighest<Held> && Now(name)) {
      return static_cast<Held>(most + 1);
    }
    return static_cast<Held>(value);
  }
};

/// Writes records with a number beyond its limit, or a text or a list of numbers.
class RecordBreaker : public RecordWriter {
 public:
  explicit RecordBreaker(Break& broken) : broken_(broken) {}

  template <class Value, class Held>
  Held Number(const char* field, Value value, Held held, int64_t least = kLowest<Value>,
              int64_t most = kHighest<Value>) {
    return broken_.Number(field, value, held, least, most);
  }
  template <class Enumeration>
  uint32_t Enum(const char* field, Enumeration value, uint32_t held, Enumeration last) {
    return broken_.Number(field, static_cast<uint32_t>(value), held, 0, static_cast<int64_t>(last));
  }
  double Factor(const char* field, double value, double) {
    return broken_.Now(field) ? std::numeric_limits<double>::quiet_NaN() : value;
  }
  void Text(const char* field, const std::string& text, std::string* held, size_t most) {
    *held = broken_.Now(field) ? std::string(most + 1, 'x') : text;
  }
  template <class Item, class Items>
  void List(const char* field, const std::vector<Item>& list, Items* held, size_t most) {
    for (const Item& one : list) Fields(*this, one, *held->Add());
    if (most > 1000 || !broken_.Now(field)) return;  // longer ones would take gigabytes
    while (static_cast<size_t>(held->size()) <= most) held->Add();
  }
  template <class Value, class Values>
  void Numbers(const char* field, const std::vector<Value>& list, Values* held, size_t most,
               int64_t least = INT64_MIN, int64_t last = INT64_MAX) {
    for (const Value one : list) {
      held->Add(broken_.Number(field, one, decltype(held->Get(0) + 0){}, least, last));
    }
    if (most > kMaxTensors || !broken_.Now(field)) return;
    while (static_cast<size_t>(held->size()) <= most) held->Add(0);
  }

 private:
  Break& broken_;
};

/// The same of fixed fields.
class FieldBreaker : public ByteWriter {
 public:
  FieldBreaker(std::vector<std::byte>& out, Break& broken) : ByteWriter(out), broken_(broken) {}

  template <class Int>
  void Number(const char* field, Int value, int64_t least = kLowest<Int>,
              int64_t most = kHighest<Int>) {
    Put(broken_.Number(field, value, value, least, most), out_);
  }
  template <class Enumeration>
  void Enum(const char* field, Enumeration value, Enumeration last, int64_t first = 0) {
    Number(field, static_cast<int32_t>(value), first, static_cast<int64_t>(last));
  }
  void Text(const char* field, const std::string& text, size_t most) {
    const std::string written = broken_.Now(field) ? std::string(most + 1, 'x') : text;
    ByteWriter::Text(field, written, written.size());
  }
  template <class Item>
  void List(const char* field, const std::vector<Item>& list, size_t most) {
    std::vector<Item> written = list;
    if (broken_.Now(field)) written.resize(most + 1);
    Put(static_cast<uint32_t>(written.size()), out_);
    for (const Item& one : written) Fields(*this, one);
  }
  template <class Part>
  void Records(const Part& part) {
    wire::Records records;
    RecordBreaker breaker(broken_);
    Fields(breaker, part, records);
    const auto bytes = records.SerializeAsString();
    out_.insert(out_.end(), std::as_bytes(std::span(bytes)).begin(),
                std::as_bytes(std::span(bytes)).end());
  }

 private:
  Break& broken_;
};

TEST(Wire, RefusesEachFieldBeyondItsLimitsByName) {
  int breaks = 0;
  ForEachMessage([&](const auto& message) {
    for (int which = 0;; ++which) {
      Break broken;
      broken.which = which;
      std::vector<std::byte> bytes = Bytes(message);
      bytes.resize(8);  // the header
      FieldBreaker breaker(bytes, broken);
      Fields(breaker, message);
      const std::string refusal = Refusal(Resized(bytes, bytes.size()));
      if (broken.field.empty()) {
        EXPECT_EQ(refusal, "") << "unbroken";
        break;
      }
      EXPECT_THAT(refusal, HasSubstr(broken.field)) << which;
      ++breaks;
    }
  });
  EXPECT_GT(breaks, 250);
}

struct Bad {
  const char* refusal;
  void (*change)(UpMessage&);
};

Signature& SignatureOf(UpMessage& message, size_t key) {
  return message.keys[key].signatures.front().signature;
}

TEST(Wire, RefusesWhatNoRankWouldSubmit) {
  const Bad cases[] = {
      {"exceed 1152921504606846976 bytes",
       [](UpMessage& m) {
         SignatureOf(m, 0).tensors[0].shape = {std::numeric_limits<int64_t>::max(), 0, 8};
       }},
      {"rows in its signature; expected 0",
       [](UpMessage& m) {
         SignatureOf(m, 2).tensors[0].shape = {5, 4};
       }},
      {"a scalar, which has no rows",
       [](UpMessage& m) {
         SignatureOf(m, 2).kind = m.keys[2].key.kind = OpKind::kReducescatter;
         SignatureOf(m, 2).tensors[0].shape.clear();
       }},
      {"votes without a signature", [](UpMessage& m) { m.keys[0].signatures.clear(); }},
      {"stands for no id", [](UpMessage& m) { m.ids = {kNoId}; }},
  };
  for (const Bad& bad : cases) {
    UpMessage message = Records();
    bad.change(message);
    EXPECT_THAT(RefusalOf(message), HasSubstr(bad.refusal));
  }
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
  std::vector<std::vector<std::byte>> seeds;
  ForEachMessage([&](const auto& message) { seeds.push_back(Bytes(message)); });
  int refused = 0;
  constexpr int kRounds = 40'000;
  for (int seed = 0; seed < kRounds; ++seed) {
    simulation::Random random(static_cast<uint64_t>(seed));
    std::vector<std::byte> bytes =
        seeds[static_cast<size_t>(random.Below(static_cast<int>(seeds.size())))];
    Mutate(random, bytes);
    if (!Refusal(bytes).empty()) ++refused;
  }
  EXPECT_GT(refused, kRounds / 4);
}

}  // namespace
}  // namespace farandole
