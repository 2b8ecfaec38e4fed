#include "coordinator/control/wire/convert.h"
#include "coordinator/protocol/limits.h"
#include "ops/device.h"

namespace farandole {
namespace {

/// Values of an enumeration run from 0 to its last one.
constexpr uint32_t kLastKind = static_cast<uint32_t>(kLastOpKind);
constexpr uint32_t kLastCode = static_cast<uint32_t>(Code::kInternal);
constexpr uint32_t kLastFailureKind = static_cast<uint32_t>(FailureKind::kBlockedInC);

/// Bytes from another process are not trusted: a number is checked before it is narrowed, cast to
/// an enumeration or used as a size. What depends on tables or on the tree (unknown ids, ranks
/// outside of a branch) is the negotiation's to check.
Status CheckLimit(const char* field, uint64_t value, uint64_t limit) {
  if (value <= limit) return {};
  return Internal(std::string("frame: ") + field + " is " + std::to_string(value) + ", limit " +
                  std::to_string(limit));
}

template <class List>
Status CachedCount(const char* field, const List& list, size_t limit) {
  return CheckLimit(field, static_cast<uint64_t>(list.size()), limit);
}

Status ReadText(const char* field, const std::string& in, size_t limit, std::string& out) {
  FARANDOLE_RETURN_IF_ERROR(CheckLimit(field, in.size(), limit));
  out = in;
  return {};
}

Status ReadRank(uint32_t in, int32_t& out) {
  FARANDOLE_RETURN_IF_ERROR(CheckLimit("rank", in, kMaxRanks - 1));
  out = static_cast<int32_t>(in);
  return {};
}

template <class List>
Status ReadRanks(const List& in, std::vector<int32_t>& out) {
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of ranks", in, kMaxRanks));
  out.clear();
  for (const uint32_t rank : in) FARANDOLE_RETURN_IF_ERROR(ReadRank(rank, out.emplace_back()));
  return {};
}

/// Numbers of decisions, steps, rows and ages of operations start at 0.
Status ReadNumber(int64_t in, int64_t& out) {
  out = in;
  return in >= 0 ? Status() : Internal("frame: negative number " + std::to_string(in));
}

Status ReadKey(const wire::Key& in, KeyName& out) {
  FARANDOLE_RETURN_IF_ERROR(CheckLimit("kind", in.kind(), kLastKind));
  out.set = in.set();
  out.kind = static_cast<OpKind>(in.kind());
  return ReadText("name", in.name(), kMaxNameBytes, out.name);
}

Status ReadTensor(const wire::TensorSignature& in, TensorSignature& out) {
  FARANDOLE_RETURN_IF_ERROR(CheckLimit("dtype", in.dtype(), kDTypeCount - 1));
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of dimensions", in.shape(), kMaxDims));
  out.dtype = static_cast<DType>(in.dtype());
  out.shape.assign(in.shape().begin(), in.shape().end());
  return ReadText("tensor name", in.name(), kMaxNameBytes, out.name);
}

Status ReadCollective(const wire::Collective& in, Collective& out) {
  const Result<Collective> read = ToCollective({in.kind(), in.op(), in.wire_format(), in.device(),
                                                in.root(), in.prescale(), in.postscale()});
  if (!read.ok()) return Internal("frame: " + read.status().message());
  out = read.value();
  return {};
}

Status ReadSignature(const wire::Signature& in, Signature& out) {
  FARANDOLE_RETURN_IF_ERROR(ReadCollective(in.collective(), out));
  FARANDOLE_RETURN_IF_ERROR(ReadText("function", in.function(), kMaxNameBytes, out.function));
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of tensors", in.tensors(), kMaxTensors));
  for (const wire::TensorSignature& tensor : in.tensors()) {
    FARANDOLE_RETURN_IF_ERROR(ReadTensor(tensor, out.tensors.emplace_back()));
  }
  return ReadRanks(in.ranks(), out.ranks);
}

/// What this rank would refuse to submit it refuses to hear. The kind is the
/// signature's: ranks may disagree with the key's, and a record by id has no key at all.
Status CheckPeer(KeyName key, const Signature& signature) {
  key.kind = signature.kind;
  const Status checked = CheckLimits(key, signature);
  return checked.ok() ? checked : Internal("frame: " + checked.message());
}

template <class List>
Status ReadMask(const List& in, Mask& out) {
  FARANDOLE_RETURN_IF_ERROR(CachedCount("words of a mask", in, (kMaxTensors + 63) / 64));
  out.assign(in.begin(), in.end());
  return {};
}

template <class List>
Status ReadMasks(const List& in, std::vector<RankMask>& out) {
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of masks", in, kMaxRanks));
  for (const wire::RankMask& one : in) {
    RankMask& mask = out.emplace_back();
    FARANDOLE_RETURN_IF_ERROR(ReadRank(one.rank(), mask.rank));
    FARANDOLE_RETURN_IF_ERROR(ReadMask(one.mask(), mask.mask));
  }
  return {};
}

Status ReadId(uint32_t in, uint32_t& out) {
  out = in;
  return CheckLimit("id", in, kNoId - 1);
}

template <class List>
Status ReadIds(const List& in, std::vector<uint32_t>& out) {
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of ids", in, kMaxKeysPerMessage));
  for (const uint32_t id : in) FARANDOLE_RETURN_IF_ERROR(ReadId(id, out.emplace_back()));
  return {};
}

Status ReadStep(const wire::StepCount& in, StepCount& out) {
  FARANDOLE_RETURN_IF_ERROR(ReadNumber(in.step(), out.step));
  for (const auto& [from, to] : {std::pair{in.passes(), &out.passes},
                                 {in.no_sync_passes(), &out.no_sync_passes},
                                 {in.previous_passes(), &out.previous_passes},
                                 {in.previous_no_sync_passes(), &out.previous_no_sync_passes}}) {
    FARANDOLE_RETURN_IF_ERROR(CheckLimit("backward passes", from, INT32_MAX));
    *to = static_cast<int32_t>(from);
  }
  return {};
}

/// A record by an id has no key, and `out.key` is then empty: the negotiation knows it by the id.
Status ReadSignatures(const wire::KeyVotes& in, KeyVotes& out) {
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of signatures", in.signatures(), kMaxRanks));
  for (const wire::SignatureVotes& one : in.signatures()) {
    SignatureVotes& to = out.signatures.emplace_back();
    if (one.has_id() == one.has_signature()) return Internal("frame: id or signature, not both");
    if (one.has_id()) FARANDOLE_RETURN_IF_ERROR(ReadId(one.id(), to.id));
    if (one.has_signature())
      FARANDOLE_RETURN_IF_ERROR(ReadSignature(one.signature(), to.signature));
    FARANDOLE_RETURN_IF_ERROR(ReadRanks(one.ranks(), to.ranks));
  }
  if (out.signatures.empty()) return Internal("frame: votes without a signature");
  for (const SignatureVotes& one : out.signatures) {
    if (one.id == kNoId) FARANDOLE_RETURN_IF_ERROR(CheckPeer(out.key, one.signature));
  }
  return {};
}

template <class List>
Status ReadRows(const List& in, std::vector<int64_t>& out) {
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of rows", in, kMaxRowNumbers));
  for (const int64_t rows : in) FARANDOLE_RETURN_IF_ERROR(ReadNumber(rows, out.emplace_back()));
  return {};
}

Status ReadVotes(const wire::KeyVotes& in, KeyVotes& out) {
  FARANDOLE_RETURN_IF_ERROR(ReadKey(in.key(), out.key));
  FARANDOLE_RETURN_IF_ERROR(ReadSignatures(in, out));
  FARANDOLE_RETURN_IF_ERROR(ReadMasks(in.absent(), out.absent));
  FARANDOLE_RETURN_IF_ERROR(ReadMasks(in.clean(), out.clean));
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of failures", in.failed(), kMaxRanks));
  for (const wire::RankText& one : in.failed()) {
    RankText& to = out.failed.emplace_back();
    FARANDOLE_RETURN_IF_ERROR(ReadRank(one.rank(), to.rank));
    FARANDOLE_RETURN_IF_ERROR(ReadText("failure", one.text(), kMaxNameBytes, to.text));
  }
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of step counts", in.steps(), kMaxRanks));
  for (const wire::StepVotes& one : in.steps()) {
    StepVotes& to = out.steps.emplace_back();
    FARANDOLE_RETURN_IF_ERROR(ReadStep(one.count(), to.count));
    FARANDOLE_RETURN_IF_ERROR(ReadRanks(one.ranks(), to.ranks));
  }
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of ranks with rows", in.rows(), kMaxRanks));
  for (const wire::RankRows& one : in.rows()) {
    RankRows& to = out.rows.emplace_back();
    FARANDOLE_RETURN_IF_ERROR(ReadRank(one.rank(), to.rank));
    FARANDOLE_RETURN_IF_ERROR(ReadRows(one.rows(), to.rows));
  }
  return {};
}

/// Either the id or the signature in full with its key, at their second use together with the id
/// that they are bound to.
Status ReadItem(const wire::WorkItem& in, WorkItem& out) {
  if (in.has_id() == in.has_signature()) return Internal("frame: id or signature, not both");
  if (in.has_id()) FARANDOLE_RETURN_IF_ERROR(ReadId(in.id(), out.id));
  if (in.has_bind()) FARANDOLE_RETURN_IF_ERROR(ReadId(in.bind(), out.bind));
  if (in.has_signature()) {
    FARANDOLE_RETURN_IF_ERROR(ReadKey(in.key(), out.key));
    FARANDOLE_RETURN_IF_ERROR(ReadSignature(in.signature(), out.signature));
    FARANDOLE_RETURN_IF_ERROR(CheckPeer(out.key, out.signature));
  }
  FARANDOLE_RETURN_IF_ERROR(ReadMask(in.skipped(), out.skipped));
  FARANDOLE_RETURN_IF_ERROR(ReadRows(in.rows(), out.rows));
  return ReadMasks(in.absent(), out.absent);
}

Status ReadFailure(const wire::Failure& in, FailureFacts& out) {
  FARANDOLE_RETURN_IF_ERROR(ReadText("cause", in.cause(), kMaxNameBytes, out.cause));
  FARANDOLE_RETURN_IF_ERROR(ReadText("tensor", in.tensor(), kMaxNameBytes, out.tensor));
  FARANDOLE_RETURN_IF_ERROR(ReadText("host", in.host(), kMaxNameBytes, out.host));
  FARANDOLE_RETURN_IF_ERROR(CheckLimit("failure kind", in.kind(), kLastFailureKind));
  out.kind = static_cast<FailureKind>(in.kind());
  out.number = in.number();
  out.pid = in.pid();
  return {};
}

}  // namespace

// The lists of `message` are empty: DecodeFrame has cleared it. How many ids a run of step counts
// covers is not checked, since VoteTally takes no more than there are.
Status Read(const wire::Votes& votes, UpMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(ReadNumber(votes.number(), message.number));
  FARANDOLE_RETURN_IF_ERROR(ReadIds(votes.ids(), message.ids));
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of keys", votes.keys(), kMaxKeysPerMessage));
  for (const wire::KeyVotes& one : votes.keys()) {
    FARANDOLE_RETURN_IF_ERROR(ReadVotes(one, message.keys.emplace_back()));
  }
  FARANDOLE_RETURN_IF_ERROR(CachedCount("runs of step counts", votes.steps(), message.ids.size()));
  for (const wire::StepRun& one : votes.steps()) {
    StepRun& run = message.steps.emplace_back();
    run.length = one.length();
    FARANDOLE_RETURN_IF_ERROR(ReadStep(one.count(), run.count));
  }
  return {};
}

Status Read(const wire::Leave& leave, UpMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(ReadRank(leave.rank(), message.rank));
  return ReadFailure(leave.failure(), message.facts);
}

Status Read(const wire::Stall& stall, UpMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(ReadNumber(stall.number(), message.number));
  return ReadKey(stall.key(), message.key);
}

Status Read(const wire::Answers& answers, UpMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(ReadNumber(answers.number(), message.number));
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of answers", answers.answers(), kMaxRanks));
  for (const wire::Answer& one : answers.answers()) {
    Answer& to = message.answers.emplace_back();
    to.pending = one.pending();
    FARANDOLE_RETURN_IF_ERROR(ReadRank(one.rank(), to.rank));
    FARANDOLE_RETURN_IF_ERROR(ReadNumber(one.last_age_ns(), to.last_age_ns));
    FARANDOLE_RETURN_IF_ERROR(ReadText("signature", one.signature(), kMaxTextBytes, to.signature));
    FARANDOLE_RETURN_IF_ERROR(ReadText("last operation", one.last(), kMaxTextBytes, to.last));
    FARANDOLE_RETURN_IF_ERROR(CheckLimit("number of tensors", one.tensors(), kMaxTensors));
    // An answer names the first few of its tensors, never more than there are.
    FARANDOLE_RETURN_IF_ERROR(CachedCount("number of names", one.names(), one.tensors()));
    to.tensors = static_cast<int32_t>(one.tensors());
    for (const std::string& name : one.names()) {
      FARANDOLE_RETURN_IF_ERROR(ReadText("name", name, kMaxNameBytes, to.names.emplace_back()));
    }
    FARANDOLE_RETURN_IF_ERROR(CheckLimit("kind of failure", one.doing(), kLastFailureKind));
    to.doing.kind = static_cast<FailureKind>(one.doing());
    FARANDOLE_RETURN_IF_ERROR(ReadText("place", one.where(), kMaxTextBytes, to.doing.text));
  }
  return {};
}

Status Read(const wire::Waits& waits, UpMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(ReadNumber(waits.number(), message.number));
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of groups", waits.waiting(), kMaxRanks));
  for (const wire::WaitingRanks& one : waits.waiting()) {
    WaitingRanks& to = message.waiting.emplace_back();
    FARANDOLE_RETURN_IF_ERROR(ReadRanks(one.ranks(), to.ranks));
    FARANDOLE_RETURN_IF_ERROR(CachedCount("number of keys", one.keys(), kMaxKeysPerMessage));
    for (const wire::Key& key : one.keys()) {
      FARANDOLE_RETURN_IF_ERROR(ReadKey(key, to.keys.emplace_back()));
    }
    to.may_go_on = one.may_go_on();
    to.in_order = one.in_order();
    to.may_have_more_threads = one.may_have_more_threads();
    FARANDOLE_RETURN_IF_ERROR(ReadText("place", one.place(), kMaxTextBytes, to.place));
  }
  return {};
}

Status Read(const wire::Work& work, DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(ReadNumber(work.number(), message.number));
  message.set = work.set();
  FARANDOLE_RETURN_IF_ERROR(ReadIds(work.ids(), message.ids));
  FARANDOLE_RETURN_IF_ERROR(CachedCount("number of items", work.items(), kMaxKeysPerMessage));
  for (const wire::WorkItem& item : work.items()) {
    FARANDOLE_RETURN_IF_ERROR(ReadItem(item, message.items.emplace_back()));
  }
  return {};
}

Status Read(const wire::Notice& notice, DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(ReadNumber(notice.number(), message.number));
  FARANDOLE_RETURN_IF_ERROR(CheckLimit("code", notice.code(), kLastCode));
  FARANDOLE_RETURN_IF_ERROR(CheckLimit("number of planes", notice.planes().size(), 64));
  FARANDOLE_RETURN_IF_ERROR(ReadKey(notice.key(), message.key));
  FARANDOLE_RETURN_IF_ERROR(ReadRank(notice.rank(), message.rank));
  FARANDOLE_RETURN_IF_ERROR(ReadText("text", notice.text(), kMaxTextBytes, message.text));
  FARANDOLE_RETURN_IF_ERROR(ReadFailure(notice.failure(), message.facts));
  message.set = notice.set();
  message.code = static_cast<int32_t>(notice.code());
  // One byte per device kind; Executor::AddSet checks that these planes exist.
  message.planes.assign(notice.planes().begin(), notice.planes().end());
  return ReadRanks(notice.ranks(), message.ranks);
}

}  // namespace farandole
