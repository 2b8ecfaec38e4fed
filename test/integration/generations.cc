// The elastic trial over the C ABI: three processes go on, generation after generation, each time
// that a fourth one is killed. generations [how many kills; or FARANDOLE_TEST_GENERATIONS]
//
// Shown: the survivors' shutdown says nothing twice; they join a generation of three at once;
// handles of the one that ended say so, also when its context is released; and memory, descriptors
// and threads stay as they are.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"

namespace {

constexpr int kSurvivors = 3;
constexpr int kWarmUp = 20;        // generations
constexpr long kMostGrown = 4096;  // KiB, after that

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%d: %s; last error: %s\n", getpid(), what, farandole_last_error());
  std::_Exit(1);
}

double NowMs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

/// What this process uses: "VmRSS" in KiB, "Threads".
long Status(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::stol(line.substr(name.size() + 1));
  }
  return -1;
}

long Descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

farandole_context* Join(int rank, int size, const std::string& folder) {
  farandole_init_options options = FARANDOLE_INIT_OPTIONS;
  const std::string address = "file://" + folder;
  (void)mkdir(folder.c_str(), 0700);  // whoever is first
  options.rank = rank;
  options.size = size;
  options.address = address.c_str();
  farandole_context* context = nullptr;
  Require(farandole_init(&options, &context) == FARANDOLE_OK, "init");
  return context;
}

/// An allreduce of a rank of ones, on a process set or 0.
struct Sum {
  Sum(farandole_context* context, uint32_t set) {
    params.struct_size = sizeof params;
    params.kind = FARANDOLE_ALLREDUCE;
    params.prescale = params.postscale = 1;
    params.root = -1;
    params.set = set;
    prepared = farandole_prepare(context, &params, "sum", &tensor, 1, &operation, &version);
  }
  /// The same as gradients of an optimizer.
  farandole_gradients* MakeGradients(farandole_context* context) const {
    farandole_gradients* made = nullptr;
    farandole_gradient_options options{};
    options.struct_size = sizeof options;
    options.prefix = "g";
    Require(
        farandole_gradients_create(context, &params, &options, &tensor, 1, &made) == FARANDOLE_OK,
        "gradients");
    return made;
  }
  int Start() { return farandole_start(operation, version, &in, &out, nullptr, nullptr, &work); }
  int Run() {
    std::fill(data, data + 256, 1.0F);
    const int code = Start();
    return code == FARANDOLE_OK ? farandole_wait(work, 60) : code;
  }
  const int64_t count = 256;
  const farandole_tensor tensor = {nullptr, FARANDOLE_FLOAT32, 1, &count};
  farandole_params params{};
  farandole_operation* operation = nullptr;
  farandole_work* work = nullptr;
  uint32_t version = 0;
  int prepared = FARANDOLE_OK;
  float data[256];
  const void* in = data;
  void* out = data;
};

uint32_t AddSet(farandole_context* context) {
  const int32_t ranks[] = {0, 1};
  farandole_work* work = nullptr;
  uint32_t set = 0;
  Require(farandole_set_add(context, ranks, 2, &work) == FARANDOLE_OK, "set_add");
  Require(farandole_wait(work, 60) == FARANDOLE_OK, "a process set");
  farandole_work_release(work);
  Require(farandole_set_find(context, ranks, 2, &set) == FARANDOLE_OK, "set_find");
  return set;
}

/// The rank that is killed, after it has taken part.
[[noreturn]] void BeKilled(const std::string& folder) {
  farandole_context* const context = Join(kSurvivors, kSurvivors + 1, folder);
  (void)AddSet(context);
  Sum sum(context, 0);
  Require(sum.Run() == FARANDOLE_OK, "the sum of the one that is killed");
  (void)std::raise(SIGKILL);
  std::_Exit(1);
}

