/// @file
/// A C++ optimizer whose step() uses the gradients of all ranks; no framework needed.
#pragma once

#include <farandole/context.h>

#include <cstddef>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace farandole {

/// One parameter of a model: its values, its gradient, and its name in messages.
template <class T>
struct Parameter {
  std::string name;  ///< The same on all ranks; distinct within an optimizer.
  Span<T> value;     ///< What broadcast_parameters() copies and step() changes.
  Span<T> gradient;  ///< As many elements as `value`; the memory stays where it is.
};

/// One parameter of a model on a GPU.
template <class T>
struct DeviceParameter {
  std::string name;        ///< The same on all ranks; distinct within an optimizer.
  DeviceSpan<T> value;     ///< What broadcast_parameters() copies and step() changes.
  DeviceSpan<T> gradient;  ///< As many elements as `value`; the memory stays where it is.
};

/// Copies every parameter's values from rank `root` to all ranks, in place, in one operation.
///
/// Example: `farandole::broadcast_parameters(context, model.parameters(), 0);`
/// @param context    All its ranks call.
/// @param parameters A range of Parameter<T>, the same names and counts on all ranks.
/// @param root       Whose values win.
/// @throws Error mismatch naming the parameter, invalid_argument, aborted.
template <class Range>
void broadcast_parameters(Context& context, Range&& parameters, int root) {
  std::vector<Work> copies;
  for (auto& parameter : parameters) {
    Options options;
    options.name = "parameter." + parameter.name;
    copies.push_back(context.broadcast_async(parameter.value, root, options));
  }
  for (Work& copy : copies) copy.wait();
}

/// As above on a GPU, after what `stream` holds now and before what is put into it later.
///
/// @param context    All its ranks call.
/// @param parameters A range of DeviceParameter<T>, the same names and counts on all ranks.
/// @param root       Whose values win.
/// @param stream     Of the GPU that holds them.
/// @throws Error mismatch naming the parameter, invalid_argument, unavailable, aborted.
template <class Range>
void broadcast_parameters(Context& context, Range&& parameters, int root, const Stream& stream) {
  std::vector<Work> copies;
  for (auto& parameter : parameters) {
    Options options;
    options.name = "parameter." + parameter.name;
    copies.push_back(context.broadcast_async(parameter.value, root, stream, options));
  }
  for (Work& copy : copies) copy.hand_over(stream);
}

/// How gradients are exchanged.
struct GradientOptions {
  Op op = Op::average;                          ///< average or sum.
  Compression compression = Compression::none;  ///< Of float and double.
  double predivide_factor =
      1.0;             ///< With average: divide by this before the sum, by size() / this after.
  std::string prefix;  ///< Of the gradients' names, distinct per optimizer; empty: by the order of
                       ///< their making.
  std::int64_t group_bytes =
      0;  ///< Gradients are announced in groups of about this size; 0: the setting.
};

