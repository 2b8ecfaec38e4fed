// How an allreduce among hosts scales, as a table in Markdown: simulate_allreduce KIB HOSTS ...
//
// What decides with many hosts is how many messages there are and how long they are: a LogGP clock
// as that of simulate_scale, without the copies and sums of a host. docs/scaling.md has the
// figures.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

constexpr double kOverheadNs = 350;  // of the processor, for each send and each receive
constexpr double kLatencyNs = 1200;
constexpr double kByteNs = 0.08;       // 100 Gbit/s
constexpr double kNoise = 0.001;       // the probability that a host is interrupted in a stage
constexpr double kNoiseMostNs = 50e3;  // and how long, at most
constexpr int kSeeds = 5;
constexpr double kKib = 1024;

/// What all hosts do with a chunk at a time: each sends `messages` messages of `bytes`, and waits
/// for those of its sources: of the hosts a multiple of `stride` away in its block of `block`
/// hosts; or, of `block` 0, of the host before it; or, of `block` < 0, of the host `stride` away by
/// exclusive or.
struct Stage {
  double messages;
  double bytes;
  int block;
  int stride;
};
using Stages = std::vector<Stage>;

/// Scatter and gather among all hosts at once: every host reduces an H-th of a chunk.
Stages Direct(int hosts, double chunk) {
  const Stage stage{hosts - 1.0, chunk / hosts, hosts, 1};
  return {stage, stage};
}

/// Within blocks of about sqrt(H) hosts, then, of what each host reduced, among the hosts in the
/// same place of all blocks; and back. Sums are those of blocks, added in order.
Stages TwoLevels(int hosts, double chunk) {
  const int block = 1 << (static_cast<int>(std::log2(hosts)) + 1) / 2;
  const int blocks = hosts / block;
  const Stage inner{block - 1.0, chunk / block, block, 1};
  const Stage outer{blocks - 1.0, chunk / hosts, hosts, block};
  return {inner, outer, outer, inner};
}

/// Source: Patarasuk and Yuan, JPDC 69(2), 2009.
Stages Ring(int hosts, double chunk) {
  return Stages(static_cast<size_t>(2 * (hosts - 1)), {1, chunk / hosts, 0, 1});
}

/// Recursive halving and doubling: Thakur et al., IJHPCA 19(1), 2005.
Stages Halving(int hosts, double chunk) {
  Stages stages;
  for (int apart = hosts / 2; apart > 0; apart /= 2)
    stages.push_back({1, chunk * apart / hosts, -1, apart});
  for (int apart = 1; apart < hosts; apart *= 2)
    stages.push_back({1, chunk * apart / hosts, -1, apart});
  return stages;
}

/// When each host has what its sources sent, which is done at `sent`.
std::vector<double> Arrivals(const Stage& stage, const std::vector<double>& sent) {
  const size_t hosts = sent.size();
  std::vector<double> arrived(hosts);
  if (stage.block <= 0) {
    for (size_t h = 0; h < hosts; ++h)
      arrived[h] =
          sent[stage.block == 0 ? (h + hosts - 1) % hosts : h ^ static_cast<size_t>(stage.stride)];
  } else {
    const auto group = [&](size_t h) {
      const auto block = static_cast<size_t>(stage.block);
      return h / block * block + h % static_cast<size_t>(stage.stride);
    };
    std::vector<double> last(hosts);
    for (size_t h = 0; h < hosts; ++h) last[group(h)] = std::max(last[group(h)], sent[h]);
    for (size_t h = 0; h < hosts; ++h) arrived[h] = last[group(h)];
  }
  for (double& time : arrived) time += kLatencyNs;
  return arrived;
}

/// Chunks follow one another a stage apart. @return Until the last host has the last chunk, in ns.
double Time(int hosts, const Stages& stages, int chunks, std::mt19937_64* random) {
  const auto count = static_cast<size_t>(hosts);
  std::vector<double> processor(count), link(count), sent(count);
  std::vector<std::vector<double>> ready(static_cast<size_t>(chunks), std::vector<double>(count));
  std::uniform_real_distribution<double> chance;
  const int depth = static_cast<int>(stages.size());
  for (int wave = 0; wave < chunks + depth - 1; ++wave) {
    for (int chunk = std::max(0, wave - depth + 1); chunk <= std::min(wave, chunks - 1); ++chunk) {
      const Stage& stage = stages[static_cast<size_t>(wave - chunk)];
      std::vector<double>& mine = ready[static_cast<size_t>(chunk)];
      for (size_t h = 0; h < count; ++h) {
        const double start = std::max(processor[h], mine[h]);
        processor[h] = start + 2 * stage.messages * kOverheadNs;
        if (random != nullptr && chance(*random) < kNoise)
          processor[h] += chance(*random) * kNoiseMostNs;
        link[h] = std::max(link[h], start) + stage.messages * stage.bytes * kByteNs;
        sent[h] = std::max(processor[h], link[h]);
      }
      mine = Arrivals(stage, sent);
    }
  }
  return *std::ranges::max_element(ready.back());
}

/// The median of noisy runs, in ns.
double Noisy(int hosts, const Stages& stages, int chunks) {
  std::vector<double> times;
  for (int seed = 0; seed < kSeeds; ++seed) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    times.push_back(Time(hosts, stages, chunks, &random));
  }
  std::ranges::sort(times);
  return times[kSeeds / 2];
}

void Print(double bytes, int hosts) {
  std::printf("| %d | %.0f ", hosts, bytes / kKib);
  const auto print = [&](Stages (*plan)(int, double), double most) {
    const int chunks = static_cast<int>(std::ceil(bytes / most));
    const Stages stages = plan(hosts, bytes / chunks);
    std::printf("| %.2f, %.2f ", Time(hosts, stages, chunks, nullptr) / 1e6,
                Noisy(hosts, stages, chunks) / 1e6);
  };
  const double grown = 16 * kKib * hosts;
  print(Direct, std::clamp(grown, 256 * kKib, 1024 * kKib));
  print(Direct, std::clamp(grown, 256 * kKib, 4096 * kKib));
  print(TwoLevels, 1024 * kKib);
  print(Ring, bytes);
  print(Halving, bytes);
  std::printf("| %.2f |\n", 2 * bytes * (hosts - 1) / hosts * kByteNs / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> hosts;
  for (int i = 2; i < argc; ++i) hosts.push_back(std::atoi(argv[i]));
  const auto is_wrong = [](int count) { return count < 2 || (count & (count - 1)) != 0; };
  if (hosts.empty() || std::atoi(argv[1]) < 1 || std::ranges::any_of(hosts, is_wrong)) {
    std::fprintf(stderr, "usage: simulate_allreduce KIB HOSTS ..., powers of two\n");
    return 2;
  }
  std::printf(
      "| hosts | KiB | direct | to 4 MiB | two levels | ring | halving | link |\n"
      "|---|---|---|---|---|---|---|---|\n");
  for (const int count : hosts) Print(std::atof(argv[1]) * kKib, count);
}
