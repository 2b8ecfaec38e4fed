#include "ops/cpu/batch.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

namespace farandole {
namespace {

/// A valid float32 sum of two elements over three ranks, which each test makes invalid.
struct Valid {
  std::vector<int> ranks = {0, 2, 5};
  std::vector<int> absent;
  std::vector<float> data = {1, 2};
  Segment segment{data.data(), data.data(), 2};
  Batch batch;
  Valid() {
    batch.ranks = ranks;
    batch.my_index = 1;
    batch.segments = {&segment, 1};
    batch.count = 2;
  }
  Code Check() {
    batch.absent = absent;
    return CheckBatch(batch).code();
  }
};

TEST(CheckBatch, AcceptsASum) { EXPECT_EQ(Valid().Check(), Code::kOk); }

TEST(CheckBatch, RefusesSumAndAverageOfBool) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    Valid valid;
    valid.batch.dtype = valid.batch.wire = DType::kBool;
    valid.batch.op = op;
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
  }
}

TEST(CheckBatch, TakesBitwiseOpsOfIntegersAndBoolWithoutFactors) {
  for (const ReduceOp op : {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
    Valid valid;
    valid.batch.op = op;
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument);  // of float32
    for (const DType dtype : {DType::kBool, DType::kInt32}) {
      valid.batch.dtype = valid.batch.wire = dtype;
      valid.batch.prescale = 1.0;
      EXPECT_EQ(valid.Check(), Code::kOk);
      valid.batch.prescale = 2.0;
      EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
    }
  }
}

TEST(CheckBatch, RefusesFactorsThatAreNotFinite) {
  Valid valid;
  valid.batch.prescale = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
  valid.batch.prescale = 1.0;
  valid.batch.postscale = std::numeric_limits<double>::infinity();
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
}

TEST(CheckBatch, RefusesFactorsForBool) {
  Valid valid;
  valid.batch.dtype = valid.batch.wire = DType::kBool;
  valid.batch.op = ReduceOp::kMax;
  EXPECT_EQ(valid.Check(), Code::kOk);
  valid.batch.postscale = 2.0;
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
}

TEST(CheckBatch, RefusesAWireTypeTheTensorCannotTravelAs) {
  Valid valid;
  valid.batch.wire = DType::kBfloat16;
  EXPECT_EQ(valid.Check(), Code::kOk);
  valid.batch.wire = DType::kInt32;
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
}

TEST(CheckBatch, RefusesUnknownEnumerators) {
  Valid dtype;
  for (const int number : {kReducibleDTypeCount, kDTypeCount, 255}) {
    dtype.batch.dtype = static_cast<DType>(number);
    EXPECT_EQ(dtype.Check(), Code::kInvalidArgument);
  }
  Valid op;
  for (const int number : {10, 255}) {
    op.batch.op = static_cast<ReduceOp>(number);
    EXPECT_EQ(op.Check(), Code::kInvalidArgument);
  }
  for (const ReduceOp other : {ReduceOp::kPreMulSum, ReduceOp::kAdasum}) {  // arrive as other ones
    op.batch.op = other;
    EXPECT_EQ(op.Check(), Code::kInvalidArgument);
  }
}

TEST(CheckBatch, RefusesWhenNobodyContributes) {
  Valid valid;
  valid.absent = {0, 1, 2};
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
}

TEST(CheckBatch, RefusesAnAbsentOrUnknownRoot) {
  Valid valid;
  valid.batch.kind = OpKind::kBroadcast;
  valid.batch.root_index = 2;
  EXPECT_EQ(valid.Check(), Code::kOk);
  valid.absent = {2};
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
  valid.absent = {};
  valid.batch.root_index = 3;
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
}

TEST(CheckBatch, RefusesAContributorWithoutInput) {
  Valid valid;
  valid.segment.in = nullptr;
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
  valid.absent = {1};
  EXPECT_EQ(valid.Check(), Code::kOk);
}

TEST(CheckBatch, RefusesSegmentsThatDoNotAddUp) {
  Valid valid;
  valid.batch.count = 3;
  EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
}

