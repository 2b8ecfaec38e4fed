// The one mapping between the message structs and their Protocol Buffers (farandole.proto): an
// archive is shown a struct beside its Protocol Buffer, and a function here for each struct names
// the fields, their limits and their places in both.
//
// Where an archive returns a value, that is what the Protocol Buffer is to hold; when it is read,
// what it holds already. Reading refuses what Submit would refuse (coordinator/protocol/limits.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/control/wire/bytes.h"
#include "coordinator/control/wire/farandole.pb.h"
#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/messages.h"
#include "ops/device.h"

namespace farandole {

class RecordWriter {
 public:
  static constexpr bool kReads = false;

  template <class Value, class Held>
  Held Number(const char*, Value value, Held, int64_t = 0, int64_t = 0) {
    return static_cast<Held>(value);
  }
  template <class Enumeration>
  uint32_t Enum(const char*, Enumeration value, uint32_t, Enumeration) {
    return static_cast<uint32_t>(value);
  }
  double Factor(const char*, double value, double) { return value; }
  void Text(const char*, const std::string& text, std::string* held, size_t) { *held = text; }
  template <class Item, class Items>
  void List(const char*, const std::vector<Item>& list, Items* held, size_t) {
    for (const Item& one : list) Fields(*this, one, *held->Add());
  }
  template <class Value, class Values>
  void Numbers(const char*, const std::vector<Value>& list, Values* held, size_t, int64_t = 0,
               int64_t = 0) {
    held->Add(list.begin(), list.end());
  }
  /// In its fixed layout.
  template <class Struct>
  void Fixed(const Struct& value, std::string* held) {
    std::vector<std::byte> bytes;
    ByteWriter writer(bytes);
    Fields(writer, value);
    held->assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  /// Whether a field is there that need not be.
  bool Has(bool in_struct, bool) { return in_struct; }
  void Require(bool, const char*) {}
  void CheckPeer(const KeyName&, const Signature&) {}
};

class RecordReader : public Checks {
 public:
  static constexpr bool kReads = true;

