// The conformance suites of transport and data plane over the MPI plug-in, of the data plane and a
// transport over memory that processes share, and of the data plane that uses both, one rank per
// process:
// mpirun -np N mpi_conformance PLUGIN [LIBMPI]. Exits 1, and says why, if any rank fails.
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "coordinator/control/host_transport.h"
#include "coordinator/control/rendezvous.h"
#include "coordinator/control/share_memory.h"
#include "core/plugin_loader.h"
#include "ops/cpu/batch.h"
#include "ops/cpu/kernels.h"
#include "ops/device.h"
#include "ops/hierarchical/plane.h"
#include "ops/p2p/plane.h"
#include "ops/shm/plane.h"
#include "test/conformance/data_plane_rank.h"
#include "test/conformance/data_plane_reference.h"
#include "test/conformance/transport_cases.h"

namespace {
std::atomic<int64_t> news{0};
std::atomic<int64_t> aligned_bytes{0};
std::atomic<bool> no_aligned_memory{false};
}  // namespace

// Where only one of a pair is inlined GCC 12 takes them for mismatched.
[[gnu::noinline]] void* operator new(std::size_t size) {
  news.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t size) {
  if (no_aligned_memory.load()) return nullptr;
  aligned_bytes.fetch_add(static_cast<int64_t>(size), std::memory_order_relaxed);
  return memalign(alignment, size);
}

namespace farandole {
namespace {

constexpr int64_t kPatienceNs = 30 * kNsPerSecond;
constexpr auto kWatchNobody = [](int, pid_t) {};

// What every check gets.
struct Bench {
  MpiRuntime& mpi;
  Transport& transport;
  DataPlane& plane;
  Counters& counters;
  FutexDoorbell& bell;
  std::vector<int> hosts = {};  // by rank, as played; see PlaneCase
  BufferSource buffers = {};

