// The elastic trial over the C ABI: four processes go on, generation after generation, as some are
// killed, stopped, leave or die while the others recover, and new ones take their places.
// generations [how many losses; or FARANDOLE_TEST_GENERATIONS [how many disturbances [seed]]]
//
// Shown: whoever is lost, rank 0 too, the others' next sum is that of those who are left; handles
// of the generation that ended say so; who was stopped is told later; and memory, descriptors and
// threads stay as they are. Disturbances hit any processes at any point of a recovery, newcomers in
// their join as well: those that may go on do, and nobody waits for ever.
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"

namespace {

constexpr int kRanks = 4;
constexpr long kMostGrown = 4096;  // KiB, in a longer run
constexpr int kWarm = 60;          // losses
constexpr int kHalted = 75;
constexpr double kPatienceMs = 60'000;
constexpr double kSoonMs = 20'000;
constexpr unsigned kSilentMs = 1000;  // FARANDOLE_LIVENESS_TIMEOUT_S of disturbed jobs

double NowMs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

/// What the parent and the processes of one job see of each other. A process has a place of its
/// own, which another one takes once it has ended.
struct Place {
  std::atomic<int> rank, size;
  std::atomic<uint64_t> generation;
  std::atomic<double> first_sum_ms;  // of the generation
  std::atomic<bool> leaves;          // it is to leave
  std::atomic<long> use[3];          // KiB, descriptors, threads
};
struct Board {
  std::array<Place, kRanks> places;
  std::atomic<bool> ends;
};
Board* board = nullptr;
std::string folder;

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%d: %s; last error: %s\n", getpid(), what, farandole_last_error());
  std::_Exit(1);
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

// --- A process of the job ---

/// An allreduce of a number of floats, on a process set or 0.
struct Sum {
  Sum(farandole_context* context, uint32_t set) {
    params.struct_size = sizeof params;
    params.kind = FARANDOLE_ALLREDUCE;
    params.prescale = params.postscale = 1;
    params.root = -1;
    params.set = set;
    prepared = farandole_prepare(context, &params, "sum", &tensor, 1, &operation, &version);
  }
  ~Sum() {
    farandole_work_release(work);
    farandole_operation_release(operation);
  }
  /// The same as gradients of an optimizer.
  farandole_gradients* MakeGradients(farandole_context* context) const {
    farandole_gradients* made = nullptr;
    farandole_gradient_options options{};
    options.struct_size = sizeof options;
    options.prefix = "g";
    (void)farandole_gradients_create(context, &params, &options, &tensor, 1, &made);
    return made;
  }
  int Start() { return farandole_start(operation, version, &in, &out, nullptr, nullptr, &work); }
  int Run(float is_due) {
    farandole_work_release(std::exchange(work, nullptr));
    std::fill(data, data + 256, 1.0F);
    data[0] = is_due;
    code = operation == nullptr ? prepared : Start();
    if (code == FARANDOLE_OK) code = farandole_wait(work, 60);
    return code;
  }
  const int64_t count = 256;
  const farandole_tensor tensor = {nullptr, FARANDOLE_FLOAT32, 1, &count};
  farandole_params params{};
  farandole_operation* operation = nullptr;
  farandole_work* work = nullptr;
  uint32_t version = 0;
  int prepared = FARANDOLE_OK;
  int code = FARANDOLE_OK;
  float data[256];
  const void* in = data;
  void* out = data;
};

uint32_t AddSet(farandole_context* context) {
  const int32_t ranks[] = {0};
  farandole_work* work = nullptr;
  uint32_t set = 0;
  const bool is_added = farandole_set_add(context, ranks, 1, &work) == FARANDOLE_OK &&
                        farandole_wait(work, 60) == FARANDOLE_OK;
  farandole_work_release(work);
  if (is_added) (void)farandole_set_find(context, ranks, 1, &set);
  return set;
}

/// Others read it while they begin.
void WriteMembers(const farandole_context* context) {
  const char* members = "";
  Require(farandole_members(context, -1, &members) == FARANDOLE_OK, "members");
  const std::string name = folder + "/members";
  std::ofstream(name + std::to_string(getpid())) << members;
  (void)std::rename((name + std::to_string(getpid())).c_str(), name.c_str());
}

farandole_context* Join(int rank, bool is_new) {
  farandole_init_options options = FARANDOLE_INIT_OPTIONS;
  const std::string address = "file://" + folder;
  std::string members;
  options.is_elastic = 1;
  if (is_new) {
    std::getline(std::ifstream(folder + "/members"), members);
    options.members = members.c_str();
  } else {
    options.rank = rank;
    options.size = kRanks;
    options.address = address.c_str();
  }
  farandole_context* context = nullptr;
  Require(farandole_init(&options, &context) == FARANDOLE_OK, "init");
  return context;
}

/// The next generation; a process that must not go on ends here.
farandole_context* GoOn(farandole_context* ended) {
  farandole_context* next = nullptr;
  const farandole_reinit_options slices = {sizeof slices, 0.02};
  int code = FARANDOLE_PENDING;
  while (code == FARANDOLE_PENDING) code = farandole_reinit(ended, &slices, &next);
  if (code == FARANDOLE_HALTED) {
    std::fprintf(stderr, "%d: halted: %s\n", getpid(), farandole_last_error());
    farandole_release(ended);
    std::_Exit(kHalted);
  }
  Require(code == FARANDOLE_OK, "reinit");
  farandole_release(ended);
  return next;
}

void CheckEnded(Sum& old, farandole_gradients* gradients, uint32_t set,
                farandole_context* context) {
  if (set != 0)
    Require(Sum(context, set).prepared == FARANDOLE_GENERATION_ENDED, "an old process set");
  if (old.work != nullptr && old.code != FARANDOLE_OK)
    Require(farandole_wait(old.work, -1) == FARANDOLE_GENERATION_ENDED, "an old work");
  farandole_work_release(std::exchange(old.work, nullptr));
  // A generation may have ended before anything of it was made.
  if (old.operation == nullptr || gradients == nullptr) return;
  Require(old.Start() == FARANDOLE_GENERATION_ENDED, "an old operation");
  Require(std::strstr(farandole_last_error(), "has begun generation") != nullptr, "what is said");
  Require(farandole_gradients_mark(gradients, 0, old.in, old.out, FARANDOLE_PRESENT, nullptr) ==
              FARANDOLE_GENERATION_ENDED,
          "old gradients");
}

/// Sums until the generation ends, or its members let somebody in. @return whether it goes on.
bool SumUp(farandole_context* context, Place& place, Sum& sum, int size) {
  for (bool is_first = true;; is_first = false) {
    if (place.leaves.load()) return false;
    int is_due = 0;
    Require(farandole_change_is_due(context, &is_due) == FARANDOLE_OK, "change_is_due");
    const int code = sum.Run(is_due != 0 ? 1.0F : 0.0F);
    if (code != FARANDOLE_OK) {
      Require(code == FARANDOLE_UNAVAILABLE || code == FARANDOLE_ABORTED, "how it ends");
      return true;
    }
    Require(sum.data[255] == static_cast<float>(size), "the sum");
    if (is_first) place.first_sum_ms.store(NowMs());
    if (is_first && size == kRanks && place.rank.load() == 0) {
      place.use[0].store(Status("VmRSS"));
      place.use[1].store(Descriptors());
      place.use[2].store(Status("Threads"));
    }
    if (sum.data[0] > 0) return true;
    usleep(1000);
  }
}

[[noreturn]] void BeMember(int at, bool is_new) {
  Place& place = board->places[static_cast<size_t>(at)];
  farandole_context* context = Join(at, is_new);
  for (;;) {
    farandole_topology topology{};
    uint64_t generation = 0;
    Require(farandole_get_topology(context, &topology) == FARANDOLE_OK, "topology");
    Require(farandole_generation_number(context, &generation) == FARANDOLE_OK, "generation");
    WriteMembers(context);
    place.first_sum_ms.store(0);
    place.rank.store(topology.rank);
    place.size.store(topology.size);
    place.generation.store(generation);
    auto sum = std::make_unique<Sum>(context, 0);
    farandole_gradients* const gradients = sum->MakeGradients(context);
    const uint32_t set = AddSet(context);
    if (!SumUp(context, place, *sum, topology.size)) break;
    context = GoOn(context);
    CheckEnded(*sum, gradients, set, context);
    farandole_gradients_release(gradients);
    sum.reset();
  }
  Require(farandole_shutdown(context) == FARANDOLE_OK, "shutdown");
  farandole_release(context);
  std::_Exit(0);
}

// --- The parent ---

struct Job {
  std::array<pid_t, kRanks> processes{};

