// Memory that the processes of one host share: a file without a name, which begins with the ranks'
// doorbells and mailboxes, and of which every process set has a segment, and every process one for
// its buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/doorbell.h"
#include "core/status.h"
#include "ops/shm/memory.h"

namespace farandole {

/// The file lies in memory (memfd) and is found through /proc by those who may debug its creator,
/// that is by the same user. So it vanishes with its last user, however that one ends.
///
/// Then comes a region of 64 GiB for the buffers of each rank. A process maps the regions
/// of all ranks when it allocates its first buffer, so that peers' buffers need no further call.
///
/// Behind them, the segment of a set begins at a multiple of its uid. Uids are never reused, so
/// neither are segments, and members add and remove a set without waiting for one another; a
/// segment takes up memory from the first member's Join until all have released it. Pages are
/// allocated in advance, each member's slots by itself: so they lie on its NUMA node, and a lack of
/// memory is an error, not a SIGBUS.
///
/// Thread safety: Join by any thread. Invariant: all processes have the same Options, ranks and
/// mailbox bytes; the size of the cache is told by the creator.
class HostMemory final : public SharedMemory {
 public:
  /// One process's end of the file.
  struct User {
    int rank = 0;              ///< Its global rank.
    std::vector<int> ranks;    ///< All global ranks that share the file, ascending.
    size_t mailbox_bytes = 0;  ///< Of memory for messages between them.
  };

  /// A new file. @return Unavailable with the system's reason.
  static Result<std::shared_ptr<HostMemory>> Create(const User& user, Options options = {});
  /// The file that a process of this host has created and has open; `address` is its address().
  /// @return Unavailable with the system's reason, or if the file found is another one.
  static Result<std::shared_ptr<HostMemory>> Open(const std::string& address, const User& user,
                                                  Options options = {});
  ~HostMemory() override;

  std::string address() const;
  const std::vector<int>& ranks() const { return user_.ranks; }
  /// From now on peers ring `bell`, the one of this rank. Once, before its engine starts; the
  /// memory outlives every use of the bell.
  void UseBell(FutexDoorbell& bell);
  /// The same zeros for all processes at first, aligned to 64 bytes.
  std::byte* mailboxes() const { return control_ + BellBytes(); }

  const char* name() const override { return "shm"; }
  Result<std::shared_ptr<std::byte>> Join(uint32_t set, std::span<const int> ranks,
                                          int my_index) override;
  Doorbell* bell(int rank) const override;

 protected:
  Result<int64_t> Take(const Buffers& buffers, size_t bytes) override;
  void Free(int64_t offset, size_t bytes) override;

 private:
  HostMemory(int file, const User& user, Options options);
  size_t BellBytes() const { return user_.ranks.size() * sizeof(FutexDoorbell::State); }
  size_t ControlBytes() const { return BellBytes() + user_.mailbox_bytes; }
  size_t MostSetBytes(size_t ranks) const;
  size_t IndexOf(int rank) const;
  Status MapControl();
  size_t RegionsBytes() const;
  Status Reserve(size_t offset, size_t bytes) const;
  void Discard(size_t offset, size_t bytes) const;
  Status MapBuffers();

  const int file_;
  const User user_;
  const size_t regions_begin_;
  const size_t segments_begin_;  // of the process set 0
  const size_t segment_bytes_;
  std::byte* control_ = nullptr;             // begins with the bells' states, by index in `ranks`
  mutable std::deque<FutexDoorbell> bells_;  // likewise, to ring
};

}  // namespace farandole