/// @cond internal
namespace detail {

template <class T>
constexpr bool is_device_span = false;
template <class T>
constexpr bool is_device_span<DeviceSpan<T>> = true;

template <class... T>
constexpr bool is_one_stream = false;
template <class T>
constexpr bool is_one_stream<T> = std::is_convertible_v<const T&, const Stream&>;

/// The gradients of one optimizer over the C ABI, whose round object holds all state. Thread
/// safety: one thread at a time.
class Gradients {
 public:
  /// On a GPU every mark and finish names a stream.
  /// @param allocator For results of gradients that are marked absent without memory.
  Gradients(Context& context, const GradientOptions& options,
            const std::vector<farandole_tensor>& tensors, farandole_device device = FARANDOLE_CPU,
            const farandole_allocator* allocator = nullptr)
      : owner_(context.owned()) {
    if (options.op != Op::average && options.op != Op::sum)
      throw Error(Code::invalid_argument, "gradients are reduced by average or sum");
    if (options.predivide_factor != 1.0 && options.op != Op::average)
      throw Error(Code::invalid_argument, "predivide_factor needs Op::average");
    farandole_params params{};
    params.struct_size = sizeof params;
    params.kind = FARANDOLE_ALLREDUCE;
    params.op = static_cast<std::int32_t>(options.op);
    params.prescale = 1.0 / options.predivide_factor;
    params.postscale = options.predivide_factor;
    params.root = -1;
    params.wire = static_cast<std::int32_t>(options.compression);
    params.device = device;
    farandole_gradient_options how{};
    how.struct_size = sizeof how;
    how.prefix = options.prefix.empty() ? nullptr : options.prefix.c_str();
    how.group_bytes = options.group_bytes;
    how.allocator = allocator;
    farandole_gradients* gradients = nullptr;
    check(farandole_gradients_create(context.handle(), &params, &how, tensors.data(),
                                     static_cast<std::int32_t>(tensors.size()), &gradients))
        .value();
    gradients_.reset(gradients);
  }
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;
  /// Without its Context there is nothing to wait for.
  ~Gradients() { wait_until_complete(); }

  /// The coming windows have so many backward passes; 0: a round opens with the first one.
  void set_passes(std::int32_t passes) {
    check(farandole_gradients_set_passes(get(), passes)).value();
  }
  /// A backward pass begins, whose number ranks compare. @return whether it is its window's last.
  bool count_pass() {
    check(farandole_gradients_count_pass(get_or_throw(), 0)).value();
    return read().is_window_full == 1;
  }
  /// A window that has begun and opened no round counts no more.
  void forget() { check(farandole_gradients_forget(get())).value(); }
  /// Opens a round, if none is open.
  void open() { check(farandole_gradients_open(get_or_throw())).value(); }
  /// @return the gradient to mark now, or < 0.
  std::int32_t accumulated(std::size_t i) {
    std::int32_t due = -1;
    check(farandole_gradients_accumulated(get(), static_cast<std::int32_t>(i), &due)).value();
    return due;
  }
  /// The next gradient that is not marked, or -1.
  std::int32_t next() const { return farandole_gradients_next(get()); }
  void mark(std::size_t i, const void* in, void* out, farandole_vote vote = FARANDOLE_PRESENT) {
    check(farandole_gradients_mark(get_or_throw(), static_cast<std::int32_t>(i), in, out, vote,
                                   nullptr))
        .value();
  }
  void mark(std::size_t i, const void* in, void* out, farandole_vote vote, const Stream& stream) {
    const farandole_stream producer = to_c(stream);
    check(farandole_gradients_mark(get_or_throw(), static_cast<std::int32_t>(i), in, out, vote,
                                   &producer))
        .value();
  }
  bool skipped(std::size_t i) const {
    return farandole_gradients_skipped(get(), static_cast<std::int32_t>(i)) == 1;
  }
  bool is_open() const { return read().is_open == 1; }
  /// The gradients were used: the coming rounds are those of the next step, on all ranks.
  void stepped() { check(farandole_gradients_stepped(get())).value(); }

  void finish() { end_and_wait(nullptr); }
  /// The host waits until all is launched, `stream` until it is complete.
  void finish(const Stream& stream) {
    const farandole_stream waiting = to_c(stream);
    end_and_wait(&waiting);
  }
  /// Waits, because the round's memory is the caller's again afterwards.
  void fail(const std::string& why) noexcept {
    (void)farandole_gradients_end(get(), why.c_str());  // the others are notified; this rank knows
    (void)farandole_gradients_wait(get(), nullptr, -1);
    wait_until_complete();
  }

 private:
  /// NULL once the Context has ended: the C functions do nothing then.
  farandole_gradients* get() const { return owner_.expired() ? nullptr : gradients_.get(); }

  farandole_gradients* get_or_throw() const {
    if (!owner_.expired()) return gradients_.get();
    throw Error(Code::invalid_argument,
                "the Context of these gradients has ended; expected it to outlive the optimizer");
  }

