#include "coordinator/control/mpi_transport.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "coordinator/control/gather_text.h"
#include "coordinator/control/graces.h"
#include "ops/p2p/mpi/link.h"

namespace farandole {
namespace {

// Start-up has tags of its own: ranks that have finished it may already send votes to one that
// still waits for rank 0's answer.
enum StartTag : int { kGatherTag = kMpiOthersTag + 1, kGatheredTag };

// How often MPI is asked, by how long nothing has happened (docs/decisions.md): hot, then gently,
// then rarely.
constexpr int64_t kHotNs = kNsPerMs;
constexpr int64_t kBusyPollNs = 100 * kNsPerUs;
constexpr int64_t kIdleAfterNs = 100 * kNsPerMs;
constexpr int64_t kIdlePollNs = 10 * kNsPerMs;
// That one Poll takes at most: 256 KB, as much as a step of a data plane moves.
constexpr int kSlicesPerPoll = 64;

// A buffer that only grows, so that alternating sizes neither allocate nor clear memory.
class GrowingBuffer {
 public:
  std::byte* Reserve(size_t bytes) {
    if (bytes > data_.size()) data_.resize(bytes);
    return data_.data();
  }
  const std::byte* data() const { return data_.data(); }

 private:
  std::vector<std::byte> data_;
};

int CountOf(size_t bytes) { return static_cast<int>(bytes); }

using Header = uint64_t;  // of a message's first slice: the message's length
using Slice = std::array<std::byte, kMpiSliceBytes>;
using Bytes = std::span<const std::byte>;

// Where the next slice from `source` goes. MPI writes there at any time.
struct Receive {
  int source = 0;  // a neighbour, or MPI_ANY_SOURCE
  int tag = 0;
  std::unique_ptr<Slice> slice = std::make_unique<Slice>();
};

// A message of several slices; later the one handed out last. Keeps its capacity.
struct Assembly {
  uint64_t missing = 0;  // bytes that are still to come; 0: no message is being put together
  std::vector<std::byte> bytes = {};
};

class MpiTransport final : public Transport {
 public:
  MpiTransport(MPI_Comm communicator, const Clock& clock) : comm_(communicator), clock_(clock) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    is_neighbour_.resize(static_cast<size_t>(size_));
    AddReceive(MPI_ANY_SOURCE, kMpiOthersTag);
  }

  // Blocking until sends are complete is no choice: a peer that is gone never receives. A posted
  // receive is complete once it is cancelled, unless a message is just being written to it. After
  // MPI_Finalize MPI has no use for the buffers.
  ~MpiTransport() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;
    bool in_use = !requests_.empty() || receive_ != MPI_REQUEST_NULL;
    for (MPI_Request& posted : posted_) in_use = !Cancel(posted) || in_use;
    if (!in_use) return;
    // MPI may still touch these buffers: give them up instead of freeing them.
    (void)new std::tuple(std::move(buffers_), std::move(incoming_), std::move(receives_));
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "mpi"; }

  // What is longer than a slice goes as several, which MPI does not let overtake each other.
  Status Send(int to, Bytes data) override {
    if (data.size() > size_t{INT32_MAX}) {
      return InvalidArgument("control message of " + std::to_string(data.size()) + " bytes");
    }
    const int tag = is_neighbour_[static_cast<size_t>(to)] ? kMpiNeighbourTag : kMpiOthersTag;
    const Header length = data.size();
    const Bytes head = std::as_bytes(std::span(&length, 1));
    size_t sent = std::min(data.size(), kMpiSliceBytes - head.size());
    FARANDOLE_RETURN_IF_ERROR(SendTagged(to, head, data.first(sent), tag));
    while (sent < data.size()) {
      const Bytes slice = data.subspan(sent, std::min(data.size() - sent, kMpiSliceBytes));
      FARANDOLE_RETURN_IF_ERROR(SendTagged(to, {}, slice, tag));
      sent += slice.size();
    }
    return Status();
  }