  int rank() const { return mpi.rank(); }
  int size() const { return mpi.size(); }
};

// All ranks say what went wrong; the first answer that is not empty. Also a barrier.
std::string Agree(Bench& bench, const std::string& mine) {
  Result<std::vector<std::string>> all = bench.transport.Allgather(mine, kPatienceNs);
  if (!all.ok()) return all.status().ToString();
  for (int rank = 0; rank < bench.size(); ++rank) {
    const std::string& said = all.value()[static_cast<size_t>(rank)];
    if (!said.empty()) return "rank " + std::to_string(rank) + ": " + said;
  }
  return {};
}

std::string SameOnAll(Bench& bench, const std::vector<uint64_t>& fingerprints) {
  const std::string mine(reinterpret_cast<const char*>(fingerprints.data()),
                         fingerprints.size() * sizeof(uint64_t));
  Result<std::vector<std::string>> all = bench.transport.Allgather(mine, kPatienceNs);
  if (!all.ok()) return all.status().ToString();
  for (size_t i = 0; i < fingerprints.size(); ++i) {
    for (const std::string& theirs : all.value()) {
      uint64_t value = 0;
      theirs.copy(reinterpret_cast<char*>(&value), sizeof value, i * sizeof value);
      const bool both = value != 0 && fingerprints[i] != 0;
      if (both && value != fingerprints[i]) return "case " + std::to_string(i) + " differs";
    }
  }
  return {};
}

std::string GivesTheReference(Bench& bench, const std::vector<PlaneCase>& cases) {
  std::vector<uint64_t> fingerprints;
  std::string wrong = RunCasesOnRank(bench.plane, bench.bell, GlobalSet(bench.rank(), bench.size()),
                                     cases, &fingerprints);
  return wrong.empty() ? SameOnAll(bench, fingerprints) : wrong;
}

std::string PlaneGivesTheReferenceOnAllRanks(Bench& bench) {
  return GivesTheReference(bench, AllPlaneCases(bench.size()));
}

std::string TensorsInBuffersAreReducedWhereTheyLie(Bench& bench) {
  SetView set = GlobalSet(bench.rank(), bench.size());
  set.buffers = bench.buffers;
  const int64_t before = bench.counters.Get(Counter::kInPlaceBytes);
  std::vector<PlaneCase> cases = AllPlaneCases(bench.size());
  std::erase_if(cases, [](const PlaneCase& c) { return c.kind != OpKind::kAllreduce; });
  std::vector<uint64_t> fingerprints;
  std::string wrong = RunCasesOnRank(bench.plane, bench.bell, set, cases, &fingerprints);
  if (!wrong.empty()) return wrong;
  if (bench.counters.Get(Counter::kInPlaceBytes) == before) return "all were copied";
  return SameOnAll(bench, fingerprints);
}

std::string AdasumGivesTheReferenceOnAllRanks(Bench& bench) {
  return GivesTheReference(bench, AdasumCases(bench.size()));
}

// What a large set does otherwise than a small one.
std::string SmallGathersGiveTheReference(Bench& bench) {
  std::vector<PlaneCase> cases = AllPlaneCases(bench.size());
  std::erase_if(cases, [](const PlaneCase& c) {
    const bool gathers = c.kind == OpKind::kAllreduce || c.kind == OpKind::kAllgather;
    return !gathers || c.Count() > 10'000;
  });
  return GivesTheReference(bench, cases);
}

// Those that a hierarchical plane composes; others are the flat plane's.
std::string ComposedCollectivesGiveTheReference(Bench& bench) {
  std::string wrong;
  for (const auto cases : {AllreduceCases, NumericCases, ShapeCases, BroadcastCases, SlotCases}) {
    if (wrong.empty()) wrong = GivesTheReference(bench, OnHosts(cases(bench.size()), bench.hosts));
  }
  return wrong;
}

// The view of a set made of every `step`-th rank from `first`; my_index -1 for others.
SetView Every(int step, int first, uint32_t uid, const Bench& bench) {
  SetView view;
  view.set = uid;
  view.my_index = -1;
  for (int rank = first; rank < bench.size(); rank += step) {
    if (rank == bench.rank()) view.my_index = static_cast<int>(view.ranks.size());
    view.ranks.push_back(rank);
  }
  return view;
}

constexpr OpKind kKinds[] = {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kAllgather,
                             OpKind::kReducescatter, OpKind::kAlltoall};

// With `split` elements of each member; alltoall: at most.
PlaneCase EvenCase(OpKind kind, int members, int64_t split) {
  PlaneCase c;
  c.kind = kind;
  c.members = members;
  c.counts = {split * members};
  if (IsVariableSize(kind)) c.splits.assign(static_cast<size_t>(members), split);
  if (kind == OpKind::kAlltoall) c.counts = {split};
  if (!IsVariableSize(kind)) c.counts.push_back(17);
  return c;
}

// Several batches of several overlapping sets, all started before any is stepped.
std::string BatchesOfSeveralSetsRunSideBySide(Bench& bench) {
  std::vector<std::unique_ptr<RankRun>> runs;
  std::vector<RankRun*> started;
  std::vector<std::vector<std::byte>> expected;
  expected.reserve(64);  // RankRun borrows them
  const SetView sets[] = {Every(1, 0, 7, bench), Every(2, 0, 8, bench), Every(2, 1, 9, bench),
                          Every(1, 1, 10, bench)};
  for (const SetView& set : sets) {
    if (set.my_index < 0) continue;
    if (!bench.plane.AddSet(set.set, set.ranks, set.my_index).ok()) return "AddSet failed";
    for (int number = 1; number <= 8; ++number) {
      PlaneCase c = EvenCase(kKinds[number % 5], static_cast<int>(set.ranks.size()),
                             int64_t{1} << 2 * number);
      c.root = number % c.members;
      c.seed = static_cast<uint64_t>(number) + set.set;
      expected.push_back(ReferenceResult(c));
      runs.push_back(std::make_unique<RankRun>(c, set, number, expected.back()));
      started.push_back(runs.back().get());
    }
  }
  std::string wrong = DriveAllToEnd(bench.plane, bench.bell, started);
  for (const SetView& set : sets) {
    if (set.my_index >= 0) bench.plane.RemoveSet(set.set);
  }
  return wrong;
}

std::string RunSteadyRounds(Bench& bench, std::span<RankRun* const> runs, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    for (RankRun* run : runs) {
      Result<PlaneOperation*> operation = run->Start(bench.plane);
      if (!operation.ok()) return operation.status().ToString();
      for (;;) {
        const Progress progress = operation.value()->Step();
        if (progress.state == Progress::State::kFailed) return progress.status.ToString();
        if (progress.state == Progress::State::kDone) break;
        (void)bench.transport.Poll();  // as an engine would; nothing arrives here
      }
    }
  }
  return {};
}

std::string SteadyBatchesAllocateNothing(Bench& bench) {
  const SetView set = GlobalSet(bench.rank(), bench.size());
  if (!bench.plane.AddSet(set.set, set.ranks, set.my_index).ok()) return "AddSet failed";
  std::vector<std::unique_ptr<RankRun>> owned;
  for (const OpKind kind : kKinds) {
    for (const int64_t split : {1, 100'000}) {
      owned.push_back(std::make_unique<RankRun>(EvenCase(kind, bench.size(), split), set, 1,
                                                std::span<const std::byte>()));
    }
  }
  PlaneCase adasum = EvenCase(OpKind::kAllreduce, bench.size(), 1000);
  adasum.op = ReduceOp::kAdasum;
  adasum.wire = WireFormat::kBfloat16;
  owned.push_back(std::make_unique<RankRun>(adasum, set, 1, std::span<const std::byte>()));
  std::vector<RankRun*> runs;
  for (const auto& run : owned) runs.push_back(run.get());
  std::string wrong = RunSteadyRounds(bench, runs, 3);
  const int64_t before = news.load();
  if (wrong.empty()) wrong = RunSteadyRounds(bench, runs, 20);
  const int64_t during = news.load() - before;
  bench.plane.RemoveSet(set.set);
  if (!wrong.empty() || during == 0) return wrong;
  return std::to_string(during) + " calls of operator new in 220 steady batches";
}

// Staging is allocated with the first batch, which reports a lack of memory.
std::string ASetWithoutBatchesTakesNoMemory(Bench& bench) {
  if (bench.size() == 1) return {};
  SetView set = GlobalSet(bench.rank(), bench.size());
  const int64_t before = aligned_bytes.load();
  for (set.set = 50; set.set < 114; ++set.set) {
    if (!bench.plane.AddSet(set.set, set.ranks, set.my_index).ok()) return "AddSet failed";
  }
  const int64_t unused = aligned_bytes.load() - before;
  set.set = 50;
  const PlaneCase c = EvenCase(OpKind::kAllreduce, bench.size(), 100);
  RankRun run(c, set, 1, {});
  RankRun* const runs[] = {&run};
  no_aligned_memory = true;
  const Result<PlaneOperation*> refused = bench.plane.Start(run.batch());
  no_aligned_memory = false;
  if (refused.ok()) return "a batch starts without memory; " + std::to_string(unused) + " bytes";
  std::string wrong = RunSteadyRounds(bench, runs, 2);
  const int64_t used = aligned_bytes.load() - before;
  for (set.set = 50; set.set < 114; ++set.set) bench.plane.RemoveSet(set.set);
  if (unused != 0) wrong += std::to_string(unused) + " bytes for 64 sets without batches; ";
  if (used != 4 << 20) wrong += std::to_string(used) + " bytes for one with batches; ";
  if (refused.status().code() != Code::kResourceExhausted) wrong += refused.status().ToString();
  return wrong;
}

// Elements of `c`, which is even, that `me` sends to others and gets from all, itself included.
struct Moved {
  int64_t sent = 0;
  int64_t received = 0;
};
Moved Predict(const PlaneCase& c, int me) {
  Moved moved;
  for (int peer = 0; peer < c.members; ++peer) {
    const bool alltoall = c.kind == OpKind::kAlltoall;
    if (peer != me) moved.sent += alltoall ? c.SplitOf(me, peer) : c.splits[0];
    moved.received += alltoall ? c.SplitOf(peer, me) : c.splits[0];
  }
  return moved;
}

// Nothing is sent twice, and nothing is copied but into staging once and into the result once: an
// allgather packs its split once for all, a reducescatter writes only its own split.
std::string EachKindMovesTheBytesPredicted(Bench& bench) {
  if (bench.size() == 1) return {};
  const SetView set = GlobalSet(bench.rank(), bench.size());
  if (!bench.plane.AddSet(set.set, set.ranks, set.my_index).ok()) return "AddSet failed";
  std::string wrong;
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    const PlaneCase c = EvenCase(kind, bench.size(), 100'003);
    const Moved moved = Predict(c, bench.rank());
    const int64_t packed = kind == OpKind::kAllgather ? c.splits[0] : moved.sent;
    const int64_t written = kind == OpKind::kReducescatter ? c.splits[0] : moved.received;
    const int64_t sent_before = bench.counters.Get(Counter::kBulkBytesSent);
    const int64_t copied_before = bench.counters.Get(Counter::kBytesCopied);
    RankRun run(c, set, 1, {});
    RankRun* const runs[] = {&run};
    wrong += RunSteadyRounds(bench, runs, 1);
    const int64_t sent = bench.counters.Get(Counter::kBulkBytesSent) - sent_before;
    const int64_t copied = bench.counters.Get(Counter::kBytesCopied) - copied_before;
    if (sent == 4 * moved.sent && copied == 4 * (packed + written)) continue;
    wrong += c.ToString() + ": sent " + std::to_string(sent) + " bytes, predicted " +
             std::to_string(4 * moved.sent) + "; copied " + std::to_string(copied) +
             ", predicted " + std::to_string(4 * (packed + written)) + "\n";
  }
  bench.plane.RemoveSet(set.set);
  return wrong;
}

// To each other member in a set of up to eight; else one per doubling of what a member has
// gathered.
int64_t MessagesOfASmallGather(int members) {
  return members <= 8 ? members - 1 : std::bit_width(static_cast<unsigned>(members - 1));
}

std::string SmallGathersTakeFewMessages(Bench& bench) {
  const SetView set = GlobalSet(bench.rank(), bench.size());
  if (!bench.plane.AddSet(set.set, set.ranks, set.my_index).ok()) return "AddSet failed";
  const int64_t expected = MessagesOfASmallGather(bench.size());
  std::string wrong;
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kAllgather}) {
    for (const int64_t split : {1, 100}) {
      const PlaneCase c = EvenCase(kind, bench.size(), split);
      const int64_t before = bench.counters.Get(Counter::kBulkMessagesSent);
      RankRun run(c, set, 1, {});
      RankRun* const runs[] = {&run};
      wrong += RunSteadyRounds(bench, runs, 1);
      const int64_t sent = bench.counters.Get(Counter::kBulkMessagesSent) - before;
      if (sent == expected) continue;
      wrong += c.ToString() + ": " + std::to_string(sent) + " messages, expected " +
               std::to_string(expected) + "\n";
    }
  }
  bench.plane.RemoveSet(set.set);
  return wrong;
}

