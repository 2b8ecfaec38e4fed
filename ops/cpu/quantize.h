// An allreduce of float32 whose contributions and result travel as 8-bit integers, with error
// feedback: what a rounding leaves over is added to what the same rank rounds there the next time.
//
// A rank rounds what it sends to the owner of a shard; the owner adds all contributions in float
// and in rank order, its own as it is, rounds the sum once and sends that. Every rank, the owner
// too, takes the rounded sum, so all have the same bits. Each element is rounded in one of the two
// roles on each rank, and in both its residual has the unit of the sum before division; so
// batches may be formed otherwise and elements change their owners: each rank adds what it has left
// in either role.
//
// Sources: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
// distributed training of speech DNNs", Interspeech 2014 (error feedback); Dettmers, "8-bit
// approximations for parallelism in deep learning", ICLR 2016, arXiv:1511.04561.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/cpu/batch.h"

namespace farandole {

/// Of more ranks, a block for each would not fit into staging (docs/decisions.md).
inline constexpr size_t kMostQuantizingRanks = 4096;

/// Whether a plane between processes runs `batch` so, unless it is small. Result contract:
/// contributions c_k, scaled by `prescale`, and their sum s are quantized (CpuKernels::Quantize) in
/// blocks that begin with each message; the result is q(s) * (postscale / ranks.size()) of an
/// average, else q(s) * postscale, in float. A sum from 2^127 on and what is not finite make their
/// block NaN on all ranks.
bool IsQuantized(const Batch& batch);
/// The same of tensors of a signature, among so many ranks.
bool IsQuantized(const Collective& collective, DType dtype, size_t ranks);

/// Quantizes the next `count` elements of the batch's inputs to `to`; moves the cursor past them.
void QuantizeRuns(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor,
                  std::byte* to, int64_t count);
/// Writes the next `count` elements of the result, quantized at `from`, to the batch's outputs.
void DequantizeRuns(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor,
                    const std::byte* from, int64_t count);
/// The owner's part: adds the contributions to the next `count` elements, quantizes the sum to `to`
/// and writes the result to the outputs.
///
/// @param sources  In rank order, of those that contribute, where each is quantized; nullptr: this
/// rank's own, which is in the batch's inputs.
void ReduceQuantized(const CpuKernels& kernels, const Batch& batch, SegmentCursor& cursor,
                     std::span<const void* const> sources, std::byte* to, int64_t count);

}  // namespace farandole
