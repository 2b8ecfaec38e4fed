#include "coordinator/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "test/planes/failing_plane.h"
#include "test/support/count_allocations.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Signature Floats(int64_t count, ReduceOp op = ReduceOp::kSum) {
  Signature signature;
  signature.op = op;
  signature.tensors.push_back({"", DType::kFloat32, {count}});
  return signature;
}

/// Ranks with float tensors under names, which they reduce in place.
class Ranks : public SteppedJob {
 public:
  using SteppedJob::SteppedJob;
  struct Tensor {
    std::vector<float> data;
    std::shared_ptr<Work> work;
  };

  /// Of `rank`, filled with `value`; kept if it starts.
  Status Start(int rank, const KeyName& name, const Signature& signature, float value = 1) {
    const bool is_empty = signature.tensors.empty();
    const auto count = static_cast<size_t>(is_empty ? 0 : signature.tensors[0].shape[0]);
    Tensor tensor{std::vector<float>(count, value), nullptr};
    Result<Operation*> operation = engine(rank).operations().Prepare(name, signature);
    if (!operation.ok()) return operation.status();
    const void* in = tensor.data.data();
    void* out = tensor.data.data();
    const size_t tensors = signature.tensors.size();
    Result<std::shared_ptr<Work>> work =
        engine(rank).Start(*operation.value(), {&in, tensors}, {&out, tensors});
    if (!work.ok()) return work.status();
    tensor.work = work.value();
    started.push_back(std::move(tensor));
    return {};
  }
  Status Start(int rank, const std::string& name, const Signature& signature, float value = 1) {
    return Start(rank, KeyName{0, OpKind::kAllreduce, name}, signature, value);
  }
  /// Since they were last asked for; each has ended well.
  std::vector<std::vector<float>> Results() {
    SettleHeld();
    std::vector<std::vector<float>> results;
    for (Tensor& tensor : std::exchange(started, {})) {
      EXPECT_TRUE(tensor.work->done());
      EXPECT_TRUE(tensor.work->status().ok()) << tensor.work->status().message();
      results.push_back(std::move(tensor.data));
    }
    return results;
  }
  void Pass(int seconds) {
    for (int i = 0; i < seconds; ++i) {
      clock().Advance(kNsPerSecond);
      Settle();
    }
  }

  std::vector<Tensor> started;
};

// A rank without that memory is told by its call, and not when the others wait for it.
TEST(Engine, HasWhatAnEightBitWireLeavesOverBeforeRanksAgreeWhereAnythingIsRounded) {
  for (const bool quantizes : {false, true}) {
    SteppedJob job(2, SteppedJob::Stepped(), [&](int, std::unique_ptr<DataPlane> plane) {
      return std::make_unique<FailingPlane>(std::move(plane),
                                            FailingPlane::Options{.quantizes = quantizes});
    });
    Signature signature = Floats(1000);
    signature.wire_format = WireFormat::kInt8;
    signature.tensors.push_back({"", DType::kInt32, {10}});
    OperationRegistry& operations = job.engine(0).operations();
    const auto residuals = [&](const char* name) -> const Residuals& {
      return operations.Prepare({0, OpKind::kAllreduce, name}, signature).value()->residuals;
    };
    ASSERT_EQ(residuals("named").size(), quantizes ? 2 : 0);
    EXPECT_TRUE(residuals("allreduce.noname.0").empty());
    if (!quantizes) continue;
    EXPECT_EQ(residuals("named")[0].get()[999], 0.0f);
    EXPECT_EQ(residuals("named")[1], nullptr) << "integers are not rounded";
  }
}

TEST(Engine, SumsATensorOfAllRanks) {
  Ranks job(3);
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(job.Start(r, "t", Floats(1000), static_cast<float>(r + 1)).ok());
  }
  EXPECT_THAT(job.Results(), Each(std::vector<float>(1000, 6.0f)));
}

TEST(Engine, RefusesAContributionWithoutMemoryAndGoesOn) {
  Ranks job(1);
  Operation& operation =
      *job.engine(0).operations().Prepare({0, OpKind::kAllreduce, "t"}, Floats(4)).value();
  float memory[4] = {};
  const void* in = nullptr;
  void* out = memory;
  const Status refused = job.engine(0).Start(operation, {&in, 1}, {&out, 1}).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("\"t\": tensor 0 has no input"));
  ASSERT_TRUE(job.Start(0, "t", Floats(4)).ok());
  EXPECT_EQ(job.Results().size(), 1u);
}

