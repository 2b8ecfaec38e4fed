// The host of Membership: what a process of an elastic job has for as long as it is in that job,
// generation after generation.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "coordinator/job/member_mail.h"
#include "coordinator/membership/membership.h"
#include "core/log.h"
#include "core/net/listener.h"
#include "core/status.h"

namespace farandole {

/// What a member fails with when others go on without this generation.
inline constexpr const char* kMembersChange = "the members of the job change; reinit() goes on";

/// Of "host:port,...": each as numeric addresses. @return InvalidArgument for what is none;
/// Unavailable if none can be resolved.
Result<std::vector<std::string>> MembersAt(const std::string& texts);
/// Addresses of this host for a process that asks those members to be let in, or begins alone.
/// @return As InterfaceAddresses.
Result<std::vector<SocketAddress>> WhereToListen(const std::string& interfaces,
                                                 const std::vector<std::string>& members);

/// Members that a generation has lost. A death that a kernel has seen is certain, and so is a clean
/// leave; who is silent or cut off is a suspect.
struct Losses {
  std::set<MemberId> dead;
  std::set<MemberId> suspects;
};

/// What the service needs of the generation in which this process computes. Called by its thread;
/// they neither block nor call the service.
struct RunningGeneration {
  std::function<void(const Status&)> end;  ///< Its engine fails with this, on all ranks.
  std::function<bool()> has_ended;         ///< It computes nothing more.
  std::function<Losses()> losses;
};

/// Where this process is to join.
struct MemberAssignment {
  MemberList list;
  int rank = 0;
  std::shared_ptr<Listener> listener;  ///< Of rank 0, at list.root.
};

/// A thread answers the other members, also while the program computes, and sleeps otherwise.
///
/// Thread safety: any thread; Agree, AwaitAssignment and Joined by the one that takes the process
/// from generation to generation. Nothing blocks but AwaitAssignment and Leave.
class MemberService {
 public:
  struct Options {
    std::string key;                        ///< The job's, 32 bytes.
    std::string job;                        ///< Its name.
    std::vector<SocketAddress> where = {};  ///< Where it listens, at `ports`.
    PortRange ports = {};
    bool is_anywhere = false;  ///< Those are all addresses of this host, not only chosen ones.
    int64_t silence_ns = 0;    ///< See MembershipOptions.
    int64_t join_ns = 0;
    int most = 0;
    LogLevel log_level = LogLevel::kWarning;
  };

  /// @return What ListenOn returns; ResourceExhausted for a thread.
  static Result<std::shared_ptr<MemberService>> Create(Options options);
  ~MemberService();

  const Member& self() const { return self_; }
  const std::string& key() const { return options_.key; }
  const std::string& job() const { return options_.job; }

  /// Of a process that began the job with others, whose first generation this is.
  void Begin(MemberList first, RunningGeneration running);
  /// Of a newcomer. @param addresses  Of members, each "host:port", numeric.
  void Ask(std::vector<std::string> addresses);
  /// The generation is being taken down: what was given of it is not called any more.
  void Forget();
  /// It has ended: the next one is to be agreed on.
  void Agree(const Losses& losses);
  /// Waits up to `timeout_ns` (< 0: no limit). @return nothing: not yet; Halted, for good.
  Result<std::optional<MemberAssignment>> AwaitAssignment(int64_t timeout_ns);
  /// The join of the last one is to be given up.
  bool IsGivenUp();
  /// How that ended; `running` if well.
  void Joined(std::optional<RunningGeneration> running);
  /// All members have completed something in that generation.
  void Computed(const GenerationNumber& generation);
  /// This process leaves: within 2 s the others know. It is a member no more.
  void Leave();

  /// By Leave.
  bool has_left();
  /// Newcomers wait to be let in. Rank 0 is sure to know.
  bool change_is_due();
  /// The newest list that has started.
  MemberList started();
  /// In a forked child, which has no thread: others shall see the end of this process.
  void CloseInChild();

 private:
  enum class Text : char { kMembership = 'm', kLeave = 'l' };
  using Lock = std::unique_lock<std::mutex>;

  explicit MemberService(Options options)
      : options_(std::move(options)), log_(options_.log_level, "members") {}
  void Run();
  // All below with mutex_ held.
  MembershipOptions OptionsOfMachine() const;
  int64_t NextWakeNs() const;
  void Take(const MemberMail::Event& event);
  void Say(const std::string& what);
  void Perform();
  void Perform(MembershipAction& action);
  void Open();
  void End();
  void EndIfComplete();
  void EndWith(const Losses& losses);
  void SayLeave();
  void Stop(Lock& lock);

  const Options options_;
  PrefixLog log_;
  Member self_;
  std::unique_ptr<MemberMail> mail_;  // the thread's; Wake anybody's
  std::thread thread_;

  std::mutex mutex_;  // of those below
  std::condition_variable changed_;
  std::optional<Membership> machine_;
  RunningGeneration running_;
  bool is_ending_ = false;              // the engine has been told to end
  bool has_ended_ = false;              // the machine knows that the generation has ended
  std::shared_ptr<Listener> listener_;  // of the last kOpen
  std::optional<MemberAssignment> assignment_;
  bool is_taken_ = false;  // somebody joins there
  bool is_given_up_ = false;
  std::string halted_;  // why
  std::vector<std::pair<Member, std::string>> outbox_;
  std::set<MemberId> pinged_;  // and no answer yet
  bool is_idle_ = true;        // nothing is on its way
  bool stops_ = false;
};

}  // namespace farandole
