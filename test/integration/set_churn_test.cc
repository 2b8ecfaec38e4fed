// Process sets and names that come and go: whatever a set needed is free again once it has ended,
// and so is what a name needed once nobody holds it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "test/support/stepped_job.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;

EngineOptions WithoutLinger() {
  EngineOptions options = SteppedJob::Stepped();
  options.linger_ns = 0;
  return options;
}

Signature Floats(int64_t count) {
  Signature signature;
  signature.tensors.push_back({"", DType::kFloat32, {count}});
  return signature;
}

#if defined(FARANDOLE_SANITIZE_ADDRESS) || defined(FARANDOLE_SANITIZE_THREAD)
constexpr bool kSanitized = true;  // freed memory is kept for a while
#else
constexpr bool kSanitized = false;
#endif

int64_t ResidentBytes() {
  int64_t total = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// A job whose ranks all do the same.
class Churn {
 public:
  explicit Churn(int size, EngineOptions options = WithoutLinger()) : job(size, options) {}

  uint32_t Add(const std::vector<int32_t>& ranks) {
    works.clear();
    for (int r = 0; r < job.size(); ++r) works.push_back(job.engine(r).AddSet(ranks).value());
    job.Settle();
    Expect(Code::kOk);
    return job.engine(0).operations().SetOf(ranks).value().uid;
  }

  void Remove(uint32_t uid) {
    works.clear();
    for (int r = 0; r < job.size(); ++r) works.push_back(job.engine(r).RemoveSet(uid).value());
    job.Settle();
    Expect(Code::kOk);
  }

  // An allreduce of ones on every rank of `ranks`.
  void Sum(uint32_t uid, const std::vector<int32_t>& ranks, const std::string& name) {
    works.clear();
    std::vector<std::vector<float>> data(ranks.size(), std::vector<float>(4, 1.0f));
    for (size_t i = 0; i < ranks.size(); ++i) {
      Engine& engine = job.engine(ranks[i]);
      Operation& operation =
          *engine.operations().Prepare({uid, OpKind::kAllreduce, name}, Floats(4)).value();
      const void* in = data[i].data();
      void* out = data[i].data();
      works.push_back(engine.Start(operation, {&in, 1}, {&out, 1}).value());
    }
    job.Settle();
    Expect(Code::kOk);
    for (const std::vector<float>& result : data) {
      ASSERT_EQ(result, std::vector<float>(4, static_cast<float>(ranks.size())));
    }
  }

  std::vector<Engine::TableSizes> Sizes() {
    std::vector<Engine::TableSizes> sizes;
    for (int r = 0; r < job.size(); ++r) sizes.push_back(job.engine(r).Sizes());
    return sizes;
  }

  void Expect(Code code) const {
    for (const auto& work : works) {
      ASSERT_TRUE(work->done());
      ASSERT_EQ(work->status().code(), code) << work->status().message();
    }
  }

  SteppedJob job;
  std::vector<std::shared_ptr<Work>> works;
};

TEST(ProcessSetChurn, TablesAndMemoryStayFlat) {
  Churn churn(3);
  const std::vector<int32_t> sets[] = {{0, 2}, {0, 1}, {2}};
  const auto cycles = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const std::vector<int32_t>& ranks = sets[i % 3];
      const uint32_t uid = churn.Add(ranks);
      churn.Sum(uid, ranks, "t");
      churn.Remove(uid);
    }
  };
  cycles(600);  // every name of a call that adds or removes was used
  const std::vector<Engine::TableSizes> before = churn.Sizes();
  const int64_t resident = ResidentBytes();
  cycles(kSanitized ? 1'000 : 50'000);
  EXPECT_EQ(churn.Sizes(), before);
  if (kSanitized) return;
  EXPECT_LT(ResidentBytes() - resident, 4 << 20);
}

TEST(ProcessSetChurn, IdsOfRemovedSetsAreHandedOutAgain) {
  EngineOptions options = WithoutLinger();
  options.negotiation.max_ids = 2;
  Churn churn(3, options);
  for (int i = 0; i < 10; ++i) {
    const uint32_t uid = churn.Add({0, 2});
    for (int use = 0; use < 4; ++use) churn.Sum(uid, {0, 2}, "t");
    churn.Remove(uid);
  }
  EXPECT_TRUE(churn.job.log(0).empty()) << churn.job.log(0).front();
}

