// How allgather, reducescatter and alltoall divide tensors among the ranks of a set: along the
// first dimension, in rows.
//
// A reducescatter divides evenly. The rows of an allgather travel with the votes and come back with
// the decision. Those of an alltoall are known to each pair of ranks, which exchange them when it
// runs (coordinator/engine/executor.h). Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "coordinator/protocol/request.h"
#include "core/status.h"

namespace farandole {

/// Elements of one row: the product of all dimensions but the first. Of a tensor without rows it
/// may exceed every limit, and is then above kMaxTensorBytes.
int64_t RowCount(const TensorSignature& tensor);

/// Of numbers for each tensor and each of `size` ranks (the rows of an allgather, the splits of an
/// alltoall) those of tensor `t`, by position.
std::span<const int64_t> OfTensor(std::span<const int64_t> numbers, size_t t, size_t size);

/// Reducescatter: of `rows` rows divided among `size` ranks, those of the rank at `position`. The
/// first (rows % size) ranks have one row more, as in Horovod.
int64_t ShareOf(int64_t rows, int64_t size, int64_t position);

/// Of a tensor with `rows` rows on each of the ascending `members`: the rows of its result on
/// `rank`.
int64_t ResultRows(OpKind kind, int64_t rows, std::span<const int32_t> members, int32_t rank);

/// Allgather and reducescatter: elements of each rank's split of tensor `t`, into `counts`, by
/// position.
/// @param rows  Of an allgather, as decided; has passed CheckRows.
void CountsOf(const Signature& signature, std::span<const int64_t> rows, size_t t, size_t size,
              std::vector<int64_t>& counts);

/// What a signature says by itself: tensors that are divided have a first dimension, which is 0
/// where rows may differ. @return InvalidArgument naming the key and the tensor.
Status CheckDivisible(const KeyName& key, const Signature& signature);

/// The rows of an allgather: one number for each tensor and each of `size` ranks, not negative, and
/// a result of at most kMaxTensorBytes. @return InvalidArgument.
Status CheckRows(const KeyName& key, const Signature& signature, std::span<const int64_t> rows,
                 size_t size);

/// Rows that are not negative, and of at most kMaxTensorBytes together. @return InvalidArgument.
Status CheckSum(const KeyName& key, const TensorSignature& tensor, std::span<const int64_t> rows);

/// The signature that ranks with different rows agree on, and the rows of this one's tensors.
Signature WithoutRows(const Signature& signature, std::vector<int64_t>& rows);

/// Rows that this rank passes: as many numbers as tensors where rows may differ, not negative, of
/// tensors of at most kMaxTensorBytes. @return InvalidArgument.
Status CheckPassedRows(const KeyName& key, const Signature& signature,
                       std::span<const int64_t> rows);

/// Alltoall: the same number of rows for each of `size` ranks.
/// @return InvalidArgument if they do not divide.
Result<std::vector<int64_t>> SplitEvenly(const KeyName& key, std::span<const int64_t> rows,
                                         size_t size);

/// The rows of an allgather from its votes: those that a rank sent, those of the last decision
/// (`known`; empty: there was none) of a rank that did not, and none of an absent one.
/// @return Internal if a rank sent none and none are known; CheckRows.
Result<std::vector<int64_t>> CollectRows(const KeyName& key, const Signature& signature,
                                         const KeyVotes& votes, std::span<const int32_t> ranks,
                                         std::span<const int64_t> known);

/// Alltoall: one number for each tensor and each of `size` ranks, not negative; those of a tensor
/// add up to at most its rows. Other kinds: none. @return InvalidArgument.
Status CheckSplits(const KeyName& key, const Signature& signature, std::span<const int64_t> rows,
                   std::span<const int64_t> splits, size_t size);

/// The position of `rank` among the ascending `members`; of another rank, where it would be.
size_t PositionOf(int32_t rank, std::span<const int32_t> members);

/// "[2,3]"; of a long list the beginning.
std::string DescribeRows(std::span<const int64_t> rows);

}  // namespace farandole
