// What the members of a process set do before its first CUDA batch: tell one another what they
// have, choose one way, and share what it takes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "ops/cuda/card.h"
#include "ops/cuda/choose_way.h"
#include "ops/cuda/host_set.h"
#include "ops/cuda/nccl_source.h"
#include "ops/data_plane.h"

namespace farandole {

/// Exchanges the members' cards, then, for NCCL, the unique id that member 0 makes, if one is
/// wanted. One or two host batches; all members end alike.
///
/// Thread safety: the holder of the engine lock. Lifetime: `host` and `nccl` outlive it.
class WaySetUp {
 public:
  /// @param host      nullptr for a set of one member, which exchanges nothing.
  /// @param wants_id  Alike on all members: there is no communicator to make theirs from.
  WaySetUp(HostSet* host, const RankCard& mine, NcclSource& nccl, bool wants_id = true);
  ~WaySetUp();
  WaySetUp(const WaySetUp&) = delete;
  WaySetUp& operator=(const WaySetUp&) = delete;

  /// kMoved, kWaiting, then kDone: the choice stands.
  /// kFailed: what ChooseWay returns; the failure of member 0 to make an id, naming it; what the
  /// host plane returns. Once it said kFailed, it is over.
  Progress Step();
  /// Gives up what is under way.
  void Abandon();

  const WayChoice& choice() const { return choice_; }
  const std::vector<RankCard>& cards() const { return cards_; }
  const std::string& unique_id() const { return unique_id_; }  ///< For NCCL, if wanted.

 private:
  enum class Stage { kBegin, kCards, kId, kDone };

  Status Advance();
  Status TellCards();
  Status Judge();
  Status TellId();
  Status ReadId();
  Status StartExchange(OpKind kind);

  HostSet* const host_;
  const RankCard mine_;
  NcclSource& nccl_;
  const bool wants_id_;
  Stage stage_ = Stage::kBegin;
  WayChoice choice_;
  std::vector<RankCard> cards_;
  std::string unique_id_;
  std::vector<std::byte> bytes_;  // these four: the host batch under way
  Segment segment_;
  Batch batch_;
  PlaneOperation* operation_ = nullptr;
};

}  // namespace farandole
