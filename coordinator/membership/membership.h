// Who computes together, generation after generation: a pure state machine. README.md has the rules
// and why they hold.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace farandole {

/// A process of a job, for as long as it lives: random, never 0.
using MemberId = uint64_t;

struct Member {
  MemberId id = 0;
  std::string address = {};  ///< "host:port", where it listens for messages of membership.
  std::string host = {};     ///< Equal for processes of one host: they get neighbouring ranks.
  bool operator==(const Member&) const = default;
};

/// Generations are ordered by number; each is proposed by one process.
struct GenerationNumber {
  uint64_t number = 0;    ///< 0: none. The first generation of a job: 1.
  MemberId proposer = 0;  ///< Tells generations apart that two processes propose at once.
  auto operator<=>(const GenerationNumber&) const = default;
};

/// Members in rank order.
struct MemberList {
  GenerationNumber generation = {};
  std::vector<Member> members = {};
  std::string root = {};  ///< "host:port", where rank 0 waits for the others to join.
  /// Members of earlier lists that went on without them, and whose end nobody has seen.
  std::map<MemberId, Member> left_out = {};
  /// Members that count in a quorum only where the list is known to have computed something.
  std::set<MemberId> newcomers = {};
  /// Members that came while somebody was left out: they don't count at all.
  std::set<MemberId> without_vote = {};
  /// What each member had accepted when it reported to who proposed this. A member that has
  /// accepted something since then refuses, for good.
  std::map<MemberId, GenerationNumber> rests_on = {};
  bool operator==(const MemberList&) const = default;
};

/// What one process tells another.
struct MembershipMessage {
  enum class Kind : uint8_t {
    kReport = 1,    ///< A survivor to who it believes leads.
    kProposal = 2,  ///< The leader to all in `proposal`.
    kRefusal = 3,   ///< To a leader: this process has accepted something else since its report.
    kAsk = 4,       ///< A newcomer, `sender`, asks to be let in; passed on to rank 0.
    kGoneOn = 5,    ///< To one who doesn't know of `started`, or isn't in it any more or yet.
    kPing = 6,      ///< To one whose end would matter.
  };
  Kind kind = Kind::kReport;
  Member sender = {};
  MemberList started = {};               ///< The last one that the sender knows to have started,
  bool has_computed = false;             ///< and whether it knows that it has computed something.
  std::vector<MemberList> pending = {};  ///< Newer ones that may have started, oldest first.
  GenerationNumber accepted = {};        ///< The newest that it has accepted.
  std::set<MemberId> dead = {};      ///< Whose end a kernel or a launcher has seen, or who left.
  std::set<MemberId> suspects = {};  ///< Whom the sender cannot reach.
  MemberList proposal = {};          ///< kProposal; in a kRefusal its generation alone, in a kPing
                                     ///< that of the list that the sender joins.
  bool operator==(const MembershipMessage&) const = default;
};

struct MembershipOptions {
  Member self;
  uint64_t seed = 0;                   ///< Of back-off times; differs from process to process.
  int64_t silence_ns = 2'000'000'000;  ///< Who has not answered for so long is left out.
  int64_t join_ns = 5'000'000'000;     ///< A join that takes longer is given up, by kEnd.
  int64_t halt_ns = 10'000'000'000;    ///< So long a minority waits for others.
  int most = 0;                        ///< Members of a generation; 0: any number.
};

/// What the host of the machine is to do, in order.
struct MembershipAction {
  enum class Kind : uint8_t {
    kSend = 1,  ///< `message` to `to`. If it can't be delivered, Unreachable.
    kOpen = 2,  ///< Listen as rank 0 of a generation that is to be proposed; Opened says where.
    kJoin = 3,  ///< Join `list` as rank `rank`; Joined says how it went.
    kEnd = 4,   ///< End the present generation, then Ended; or give the join up, then Joined.
    kHalt = 5,  ///< Leave the job with `text`: exit code 75. Nothing follows.
  };
  Kind kind = Kind::kSend;
  Member to = {};  ///< id 0: only its address is known.
  MembershipMessage message = {};
  MemberList list = {};
  int rank = -1;
  std::string text = {};
};

