#include "test/simulation/world.h"

#include <algorithm>

#include "test/simulation/player.h"

namespace farandole::simulation {
namespace {

constexpr int64_t kMostEvents = 5'000'000;

}  // namespace

World::World(const Scenario& scenario, std::vector<Fault> faults)
    : scenario_(scenario),
      faults_(std::move(faults)),
      oracle_(scenario),
      random_(scenario.seed ^ 0x5eed) {
  for (int rank = 0; rank < scenario.size; ++rank) {
    players_.push_back(std::make_unique<Player>(*this, rank));
  }
}

World::~World() = default;

void World::At(int rank, int64_t time, std::function<void()> what) {
  events_.push({time, order_++, rank, std::move(what)});
}

void World::Send(int from, int to, std::vector<std::byte> bytes) {
  ++totals_.messages;
  totals_.bytes += static_cast<int64_t>(bytes.size());
  int64_t delay = random_.Between(1, scenario_.link_delay);
  if (scenario_.slow_link == from || scenario_.slow_link == to) delay *= 100;
  int64_t& last = link_free_at_[{from, to}];
  last = std::max(last, now_ + delay);
  At(to, last, [this, from, to, kept = std::move(bytes)] {
    players_[static_cast<size_t>(to)]->Receive(from, kept);
  });
}

// Nodes that decide for different sets may give the same numbers.
void World::BatchAtHead(int rank, uint32_t set, int64_t number, int32_t index,
                        const std::vector<int>& participants) {
  Meeting& meeting = meetings_[{set, number, index}];
  meeting.here.push_back(rank);
  if (meeting.participants.empty()) meeting.participants = participants;
  if (meeting.participants.empty()) return;
  for (const int needed : meeting.participants) {
    if (std::find(meeting.here.begin(), meeting.here.end(), needed) == meeting.here.end()) return;
  }
  for (const int there : meeting.participants) {
    In(there, random_.Between(1, scenario_.run_time), [this, there, number, index] {
      players_[static_cast<size_t>(there)]->FinishBatch(number, index);
    });
  }
}

/// Who talks to a rank that crashed learns of it, and some others: from the rest of the survivors.
void World::Strike(const Fault& fault) {
  int64_t& until = down_until_[fault.rank];
  if (until == INT64_MAX) return;
  if (fault.stop_ns > 0) {
    until = std::max(until, now_ + fault.stop_ns);
    ++totals_.stops;
    return;
  }
  until = INT64_MAX;
  ++totals_.crashes;
  oracle_.Crashed(fault.rank);
  const int parent = scenario_.parent[static_cast<size_t>(fault.rank)];
  for (int to = 0; to < scenario_.size; ++to) {
    const bool talks = to == parent || scenario_.parent[static_cast<size_t>(to)] == fault.rank;
    if (!talks && !random_.Percent(30)) continue;
    const int64_t told = now_ + int64_t{random_.Between(1, scenario_.link_delay)} * 100;
    At(to, std::max(told, link_free_at_[{fault.rank, to}]),
       [this, to, lost = fault.rank] { players_[static_cast<size_t>(to)]->Lose(lost); });
  }
}

void World::Step() {
  Event event = events_.top();
  events_.pop();
  now_ = event.time;
  while (!faults_.empty() && faults_.front().event <= totals_.events) {
    Strike(faults_.front());
    faults_.erase(faults_.begin());
  }
  ++totals_.events;
  const auto down = down_until_.find(event.rank);
  if (down == down_until_.end() || down->second <= now_) return event.what();
  if (down->second == INT64_MAX) return;
  event.time = down->second;
  events_.push(std::move(event));
}

std::optional<std::string> World::Run() {
  for (int rank = 0; rank < scenario_.size; ++rank) {
    Player& player = *players_[static_cast<size_t>(rank)];
    In(rank, random_.Below(scenario_.think + 1), [&player] { player.Act(); });
  }
  while (!events_.empty() && !oracle_.failure()) {
    Step();
    if (totals_.events > kMostEvents) oracle_.Fail("the run does not end");
  }
  if (!oracle_.failure()) Judge();
  return oracle_.failure();
}

/// Where ranks crash while the job shuts down, no rank that has shut down passes that on.
void World::Judge() {
  const auto is_over = [](const auto& player) { return player->shut_down(); };
  const bool excused = totals_.crashes > 0 && std::ranges::any_of(players_, is_over);
  std::string stuck;
  for (int rank = 0; rank < scenario_.size && !excused; ++rank) {
    const Player& player = *players_[static_cast<size_t>(rank)];
    const auto down = down_until_.find(rank);
    if (down != down_until_.end() && down->second == INT64_MAX) continue;
    const bool parts = scenario_.part_at >= 0;
    if (player.failed() || (!parts && player.shut_down())) continue;
    stuck += "\n  " + player.Describe();
  }
  if (!stuck.empty()) return oracle_.Fail("deadlock:" + stuck);
  if (totals_.crashes > 0 || scenario_.part_at >= 0) return oracle_.ValidateSurvivors();
  oracle_.ValidateRound();
}

namespace {

std::optional<std::string> Play(const Scenario& scenario, std::vector<Fault> faults,
                                Totals* totals) {
  World world(scenario, std::move(faults));
  const std::optional<std::string> failure = world.Run();
  for (const auto& [name, total] : kTotals) {
    if (totals != nullptr) totals->*total += world.totals().*total;
  }
  if (!failure) return failure;
  return "seed " + std::to_string(scenario.seed) + " (" + std::to_string(scenario.size) +
         " ranks): " + *failure;
}

/// Up to two crashes, which leave the survivors connected, and up to three stops.
std::vector<Fault> DrawFaults(Random& random, const Scenario& scenario) {
  std::vector<Fault> faults;
  const int crashes = scenario.part_at >= 0 ? 0 : random.Below(3);
  const int all = crashes + random.Below(4);
  const int within = 8 * static_cast<int>(scenario.ops.size()) * scenario.size;
  for (int i = 0; i < all; ++i) {
    const int64_t stop_ns = int64_t{random.Between(1, scenario.link_delay)} * 300;
    faults.push_back(
        {random.Between(1, within), random.Below(scenario.size), i < crashes ? 0 : stop_ns});
  }
  std::ranges::sort(faults, {}, &Fault::event);
  return faults;
}

}  // namespace

std::optional<std::string> RunSeed(uint64_t seed, Totals* totals) {
  return Play(MakeScenario(seed), {}, totals);
}

std::optional<std::string> RunSeedWithFaults(uint64_t seed, Totals* totals) {
  Scenario scenario = MakeScenario(seed);
  Random random(seed ^ 0xfa17);
  const int factors[] = {1'000, 10'000, 100'000};
  SlowDown(scenario, factors[random.Below(3)]);
  if (scenario.size > 1 && random.Percent(20)) LetRanksPart(scenario);
  return Play(scenario, DrawFaults(random, scenario), totals);
}

std::optional<std::string> RunSeedWithAgreements(uint64_t seed, Totals* totals) {
  Scenario scenario = MakeScenario(seed);
  scenario.agrees = true;
  Random random(seed ^ 0xa9ee);
  if (seed % 2 == 0) return Play(scenario, {}, totals);
  SlowDown(scenario, 1'000);
  return Play(scenario, DrawFaults(random, scenario), totals);
}

}  // namespace farandole::simulation
