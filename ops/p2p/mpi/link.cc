#include "ops/p2p/mpi/link.h"

#include <array>
#include <string>
#include <vector>

#include "ops/data_plane.h"

namespace farandole {
namespace {

/// MPI's own text, such as "MPI_ERR_TRUNCATE: message truncated".
std::string TextOf(int code) {
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
    return "error " + std::to_string(code);
  }
  return std::string(text.data(), static_cast<size_t>(length));
}

/// Polls without progress before polling becomes gentle: about half a millisecond.
constexpr int64_t kHotPolls = 1000;
constexpr int64_t kGentlePollNs = 50'000;

/// The engine has failed the operation by now and does not report this status.
Status TooLate(const char* what) {
  return Aborted(std::string(what) + " returned after the tensors were released");
}

/// Each set has two tags, one per round. LibraryCall releases the users' tensors while MPI runs:
/// should the call hang, they can be freed.
class MpiLink final : public P2pLink {
 public:
  MpiLink(MPI_Comm communicator, BorrowedMemory* memory, uint32_t uid, std::span<const int> ranks)
      : communicator_(communicator),
        memory_(memory),
        tag_(static_cast<int>(2 * (uid % kMaxLiveSets))),
        ranks_(ranks.begin(), ranks.end()),
        statuses_(2 * ranks.size()) {
    for (auto& slot : requests_) {
      for (size_t group = 0; group < kGroups; ++group) {
        const bool is_sends = group == static_cast<size_t>(Group::kSends);
        slot[group].assign(is_sends ? 2 * ranks.size() : ranks.size(), MPI_REQUEST_NULL);
      }
    }
  }

  Status Send(int slot, Round round, int to, const std::byte* data, int64_t bytes) override {
    idle_polls_ = 0;
    const auto member = static_cast<size_t>(to);
    const size_t at = static_cast<size_t>(round) * ranks_.size() + member;
    const LibraryCall call(memory_);
    const int code = MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, ranks_[member],
                               TagOf(round), communicator_, &Requests(slot, Group::kSends)[at]);
    if (!call.ReturnedInTime()) return TooLate("MPI_Isend");
    return FromMpi(code, {"MPI_Isend (data plane)", ranks_[member], bytes});
  }

  Status Receive(int slot, Round round, int from, std::byte* data, int64_t bytes) override {
    idle_polls_ = 0;
    const auto member = static_cast<size_t>(from);
    const auto group = static_cast<Group>(round);
    const LibraryCall call(memory_);
    const int code = MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, ranks_[member],
                               TagOf(round), communicator_, &Requests(slot, group)[member]);
    if (!call.ReturnedInTime()) return TooLate("MPI_Irecv");
    return FromMpi(code, {"MPI_Irecv (data plane)", ranks_[member], bytes});
  }

  /// MPI_Testall completes all or none; requests of members without a message are MPI_REQUEST_NULL.
  Result<bool> AllComplete(int slot, Group group) override {
    static constexpr const char* kNames[] = {"MPI_Testall (contributions)", "MPI_Testall (results)",
                                             "MPI_Testall (sends)"};
    const char* const what = kNames[static_cast<size_t>(group)];
    std::vector<MPI_Request>& requests = Requests(slot, group);
    int done = 0;
    const LibraryCall call(memory_);
    const int code =
        MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, statuses_.data());
    if (!call.ReturnedInTime()) return TooLate(what);
    if (done != 0) idle_polls_ = 0;
    if (code == MPI_SUCCESS) return done != 0;
    return FromMpi(code, {what}, std::span(statuses_).first(requests.size()));
  }

  int64_t BytesFrom(int member) const override {
    int bytes = 0;
    MPI_Get_count(&statuses_[static_cast<size_t>(member)], MPI_BYTE, &bytes);
    return bytes;
  }

  /// MPI has no event that rings a doorbell: first the engine asks at once, later less often.
  int64_t PollAfterNs() override { return ++idle_polls_ < kHotPolls ? 0 : kGentlePollNs; }

 private:
  int TagOf(Round round) const { return tag_ + static_cast<int>(round); }
  std::vector<MPI_Request>& Requests(int slot, Group group) {
    return requests_[static_cast<size_t>(slot)][static_cast<size_t>(group)];
  }

  const MPI_Comm communicator_;
  BorrowedMemory* const memory_;
  const int tag_;
  const std::vector<int> ranks_;
  /// By slot and group: one per member, of sends one for each round and member.
  std::array<std::array<std::vector<MPI_Request>, kGroups>, kLinkSlots> requests_;
  std::vector<MPI_Status> statuses_;
  int64_t idle_polls_ = 0;  // since anything was sent, received or complete
};

}  // namespace

Status FromMpi(int code, const MpiCall& call) {
  if (code == MPI_SUCCESS) return Status();
  std::string text = call.name;
  if (call.peer >= 0) text += " to or from rank " + std::to_string(call.peer);
  if (call.bytes >= 0) text += ", " + std::to_string(call.bytes) + " bytes";
  return Internal(text + ": " + TextOf(code));
}

/// MPI_ERR_IN_STATUS names no error: the first request that failed does (MPI 4.0, section 3.7.5).
Status FromMpi(int code, const MpiCall& call, std::span<const MPI_Status> statuses) {
  if (code != MPI_ERR_IN_STATUS) return FromMpi(code, call);
  for (const MPI_Status& status : statuses) {
    // MPI_ERR_PENDING: neither failed nor complete.
    if (status.MPI_ERROR == MPI_SUCCESS || status.MPI_ERROR == MPI_ERR_PENDING) continue;
    return FromMpi(status.MPI_ERROR, {call.name, status.MPI_SOURCE, call.bytes});
  }
  return FromMpi(code, call);
}

P2pLinkFactory MakeMpiLinks(MPI_Comm communicator, BorrowedMemory* memory) {
  return [communicator, memory](uint32_t uid, std::span<const int> ranks) {
    return std::make_unique<MpiLink>(communicator, memory, uid, ranks);
  };
}

}  // namespace farandole
