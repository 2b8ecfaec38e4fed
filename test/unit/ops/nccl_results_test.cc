// Batches of several ranks over the fake libnccl: results, and what goes wrong between ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "core/half.h"
#include "ops/cpu/batch.h"
#include "ops/nccl/plan.h"
#include "test/conformance/data_plane_reference.h"
#include "test/fakes/nccl/open.h"
#include "test/unit/ops/nccl_ranks.h"

namespace farandole {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr DType kEveryDType[] = {DType::kBool,    DType::kUint8,  DType::kInt8,    DType::kInt16,
                                 DType::kInt32,   DType::kInt64,  DType::kFloat16, DType::kBfloat16,
                                 DType::kFloat32, DType::kFloat64};

/// One rank's memory and batch for a case. Tensors lie end to end, aligned to their elements.
class CaseOnRank {
 public:
  CaseOnRank(const PlaneCase& c, int member) : case_(c), ranks_(static_cast<size_t>(c.members)) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
    const size_t element = static_cast<size_t>(SizeOf(c.dtype));
    in_.resize(element * static_cast<size_t>(c.Count()) + 1);  // never empty
    out_.resize(in_.size());
    for (int64_t i = 0; i < c.Count(); ++i) {
      const uint64_t bits = InputBits(c, member, i);
      std::memcpy(in_.data() + static_cast<size_t>(i) * element, &bits, element);
    }
    const bool absent = c.IsAbsent(member);
    takes_result_ = !absent || !c.absent_drop;
    size_t at = 0;
    for (int64_t count : c.counts) {
      std::byte* const in = in_.data() + at;
      std::byte* const out = c.in_place ? in : out_.data() + at;
      segments_.push_back({absent ? nullptr : in, takes_result_ ? out : nullptr, count});
      at += element * static_cast<size_t>(count);
    }
    batch_.ranks = ranks_;
    batch_.my_index = member;
    batch_.kind = c.kind;
    batch_.dtype = c.dtype;
    batch_.wire = WireDType(c.dtype, c.wire);
    batch_.op = c.op;
    batch_.prescale = c.prescale;
    batch_.postscale = c.postscale;
    batch_.root_index = c.root;
    batch_.absent = case_.absent;
    batch_.segments = segments_;
    batch_.count = c.Count();
    batch_.device = DeviceKind::kCuda;
  }
  CaseOnRank(const CaseOnRank&) = delete;
  CaseOnRank& operator=(const CaseOnRank&) = delete;

  const Batch& batch() const { return batch_; }
  bool takes_result() const { return takes_result_; }
  const std::byte* result() const { return case_.in_place ? in_.data() : out_.data(); }

 private:
  const PlaneCase case_;
  std::vector<int> ranks_;
  std::vector<std::byte> in_, out_;
  std::vector<Segment> segments_;
  Batch batch_;
  bool takes_result_ = true;
};

double AsDouble(DType dtype, const std::byte* element) {
  const auto as = [&](auto value) {
    std::memcpy(&value, element, sizeof value);
    return value;
  };
  if (dtype == DType::kFloat16) return ToFloat(as(Float16{}));
  if (dtype == DType::kBfloat16) return ToFloat(as(Bfloat16{}));
  return dtype == DType::kFloat32 ? static_cast<double>(as(float{})) : as(double{});
}

double EpsilonOf(DType wire) {
  if (wire == DType::kFloat16) return std::ldexp(1.0, -10);
  if (wire == DType::kBfloat16) return std::ldexp(1.0, -7);
  return std::ldexp(1.0, wire == DType::kFloat32 ? -23 : -52);
}

/// NCCL adds in the wire type, in an order of its own: floats may differ by some roundings.
int64_t CountWrong(const PlaneCase& c, const std::byte* got, const std::vector<std::byte>& wanted) {
  int64_t first = 0;
  if (!IsFloating(c.dtype) || c.kind == OpKind::kBroadcast) {
    return CountDifferences(c.dtype, got, wanted.data(), c.Count(), &first);
  }
  const double most = 8.0 * c.members * std::abs(c.prescale * c.postscale);  // of a sum
  const double room = EpsilonOf(WireDType(c.dtype, c.wire)) * (c.members + 2);
  int64_t wrong = 0;
  for (int64_t i = 0; i < c.Count(); ++i) {
    const double is = AsDouble(c.dtype, got + i * SizeOf(c.dtype));
    const double should = AsDouble(c.dtype, wanted.data() + i * SizeOf(c.dtype));
    wrong += std::abs(is - should) <= room * std::max(most, std::abs(should)) ? 0 : 1;
  }
  return wrong;
}

