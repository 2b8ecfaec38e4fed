#include "test/conformance/data_plane_harness.h"

#include <algorithm>
#include <random>
#include <thread>

#include "test/conformance/data_plane_reference.h"

namespace farandole {
namespace {

/// Steps of waiting in a row, per rank, after which nothing will ever move again.
constexpr int kStuckSteps = 200;
/// Batches a rank starts ahead.
constexpr size_t kAhead = 2;

/// One rank of an interleaved run.
struct SteppedRank {
  struct Started {
    std::unique_ptr<RankRun> run;
    PlaneOperation* operation;
  };
  std::vector<Started> started;
  size_t next_case = 0;
};

class Interleaving {
 public:
  Interleaving(PlaneGroup& group, std::span<const PlaneCase> cases)
      : group_(group),
        cases_(cases),
        ranks_(static_cast<size_t>(group.size())),
        expected_(ReferenceResults(cases)) {}

  std::string Run(uint64_t seed) {
    std::mt19937_64 random(seed);
    int waits = 0;
    for (size_t ended = 0; ended < ranks_.size() * cases_.size();) {
      const size_t rank = random() % ranks_.size();
      if (std::string wrong = StartAhead(rank); !wrong.empty()) return wrong;
      if (ranks_[rank].started.empty()) continue;
      const Progress progress = Step(rank, random() % ranks_[rank].started.size());
      if (progress.state == Progress::State::kFailed) return progress.status.ToString();
      if (progress.state == Progress::State::kDone) ++ended;
      waits = progress.state == Progress::State::kWaiting ? waits + 1 : 0;
      if (waits > kStuckSteps * group_.size()) return "no progress\n" + failures_;
    }
    return failures_;
  }

 private:
  std::string StartAhead(size_t rank) {
    SteppedRank& state = ranks_[rank];
    // Nothing of the set starts before the last part of an adasum, as in an engine.
    const auto is_composed = [](const SteppedRank::Started& one) {
      return IsAdasum(one.run->batch());
    };
    while (state.started.size() < kAhead && state.next_case < cases_.size() &&
           std::ranges::none_of(state.started, is_composed)) {
      const size_t k = state.next_case++;
      auto run = std::make_unique<RankRun>(cases_[k], group_.Set(static_cast<int>(rank)),
                                           static_cast<int64_t>(k), expected_[k]);
      Result<PlaneOperation*> operation = run->Start(*group_.planes[rank]);
      if (!operation.ok()) return cases_[k].ToString() + ": " + operation.status().ToString();
      state.started.push_back({std::move(run), operation.value()});
    }
    return {};
  }

  Progress Step(size_t rank, size_t which) {
    auto& started = ranks_[rank].started;
    Progress progress = started[which].operation->Step();
    if (progress.state != Progress::State::kDone) return progress;
    if (std::string wrong = started[which].run->Check(); !wrong.empty()) {
      failures_ += "member " + std::to_string(rank) + ", batch " +
                   std::to_string(started[which].run->batch().number) + ": " + wrong + "\n";
    }
    started.erase(started.begin() + static_cast<std::ptrdiff_t>(which));
    return progress;
  }

  PlaneGroup& group_;
  std::span<const PlaneCase> cases_;
  std::vector<SteppedRank> ranks_;
  std::vector<std::vector<std::byte>> expected_;
  std::string failures_;
};

std::string CompareFingerprints(std::span<const PlaneCase> cases,
                                const std::vector<std::vector<uint64_t>>& fingerprints) {
  std::string failures;
  for (size_t k = 0; k < cases.size(); ++k) {
    uint64_t first = 0;
    for (const auto& of_rank : fingerprints) {
      const uint64_t fingerprint = k < of_rank.size() ? of_rank[k] : 0;
      if (fingerprint == 0) continue;  // drops the result
      if (first == 0) first = fingerprint;
      if (fingerprint != first) failures += cases[k].ToString() + ": members' bits differ\n";
    }
  }
  return failures;
}

}  // namespace

PlaneGroup::~PlaneGroup() {
  std::vector<std::thread> ends;
  for (std::unique_ptr<DataPlane>& plane : planes) ends.emplace_back([&plane] { plane = nullptr; });
  for (std::thread& end : ends) end.join();
}

SetView PlaneGroup::Set(int rank) const {
  SetView view = GlobalSet(rank, size());
  if (!buffers.empty()) view.buffers = buffers[static_cast<size_t>(rank)];
  return view;
}

void OnEveryRank(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

std::string RunThreaded(PlaneGroup& group, std::span<const PlaneCase> cases) {
  const size_t size = static_cast<size_t>(group.size());
  const std::vector<std::vector<std::byte>> expected = ReferenceResults(cases);
  std::vector<std::string> failures(size);
  std::vector<std::vector<uint64_t>> fingerprints(size);
  OnEveryRank(group.size(), [&](int rank) {
    const size_t at = static_cast<size_t>(rank);
    failures[at] = RunCasesOnRank(*group.planes[at], *group.bells[at], group.Set(rank), cases,
                                  expected, &fingerprints[at]);
  });
  std::string all;
  for (const std::string& failure : failures) all += failure;
  return all + CompareFingerprints(cases, fingerprints);
}

std::string RunInterleaved(PlaneGroup& group, std::span<const PlaneCase> cases, uint64_t seed) {
  for (int rank = 0; rank < group.size(); ++rank) {
    const SetView view = GlobalSet(rank, group.size());
    const Status added =
        group.planes[static_cast<size_t>(rank)]->AddSet(view.set, view.ranks, view.my_index);
    if (!added.ok()) return added.ToString();
  }
  return Interleaving(group, cases).Run(seed);
}

}  // namespace farandole
