#include "coordinator/job/member_service.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "coordinator/control/rendezvous.h"
#include "coordinator/job/world.h"
#include "coordinator/membership/encoding.h"
#include "core/clock.h"
#include "core/threads.h"

namespace farandole {
namespace {

constexpr int64_t kLeaveNs = 2 * kNsPerSecond;
constexpr int64_t kEndingNs = kNsPerMs;  // how often an engine that is to end is asked

std::string InOneText(const std::vector<SocketAddress>& addresses) {
  std::string text;
  for (const SocketAddress& one : addresses) text += (text.empty() ? "" : ",") + one.ToString();
  return text;
}

uint64_t RandomNumber() {
  uint64_t number = 0;
  FillRandom(std::as_writable_bytes(std::span(&number, 1)));
  return std::max<uint64_t>(number, 1);
}

// That the kernel would send from; nothing is sent.
std::optional<SocketAddress> AddressToward(const SocketAddress& other) {
  const int socket = ::socket(other.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return std::nullopt;
  const Listener closes(socket);
  if (connect(socket, other.data(), other.size()) != 0) return std::nullopt;
  return closes.address().WithPort(0);
}

std::string Describe(const GenerationNumber& generation) {
  return std::to_string(generation.number) + "." + std::to_string(generation.proposer % 1000);
}

std::string Describe(const MembershipMessage& message) {
  const auto kind = static_cast<size_t>(message.kind);
  static constexpr std::array kKinds = {"",    "report",  "proposal", "refusal",
                                        "ask", "gone on", "ping"};
  std::string text = kKinds[std::min(kind, kKinds.size() - 1)];
  text += " of " + std::to_string(message.sender.id % 1000) + ": started " +
          Describe(message.started.generation) + ", accepted " + Describe(message.accepted) +
          ", proposes " + Describe(message.proposal.generation) + ", dead";
  for (const MemberId id : message.dead) text += " " + std::to_string(id % 1000);
  text += ", suspects";
  for (const MemberId id : message.suspects) text += " " + std::to_string(id % 1000);
  return text;
}

std::string Describe(const MembershipAction& action) {
  switch (action.kind) {
    case MembershipAction::Kind::kSend:
      return "to " + std::to_string(action.to.id % 1000) + ": " + Describe(action.message);
    case MembershipAction::Kind::kOpen:
      return "listens for a generation";
    case MembershipAction::Kind::kJoin:
      return "joins generation " + Describe(action.list.generation) + " as rank " +
             std::to_string(action.rank) + " of " + std::to_string(action.list.members.size());
    case MembershipAction::Kind::kEnd:
      return "ends the generation";
    case MembershipAction::Kind::kHalt:
      return "halts: " + action.text;
  }
  return "";
}

}  // namespace

Result<std::vector<std::string>> MembersAt(const std::string& texts) {
  Result<std::vector<HostPort>> named = ParseHostPorts(texts);
  if (!named.ok()) return named.status();
  std::vector<std::string> members;
  Status failed;
  for (const HostPort& one : named.value()) {
    const Result<std::vector<SocketAddress>> addresses = Resolve(one);
    if (!addresses.ok()) failed = addresses.status();
    if (addresses.ok()) members.push_back(InOneText(addresses.value()));
  }
  if (members.empty() && !failed.ok()) return failed;
  return members;
}

Result<std::vector<SocketAddress>> WhereToListen(const std::string& interfaces,
                                                 const std::vector<std::string>& members) {
  const Result<InterfaceList> list = ParseInterfaces(interfaces);
  if (!list.ok()) return list.status();
  std::optional<SocketAddress> known;
  for (const std::string& one : members) {
    const Result<SocketAddress> address = ParseSocketAddress(one.substr(0, one.find(',')));
    if (address.ok() && !known) known = AddressToward(address.value());
  }
  if (known && known->IsLoopback()) return std::vector<SocketAddress>{*known};
  return Reachable(0, list.value(), known);
}

Result<std::shared_ptr<MemberService>> MemberService::Create(Options options) {
  std::shared_ptr<MemberService> service(new MemberService(std::move(options)));
  Result<Listening> listening = ListenOn(service->options_.where, service->options_.ports);
  if (!listening.ok()) return listening.status();
  service->self_ = {RandomNumber(), InOneText(listening.value().addresses), ThisHost()};
  Party party;
  std::copy_n(reinterpret_cast<const std::byte*>(service->key().data()), party.key.size(),
              party.key.data());
  party.job = JobTag(service->job());
  Result<std::unique_ptr<MemberMail>> mail =
      MemberMail::Create(party, service->self_.id, std::move(listening).value());
  if (!mail.ok()) return mail.status();
  service->mail_ = std::move(mail).value();
  FARANDOLE_RETURN_IF_ERROR(
      StartThread(service->thread_, "farandole-memb", [s = service.get()] { s->Run(); }));
  World::Get().AddService(service.get());
  return service;
}

MemberService::~MemberService() {
  Lock lock(mutex_);
  Stop(lock);
}

void MemberService::Stop(Lock& lock) {
  stops_ = true;
  machine_.reset();
  running_ = {};
  if (!thread_.joinable()) return;
  World::Get().RemoveService(this);
  mail_->Wake();
  lock.unlock();
  thread_.join();
  lock.lock();
  mail_.reset();  // from here on nobody listens there
}

void MemberService::CloseInChild() {
  if (mail_ != nullptr) mail_->CloseInChild();
}

MembershipOptions MemberService::OptionsOfMachine() const {
  MembershipOptions options;
  options.self = self_;
  options.seed = RandomNumber();
  if (options_.silence_ns > 0) options.silence_ns = options_.silence_ns;
  if (options_.join_ns > 0) options.join_ns = options_.join_ns;
  options.most = options_.most;
  return options;
}

// --- The thread ---

void MemberService::Run() {
  Lock lock(mutex_);
  while (!stops_) {
    for (auto& [to, text] : std::exchange(outbox_, {})) mail_->Send(to, std::move(text));
    is_idle_ = !mail_->IsSending();
    if (is_idle_) changed_.notify_all();
    const int64_t until_ns = NextWakeNs();
    lock.unlock();
    const std::vector<MemberMail::Event> events = mail_->Poll(until_ns);
    lock.lock();
    if (!machine_) continue;
    machine_->Tick(SteadyClock().NowNs());
    for (const MemberMail::Event& event : events) Take(event);
    EndIfComplete();
    Perform();
  }
}

int64_t MemberService::NextWakeNs() const {
  if (!machine_) return kNever;
  int64_t next_ns = machine_->NextTimer().value_or(kNever);
  if (is_ending_) next_ns = std::min(next_ns, SteadyClock().NowNs() + kEndingNs);
  return next_ns;
}

void MemberService::Take(const MemberMail::Event& event) {
  switch (event.kind) {
    case MemberMail::Event::Kind::kCame: {
      const std::string_view text = event.text;
      if (text.empty()) return;
      const ByteSpan rest = TextBytes(text.substr(1));
      if (text[0] == static_cast<char>(Text::kMembership)) {
        const Result<MembershipMessage> message = DecodeMembership(rest);
        Say("came: " + (message.ok() ? Describe(message.value()) : message.status().message()));
        if (!message.ok()) return;
        machine_->Received(message.value());
      } else if (text[0] == static_cast<char>(Text::kLeave)) {
        const Result<MembershipMessage> left = DecodeMembership(rest);
        if (!left.ok()) return;
        machine_->Died({left.value().sender.id});
      }
      return;
    }
    case MemberMail::Event::Kind::kDelivered:
      pinged_.erase(event.to.id);
      return;
    case MemberMail::Event::Kind::kGone:
      Say("gone: " + std::to_string(event.to.id % 1000) + ": " + event.text);
      if (event.to.id != 0) machine_->Died({event.to.id});
      [[fallthrough]];
    case MemberMail::Event::Kind::kLost:
      pinged_.erase(event.to.id);
      machine_->Unreachable(event.to);
      return;
  }
}

// For who looks into how a job went on.
void MemberService::Say(const std::string& what) {
  if (log_.Enabled(LogLevel::kDebug)) log_.Write(LogLevel::kDebug, what);
}

// What one action leads to may be others, which are due at once.
void MemberService::Perform() {
  for (auto actions = machine_->TakeActions(); !actions.empty();
       actions = machine_->TakeActions()) {
    for (MembershipAction& action : actions) Perform(action);
    changed_.notify_all();
  }
}

void MemberService::Perform(MembershipAction& action) {
  Say(Describe(action));
  switch (action.kind) {
    case MembershipAction::Kind::kSend:
      if (action.message.kind == MembershipMessage::Kind::kPing &&
          !pinged_.insert(action.to.id).second) {
        break;  // it has not answered the last one
      }
      outbox_.emplace_back(action.to,
                           static_cast<char>(Text::kMembership) + EncodeMembership(action.message));
      break;
    case MembershipAction::Kind::kOpen:
      Open();
      break;
    case MembershipAction::Kind::kJoin:
      assignment_ = {std::move(action.list), action.rank, nullptr};
      if (action.rank == 0) assignment_->listener = std::exchange(listener_, nullptr);
      is_taken_ = is_given_up_ = false;
      break;
    case MembershipAction::Kind::kEnd:
      End();
      break;
    case MembershipAction::Kind::kHalt:
      halted_ = action.text;
      is_given_up_ = true;  // a join that nobody else waits for any more
      if (running_.end) running_.end(Aborted(halted_));
      SayLeave();
      break;
  }
}

// A socket of its own for each generation: who comes too late to an earlier one finds nobody.
void MemberService::Open() {
  const SocketAddress best = options_.where.front();
  const bool is_one = !options_.is_anywhere || options_.where.size() == 1;
  Result<Listening> listening =
      is_one ? ListenOn({best}, options_.ports) : ListenForAll(options_.ports, {}, "", best);
  if (!listening.ok()) return machine_->Opened("");
  listener_ = std::make_shared<Listener>(std::move(listening.value().sockets.front()));
  machine_->Opened(InOneText(listening.value().addresses));
}

void MemberService::End() {
  if (assignment_ && is_taken_) {
    is_given_up_ = true;
  } else if (assignment_) {
    const GenerationNumber generation = assignment_->list.generation;
    assignment_.reset();
    machine_->Joined(generation, false);
  } else if (!has_ended_) {
    if (running_.end) running_.end(Aborted(kMembersChange));
    is_ending_ = true;
  }
}

void MemberService::EndIfComplete() {
  if (!is_ending_ || (running_.has_ended && !running_.has_ended())) return;
  EndWith(running_.losses ? running_.losses() : Losses());
}

// Others' reports may end it first, when the program has released its engine and has yet to say
// what that knows.
void MemberService::EndWith(const Losses& losses) {
  is_ending_ = false;
  has_ended_ = true;
  machine_->Ended(losses.dead, losses.suspects);
}

void MemberService::SayLeave() {
  const std::string text = static_cast<char>(Text::kLeave) + EncodeMembership({.sender = self_});
  for (const Member& other : machine_->Others()) outbox_.emplace_back(other, text);
}

// --- The program's threads ---

void MemberService::Begin(MemberList first, RunningGeneration running) {
  const Lock lock(mutex_);
  machine_.emplace(OptionsOfMachine(), std::move(first));
  running_ = std::move(running);
  mail_->Wake();
}

void MemberService::Ask(std::vector<std::string> addresses) {
  const Lock lock(mutex_);
  machine_.emplace(OptionsOfMachine(), std::move(addresses));
  has_ended_ = true;
  mail_->Wake();
}

void MemberService::Forget() {
  const Lock lock(mutex_);
  running_ = {};
}

void MemberService::Agree(const Losses& losses) {
  const Lock lock(mutex_);
  running_ = {};
  if (!machine_) return;
  machine_->Tick(SteadyClock().NowNs());
  EndWith(losses);
  mail_->Wake();
}

Result<std::optional<MemberAssignment>> MemberService::AwaitAssignment(int64_t timeout_ns) {
  Lock lock(mutex_);
  const auto is_known = [this] {
    return !halted_.empty() || stops_ || (assignment_ && !is_taken_);
  };
  if (timeout_ns < 0) {
    changed_.wait(lock, is_known);
  } else if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_known)) {
    return std::optional<MemberAssignment>();
  }
  if (!halted_.empty()) return Status(Code::kHalted, halted_);
  if (stops_) return Status(Code::kHalted, "this process has left the job");
  is_taken_ = true;
  return assignment_;
}