  /// All zero once the Context has ended.
  farandole_round_status read() const noexcept {
    farandole_round_status status{};
    status.struct_size = sizeof status;
    (void)farandole_gradients_status(get(), &status);
    return status;
  }

  void end_and_wait(const farandole_stream* stream) {
    check(farandole_gradients_compare(get_or_throw(), -1)).value();
    const int ended = farandole_gradients_end(get(), nullptr);
    const Error first = ended == FARANDOLE_OK ? Error(Code::ok, "") : last_error(ended);
    Result<void> outcome = check(farandole_gradients_wait(get(), stream, -1));
    if (!outcome.ok()) wait_until_complete();  // what was launched goes on
    if (first.code() != Code::ok) throw first;
    outcome.value();
  }

  void wait_until_complete() const noexcept {
    (void)poll_until_complete(
        [this] {
          std::int64_t complete = 0;
          const int code = farandole_gradients_complete(get(), &complete);
          if (code != FARANDOLE_OK) return code;
          return static_cast<int>(complete == read().rounds ? FARANDOLE_OK : FARANDOLE_PENDING);
        },
        -1);
  }

  struct Release {
    void operator()(farandole_gradients* gradients) const {
      farandole_gradients_release(gradients);
    }
  };
  std::unique_ptr<farandole_gradients, Release> gradients_;
  const std::weak_ptr<const OwnedContext> owner_;
};

}  // namespace detail
/// @endcond

/// Wraps an optimizer: `step()` first reduces the gradients over all ranks.
///
/// `Opt` is any class with `parameters()`, which returns a range of Parameter<T> whose spans do not
/// move, and `step()`. To send a gradient during backward, call `ready(i)` as soon as it is final;
/// step() sends the others. Ranks may differ in which gradients they announce, and when.
/// @code
/// farandole::DistributedOptimizer optimizer(context, Sgd(model.parameters(), 0.1f));
/// model.backward(loss);  // optimizer.ready(i) from inside overlaps
/// optimizer.step();
/// @endcode
/// On a GPU `parameters()` returns DeviceParameter<T>; ready(), synchronize() and step() then take
/// the stream that produces and uses the gradients, and pass it to the wrapped `step()` first:
/// @code
/// optimizer.step(farandole::Stream{0, stream});
/// @endcode
/// Thread safety: one thread at a time. Lifetime: ends before the Context; used after it, it throws
/// invalid_argument. Its destructor waits until the library no longer uses a gradient.
template <class Opt>
class DistributedOptimizer {
 public:
  /// Every rank wraps the same parameters in the same order. @throws Error invalid_argument.
  DistributedOptimizer(Context& context, Opt optimizer, const GradientOptions& options = {})
      : optimizer_(std::move(optimizer)), gradients_(gradients_of(context, options)) {}
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;
  /// A round that was begun and not ended fails on the other ranks.
  ~DistributedOptimizer() {
    if (gradients_.is_open())
      gradients_.fail("the optimizer was destroyed in the middle of a step");
  }

  /// The wrapped optimizer.
  Opt& inner() { return optimizer_; }

  /// Gradient `i`, by position in parameters(), is final and may be sent; do not write to it before
  /// step() has returned.
  /// On a GPU: final once `stream` has done what it holds now; later writes go into `stream` after
  /// step().
  /// @throws Error invalid_argument if it was announced before in this step.
  template <class... OnStream>
  void ready(std::size_t i, const OnStream&... stream) {
    check_streams<OnStream...>();
    mark(i, gradient(i), stream...);
  }

  /// Sends the gradients that ready() has not announced and waits until all are reduced, in place.
  /// On a GPU the host waits until all is launched, and work put into `stream` later runs after it.
  /// @throws Error mismatch, aborted (another rank failed; its reason is in the message), timeout,
  /// ...
  template <class... OnStream>
  void synchronize(const OnStream&... stream) {
    check_streams<OnStream...>();
    for (std::int32_t i = gradients_.next(); i >= 0; i = gradients_.next())
      mark(static_cast<std::size_t>(i), gradient(static_cast<std::size_t>(i)), stream...);
    gradients_.finish(stream...);
  }