// What is sent besides the tensors are three numbers for each pair of a level.
std::string AnAdasumSendsAboutAsMuchAsASum(Bench& bench) {
  if (bench.size() == 1) return {};
  const SetView set = GlobalSet(bench.rank(), bench.size());
  if (!bench.plane.AddSet(set.set, set.ranks, set.my_index).ok()) return "AddSet failed";
  PlaneCase c = EvenCase(OpKind::kAllreduce, bench.size(), 100'003);
  std::string wrong;
  int64_t sent[2] = {};
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAdasum}) {
    c.op = op;
    const int64_t before = bench.counters.Get(Counter::kBulkBytesSent);
    RankRun run(c, set, 1, {});
    RankRun* const runs[] = {&run};
    wrong += RunSteadyRounds(bench, runs, 1);
    sent[op == ReduceOp::kAdasum ? 1 : 0] = bench.counters.Get(Counter::kBulkBytesSent) - before;
  }
  bench.plane.RemoveSet(set.set);
  // Shards of chunks are aligned, so a rank's may differ by a little.
  if (!wrong.empty() || std::abs(sent[1] - sent[0]) < sent[0] / 100) return wrong;
  return "an adasum sent " + std::to_string(sent[1]) + " bytes, a sum " + std::to_string(sent[0]);
}

