// The thread that frees callers when the engine is stuck inside a library.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "coordinator/engine/engine_loop.h"

namespace farandole {

/// Looks several times per deadline whether an iteration of the engine loop goes on. It cannot free
/// the holder of the engine lock, but everybody who waits for it; so it does where the engine does
/// not take a peer's final error. It also watches for peers that die, and writes out what stderr
/// did not take, without waiting.
///
/// Thread safety: by the engine's owner; Fail from any thread but the holder of the engine lock.
class Watchdog {
 public:
  Watchdog(const EngineLoop& loop, const EngineOptions& options, const EngineParts& parts,
           const SharedParts& shared);

  void Start();
  void Stop();
  /// Fails the engine from outside of the engine lock: after this it touches no tensor, so they may
  /// be released to their users.
  void Fail(const Status& error);

 private:
  void Loop();
  void EndOperations();
  void FailWith(const Status& error, bool is_shared);
  void HeedPeers(int64_t stuck_ns);
  int64_t LimitNs() const;
  void SleepFor(int64_t period_ns);

  const EngineLoop& loop_;
  const int rank_;
  const int64_t progress_timeout_ns_;
  const int64_t shutdown_timeout_ns_;
  PeerWatch* const peers_;
  StreamHub* const hub_;
  const std::vector<EngineObserver*>& observers_;
  bool has_heard_ = false;  // a peer's final error, in an earlier period
  Lifecycle& lifecycle_;
  OperationRegistry& operations_;
  BorrowedMemory& memory_;
  LivenessTable& liveness_;
  std::atomic<uint32_t> stop_{0};
  std::thread thread_;
};

}  // namespace farandole