TEST(ProcessSetChurn, DisagreementAboutTheRanksIsAMismatchThatNamesBoth) {
  Churn churn(3);
  churn.works = {churn.job.engine(0).AddSet({0, 1}).value(),
                 churn.job.engine(1).AddSet({0, 2}).value(),
                 churn.job.engine(2).AddSet({0, 1}).value()};
  churn.job.Settle();
  churn.Expect(Code::kMismatch);
  EXPECT_THAT(churn.works[2]->status().message(), HasSubstr("ranks 0, 2 sent ranks 0, 1"));
  EXPECT_THAT(churn.works[2]->status().message(), HasSubstr("rank 1 sent ranks 0, 2"));
  churn.Sum(churn.Add({0, 1}), {0, 1}, "t");
}

TEST(ProcessSetChurn, CallsInAnotherOrderAreAMismatchAndTheNextOnesWork) {
  Churn churn(3);
  for (int r = 0; r < 3; ++r) {
    for (const int32_t other : {r == 1 ? 2 : 1, r == 1 ? 1 : 2}) {
      churn.works.push_back(churn.job.engine(r).AddSet({0, other}).value());
    }
  }
  churn.job.Settle();
  churn.Expect(Code::kMismatch);
  for (int round = 0; round < 2; ++round) {
    const uint32_t a = churn.Add({0, 1});
    const uint32_t b = churn.Add({0, 2});
    churn.Sum(a, {0, 1}, "t");
    churn.Sum(b, {0, 2}, "t");
    churn.Remove(a);
    churn.Remove(b);
  }
}

// Two kinds of one name share a key, which goes with the set; a start that is held meanwhile has
// none.
TEST(ProcessSetChurn, AStartThatIsHeldWhileItsSetEndsEndsToo) {
  EngineOptions options = SteppedJob::Stepped();
  SteppedJob job(3, options);
  const auto all = [&](const std::function<std::shared_ptr<Work>(Engine&)>& start, int ranks) {
    std::vector<std::shared_ptr<Work>> works;
    for (int r = 0; r < ranks; ++r) works.push_back(start(job.engine(r)));
    job.SettleHeld();
    for (const auto& work : works) ASSERT_TRUE(work->done() && work->status().ok());
  };
  all([](Engine& engine) { return engine.AddSet({0, 1}).value(); }, 3);
  const uint32_t uid = job.engine(0).operations().SetOf({0, 1}).value().uid;
  std::vector<float> data(4, 1.0f);
  const void* in = data.data();
  void* out = data.data();
  const auto operation = [&](Engine& engine, OpKind kind) {
    Signature signature = Floats(4);
    signature.root = kind == OpKind::kBroadcast ? 0 : -1;
    return engine.operations().Prepare({uid, kind, "x"}, signature).value();
  };
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kBroadcast}) {
    all(
        [&](Engine& engine) {
          return engine.Start(*operation(engine, kind), {&in, 1}, {&out, 1}).value();
        },
        2);
  }
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(job.engine(r).RemoveSet(uid).ok());
  job.clock().Advance(options.linger_ns);
  job.engine(0).RunOnce();  // takes its own call; the others' have not arrived
  const auto held = job.engine(0)
                        .Start(*operation(job.engine(0), OpKind::kAllreduce), {&in, 1}, {&out, 1})
                        .value();
  job.Settle();
  ASSERT_FALSE(held->done());
  all([](Engine& engine) { return engine.AddSet({0, 2}).value(); }, 3);
  ASSERT_TRUE(held->done());
  EXPECT_EQ(held->status().code(), Code::kAborted) << held->status().message();
}

TEST(ProcessSetChurn, TwoSetsCanBeAddedAndRemovedAtOnce) {
  Churn churn(3);
  for (int r = 0; r < 3; ++r) {
    for (const int32_t other : {1, 2}) {
      churn.works.push_back(churn.job.engine(r).AddSet({0, other}).value());
    }
  }
  churn.job.Settle();
  churn.Expect(Code::kOk);
  churn.works.clear();
  for (int r = 0; r < 3; ++r) {
    for (const int32_t other : {1, 2}) {
      Engine& engine = churn.job.engine(r);
      churn.works.push_back(
          engine.RemoveSet(engine.operations().SetOf({0, other}).value().uid).value());
    }
  }
  churn.job.Settle();
  churn.Expect(Code::kOk);
}

TEST(ProcessSetChurn, RefusesTheCallBeyondTwoHundredFiftySixUnderWay) {
  Churn churn(2);
  for (int i = 0; i < 256; ++i) ASSERT_TRUE(churn.job.engine(0).AddSet({0}).ok());
  const Status refused = churn.job.engine(0).AddSet({0}).status();
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("256 calls are in flight on rank 0"));
  for (int i = 0; i < 256; ++i) ASSERT_TRUE(churn.job.engine(1).AddSet({0}).ok());
  churn.job.Settle();
  churn.Remove(churn.job.engine(1).operations().SetOf({0}).value().uid);
  churn.Remove(churn.Add({0}));
}

