#include "coordinator/control/wire/convert.h"

namespace farandole {
namespace {

// Without `function`: it is part of the signature and travels there.
void FillKey(const KeyName& key, wire::Key& out) {
  out.set_set(key.set);
  out.set_kind(static_cast<uint32_t>(key.kind));
  out.set_name(key.name);
}

void FillTensor(const TensorSignature& tensor, wire::TensorSignature& out) {
  out.set_name(tensor.name);
  out.set_dtype(static_cast<uint32_t>(tensor.dtype));
  for (const int64_t extent : tensor.shape) out.add_shape(extent);
}

void FillCollective(const Collective& collective, wire::Collective& out) {
  out.set_kind(static_cast<uint32_t>(collective.kind));
  out.set_op(static_cast<uint32_t>(collective.op));
  out.set_wire_format(static_cast<uint32_t>(collective.wire_format));
  out.set_device(static_cast<uint32_t>(collective.device));
  out.set_root(collective.root);
  out.set_prescale(collective.prescale);
  out.set_postscale(collective.postscale);
}

void FillSignature(const Signature& signature, wire::Signature& out) {
  FillCollective(signature, *out.mutable_collective());
  out.set_function(signature.function);
  for (const TensorSignature& tensor : signature.tensors) FillTensor(tensor, *out.add_tensors());
  for (const int32_t rank : signature.ranks) out.add_ranks(static_cast<uint32_t>(rank));
}

template <class List>
// Words of a mask are fixed64: with most bits set a varint would take ten bytes instead of eight.
void FillMasks(const std::vector<RankMask>& masks, List& out) {
  for (const RankMask& one : masks) {
    wire::RankMask& mask = *out.Add();
    mask.set_rank(static_cast<uint32_t>(one.rank));
    for (const uint64_t word : one.mask) mask.add_mask(word);
  }
}

void FillStep(const StepCount& count, wire::StepCount& out) {
  out.set_step(count.step);
  out.set_passes(static_cast<uint32_t>(count.passes));
  out.set_no_sync_passes(static_cast<uint32_t>(count.no_sync_passes));
  out.set_previous_passes(static_cast<uint32_t>(count.previous_passes));
  out.set_previous_no_sync_passes(static_cast<uint32_t>(count.previous_no_sync_passes));
}

// An id stands for key and signature, so neither travels with it. Where ranks disagree some have
// voted by id and others in full; one id is enough for the receiver to find the key.
void FillVotes(const KeyVotes& votes, wire::KeyVotes& out) {
  bool by_id = false;
  for (const SignatureVotes& one : votes.signatures) {
    wire::SignatureVotes& to = *out.add_signatures();
    by_id |= one.id != kNoId;
    if (one.id != kNoId) to.set_id(one.id);
    if (one.id == kNoId) FillSignature(one.signature, *to.mutable_signature());
    for (const int32_t rank : one.ranks) to.add_ranks(static_cast<uint32_t>(rank));
  }
  if (!by_id) FillKey(votes.key, *out.mutable_key());
  FillMasks(votes.absent, *out.mutable_absent());
  FillMasks(votes.clean, *out.mutable_clean());
  for (const RankText& one : votes.failed) {
    wire::RankText& to = *out.add_failed();
    to.set_rank(static_cast<uint32_t>(one.rank));
    to.set_text(one.text);
  }
  for (const StepVotes& one : votes.steps) {
    wire::StepVotes& to = *out.add_steps();
    FillStep(one.count, *to.mutable_count());
    for (const int32_t rank : one.ranks) to.add_ranks(static_cast<uint32_t>(rank));
  }
  for (const RankRows& one : votes.rows) {
    wire::RankRows& to = *out.add_rows();
    to.set_rank(static_cast<uint32_t>(one.rank));
    for (const int64_t rows : one.rows) to.add_rows(rows);
  }
}

// An item with `bind` is the last in full: from then on both sides know the id.
void FillItem(const WorkItem& item, wire::WorkItem& out) {
  if (item.id != kNoId) {
    out.set_id(item.id);
  } else {
    FillKey(item.key, *out.mutable_key());
    FillSignature(item.signature, *out.mutable_signature());
  }
  if (item.bind != kNoId) out.set_bind(item.bind);
  FillMasks(item.absent, *out.mutable_absent());
  for (const uint64_t word : item.skipped) out.add_skipped(word);
  for (const int64_t rows : item.rows) out.add_rows(rows);
}

void FillFailure(const FailureFacts& facts, wire::Failure& failure) {
  failure.set_cause(facts.cause);
  failure.set_tensor(facts.tensor);
  failure.set_kind(static_cast<uint32_t>(facts.kind));
  failure.set_number(facts.number);
  failure.set_host(facts.host);
  failure.set_pid(facts.pid);
}

}  // namespace

// Only for votes with records. Those by ids alone are fixed frames, which need no allocation
// (wire.cc); likewise Work, below.
void Fill(const UpMessage& message, wire::Votes& votes) {
  votes.set_number(message.number);
  for (const uint32_t id : message.ids) votes.add_ids(id);
  for (const KeyVotes& key : message.keys) FillVotes(key, *votes.add_keys());
  for (const StepRun& run : message.steps) {
    wire::StepRun& to = *votes.add_steps();
    to.set_length(run.length);
    FillStep(run.count, *to.mutable_count());
  }
}

void Fill(const UpMessage& message, wire::Leave& leave) {
  leave.set_rank(static_cast<uint32_t>(message.rank));
  FillFailure(message.facts, *leave.mutable_failure());
}

void Fill(const UpMessage& message, wire::Stall& stall) {
  stall.set_number(message.number);
  FillKey(message.key, *stall.mutable_key());
}

void Fill(const UpMessage& message, wire::Answers& answers) {
  answers.set_number(message.number);
  for (const Answer& one : message.answers) {
    wire::Answer& to = *answers.add_answers();
    to.set_rank(static_cast<uint32_t>(one.rank));
    to.set_pending(one.pending);
    to.set_signature(one.signature);
    to.set_last(one.last);
    to.set_last_age_ns(one.last_age_ns);
    to.set_tensors(static_cast<uint32_t>(one.tensors));
    for (const std::string& name : one.names) to.add_names(name);
    to.set_doing(static_cast<uint32_t>(one.doing.kind));
    to.set_where(one.doing.text);
  }
}

void Fill(const UpMessage& message, wire::Waits& waits) {
  waits.set_number(message.number);
  for (const WaitingRanks& one : message.waiting) {
    wire::WaitingRanks& to = *waits.add_waiting();
    for (const int32_t rank : one.ranks) to.add_ranks(static_cast<uint32_t>(rank));
    for (const KeyName& key : one.keys) FillKey(key, *to.add_keys());
    to.set_may_go_on(one.may_go_on);
    to.set_in_order(one.in_order);
    to.set_may_have_more_threads(one.may_have_more_threads);
    to.set_place(one.place);
  }
}

void Fill(const DownMessage& message, wire::Work& work) {
  work.set_number(message.number);
  work.set_set(message.set);
  for (const uint32_t id : message.ids) work.add_ids(id);
  for (const WorkItem& item : message.items) FillItem(item, *work.add_items());
}

// Seven types of message share it. Fields that a type does not use have their default, which proto3
// does not write.
void Fill(const DownMessage& message, wire::Notice& notice) {
  notice.set_number(message.number);
  notice.set_set(message.set);
  FillKey(message.key, *notice.mutable_key());
  notice.set_text(message.text);
  notice.set_code(static_cast<uint32_t>(message.code));
  for (const int32_t rank : message.ranks) notice.add_ranks(static_cast<uint32_t>(rank));
  notice.set_planes(message.planes.data(), message.planes.size());
  notice.set_rank(static_cast<uint32_t>(message.rank));
  FillFailure(message.facts, *notice.mutable_failure());
}

}  // namespace farandole
