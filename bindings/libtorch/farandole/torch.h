/// @file
/// Farandole for libtorch: an optimizer of torch::optim whose step() uses the gradients of all
/// ranks.
///
/// Header-only: compiled in your translation unit against your libtorch, with either ABI of
/// std::string. CMake: `find_package(Farandole REQUIRED COMPONENTS Torch)` and the target
/// `Farandole::torch`.
#pragma once

#include <farandole/context.h>
#include <farandole/torch_reducer.h>
#include <farandole/torch_rows.h>
#include <farandole/torch_streams.h>
#include <farandole/torch_tensors.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

namespace farandole::torch {

/// @cond internal
namespace detail {

/// Runs a collective in place on a tensor: `on_host(span)`, or in the current stream of its GPU
/// `on_device(span, stream)`, which starts it.
template <class OnHost, class OnDevice>
void run_on(const ::torch::Tensor& tensor, OnHost on_host, OnDevice on_device) {
  const ::torch::Tensor wire = on_wire(tensor, wire_device_of(tensor));
  if (wire.is_cuda()) {
    with_span<DeviceSpan>(wire, [&](auto span) {
      Work work = on_device(span, stream_after_current(wire.device()));
      make_current_wait(wire.device(), [&](const Stream& stream) { work.hand_over(stream); });
    });
  } else {
    with_span<Span>(wire, on_host);
  }
  copy_back(wire, tensor);
}

}  // namespace detail
/// @endcond

/// Reduces a tensor over all ranks, in place. On a GPU the current stream waits for the result, not
/// the host; on other devices than GPUs of NVIDIA it travels through the host's memory.
/// @throws Error as Context::allreduce.
inline void allreduce(Context& context, const ::torch::Tensor& tensor,
                      const Options& options = {}) {
  detail::run_on(
      tensor, [&](auto span) { context.allreduce(span, options); },
      [&](auto span, const Stream& stream) {
        return context.allreduce_async(span, stream, options);
      });
}

/// Copies a tensor of rank `root` to all ranks, in place and as allreduce() does.
/// @throws Error as Context::broadcast.
inline void broadcast(Context& context, const ::torch::Tensor& tensor, int root,
                      const Options& options = {}) {
  detail::run_on(
      tensor, [&](auto span) { context.broadcast(span, root, options); },
      [&](auto span, const Stream& stream) {
        return context.broadcast_async(span, root, stream, options);
      });
}

/// Copies all parameters and buffers of a module from rank `root` to all ranks, in place.
/// @throws Error mismatch naming the tensor if the ranks' modules differ.
inline void broadcast_parameters(Context& context, const ::torch::nn::Module& module,
                                 int root = 0) {
  const auto copy = [&](const auto& named) {
    for (const auto& item : named) {
      Options options;
      options.name = "parameter." + item.key();
      broadcast(context, item.value(), root, options);
    }
  };
  copy(module.named_parameters());
  copy(module.named_buffers());
}

/// @cond internal
namespace detail {

/// Its first parameter's device; none on the CPU, where a state needs no move.
inline std::optional<c10::Device> device_of_first(::torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    for (const ::torch::Tensor& parameter : group.params())
      if (!parameter.is_cpu()) return parameter.device();
  return std::nullopt;
}

}  // namespace detail
/// @endcond

/// Copies the optimizer state and options of rank `root` to every rank, without a step to create
/// state. The state travels through host memory and is placed on the device of the first parameter.
/// @param context   All its ranks call.
/// @param optimizer Any of torch::optim, wrapped or not, over the same parameters on all ranks.
/// @param root      Whose state wins.
inline void broadcast_optimizer_state(Context& context, ::torch::optim::Optimizer& optimizer,
                                      int root = 0) {
  std::string bytes;
  if (context.rank() == root) {
    ::torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    bytes = stream.str();
  }
  std::int64_t size = static_cast<std::int64_t>(bytes.size());
  context.broadcast(Span(&size, 1), root);
  bytes.resize(static_cast<std::size_t>(size));
  context.broadcast(bytes, root);
  if (context.rank() == root) return;
  std::istringstream stream(bytes);
  ::torch::serialize::InputArchive archive;
  archive.load_from(stream, detail::device_of_first(optimizer));
  optimizer.state().clear();  // load() would keep what the root does not have
  optimizer.load(archive);
}

/// An `Opt` of torch::optim whose gradients are those of all ranks when it steps.
///
/// Gradients travel during backward(); step() waits for them. Several backward passes before a step
/// accumulate; the first step learns their number, or GradientOptions tells it. Ranks that run
/// unequally many before a step get a mismatch, all of them. It is an `Opt`: learning rate
/// schedulers, param_groups() and state() work as usual.
/// @code
/// farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
///     context, model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
/// @endcode
/// A parameter without a gradient on this rank receives the other ranks' sum, divided by the number
/// of all ranks; one without a gradient on any rank keeps none. If autograd's .grad shares memory
/// with other tensors, the gradient is copied first; one that you placed yourself, for example in a
/// flat buffer, is reduced in place. On a GPU hooks send after the stream that is current in them,
/// and step() makes the current stream wait, not the host. After a failed backward call
/// zero_grad(): the other ranks' step() then throws `aborted`. Thread safety: as of Opt. Lifetime:
/// ends before the Context.
template <class Opt>
class DistributedOptimizer : public Opt {
 public:
  /// Arguments after the context are those of `Opt`. @throws Error invalid_argument.
  template <class First, class... Rest,
            class = std::enable_if_t<!std::is_same_v<std::decay_t<First>, GradientOptions>>>
  explicit DistributedOptimizer(Context& context, First&& first, Rest&&... rest)
      : DistributedOptimizer(Private(), context, GradientOptions(), std::forward<First>(first),
                             std::forward<Rest>(rest)...) {}