/// A generation of four until one is killed, then one of three. @return ms from the error to its
/// sum.
double GoOn(int rank, const std::string& folder) {
  farandole_context* context = Join(rank, kSurvivors + 1, folder + "a");
  Sum lost(context, 0);
  farandole_gradients* const gradients = lost.MakeGradients(context);
  const uint32_t set = AddSet(context);
  int code = lost.Run();
  while (code == FARANDOLE_OK) {
    farandole_work_release(std::exchange(lost.work, nullptr));
    code = lost.Run();
  }
  const double lost_ms = NowMs();
  Require(code == FARANDOLE_UNAVAILABLE, "the loss");
  Require(farandole_shutdown(context) == FARANDOLE_OK, "shutdown says it again");
  farandole_release(context);
  farandole_work* none = nullptr;
  Require(farandole_start(lost.operation, lost.version, &lost.in, &lost.out, nullptr, nullptr,
                          &none) == FARANDOLE_UNAVAILABLE,
          "why the generation has ended");

  context = Join(rank, kSurvivors, folder + "b");
  Sum next(context, 0);
  Require(Sum(context, set).prepared == FARANDOLE_GENERATION_ENDED, "an old process set");
  Require(next.Run() == FARANDOLE_OK && next.data[255] == kSurvivors, "the next sum");
  const double took_ms = NowMs() - lost_ms;
  if (lost.work != nullptr) {
    Require(farandole_wait(lost.work, -1) == FARANDOLE_GENERATION_ENDED, "an old work");
    farandole_work_release(lost.work);
  }
  Require(lost.Start() == FARANDOLE_GENERATION_ENDED, "an old operation");
  Require(std::strstr(farandole_last_error(), "has begun generation") != nullptr, "what is said");
  farandole_operation_release(lost.operation);
  Require(farandole_gradients_mark(gradients, 0, lost.in, lost.out, FARANDOLE_PRESENT, nullptr) ==
              FARANDOLE_GENERATION_ENDED,
          "old gradients");
  farandole_gradients_release(gradients);
  farandole_work_release(next.work);
  farandole_operation_release(next.operation);
  Require(farandole_shutdown(context) == FARANDOLE_OK, "shutdown");
  farandole_release(context);
  return took_ms;
}

[[noreturn]] void Survive(int rank, int count, const std::string& folder) {
  std::vector<double> took_ms;
  long before[3] = {};
  for (int n = 0; n < count; ++n) {
    if (n == std::min(kWarmUp, count / 2)) {
      before[0] = Status("VmRSS"), before[1] = Descriptors(), before[2] = Status("Threads");
    }
    took_ms.push_back(GoOn(rank, folder + "/" + std::to_string(n)));
  }
  const long after[3] = {Status("VmRSS"), Descriptors(), Status("Threads")};
  std::sort(took_ms.begin(), took_ms.end());
  std::printf(
      "rank %d: %d losses; to the next sum %.1f ms, at most %.1f; KiB %ld to %ld, "
      "descriptors %ld to %ld, threads %ld to %ld\n",
      rank, count, took_ms[took_ms.size() / 2], took_ms.back(), before[0], after[0], before[1],
      after[1], before[2], after[2]);
  Require(after[1] <= before[1] && after[2] <= before[2], "descriptors and threads");
  Require(count <= 2 * kWarmUp || after[0] <= before[0] + kMostGrown, "memory");
  std::fflush(stdout);
  std::_Exit(0);
}

pid_t Fork() {
  std::fflush(nullptr);
  return fork();
}

int StatusOf(pid_t process) {
  int status = 0;
  (void)waitpid(process, &status, 0);
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  const char* const asked = argc > 1 ? argv[1] : std::getenv("FARANDOLE_TEST_GENERATIONS");
  const int count = asked != nullptr ? std::atoi(asked) : 6;
  char name[] = "/tmp/farandole_generations_XXXXXX";
  if (mkdtemp(name) == nullptr) return 1;
  std::vector<pid_t> survivors;
  for (int rank = 0; rank < kSurvivors; ++rank) {
    const pid_t process = Fork();
    if (process == 0) Survive(rank, count, name);
    survivors.push_back(process);
  }
  int failures = 0;
  for (int n = 0; n < count && failures == 0; ++n) {
    const pid_t process = Fork();
    if (process == 0) BeKilled(std::string(name) + "/" + std::to_string(n) + "a");
    const int status = StatusOf(process);
    failures += !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL;
  }
  for (const pid_t process : survivors) {
    if (failures != 0) (void)kill(process, SIGKILL);
    failures += StatusOf(process) != 0;
  }
  std::filesystem::remove_all(name);
  return failures == 0 ? 0 : 1;
}
