// Where the CUDA plane gets NCCL from: the process's library, or what a test puts in its place.
#pragma once

#include <memory>
#include <string>

#include "core/status.h"
#include "ops/cuda/way.h"
#include "ops/nccl/nccl_way.h"

namespace farandole {

struct NcclFound {
  int version = 0;       ///< 23203 is 2.32.3.
  std::string file;      ///< Where it was loaded from.
  bool shrinks = false;  ///< Makes communicators from others: ncclCommShrink.
};

/// Thread safety: the holder of the engine lock. Lifetime: outlives the ways it made.
class NcclSource {
 public:
  virtual ~NcclSource() = default;
  /// Loads it. @return Why there is none, in a sentence.
  virtual Result<NcclFound> Find() = 0;
  /// Lets several ranks of this process's communicators sit on one GPU; before the first of them.
  virtual void AllowSharedGpus() = 0;
  virtual Result<std::string> MakeUniqueId() = 0;
  /// `options.library` is left to the source.
  virtual std::unique_ptr<CudaWay> MakeWay(NcclWayOptions options) = 0;
};

}  // namespace farandole
