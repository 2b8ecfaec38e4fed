#include "test/simulation/scaled_job.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>

#include "coordinator/control/rendezvous.h"
#include "coordinator/control/wire/wire.h"

namespace farandole::simulation {
namespace {

constexpr int kWarmUpRounds = 3;  // by record, by record with a new id, by id

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "scaled job: %s\n", status.ToString().c_str());
  std::abort();
}

double NowNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<double>(std::chrono::nanoseconds(now).count());
}

}  // namespace

double StepCosts::Of(const Kind& kind) const {
  for (auto it = least_.lower_bound(kind); it != least_.end(); ++it) {
    const Kind& found = it->first;
    if (found.is_root == kind.is_root && found.upward == kind.upward &&
        found.answers == kind.answers) {
      return it->second;
    }
  }
  return least_.empty() ? 0 : least_.rbegin()->second;
}

/// One rank's negotiation, and what it sent in the last step.
class ScaledJob::Node final : public NegotiationListener {
 public:
  struct Outgoing {
    int to = 0;
    std::shared_ptr<std::vector<std::byte>> bytes;
  };

  Node(const NegotiationOptions& options, int tensors)
      : rank_(options.rank), tensors_(tensors), negotiation_(options, *this) {
    signature_.tensors = {{"", DType::kFloat32, {64}}};
    UseSet(kGlobalSet);
  }

  void UseSet(uint32_t set) {
    keys_.clear();
    for (int i = 0; i < tensors_; ++i) {
      keys_.push_back(
          negotiation_.Intern({set, OpKind::kAllreduce, "tensor " + std::to_string(i)}));
    }
  }
  void SubmitSets(const std::vector<std::vector<int>>& sets) {
    for (const std::vector<int>& ranks : sets) {
      Signature add;
      add.kind = OpKind::kAddSet;
      add.ranks = ranks;
      const std::string name = std::to_string(ranks.front());
      Require(negotiation_.Submit(negotiation_.Intern({kGlobalSet, OpKind::kAddSet, name}), add,
                                  vote_));
    }
  }
  void Submit() {
    for (const KeyId key : keys_) Require(negotiation_.Submit(key, signature_, vote_));
  }
  void Flush() { negotiation_.Flush(); }
  void Receive(int from, std::span<const std::byte> bytes) {
    FrameReader reader(bytes);
    for (;;) {
      const Result<FrameReader::Kind> kind = reader.Next(up_, down_);
      Require(kind.status());
      if (kind.value() == FrameReader::Kind::kEnd) return;
      Require(kind.value() == FrameReader::Kind::kUp ? negotiation_.ReceiveUp(from, up_)
                                                     : negotiation_.ReceiveDown(from, down_));
    }
  }
  /// As the executor of the rank that reports, which is the lowest one.
  void FinishWork() {
    for (const int64_t number : std::exchange(works_, {})) negotiation_.BatchDone(number, 0);
  }

  std::vector<Outgoing> sent;
  int64_t tensors_decided = 0;
  int64_t decisions = 0;

  // NegotiationListener
  void SendUp(int parent, const UpMessage& message) override { Put(parent, message); }
  void SendDown(int child, const DownMessage& message) override { Put(child, message); }
  void OnWork(const WorkDecision& work) override {
    tensors_decided += static_cast<int64_t>(work.keys.size());
    ++decisions;
    if (rank_ == reporter_) works_.push_back(work.number);
  }
  void OnEnded(KeyId, const Status& status) override { Require(status); }
  void OnSetAdded(const ProcessSetInfo& set) override {
    if (!std::binary_search(set.ranks.begin(), set.ranks.end(), rank_)) return;
    reporter_ = set.ranks.front();
    UseSet(set.uid);
  }
  void OnSetEnded(uint32_t, const Status&) override {}
  void OnJoinDone(int) override {}
  void OnLeft(int) override {}
  void OnShutdown() override {}
  void OnReport(const std::string& text) override { Require(Internal(text)); }
  void OnStallShutdown(const Status& error) override { Require(error); }

 private:
  // As FrameCoalescer: several frames for a peer are one message.
  template <class Message>
  void Put(int to, const Message& message) {
    auto found = std::ranges::find(sent, to, &Outgoing::to);
    if (found == sent.end()) {
      found = sent.insert(found, {to, std::make_shared<std::vector<std::byte>>()});
    }
    Require(Encode(message, *found->bytes));
  }

  const int rank_;
  const int tensors_;
  int reporter_ = 0;
  Negotiation negotiation_;
  Signature signature_;
  const Vote vote_;
  std::vector<KeyId> keys_;
  std::vector<int64_t> works_;  // numbers of decisions that are to be reported
  UpMessage up_;
  DownMessage down_;
};

ScaledJob::ScaledJob(const ScaledJobOptions& options) : options_(options), random_(options.seed) {
  std::vector<int> host(static_cast<size_t>(options.ranks));
  for (size_t r = 0; r < host.size(); ++r) host[r] = static_cast<int>(r) / options.ranks_per_host;
  parent_ = MakeTree(host);
  children_.resize(host.size());
  for (size_t r = 1; r < host.size(); ++r) {
    children_[static_cast<size_t>(parent_[r])].push_back(static_cast<int>(r));
  }
  free_ns_.resize(host.size());
  on_link_.resize(host.size());
  NegotiationOptions with;
  with.size = options.ranks;
  with.parent = parent_;
  with.planes = {0};
  for (int r = 0; r < options.ranks; ++r) {
    if (IsShared(r)) continue;
    if (IsLeaf(r) && options.ranks_per_set == 0) leaf_ = r;
    with.rank = r;
    nodes_[r] = std::make_unique<Node>(with, options.tensors);
  }
}

