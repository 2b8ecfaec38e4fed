// The libtorch adapter from outside: N ranks train as one process does on the whole batch. Run
// under mpirun; every rank also trains the single-process twin and compares. `libtorch_api WAY
// STREAM` has all tensors but the twin's on a GPU, one per rank if WAY is "nccl" and one for all if
// it is "staged", in libtorch's stream of that number; 0 is the default one.
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <farandole/torch.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"

using farandole::Code;
using farandole::Context;
using farandole::Error;

namespace {

torch::Device device(torch::kCPU);

constexpr std::int64_t kRows = 12;  // of the whole batch; divisible by 1, 2, 3 and 4 ranks

torch::nn::Sequential MakeNet(int seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  torch::nn::Sequential net(torch::nn::Linear(5, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3),
                            torch::nn::Linear(3, 3));
  net->to(device, torch::kFloat64);
  return net;
}

torch::Tensor BatchOf(int step) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + step));
  return torch::randn({kRows, 5}, torch::kFloat64);
}

double Distance(torch::nn::Sequential& a, torch::nn::Sequential& b) {
  double worst = 0;
  const auto left = a->parameters(), right = b->parameters();
  for (std::size_t i = 0; i < left.size(); ++i)
    worst = std::max(worst, (left[i].cpu() - right[i].cpu()).abs().max().item<double>());
  return worst;
}

// The last layer is used in even steps only, and then not by rank 1, where there are several ranks.
torch::Tensor Forward(torch::nn::Sequential& net, const torch::Tensor& x, bool whole) {
  torch::Tensor y = x;
  std::size_t left = net->size() - (whole ? 0 : 1);
  for (auto& module : *net) {
    if (left-- == 0) break;
    y = module.forward(y);
  }
  return y.square().sum();
}

template <class Opt, class OptOptions>
void TestTraining(Context& context, const OptOptions& options) {
  torch::nn::Sequential alone = MakeNet(1), mine = MakeNet(100 + context.rank());
  alone->to(torch::kCPU);
  farandole::torch::broadcast_parameters(context, *mine, 0);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < mine->parameters().size(); ++i)
      alone->parameters()[i].copy_(mine->parameters()[i]);
  }
  Opt plain(alone->parameters(), options);
  farandole::torch::GradientOptions exchange;
  exchange.names = mine->named_parameters();
  farandole::torch::DistributedOptimizer<Opt> optimizer(context, exchange, mine->parameters(),
                                                        options);
  torch::optim::StepLR schedule(optimizer, 3, 0.5), plain_schedule(plain, 3, 0.5);
  const std::int64_t share = kRows / context.size();
  for (int step = 0; step < 8; ++step) {
    const torch::Tensor x = BatchOf(step);
    const auto uses_last = [&](int rank) { return step % 2 == 0 && (rank != 1); };
    plain.zero_grad();
    torch::Tensor loss = torch::zeros({}, torch::kFloat64);
    for (int r = 0; r < context.size(); ++r)
      loss = loss + Forward(alone, x.slice(0, r * share, (r + 1) * share), uses_last(r));
    (loss / context.size()).backward();
    plain.step();
    plain_schedule.step();

    optimizer.zero_grad();
    const std::int64_t first = context.rank() * share;
    Forward(mine, x.slice(0, first, first + share).to(device), uses_last(context.rank()))
        .backward();
    if (step == 4) optimizer.synchronize();
    optimizer.step();
    schedule.step();
    EXPECT(Distance(alone, mine) < 1e-12);
  }
}

void TestState(Context& context) {
  torch::nn::Sequential net = MakeNet(7);
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.1 * (context.rank() + 1)));
  if (context.rank() == 0) {
    Forward(net, BatchOf(0).to(device), true).backward();
    adam.step();
  }
  farandole::torch::broadcast_optimizer_state(context, adam, 0);
  EXPECT(adam.param_groups()[0].options().get_lr() == 0.1);
  EXPECT(adam.state().size() == net->parameters().size());
  for (const auto& item : adam.state()) {
    const auto& state = static_cast<const torch::optim::AdamParamState&>(*item.second);
    EXPECT(state.exp_avg().device() == device && state.step() == 1);
  }
}

