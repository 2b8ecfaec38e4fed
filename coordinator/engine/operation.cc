#include "coordinator/engine/operation.h"

#include <numeric>
#include <string>

#include "coordinator/protocol/splits.h"

namespace farandole {
void Operation::Empty() {
  ended = true;
  name = KeyName();
  holder = nullptr;
  signature = Signature();
  splits = std::vector<int64_t>();
  extents = std::vector<Extent>();
  in = std::vector<const void*>();
  out = std::vector<void*>();
  vote = Vote();
  work = nullptr;
  ready = std::vector<std::shared_ptr<DeviceEvent>>();
  ready_count = 0;
  later_steps.clear();
  key = kUnknownKey;
  track = 0;
}

Extent ExtentOf(const Operation& operation, size_t m, std::span<const int32_t> members,
                int32_t rank) {
  const Signature& signature = operation.signature;
  const Member& member = signature.members[m];
  const OpKind kind = operation.name.kind;
  const int64_t rows = member.shape.empty() ? 1 : member.shape.front();
  if (rows == 0) return {};
  const size_t position = PositionOf(rank, members);
  Extent rows_of{rows, rows};
  if (kind == OpKind::kBroadcast && signature.root != rank) rows_of.in = 0;
  if (kind == OpKind::kAllgather) rows_of.in = RowsOf(signature, m)[position];
  if (kind == OpKind::kReducescatter) {
    rows_of.out =
        ShareOf(rows, static_cast<int64_t>(members.size()), static_cast<int64_t>(position));
  }
  if (kind == OpKind::kAlltoall) {
    const Splits splits = SplitsOf(operation.splits, m, members.size());
    rows_of.in = std::reduce(splits.sends.begin(), splits.sends.end());
    rows_of.out = std::reduce(splits.receives.begin(), splits.receives.end());
  }
  const int64_t row_bytes = RowCount(member) * SizeOf(member.dtype);
  return {rows_of.in * row_bytes, rows_of.out * row_bytes};
}

int64_t TotalBytes(const Signature& signature) {
  int64_t bytes = 0;
  for (const Member& member : signature.members) bytes += member.Count() * SizeOf(member.dtype);
  return bytes;
}

}  // namespace farandole
