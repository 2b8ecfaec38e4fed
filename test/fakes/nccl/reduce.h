// The arithmetic of the fake NCCL.
#pragma once

#include <cstdint>
#include <span>

namespace farandole {

/// Size of one element by NCCL's number of the type; 0 for one that the fake does not have
/// (unsigned ones beyond a byte, 8-bit floats, and what comes later).
int64_t FakeNcclSizeOf(int datatype);

struct FakeNcclReduction {
  int datatype = 0;
  int op = 0;        ///< ncclSum .. ncclAvg.
  size_t first = 0;  ///< Which source the sum begins with.
};

/// out[i] = op(sources[...][i]), rounding to the type after every step, the sources taken in turn
/// from `first` on: like NCCL's, a result that depends on the order. Averages of floats multiply
/// each source by 1/n in the type before the sum, those of integers divide after it.
void FakeNcclReduce(void* out, std::span<const void* const> sources, int64_t count,
                    const FakeNcclReduction& reduction);

}  // namespace farandole
