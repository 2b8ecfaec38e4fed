#include "ops/cpu/batch.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "test/unit/ops/batch_in_text.h"

namespace farandole {
namespace {

/// Outcomes and batches; "a|b" stands for a batch with each.
constexpr char kBatches[] = R"(
ok      allreduce
refused allreduce dtype=bool op=sum|average
ok      allreduce dtype=bool|int32 op=bit_and|bit_or|bit_xor
refused allreduce dtype=bool|int32 op=bit_and|bit_or|bit_xor pre=2
refused allreduce dtype=float32 op=bit_and|bit_or|bit_xor
refused allreduce pre=nan
refused allreduce post=inf
ok      allreduce dtype=bool op=max
refused allreduce dtype=bool op=max post=2
ok      allreduce wire=bfloat16
refused allreduce wire=int32
refused allreduce absent=0,1
ok      broadcast root=1
refused broadcast root=1 absent=1
refused broadcast root=2
ok      broadcast dtype=bool pre=3
refused allreduce noin
ok      allreduce absent
refused allreduce count=6
absent  barrier
# Collectives of variable size.
ok      allgather|reducescatter parts=0,5,1 me=1
ok      alltoall sends=1,2,0 receives=4,2,3 me=1
refused allgather|reducescatter parts=0,5,1 me=1 segments=0|2
refused alltoall sends=1,2,0 receives=4,2,3 me=1 segments=0|2
refused allgather|reducescatter ranks=3 parts=1,5 me=1
refused allgather|reducescatter parts=-1,6,1|1,5,1 me=1 counts=6
ok      allgather|reducescatter parts=6,0,0 me=1
refused alltoall ranks=3 sends=1,2 receives=4,2,3 me=1
refused alltoall ranks=3 sends=1,2,0 receives=4,2 me=1
# More than the batch's count, less than nothing, not what this rank sends itself; and valid ones.
refused alltoall sends=0,2,5|0,2,-1|0,1,4 receives=4,2,3 me=1 counts=4
refused alltoall sends=1,2,0 receives=0,2,5|0,2,-1|0,1,4 me=1 counts=4
ok      alltoall sends=0,2,4 receives=4,2,3 me=1 counts=4
ok      alltoall sends=1,2,0 receives=0,2,4 me=1 counts=4
# Nothing comes from absent members.
ok      allgather parts=0,5,1 me=1 absent=0
refused allgather parts=0,5,1 me=1 absent=2
ok      reducescatter parts=0,5,1 me=1 absent=2
refused alltoall sends=1,2,0 receives=4,2,3 me=1 absent=0
# A reduction is that of a reducescatter alone.
refused reducescatter parts=0,5,1 me=1 dtype=bool post=2
ok      allgather parts=0,5,1 me=1 dtype=bool post=2
ok      alltoall sends=1,2,0 receives=4,2,3 me=1 dtype=bool post=2
# An input is needed where this rank has elements.
refused allgather|reducescatter parts=0,5,1 me=1 noin
refused alltoall sends=1,2,0 receives=4,2,3 me=1 noin
ok      allgather parts=5,0,1 me=1 noin
ok      alltoall sends=0,0,0 receives=4,0,3 me=1 noin
)";

void ExpectCode(Code code, const std::string& text) {
  const size_t bar = text.find('|');
  if (bar == std::string::npos) {
    EXPECT_EQ(CheckBatch(BatchInText(text).batch).code(), code) << text;
    return;
  }
  const size_t begin = text.find_last_of(" =", bar) + 1;  // nothing of the kind for the first word
  const size_t end = std::min(text.find(' ', bar), text.size());
  std::istringstream choices(text.substr(begin, end - begin));
  for (std::string one; std::getline(choices, one, '|');) {
    ExpectCode(code, text.substr(0, begin) + one + text.substr(end));
  }
}

TEST(CheckBatch, AnswersAsTheTableSays) {
  std::istringstream lines(kBatches);
  for (std::string outcome, text; lines >> outcome && std::getline(lines >> std::ws, text);) {
    if (outcome.starts_with("#")) continue;
    ExpectCode(outcome == "ok"        ? Code::kOk
               : outcome == "refused" ? Code::kInvalidArgument
                                      : Code::kUnimplemented,
               text);
  }
}

TEST(CheckBatch, RefusesUnknownEnumerators) {
  for (const int number : {kReducibleDTypeCount, kDTypeCount, 255}) {
    BatchInText given("allreduce");
    given.batch.dtype = static_cast<DType>(number);
    EXPECT_EQ(CheckBatch(given.batch).code(), Code::kInvalidArgument) << number;
  }
  for (const ReduceOp op : {static_cast<ReduceOp>(10), static_cast<ReduceOp>(255),
                            ReduceOp::kPreMulSum, ReduceOp::kAdasum}) {  // arrive as other ones
    BatchInText given("allreduce");
    given.batch.op = op;
    EXPECT_EQ(CheckBatch(given.batch).code(), Code::kInvalidArgument) << static_cast<int>(op);
  }
}

TEST(Batch, KnowsTheSizesOfInputAndOutput) {
  const auto sizes = [](const char* text) {
    const BatchInText given(text);
    return std::pair(InputCount(given.batch, given.segments[0]),
                     OutputCount(given.batch, given.segments[0]));
  };
  using Sizes = std::pair<int64_t, int64_t>;
  EXPECT_EQ(sizes("allgather parts=0,5,1 me=1"), Sizes(5, 6));
  EXPECT_EQ(sizes("reducescatter parts=0,5,1 me=1"), Sizes(6, 5));
  EXPECT_EQ(sizes("alltoall sends=1,2,0 receives=4,2,3 me=1"), Sizes(3, 9));
  EXPECT_EQ(sizes("allreduce counts=6"), Sizes(6, 6));
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
  const BatchInText alone("allreduce ranks=1 inplace=0");
  SoloRun run(alone.batch);
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
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
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
