#include "coordinator/control/mpi_transport.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "coordinator/control/gather_text.h"
#include "ops/mpi/status.h"

namespace farandole {
namespace {

// Start-up has tags of its own: ranks that have finished it may already send votes to one that
// still waits for rank 0's answer.
enum Tag : int { kMessageTag = 0, kGatherTag = 1, kGatheredTag = 2 };

// How often MPI is asked, by how long nothing has happened (docs/decisions.md): hot, then gently,
// then rarely.
constexpr int64_t kHotNs = kNsPerMs;
constexpr int64_t kBusyPollNs = 100 * kNsPerUs;
constexpr int64_t kIdleAfterNs = 100 * kNsPerMs;
constexpr int64_t kIdlePollNs = 10 * kNsPerMs;
// Rank 0 reports who is missing to the others; they wait this much longer than it does.
constexpr int64_t kGatherGraceNs = 500 * kNsPerMs;

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

class MpiTransport final : public Transport {
 public:
  MpiTransport(MPI_Comm communicator, const Clock& clock) : comm_(communicator), clock_(clock) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }

  // Blocking until sends are complete is no choice: a peer that is gone never receives. After
  // MPI_Finalize MPI has no use for the buffers.
  ~MpiTransport() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    const bool in_use = !requests_.empty() || receive_ != MPI_REQUEST_NULL;
    if (!in_use || finalized != 0) return;
    // MPI may still touch these buffers: give them up instead of freeing them.
    (void)new std::pair(std::move(buffers_), std::move(incoming_));
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "mpi"; }

  Status Send(int to, std::span<const std::byte> data) override {
    return SendTagged(to, data, kMessageTag);
  }

  Result<std::optional<Incoming>> Poll() override {
    if (Status s = RetireSends(); !s.ok()) return s;
    // A large message arrives over several polls. Nothing is probed before it is complete, so
    // messages of one sender are handed out in the order sent.
    if (receive_ == MPI_REQUEST_NULL) {
      Result<bool> found = StartReceive(MPI_ANY_SOURCE, kMessageTag);
      if (!found.ok()) return found.status();
      if (!found.value()) return std::optional<Incoming>();
    }
    Result<bool> arrived = FinishReceive();
    if (!arrived.ok()) return arrived.status();
    if (!arrived.value()) return std::optional<Incoming>();
    return std::optional<Incoming>(Incoming{from_, Received(), Status()});
  }

  // While MPI still has a message of ours, either way, the engine polls as if it were busy: MPI
  // need not make progress outside of its calls.
  int64_t PollAfterNs(bool busy, int64_t idle_ns) const override {
    if (idle_ns < kHotNs) return 0;
    if (busy || idle_ns < kIdleAfterNs || !Drained() || receive_ != MPI_REQUEST_NULL) {
      return kBusyPollNs;
    }
    return kIdlePollNs;
  }

  // By point to point through rank 0, as MPI's own allgather has no deadline and does not say who
  // is missing.
  Result<std::vector<std::string>> Allgather(const std::string& mine, int64_t timeout_ns) override {
    const int64_t deadline_ns = clock_.NowNs() + timeout_ns;
    return rank_ == 0 ? GatherAtRoot(mine, deadline_ns)
                      : GatherAtLeaf(mine, deadline_ns + kGatherGraceNs);
  }

  bool Drained() const override { return requests_.empty(); }

 private:
  std::span<const std::byte> Received() const {
    return {incoming_.data(), static_cast<size_t>(received_bytes_)};
  }

  // Copies, because the caller refills its buffer at once while MPI reads until the request is
  // complete. Buffer and request are stored before the error is looked at, so that the two lists
  // stay equally long.
  Status SendTagged(int to, std::span<const std::byte> data, int tag) {
    if (data.size() > size_t{INT32_MAX}) {
      return InvalidArgument("control message of " + std::to_string(data.size()) + " bytes");
    }
    if (free_.empty()) free_.emplace_back();
    GrowingBuffer buffer = std::move(free_.back());
    free_.pop_back();
    std::byte* const bytes = buffer.Reserve(data.size());
    if (!data.empty()) std::memcpy(bytes, data.data(), data.size());
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Isend(bytes, CountOf(data.size()), MPI_BYTE, to, tag, comm_, &request);
    buffers_.push_back(std::move(buffer));
    requests_.push_back(request);
    return FromMpi(code, {"MPI_Isend", to, static_cast<int64_t>(data.size())});
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

  // Begins to receive the next message with `tag` from `source`, if there is one. The matched probe
  // says how long the message is and removes it from MPI's queue, so the buffer has room for it and
  // no other receive can take it.
  Result<bool> StartReceive(int source, int tag) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    int code = MPI_Improbe(source, tag, comm_, &found, &message, &status);
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
  Result<bool> Await(int source, int tag, int64_t deadline_ns) {
    for (bool started = false;;) {
      if (Status s = RetireSends(); !s.ok()) return s;
      if (!started) {
        Result<bool> found = StartReceive(source, tag);
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
      Result<bool> came = Await(MPI_ANY_SOURCE, kGatherTag, deadline_ns);
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
    FARANDOLE_RETURN_IF_ERROR(SendTagged(0, BytesOf(mine), kGatherTag));
    Result<bool> came = Await(MPI_ANY_SOURCE, kGatheredTag, deadline_ns);
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

  Status SendAnswer(RankRange to, std::span<const std::byte> answer) {
    for (int rank = to.first; rank < to.last; ++rank) {
      FARANDOLE_RETURN_IF_ERROR(SendTagged(rank, answer, kGatheredTag));
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

  // The receive in flight, if receive_ is not null; afterwards the message handed out last.
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
