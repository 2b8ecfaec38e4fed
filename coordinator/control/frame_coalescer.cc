#include "coordinator/control/frame_coalescer.h"

#include <string>
#include <utility>

#include "coordinator/control/wire/wire.h"

namespace farandole {
namespace {

constexpr const char* kFailed = " failed: ";

/// A call that is wrong on one rank is not wrong on the others.
Code CodeElsewhere(Code code) { return code == Code::kInvalidArgument ? Code::kAborted : code; }

/// Rank -1: rank 0 has decided it for all ranks, and the text names nobody who failed. What a rank
/// reports of another one, which is lost, names that one.
Status StatusOf(const AbortMessage& abort) {
  const std::vector<int32_t>& ranks = abort.facts.ranks;
  const bool is_own = abort.rank >= 0 && (ranks.empty() || ranks.front() == abort.rank);
  return {abort.code, (is_own ? RankName(abort.rank) + kFailed : "") + abort.text, abort.facts};
}

/// StatusOf puts the rank in front on the other side, where it should not stand twice.
AbortMessage AbortOf(int rank, const Status& error) {
  const FailureFacts facts = FailedOn(rank, error).facts();
  return {rank, CodeElsewhere(error.code()), facts.cause, facts};
}

/// Of which StatusOf makes the same again.
AbortMessage SharedAbort(const Status& error) {
  const FailureFacts& facts = error.facts();
  const int of = facts.ranks.empty() ? -1 : facts.ranks.front();
  const bool is_own = error.message() == RankName(of) + kFailed + facts.cause;
  return {is_own ? of : -1, error.code(), is_own ? facts.cause : error.message(), facts};
}

}  // namespace

FrameCoalescer::FrameCoalescer(Transport& transport, Counters& counters, Liveness& liveness)
    : transport_(transport),
      counters_(counters),
      liveness_(liveness),
      outgoing_(static_cast<size_t>(transport.size())) {}

// A peer is the parent or a child, so its buffer holds frames of one direction. It is in waiting_
// as long as there are any.
Status FrameCoalescer::Add(int to, const UpMessage& message) {
  Outgoing& out = outgoing_[static_cast<size_t>(to)];
  if (out.bytes.empty()) waiting_.push_back(to);
  out.up = true;
  return Encode(message, out.bytes);
}

Status FrameCoalescer::Add(int to, const DownMessage& message) {
  Outgoing& out = outgoing_[static_cast<size_t>(to)];
  if (out.bytes.empty()) waiting_.push_back(to);
  out.up = false;
  return Encode(message, out.bytes);
}

// One transport message per peer, however many frames this step has added: what a small message
// costs hardly depends on its length. After a failed send the rest stays in waiting_, but the error
// is final and SpreadAbort drops it.
Status FrameCoalescer::Flush() {
  for (int to : waiting_) {
    Outgoing& out = outgoing_[static_cast<size_t>(to)];
    counters_.Add(out.up ? Counter::kMessagesUp : Counter::kMessagesDown);
    counters_.Add(Counter::kControlBytesSent, static_cast<int64_t>(out.bytes.size()));
    Status sent = transport_.Send(to, out.bytes);
    out.bytes.clear();
    if (sent.code() == Code::kUnavailable) return FailedOn(to, sent);
    if (!sent.ok()) return sent;
  }
  waiting_.clear();
  return {};
}

// `limit` keeps a stream of messages from holding up the batches. A transport message is taken
// whole, because its bytes are valid until the next Poll only.
Result<int> FrameCoalescer::Receive(Negotiation& negotiation, int limit) {
  int received = 0;
  for (; received < limit; ++received) {
    Result<std::optional<Transport::Incoming>> polled = transport_.Poll();
    if (!polled.ok()) return polled.status();
    if (!polled.value().has_value()) break;
    counters_.Add(Counter::kMessagesReceived);
    FARANDOLE_RETURN_IF_ERROR(Dispatch(negotiation, *polled.value()));
  }
  return received;
}

// Frames are applied in the order of the link, on which the protocol rests. Nothing behind an Abort
// is read, as all work ends with its error; it has a transport message to itself.
Status FrameCoalescer::Dispatch(Negotiation& negotiation, const Transport::Incoming& incoming) {
  FrameReader reader(incoming.data);
  for (;;) {
    Result<FrameReader::Kind> next = reader.Next(up_, down_);
    if (!next.ok()) {
      return Internal("from rank " + std::to_string(incoming.from) + ": " +
                      next.status().message());
    }
    if (next.value() == FrameReader::Kind::kEnd) return {};
    if (next.value() == FrameReader::Kind::kAbort) {
      liveness_.Hear(incoming.data);
      return StatusOf(reader.abort());
    }
    FARANDOLE_RETURN_IF_ERROR(next.value() == FrameReader::Kind::kUp
                                  ? negotiation.ReceiveUp(incoming.from, up_)
                                  : negotiation.ReceiveDown(incoming.from, down_));
  }
}

void FrameCoalescer::SpreadAbort(const Status& error, bool is_shared) {
  const int size = transport_.size();
  const int rank = transport_.rank();
  const std::vector<std::byte> frame = EncodeFailure(rank, error, is_shared);
  // The receivers end all their work, so what waits is of no use to them.
  for (const int to : waiting_) outgoing_[static_cast<size_t>(to)].bytes.clear();
  waiting_.clear();
  for (int distance = 1; distance <= size / 2; distance *= 2) {
    for (const int step : {distance, size - distance}) {
      // A peer that is lost cannot be notified.
      (void)transport_.Send((rank + step) % size, frame);
      // Opposite each other on the ring: both directions lead to the same rank.
      if (2 * distance == size) break;
    }
  }
}

// For an engine with a final error: nothing is applied any more, and errors of the transport add
// nothing.
void FrameCoalescer::Drain(int limit) {
  for (int taken = 0; taken < limit; ++taken) {
    const Result<std::optional<Transport::Incoming>> polled = transport_.Poll();
    if (!polled.ok() || !polled.value().has_value()) return;
    liveness_.Hear(polled.value()->data);
  }
}

std::vector<std::byte> EncodeFailure(int rank, const Status& error, bool is_shared) {
  std::vector<std::byte> bytes;
  Encode(is_shared ? SharedAbort(error) : AbortOf(rank, error), bytes);
  return bytes;
}

Status DecodeFailure(std::span<const std::byte> bytes) {
  UpMessage up;
  DownMessage down;
  FrameReader reader(bytes);
  const Result<FrameReader::Kind> next = reader.Next(up, down);
  const bool is_abort = next.ok() && next.value() == FrameReader::Kind::kAbort;
  return is_abort ? StatusOf(reader.abort()) : Status();
}

}  // namespace farandole
