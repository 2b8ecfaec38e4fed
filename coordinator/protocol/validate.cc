#include "coordinator/protocol/validate.h"

#include <algorithm>

#include "coordinator/protocol/error_text.h"
#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/splits.h"

namespace farandole {
namespace {

Outcome Refuse(Code code, std::string text, FailureFacts facts = {}) {
  Outcome outcome;
  outcome.what = Outcome::What::kRefuse;
  outcome.why = Status(code, std::move(text), std::move(facts));
  return outcome;
}

/// The first text belongs to the first rank; those of later ones may be empty (DescribeFailures).
FailureFacts FactsOf(const std::vector<RankText>& failed) {
  FailureFacts facts;
  for (const RankText& one : failed) facts.ranks.push_back(one.rank);
  facts.cause = failed.front().text;
  return facts;
}

/// Tensors that each of `size` ranks is absent from or clean in. A rank that is both in a tensor is
/// counted once. Ranks that have joined are in the absent list.
Mask NobodyPresent(const KeyVotes& votes, int tensors, size_t size) {
  std::vector<size_t> without(static_cast<size_t>(tensors), 0);
  const auto count = [&](const Mask& mask, const Mask* not_in) {
    for (int t = 0; t < tensors; ++t) {
      if (!TestBit(mask, t) || (not_in != nullptr && TestBit(*not_in, t))) continue;
      ++without[static_cast<size_t>(t)];
    }
  };
  for (const RankMask& absent : votes.absent) count(absent.mask, nullptr);
  for (const RankMask& clean : votes.clean) count(clean.mask, FindMask(votes.absent, clean.rank));
  Mask nobody;
  for (int t = 0; t < tensors; ++t) {
    if (without[static_cast<size_t>(t)] == size) SetBit(nobody, t, tensors);
  }
  return nobody;
}

/// The absent lists without tensors that do not run, and without ranks that are left empty.
std::vector<RankMask> Trim(const std::vector<RankMask>& absent, const Mask& skipped) {
  std::vector<RankMask> trimmed;
  for (const RankMask& rank : absent) {
    RankMask kept = rank;
    for (size_t w = 0; w < kept.mask.size() && w < skipped.size(); ++w) kept.mask[w] &= ~skipped[w];
    if (AnyBit(kept.mask)) trimmed.push_back(std::move(kept));
  }
  return trimmed;
}

/// A broadcast's root must contribute to every tensor that runs. `outcome.absent` is trimmed, so
/// the root may be absent from tensors that are skipped.
Status CheckRoot(const KeyName& key, const Signature& signature, const Outcome& outcome,
                 const std::vector<int32_t>& ranks) {
  const std::string root = "root rank " + std::to_string(signature.root);
  if (!std::binary_search(ranks.begin(), ranks.end(), signature.root)) {
    return InvalidArgument(Describe(key) + ": " + root + " is no member of the process set");
  }
  if (FindMask(outcome.absent, signature.root) == nullptr) return {};
  return InvalidArgument(Describe(key) + ": " + root +
                         " has nothing to broadcast: it joined or voted absent");
}

/// What a kind asks of those who take part.
Status CheckParticipants(const KeyName& key, const Signature& signature, const Outcome& outcome,
                         const std::vector<int32_t>& ranks, bool join_allreduce_only) {
  const bool wants_all =
      key.kind == OpKind::kAlltoall || (join_allreduce_only && key.kind != OpKind::kAllreduce);
  if (wants_all && !outcome.absent.empty()) {
    return InvalidArgument(Describe(key) + ": rank " + std::to_string(outcome.absent.front().rank) +
                           " has joined or voted absent; " + std::string(Name(key.kind)) +
                           " is not possible while a rank has joined");
  }
  return key.kind == OpKind::kBroadcast ? CheckRoot(key, signature, outcome, ranks) : Status();
}

/// Those who reported a step reported the same one, and those who ran backward passes in it ran as
/// many. A rank that ran none takes part in step() all the same. An announcement compares steps
/// alone: the passes of a round may be reported before the last of them, and its gradients compare
/// them.
bool AgreeOnStep(OpKind kind, const std::vector<StepVotes>& steps) {
  int32_t passes = 0;
  for (const StepVotes& one : steps) {
    if (one.count.step != steps.front().count.step) return false;
    if (one.count.passes == 0 || kind == OpKind::kStep) continue;
    if (passes != 0 && one.count.passes != passes) return false;
    passes = one.count.passes;
  }
  return true;
}

/// "bool, uint8, ... or float64"
std::string ReducibleDTypes() {
  std::string text;
  for (int i = 0; i < kReducibleDTypeCount; ++i) {
    if (i > 0) text += i + 1 == kReducibleDTypeCount ? " or " : ", ";
    text += Name(static_cast<DType>(i));
  }
  return text;
}

Status CheckAdasum(const KeyName& name, const Signature& signature) {
  if (name.kind != OpKind::kAllreduce) {
    return InvalidArgument(Describe(name) +
                           ": adasum needs the whole tensor on every rank; expected an allreduce");
  }
  if (signature.device != DeviceKind::kCuda) return {};
  return InvalidArgument(Describe(name) +
                         ": adasum is not offered for tensors on a GPU; copy the tensor into host "
                         "memory, reduce it there and copy the result back");
}

/// The op must be defined for the dtype, and only numbers can be multiplied.
Status CheckReduction(const KeyName& name, const Signature& signature, DType dtype) {
  const std::string op(Name(signature.op));
  if (!IsReducible(dtype)) {
    return InvalidArgument(Describe(name) + ": " + std::string(Name(dtype)) +
                           " cannot be reduced, only moved by broadcast, allgather and alltoall; "
                           "expected " +
                           ReducibleDTypes());
  }
  if (!IsDefined(signature.op, dtype)) {
    const char* const expected =
        signature.op == ReduceOp::kAdasum
            ? "; expected float16, bfloat16, float32 or float64"
            : (dtype == DType::kBool ? "; expected min (and), max (or), product (and) or bit_xor"
                                     : "; expected integers or bool");
    return InvalidArgument(Describe(name) + ": " + op + " is not defined for " +
                           std::string(Name(dtype)) + expected);
  }
  if (signature.op == ReduceOp::kAdasum) FARANDOLE_RETURN_IF_ERROR(CheckAdasum(name, signature));
  if (IsBitwise(signature.op) && signature.device == DeviceKind::kCuda) {
    return InvalidArgument(Describe(name) + ": " + op +
                           " is not offered for tensors on a GPU, as NCCL has no bitwise ops; "
                           "expected a tensor in host memory");
  }
  const bool scales = signature.prescale != 1.0 || signature.postscale != 1.0;
  if (!scales || (dtype != DType::kBool && !IsBitwise(signature.op))) return {};
  return InvalidArgument(Describe(name) + ": " + (dtype == DType::kBool ? "bool" : op) +
                         " cannot be multiplied; expected prescale and postscale 1, got " +
                         std::to_string(signature.prescale) + " and " +
                         std::to_string(signature.postscale));
}

}  // namespace

Status Validate(const KeyName& name, const Signature& signature, std::span<const int32_t> members) {
  FARANDOLE_RETURN_IF_ERROR(CheckLimits(name, signature));
  if (name.kind == OpKind::kBroadcast &&
      std::find(members.begin(), members.end(), signature.root) == members.end()) {
    return InvalidArgument(Describe(name) + ": root rank " + std::to_string(signature.root) +
                           " is no member of the process set; expected a rank from " +
                           std::to_string(members.front()) + " to " +
                           std::to_string(members.back()));
  }
  for (const TensorSignature& tensor : signature.tensors) {
    if (!Reduces(name.kind)) break;
    FARANDOLE_RETURN_IF_ERROR(CheckReduction(name, signature, tensor.dtype));
  }
  return {};
}

/// Failures and mismatches come first: with several signatures the masks belong to different
/// tensors, and nodes on the way drop them (ShortenRefused).
Outcome ValidateRound(const KeyName& key, const KeyVotes& votes, const std::vector<int32_t>& ranks,
                      const std::function<const Signature&(size_t)>& signature,
                      std::span<const int64_t> known, bool join_allreduce_only) {
  if (!votes.failed.empty()) {
    return Refuse(Code::kAborted, DescribeFailures(key, votes.failed), FactsOf(votes.failed));
  }
  if (votes.signatures.size() > 1) {
    std::vector<Sent> sent;
    for (size_t i = 0; i < votes.signatures.size(); ++i) {
      sent.push_back({&signature(i), votes.signatures[i].ranks});
    }
    const std::string tensor = MismatchedTensor(sent);
    return Refuse(Code::kMismatch, DescribeMismatch(key, std::move(sent)), {.tensor = tensor});
  }
  if (!AgreeOnStep(key.kind, votes.steps)) {
    return Refuse(Code::kMismatch, DescribeSteps(key, votes.steps));
  }
  const auto tensors = static_cast<int>(signature(0).tensors.size());
  Outcome outcome;
  if (tensors == 0) return outcome;
  outcome.skipped = NobodyPresent(votes, tensors, ranks.size());
  const Mask full = FullMask(tensors);
  if (outcome.skipped == full) {
    outcome.what = Outcome::What::kSkip;
    return outcome;
  }
  // Ranks that are clean are not absent: they contribute their value, since somebody is present.
  outcome.absent = Trim(votes.absent, outcome.skipped);
  const Status checked = CheckParticipants(key, signature(0), outcome, ranks, join_allreduce_only);
  if (!checked.ok()) return Refuse(Code::kMismatch, checked.message());  // it concerns all of them
  if (signature(0).kind == OpKind::kAllgather) {
    Result<std::vector<int64_t>> rows = CollectRows(key, signature(0), votes, ranks, known);
    if (!rows.ok()) return Refuse(rows.status().code(), rows.status().message());
    outcome.rows = std::move(rows).value();
  }
  // Only then does a list of ranks without masks stand for all tensors, when keys are fused.
  outcome.uniform = outcome.skipped.empty() &&
                    std::all_of(outcome.absent.begin(), outcome.absent.end(),
                                [&](const RankMask& rank) { return rank.mask == full; });
  return outcome;
}

}  // namespace farandole