void TestAccumulationAndClosure(Context& context) {
  torch::Tensor w = torch::zeros({2}, torch::requires_grad().device(device));
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, std::vector<torch::Tensor>{w}, torch::optim::SGDOptions(1.0));
  const double mean = (context.size() - 1) / 2.0;  // of the ranks
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < 2; ++pass) (w * context.rank()).sum().backward();
    optimizer.step();
  }
  EXPECT(torch::allclose(w.cpu(), torch::full({2}, -6 * mean)));
  optimizer.zero_grad();
  optimizer.step([&] {
    optimizer.zero_grad();
    torch::Tensor loss = (w * context.rank()).sum();
    loss.backward();
    return loss;
  });
  EXPECT(torch::allclose(w.cpu(), torch::full({2}, -7 * mean)));
}

// Windows of two passes, one that a step() ends early, one more before a step, and unequal ones.
void TestWindows(Context& context) {
  torch::Tensor w = torch::zeros({2}, torch::requires_grad().device(device));
  farandole::torch::GradientOptions options;
  options.backward_passes_per_step = 2;
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, options, std::vector<torch::Tensor>{w}, torch::optim::SGDOptions(1.0));
  const double mean = (context.size() - 1) / 2.0;  // of the ranks
  int total = 0;
  for (const int passes : {2, 2, 1, 2, 4, 3, 2}) {
    const std::int64_t before = context.counters().at("batches");
    optimizer.zero_grad();
    for (int pass = 0; pass < passes; ++pass) {
      if (pass == 1) EXPECT(context.counters().at("batches") == before);
      (w * context.rank()).sum().backward();
    }
    optimizer.step();
    total += passes;
    EXPECT(torch::allclose(w.cpu(), torch::full({2}, -total * mean)));
  }
  if (context.size() == 1) return;
  optimizer.zero_grad();
  try {
    for (int pass = 0; pass < (context.rank() == 1 ? 1 : 2); ++pass) w.sum().backward();
    optimizer.step();
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::mismatch);
    EXPECT(std::strstr(error.what(), "rank 1 ran 1") != nullptr);
  }
  optimizer.zero_grad();
  for (int pass = 0; pass < 2; ++pass) w.sum().backward();
  optimizer.step();
  EXPECT(torch::allclose(w.cpu(), torch::full({2}, -total * mean - 2)));

  torch::Tensor v = torch::zeros({2}, torch::requires_grad().device(device));
  options.op = farandole::Op::sum;  // a sum would be reduced once more
  farandole::torch::DistributedOptimizer<torch::optim::SGD> of_sum(
      context, options, std::vector<torch::Tensor>{v}, torch::optim::SGDOptions(1.0));
  of_sum.zero_grad();
  for (int pass = 0; pass < 2; ++pass) v.sum().backward();
  try {
    v.sum().backward();
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(std::strstr(error.what(), "backward_passes_per_step=2") != nullptr);
  }
}

void TrainWithOnePassMore(Context& context, int window) {
  torch::Tensor w = torch::zeros({2}, torch::requires_grad().device(device));
  farandole::torch::GradientOptions options;
  options.backward_passes_per_step = window;
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, options, std::vector<torch::Tensor>{w}, torch::optim::SGDOptions(1.0));
  try {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const int more = context.rank() == 0 && step == 1 ? 1 : 0;
      for (int pass = 0; pass < window + more; ++pass) w.sum().backward();
      optimizer.step();
    }
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::mismatch);
    EXPECT(std::strstr(error.what(), "in step 2 rank 0 ran 3 backward passes, rank") != nullptr);
  }
}

// On threads with a job of their own, as ranks that have parted get the error until its end.
void TestOnePassMoreOnOneRank() {
  std::vector<Context> contexts = Context::in_process(3);
  std::vector<std::thread> ranks;
  for (Context& context : contexts)
    ranks.emplace_back([&context] { TrainWithOnePassMore(context, 2); });
  for (std::thread& rank : ranks) rank.join();
}

