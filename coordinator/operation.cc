#include "coordinator/operation.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "coordinator/parts.h"

namespace farandole {
namespace {

bool Reduces(OpKind kind) { return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter; }

Status CheckMember(const KeyName& name, const Signature& signature, const Member& member) {
  if (static_cast<int>(member.dtype) >= kDTypeCount) {
    return InvalidArgument(Describe(name) + ": dtype number " +
                           std::to_string(static_cast<int>(member.dtype)) +
                           " is unknown; expected 0.." + std::to_string(kDTypeCount - 1));
  }
  int64_t bytes = SizeOf(member.dtype);
  for (int64_t dim : member.shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) {
      return InvalidArgument(Describe(name) + ": shape of " + Describe(member) +
                             " must have non-negative dimensions and a size below 2^63 bytes");
    }
  }
  const bool sums = signature.op == ReduceOp::kSum || signature.op == ReduceOp::kAverage;
  if (Reduces(name.kind) && member.dtype == DType::kBool && sums) {
    return InvalidArgument(
        Describe(name) + ": " + std::string(Name(signature.op)) +
        " is not defined for bool; expected min (and), max (or) or product (and)");
  }
  const bool scales = signature.prescale != 1.0 || signature.postscale != 1.0;
  if (Reduces(name.kind) && member.dtype == DType::kBool && scales) {
    return InvalidArgument(
        Describe(name) + ": bool cannot be multiplied; expected prescale and postscale 1, got " +
        std::to_string(signature.prescale) + " and " + std::to_string(signature.postscale));
  }
  return {};
}

Status CheckParameters(const KeyName& name, const Signature& signature,
                       std::span<const int32_t> members) {
  if (name.function.size() > 4096) {
    return InvalidArgument("the name of a called collective has " +
                           std::to_string(name.function.size()) + " bytes; expected at most 4096");
  }
  if (name.name.size() > 4096) {
    return InvalidArgument("a tensor name has " + std::to_string(name.name.size()) +
                           " bytes; expected at most 4096: " + name.name.substr(0, 64) + "...");
  }
  if (static_cast<int>(signature.op) > static_cast<int>(ReduceOp::kProduct)) {
    return InvalidArgument(Describe(name) + ": reduce op number " +
                           std::to_string(static_cast<int>(signature.op)) +
                           " is unknown; expected 0..4");
  }
  if (!std::isfinite(signature.prescale) || !std::isfinite(signature.postscale)) {
    return InvalidArgument(Describe(name) + ": prescale and postscale factors must be finite");
  }
  if (name.kind == OpKind::kBroadcast &&
      std::find(members.begin(), members.end(), signature.root) == members.end()) {
    return InvalidArgument(Describe(name) + ": root rank " + std::to_string(signature.root) +
                           " is no member of the process set; expected a rank from " +
                           std::to_string(members.front()) + " to " +
                           std::to_string(members.back()));
  }
  return {};
}

}  // namespace

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
  key = kUnknownKey;
  track = 0;
}

Status Validate(const KeyName& name, const Signature& signature, std::span<const int32_t> members) {
  FARANDOLE_RETURN_IF_ERROR(CheckParameters(name, signature, members));
  for (const Member& member : signature.members) {
    FARANDOLE_RETURN_IF_ERROR(CheckMember(name, signature, member));
  }
  FARANDOLE_RETURN_IF_ERROR(CheckRowsFor(name, signature, members.size()));
  return CheckRows(name, signature);
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
