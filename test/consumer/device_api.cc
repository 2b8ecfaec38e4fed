// The C++ frontend on GPUs that are fakes: `device_api threads N WAY` runs N ranks in this
// process, `device_api job WAY` is one rank of a job. WAY is what FARANDOLE_NCCL and the number of
// fake GPUs lead to: "nccl", with a GPU per rank, or "staged", with one GPU for all.
#include <farandole/optimizer.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_gpu.h"

using farandole::Code;
using farandole::Context;
using farandole::DeviceParameter;
using farandole::DeviceSpan;
using farandole::Error;
using farandole::Op;
using farandole::Options;
using farandole::Stream;
using farandole::Work;

namespace {

constexpr std::int64_t kLateUs = 3000;

struct Rank {
  Context& context;
  int device;
  bool is_launched_early;  // a collective is launched while its producer is still at work
  float mine() const { return static_cast<float>(context.rank() + 1); }
  float sum() const { return static_cast<float>(context.size() * (context.size() + 1) / 2); }
};

// Means: a library may multiply by 1/size instead of dividing.
bool Near(float a, float b) { return std::abs(a - b) < 1e-4f; }

template <class T>
DeviceSpan<T> On(std::vector<T>& memory) {
  return {memory.data(), memory.size()};
}

Options Named(const std::string& name, Op op = Op::sum) {
  Options options;
  options.name = name;
  options.op = op;
  return options;
}

void TestLateProducer(const Rank& rank) {
  FakeStream producer(rank.device), consumer(rank.device);
  std::vector<float> data(1000, -1.0f);
  producer.Write(data, std::vector<float>(1000, rank.mine()), kLateUs);
  Work work = rank.context.allreduce_async(On(data), producer, Named("late"));
  work.wait(consumer);
  EXPECT(work.done());
  EXPECT(consumer.Read(data) == std::vector<float>(1000, rank.sum()));
  work.wait();
  EXPECT(work.is_complete());
}

void TestTheHostDoesNotWaitForTheDevice(const Rank& rank) {
  if (!rank.is_launched_early) return;
  FakeStream producer(rank.device), consumer(rank.device), other(rank.device);
  std::vector<double> data(77);
  producer.Hold();
  producer.Write(data, std::vector<double>(77, rank.mine()), 0);
  Work work = rank.context.allreduce_async(On(data), producer, Named("held"));
  work.wait(consumer);
  work.wait(other);
  EXPECT(work.done() && !work.is_complete() && !work.wait_for(0.001));
  producer.Release();
  EXPECT(consumer.Read(data)[76] == rank.sum() && other.Read(data)[0] == rank.sum());
}

void TestBlockingCallsOrderTheirStream(const Rank& rank) {
  FakeStream stream(rank.device);
  std::vector<std::int64_t> counts(9);
  stream.Write(counts, std::vector<std::int64_t>(9, rank.context.rank() + 1), kLateUs);
  rank.context.allreduce(On(counts), stream, Named("in one stream", Op::max));
  EXPECT(stream.Read(counts)[8] == rank.context.size());
  std::vector<float> weights(50);
  stream.Write(weights, std::vector<float>(50, rank.mine()), kLateUs);
  rank.context.broadcast(On(weights), rank.context.size() - 1, stream, Named("weights"));
  EXPECT(stream.Read(weights)[49] == static_cast<float>(rank.context.size()));
  stream.Write(weights, std::vector<float>(50, 3.0f), kLateUs);
  rank.context.broadcast_async(On(weights), 0, stream).hand_over(stream);
  EXPECT(stream.Read(weights)[0] == 3.0f);
  std::vector<float> none;
  rank.context.allreduce(On(none), stream);
}

void TestDroppedWorkIsWaitedFor(const Rank& rank) {
  FakeStream producer(rank.device);
  std::vector<float> data(300);
  producer.Write(data, std::vector<float>(300, rank.mine()), 10 * kLateUs);
  (void)rank.context.allreduce_async(On(data), producer, Named("dropped"));
  EXPECT(data[299] == rank.sum());
  producer.Write(data, std::vector<float>(300, rank.mine()), 10 * kLateUs);
  Work work = rank.context.allreduce_async(On(data), producer, Named("dropped"));
  work = Work();
  EXPECT(data[0] == rank.sum());
}

void TestManyAtOnceWithOptions(const Rank& rank) {
  FakeStream producer(rank.device), consumer(rank.device);
  std::vector<std::vector<float>> data(40, std::vector<float>(500));
  Options options = Named("", Op::average);
  options.prescale = 0.5;
  options.postscale = 4.0;
  options.compression = farandole::Compression::fp16;
  std::vector<Work> works;
  for (std::size_t i = 0; i < data.size(); ++i) {
    producer.Write(data[i], std::vector<float>(500, static_cast<float>(i)), 0);
    options.name = "many " + std::to_string(i);
    works.push_back(rank.context.allreduce_async(On(data[i]), producer, options));
  }
  for (Work& work : works) work.wait(consumer);
  for (std::size_t i = 0; i < data.size(); ++i)
    EXPECT(Near(consumer.Read(data[i])[499], 2.0f * static_cast<float>(i)));
}

void TestProcessSets(const Rank& rank) {
  if (rank.context.size() < 3) return;
  const farandole::ProcessSet pair = rank.context.add_process_set({0, 2});
  if (rank.context.rank() % 2 == 0 && rank.context.rank() < 3) {
    FakeStream stream(rank.device);
    std::vector<float> data(4);
    stream.Write(data, std::vector<float>(4, rank.mine()), kLateUs);
    Options options = Named("of a pair");
    options.set = pair;
    rank.context.allreduce(On(data), stream, options);
    EXPECT(stream.Read(data)[3] == 4.0f);
  }
  rank.context.remove_process_set(pair);
}

// Neither NCCL nor the move kernel knows the type.
void TestMovedOnly(const Rank& rank) {
  using Number = std::complex<double>;
  const auto size = static_cast<std::size_t>(rank.context.size());
  FakeStream stream(rank.device);
  std::vector<Number> mine(3), all(3 * size), pieces(3 * size);
  stream.Write(mine, std::vector<Number>(3, {1.5, rank.mine()}), kLateUs);
  rank.context.allgather_into(On(mine), On(all), stream, Named("complex"));
  rank.context.alltoall_into(On(all), On(pieces), stream, Named("complex pieces"));
  rank.context.broadcast(On(mine), rank.context.size() - 1, stream, Named("complex weights"));
  EXPECT(stream.Read(all)[3 * size - 1] == Number(1.5, rank.context.size()));
  EXPECT(stream.Read(pieces)[0] == all[3 * static_cast<std::size_t>(rank.context.rank())]);
  EXPECT(stream.Read(mine)[2] == Number(1.5, rank.context.size()));
}

void TestRows(const Rank& rank) {
  const auto size = static_cast<std::size_t>(rank.context.size());
  FakeStream stream(rank.device), consumer(rank.device);
  std::vector<float> mine(6), all(6 * size), part(3), pieces(6 * size);
  stream.Write(mine, std::vector<float>(6, rank.mine()), kLateUs);
  rank.context.allgather_into(On(mine), On(all), stream, Named("gathered"));
  Work exchange = rank.context.alltoall_into_async(On(all), On(pieces), stream, Named("pieces"));
  exchange.wait(consumer);
  Options options = Named("parts");
  options.row = 3;
  std::vector<float> summed(3 * size);
  stream.Write(summed, std::vector<float>(3 * size, rank.mine()), kLateUs);
  rank.context.reducescatter_into(On(summed), On(part), stream, options);
  EXPECT(stream.Read(part) == std::vector<float>(3, rank.sum()));
  const std::vector<float> gathered = stream.Read(all), exchanged = consumer.Read(pieces);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT(gathered[i] == static_cast<float>(i / 6 + 1));
    EXPECT(exchanged[i] == rank.mine());
  }
  exchange.wait();
  EXPECT(exchange.is_complete());
}

