#include "test/simulation/world.h"

#include <algorithm>

#include "test/simulation/player.h"

namespace farandole::simulation {
namespace {

constexpr int64_t kMostEvents = 5'000'000;

}  // namespace

World::World(const Scenario& scenario)
    : scenario_(scenario), oracle_(scenario), random_(scenario.seed ^ 0x5eed) {
  for (int rank = 0; rank < scenario.size; ++rank) {
    players_.push_back(std::make_unique<Player>(*this, rank));
  }
}

World::~World() = default;

void World::At(int64_t time, std::function<void()> what) {
  events_.push({time, order_++, std::move(what)});
}

void World::Send(int from, int to, std::vector<std::byte> bytes) {
  ++totals_.messages;
  totals_.bytes += static_cast<int64_t>(bytes.size());
  int64_t delay = random_.Between(1, scenario_.link_delay);
  if (scenario_.slow_link == from || scenario_.slow_link == to) delay *= 100;
  int64_t& last = link_free_at_[{from, to}];
  last = std::max(last, now_ + delay);
  At(last, [this, from, to, kept = std::move(bytes)] {
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
    In(random_.Between(1, scenario_.run_time), [this, there, number, index] {
      players_[static_cast<size_t>(there)]->FinishBatch(number, index);
    });
  }
}

std::optional<std::string> World::Run() {
  for (const auto& player : players_) {
    In(random_.Below(scenario_.think + 1), [&player] { player->Act(); });
  }
  while (!events_.empty() && !oracle_.failure()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    event.what();
    if (++totals_.events > kMostEvents) oracle_.Fail("the run does not end");
  }
  if (oracle_.failure()) return oracle_.failure();
  std::string stuck;
  for (const auto& player : players_) {
    if (!player->shut_down()) stuck += "\n  " + player->Describe();
  }
  if (!stuck.empty()) oracle_.Fail("deadlock:" + stuck);
  if (!oracle_.failure()) oracle_.ValidateRound();
  return oracle_.failure();
}

std::optional<std::string> RunSeed(uint64_t seed, Totals* totals) {
  const Scenario scenario = MakeScenario(seed);
  World world(scenario);
  const std::optional<std::string> failure = world.Run();
  if (totals != nullptr) {
    const Totals& one = world.totals();
    totals->events += one.events;
    totals->messages += one.messages;
    totals->bytes += one.bytes;
    totals->works += one.works;
    totals->submissions += one.submissions;
    totals->refused += one.refused;
    totals->skipped += one.skipped;
    totals->aborted += one.aborted;
    totals->reports += one.reports;
    totals->joins += one.joins;
    totals->retired += one.retired;
  }
  if (!failure) return failure;
  return "seed " + std::to_string(seed) + " (" + std::to_string(scenario.size) +
         " ranks): " + *failure;
}

}  // namespace farandole::simulation
