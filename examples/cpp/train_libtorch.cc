// Trains a convolutional network with libtorch on Fashion-MNIST, each rank on its share of the
// images.
//
// Built by CMake with find_package(Farandole REQUIRED COMPONENTS Torch), see CMakeLists.txt here;
// run as: mpirun -np 2 ./train_libtorch [EPOCHS [IMAGES]]
#include <farandole/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "fashion_mnist.h"

namespace {

constexpr std::int64_t kBatch = 64;  // per rank

struct NetImpl : torch::nn::Module {
  NetImpl() {
    namespace nn = torch::nn;
    layers = register_module(
        "layers",
        nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)), nn::ReLU(),
                       nn::MaxPool2d(2), nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)),
                       nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(), nn::Linear(32 * 7 * 7, 64),
                       nn::ReLU(), nn::Linear(64, fashion_mnist::kClasses)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};
TORCH_MODULE(Net);

struct Tensors {
  torch::Tensor images;  // [N, 1, 28, 28], -0.5 to 0.5
  torch::Tensor labels;  // [N]
};

Tensors to_tensors(fashion_mnist::Dataset data) {
  const auto count = static_cast<std::int64_t>(data.size());
  return {torch::from_blob(data.images.data(), {count, 1, 28, 28}, torch::kUInt8)
                  .to(torch::kFloat32)
                  .div_(255) -
              0.5,
          torch::from_blob(data.labels.data(), {count}, torch::kUInt8).to(torch::kInt64)};
}

void train_epoch(farandole::Context& context, Net& net, torch::optim::Optimizer& optimizer,
                 const Tensors& data, std::int64_t images, int epoch) {
  torch::manual_seed(static_cast<std::uint64_t>(epoch));  // one order on all ranks
  const torch::Tensor order = torch::randperm(images);
  const std::int64_t share = images / context.size() / kBatch * kBatch;
  for (std::int64_t at = 0; at < share; at += kBatch) {
    const torch::Tensor picked =
        order.slice(0, context.rank() * share + at, context.rank() * share + at + kBatch);
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(net->forward(data.images.index_select(0, picked)),
                                         data.labels.index_select(0, picked))
        .backward();
    optimizer.step();
  }
}

// The share of right answers over all ranks, each of which looks at a part of its own.
double accuracy(farandole::Context& context, Net& net, const Tensors& data) {
  const torch::NoGradGuard no_grad;
  net->eval();
  const auto images =
      data.images.tensor_split(context.size())[static_cast<std::size_t>(context.rank())];
  const auto labels =
      data.labels.tensor_split(context.size())[static_cast<std::size_t>(context.rank())];
  const torch::Tensor counts = torch::tensor(
      {net->forward(images).argmax(1).eq(labels).sum().item<std::int64_t>(), labels.numel()});
  farandole::Options options;
  options.op = farandole::Op::sum;
  farandole::torch::allreduce(context, counts, options);
  return counts[0].item<double>() / counts[1].item<double>();
}

// Whether rank 0's parameters, sent to all, equal everybody's own.
bool replicas_agree(farandole::Context& context, Net& net) {
  torch::Tensor same = torch::ones({1}, torch::kInt32);
  for (const torch::Tensor& parameter : net->parameters()) {
    const torch::Tensor first = parameter.detach().clone();
    farandole::torch::broadcast(context, first, 0);
    same.mul_(torch::equal(first, parameter));
  }
  farandole::Options options;
  options.op = farandole::Op::min;
  farandole::torch::allreduce(context, same, options);
  return same.item<int>() == 1;
}

}  // namespace

int main(int argc, char** argv) try {
  const int epochs = argc > 1 ? std::atoi(argv[1]) : 2;
  farandole::Context context = farandole::Context::init();
  torch::set_num_threads(1);
  torch::manual_seed(static_cast<std::uint64_t>(100 + context.rank()));
  Net net;
  farandole::torch::broadcast_parameters(context, *net, 0);
  farandole::torch::GradientOptions options;
  options.names = net->named_parameters();
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, options, net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::StepLR schedule(optimizer, 1, 0.5);
  const Tensors train = to_tensors(fashion_mnist::load("train"));
  const std::int64_t images = argc > 2
                                  ? std::min<std::int64_t>(train.labels.numel(), std::atol(argv[2]))
                                  : train.labels.numel();
  for (int epoch = 0; epoch < epochs; ++epoch) {
    train_epoch(context, net, optimizer, train, images, epoch);
    schedule.step();
  }
  const double right = accuracy(context, net, to_tensors(fashion_mnist::load("t10k")));
  const bool same = replicas_agree(context, net);
  if (context.rank() == 0)
    std::printf("accuracy=%.3f replicas=%s\n", right, same ? "identical" : "DIFFER");
  return same ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