TEST(CheckBatch, SaysThatOtherKindsAreNotOffered) {
  Valid valid;
  valid.batch.kind = OpKind::kBarrier;
  EXPECT_EQ(valid.Check(), Code::kUnimplemented);
}

/// A valid batch of three ranks, of a variable-size collective; this rank is the second one.
struct VariableSize : Valid {
  explicit VariableSize(OpKind kind) {
    batch.kind = kind;
    segment.count = batch.count = kind == OpKind::kAlltoall ? 4 : 6;
    batch.splits = splits;
    batch.sends = sends;
    batch.receives = receives;
  }
  std::vector<int64_t> splits = {0, 5, 1};
  std::vector<int64_t> sends = {1, 2, 0};
  std::vector<int64_t> receives = {4, 2, 3};
};

constexpr OpKind kVariableSize[] = {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall};

TEST(CheckBatch, AcceptsVariableSizeCollectives) {
  for (const OpKind kind : kVariableSize)
    EXPECT_EQ(VariableSize(kind).Check(), Code::kOk) << Name(kind);
}

TEST(CheckBatch, RefusesToFuseVariableSizeCollectives) {
  for (const OpKind kind : kVariableSize) {
    VariableSize valid(kind);
    const std::vector<Segment> two = {valid.segment, {nullptr, nullptr, 0}};
    valid.batch.segments = two;
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument) << Name(kind);
    valid.batch.segments = {};
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument) << Name(kind);
  }
}

TEST(CheckBatch, RefusesSplitsThatDoNotFitTheMembers) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter}) {
    VariableSize valid(kind);
    valid.batch.splits = std::span(valid.splits).first(2);
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument) << Name(kind);
    valid.batch.splits = valid.splits;
    valid.splits = {-1, 6, 1};
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument) << Name(kind);
    valid.splits = {1, 5, 1};
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument) << Name(kind);
    valid.splits = {6, 0, 0};
    EXPECT_EQ(valid.Check(), Code::kOk) << Name(kind);
  }
}

TEST(CheckBatch, RefusesSendsAndReceivesThatDoNotFitTheMembersOrTheCount) {
  for (const bool sends : {true, false}) {
    VariableSize valid(OpKind::kAlltoall);
    std::vector<int64_t>& splits = sends ? valid.sends : valid.receives;
    (sends ? valid.batch.sends : valid.batch.receives) = std::span(splits).first(2);
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
    (sends ? valid.batch.sends : valid.batch.receives) = splits;
    splits = {0, 2, 5};
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument) << "more than the batch's count";
    splits = {0, 2, -1};
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument);
    splits = {0, 1, 4};
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument) << "not what this rank sends itself";
    splits = {0, 2, 4};
    EXPECT_EQ(valid.Check(), Code::kOk);
  }
}

TEST(CheckBatch, ExpectsNothingFromAbsentMembers) {
  VariableSize gather(OpKind::kAllgather);
  gather.absent = {0};
  EXPECT_EQ(gather.Check(), Code::kOk);
  gather.absent = {2};
  EXPECT_EQ(gather.Check(), Code::kInvalidArgument);
  VariableSize scatter(OpKind::kReducescatter);
  scatter.absent = {2};
  EXPECT_EQ(scatter.Check(), Code::kOk);
  VariableSize all(OpKind::kAlltoall);
  all.absent = {0};
  EXPECT_EQ(all.Check(), Code::kInvalidArgument);
}

TEST(CheckBatch, ChecksTheReductionOfAReducescatterOnly) {
  for (const OpKind kind : kVariableSize) {
    VariableSize valid(kind);
    valid.batch.dtype = valid.batch.wire = DType::kBool;
    valid.batch.postscale = 2.0;
    const Code expected = kind == OpKind::kReducescatter ? Code::kInvalidArgument : Code::kOk;
    EXPECT_EQ(valid.Check(), expected) << Name(kind);
  }
}

