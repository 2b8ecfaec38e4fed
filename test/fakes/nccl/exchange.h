// One rank's end of a fake communicator: moves and reduces the data, on the stream's thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "test/fakes/nccl/segment.h"

namespace farandole {

/// One NCCL operation as it lies in a stream.
struct FakeNcclWork {
  enum class Kind : uint8_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kReceive };
  Kind kind = Kind::kAllReduce;
  const void* send = nullptr;
  void* receive = nullptr;
  int64_t count = 0;  ///< As the call has it.
  int datatype = 0;
  int op = 0;
  int peer = 0;             ///< Or the root.
  bool never_ends = false;  ///< Until the communicator is aborted.
};

/// Thread safety: Abort, TakeTicket and Connected from any thread; Run on streams' threads.
class FakeNcclExchange {
 public:
  using Complain = std::function<void(std::string)>;

  /// @param complain  Told when ranks run different collectives; the real one would hang or worse.
  FakeNcclExchange(std::shared_ptr<FakeNcclSegment> segment, int rank, int size, Complain complain);

  /// Everybody is in.
  bool Connected();
  /// As the host of the real one at the first use of an algorithm (which kind and size choose), or
  /// of a peer in one direction: blocks until the others have called it, too. @return false if it
  /// was aborted meanwhile.
  bool MeetAtFirstUse(const std::vector<FakeNcclWork>& works);
  /// This rank needs its peers' proxies no more.
  void Close() { me().closed.store(1, std::memory_order_release); }
  /// The proxy of this rank serves its peers of the same host until they have closed, for ever if
  /// one died, unless aborted.
  void AwaitPeersClosed();
  FakeNcclShared& shared() { return segment_->shared(); }
  void Unlink() { segment_->Unlink(); }
  /// What runs, and what is run later, ends without a result; the peers' proxies are left.
  void Abort() {
    aborted_ = true;
    Close();
  }

  /// Operations run in the order in which they took tickets, on whatever stream they are.
  uint64_t TakeTicket() { return tickets_.fetch_add(1); }
  void Run(uint64_t ticket, const std::vector<FakeNcclWork>& works);

 private:
  using Slots = const std::vector<const void*>&;
  using Use = std::function<void(Slots)>;
  struct Transfer;

  template <class Ready>
  bool Wait(Ready ready) const;
  template <class Holds>
  bool AllRanks(Holds holds);
  FakeNcclShared::Rank& me() { return shared().ranks[rank_]; }
  bool RunAll(const std::vector<FakeNcclWork>& works);
  void Poison(const FakeNcclWork& work);
  bool RunOne(const FakeNcclWork& work);
  bool AllReduce(const FakeNcclWork& work, uint64_t what);
  bool ReduceScatter(const FakeNcclWork& work, uint64_t what);
  bool AllGather(const FakeNcclWork& work, uint64_t what);
  bool Broadcast(const FakeNcclWork& work, uint64_t what);
  bool Round(const void* mine, int64_t size_bytes, uint64_t what, const Use& use);
  bool Reduced(const FakeNcclWork& work, const void* in, void* out, int64_t count, uint64_t what);
  bool RunTransfers(const std::vector<FakeNcclWork>& works);
  bool Advance(Transfer& transfer);
  bool Contradicts(const FakeNcclShared::Channel& channel, const FakeNcclWork& work);

  const std::shared_ptr<FakeNcclSegment> segment_;
  const int rank_;
  const int size_;
  const Complain complain_;
  std::atomic<bool> aborted_{false};
  std::atomic<uint64_t> tickets_{0};
  std::atomic<uint64_t> turn_{0};
  uint64_t rounds_ = 0;        // these two: of whose turn it is
  bool contradicted_ = false;  // two ends of a transfer do not agree
};

}  // namespace farandole