// A parameter that was frozen at the wrap, and one whose gradient is set by hand: no hook tells of
// them.
void TestGradientsWithoutHooks(Context& context) {
  torch::Tensor w = torch::zeros({2}, torch::requires_grad().device(device));
  torch::Tensor frozen = torch::zeros({2}, device);
  torch::Tensor manual = torch::zeros({2}, torch::requires_grad().device(device));
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, std::vector<torch::Tensor>{w, frozen, manual}, torch::optim::SGDOptions(1.0));
  frozen.requires_grad_();
  const double mean = (context.size() - 1) / 2.0;
  for (int step = 1; step <= 4; ++step) {
    optimizer.zero_grad(step % 2 == 0);
    ((w + frozen) * context.rank()).sum().backward();
    manual.mutable_grad() = torch::full({2}, static_cast<float>(context.rank())).to(device);
    optimizer.step();
    for (const torch::Tensor& tensor : {w, frozen, manual})
      EXPECT(torch::allclose(tensor.cpu(), torch::full({2}, -mean * step)));
  }
}

torch::Tensor Numbers(double first, bool requires_grad = true) {
  return torch::arange(first, first + 6, torch::kFloat64)
      .to(device)
      .set_requires_grad(requires_grad);
}

// What the ranks' `of(rank)` come to.
template <class Of>
torch::Tensor Total(Context& context, Of of) {
  torch::Tensor total = torch::zeros({6}, torch::kFloat64);
  for (int rank = 0; rank < context.size(); ++rank) total = total + of(rank).detach().cpu();
  return total;
}

bool IsClose(const torch::Tensor& gradient, const torch::Tensor& expected) {
  return torch::allclose(gradient.cpu().reshape(-1), expected);
}

// The gradient of `position` is a view of that of y, which a * b needs later: a residual stream
// with a batch of one.
void TestAGradientThatOtherNodesRead(Context& context) {
  const auto weight = [](int rank) { return Numbers(1 + 2 * rank, false); };
  const auto factor = [](int rank) { return Numbers(-2 + rank * rank, false); };
  const int n = context.size(), me = context.rank();
  torch::Tensor a = Numbers(3), b = factor(me).requires_grad_();
  torch::Tensor position = Numbers(0).detach().view({2, 3}).requires_grad_();
  farandole::torch::GradientOptions each_alone;
  each_alone.group_bytes = 1;
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, each_alone, std::vector<torch::Tensor>{position, a, b}, torch::optim::SGDOptions(0));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const torch::Tensor product = a * b;
    product.register_hook([&](const torch::Tensor&) {  // position was sent before
      for (int i = 0; i < 3; ++i) context.barrier();
    });
    const torch::Tensor y = product.view({1, 2, 3}) + position.unsqueeze(0);
    (y * weight(me).view({1, 2, 3})).sum().backward();
    optimizer.step();
    const auto of_a = [&](int rank) { return weight(rank) * factor(rank) / n; };
    EXPECT(IsClose(a.grad(), Total(context, of_a)));
    EXPECT(IsClose(b.grad(), Total(context, [&](int rank) { return weight(rank) * a / n; })));
    EXPECT(IsClose(position.grad(), Total(context, [&](int rank) { return weight(rank) / n; })));
  }
}

void TestTwoOptimizersWhoseGradientsShareMemory(Context& context) {
  const auto weight = [](int rank) { return Numbers(1 + 2 * rank, false); };
  torch::Tensor p = Numbers(0).detach().view({1, 6}).requires_grad_();
  torch::Tensor q = Numbers(0).detach().view({6, 1}).requires_grad_();
  farandole::torch::GradientOptions sum;
  sum.op = farandole::Op::sum;
  using Optimizer = farandole::torch::DistributedOptimizer<torch::optim::SGD>;
  Optimizer one(context, sum, std::vector<torch::Tensor>{p}, torch::optim::SGDOptions(0));
  Optimizer two(context, sum, std::vector<torch::Tensor>{q}, torch::optim::SGDOptions(0));
  for (int step = 0; step < 3; ++step) {
    one.zero_grad();
    two.zero_grad();
    ((p.view(-1) + q.view(-1)) * weight(context.rank())).sum().backward();
    one.step();
    two.step();
    EXPECT(IsClose(p.grad(), Total(context, weight)));
    EXPECT(IsClose(q.grad(), Total(context, weight)));
  }
}