  // Goes through what has arrived until a message is complete. Of each sender one slice at most is
  // among it, since its next receive is posted when the slice has been taken.
  Result<std::optional<Incoming>> Poll() override {
    FARANDOLE_RETURN_IF_ERROR(RetireSends());
    FARANDOLE_RETURN_IF_ERROR(PostReceives());
    for (int slices = 0; slices < kSlicesPerPoll; ++slices) {
      if (arrived_.empty()) FARANDOLE_RETURN_IF_ERROR(FindArrived());
      if (arrived_.empty()) return std::optional<Incoming>();
      const Arrival slice = arrived_.back();
      arrived_.pop_back();
      to_post_.push_back(slice.receive);
      const Bytes data(receives_[slice.receive].slice->data(), slice.bytes);
      Result<std::optional<Bytes>> message = Take(slice.from, data);
      if (!message.ok()) return message.status();
      if (message.value()) return std::optional(Incoming{slice.from, *message.value()});
      FARANDOLE_RETURN_IF_ERROR(PostReceives());
    }
    return std::optional<Incoming>();
  }

  // While MPI still has a message of ours, either way, the engine polls as if it were busy: MPI
  // need not make progress outside of its calls.
  int64_t PollAfterNs(bool busy, int64_t idle_ns) const override {
    if (idle_ns < kHotNs) return 0;
    if (busy || idle_ns < kIdleAfterNs || !Drained() || incomplete_ > 0) return kBusyPollNs;
    return kIdlePollNs;
  }

  // By point to point through rank 0, as MPI's own allgather has no deadline and does not say who
  // is missing.
  Result<std::vector<std::string>> Allgather(const std::string& mine, int64_t timeout_ns) override {
    const int64_t deadline_ns = clock_.NowNs() + timeout_ns;
    return rank_ == 0 ? GatherAtRoot(mine, deadline_ns)
                      : GatherAtLeaf(mine, deadline_ns + kGatherGraceNs);
  }

  void SetNeighbours(std::span<const int> ranks) override {
    for (const int neighbour : ranks) {
      is_neighbour_[static_cast<size_t>(neighbour)] = true;
      AddReceive(neighbour, kMpiNeighbourTag);
    }
  }

  bool Drained() const override { return requests_.empty(); }

 private:
  // A slice in its receive's buffer.
  struct Arrival {
    size_t receive = 0;  // in receives_
    int from = 0;        // rank
    size_t bytes = 0;
  };

  // With nothing posted yet: that is Poll's, which can fail.
  void AddReceive(int source, int tag) {
    to_post_.push_back(receives_.size());
    receives_.push_back({source, tag});
    posted_.push_back(MPI_REQUEST_NULL);
    found_.resize(posted_.size());
    found_statuses_.resize(posted_.size());
    to_post_.reserve(posted_.size());
    arrived_.reserve(posted_.size());
  }

  Status PostReceives() {
    for (; !to_post_.empty(); to_post_.pop_back()) {
      const size_t i = to_post_.back();
      const int code = MPI_Irecv(receives_[i].slice->data(), CountOf(kMpiSliceBytes), MPI_BYTE,
                                 receives_[i].source, receives_[i].tag, comm_, &posted_[i]);
      if (code != MPI_SUCCESS) return FromMpi(code, {"MPI_Irecv", receives_[i].source});
    }
    return Status();
  }

  // Testsome takes what has arrived from all senders at once, so none of them can keep the others
  // waiting.
  Status FindArrived() {
    int count = 0;
    const int code = MPI_Testsome(CountOf(posted_.size()), posted_.data(), &count, found_.data(),
                                  found_statuses_.data());
    const auto found = static_cast<size_t>(std::max(count, 0));  // MPI_UNDEFINED is negative
    if (code != MPI_SUCCESS) {
      return FromMpi(code, {"MPI_Testsome (receive)"}, std::span(found_statuses_.data(), found));
    }
    for (size_t i = 0; i < found; ++i) {
      int bytes = 0;
      MPI_Get_count(&found_statuses_[i], MPI_BYTE, &bytes);
      arrived_.push_back({static_cast<size_t>(found_[i]), found_statuses_[i].MPI_SOURCE,
                          static_cast<size_t>(bytes)});
    }
    return Status();
  }

  // @return the message, if `slice` is its last one. A message of one slice is not copied.
  Result<std::optional<Bytes>> Take(int from, Bytes slice) {
    const auto begun = assemblies_.find(from);
    if (begun != assemblies_.end() && begun->second.missing > 0) {
      return Append(from, begun->second, slice);
    }
    Header length = 0;
    if (slice.size() < sizeof length) return Malformed(from, "no length in front");
    std::memcpy(&length, slice.data(), sizeof length);
    slice = slice.subspan(sizeof length);
    if (length == slice.size()) return std::optional(slice);
    if (length > Header{INT32_MAX}) return Malformed(from, std::to_string(length) + " bytes");
    Assembly& assembly = assemblies_[from];
    assembly.bytes.clear();
    assembly.missing = length;
    ++incomplete_;
    return Append(from, assembly, slice);
  }

