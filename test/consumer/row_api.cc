// Allgather, reducescatter and alltoall of the C++ API: `row_api threads N` runs N ranks in this
// process, `row_api job` is one rank of a job, `row_api mixed` meets a Python rank.
#include <farandole/context.h>

#include <array>
#include <complex>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

using farandole::Code;
using farandole::Context;
using farandole::Error;
using farandole::Op;
using farandole::Options;
using farandole::Work;
using Splits = std::vector<std::int64_t>;

namespace {

constexpr std::size_t kNoMemory = 123'457;  // bytes of which there are none in one piece

}  // namespace

void* operator new(std::size_t bytes) {
  void* const memory = bytes == kNoMemory ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

Options Named(const std::string& name, std::int64_t row = 1) {
  Options options;
  options.name = name;
  options.op = Op::sum;
  options.row = row;
  return options;
}

// `n` elements that say who gave them: 100 x rank + position.
template <class T>
std::vector<T> From(int rank, int n) {
  std::vector<T> data;
  for (int i = 0; i < n; ++i) data.push_back(static_cast<T>(100 * rank + i));
  return data;
}

template <class T>
void Append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// What throws: its code and a part of its sentence.
template <class Call>
void ExpectError(Call call, Code code, const char* text) {
  try {
    call();
    EXPECT(false);
  } catch (const Error& error) {
    const bool as_expected = error.code() == code && std::strstr(error.what(), text) != nullptr;
    if (!as_expected) std::fprintf(stderr, "%s\n", error.what());
    EXPECT(as_expected);
  }
}

template <class T>
void TestAllgather(Context& context) {
  const int n = context.size();
  std::vector<T> expected, whole_rows;
  for (int rank = 0; rank < n; ++rank) {
    Append(expected, From<T>(rank, rank));  // rank 0 gives nothing
    Append(whole_rows, From<T>(rank, 3 * (n - rank)));
  }
  EXPECT(context.allgather(From<T>(context.rank(), context.rank()), Named("uneven")) == expected);
  EXPECT(context.allgather(From<T>(context.rank(), context.rank())) == expected);
  EXPECT(context.allgather(From<T>(context.rank(), 3 * (n - context.rank())), Named("rows", 3)) ==
         whole_rows);
  EXPECT(context.allgather(std::vector<T>(), Named("nothing")).empty());
}

template <class T>
void TestReducescatter(Context& context) {
  const int n = context.size();
  const int rows = 2 * n + (n > 1 ? 1 : 0);  // rank 0 gets one more
  std::vector<T> data = From<T>(0, 2 * rows);
  const int first = context.rank() == 0 ? 0 : 2 * context.rank() + 1;
  const int mine = context.rank() == 0 && n > 1 ? 3 : 2;
  std::vector<T> expected;
  for (int i = 2 * first; i < 2 * (first + mine); ++i) expected.push_back(static_cast<T>(n * i));
  EXPECT(context.reducescatter(data, Named("sum", 2)) == expected);
  EXPECT(data == From<T>(0, 2 * rows));
  Options options = Named("", 2);
  options.op = Op::max;
  std::vector<T> taken(expected.size());
  context.reducescatter_into(data, taken, options);
  EXPECT(taken.front() == static_cast<T>(2 * first));
  Work work = context.reducescatter_into_async(data, taken, Named("async", 2));
  work.wait();
  EXPECT(taken == expected);
}

// Rows of two elements, as many in each direction as these say; the most on one way only.
int SplitOf(int from, int to) { return from == 0 && to == 1 ? 7 : (from + 2 * to) % 3; }

template <class T>
void TestAlltoall(Context& context) {
  const int n = context.size(), me = context.rank();
  std::vector<T> data, expected;
  Splits sends, receives;
  for (int peer = 0; peer < n; ++peer) {
    sends.push_back(SplitOf(me, peer));
    receives.push_back(SplitOf(peer, me));
    Append(data, From<T>(me + 5 * peer, 2 * SplitOf(me, peer)));
    Append(expected, From<T>(peer + 5 * me, 2 * SplitOf(peer, me)));
  }
  for (const char* name : {"splits", ""}) {
    const auto received = context.alltoall(data, sends, Named(name, 2));
    EXPECT(received.data == expected);
    EXPECT(received.received_splits == receives);
  }
  const Splits none(static_cast<std::size_t>(n), 0);
  EXPECT(context.alltoall(std::vector<T>(), none, Named("nothing")).data.empty());
}

// What is moved, and cannot be reduced.
void TestMovedOnly(Context& context) {
  const int last = context.size() - 1;
  const auto byte = static_cast<std::uint8_t>(200 + context.rank());
  const auto of_last = static_cast<std::uint8_t>(200 + last);
  std::vector<farandole::Float8E4m3fn> small(5, {byte});
  context.broadcast(small, last, Named("float8_e4m3fn"));
  EXPECT(small[4].bits == of_last);
  const auto all =
      context.allgather(std::vector<farandole::Float8E5m2>(2, {byte}), Named("float8_e5m2"));
  EXPECT(all.size() == 2 * static_cast<std::size_t>(context.size()) && all.back().bits == of_last);
  const float of_rank = static_cast<float>(context.rank());
  std::vector<std::complex<float>> pairs(3, {of_rank, -of_rank});
  context.broadcast(pairs, last, Named("complex64"));
  EXPECT(pairs[2] == std::complex<float>(static_cast<float>(last), -static_cast<float>(last)));
  const auto refused = context.try_allreduce(pairs, Named("pairs"));
  EXPECT(!refused.ok() && refused.error().code() == Code::invalid_argument);
  EXPECT(std::strstr(refused.error().what(), "\"pairs\": complex64 cannot be reduced") != nullptr);
  ExpectError([&] { context.reducescatter(small, Named("small")); }, Code::invalid_argument,
              "float8_e4m3fn cannot be reduced");
}

void TestKnownSizes(Context& context) {
  const int n = context.size(), me = context.rank();
  std::vector<int> gathered(static_cast<std::size_t>(2 * n)), expected;
  for (int rank = 0; rank < n; ++rank) Append(expected, From<int>(rank, 2));
  context.allgather_into(From<int>(me, 2), gathered);
  EXPECT(gathered == expected);
  std::vector<int> data = From<int>(me, 2), pieces, received(expected.size());
  context.allgather_into_async(data, gathered, Named("gather")).wait();
  EXPECT(gathered == expected);
  expected.clear();
  for (int peer = 0; peer < n; ++peer) {
    Append(pieces, From<int>(10 * me + peer, 2));
    Append(expected, From<int>(10 * peer + me, 2));
  }
  context.alltoall_into(pieces, received);
  EXPECT(received == expected);
  context.alltoall_into_async(pieces, received, Named("pieces", 2)).wait();
  EXPECT(received == expected);
  bool flag[1] = {me == 0}, flags[64] = {};
  context.allgather_into(flag, farandole::Span<bool>(flags, static_cast<std::size_t>(n)));
  EXPECT(flags[0] && (n == 1 || !flags[1]));
}

void TestManyUnnamed(Context& context) {
  for (int i = 0; i < 300; ++i) {  // more than the 256 slots
    const auto all = context.allgather(std::array<int, 1>{i});
    EXPECT(all.size() == static_cast<std::size_t>(context.size()) && all.back() == i);
  }
}

void TestWrongUse(Context& context) {
  const Splits two_many(static_cast<std::size_t>(context.size()), 2);
  const std::vector<int> one = {1};
  std::vector<int> wrong(static_cast<std::size_t>(context.size()) + 7);
  const Code invalid = Code::invalid_argument;
  ExpectError([&] { context.alltoall(one, two_many, Named("x")); }, invalid,
              "alltoall \"x\": the splits add up to");
  ExpectError([&] { context.alltoall(one, Splits(), Named("x")); }, invalid, "0 splits");
  ExpectError([&] { context.allgather(one, Named("x", 2)); }, invalid,
              "allgather \"x\": 1 elements are no whole rows of 2");
  ExpectError([&] { context.allgather_into(one, wrong, Named("x")); }, invalid, "the output has");
  EXPECT(!context.try_allgather_into(one, wrong).ok() &&
         !context.try_allgather(one, Named("", 2)).ok());
  EXPECT(context.size() == 1 || !context.try_alltoall_into(one, wrong).ok());
  context.barrier();
}

// An unnamed call that one rank alone gets wrong leaves the next ones matched.
void TestRefusedOnOneRank(Context& context) {
  const std::vector<int> one = {1};
  if (context.rank() == 0) {
    EXPECT(!context.try_allgather(one, Named("", 2)).ok());
    EXPECT(!context.try_alltoall(one, Splits()).ok());
  }
  const auto size = static_cast<std::size_t>(context.size());
  EXPECT(context.allgather(one).size() == size);
  EXPECT(context.alltoall(std::vector<int>(size, 1), Splits(size, 1)).data.size() == size);
}

void TestSetWithoutRanks(Context& context) {
  Options options = Named("x");
  options.set.id = 7;
  std::vector<int> data = {1}, taken = {1};
  const char* const text = "\"x\": process set 7 has no ranks";
  const Code invalid = Code::invalid_argument;
  ExpectError([&] { context.allgather(data, options); }, invalid, text);
  ExpectError([&] { context.reducescatter(data, options); }, invalid, text);
  ExpectError([&] { context.alltoall(data, Splits(), options); }, invalid, text);
  ExpectError([&] { context.reducescatter_into(data, taken, options); }, invalid, text);
}

// Rank 1 has no memory for what comes; the others get theirs.
void TestNoMemory(Context& context) {
  if (context.size() == 1) return;
  const auto size = static_cast<std::size_t>(context.size());
  Splits splits(size, 0);
  if (context.rank() == 0) splits = {3, kNoMemory};
  splits.resize(size);
  std::vector<std::uint8_t> data(context.rank() == 0 ? kNoMemory + 3 : 0, 7);
  const auto received = context.try_alltoall(data, splits, Named("much"));
  EXPECT(received.ok() == (context.rank() != 1));
  if (context.rank() == 1) {
    EXPECT(received.error().code() == Code::resource_exhausted);
    EXPECT(received.error().what() ==
           "alltoall \"much\": no memory for a result of " + std::to_string(kNoMemory) + " bytes");
  }
  context.barrier();
}

void TestProcessSet(Context& context) {
  if (context.size() < 3) return;
  Options options = Named("");
  options.set = context.add_process_set({2, 0});
  if (context.rank() == 0 || context.rank() == 2) {
    std::vector<int> expected = From<int>(0, 1);
    Append(expected, From<int>(2, 3));
    EXPECT(context.allgather(From<int>(context.rank(), 1 + context.rank()), options) == expected);
    const std::vector<int> three = {1, 2, 3};
    EXPECT(context.reducescatter(three, options).size() == (context.rank() == 0 ? 2u : 1u));
  } else {
    ExpectError([&] { context.allgather(std::vector<int>{1}, options); }, Code::invalid_argument,
                "no member");
  }
  context.remove_process_set(options.set);
}

void TestAll(Context& context) {
  TestAllgather<float>(context);
  TestAllgather<std::int64_t>(context);
  TestReducescatter<double>(context);
  TestReducescatter<int>(context);
  TestAlltoall<float>(context);
  TestAlltoall<short>(context);
  TestAllgather<std::uint16_t>(context);
  TestAllgather<std::complex<double>>(context);
  TestAlltoall<std::uint32_t>(context);
  TestAlltoall<unsigned long long>(context);
  TestAlltoall<std::complex<double>>(context);
  TestMovedOnly(context);
  TestKnownSizes(context);
  TestManyUnnamed(context);
  TestWrongUse(context);
  TestRefusedOnOneRank(context);
  TestSetWithoutRanks(context);
  TestNoMemory(context);
  TestProcessSet(context);
}

// Its partner is consumer_test.py's Python rank.
void MeetPython(Context& context) {
  const std::vector<float> both = context.allgather(std::vector<float>{1, 2}, Named("shared", 2));
  EXPECT((both == std::vector<float>{1, 2, 10, 20, 30, 40}));
  const std::vector<float> again = context.allgather(std::vector<float>{5});
  EXPECT((again == std::vector<float>{5, 6, 7}));
  const auto received = context.alltoall(std::vector<int>{1, 2, 3}, {1, 2}, Named("pieces"));
  EXPECT((received.data == std::vector<int>{1, 10, 20}));
  EXPECT((received.received_splits == Splits{1, 2}));
  const auto nothing = context.alltoall(std::vector<int>(), {0, 0}, Named("nothing"));
  EXPECT(nothing.data.empty());
  EXPECT(context.allgather(std::vector<int>(), Named("nothing")).empty());
  const std::vector<double> part = context.reducescatter(std::vector<double>{1, 2, 3});
  EXPECT((part == std::vector<double>{5.5, 11}));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "threads") {
    std::vector<Context> contexts = Context::in_process(std::atoi(argv[2]));
    std::vector<std::thread> threads;
    for (Context& context : contexts)
      threads.emplace_back([&context] {
        TestAll(context);
        context.shutdown();
      });
    for (std::thread& thread : threads) thread.join();
    std::printf("%d ranks as threads: all right\n", std::atoi(argv[2]));
    return 0;
  }
  Context context = Context::init();
  mode == "mixed" ? MeetPython(context) : TestAll(context);
  context.shutdown();
  std::printf("rank %d of %d: all right\n", context.rank(), context.size());
  return 0;
}
