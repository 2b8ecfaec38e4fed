// A job of many ranks in its steady state on a LogGP clock (Alexandrov et al., SPAA 1995,
// doi:10.1145/215399.215427): how long the negotiation takes there, and how much it sends.
//
// Messages and their contents are production's: every rank with ranks below it runs a Negotiation
// of its own and the wire format. The ranks without, which all do the same, share one, except where
// process sets tell them apart. Only time is a model: links and noise by parameters, computing as
// measured in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <tuple>
#include <vector>

#include "coordinator/protocol/negotiation.h"
#include "test/simulation/random.h"

namespace farandole::simulation {

/// A kind of link, in ns and ns per byte.
struct Link {
  double latency = 0;   ///< L: from the end of the send to the begin of the receive.
  double overhead = 0;  ///< o: of a processor, for each send and each receive.
  double per_byte = 0;  ///< G.
};

struct ScaledJobOptions {
  int ranks = 1;
  int ranks_per_host = 8;
  int tensors = 200;
  /// 0: the tensors are those of all ranks. Otherwise each so many ranks in a row are a process set
  /// with tensors of its own. Divides `ranks`.
  int ranks_per_set = 0;
  Link in_host = {60, 50, 0.05};           ///< A flag and a copy in shared memory.
  Link between_hosts = {1200, 350, 0.08};  ///< 100 Gbit/s.
  double noise_ns = 50'000;                ///< A noisy step is interrupted for up to so long ...
  double noise_share = 0.001;              ///< ... with this probability.
  uint64_t seed = 1;
};

/// One round: all tensors are submitted on all ranks at time 0.
struct ScaledRound {
  double ns = 0;         ///< Until the last rank knows that all of them are ready.
  int64_t messages = 0;  ///< Over all links, both ways.
  int64_t bytes = 0;
  int most_on_a_link = 0;  ///< Messages, both ways.
  int decisions = 0;
};

/// What one step of a rank costs, by what it does; see ScaledJob::Calibrate.
class StepCosts {
 public:
  /// Of a rank with so many children; `answers`: it sends, or is handed work.
  struct Kind {
    bool is_root = false;
    int children = 0;
    bool upward = false;
    bool answers = false;
    auto operator<=>(const Kind&) const = default;
  };
  void Measure(const Kind& kind, double ns) {
    const auto [it, is_new] = least_.emplace(kind, ns);
    if (!is_new && ns < it->second) it->second = ns;
  }
  /// The least that was measured; without one, that of the most similar kind with more children.
  double Of(const Kind& kind) const;

 private:
  std::map<Kind, double> least_;
};

class ScaledJob {
 public:
  explicit ScaledJob(const ScaledJobOptions& options);
  ~ScaledJob();

  /// Registers the tensors on all ranks, until they travel by their ids.
  void WarmUp();
  /// @param costs  Taken from here; nullptr: nothing but the links takes time, or, with process
  ///               sets, each step takes as long as it does here.
  /// @param noisy  With the noise of the options.
  ScaledRound Run(const StepCosts* costs, bool noisy = false);
  /// Runs rounds and measures the steps in them. With few ranks, whose memory stays in the cache.
  StepCosts Calibrate(int rounds);
  /// Links, both ways counted as one.
  int links() const { return options_.ranks - 1; }

 private:
  class Node;
  struct Arrival {
    double ns = 0;
    int64_t order = 0;
    int from = 0;
    int to = 0;
    std::shared_ptr<const std::vector<std::byte>> bytes;
    bool operator>(const Arrival& other) const {
      return std::tie(ns, order) > std::tie(other.ns, other.order);
    }
  };

  const Link& LinkOf(int a, int b) const;
  double Noise();
  bool IsLeaf(int rank) const { return children_[static_cast<size_t>(rank)].empty(); }
  /// Whether another leaf does its work.
  bool IsShared(int rank) const { return leaf_ >= 0 && rank != leaf_ && rank != 0 && IsLeaf(rank); }
  Node& NodeOf(int rank) { return *nodes_.at(IsShared(rank) ? leaf_ : rank); }
  void Exchange();
  void Deliver(const Arrival& arrival);
  double Step(int rank, bool upward, const std::function<void(Node&)>& what);
  void Send(int from, double begin_ns);

  const ScaledJobOptions options_;
  std::vector<int> parent_;
  std::vector<std::vector<int>> children_;
  std::map<int, std::unique_ptr<Node>> nodes_;  // those with children, and one or all without
  int leaf_ = -1;                               // the one
  std::vector<double> free_ns_;                 // by rank: until then it is busy
  std::vector<int> on_link_;                    // by child: messages in this round
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals_;
  int64_t order_ = 0;
  Random random_;
  ScaledRound round_;
  bool noisy_ = false;
  const StepCosts* costs_ = nullptr;
  StepCosts* measured_ = nullptr;
};

}  // namespace farandole::simulation
