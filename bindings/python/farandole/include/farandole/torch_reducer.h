/// @file
/// The gradient rounds of one libtorch optimizer, from hooks to results. Included by
/// farandole/torch.h.
#pragma once

#include <farandole/context.h>
#include <farandole/optimizer.h>
#include <farandole/torch_streams.h>
#include <farandole/torch_tensors.h>
#include <torch/torch.h>

#include <algorithm>
#include <any>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace farandole::torch {

/// How a wrapped optimizer exchanges gradients.
struct GradientOptions : farandole::GradientOptions {
  /// Names for messages, usually `model->named_parameters()`; parameters without one are numbered.
  ::torch::OrderedDict<std::string, ::torch::Tensor> names;
};

/// @cond internal
namespace detail {

/// Reports when a parameter's gradient has been accumulated.
template <class Owner>
class AccumulatedHook final : public ::torch::autograd::FunctionPostHook {
 public:
  AccumulatedHook(std::weak_ptr<Owner> owner, std::size_t index)
      : owner_(std::move(owner)), index_(index) {}
  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& outputs,
      const ::torch::autograd::variable_list& inputs) override {
    if (const auto owner = owner_.lock()) owner->accumulated(index_, inputs.at(0));
    return outputs;
  }

 private:
  std::weak_ptr<Owner> owner_;
  std::size_t index_;
};

