// The C++ frontend from outside: `cpp_api threads N FOLDER` runs N ranks in this process, `cpp_api
// job FOLDER` is one rank of a job, `cpp_api mixed` reduces what a Python rank reduces.
#include <farandole/optimizer.h>

#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

using farandole::Code;
using farandole::Context;
using farandole::Error;
using farandole::Op;
using farandole::Options;
using farandole::Parameter;
using farandole::Span;
using farandole::Work;

namespace {

Options Named(const std::string& name, Op op = Op::sum) {
  Options options;
  options.name = name;
  options.op = op;
  return options;
}

template <class T>
void TestOps(Context& context) {
  const T mine = static_cast<T>(context.rank() + 1);
  const int n = context.size();
  std::vector<T> data(7, mine);
  context.allreduce(data, Named("sum"));
  EXPECT(data[6] == static_cast<T>(n * (n + 1) / 2));
  data.assign(7, mine);
  context.allreduce(data, Named("max", Op::max));
  EXPECT(data[0] == static_cast<T>(n));
  data.assign(7, mine);
  context.broadcast(data, n - 1, Named("from the last"));
  EXPECT(data[3] == static_cast<T>(n));
}

void TestContainers(Context& context) {
  const int n = context.size();
  std::array<float, 3> array = {1, 2, 3};
  context.allreduce(array, Named("array"));
  EXPECT(array[2] == 3.0f * static_cast<float>(n));
  double plain[2] = {1, 2};
  context.allreduce(plain, Named("plain"));
  EXPECT(plain[1] == 2.0 * n);
  std::int64_t scalar = 5;
  context.allreduce(Span(&scalar, 1), Named("scalar", Op::average));
  EXPECT(scalar == 5);
  std::vector<float> none;
  context.allreduce(none, Named("none"));
  bool flag[1] = {context.rank() == 0};
  context.allreduce(flag, Named("any", Op::max));
  EXPECT(flag[0]);
}

void TestBuffers(Context& context) {
  constexpr std::size_t kCount = 50'000;
  const int n = context.size();
  const std::int64_t before = context.counters().at("in_place_bytes");
  const std::shared_ptr<float[]> data = context.buffer<float>(kCount);
  EXPECT(data[0] == 0.0f);
  data[kCount - 1] = static_cast<float>(context.rank() + 1);
  context.allreduce(Span(data.get(), kCount), Named("in buffers"));
  EXPECT(data[kCount - 1] == static_cast<float>(n * (n + 1) / 2));
  const std::int64_t bytes = context.counters().at("in_place_bytes") - before;
  EXPECT(bytes == (n > 1 ? 4 * static_cast<std::int64_t>(kCount) : 0));
}

void TestFactorsAndCompression(Context& context) {
  Options options = Named("factors", Op::average);
  options.prescale = 0.5;
  options.postscale = 4.0;
  options.compression = farandole::Compression::bf16;
  std::vector<float> data(100, 3.0f);
  context.allreduce(data, options);
  EXPECT(data[99] == 6.0f);
}

void TestBitwiseAndPreMultiplied(Context& context) {
  std::vector<int> bits = {1 << context.rank(), 7};
  context.allreduce(bits, Named("bits", Op::bit_or));
  EXPECT(bits[0] == (1 << context.size()) - 1 && bits[1] == 7);
  bool odd[1] = {true};
  context.allreduce(odd, Named("odd", Op::bit_xor));
  EXPECT(odd[0] == (context.size() % 2 == 1));
  Options options = Named("weighted", Op::premul_sum);
  options.prescale = context.rank() + 1;
  std::vector<float> data(10, 2.0f);
  context.allreduce(data, options);
  EXPECT(data[9] == static_cast<float>(context.size() * (context.size() + 1)));
  std::vector<float> floats(1);
  const auto refused = context.try_allreduce(floats, Named("floats", Op::bit_and));
  EXPECT(!refused.ok() && refused.error().code() == Code::invalid_argument);
}

// Rank r has the r-th axis of the space, twice: orthogonal tensors are added, equal ones stay.
void TestAdasum(Context& context) {
  const auto size = static_cast<std::size_t>(context.size());
  std::vector<double> axis(size), same(3, 0.5);
  axis[static_cast<std::size_t>(context.rank())] = 2.0;
  Work of_same = context.allreduce_async(same, Named("same", Op::adasum));
  context.allreduce(axis, Named("axis", Op::adasum));
  of_same.wait();
  EXPECT(axis == std::vector<double>(size, 2.0) && same == std::vector<double>(3, 0.5));
  Options options = Named("scaled", Op::adasum);
  options.prescale = 2.0;
  options.postscale = -0.25;
  options.compression = farandole::Compression::bf16;
  std::vector<float> scaled(300, 4.0f);
  context.allreduce(scaled, options);
  EXPECT(scaled[299] == -2.0f);
  std::vector<int> integers(1);
  const auto refused = context.try_allreduce(integers, Named("integers", Op::adasum));
  EXPECT(!refused.ok() && refused.error().code() == Code::invalid_argument);
}

void TestAsync(Context& context) {
  std::vector<std::vector<float>> data(50, std::vector<float>(1000, 1.0f));
  std::vector<Work> works;
  for (std::size_t i = 0; i < data.size(); ++i)
    works.push_back(context.allreduce_async(data[i], Named("async " + std::to_string(i))));
  for (Work& work : works) EXPECT(work.wait_for(60));
  for (const auto& one : data) EXPECT(one[999] == static_cast<float>(context.size()));
  std::vector<float> dropped(1000, 1.0f);
  (void)context.allreduce_async(dropped, Named("dropped"));  // its end is waited for
  EXPECT(dropped[0] == static_cast<float>(context.size()));
  for (int i = 0; i < 300; ++i) context.allreduce(dropped);  // unnamed, more than the 256 slots
}

void TestErrors(Context& context) {
  std::vector<float> data(static_cast<std::size_t>(context.rank() == 0 ? 2 : 3));
  const auto outcome = context.try_allreduce(data, Named("uneven"));
  EXPECT(outcome.ok() == (context.size() == 1));
  if (!outcome) {
    EXPECT(outcome.error().code() == Code::mismatch);
    EXPECT(std::strstr(outcome.error().what(), "\"uneven\"") != nullptr);
    EXPECT(std::strstr(outcome.error().what(), "rank 0") != nullptr);
  }
  try {
    context.broadcast(data, context.size());
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::invalid_argument);
  }
  context.barrier();
}