/// One process of a job whose processes may die, stop, leave and come at any time.
///
/// Thread safety: one thread at a time. It has no clock: it is as late as the last Tick said, so
/// the host calls Tick before any other input. After each input the host takes the actions.
/// Invariant: lists that start are ordered, and no two go on beside one another; see README.md.
class Membership {
 public:
  /// A process that is in `started`, a generation that has started.
  Membership(MembershipOptions options, MemberList started);
  /// A newcomer, which asks those that listen at `addresses` in turn until it is let in.
  Membership(MembershipOptions options, std::vector<std::string> addresses);

  /// Time has come to `now_ns`, of a clock that never goes back.
  void Tick(int64_t now_ns);
  /// Processes whose end is certain: their kernel or launcher has seen it, or they left cleanly.
  void Died(const std::set<MemberId>& dead);
  /// The present generation has ended here: by a loss, by kEnd, or because its members want to let
  /// newcomers in. The engine computes nothing more.
  /// @param suspects  Members that cannot be reached, or are silent.
  void Ended(const std::set<MemberId>& dead = {}, const std::set<MemberId>& suspects = {});
  /// After kOpen: others reach rank 0 at `address`. Empty: this process cannot listen now.
  void Opened(const std::string& address);
  /// After kJoin, exactly once: whether the engine of that list has started here. If not, nothing
  /// of it computes here, nor will; if so, nothing has before this call.
  void Joined(const GenerationNumber& generation, bool ok, const std::set<MemberId>& dead = {},
              const std::set<MemberId>& suspects = {});
  /// The first collective of that generation has completed here, as the exchange of the state: so
  /// it has started on every member. From then on newcomers have a vote in who goes on.
  void Computed(const GenerationNumber& generation);
  void Received(const MembershipMessage& message);
  /// A message could not be delivered, or it isn't known whether it was.
  void Unreachable(const Member& to);

  /// What is to be done since the last call.
  std::vector<MembershipAction> TakeActions();
  /// When Tick is due; nothing: not before another input.
  std::optional<int64_t> NextTimer() const;

  /// The newest list that is known to have started.
  const MemberList& started() const { return started_; }
  /// Newcomers that ask rank 0 to be let in and would find room, oldest first.
  std::vector<Member> askers() const;
  /// The next generation would be a better one: newcomers wait, or members get a vote, as all that
  /// were left out have ended.
  bool IsChangeDue() const;
  /// All others that this process knows by address, to whom its leave matters.
  std::vector<Member> Others() const;

  /// That this process has halted, by kHalt.
  bool has_halted() const { return phase_ == Phase::kHalted; }

 private:
  enum class Phase : uint8_t {
    kRunning,    // started_ computes
    kEnding,     // kEnd was given; Ended follows
    kGathering,  // reports, or gathers reports; a newcomer asks
    kOpening,    // kOpen was given; else as kGathering
    kJoining,    // kJoin was given; Joined follows
    kHalted,
  };
  /// What a proposal is made of: the lists of which it needs a quorum, and who has reported.
  struct Basis {
    MemberList started;
    bool has_computed = false;
    std::vector<MemberList> pending;
    std::set<MemberId> here;  // reporters that are in one of these lists, and this process
    std::set<MemberId> suspected = {};  // by one of them
  };
  struct Ask {
    MembershipMessage message;
    int64_t heard_ns = 0;
  };

  bool IsNewcomer() const;
  bool IsSuspect(MemberId id) const;
  bool IsGathering() const { return phase_ == Phase::kGathering || phase_ == Phase::kOpening; }
  const MembershipMessage& MessageOf(MemberId id) const;
  MembershipMessage Say(MembershipMessage::Kind kind) const;
  void Send(const Member& to, MembershipMessage message);
  void AddFacts(const std::set<MemberId>& dead, const std::set<MemberId>& suspects);
  void NoteNumbers(const MembershipMessage& message);
  void Learn(const MembershipMessage& message);
  void SetStarted(const MemberList& started, bool has_computed);
  void BeginGathering();
  void GiveUpJoinWith(const std::set<MemberId>& dead);
  void GiveUpJoin();
  void Halt(std::string text);

