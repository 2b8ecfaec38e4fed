// Looks for nan and infinity in what this rank contributes, before a sum hides where they are from.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "coordinator/diagnosis/diagnosis.h"
#include "core/half.h"
#include "ops/cpu/kernels.h"

namespace farandole {
namespace {

constexpr size_t kRememberedNames = 10'000;  // names that are made up may be new at each call

template <class T>
T ElementAt(const void* memory, int64_t i) {
  T element;
  std::memcpy(&element, static_cast<const T*>(memory) + i, sizeof element);
  return element;
}

double NumberAt(const void* memory, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat16:
      return ToFloat(ElementAt<Float16>(memory, i));
    case DType::kBfloat16:
      return ToFloat(ElementAt<Bfloat16>(memory, i));
    case DType::kFloat32:
      return ElementAt<float>(memory, i);
    default:
      return ElementAt<double>(memory, i);
  }
}

const char* NameOf(double number) {
  if (std::isnan(number)) return "nan";
  return number > 0 ? "inf" : "-inf";
}

/// "gradient "layer1.weight" of step 41", "tensor "x"", "tensor 3 of "x"".
std::string DescribeTensor(const Operation& operation, size_t t, const StepCount& step) {
  const std::vector<TensorSignature>& tensors = operation.signature.tensors;
  const std::string& own = tensors[t].name;
  if (step.step > 0) return "gradient \"" + own + "\" of step " + std::to_string(step.step);
  if (tensors.size() == 1) return "tensor " + DescribeName(operation.name);
  return "tensor " + (own.empty() ? std::to_string(t) : "\"" + own + "\"") + " of " +
         DescribeName(operation.name);
}

/// Checks allreduces and reducescatters of tensors on the CPU on the thread that starts them: only
/// before a rank votes can a key still be refused for all ranks. With kWarn it logs instead: the
/// first such tensor of the operation, at its 1st, 2nd, 4th, 8th, ... time.
class NumberCheck final : public EngineObserver {
 public:
  NumberCheck(NanCheck mode, int rank, Log& log) : mode_(mode), rank_(rank), log_(log) {}
  std::string Refuse(const Operation& operation, std::span<const void* const> in,
                     const Vote& vote) override;

 private:
  void Warn(const std::string& name, const std::string& text);
  void WarnOfGpu();

  const NanCheck mode_;
  const int rank_;
  Log& log_;
  std::mutex mutex_;
  std::map<std::string, uint64_t> times_;  // by operation and tensor
  bool has_warned_of_gpu_ = false;
};

std::string NumberCheck::Refuse(const Operation& operation, std::span<const void* const> in,
                                const Vote& vote) {
  const OpKind kind = operation.name.kind;
  if (kind != OpKind::kAllreduce && kind != OpKind::kReducescatter) return {};
  if (!vote.failed.empty()) return {};
  if (operation.signature.device != DeviceKind::kCpu) {
    WarnOfGpu();
    return {};
  }
  for (size_t t = 0; t < in.size(); ++t) {
    const TensorSignature& tensor = operation.signature.tensors[t];
    if (in[t] == nullptr || TestBit(vote.absent, static_cast<int>(t))) continue;
    const int64_t at = BestCpuKernels().FindNonFinite(in[t], tensor.dtype, tensor.Count());
    if (at == tensor.Count()) continue;
    std::string text = DescribeTensor(operation, t, vote.step) + " (" +
                       CalledAs(kind, operation.signature.function) + ", element " +
                       std::to_string(at) + " of " + std::to_string(tensor.Count()) + ") is " +
                       NameOf(NumberAt(in[t], tensor.dtype, at));
    if (mode_ == NanCheck::kRaise) return text;
    Warn(operation.name.name + '\0' + tensor.name, text);
    break;  // what is wrong in one gradient mostly is in others, too
  }
  return {};
}

void NumberCheck::Warn(const std::string& name, const std::string& text) {
  uint64_t times = 0;
  {
    const std::lock_guard lock(mutex_);
    if (times_.size() >= kRememberedNames) times_.clear();
    times = ++times_[name];
  }
  if (!std::has_single_bit(times)) return;
  log_.Write(LogLevel::kWarning,
             "rank " + std::to_string(rank_) + ": " + text +
                 (times == 1 ? "" : "; so far " + std::to_string(times) + " times"));
}

void NumberCheck::WarnOfGpu() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_warned_of_gpu_, true)) return;
  }
  log_.Write(LogLevel::kWarning, "FARANDOLE_NAN_CHECK: tensors on a GPU are not checked");
}

}  // namespace

std::unique_ptr<EngineObserver> MakeNumberCheck(NanCheck mode, int rank, Log& log) {
  return std::make_unique<NumberCheck>(mode, rank, log);
}

}  // namespace farandole