void TestProcessSets(Context& context) {
  if (context.size() < 2) return;
  std::vector<int> ranks;
  for (int rank = 1; rank < context.size(); ++rank) ranks.push_back(rank);
  const farandole::ProcessSet rest = context.add_process_set(ranks);
  if (context.rank() > 0) {
    Options options = Named("of the rest");
    options.set = rest;
    std::vector<int> data = {1};
    context.allreduce(data, options);
    EXPECT(data[0] == context.size() - 1);
  }
  context.remove_process_set(rest);
  EXPECT(context.counters().at("batches") > 0);
  EXPECT(!context.setting("FARANDOLE_FUSION_THRESHOLD").empty());
}

void TestTimeline(Context& context, const std::string& folder) {
  context.barrier();
  const std::string path = folder + "/timeline.{rank}.json";
  context.start_timeline(path, true);
  try {
    context.start_timeline(path + ".other");
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::invalid_argument);
  }
  std::vector<float> data(10, 1.0f);
  context.allreduce(data, Named("on the timeline"));
  context.stop_timeline();
  std::ifstream written(folder + "/timeline." + std::to_string(context.rank()) + ".json");
  const std::string text((std::istreambuf_iterator<char>(written)), {});
  EXPECT(text.find("on the timeline") != std::string::npos);
}

// value -= rate * gradient, over a list of parameters that backward() fills.
struct Descent {
  std::list<Parameter<double>> list;
  double rate;
  std::list<Parameter<double>>& parameters() { return list; }
  int step(int told) {
    for (auto& parameter : list)
      for (std::size_t i = 0; i < parameter.value.size(); ++i)
        parameter.value[i] -= rate * parameter.gradient[i];
    return told;
  }
};

