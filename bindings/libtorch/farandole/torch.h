/// @file
/// Farandole for libtorch: an optimizer of torch::optim whose step() uses the gradients of all
/// ranks.
///
/// Header-only: compiled in your translation unit against your libtorch, with either ABI of
/// std::string. CMake: `find_package(Farandole REQUIRED COMPONENTS Torch)` and the target
/// `Farandole::torch`.
#pragma once

#include <farandole/context.h>
#include <farandole/optimizer.h>
#include <torch/torch.h>

#include <algorithm>
#include <any>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace farandole::torch {

/// @cond internal
namespace detail {

inline DataType data_type_of(const ::torch::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ::torch::kBool:
      return DataType::boolean;
    case ::torch::kUInt8:
      return DataType::uint8;
    case ::torch::kInt8:
      return DataType::int8;
    case ::torch::kInt16:
      return DataType::int16;
    case ::torch::kInt32:
      return DataType::int32;
    case ::torch::kInt64:
      return DataType::int64;
    case ::torch::kFloat16:
      return DataType::float16;
    case ::torch::kBFloat16:
      return DataType::bfloat16;
    case ::torch::kFloat32:
      return DataType::float32;
    case ::torch::kFloat64:
      return DataType::float64;
    default:
      throw Error(Code::invalid_argument,
                  std::string("a tensor of ") + ::torch::toString(tensor.scalar_type()) +
                      " cannot travel; expected bool, (u)int8, int16, int32, int64, float16, "
                      "bfloat16, float32 or float64");
  }
}

/// The tensor's elements in row order on the host: its own memory where that is so already.
inline ::torch::Tensor on_wire(const ::torch::Tensor& tensor) {
  if (tensor.layout() != ::torch::kStrided)
    throw Error(Code::invalid_argument, "a sparse tensor cannot travel; expected a dense one");
  return tensor.detach().to(::torch::kCPU).contiguous();
}

inline void copy_back(const ::torch::Tensor& wire, const ::torch::Tensor& tensor) {
  const ::torch::NoGradGuard no_grad;
  if (!wire.is_alias_of(tensor)) tensor.detach().copy_(wire);
}

/// Runs one collective on bytes of the tensor's type. `call` gets a typed Span.
template <class Call>
void with_span(const ::torch::Tensor& wire, Call call) {
  const auto count = static_cast<std::size_t>(wire.numel());
  const auto span = [&](auto element) {
    using T = decltype(element);
    return Span<T>(static_cast<T*>(wire.data_ptr()), count);
  };
  switch (data_type_of(wire)) {
    case DataType::boolean:
      return call(span(bool{}));
    case DataType::uint8:
      return call(span(std::uint8_t{}));
    case DataType::int8:
      return call(span(std::int8_t{}));
    case DataType::int16:
      return call(span(std::int16_t{}));
    case DataType::int32:
      return call(span(std::int32_t{}));
    case DataType::int64:
      return call(span(std::int64_t{}));
    case DataType::float16:
      return call(span(Float16{}));
    case DataType::bfloat16:
      return call(span(Bfloat16{}));
    case DataType::float32:
      return call(span(float{}));
    case DataType::float64:
      return call(span(double{}));
  }
}

/// Tells when a parameter's gradient has been accumulated.
template <class Owner>
class AccumulatedHook final : public ::torch::autograd::FunctionPostHook {
 public:
  AccumulatedHook(std::weak_ptr<Owner> owner, std::size_t index)
      : owner_(std::move(owner)), index_(index) {}
  ::torch::autograd::variable_list operator()(const ::torch::autograd::variable_list& outputs,
                                              const ::torch::autograd::variable_list&) override {
    if (const auto owner = owner_.lock()) owner->fired(index_);
    return outputs;
  }

 private:
  std::weak_ptr<Owner> owner_;
  std::size_t index_;
};

}  // namespace detail
/// @endcond

/// Reduces a tensor of any device over all ranks, in place. @throws Error as Context::allreduce.
inline void allreduce(Context& context, const ::torch::Tensor& tensor,
                      const Options& options = {}) {
  const ::torch::Tensor wire = detail::on_wire(tensor);
  detail::with_span(wire, [&](auto span) { context.allreduce(span, options); });
  detail::copy_back(wire, tensor);
}