TEST(CheckBatch, AsksForAnInputWhereThisRankHasElements) {
  for (const OpKind kind : kVariableSize) {
    VariableSize valid(kind);
    valid.segment.in = nullptr;
    EXPECT_EQ(valid.Check(), Code::kInvalidArgument) << Name(kind);
  }
  VariableSize gather(OpKind::kAllgather);
  gather.segment.in = nullptr;
  gather.splits = {5, 0, 1};
  EXPECT_EQ(gather.Check(), Code::kOk);
  VariableSize all(OpKind::kAlltoall);
  all.segment.in = nullptr;
  all.sends = {0, 0, 0};
  all.receives = {4, 0, 3};
  EXPECT_EQ(all.Check(), Code::kOk);
}

TEST(Batch, KnowsTheSizesOfInputAndOutput) {
  const auto sizes = [](OpKind kind) {
    const VariableSize valid(kind);
    return std::pair(InputCount(valid.batch, valid.segment),
                     OutputCount(valid.batch, valid.segment));
  };
  EXPECT_EQ(sizes(OpKind::kAllgather), (std::pair<int64_t, int64_t>(5, 6)));
  EXPECT_EQ(sizes(OpKind::kReducescatter), (std::pair<int64_t, int64_t>(6, 5)));
  EXPECT_EQ(sizes(OpKind::kAlltoall), (std::pair<int64_t, int64_t>(3, 9)));
  EXPECT_EQ(sizes(OpKind::kAllreduce), (std::pair<int64_t, int64_t>(6, 6)));
}

TEST(Batch, TravelsRoundedOnlyWhereItIsReduced) {
  Batch batch;
  batch.wire = DType::kFloat16;
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kReducescatter}) {
    batch.kind = kind;
    EXPECT_EQ(WireOf(batch), DType::kFloat16) << Name(kind);
  }
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kAllgather, OpKind::kAlltoall}) {
    batch.kind = kind;
    EXPECT_EQ(WireOf(batch), DType::kFloat32) << Name(kind);
  }
}

TEST(CheckBatch, IgnoresOpAndFactorsOfABroadcast) {
  Valid valid;
  valid.batch.kind = OpKind::kBroadcast;
  valid.batch.dtype = valid.batch.wire = DType::kBool;
  valid.batch.prescale = 3.0;
  EXPECT_EQ(valid.Check(), Code::kOk);
}

TEST(SegmentCursor, CutsRunsAtSegmentBordersAndAtTheLimit) {
  float a[3];
  float b[4];
  const std::vector<Segment> segments = {{a, nullptr, 3}, {nullptr, nullptr, 0}, {b, b, 4}};
  SegmentCursor cursor(segments, DType::kFloat32);
  std::vector<int64_t> counts;
  for (auto run = cursor.Next(2); run.count > 0; run = cursor.Next(2)) counts.push_back(run.count);
  EXPECT_EQ(counts, (std::vector<int64_t>{2, 1, 2, 2}));
}

TEST(SegmentCursor, SkipsIntoTheMiddleOfALaterSegment) {
  float a[3];
  float b[4];
  const std::vector<Segment> segments = {{a, a, 3}, {b, nullptr, 4}};
  SegmentCursor cursor(segments, DType::kFloat32);
  cursor.Skip(5);
  const auto run = cursor.Next(100);
  EXPECT_EQ(run.in, reinterpret_cast<const std::byte*>(b + 2));
  EXPECT_EQ(run.out, nullptr);
  EXPECT_EQ(run.count, 2);
}

TEST(SegmentCursor, CountsBeyondTwoToThe31) {
  constexpr int64_t kHuge = int64_t{5} << 31;
  auto* const never_read = reinterpret_cast<std::byte*>(uintptr_t{4096});
  const std::vector<Segment> segments = {{never_read, nullptr, kHuge}};
  SegmentCursor cursor(segments, DType::kInt64);
  cursor.Skip(kHuge - 3);
  const auto run = cursor.Next(100);
  EXPECT_EQ(run.count, 3);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(run.in), 4096 + static_cast<uintptr_t>(kHuge - 3) * 8);
}

