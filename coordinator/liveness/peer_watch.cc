#include "coordinator/liveness/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <utility>

#include "core/clock.h"

namespace farandole {
namespace {

// How much longer than a stopped process a frozen one is waited for: its state does not tell it
// from one that waits for a disk.
constexpr int64_t kFrozenFactor = 5;

std::string StatOf(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  return text;
}

/// The state of a process or thread as ps shows it; 'R' if it cannot be read.
char StateIn(const std::string& stat) {
  const size_t name_end = stat.rfind(')');  // the name before it may hold anything
  return name_end == std::string::npos || name_end + 2 >= stat.size() ? 'R' : stat[name_end + 2];
}

char StateOfThread(pid_t process, int32_t thread) {
  return StateIn(
      StatOf("/proc/" + std::to_string(process) + "/task/" + std::to_string(thread) + "/stat"));
}

/// What the system tells of a process to those who hold a descriptor of it, from Linux 6.15 on; as
/// in linux/pidfd.h, which older systems do not have.
struct PidfdInfo {
  static constexpr uint64_t kExit = 1 << 3;
  uint64_t mask;
  uint64_t cgroup;
  uint32_t ids[11];
  int32_t exit_code;
};
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

// Watches from one reading of the counts of OomKills to the next: a few seconds.
constexpr int kWatchesPerRefresh = 16;
// How long the end of a process may take to be told, once it is known that it has ended.
constexpr int kEndTries = 20;
constexpr int kEndTryUs = 1000;

/// As wait() has it; nullopt: it cannot be found out. The descriptor tells it once the parent has
/// waited for the process, /proc until then.
std::optional<int> WaitStatus(int file, pid_t pid, int& tries_left) {
  for (bool is_first = true; is_first || tries_left > 0; is_first = false, --tries_left) {
    PidfdInfo info = {};
    info.mask = PidfdInfo::kExit;
    if (ioctl(file, kPidfdGetInfo, &info) == 0 && (info.mask & PidfdInfo::kExit) != 0) {
      return info.exit_code;
    }
    const std::string stat = StatOf("/proc/" + std::to_string(pid) + "/stat");
    const size_t last = stat.rfind(' ');
    if (StateIn(stat) == 'Z' && last != std::string::npos)
      return static_cast<int>(std::strtol(stat.c_str() + last, nullptr, 10));
    usleep(kEndTryUs);
  }
  return std::nullopt;
}

std::string InSeconds(int64_t ns) {
  char text[32];
  (void)std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) / kNsPerSecond);
  return text;
}

}  // namespace

// Version 2 has one line "0::/path"; of version 1 the line of its controller: "4:memory:/path".
OomKills::OomKills(pid_t process) {
  std::ifstream groups("/proc/" + std::to_string(process) + "/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t path = line.rfind(':') + 1;
    const bool is_memory = line.find(":memory:") != std::string::npos;
    if (!is_memory && !line.starts_with("0::")) continue;
    const std::string file =
        is_memory ? "/sys/fs/cgroup/memory" + line.substr(path) + "/memory.oom_control"
                  : "/sys/fs/cgroup" + line.substr(path) + "/memory.events";
    if (access(file.c_str(), R_OK) == 0) file_ = file;
  }
  seen_ = Read();
}

int64_t OomKills::Read() const {
  std::ifstream file(file_);
  std::string name;
  for (int64_t value = 0; file >> name >> value;) {
    if (name == "oom_kill") return value;
  }
  return 0;
}

bool OomKills::HaveGrown() {
  const int64_t now = file_.empty() ? 0 : Read();
  return now > std::exchange(seen_, now);
}

PeerWatch::PeerWatch(Liveness& table)
    : table_(table), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

PeerWatch::~PeerWatch() {
  for (const Peer& peer : peers_) {
    if (peer.file >= 0) close(peer.file);
  }
  if (wake_ >= 0) close(wake_);
}

// By number, since the C libraries that are supported do not all have the function.
bool PeerWatch::Add(int rank, pid_t pid) {
  const auto file = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (file < 0 || wake_ < 0) return false;
  peers_.push_back({rank, pid, file, OomKills(pid)});
  return true;
}

void PeerWatch::UsePulses(std::span<Pulse> pulses, std::span<const int> ranks, size_t mine,
                          int64_t patience_ns) {
  mine_ = &pulses[mine];
  patience_ns_ = patience_ns;
  for (Peer& peer : peers_) {
    const auto found = std::ranges::find(ranks, peer.rank);
    if (found != ranks.end()) peer.pulse = &pulses[static_cast<size_t>(found - ranks.begin())];
  }
}

void PeerWatch::Watch(int64_t timeout_ns) {
  const int64_t until_ns = SteadyClock().NowNs() + timeout_ns;
  std::vector<pollfd> files = {{wake_, POLLIN, 0}};
  for (const Peer& peer : peers_) files.push_back({peer.file, POLLIN, 0});
  Beat();
  for (int64_t left_ns = timeout_ns; left_ns > 0; left_ns = until_ns - SteadyClock().NowNs()) {
    const int64_t left_ms = std::min<int64_t>((left_ns + kNsPerMs - 1) / kNsPerMs, INT_MAX);
    if (poll(files.data(), files.size(), static_cast<int>(left_ms)) <= 0) continue;
    if (files[0].revents != 0) return;
    end_tries_ = kEndTries;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (files[i + 1].revents == 0) continue;
      files[i + 1].fd = -1;
      NoteEnd(peers_[i]);
    }
  }
  const bool refreshes = ++watches_ % kWatchesPerRefresh == 0;
  for (Peer& peer : peers_) {
    if (refreshes) (void)peer.oom_kills.HaveGrown();
    if (!CheckPulse(peer, timeout_ns)) peer.silent_ns = 0;
  }
}

