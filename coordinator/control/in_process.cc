#include "coordinator/control/in_process.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

namespace farandole {
namespace {

struct Message {
  int from = 0;  // rank
  std::vector<std::byte> data;
};

// A queue as a ring of messages that keep their buffers. A deque would allocate and free blocks as
// messages pass through it.
class MessageRing {
 public:
  // The place for a new last message.
  Message& PushBack() {
    if (count_ == ring_.size()) Grow();
    return ring_[(head_ + count_++) & (ring_.size() - 1)];
  }
  // Exchanges the first message with `spare`, so that buffers circulate, and removes it.
  void PopFront(Message& spare) {
    std::swap(ring_[head_], spare);
    head_ = (head_ + 1) & (ring_.size() - 1);
    --count_;
  }
  bool empty() const { return count_ == 0; }

 private:
  void Grow() {
    std::vector<Message> larger(2 * ring_.size());
    // The oldest message comes first, since positions in the larger ring have another mask.
    for (size_t i = 0; i < count_; ++i) {
      larger[i] = std::move(ring_[(head_ + i) & (ring_.size() - 1)]);
    }
    ring_.swap(larger);
    head_ = 0;
  }

  std::vector<Message> ring_ = std::vector<Message>(16);  // a power of two
  size_t head_ = 0;                                       // position of the oldest message
  size_t count_ = 0;                                      // messages that wait
};

// What is on its way to one rank. `doorbell` is rung under the lock, so that an endpoint that goes
// away takes its doorbell along safely.
struct alignas(64) Mailbox {
  std::mutex lock;                  // of all below; `news` is written under it only
  MessageRing waiting;              // oldest first
  Doorbell* doorbell = nullptr;     // of the endpoint; nullptr: nobody is notified
  Liveness* liveness = nullptr;     // of the endpoint; may be nullptr
  bool closed = false;              // the endpoint is gone
  std::vector<LinkCount> received;  // by sender
  std::atomic<bool> news{false};    // `waiting` is not empty; read without the lock
};

// Called with the box's lock held.
void Dispatch(Mailbox& box) {
  box.news.store(true, std::memory_order_release);
  if (box.doorbell != nullptr) box.doorbell->Ring();
}

}  // namespace

class InProcessHub::Impl {
 public:
  explicit Impl(int size) : boxes_(static_cast<size_t>(size)), lost_(static_cast<size_t>(size)) {
    for (Mailbox& box : boxes_) box.received.resize(static_cast<size_t>(size));
  }

  int size() const { return static_cast<int>(boxes_.size()); }
  Mailbox& Box(int rank) { return boxes_[static_cast<size_t>(rank)]; }

  // Copies under the receiver's lock, hence the messages of one sender arrive in the order sent.
  // What is sent to an endpoint that is gone is counted and dropped, as by a link.
  Status Send(int from, int to, std::span<const std::byte> data) {
    if (IsLost(to)) return Unavailable("rank " + std::to_string(to) + " is lost");
    Mailbox& box = Box(to);
    const std::lock_guard<std::mutex> guard(box.lock);
    LinkCount& count = box.received[static_cast<size_t>(from)];
    ++count.messages;
    count.bytes += static_cast<int64_t>(data.size());
    if (box.closed) return Status();
    Message& message = box.waiting.PushBack();
    message.from = from;
    message.data.assign(data.begin(), data.end());
    Dispatch(box);
    return Status();
  }

  void Disconnect(int rank, const Status& why) {
    if (lost_[static_cast<size_t>(rank)].exchange(true)) return;
    for (int to = 0; to < size(); ++to) {
      if (to == rank) continue;
      Mailbox& box = Box(to);
      const std::lock_guard<std::mutex> guard(box.lock);
      if (!box.closed && box.liveness != nullptr) box.liveness->Note(FailedOn(rank, why));
    }
  }

  bool IsLost(int rank) const { return lost_[static_cast<size_t>(rank)].load(); }

