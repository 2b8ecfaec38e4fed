#include "coordinator/control/tcp_transport.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "coordinator/control/gather_text.h"
#include "coordinator/control/graces.h"
#include "coordinator/control/wire/bytes.h"

namespace farandole {
namespace {

// Levels of the tree of answers below a rank.
int LevelsBelow(int rank, int size) {
  int levels = 0;
  for (RankRange below = AnswerChildren(rank, size); below.first < size; ++levels) {
    below = AnswerChildren(below.first, size);
  }
  return levels;
}

class TcpTransport final : public Transport {
 public:
  TcpTransport(std::shared_ptr<StreamHub> hub, const Clock& clock)
      : hub_(std::move(hub)), clock_(clock) {}

  ~TcpTransport() override { hub_->Shutdown(); }

  int rank() const override { return hub_->rank(); }
  int size() const override { return hub_->size(); }
  const char* name() const override { return "tcp"; }

  Status Send(int to, std::span<const std::byte> data) override {
    return hub_->Send(to, FrameType::kMessage, data);
  }

  Result<std::optional<Incoming>> Poll() override {
    while (messages_.empty()) {
      std::optional<HubEvent> event = hub_->Next(std::exchange(current_.data, {}));
      if (!event) return std::optional<Incoming>();
      Sort(std::move(event));
    }
    current_ = std::move(messages_.front());
    messages_.pop_front();
    return std::optional(Incoming{current_.from, current_.data});
  }

  int64_t PollAfterNs(bool, int64_t) const override { return kByDoorbell; }

  Result<std::vector<std::string>> Allgather(const std::string& mine, int64_t timeout_ns) override {
    const int64_t deadline_ns = clock_.NowNs() + timeout_ns;
    ++round_;
    Texts texts(static_cast<size_t>(size()));
    texts[static_cast<size_t>(rank())] = mine;
    GatherBelow(texts, deadline_ns);
    if (!exhausted_.ok()) return exhausted_;
    std::string answer;
    if (rank() == 0) {
      answer = EncodeGathered(WithoutHidden(std::move(texts)));
    } else {
      Result<std::string> came = AskParent(texts, deadline_ns);
      if (!came.ok()) return came.status();
      answer = std::move(came.value());
    }
    std::vector<std::byte> frame;
    Put(round_, frame);
    const ByteSpan bytes = TextBytes(answer);
    frame.insert(frame.end(), bytes.begin(), bytes.end());
    const RankRange below = AnswerChildren(rank(), size());
    for (int child = below.first; child < below.last; ++child) {
      (void)hub_->Send(child, FrameType::kGathered, frame);  // who is lost gets none
    }
    return DecodeGathered(bytes, size());
  }

  void SetNeighbours(std::span<const int> ranks) override {
    for (const int neighbour : ranks) hub_->Connect(neighbour);
  }

  void Leave() override { hub_->Leave(); }
  bool Drained() const override { return hub_->Drained(); }

 private:
  using Texts = std::vector<std::optional<std::string>>;  // by rank

  // What Poll hands out, and what Allgather waits for, may come while the other one looks.
  void Sort(std::optional<HubEvent> event) {
    if (!event || event->connection != 0) return;
    const bool is_loss = event->kind == HubEvent::Kind::kLost;
    // What this rank lacks is no silence of a peer.
    if (is_loss && event->status.code() == Code::kResourceExhausted) exhausted_ = event->status;
    if (is_loss) return void(lost_.emplace(event->from, event->status));
    (event->type == FrameType::kMessage ? messages_ : gathers_).push_back(std::move(*event));
  }

