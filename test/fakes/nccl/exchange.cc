#include "test/fakes/nccl/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "test/fakes/nccl/reduce.h"

namespace farandole {
namespace {

const char* At(const void* memory, int64_t offset) {
  return static_cast<const char*>(memory) + offset;
}
char* At(void* memory, int64_t offset) { return static_cast<char*>(memory) + offset; }

/// Equal on all ranks for one collective, and rarely otherwise.
uint64_t Describe(const FakeNcclWork& work) {
  uint64_t what = static_cast<uint64_t>(work.kind) + 1;
  for (const int64_t part :
       {work.count, int64_t{work.datatype}, int64_t{work.op}, int64_t{work.peer}}) {
    what = what * 1000003 + static_cast<uint64_t>(part);
  }
  return what;
}

bool IsTransfer(const FakeNcclWork& work) {
  return work.kind == FakeNcclWork::Kind::kSend || work.kind == FakeNcclWork::Kind::kReceive;
}

/// A bit: each kind has one for small and one for large sizes.
uint32_t Algorithm(const FakeNcclWork& work) {
  const bool is_large = work.count * FakeNcclSizeOf(work.datatype) > kFakeNcclSmallBytes;
  return 1u << (2 * static_cast<int>(work.kind) + (is_large ? 1 : 0));
}

}  // namespace

FakeNcclExchange::FakeNcclExchange(std::shared_ptr<FakeNcclSegment> segment, int rank, int size,
                                   Complain complain)
    : segment_(std::move(segment)), rank_(rank), size_(size), complain_(std::move(complain)) {}

bool FakeNcclExchange::Connected() {
  return shared().arrived.load(std::memory_order_acquire) == static_cast<uint32_t>(size_);
}

template <class Holds>
bool FakeNcclExchange::AllRanks(Holds holds) {
  return std::all_of(shared().ranks, shared().ranks + size_, holds);
}

// All that a group needs is connected side by side.
bool FakeNcclExchange::MeetAtFirstUse(const std::vector<FakeNcclWork>& works) {
  uint32_t algorithms = 0, sends_to = 0, receives_from = 0;
  for (const FakeNcclWork& work : works) {
    if (work.kind == FakeNcclWork::Kind::kSend) sends_to |= 1u << work.peer;
    if (work.kind == FakeNcclWork::Kind::kReceive) receives_from |= 1u << work.peer;
    if (!IsTransfer(work)) algorithms |= Algorithm(work);
  }
  me().algorithms.fetch_or(algorithms, std::memory_order_acq_rel);
  me().sends_to.fetch_or(sends_to, std::memory_order_acq_rel);
  me().receives_from.fetch_or(receives_from, std::memory_order_acq_rel);
  const uint32_t my_bit = 1u << rank_;
  return Wait([&] {
    return AllRanks([&](const FakeNcclShared::Rank& rank) {
      const uint32_t bit = 1u << (&rank - shared().ranks);
      return (rank.algorithms & algorithms) == algorithms &&
             ((sends_to & bit) == 0 || (rank.receives_from & my_bit) != 0) &&
             ((receives_from & bit) == 0 || (rank.sends_to & my_bit) != 0);
    });
  });
}

// Those that never used an algorithm or a peer have no connection to close.
void FakeNcclExchange::AwaitPeersClosed() {
  const auto is_connected = [](const FakeNcclShared::Rank& rank) {
    return (rank.algorithms | rank.sends_to | rank.receives_from) != 0;
  };
  if (!is_connected(me())) return;
  (void)Wait([&] {
    return AllRanks(
        [&](const FakeNcclShared::Rank& rank) { return rank.closed != 0 || !is_connected(rank); });
  });
}

// For ever, as on a GPU, unless aborted.
template <class Ready>
bool FakeNcclExchange::Wait(Ready ready) const {
  for (int looks = 0; !ready(); ++looks) {
    if (aborted_) return false;
    if (looks < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

void FakeNcclExchange::Run(uint64_t ticket, const std::vector<FakeNcclWork>& works) {
  const bool ran =
      Wait([&] { return turn_.load(std::memory_order_acquire) == ticket; }) && RunAll(works);
  if (ran) return turn_.store(ticket + 1, std::memory_order_release);
  for (const FakeNcclWork& work : works) Poison(work);
}

bool FakeNcclExchange::RunAll(const std::vector<FakeNcclWork>& works) {
  for (const FakeNcclWork& work : works) {
    if (!IsTransfer(work) && !RunOne(work)) return false;
  }
  return RunTransfers(works);
}

// An aborted kernel ends as any other, and what it leaves is undefined.
void FakeNcclExchange::Poison(const FakeNcclWork& work) {
  if (work.receive == nullptr) return;
  const int64_t ranks = work.kind == FakeNcclWork::Kind::kAllGather ? size_ : 1;
  const int64_t size_bytes = ranks * work.count * FakeNcclSizeOf(work.datatype);
  std::memset(work.receive, 0x3A, static_cast<size_t>(size_bytes));
}

bool FakeNcclExchange::RunOne(const FakeNcclWork& work) {
  if (work.never_ends) return Wait([] { return false; });
  if (work.count == 0) return true;
  const uint64_t what = Describe(work);
  switch (work.kind) {
    case FakeNcclWork::Kind::kAllReduce:
      return AllReduce(work, what);
    case FakeNcclWork::Kind::kBroadcast:
      return Broadcast(work, what);
    case FakeNcclWork::Kind::kAllGather:
      return AllGather(work, what);
    case FakeNcclWork::Kind::kReduceScatter:
      return ReduceScatter(work, what);
    case FakeNcclWork::Kind::kSend:
    case FakeNcclWork::Kind::kReceive:
      break;
  }
  return true;
}

// One chunk: everybody's contribution is put into slots, and used once all are there.
bool FakeNcclExchange::Round(const void* mine, int64_t size_bytes, uint64_t what, const Use& use) {
  const uint64_t number = ++rounds_;
  const auto all = [&](std::atomic<uint64_t> FakeNcclShared::Rank::*counter, uint64_t least) {
    return Wait([&] {
      return AllRanks([&](const FakeNcclShared::Rank& rank) {
        return (rank.*counter).load(std::memory_order_acquire) >= least;
      });
    });
  };
  if (!all(&FakeNcclShared::Rank::consumed, number - 1)) return false;
  if (mine != nullptr) std::memcpy(me().slot, mine, static_cast<size_t>(size_bytes));
  me().what = what;
  me().posted.store(number, std::memory_order_release);
  if (!all(&FakeNcclShared::Rank::posted, number)) return false;
  std::vector<const void*> slots;
  for (int rank = 0; rank < size_; ++rank) {
    if (shared().ranks[rank].what != what) {
      complain_("rank " + std::to_string(rank_) + " and rank " + std::to_string(rank) +
                " run different collectives (kind, count, type, op or root)");
      return Wait([] { return false; });
    }
    slots.push_back(shared().ranks[rank].slot);
  }
  use(slots);
  me().consumed.store(number, std::memory_order_release);
  return true;
}

// `out` may be null: this rank only contributes.
bool FakeNcclExchange::Reduced(const FakeNcclWork& work, const void* in, void* out, int64_t count,
                               uint64_t what) {
  const int64_t size_of = FakeNcclSizeOf(work.datatype);
  const int64_t at_once = kFakeNcclSlotBytes / size_of;
  for (int64_t begin = 0; begin < count; begin += at_once) {
    const int64_t some = std::min(at_once, count - begin);
    const bool went_on =
        Round(At(in, begin * size_of), some * size_of, what, [&](const auto& slots) {
          if (out == nullptr) return;
          FakeNcclReduction reduction{work.datatype, work.op,
                                      rounds_ % static_cast<uint64_t>(size_)};
          FakeNcclReduce(At(out, begin * size_of), slots, some, reduction);
        });
    if (!went_on) return false;
  }
  return true;
}

bool FakeNcclExchange::AllReduce(const FakeNcclWork& work, uint64_t what) {
  return Reduced(work, work.send, work.receive, work.count, what);
}

bool FakeNcclExchange::ReduceScatter(const FakeNcclWork& work, uint64_t what) {
  const int64_t shard_bytes = work.count * FakeNcclSizeOf(work.datatype);
  for (int rank = 0; rank < size_; ++rank) {
    void* out = rank == rank_ ? work.receive : nullptr;
    if (!Reduced(work, At(work.send, rank * shard_bytes), out, work.count, what)) return false;
  }
  return true;
}

bool FakeNcclExchange::AllGather(const FakeNcclWork& work, uint64_t what) {
  const int64_t size_bytes = work.count * FakeNcclSizeOf(work.datatype);
  for (int64_t begin = 0; begin < size_bytes; begin += kFakeNcclSlotBytes) {
    const int64_t some = std::min(kFakeNcclSlotBytes, size_bytes - begin);
    const bool went_on = Round(At(work.send, begin), some, what, [&](const auto& slots) {
      for (int rank = 0; rank < size_; ++rank) {
        std::memcpy(At(work.receive, rank * size_bytes + begin), slots[static_cast<size_t>(rank)],
                    static_cast<size_t>(some));
      }
    });
    if (!went_on) return false;
  }
  return true;
}

bool FakeNcclExchange::Broadcast(const FakeNcclWork& work, uint64_t what) {
  const int64_t size_bytes = work.count * FakeNcclSizeOf(work.datatype);
  for (int64_t begin = 0; begin < size_bytes; begin += kFakeNcclSlotBytes) {
    const int64_t some = std::min(kFakeNcclSlotBytes, size_bytes - begin);
    const void* mine = rank_ == work.peer ? At(work.send, begin) : nullptr;
    const bool went_on = Round(mine, some, what, [&](const auto& slots) {
      std::memcpy(At(work.receive, begin), slots[static_cast<size_t>(work.peer)],
                  static_cast<size_t>(some));
    });
    if (!went_on) return false;
  }
  return true;
}

struct FakeNcclExchange::Transfer {
  const FakeNcclWork* work;
  int64_t done_bytes;
  int64_t size_bytes;
  bool read = false;  ///< A send waits until its peer has received, as the real one may.
  bool sends() const { return work->kind == FakeNcclWork::Kind::kSend; }
  bool over() const { return done_bytes == size_bytes && (read || !sends()); }
  bool shares_channel_with(const Transfer& other) const {
    return work->kind == other.work->kind && work->peer == other.work->peer;
  }
};

// From then on nothing of this rank is exchanged any more, as if it hung.
bool FakeNcclExchange::Contradicts(const FakeNcclShared::Channel& channel,
                                   const FakeNcclWork& work) {
  if (channel.count == work.count && channel.datatype == work.datatype) return false;
  const auto text = [](int64_t count, int datatype) {
    return std::to_string(count) + " elements of type " + std::to_string(datatype);
  };
  complain_("rank " + std::to_string(work.peer) + " sends " +
            text(channel.count, channel.datatype) + " to rank " + std::to_string(rank_) +
            ", which receives " + text(work.count, work.datatype));
  return contradicted_ = true;
}

// Moves one chunk if the channel is ready for it.
bool FakeNcclExchange::Advance(Transfer& transfer) {
  const bool sends = transfer.sends();
  FakeNcclShared::Channel& channel =
      sends ? me().to[transfer.work->peer] : shared().ranks[transfer.work->peer].to[rank_];
  const uint64_t written = channel.written.load(std::memory_order_acquire);
  const uint64_t read = channel.read.load(std::memory_order_acquire);
  if ((written == read) != sends || contradicted_) return false;
  if (!sends && Contradicts(channel, *transfer.work)) return false;
  if (sends && transfer.done_bytes == transfer.size_bytes) return transfer.read = true;
  const int64_t some = std::min(kFakeNcclChannelBytes, transfer.size_bytes - transfer.done_bytes);
  if (sends) {
    std::memcpy(channel.bytes, At(transfer.work->send, transfer.done_bytes),
                static_cast<size_t>(some));
    channel.count = transfer.work->count;
    channel.datatype = transfer.work->datatype;
    channel.written.store(written + 1, std::memory_order_release);
  } else {
    std::memcpy(At(transfer.work->receive, transfer.done_bytes), channel.bytes,
                static_cast<size_t>(some));
    channel.read.store(read + 1, std::memory_order_release);
  }
  transfer.done_bytes += some;
  return true;
}

// All sends and receives of a group side by side; those between the same two ranks in order.
bool FakeNcclExchange::RunTransfers(const std::vector<FakeNcclWork>& works) {
  std::vector<Transfer> transfers;
  for (const FakeNcclWork& work : works) {
    if (IsTransfer(work))
      transfers.push_back({&work, 0, work.count * FakeNcclSizeOf(work.datatype)});
  }
  while (true) {
    std::erase_if(transfers, [](const Transfer& transfer) { return transfer.over(); });
    if (transfers.empty()) return true;
    const bool went_on = Wait([&] {
      bool moved = false;
      for (auto it = transfers.begin(); it != transfers.end(); ++it) {
        const bool first = std::none_of(transfers.begin(), it, [&](const Transfer& other) {
          return other.shares_channel_with(*it) && !other.over();
        });
        if (first && !it->over() && !it->work->never_ends) moved |= Advance(*it);
      }
      return moved;
    });
    if (!went_on) return false;
  }
}

}  // namespace farandole
