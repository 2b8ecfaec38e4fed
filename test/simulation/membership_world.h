// One job whose processes crash, stop, cannot reach one another, come and leave, by a seed:
// production machines of coordinator/membership, and of engines and network what may become of
// them. Faults cease after a while, and then what is left must go on or end.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/membership/membership.h"
#include "test/simulation/random.h"

namespace farandole::simulation {

/// What schedules did, summed over all.
struct MembershipTotals {
  int64_t crashes = 0;
  int64_t stops = 0;
  int64_t cuts = 0;
  int64_t newcomers = 0;
  int64_t leavers = 0;
  int64_t failed_joins = 0;
  int64_t split_joins = 0;  ///< Which succeeded at some members, and failed at others.
  int64_t generations = 0;  ///< That computed something.
  int64_t steps = 0;
  int64_t halted = 0;
  int64_t told = 0;         ///< Of these, that the job has gone on without them.
  int64_t rolled_back = 0;  ///< Steps were lost, as all who had voted for them are dead.
  int64_t went_on = 0;      ///< Schedules at whose end a generation computes.
  int64_t messages = 0;
};

/// By the name that simulate prints.
inline constexpr std::pair<const char*, int64_t MembershipTotals::*> kMembershipTotals[] = {
    {"crashes", &MembershipTotals::crashes},
    {"stops", &MembershipTotals::stops},
    {"cuts", &MembershipTotals::cuts},
    {"newcomers", &MembershipTotals::newcomers},
    {"leavers", &MembershipTotals::leavers},
    {"failed joins", &MembershipTotals::failed_joins},
    {"of them at some members", &MembershipTotals::split_joins},
    {"generations", &MembershipTotals::generations},
    {"steps", &MembershipTotals::steps},
    {"halted", &MembershipTotals::halted},
    {"as others went on", &MembershipTotals::told},
    {"rolled back", &MembershipTotals::rolled_back},
    {"went on", &MembershipTotals::went_on},
    {"messages", &MembershipTotals::messages}};

/// Rules that it checks:
/// 1. Once another generation has computed, a generation computes nothing more. The next one has
///    all its steps but the last, unless all of its voters are dead.
/// 2. Nobody halts for want of others while a quorum has been connected for long, or all others
///    have ended long ago.
/// 3. After the faults every process halts, or is in the one generation that computes; and has a
///    vote in it once all that were left out have ended.
class MembershipWorld {
 public:
  MembershipWorld(uint64_t seed, MembershipTotals& totals, bool prints = false);
  /// @return what went wrong, or nothing.
  std::optional<std::string> Run();

 private:
  struct Process {
    Member self;
    std::unique_ptr<Membership> machine;
    bool is_dead = false;    // or has left, or has halted
    bool is_silent = false;  // then: others but those of its host never learn of its end
    int64_t ended_ns = 0;
    bool is_stopped = false;
    bool goes_on = false;  // after a while, if it is stopped
    bool has_halted = false;
    std::optional<GenerationNumber> engine;   // that has started here and not ended
    std::optional<GenerationNumber> joining;  // and has no result yet
    int state = -1;                           // of steps_; -1: none yet
    int64_t timer_ns = INT64_MAX;
    std::set<GenerationNumber> told = {};             // of which lists it has heard
    int dies_in_sends = -1;                           // of its next proposal
    std::vector<std::function<void()>> backlog = {};  // while it is stopped
  };
  struct Generation {
    MemberList list;
    std::set<int> begun = {};   // processes that have ever begun to join
    std::set<int> inside = {};  // whose engine runs
    bool has_started = false;   // on any
    bool has_state = false;
    bool is_closed = false;  // another one has computed since
    int state = -1;
    int steps = 0;
    int64_t progress_ns = 0;
  };
  struct Step {
    int before = -1;
    GenerationNumber generation;
  };
  struct Event {
    int64_t time = 0;
    int64_t order = 0;
    std::function<void()> what;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  int64_t Ms(int low, int high) { return random_.Between(low, high) * int64_t{1'000'000}; }
  void At(int64_t time, std::function<void()> what);
  /// After `delay_ns`, on a process that can act; and what it wants done then.
  void On(int process, int64_t delay_ns, std::function<void()> what);
  void Drain(int process);
  void Do(int process, MembershipAction& action);
  void Send(int from, const Member& to, const MembershipMessage& message);

  void BeginJoin(int process, const MemberList& list);
  void EndJoin(int process, const GenerationNumber& generation, bool ok);
  void DecideJoin(Generation& generation);
  void Leave(int process, const std::set<MemberId>& dead, const std::set<MemberId>& suspects);
  void NotifyPeers(int process, const GenerationNumber& generation);
  void TryStep(const GenerationNumber& number);
  void Compute(Generation& generation);
  void CheckState(const Generation& generation, int best);
  void CheckHalt(int process, const std::string& text);
  void EndGently(Generation& generation);

  void AddProcess(bool is_newcomer);
  void Strike();
  void Crash(int process, bool is_seen_everywhere);
  void End(int process, bool is_seen_everywhere);
  void Stop(int process);
  void Cut();
  void Heal();
  bool IsSettled();
  void Fail(const std::string& what);

  int IndexOf(const Member& member) const { return static_cast<int>(member.id) - 1; }
  Process& process(int index) { return processes_[static_cast<size_t>(index)]; }
  bool CanAct(int index);
  bool Reaches(int from, int to);
  bool AreConnected(const MemberList& list);
  bool SeesEnd(int from, int of);
  std::string Describe(const MemberList& list) const;

  const uint64_t seed_;
  MembershipTotals& totals_;
  const bool prints_;
  Random random_;
  int64_t now_ = 1;
  int64_t order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::deque<Process> processes_;  // ids are indices + 1
  std::map<GenerationNumber, Generation> generations_;
  std::vector<Step> steps_;
  std::optional<GenerationNumber> computing_;  // the last one that did
  int last_step_ = 0;
  std::set<std::pair<int, int>> cut_;  // from, to
  int lost_percent_ = 0;               // of messages
  int slow_percent_ = 10;
  int split_percent_ = 15;  // of joins succeed at some members only
  int hosts_ = 1;
  int64_t faults_end_ns_ = 0;
  int64_t fault_ns_ = 0;  // the last one
  bool went_on_ = false;
  std::optional<std::string> failure_;
};

std::optional<std::string> RunMembershipSeed(uint64_t seed, MembershipTotals* totals = nullptr,
                                             bool prints = false);

}  // namespace farandole::simulation
