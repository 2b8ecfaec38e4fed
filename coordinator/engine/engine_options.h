// What an engine is made from: its settings, and everything it uses and does not own.
#pragma once

#include <cstdint>
#include <vector>

#include "coordinator/liveness/peer_watch.h"
#include "coordinator/liveness/table.h"
#include "coordinator/protocol/negotiation_observer.h"
#include "coordinator/protocol/options.h"
#include "core/borrowed_memory.h"
#include "core/clock.h"
#include "core/counters.h"
#include "core/doorbell.h"
#include "core/log.h"
#include "core/net/stream_hub.h"
#include "core/transport.h"
#include "ops/data_plane.h"
#include "ops/gpu/rank_device.h"

namespace farandole {

class EngineObserver;

/// By what they want to know of, so that nobody is asked in vain for each operation.
struct EngineObservers {
  std::vector<EngineObserver*> starting, submitted, decided, batch_done, done, finished;
  std::vector<EngineObserver*> all;  ///< For what is rare.
};

struct EngineOptions {
  NegotiationOptions negotiation;
  int64_t progress_timeout_ns = 60 * kNsPerSecond;  ///< Of started work.
  /// The same on a GPU, where started work also waits for what peers' GPUs have to do before it.
  int64_t cuda_progress_timeout_ns = 600 * kNsPerSecond;
  /// Batches launched on a GPU leave the window at once while it has no more bytes than this to do.
  int64_t launched_bytes = int64_t{256} << 20;
  /// A join or a leave that a stuck engine does not take for so long fails it.
  int64_t shutdown_timeout_ns = 30 * kNsPerSecond;
  /// After a final error its report to the others is moved along for so long at most.
  int64_t longest_spread_ns = kNsPerSecond;
  int64_t linger_ns = 100 * kNsPerUs;  ///< Small asynchronous submissions wait this long for more.
  int64_t linger_bytes = int64_t{64} << 10;  ///< More than this pending: no waiting.
  int64_t spin_ns =
      100 * kNsPerUs;        ///< A waiting caller spins so long; 0 with more ranks than cores.
  bool fills_cores = false;  ///< The threads of this host's ranks, which are all, need every core.
  bool threads = true;       ///< false: tests drive RunOnce themselves.
};

/// Outlives the engine.
struct EngineParts {
  Transport* transport = nullptr;
  std::vector<DataPlane*> planes;  ///< By number, as agreed at start.
  FutexDoorbell* doorbell = nullptr;
  const Clock* clock = nullptr;
  Counters* counters = nullptr;
  Log* log = nullptr;
  RankDevice* gpu = nullptr;                    ///< For tensors on a GPU; nullptr: there is none.
  EngineObservers observers = {};               ///< Of operations.
  ObserveNegotiation observe_negotiation = {};  ///< May be empty.
  /// Of users' tensors, shared with the planes; nullptr: the engine's own.
  BorrowedMemory* memory = nullptr;
  LivenessTable* liveness = nullptr;  ///< Who is gone, and why; nullptr: the engine's own.
  PeerWatch* peers = nullptr;         ///< Processes that it watches; may be nullptr.
  StreamHub* hub = nullptr;           ///< A way to other hosts past the engine; may be nullptr.
};

}  // namespace farandole
