#include "coordinator/protocol/batching.h"

#include "coordinator/protocol/splits.h"

namespace farandole {
namespace {

const TensorSignature& TensorOf(const WorkDecision& work, BatchEntry at) {
  return work.keys[static_cast<size_t>(at.key)].signature->tensors[static_cast<size_t>(at.tensor)];
}

/// Bytes of the whole tensor on all ranks together; 1 of an alltoall, whose sizes are not known
/// yet: ranks want to know the rows also where these have no elements.
int64_t BytesOf(const DecidedKey& key, size_t t) {
  const TensorSignature& tensor = key.signature->tensors[t];
  if (key.signature->kind == OpKind::kAlltoall) return 1;
  int64_t count = tensor.Count();
  if (key.signature->kind == OpKind::kAllgather) {
    const size_t size = key.rows.size() / key.signature->tensors.size();
    count = 0;
    for (const int64_t rows : OfTensor(key.rows, t, size)) count += rows * RowCount(tensor);
  }
  return count * SizeOf(tensor.dtype);
}

/// Whether exactly the ranks in `absent` are absent from the tensor. Both lists ascend: one pass.
bool SameAbsent(const DecidedKey& key, int tensor, const std::vector<int32_t>& absent) {
  size_t seen = 0;
  for (const RankMask& rank : key.absent) {
    if (!TestBit(rank.mask, tensor)) continue;
    if (seen == absent.size() || absent[seen] != rank.rank) return false;
    ++seen;
  }
  return seen == absent.size();
}

/// Each key of a premul_sum has a factor of its own, and a batch has one. Tensors of one key have
/// one signature, so its address is enough; this is also how the tensors of one premul_sum come
/// into one batch.
bool Compatible(const WorkDecision& work, const BatchPlan& plan, BatchEntry next) {
  const BatchEntry first = plan.entries.front();
  const DecidedKey& a = work.keys[static_cast<size_t>(first.key)];
  const DecidedKey& b = work.keys[static_cast<size_t>(next.key)];
  if (TensorOf(work, first).dtype != TensorOf(work, next).dtype) return false;
  if (!SameAbsent(b, next.tensor, plan.absent)) return false;
  const Signature& s = *a.signature;
  const Signature& t = *b.signature;
  const Collective& collective = s;
  if (&s == &t) return true;
  return collective == t && FusesKeys(s);
}

/// The open batch that takes `next`: the last compatible one, if there is room. Where that one is
/// full, an earlier one with room is not taken, so that compatible tensors keep the order of the
/// decision. O(batches of the decision).
BatchPlan* FindOpen(const WorkDecision& work, BatchEntry next, int64_t bytes,
                    int64_t threshold_bytes, std::span<BatchPlan> plans) {
  if (threshold_bytes <= 0 || !FusesTensors(work.keys[static_cast<size_t>(next.key)].name->kind)) {
    return nullptr;
  }
  for (size_t i = plans.size(); i-- > 0;) {
    if (!Compatible(work, plans[i], next)) continue;
    const bool room =
        plans[i].bytes <= threshold_bytes && bytes <= threshold_bytes - plans[i].bytes;
    return room ? &plans[i] : nullptr;
  }
  return nullptr;
}

/// Reuses the plan of an earlier decision, so that its vectors keep their capacity.
BatchPlan& Open(const DecidedKey& key, int tensor, std::vector<BatchPlan>& plans, size_t* count) {
  if (*count == plans.size()) plans.emplace_back();
  BatchPlan& plan = plans[(*count)++];
  plan.entries.clear();
  plan.absent.clear();
  plan.bytes = 0;
  for (const RankMask& rank : key.absent) {
    if (TestBit(rank.mask, tensor)) plan.absent.push_back(rank.rank);
  }
  return plan;
}

}  // namespace

/// Nothing but its arguments counts, all of which are agreed. A rank that formed other batches
/// would run collectives that do not match, and report batches that the decider does not know.
void FormBatches(const WorkDecision& work, int64_t threshold_bytes, std::vector<BatchPlan>& plans,
                 size_t* count) {
  *count = 0;
  for (size_t k = 0; k < work.keys.size(); ++k) {
    const DecidedKey& key = work.keys[k];
    for (size_t t = 0; t < key.signature->tensors.size(); ++t) {
      const BatchEntry entry{static_cast<int32_t>(k), static_cast<int32_t>(t)};
      const int64_t bytes = BytesOf(key, t);
      if (TestBit(*key.skipped, entry.tensor)) continue;
      if (bytes == 0) continue;
      BatchPlan* plan =
          FindOpen(work, entry, bytes, threshold_bytes, std::span(plans).first(*count));
      if (plan == nullptr) plan = &Open(key, entry.tensor, plans, count);
      plan->entries.push_back(entry);
      plan->bytes += bytes;
    }
  }
}

}  // namespace farandole
