// Trains a network without any framework on Fashion-MNIST, each rank on its share of the images.
//
//   g++ -std=c++17 -O3 train_mlp.cc $(pkg-config --cflags --libs farandole) -o train_mlp
//   mpirun -np 2 ./train_mlp [EPOCHS [IMAGES]]
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "fashion_mnist.h"
#include "mlp.h"

namespace {

constexpr int kBatch = 32;  // per rank

void read_image(const fashion_mnist::Dataset& data, std::size_t i, std::vector<float>& x) {
  for (int p = 0; p < fashion_mnist::kPixels; ++p)
    x[static_cast<std::size_t>(p)] =
        static_cast<float>(data.images[i * fashion_mnist::kPixels + static_cast<std::size_t>(p)]) /
            255.0f -
        0.5f;
}

// The images of this rank in the order of this epoch; every rank gets the same number of batches.
std::vector<std::size_t> shard(std::size_t images, int rank, int size, int epoch) {
  std::vector<std::size_t> order(images);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(epoch)));
  const std::size_t share = images / static_cast<std::size_t>(size) / kBatch * kBatch;
  const auto first = order.begin() + static_cast<std::ptrdiff_t>(share) * rank;
  return {first, first + static_cast<std::ptrdiff_t>(share)};
}

// The share of right answers over all ranks, each of which looks at every size-th image.
double accuracy(farandole::Context& context, Mlp& model, const fashion_mnist::Dataset& data) {
  std::vector<float> x(fashion_mnist::kPixels);
  std::int64_t counts[2] = {0, 0};  // right, all
  for (auto i = static_cast<std::size_t>(context.rank()); i < data.size();
       i += static_cast<std::size_t>(context.size())) {
    read_image(data, i, x);
    const std::vector<float>& z = model.forward(x.data());
    const auto best = std::max_element(z.begin(), z.end()) - z.begin();
    counts[0] += best == data.labels[i];
    ++counts[1];
  }
  farandole::Options options;
  options.op = farandole::Op::sum;
  context.allreduce(counts, options);
  return static_cast<double>(counts[0]) / static_cast<double>(counts[1]);
}

// Whether all ranks have the same bits: the least and the greatest of a hash are one.
bool replicas_agree(farandole::Context& context, Mlp& model) {
  std::int64_t hash = 0;
  for (const auto& parameter : model.parameters()) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(parameter.value.data());
    for (std::size_t i = 0; i < parameter.value.size(); ++i)
      hash =
          static_cast<std::int64_t>((static_cast<std::uint64_t>(hash) ^ words[i]) * 1099511628211u);
  }
  std::int64_t least = hash, greatest = hash;
  farandole::Options options;
  options.op = farandole::Op::min;
  context.allreduce(farandole::Span(&least, 1), options);
  options.op = farandole::Op::max;
  context.allreduce(farandole::Span(&greatest, 1), options);
  return least == greatest;
}

}  // namespace

int main(int argc, char** argv) try {
  const int epochs = argc > 1 ? std::atoi(argv[1]) : 2;
  farandole::Context context = farandole::Context::init();
  const fashion_mnist::Dataset train = fashion_mnist::load("train");
  const std::size_t images =
      argc > 2 ? std::min(train.size(), static_cast<std::size_t>(std::atol(argv[2])))
               : train.size();
  Mlp model(fashion_mnist::kPixels, 64, fashion_mnist::kClasses,
            static_cast<unsigned>(context.rank()));
  farandole::broadcast_parameters(context, model.parameters(), 0);
  farandole::DistributedOptimizer optimizer(context, Sgd(model.parameters(), 0.05f, 0.9f));
  std::vector<float> x(fashion_mnist::kPixels);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const std::vector<std::size_t> mine = shard(images, context.rank(), context.size(), epoch);
    for (std::size_t at = 0; at < mine.size(); at += kBatch) {
      model.zero_grad();
      for (std::size_t k = 0; k < kBatch; ++k) {
        read_image(train, mine[at + k], x);
        model.forward(x.data());
        model.backward(train.labels[mine[at + k]], kBatch);
      }
      optimizer.step();
    }
  }
  const double right = accuracy(context, model, fashion_mnist::load("t10k"));
  const bool same = replicas_agree(context, model);
  if (context.rank() == 0)
    std::printf("accuracy=%.3f replicas=%s\n", right, same ? "identical" : "DIFFER");
  return same ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
