// Runs many seeds: simulate [--seeds N] [--first S] [--faults 1]

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "test/simulation/world.h"

namespace {

struct Arguments {
  uint64_t first = 0;
  uint64_t seeds = 2000;
  uint64_t faults = 0;
};

std::optional<Arguments> Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (i + 1 == argc) return std::nullopt;
    const uint64_t value = std::strtoull(argv[++i], nullptr, 10);
    if (name == "--seeds")
      arguments.seeds = value;
    else if (name == "--first")
      arguments.first = value;
    else if (name == "--faults")
      arguments.faults = value;
    else
      return std::nullopt;
  }
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  const std::optional<Arguments> arguments = Parse(argc, argv);
  if (!arguments) {
    std::fprintf(stderr, "usage: simulate [--seeds N] [--first S] [--faults 1]\n");
    return 2;
  }
  farandole::simulation::Totals totals;
  uint64_t failures = 0;
  for (uint64_t seed = arguments->first; seed < arguments->first + arguments->seeds; ++seed) {
    const auto failure = arguments->faults != 0
                             ? farandole::simulation::RunSeedWithFaults(seed, &totals)
                             : farandole::simulation::RunSeed(seed, &totals);
    if (!failure) continue;
    ++failures;
    std::printf("%s\n", failure->c_str());
  }
  std::printf(
      "%llu seeds, %llu failed; %lld submissions, %lld works, %lld skipped or set changes, "
      "%lld refused, %lld aborted, %lld joins, %lld stall reports, %lld messages, %lld bytes, %lld "
      "crashes, %lld stops, %lld ranks lost another, %lld diverged\n",
      static_cast<unsigned long long>(arguments->seeds), static_cast<unsigned long long>(failures),
      static_cast<long long>(totals.submissions), static_cast<long long>(totals.works),
      static_cast<long long>(totals.skipped), static_cast<long long>(totals.refused),
      static_cast<long long>(totals.aborted), static_cast<long long>(totals.joins),
      static_cast<long long>(totals.reports), static_cast<long long>(totals.messages),
      static_cast<long long>(totals.bytes), static_cast<long long>(totals.crashes),
      static_cast<long long>(totals.stops), static_cast<long long>(totals.lost),
      static_cast<long long>(totals.diverged));
  return failures == 0 ? 0 : 1;
}
