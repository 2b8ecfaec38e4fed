// Trains a network on generated data while its ranks are killed. The weights are those of an
// undisturbed training:
//
//   farandolerun -np 3 --elastic ./uninterrupted 2000 results/killed     # kill any process it
//   names
//   ./uninterrupted 2000 results/calm
//   farandole verify results/killed results/calm
//
// Each rank ends with a line with the SHA-256 of all states, which is one for any number of ranks.
#include <farandole/job.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "mlp.h"

namespace {

constexpr int kInputs = 32, kHidden = 64, kClasses = 5, kBatch = 16;
constexpr float kRate = 0.05f, kMomentum = 0.9f;

/// Adds the gradients of a batch of random points to `gradients`, and its loss, which comes last.
void compute(Mlp& mlp, Mlp& teacher, const farandole::Slot& slot,
             const farandole::GradientSpans& gradients) {
  std::mt19937_64 random(slot.seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> point(kInputs);
  float& loss = gradients.back()[0];
  mlp.zero_grad();
  for (int i = 0; i < kBatch; ++i) {
    for (float& x : point) x = uniform(random);
    const std::vector<float>& wanted = teacher.forward(point.data());
    const auto label = std::max_element(wanted.begin(), wanted.end()) - wanted.begin();
    mlp.forward(point.data());
    loss += mlp.backward(static_cast<int>(label), kBatch) / kBatch;
  }
  const auto parameters = mlp.parameters();
  for (std::size_t k = 0; k < parameters.size(); ++k)
    std::copy(parameters[k].gradient.begin(), parameters[k].gradient.end(), gradients[k].begin());
}

}  // namespace

int main(int argc, char** argv) try {
  const long steps = argc > 1 ? std::atol(argv[1]) : 2000;
  farandole::JobOptions options;
  options.checkpoint = argc > 2 ? argv[2] : "";
  farandole::Job job(options);
  std::printf("rank %d of %d is process %d\n", job.context().rank(), job.context().size(),
              getpid());
  std::fflush(stdout);

  Mlp mlp(kInputs, kHidden, kClasses, 1), teacher(kInputs, kHidden, kClasses, 2);
  const std::vector<farandole::Parameter<float>> parameters = mlp.parameters();
  std::vector<std::vector<float>> velocity;
  for (const auto& parameter : parameters) velocity.emplace_back(parameter.value.size());
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    job.add_state(parameters[k].name, parameters[k].value);
    job.add_state(parameters[k].name + ".velocity", velocity[k]);
    job.add_gradient(parameters[k].name, parameters[k].value.size());
  }
  job.add_gradient("loss", 1);

  const auto apply = [&](std::int64_t step, const farandole::GradientSpans& means) {
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      for (std::size_t i = 0; i < means[k].size(); ++i) {
        velocity[k][i] = kMomentum * velocity[k][i] + means[k][i];
        parameters[k].value[i] -= kRate * velocity[k][i];
      }
    }
    if (step % 100 != 0 || job.context().rank() != 0) return;
    const auto loss = static_cast<double>(means.back()[0]);
    std::printf("step %ld: loss %.4f, %d ranks\n", static_cast<long>(step), loss,
                job.context().size());
    std::fflush(stdout);
  };
  const auto compute_slot = [&](const farandole::Slot& slot,
                                const farandole::GradientSpans& gradients) {
    compute(mlp, teacher, slot, gradients);
  };
  if (job.run(steps, compute_slot, apply) == farandole::JobEnd::left) return 143;
  std::printf("weights %s after %ld steps\n", job.digest().c_str(), static_cast<long>(job.steps()));
  return 0;
} catch (const farandole::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return error.code() == farandole::Code::halted ? 75 : 1;
}
