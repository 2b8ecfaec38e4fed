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

void ExpectAsOnHost(const std::vector<CastCase>& cases) {
  for (const CastCase& wanted : cases) {
    EXPECT_EQ(CompareCasts(wanted, RunCastsOnGpu, RunCastsOnHost, /*seed=*/1), "");
  }
}

TEST(CastOnGpu, CastsAndScalesEveryPairOfTypesAsOnTheHost) { ExpectAsOnHost(CasesOfEveryPair()); }

TEST(CastOnGpu, WorksFromEveryAlignmentToEveryOther) { ExpectAsOnHost(CasesOfEveryAlignment()); }

TEST(CastOnGpu, CutsLargeTensorsIntoSlicesWithoutASeam) {
  for (const CastSpec& spec : CastSpecsByShape()) {
    ExpectAsOnHost({{spec, {{1200007}, {1}, {70001, 3, 3}}}});
  }
  ExpectAsOnHost({{{DType::kFloat32, DType::kFloat16}, {{90000001, 1, 2}}}});
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

TEST(CastOnGpu, FillsAbsentInputsWithTheIdentity) { ExpectAsOnHost(CasesOfAbsentInputs()); }

TEST(CastOnGpu, RoundsEveryHalfAndTheEdgesOfEveryFloatAsOnTheHost) {
  EXPECT_EQ(CompareCastsOfSpecialElements(RunCastsOnGpu, RunCastsOnHost), "");
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

TEST(CastOnGpu, TakesAnyNumberOfItems) { ExpectAsOnHost(CasesOfAnyNumber()); }

TEST(CastOnGpu, RefusesACastThatNoKernelDoesAndGoesOn) {
  const GpuBytes memory(64);
  GpuStream stream;
  const CastItem item{memory.data(), memory.data(), 4};
  int launches = 0;
  const Status status =
      Gpu().Cast({&item, 1}, {DType::kFloat32, DType::kInt32}, stream.get(), &launches);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  ExpectAsOnHost({{{DType::kFloat32, DType::kFloat16}, {{100}}}});
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