/// Refuses all work.
class UntouchableKernels final : public CpuKernels {
 public:
  void Pack(void*, DType, const void*, DType, int64_t, double) const override { ADD_FAILURE(); }
  void Reduce(void*, std::span<const void* const>, int64_t, const ReduceSpec&) const override {
    ADD_FAILURE();
  }
  void Unpack(void*, DType, const void*, DType, int64_t) const override { ADD_FAILURE(); }
  void Scale(void*, const void*, DType, int64_t, double, double) const override { ADD_FAILURE(); }
  ScalarProducts MultiplyAndSum(const void*, const void*, DType, int64_t) const override {
    ADD_FAILURE();
    return {};
  }
  void Combine(void*, const void*, DType, int64_t, double, double) const override { ADD_FAILURE(); }
  int64_t FindNonFinite(const void*, DType, int64_t count) const override {
    ADD_FAILURE();
    return count;
  }
  void Quantize(void*, const float*, float*, int64_t, double) const override { ADD_FAILURE(); }
  void Dequantize(float*, const void*, int64_t, float, bool) const override { ADD_FAILURE(); }
  void Stream(void*, const void*, int64_t) const override { ADD_FAILURE(); }
  const char* name() const override { return "untouchable"; }
};

TEST(SoloRun, TouchesNothingInPlaceWithoutFactors) {
  Valid valid;
  valid.batch.ranks = std::span(valid.ranks).first(1);
  SoloRun run(valid.batch);
  EXPECT_TRUE(run.Step(UntouchableKernels()));
}

TEST(SoloRun, MovesAtMostAQuarterMebibytePerStep) {
  std::vector<float> in(200'000, 1.0f);
  std::vector<float> out(in.size(), 0.0f);
  const Segment segment{in.data(), out.data(), static_cast<int64_t>(in.size())};
  Batch batch;
  batch.segments = {&segment, 1};
  batch.count = segment.count;
  batch.prescale = 3.0;
  SoloRun run(batch);
  EXPECT_FALSE(run.Step(BestCpuKernels()));
  EXPECT_EQ(out[65'535], 3.0f);
  EXPECT_EQ(out[65'536], 0.0f);
  while (!run.Step(BestCpuKernels())) {
  }
  EXPECT_EQ(out, std::vector<float>(in.size(), 3.0f));
}

TEST(SoloRun, ScalesWhatIsReducedAndCopiesTheRest) {
  for (const OpKind kind : kVariableSize) {
    const std::vector<float> in = {1, 2};
    std::vector<float> out = {0, 0, 0};
    const std::vector<int64_t> two = {2};
    const Segment segment{in.data(), out.data(), 2};
    Batch batch;
    batch.kind = kind;
    batch.prescale = 3.0;
    batch.segments = {&segment, 1};
    batch.count = 2;
    batch.splits = batch.sends = batch.receives = two;
    SoloRun run(batch);
    EXPECT_TRUE(run.Step(BestCpuKernels()));
    const bool scaled = kind == OpKind::kReducescatter;
    EXPECT_EQ(out, (scaled ? std::vector<float>{3, 6, 0} : std::vector<float>{1, 2, 0}))
        << Name(kind);
  }
}

TEST(SoloRun, CopiesWhatIsSentWhenTheCountIsLarger) {
  const std::vector<float> in = {1, 2, 3};
  std::vector<float> out = {0, 0, 0};
  const std::vector<int64_t> two = {2};
  const Segment segment{in.data(), out.data(), 3};
  Batch batch;
  batch.kind = OpKind::kAlltoall;
  batch.segments = {&segment, 1};
  batch.count = 3;
  batch.sends = batch.receives = two;
  SoloRun run(batch);
  EXPECT_TRUE(run.Step(BestCpuKernels()));
  EXPECT_EQ(out, (std::vector<float>{1, 2, 0}));
}

TEST(SoloRun, DoesNotRoundToTheWireType) {
  float value = 1.0f + 0x1p-20f;
  float result = 0;
  const Segment segment{&value, &result, 1};
  Batch batch;
  batch.wire = DType::kBfloat16;
  batch.op = ReduceOp::kAverage;
  batch.segments = {&segment, 1};
  batch.count = 1;
  SoloRun run(batch);
  while (!run.Step(BestCpuKernels())) {
  }
  EXPECT_EQ(result, value);
}

}  // namespace
}  // namespace farandole