// The last rank never starts the batch; the others give up, free their tensors, and go on with
// another set.
std::string AnAbandonedBatchKeepsItsBuffersAndOnlyEndsItsSet(Bench& bench) {
  if (bench.size() == 1) return {};
  const SetView set = GlobalSet(bench.rank(), bench.size());
  if (!bench.plane.AddSet(set.set, set.ranks, set.my_index).ok()) return "AddSet failed";
  if (bench.rank() != bench.size() - 1) {
    PlaneCase c;
    c.members = bench.size();
    c.counts = {1'000'000};
    RankRun run(c, set, 1, {});
    Result<PlaneOperation*> operation = bench.plane.Start(run.batch());
    if (!operation.ok()) return operation.status().ToString();
    for (int i = 0; i < 100; ++i) {
      if (operation.value()->Step().state == Progress::State::kDone) return "done without a peer";
    }
    operation.value()->Abandon();
    const bool is_mpi = bench.plane.name() == std::string_view("mpi");
    if (is_mpi && bench.counters.Get(Counter::kQuarantinedBytes) == 0) {
      return "nothing was quarantined";
    }
    if (bench.plane.Start(run.batch()).ok()) return "a broken set starts another batch";
  }
  PlaneCase other;
  other.members = bench.size();
  other.counts = {100'000};
  SetView fresh = set;
  fresh.set = 3;
  return RunCasesOnRank(bench.plane, bench.bell, fresh, {&other, 1});
}

// A host sends and receives 2 (H-1)/H of the tensor, divided evenly among as many of its members as
// the smallest host has. Played hosts: the two of HostsPlayed.
std::string AnAllreduceSendsEachShardOnceToEachHost(Bench& bench) {
  const SetView set = GlobalSet(bench.rank(), bench.size());
  if (!bench.plane.AddSet(set.set, set.ranks, set.my_index).ok()) return "AddSet failed";
  PlaneCase c = EvenCase(OpKind::kAllreduce, bench.size(), 1 << 20);
  c.wire = WireFormat::kFloat16;
  const int64_t before = bench.counters.Get(Counter::kBulkBytesSent);
  RankRun run(c, set, 1, {});
  RankRun* const runs[] = {&run};
  std::string wrong = RunSteadyRounds(bench, runs, 1);
  const int64_t sent = bench.counters.Get(Counter::kBulkBytesSent) - before;
  bench.plane.RemoveSet(set.set);
  const int mine = bench.hosts[static_cast<size_t>(bench.rank())];
  const auto end = bench.hosts.begin() + bench.rank();
  const int64_t local_rank = std::count(bench.hosts.begin(), end, mine);
  const int64_t shards =
      std::min(std::ranges::count(bench.hosts, 0), std::ranges::count(bench.hosts, 1));
  const int64_t bytes = 2 * c.Count();
  const int64_t expected = local_rank < shards ? bytes / shards : 0;  // 2 (2-1)/2 = 1
  if (!wrong.empty() || std::abs(sent - expected) <= expected / 100) return wrong;
  return "sent " + std::to_string(sent) + " bytes, expected " + std::to_string(expected);
}

// Ranks 0 and 1, of which rank 0 sends `sent` floats and rank 1 expects `expected`, both at most
// 100,000.
Progress RunUnlikeSplits(Bench& bench, const SetView& pair, int64_t sent, int64_t expected) {
  static std::vector<float> in(100'000), out(100'000);
  const Segment segment{in.data(), out.data(), std::max(sent, expected)};
  const int64_t to_one[] = {0, sent}, from_zero[] = {expected, 0}, none[] = {0, 0};
  Batch batch;
  batch.number = 1;
  batch.set = pair.set;
  batch.ranks = pair.ranks;
  batch.my_index = pair.my_index;
  batch.kind = OpKind::kAlltoall;
  batch.segments = {&segment, 1};
  batch.count = segment.count;
  batch.sends = pair.my_index == 0 ? to_one : none;
  batch.receives = pair.my_index == 1 ? from_zero : none;
  Result<PlaneOperation*> operation = bench.plane.Start(batch);
  if (!operation.ok()) return Progress::Failed(operation.status());
  const int64_t deadline = SteadyClock().NowNs() + kPatienceNs;
  while (SteadyClock().NowNs() < deadline) {
    Progress progress = operation.value()->Step();
    using State = Progress::State;
    if (progress.state == State::kDone || progress.state == State::kFailed) return progress;
  }
  operation.value()->Abandon();
  return Progress::Waiting();
}

// The sender completes: the chunk in which they disagree is its last one here.
std::string TheReceiverOfUnlikeSplitsFailsAndNamesThem(Bench& bench) {
  constexpr int64_t kSlice = 32'768;  // floats that travel at a time between two members
  const struct {
    int64_t sent, expected;
    std::string_view says;
  } cases[] = {{8, 0, "sends rank 1 32 bytes, rank 1 expects 0"},
               {0, 8, "sends rank 1 0 bytes, rank 1 expects 32"},
               {8, 4, "sends rank 1 32 bytes, rank 1 expects 16"},
               {kSlice, 0, "sends rank 1 at least 131072 bytes, rank 1 expects 0"},
               {kSlice, 2 * kSlice, "sends rank 1 131072 bytes, rank 1 expects 262144"},
               {2 * kSlice, kSlice, "sends rank 1 at least 262144 bytes, rank 1 expects 131072"},
               {2 * kSlice, 2 * kSlice, ""},
               {2 * kSlice, 40'000, "sends rank 1 at least 262144 bytes, rank 1 expects 160000"}};
  SetView pair{20, {0, 1}, bench.rank()};
  std::string wrong;
  for (const auto& one : cases) {
    if (bench.size() == 1 || bench.rank() > 1) break;
    if (!bench.plane.AddSet(++pair.set, pair.ranks, pair.my_index).ok()) return "AddSet failed";
    const Progress end = RunUnlikeSplits(bench, pair, one.sent, one.expected);
    const bool fails = bench.rank() == 1 && !one.says.empty();
    const Progress::State expected = fails ? Progress::State::kFailed : Progress::State::kDone;
    if (end.state != expected ||
        (fails && end.status.message() != "alltoall: rank 0 " + std::string(one.says))) {
      wrong += std::to_string(one.sent) + " for " + std::to_string(one.expected) + ": ended with " +
               std::to_string(static_cast<int>(end.state)) + ", " + end.status.ToString() + "\n";
    }
    bench.plane.RemoveSet(pair.set);
  }
  return wrong;
}

// Uids that are equal modulo all numbers of tags that a plane may have to give.
uint32_t UidWithTheTagsOf(uint32_t uid, uint32_t round) { return uid + round * kMaxLiveSets; }

// Sets one after the other, all with the same tags.
std::string TagsOfRemovedSetsServeLaterOnes(Bench& bench) {
  std::string wrong;
  for (uint32_t round = 0; round < 300 && wrong.empty(); ++round) {
    SetView set = GlobalSet(bench.rank(), bench.size());
    set.set = UidWithTheTagsOf(41, round);
    PlaneCase c = EvenCase(kKinds[round % 5], bench.size(), 5);
    c.root = static_cast<int>(round) % c.members;
    c.seed = round;
    wrong = RunCasesOnRank(bench.plane, bench.bell, set, {&c, 1});
  }
  return wrong;
}

// Steps a batch of a set that was removed, though not yet here, and one of a later set with its
// tags, whose turn comes first on every other rank.
std::string StepBoth(Bench& bench, PlaneOperation* ending, uint32_t uid, PlaneOperation* later) {
  const int64_t deadline = SteadyClock().NowNs() + kPatienceNs;
  while (ending != nullptr || later != nullptr) {
    if (SteadyClock().NowNs() > deadline) return "no progress";
    bool moved = false;
    for (const bool ends : {bench.rank() % 2 == 0, bench.rank() % 2 != 0}) {
      PlaneOperation*& operation = ends ? ending : later;
      if (operation == nullptr) continue;
      const Progress progress = operation->Step();
      if (progress.state == Progress::State::kFailed) return progress.status.ToString();
      moved |= progress.state != Progress::State::kWaiting;
      if (progress.state != Progress::State::kDone) continue;
      operation = nullptr;
      if (ends) bench.plane.RemoveSet(uid);
    }
    if (!moved) std::this_thread::yield();  // there may be more ranks than cores
  }
  return {};
}

std::string ASetWaitsForTheOneThatHadItsTags(Bench& bench) {
  for (uint32_t round = 0; round < 10; ++round) {
    SetView sets[2] = {GlobalSet(bench.rank(), bench.size()),
                       GlobalSet(bench.rank(), bench.size())};
    std::vector<std::unique_ptr<RankRun>> runs;
    std::vector<std::byte> expected[2];
    PlaneOperation* operations[2] = {};
    for (uint32_t i = 0; i < 2; ++i) {
      sets[i].set = UidWithTheTagsOf(42, 2 * round + i);
      if (Status added = bench.plane.AddSet(sets[i].set, sets[i].ranks, sets[i].my_index);
          !added.ok()) {
        return added.ToString();
      }
      PlaneCase c = EvenCase(kKinds[round % 5], bench.size(), i == 0 ? 100'000 : 1'000);
      c.seed = 2 * round + i;
      expected[i] = ReferenceResult(c);
      runs.push_back(std::make_unique<RankRun>(c, sets[i], 1, expected[i]));
      Result<PlaneOperation*> started = bench.plane.Start(runs.back()->batch());
      if (!started.ok()) return started.status().ToString();
      operations[i] = started.value();
    }
    std::string wrong = StepBoth(bench, operations[0], sets[0].set, operations[1]);
    for (const auto& run : runs) wrong += run->Check();
    if (!wrong.empty()) return wrong;
    bench.plane.RemoveSet(sets[1].set);
  }
  return {};
}

// Sets one after the other, without a barrier: some members add the next while others run the last.
std::string SetsMayFollowOneAnotherAtOnce(Bench& bench) {
  std::string wrong;
  for (uint32_t round = 0; round < 100 && wrong.empty(); ++round) {
    SetView set = GlobalSet(bench.rank(), bench.size());
    set.set = 100 + round;
    PlaneCase c = EvenCase(kKinds[round % 5], bench.size(), 1000);
    c.root = static_cast<int>(round) % c.members;
    c.seed = round;
    wrong = RunCasesOnRank(bench.plane, bench.bell, set, {&c, 1});
  }
  return wrong;
}

struct Check {
  const char* name;
  std::string (*body)(Bench& bench);
};

constexpr Check kChecks[] = {
    {"PlaneGivesTheReferenceOnAllRanks", PlaneGivesTheReferenceOnAllRanks},
    {"AdasumGivesTheReferenceOnAllRanks", AdasumGivesTheReferenceOnAllRanks},
    {"BatchesOfSeveralSetsRunSideBySide", BatchesOfSeveralSetsRunSideBySide},
    {"SteadyBatchesAllocateNothing", SteadyBatchesAllocateNothing},
    {"SetsMayFollowOneAnotherAtOnce", SetsMayFollowOneAnotherAtOnce},
};

constexpr Check kMpiChecks[] = {
    {"AnAdasumSendsAboutAsMuchAsASum", AnAdasumSendsAboutAsMuchAsASum},
    {"EachKindMovesTheBytesPredicted", EachKindMovesTheBytesPredicted},
    {"SmallGathersTakeFewMessages", SmallGathersTakeFewMessages},
    {"ASetWithoutBatchesTakesNoMemory", ASetWithoutBatchesTakesNoMemory},
    {"TagsOfRemovedSetsServeLaterOnes", TagsOfRemovedSetsServeLaterOnes},
    {"ASetWaitsForTheOneThatHadItsTags", ASetWaitsForTheOneThatHadItsTags},
    {"AnAbandonedBatchKeepsItsBuffersAndOnlyEndsItsSet",
     AnAbandonedBatchKeepsItsBuffersAndOnlyEndsItsSet},
    {"TheReceiverOfUnlikeSplitsFailsAndNamesThem", TheReceiverOfUnlikeSplitsFailsAndNamesThem},
};

// With more ranks than kAllChecksRanks.
constexpr int kAllChecksRanks = 8;
constexpr Check kLargeSetChecks[] = {
    {"SmallGathersGiveTheReference", SmallGathersGiveTheReference},
    {"SmallGathersTakeFewMessages", SmallGathersTakeFewMessages},
    {"SteadyBatchesAllocateNothing", SteadyBatchesAllocateNothing},
};

// Uid 0 is broken after the last one.
constexpr Check kHierarchicalChecks[] = {
    {"ComposedCollectivesGiveTheReference", ComposedCollectivesGiveTheReference},
    {"BatchesOfSeveralSetsRunSideBySide", BatchesOfSeveralSetsRunSideBySide},
    {"SteadyBatchesAllocateNothing", SteadyBatchesAllocateNothing},
    {"SetsMayFollowOneAnotherAtOnce", SetsMayFollowOneAnotherAtOnce},
    {"AnAllreduceSendsEachShardOnceToEachHost", AnAllreduceSendsEachShardOnceToEachHost},
    {"AnAbandonedBatchKeepsItsBuffersAndOnlyEndsItsSet",
     AnAbandonedBatchKeepsItsBuffersAndOnlyEndsItsSet},
};

constexpr Check kSharedMemoryChecks[] = {
    {"TensorsInBuffersAreReducedWhereTheyLie", TensorsInBuffersAreReducedWhereTheyLie},
};

bool Report(int rank, const std::string& over, const char* name, const std::string& wrong) {
  if (!wrong.empty()) {
    std::printf("FAILED %s: %s on rank %d: %s\n", over.c_str(), name, rank, wrong.c_str());
  }
  if (wrong.empty() && rank == 0) std::printf("ok %s: %s\n", over.c_str(), name);
  return wrong.empty();
}

bool RunChecks(Bench& bench, std::span<const Check> checks) {
  bool ok = true;
  for (const Check& check : checks) {
    const std::string wrong = Agree(bench, check.body(bench));
    ok = Report(bench.rank(), bench.plane.name(), check.name, wrong) && ok;
  }
  return ok;
}

bool RunCases(Transport& transport, std::span<const TransportCase> cases,
              const std::string& where = "") {
  bool ok = true;
  for (const TransportCase& one : cases) {
    const Status status = one.body(transport);
    ok = Report(transport.rank(), transport.name() + where, one.name,
                status.ok() ? "" : status.ToString()) &&
         ok;
  }
  return ok;
}

// All ranks of this test are on one host, and may act as if they were on several.
Result<HostGroup> ShareOn(int hosts, Transport& transport, FutexDoorbell& bell,
                          std::vector<int>& host) {
  for (int rank = 0; rank < transport.size(); ++rank) host.push_back(rank % hosts);
  Result<HostGroup> shared = ShareMemory(transport, host, bell, kWatchNobody, kPatienceNs);
  if (shared.ok() && !shared.value().failure.empty()) return Internal(shared.value().failure);
  return shared;
}

bool RunSharedMemoryChecks(const Bench& mpi) {
  if (mpi.size() == 1) return true;  // shares with nobody
  std::vector<int> host;
  FutexDoorbell bell;
  const Result<HostGroup> shared = ShareOn(1, mpi.transport, bell, host);
  if (!shared.ok()) return Report(mpi.rank(), "shm", "ShareMemory", shared.status().ToString());
  SharedMemory& memory = *shared.value().memory;
  SharedMemoryPlane plane(shared.value().memory, mpi.rank(), BestCpuKernels(), &mpi.counters);
  const auto buffers = [&](size_t bytes) { return memory.Allocate(bytes).value(); };
  Bench bench{mpi.mpi, mpi.transport, plane, mpi.counters, bell, {}, buffers};
  const bool ok = RunChecks(bench, kChecks);
  return RunChecks(bench, kSharedMemoryChecks) && ok;
}

// Two hosts, by rank: halves of the ranks, or, of an odd number, every other one.
std::vector<int> HostsPlayed(int size) {
  std::vector<int> hosts;
  for (int rank = 0; rank < size; ++rank) hosts.push_back(size % 2 ? rank % 2 : rank * 2 / size);
  return hosts;
}

bool RunHierarchicalChecks(const Bench& mpi) {
  if (mpi.size() == 1) return true;
  const std::vector<int> hosts = HostsPlayed(mpi.size());
  const char* const over = "hierarchical";
  FutexDoorbell bell;
  const Result<HostGroup> shared =
      ShareMemory(mpi.transport, hosts, bell, kWatchNobody, kPatienceNs);
  if (!shared.ok()) return Report(mpi.rank(), over, "ShareMemory", shared.status().ToString());
  const std::string& failure = shared.value().failure;
  if (!failure.empty()) return Report(mpi.rank(), over, "ShareMemory", failure);
  std::unique_ptr<DataPlane> local;
  if (const auto& memory = shared.value().memory) {
    local = std::make_unique<SharedMemoryPlane>(memory, mpi.rank(), BestCpuKernels());
  }
  std::vector<std::unique_ptr<DataPlane>> planes;  // over MPI: flat, and two between hosts
  for (int i = 0; i < 3; ++i) {
    const LinkOptions options{&bell, nullptr, &mpi.counters, kPatienceNs};
    Result<std::unique_ptr<DataPlane>> plane = CreateP2pPlane(mpi.mpi, options, BestCpuKernels());
    if (!plane.ok()) return Report(mpi.rank(), over, "CreatePlane", plane.status().ToString());
    planes.push_back(std::move(plane).value());
  }
  HierarchicalPlane plane(
      {shared.value().group, local.get(), {planes[1].get(), planes[2].get()}, planes[0].get()},
      BestCpuKernels());
  Bench bench{mpi.mpi, mpi.transport, plane, mpi.counters, bell, hosts};
  return RunChecks(bench, kHierarchicalChecks);
}

// Over a new transport over MPI: the ranks of each host share memory, and those who are neighbours
// in the tree of hosts know each other.
bool RunHostTransport(const Bench& mpi, int hosts, std::span<const TransportCase> cases) {
  Result<std::unique_ptr<Transport>> made =
      mpi.mpi.CreateTransport({nullptr, nullptr, nullptr, kPatienceNs});
  if (!made.ok()) return Report(mpi.rank(), "shm", "Create", made.status().ToString());
  std::unique_ptr<Transport> transport = std::move(made).value();
  std::vector<int> host;
  FutexDoorbell bell;
  const Result<HostGroup> shared = ShareOn(hosts, *transport, bell, host);
  const std::string where = " on " + std::to_string(hosts) + " hosts";
  if (!shared.ok()) return Report(transport->rank(), "shm", "Share", shared.status().ToString());
  if (shared.value().memory != nullptr) {
    transport = MakeHostTransport(std::move(transport), shared.value().memory, nullptr);
  }
  transport->SetNeighbours(Neighbours(MakeTree(host), transport->rank()));
  return RunCases(*transport, cases, where);
}

// @return Whether all went well here. A transport's last case leaves it unusable.
bool RunAll(Bench& bench) {
  if (bench.size() > kAllChecksRanks) return RunChecks(bench, kLargeSetChecks);
  const std::span<const TransportCase> cases = TransportCases();
  const std::span<const TransportCase> all_but_last = cases.first(cases.size() - 1);
  bool ok = RunCases(bench.transport, all_but_last);
  ok = RunChecks(bench, kChecks) && ok;
  ok = RunChecks(bench, kMpiChecks) && ok;
  ok = RunSharedMemoryChecks(bench) && ok;
  ok = RunHierarchicalChecks(bench) && ok;
  ok = RunHostTransport(bench, bench.size(), cases) && ok;
  ok = RunHostTransport(bench, 2, cases) && ok;
  return RunHostTransport(bench, 1, cases) && ok;
}

int Fail(const Status& status) {
  std::printf("FAILED to start: %s\n", status.ToString().c_str());
  return 1;
}

int Main(int argc, char** argv) {
  if (argc < 2) return 2;
  const Services services{&SteadyClock(), &BestCpuKernels(), nullptr};
  Result<Backends> backends = LoadPlugin({argv[1], argc > 2 ? argv[2] : ""}, services);
  if (!backends.ok()) return Fail(backends.status());
  MpiRuntime& mpi = *backends.value().mpi;
  if (Status s = mpi.Init(); !s.ok()) return Fail(s);
  if (mpi.rank() == 0) std::printf("%s\n", mpi.library_version().c_str());
  FutexDoorbell bell;
  Counters counters;
  const LinkOptions options{&bell, nullptr, &counters, kPatienceNs};
  bool ok = true;
  {
    Result<std::unique_ptr<Transport>> transport = mpi.CreateTransport(options);
    if (!transport.ok()) return Fail(transport.status());
    Result<std::unique_ptr<DataPlane>> plane = CreateP2pPlane(mpi, options, BestCpuKernels());
    if (!plane.ok()) return Fail(plane.status());
    Bench bench{mpi, *transport.value(), *plane.value(), counters, bell};
    ok = RunAll(bench);
  }
  if (!ok) mpi.Abort(1);
  if (Status s = mpi.Finalize(); !s.ok()) return Fail(s);
  return 0;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) { return farandole::Main(argc, argv); }