struct Refused {
  OpKind kind;
  ReduceOp op;
  DType dtype;
  const char* text;  ///< nullptr: it is not.
  void (*change)(Signature&) = [](Signature&) {};
};

constexpr Refused kRefused[] = {
    {OpKind::kAllreduce, ReduceOp::kMax, DType::kBool, "bool cannot be multiplied",
     [](Signature& s) { s.prescale = 2.0; }},
    {OpKind::kAllreduce, ReduceOp::kPreMulSum, DType::kBool, "premul_sum is not defined for bool"},
    {OpKind::kReducescatter, ReduceOp::kBitXor, DType::kFloat32,
     "bit_xor is not defined for float32"},
    {OpKind::kReducescatter, ReduceOp::kBitXor, DType::kInt32, nullptr},
    {OpKind::kReducescatter, ReduceOp::kBitXor, DType::kInt32,
     "bit_xor is not offered for tensors on a GPU",
     [](Signature& s) { s.device = DeviceKind::kCuda; }},
    {OpKind::kReducescatter, ReduceOp::kBitXor, DType::kInt32, "bit_xor cannot be multiplied",
     [](Signature& s) { s.postscale = 2.0; }},
    {OpKind::kAllreduce, ReduceOp::kAdasum, DType::kFloat32, nullptr},
    {OpKind::kReducescatter, ReduceOp::kAdasum, DType::kFloat32, "adasum needs the whole tensor"},
    {OpKind::kAllreduce, ReduceOp::kAdasum, DType::kFloat32, "copy the tensor into host memory",
     [](Signature& s) { s.device = DeviceKind::kCuda; }},
    {OpKind::kAllreduce, ReduceOp::kAdasum, DType::kInt64,
     "adasum is not defined for int64; expected float16, bfloat16, float32 or float64"},
    {OpKind::kAllreduce, ReduceOp::kMax, DType::kFloat8E5m2,
     "float8_e5m2 cannot be reduced, only moved by broadcast, allgather and alltoall; expected "
     "bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32 or float64"},
    {OpKind::kReducescatter, ReduceOp::kMax, DType::kFloat8E5m2,
     "float8_e5m2 cannot be reduced, only moved by"},
};

TEST(Engine, RefusesByNameWhatCannotBeReducedBeforeAnythingStarts) {
  SteppedJob job(1);
  for (const Refused& row : kRefused) {
    Signature signature = Floats(4, row.op);
    signature.tensors[0].dtype = row.dtype;
    row.change(signature);
    const Status status =
        job.engine(0).operations().Prepare({0, row.kind, "x"}, signature).status();
    EXPECT_EQ(status.ok(), row.text == nullptr) << status.message();
    if (row.text == nullptr) continue;
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), StartsWith(std::string(Name(row.kind)) + " \"x\": "));
    EXPECT_THAT(status.message(), HasSubstr(row.text));
  }
}