/// Copies a tensor of rank `root` to all ranks, in place. @throws Error as Context::broadcast.
inline void broadcast(Context& context, const ::torch::Tensor& tensor, int root,
                      const Options& options = {}) {
  const ::torch::Tensor wire = detail::on_wire(tensor);
  detail::with_span(wire, [&](auto span) { context.broadcast(span, root, options); });
  detail::copy_back(wire, tensor);
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

/// Gives every rank the optimizer state and options of rank `root`; takes no step to create state.
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
  archive.load_from(stream);
  optimizer.state().clear();  // load() would keep what the root does not have
  optimizer.load(archive);
}

/// How a wrapped optimizer exchanges gradients.
struct GradientOptions : farandole::GradientOptions {
  /// Names for messages, usually `model->named_parameters()`; parameters without one are numbered.
  ::torch::OrderedDict<std::string, ::torch::Tensor> names;
};

/// @cond internal
namespace detail {

/// The gradient rounds of one optimizer, from hooks to results. A parameter's gradient is sent from
/// its hook at the firing count learned in earlier rounds, the rest in finish().
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(Context& context, const GradientOptions& options,
           const std::vector<::torch::optim::OptimizerParamGroup>& groups) {
    for (const auto& group : groups)
      for (const ::torch::Tensor& parameter : group.params())
        slots_.push_back(
            {name_of(parameter, options, slots_.size()), parameter, data_type_of(parameter)});
    std::vector<farandole_tensor> tensors;
    for (const Slot& slot : slots_)
      tensors.push_back({slot.name.c_str(), static_cast<std::int32_t>(data_type_of(slot.parameter)),
                         static_cast<std::int32_t>(slot.parameter.dim()),
                         slot.parameter.sizes().data()});
    gradients_ = std::make_unique<farandole::detail::Gradients>(context, options, tensors);
  }

  ~Exchange() {
    if (gradients_->is_open()) gradients_->fail("the optimizer was destroyed before step()");
  }