// What a thread may still hold of a set that has ended.
struct Held {
  Held(Engine& engine, const KeyName& name)
      : operation(engine.operations().Prepare(name, Floats(4), &version).value()) {}
  Result<std::shared_ptr<Work>> Start(Engine& engine, uint32_t as) {
    const void* in = data.data();
    void* out = data.data();
    return engine.Start(*operation, {&in, 1}, {&out, 1}, {}, true, {}, as);
  }
  uint32_t version = 0;
  Operation* operation;
  std::vector<float> data = std::vector<float>(4, 1.0f);
};

TEST(ProcessSetChurn, AnOperationOfARemovedSetIsRefusedAlsoWhenItServesAnotherSet) {
  Churn churn(3);
  Engine& engine = churn.job.engine(0);
  const uint32_t first = churn.Add({0, 1});
  Held held(engine, {first, OpKind::kAllreduce, "t"});
  churn.Remove(first);
  for (const uint32_t as : {held.version, 0u}) {
    const Status refused = held.Start(engine, as).status();
    EXPECT_EQ(refused.code(), Code::kAborted);
    EXPECT_THAT(refused.message(), HasSubstr("process set of this operation has ended"));
  }
  const uint32_t second = churn.Add({0, 1});
  Held next(engine, {second, OpKind::kAllreduce, "u"});
  EXPECT_EQ(next.operation, held.operation) << "it was free for the next set";
  EXPECT_EQ(held.Start(engine, held.version).status().code(), Code::kAborted);
  churn.Sum(second, {0, 1}, "u");
}

TEST(ProcessSetChurn, AnOperationInFlightWhenItsSetEndsIsAbortedAndThenFree) {
  Churn churn(3);
  Engine& engine = churn.job.engine(0);
  const uint32_t uid = churn.Add({0, 1});
  Held held(engine, {uid, OpKind::kAllreduce, "t"});
  const std::shared_ptr<Work> work = held.Start(engine, held.version).value();
  churn.job.Settle();
  EXPECT_FALSE(work->done());
  churn.Remove(uid);
  ASSERT_TRUE(work->done());
  EXPECT_EQ(work->status().code(), Code::kAborted);
  EXPECT_THAT(work->status().message(),
              HasSubstr("\"t\" (process set 1): process set 1 was removed"));
  EXPECT_EQ(held.Start(engine, held.version).status().code(), Code::kAborted);
}

TEST(ProcessSetChurn, AnOperationStartedAfterTheEndAndBeforeItIsToldIsAborted) {
  Churn churn(3);
  Engine& engine = churn.job.engine(0);
  const uint32_t uid = churn.Add({0, 1});
  Held held(engine, {uid, OpKind::kAllreduce, "t"});
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(churn.job.engine(r).RemoveSet(uid).ok());
  ASSERT_TRUE(engine.operations().Claim(*held.operation, held.version).ok());
  churn.job.Settle();
  const void* in = held.data.data();
  void* out = held.data.data();
  ClaimedOperation claimed(*held.operation);
  Result<std::shared_ptr<Work>> work = engine.StartClaimed(claimed, {&in, 1}, {&out, 1}, {}, true);
  churn.job.Settle();
  ASSERT_TRUE(work.ok() && work.value()->done());
  EXPECT_EQ(work.value()->status().code(), Code::kAborted);
  churn.Sum(churn.Add({0, 1}), {0, 1}, "t");
  EXPECT_EQ(engine.Sizes().negotiation.keys, churn.job.engine(1).Sizes().negotiation.keys);
}

TEST(ProcessSetChurn, AStaleHandleIsRefusedWhileItsOperationIsUsedForOtherSets) {
  Churn churn(3);
  Engine& engine = churn.job.engine(0);
  const uint32_t first = churn.Add({0, 1});
  Held held(engine, {first, OpKind::kAllreduce, "t"});
  churn.Remove(first);
  std::atomic<bool> stop{false};
  int64_t started = 0;
  std::thread user([&] {
    while (!stop.load())
      started += engine.operations().Claim(*held.operation, held.version).ok() ? 1 : 0;
  });
  for (int i = 0; i < 300; ++i) {
    const uint32_t uid = churn.Add({0, 1});
    churn.works.clear();
    // The claim of a stale handle may be in the way of a start for a moment.
    Engine& peer = churn.job.engine(1);
    Held mine(engine, {uid, OpKind::kAllreduce, "u"});
    Held other(peer, {uid, OpKind::kAllreduce, "u"});
    Result<std::shared_ptr<Work>> work = mine.Start(engine, mine.version);
    while (!work.ok()) work = mine.Start(engine, mine.version);
    churn.works = {work.value(), other.Start(peer, other.version).value()};
    churn.job.Settle();
    churn.Expect(Code::kOk);
    EXPECT_EQ(mine.data[0], 2.0f);
    churn.Remove(uid);
  }
  stop.store(true);
  user.join();
  EXPECT_EQ(started, 0);
}

