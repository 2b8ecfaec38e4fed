// What one rank tells the others about its GPU and its NCCL before the first CUDA batch of a set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/status.h"

namespace farandole {

/// Thread safety: a value. Texts are cut when written: they are there to be read by people.
struct RankCard {
  int32_t rank = 0;  ///< Global.
  std::string host;  ///< Equal for ranks that share a machine: its name, then what tells it apart.
  int32_t device_index = 0;
  std::string bus_id;
  std::string device_name;
  std::string runtime;         ///< "CUDA runtime 13.0, driver 13.0"
  int32_t nccl_version = 0;    ///< ncclGetVersion; 0: there is none here.
  std::string nccl;            ///< The library's file, or why there is none.
  int64_t shm_free_bytes = 0;  ///< Of /dev/shm; negative: not known.
  bool share_gpu = false;      ///< The user asked for NCCL also where ranks share a GPU.
  Status failure;              ///< Not OK: this rank cannot use its GPU at all.

  /// The machine's name alone, for messages.
  std::string HostName() const { return host.substr(0, host.find(' ')); }
};

/// Bytes of a written card, the same for all ranks.
inline constexpr int64_t kCardBytes = 1536;

/// Writes `card` to the kCardBytes at `to`; what it does not need becomes zero.
void WriteCard(const RankCard& card, std::span<std::byte> to);
/// @return Internal if these are not the bytes of a card.
Result<RankCard> ReadCard(std::span<const std::byte> from);

}  // namespace farandole