// Rank `failing` gives up its step; the others' step() names it and its reason.
template <class Optimizer>
void FailOn(int failing, Context& context, Optimizer& optimizer) {
  if (context.rank() == failing) return optimizer.fail("no data left");
  try {
    optimizer.step(0);
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::aborted);
    EXPECT(std::strstr(error.what(), "no data left") != nullptr);
    EXPECT(std::strstr(error.what(), ("rank " + std::to_string(failing)).c_str()) != nullptr);
  }
}

void TestOptimizer(Context& context) {
  const double mean = (context.size() + 1) / 2.0;  // of rank + 1
  std::vector<double> weight(1000, context.rank()), bias(3, context.rank());
  std::vector<double> weight_gradient(1000), bias_gradient(3);
  Descent descent{{{"weight", weight, weight_gradient}, {"bias", bias, bias_gradient}}, 0.5};
  farandole::broadcast_parameters(context, descent.parameters(), context.size() - 1);
  EXPECT(weight[500] == context.size() - 1);
  farandole::DistributedOptimizer optimizer(context, std::move(descent));
  double expected = weight[0];
  for (int step = 0; step < 5; ++step) {
    weight_gradient.assign(1000, context.rank() + 1);
    bias_gradient.assign(3, 2.0 * (context.rank() + 1));
    if ((step + context.rank()) % 2 == 0) optimizer.ready(1);
    if (step == 3) optimizer.synchronize();
    if (step == 3) EXPECT(weight_gradient[1] == mean);
    if (step == 3) continue;
    EXPECT(optimizer.step(step) == step);
    expected -= 0.5 * mean;
    EXPECT(weight[999] == expected);
  }
  if (context.size() == 1) return;
  FailOn(1, context, optimizer);
  optimizer.step(0);
}

// A rank reduces its gradients twice before its step(); the others go on to their next step, or to
// another collective. The error is final.
void TestUnequalSteps(Context& context, bool goes_on) {
  std::vector<double> weight(4, 0.0), gradient(4, 1.0);
  farandole::DistributedOptimizer optimizer(context, Descent{{{"w", weight, gradient}}, 1.0});
  try {
    for (int step = 1; step <= 3; ++step) {
      if (step == 2 && context.rank() == 1) optimizer.synchronize();
      optimizer.step(0);
      std::vector<double> loss = {1.0};
      if (goes_on) context.allreduce(loss, Named("loss", Op::average));
    }
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::mismatch);
    EXPECT(std::strstr(error.what(), "rank 1 is in step 2") != nullptr);
    EXPECT(std::strstr(error.what(), "in step 3") != nullptr);
  }
  EXPECT(farandole_check(context.handle()) == FARANDOLE_MISMATCH);
  EXPECT(farandole_shutdown(context.handle()) == FARANDOLE_OK);  // it has been told
}

// The first round after a join fails on one rank; the next one is the first on all.
void TestFailAfterJoin(Context& context) {
  if (context.size() == 1) return;
  std::vector<double> weight(4, 0.0), gradient(4, 1.0);
  farandole::DistributedOptimizer optimizer(context, Descent{{{"w", weight, gradient}}, 1.0});
  for (int step = 0; step < 2; ++step) optimizer.step(0);
  context.join();
  FailOn(0, context, optimizer);
  for (int step = 0; step < 3; ++step) optimizer.step(0);
}

// An optimizer may be used by mistake when its Context has ended.
void TestOptimizerOutlivesItsContext() {
  std::vector<double> weight(4, 0.0), gradient(4, 1.0);
  std::vector<Context> contexts = Context::in_process(1);
  farandole::DistributedOptimizer optimizer(contexts[0], Descent{{{"w", weight, gradient}}, 1.0});
  optimizer.step(0);
  contexts = std::vector<Context>();
  for (int use = 0; use < 2; ++use) {
    try {
      if (use == 0) optimizer.step(0);
      if (use == 1) optimizer.ready(0);
      EXPECT(false);
    } catch (const Error& error) {
      EXPECT(error.code() == Code::invalid_argument);
      EXPECT(std::strstr(error.what(), "Context of these gradients has ended") != nullptr);
    }
  }
  optimizer.fail("nothing happens");
}