// Several tensors of one operation, by a plane that knows none of their dtypes.
TEST(Engine, BroadcastsWhatIsOnlyMoved) {
  SteppedJob job(3);
  Signature signature;
  signature.root = 1;
  for (int i = kReducibleDTypeCount; i < kDTypeCount; ++i) {
    signature.tensors.push_back({"", static_cast<DType>(i), {3, 1}});
  }
  constexpr size_t kBytes = 3 * 16;
  const size_t tensors = signature.tensors.size();
  std::vector<std::vector<uint8_t>> memory;
  for (int r = 0; r < 3; ++r) {
    memory.emplace_back(tensors * kBytes, static_cast<uint8_t>(r));
    for (size_t i = 0; r == 1 && i < memory.back().size(); ++i) {
      memory.back()[i] = static_cast<uint8_t>(3 + i % 251);
    }
  }
  std::vector<std::shared_ptr<Work>> works;
  for (int r = 0; r < 3; ++r) {
    Result<Operation*> operation =
        job.engine(r).operations().Prepare({0, OpKind::kBroadcast, "weights"}, signature);
    ASSERT_TRUE(operation.ok()) << operation.status().message();
    std::vector<void*> out;
    for (size_t t = 0; t < tensors; ++t) {
      out.push_back(memory[static_cast<size_t>(r)].data() + t * kBytes);
    }
    const std::vector<const void*> in(out.begin(), out.end());
    works.push_back(job.engine(r).Start(*operation.value(), in, out).value());
  }
  job.SettleHeld();
  for (const size_t r : {0u, 2u}) {
    ASSERT_TRUE(works[r]->done());
    ASSERT_TRUE(works[r]->status().ok()) << works[r]->status().message();
    for (size_t i = 0; i < memory[r].size(); ++i) {
      const DType dtype = signature.tensors[i / kBytes].dtype;
      const bool is_written = i % kBytes < static_cast<size_t>(3 * SizeOf(dtype));
      ASSERT_EQ(memory[r][i], is_written ? memory[1][i] : r) << Name(dtype);
    }
  }
}

Signature PreMulSum(int64_t count, double factor) {
  Signature signature = Floats(count, ReduceOp::kPreMulSum);
  signature.prescale = factor;
  return signature;
}

// Rank r multiplies by r + 1, then by r + 2 and so on: rounds by signature and by id.
TEST(Engine, MultipliesAPreMulSumByEachRanksOwnFactor) {
  Ranks job(3);
  for (int round = 0; round < 4; ++round) {
    for (int r = 0; r < 3; ++r) {
      ASSERT_TRUE(job.Start(r, "t", PreMulSum(5, r + 1 + round)).ok());
      ASSERT_TRUE(job.Start(r, "u", PreMulSum(5, 0.5)).ok());
    }
    const std::vector<float> t(5, static_cast<float>(6 + 3 * round)), u(5, 1.5f);
    EXPECT_THAT(job.Results(), ElementsAre(t, u, t, u, t, u));
  }
  EXPECT_EQ(job.counters(0).Get(Counter::kBatches), 8);  // none fused
}

TEST(Engine, ReducesWithoutARankThatJoined) {
  Ranks job(3);
  ASSERT_TRUE(job.engine(1).Join().ok());
  for (const int r : {0, 2}) {
    ASSERT_TRUE(job.Start(r, "t", PreMulSum(4, r + 1)).ok());
    ASSERT_TRUE(job.Start(r, "u", Floats(1, ReduceOp::kAdasum), static_cast<float>(r + 2)).ok());
  }
  const std::vector<float> t(4, 4.0f), u{3.0f};
  EXPECT_THAT(job.Results(), ElementsAre(t, u, t, u));
}

// Of one element each, whose adasum is the mean: two fused keys, then a sum behind them.
TEST(Engine, RunsAdasumsOfSeveralTensorsAmongOtherBatches) {
  Ranks job(3);
  int64_t allocations = 0;
  for (int round = 0; round < 50; ++round) {
    for (int r = 0; r < 3; ++r) {
      for (int k = 0; k < 3; ++k) {
        const ReduceOp op = k < 2 ? ReduceOp::kAdasum : ReduceOp::kSum;
        const auto value = static_cast<float>((r + 1) * (k + 1));
        ASSERT_TRUE(job.Start(r, std::to_string(k), Floats(1, op), value).ok());
      }
    }
    const int64_t now = job.SettleHeld();
    if (round >= 40) allocations += now;
    const std::vector<float> mean{2.25f}, twice{4.5f}, sum{18};  // ((1 + 2) / 2 + 3) / 2
    EXPECT_THAT(job.Results(), ElementsAre(mean, twice, sum, mean, twice, sum, mean, twice, sum));
  }
  EXPECT_EQ(allocations, 0);
  EXPECT_LE(job.counters(0).Get(Counter::kBatches), 100 + 2);  // fused once both are known by id
}

