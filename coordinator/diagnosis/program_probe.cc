#include "coordinator/diagnosis/program_probe.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace farandole {
namespace {

constexpr int64_t kLockNs = 300 * kNsPerMs;   // the interpreter's lock is got within, or never
constexpr int64_t kFreshNs = 500 * kNsPerMs;  // queries about several keys come together

std::atomic<DescribeProgram> described_by{nullptr};
std::atomic<int> calls_in_flight{0};  // in flight

/// The state of the main thread as the kernel gives it, in words.
std::string MainThreadState() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  const char state = name_end + 2 < line.size() ? line[name_end + 2] : '?';
  if (state == 'R') return "; its main thread runs";
  if (state == 'D') return "; its main thread waits for a disk or a device";
  return state == 'S' ? "; its main thread sleeps" : "";
}

}  // namespace

// Whoever is in Run either sees the new one or is counted. In a forked child, where none of the
// threads is, the parent's calls do not count.
void SetDescribeProgram(DescribeProgram describe) {
  described_by.store(nullptr);
  if (describe != nullptr) calls_in_flight.store(0);
  while (calls_in_flight.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  described_by.store(describe);
}

void ProgramProbe::Run(Call& call, const std::vector<uint64_t>& threads) {
  calls_in_flight.fetch_add(1);
  call.has_begun.store(true);
  if (const DescribeProgram describe = described_by.load(); describe != nullptr) {
    describe(threads.data(), threads.size(), call.text.data(), call.text.size() - 1);
  }
  call.is_done.store(true);
  calls_in_flight.fetch_sub(1);
}

bool ProgramProbe::Ask(std::vector<uint64_t> threads, int64_t now_ns) {
  if (described_by.load() == nullptr) return false;
  const bool is_asked = call_ != nullptr && (!call_->is_done || now_ns - asked_ns_ < kFreshNs);
  if (is_asked) return true;
  const auto call = std::make_shared<Call>();
  try {
    std::thread([call, threads = std::move(threads)] { Run(*call, threads); }).detach();
  } catch (const std::system_error&) {
    return false;
  }
  call_ = call;
  asked_ns_ = now_ns;
  begun_ns_ = kNever;
  return true;
}

std::optional<Activity> ProgramProbe::Find(int64_t now_ns) {
  if (call_->is_done) {
    if (call_->text[0] == 0) return Activity{};
    return Activity{FailureKind::kBlockedInPython, call_->text.data()};
  }
  if (call_->has_begun) begun_ns_ = std::min(begun_ns_, now_ns);  // threads start late under load
  if (begun_ns_ == kNever || now_ns - begun_ns_ < kLockNs) return std::nullopt;
  return Activity{FailureKind::kBlockedInC, MainThreadState()};
}

}  // namespace farandole
