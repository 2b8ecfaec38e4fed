// What the transport over MPI does beyond test/conformance/transport_cases.h: slices, neighbours
// and other ranks, its end, what a broken peer sends, and the tree of its allgather:
// mpirun -np N mpi_transport. Exits 1, and says why, if any rank fails.
#include "coordinator/control/mpi_transport.h"

#include <mpi.h>
#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "coordinator/control/frame_coalescer.h"
#include "coordinator/liveness/table.h"
#include "core/clock.h"
#include "core/counters.h"
#include "test/conformance/transport_cases.h"

namespace {
std::atomic<int64_t> news{0};
}  // namespace

void* operator new(std::size_t size) {
  news.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace farandole {
namespace {

constexpr size_t kOneSlice = kMpiSliceBytes - 8;  // the most that a message of one slice holds

// A rank with a communicator and a transport that no other case has. Collective.
struct Rank {
  Rank() {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    transport = MakeMpiTransport(comm, SteadyClock());
    MPI_Barrier(MPI_COMM_WORLD);
  }
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  std::unique_ptr<Transport> transport;
};

using Bytes = std::vector<std::byte>;

size_t SizeOf(int sequence) {
  constexpr size_t kSizes[] = {
      0, 100'000,       kOneSlice, 1, kOneSlice + 1, kMpiSliceBytes + kOneSlice,
      5, 2 * kOneSlice, 40,        0, 3'000'000};
  return kSizes[static_cast<size_t>(sequence) % std::size(kSizes)];
}

// All ranks around rank 0.
std::vector<int> NeighboursInStar(const Rank& me) {
  return me.rank == 0 ? OthersThan(0, me.size) : std::vector<int>{0};
}

// Rank 0 has no neighbour but rank 1, and so on.
std::vector<int> NeighboursInChain(const Rank& me) {
  std::vector<int> neighbours;
  if (me.rank > 0) neighbours.push_back(me.rank - 1);
  if (me.rank + 1 < me.size) neighbours.push_back(me.rank + 1);
  return neighbours;
}

Status Send(Rank& me, const std::vector<int>& receivers, int count) {
  for (int sequence = 0; sequence < count; ++sequence) {
    for (const int to : receivers) {
      FARANDOLE_RETURN_IF_ERROR(
          me.transport->Send(to, ContentOf(me.rank, to, sequence, SizeOf(sequence))));
    }
  }
  return Status();
}

Status LongMessagesOfSeveralNeighboursComeWholeAndInOrder(Rank& me) {
  me.transport->SetNeighbours(NeighboursInStar(me));
  FARANDOLE_RETURN_IF_ERROR(Send(me, NeighboursInStar(me), 22));
  FARANDOLE_RETURN_IF_ERROR(ExpectInOrder(*me.transport, NeighboursInStar(me), 22, SizeOf));
  return DrainSends(*me.transport);
}

// Between neighbours and between others, all at the same time.
Status OtherRanksAreHeardToo(Rank& me) {
  const std::vector<int> others = OthersThan(me.rank, me.size);
  me.transport->SetNeighbours(NeighboursInChain(me));
  FARANDOLE_RETURN_IF_ERROR(Send(me, others, 10));
  FARANDOLE_RETURN_IF_ERROR(ExpectInOrder(*me.transport, others, 10, SizeOf));
  return DrainSends(*me.transport);
}

Status MessagesWaitUntilTheReceiverKnowsItsNeighbours(Rank& me) {
  if (me.rank != 0) {
    me.transport->SetNeighbours({{0}});
    FARANDOLE_RETURN_IF_ERROR(Send(me, {0}, 11));
  }
  MPI_Barrier(me.comm);
  if (me.rank == 0) {
    for (int i = 0; i < 1000; ++i) {
      Result<std::optional<Transport::Incoming>> polled = me.transport->Poll();
      if (!polled.ok()) return polled.status();
      if (polled.value()) return Internal("a neighbour was heard before it was one");
    }
    me.transport->SetNeighbours(NeighboursInStar(me));
    FARANDOLE_RETURN_IF_ERROR(ExpectInOrder(*me.transport, NeighboursInStar(me), 11, SizeOf));
  }
  return DrainSends(*me.transport);
}

// The last rank's neighbour is the one before it; the others hear of its end all the same, and pass
// it on.
Status AFinalErrorReachesAllRanks(Rank& me) {
  me.transport->SetNeighbours(NeighboursInChain(me));
  Counters counters;
  LivenessTable table;
  FrameCoalescer coalescer(*me.transport, counters, table);
  const int last = me.size - 1;
  Status error = Internal("the cause");
  const int64_t deadline_ns = SteadyClock().NowNs() + kTransportPatienceNs;
  for (error = me.rank == last ? error : Status(); error.ok(); error = table.Judge().error) {
    if (SteadyClock().NowNs() > deadline_ns) return Timeout("no final error came");
    coalescer.Drain(10);
    sched_yield();
  }
  coalescer.SpreadAbort(error, me.rank != last);
  while (!me.transport->Drained() && SteadyClock().NowNs() < deadline_ns) coalescer.Drain(10);
  const std::string expected = "rank " + std::to_string(last) + " failed: the cause";
  if (me.rank == last || error.message() == expected) return Status();
  return Internal("another error came: " + error.ToString());
}

Status SteadyMessagesAllocateNothing(Rank& me) {
  const std::vector<int> neighbours = NeighboursInStar(me);
  me.transport->SetNeighbours(neighbours);
  const Bytes sizes[] = {ContentOf(0, 0, 0, 100), ContentOf(0, 0, 0, 20'000),
                         ContentOf(0, 0, 0, 0)};
  int64_t before = 0;
  for (int round = 0; round < 300; ++round) {
    if (round == 100) before = news.load();
    const Bytes& data = sizes[round % 3];
    for (int rank = 1; rank < me.size; ++rank) {
      if (me.rank == 0) FARANDOLE_RETURN_IF_ERROR(me.transport->Send(rank, data));
    }
    for (size_t left = neighbours.size(); left > 0; --left) {
      Result<Transport::Incoming> message = NextMessage(*me.transport);
      if (!message.ok()) return message.status();
      if (!std::ranges::equal(message.value().data, data)) return Internal("another message came");
      if (me.rank != 0) FARANDOLE_RETURN_IF_ERROR(me.transport->Send(0, message.value().data));
    }
  }
  const int64_t during = news.load() - before;
  // Now and then MPI keeps a send longer than ever before, and one more buffer is needed.
  if (during < 20) return DrainSends(*me.transport);
  return Internal(std::to_string(during) + " calls of operator new in 200 steady rounds");
}

// As a peer that knows the communicator, but not the format.
void SendRaw(const Rank& me, const Bytes& bytes) {
  MPI_Send(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, 0, kMpiNeighbourTag, me.comm);
}

Bytes Slice(uint64_t length, size_t size) {
  Bytes slice(size);
  std::memcpy(slice.data(), &length, sizeof length);
  return slice;
}

Status APartOfAMessageKeepsThePollsFrequent(Rank& me) {
  if (me.rank > 1) return Status();
  if (me.rank == 1) {
    SendRaw(me, Slice(kMpiSliceBytes, kMpiSliceBytes));
    MPI_Recv(nullptr, 0, MPI_BYTE, 0, 99, me.comm, MPI_STATUS_IGNORE);
    SendRaw(me, Bytes(8));
    return Status();
  }
  me.transport->SetNeighbours(NeighboursInStar(me));
  const auto idle_ns = [&] { return me.transport->PollAfterNs(false, kNsPerSecond); };
  const int64_t none_ns = idle_ns();
  const int64_t deadline_ns = SteadyClock().NowNs() + kTransportPatienceNs;
  while (idle_ns() == none_ns && SteadyClock().NowNs() < deadline_ns) {
    if (Result<std::optional<Transport::Incoming>> polled = me.transport->Poll();
        !polled.ok() || polled.value()) {
      return Internal("half a message was handed out: " + polled.status().ToString());
    }
  }
  const int64_t half_ns = idle_ns();
  MPI_Send(nullptr, 0, MPI_BYTE, 1, 99, me.comm);
  if (Result<Transport::Incoming> message = NextMessage(*me.transport);
      !message.ok() || message.value().data.size() != kMpiSliceBytes) {
    return Internal("the message did not come: " + message.status().ToString());
  }
  if (half_ns < none_ns && idle_ns() == none_ns) return Status();
  return Internal("polled after " + std::to_string(none_ns) + ", " + std::to_string(half_ns) +
                  " and " + std::to_string(idle_ns()) + " ns");
}

Status WhatABrokenPeerSendsIsRefused(Rank& me) {
  const std::vector<std::vector<Bytes>> kinds = {
      {Bytes(0)},                                         // no length
      {Bytes(7)},                                         // nor here
      {Slice(uint64_t{1} << 60, kMpiSliceBytes)},         // longer than anybody sends
      {Slice(UINT64_MAX, kMpiSliceBytes)},                // likewise
      {Slice(5, 100)},                                    // more than announced
      {Slice(0, 9)},                                      // likewise
      {Slice(kMpiSliceBytes, kMpiSliceBytes), Bytes(9)},  // likewise, in the second slice
      {Slice(kMpiSliceBytes, kMpiSliceBytes), Bytes(0)},  // no progress
      {Bytes(kMpiSliceBytes + 1)},                        // no room for it
  };
  std::string wrong;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    Rank mine;
    mine.transport->SetNeighbours(NeighboursInStar(me));
    if (me.rank == 1) {
      for (const Bytes& slice : kinds[kind]) SendRaw(mine, slice);
    }
    const Status status = me.rank == 0 ? NextMessage(*mine.transport).status() : Status();
    MPI_Barrier(me.comm);
    const bool named = status.message().find("rank 1") != std::string::npos;
    if (me.rank == 0 && (status.code() != Code::kInternal || !named)) {
      wrong += "kind " + std::to_string(kind) + ": " + status.ToString() + "; ";
    }
  }
  return wrong.empty() ? Status() : Internal(wrong);
}

// A long message is on its way in both directions when the transports end. What is sent later must
// not be written to a buffer of theirs: a receive that is not cancelled would take it.
Status AnEndedTransportReceivesNothing(Rank& me) {
  me.transport->SetNeighbours(NeighboursInStar(me));
  const std::vector<int> neighbours = NeighboursInStar(me);
  for (const int to : neighbours) {
    FARANDOLE_RETURN_IF_ERROR(me.transport->Send(to, ContentOf(me.rank, to, 10, 3'000'000)));
  }
  for (int i = 0; i < 3; ++i) FARANDOLE_RETURN_IF_ERROR(me.transport->Poll().status());
  me.transport.reset();
  MPI_Barrier(me.comm);
  if (me.rank == 1) {
    // Behind what the transport had sent, which nobody receives any more but this loop.
    const Bytes last(77);
    SendRaw(me, last);
  }
  if (me.rank != 0) return Status();
  const int64_t deadline_ns = SteadyClock().NowNs() + kTransportPatienceNs;
  Bytes slice(kMpiSliceBytes);
  for (int bytes = 0; bytes != 77;) {
    int found = 0;
    MPI_Status status;
    MPI_Iprobe(1, kMpiNeighbourTag, me.comm, &found, &status);
    if (SteadyClock().NowNs() > deadline_ns) return Timeout("the last message did not come");
    if (found == 0) continue;
    MPI_Recv(slice.data(), static_cast<int>(slice.size()), MPI_BYTE, 1, kMpiNeighbourTag, me.comm,
             &status);
    MPI_Get_count(&status, MPI_BYTE, &bytes);
  }
  return Status();
}

// The posted receives of a transport that is idle.
Status AnIdleTransportEndsAndReceivesNothing(Rank& me) {
  me.transport->SetNeighbours(NeighboursInStar(me));
  FARANDOLE_RETURN_IF_ERROR(me.transport->Poll().status());
  me.transport.reset();
  MPI_Barrier(me.comm);
  for (const int tag : {kMpiNeighbourTag, kMpiOthersTag}) {
    if (me.rank == 1) MPI_Send("x", 1, MPI_CHAR, 0, tag, me.comm);
    const int64_t deadline_ns = SteadyClock().NowNs() + kTransportPatienceNs;
    for (int found = me.rank == 0 ? 0 : 1; found == 0;) {
      MPI_Iprobe(1, tag, me.comm, &found, MPI_STATUS_IGNORE);
      if (SteadyClock().NowNs() > deadline_ns) return Timeout("an ended transport took a message");
    }
  }
  return Status();
}

Status EveryRankGetsAllTexts(Rank& me) {
  for (int round = 0; round < 20; ++round) {
    const auto text_of = [round](int rank) {
      return std::string(static_cast<size_t>(rank * 500), 'x') + std::to_string(rank + round);
    };
    Result<std::vector<std::string>> all =
        me.transport->Allgather(text_of(me.rank), kTransportPatienceNs);
    if (!all.ok()) return all.status();
    for (int rank = 0; rank < me.size; ++rank) {
      if (all.value().at(static_cast<size_t>(rank)) == text_of(rank)) continue;
      return Internal("wrong text of rank " + std::to_string(rank));
    }
  }
  return Status();
}

// Rank 1, which would pass answers on to rank 9 and later ones.
Status AllNameARankThatIsSilent(Rank& me) {
  if (me.rank == 1) return Status();
  const int64_t begin_ns = SteadyClock().NowNs();
  const Status status = me.transport->Allgather("x", 200 * kNsPerMs).status();
  const int64_t took_ns = SteadyClock().NowNs() - begin_ns;
  if (status.message() != "allgather at start: rank 1 did not arrive in time") {
    return Internal("not the error expected: " + status.ToString());
  }
  return took_ns < 1200 * kNsPerMs ? Status() : Internal("more than a second after the deadline");
}

struct Case {
  const char* name;
  Status (*body)(Rank& me);
};

constexpr Case kCases[] = {
    {"LongMessagesOfSeveralNeighboursComeWholeAndInOrder",
     LongMessagesOfSeveralNeighboursComeWholeAndInOrder},
    {"OtherRanksAreHeardToo", OtherRanksAreHeardToo},
    {"MessagesWaitUntilTheReceiverKnowsItsNeighbours",
     MessagesWaitUntilTheReceiverKnowsItsNeighbours},
    {"AFinalErrorReachesAllRanks", AFinalErrorReachesAllRanks},
    {"SteadyMessagesAllocateNothing", SteadyMessagesAllocateNothing},
    {"APartOfAMessageKeepsThePollsFrequent", APartOfAMessageKeepsThePollsFrequent},
    {"WhatABrokenPeerSendsIsRefused", WhatABrokenPeerSendsIsRefused},
    {"AnEndedTransportReceivesNothing", AnEndedTransportReceivesNothing},
    {"AnIdleTransportEndsAndReceivesNothing", AnIdleTransportEndsAndReceivesNothing},
    {"EveryRankGetsAllTexts", EveryRankGetsAllTexts},
    {"AllNameARankThatIsSilent", AllNameARankThatIsSilent},
};

bool Run(const Case& one) {
  Rank me;
  const Status status = one.body(me);
  if (!status.ok()) {
    std::printf("FAILED %s on rank %d: %s\n", one.name, me.rank, status.ToString().c_str());
    std::fflush(stdout);
  }
  int ok = status.ok() ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (ok != 0 && me.rank == 0) std::printf("ok %s\n", one.name);
  return ok != 0;
}

int Main() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  bool ok = true;
  for (const Case& one : kCases) ok = Run(one) && ok;
  if (!ok) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Finalize();
  return 0;
}

}  // namespace
}  // namespace farandole

int main() { return farandole::Main(); }
