// The table of keys and ids on one node.
//
// Thread safety: none; one baton holder at a time. Internal to the negotiation.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "coordinator/negotiation_state.h"

namespace farandole {

/// Invariant: ids are bound by decisions only, the same ones on all nodes that serve a key's set.
/// References to a Key and pointers to a Bound stay valid for the table's life.
class KeyTable {
 public:
  /// The key's number here; new names get the next one.
  KeyId Intern(const KeyName& name);
  Key& At(KeyId id) { return keys_[id]; }
  const Key& At(KeyId id) const { return keys_[id]; }
  size_t size() const { return keys_.size(); }

  /// nullptr for an id that was never bound here.
  const Bound* ById(uint32_t id) const { return id < bound_.size() ? bound_[id] : nullptr; }
  /// The key's id for this signature, or nullptr.
  const Bound* Match(const Key& key, const Signature& signature) const;
  /// @return nullptr if the id is taken.
  const Bound* Bind(uint32_t id, KeyId key, const Signature& signature);

 private:
  struct HashName {
    size_t operator()(const KeyName& name) const { return static_cast<size_t>(Hash(name)); }
  };
  std::deque<Key> keys_;
  std::unordered_map<KeyName, KeyId, HashName> by_name_;
  std::deque<Bound> storage_;
  std::vector<const Bound*> bound_;  // by id
};

}  // namespace farandole