class NcclResultsTest : public ::testing::Test {
 protected:
  static NcclLibrary Library(const char* file) {
    return *NcclLibrary::In(dlopen(file, RTLD_NOW | RTLD_LOCAL), file).value();
  }
  /// Kept by the process, as OfProcess does.
  static const NcclLibrary& Library() {
    static const NcclLibrary library = Library(FARANDOLE_FAKE_NCCL);
    return library;
  }
  static const FakeNcclControl& control() {
    static const FakeNccl fake(FARANDOLE_FAKE_NCCL);
    return fake.control();
  }
  void SetUp() override { control().reset(); }
  void TearDown() override {
    EXPECT_STREQ(control().take_misuses(), "");
    EXPECT_EQ(control().live_comms(), 0);
    EXPECT_EQ(control().registered_bytes(), 0);
    EXPECT_EQ(control().live_memory_bytes(), 0);
  }

  static void RunCase(NcclRanks& ranks, const PlaneCase& c) {
    SCOPED_TRACE(c.ToString());
    std::vector<std::unique_ptr<CaseOnRank>> parts;
    std::vector<Batch> batches;
    std::vector<int64_t> launches;
    for (int rank = 0; rank < c.members; ++rank) {
      parts.push_back(std::make_unique<CaseOnRank>(c, rank));
      batches.push_back(parts.back()->batch());
      ASSERT_TRUE(CheckBatch(batches.back()).ok()) << CheckBatch(batches.back()).message();
      launches.push_back(ranks.counters(rank).Get(Counter::kDeviceLaunches));
    }
    const Status status = ranks.Run(batches);
    ASSERT_TRUE(status.ok()) << status.message();
    const std::vector<std::byte> wanted = ReferenceResult(c);
    for (int rank = 0; rank < c.members; ++rank) {
      const size_t i = static_cast<size_t>(rank);
      EXPECT_LE(ranks.counters(rank).Get(Counter::kDeviceLaunches) - launches[i], 2);
      if (!parts[i]->takes_result()) continue;
      ASSERT_EQ(CountWrong(c, parts[i]->result(), wanted), 0) << "on rank " << rank;
    }
  }
};

/// A case out of all that there can be.
PlaneCase Draw(int members, std::mt19937& random) {
  const auto one_of = [&](const auto& choices) { return choices[random() % std::size(choices)]; };
  const ReduceOp ops[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                          ReduceOp::kProduct};
  const std::vector<int64_t> counts[] = {
      {1}, {33}, {0, 7}, {17, 3}, {5, 4096, 64, 1}, std::vector<int64_t>(40, 3)};
  const double factors[] = {1.0, 1.0, 1.0, 0.5, 3.0};
  PlaneCase c;
  c.members = members;
  c.dtype = one_of(kEveryDType);
  c.wire = static_cast<WireFormat>(random() % 3);
  do {
    c.op = one_of(ops);
  } while (!HasOp(c.dtype, c.op));
  c.counts = one_of(counts);
  c.in_place = random() % 2 == 0;
  if (c.dtype != DType::kBool) {
    const bool may_overflow = c.op == ReduceOp::kProduct && IsFloating(c.dtype);
    if (!may_overflow) c.prescale = one_of(factors);
    c.postscale = one_of(factors);
  }
  if (random() % 6 == 0) c.kind = OpKind::kBroadcast;
  c.root = static_cast<int>(random() % static_cast<unsigned>(members));
  if (random() % 2 == 0) c.absent = {(c.root + 1) % members};
  c.absent_drop = random() % 2 == 0;
  // NCCL has no type in which a sum of any int64 could be divided.
  const bool wraps = c.dtype == DType::kInt64 && c.op == ReduceOp::kAverage;
  c.fill = IsFloating(c.dtype) || wraps ? Fill::kSmall : Fill::kRandom;
  c.seed = random();
  return c;
}

TEST_F(NcclResultsTest, AreThoseOfTheContractWhateverIsDrawn) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int size : {2, 3, 4}) {
    NcclRanks ranks(Library(), size);
    ASSERT_TRUE(ranks.Connect().ok());
    for (int i = 0; i < 150 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(size, random));
  }
}

TEST_F(NcclResultsTest, AreTheSameWhenEveryCallIsInProgressForAWhile) {
  std::mt19937 random(1);
  control().set("INIT_POLLS", "3");
  control().set("BUSY_POLLS", "2");
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  for (int i = 0; i < 40 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(2, random));
}