// Memory that is free in the order of the stream: somebody is still writing to it.
struct BusyMemory {
  FakeStream& stream;
  std::vector<float> data;
  static void* Allocate(void* self, std::int32_t, const std::int64_t*, std::int32_t,
                        std::int64_t bytes) {
    auto& [stream, data] = *static_cast<BusyMemory*>(self);
    data.resize(static_cast<std::size_t>(bytes) / sizeof(float));
    stream.Write(data, std::vector<float>(data.size(), -1.0f), kLateUs);
    return data.data();
  }
};

// The C ABI's: rank r gives r + 1 rows. `memory` NULL: the result is in the library's.
farandole_work* Gather(const Rank& rank, FakeStream& stream, const std::vector<float>& mine,
                       const farandole_allocator* memory) {
  Options options = Named("any size");
  const farandole_params params =
      farandole::detail::params_of(FARANDOLE_ALLGATHER, FARANDOLE_CUDA, options);
  const farandole::detail::Shape shape(static_cast<std::int64_t>(mine.size()), 1);
  const farandole_tensor tensor = shape.describe(nullptr, farandole::DataType::float32);
  const auto prepared =
      farandole::detail::prepare(rank.context.handle(), params, options.name, &tensor, 1).value();
  const farandole_stream producer = farandole::detail::to_c(stream);
  const void* const in = mine.data();
  farandole_work* work = nullptr;
  EXPECT(farandole_start_allocating(prepared.operation.get(), prepared.version, &in, memory,
                                    &producer, &work) == FARANDOLE_OK);
  EXPECT(farandole_wait_on(work, &producer, -1) == FARANDOLE_OK);
  return work;
}

