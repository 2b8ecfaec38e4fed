// Runs many seeds: simulate [--seeds N] [--first S] [--faults 1]

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>

#include "test/simulation/world.h"

int main(int argc, char** argv) {
  std::map<std::string, uint64_t> arguments = {{"--seeds", 2000}, {"--first", 0}, {"--faults", 0}};
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc || !arguments.contains(argv[i])) {
      std::fprintf(stderr, "usage: simulate [--seeds N] [--first S] [--faults 1]\n");
      return 2;
    }
    arguments[argv[i]] = std::strtoull(argv[i + 1], nullptr, 10);
  }
  const auto run = arguments["--faults"] != 0 ? farandole::simulation::RunSeedWithFaults
                                              : farandole::simulation::RunSeed;
  farandole::simulation::Totals totals;
  unsigned long long failures = 0;
  const uint64_t first = arguments["--first"], seeds = arguments["--seeds"];
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const std::optional<std::string> failure = run(seed, &totals);
    if (!failure) continue;
    ++failures;
    std::printf("%s\n", failure->c_str());
  }
  std::printf("%llu seeds, %llu failed", static_cast<unsigned long long>(seeds), failures);
  for (const auto& [name, total] : farandole::simulation::kTotals) {
    std::printf(", %lld %s", static_cast<long long>(totals.*total), name);
  }
  std::printf("\n");
  return failures == 0 ? 0 : 1;
}