  // A barrier with values: all ranks arrive, then all leave with the result. A rank whose time is
  // up may stay counted as arrived, so nobody calls this again after a Timeout; start-up has
  // failed.
  Result<std::vector<std::string>> Allgather(int rank, const std::string& mine,
                                             int64_t timeout_ns) {
    std::unique_lock<std::mutex> guard(gather_lock_);
    // A round may begin only when everybody has taken the last one's result.
    const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    const bool open = gathered_.wait_until(guard, until, [&] { return leaving_ == 0; });
    if (open) {
      if (values_.empty()) values_.resize(boxes_.size());
      values_[static_cast<size_t>(rank)] = mine;
      arrived_.push_back(rank);
      if (static_cast<int>(arrived_.size()) == size()) leaving_ = size();
      gathered_.notify_all();
    }
    const bool complete = open && gathered_.wait_until(guard, until, [&] { return leaving_ > 0; });
    if (!complete) return Timeout("allgather at start: " + Silent() + " did not arrive in time");
    std::vector<std::string> result = values_;
    if (--leaving_ == 0) {
      values_.clear();
      arrived_.clear();
      gathered_.notify_all();
    }
    return result;
  }

 private:
  // Under gather_lock_.
  std::string Silent() const {
    std::vector<bool> here(boxes_.size());
    for (int rank : arrived_) here[static_cast<size_t>(rank)] = true;
    std::string text;
    for (int rank = 0; rank < size(); ++rank) {
      if (here[static_cast<size_t>(rank)]) continue;
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
    return text;
  }

  std::vector<Mailbox> boxes_;           // by receiving rank
  std::vector<std::atomic<bool>> lost_;  // by rank
  std::mutex gather_lock_;               // of those below
  std::condition_variable gathered_;     // the round is complete, or a new one may begin
  std::vector<std::string> values_;      // by rank
  std::vector<int> arrived_;             // ranks in this round
  int leaving_ = 0;                      // ranks that have not yet taken the complete result
};

class InProcessHub::Endpoint final : public Transport {
 public:
  Endpoint(Impl& hub, int rank, Doorbell* doorbell, Liveness* liveness)
      : hub_(hub), box_(hub.Box(rank)), rank_(rank) {
    const std::lock_guard<std::mutex> guard(box_.lock);
    box_.doorbell = doorbell;
    box_.liveness = liveness;
  }
  ~Endpoint() override {
    // Under the lock, so no sender is ringing the doorbell when its owner destroys it.
    const std::lock_guard<std::mutex> guard(box_.lock);
    box_.doorbell = nullptr;
    box_.closed = true;
  }

  int rank() const override { return rank_; }
  int size() const override { return hub_.size(); }
  const char* name() const override { return "in_process"; }

  Status Send(int to, std::span<const std::byte> data) override {
    return hub_.Send(rank_, to, data);
  }

  Result<std::optional<Incoming>> Poll() override {
    // Nothing has come, in most polls: that costs one load. Senders set `news`, and this function
    // clears it, under the lock, so no message is missed.
    if (!box_.news.load(std::memory_order_acquire)) return std::optional<Incoming>();
    {
      const std::lock_guard<std::mutex> guard(box_.lock);
      if (box_.waiting.empty()) return std::optional<Incoming>();
      box_.waiting.PopFront(current_);
      if (box_.waiting.empty()) box_.news.store(false, std::memory_order_relaxed);
    }
    return std::optional<Incoming>(Incoming{current_.from, current_.data});
  }

  int64_t PollAfterNs(bool, int64_t) const override { return kByDoorbell; }

  Result<std::vector<std::string>> Allgather(const std::string& mine, int64_t timeout_ns) override {
    return hub_.Allgather(rank_, mine, timeout_ns);
  }

  // A message is with its receiver as soon as it is sent.
  bool Drained() const override { return true; }

 private:
  Impl& hub_;
  Mailbox& box_;
  const int rank_;
  Message current_;  // the message handed out last
};

InProcessHub::InProcessHub(int size) : impl_(std::make_unique<Impl>(size)) {}
InProcessHub::~InProcessHub() = default;

int InProcessHub::size() const { return impl_->size(); }

std::unique_ptr<Transport> InProcessHub::Create(int rank, Doorbell* doorbell, Liveness* liveness) {
  return std::make_unique<Endpoint>(*impl_, rank, doorbell, liveness);
}

void InProcessHub::Disconnect(int rank, const Status& why) { impl_->Disconnect(rank, why); }

LinkCount InProcessHub::Sent(int from, int to) const {
  Mailbox& box = impl_->Box(to);
  const std::lock_guard<std::mutex> guard(box.lock);
  return box.received[static_cast<size_t>(from)];
}

}  // namespace farandole