  /// synchronize(), then the wrapped optimizer's step with the same arguments. On a GPU the first
  /// of them is the stream. @throws Error as synchronize().
  template <class... Arguments>
  decltype(auto) step(Arguments&&... arguments) {
    synchronize_by_first(arguments...);
    gradients_.stepped();
    return optimizer_.step(std::forward<Arguments>(arguments)...);
  }

  /// Reports that this rank cannot complete its gradients: the other ranks' step() throws `aborted`
  /// with `why`. The next step() of this rank begins anew.
  void fail(const std::string& why) { gradients_.fail(why.empty() ? "unknown error" : why); }

 private:
  using Gradient = decltype(std::begin(std::declval<Opt&>().parameters())->gradient);
  static constexpr bool kOnDevice = detail::is_device_span<std::decay_t<Gradient>>;

  template <class... OnStream>
  static constexpr void check_streams() {
    static_assert(!kOnDevice || detail::is_one_stream<OnStream...>,
                  "gradients on a GPU need the farandole::Stream they are made and used in");
    static_assert(kOnDevice || sizeof...(OnStream) == 0, "gradients on the CPU have no stream");
  }

  void synchronize_by_first() {
    static_assert(!kOnDevice, "step() of gradients on a GPU needs a farandole::Stream first");
    synchronize();
  }
  template <class First, class... Rest>
  void synchronize_by_first(const First& first, const Rest&...) {
    static_assert(!kOnDevice || detail::is_one_stream<First>,
                  "step() of gradients on a GPU needs a farandole::Stream first");
    if constexpr (kOnDevice)
      synchronize(first);
    else
      synchronize();
  }

  template <class T>
  void mark(std::size_t i, Span<T> gradient) {
    gradients_.mark(i, gradient.data(), gradient.data());
  }
  template <class T>
  void mark(std::size_t i, DeviceSpan<T> gradient, const Stream& stream) {
    gradients_.mark(i, gradient.address(), gradient.address(), FARANDOLE_PRESENT, stream);
  }

  auto gradient(std::size_t i) {
    auto&& parameters = optimizer_.parameters();
    auto at = parameters.begin();
    if (i >= static_cast<std::size_t>(parameters.size()))
      throw Error(Code::invalid_argument, "ready(" + std::to_string(i) + "): there are " +
                                              std::to_string(parameters.size()) + " parameters");
    std::advance(at, static_cast<std::ptrdiff_t>(i));
    return at->gradient;
  }

  // The library copies what describes the gradients.
  detail::Gradients gradients_of(Context& context, const GradientOptions& options) {
    std::vector<std::string> names;
    std::vector<std::int64_t> counts;
    std::vector<std::int32_t> types;
    for (auto& parameter : optimizer_.parameters()) {
      using T = typename decltype(parameter.gradient)::element_type;
      if (parameter.gradient.size() != parameter.value.size())
        throw Error(Code::invalid_argument, "parameter \"" + parameter.name + "\" has " +
                                                std::to_string(parameter.value.size()) +
                                                " values, but its gradient " +
                                                std::to_string(parameter.gradient.size()));
      names.push_back(parameter.name);
      counts.push_back(static_cast<std::int64_t>(parameter.gradient.size()));
      types.push_back(static_cast<std::int32_t>(data_type_of<T>()));
    }
    std::vector<farandole_tensor> tensors;
    for (std::size_t i = 0; i < names.size(); ++i)
      tensors.push_back({names[i].c_str(), types[i], 1, &counts[i]});
    return detail::Gradients(context, options, tensors, kOnDevice ? FARANDOLE_CUDA : FARANDOLE_CPU);
  }

  Opt optimizer_;
  detail::Gradients gradients_;
};

}  // namespace farandole
