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
  std::string address;  ///< "host:port", where it listens for messages of membership.
  std::string host;     ///< Equal for processes of one host: they get neighbouring ranks.
  bool operator==(const Member&) const = default;
};

/// Generations are ordered by number; each is proposed by one process.
struct GenerationNumber {
  uint64_t number = 0;
  MemberId proposer = 0;  ///< Tells generations apart that two processes propose at once.
  auto operator<=>(const GenerationNumber&) const = default;
};

/// Members in rank order.
struct MemberList {
  GenerationNumber generation;
  std::vector<Member> members;
  std::string root;  ///< "host:port", where rank 0 waits for the others to join.
  bool operator==(const MemberList&) const = default;
};

/// What one process tells another.
struct MembershipMessage {
  enum class Kind : uint8_t {
    kReport = 1,    ///< A survivor to who it believes leads: all but `proposal` and `text`.
    kProposal = 2,  ///< The leader to all in `proposal`.
    kRefusal = 3,   ///< To a leader: this process has accepted `accepted`, which is newer.
    kAsk = 4,       ///< A newcomer, `sender`, asks to be let in; passed on to rank 0.
    kGoneOn = 5,    ///< To one who is not in it any more: `started` went on without him.
  };
  Kind kind = Kind::kReport;
  Member sender;
  MemberList started;                 ///< The last one that the sender knows to have started.
  std::optional<MemberList> pending;  ///< One that it has begun to join, and may have started.
  GenerationNumber accepted;          ///< The newest that it has accepted.
  std::set<MemberId> dead;            ///< Whose end a kernel or a launcher has seen, or who left.
  MemberList proposal;                ///< kProposal.
};

struct MembershipOptions {
  Member self;
  int64_t silence_ns = 2'000'000'000;  ///< Who has not answered for so long is left out.
  int64_t halt_ns = 10'000'000'000;    ///< So long a minority waits for others.
  int most = 0;                        ///< Members of a generation; 0: any number.
};

/// What the host of the machine is to do, in order.
struct MembershipAction {
  enum class Kind : uint8_t {
    kSend = 1,  ///< `message` to `to`. If it can't be delivered, Unreachable.
    kOpen = 2,  ///< Listen as rank 0 of a generation that is to be proposed; Opened says where.
    kJoin = 3,  ///< Join `list` as rank `rank`; Joined says how it went.
    kEnd = 4,   ///< End the present generation: others have (or someone is to be let in).
    kHalt = 5,  ///< Leave the job with `text`: exit code 75.
  };
  Kind kind = Kind::kSend;
  Member to = {};
  MembershipMessage message = {};
  MemberList list = {};
  int rank = -1;
  std::string text = {};
};

}  // namespace farandole
