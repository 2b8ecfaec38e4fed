#include "coordinator/protocol/splits.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/state.h"

namespace farandole {
namespace {

constexpr size_t kRowsListed = 16;  // numbers of rows spelled out

Status Refuse(const KeyName& key, const std::string& why) {
  return InvalidArgument(Describe(key) + ": " + why);
}

/// "rows of float32 [*,4]": the first extent, one character, is 0 where rows may differ.
std::string DescribeRowsOf(const TensorSignature& tensor) {
  std::string shape = Describe(tensor);
  shape.replace(shape.find('[') + 1, 1, "*");
  return "rows of " + shape;
}

Status CheckNumbers(const KeyName& key, const char* what, size_t given, size_t tensors,
                    size_t size) {
  if (given == tensors * size) return {};
  return Refuse(key, std::to_string(given) + " " + what + "; expected one for each of " +
                         std::to_string(tensors) + " tensors and " + std::to_string(size) +
                         " ranks");
}

/// CheckSum of each tensor, of `size` numbers each.
Status CheckSums(const KeyName& key, const Signature& signature, std::span<const int64_t> rows,
                 size_t size) {
  for (size_t t = 0; t < rows.size() / size; ++t) {
    FARANDOLE_RETURN_IF_ERROR(CheckSum(key, signature.tensors[t], OfTensor(rows, t, size)));
  }
  return {};
}

}  // namespace

/// With overflow checks, because the numbers come from users and from other ranks.
Status CheckSum(const KeyName& key, const TensorSignature& tensor, std::span<const int64_t> rows) {
  int64_t bytes = 0;
  bool fits = true;
  for (const int64_t one : rows) {
    if (one < 0) {
      return Refuse(key,
                    DescribeRows(rows) + " " + DescribeRowsOf(tensor) + " must not be negative");
    }
    fits = fits && !__builtin_add_overflow(bytes, one, &bytes);
  }
  fits = fits && !__builtin_mul_overflow(bytes, RowCount(tensor), &bytes) &&
         !__builtin_mul_overflow(bytes, SizeOf(tensor.dtype), &bytes);
  if (fits && bytes <= kMaxTensorBytes) return {};
  return Refuse(key, DescribeRows(rows) + " " + DescribeRowsOf(tensor) + " exceed " +
                         std::to_string(kMaxTensorBytes) + " bytes");
}

/// After an overflow the value is one that CheckSum refuses for a single row.
int64_t RowCount(const TensorSignature& tensor) {
  int64_t count = 1;
  for (size_t d = 1; d < tensor.shape.size(); ++d) {
    if (__builtin_mul_overflow(count, tensor.shape[d], &count)) return kMaxTensorBytes + 1;
  }
  return count;
}

std::span<const int64_t> OfTensor(std::span<const int64_t> numbers, size_t t, size_t size) {
  return numbers.subspan(t * size, size);
}

int64_t ShareOf(int64_t rows, int64_t size, int64_t position) {
  return rows / size + (position < rows % size ? 1 : 0);
}

int64_t ResultRows(OpKind kind, int64_t rows, std::span<const int32_t> members, int32_t rank) {
  const auto size = static_cast<int64_t>(members.size());
  if (kind == OpKind::kAllgather) return rows * size;
  if (kind != OpKind::kReducescatter) return rows;
  return ShareOf(rows, size, static_cast<int64_t>(PositionOf(rank, members)));
}

/// The products cannot overflow: CheckRows bounds the result of an allgather, CheckLimits the input
/// of a reducescatter.
void CountsOf(const Signature& signature, std::span<const int64_t> rows, size_t t, size_t size,
              std::vector<int64_t>& counts) {
  const TensorSignature& tensor = signature.tensors[t];
  const int64_t row = RowCount(tensor);
  counts.clear();
  for (size_t p = 0; p < size; ++p) {
    const int64_t split =
        signature.kind == OpKind::kAllgather
            ? OfTensor(rows, t, size)[p]
            : ShareOf(tensor.shape.front(), static_cast<int64_t>(size), static_cast<int64_t>(p));
    counts.push_back(split * row);
  }
}

Status CheckDivisible(const KeyName& key, const Signature& signature) {
  if (!IsVariableSize(key.kind)) return {};
  for (const TensorSignature& tensor : signature.tensors) {
    if (tensor.shape.empty()) {
      return Refuse(key, Describe(tensor) +
                             " is a scalar, which has no rows; expected at least one dimension");
    }
    if (!RowsMayDiffer(key.kind) || tensor.shape.front() == 0) continue;
    return Refuse(key, Describe(tensor) + " with rows in its signature; expected 0");
  }
  return {};
}

Status CheckRows(const KeyName& key, const Signature& signature, std::span<const int64_t> rows,
                 size_t size) {
  const size_t tensors = key.kind == OpKind::kAllgather ? signature.tensors.size() : 0;
  FARANDOLE_RETURN_IF_ERROR(CheckNumbers(key, "numbers of rows", rows.size(), tensors, size));
  return CheckSums(key, signature, rows, size);
}

Signature WithoutRows(const Signature& signature, std::vector<int64_t>& rows) {
  Signature agreed = signature;
  rows.clear();
  // A scalar is left as it is; CheckDivisible refuses it by name.
  for (TensorSignature& tensor : agreed.tensors) {
    rows.push_back(tensor.shape.empty() ? 0 : std::exchange(tensor.shape.front(), 0));
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
/// ascends: O(ranks x (tensors + log ranks)).
Result<std::vector<int64_t>> CollectRows(const KeyName& key, const Signature& signature,
                                         const KeyVotes& votes, std::span<const int32_t> ranks,
                                         std::span<const int64_t> known) {
  const size_t tensors = signature.tensors.size();
  std::vector<int64_t> rows(tensors * ranks.size(), 0);
  for (size_t p = 0; p < ranks.size(); ++p) {
    const auto sent = std::ranges::lower_bound(votes.rows, ranks[p], {}, &RankRows::rank);
    const bool has_sent = sent != votes.rows.end() && sent->rank == ranks[p];
    const Mask* const absent = FindMask(votes.absent, ranks[p]);
    for (size_t t = 0; t < tensors; ++t) {
      if (absent != nullptr && TestBit(*absent, static_cast<int>(t))) continue;
      if (!has_sent && known.empty()) {
        return Internal(Describe(key) + ": rank " + std::to_string(ranks[p]) +
                        " voted without its rows");
      }
      rows[t * ranks.size() + p] = has_sent ? sent->rows[t] : known[t * ranks.size() + p];
    }
  }
  FARANDOLE_RETURN_IF_ERROR(CheckRows(key, signature, rows, ranks.size()));
  return rows;
}

Status CheckSplits(const KeyName& key, const Signature& signature, std::span<const int64_t> rows,
                   std::span<const int64_t> splits, size_t size) {
  const size_t tensors = key.kind == OpKind::kAlltoall ? signature.tensors.size() : 0;
  FARANDOLE_RETURN_IF_ERROR(CheckNumbers(key, "splits", splits.size(), tensors, size));
  for (size_t t = 0; t < tensors; ++t) {
    const std::span<const int64_t> these = OfTensor(splits, t, size);
    FARANDOLE_RETURN_IF_ERROR(CheckSum(key, signature.tensors[t], these));
    // Cannot overflow: CheckSum has added the same numbers.
    const int64_t sum = std::reduce(these.begin(), these.end());
    if (sum <= rows[t]) continue;
    return Refuse(key, "splits " + DescribeRows(these) + " add up to " + std::to_string(sum) +
                           " rows; expected at most the " + std::to_string(rows[t]) +
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
  for (size_t i = 0; i < std::min(rows.size(), kRowsListed); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(rows[i]);
  }
  if (rows.size() > kRowsListed) text += ",... (" + std::to_string(rows.size()) + " ranks)";
  return text + "]";
}

}  // namespace farandole
