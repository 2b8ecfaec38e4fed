// What ranks negotiate about: keys, signatures and votes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/collective.h"

namespace farandole {

inline constexpr uint32_t kGlobalSet = 0;  ///< Uid of the set of all ranks.

/// Readiness is counted per (process set, name). Barriers, changes of process sets and steps have
/// names of their own, apart from those of data collectives (SpaceOf); among the latter a name may
/// serve one kind after another.
struct KeyName {
  uint32_t set = kGlobalSet;
  OpKind kind = OpKind::kAllreduce;  ///< Of a data collective: that of the current use.
  std::string name;
  /// What the user called, where that is not `kind`: see Signature and CalledAs. For messages.
  std::string function = {};
  bool operator==(const KeyName&) const = default;
};
/// Whether a kind has tensors; barriers, changes of process sets and steps have none.
constexpr bool MovesTensors(OpKind kind) { return kind < OpKind::kBarrier; }
/// Whether each rank may pass another number of rows (the first dimension): allgather, alltoall.
/// The size of the result is then known only when the operation runs.
constexpr bool RowsMayDiffer(OpKind kind) {
  return kind == OpKind::kAllgather || kind == OpKind::kAlltoall;
}
/// Whether tensors share batches: allreduces, and broadcasts of one root. The splits of the other
/// kinds lie end to end already.
constexpr bool FusesTensors(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kBroadcast;
}
/// Whether those of different keys do: not of a premul_sum, as a batch has one factor.
constexpr bool FusesKeys(const Collective& collective) {
  return FusesTensors(collective.kind) && collective.op != ReduceOp::kPreMulSum;
}
/// Kinds whose names are distinguished have different ones.
constexpr OpKind SpaceOf(OpKind kind) { return MovesTensors(kind) ? OpKind::kAllreduce : kind; }
/// Whether both are the same key, whatever its current use.
bool SameKey(const KeyName& a, const KeyName& b);

/// One tensor of a key. A plain operation has one tensor with an empty name; a group has several.
struct TensorSignature {
  std::string name;  ///< Only in groups, for messages.
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  bool operator==(const TensorSignature&) const = default;
  /// Number of elements; the shape has passed CheckLimits.
  int64_t Count() const;
  int64_t Bytes() const { return Count() * SizeOf(dtype); }
};

/// What must be equal among those who submit a key.
///
/// Shapes are those of the input; where rows may differ (RowsMayDiffer) the first dimension is 0.
struct Signature : Collective {
  /// The function that the user called where this is a part of it, as the broadcast of a
  /// "broadcast_object"; empty: `kind`.
  std::string function = {};
  std::vector<TensorSignature> tensors;
  std::vector<int32_t> ranks;  ///< AddSet: the members, ascending. RemoveSet: {uid}.
  bool operator==(const Signature&) const = default;
};
/// Equal in all but the kind, which a name has.
bool SameDescription(const Signature& a, const Signature& b);

/// One bit per tensor of a key. Empty means "no bit set".
using Mask = std::vector<uint64_t>;
bool TestBit(const Mask& mask, int bit);
/// Grows an empty mask to hold `bits` bits.
void SetBit(Mask& mask, int bit, int bits);
bool AnyBit(const Mask& mask);
/// The mask with the first `bits` bits set; empty for 0.
Mask FullMask(int bits);

/// Where in its training loop a rank submits gradients, as its optimizer counts. Ranks that submit
/// one key must agree on it (AgreeOnStep): gradients of different steps are never reduced together.
struct StepCount {
  int64_t step = 0;             ///< From 1; 0: not reported, and compared with nobody.
  int32_t passes = 0;           ///< Backward passes since the last step; 0: compared with nobody's.
  int32_t no_sync_passes = 0;   ///< How many of them only accumulated.
  int32_t previous_passes = 0;  ///< Of the step before, for messages.
  int32_t previous_no_sync_passes = 0;  ///< Likewise.
  bool operator==(const StepCount&) const = default;
};

/// How one rank takes part. All-empty is the common case: present with every tensor.
struct Vote {
  Mask absent;  ///< Tensors this rank takes part in without a contribution.
  Mask clean;   ///< Tensors that hold a value reduced before: contributed only if somebody is
                ///< present.
  std::string
      failed;      ///< Not empty: this rank's backward raised; the key is refused with this text.
  StepCount step;  ///< Of gradients.
  std::vector<int64_t> rows;  ///< Allgather: of each tensor, the rows that this rank passes.
};

/// The collective that the user called: `function`, or the name of `kind` where it is empty.
std::string CalledAs(OpKind kind, const std::string& function);
/// ""layer1.weight"" or, with a set, ""layer1.weight" (process set 3)".
std::string DescribeName(const KeyName& key);
/// "allreduce "layer1.weight"" or, with a set, "allreduce "layer1.weight" (process set 3)".
std::string Describe(const KeyName& key);
/// "float32 [64,128]" for a plain key; for messages only.
std::string Describe(const TensorSignature& tensor);

}  // namespace farandole
