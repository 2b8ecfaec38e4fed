// What the members of a process set do before its first GPU batch: exchange what they have, choose
// one backend alike, and share what NCCL takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "ops/data_plane.h"
#include "ops/gpu/backend.h"

namespace farandole {

/// "2.32.3" of 23203, as ncclGetVersion says it.
std::string NcclVersionText(int version);

/// Text in a value that is sent as it lies in memory; cut where it is too long.
template <size_t kSize>
class FixedText {
 public:
  FixedText() = default;
  FixedText& operator=(std::string_view text) {
    std::fill(text_, text_ + kSize, '\0');
    text.copy(text_, kSize - 1);
    return *this;
  }
  operator std::string() const { return text_; }
  std::string text() const { return text_; }

 private:
  char text_[kSize] = {};
};

/// What one rank reports about its GPU and its NCCL. All ranks run the same build, as was checked
/// at start, so it is exchanged as it lies in memory. Texts are there to be read by people.
struct PeerCapabilities {
  uint32_t mark = kMark;       ///< Distinguishes it from the zeros of a rank that reported nothing.
  int32_t rank = 0;            ///< Global.
  int32_t nccl_version = 0;    ///< ncclGetVersion; 0: there is none here.
  int32_t failure_code = 0;    ///< Of Code; not OK: this rank cannot use its GPU at all.
  int64_t shm_free_bytes = 0;  ///< Of /dev/shm; negative: not known.
  int64_t share_gpu = 0;       ///< The user asked for NCCL also where ranks share a GPU.
  FixedText<128>
      host;  ///< Equal for ranks that share a machine: its name, then what distinguishes it.
  FixedText<32> bus_id;
  FixedText<96> runtime;  ///< "CUDA runtime 13.0, driver 13.0"
  FixedText<512> nccl;    ///< The library's file, or why there is none.
  FixedText<512> failure;

  static constexpr uint32_t kMark = 0x46437264;
  void SetFailure(const Status& status);
  /// The machine's name alone, for messages.
  std::string HostName() const { return host.text().substr(0, host.text().find(' ')); }
};

struct BackendChoice {
  enum class Kind {
    kSolo,        ///< One member: nothing travels.
    kNccl,        ///< NCCL, one GPU per rank.
    kNcclShared,  ///< NCCL although ranks share a GPU, as the user asked.
    kStaged,      ///< Through host memory.
  };
  Kind kind = Kind::kStaged;
  std::string why;     ///< kStaged: why not NCCL, and what would help.
  std::string advice;  ///< What may go wrong with this choice, or empty.
  bool UsesNccl() const { return kind == Kind::kNccl || kind == Kind::kNcclShared; }
};

/// The first NCCL that lets ranks share a GPU.
inline constexpr int kNcclOfSharedGpus = 23000;
/// What NCCL may put into /dev/shm per rank of a host: a generous bound, for a warning only.
inline constexpr int64_t kNcclShmBytesPerRank = int64_t{32} << 20;

/// The same answer on all members, because all see the same capabilities. Pure.
///
/// Ranks on one GPU are staged, unless all of them have an NCCL that can share it and the user
/// asked for that; a set in which a rank has no NCCL is staged.
///
/// @param peers  One per member, ascending ranks; at least one.
/// @return The failure of the first rank that cannot use its GPU, naming it; Mismatch naming
/// ranks, versions and files where NCCL's versions differ, which NCCL does not bear.
Result<BackendChoice> ChooseBackend(std::span<const PeerCapabilities> peers);

/// "rank 0: host a, GPU 0000:17:00.0; rank 1: ...": which rank is where, cut for many ranks.
std::string DescribeRanks(std::span<const PeerCapabilities> peers);

/// Exchanges the members' capabilities, then, for NCCL, the unique id that member 0 makes. One or
/// two host batches; all members end alike.
///
/// Thread safety: the holder of the engine lock. Lifetime: `host` and `nccl` outlive it.
class BackendSelection {
 public:
  /// @param host  nullptr for a set of one member, which exchanges nothing.
  BackendSelection(HostSet* host, const PeerCapabilities& mine, NcclProvider& nccl);
  ~BackendSelection() { Abandon(); }
  BackendSelection(const BackendSelection&) = delete;
  BackendSelection& operator=(const BackendSelection&) = delete;

  /// kMoved, kWaiting, then kDone: the choice stands.
  /// kFailed: what ChooseBackend returns; the failure of member 0 to make an id, naming it; what
  /// the host plane returns. It is the last answer.
  Progress Step();
  void Abandon();

  const BackendChoice& choice() const { return choice_; }
  const std::vector<PeerCapabilities>& peers() const { return peers_; }
  const std::string& unique_id() const { return unique_id_; }  ///< For NCCL.

 private:
  enum class Stage { kBegin, kPeers, kId, kDone };

  Status Advance();
  Status SendMine();
  Status Choose();
  Status SendId();
  Status ReadId();
  Status StartExchange(OpKind kind);

  HostSet* const host_;
  const PeerCapabilities mine_;
  NcclProvider& nccl_;
  Stage stage_ = Stage::kBegin;
  BackendChoice choice_;
  std::vector<PeerCapabilities> peers_;
  std::string unique_id_;
  std::vector<std::byte> bytes_;  // these four: the host batch in flight
  Segment segment_;
  Batch batch_;
  PlaneOperation* operation_ = nullptr;
};

}  // namespace farandole