// Each allocation of a rank's engine between the start of a tensor that it has never seen and its
// end, by turns.
TEST(Engine, EndsOnAllRanksWhenOneRunsOutOfMemory) {
  bool is_reached = true;
  int failures = 0;
  for (int64_t nth = 1; is_reached; ++nth) {
    Ranks job(2);
    for (int r = 0; r < 2; ++r) {
      ASSERT_TRUE(job.Start(r, "a tensor with a name that needs memory", Floats(64)).ok());
    }
    is_reached = false;
    for (int step = 0; step < 20; ++step) {
      job.clock().Advance(kNsPerMs);
      job.engine(0).RunOnce();
      const FailAllocation failure(is_reached ? 0 : nth);
      job.engine(1).RunOnce();
      is_reached = is_reached || failure.has_failed();
    }
    job.SettleHeld();
    for (const Ranks::Tensor& tensor : job.started) {
      ASSERT_TRUE(tensor.work->done()) << "allocation " << nth;
      if (tensor.work->status().ok()) continue;
      ++failures;
      EXPECT_EQ(tensor.work->status().code(), Code::kResourceExhausted);
      EXPECT_THAT(tensor.work->status().message(), HasSubstr("the engine: out of memory"));
      EXPECT_THAT(tensor.work->status().facts().ranks, ::testing::ElementsAre(1));
    }
  }
  EXPECT_GT(failures, 10);
}

// That allocation is the Work, which the caller keeps as long as it likes.
TEST(Engine, StartsAKnownOperationWithOneAllocationAndNegotiatesItWithNone) {
  constexpr int kOperations = 200;
  SteppedJob job(2);
  std::vector<Operation*> operations;
  std::vector<float> values(2 * kOperations * 64);
  for (int i = 0; i < 2 * kOperations; ++i) {
    const KeyName name{0, OpKind::kAllreduce, "gradient " + std::to_string(i / 2)};
    operations.push_back(job.engine(i % 2).operations().Prepare(name, Floats(64)).value());
  }
  for (int rank = 0; rank < 2; ++rank) job.engine(rank).EnterCaller();  // a thread's first call
  std::vector<std::shared_ptr<Work>> works(operations.size());
  for (int round = 0; round < 30; ++round) {
    std::ranges::fill(works, nullptr);
    int64_t by_callers = 0;
    for (size_t i = 0; i < operations.size(); ++i) {
      const void* const in = &values[64 * i];
      void* const out = &values[64 * i];
      const CountAllocations allocations;
      works[i] =
          job.engine(static_cast<int>(i % 2)).Start(*operations[i], {&in, 1}, {&out, 1}).value();
      by_callers += allocations.count();
    }
    const int64_t batches = job.counters(0).Get(Counter::kBatches);
    const int64_t by_engines = job.SettleHeld();
    for (const auto& work : works) ASSERT_TRUE(work->done() && work->status().ok());
    EXPECT_EQ(by_callers, 2 * kOperations);
    if (round < 20) continue;  // by then all buffers that are used again have grown
    EXPECT_EQ(by_engines, 0);
    EXPECT_EQ(job.counters(0).Get(Counter::kBatches) - batches, 1);
  }
}

TEST(Engine, StartsNothingThatAnotherThreadHasDescribedAnew) {
  SteppedJob job(1);
  uint32_t version = 0;
  Operation& operation = *job.engine(0)
                              .operations()
                              .Prepare({0, OpKind::kAllreduce, "t"}, Floats(4), &version)
                              .value();
  ASSERT_TRUE(job.engine(0).operations().Prepare({0, OpKind::kAllreduce, "t"}, Floats(400)).ok());
  const Status refused = job.engine(0).operations().Claim(operation, version);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("redefined"));
  EXPECT_TRUE(job.engine(0).operations().Claim(operation, version + 1).ok());
}

TEST(Engine, RefusesADifferentShapeOnAllRanksByNameAndGoesOn) {
  Ranks job(3);
  for (int round = 0; round < 5; ++round) {  // unknown, seen once, known by id, ...
    const bool odd = round % 2 == 1;
    for (int r = 0; r < 3; ++r) {
      ASSERT_TRUE(job.Start(r, "layer1.weight", Floats(odd && r == 2 ? 7 : 8)).ok());
    }
    if (!odd) {
      EXPECT_THAT(job.Results(), Each(std::vector<float>(8, 3.0f)));
      continue;
    }
    job.SettleHeld();
    for (const Ranks::Tensor& tensor : std::exchange(job.started, {})) {
      ASSERT_TRUE(tensor.work->done());
      EXPECT_EQ(tensor.work->status().code(), Code::kMismatch);
      EXPECT_THAT(tensor.work->status().message(),
                  AllOf(HasSubstr("layer1.weight"), HasSubstr("rank 2 sent float32 [7]"),
                        HasSubstr("float32 [8]")));
    }
  }
}

