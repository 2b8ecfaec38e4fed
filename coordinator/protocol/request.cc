#include "coordinator/protocol/request.h"

#include <algorithm>
#include <tuple>

namespace farandole {

int64_t TensorSignature::Count() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

bool SameKey(const KeyName& a, const KeyName& b) {
  return a.set == b.set && SpaceOf(a.kind) == SpaceOf(b.kind) && a.name == b.name;
}

/// The kinds are not compared: the caller has found `a` by its kind, and `b` need not say one
/// (OperationRegistry::Redefine fills it in).
bool SameDescription(const Signature& a, const Signature& b) {
  Collective of_b = b;
  of_b.kind = a.kind;
  const Collective& of_a = a;
  return of_a == of_b &&
         std::tie(a.function, a.tensors, a.ranks) == std::tie(b.function, b.tensors, b.ranks);
}

bool TestBit(const Mask& mask, int bit) {
  const auto word = static_cast<size_t>(bit) / 64;
  return word < mask.size() && (mask[word] >> (bit % 64) & 1) != 0;
}

void SetBit(Mask& mask, int bit, int bits) {
  const size_t words = (static_cast<size_t>(bits) + 63) / 64;
  if (mask.size() < words) mask.resize(words, 0);
  mask[static_cast<size_t>(bit) / 64] |= uint64_t{1} << (bit % 64);
}

bool AnyBit(const Mask& mask) {
  return std::any_of(mask.begin(), mask.end(), [](uint64_t word) { return word != 0; });
}

/// Bits beyond the last are 0, so that masks are compared as vectors.
Mask FullMask(int bits) {
  Mask mask((static_cast<size_t>(bits) + 63) / 64, ~uint64_t{0});
  if (bits % 64 != 0) mask.back() >>= 64 - bits % 64;
  return mask;
}

std::string CalledAs(OpKind kind, const std::string& function) {
  return function.empty() ? std::string(Name(kind)) : function;
}

std::string DescribeName(const KeyName& key) {
  std::string text = "\"" + key.name + "\"";
  if (key.set != kGlobalSet) text += " (process set " + std::to_string(key.set) + ")";
  return text;
}

std::string Describe(const KeyName& key) {
  return CalledAs(key.kind, key.function) + " " + DescribeName(key);
}

std::string Describe(const TensorSignature& tensor) {
  std::string text = std::string(Name(tensor.dtype)) + " [";
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(tensor.shape[i]);
  }
  return text + "]";
}

}  // namespace farandole
