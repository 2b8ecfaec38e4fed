// Runs many seeds: simulate [--seeds N] [--first S]
//     [--faults 1 | --agreements 1 | --membership 1 [--print 1]]

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "test/simulation/membership_world.h"
#include "test/simulation/world.h"

namespace farandole::simulation {
namespace {

template <class Totals>
int RunAll(uint64_t first, uint64_t seeds,
           std::span<const std::pair<const char*, int64_t Totals::*>> names,
           const std::function<std::optional<std::string>(uint64_t, Totals*)>& run) {
  Totals totals;
  unsigned long long failures = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const std::optional<std::string> failure = run(seed, &totals);
    if (!failure) continue;
    ++failures;
    std::printf("%s\n", failure->c_str());
  }
  std::printf("%llu seeds, %llu failed", static_cast<unsigned long long>(seeds), failures);
  for (const auto& [name, total] : names) {
    std::printf(", %lld %s", static_cast<long long>(totals.*total), name);
  }
  std::printf("\n");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace farandole::simulation

int main(int argc, char** argv) {
  namespace sim = farandole::simulation;
  std::map<std::string, uint64_t> arguments = {{"--seeds", 2000},   {"--first", 0},
                                               {"--faults", 0},     {"--agreements", 0},
                                               {"--membership", 0}, {"--print", 0}};
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc || !arguments.contains(argv[i])) {
      std::fprintf(stderr,
                   "usage: simulate [--seeds N] [--first S] "
                   "[--faults 1 | --agreements 1 | --membership 1 [--print 1]]\n");
      return 2;
    }
    arguments[argv[i]] = std::strtoull(argv[i + 1], nullptr, 10);
  }
  const uint64_t first = arguments["--first"], seeds = arguments["--seeds"];
  if (arguments["--membership"] != 0) {
    const bool prints = arguments["--print"] != 0;
    return sim::RunAll<sim::MembershipTotals>(first, seeds, sim::kMembershipTotals,
                                              [prints](uint64_t seed, sim::MembershipTotals* t) {
                                                return sim::RunMembershipSeed(seed, t, prints);
                                              });
  }
  return sim::RunAll<sim::Totals>(first, seeds, sim::kTotals,
                                  arguments["--agreements"] != 0 ? sim::RunSeedWithAgreements
                                  : arguments["--faults"] != 0   ? sim::RunSeedWithFaults
                                                                 : sim::RunSeed);
}