TEST(Engine, HoldsSmallSubmissionsForTheLingerTimeAndDecidesThemTogether) {
  Ranks job(2);
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(job.Start(i / 50, "t" + std::to_string(i % 50), Floats(4)).ok());
    job.Settle();
  }
  EXPECT_FALSE(job.started[0].work->done());
  EXPECT_THAT(job.Results(), Each(std::vector<float>(4, 2.0f)));
  EXPECT_EQ(job.counters(0).Get(Counter::kBatches), 1);
}

TEST(Engine, RefusesASecondStartOfAnOperationInFlight) {
  Ranks job(2);
  ASSERT_TRUE(job.Start(0, "t", Floats(4)).ok());
  const Status same = job.Start(0, "t", Floats(4));
  EXPECT_EQ(same.code(), Code::kInvalidArgument);
  EXPECT_THAT(same.message(), HasSubstr("already in flight"));
  EXPECT_EQ(job.Start(0, "t", Floats(5)).code(), Code::kInvalidArgument);
}

TEST(Engine, FinishesABarrierAndAnEmptyTensorWithoutABatch) {
  for (const KeyName& name : {KeyName{0, OpKind::kBarrier, "b"}, {0, OpKind::kAllreduce, "e"}}) {
    Ranks job(3);
    const Signature signature = name.kind == OpKind::kBarrier ? Signature() : Floats(0);
    for (const int r : {0, 1}) ASSERT_TRUE(job.Start(r, name, signature).ok());
    job.SettleHeld();
    EXPECT_FALSE(job.started[0].work->done());
    ASSERT_TRUE(job.Start(2, name, signature).ok());
    EXPECT_EQ(job.Results().size(), 3u);
    EXPECT_EQ(job.counters(0).Get(Counter::kBatches), 0);
  }
}

TEST(Engine, LetsAJoinedRankServeTheOthers) {
  Ranks job(3);
  Result<std::shared_ptr<Work>> joined = job.engine(2).Join();
  ASSERT_TRUE(joined.ok());
  for (const int r : {0, 1}) {
    ASSERT_TRUE(job.Start(r, "t", Floats(10, ReduceOp::kAverage), 3).ok());
  }
  EXPECT_THAT(job.Results(), Each(std::vector<float>(10, 2.0f)));
  Result<std::shared_ptr<Work>> first = job.engine(0).Join();
  job.SettleHeld();
  EXPECT_FALSE(joined.value()->done());
  Result<std::shared_ptr<Work>> second = job.engine(1).Join();
  job.SettleHeld();
  for (auto* work : {&joined, &first, &second})
    EXPECT_TRUE(work->value()->done() && work->value()->status().ok());
  EXPECT_EQ(job.engine(0).lifecycle().last_joined(), 1);
}

TEST(Engine, AbortsPendingWorkNamingTheRankThatLeft) {
  Ranks job(2);
  ASSERT_TRUE(job.Start(0, "t", Floats(4)).ok());
  std::shared_ptr<Work> left = job.engine(1).Leave();
  job.SettleHeld();
  const Work& work = *job.started[0].work;
  ASSERT_TRUE(work.done());
  EXPECT_EQ(work.status().code(), Code::kAborted);
  EXPECT_THAT(work.status().message(), HasSubstr("rank 1"));
  EXPECT_FALSE(left->done());
  std::shared_ptr<Work> last = job.engine(0).Leave();
  job.SettleHeld();
  EXPECT_TRUE(left->done() && left->status().ok());
  EXPECT_TRUE(last->done() && last->status().ok());
  EXPECT_TRUE(job.engine(0).ShutDownCleanly() && job.engine(1).ShutDownCleanly());
}

