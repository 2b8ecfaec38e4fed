// Measures small collectives from call to result, over whatever the job runs on, and an idle rank's
// processor time. Run as: mpirun -np 2 --bind-to core latency_bench [ROUNDS], or alone.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "bindings/c/farandole.h"
#include "core/clock.h"

namespace {

constexpr int kIdleSeconds = 5;

void Require(int code) {
  if (code == FARANDOLE_OK) return;
  std::fprintf(stderr, "%s\n", farandole_last_error());
  std::exit(1);
}

double ProcessorSeconds() {
  rusage usage{};
  (void)getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

farandole_operation* Prepare(farandole_context* context, int64_t count) {
  farandole_params params{};
  params.struct_size = sizeof(params);
  params.kind = FARANDOLE_ALLREDUCE;
  params.op = FARANDOLE_SUM;
  params.prescale = params.postscale = 1.0;
  params.root = -1;
  const farandole_tensor tensor{nullptr, FARANDOLE_FLOAT32, 1, &count};
  farandole_operation* operation = nullptr;
  Require(farandole_prepare(context, &params, "latency", &tensor, 1, &operation, nullptr));
  return operation;
}

// Microseconds of each blocking call, sorted; the first tenth, the warm-up, left out.
std::vector<double> TimeAllreduce(farandole_context* context, int64_t count, int rounds) {
  farandole_operation* operation = Prepare(context, count);
  std::vector<float> data(static_cast<size_t>(count), 0.0f);
  const void* in = data.data();
  void* out = data.data();
  std::vector<double> us;
  for (int i = -rounds / 10; i < rounds; ++i) {
    const int64_t begin = farandole::SteadyClock().NowNs();
    farandole_work* work = nullptr;
    Require(farandole_run(operation, 0, &in, &out, 60.0, &work));
    if (i >= 0) us.push_back(static_cast<double>(farandole::SteadyClock().NowNs() - begin) / 1e3);
  }
  std::sort(us.begin(), us.end());
  return us;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20'000;
  farandole_context* context = nullptr;
  Require(farandole_init(&context));
  farandole_topology topology{};
  Require(farandole_get_topology(context, &topology));
  const std::vector<double> us = TimeAllreduce(context, 1, rounds);
  const auto at = [&](double q) {
    return us[static_cast<size_t>(q * static_cast<double>(rounds - 1))];
  };
  const double before = ProcessorSeconds();
  std::this_thread::sleep_for(std::chrono::seconds(kIdleSeconds));
  const double idle = (ProcessorSeconds() - before) / kIdleSeconds;
  std::printf(
      "rank %d of %d: 4-byte allreduce p50 %.1f us, p90 %.1f us, p99 %.1f us; idle %.2f %% of a "
      "core\n",
      topology.rank, topology.size, at(0.5), at(0.9), at(0.99), 100 * idle);
  Require(farandole_shutdown(context));
  farandole_release(context);
  return 0;
}
