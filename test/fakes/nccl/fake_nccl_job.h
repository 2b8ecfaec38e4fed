// Some ranks of the fake NCCL in one thread: each with a fake GPU, a stream and a communicator.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "test/fakes/fake_device.h"
#include "test/fakes/nccl/abi.h"
#include "test/fakes/nccl/open.h"

namespace farandole {

#define FARANDOLE_FAKE_NCCL_CALL(name, ...) \
  FakeNcclJob::Library().Get<decltype(&name)>(#name)(__VA_ARGS__)

/// The same of a rank of `job`, until it is complete.
#define FARANDOLE_FAKE_NCCL_RUN(job, rank, name, ...) \
  (job).Completed(rank, FARANDOLE_FAKE_NCCL_CALL(name, __VA_ARGS__))

class FakeNcclJob {
 public:
  static const FakeNccl& Library() {
    static const FakeNccl library(FARANDOLE_FAKE_NCCL);
    return library;
  }
  static const FakeNcclControl& control() { return Library().control(); }
  static ncclUniqueId NewId() {
    ncclUniqueId id;
    EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclGetUniqueId, &id), ncclSuccess);
    return id;
  }
  /// Without waiting for the peers.
  static ncclResult_t Start(ncclComm_t* comm, int size, const ncclUniqueId& id, int rank) {
    constexpr int kUndefined = -2147483647 - 1;
    ncclConfig_t config = {sizeof config, 0xcafebeef, 23203,     /*blocking=*/0,
                           kUndefined,    kUndefined, kUndefined};
    return FARANDOLE_FAKE_NCCL_CALL(ncclCommInitRankConfig, comm, size, id, rank, &config);
  }

  /// Collectives that each rank has called when the job begins.
  static constexpr int kFirstUses = 4;

  /// @param meets  Of several ranks: each algorithm for small sizes and each peer has been used
  ///               once, which is when the host waits for the others.
  FakeNcclJob(FakeDeviceRuntime& runtime, int size, bool meets = true) : runtime_(runtime) {
    const ncclUniqueId id = NewId();
    for (int rank = 0; rank < size; ++rank) {
      Use(rank);
      streams_.push_back(runtime.fake(rank).NewStream());
      comms_.push_back(nullptr);
      EXPECT_EQ(Start(&comms_.back(), size, id, rank), ncclInProgress);
    }
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(Complete(rank), ncclSuccess);
    if (size > 1 && meets) UseEverythingOnce();
  }
  ~FakeNcclJob() {
    for (int rank = 0; rank < size(); ++rank) {
      if (comm(rank) != nullptr) Abort(rank);
    }
  }

  int size() const { return static_cast<int>(comms_.size()); }
  ncclComm_t comm(int rank) { return comms_[static_cast<size_t>(rank)]; }
  FakeStream& stream(int rank) { return *streams_[static_cast<size_t>(rank)]; }
  cudaStream_t handle(int rank) { return static_cast<cudaStream_t>(stream(rank).handle()); }
  void Use(int rank) { ASSERT_TRUE(runtime_.fake(rank).MakeCurrent().ok()); }
  ncclResult_t Look(int rank) {
    ncclResult_t state = ncclSuccess;
    EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclCommGetAsyncError, comm(rank), &state), ncclSuccess);
    return state;
  }
  ncclResult_t AllReduce(int rank, const void* in, void* out, size_t count,
                         ncclDataType_t type = ncclFloat32, ncclRedOp_t op = ncclSum) {
    return Completed(rank, StartAllReduce(rank, in, out, count, type, op));
  }
  ncclResult_t StartAllReduce(int rank, const void* in, void* out, size_t count,
                              ncclDataType_t type = ncclFloat32, ncclRedOp_t op = ncclSum) {
    Use(rank);
    return FARANDOLE_FAKE_NCCL_CALL(ncclAllReduce, in, out, count, type, op, comm(rank),
                                    handle(rank));
  }
  /// Of floats: a send of what `memory` holds, or a receive into it.
  ncclResult_t StartSend(int rank, const void* memory, size_t count, int peer) {
    Use(rank);
    return FARANDOLE_FAKE_NCCL_CALL(ncclSend, memory, count, ncclFloat32, peer, comm(rank),
                                    handle(rank));
  }
  ncclResult_t StartReceive(int rank, void* memory, size_t count, int peer) {
    Use(rank);
    return FARANDOLE_FAKE_NCCL_CALL(ncclRecv, memory, count, ncclFloat32, peer, comm(rank),
                                    handle(rank));
  }
  /// What a call that does not block comes to.
  ncclResult_t Completed(int rank, ncclResult_t result) {
    return result == ncclInProgress ? Complete(rank) : result;
  }
  /// Until the last call is complete. @return The state then.
  ncclResult_t Complete(int rank) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) state = Look(rank);
    return state;
  }
  void Abort(int rank) {
    EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclCommAbort, comm(rank)), ncclSuccess);
    comms_[static_cast<size_t>(rank)] = nullptr;
  }
  void Destroy(int rank) {
    EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclCommDestroy, comm(rank)), ncclSuccess);
    comms_[static_cast<size_t>(rank)] = nullptr;
  }
  void Synchronize() {
    for (int rank = 0; rank < size(); ++rank) {
      if (comm(rank) != nullptr) (void)Complete(rank);
    }
    for (FakeStream* stream : streams_) stream->Synchronize();
  }

 private:
  void UseEverythingOnce() {
    const auto n = static_cast<size_t>(size());
    std::vector<float> in(n * n), out(n * n);
    const auto on_all = [&](auto start) {
      for (int rank = 0; rank < size(); ++rank) {
        Use(rank);
        const size_t first = static_cast<size_t>(rank) * n;
        EXPECT_EQ(start(rank, &in[first], &out[first]), ncclInProgress);
      }
      Synchronize();
    };
    on_all([&](int rank, float* i, float* o) { return StartAllReduce(rank, i, o, 1); });
    on_all([&](int rank, float* i, float* o) {
      return FARANDOLE_FAKE_NCCL_CALL(ncclBroadcast, i, o, 1, ncclFloat32, 0, comm(rank),
                                      handle(rank));
    });
    on_all([&](int rank, float* i, float* o) {
      return FARANDOLE_FAKE_NCCL_CALL(ncclAllGather, i, o, 1, ncclFloat32, comm(rank),
                                      handle(rank));
    });
    on_all([&](int rank, float* i, float* o) {
      return FARANDOLE_FAKE_NCCL_CALL(ncclReduceScatter, i, o, 1, ncclFloat32, ncclSum, comm(rank),
                                      handle(rank));
    });
    on_all([&](int rank, float* i, float* o) {
      FARANDOLE_FAKE_NCCL_CALL(ncclGroupStart);
      for (int peer = 0; peer < size(); ++peer) {
        StartSend(rank, i, 1, peer);
        StartReceive(rank, o + peer, 1, peer);
      }
      return FARANDOLE_FAKE_NCCL_CALL(ncclGroupEnd);
    });
  }

  FakeDeviceRuntime& runtime_;
  std::vector<FakeStream*> streams_;
  std::vector<ncclComm_t> comms_;
};

}  // namespace farandole
