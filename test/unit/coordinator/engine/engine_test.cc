#include "coordinator/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "test/planes/failing_plane.h"
#include "test/support/count_allocations.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;

Signature Floats(int64_t count, ReduceOp op = ReduceOp::kSum) {
  Signature signature;
  signature.op = op;
  signature.tensors.push_back({"", DType::kFloat32, {count}});
  return signature;
}

// One rank's float tensor under a name.
struct Tensor {
  std::vector<float> data;
  std::shared_ptr<Work> work;
};

Status StartOn(Engine& engine, const KeyName& name, const Signature& signature, Tensor& tensor) {
  Result<Operation*> operation = engine.operations().Prepare(name, signature);
  if (!operation.ok()) return operation.status();
  const void* in = tensor.data.data();
  void* out = tensor.data.data();
  const size_t tensors = signature.tensors.size();
  Result<std::shared_ptr<Work>> work =
      engine.Start(*operation.value(), {&in, tensors}, {&out, tensors});
  if (!work.ok()) return work.status();
  tensor.work = work.value();
  return {};
}

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
  SteppedJob job(3);
  std::vector<Tensor> tensors(3);
  for (int r = 0; r < 3; ++r) {
    tensors[static_cast<size_t>(r)].data.assign(1000, static_cast<float>(r + 1));
    ASSERT_TRUE(StartOn(job.engine(r), {0, OpKind::kAllreduce, "t"}, Floats(1000),
                        tensors[static_cast<size_t>(r)])
                    .ok());
  }
  job.SettleHeld();
  for (const Tensor& tensor : tensors) {
    ASSERT_TRUE(tensor.work->done());
    EXPECT_TRUE(tensor.work->status().ok()) << tensor.work->status().message();
    EXPECT_EQ(tensor.data, std::vector<float>(1000, 6.0f));
  }
}

TEST(Engine, RefusesAContributionWithoutMemoryAndGoesOn) {
  SteppedJob job(1);
  Operation& operation =
      *job.engine(0).operations().Prepare({0, OpKind::kAllreduce, "t"}, Floats(4)).value();
  Tensor tensor{std::vector<float>(4, 1.0f), nullptr};
  const void* in = nullptr;
  void* out = tensor.data.data();
  const Status refused = job.engine(0).Start(operation, {&in, 1}, {&out, 1}).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("\"t\": tensor 0 has no input"));
  ASSERT_TRUE(StartOn(job.engine(0), {0, OpKind::kAllreduce, "t"}, Floats(4), tensor).ok());
  job.SettleHeld();
  EXPECT_TRUE(tensor.work->done() && tensor.work->status().ok());
}

TEST(Engine, RefusesToMultiplyBoolsBeforeAnythingStarts) {
  SteppedJob job(1);
  Signature signature;
  signature.op = ReduceOp::kMax;
  signature.prescale = 2.0;
  signature.tensors.push_back({"", DType::kBool, {4}});
  const Status refused =
      job.engine(0).operations().Prepare({0, OpKind::kAllreduce, "flags"}, signature).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("\"flags\": bool cannot be multiplied"));
}

TEST(Engine, RefusesBitwiseOpsOfFloatsAndTheirFactorsByName) {
  SteppedJob job(1);
  Signature signature = Floats(4, ReduceOp::kBitXor);
  const KeyName name{0, OpKind::kReducescatter, "bits"};
  const Status floats = job.engine(0).operations().Prepare(name, signature).status();
  EXPECT_EQ(floats.code(), Code::kInvalidArgument);
  EXPECT_THAT(floats.message(), HasSubstr("\"bits\": bit_xor is not defined for float32"));
  signature.tensors[0].dtype = DType::kInt32;
  EXPECT_TRUE(job.engine(0).operations().Prepare(name, signature).ok());
  signature.device = DeviceKind::kCuda;
  const Status on_gpu = job.engine(0).operations().Prepare(name, signature).status();
  EXPECT_EQ(on_gpu.code(), Code::kInvalidArgument);
  EXPECT_THAT(on_gpu.message(), HasSubstr("bit_xor is not offered for tensors on a GPU"));
  signature.device = DeviceKind::kCpu;
  signature.postscale = 2.0;
  const Status scaled = job.engine(0).operations().Prepare(name, signature).status();
  EXPECT_EQ(scaled.code(), Code::kInvalidArgument);
  EXPECT_THAT(scaled.message(), HasSubstr("\"bits\": bit_xor cannot be multiplied"));
}

