// One run: ranks with production negotiations, FIFO links that carry encoded bytes, and executors
// that take random time. Events happen one at a time, in an order drawn from the seed. Ranks may
// crash, which their peers are told some time after what they had sent, or stop for a while.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "coordinator/protocol/negotiation.h"
#include "ops/agreement.h"
#include "test/simulation/oracle.h"
#include "test/simulation/random.h"
#include "test/simulation/scenario.h"

namespace farandole::simulation {

/// What a finished run did, summed over ranks and links.
struct Totals {
  int64_t events = 0;
  int64_t messages = 0;
  int64_t bytes = 0;
  int64_t works = 0;
  int64_t submissions = 0;
  int64_t refused = 0;
  int64_t skipped = 0;
  int64_t aborted = 0;
  int64_t reports = 0;
  int64_t joins = 0;
  int64_t retired = 0;   ///< Ids, on each link.
  int64_t known = 0;     ///< Decisions handed out with remembered batches.
  int64_t agreed = 0;    ///< Works that members agreed on without votes, and
  int64_t declined = 0;  ///< ... those that they voted on after all.
  int64_t crashes = 0;
  int64_t stops = 0;
  int64_t lost = 0;      ///< Ranks that a final error named a crashed one to.
  int64_t diverged = 0;  ///< Ranks that were told so.
};

/// By the name that simulate prints.
inline constexpr std::pair<const char*, int64_t Totals::*> kTotals[] = {
    {"submissions", &Totals::submissions},
    {"works", &Totals::works},
    {"skipped or set changes", &Totals::skipped},
    {"refused", &Totals::refused},
    {"aborted", &Totals::aborted},
    {"joins", &Totals::joins},
    {"stall reports", &Totals::reports},
    {"ids retired", &Totals::retired},
    {"known works", &Totals::known},
    {"agreed works", &Totals::agreed},
    {"declined works", &Totals::declined},
    {"events", &Totals::events},
    {"messages", &Totals::messages},
    {"bytes", &Totals::bytes},
    {"crashes", &Totals::crashes},
    {"stops", &Totals::stops},
    {"ranks lost another", &Totals::lost},
    {"diverged", &Totals::diverged}};

struct Fault {
  int64_t event = 0;  ///< Before the one of this number ...
  int rank = 0;
  int64_t stop_ns = 0;  ///< ... the rank stops for so long; 0: it crashes.
};

class Player;

/// Time, links and execution. Invariant: bytes of one link arrive in the order sent.
class World {
 public:
  explicit World(const Scenario& scenario, std::vector<Fault> faults = {});
  ~World();

  /// @return what went wrong, or nothing.
  std::optional<std::string> Run();
  const Totals& totals() const { return totals_; }

  // For players.
  const Scenario& scenario() const { return scenario_; }
  Oracle& oracle() { return oracle_; }
  Random& random() { return random_; }
  Totals& totals() { return totals_; }
  int64_t now() const { return now_; }
  /// An event on `rank`, which waits while that is stopped.
  void At(int rank, int64_t time, std::function<void()> what);
  void In(int rank, int64_t delay, std::function<void()> what) {
    At(rank, now_ + delay, std::move(what));
  }
  void Send(int from, int to, std::vector<std::byte> bytes);
  /// What the members of a set share.
  Agreement::Word& WordOf(uint32_t set) { return words_[set]; }

  /// A batch reached the head of its queue on `rank`; it runs once all participants are there.
  /// `participants` is empty if this rank does not know them all.
  void BatchAtHead(int rank, uint32_t set, int64_t number, int32_t index,
                   const std::vector<int>& participants);

 private:
  struct Event {
    int64_t time = 0;
    int64_t order = 0;
    int rank = 0;
    std::function<void()> what;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  void Strike(const Fault& fault);
  void Step();
  void Judge();

  const Scenario& scenario_;
  std::vector<Fault> faults_;
  std::map<int, int64_t> down_until_;  // by rank
  Oracle oracle_;
  Random random_;
  Totals totals_;
  int64_t now_ = 0;
  int64_t order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::map<std::pair<int, int>, int64_t> link_free_at_;  // last delivery of each link
  struct Meeting {
    std::vector<int> here;
    std::vector<int> participants;
  };
  std::map<std::tuple<uint32_t, int64_t, int32_t>, Meeting> meetings_;
  std::map<uint32_t, Agreement::Word> words_;
  std::vector<std::unique_ptr<Player>> players_;
};

/// Plays the scenario of one seed. @return what went wrong, or nothing.
std::optional<std::string> RunSeed(uint64_t seed, Totals* totals = nullptr);
/// The same script, with crashes and stops, or with ranks that come to wait for one another; slow
/// enough for ranks to ask who waits.
std::optional<std::string> RunSeedWithFaults(uint64_t seed, Totals* totals = nullptr);
/// The same script, where ranks that have nothing else in flight try to agree without votes; with
/// an odd seed also with crashes and stops.
std::optional<std::string> RunSeedWithAgreements(uint64_t seed, Totals* totals = nullptr);

}  // namespace farandole::simulation
