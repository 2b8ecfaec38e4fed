// CUDA tensors for a libtorch that has none: their memory is the host's, and their kernels are the
// CPU's, run by the host when it has waited for the current stream of the fake GPU; only copies are
// in the stream, and late. A fake: it shows whether streams are ordered, and nothing about a GPU.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "fake_gpu.h"

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::kCUDA;
using c10::Stream;

struct Streams {
  std::mutex mutex;
  std::map<std::pair<int, c10::StreamId>, FakeStream*> made;
};

Streams& AllStreams() {
  static auto* const streams = new Streams();
  return *streams;
}

// Stream 0 is the default one of its device; the others are made when they are first used.
FakeStream& FakeStreamOf(const Stream& stream) {
  Streams& streams = AllStreams();
  const std::lock_guard lock(streams.mutex);
  FakeStream*& found = streams.made[{stream.device_index(), stream.id()}];
  if (found == nullptr)
    found = stream.id() == 0 ? new FakeStream(farandole::Stream{stream.device_index(), nullptr})
                             : new FakeStream(stream.device_index());
  return *found;
}

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current_device_); }
  void setDevice(Device device) const override { current_device_ = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device_ = device.index();
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, current_stream_);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream_ = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return static_cast<const farandole::Stream&>(FakeStreamOf(stream)).handle;
  }
  DeviceIndex deviceCount() const noexcept override { return 8; }
  // An event is over when it is recorded, because the host waits.
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    FakeStreamOf(stream).Synchronize();
    static int over;
    *event = &over;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  static thread_local DeviceIndex current_device_;
  static thread_local c10::StreamId current_stream_;
};

thread_local DeviceIndex FakeGuard::current_device_ = 0;
thread_local c10::StreamId FakeGuard::current_stream_ = 0;

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

// By these autograd asks whether there are GPUs; libtorch knows them by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 8; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static const at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
  DeviceIndex getCurrentDevice() const override { return FakeGuard().getDevice().index(); }
};
using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

at::Tensor WithStorage(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      like.storage_offset());
  return tensor;
}

// As when memory of a GPU is freed: late copies into it are over.
void SynchronizeAll() {
  Streams& streams = AllStreams();
  const std::lock_guard lock(streams.mutex);
  for (const auto& item : streams.made) item.second->Synchronize();
}

// The same memory under another device's name; it lives as long as either of them.
c10::Storage Renamed(const c10::Storage& storage, Device device) {
  auto* const keeper = new c10::Storage(storage);
  const auto drop = [](void* kept) {
    if (static_cast<c10::Storage*>(kept)->device_type() == at::kCPU) SynchronizeAll();
    delete static_cast<c10::Storage*>(kept);
  };
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(storage.mutable_data(), keeper, drop, device), nullptr, false);
}

at::Tensor CpuAlias(const at::Tensor& tensor) {
  return WithStorage(Renamed(tensor.storage(), at::kCPU), tensor, c10::DispatchKey::CPU);
}

// One call of a CUDA operator, on the CPU.
class Call {
 public:
  explicit Call(Device device) : device_(device) {}

  void ToCpu(c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = Alias(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(Alias(tensor));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        tensors.push_back(tensor ? std::optional(Alias(*tensor)) : std::nullopt);
      value = tensors;
    } else if (value.isDevice()) {
      value = Device(at::kCPU);
    }
  }
  void ToCuda(c10::IValue& value) const {
    if (value.isTensor() && value.toTensor().defined()) {
      value = Original(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(Original(tensor));
      value = tensors;
    }
  }

 private:
  at::Tensor Alias(const at::Tensor& tensor) {
    if (!tensor.is_cuda()) return tensor;
    aliases_.emplace_back(CpuAlias(tensor), tensor);
    return aliases_.back().first;
  }
  at::Tensor Original(const at::Tensor& tensor) const {
    for (const auto& [alias, original] : aliases_)
      if (alias.is_same(tensor)) return original;
    for (const auto& [alias, original] : aliases_)
      if (alias.storage().is_alias_of(tensor.storage()))
        return WithStorage(original.storage(), tensor, c10::DispatchKey::CUDA);
    return WithStorage(Renamed(tensor.storage(), device_), tensor, c10::DispatchKey::CUDA);
  }

  Device device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;
};

Device DeviceOf(const std::vector<c10::IValue>& arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice() && argument.toDevice().has_index()) return argument.toDevice();
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().is_cuda())
      return argument.toTensor().device();
  }
  return FakeGuard().getDevice();
}

void RunOnCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  std::vector<c10::IValue> arguments = torch::jit::pop(*stack, count);
  const Device device = DeviceOf(arguments);
  FakeStreamOf(FakeGuard().getStream(device)).Synchronize();
  Call call(device);
  for (c10::IValue& argument : arguments) call.ToCpu(argument);
  for (c10::IValue& argument : arguments) stack->push_back(std::move(argument));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const std::size_t results = op.schema().returns().size();
  for (std::size_t i = stack->size() - results; i < stack->size(); ++i) call.ToCuda((*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&RunOnCpu>());
}

at::Tensor& CopyLate(at::Tensor& to, const at::Tensor& from, bool) {
  constexpr std::int64_t kLateUs = 1000;
  const Device device = to.is_cuda() ? to.device() : from.device();
  FakeStream& stream = FakeStreamOf(FakeGuard().getStream(device));
  stream.Synchronize();
  const at::Tensor source = from.is_cuda() ? CpuAlias(from) : from;
  if (!to.is_cuda()) return to.copy_(source);
  if (!to.is_contiguous()) {
    CpuAlias(to).copy_(source);
    return to;
  }
  const at::Tensor values = at::empty(to.sizes(), to.options().device(at::kCPU)).copy_(source);
  stream.Write(to.data_ptr(), values.data_ptr(), static_cast<std::int64_t>(to.nbytes()), kLateUs);
  return to;
}

at::Tensor& SetStorage(at::Tensor& tensor, at::Storage storage, std::int64_t offset,
                       at::IntArrayRef sizes, at::IntArrayRef strides) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

// libtorch has these for every device, through code that needs the device's own kernels.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", CopyLate);
  m.impl("set_.source_Storage_storage_offset", SetStorage);  // by which archives are read
}

}  // namespace
