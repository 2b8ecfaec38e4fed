#include "coordinator/protocol/splits.h"

#include <algorithm>
#include <string>

#include "coordinator/protocol/limits.h"

namespace farandole {
namespace {

constexpr size_t kListed = 16;  // numbers of rows spelled out

Status Refuse(const KeyName& key, const std::string& why) {
  return InvalidArgument(Describe(key) + ": " + why);
}

Status CheckMemberRows(const KeyName& key, const Member& member, std::span<const int64_t> rows) {
  const std::string these = "rows " + DescribeRows(rows) + " of " + Describe(member);
  int64_t sum = 0;
  for (const int64_t one : rows) {
    if (one < 0) return Refuse(key, these + " must not be negative");
    if (__builtin_add_overflow(sum, one, &sum)) return Refuse(key, these + " are too many");
  }
  if (sum == member.shape.front()) return {};
  return Refuse(key, these + " add up to " + std::to_string(sum) + "; expected " +
                         std::to_string(member.shape.front()));
}

/// One direction of one tensor's splits.
Status CheckSplit(const KeyName& key, const Member& member, std::span<const int64_t> rows,
                  const char* what) {
  const int64_t most = member.shape.front();
  int64_t bytes = 0;
  for (const int64_t one : rows) {
    if (one < 0 || one > most) {
      return Refuse(key, std::string(what) + " has " + std::to_string(one) + " rows for one rank" +
                             "; expected 0 to " + std::to_string(most) +
                             ", the most rows that any rank sends to any other");
    }
    if (__builtin_add_overflow(bytes, one, &bytes)) {
      return Refuse(key, std::string(what) + " has too many rows: " + DescribeRows(rows));
    }
  }
  if (bytes == 0) return {};
  const bool fits = !__builtin_mul_overflow(bytes, RowCount(member), &bytes) &&
                    !__builtin_mul_overflow(bytes, SizeOf(member.dtype), &bytes);
  if (fits && bytes <= kMaxTensorBytes) return {};
  return Refuse(key, std::string(what) + " of rows " + DescribeRows(rows) + " of " +
                         Describe(member) + " exceeds " + std::to_string(kMaxTensorBytes) +
                         " bytes");
}

}  // namespace

int64_t RowCount(const Member& member) {
  int64_t count = 1;
  for (size_t d = 1; d < member.shape.size(); ++d) count *= member.shape[d];
  return count;
}

std::span<const int64_t> RowsOf(const Signature& signature, size_t m) {
  const size_t size = signature.rows.size() / signature.members.size();
  return std::span(signature.rows).subspan(m * size, size);
}

int64_t ShareOf(int64_t rows, int64_t size, int64_t position) {
  return rows / size + (position < rows % size ? 1 : 0);
}

void CountsOf(OpKind kind, const Signature& signature, size_t m, size_t size,
              std::vector<int64_t>& parts) {
  const Member& member = signature.members[m];
  const int64_t row = RowCount(member);
  parts.clear();
  for (size_t p = 0; p < size; ++p) {
    const int64_t rows =
        kind == OpKind::kAllgather
            ? RowsOf(signature, m)[p]
            : ShareOf(member.shape.front(), static_cast<int64_t>(size), static_cast<int64_t>(p));
    parts.push_back(rows * row);
  }
}

Splits SplitsOf(std::span<const int64_t> splits, size_t m, size_t size) {
  return {splits.subspan(2 * m * size, size), splits.subspan((2 * m + 1) * size, size)};
}

Status CheckRows(const KeyName& key, const Signature& signature) {
  const bool gathers = key.kind == OpKind::kAllgather;
  if (!gathers && !signature.rows.empty()) {
    return Refuse(key, "rows of each rank are told for an allgather alone");
  }
  if (!IsVariableSize(key.kind)) return {};
  if (signature.members.empty()) return Refuse(key, "no tensor; expected at least one");
  for (const Member& member : signature.members) {
    if (!member.shape.empty()) continue;
    return Refuse(
        key, Describe(member) + " is a scalar, which has no rows; expected at least one dimension");
  }
  if (!gathers) return {};
  if (signature.rows.empty() || signature.rows.size() % signature.members.size() != 0) {
    return Refuse(key, std::to_string(signature.rows.size()) + " numbers of rows for " +
                           std::to_string(signature.members.size()) +
                           " tensors; expected one for each tensor and rank");
  }
  for (size_t m = 0; m < signature.members.size(); ++m) {
    FARANDOLE_RETURN_IF_ERROR(CheckMemberRows(key, signature.members[m], RowsOf(signature, m)));
  }
  return {};
}

Status CheckRowsFor(const KeyName& key, const Signature& signature, size_t size) {
  if (key.kind != OpKind::kAllgather) return {};
  if (signature.rows.size() == signature.members.size() * size) return {};
  return Refuse(key, std::to_string(signature.rows.size()) + " numbers of rows; expected one for " +
                         "each of " + std::to_string(signature.members.size()) + " tensors and " +
                         std::to_string(size) + " ranks");
}

Status CheckSplits(const KeyName& key, const Signature& signature, std::span<const int64_t> splits,
                   std::span<const int32_t> members, int32_t rank) {
  const size_t size = members.size();
  const size_t tensors = key.kind == OpKind::kAlltoall ? signature.members.size() : 0;
  if (splits.size() != tensors * 2 * size) {
    return Refuse(key, std::to_string(splits.size()) + " numbers of rows sent and received; " +
                           "expected " + std::to_string(tensors * 2 * size));
  }
  for (size_t m = 0; m < tensors; ++m) {
    const Splits rows = SplitsOf(splits, m, size);
    const Member& member = signature.members[m];
    FARANDOLE_RETURN_IF_ERROR(CheckSplit(key, member, rows.sends, "what is sent"));
    FARANDOLE_RETURN_IF_ERROR(CheckSplit(key, member, rows.receives, "what is received"));
    const size_t me = PositionOf(rank, members);
    if (rows.sends[me] == rows.receives[me]) continue;
    return Refuse(key, "rank " + std::to_string(rank) + " sends itself " +
                           std::to_string(rows.sends[me]) + " rows and receives " +
                           std::to_string(rows.receives[me]) + " from itself; expected as many");
  }
  return {};
}

size_t PositionOf(int32_t rank, std::span<const int32_t> members) {
  return static_cast<size_t>(std::lower_bound(members.begin(), members.end(), rank) -
                             members.begin());
}

std::string DescribeRows(std::span<const int64_t> rows) {
  std::string text = "[";
  for (size_t i = 0; i < std::min(rows.size(), kListed); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(rows[i]);
  }
  if (rows.size() > kListed) text += ",... (" + std::to_string(rows.size()) + " ranks)";
  return text + "]";
}

}  // namespace farandole
