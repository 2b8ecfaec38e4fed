// Measures the CPU kernels against memcpy of as many bytes, in the same run: cost 1.00 is memcpy's.
//
// usage: kernels_bench [repetitions=200]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/types.h"
#include "ops/cpu/kernels.h"

namespace farandole {
namespace {

/// Bytes at the start of a page, as slots and large tensors are; written once so that they are
/// there.
class Bytes {
 public:
  explicit Bytes(size_t size) : data_(static_cast<std::byte*>(::operator new(size, kPage))) {
    std::memset(data_.get(), 0, size);
  }
  std::byte* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kPage{4096};
  struct Free {
    void operator()(std::byte* block) const { ::operator delete(block, kPage); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

/// What all cases read and write.
struct Memory {
  explicit Memory(size_t size) : to(size), from{Bytes(size), Bytes(size), Bytes(size)} {}
  Bytes to;
  Bytes from[3];
};

struct Case {
  std::string name;
  int64_t bytes = 0;  ///< Read and written.
  std::function<void()> run;
};

/// Shortest of many: what the code costs when nobody else runs.
struct Shortest {
  int64_t ns = INT64_MAX;
  void Time(const std::function<void()>& body) {
    const int64_t begin_ns = SteadyClock().NowNs();
    body();
    ns = std::min(ns, SteadyClock().NowNs() - begin_ns);
  }
};

std::string Text(DType dtype) { return std::string(Name(dtype)); }

Case PackCase(Memory& m, DType dtype, DType wire, int64_t count, double prescale) {
  return {"pack " + Text(dtype) + " to " + Text(wire) + (prescale == 1.0 ? "" : " scaled"),
          count * (SizeOf(dtype) + SizeOf(wire)), [&m, dtype, wire, count, prescale] {
            BestCpuKernels().Pack(m.to.data(), wire, m.from[0].data(), dtype, count, prescale);
          }};
}

Case UnpackCase(Memory& m, DType dtype, DType wire, int64_t count) {
  return {"unpack " + Text(wire) + " to " + Text(dtype), count * (SizeOf(dtype) + SizeOf(wire)),
          [&m, dtype, wire, count] {
            BestCpuKernels().Unpack(m.to.data(), dtype, m.from[0].data(), wire, count);
          }};
}

Case ReduceCase(Memory& m, DType wire, ReduceOp op, size_t sources, int64_t count) {
  return {std::string(Name(op)) + " of " + std::to_string(sources) + " " + Text(wire),
          count * SizeOf(wire) * static_cast<int64_t>(sources + 1), [&m, wire, op, sources, count] {
            const void* from[] = {m.from[0].data(), m.from[1].data(), m.from[2].data()};
            BestCpuKernels().Reduce(m.to.data(), std::span(from).first(sources), count,
                                    {wire, op, static_cast<int64_t>(sources), 1.0});
          }};
}

Case FindCase(Memory& m, DType dtype, int64_t count) {
  return {"find nan in " + Text(dtype), count * SizeOf(dtype), [&m, dtype, count] {
            if (BestCpuKernels().FindNonFinite(m.from[0].data(), dtype, count) != count)
              std::abort();
          }};
}

Case StreamCase(Memory& m, int64_t bytes) {
  return {"stream", 2 * bytes,
          [&m, bytes] { BestCpuKernels().Stream(m.to.data(), m.from[0].data(), bytes); }};
}

std::vector<Case> Cases(Memory& m, int64_t count) {
  std::vector<Case> cases;
  for (const DType wire : {DType::kFloat16, DType::kBfloat16}) {
    for (const double prescale : {1.0, 0.5}) {
      cases.push_back(PackCase(m, DType::kFloat32, wire, count, prescale));
    }
    cases.push_back(UnpackCase(m, DType::kFloat32, wire, count));
    cases.push_back(PackCase(m, DType::kFloat64, wire, count / 2, 1.0));
    for (const size_t sources : {2u, 3u}) {
      cases.push_back(ReduceCase(m, wire, ReduceOp::kSum, sources, count));
    }
    cases.push_back(ReduceCase(m, wire, ReduceOp::kAverage, 2, count));
    cases.push_back(ReduceCase(m, wire, ReduceOp::kMax, 2, count));
  }
  cases.push_back(PackCase(m, DType::kFloat32, DType::kFloat32, count, 0.5));
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kInt32}) {
    const int64_t fitting = count * 4 / SizeOf(dtype);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax}) {
      for (const size_t sources : {2u, 3u}) {
        cases.push_back(ReduceCase(m, dtype, op, sources, fitting));
      }
    }
  }
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64})
    cases.push_back(FindCase(m, dtype, count * 4 / SizeOf(dtype)));
  cases.push_back(StreamCase(m, count * 4));
  return cases;
}

void Measure(const Case& one, int repetitions) {
  Shortest ours;
  Shortest copy;
  const auto half = static_cast<size_t>(one.bytes / 2);
  const Bytes target(half);
  const Bytes source(half);
  for (int i = 0; i < repetitions; ++i) {  // in turn, so that both see the same machine
    ours.Time(one.run);
    copy.Time([&] { std::memcpy(target.data(), source.data(), half); });
  }
  std::printf("  %-32s %8.2f GB/s  cost %6.2f\n", one.name.c_str(),
              static_cast<double>(one.bytes) / static_cast<double>(ours.ns),
              static_cast<double>(ours.ns) / static_cast<double>(copy.ns));
}

int Main(int repetitions) {
  std::printf("kernels %s; bytes are those read and written\n", BestCpuKernels().name());
  for (const int64_t kib : {8, 256, 16384}) {
    const int64_t count = kib * 1024 / 4;
    Memory memory(static_cast<size_t>(kib) * 1024);
    std::printf("%lld KiB of float32\n", static_cast<long long>(kib));
    for (const Case& one : Cases(memory, count)) {
      Measure(one, kib > 1024 ? std::max(3, repetitions / 10) : repetitions);
    }
  }
  return 0;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) { return farandole::Main(argc > 1 ? std::atoi(argv[1]) : 200); }
