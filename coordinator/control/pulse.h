// A process's sign of life, in memory that the ranks of a host share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace farandole {

/// Zero at first. Written by the thread that watches, which holds no lock of the engine's and calls
/// no library that may block: so a stuck engine still has a pulse, and a stopped process has none.
struct Pulse {
  static constexpr size_t kFailureBytes = 3052;  // more than EncodeFailure writes

  alignas(64) std::atomic<uint32_t> beats;  // grows while the thread runs; 0: it does not yet, or
                                            // not any more
  std::atomic<int32_t> thread;              // its number
  std::atomic<uint32_t> left;               // 1: it has ended well, and the process may go
  std::atomic<uint32_t> failed;             // bytes of `failure`, once it is there
  std::byte failure[kFailureBytes];         // of an engine that is stuck, as EncodeFailure has it
};

}  // namespace farandole
