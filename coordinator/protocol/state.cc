#include "coordinator/protocol/state.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace farandole {

bool Contributors::Test(int i) const {
  if (i < 64) return (first_ >> i & 1) != 0;
  const auto word = static_cast<size_t>(i) / 64 - 1;
  return word < rest_.size() && (rest_[word] >> (i % 64) & 1) != 0;
}

void Contributors::Set(int i) {
  if (i < 64) {
    first_ |= uint64_t{1} << i;
    return;
  }
  const auto word = static_cast<size_t>(i) / 64 - 1;
  if (word >= rest_.size()) rest_.resize(word + 1, 0);
  rest_[word] |= uint64_t{1} << (i % 64);
}

void Contributors::Clear() {
  first_ = 0;
  std::fill(rest_.begin(), rest_.end(), 0);
}

const Mask* FindMask(const std::vector<RankMask>& list, int32_t rank) {
  const auto it = std::lower_bound(list.begin(), list.end(), rank,
                                   [](const RankMask& one, int32_t r) { return one.rank < r; });
  return it != list.end() && it->rank == rank ? &it->mask : nullptr;
}

bool FusionKey::With(const FusionKey& other) const {
  return uniform && other.uniform && collective == other.collective && dtype == other.dtype;
}

/// A key without tensors is not uniform, so nothing is fused with it.
FusionKey FusionKeyOf(const Signature& signature) {
  FusionKey fusion_key;
  fusion_key.collective = signature;
  if (signature.tensors.empty()) return fusion_key;
  fusion_key.dtype = signature.tensors.front().dtype;
  fusion_key.uniform = FusesKeys(signature);
  for (const TensorSignature& tensor : signature.tensors) {
    fusion_key.uniform = fusion_key.uniform && tensor.dtype == fusion_key.dtype;
    fusion_key.bytes += tensor.Bytes();
  }
  return fusion_key;
}

/// The signature of a plain round stands for all that have voted so far: it gets no list of ranks
/// until another one comes (VoteTally::AddVariant).
KeyVotes& Round::Detail(const KeyName& key) {
  if (detailed) return *detail;
  if (detail == nullptr) detail = std::make_unique<KeyVotes>();
  *detail = KeyVotes();
  detail->key = key;
  detailed = true;
  if (plain != nullptr) {
    detail->signatures.emplace_back();
    detail->signatures.back().id = plain->id;
    plain = nullptr;
    if (step.step > 0) detail->steps.push_back({step, {}});
  }
  return *detail;
}

bool SetState::Contains(int rank) const {
  return std::binary_search(info.ranks.begin(), info.ranks.end(), rank);
}

/// Need not be equal on all ranks, as std::hash may differ between builds: it is used within one
/// process only, by Decider::IdFor.
uint64_t Hash(const Signature& signature) {
  uint64_t hash = Hash(static_cast<const Collective&>(signature));
  hash = Mix(hash, std::hash<std::string>()(signature.function));
  for (const TensorSignature& tensor : signature.tensors) {
    hash = Mix(hash, std::hash<std::string>()(tensor.name));
    hash = Mix(hash, static_cast<uint64_t>(tensor.dtype) << 32 | tensor.shape.size());
    for (const int64_t extent : tensor.shape) hash = Mix(hash, static_cast<uint64_t>(extent));
  }
  for (const int32_t rank : signature.ranks) hash = Mix(hash, static_cast<uint64_t>(rank));
  return hash;
}

/// Equal where SameKey is: neither reads the function, nor which data collective it is.
uint64_t Hash(const KeyName& key) {
  return Mix(Mix(key.set, static_cast<uint64_t>(SpaceOf(key.kind))),
             std::hash<std::string>()(key.name));
}

}  // namespace farandole