  Result<std::optional<Bytes>> Append(int from, Assembly& assembly, Bytes slice) {
    if (slice.empty() || slice.size() > assembly.missing) {
      return Malformed(from, "a slice of " + std::to_string(slice.size()) + " bytes where " +
                                 std::to_string(assembly.missing) + " are missing");
    }
    assembly.bytes.insert(assembly.bytes.end(), slice.begin(), slice.end());
    assembly.missing -= slice.size();
    if (assembly.missing > 0) return std::optional<Bytes>();
    --incomplete_;
    return std::optional(Bytes(assembly.bytes));
  }

  static Status Malformed(int from, const std::string& what) {
    return Internal("control message from rank " + std::to_string(from) + ": " + what);
  }

  // @return Whether MPI is done with the buffer of `request`.
  static bool Cancel(MPI_Request& request) {
    if (request == MPI_REQUEST_NULL) return true;
    int done = 0;
    (void)MPI_Cancel(&request);  // if it fails the request is not done
    return MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0;
  }

  Bytes Received() const { return {incoming_.data(), static_cast<size_t>(received_bytes_)}; }

  // Copies, because the caller refills its buffer at once while MPI reads until the request is
  // complete. Buffer and request are stored before the error is looked at, so that the two lists
  // stay equally long.
  Status SendTagged(int to, Bytes head, Bytes data, int tag) {
    if (free_.empty()) free_.emplace_back();
    GrowingBuffer buffer = std::move(free_.back());
    free_.pop_back();
    const size_t size = head.size() + data.size();
    std::byte* const bytes = buffer.Reserve(size);
    std::ranges::copy(data, std::ranges::copy(head, bytes).out);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Isend(bytes, CountOf(size), MPI_BYTE, to, tag, comm_, &request);
    buffers_.push_back(std::move(buffer));
    requests_.push_back(request);
    return FromMpi(code, {"MPI_Isend", to, static_cast<int64_t>(size)});
  }