  /// Apart from the constructor, because hooks hold this weakly.
  void hook() {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].parameter.requires_grad()) continue;
      auto accumulator = ::torch::autograd::impl::grad_accumulator(slots_[i].parameter);
      accumulator->add_post_hook(std::make_unique<AccumulatedHook<Exchange>>(weak_from_this(), i));
      slots_[i].accumulator = std::move(accumulator);
    }
  }

  void fired(std::size_t i) {
    Slot& slot = slots_[i];
    if (gradients_->marked(i)) {
      slot.learned = slot.fired + 1;
      throw Error(
          Code::invalid_argument,
          "the gradient of \"" + slot.name +
              "\" fired again after it was sent; call step() or zero_grad() first: the number of "
              "backward passes per step is learned from earlier steps");
    }
    slot.reduced.reset();
    if (++slot.fired == slot.learned) mark(i);
  }

  /// @param parameters How many the optimizer has now.
  void finish(std::size_t parameters) {
    if (parameters != slots_.size())
      throw Error(Code::unimplemented, "the optimizer was wrapped with " +
                                           std::to_string(slots_.size()) + " parameters and has " +
                                           std::to_string(parameters) +
                                           " now; wrap it after the last add_param_group()");
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if (!gradients_->marked(i)) mark(i);
    std::exception_ptr failure;
    try {
      gradients_->finish();
    } catch (...) {
      failure = std::current_exception();
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) take_back(i, failure == nullptr);
    if (failure) std::rethrow_exception(failure);
  }

  /// Gives up an open round, on all ranks.
  void abandon() {
    const bool has_fired =
        std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.fired > 0; });
    if (has_fired || gradients_->is_open())
      gradients_->fail("zero_grad() was called before step()");
    for (Slot& slot : slots_) slot.fired = 0;
  }

 private:
  struct Slot {
    std::string name;
    ::torch::Tensor parameter;
    DataType type;
    ::torch::Tensor wire = {};  // in flight
    int fired = 0;
    int learned = 0;  // firings in an earlier round; 0: none yet
    // The gradient tensor that was last reduced and has not fired since, and its version then.
    // Weakly: its address is not given to another one while this is held.
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> reduced = {};
    std::uint32_t version = 0;
    std::any accumulator = {};  // autograd's node; it lives only as long as somebody holds it
  };

  static std::string name_of(const ::torch::Tensor& parameter, const GradientOptions& options,
                             std::size_t number) {
    for (const auto& item : options.names)
      if (item.value().is_same(parameter)) return item.key();
    return "noname." + std::to_string(number);
  }

  static bool is_reduced(const Slot& slot, const ::torch::Tensor& grad) {
    return slot.reduced && slot.reduced->_unsafe_get_target() == grad.unsafeGetTensorImpl() &&
           slot.version == static_cast<std::uint32_t>(grad._version());
  }

  void mark(std::size_t i) {
    Slot& slot = slots_[i];
    if (data_type_of(slot.parameter) != slot.type)
      throw Error(Code::invalid_argument,
                  "the dtype of \"" + slot.name +
                      "\" has changed since its optimizer was wrapped; wrap "
                      "an optimizer over the model as it is now");
    const ::torch::Tensor grad = slot.parameter.grad();
    if (!grad.defined()) {
      slot.wire =
          ::torch::empty(slot.parameter.sizes(), slot.parameter.options().device(::torch::kCPU));
      gradients_->mark(i, nullptr, slot.wire.data_ptr(), FARANDOLE_ABSENT);
      return;
    }
    slot.wire = on_wire(grad).to(slot.parameter.scalar_type());
    gradients_->mark(i, slot.wire.data_ptr(), slot.wire.data_ptr(),
                     is_reduced(slot, grad) ? FARANDOLE_CLEAN : FARANDOLE_PRESENT);
  }

  void take_back(std::size_t i, bool succeeded) {
    Slot& slot = slots_[i];
    const ::torch::Tensor wire = std::exchange(slot.wire, ::torch::Tensor());
    slot.learned = std::max(slot.learned, slot.fired);
    slot.fired = 0;
    if (!succeeded || gradients_->skipped(i)) return;
    if (slot.parameter.grad().defined()) {
      copy_back(wire, slot.parameter.grad());
    } else {
      slot.parameter.mutable_grad() = wire.to(slot.parameter.device());
    }
    slot.reduced.emplace(slot.parameter.grad().getIntrusivePtr());
    slot.version = static_cast<std::uint32_t>(slot.parameter.grad()._version());
  }

  std::vector<Slot> slots_;
  std::unique_ptr<farandole::detail::Gradients> gradients_;
};

}  // namespace detail
/// @endcond

/// An `Opt` of torch::optim whose gradients are those of all ranks when it steps.
///
/// Gradients travel while backward() goes on; step() waits for them. Several backward passes before
/// a step add up: how many there are is learned in the first step. It is an `Opt`: learning rate
/// schedulers, param_groups() and state() work as ever.
/// @code
/// farandole::torch::DistributedOptimizer<torch::optim::SGD> optimizer(
///     context, model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
/// @endcode
/// A parameter without a gradient on this rank receives the others' mean, divided by the full size;
/// one without a gradient anywhere keeps none. After a failed backward call zero_grad(): the other
/// ranks' step() then throws `aborted`. Thread safety: as of Opt. Lifetime: ends before the
/// Context.
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
        return Opt::step();
      }
    }
    return Opt::step([&] {
      ::torch::Tensor loss = closure();
      synchronize();
      return loss;
    });
  }

  /// Reduces what has not been sent yet and waits: gradients are final afterwards, for clipping.
  /// A step() that follows finds them clean and exchanges nothing.
  void synchronize() {
    std::size_t parameters = 0;
    for (const auto& group : this->param_groups()) parameters += group.params().size();
    exchange_->finish(parameters);
  }

  /// As of Opt; gives up a round that a failed backward() left open.
  void zero_grad(bool set_to_none = true) {
    exchange_->abandon();
    Opt::zero_grad(set_to_none);
  }

 private:
  struct Private {};
  template <class... Arguments>
  DistributedOptimizer(Private, Context& context, const GradientOptions& options,
                       Arguments&&... arguments)
      : Opt(std::forward<Arguments>(arguments)...),
        exchange_(std::make_shared<detail::Exchange>(context, options, this->param_groups())) {
    exchange_->hook();
  }

  std::shared_ptr<detail::Exchange> exchange_;
};

}  // namespace farandole::torch