  // The next frame of this type from `from`, of this round. @return nothing when time is up or the
  // rank is lost.
  std::optional<std::string> Await(int from, FrameType type, int64_t deadline_ns) {
    hub_->Expect(from);
    for (;;) {
      const auto found = std::ranges::find_if(gathers_, [&](const HubEvent& event) {
        uint32_t round = 0;
        if (event.data.size() >= sizeof round) std::memcpy(&round, event.data.data(), sizeof round);
        return event.from == from && event.type == type && round == round_;
      });
      if (found != gathers_.end()) {
        std::string text = TextOf(ByteSpan(found->data).subspan(sizeof round_));
        gathers_.erase(found);
        return text;
      }
      if (lost_.contains(from) || !exhausted_.ok()) return std::nullopt;
      if (!hub_->WaitForEvent(deadline_ns)) return std::nullopt;
      Sort(hub_->Next());
    }
  }

  void GatherBelow(Texts& texts, int64_t deadline_ns) {
    const RankRange below = AnswerChildren(rank(), size());
    deadline_ns += kGracePerLevelNs * std::max(0, LevelsBelow(rank(), size()) - 1);
    for (int child = below.first; child < below.last; ++child) {
      const std::optional<std::string> came = Await(child, FrameType::kGather, deadline_ns);
      if (came) Enter(*came, texts);
    }
  }

  // What a rank below sent: rank, length, text, again and again. Malformed: those are silent.
  void Enter(const std::string& came, Texts& texts) const {
    ByteSpan left = TextBytes(came);
    while (left.size() >= 8) {
      uint32_t from = 0;
      uint32_t length = 0;
      std::memcpy(&from, left.data(), 4);
      std::memcpy(&length, left.data() + 4, 4);
      left = left.subspan(8);
      if (from >= texts.size() || length > left.size()) return;
      texts[from] = TextOf(left.first(length));
      left = left.subspan(length);
    }
  }

  Result<std::string> AskParent(const Texts& texts, int64_t deadline_ns) {
    const int parent = AnswerParent(rank());
    std::vector<std::byte> frame;
    Put(round_, frame);
    for (size_t from = 0; from < texts.size(); ++from) {
      if (!texts[from]) continue;
      Put(static_cast<uint32_t>(from), frame);
      Put(static_cast<uint32_t>(texts[from]->size()), frame);
      const ByteSpan bytes = TextBytes(*texts[from]);
      frame.insert(frame.end(), bytes.begin(), bytes.end());
    }
    FARANDOLE_RETURN_IF_ERROR(hub_->Send(parent, FrameType::kGather, frame));
    deadline_ns += kAnswerGraceNs + kGracePerLevelNs * LevelsBelow(0, size());
    std::optional<std::string> answer = Await(parent, FrameType::kGathered, deadline_ns);
    if (answer) return std::move(*answer);
    if (!exhausted_.ok()) return exhausted_;
    if (lost_.contains(parent)) return lost_.at(parent);
    return Timeout(
        "allgather at start: rank 0 did not answer in time" +
        (parent == 0 ? "" : ", or rank " + std::to_string(parent) + " did not pass the answer on"));
  }

  // A rank above which somebody is silent may well have sent its text. It is not called silent.
  static Texts WithoutHidden(Texts texts) {
    for (size_t rank = texts.size(); rank-- > 1;) {
      const int parent = AnswerParent(static_cast<int>(rank));
      if (!texts[rank] && !texts[static_cast<size_t>(parent)]) texts[rank] = "";
    }
    return texts;
  }

  const std::shared_ptr<StreamHub> hub_;
  const Clock& clock_;
  HubEvent current_;  // what Poll handed out
  std::deque<HubEvent> messages_;
  std::deque<HubEvent> gathers_;
  std::map<int, Status> lost_;  // by rank, for Allgather: the engine asks its Liveness
  Status exhausted_;            // what this rank lacks
  uint32_t round_ = 0;          // of Allgather
};

}  // namespace

std::unique_ptr<Transport> MakeTcpTransport(std::shared_ptr<StreamHub> hub, const Clock& clock) {
  return std::make_unique<TcpTransport>(std::move(hub), clock);
}

}  // namespace farandole
