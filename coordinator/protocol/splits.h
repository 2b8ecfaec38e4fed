// How allgather, reducescatter and alltoall cut tensors among the ranks of a set: along the first
// dimension, in rows.
//
// Sizes are agreed on, or known to each rank, before anything runs: docs/decisions.md, "Sizes are
// known before a plane starts". Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/protocol/request.h"
#include "core/status.h"

namespace farandole {

/// Elements of one row: the product of all dimensions but the first.
int64_t RowCount(const Member& member);

/// Allgather: the rows that each rank gives to member `m`, by position.
std::span<const int64_t> RowsOf(const Signature& signature, size_t m);

/// Reducescatter: of `rows` rows cut for `size` ranks, those of the rank at `position`. The first
/// (rows % size) ranks have one row more, as in Horovod.
int64_t ShareOf(int64_t rows, int64_t size, int64_t position);

/// Allgather and reducescatter: elements of each rank's part of member `m`, into `parts`, by
/// position. The signature has passed CheckRows and CheckRowsFor(size).
void CountsOf(OpKind kind, const Signature& signature, size_t m, size_t size,
              std::vector<int64_t>& parts);

/// Alltoall: the rows that this rank sends to each rank with member `m`, then those it receives
/// from each.
struct Splits {
  std::span<const int64_t> sends;
  std::span<const int64_t> receives;
};
Splits SplitsOf(std::span<const int64_t> splits, size_t m, size_t size);

/// What a signature says by itself: tensors that are cut have rows; rows are told for allgathers
/// alone, are not negative, and add up to the first dimension. Shapes have no negative extent.
/// @return InvalidArgument naming the key, the tensor and the rows.
Status CheckRows(const KeyName& key, const Signature& signature);

/// An allgather tells the rows of `size` ranks for each tensor. @return InvalidArgument.
Status CheckRowsFor(const KeyName& key, const Signature& signature, size_t size);

/// Alltoall: two numbers for each tensor and each of `members`, none negative or above the first
/// dimension; what is sent and received has a size, and `rank` receives from itself what it sends
/// itself. Other kinds: none. The signature has passed CheckRows. @return InvalidArgument.
Status CheckSplits(const KeyName& key, const Signature& signature, std::span<const int64_t> splits,
                   std::span<const int32_t> members, int32_t rank);

/// The position of `rank` among the ascending `members`, of which it is one.
size_t PositionOf(int32_t rank, std::span<const int32_t> members);

/// "[2,3]"; of a long list the beginning.
std::string DescribeRows(std::span<const int64_t> rows);

}  // namespace farandole