  /// With options for the exchange. @throws Error invalid_argument.
  template <class... Arguments>
  DistributedOptimizer(Context& context, const GradientOptions& options, Arguments&&... arguments)
      : DistributedOptimizer(Private(), context, options, std::forward<Arguments>(arguments)...) {}

  /// As of libtorch's optimizers.
  using LossClosure = ::torch::optim::Optimizer::LossClosure;

  /// Waits for the reduced gradients, then steps. With a closure each of its evaluations is
  /// reduced.
  /// @throws Error mismatch, aborted (with the failed rank's reason), timeout.
  ::torch::Tensor step(LossClosure closure = nullptr) override {
    if (closure == nullptr) {
      if constexpr (std::is_same_v<Opt, ::torch::optim::LBFGS>) {
        throw Error(Code::invalid_argument, "LBFGS::step() needs a closure");
      } else {
        synchronize();
        reducer_->stepped();
        return Opt::step();
      }
    }
    ::torch::Tensor loss = Opt::step([&] {
      ::torch::Tensor one = closure();
      synchronize();
      return one;
    });
    reducer_->stepped();
    return loss;
  }

  /// Reduces the gradients not sent yet and waits: all are final afterwards, for example for
  /// clipping. A step() that follows exchanges nothing.
  void synchronize() {
    std::size_t parameters = 0;
    for (const auto& group : this->param_groups()) parameters += group.params().size();
    reducer_->finish(parameters);
  }

  /// As of Opt; gives up a round that a failed backward() left open.
  void zero_grad(bool set_to_none = true) {
    reducer_->abandon();
    Opt::zero_grad(set_to_none);
  }

 private:
  struct Private {};
  template <class... Arguments>
  DistributedOptimizer(Private, Context& context, const GradientOptions& options,
                       Arguments&&... arguments)
      : Opt(std::forward<Arguments>(arguments)...),
        reducer_(
            std::make_shared<detail::GradientReducer>(context, options, this->param_groups())) {
    reducer_->hook();
  }

  std::shared_ptr<detail::GradientReducer> reducer_;
};

}  // namespace farandole::torch
