// The cast kernel on a GPU against the same body on the host: what only the hardware can get wrong
// is its conversions, its alignments and its launches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/gpu/cuda/cast.h"
#include "test/gpu/gpu.h"
#include "test/support/cast_cases.h"

namespace farandole {
namespace {

Result<CastBytes> RunCastsOnGpu(const CastCase& wanted, const CastLayout& layout,
                                const CastBytes& in, const CastBytes& out) {
  Device& gpu = Gpu();
  const GpuBytes from(in);
  const GpuBytes to(out);
  GpuStream stream;
  int launches = 0;
  const Status status = gpu.Cast(layout.ItemsAt(wanted, from.data(), to.data()), wanted.spec,
                                 stream.get(), &launches);
  if (!status.ok()) return status;
  stream.Wait();
  return to.Read();
}

void ExpectAsOnHost(const CastCase& wanted, uint64_t seed = 1) {
  EXPECT_EQ(CompareCasts(wanted, RunCastsOnGpu, RunCastsOnHost, seed), "") << "seed " << seed;
}

TEST(CastOnGpu, CastsAndScalesEveryPairOfTypesAsOnTheHost) {
  for (const CastSpec& spec : AllCastSpecs()) ExpectAsOnHost({spec, ItemsOfEverySize()});
}

TEST(CastOnGpu, WorksFromEveryAlignmentToEveryOther) {
  for (const CastSpec& spec : CastSpecsByShape()) {
    CastCase wanted{spec, {}};
    for (int in_shift = 0; in_shift < 16; ++in_shift) {
      for (int out_shift = 0; out_shift < 16; ++out_shift) {
        for (const int64_t count : {1, 5, 37, 1201}) {
          wanted.items.push_back({count, in_shift, out_shift});
        }
      }
    }
    ExpectAsOnHost(wanted);
  }
}

TEST(CastOnGpu, CutsLargeTensorsIntoSlicesWithoutASeam) {
  for (const CastSpec& spec : CastSpecsByShape()) {
    ExpectAsOnHost({spec, {{1200007}, {1}, {70001, 3, 3}}});
  }
  ExpectAsOnHost({{DType::kFloat32, DType::kFloat16}, {{90000001, 1, 2}}});
}

TEST(CastOnGpu, CastsMoreThanTwoToThe31Elements) {
  const int64_t count = (int64_t{1} << 31) + 4099;
  const GpuBytes in(count);
  const GpuBytes out(count);
  GpuStream stream;
  MustCuda(cudaMemset(in.data(), 7, static_cast<size_t>(count)), "cudaMemset");
  MustCuda(cudaMemset(out.data(), 0, static_cast<size_t>(count)), "cudaMemset");
  const CastItem item{in.data(), out.data(), count};
  int launches = 0;
  Must(Gpu().Cast({&item, 1}, {DType::kUint8, DType::kUint8, 3.0}, stream.get(), &launches));
  stream.Wait();
  const CastBytes bytes = out.Read();
  const auto wrong = std::find_if(bytes.begin(), bytes.end(),
                                  [](std::byte value) { return value != std::byte{21}; });
  EXPECT_EQ(wrong, bytes.end()) << "element " << wrong - bytes.begin();
}

TEST(CastOnGpu, FillsAbsentInputsWithTheIdentity) {
  for (int to = 0; to < kReducibleDTypeCount; ++to) {
    for (int op = 0; op < 5; ++op) {
      for (const double scale : {1.0, 0.5}) {
        const auto dtype = static_cast<DType>(to);
        const CastSpec spec{dtype, dtype, scale, 1, static_cast<ReduceOp>(op)};
        ExpectAsOnHost(
            {spec, {{1, 0, 1, true}, {1021, 0, 3, true}, {5, 1, 1}, {40000, 0, 7, true}}});
      }
    }
  }
}

TEST(CastOnGpu, RoundsEveryHalfAndTheEdgesOfEveryFloatAsOnTheHost) {
  for (const DType from : {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64}) {
    for (const DType to : {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64}) {
      const CastBytes in = SpecialElements(from);
      const int64_t count = static_cast<int64_t>(in.size()) / SizeOf(from);
      for (const double scale : {1.0, 0.1, 3e4}) {
        const CastCase wanted{{from, to, scale}, {{count}}};
        EXPECT_EQ(CompareCastsOf(wanted, in, RunCastsOnGpu, RunCastsOnHost), "");
      }
    }
  }
}

TEST(CastOnGpu, LaunchesOncePer1024ItemsAndNotForNothing) {
  const GpuBytes in(4 * 3000);
  const GpuBytes out(4 * 3000);
  GpuStream stream;
  const std::pair<int, int> expected[] = {{0, 0},    {1, 1},    {128, 1}, {129, 1},
                                          {1024, 1}, {1025, 2}, {3000, 3}};
  for (const auto& [items, launches] : expected) {
    std::vector<CastItem> list;
    for (int i = 0; i < items; ++i) {
      list.push_back({in.data() + 4 * i, out.data() + 4 * i, 1});
      list.push_back({in.data(), out.data(), 0});
    }
    int made = -1;
    Must(Gpu().Cast(list, {DType::kFloat32, DType::kFloat32, 2.0}, stream.get(), &made));
    EXPECT_EQ(made, launches) << items << " items";
  }
}

TEST(CastOnGpu, TakesAnyNumberOfItems) {
  for (const int items :
       {1, kFewItems, kFewItems + 1, Device::kItemsPerLaunch, Device::kItemsPerLaunch + 1, 2500}) {
    CastCase wanted{{DType::kFloat32, DType::kBfloat16, 0.5}, {}};
    for (int i = 0; i < items; ++i) wanted.items.push_back({i % 67, i % 3, i % 2, i % 11 == 0});
    ExpectAsOnHost(wanted);
  }
}

TEST(CastOnGpu, RefusesACastThatNoKernelDoesAndGoesOn) {
  const GpuBytes memory(64);
  GpuStream stream;
  const CastItem item{memory.data(), memory.data(), 4};
  int launches = 0;
  const Status status =
      Gpu().Cast({&item, 1}, {DType::kFloat32, DType::kInt32}, stream.get(), &launches);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  ExpectAsOnHost({{DType::kFloat32, DType::kFloat16}, {{100}}});
}

std::vector<float> Floats(const GpuBytes& memory) {
  const CastBytes bytes = memory.Read();
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void Write(const GpuBytes& memory, float value) {
  const std::vector<float> values(static_cast<size_t>(memory.size_bytes()) / sizeof(float), value);
  MustCuda(cudaMemcpy(memory.data(), values.data(), values.size() * sizeof(float),
                      cudaMemcpyHostToDevice),
           "cudaMemcpy");
}

TEST(CastOnGpu, IsPoisonedByWhatTheHostHasSetWhenTheStreamGetsThere) {
  Device& gpu = Gpu();
  const GpuBytes flag(sizeof(uint32_t));
  const GpuBytes memory(4 * 1000);
  auto* const pinned = static_cast<uint32_t*>(Must(gpu.AllocatePinned(sizeof(uint32_t))));
  auto* const on_device = reinterpret_cast<uint32_t*>(flag.data());
  const CastItem item{memory.data(), memory.data(), 1000};
  CastSpec spec{DType::kFloat32, DType::kFloat32};
  spec.poisoned = on_device;
  for (const bool poisons : {false, true}) {
    Write(memory, 1.0f);
    *pinned = 0;
    GpuStream stream;
    stream.HoldUp();
    int launches = 0;
    Must(gpu.CopyFlag(pinned, on_device, stream.get()));
    Must(gpu.Cast({&item, 1}, spec, stream.get(), &launches));
    *pinned = poisons ? 1 : 0;
    stream.Release();
    stream.Wait();
    for (const float value : Floats(memory)) ASSERT_EQ(std::isnan(value), poisons);
  }
  gpu.FreePinned(pinned);
}

TEST(CastOnGpu, IsReplayedByAGraphWithTheMemoryOfThen) {
  Device& gpu = Gpu();
  const GpuBytes in(4 * 1000);
  const GpuBytes out(4 * 1000);
  GpuStream stream;
  MustCuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal),
           "cudaStreamBeginCapture");
  {
    std::vector<CastItem> items;  // gone before the graph runs
    for (int i = 0; i < 500; ++i) items.push_back({in.data() + 8 * i, out.data() + 8 * i, 2});
    int launches = 0;
    Must(gpu.Cast(items, {DType::kFloat32, DType::kFloat32, 3.0}, stream.get(), &launches));
    EXPECT_EQ(launches, 1);
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t program = nullptr;
  MustCuda(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
  MustCuda(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
  for (const float value : {1.0f, 5.0f}) {
    Write(in, value);
    MustCuda(cudaGraphLaunch(program, stream.get()), "cudaGraphLaunch");
    stream.Wait();
    EXPECT_EQ(Floats(out), std::vector<float>(1000, 3.0f * value));
  }
  MustCuda(cudaGraphExecDestroy(program), "cudaGraphExecDestroy");
  MustCuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

}  // namespace
}  // namespace farandole