void PeerWatch::NoteEnd(Peer& peer) {
  const int file = std::exchange(peer.file, -1);
  const std::optional<int> status = WaitStatus(file, peer.pid, end_tries_);
  close(file);
  table_.NoteEnd(peer.rank);
  if (peer.pulse != nullptr && peer.pulse->left.load() != 0) return;
  FailureFacts facts;
  std::string why = "has died";
  if (status && WIFSIGNALED(*status)) {
    facts.number = WTERMSIG(*status);
    const bool is_oom = facts.number == SIGKILL && peer.oom_kills.HaveGrown();
    facts.kind = is_oom ? FailureKind::kOutOfMemory : FailureKind::kKilled;
    why = "was killed by signal " + std::to_string(facts.number) + " (" + strsignal(facts.number) +
          ")" + (is_oom ? ", as there was no memory left" : "");
  } else if (status && WIFEXITED(*status)) {
    facts.number = WEXITSTATUS(*status);
    facts.kind = FailureKind::kExited;
    why = "has exited with code " + std::to_string(facts.number) + " before it left the job";
  }
  Lose(peer, why, std::move(facts));
}

void PeerWatch::Lose(Peer& peer, const std::string& why, FailureFacts facts) {
  peer.is_lost = true;
  facts.ranks = {peer.rank};
  facts.host = HostName();
  facts.pid = peer.pid;
  if (describe_last_) facts.last = describe_last_(peer.rank, &facts.last_age_ns);
  std::string text = RankWithProcess(peer.rank, facts) + " " + why;
  if (!facts.last.empty()) {
    text += "; its last operation: " + facts.last + ", " + InSeconds(facts.last_age_ns) + " before";
  }
  facts.cause = text;
  table_.Note(Status(Code::kUnavailable, text, std::move(facts)));
}

void PeerWatch::Beat() {
  if (mine_ == nullptr) return;
  mine_->thread.store(static_cast<int32_t>(syscall(SYS_gettid)), std::memory_order_relaxed);
  const uint32_t beats = mine_->beats.load(std::memory_order_relaxed) + 1;
  mine_->beats.store(beats == 0 ? 1 : beats, std::memory_order_release);
}

void PeerWatch::EndPulse() {
  if (mine_ != nullptr) mine_->beats.store(0, std::memory_order_release);
}

void PeerWatch::Report(std::span<const std::byte> failure) {
  if (mine_ == nullptr || mine_->failed.load() != 0) return;
  failure = failure.first(std::min(failure.size(), sizeof mine_->failure));
  std::ranges::copy(failure, mine_->failure);
  mine_->failed.store(static_cast<uint32_t>(failure.size()), std::memory_order_release);
}

// @return whether the peer owes a beat. A starved thread is in state R, a debugger's in state t.
bool PeerWatch::CheckPulse(Peer& peer, int64_t period_ns) {
  if (peer.pulse == nullptr || peer.file < 0 || peer.is_lost) return false;
  if (const uint32_t bytes = peer.pulse->failed.load(std::memory_order_acquire); bytes != 0) {
    peer.is_lost = true;
    table_.NoteStopped(peer.rank, false);
    table_.Hear(
        std::span(peer.pulse->failure).first(std::min<size_t>(bytes, Pulse::kFailureBytes)));
    return false;
  }
  const uint32_t beats = peer.pulse->beats.load(std::memory_order_acquire);
  const bool is_silent = beats != 0 && beats == peer.beats;
  peer.beats = beats;
  if (patience_ns_ == 0) return false;
  if (!is_silent) {
    if (peer.silent_ns > 0) table_.NoteStopped(peer.rank, false);
    return false;
  }
  peer.silent_ns += period_ns;
  if (peer.silent_ns < patience_ns_ / 2) return true;
  const char state = StateOfThread(peer.pid, peer.pulse->thread.load(std::memory_order_relaxed));
  table_.NoteStopped(peer.rank, state == 'T');
  if (peer.silent_ns < patience_ns_) return true;
  const std::string since = "; it has not run for " + InSeconds(peer.silent_ns);
  if (state == 'T') {
    Lose(peer, "is stopped (SIGSTOP or Ctrl-Z)" + since, {.kind = FailureKind::kStopped});
  }
  const bool is_frozen = state == 'S' || state == 'D';
  if (is_frozen && peer.silent_ns >= kFrozenFactor * patience_ns_) {
    Lose(peer, std::string("is frozen (state ") + state + ")" + since,
         {.kind = FailureKind::kFrozen});
  }
  return state == 'T' || is_frozen;
}

void PeerWatch::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof(one));  // it cannot be full: nobody writes more than once
}

}  // namespace farandole