void TestResultsOfAnySize(const Rank& rank) {
  FakeStream stream(rank.device);
  std::vector<float> mine(static_cast<std::size_t>(rank.context.rank()) + 1), expected;
  for (int r = 1; r <= rank.context.size(); ++r)
    expected.insert(expected.end(), static_cast<std::size_t>(r), static_cast<float>(r));
  stream.Write(mine, std::vector<float>(mine.size(), rank.mine()), kLateUs);
  BusyMemory busy{stream, {}};
  const farandole_allocator memory{sizeof memory, &busy, &BusyMemory::Allocate};
  farandole_work_release(Gather(rank, stream, mine, &memory));
  EXPECT(stream.Read(busy.data) == expected);
  farandole_work* const work = Gather(rank, stream, mine, nullptr);
  farandole_buffer* result = nullptr;
  EXPECT(farandole_take_result(work, 0, &result) == FARANDOLE_OK);
  farandole_work_release(work);
  stream.Synchronize();
  const auto* const data = static_cast<const float*>(farandole_buffer_data(result));
  EXPECT(std::vector<float>(data, data + expected.size()) == expected);
  farandole_buffer_release(result);
}

template <class Call>
void ExpectRefused(Call call, const char* text) {
  try {
    call();
    EXPECT(false);
  } catch (const Error& error) {
    if (error.code() != Code::invalid_argument || std::strstr(error.what(), text) == nullptr)
      std::fprintf(stderr, "code %d: %s\n", static_cast<int>(error.code()), error.what());
    EXPECT(error.code() == Code::invalid_argument);
    EXPECT(std::strstr(error.what(), text) != nullptr);
  }
}

void TestWrongUse(const Rank& rank) {
  FakeStream stream(rank.device);
  std::vector<float> data(3, rank.mine());
  const Stream elsewhere{rank.device + 1, nullptr};
  const Stream nowhere{99, nullptr};
  ExpectRefused([&] { rank.context.allreduce(On(data), nowhere, Named("wrong")); }, "CUDA device");
  stream.BeginCapture();
  ExpectRefused([&] { rank.context.allreduce(On(data), stream, Named("wrong")); }, "captured");
  stream.EndCapture();
  Work work = rank.context.allreduce_async(On(data), stream, Named("wrong"));
  ExpectRefused([&] { work.wait(elsewhere); }, "CUDA device");
  ExpectRefused([&] { work.hand_over(elsewhere); }, "CUDA device");
  ExpectRefused([&] { rank.context.alltoall_into(On(data), On(data), stream); },
                rank.context.size() % 3 == 0 || rank.context.size() == 1
                    ? "its output in the memory of its input"
                    : "do not divide");
  work.wait(stream);
  EXPECT(stream.Read(data)[2] == rank.sum());
}

// Ranks that differ in where their memory is.
void TestMixedPlaces(const Rank& rank) {
  if (rank.context.size() < 2) return;
  FakeStream stream(rank.device);
  std::vector<float> data(3, 1.0f);
  const auto outcome = rank.context.rank() == 0
                           ? rank.context.try_allreduce(On(data), stream, Named("mixed"))
                           : rank.context.try_allreduce(data, Named("mixed"));
  EXPECT(!outcome.ok() && outcome.error().code() == Code::mismatch);
  EXPECT(std::strstr(outcome.error().what(), "\"mixed\"") != nullptr);
}