  template <class Value, class Held>
  Held Number(const char* field, Value& value, Held held, int64_t least = kLowest<Value>,
              int64_t most = kHighest<Value>) {
    Check(field, held, least, most);
    value = static_cast<Value>(held);
    return held;
  }
  template <class Enumeration>
  uint32_t Enum(const char* field, Enumeration& value, uint32_t held, Enumeration last) {
    if (Check(field, held, 0, static_cast<int64_t>(last))) value = static_cast<Enumeration>(held);
    return held;
  }
  /// NaN differs from itself, so ranks that all passed it would be refused as disagreeing.
  double Factor(const char* field, double& value, double held) {
    if (!std::isfinite(held)) Refuse(std::string(field) + " is not finite");
    return value = held;
  }
  void Text(const char* field, std::string& text, std::string* held, size_t most) {
    if (CheckSize(field, held->size(), most)) text = std::move(*held);
  }
  template <class Item, class Items>
  void List(const char* field, std::vector<Item>& list, Items* held, size_t most) {
    list.clear();
    if (!CheckSize(field, static_cast<size_t>(held->size()), most, "number of ")) return;
    for (auto one = held->begin(); one != held->end() && status().ok(); ++one) {
      Fields(*this, list.emplace_back(), *one);
    }
  }
  template <class Value, class Values>
  void Numbers(const char* field, std::vector<Value>& list, Values* held, size_t most,
               int64_t least = INT64_MIN, int64_t last = INT64_MAX) {
    if (!CheckSize(field, static_cast<size_t>(held->size()), most, "number of ")) return;
    for (const auto one : *held) Check(field, static_cast<int64_t>(one), least, last);
    list.assign(held->begin(), held->end());
  }
  template <class Struct>
  void Fixed(Struct& value, std::string* held) {
    ByteReader reader(std::as_bytes(std::span(held->data(), held->size())));
    Fields(reader, value);
    Include(reader.Finish());
  }
  bool Has(bool, bool held) { return held; }
  void Require(bool holds, const char* why) {
    if (!holds) Refuse(why);
  }
  /// What this rank would refuse to submit it refuses to hear. The kind is the signature's: ranks
  /// may disagree with the key's, and a record by id has no key at all.
  void CheckPeer(KeyName key, const Signature& signature) {
    key.kind = signature.kind;
    const Status checked = CheckLimits(key, signature);
    if (!checked.ok()) Refuse(checked.message());
  }
};

template <class Archive>
uint32_t RankField(Archive& archive, Of<Archive, int32_t>& rank, uint32_t held) {
  return archive.Number("rank", rank, held, 0, kMaxRanks - 1);
}
template <class Archive, class Ranks, class Held>
void RanksField(Archive& archive, Ranks& ranks, Held* held) {
  archive.Numbers("ranks", ranks, held, kMaxRanks, 0, kMaxRanks - 1);
}
template <class Archive, class Words, class Held>
void MaskField(Archive& archive, Words& words, Held* held) {
  archive.Numbers("words of a mask", words, held, (kMaxTensors + 63) / 64);
}

/// Without `function`: it is part of the signature and travels there.
template <class Archive>
void Fields(Archive& archive, Of<Archive, KeyName>& key, wire::Key& to) {
  to.set_set(archive.Number("process set", key.set, to.set()));
  to.set_kind(archive.Enum("kind", key.kind, to.kind(), kLastOpKind));
  archive.Text("name", key.name, to.mutable_name(), kMaxNameBytes);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, TensorSignature>& tensor, wire::TensorSignature& to) {
  archive.Text("tensor name", tensor.name, to.mutable_name(), kMaxNameBytes);
  to.set_dtype(archive.Enum("dtype", tensor.dtype, to.dtype(), DType{kDTypeCount - 1}));
  archive.Numbers("dimensions", tensor.shape, to.mutable_shape(), kMaxDims);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, Collective>& collective, wire::Collective& to) {
  to.set_kind(archive.Enum("collective kind", collective.kind, to.kind(), kLastOpKind));
  to.set_op(archive.Enum("reduce op", collective.op, to.op(), kLastReduceOp));
  to.set_wire_format(
      archive.Enum("wire format", collective.wire_format, to.wire_format(), kLastWireFormat));
  to.set_device(archive.Enum("device", collective.device, to.device(), kLastDeviceKind));
  to.set_root(archive.Number("root rank", collective.root, to.root()));
  to.set_prescale(archive.Factor("prescale", collective.prescale, to.prescale()));
  to.set_postscale(archive.Factor("postscale", collective.postscale, to.postscale()));
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, Signature>& signature, wire::Signature& to) {
  Of<Archive, Collective>& collective = signature;
  Fields(archive, collective, *to.mutable_collective());
  archive.Text("function", signature.function, to.mutable_function(), kMaxNameBytes);
  archive.List("tensors", signature.tensors, to.mutable_tensors(), kMaxTensors);
  RanksField(archive, signature.ranks, to.mutable_ranks());
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, RankMask>& mask, wire::RankMask& to) {
  to.set_rank(RankField(archive, mask.rank, to.rank()));
  MaskField(archive, mask.mask, to.mutable_mask());
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, RankRows>& rows, wire::RankRows& to) {
  to.set_rank(RankField(archive, rows.rank, to.rank()));
  archive.Numbers("rows", rows.rows, to.mutable_rows(), kMaxRowNumbers, 0);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, RankText>& text, wire::RankText& to) {
  to.set_rank(RankField(archive, text.rank, to.rank()));
  archive.Text("failure", text.text, to.mutable_text(), kMaxNameBytes);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, StepVotes>& votes, wire::StepVotes& to) {
  archive.Fixed(votes.count, to.mutable_count());
  RanksField(archive, votes.ranks, to.mutable_ranks());
}

/// An id, which stands for key and signature, or the signature. @return whether it is the id.
template <class Archive, class Struct, class Held>
bool IdOrSignature(Archive& archive, Struct& value, Held& to) {
  const bool by_id = archive.Has(value.id != kNoId, to.has_id());
  if (by_id) to.set_id(archive.Number("id", value.id, to.id(), 0, kNoId - 1));
  if (archive.Has(!by_id, to.has_signature())) {
    Fields(archive, value.signature, *to.mutable_signature());
  }
  archive.Require(to.has_id() != to.has_signature(), "id or signature, not both");
  return by_id;
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, SignatureVotes>& votes, wire::SignatureVotes& to) {
  IdOrSignature(archive, votes, to);
  RanksField(archive, votes.ranks, to.mutable_ranks());
}

/// Where ranks disagree some have voted by id and others in full; one id is enough for the receiver
/// to find the key, which then stays empty.
template <class Archive>
void Fields(Archive& archive, Of<Archive, KeyVotes>& votes, wire::KeyVotes& to) {
  archive.List("signatures", votes.signatures, to.mutable_signatures(), kMaxRanks);
  archive.Require(!votes.signatures.empty(), "votes without a signature");
  const bool by_id = std::ranges::any_of(votes.signatures,
                                         [](const SignatureVotes& one) { return one.id != kNoId; });
  if (!by_id) Fields(archive, votes.key, *to.mutable_key());
  for (const SignatureVotes& one : votes.signatures) {
    if (one.id == kNoId) archive.CheckPeer(votes.key, one.signature);
  }
  archive.List("masks", votes.absent, to.mutable_absent(), kMaxRanks);
  archive.List("masks", votes.clean, to.mutable_clean(), kMaxRanks);
  archive.List("failures", votes.failed, to.mutable_failed(), kMaxRanks);
  archive.List("step counts", votes.steps, to.mutable_steps(), kMaxRanks);
  archive.List("ranks with rows", votes.rows, to.mutable_rows(), kMaxRanks);
}

/// An item with `bind` is the last in full: from then on both sides know the id.
template <class Archive>
void Fields(Archive& archive, Of<Archive, WorkItem>& item, wire::WorkItem& to) {
  if (!IdOrSignature(archive, item, to)) {
    Fields(archive, item.key, *to.mutable_key());
    archive.CheckPeer(item.key, item.signature);
  }
  if (archive.Has(item.bind != kNoId, to.has_bind())) {
    to.set_bind(archive.Number("id", item.bind, to.bind(), 0, kNoId - 1));
  }
  archive.List("masks", item.absent, to.mutable_absent(), kMaxRanks);
  MaskField(archive, item.skipped, to.mutable_skipped());
  archive.Numbers("rows", item.rows, to.mutable_rows(), kMaxRowNumbers, 0);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, std::string>& name, std::string& to) {
  archive.Text("name", name, &to, kMaxNameBytes);
}

/// An answer names the first few of its tensors, never more than there are.
template <class Archive>
void Fields(Archive& archive, Of<Archive, Answer>& answer, wire::Answer& to) {
  to.set_rank(RankField(archive, answer.rank, to.rank()));
  to.set_pending(archive.Number("pending", answer.pending, to.pending()));
  archive.Text("signature", answer.signature, to.mutable_signature(), kMaxTextBytes);
  archive.Text("last operation", answer.last, to.mutable_last(), kMaxTextBytes);
  to.set_last_age_ns(archive.Number("age", answer.last_age_ns, to.last_age_ns(), 0));
  to.set_tensors(archive.Number("tensors", answer.tensors, to.tensors(), 0, kMaxTensors));
  archive.List("names", answer.names, to.mutable_names(), to.tensors());
  to.set_doing(
      archive.Enum("kind of failure", answer.doing.kind, to.doing(), FailureKind::kBlockedInC));
  archive.Text("place", answer.doing.text, to.mutable_where(), kMaxTextBytes);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, WaitingRanks>& waiting, wire::WaitingRanks& to) {
  RanksField(archive, waiting.ranks, to.mutable_ranks());
  archive.List("keys", waiting.keys, to.mutable_keys(), kMaxKeysPerMessage);
  to.set_may_go_on(archive.Number("may go on", waiting.may_go_on, to.may_go_on()));
  to.set_in_order(archive.Number("in order", waiting.in_order, to.in_order()));
  to.set_may_have_more_threads(archive.Number(
      "may have more threads", waiting.may_have_more_threads, to.may_have_more_threads()));
  archive.Text("place", waiting.place, to.mutable_place(), kMaxTextBytes);
}

/// Six types of message share it. Fields that a type does not use have their default, which proto3
/// does not write. Executor::AddSet checks that the planes, one of each kind of device, exist.
template <class Archive>
void Fields(Archive& archive, Of<Archive, DownMessage>& message, wire::Records& to) {
  wire::Notice& notice = *to.mutable_notice();
  Fields(archive, message.key, *notice.mutable_key());
  archive.Text("text", message.text, notice.mutable_text(), kMaxTextBytes);
  notice.set_code(
      archive.Number("code", message.code, notice.code(), 0, static_cast<int>(Code::kInternal)));
  RanksField(archive, message.ranks, notice.mutable_ranks());
  archive.Numbers("planes", message.planes, notice.mutable_planes(), 64, 0, UINT8_MAX);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, KeyName>& key, wire::Records& to) {
  Fields(archive, key, *to.mutable_key());
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, std::vector<KeyVotes>>& keys, wire::Records& to) {
  archive.List("keys", keys, to.mutable_keys(), kMaxKeysPerMessage);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, std::vector<Answer>>& answers, wire::Records& to) {
  archive.List("answers", answers, to.mutable_answers(), kMaxRanks);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, std::vector<WaitingRanks>>& waiting, wire::Records& to) {
  archive.List("groups", waiting, to.mutable_waiting(), kMaxRanks);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, std::vector<WorkItem>>& items, wire::Records& to) {
  archive.List("items", items, to.mutable_items(), kMaxKeysPerMessage);
}

}  // namespace farandole