void TestMemoryThatIsNotTheGradientsAlone(Context& context) {
  const auto weight = [](int rank) { return Numbers(1 + 2 * rank, false); };
  const torch::Tensor mine = weight(context.rank()), total = Total(context, weight);
  torch::Tensor p = Numbers(0).detach().view({1, 6}).requires_grad_();
  farandole::torch::GradientOptions sum;
  sum.op = farandole::Op::sum;
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, sum, std::vector<torch::Tensor>{p}, torch::optim::SGDOptions(0));
  for (int step = 0; step < 3; ++step) {  // an input's gradient
    optimizer.zero_grad();
    torch::Tensor input = Numbers(1).detach().view({2, 3}).requires_grad_();
    ((p.view(-1) + input.view(-1)) * mine).sum().backward();
    optimizer.step();
    EXPECT(IsClose(p.grad(), total));
    EXPECT(IsClose(input.grad(), mine.cpu()));
  }
  for (int step = 0; step < 2; ++step) {  // what the caller gave to backward()
    optimizer.zero_grad();
    const torch::Tensor given = weight(context.rank());
    p.view(-1).backward(given);
    optimizer.step();
    EXPECT(IsClose(p.grad(), total));
    EXPECT(IsClose(given, mine.cpu()));
  }
}

// Where the user has put gradients they stay: a buffer of all of them has the reduced ones.
void TestGradientsInABufferOfTheUsers(Context& context) {
  const auto weight = [](int rank) { return Numbers(1 + 2 * rank, false); };
  torch::Tensor p = Numbers(0), q = Numbers(0);
  farandole::torch::GradientOptions sum;
  sum.op = farandole::Op::sum;
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, sum, std::vector<torch::Tensor>{p, q}, torch::optim::SGDOptions(0));
  const torch::Tensor flat = torch::zeros({12}, torch::kFloat64).to(device);
  p.mutable_grad() = flat.slice(0, 0, 6).detach();
  q.mutable_grad() = flat.slice(0, 6, 12).detach();
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad(false);
    ((p + 2 * q) * weight(context.rank())).sum().backward();
    optimizer.step();
    const torch::Tensor total = Total(context, weight);
    EXPECT(IsClose(flat, torch::cat({total, 2 * total})));
  }
}

std::atomic<int> copies{0};