// value -= gradient / 2, as its "kernel" in the stream of the step would.
struct Descent {
  std::vector<DeviceParameter<float>> list;
  std::vector<DeviceParameter<float>>& parameters() { return list; }
  int step(FakeStream& stream, int told) {
    stream.Synchronize();
    for (auto& parameter : list) {
      const float* const gradient = parameter.gradient.address();
      const std::size_t count = parameter.gradient.size();
      for (std::size_t i = 0; i < count; ++i) parameter.value.address()[i] -= 0.5f * gradient[i];
    }
    return told;
  }
};

void TestOptimizer(const Rank& rank) {
  FakeStream backward(rank.device), other(rank.device);
  std::vector<float> weight(900), bias(5), weight_gradient(900), bias_gradient(5);
  backward.Write(weight, std::vector<float>(900, rank.mine()), kLateUs);
  Descent descent{
      {{"weight", On(weight), On(weight_gradient)}, {"bias", On(bias), On(bias_gradient)}}};
  farandole::broadcast_parameters(rank.context, descent.parameters(), 0, backward);
  EXPECT(backward.Read(weight)[899] == 1.0f);
  const float mean = rank.sum() / static_cast<float>(rank.context.size());
  farandole::DistributedOptimizer optimizer(rank.context, std::move(descent));
  float expected = 1.0f;
  for (int step = 0; step < 5; ++step) {
    other.Write(bias_gradient, std::vector<float>(5, 7.0f), kLateUs);
    optimizer.ready(1, other);
    backward.Write(weight_gradient, std::vector<float>(900, rank.mine()), kLateUs);
    if (step == 3) optimizer.synchronize(backward);
    if (step == 3) EXPECT(Near(backward.Read(weight_gradient)[1], mean));
    if (step == 3) EXPECT(Near(backward.Read(bias_gradient)[1], 7.0f));
    if (step == 3) continue;
    EXPECT(optimizer.step(backward, step) == step);
    expected -= 0.5f * mean;
    EXPECT(Near(weight[899], expected) && Near(weight[0], expected));
  }
  ExpectRefused([&] { optimizer.ready(2, backward); }, "there are 2 parameters");
  if (rank.context.size() == 1) return;
  if (rank.context.rank() == 1) {
    optimizer.fail("no data left");
    return;
  }
  const auto failed = [&] { optimizer.step(backward, 0); };
  try {
    failed();
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::aborted);
    EXPECT(std::strstr(error.what(), "no data left") != nullptr);
  }
}

// What the destructor promises: no gradient is written after it.
void TestDroppedOptimizer(const Rank& rank) {
  FakeStream backward(rank.device);
  std::vector<float> weight(10), gradient(10);
  {
    farandole::DistributedOptimizer optimizer(
        rank.context, Descent{{{"dropped weight", On(weight), On(gradient)}}});
    backward.Write(gradient, std::vector<float>(10, rank.mine()), 10 * kLateUs);
    optimizer.synchronize(backward);
  }
  EXPECT(Near(gradient[9], rank.sum() / static_cast<float>(rank.context.size())));
}

void TestAll(Context& context, int device, const std::string& way) {
  const Rank rank{context, device, way == "nccl"};
  TestLateProducer(rank);
  TestTheHostDoesNotWaitForTheDevice(rank);
  TestBlockingCallsOrderTheirStream(rank);
  TestDroppedWorkIsWaitedFor(rank);
  TestManyAtOnceWithOptions(rank);
  TestProcessSets(rank);
  TestRows(rank);
  TestMovedOnly(rank);
  TestResultsOfAnySize(rank);
  TestWrongUse(rank);
  TestMixedPlaces(rank);
  TestOptimizer(rank);
  TestDroppedOptimizer(rank);
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc > 2);
  const std::string way = argv[argc - 1];
  if (std::strcmp(argv[1], "threads") == 0) {
    std::vector<Context> contexts = Context::in_process(std::atoi(argv[2]));
    std::vector<std::thread> threads;
    for (Context& context : contexts)
      threads.emplace_back([&context, &way] {
        TestAll(context, way == "nccl" ? context.rank() : 0, way);
        context.shutdown();
      });
    for (std::thread& thread : threads) thread.join();
    std::printf("%d ranks as threads: all right\n", std::atoi(argv[2]));
    return 0;
  }
  Context context = Context::init();
  TestAll(context, way == "nccl" ? context.local_rank() : 0, way);
  context.shutdown();
  std::printf("rank %d of %d: all right\n", context.rank(), context.size());
  return 0;
}
