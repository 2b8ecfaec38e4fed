#include "coordinator/protocol/splits.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/state.h"

namespace farandole {
namespace {

constexpr size_t kListed = 16;  // numbers of rows spelled out

Status Refuse(const KeyName& key, const std::string& why) {
  return InvalidArgument(Describe(key) + ": " + why);
}

/// "rows of float32 [*,4]": the first extent, one character, is 0 where rows may differ.
std::string DescribeRowsOf(const Member& member) {
  std::string shape = Describe(member);
  shape.replace(shape.find('[') + 1, 1, "*");
  return "rows of " + shape;
}

Status CheckNumbers(const KeyName& key, const char* what, size_t given, size_t members,
                    size_t size) {
  if (given == members * size) return {};
  return Refuse(key, std::to_string(given) + " " + what + "; expected one for each of " +
                         std::to_string(members) + " tensors and " + std::to_string(size) +
                         " ranks");
}

/// CheckSum of each member, of `size` numbers each.
Status CheckSums(const KeyName& key, const Signature& signature, std::span<const int64_t> rows,
                 size_t size) {
  for (size_t m = 0; m < rows.size() / size; ++m) {
    FARANDOLE_RETURN_IF_ERROR(CheckSum(key, signature.members[m], OfMember(rows, m, size)));
  }
  return {};
}

}  // namespace

/// With overflow checks, because the numbers come from users and from other ranks.
Status CheckSum(const KeyName& key, const Member& member, std::span<const int64_t> rows) {
  int64_t bytes = 0;
  bool fits = true;
  for (const int64_t one : rows) {
    if (one < 0) {
      return Refuse(key,
                    DescribeRows(rows) + " " + DescribeRowsOf(member) + " must not be negative");
    }
    fits = fits && !__builtin_add_overflow(bytes, one, &bytes);
  }
  fits = fits && !__builtin_mul_overflow(bytes, RowCount(member), &bytes) &&
         !__builtin_mul_overflow(bytes, SizeOf(member.dtype), &bytes);
  if (fits && bytes <= kMaxTensorBytes) return {};
  return Refuse(key, DescribeRows(rows) + " " + DescribeRowsOf(member) + " exceed " +
                         std::to_string(kMaxTensorBytes) + " bytes");
}

/// After an overflow the value is one that CheckSum refuses for a single row.
int64_t RowCount(const Member& member) {
  int64_t count = 1;
  for (size_t d = 1; d < member.shape.size(); ++d) {
    if (__builtin_mul_overflow(count, member.shape[d], &count)) return kMaxTensorBytes + 1;
  }
  return count;
}

std::span<const int64_t> OfMember(std::span<const int64_t> numbers, size_t m, size_t size) {
  return numbers.subspan(m * size, size);
}

int64_t ShareOf(int64_t rows, int64_t size, int64_t position) {
  return rows / size + (position < rows % size ? 1 : 0);
}

/// The products cannot overflow: CheckRows bounds the result of an allgather, CheckLimits the input
/// of a reducescatter.
void CountsOf(const Signature& signature, std::span<const int64_t> rows, size_t m, size_t size,
              std::vector<int64_t>& counts) {
  const Member& member = signature.members[m];
  const int64_t row = RowCount(member);
  counts.clear();
  for (size_t p = 0; p < size; ++p) {
    const int64_t split =
        signature.kind == OpKind::kAllgather
            ? OfMember(rows, m, size)[p]
            : ShareOf(member.shape.front(), static_cast<int64_t>(size), static_cast<int64_t>(p));
    counts.push_back(split * row);
  }
}

Status CheckDivisible(const KeyName& key, const Signature& signature) {
  if (!IsVariableSize(key.kind)) return {};
  if (signature.members.empty()) return Refuse(key, "no tensor; expected at least one");
  for (const Member& member : signature.members) {
    if (member.shape.empty()) {
      return Refuse(key, Describe(member) +
                             " is a scalar, which has no rows; expected at least one dimension");
    }
    if (!RowsMayDiffer(key.kind) || member.shape.front() == 0) continue;
    return Refuse(key, Describe(member) + " with rows in its signature; expected 0");
  }
  return {};
}

Status CheckRows(const KeyName& key, const Signature& signature, std::span<const int64_t> rows,
                 size_t size) {
  const size_t members = key.kind == OpKind::kAllgather ? signature.members.size() : 0;
  FARANDOLE_RETURN_IF_ERROR(CheckNumbers(key, "numbers of rows", rows.size(), members, size));
  return CheckSums(key, signature, rows, size);
}

Signature WithoutRows(const Signature& signature, std::vector<int64_t>& rows) {
  Signature agreed = signature;
  rows.clear();
  // A scalar is left as it is; CheckDivisible refuses it by name.
  for (Member& member : agreed.members) {
    rows.push_back(member.shape.empty() ? 0 : std::exchange(member.shape.front(), 0));
  }
  return agreed;
}

Status CheckPassedRows(const KeyName& key, const Signature& signature,
                       std::span<const int64_t> rows) {
  return CheckSums(key, signature, rows, 1);
}

Result<std::vector<int64_t>> SplitEvenly(const KeyName& key, std::span<const int64_t> rows,
                                         size_t size) {
  std::vector<int64_t> splits;
  for (const int64_t one : rows) {
    if (one % static_cast<int64_t>(size) != 0) {
      return Refuse(key, std::to_string(one) + " rows do not divide among " + std::to_string(size) +
                             " ranks; expected splits, or a multiple");
    }
    splits.insert(splits.end(), size, one / static_cast<int64_t>(size));
  }
  return splits;
}

/// A rank that sent no rows voted by id alone. Rows are searched in the list by rank, which
/// ascends: O(ranks x (members + log ranks)).
Result<std::vector<int64_t>> CollectRows(const KeyName& key, const Signature& signature,
                                         const KeyVotes& votes, std::span<const int32_t> ranks,
                                         std::span<const int64_t> known) {
  const size_t members = signature.members.size();
  std::vector<int64_t> rows(members * ranks.size(), 0);
  for (size_t p = 0; p < ranks.size(); ++p) {
    const auto sent = std::ranges::lower_bound(votes.rows, ranks[p], {}, &RankRows::rank);
    const bool has_sent = sent != votes.rows.end() && sent->rank == ranks[p];
    const Mask* const absent = FindMask(votes.absent, ranks[p]);
    for (size_t m = 0; m < members; ++m) {
      if (absent != nullptr && TestBit(*absent, static_cast<int>(m))) continue;
      if (!has_sent && known.empty()) {
        return Internal(Describe(key) + ": rank " + std::to_string(ranks[p]) +
                        " voted without its rows");
      }
      rows[m * ranks.size() + p] = has_sent ? sent->rows[m] : known[m * ranks.size() + p];
    }
  }
  FARANDOLE_RETURN_IF_ERROR(CheckRows(key, signature, rows, ranks.size()));
  return rows;
}

Status CheckSplits(const KeyName& key, const Signature& signature, std::span<const int64_t> rows,
                   std::span<const int64_t> splits, size_t size) {
  const size_t members = key.kind == OpKind::kAlltoall ? signature.members.size() : 0;
  FARANDOLE_RETURN_IF_ERROR(CheckNumbers(key, "splits", splits.size(), members, size));
  for (size_t m = 0; m < members; ++m) {
    const std::span<const int64_t> these = OfMember(splits, m, size);
    FARANDOLE_RETURN_IF_ERROR(CheckSum(key, signature.members[m], these));
    // Cannot overflow: CheckSum has added the same numbers.
    const int64_t sum = std::reduce(these.begin(), these.end());
    if (sum <= rows[m]) continue;
    return Refuse(key, "splits " + DescribeRows(these) + " add up to " + std::to_string(sum) +
                           " rows; expected at most the " + std::to_string(rows[m]) +
                           " of the tensor");
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