TEST(Engine, SaysWhyASetIsGoneToWhoeverAsksForIt) {
  SteppedJob job(2);
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(job.engine(r).AddSet({0}).ok());
  job.SettleHeld();
  const uint32_t uid = job.engine(0).operations().SetOf({0}).value().uid;
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(job.engine(r).RemoveSet(uid).ok());
  job.SettleHeld();
  const auto answer = [&](int rank, uint32_t set) {
    return job.engine(rank).operations().FindSet(set).status().ToString();
  };
  EXPECT_THAT(answer(0, uid),
              HasSubstr("InvalidArgument: process set " + std::to_string(uid) + " was removed"));
  EXPECT_THAT(answer(0, 77), HasSubstr("InvalidArgument: process set 77 is unknown"));
  const std::shared_ptr<Work> left = job.engine(1).Leave();
  job.SettleHeld();
  EXPECT_THAT(answer(0, kGlobalSet), HasSubstr("Aborted: "));
  EXPECT_THAT(answer(0, kGlobalSet), HasSubstr("rank 1 has left"));
  EXPECT_THAT(answer(1, kGlobalSet), HasSubstr("Aborted: farandole has been shut down on rank 1"));
}

TEST(Engine, RunsBatchesOnAProcessSet) {
  Ranks job(3);
  std::vector<std::shared_ptr<Work>> adding;
  for (int r = 0; r < 3; ++r) adding.push_back(job.engine(r).AddSet({0, 2}).value());
  job.SettleHeld();
  for (const std::shared_ptr<Work>& work : adding) ASSERT_TRUE(work->done() && work->status().ok());
  const KeyName name{job.engine(0).operations().SetOf({0, 2}).value().uid, OpKind::kAllreduce, "t"};
  for (const int r : {0, 2}) ASSERT_TRUE(job.Start(r, name, Floats(4)).ok());
  EXPECT_THAT(job.Results(), Each(std::vector<float>(4, 2.0f)));
  const Status refused = job.Start(1, name, Floats(4));
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("no member"));
}

TEST(Engine, ReportsAStallOnAllRanksNamingTheMissingAndEndsByItsError) {
  EngineOptions options = SteppedJob::Stepped();
  options.negotiation.stall_ns = kNsPerSecond;
  options.negotiation.stall_shutdown_ns = 5 * kNsPerSecond;
  Ranks job(3, options);
  ASSERT_TRUE(job.Start(1, "late.weight", Floats(4)).ok());
  job.SettleHeld();
  job.Pass(4);
  EXPECT_FALSE(job.started[0].work->done());
  for (int r = 0; r < 3; ++r) {
    ASSERT_FALSE(job.log(r).empty()) << "rank " << r;
    EXPECT_THAT(job.log(r).front(),
                AllOf(HasSubstr("allreduce \"late.weight\""), HasSubstr(": rank 1 waits"),
                      HasSubstr("missing: rank 0"), HasSubstr("rank 2")));
  }
  job.Pass(4);
  ASSERT_TRUE(job.started[0].work->done());
  for (int r = 0; r < 3; ++r) {
    const Status error = job.engine(r).lifecycle().final_error();
    EXPECT_EQ(error.code(), Code::kTimeout) << "rank " << r;
    EXPECT_THAT(error.message(), HasSubstr("allreduce \"late.weight\": rank 1 waits"));
  }
}

// Another thread may be half-way through Operation::Release when the slot's next call comes.
TEST(Engine, AnUnnamedSlotIsBusyUntilItsOperationIsReleasedAsAWhole) {
  Ranks job(1);
  OperationRegistry& operations = job.engine(0).operations();
  const auto next = [&] {
    Operation* const operation =
        operations.PrepareUnnamed(0, OpKind::kAllreduce, Floats(1), nullptr, {}).value();
    if (operation != nullptr) operations.ReleaseHandle(*operation);
    return operation;
  };
  Operation& first = *next();
  Operation* latest = &first;
  for (int slots = 1; slots < 256; ++slots) ASSERT_NE(latest = next(), &first);
  ASSERT_TRUE(first.Take());
  first.holder->store(nullptr);
  EXPECT_EQ(next(), nullptr);
  first.in_flight.store(false);
  EXPECT_EQ(next(), &first);
}

}  // namespace
}  // namespace farandole
