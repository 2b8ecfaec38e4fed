#include "coordinator/protocol/limits.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "coordinator/protocol/splits.h"

namespace farandole {
namespace {

/// Of a list by rank: a rank below kMaxRanks, and the tags and lengths around it and a mask.
constexpr size_t kEntryBytes = 13;
/// A number of rows of a tensor below kMaxTensorBytes.
constexpr size_t kRowsBytes = 9;

Status CheckName(const char* what, const std::string& name) {
  if (name.size() <= kMaxNameBytes) return {};
  return InvalidArgument(std::string(what) + " has " + std::to_string(name.size()) +
                         " bytes; expected at most " + std::to_string(kMaxNameBytes) + ": " +
                         name.substr(0, 64) + "...");
}

/// The extents of an empty tensor have to fit as well: TensorSignature::Count multiplies them in
/// order and must not overflow before it comes to the 0.
Status CheckTensor(const KeyName& key, const TensorSignature& tensor, int64_t* bytes) {
  const auto refuse = [&](const std::string& why) {
    return InvalidArgument(Describe(key) + ": " + why);
  };
  FARANDOLE_RETURN_IF_ERROR(CheckName("a tensor name", tensor.name));
  if (static_cast<int>(tensor.dtype) >= kDTypeCount) {
    return refuse("dtype number " + std::to_string(static_cast<int>(tensor.dtype)) +
                  " is unknown; expected 0.." + std::to_string(kDTypeCount - 1));
  }
  if (tensor.shape.size() > kMaxDims) {
    return refuse("tensor of " + std::to_string(tensor.shape.size()) + " dimensions; at most " +
                  std::to_string(kMaxDims));
  }
  int64_t size = SizeOf(tensor.dtype);
  bool fits = true;
  bool empty = false;
  for (const int64_t extent : tensor.shape) {
    if (extent < 0) return refuse("negative extent " + std::to_string(extent));
    empty |= extent == 0;
    fits = fits && !__builtin_mul_overflow(size, extent == 0 ? 1 : extent, &size);
  }
  if (fits && !empty) fits = !__builtin_add_overflow(*bytes, size, bytes);
  if (fits && size <= kMaxTensorBytes && *bytes <= kMaxTensorBytes) return {};
  return refuse("tensors of " + Describe(tensor) + " exceed " + std::to_string(kMaxTensorBytes) +
                " bytes");
}

}  // namespace

/// About 64 bytes for the scalar fields; at most 10 for an extent and 5 for a rank (varints).
size_t TravelBytes(const Signature& signature) {
  size_t bytes = 64 + signature.function.size() + 5 * signature.ranks.size();
  for (const TensorSignature& tensor : signature.tensors) {
    bytes += 8 + tensor.name.size() + 10 * tensor.shape.size();
  }
  return bytes;
}

/// As varints: 7 bits per byte, and one byte for a 0.
size_t TravelBytes(const std::vector<int64_t>& rows) {
  size_t bytes = 0;
  for (const int64_t one : rows) {
    bytes += (static_cast<size_t>(std::bit_width(static_cast<uint64_t>(one) | 1)) + 6) / 7;
  }
  return bytes;
}

size_t TravelBytes(const std::vector<RankMask>& masks) {
  size_t bytes = 0;
  for (const RankMask& one : masks) bytes += kEntryBytes + one.mask.size() * sizeof(uint64_t);
  return bytes;
}

size_t TravelBytes(const KeyVotes& votes) {
  size_t bytes = 32 + votes.key.name.size() + TravelBytes(votes.absent) + TravelBytes(votes.clean);
  for (const SignatureVotes& one : votes.signatures) {
    bytes += kEntryBytes + 5 * one.ranks.size();
    if (one.id == kNoId) bytes += TravelBytes(one.signature);
  }
  for (const RankText& failed : votes.failed) bytes += kEntryBytes + failed.text.size();
  for (const StepVotes& one : votes.steps) bytes += 48 + 5 * one.ranks.size();
  for (const RankRows& one : votes.rows) bytes += kEntryBytes + TravelBytes(one.rows);
  return bytes;
}

size_t TravelBytes(const WorkItem& item) {
  size_t bytes = 32 + TravelBytes(item.absent) + item.skipped.size() * sizeof(uint64_t) +
                 TravelBytes(item.rows);
  if (item.id == kNoId) bytes += item.key.name.size() + TravelBytes(item.signature);
  return bytes;
}

/// Half of kMaxListBytes for each list, because every rank may be in both, absent and clean.
/// Checked where a key is submitted: a record that is too large on its way up could only end the
/// job.
Status CheckGroupFits(const KeyName& key, const Signature& signature, size_t ranks) {
  const size_t words = (signature.tensors.size() + 63) / 64;
  // Masks, and the rows of an allgather: at most kRowsBytes each.
  const size_t rows = signature.kind == OpKind::kAllgather ? signature.tensors.size() : 0;
  const size_t entry = kEntryBytes + words * sizeof(uint64_t) + rows * kRowsBytes;
  if (entry <= kMaxListBytes / 2 / std::max<size_t>(ranks, 1)) return {};
  return InvalidArgument(Describe(key) + ": a group of " +
                         std::to_string(signature.tensors.size()) + " tensors among " +
                         std::to_string(ranks) +
                         " ranks is too large to negotiate; use several smaller groups");
}

Status CheckLimits(const KeyName& key, const Signature& signature) {
  FARANDOLE_RETURN_IF_ERROR(CheckName("a name", key.name));
  FARANDOLE_RETURN_IF_ERROR(CheckName("the name of a called collective", signature.function));
  if (MovesTensors(key.kind) == signature.tensors.empty()) {
    const std::string count = std::to_string(signature.tensors.size());
    return InvalidArgument(Describe(key) + ": " +
                           (signature.tensors.empty() ? "no tensor; expected at least one"
                                                      : count + " tensors; expected none"));
  }
  if (signature.tensors.size() > kMaxTensors) {
    return InvalidArgument("group of " + std::to_string(signature.tensors.size()) +
                           " tensors; at most " + std::to_string(kMaxTensors));
  }
  int64_t bytes = 0;
  for (const TensorSignature& tensor : signature.tensors) {
    FARANDOLE_RETURN_IF_ERROR(CheckTensor(key, tensor, &bytes));
  }
  FARANDOLE_RETURN_IF_ERROR(CheckDivisible(key, signature));
  const size_t travel = TravelBytes(signature);
  if (travel <= kMaxSignatureBytes) return {};
  return InvalidArgument("signature of " + std::to_string(travel) + " bytes; at most " +
                         std::to_string(kMaxSignatureBytes));
}

/// A shorter mask fits, as words that are missing have no bit set. In a mask of full length only
/// the last word can have bits beyond the end.
bool FitsMask(const Mask& mask, int bits) {
  const size_t words = (static_cast<size_t>(bits) + 63) / 64;
  if (mask.size() > words) return false;
  if (mask.size() < words || bits % 64 == 0) return true;
  return mask.empty() || (mask.back() >> (bits % 64)) == 0;
}

bool AreAscending(std::span<const int32_t> ranks) {
  return std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
}

}  // namespace farandole
