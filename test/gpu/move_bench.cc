// How near the cast kernel comes to the device's own copy: bytes read and written per second, as a
// share of what a 1 GiB device-to-device copy reached in the same run. One JSON object per line.
//
// usage: gpu_move_bench resnet50_backward.csv [repetitions=50]
//
// The kernel's time is the median over single launches, each between two events; `sustained` is
// that of launches one after the other. Consecutive launches work on different memory, more of it
// than any L2 cache holds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/clock.h"
#include "test/gpu/gpu.h"
#include "test/gpu/move_sets.h"

namespace farandole {
namespace {

constexpr int64_t kFootprint = int64_t{512} << 20;

/// A way of moving: between tensors of their own and one buffer, perhaps with a look at the flag
/// that poisons results (CastSpec::poisoned).
struct Way {
  enum class Flag { kNone, kOnDevice, kPinned };
  const char* name;
  CastSpec spec;
  bool pack;
  Flag flag = Flag::kNone;
};

constexpr Way kWays[] = {
    {"pack float32", {DType::kFloat32, DType::kFloat32}, true},
    {"pack float32 -> float16", {DType::kFloat32, DType::kFloat16, 0.125}, true},
    {"pack float32 -> bfloat16", {DType::kFloat32, DType::kBfloat16, 0.125}, true},
    {"unpack float32", {DType::kFloat32, DType::kFloat32}, false},
    {"unpack float32, flag", {DType::kFloat32, DType::kFloat32}, false, Way::Flag::kOnDevice},
    {"unpack float32, pinned flag", {DType::kFloat32, DType::kFloat32}, false, Way::Flag::kPinned},
    {"unpack float16 -> float32, scaled", {DType::kFloat16, DType::kFloat32, 8.0}, false},
    {"unpack bfloat16 -> float32, scaled", {DType::kBfloat16, DType::kFloat32, 8.0}, false}};

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Stopwatch {
 public:
  Stopwatch() {
    MustCuda(cudaEventCreate(&begin_), "cudaEventCreate");
    MustCuda(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Stopwatch() {
    MustCuda(cudaEventDestroy(begin_), "cudaEventDestroy");
    MustCuda(cudaEventDestroy(end_), "cudaEventDestroy");
  }
  /// Microseconds on the device between what comes before and after run().
  double Time(cudaStream_t stream, const std::function<void()>& run) {
    MustCuda(cudaEventRecord(begin_, stream), "cudaEventRecord");
    run();
    MustCuda(cudaEventRecord(end_, stream), "cudaEventRecord");
    MustCuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    MustCuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e3;
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// GB/s read and written by a copy of 1 GiB.
double CopyRate(cudaStream_t stream, int repetitions) {
  constexpr int64_t kSize = int64_t{1} << 30;
  const GpuBytes from(kSize);
  const GpuBytes to(kSize);
  Stopwatch watch;
  std::vector<double> times_us;
  for (int i = 0; i < repetitions + 3; ++i) {
    const double time_us = watch.Time(stream, [&] {
      MustCuda(cudaMemcpyAsync(to.data(), from.data(), kSize, cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
    });
    if (i >= 3) times_us.push_back(time_us);
  }
  return 2.0 * static_cast<double>(kSize) / Median(times_us) / 1e3;
}

/// One set moved one way, in as many copies as make up the footprint.
class Bench {
 public:
  Bench(const TensorSet& set, const Way& way, cudaStream_t stream)
      : set_(set), way_(way), spec_(way.spec), stream_(stream) {
    // The plane's flag comes from pinned memory by a kernel of its own, which is timed here too.
    pinned_ = static_cast<uint32_t*>(Must(Gpu().AllocatePinned(sizeof *pinned_)));
    *pinned_ = 0;
    if (way.flag == Way::Flag::kOnDevice)
      spec_.poisoned = reinterpret_cast<uint32_t*>(flag_.data());
    if (way.flag == Way::Flag::kPinned) spec_.poisoned = pinned_;
    const int64_t in_size = SizeOf(way.spec.from);
    const int64_t out_size = SizeOf(way.spec.to);
    bytes_ = set.total() * (in_size + out_size);
    // Frameworks align tensors to 512 bytes; in the buffer they lie at multiples of 16.
    int64_t in_bytes = 0;
    int64_t out_bytes = 0;
    std::vector<CastItem> places;
    for (const int64_t count : set.counts) {
      places.push_back({nullptr, nullptr, count});
      in_offsets_.push_back(in_bytes);
      out_offsets_.push_back(out_bytes);
      in_bytes += RoundUp(count * in_size, way.pack ? 512 : 16);
      out_bytes += RoundUp(count * out_size, way.pack ? 16 : 512);
    }
    const int64_t copies = std::clamp<int64_t>(kFootprint / bytes_ + 1, 2, 512);
    in_ = std::make_unique<GpuBytes>(copies * RoundUp(in_bytes, 512));
    out_ = std::make_unique<GpuBytes>(copies * RoundUp(out_bytes, 512));
    MustCuda(cudaMemset(in_->data(), 0, static_cast<size_t>(in_->size_bytes())), "cudaMemset");
    for (int64_t copy = 0; copy < copies; ++copy) {
      moves_.push_back(places);
      for (size_t i = 0; i < places.size(); ++i) {
        moves_.back()[i].in = in_->data() + copy * RoundUp(in_bytes, 512) + in_offsets_[i];
        moves_.back()[i].out = out_->data() + copy * RoundUp(out_bytes, 512) + out_offsets_[i];
      }
    }
  }

  ~Bench() { Gpu().FreePinned(pinned_); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void Run(int repetitions, double copy_rate) {
    Stopwatch watch;
    std::vector<double> kernel_us, host_us, loop_us;
    for (int i = 0; i < repetitions + 3; ++i) {
      const double kernel = watch.Time(stream_, [&] { host_us.push_back(MoveNext()); });
      const double loop = watch.Time(stream_, [&] { CopyEach(); });
      if (i < 3) continue;
      kernel_us.push_back(kernel);
      loop_us.push_back(loop);
    }
    const double sustained_us = watch.Time(stream_, [&] {
      for (int i = 0; i < repetitions; ++i) MoveNext();
    }) / repetitions;
    Print(Median(kernel_us), sustained_us, Median(host_us), Median(loop_us), copy_rate);
  }

 private:
  const std::vector<CastItem>& Next() { return moves_[next_++ % moves_.size()]; }

  /// @return Microseconds of the calling thread.
  double MoveNext() {
    const int64_t begin_ns = SteadyClock().NowNs();
    if (way_.flag == Way::Flag::kOnDevice) {
      Must(Gpu().CopyFlag(pinned_, reinterpret_cast<uint32_t*>(flag_.data()), stream_));
    }
    Must(Gpu().Cast(Next(), spec_, stream_, &launches_));
    return static_cast<double>(SteadyClock().NowNs() - begin_ns) / 1e3;
  }

  /// What packing is without a kernel, casts left aside: one copy per tensor, of the narrower size.
  void CopyEach() {
    const int64_t element = std::min(SizeOf(way_.spec.from), SizeOf(way_.spec.to));
    for (const CastItem& item : Next()) {
      MustCuda(cudaMemcpyAsync(item.out, item.in, static_cast<size_t>(item.count * element),
                               cudaMemcpyDeviceToDevice, stream_),
               "cudaMemcpyAsync");
    }
  }

  void Print(double kernel_us, double sustained_us, double host_us, double loop_us,
             double copy_rate) const {
    const auto share = [&](double us) {
      return static_cast<double>(bytes_) / us / 1e3 / copy_rate;
    };
    std::printf(
        "{\"bench\": \"move\", \"set\": \"%s\", \"way\": \"%s\", \"tensors\": %zu, \"bytes\": "
        "%lld, "
        "\"launches\": %d, \"kernel_us\": %.2f, \"share_of_copy\": %.3f, \"sustained_us\": %.2f, "
        "\"sustained_share_of_copy\": %.3f, \"host_us\": %.2f, \"copy_per_tensor_us\": %.2f}\n",
        set_.name.c_str(), way_.name, set_.counts.size(), static_cast<long long>(bytes_), launches_,
        kernel_us, share(kernel_us), sustained_us, share(sustained_us), host_us, loop_us);
    std::fflush(stdout);
  }

  const TensorSet& set_;
  const Way& way_;
  CastSpec spec_;
  const cudaStream_t stream_;
  const GpuBytes flag_{sizeof(uint32_t)};
  uint32_t* pinned_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<int64_t> in_offsets_;
  std::vector<int64_t> out_offsets_;
  std::unique_ptr<GpuBytes> in_;
  std::unique_ptr<GpuBytes> out_;
  std::vector<std::vector<CastItem>> moves_;
  size_t next_ = 0;
  int launches_ = 0;
};

int Run(const std::string& csv_path, int repetitions) {
  const TensorSet resnet = ResNet50Set(csv_path);
  if (resnet.counts.empty()) {
    std::fprintf(stderr, "cannot read \"%s\"\n", csv_path.c_str());
    return 2;
  }
  const std::vector<TensorSet> sets = {
      UniformSet(1 << 10), UniformSet(64 << 10), UniformSet(1 << 20), UniformSet(4 << 20), resnet,
      BertLargeSet()};
  Device& gpu = Gpu();
  GpuStream stream(cudaStreamNonBlocking);
  const double copy_rate = CopyRate(stream.get(), repetitions);
  std::printf("{\"bench\": \"copy\", \"device\": \"%s\", \"gb_per_s\": %.1f}\n",
              gpu.info().name.c_str(), copy_rate);
  for (const TensorSet& set : sets) {
    for (const Way& way : kWays) Bench(set, way, stream.get()).Run(repetitions, copy_rate);
  }
  return 0;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: gpu_move_bench resnet50_backward.csv [repetitions=50]\n");
    return 2;
  }
  return farandole::Run(argv[1], argc > 2 ? std::atoi(argv[2]) : 50);
}