// A Context that is moved takes its optimizers along.
void TestOptimizerOfAMovedContext() {
  std::vector<double> weight(4, 0.0), gradient(4, 1.0);
  Context first = std::move(Context::in_process(1)[0]);
  farandole::DistributedOptimizer optimizer(first, Descent{{{"w", weight, gradient}}, 1.0});
  Context second = std::move(first);
  optimizer.step(0);
  second.join();
  optimizer.step(0);
  EXPECT(weight[0] == -2.0);
}

// Two optimizers of unnamed exchanges: their gradients have names of their own.
void TestTwoOptimizers(Context& context) {
  std::vector<double> a(4, 0.0), b(4, 0.0), a_gradient(4), b_gradient(4);
  farandole::DistributedOptimizer first(context, Descent{{{"w", a, a_gradient}}, 1.0});
  farandole::DistributedOptimizer second(context, Descent{{{"w", b, b_gradient}}, 1.0});
  for (int step = 1; step <= 3; ++step) {
    a_gradient.assign(4, 1.0);
    b_gradient.assign(4, 100.0);
    first.step(0);
    second.step(0);
    EXPECT(a[0] == -1.0 * step && b[0] == -100.0 * step);
  }
}

void TestAll(Context& context, const std::string& folder) {
  TestOps<float>(context);
  TestOps<double>(context);
  TestOps<std::int8_t>(context);
  TestOps<std::uint8_t>(context);
  TestOps<short>(context);
  TestOps<int>(context);
  TestOps<long>(context);
  TestOps<long long>(context);
  TestContainers(context);
  TestBuffers(context);
  TestFactorsAndCompression(context);
  TestBitwiseAndPreMultiplied(context);
  TestAdasum(context);
  TestAsync(context);
  TestErrors(context);
  TestProcessSets(context);
  TestOptimizer(context);
  TestTwoOptimizers(context);
  TestFailAfterJoin(context);
  TestTimeline(context, folder);
  EXPECT(context.join() < context.size());
}

// Its partner is consumer_test.py's Python rank.
void ReduceWithPython(Context& context) {
  std::vector<float> data = {1, 2, 3};
  context.allreduce(data, Named("shared", Op::average));
  EXPECT(data[0] == 10.5f && data[2] == 16.5f);
  std::int64_t told = 41 + context.rank();
  context.broadcast(Span(&told, 1), 0, Named("told"));
  EXPECT(told == 41);
}

}  // namespace

// Sets that come and go, each with a collective of its own.
void ChurnSets(Context& context) {
  const int size = context.size();
  for (int i = 0; i < 1000; ++i) {
    const std::vector<int> ranks = {std::min(i % size, (i + 1) % size),
                                    std::max(i % size, (i + 1) % size)};
    Options options = Named("of the set");
    options.set = context.add_process_set(ranks);
    if (context.rank() == ranks[0] || context.rank() == ranks[1]) {
      std::vector<int> data = {context.rank(), i};
      context.allreduce(data, options);
      EXPECT(data[0] == ranks[0] + ranks[1]);
      EXPECT(data[1] == 2 * i);
    }
    context.remove_process_set(options.set);
  }
}

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const std::string folder = argv[argc - 1];
  if (mode == "threads") {
    std::vector<Context> contexts = Context::in_process(std::atoi(argv[2]));
    std::vector<std::thread> threads;
    for (Context& context : contexts)
      threads.emplace_back([&context, &folder] {
        TestAll(context, folder);
        context.shutdown();
      });
    for (std::thread& thread : threads) thread.join();
    for (int goes_on = 0; goes_on < 2 && contexts.size() > 1; ++goes_on) {
      std::vector<Context> parted = Context::in_process(std::atoi(argv[2]));
      threads.clear();
      for (Context& context : parted)
        threads.emplace_back([&, goes_on] { TestUnequalSteps(context, goes_on == 1); });
      for (std::thread& thread : threads) thread.join();
    }
    TestOptimizerOutlivesItsContext();
    TestOptimizerOfAMovedContext();
    std::printf("%d ranks as threads: all right\n", std::atoi(argv[2]));
    return 0;
  }
  Context context = Context::init();
  if (mode == "churn") {
    ChurnSets(context);
  } else {
    mode == "mixed" ? ReduceWithPython(context) : TestAll(context, folder);
  }
  context.shutdown();
  std::printf("rank %d of %d: all right\n", context.rank(), context.size());
  return 0;
}
