#include "coordinator/links.h"

#include <optional>
#include <string>

#include "coordinator/wire/wire.h"

namespace farandole {

Links::Links(Transport& transport, uint32_t epoch, Counters& counters)
    : transport_(transport),
      epoch_(epoch),
      counters_(counters),
      outgoing_(static_cast<size_t>(transport.size())) {}

void Links::Add(int to, const UpMessage& message) {
  Outgoing& out = outgoing_[static_cast<size_t>(to)];
  if (out.bytes.empty()) waiting_.push_back(to);
  out.up = true;
  Encode(message, epoch_, out.bytes);
}

void Links::Add(int to, const DownMessage& message) {
  Outgoing& out = outgoing_[static_cast<size_t>(to)];
  if (out.bytes.empty()) waiting_.push_back(to);
  out.up = false;
  Encode(message, epoch_, out.bytes);
}

Status Links::Flush() {
  for (int to : waiting_) {
    Outgoing& out = outgoing_[static_cast<size_t>(to)];
    counters_.Add(out.up ? Counter::kMessagesUp : Counter::kMessagesDown);
    counters_.Add(Counter::kControlBytesSent, static_cast<int64_t>(out.bytes.size()));
    Status sent = transport_.Send(to, out.bytes);
    out.bytes.clear();
    if (!sent.ok()) return sent;
  }
  waiting_.clear();
  return {};
}

Result<int> Links::Receive(Negotiation& negotiation, int limit) {
  int received = 0;
  for (; received < limit; ++received) {
    Result<std::optional<Transport::Incoming>> polled = transport_.Poll();
    if (!polled.ok()) return polled.status();
    if (!polled.value().has_value()) break;
    const Transport::Incoming& incoming = *polled.value();
    if (!incoming.lost.ok()) return incoming.lost;
    counters_.Add(Counter::kMessagesReceived);
    FARANDOLE_RETURN_IF_ERROR(Dispatch(negotiation, incoming));
  }
  return received;
}

Status Links::Dispatch(Negotiation& negotiation, const Transport::Incoming& incoming) {
  FrameReader reader(incoming.data, epoch_);
  for (;;) {
    Result<FrameReader::Kind> next = reader.Next(up_, down_);
    if (!next.ok()) {
      return Internal("from rank " + std::to_string(incoming.from) + ": " +
                      next.status().message());
    }
    if (next.value() == FrameReader::Kind::kEnd) return {};
    FARANDOLE_RETURN_IF_ERROR(next.value() == FrameReader::Kind::kUp
                                  ? negotiation.ReceiveUp(incoming.from, up_)
                                  : negotiation.ReceiveDown(incoming.from, down_));
  }
}

}  // namespace farandole
