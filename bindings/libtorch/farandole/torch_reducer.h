/// @file
/// The gradient rounds of one libtorch optimizer, from hooks to results. Included by
/// farandole/torch.h.
#pragma once

#include <farandole/context.h>
#include <farandole/optimizer.h>
#include <farandole/torch_memory.h>
#include <farandole/torch_streams.h>
#include <farandole/torch_tensors.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <any>
#include <cstddef>
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
  /// Whether autograd allocates gradients in memory that the ranks of a host share, where they are
  /// reduced without a copy. This replaces torch's allocator of host memory by one that returns a
  /// shared block when a backward pass allocates a gradient's size, and forwards all other requests
  /// to the previous allocator. The blocks always take the memory of one gradient per parameter. A
  /// gradient that you keep stays unchanged. On the CPU only; ranks may differ in it.
  bool share_gradients = false;
  /// Backward passes before each step, of which the last one sends: a window; the same on all
  /// ranks. More passes than that are another window, and fewer are reduced by step(). 0: the first
  /// steps tell how often gradients are accumulated. A pass within a pass counts as one more.
  std::int32_t backward_passes_per_step = 0;
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

/// Reports that a gradient is about to be accumulated.
template <class Owner>
class AccumulatingHook final : public ::torch::autograd::FunctionPreHook {
 public:
  explicit AccumulatingHook(std::weak_ptr<Owner> owner) : owner_(std::move(owner)) {}
  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& gradients) override {
    if (const auto owner = owner_.lock()) owner->accumulating();
    return gradients;
  }

 private:
  std::weak_ptr<Owner> owner_;
};

