// The table of keys and ids on one node.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "coordinator/protocol/known_work.h"
#include "coordinator/protocol/state.h"

namespace farandole {

/// Invariant: ids are bound and retired by decisions only, the same ones on all nodes that serve a
/// key's set. References to a Key, and pointers to a CachedSignature, stay valid until the key is
/// released; its number and ids then are another's.
class SignatureCache {
 public:
  /// The key's number here; new names get a free one. Names of data collectives of different kinds
  /// are one key.
  KeyId Intern(const KeyName& name);
  /// The key, with its round and submission: known work of which it is a part is dissolved.
  Key& At(KeyId id) {
    Key& key = keys_[id];
    if (key.known != nullptr) Dissolve(*key.known);
    return key;
  }
  /// The same, but that what known work keeps of it is there.
  Key& Peek(KeyId id) { return keys_[id]; }
  const Key& Peek(KeyId id) const { return keys_[id]; }
  /// Whether an own submission of it is pending.
  bool IsPending(KeyId id) const {
    const Key& key = keys_[id];
    return key.known == nullptr ? key.pending : key.known_at < key.known->own;
  }
  /// From now on its keys are known as one. They are at rest, and not part of another one.
  void Know(std::shared_ptr<KnownWork> work);
  /// The known work that the first of `ids` is a part of, if they begin with all of its ids and
  /// their sender has applied the decisions up to `number`; or nullptr.
  KnownWork* FindKnown(std::span<const uint32_t> ids, int64_t number) const;
  size_t known() const { return known_.size(); }
  /// Numbers are below it; released ones among them have an empty Key.
  size_t size() const { return keys_.size(); }
  /// Keys that are not released.
  size_t live() const { return by_name_.size(); }
  /// Those of a set.
  const std::vector<KeyId>& OfSet(uint32_t set) const;
  /// Forgets the key, whose set has ended, and frees its ids. Nothing refers to it any more.
  void Release(KeyId id, int64_t number);
  /// Forgets the keys of which `is_forgotten(id)` is true; they have no ids, and their sets are
  /// live. One that is interned again counts as closed when the last forgotten key of its set was.
  template <class Predicate>
  void ForgetIf(Predicate is_forgotten) {
    for (auto& entry : by_set_) {
      OfOneSet& of_set = entry.second;
      std::erase_if(of_set.keys, [&](KeyId id) {
        if (!is_forgotten(id)) return false;
        of_set.closed = std::max(of_set.closed, keys_[id].closed);
        Clear(id);
        return true;
      });
    }
  }
  /// Before a set ends of which every key may be forgotten.
  void EndSet(uint32_t set) {
    if (OfSet(set).empty()) by_set_.erase(set);
  }

  /// nullptr for an id that is not bound here.
  const CachedSignature* ById(uint32_t id) const {
    const Id* const slot = Find(id);
    return slot == nullptr ? nullptr : slot->cached.get();
  }
  /// Whether a node that has applied the decisions up to `number`, and none later, may mean by `id`
  /// a key whose set has ended since: a vote that was on its way then. Nodes that vote for the next
  /// key with this id have applied a later decision.
  bool IsLate(uint32_t id, int64_t number) const {
    const Id* const slot = Find(id);
    return slot != nullptr && number < slot->freed;
  }
  /// The key's id for this signature, or nullptr.
  const CachedSignature* Match(const Key& key, const Signature& signature) const;
  /// What was voted for, in full.
  const Signature& SignatureOf(const SignatureVotes& votes) const {
    return votes.id == kNoId ? votes.signature : ById(votes.id)->signature;
  }
  /// Match finds the id no more, ById does until it is freed.
  void Retire(uint32_t id);
  /// @param number  Of the decision that ended the key's set; 0: nobody votes by the id any more.
  void FreeId(uint32_t id, int64_t number);
  /// Calls `use(cached)` for each id of that level.
  template <class Use>
  void ForEachId(int level, Use use) const {
    if (static_cast<size_t>(level) >= ids_.size()) return;
    for (const Id& slot : ids_[static_cast<size_t>(level)])
      if (slot.cached != nullptr) use(*slot.cached);
  }
  /// @return nullptr if the id is taken.
  const CachedSignature* Bind(uint32_t id, KeyId key, const Signature& signature);
  /// Allgather: the rows of the decision that is being applied to the id.
  void SetRows(uint32_t id, const std::vector<int64_t>& rows) { Slot(id).cached->rows = rows; }

 private:
  struct HashName {
    size_t operator()(const KeyName& name) const { return static_cast<size_t>(Hash(name)); }
  };
  struct EqualName {
    bool operator()(const KeyName& a, const KeyName& b) const { return SameKey(a, b); }
  };
  struct Id {
    std::unique_ptr<CachedSignature> cached;
    int64_t freed = 0;  // number of the decision that ended its last key's set
  };
  void Clear(KeyId id);
  void Dissolve(KnownWork& work);
  const Id* Find(uint32_t id) const {
    const auto level = static_cast<size_t>(LevelOfId(id));
    if (level >= ids_.size() || IndexOfId(id) >= ids_[level].size()) return nullptr;
    return &ids_[level][IndexOfId(id)];
  }
  Id& Slot(uint32_t id) { return ids_[static_cast<size_t>(LevelOfId(id))][IndexOfId(id)]; }

  std::deque<Key> keys_;
  std::vector<KeyId> free_;
  std::unordered_map<KeyName, KeyId, HashName, EqualName> by_name_;
  struct OfOneSet {
    std::vector<KeyId> keys;
    int64_t closed = 0;  // the largest Key::closed of forgotten ones
  };
  std::unordered_map<uint32_t, OfOneSet> by_set_;
  std::vector<std::vector<Id>> ids_;  // by level and index
  std::vector<std::shared_ptr<KnownWork>> known_;
};

}  // namespace farandole