// A job whose ranks give back what they prepared, each `kLate` names later than the rank before.
class NameChurn {
 public:
  static constexpr int kRanks = 3;
  static constexpr int kLate = 5;

  // Three uses of each name, so that it gets an id and is used by it.
  void Use(int first, int count) {
    for (int i = first; i < first + count; ++i) {
      const std::string name = "name " + std::to_string(i);
      for (int r = 0; r < kRanks; ++r) Held(r).emplace_back(Prepare(r, name));
      for (int use = 0; use < 3; ++use) Sum(name);
      for (int r = 0; r < kRanks; ++r)
        while (std::ssize(Held(r)) > kLate * r) Held(r).pop_front();
    }
  }

  void Sum(const std::string& name) {
    works_.clear();
    std::array<std::array<float, 4>, kRanks> data;
    for (int r = 0; r < kRanks; ++r) {
      data[static_cast<size_t>(r)].fill(1.0f);
      const HeldOperation operation = Prepare(r, name);
      const void* in = data[static_cast<size_t>(r)].data();
      void* out = data[static_cast<size_t>(r)].data();
      works_.push_back(churn.job.engine(r).Start(*operation, {&in, 1}, {&out, 1}).value());
    }
    churn.job.Settle();
    for (const std::shared_ptr<Work>& work : works_) {
      ASSERT_TRUE(work->done());
      ASSERT_TRUE(work->status().ok()) << work->status().message();
    }
    for (const auto& result : data) ASSERT_EQ(result.front(), float{kRanks});
  }

  HeldOperation Prepare(int rank, const std::string& name) {
    return HeldOperation(churn.job.engine(rank)
                             .operations()
                             .Prepare({kGlobalSet, OpKind::kAllreduce, name}, Floats(4))
                             .value());
  }

  Churn churn{kRanks};

 private:
  std::deque<HeldOperation>& Held(int rank) { return held_[static_cast<size_t>(rank)]; }

  std::array<std::deque<HeldOperation>, kRanks> held_;
  std::vector<std::shared_ptr<Work>> works_;
};

TEST(NameChurn, NamesThatNobodyHoldsTakeNothing) {
  NameChurn names;
  constexpr int kFirst = kSanitized ? 3'000 : 20'000;
  names.Use(0, kFirst);
  const int64_t resident = ResidentBytes();
  names.Use(kFirst, 3 * kFirst);
  for (const Engine::TableSizes& sizes : names.churn.Sizes()) {
    EXPECT_LT(sizes.negotiation.keys, 10'000u);
    EXPECT_LT(sizes.negotiation.numbers, 10'000u);
    EXPECT_LT(sizes.negotiation.ids, 10'000u);
    EXPECT_LT(sizes.operations.operations, 10'000u);
  }
  if (kSanitized) return;
  EXPECT_LT(ResidentBytes() - resident, 4 << 20);
}

// The ids of all other names are free then, at every rank, and only these are left.
TEST(NameChurn, WhatIsHeldKeepsItsIdAndWhatIsUsedAgainGetsOne) {
  constexpr int kNames = kSanitized ? 2'000 : 8'000;
  NameChurn names;
  const HeldOperation held = names.Prepare(0, "held");
  for (int use = 0; use < 3; ++use) names.Sum("held");
  names.Sum("now and then");
  for (int i = 0; i < 5; ++i) {
    names.Use(i * kNames, kNames);
    const int64_t before = names.churn.job.counters(1).Get(Counter::kControlBytesSent);
    names.Sum("held");
    const int64_t by_id = names.churn.job.counters(1).Get(Counter::kControlBytesSent) - before;
    names.Sum("now and then");
    const int64_t bytes =
        names.churn.job.counters(1).Get(Counter::kControlBytesSent) - before - by_id;
    EXPECT_LT(by_id, bytes) << "round " << i;
  }
}

}  // namespace
}  // namespace farandole