TEST_F(NcclResultsTest, AreTheSameWithALibraryThatRegistersNothing) {
  const NcclLibrary old = Library(FARANDOLE_FAKE_NCCL_OLD);
  std::mt19937 random(2);
  NcclRanks ranks(old, 3);
  ASSERT_TRUE(ranks.Connect().ok());
  for (int i = 0; i < 40 && !HasFatalFailure(); ++i) RunCase(ranks, Draw(3, random));
  EXPECT_EQ(ranks.counters(0).Get(Counter::kRegisteredBytes), 0);
}

/// Four floats per rank, launched by a test itself.
class NcclRanksTest : public NcclResultsTest {
 protected:
  NcclRanksTest() {
    case_.members = 2;
    case_.counts = {4, 4};
    for (int rank : {0, 1}) parts_.push_back(std::make_unique<CaseOnRank>(case_, rank));
    for (const auto& part : parts_) batches_.push_back(part->batch());
  }
  /// One rank alone.
  static void Launch(NcclRanks& ranks, int rank, const Batch& batch) {
    ranks.Use(rank);
    ASSERT_TRUE(ranks.way(rank).Begin(batch).ok());
    Progress progress;
    do {
      progress = ranks.way(rank).Step();
    } while (progress.state == Progress::State::kMoved ||
             progress.state == Progress::State::kWaiting);
    ASSERT_EQ(progress.state, Progress::State::kLaunched);
  }

  PlaneCase case_;
  std::vector<std::unique_ptr<CaseOnRank>> parts_;
  std::vector<Batch> batches_;
};

TEST_F(NcclRanksTest, ALaunchWaitsForNoPeer) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  Launch(ranks, 0, batches_[0]);
  EXPECT_FALSE(ranks.way(0).end()->Passed().value());
  Launch(ranks, 1, batches_[1]);
  EXPECT_TRUE(ranks.Finish().ok());
  EXPECT_EQ(CountWrong(case_, parts_[0]->result(), ReferenceResult(case_)), 0);
}

TEST_F(NcclRanksTest, AbandonFreesAStreamThatWaitsForAPeer) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  Launch(ranks, 0, batches_[0]);
  ranks.Use(0);
  ranks.way(0).Abandon();
  ranks.stream(0).Synchronize();
  EXPECT_TRUE(ranks.way(0).end()->Passed().value());
}

TEST_F(NcclRanksTest, AnErrorAfterTheLaunchIsFoundWithItsText) {
  control().set("ERROR_AT", "1");
  control().set("ERROR_TEXT", "the peer hung up");
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  ASSERT_TRUE(ranks.Launch(batches_).ok());
  const Status status = ranks.Finish();
  ranks.way(1).Abandon();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("the peer hung up"), HasSubstr("NCCL 2.32.3 ("),
                                      HasSubstr("libnccl.so.2"), HasSubstr("the map")));
}

TEST_F(NcclRanksTest, ACommunicatorThatNeverComesUpIsAborted) {
  control().set("INIT_HANGS", "1");
  NcclRanks ranks(Library(), 2);
  ranks.Use(0);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(ranks.way(0).Connect().state, Progress::State::kWaiting);
  }
  ranks.End(0);
  EXPECT_EQ(control().times("ncclCommAbort"), 1);
}

TEST_F(NcclRanksTest, AFailedStartNamesItsCall) {
  control().set("INIT_ERROR", "5");
  NcclRanks ranks(Library(), 2);
  EXPECT_THAT(ranks.Connect().message(), HasSubstr("ncclCommInitRankConfig: "));
}

TEST_F(NcclRanksTest, TheBufferIsRegisteredOnceAndCounted) {
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(ranks.Run(batches_).ok());
  EXPECT_EQ(control().times("ncclCommRegister"), 2);  // of two ranks
  const int64_t bytes = ranks.counters(0).Get(Counter::kRegisteredBytes);
  EXPECT_GT(bytes, 0);
  EXPECT_EQ(control().registered_bytes(), 2 * bytes);
}

TEST_F(NcclRanksTest, OneLargeTensorUsesNoBufferAndNoKernel) {
  case_.counts = {100'000};
  NcclRanks ranks(Library(), 2);
  ASSERT_TRUE(ranks.Connect().ok());
  RunCase(ranks, case_);
  EXPECT_EQ(control().times("ncclMemAlloc"), 0);
  EXPECT_EQ(ranks.counters(0).Get(Counter::kDeviceLaunches), 0);
}

}  // namespace
}  // namespace farandole
