#include "coordinator/negotiation_keys.h"

#include <algorithm>

namespace farandole {

KeyId KeyTable::Intern(const KeyName& name) {
  const auto [it, added] = by_name_.emplace(name, static_cast<KeyId>(keys_.size()));
  if (added) keys_.emplace_back().name = name;
  return it->second;
}

const Bound* KeyTable::Match(const Key& key, const Signature& signature) const {
  const auto same = [&](const Bound* bound) { return bound->signature == signature; };
  const auto it = std::find_if(key.bound.begin(), key.bound.end(), same);
  return it == key.bound.end() ? nullptr : *it;
}

const Bound* KeyTable::Bind(uint32_t id, KeyId key, const Signature& signature) {
  if (id >= bound_.size()) bound_.resize(size_t{id} + 1, nullptr);
  if (bound_[id] != nullptr) return nullptr;
  storage_.push_back({id, key, signature, FuseOf(keys_[key].name.kind, signature)});
  bound_[id] = &storage_.back();
  keys_[key].bound.push_back(bound_[id]);
  return bound_[id];
}

}  // namespace farandole