// Counts what copies tensors, in any thread, while it lives.
class CountCopies {
 public:
  CountCopies() {
    copies = 0;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& call)
                                       -> std::unique_ptr<at::ObserverContext> {
          const std::string_view name = call.name();
          if (name == "aten::clone" || name == "aten::copy_") ++copies;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CountCopies() { at::removeCallback(handle_); }
  int count() const { return copies; }

 private:
  at::CallbackHandle handle_;
};

struct Ordinary : torch::nn::Module {
  torch::nn::Sequential body{
      torch::nn::Conv2d(2, 3, 3), torch::nn::BatchNorm2d(3),
      torch::nn::ReLU(),          torch::nn::Flatten(),
      torch::nn::Linear(48, 5),   torch::nn::LayerNorm(torch::nn::LayerNormOptions({5}))};
  Ordinary() { register_module("body", body); }
};

template <class Optimizer>
int CopiesOfAStep(Ordinary& model, Optimizer& optimizer) {
  int copies_of_last = 0;
  for (int step = 0; step < 3; ++step) {
    const torch::Tensor x = torch::ones({4, 2, 6, 6});
    const CountCopies counter;
    optimizer.zero_grad();
    model.body->forward(x).square().sum().backward();
    optimizer.step();
    copies_of_last = counter.count();
  }
  return copies_of_last;
}

void TestAnOrdinaryModelIsReducedWithoutCopies(Context& context) {
  Ordinary alone, mine;
  torch::optim::SGD plain(alone.parameters(), 0.1);
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(context, mine.parameters(),
                                                                      0.1);
  const int expected = CopiesOfAStep(alone, plain);
  EXPECT(CopiesOfAStep(mine, optimizer) == expected);
}

// Every gradient autograd makes is born in a shared block and reduced there; whoever keeps one
// keeps its values, also when the optimizer is gone, which then gets no block any more.
void TestSharedGradients(Context& context) {
  constexpr std::int64_t kCount = 100'000, kBytes = kCount * 8;
  torch::Tensor p = torch::ones({kCount}, torch::requires_grad().dtype(torch::kFloat64));
  torch::Tensor q = torch::ones({kCount / 4, 2}, torch::requires_grad().dtype(torch::kFloat64));
  const auto backward = [&](int step) {
    ((p * (context.rank() + step)).sum() + (q * step).sum()).backward();
  };
  const double mean_rank = (context.size() - 1) / 2.0;
  torch::Tensor kept;
  void* first = nullptr;
  {
    farandole::torch::GradientOptions options;
    options.share_gradients = true;
    farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
        context, options, std::vector<torch::Tensor>{p, q}, torch::optim::SGDOptions(0));
    const auto in_place = [&] { return context.counters().at("in_place_bytes"); };
    const std::int64_t before = in_place();
    for (int step = 1; step < 5; ++step) {
      optimizer.zero_grad();
      backward(step);
      optimizer.step();
      EXPECT((p.grad() == mean_rank + step).all().item<bool>());
      EXPECT((q.grad() == step).all().item<bool>());
      if (step == 1) first = p.grad().data_ptr();
      if (step != 2) continue;
      EXPECT(p.grad().data_ptr() == first);
      EXPECT(in_place() - before == (context.size() > 1 ? 2 * (kBytes + kBytes / 2) : 0));
      kept = p.grad();
    }
    EXPECT((kept == mean_rank + 2).all().item<bool>());
    EXPECT(p.grad().data_ptr() != first);
  }
  EXPECT((kept == mean_rank + 2).all().item<bool>());
  const void* const born = q.grad().data_ptr();
  p.mutable_grad().reset();
  q.mutable_grad().reset();
  kept.reset();
  backward(1);
  EXPECT(p.grad().data_ptr() != first && p.grad().data_ptr() != born);
  EXPECT((q.grad() == 1).all().item<bool>());
}

void TestFailure(Context& context) {
  torch::Tensor w = torch::zeros({2}, torch::requires_grad().device(device));
  torch::Tensor v = torch::zeros({2}, torch::requires_grad().device(device));
  farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
      context, std::vector<torch::Tensor>{w, v}, torch::optim::SGDOptions(1.0));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    (w + v).sum().backward();
    optimizer.step();
  }
  if (context.size() == 1) return;
  (w + v).sum().backward();
  if (context.rank() == 0) {
    optimizer.zero_grad();  // gives up what its hooks had sent
  } else {
    try {
      optimizer.step();
      EXPECT(false);
    } catch (const Error& error) {
      EXPECT(error.code() == Code::aborted);
      EXPECT(std::strstr(error.what(), "rank 0") != nullptr);
    }
    optimizer.zero_grad();
  }
  (w + v).sum().backward();
  optimizer.step();
  EXPECT(w[0].item<float>() == -4.0f);
}

