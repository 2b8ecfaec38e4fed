#include "test/support/cast_on_host.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "ops/gpu/cuda/cast.h"

namespace farandole {
namespace {

/// As many as an H100 has, so that work is cut as it is there.
constexpr int kMultiprocessors = 132;

/// A GPU stops at an access that is not aligned to its width; so does this, lest the body go wrong
/// unseen where memcpy does not care.
template <class T>
void MustBeAligned(const T* memory) {
  if (std::bit_cast<uintptr_t>(memory) % alignof(T) != 0) std::abort();
}

struct HostMachine {
  template <class T>
  static T Load(const T* from) {
    MustBeAligned(from);
    T value;
    std::memcpy(static_cast<void*>(&value), from, sizeof value);
    return value;
  }
  template <class T>
  static void Store(T* to, T value) {
    MustBeAligned(to);
    std::memcpy(static_cast<void*>(to), &value, sizeof value);
  }
  static float Widen(Float16 value) { return ToFloat(value); }
  static float Widen(Bfloat16 value) { return ToFloat(value); }
  static Float16 Round(Float16, float value) { return ToFloat16(value); }
  static Float16 Round(Float16, double value) { return ToFloat16(RoundToOdd(value)); }
  static Bfloat16 Round(Bfloat16, float value) { return ToBfloat16(value); }
  static Bfloat16 Round(Bfloat16, double value) { return ToBfloat16(RoundToOdd(value)); }
};

template <class Body>
void RunBlocks(uint32_t blocks, const Body& body) {
  for (uint32_t block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kBlockThreads; ++thread) body(block, thread);
  }
}

void RunCopies(const LargeCastTable& table, uint32_t blocks) {
  RunBlocks(blocks,
            [&](uint32_t block, int thread) { CopyBody<HostMachine>(table, block, thread); });
}

void RunCasts(const CastSpec& spec, const LargeCastTable& table, uint32_t blocks) {
  VisitCast(spec.from, spec.to, [&](auto from, auto to) {
    RunBlocks(blocks, [&](uint32_t block, int thread) {
      CastBody<HostMachine, typename decltype(from)::Type, typename decltype(to)::Type>(
          table, block, thread);
    });
  });
}

}  // namespace

Status CastOnHost(std::span<const CastItem> items, const CastSpec& spec) {
  const Result<CastJob> job = MakeCastJob(items, spec);
  if (!job.ok()) return job.status();
  const auto table = std::make_unique<LargeCastTable>();
  std::span<const CastItem> rest = job.value().items;
  while (!rest.empty()) {
    const auto now = rest.first(std::min(rest.size(), size_t{Device::kItemsPerLaunch}));
    const uint32_t blocks = FillCastTable(job.value(), now, kMultiprocessors, table.get());
    job.value().raw ? RunCopies(*table, blocks) : RunCasts(spec, *table, blocks);
    rest = rest.subspan(now.size());
  }
  return {};
}

}  // namespace farandole
