// One piece of a group of NCCL's calls: what a rank sends to, or has from, one other.
#pragma once

#include <cstdint>

namespace farandole {

struct NcclTransfer {
  enum class Kind : uint8_t { kBroadcast, kSend, kReceive };
  Kind kind = Kind::kBroadcast;
  int peer = 0;              ///< Position of the other, or of the broadcast's root.
  const void* in = nullptr;  ///< Of a send and a broadcast; only the root's is read.
  void* out = nullptr;       ///< Of a receive and a broadcast.
  int64_t size_bytes = 0;
};

}  // namespace farandole