bool MemberService::IsGivenUp() {
  const Lock lock(mutex_);
  return is_given_up_;
}

void MemberService::Joined(std::optional<RunningGeneration> running) {
  const Lock lock(mutex_);
  if (!machine_ || !assignment_) return;
  machine_->Tick(SteadyClock().NowNs());
  const GenerationNumber generation = assignment_->list.generation;
  assignment_.reset();
  is_taken_ = is_given_up_ = false;
  if (running) {
    running_ = std::move(*running);
    has_ended_ = false;
  }
  Say(std::string(running ? "has joined" : "has not joined") + " generation " +
      Describe(generation));
  machine_->Joined(generation, running.has_value());
  mail_->Wake();
}

void MemberService::Computed(const GenerationNumber& generation) {
  const Lock lock(mutex_);
  if (!machine_) return;
  machine_->Tick(SteadyClock().NowNs());
  Say("has computed in generation " + Describe(generation));
  machine_->Computed(generation);
  mail_->Wake();
}

void MemberService::Leave() {
  Lock lock(mutex_);
  if (stops_) return;
  if (halted_.empty() && machine_) SayLeave();
  machine_.reset();
  running_ = {};
  is_idle_ = false;
  mail_->Wake();
  (void)changed_.wait_for(lock, std::chrono::nanoseconds(kLeaveNs),
                          [this] { return is_idle_ && outbox_.empty(); });
  Stop(lock);
}

bool MemberService::has_left() {
  const Lock lock(mutex_);
  return stops_;
}

bool MemberService::change_is_due() {
  const Lock lock(mutex_);
  return machine_ && machine_->IsChangeDue();
}

MemberList MemberService::started() {
  const Lock lock(mutex_);
  return machine_ ? machine_->started() : MemberList();
}

}  // namespace farandole
