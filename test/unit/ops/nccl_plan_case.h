// What tests of the plans over NCCL ask of a plan, whatever its kind.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/gpu/nccl/plan.h"

namespace farandole {

MATCHER_P3(Item, in, out, count, "") {
  return arg.in == in && arg.out == out && arg.count == count;
}

/// A batch as one member of `size` sees it, and its plan; nobody follows the pointers.
struct NcclPlanCase {
  explicit NcclPlanCase(size_t size) : ranks(size) {
    std::iota(ranks.begin(), ranks.end(), 0);
    batch.ranks = ranks;
  }
  NcclPlanCase(const NcclPlanCase&) = delete;
  NcclPlanCase& operator=(const NcclPlanCase&) = delete;

  NcclPlan Plan() const {
    buffer_bytes = 0;
    const auto give = [this](int64_t size_bytes) {
      buffer_bytes = size_bytes;
      return Result<void*>(buffer);
    };
    NcclPlan plan;
    EXPECT_TRUE(PlanNccl(batch, give, plan).ok());
    return plan;
  }
  std::vector<CastItem> Packed() const { return Plan().pack; }
  /// Without the results that NCCL has written where they belong.
  std::vector<CastItem> Unpacked() const {
    std::vector<CastItem> items = Plan().unpack;
    std::erase_if(items, [](const CastItem& item) { return item.in == item.out; });
    return items;
  }
  std::vector<NcclCall> Calls() const { return Plan().calls; }
  NcclCall Call() const {
    const std::vector<NcclCall> calls = Calls();
    EXPECT_EQ(calls.size(), 1u);
    return calls.empty() ? NcclCall() : calls.front();
  }
  int64_t BufferBytes() const {
    (void)Plan();
    return buffer_bytes;
  }
  bool IsFused() const { return Call().in == buffer; }

  mutable std::byte buffer[4096];
  mutable int64_t buffer_bytes = 0;  // that were asked for
  std::vector<int> ranks, absent;
  Batch batch;
};

}  // namespace farandole