/// What libtorch adds to the rounds of one optimizer: hooks, tensors, and whose memory they are.
class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  GradientReducer(Context& context, const GradientOptions& options,
                  const std::vector<::torch::optim::OptimizerParamGroup>& groups)
      : passes_(options.backward_passes_per_step), is_average_(options.op == Op::average) {
    if (passes_ < 0)
      throw Error(Code::invalid_argument,
                  "backward_passes_per_step must be >= 0, not " + std::to_string(passes_));
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
    const farandole_allocator allocator{sizeof allocator, this, &GradientReducer::allocate};
    gradients_ = std::make_unique<farandole::detail::Gradients>(
        context, options, tensors, device_.is_cuda() ? FARANDOLE_CUDA : FARANDOLE_CPU, &allocator);
    gradients_->set_passes(passes_);
    if (options.share_gradients && device_.is_cpu()) offer_memory(context);
  }

  ~GradientReducer() {
    if (memory_ != nullptr) GradientAllocator::instance().withdraw(memory_.get());
    if (gradients_->is_open()) gradients_->fail("the optimizer was destroyed before step()");
  }

  /// Apart from the constructor, because hooks hold this weakly.
  void hook() {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].parameter.requires_grad()) continue;
      auto accumulator = ::torch::autograd::impl::grad_accumulator(slots_[i].parameter);
      if (passes_ > 0)
        accumulator->add_pre_hook(
            std::make_unique<AccumulatingHook<GradientReducer>>(weak_from_this()));
      accumulator->add_post_hook(
          std::make_unique<AccumulatedHook<GradientReducer>>(weak_from_this(), i));
      slots_[i].accumulator = std::move(accumulator);
    }
  }

  /// As accumulated(). A pass after the last of its window must not add to what is in flight.
  void accumulating() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!pass_.expired() || !gradients_->is_open()) return;
    if (is_average_) return complete();
    const std::string error =
        "backward() ran more often than backward_passes_per_step=" + std::to_string(passes_) +
        " before step(); that is possible with Op::average only";
    gradients_->fail(error);
    throw Error(Code::invalid_argument, error);
  }

  /// From the thread of the gradient's device: autograd has one for each, besides the caller's.
  /// @param added What autograd holds until the hook returns; it may have become the gradient.
  void accumulated(std::size_t i, const ::torch::Tensor& added) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slots_[i];
    slot.reduced.reset();
    slot.is_fresh = slot.is_fresh || are_one(added, slot.parameter.grad());
    const ::torch::Tensor& grad = slot.parameter.grad();
    if (grad.defined() && grad.is_cuda()) slot.made_in = current_stream(grad.device());
    begin_pass();
    const std::int32_t due = gradients_->accumulated(i);
    if (due >= 0) mark(static_cast<std::size_t>(due));
  }

  /// @param parameters How many the optimizer has now.
  void finish(std::size_t parameters) {
    if (parameters != slots_.size())
      throw Error(Code::unimplemented, "the optimizer was wrapped with " +
                                           std::to_string(slots_.size()) + " parameters and has " +
                                           std::to_string(parameters) +
                                           " now; wrap it after the last add_param_group()");
    const std::lock_guard<std::mutex> lock(mutex_);
    complete();
  }

  /// The reduced gradients were used.
  void stepped() { gradients_->stepped(); }

  /// Gives up an open round, on all ranks.
  void abandon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (gradients_->is_open()) gradients_->fail("zero_grad() was called before step()");
    gradients_->forget();
    pass_.reset();
  }

 private:
  struct Slot {
    std::string name;
    ::torch::Tensor parameter;
    DataType type;
    ::torch::Tensor wire = {};                // in flight
    std::optional<c10::Stream> made_in = {};  // CUDA: the stream of the gradient's hook
    bool is_fresh = false;   // autograd, not the user, gave .grad its memory since the last round
    bool is_shared = false;  // in flight, and .grad's memory has another owner
    // The gradient tensor that was last reduced and has not been accumulated since, and its version
    // then. Weakly: its address is not given to another one while this is held.
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> reduced = {};
    std::uint32_t version = 0;
    std::any accumulator = {};  // autograd's node; it lives only as long as somebody holds it
  };

  // With the first gradient of a backward pass. The pass has ended when its callback was called, or
  // has failed when nobody holds that any more.
  void begin_pass() {
    if (!pass_.expired()) return;
    const auto pass = std::make_shared<char>();
    ::torch::autograd::Engine::get_default_engine().queue_callback(
        [owner = weak_from_this(), pass] {
          const auto self = owner.lock();
          if (self == nullptr) return;
          const std::lock_guard<std::mutex> lock(self->mutex_);
          self->pass_.reset();
        });
    pass_ = pass;
    if (gradients_->count_pass()) gradients_->open();
  }

  // Ends the round, or a window whose last pass has not come, and takes the results.
  void complete() {
    pass_.reset();
    for (std::int32_t i = gradients_->next(); i >= 0; i = gradients_->next())
      mark(static_cast<std::size_t>(i));
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
    if (!failure) return;
    // Another rank may still write there: no other tensor gets it, and later gradients are copied.
    if (memory_ != nullptr) GradientAllocator::instance().withdraw(memory_.get());
    std::rethrow_exception(failure);
  }

  static std::string name_of(const ::torch::Tensor& parameter, const GradientOptions& options,
                             std::size_t number) {
    for (const auto& item : options.names)
      if (item.value().is_same(parameter)) return item.key();
    return "noname." + std::to_string(number);
  }

  // Without one of them no batch with its gradient is reduced where it lies.
  void offer_memory(Context& context) {
    std::vector<std::size_t> sizes;
    for (const Slot& slot : slots_) sizes.push_back(slot.parameter.nbytes());
    memory_ = context.buffer<std::byte>(GradientAllocator::bytes_for(sizes));
    GradientAllocator::instance().offer(std::shared_ptr<void>(memory_, memory_.get()), sizes);
  }

  static bool is_reduced(const Slot& slot, const ::torch::Tensor& grad) {
    return slot.reduced && slot.reduced->_unsafe_get_target() == grad.unsafeGetTensorImpl() &&
           slot.version == static_cast<std::uint32_t>(grad._version());
  }

  static bool are_one(const ::torch::Tensor& added, const ::torch::Tensor& grad) {
    return added.defined() && added.has_storage() && added.is_alias_of(grad);
  }

  // The memory of a result where this rank has no gradient, when some rank has. Called by a thread
  // of the library during the round, in which nothing else touches the slot.
  static void* allocate(void* reducer, std::int32_t tensor, const std::int64_t*, std::int32_t,
                        std::int64_t) noexcept {
    auto& self = *static_cast<GradientReducer*>(reducer);
    Slot& slot = self.slots_[static_cast<std::size_t>(tensor)];
    try {
      slot.wire =
          ::torch::empty(slot.parameter.sizes(), slot.parameter.options().device(self.device_));
      return slot.wire.data_ptr();
    } catch (...) {
      return nullptr;
    }
  }

  void mark(std::size_t i) {
    Slot& slot = slots_[i];
    if (data_type_of(slot.parameter) != slot.type)
      throw Error(Code::invalid_argument,
                  "the dtype of \"" + slot.name +
                      "\" has changed since its optimizer was wrapped; wrap "
                      "an optimizer over the model as it is now");
    const ::torch::Tensor grad = slot.parameter.grad();
    if (!grad.defined()) return send(i, nullptr, FARANDOLE_ABSENT);
    if (slot.made_in) order(*slot.made_in, current_stream(slot.made_in->device()));
    slot.made_in.reset();
    slot.wire = on_wire(grad, device_).to(slot.parameter.scalar_type());
    // Memory of .grad that has another owner may be a view of a gradient that autograd, another
    // optimizer or the user still reads. The wire is an owner, too, where it is not a copy.
    const bool is_in_place = slot.wire.is_alias_of(grad);
    slot.is_shared = slot.is_fresh && grad.storage().use_count() > (is_in_place ? 2 : 1);
    if (slot.is_shared && is_in_place) slot.wire = slot.wire.clone();
    send(i, slot.wire.data_ptr(), is_reduced(slot, grad) ? FARANDOLE_CLEAN : FARANDOLE_PRESENT);
  }

  // On a GPU behind what is in the current stream: the copy to the wire, the gradient before it.
  void send(std::size_t i, void* memory, farandole_vote vote) {
    if (device_.is_cuda())
      gradients_->mark(i, memory, memory, vote, stream_after_current(device_));
    else
      gradients_->mark(i, memory, memory, vote);
  }

  void take_back(std::size_t i, bool succeeded) {
    Slot& slot = slots_[i];
    const ::torch::Tensor wire = std::exchange(slot.wire, ::torch::Tensor());
    if (wire.defined() && wire.is_cuda()) use_in_current_stream(wire);
    if (!succeeded || gradients_->skipped(i)) return;
    slot.is_fresh = false;
    ::torch::Tensor& grad = slot.parameter.mutable_grad();
    if (!wire.defined()) {  // without elements
      if (!grad.defined()) grad = ::torch::zeros_like(slot.parameter);
    } else if (!grad.defined()) {
      grad = wire.to(slot.parameter.device());
    } else if (slot.is_shared) {  // the other owner keeps its values
      grad = wire.to(grad.options());
    } else {
      copy_back(wire, grad);
    }
    slot.reduced.emplace(grad.getIntrusivePtr());
    slot.version = static_cast<std::uint32_t>(grad._version());
  }

  const std::int32_t passes_;  // of a window
  const bool is_average_;
  std::mutex mutex_;                   // over all below
  std::weak_ptr<char> pass_;           // that runs; expired: none
  c10::Device device_{::torch::kCPU};  // of gradients that travel: the first GPU of a parameter
  std::vector<Slot> slots_;
  std::shared_ptr<std::byte[]> memory_;  // of gradients to come; nullptr: torch chooses
  // Last, to go first: its end waits until the slots' memory is not touched any more.
  std::unique_ptr<farandole::detail::Gradients> gradients_;
};

}  // namespace detail
/// @endcond

}  // namespace farandole::torch