  // Reclaims the buffers of finished sends. MPI_Testsome sets the requests that are complete to
  // MPI_REQUEST_NULL; the others move up and keep their order. `count` is MPI_UNDEFINED, which is
  // negative, if no request was active.
  Status RetireSends() {
    if (requests_.empty()) return Status();
    done_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int count = 0;
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                  done_.data(), statuses_.data());
    if (code != MPI_SUCCESS) {
      return FromMpi(code, {"MPI_Testsome (send)"},
                     std::span(statuses_.data(), static_cast<size_t>(std::max(count, 0))));
    }
    size_t kept = 0;
    for (size_t i = 0; count > 0 && i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) {
        free_.push_back(std::move(buffers_[i]));
        continue;
      }
      if (kept != i) {
        requests_[kept] = requests_[i];
        buffers_[kept] = std::move(buffers_[i]);
      }
      ++kept;
    }
    if (count <= 0) return Status();
    requests_.resize(kept);
    buffers_.resize(kept);
    return Status();
  }

  // Begins to receive the next message with `tag`, if there is one; only at start-up. The matched
  // probe says how long the message is and removes it from MPI's queue, so the buffer has room for
  // it and no other receive can take it.
  Result<bool> StartReceive(int tag) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    int code = MPI_Improbe(MPI_ANY_SOURCE, tag, comm_, &found, &message, &status);
    if (code != MPI_SUCCESS) return FromMpi(code, {"MPI_Improbe"});
    if (found == 0) return false;
    MPI_Get_count(&status, MPI_BYTE, &received_bytes_);
    from_ = status.MPI_SOURCE;
    code = MPI_Imrecv(incoming_.Reserve(static_cast<size_t>(received_bytes_)), received_bytes_,
                      MPI_BYTE, &message, &receive_);
    if (code != MPI_SUCCESS) return FromMpi(code, {"MPI_Imrecv", from_, received_bytes_});
    return true;
  }

  Result<bool> FinishReceive() {
    int done = 0;
    const int code = MPI_Test(&receive_, &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) return FromMpi(code, {"MPI_Test (receive)", from_, received_bytes_});
    return done != 0;
  }

  // Waits for one message. @return false when the deadline passed. Only at start-up, hence without
  // sleeping. Sends are moved on because the peer may need one of them first.
  Result<bool> Await(int tag, int64_t deadline_ns) {
    for (bool started = false;;) {
      if (Status s = RetireSends(); !s.ok()) return s;
      if (!started) {
        Result<bool> found = StartReceive(tag);
        if (!found.ok()) return found;
        started = found.value();
      }
      if (started) {
        Result<bool> arrived = FinishReceive();
        if (!arrived.ok() || arrived.value()) return arrived;
      }
      if (clock_.NowNs() > deadline_ns) return false;
      sched_yield();
    }
  }

  // Rank 0 answers when its time is up, too, and then everybody itself, so all ranks that have come
  // report the same silent ones, whoever of them should have passed it on. It does not wait for the
  // answers to leave; later polls move them on.
  Result<std::vector<std::string>> GatherAtRoot(const std::string& mine, int64_t deadline_ns) {
    std::vector<std::optional<std::string>> values(static_cast<size_t>(size_));
    values[0] = mine;
    int missing = size_ - 1;
    for (; missing > 0; --missing) {
      Result<bool> came = Await(kGatherTag, deadline_ns);
      if (!came.ok()) return came.status();
      if (!came.value()) break;
      values[static_cast<size_t>(from_)] = TextOf(Received());
    }
    const std::string answer = EncodeGathered(values);
    const RankRange to = missing == 0 ? AnswerChildren(0, size_) : RankRange{1, size_};
    FARANDOLE_RETURN_IF_ERROR(SendAnswer(to, BytesOf(answer)));
    return DecodeGathered(BytesOf(answer), size_);
  }

  Result<std::vector<std::string>> GatherAtLeaf(const std::string& mine, int64_t deadline_ns) {
    FARANDOLE_RETURN_IF_ERROR(SendTagged(0, {}, BytesOf(mine), kGatherTag));
    Result<bool> came = Await(kGatheredTag, deadline_ns);
    if (!came.ok()) return came.status();
    if (!came.value()) {
      const int parent = AnswerParent(rank_);
      return Timeout("allgather at start: rank 0 did not answer in time" +
                     (parent == 0
                          ? ""
                          : ", or rank " + std::to_string(parent) + " did not pass the answer on"));
    }
    Result<std::vector<std::string>> texts = DecodeGathered(Received(), size_);
    if (!texts.ok()) return texts;
    FARANDOLE_RETURN_IF_ERROR(SendAnswer(AnswerChildren(rank_, size_), Received()));
    return texts;
  }

  Status SendAnswer(RankRange to, Bytes answer) {
    for (int rank = to.first; rank < to.last; ++rank) {
      FARANDOLE_RETURN_IF_ERROR(SendTagged(rank, {}, answer, kGatheredTag));
    }
    return Status();
  }

  // Ours alone and never freed; see MakeMpiTransport.
  const MPI_Comm comm_;
  const Clock& clock_;
  int rank_ = 0;
  int size_ = 1;

  // Sends in flight: buffers_[i] belongs to requests_[i]. free_ holds buffers of past ones.
  std::vector<MPI_Request> requests_;
  std::vector<GrowingBuffer> buffers_;
  std::vector<GrowingBuffer> free_;
  // Of MPI_Testsome, kept so that polling does not allocate.
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;

  // One receive for each neighbour and, the first, for all other ranks. posted_[i] is that of
  // receives_[i]: active, or null while its index is in to_post_ or in arrived_.
  std::vector<Receive> receives_;
  std::vector<MPI_Request> posted_;
  std::vector<size_t> to_post_;
  std::vector<Arrival> arrived_;        // not handed out yet
  std::vector<bool> is_neighbour_;      // by rank
  std::map<int, Assembly> assemblies_;  // by sender
  int incomplete_ = 0;                  // of the assemblies
  // Of MPI_Testsome.
  std::vector<int> found_;
  std::vector<MPI_Status> found_statuses_;

  // At start only: the receive in flight, if receive_ is not null; afterwards its message.
  MPI_Request receive_ = MPI_REQUEST_NULL;
  GrowingBuffer incoming_;
  int from_ = 0;            // rank
  int received_bytes_ = 0;  // length; incoming_ may be larger
};

}  // namespace

std::unique_ptr<Transport> MakeMpiTransport(MPI_Comm communicator, const Clock& clock) {
  return std::make_unique<MpiTransport>(communicator, clock);
}

}  // namespace farandole
