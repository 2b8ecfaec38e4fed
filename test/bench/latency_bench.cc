// Measures small collectives from call to result, over whatever the job runs on, what it costs to
// start one, and an idle rank's processor time. Run as: mpirun -np 2 --bind-to core latency_bench
// [ROUNDS], or alone.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
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

// An allreduce of `count` floats; a barrier for 0.
farandole_operation* Prepare(farandole_context* context, const char* name, int64_t count) {
  farandole_params params{};
  params.struct_size = sizeof(params);
  params.kind = count > 0 ? FARANDOLE_ALLREDUCE : FARANDOLE_BARRIER;
  params.op = FARANDOLE_SUM;
  params.prescale = params.postscale = 1.0;
  params.root = -1;
  const farandole_tensor tensor{nullptr, FARANDOLE_FLOAT32, 1, &count};
  farandole_operation* operation = nullptr;
  Require(farandole_prepare(context, &params, name, &tensor, count > 0, &operation, nullptr));
  return operation;
}

// Microseconds of each blocking call, sorted; the first tenth, the warm-up, left out.
std::vector<double> TimeBlocking(farandole_context* context, int64_t count, int rounds) {
  farandole_operation* operation = Prepare(context, count > 0 ? "allreduce" : "barrier", count);
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

// Microseconds of each call that starts one of 200 asynchronous allreduces of 256 bytes, all of
// them known from the warm-up, and those of starting 200 and waiting for all.
struct SubmitTimes {
  std::vector<double> submit;
  std::vector<double> batch;
};

SubmitTimes TimeSubmissions(farandole_context* context, int rounds) {
  constexpr int kOperations = 200;
  constexpr int64_t kCount = 64;
  std::vector<float> data(kOperations * kCount, 0.0f);
  std::vector<farandole_operation*> operations;
  for (int k = 0; k < kOperations; ++k)
    operations.push_back(Prepare(context, ("submit." + std::to_string(k)).c_str(), kCount));
  std::vector<farandole_work*> works(kOperations);
  SubmitTimes times;
  for (int i = -rounds / 10; i < rounds; ++i) {
    const int64_t begin = farandole::SteadyClock().NowNs();
    int64_t last = begin;
    for (int k = 0; k < kOperations; ++k) {
      void* out = data.data() + k * kCount;
      const void* in = out;
      Require(farandole_start(operations[static_cast<size_t>(k)], 0, &in, &out, nullptr, nullptr,
                              &works[static_cast<size_t>(k)]));
      const int64_t now = farandole::SteadyClock().NowNs();
      if (i >= 0) times.submit.push_back(static_cast<double>(now - last) / 1e3);
      last = now;
    }
    for (farandole_work* work : works) {
      Require(farandole_wait(work, 60.0));
      farandole_work_release(work);
    }
    if (i >= 0)
      times.batch.push_back(static_cast<double>(farandole::SteadyClock().NowNs() - begin) / 1e3);
  }
  std::sort(times.submit.begin(), times.submit.end());
  std::sort(times.batch.begin(), times.batch.end());
  return times;
}

double Quantile(const std::vector<double>& sorted, double q) {
  return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1))];
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20'000;
  farandole_context* context = nullptr;
  Require(farandole_init(nullptr, &context));
  farandole_topology topology{};
  Require(farandole_get_topology(context, &topology));
  const std::vector<double> us = TimeBlocking(context, 1, rounds);
  const std::vector<double> barrier_us = TimeBlocking(context, 0, rounds);
  const SubmitTimes times = TimeSubmissions(context, std::max(rounds / 100, 1));
  const double before = ProcessorSeconds();
  std::this_thread::sleep_for(std::chrono::seconds(kIdleSeconds));
  const double idle = (ProcessorSeconds() - before) / kIdleSeconds;
  std::printf(
      "rank %d of %d: 4-byte allreduce p50 %.1f us, p90 %.1f us, p99 %.1f us; barrier p50 %.1f us; "
      "submit p50 %.2f us, "
      "p90 "
      "%.2f us; 200 x 256 bytes p50 %.0f us, p90 %.0f us; idle %.2f %% of a core\n",
      topology.rank, topology.size, Quantile(us, 0.5), Quantile(us, 0.9), Quantile(us, 0.99),
      Quantile(barrier_us, 0.5), Quantile(times.submit, 0.5), Quantile(times.submit, 0.9),
      Quantile(times.batch, 0.5), Quantile(times.batch, 0.9), 100 * idle);
  Require(farandole_shutdown(context));
  farandole_release(context);
  return 0;
}