  void OnReport(const MembershipMessage& message);
  void OnReportWhileRunning(const MembershipMessage& message);
  void OnReportWhileJoining(const MembershipMessage& message);
  void OnReportWhileGathering(const MembershipMessage& message);
  void OnProposal(const MembershipMessage& message);
  void Refuse(const MembershipMessage& message);
  void OnRefusal(const MembershipMessage& message);
  void OnAsk(const MembershipMessage& message);
  void OnPing(const MembershipMessage& message);

  void Advance();
  void Ping();
  std::vector<Member> Watched() const;
  void AskForEntry();
  void Probe();
  std::optional<Member> Leader() const;
  bool CannotStart(const MemberList& list) const;
  Basis Collect() const;
  bool IsHopeless() const;
  bool IsAwaiting(const Basis& basis) const;
  bool HasQuorum(const std::set<MemberId>& here, const Basis& basis) const;
  std::set<MemberId> Reachable(const Basis& basis) const;
  std::optional<MemberList> MakeList(const Basis& basis) const;
  std::optional<MemberList> MakeList(const Basis& basis, const std::set<MemberId>& here) const;
  bool GiveVotes(const Basis& basis, MemberList& next) const;
  void AddNewcomers(const Basis& basis, std::vector<Member>& members) const;
  void TryToLead();
  void Propose(const std::string& root);
  void Accept(const MembershipMessage& proposal);
  void HaltAsLeftOut(const MemberList& started);
  void HaltAsMinority();
  uint64_t Random();

  MembershipOptions options_;
  const std::vector<std::string> addresses_;  // that a newcomer asks
  Phase phase_ = Phase::kGathering;
  int64_t now_ns_ = 0;
  MemberList started_;
  bool has_computed_ = false;
  std::vector<MemberList> pending_;  // newer than started_, oldest first
  GenerationNumber accepted_;
  uint64_t seen_number_ = 0;  // the greatest
  std::set<MemberId> dead_;
  std::set<MemberId> suspects_;              // until they send something, or a generation starts
  std::map<MemberId, int64_t> unreachable_;  // until then, or they send something
  std::map<MemberId, int64_t> passed_by_;    // leaders that propose nothing, until then

  std::map<MemberId, MembershipMessage> reports_;  // since the last join began
  std::vector<Ask> asks_;                          // in the order in which they came first
  MemberId reported_to_ = 0;
  int64_t reported_since_ns_ = 0;
  int64_t report_ns_ = 0;    // when to report next
  int64_t probe_ns_ = 0;     // when to try suspects again
  int64_t ping_ns_ = 0;      // when to see again whether others live
  int64_t gather_ns_ = 0;    // when the gathering began
  int64_t ended_ns_ = 0;     // when the last generation ended
  int64_t hope_ns_ = 0;      // when a quorum, or a member, was last seen
  int64_t back_off_ns_ = 0;  // until when not to propose
  int failures_ = 0;         // joins since the last start that failed
  size_t next_address_ = 0;
  int64_t ask_ns_ = 0;  // when to ask next

  MembershipMessage proposal_;  // the one that is joined, if this process made it
  MemberList joining_;
  int64_t join_until_ns_ = 0;
  bool end_asked_ = false;

  uint64_t random_ = 0;
  std::vector<MembershipAction> actions_;
};

/// Whether those `here` may go on from `list`: no others that don't hold one of them can, as long
/// as any of its voters lives. See README.md.
bool IsQuorum(const std::set<MemberId>& here, const MemberList& list,
              const std::set<MemberId>& dead, bool newcomers_vote);

}  // namespace farandole
