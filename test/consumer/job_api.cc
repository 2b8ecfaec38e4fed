// A Job of a linear model. Arguments: the folder, steps, and what happens to which rank in which
// step: kill1=5, term0=3, wait0=8 (until somebody wants to join); or seed1=9, that of a rank.
// Prints: how it ended, after how many steps, the digest.
#include <farandole/job.h>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

using farandole::Code;
using farandole::Error;
using farandole::GradientSpans;
using farandole::Job;
using farandole::Slot;

namespace {

template <class Call>
void expect_refused(Call call) {
  bool is_refused = false;
  try {
    call();
  } catch (const Error& error) {
    is_refused = error.code() == Code::invalid_argument;
  }
  EXPECT(is_refused);
}

void refusals(Job& job, std::vector<float>& weight) {
  expect_refused([&] { job.add_state("weight", weight); });
  expect_refused([&] { job.add_gradient("a\"b", 1); });
  expect_refused([&] { job.add_gradient("", 1); });
  farandole::JobOptions options;
  options.keep = 0;
  expect_refused([&] { Job other(options); });
}

int train(const std::vector<std::string>& words) {
  const std::string first = std::getenv("FARANDOLE_RANK") ? std::getenv("FARANDOLE_RANK") : "0";
  farandole::JobOptions options;
  options.slots = 5;
  options.checkpoint = words[0];
  options.checkpoint_steps = 4;
  for (const std::string& word : words)
    if (word.rfind("seed" + first + "=", 0) == 0) options.seed = std::stoull(word.substr(6));
  Job job(options);
  const int rank = job.context().rank();  // in its first generation
  std::vector<float> weight(1000, 0.5f);
  double momentum = 0.25;
  job.add_state("weight", weight);
  job.add_state("momentum", farandole::Span(&momentum, 1));
  job.add_state("nothing", std::vector<int>());
  job.add_gradient("weight", weight.size());
  job.add_gradient("sums", 1);
  refusals(job, weight);
  const auto happens = [&](const std::string& what, std::int64_t step) {
    const std::string wanted = what + std::to_string(rank) + "=" + std::to_string(step);
    return std::find(words.begin(), words.end(), wanted) != words.end();
  };
  const auto compute = [&](const Slot& slot, const GradientSpans& gradients) {
    if (happens("kill", slot.step)) (void)std::raise(SIGKILL);
    if (happens("term", slot.step)) (void)std::raise(SIGTERM);
    while (happens("wait", slot.step) && !job.context().change_is_due())
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT(gradients.size() == 2 && slot.count == 5 && slot.number < 5);
    for (std::size_t i = 0; i < weight.size(); ++i) {
      const auto noise = static_cast<float>((slot.seed >> (i % 32)) % 1000);
      gradients[0][i] = noise * 1e-3f - weight[i] / 3;
      gradients[1][0] += gradients[0][i];
    }
  };
  const auto apply = [&](std::int64_t step, const GradientSpans& means) {
    EXPECT(step == job.steps());
    momentum = momentum * 0.9 + static_cast<double>(means[1][0]) * 1e-3;
    for (std::size_t i = 0; i < weight.size(); ++i)
      weight[i] += 0.1f * means[0][i] + static_cast<float>(momentum);
  };
  const auto end = static_cast<int>(job.run(std::stol(words[1]), compute, apply));
  expect_refused([&] { (void)job.run(1, compute, apply); });
  std::printf("%d %ld %s\n", end, static_cast<long>(job.steps()), job.digest().c_str());
  return end == static_cast<int>(farandole::JobEnd::left) ? 143 : 0;
}

}  // namespace

int main(int argc, char** argv) try {
  return train({argv + 1, argv + argc});
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