std::optional<torch::ScalarType> TypeNamed(std::string_view name) {
  for (int i = 0; i < static_cast<int>(torch::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<torch::ScalarType>(i);
    if (torch::toString(type) == name) return type;
  }
  return std::nullopt;
}

void TestRows(Context& context) {
  const int n = context.size(), me = context.rank();
  std::vector<torch::Tensor> of_all;
  for (int rank = 0; rank < n; ++rank)
    of_all.push_back(torch::full({rank, 3}, rank, torch::kInt64));  // rank 0 has no rows
  const torch::Tensor mine = of_all[static_cast<std::size_t>(me)].to(device);
  const torch::Tensor all = farandole::torch::allgather(context, mine);
  EXPECT(all.device() == mine.device() && torch::equal(all.cpu(), torch::cat(of_all)));
  const torch::Tensor turned = farandole::torch::allgather(context, mine.t().contiguous().t());
  EXPECT(torch::equal(turned.cpu(), torch::cat(of_all)));
  EXPECT(farandole::torch::allgather(context, torch::ones({2, 0}, device)).size(0) == 2 * n);
  torch::Tensor waves = torch::full({3}, c10::complex<double>(me, 0.5), torch::kComplexDouble);
  EXPECT(torch::equal(farandole::torch::allgather(context, waves.to(device)).cpu()[3 * n - 1],
                      torch::full({}, c10::complex<double>(n - 1, 0.5), torch::kComplexDouble)));
  const auto bits = torch::full({2}, 60 + me, torch::kUInt8);
  for (const char* name : {"UInt16", "Float8_e5m2"}) {  // of newer versions than some we know
    const auto type = TypeNamed(name);
    if (!type) continue;
    const torch::Tensor moved = farandole::torch::allgather(context, bits.to(*type).to(device));
    EXPECT(torch::equal(moved.cpu()[2 * n - 1].to(torch::kFloat32),
                        torch::full({}, 59 + n, torch::kUInt8).to(*type).to(torch::kFloat32)));
  }
  const torch::Tensor data = torch::arange(2 * (n + 1), torch::kFloat64).reshape({n + 1, 2});
  const torch::Tensor part = farandole::torch::reducescatter(context, (data * (me + 1)).to(device));
  const std::int64_t first = me == 0 ? 0 : me + 1;
  const torch::Tensor expected = data.slice(0, first, me == 0 ? 2 : first + 1) * (n + 1) / 2.0;
  EXPECT(torch::allclose(part.cpu(), expected));
  try {
    farandole::torch::reducescatter(context, torch::tensor(1.0f).to(device));
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(std::strstr(error.what(), "reducescatter: a scalar has no rows") != nullptr);
  }
  try {  // on one rank alone: the next unnamed call meets the others all the same
    if (me == 0) farandole::torch::allgather(context, torch::tensor(1.0f).to(device));
    EXPECT(me != 0);
  } catch (const Error& error) {
    EXPECT(std::strstr(error.what(), "allgather: a scalar has no rows") != nullptr);
  }
  EXPECT(farandole::torch::allgather(context, torch::ones({1}).to(device)).size(0) == n);
  if (n == 1) return;
  farandole::Options named;
  named.name = "k";
  try {  // different collectives under one name
    if (me == 0) farandole::torch::reducescatter(context, mine, named);
    if (me != 0) farandole::torch::allgather(context, mine, named);
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::mismatch);
    EXPECT(std::strstr(error.what(), "\"k\": rank 0 called reducescatter, rank") != nullptr);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Context context = Context::init();
  std::optional<c10::StreamGuard> current;
  if (argc > 2) {
    const int index = std::strcmp(argv[1], "nccl") == 0 ? context.local_rank() : 0;
    device = torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(index));
    current.emplace(c10::Stream(c10::Stream::UNSAFE, device, std::atoi(argv[2])));
  }
  torch::set_num_threads(1);
  TestTraining<torch::optim::SGD>(context, torch::optim::SGDOptions(0.01).momentum(0.9));
  TestTraining<torch::optim::AdamW>(context, torch::optim::AdamWOptions(0.01));
  TestState(context);
  TestAccumulationAndClosure(context);
  TestWindows(context);
  TestGradientsWithoutHooks(context);
  TestAGradientThatOtherNodesRead(context);
  TestTwoOptimizersWhoseGradientsShareMemory(context);
  TestMemoryThatIsNotTheGradientsAlone(context);
  TestGradientsInABufferOfTheUsers(context);
  if (device.is_cpu()) TestAnOrdinaryModelIsReducedWithoutCopies(context);
  if (device.is_cpu()) TestSharedGradients(context);
  TestRows(context);
  TestFailure(context);
  if (device.is_cpu()) TestOnePassMoreOnOneRank();
  std::printf("rank %d of %d: all right\n", context.rank(), context.size());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
