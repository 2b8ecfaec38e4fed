#include "ops/cuda/move_host.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/half.h"
#include "ops/cuda/move_body.h"
#include "ops/cuda/move_kinds.h"
#include "ops/cuda/move_table.h"

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
    for (int thread = 0; thread < kMoveThreads; ++thread) body(block, thread);
  }
}

void RunCopies(const LargeMoveTable& table, uint32_t blocks) {
  RunBlocks(blocks,
            [&](uint32_t block, int thread) { CopyBody<HostMachine>(table, block, thread); });
}

void RunCasts(const MoveSpec& spec, const LargeMoveTable& table, uint32_t blocks) {
  const auto run = [&](auto from, auto to) {
    RunBlocks(blocks, [&](uint32_t block, int thread) {
      CastBody<HostMachine, typename decltype(from)::Type, typename decltype(to)::Type>(
          table, block, thread);
    });
  };
  if (IsFloating(spec.from)) {
    VisitFloating(spec.from,
                  [&](auto from) { VisitFloating(spec.to, [&](auto to) { run(from, to); }); });
  } else {
    VisitInteger(spec.from,
                 [&](auto from) { VisitInteger(spec.to, [&](auto to) { run(from, to); }); });
  }
}

}  // namespace

Status MoveOnHost(std::span<const DeviceMove> moves, const MoveSpec& spec) {
  const Result<MoveJob> job = MakeMoveJob(moves, spec);
  if (!job.ok()) return job.status();
  const auto table = std::make_unique<LargeMoveTable>();
  std::span<const DeviceMove> rest = job.value().moves;
  while (!rest.empty()) {
    const auto now = rest.first(std::min(rest.size(), size_t{Device::kMovesPerLaunch}));
    const uint32_t blocks = FillMoveTable(job.value(), now, kMultiprocessors, table.get());
    job.value().raw ? RunCopies(*table, blocks) : RunCasts(spec, *table, blocks);
    rest = rest.subspan(now.size());
  }
  return {};
}

}  // namespace farandole
