#include "coordinator/protocol/signature_cache.h"

#include <algorithm>

namespace farandole {

/// Numbers of released keys come first, so the table is as long as the most keys that were live at
/// once. One look-up by name, whether or not the key is new.
KeyId SignatureCache::Intern(const KeyName& name) {
  const KeyId next = free_.empty() ? static_cast<KeyId>(keys_.size()) : free_.back();
  const auto [it, added] = by_name_.emplace(name, next);
  if (!added) return it->second;
  if (free_.empty()) {
    keys_.emplace_back();
  } else {
    free_.pop_back();
  }
  OfOneSet& of_set = by_set_[name.set];
  of_set.keys.push_back(next);
  Key& key = keys_[next];
  key.name = name;
  key.is_live = true;
  key.closed = of_set.closed;
  return next;
}

const std::vector<KeyId>& SignatureCache::OfSet(uint32_t set) const {
  static const std::vector<KeyId> kNone;
  const auto it = by_set_.find(set);
  return it == by_set_.end() ? kNone : it->second.keys;
}

void SignatureCache::Know(std::shared_ptr<KnownWork> work) {
  for (size_t i = 0; i < work->keys.size(); ++i) {
    Key& key = keys_[work->keys[i].key];
    key.known = work.get();
    key.known_at = static_cast<uint32_t>(i);
    work->freed = std::max(work->freed, Slot(work->ids[i]).freed);
  }
  known_.push_back(std::move(work));
}

/// A vote that may mean an id's former key (IsLate) is looked at id by id.
KnownWork* SignatureCache::FindKnown(std::span<const uint32_t> ids, int64_t number) const {
  const CachedSignature* const first = ById(ids.front());
  KnownWork* const work = first == nullptr ? nullptr : keys_[first->key].known;
  if (work == nullptr || number < work->freed || ids.size() < work->ids.size()) return nullptr;
  return std::ranges::equal(ids.first(work->ids.size()), work->ids) ? work : nullptr;
}

/// A decider may still have it in its queue.
void SignatureCache::Dissolve(KnownWork& work) {
  for (size_t i = 0; i < work.keys.size(); ++i) {
    Key& key = keys_[work.keys[i].key];
    key.known = nullptr;
    work.Restore(i, ById(work.ids[i]), key);
  }
  std::erase_if(known_, [&](const auto& one) { return one.get() == &work; });
}

void SignatureCache::Release(KeyId id, int64_t number) {
  for (const CachedSignature* cached : At(id).cached) FreeId(cached->id, number);
  const auto of_set = by_set_.find(keys_[id].name.set);
  std::vector<KeyId>& list = of_set->second.keys;
  // From the end, as the keys of a set are released last to first (Applier::ReleaseKeys).
  list.erase(std::find(list.rbegin(), list.rend(), id).base() - 1);
  if (list.empty()) by_set_.erase(of_set);
  Clear(id);
}

void SignatureCache::Clear(KeyId id) {
  by_name_.erase(keys_[id].name);
  keys_[id] = Key();
  free_.push_back(id);
}

void SignatureCache::Retire(uint32_t id) {
  CachedSignature& cached = *Slot(id).cached;
  cached.retired = true;
  std::erase(At(cached.key).cached, &cached);
}

/// After a set has ended, IsLate recognises votes by the id that still mean the old key.
void SignatureCache::FreeId(uint32_t id, int64_t number) {
  Id& slot = Slot(id);
  slot.freed = std::max(slot.freed, number);
  slot.cached.reset();
}

/// Linear: a key has one id as a rule, and at most 64 (kIdsOfAKey in decider.cc).
const CachedSignature* SignatureCache::Match(const Key& key, const Signature& signature) const {
  const auto same = [&](const CachedSignature* cached) { return cached->signature == signature; };
  const auto it = std::find_if(key.cached.begin(), key.cached.end(), same);
  return it == key.cached.end() ? nullptr : *it;
}

const CachedSignature* SignatureCache::Bind(uint32_t id, KeyId key, const Signature& signature) {
  const auto level = static_cast<size_t>(LevelOfId(id));
  if (level >= ids_.size()) ids_.resize(level + 1);
  if (IndexOfId(id) >= ids_[level].size()) ids_[level].resize(size_t{IndexOfId(id)} + 1);
  Id& slot = Slot(id);
  if (slot.cached != nullptr) return nullptr;
  slot.cached = std::make_unique<CachedSignature>(
      CachedSignature{id, false, key, signature, {}, FusionKeyOf(signature)});
  keys_[key].cached.push_back(slot.cached.get());
  return keys_[key].cached.back();
}

}  // namespace farandole
