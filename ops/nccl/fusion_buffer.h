// Device memory in which the tensors of a batch lie end to end, registered with NCCL where it can.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/counters.h"
#include "core/log.h"
#include "core/status.h"
#include "ops/cuda/lane.h"
#include "ops/nccl/communicator.h"

namespace farandole {

struct NcclFusionBufferOptions {
  const NcclApi* api = nullptr;
  CudaLane* lane = nullptr;
  NcclCommunicator* communicator = nullptr;
  Counters* counters = nullptr;  ///< May be nullptr.
  Log* log = nullptr;            ///< May be nullptr.
};

/// Thread safety: none. Invariant: memory is freed at the end only.
/// Lifetime: the lane outlives it; the communicator lives until Detach.
class NcclFusionBuffer {
 public:
  explicit NcclFusionBuffer(const NcclFusionBufferOptions& options);
  /// Frees everything: its users must be over, and the communicator gone.
  ~NcclFusionBuffer();
  NcclFusionBuffer(const NcclFusionBuffer&) = delete;
  NcclFusionBuffer& operator=(const NcclFusionBuffer&) = delete;

  /// Makes it at least that large, by new memory if it must be; the old is kept. A registration may
  /// then be in progress at the communicator.
  /// @return ResourceExhausted, with the buffer as it was.
  Status Reserve(int64_t size_bytes);
  /// Lets NCCL forget all of it, before the communicator ends.
  void Detach();
  /// The stream may not get past the batches that use it: nothing is freed, all is counted.
  void Quarantine();
  void* data() const { return now_.memory; }

 private:
  struct Piece {
    void* memory = nullptr;
    int64_t size_bytes = 0;
    bool from_nccl = false;
    void* registration = nullptr;
  };

  Result<Piece> Allocate(int64_t size_bytes);
  void Register(Piece& piece);
  void Deregister(Piece& piece);
  void Free(Piece& piece);
  void Count(Counter counter, int64_t n);
  void SayOnce(const std::string& why);

  const NcclFusionBufferOptions options_;
  Piece now_;
  std::vector<Piece> old_;
  bool said_ = false;
};

}  // namespace farandole