ScaledJob::~ScaledJob() = default;

void ScaledJob::WarmUp() {
  std::vector<std::vector<int>> sets;
  for (int rank = 0; options_.ranks_per_set > 0 && rank < options_.ranks; ++rank) {
    if (rank % options_.ranks_per_set == 0) sets.emplace_back();
    sets.back().push_back(rank);
  }
  if (!sets.empty()) {
    for (auto& [rank, node] : nodes_) node->SubmitSets(sets);
    Exchange();
  }
  for (int round = 0; round < kWarmUpRounds; ++round) Run(nullptr);
}

StepCosts ScaledJob::Calibrate(int rounds) {
  StepCosts costs;
  measured_ = &costs;
  for (int round = 0; round < rounds; ++round) Run(nullptr);
  measured_ = nullptr;
  return costs;
}

const Link& ScaledJob::LinkOf(int a, int b) const {
  const int per_host = options_.ranks_per_host;
  return a / per_host == b / per_host ? options_.in_host : options_.between_hosts;
}

double ScaledJob::Noise() {
  if (!noisy_) return 0;
  const auto fraction = [&] { return static_cast<double>(random_.Next() >> 11) * 0x1p-53; };
  return fraction() < options_.noise_share ? options_.noise_ns * fraction() : 0;
}

ScaledRound ScaledJob::Run(const StepCosts* costs, bool noisy) {
  costs_ = costs;
  noisy_ = noisy;
  round_ = ScaledRound();
  std::fill(free_ns_.begin(), free_ns_.end(), 0.0);
  std::fill(on_link_.begin(), on_link_.end(), 0);
  for (auto& [rank, node] : nodes_) node->tensors_decided = node->decisions = 0;
  for (auto& [rank, node] : nodes_) node->Submit();
  Exchange();
  for (auto& [rank, node] : nodes_) {
    if (node->tensors_decided == options_.tensors) continue;
    Require(Internal("rank " + std::to_string(rank) + " was handed " +
                     std::to_string(node->tensors_decided) + " tensors"));
  }
  round_.ns = *std::max_element(free_ns_.begin(), free_ns_.end());
  round_.most_on_a_link = *std::max_element(on_link_.begin(), on_link_.end());
  round_.decisions = static_cast<int>(nodes_.at(0)->decisions);
  return round_;
}

// Submitting is the caller's time, before the round; a rank flushes at 0, when it has submitted
// all.
void ScaledJob::Exchange() {
  double leaf_ns = 0;
  if (leaf_ >= 0) leaf_ns = Step(leaf_, true, [](Node& node) { node.Flush(); });
  const auto of_leaf = leaf_ >= 0 ? NodeOf(leaf_).sent : std::vector<Node::Outgoing>();
  for (int rank = options_.ranks - 1; rank >= 0; --rank) {
    double ns = leaf_ns;
    if (IsShared(rank) || rank == leaf_) {
      NodeOf(rank).sent = of_leaf;
      for (Node::Outgoing& out : NodeOf(rank).sent) out.to = parent_[static_cast<size_t>(rank)];
    } else {
      ns = Step(rank, true, [](Node& node) { node.Flush(); });
    }
    Send(rank, Noise() + ns);
  }
  while (!arrivals_.empty()) {
    const Arrival next = arrivals_.top();
    arrivals_.pop();
    Deliver(next);
  }
}

// A leaf whose work is done by another one takes as long as that.
void ScaledJob::Deliver(const Arrival& arrival) {
  const int rank = arrival.to;
  const bool upward = arrival.from != parent_[static_cast<size_t>(rank)];
  const double begin_ns = std::max(arrival.ns, free_ns_[static_cast<size_t>(rank)]) + Noise() +
                          LinkOf(arrival.from, rank).overhead;
  double ns = 0;
  if (IsShared(rank)) {
    ns = costs_ == nullptr ? 0 : costs_->Of({false, 0, upward, true});
  } else {
    ns = Step(rank, upward, [&](Node& node) {
      node.Receive(arrival.from, *arrival.bytes);
      node.Flush();
    });
  }
  Send(rank, begin_ns + ns);
}

/// @return what it costs.
double ScaledJob::Step(int rank, bool upward, const std::function<void(Node&)>& what) {
  Node& node = NodeOf(rank);
  node.sent.clear();
  const int64_t decided = node.decisions;
  const double begin_ns = NowNs();
  what(node);
  const double took_ns = NowNs() - begin_ns;
  const bool answers = !node.sent.empty() || node.decisions > decided;
  const StepCosts::Kind kind{
      rank == 0, static_cast<int>(children_[static_cast<size_t>(rank)].size()), upward, answers};
  if (measured_ != nullptr) measured_->Measure(kind, took_ns);
  node.FinishWork();
  if (options_.ranks_per_set > 0) return took_ns;
  return costs_ == nullptr ? 0 : costs_->Of(kind);
}

/// What the rank's last step has sent: one message after the other, each as long as the processor
/// and the link are busy with it.
void ScaledJob::Send(int from, double begin_ns) {
  double at_ns = begin_ns;
  for (const auto& [to, content] : std::exchange(NodeOf(from).sent, {})) {
    const Link& link = LinkOf(from, to);
    const auto bytes = static_cast<double>(content->size());
    at_ns += link.overhead + bytes * link.per_byte;
    arrivals_.push({at_ns + link.latency, order_++, from, to, content});
    ++round_.messages;
    round_.bytes += static_cast<int64_t>(content->size());
    ++on_link_[static_cast<size_t>(parent_[static_cast<size_t>(from)] == to ? from : to)];
  }
  free_ns_[static_cast<size_t>(from)] = at_ns;
}

}  // namespace farandole::simulation
