#include "core/flight_recorder.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "core/futex.h"
#include "core/timeline.h"

namespace farandole {
namespace {

constexpr int64_t kFinishTimeoutNs = 5 * kNsPerSecond;  // for a file system to answer
constexpr int64_t kStopTimeoutNs = kNsPerSecond;
constexpr std::string_view kCut = "..";

constexpr std::string_view kStepNames[] = {"none", "submitted", "stalled", "failed"};

using Words = std::array<uint64_t, FlightRing::kWords>;

uint64_t WhatItIs(const FlightFacts& event) {
  return uint64_t{event.set} << 32 | static_cast<uint64_t>(event.step) << 16 |
         static_cast<uint64_t>(event.kind) << 8 | static_cast<uint64_t>(event.dtype);
}

uint64_t CallAndCode(uint64_t call, Code code) { return call << 32 | static_cast<uint64_t>(code); }

/// Writes the words that hold the name, and one 0 after it where there is room.
void StoreName(FlightRing::Word* words, std::string_view name) {
  char cut[FlightRing::kNameBytes];
  if (name.size() > sizeof cut) {
    const size_t kept = sizeof cut - kCut.size();
    kCut.copy(cut, kCut.size());
    name.copy(cut + kCut.size(), kept, name.size() - kept);
    name = {cut, sizeof cut};
  }
  for (size_t at = 0; at < FlightRing::kNameBytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    const size_t bytes = std::min(name.size() - at, sizeof word);
    std::memcpy(&word, name.data() + at, bytes);
    words[at / sizeof word].store(word, std::memory_order_release);
    if (bytes < sizeof word) break;
  }
}

FlightEvent Unpack(const Words& words) {
  FlightEvent event;
  event.at_ns = static_cast<int64_t>(words[1]);
  event.decided_ns = static_cast<int64_t>(words[2]);
  event.finished_ns = static_cast<int64_t>(words[3]);
  event.bytes = static_cast<int64_t>(words[4]);
  event.set = static_cast<uint32_t>(words[5] >> 32);
  event.step = static_cast<FlightStep>(words[5] >> 16 & 0xff);
  event.kind = static_cast<OpKind>(words[5] >> 8 & 0xff);
  event.dtype = static_cast<DType>(words[5] & 0xff);
  event.call = static_cast<uint32_t>(words[6] >> 32);
  event.code = static_cast<Code>(words[6] & 0xff);
  const auto* const text = reinterpret_cast<const char*>(&words[FlightRing::kNameWord]);
  event.name.assign(text, strnlen(text, FlightRing::kNameBytes));
  return event;
}

// Event number `number`, from 1. Each load comes before those after it, so the number is the same
// at the end only if no word is of a later event. @return nullopt: torn, or overwritten.
std::optional<FlightEvent> ReadEvent(const FlightRing& ring, uint64_t number) {
  const auto& slot = ring.events[(number - 1) % FlightRing::kEvents];
  Words words{};
  for (size_t i = 0; i < words.size(); ++i) words[i] = slot[i].load(std::memory_order_acquire);
  if (words[0] != number || slot[0].load(std::memory_order_relaxed) != number) return std::nullopt;
  return Unpack(words);
}

uint64_t OldestOf(uint64_t written) {
  return written < FlightRing::kEvents ? 1 : written - FlightRing::kEvents + 1;
}

std::string TextOf(const FlightEvent& event) {
  return std::string(Name(event.kind)) + " \"" + event.name + "\"";
}

// A cut name may begin or end inside a character, and the file can be read in any case.
std::string Quoted(std::string_view text) { return QuotedForJson(text, true); }

void WriteEvent(std::ostream& out, const FlightEvent& event, int64_t wall_ns) {
  const auto time = [wall_ns](int64_t at_ns) { return at_ns == 0 ? 0 : at_ns + wall_ns; };
  out << R"({"step": )" << Quoted(NameAt(kStepNames, event.step, "unknown")) << R"(, "kind": )"
      << Quoted(Name(event.kind)) << R"(, "name": )" << Quoted(event.name) << R"(, "set": )"
      << event.set << R"(, "call": )" << event.call << R"(, "bytes": )" << event.bytes
      << R"(, "dtype": )" << Quoted(Name(event.dtype)) << R"(, "code": )"
      << Quoted(CodeName(event.code)) << R"(, "at_ns": )" << time(event.at_ns)
      << R"(, "decided_ns": )" << time(event.decided_ns) << R"(, "finished_ns": )"
      << time(event.finished_ns) << "}";
}

void WriteError(std::ostream& out, const Status& error) {
  if (error.ok()) {
    out << "null";
    return;
  }
  const FailureFacts& facts = error.facts();
  out << R"({"message": )" << Quoted(error.message()) << R"(, "code": )"
      << Quoted(CodeName(error.code())) << R"(, "cause": )" << Quoted(facts.cause)
      << R"(, "kind": )" << Quoted(FailureKindName(facts.kind)) << R"(, "number": )" << facts.number
      << R"(, "host": )" << Quoted(facts.host) << R"(, "pid": )" << facts.pid << R"(, "tensor": )"
      << Quoted(facts.tensor) << R"(, "last": )" << Quoted(facts.last) << R"(, "last_age_ns": )"
      << facts.last_age_ns << R"(, "ranks": [)";
  const char* between = "";
  for (const int32_t rank : facts.ranks) out << std::exchange(between, ", ") << rank;
  out << "]}";
}

/// Whether the process still writes its files itself: it has neither ended nor been stopped.
bool CanWrite(uint64_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  return std::strchr("ZXTt", line[name_end + 2]) == nullptr;
}

bool WriteAll(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(file, text.data(), text.size());
    if (count < 0) return false;  // no signal interrupts the thread that writes
    text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

// Grows with every request and every signal, and wakes the threads of all ranks of the process.
std::atomic<uint32_t> news{0};
std::atomic<uint32_t> signals{0};

void Announce() {
  news.fetch_add(1);
  FutexWake(news, INT_MAX);
}

void OnSignal(int) {
  const int error = errno;
  signals.fetch_add(1);
  Announce();
  errno = error;
}

void UseSignal() {
  struct sigaction present {};
  if (sigaction(SIGUSR1, nullptr, &present) != 0) return;
  if ((present.sa_flags & SA_SIGINFO) != 0 || present.sa_handler != SIG_DFL) return;
  struct sigaction wanted {};
  wanted.sa_handler = OnSignal;
  wanted.sa_flags = SA_RESTART;
  (void)sigaction(SIGUSR1, &wanted, nullptr);  // it cannot fail: signal and handler are valid
}

/// Makes a folder, for this user alone, where it does not exist yet. Those above it only after a
/// "/./": above a folder that a user gave may be a file system that is not mounted.
void MakeFolder(const std::string& path) {
  const size_t kept = path.find("/./");
  for (size_t end = kept == std::string::npos ? path.size() : kept + 2; end != std::string::npos;) {
    end = path.find('/', end + 1);
    (void)mkdir(path.substr(0, end).c_str(), 0700);  // who then opens a file there finds out
  }
}

int64_t WallNs() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

std::vector<FlightEvent> ReadFlight(const FlightRing& ring) {
  const uint64_t written = ring.written.load(std::memory_order_acquire);
  std::vector<FlightEvent> events;
  for (uint64_t number = OldestOf(written); number <= written; ++number) {
    if (std::optional<FlightEvent> event = ReadEvent(ring, number)) events.push_back(*event);
  }
  return events;
}

std::string DescribeLast(const FlightRing& ring, int64_t now_ns, int64_t* age_ns) {
  *age_ns = -1;
  const uint64_t written = ring.written.load(std::memory_order_acquire);
  for (uint64_t number = written; number >= OldestOf(written); --number) {
    const std::optional<FlightEvent> event = ReadEvent(ring, number);
    if (!event || event->step != FlightStep::kSubmitted || event->kind == OpKind::kStep) continue;
    *age_ns = std::max<int64_t>(now_ns - event->at_ns, 0);
    return TextOf(*event);
  }
  return {};
}

/// What the recorder and the thread that writes files both use.
struct FlightRecorder::Shared {
  Options options;
  std::mutex mutex;  // of those below
  std::condition_variable written;
  std::string reason;  // of the file that is wanted; empty: none is
  Status error;
  bool is_writing = false;
  bool is_stopping = false;
  bool has_ended = false;

  std::string PathOf(int rank) const {
    const std::string job = options.job.empty() ? std::to_string(getpid()) : options.job;
    std::string name = "farandole-" + job + "-rank" + std::to_string(rank) + ".json";
    std::ranges::replace_if(
        name, [](char c) { return c == '/' || c == ' '; }, '_');
    return options.folder + "/" + name;
  }

  std::string ContentOf(const FlightRing& ring, const std::string& why,
                        const Status& failure) const {
    const uint64_t place = ring.place.load();
    const auto rank = static_cast<int>(place >> 32);
    const auto wall_ns = static_cast<int64_t>(ring.wall_ns.load());
    std::ostringstream out;
    out << R"({"rank": )" << rank << R"(, "size": )" << (place & UINT32_MAX) << R"(, "host": )"
        << Quoted(options.host) << R"(, "pid": )" << ring.process.load() << R"(, "job": )"
        << Quoted(options.job) << R"(, "version": )" << Quoted(options.version) << R"(, "reason": )"
        << Quoted(why) << R"(, "written_by": )" << options.rank << R"(, "written_ns": )" << WallNs()
        << R"(, "wall_offset_ns": )" << wall_ns << ",\n \"error\": ";
    WriteError(out, failure);
    out << ",\n \"events\": [";
    const char* between = "\n  ";
    for (const FlightEvent& event : ReadFlight(ring)) {
      WriteEvent(out << std::exchange(between, ",\n  "), event, wall_ns);
    }
    out << "]}\n";
    return std::move(out).str();
  }

  // First under a name that did not exist: who reads the folder finds whole files only, and in a
  // folder that others may write to nothing is written through a link of theirs.
  void WriteFile(const FlightRing& ring, const std::string& why, const Status& failure) const {
    const std::string path = PathOf(static_cast<int>(ring.place.load() >> 32));
    std::string partial = path + ".XXXXXX";
    const int file = mkostemp(partial.data(), O_CLOEXEC);  // O_EXCL, mode 0600
    if (file < 0) return;
    const bool is_whole = WriteAll(file, ContentOf(ring, why, failure));
    if (close(file) != 0 || !is_whole || std::rename(partial.c_str(), path.c_str()) != 0) {
      (void)std::remove(partial.c_str());  // a full disk: nothing is better than a half
    }
  }

  // The first that can also writes the files of those who cannot, unless they wrote their final
  // error themselves.
  void WriteFiles(const std::string& why, const Status& failure) const {
    const std::vector<FlightRing*>& rings = options.rings;
    MakeFolder(options.folder);
    WriteFile(*rings[options.mine], why, failure);
    std::vector<const FlightRing*> silent;
    for (size_t i = 0; i < rings.size(); ++i) {
      if (i == options.mine || rings[i]->magic.load() != FlightRing::kMagic) continue;
      if (!CanWrite(rings[i]->process.load())) {
        silent.push_back(rings[i]);
      } else if (i < options.mine) {
        return;
      }
    }
    for (const FlightRing* ring : silent) {
      const std::string path = PathOf(static_cast<int>(ring->place.load() >> 32));
      const std::vector<FlightEvent> events = ReadFlight(*ring);
      const bool has_failed = std::ranges::any_of(
          events, [](const FlightEvent& event) { return event.step == FlightStep::kFailed; });
      if (has_failed && access(path.c_str(), F_OK) == 0) continue;
      WriteFile(*ring, "it cannot write it itself", {});
    }
  }
};

Result<std::unique_ptr<FlightRecorder>> FlightRecorder::Create(Options options) {
  int file = -1;
  if (options.rings.empty()) {
    // A file, as `farandole ps` reads it through /proc. Beyond such a limit is a signal.
    rlimit limit{};
    const bool is_limited =
        getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur < sizeof(FlightRing);
    file = is_limited ? -1 : memfd_create("flight-farandole", MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, sizeof(FlightRing)) != 0) close(std::exchange(file, -1));
    const int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void* const memory = mmap(nullptr, sizeof(FlightRing), PROT_READ | PROT_WRITE, flags, file, 0);
    if (memory == MAP_FAILED) {
      if (file >= 0) close(file);
      return Unavailable(std::string("the flight recorder: no memory: ") + std::strerror(errno));
    }
    options.memory =
        std::shared_ptr<void>(memory, [](void* begin) { munmap(begin, sizeof(FlightRing)); });
    options.rings = {static_cast<FlightRing*>(memory)};
    options.mine = 0;
  }
  return std::unique_ptr<FlightRecorder>(new FlightRecorder(std::move(options), file));
}

FlightRecorder::FlightRecorder(Options options, int file)
    : file_(file), ring_(*options.rings[options.mine]), shared_(std::make_shared<Shared>()) {
  ring_.place.store(static_cast<uint64_t>(options.rank) << 32 |
                    static_cast<uint64_t>(options.size));
  ring_.process.store(static_cast<uint64_t>(getpid()));
  ring_.wall_ns.store(static_cast<uint64_t>(WallNs() - SteadyClock().NowNs()));
  ring_.magic.store(FlightRing::kMagic);
  const bool writes = !options.folder.empty();
  shared_->options = std::move(options);
  if (!writes) return;
  const uint32_t seen = signals.load();  // a later one counts, also before the thread runs
  UseSignal();
  thread_ = std::thread([shared = shared_, seen] { Write(shared, seen); });
  (void)pthread_setname_np(thread_.native_handle(), "farandole-files");  // for top and gdb
}

FlightRecorder::~FlightRecorder() {
  FinishDumps();
  if (thread_.joinable()) {
    std::unique_lock lock(shared_->mutex);
    shared_->is_stopping = true;
    Announce();
    const bool has_ended = shared_->written.wait_for(lock, std::chrono::nanoseconds(kStopTimeoutNs),
                                                     [this] { return shared_->has_ended; });
    lock.unlock();
    has_ended ? thread_.join() : thread_.detach();
  }
  if (file_ >= 0) close(file_);
}

// Every store comes after those before it: once a word of the new event can be seen, the number is
// seen to be 0, or the new one.
uint64_t FlightRecorder::Record(const FlightFacts& event, std::string_view name) {
  constexpr auto kAfter = std::memory_order_release;
  auto& words = ring_.events[written_ % FlightRing::kEvents];
  const bool is_call =
      event.step == FlightStep::kSubmitted && event.set == 0 && event.kind != OpKind::kStep;
  words[0].store(0, std::memory_order_relaxed);
  words[1].store(static_cast<uint64_t>(event.at_ns), kAfter);
  words[2].store(0, kAfter);
  words[3].store(0, kAfter);
  words[4].store(static_cast<uint64_t>(event.bytes), kAfter);
  words[5].store(WhatItIs(event), kAfter);
  words[6].store(CallAndCode(is_call ? ++calls_ : 0, Code::kOk), kAfter);
  StoreName(&words[FlightRing::kNameWord], name);
  words[0].store(++written_, kAfter);
  ring_.written.store(written_, kAfter);
  return written_;
}

/// The event, unless a later one has taken its place.
FlightRing::Word* FlightRecorder::Find(uint64_t number) {
  if (number == 0 || number + FlightRing::kEvents <= written_) return nullptr;
  return ring_.events[(number - 1) % FlightRing::kEvents];
}

void FlightRecorder::NoteStep(const StepTimes& times) {
  FlightRing::Word* total = ring_.steps;
  (total++)->fetch_add(1, std::memory_order_relaxed);
  for (const auto time : kTimesOfStep)
    (total++)->fetch_add(static_cast<uint64_t>(times.*time), std::memory_order_relaxed);
}

void FlightRecorder::NoteDecided(uint64_t number, int64_t now_ns) {
  if (FlightRing::Word* const words = Find(number); words != nullptr) {
    words[2].store(static_cast<uint64_t>(now_ns), std::memory_order_release);
  }
}

void FlightRecorder::NoteFinished(uint64_t number, Code code, int64_t now_ns) {
  FlightRing::Word* const words = Find(number);
  if (words == nullptr) return;
  const uint64_t call = words[6].load(std::memory_order_relaxed) >> 32;
  words[6].store(CallAndCode(call, code), std::memory_order_release);
  words[3].store(static_cast<uint64_t>(now_ns), std::memory_order_release);
}

void FlightRecorder::Dump(const std::string& reason, const Status& error) {
  if (shared_->options.folder.empty()) return;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->reason = reason;
    if (shared_->error.ok()) shared_->error = error;
  }
  Announce();
}

void FlightRecorder::FinishDumps() {
  std::unique_lock lock(shared_->mutex);
  shared_->written.wait_for(lock, std::chrono::nanoseconds(kFinishTimeoutNs),
                            [this] { return shared_->reason.empty() && !shared_->is_writing; });
}

// The thread's. A signal may come at any time, also while a file is written.
void FlightRecorder::Write(const std::shared_ptr<Shared>& shared, uint32_t seen_signals) {
  sigset_t all;  // none is for this thread: a file that is too long is an error, and no SIGXFSZ
  sigfillset(&all);
  (void)pthread_sigmask(SIG_BLOCK, &all, nullptr);
  for (;;) {
    const uint32_t seen = news.load();
    std::unique_lock lock(shared->mutex);
    if (shared->is_stopping) {
      shared->has_ended = true;
      shared->written.notify_all();
      return;
    }
    std::string why = std::exchange(shared->reason, {});
    const uint32_t now = signals.load();
    if (why.empty() && now != seen_signals) why = "SIGUSR1";
    seen_signals = now;
    shared->is_writing = !why.empty();
    const Status failure = shared->error;
    lock.unlock();
    if (!why.empty()) shared->WriteFiles(why, failure);
    lock.lock();
    shared->is_writing = false;
    shared->written.notify_all();
    lock.unlock();
    if (why.empty()) FutexWait(news, seen, -1);
  }
}

}  // namespace farandole
