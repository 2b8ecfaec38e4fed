#include "test/conformance/transport_cases.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace farandole {
namespace {

using Bytes = std::vector<std::byte>;

std::string Describe(const char* what, int from, int sequence) {
  return std::string(what) + " (message " + std::to_string(sequence) + " of rank " +
         std::to_string(from) + ")";
}

}  // namespace

Bytes ContentOf(int from, int to, int sequence, size_t size) {
  Bytes bytes(size);
  uint32_t state = static_cast<uint32_t>(from * 7919 + to * 104'729 + sequence * 31 + 1);
  for (std::byte& byte : bytes) {
    state = state * 1'664'525u + 1'013'904'223u;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

std::vector<int> OthersThan(int rank, int size) {
  std::vector<int> others;
  for (int r = 0; r < size; ++r) {
    if (r != rank) others.push_back(r);
  }
  return others;
}

Result<Transport::Incoming> NextMessage(Transport& transport) {
  const int64_t deadline_ns = SteadyClock().NowNs() + kTransportPatienceNs;
  while (SteadyClock().NowNs() < deadline_ns) {
    Result<std::optional<Transport::Incoming>> polled = transport.Poll();
    if (!polled.ok()) return polled.status();
    if (polled.value()) return *polled.value();
    sched_yield();
  }
  return Timeout("no message came");
}

Status DrainSends(Transport& transport) {
  const int64_t deadline_ns = SteadyClock().NowNs() + kTransportPatienceNs;
  while (!transport.Drained()) {
    Result<std::optional<Transport::Incoming>> polled = transport.Poll();
    if (!polled.ok()) return polled.status();
    if (polled.value()) return Internal("a message nobody sent");
    if (SteadyClock().NowNs() > deadline_ns) return Timeout("sends do not leave");
    sched_yield();
  }
  return Status();
}

Status ExpectInOrder(Transport& transport, const std::vector<int>& senders, int count,
                     size_t (*size_of)(int sequence)) {
  std::vector<int> seen(static_cast<size_t>(transport.size()));
  for (size_t left = senders.size() * static_cast<size_t>(count); left > 0; --left) {
    Result<Transport::Incoming> message = NextMessage(transport);
    if (!message.ok()) return message.status();
    const Transport::Incoming& incoming = message.value();
    const int sequence = seen[static_cast<size_t>(incoming.from)]++;
    if (std::find(senders.begin(), senders.end(), incoming.from) == senders.end()) {
      return Internal(Describe("wrong sender", incoming.from, sequence));
    }
    const Bytes expected = ContentOf(incoming.from, transport.rank(), sequence, size_of(sequence));
    if (!std::equal(expected.begin(), expected.end(), incoming.data.begin(), incoming.data.end())) {
      return Internal(Describe("lost, changed or out of order", incoming.from, sequence));
    }
  }
  return Status();
}

namespace {

Status RunRendezvous(Transport& transport) {
  return transport.Allgather("", kTransportPatienceNs).status();
}

size_t MixedSize(int sequence) {
  static constexpr std::array<size_t, 11> kSizes = {0, 1,         7, 64,      1 << 20, 3,
                                                    0, 64 * 1024, 1, 300'000, 4096};
  return kSizes[static_cast<size_t>(sequence) % kSizes.size()];
}

size_t SmallSize(int sequence) { return static_cast<size_t>(sequence * 37 % 301); }

Status EveryPairKeepsOrderForAllSizes(Transport& transport) {
  constexpr int kCount = 22;
  const std::vector<int> others = OthersThan(transport.rank(), transport.size());
  for (int sequence = 0; sequence < kCount; ++sequence) {
    for (const int to : others) {
      FARANDOLE_RETURN_IF_ERROR(
          transport.Send(to, ContentOf(transport.rank(), to, sequence, MixedSize(sequence))));
    }
  }
  FARANDOLE_RETURN_IF_ERROR(ExpectInOrder(transport, others, kCount, MixedSize));
  FARANDOLE_RETURN_IF_ERROR(DrainSends(transport));
  return RunRendezvous(transport);
}

Status AStormToOneRankLosesNothing(Transport& transport) {
  constexpr int kCount = 3000;
  if (transport.rank() == 0) {
    FARANDOLE_RETURN_IF_ERROR(
        ExpectInOrder(transport, OthersThan(0, transport.size()), kCount, SmallSize));
    return RunRendezvous(transport);
  }
  for (int sequence = 0; sequence < kCount; ++sequence) {
    FARANDOLE_RETURN_IF_ERROR(
        transport.Send(0, ContentOf(transport.rank(), 0, sequence, SmallSize(sequence))));
  }
  FARANDOLE_RETURN_IF_ERROR(DrainSends(transport));
  return RunRendezvous(transport);
}

Status AMessageGoesRoundTheRing(Transport& transport) {
  constexpr int kRounds = 200;
  const int size = transport.size();
  const int next = (transport.rank() + 1) % size;
  for (int round = 0; size > 1 && round < kRounds; ++round) {
    const Bytes token = ContentOf(0, 0, round, 40);
    if (transport.rank() == 0) FARANDOLE_RETURN_IF_ERROR(transport.Send(next, token));
    Result<Transport::Incoming> message = NextMessage(transport);
    if (!message.ok()) return message.status();
    const std::span<const std::byte> data = message.value().data;
    if (!std::equal(token.begin(), token.end(), data.begin(), data.end())) {
      return Internal("the token changed in transit");
    }
    if (transport.rank() != 0) FARANDOLE_RETURN_IF_ERROR(transport.Send(next, data));
  }
  FARANDOLE_RETURN_IF_ERROR(DrainSends(transport));
  return RunRendezvous(transport);
}

Status AllgatherReturnsEveryTextByRank(Transport& transport) {
  const auto text_of = [](int rank, int round) {
    return std::string(static_cast<size_t>(rank * 50'000), static_cast<char>('a' + round));
  };
  for (int round = 0; round < 3; ++round) {
    Result<std::vector<std::string>> all =
        transport.Allgather(text_of(transport.rank(), round), kTransportPatienceNs);
    if (!all.ok()) return all.status();
    for (int rank = 0; rank < transport.size(); ++rank) {
      if (all.value().at(static_cast<size_t>(rank)) != text_of(rank, round)) {
        return Internal("wrong text of rank " + std::to_string(rank));
      }
    }
  }
  return Status();
}

// The last rank stays away; the others must say so in time.
Status AllgatherNamesTheSilentRank(Transport& transport) {
  const int silent = transport.size() - 1;
  if (transport.rank() == silent) return Status();
  const int64_t begin_ns = SteadyClock().NowNs();
  const Status status = transport.Allgather("x", 100 * kNsPerMs).status();
  const int64_t took_ns = SteadyClock().NowNs() - begin_ns;
  if (status.code() != Code::kTimeout) return Internal("no time-out but " + status.ToString());
  if (status.message().find("rank " + std::to_string(silent)) == std::string::npos) {
    return Internal("the silent rank is not named: " + status.message());
  }
  return took_ns < 1100 * kNsPerMs ? Status() : Internal("more than a second after the deadline");
}

constexpr TransportCase kCases[] = {
    {"EveryPairKeepsOrderForAllSizes", EveryPairKeepsOrderForAllSizes},
    {"AStormToOneRankLosesNothing", AStormToOneRankLosesNothing},
    {"AMessageGoesRoundTheRing", AMessageGoesRoundTheRing},
    {"AllgatherReturnsEveryTextByRank", AllgatherReturnsEveryTextByRank},
    {"AllgatherNamesTheSilentRank", AllgatherNamesTheSilentRank},
};

}  // namespace

std::span<const TransportCase> TransportCases() { return kCases; }

}  // namespace farandole
