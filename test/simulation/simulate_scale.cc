// How the negotiation scales, as a table in Markdown: simulate_scale TENSORS RANKS ..., or, with a
// process set for each RANKS_PER_SET ranks, simulate_scale --sets RANKS_PER_SET TENSORS RANKS ...
//
// The time of the longest path of a round in which all tensors become ready everywhere at once;
// docs/scaling.md explains the columns.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "coordinator/control/rendezvous.h"
#include "test/simulation/scaled_job.h"

namespace {

using farandole::simulation::ScaledJob;
using farandole::simulation::ScaledJobOptions;
using farandole::simulation::ScaledRound;
using farandole::simulation::StepCosts;

constexpr int kCalibrationRounds = 40;

double At(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

// In a job with the same numbers of children at rank 0 and at one other rank, whose tables stay in
// the cache.
StepCosts Calibrate(int ranks, int tensors) {
  const ScaledJobOptions whole;
  const int enough = (1 + 2 * farandole::kFanOut) * whole.ranks_per_host;
  ScaledJob job({.ranks = std::min(ranks, enough), .tensors = tensors});
  job.WarmUp();
  return job.Calibrate(kCalibrationRounds);
}

void Print(int ranks, int tensors) {
  const StepCosts costs = Calibrate(ranks, tensors);
  ScaledJob job({.ranks = ranks, .tensors = tensors});
  job.WarmUp();
  const ScaledRound quiet = job.Run(&costs);
  std::vector<double> noisy_us;
  const int rounds = std::clamp(40'000 / tensors, 10, 200);
  for (int i = 0; i < rounds; ++i) noisy_us.push_back(job.Run(&costs, true).ns / 1e3);
  std::printf("| %d | %d | %.1f | %.0f | %.0f | %.1f | %.0f |\n", ranks, tensors, quiet.ns / 1e3,
              At(noisy_us, 0.5), At(noisy_us, 0.99),
              static_cast<double>(quiet.messages) / std::max(1, job.links()),
              static_cast<double>(quiet.bytes) / ranks);
  std::fflush(stdout);
}

void PrintSets(int ranks, int tensors, int ranks_per_set) {
  ScaledJob job({.ranks = ranks, .tensors = tensors, .ranks_per_set = ranks_per_set});
  job.WarmUp();
  ScaledRound best = job.Run(nullptr);
  for (int i = 0; i < 20; ++i) {
    const ScaledRound round = job.Run(nullptr);
    if (round.ns < best.ns) best = round;
  }
  std::printf("| %d | %d | %d | %.1f | %d |\n", ranks, ranks / ranks_per_set, tensors,
              best.ns / 1e3, best.most_on_a_link);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> numbers;
  const bool sets = argc > 4 && std::strcmp(argv[1], "--sets") == 0;
  for (int i = sets ? 3 : 1; i < argc; ++i) numbers.push_back(std::atoi(argv[i]));
  if (numbers.size() < 2 || *std::min_element(numbers.begin(), numbers.end()) < 1) {
    std::fprintf(stderr, "usage: simulate_scale [--sets RANKS_PER_SET] TENSORS RANKS ...\n");
    return 2;
  }
  if (sets) {
    std::printf(
        "| ranks | sets | tensors of a set | us | messages a link |\n|---|---|---|---|---|\n");
    for (size_t i = 1; i < numbers.size(); ++i) {
      PrintSets(numbers[i], numbers.front(), std::atoi(argv[2]));
    }
    return 0;
  }
  std::printf(
      "| ranks | tensors | quiet us | noisy p50 us | noisy p99 us | messages a link | bytes a rank "
      "|\n|---|---|---|---|---|---|---|\n");
  for (size_t i = 1; i < numbers.size(); ++i) Print(numbers[i], numbers.front());
}