/// The gradient rounds of one optimizer, from hooks to results. A parameter's gradient is sent from
/// its hook at the firing count learned in earlier rounds, the rest in finish().
class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  GradientReducer(Context& context, const GradientOptions& options,
                  const std::vector<::torch::optim::OptimizerParamGroup>& groups) {
    for (const auto& group : groups)
      for (const ::torch::Tensor& parameter : group.params())
        slots_.push_back(
            {name_of(parameter, options, slots_.size()), parameter, data_type_of(parameter)});
    for (const Slot& slot : slots_)
      if (device_.is_cpu()) device_ = wire_device_of(slot.parameter);
    std::vector<farandole_tensor> tensors;
    for (const Slot& slot : slots_)
      tensors.push_back({slot.name.c_str(), static_cast<std::int32_t>(data_type_of(slot.parameter)),
                         static_cast<std::int32_t>(slot.parameter.dim()),
                         slot.parameter.sizes().data()});
    gradients_ = std::make_unique<farandole::detail::Gradients>(
        context, options, tensors, device_.is_cuda() ? FARANDOLE_CUDA : FARANDOLE_CPU);
  }

  ~GradientReducer() {
    if (gradients_->is_open()) gradients_->fail("the optimizer was destroyed before step()");
  }

  /// Apart from the constructor, because hooks hold this weakly.
  void hook() {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].parameter.requires_grad()) continue;
      auto accumulator = ::torch::autograd::impl::grad_accumulator(slots_[i].parameter);
      accumulator->add_post_hook(
          std::make_unique<AccumulatedHook<GradientReducer>>(weak_from_this(), i));
      slots_[i].accumulator = std::move(accumulator);
    }
  }

  /// From the thread of the gradient's device: autograd has one for each, besides the caller's.
  /// @param added What autograd holds until the hook returns; it may have become the gradient.
  void accumulated(std::size_t i, const ::torch::Tensor& added) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slots_[i];
    if (gradients_->marked(i)) {
      slot.learned = slot.accumulations + 1;
      throw Error(Code::invalid_argument,
                  "the gradient of \"" + slot.name +
                      "\" was accumulated again after it was sent; call step() or zero_grad() "
                      "first: the number of "
                      "backward passes per step is learned from earlier steps");
    }
    slot.reduced.reset();
    if (++slot.accumulations == slot.learned) mark(i, added);
  }

  /// @param parameters How many the optimizer has now.
  void finish(std::size_t parameters) {
    if (parameters != slots_.size())
      throw Error(Code::unimplemented, "the optimizer was wrapped with " +
                                           std::to_string(slots_.size()) + " parameters and has " +
                                           std::to_string(parameters) +
                                           " now; wrap it after the last add_param_group()");
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if (!gradients_->marked(i)) mark(i);
    std::exception_ptr failure;
    try {
      if (device_.is_cuda())
        make_current_wait(device_, [&](const Stream& stream) { gradients_->finish(stream); });
      else
        gradients_->finish();
    } catch (...) {
      failure = std::current_exception();
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) take_back(i, failure == nullptr);
    if (failure) std::rethrow_exception(failure);
  }

  /// The reduced gradients were used.
  void stepped() { gradients_->stepped(); }

  /// Gives up an open round, on all ranks.
  void abandon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool has_gradients = std::any_of(slots_.begin(), slots_.end(),
                                           [](const Slot& slot) { return slot.accumulations > 0; });
    if (has_gradients || gradients_->is_open())
      gradients_->fail("zero_grad() was called before step()");
    for (Slot& slot : slots_) slot.accumulations = 0;
  }

 private:
  struct Slot {
    std::string name;
    ::torch::Tensor parameter;
    DataType type;
    ::torch::Tensor wire = {};  // in flight
    int accumulations = 0;
    int learned = 0;  // accumulations in an earlier round; 0: none yet
    // The gradient tensor that was last reduced and has not been accumulated since, and its version
    // then. Weakly: its address is not given to another one while this is held.
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

  // The gradient in memory that may be written: its own, unless that has another owner than .grad,
  // which may be a view of a gradient that autograd, another optimizer or the user still reads.
  // Owners that read nothing are detach()'s result and, until its hook returns, `added` with the
  // tensor that `added` is a view of, if nobody else has that.
  ::torch::Tensor wire_of(const Slot& slot, const ::torch::Tensor& grad,
                          const ::torch::Tensor& added) const {
    ::torch::Tensor wire = on_wire(grad, device_).to(slot.parameter.scalar_type());
    if (!wire.is_alias_of(grad)) return wire;
    std::size_t expected = 2;
    if (added.defined() && added.is_alias_of(grad))
      expected += added.is_view() && added._base().use_count() == 1 ? 2 : 1;
    return grad.storage().use_count() > expected ? wire.clone() : wire;
  }

  void mark(std::size_t i, const ::torch::Tensor& added = {}) {
    Slot& slot = slots_[i];
    if (data_type_of(slot.parameter) != slot.type)
      throw Error(Code::invalid_argument,
                  "the dtype of \"" + slot.name +
                      "\" has changed since its optimizer was wrapped; wrap "
                      "an optimizer over the model as it is now");
    const ::torch::Tensor grad = slot.parameter.grad();
    if (!grad.defined()) {
      slot.wire = ::torch::empty(slot.parameter.sizes(), slot.parameter.options().device(device_));
      send(i, nullptr, FARANDOLE_ABSENT);
      return;
    }
    slot.wire = wire_of(slot, grad, added);
    send(i, slot.wire.data_ptr(), is_reduced(slot, grad) ? FARANDOLE_CLEAN : FARANDOLE_PRESENT);
  }

  // On a GPU behind what is in the current stream: the copy to the wire, the gradient before it.
  void send(std::size_t i, const void* in, farandole_vote vote) {
    void* const out = slots_[i].wire.data_ptr();
    if (device_.is_cuda())
      gradients_->mark(i, in, out, vote, stream_after_current(device_));
    else
      gradients_->mark(i, in, out, vote);
  }

  void take_back(std::size_t i, bool succeeded) {
    Slot& slot = slots_[i];
    const ::torch::Tensor wire = std::exchange(slot.wire, ::torch::Tensor());
    slot.learned = std::max(slot.learned, slot.accumulations);
    slot.accumulations = 0;
    if (wire.is_cuda()) use_in_current_stream(wire);
    if (!succeeded || gradients_->skipped(i)) return;
    ::torch::Tensor& grad = slot.parameter.mutable_grad();
    if (!grad.defined()) {
      grad = wire.to(slot.parameter.device());
    } else if (wire.is_alias_of(grad) || grad.storage().use_count() == 1) {
      copy_back(wire, grad);
    } else {  // the other owner keeps its values
      grad = wire.to(grad.options());
    }
    slot.reduced.emplace(grad.getIntrusivePtr());
    slot.version = static_cast<std::uint32_t>(grad._version());
  }

  std::mutex mutex_;                   // over all below
  c10::Device device_{::torch::kCPU};  // of gradients that travel: the first GPU of a parameter
  std::vector<Slot> slots_;
  // Last, to go first: its end waits until the slots' memory is not touched any more.
  std::unique_ptr<farandole::detail::Gradients> gradients_;
};

}  // namespace detail
/// @endcond

}  // namespace farandole::torch