  void Begin(int at, bool is_new) {
    Place& place = board->places[static_cast<size_t>(at)];
    place.generation.store(0);
    place.leaves.store(false);
    place.use[0].store(0);
    std::fflush(nullptr);
    processes[static_cast<size_t>(at)] = fork();
    if (processes[static_cast<size_t>(at)] == 0) BeMember(at, is_new);
  }
  static void Await(const char* what, const std::function<bool()>& holds) {
    const double until_ms = NowMs() + kPatienceMs;
    while (!holds()) {
      if (NowMs() > until_ms) {
        for (int status = 0, pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
          std::fprintf(stderr, "%d ended: %d\n", pid, status);
        std::fprintf(stderr, "not within %.0f s: %s\n", kPatienceMs / 1000, what);
        std::exit(1);
      }
      usleep(500);
    }
  }
  /// All of these places have summed up in one generation, which is newer.
  static bool IsTogether(const std::vector<int>& places, uint64_t newer_than) {
    const Place& first = board->places[static_cast<size_t>(places.front())];
    return std::ranges::all_of(places, [&](int at) {
      const Place& place = board->places[static_cast<size_t>(at)];
      return place.generation.load() == first.generation.load() &&
             place.generation.load() > newer_than && place.first_sum_ms.load() > 0 &&
             place.size.load() == static_cast<int>(places.size());
    });
  }
  /// @return its number.
  static uint64_t AwaitGeneration(const std::vector<int>& places, uint64_t newer_than) {
    Await("a generation", [&] { return IsTogether(places, newer_than); });
    return board->places[static_cast<size_t>(places.front())].generation.load();
  }
  int PlaceOf(int rank) const {
    for (int at = 0; at < kRanks; ++at) {
      if (board->places[static_cast<size_t>(at)].rank.load() == rank) return at;
    }
    return 0;
  }
  void Kill(int at, int signal) const { (void)kill(processes[static_cast<size_t>(at)], signal); }
  /// Its exit code if it has ended, else -1.
  int Ended(int at) const {
    int status = 0;
    if (waitpid(processes[static_cast<size_t>(at)], &status, WNOHANG) <= 0) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  int Reap(int at) const {
    int status = 0;
    (void)waitpid(processes[static_cast<size_t>(at)], &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
};

enum class Loss { kKill, kTwo, kDuringRecovery, kLeave, kStop };
constexpr std::array<const char*, 5> kNames = {"killed", "two at once", "in recovery", "left",
                                               "stopped"};

/// @return ms from the loss to the last survivor's next sum.
double Lose(Job& job, Loss loss, int rank, int spared, uint64_t& generation) {
  std::vector<int> lost = {job.PlaceOf(rank)};
  if (loss == Loss::kTwo || loss == Loss::kDuringRecovery)
    lost.push_back(job.PlaceOf((rank + 1 + rank % 2) % kRanks));
  std::erase(lost, spared);
  if (lost.empty()) lost.push_back(job.PlaceOf((rank + 1) % kRanks));
  std::vector<int> left;
  for (int at = 0; at < kRanks; ++at) {
    if (std::ranges::find(lost, at) == lost.end()) left.push_back(at);
  }
  const double lost_ms = NowMs();
  if (std::getenv("FARANDOLE_TEST_VERBOSE") != nullptr) {
    std::printf("%s, rank %d, generation %llu\n", kNames[static_cast<size_t>(loss)], rank,
                static_cast<unsigned long long>(generation));
    std::fflush(stdout);
  }
  for (size_t i = 0; i < lost.size(); ++i) {
    if (i > 0 && loss == Loss::kDuringRecovery)
      usleep(static_cast<unsigned>(generation * 7919 % 100 * 1000));
    if (loss == Loss::kLeave) board->places[static_cast<size_t>(lost[i])].leaves.store(true);
    if (loss != Loss::kLeave) job.Kill(lost[i], loss == Loss::kStop ? SIGSTOP : SIGKILL);
  }
  generation = Job::AwaitGeneration(left, generation);
  double took_ms = 0;
  for (const int at : left)
    took_ms = std::max(took_ms, board->places[static_cast<size_t>(at)].first_sum_ms - lost_ms);
  for (const int at : lost) {
    if (loss == Loss::kStop) job.Kill(at, SIGCONT);
    const int code = job.Reap(at);
    const int expected = loss == Loss::kLeave ? 0 : loss == Loss::kStop ? kHalted : 128 + SIGKILL;
    if (code != expected) {
      std::fprintf(stderr, "%s: code %d\n", kNames[static_cast<size_t>(loss)], code);
      std::exit(1);
    }
  }
  for (const int at : lost) job.Begin(at, true);
  generation = Job::AwaitGeneration({0, 1, 2, 3}, generation);
  return took_ms;
}

/// Kills and stops one to three processes, and starts new ones, within some tens of ms; never one
/// of them. @return ms until the others have gone on; or, where those that were stopped may be
/// needed for that, until all have once these run again.
double Disturb(Job& job, std::mt19937& random, uint64_t& generation) {
  const auto draw = [&](unsigned below) { return static_cast<int>(random() % below); };
  const int spared = draw(kRanks);
  std::array<char, kRanks> state = {'.', '.', '.', '.'};  // killed, stopped, new
  std::string what;
  for (int left = 1 + draw(3); left > 0; --left) {
    const int at = (spared + 1 + draw(kRanks - 1)) % kRanks;
    char& one = state.at(static_cast<size_t>(at));
    if (one == 's') continue;
    if (one == 'k') {
      job.Begin(at, true);
      one = 'n';
    } else {
      one = one == '.' && draw(10) < 3 ? 's' : 'k';
      job.Kill(at, one == 's' ? SIGSTOP : SIGKILL);
      if (one == 'k') (void)job.Reap(at);
    }
    what += std::string(" ") + one + std::to_string(at);
    usleep(static_cast<unsigned>(draw(3) == 0 ? 0 : draw(60)) * 1000);
  }
  double from_ms = NowMs();
  std::printf("%s, spared %d, generation %llu\n", what.c_str(), spared,
              static_cast<unsigned long long>(generation));
  const auto others = std::ranges::count(state, 's');
  const bool goes_on = others == 0 || (others == 1 && std::ranges::count(state, '.') == kRanks - 1);
  std::vector<int> left;
  for (int at = 0; at < kRanks; ++at) {
    const char one = state.at(static_cast<size_t>(at));
    if (one == '.' || one == 'n' || (one == 's' && !goes_on)) left.push_back(at);
  }
  if (!goes_on) {
    usleep(kSilentMs * 1500);
    for (const int at : left) job.Kill(at, SIGCONT);
    from_ms = NowMs();
  }
  const uint64_t before = generation;
  Job::Await("a disturbed job goes on", [&] {
    std::erase_if(left, [&](int at) {
      const int code = job.Ended(at);
      if (code < 0) return false;
      if (code != kHalted || others == 0) {  // of halves that meet again either may be left out
        std::fprintf(stderr, "%d has ended with code %d\n", at, code);
        std::exit(1);
      }
      state.at(static_cast<size_t>(at)) = 'k';
      return true;
    });
    return Job::IsTogether(left, before);
  });
  const double took_ms = NowMs() - from_ms;
  Require(took_ms < kSoonMs, "they go on soon");
  for (int at = 0; at < kRanks; ++at) {
    if (state.at(static_cast<size_t>(at)) == 's') job.Kill(at, SIGCONT);
    if (state.at(static_cast<size_t>(at)) == 'k') job.Begin(at, true);
  }
  // Who was stopped for long has been left out, or will be.
  const double settled_ms = NowMs() + (others > 0 ? kSilentMs * 1.5 : 0);
  Job::Await("all are back", [&] {
    for (int at = 0; at < kRanks; ++at) {
      if (others == 0 || job.Ended(at) != kHalted) continue;
      state.at(static_cast<size_t>(at)) = 'k';
      job.Begin(at, true);
    }
    return NowMs() > settled_ms && Job::IsTogether({0, 1, 2, 3}, before);
  });
  generation = Job::AwaitGeneration({0, 1, 2, 3}, before);
  return took_ms;
}

void Print(const char* name, std::vector<double> took_ms) {
  if (took_ms.empty()) return;
  std::sort(took_ms.begin(), took_ms.end());
  std::printf("%-12s %4zu losses; ms to the next sum: p50 %.1f, p99 %.1f, max %.1f\n", name,
              took_ms.size(), took_ms[took_ms.size() / 2], took_ms[took_ms.size() * 99 / 100],
              took_ms.back());
}

int Run(int count, int disturbances, unsigned seed) {
  Job job;
  for (int at = 0; at < kRanks; ++at) job.Begin(at, false);
  uint64_t generation = Job::AwaitGeneration({0, 1, 2, 3}, 0);
  std::array<std::vector<double>, 5> took_ms;
  std::array<long, 3> before{};
  const Place& spared = board->places[kRanks - 1];  // in the second half
  for (int n = 0; n < count; ++n) {
    const bool spares = 2 * n >= count;
    const auto loss = static_cast<Loss>(n % 5 == 4 && n > 5 && n % 25 != 4 ? 0 : n % 5);
    const int rank = n / 5 % kRanks;
    took_ms[static_cast<size_t>(loss)].push_back(
        Lose(job, loss, rank, spares ? kRanks - 1 : -1, generation));
    if (spares && before[0] == 0) {
      for (size_t i = 0; i < 3; ++i) before[i] = spared.use[i].load();
    }
  }
  for (size_t i = 0; i < took_ms.size(); ++i) Print(kNames[i], took_ms[i]);
  int failures = 0;
  if (before[0] != 0) {
    const long after[3] = {spared.use[0], spared.use[1], spared.use[2]};
    std::printf("KiB %ld to %ld, descriptors %ld to %ld, threads %ld to %ld\n", before[0], after[0],
                before[1], after[1], before[2], after[2]);
    failures += after[1] > before[1] || after[2] > before[2] ||
                (count >= kWarm && after[0] > before[0] + kMostGrown);
  }
  std::mt19937 random(seed);
  std::vector<double> disturbed_ms;
  if (disturbances > 0) std::printf("seed %u\n", seed);
  for (int n = 0; n < disturbances; ++n) disturbed_ms.push_back(Disturb(job, random, generation));
  Print("disturbed", disturbed_ms);
  for (Place& place : board->places) place.leaves.store(true);
  for (int at = 0; at < kRanks; ++at) failures += job.Reap(at) != 0;
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const char* const asked = argc > 1 ? argv[1] : std::getenv("FARANDOLE_TEST_GENERATIONS");
  const int count = asked != nullptr ? std::atoi(asked) : 10;
  const int disturbances = argc > 2 ? std::atoi(argv[2]) : 0;
  const auto seed = argc > 3 ? static_cast<unsigned>(std::atol(argv[3])) : std::random_device{}();
  if (disturbances > 0) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    (void)setenv("FARANDOLE_LIVENESS_TIMEOUT_S", "1", 1);
  }
  char name[] = "/tmp/farandole_generations_XXXXXX";
  if (mkdtemp(name) == nullptr) return 1;
  folder = name;
  const std::string key = folder + "/key";
  std::ofstream(key) << std::string(32, 'k');
  (void)chmod(key.c_str(), 0600);
  (void)setenv("FARANDOLE_KEY_FILE", key.c_str(), 1);
  void* const memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  board = new (memory) Board();
  const int code = Run(count, disturbances, seed);
  std::filesystem::remove_all(name);
  return code;
}