TEST(Engine, RefusesToReduceWhatIsOnlyMovedAndNamesWhatCanBeReduced) {
  SteppedJob job(1);
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kReducescatter}) {
    Signature signature = Floats(4, ReduceOp::kMax);
    signature.tensors.push_back({"", DType::kFloat8E5m2, {4}});
    const Status refused = job.engine(0).operations().Prepare({0, kind, "x"}, signature).status();
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_EQ(refused.message(),
              std::string(Name(kind)) +
                  " \"x\": float8_e5m2 cannot be reduced, only moved by broadcast, allgather and "
                  "alltoall; expected bool, uint8, int8, int16, int32, int64, float16, bfloat16, "
                  "float32 or float64");
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

TEST(Engine, RefusesAPreMulSumOfBool) {
  SteppedJob job(1);
  Signature signature = Floats(4, ReduceOp::kPreMulSum);
  signature.tensors[0].dtype = DType::kBool;
  const Status refused =
      job.engine(0).operations().Prepare({0, OpKind::kAllreduce, "flags"}, signature).status();
  EXPECT_THAT(refused.message(), HasSubstr("premul_sum is not defined for bool"));
}

Signature PreMulSum(int64_t count, double factor) {
  Signature signature = Floats(count, ReduceOp::kPreMulSum);
  signature.prescale = factor;
  return signature;
}

// Rank r multiplies by r + 1, then by r + 2 and so on: rounds by signature and by id.
TEST(Engine, MultipliesAPreMulSumByEachRanksOwnFactor) {
  SteppedJob job(3);
  for (int round = 0; round < 4; ++round) {
    std::vector<Tensor> tensors(6);
    for (int r = 0; r < 3; ++r) {
      for (int k = 0; k < 2; ++k) {
        Tensor& tensor = tensors[static_cast<size_t>(2 * r + k)];
        tensor.data.assign(5, 1.0f);
        const double factor = k == 0 ? r + 1 + round : 0.5;
        ASSERT_TRUE(StartOn(job.engine(r), {0, OpKind::kAllreduce, k == 0 ? "t" : "u"},
                            PreMulSum(5, factor), tensor)
                        .ok());
      }
    }
    job.SettleHeld();
    for (size_t i = 0; i < tensors.size(); ++i) {
      ASSERT_TRUE(tensors[i].work->done());
      ASSERT_TRUE(tensors[i].work->status().ok()) << tensors[i].work->status().message();
      const float sum = i % 2 == 0 ? static_cast<float>(6 + 3 * round) : 1.5f;
      EXPECT_EQ(tensors[i].data, std::vector<float>(5, sum));
    }
  }
  EXPECT_EQ(job.counters(0).Get(Counter::kBatches), 8);  // none fused
}

TEST(Engine, ReducesAPreMulSumWithoutARankThatJoined) {
  SteppedJob job(3);
  ASSERT_TRUE(job.engine(2).Join().ok());
  std::vector<Tensor> tensors(2);
  for (int r = 0; r < 2; ++r) {
    Tensor& tensor = tensors[static_cast<size_t>(r)];
    tensor.data.assign(4, 1.0f);
    ASSERT_TRUE(
        StartOn(job.engine(r), {0, OpKind::kAllreduce, "t"}, PreMulSum(4, r + 2), tensor).ok());
  }
  job.SettleHeld();
  for (const Tensor& tensor : tensors) {
    ASSERT_TRUE(tensor.work->done() && tensor.work->status().ok());
    EXPECT_EQ(tensor.data, std::vector<float>(4, 5.0f));
  }
}

TEST(Engine, RefusesAnAdasumOfIntegersOfPartsAndOnAGpuByName) {
  SteppedJob job(1);
  Signature signature = Floats(4, ReduceOp::kAdasum);
  const KeyName name{0, OpKind::kAllreduce, "delta"};
  EXPECT_TRUE(job.engine(0).operations().Prepare(name, signature).ok());
  const Status parts =
      job.engine(0).operations().Prepare({0, OpKind::kReducescatter, "delta"}, signature).status();
  EXPECT_EQ(parts.code(), Code::kInvalidArgument);
  EXPECT_THAT(parts.message(), HasSubstr("\"delta\": adasum needs the whole tensor"));
  signature.device = DeviceKind::kCuda;
  const Status on_gpu = job.engine(0).operations().Prepare(name, signature).status();
  EXPECT_EQ(on_gpu.code(), Code::kInvalidArgument);
  EXPECT_THAT(on_gpu.message(), HasSubstr("copy the tensor into host memory"));
  signature.device = DeviceKind::kCpu;
  signature.tensors[0].dtype = DType::kInt64;
  const Status integers = job.engine(0).operations().Prepare(name, signature).status();
  EXPECT_EQ(integers.code(), Code::kInvalidArgument);
  EXPECT_THAT(integers.message(),
              HasSubstr("\"delta\": adasum is not defined for int64; expected float16, bfloat16, "
                        "float32 or float64"));
}

// Of one element each, whose adasum is the mean: two fused keys, then a sum behind them.
TEST(Engine, RunsAdasumsOfSeveralTensorsAmongOtherBatches) {
  SteppedJob job(3);
  int64_t allocations = 0;
  for (int round = 0; round < 50; ++round) {
    std::vector<Tensor> tensors(9);
    for (int r = 0; r < 3; ++r) {
      for (int k = 0; k < 3; ++k) {
        Tensor& tensor = tensors[static_cast<size_t>(3 * r + k)];
        tensor.data.assign(1, static_cast<float>((r + 1) * (k + 1)));
        const ReduceOp op = k < 2 ? ReduceOp::kAdasum : ReduceOp::kSum;
        ASSERT_TRUE(StartOn(job.engine(r), {0, OpKind::kAllreduce, std::to_string(k)},
                            Floats(1, op), tensor)
                        .ok());
      }
    }
    const int64_t now = job.SettleHeld();
    if (round >= 40) allocations += now;
    for (size_t i = 0; i < tensors.size(); ++i) {
      ASSERT_TRUE(tensors[i].work->done());
      ASSERT_TRUE(tensors[i].work->status().ok()) << tensors[i].work->status().message();
      const float expected[] = {2.25f, 4.5f, 18};  // ((1 + 2) / 2 + 3) / 2
      EXPECT_EQ(tensors[i].data[0], expected[i % 3]);
    }
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
    SteppedJob job(2);
    Tensor tensors[2] = {{std::vector<float>(64, 1), nullptr},
                         {std::vector<float>(64, 1), nullptr}};
    for (int r = 0; r < 2; ++r) {
      const KeyName name{kGlobalSet, OpKind::kAllreduce, "a tensor with a name that needs memory"};
      ASSERT_TRUE(StartOn(job.engine(r), name, Floats(64), tensors[r]).ok());
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
    for (const Tensor& tensor : tensors) {
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

TEST(Engine, RunsAnAdasumWithoutARankThatJoined) {
  SteppedJob job(3);
  ASSERT_TRUE(job.engine(1).Join().ok());
  std::vector<Tensor> tensors(3);
  for (const int r : {0, 2}) {
    Tensor& tensor = tensors[static_cast<size_t>(r)];
    tensor.data = {static_cast<float>(r + 2), 0, 0};
    ASSERT_TRUE(
        StartOn(job.engine(r), {0, OpKind::kAllreduce, "t"}, Floats(3, ReduceOp::kAdasum), tensor)
            .ok());
  }
  job.SettleHeld();
  for (const int r : {0, 2}) {
    const Tensor& tensor = tensors[static_cast<size_t>(r)];
    ASSERT_TRUE(tensor.work->done() && tensor.work->status().ok());
    EXPECT_EQ(tensor.data, (std::vector<float>{3, 0, 0}));
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
  SteppedJob job(3);
  for (int round = 0; round < 5; ++round) {  // unknown, seen once, known by id, ...
    std::vector<Tensor> tensors(3);
    for (int r = 0; r < 3; ++r) {
      Tensor& tensor = tensors[static_cast<size_t>(r)];
      tensor.data.assign(8, 1.0f);
      const bool odd = round % 2 == 1 && r == 2;
      ASSERT_TRUE(StartOn(job.engine(r), {0, OpKind::kAllreduce, "layer1.weight"},
                          Floats(odd ? 7 : 8), tensor)
                      .ok());
    }
    job.SettleHeld();
    for (const Tensor& tensor : tensors) {
      ASSERT_TRUE(tensor.work->done());
      if (round % 2 == 0) {
        EXPECT_TRUE(tensor.work->status().ok()) << tensor.work->status().message();
        EXPECT_EQ(tensor.data[7], 3.0f);
        continue;
      }
      EXPECT_EQ(tensor.work->status().code(), Code::kMismatch);
      EXPECT_THAT(tensor.work->status().message(), HasSubstr("layer1.weight"));
      EXPECT_THAT(tensor.work->status().message(), HasSubstr("rank 2 sent float32 [7]"));
      EXPECT_THAT(tensor.work->status().message(), HasSubstr("float32 [8]"));
    }
  }
}

TEST(Engine, HoldsSmallSubmissionsForTheLingerTimeAndDecidesThemTogether) {
  SteppedJob job(2);
  std::vector<std::vector<Tensor>> tensors(2, std::vector<Tensor>(50));
  for (int r = 0; r < 2; ++r) {
    for (size_t i = 0; i < 50; ++i) {
      Tensor& tensor = tensors[static_cast<size_t>(r)][i];
      tensor.data.assign(4, 1.0f);
      ASSERT_TRUE(StartOn(job.engine(r), {0, OpKind::kAllreduce, "t" + std::to_string(i)},
                          Floats(4), tensor)
                      .ok());
      job.Settle();
    }
  }
  EXPECT_FALSE(tensors[0][0].work->done());
  job.SettleHeld();
  EXPECT_TRUE(tensors[0][49].work->done());
  EXPECT_EQ(job.counters(0).Get(Counter::kBatches), 1);
}

TEST(Engine, RefusesASecondStartOfAnOperationInFlight) {
  SteppedJob job(2);
  Tensor tensor{std::vector<float>(4, 1.0f), nullptr};
  Tensor again{std::vector<float>(4, 1.0f), nullptr};
  const KeyName name{0, OpKind::kAllreduce, "t"};
  ASSERT_TRUE(StartOn(job.engine(0), name, Floats(4), tensor).ok());
  const Status same = StartOn(job.engine(0), name, Floats(4), again);
  EXPECT_EQ(same.code(), Code::kInvalidArgument);
  EXPECT_THAT(same.message(), HasSubstr("already in flight"));
  const Status other = StartOn(job.engine(0), name, Floats(5), again);
  EXPECT_EQ(other.code(), Code::kInvalidArgument);
}

TEST(Engine, FinishesABarrierWithoutABatch) {
  SteppedJob job(3);
  std::vector<Tensor> tensors(3);
  const KeyName name{0, OpKind::kBarrier, "b"};
  ASSERT_TRUE(StartOn(job.engine(0), name, Signature{}, tensors[0]).ok());
  ASSERT_TRUE(StartOn(job.engine(1), name, Signature{}, tensors[1]).ok());
  job.SettleHeld();
  EXPECT_FALSE(tensors[0].work->done());
  ASSERT_TRUE(StartOn(job.engine(2), name, Signature{}, tensors[2]).ok());
  job.SettleHeld();
  for (const Tensor& tensor : tensors)
    EXPECT_TRUE(tensor.work->done() && tensor.work->status().ok());
  EXPECT_EQ(job.counters(0).Get(Counter::kBatches), 0);
}

TEST(Engine, FinishesAnEmptyTensor) {
  SteppedJob job(2);
  std::vector<Tensor> tensors(2);
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(StartOn(job.engine(r), {0, OpKind::kAllreduce, "e"}, Floats(0),
                        tensors[static_cast<size_t>(r)])
                    .ok());
  }
  job.SettleHeld();
  EXPECT_TRUE(tensors[0].work->done() && tensors[1].work->done());
}

TEST(Engine, LetsAJoinedRankServeTheOthers) {
  SteppedJob job(3);
  Result<std::shared_ptr<Work>> joined = job.engine(2).Join();
  ASSERT_TRUE(joined.ok());
  std::vector<Tensor> tensors(2);
  for (int r = 0; r < 2; ++r) {
    tensors[static_cast<size_t>(r)].data.assign(10, 3.0f);
    ASSERT_TRUE(StartOn(job.engine(r), {0, OpKind::kAllreduce, "t"}, Floats(10, ReduceOp::kAverage),
                        tensors[static_cast<size_t>(r)])
                    .ok());
  }
  job.SettleHeld();
  for (const Tensor& tensor : tensors) EXPECT_EQ(tensor.data, std::vector<float>(10, 2.0f));
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
  SteppedJob job(2);
  Tensor tensor{std::vector<float>(4, 1.0f), nullptr};
  ASSERT_TRUE(StartOn(job.engine(0), {0, OpKind::kAllreduce, "t"}, Floats(4), tensor).ok());
  std::shared_ptr<Work> left = job.engine(1).Leave();
  job.SettleHeld();
  ASSERT_TRUE(tensor.work->done());
  EXPECT_EQ(tensor.work->status().code(), Code::kAborted);
  EXPECT_THAT(tensor.work->status().message(), HasSubstr("rank 1"));
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
  SteppedJob job(3);
  std::vector<std::shared_ptr<Work>> adding;
  for (int r = 0; r < 3; ++r) {
    Result<std::shared_ptr<Work>> added = job.engine(r).AddSet({0, 2});
    ASSERT_TRUE(added.ok());
    adding.push_back(added.value());
  }
  job.SettleHeld();
  for (const std::shared_ptr<Work>& work : adding) ASSERT_TRUE(work->done() && work->status().ok());
  const uint32_t uid = job.engine(0).operations().SetOf({0, 2}).value().uid;
  std::vector<Tensor> tensors(2);
  for (int i = 0; i < 2; ++i) {
    tensors[static_cast<size_t>(i)].data.assign(4, 1.0f);
    ASSERT_TRUE(StartOn(job.engine(2 * i), {uid, OpKind::kAllreduce, "t"}, Floats(4),
                        tensors[static_cast<size_t>(i)])
                    .ok());
  }
  job.SettleHeld();
  for (const Tensor& tensor : tensors) EXPECT_EQ(tensor.data[0], 2.0f);
  Tensor outsider{std::vector<float>(4, 1.0f), nullptr};
  const Status refused =
      StartOn(job.engine(1), {uid, OpKind::kAllreduce, "t"}, Floats(4), outsider);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("no member"));
}

TEST(Engine, ReportsAStallOnAllRanksNamingTheMissing) {
  EngineOptions options = SteppedJob::Stepped();
  options.negotiation.stall_ns = 10 * kNsPerSecond;
  SteppedJob job(3, options);
  Tensor tensor{std::vector<float>(4, 1.0f), nullptr};
  ASSERT_TRUE(
      StartOn(job.engine(1), {0, OpKind::kAllreduce, "late.weight"}, Floats(4), tensor).ok());
  job.SettleHeld();
  for (int i = 0; i < 20; ++i) {
    job.clock().Advance(kNsPerSecond);
    job.Settle();
  }
  for (int r = 0; r < 3; ++r) {
    ASSERT_EQ(job.log(r).size(), 1u) << "rank " << r;
    EXPECT_THAT(job.log(r).front(), HasSubstr("allreduce \"late.weight\": rank 1 waits"));
    EXPECT_THAT(job.log(r).front(), HasSubstr("missing: rank 0"));
    EXPECT_THAT(job.log(r).front(), HasSubstr("rank 2"));
  }
  EXPECT_FALSE(tensor.work->done());
}

TEST(Engine, EndsOnAllRanksByTheErrorOfAStallShutdown) {
  EngineOptions options = SteppedJob::Stepped();
  options.negotiation.stall_ns = kNsPerSecond;
  options.negotiation.stall_shutdown_ns = 5 * kNsPerSecond;
  SteppedJob job(3, options);
  Tensor tensor{std::vector<float>(4, 1.0f), nullptr};
  ASSERT_TRUE(StartOn(job.engine(1), {0, OpKind::kAllreduce, "w"}, Floats(4), tensor).ok());
  job.SettleHeld();
  for (int i = 0; i < 4; ++i) {
    job.clock().Advance(kNsPerSecond);
    job.Settle();
  }
  EXPECT_FALSE(tensor.work->done());
  for (int i = 0; i < 4; ++i) {
    job.clock().Advance(kNsPerSecond);
    job.Settle();
  }
  ASSERT_TRUE(tensor.work->done());
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(job.engine(r).lifecycle().final_error().code(), Code::kTimeout) << "rank " << r;
    EXPECT_THAT(job.engine(r).lifecycle().final_error().message(),
                HasSubstr("allreduce \"w\": rank 1 waits"));
  }
}

}  // namespace
}  // namespace farandole
