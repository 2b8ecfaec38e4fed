// The gradients of one optimizer's parameters: what of each pass and round is done for every one of
// them.
//
// The rounds themselves are the C ABI's (farandole_gradients_*). Here are the calls of autograd's
// hooks, and tensors as they are sent and come back, read by DLPack's C functions in host memory
// and on GPUs alike. What a gradient may be besides (sparse, compressed by a class of the user, on
// another device, in another memory order) is left to the methods of a Python object, the *owner*
// (farandole/torch/optimizer/_reducer.py), one gradient at a time.
//
// Needs the GIL, as context.h says; hooks may be called on any thread.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"
#include "bindings/python/arrays.h"
#include "bindings/python/context.h"

namespace farandole::python {

/// One parameter and its gradient. Python reads and writes the fields.
struct GradientSlot {
  pybind11::object name;
  pybind11::object parameter;

  // As gradients were defined.
  pybind11::object codec;         ///< Compresses them; null: they travel as they are.
  pybind11::object dtype;         ///< torch's, of the gradients; null: never defined.
  pybind11::object last_dtype;    ///< Of the gradient seen last.
  bool is_channels_last = false;  ///< They travel in that memory order, otherwise in C order.
  std::optional<Layout> look;     ///< The parameter then; nullopt: it could not be read.
  bool was_live = false;          ///< IsLive() then.

  /// The stream in which the gradient was accumulated; nullopt: in host memory.
  std::optional<farandole_stream> made_in;
  /// Autograd chose the memory of `.grad`, which was None, and nothing was sent since.
  bool is_fresh = false;

  /// How often autograd has added in place to views of the tensor that `.grad` is a view of: all of
  /// them have one version. Null: it is none that the user has placed.
  std::shared_ptr<const int64_t> additions;

  // Of the open round.
  pybind11::object sent;                ///< `.grad` as it was sent; null: there was none.
  std::optional<int64_t> sent_version;  ///< What Version() gave then.
  pybind11::object buffer;              ///< The tensor whose memory is read and written.
  pybind11::object sparse;  ///< This rank's sparse gradient, which is gathered; null: none.
  bool is_present = false;  ///< This rank contributes a gradient of whatever layout.
  bool was_sparse = false;  ///< Some rank had a sparse gradient in this round or before.

  // The gradient that was reduced last and has not been accumulated to since.
  pybind11::object reduced;        ///< A weak reference, or itself; null: there is none.
  std::optional<int64_t> version;  ///< What Version() gave when it had been reduced.

  pybind11::object gradient() const;
  /// torch's dtype of the gradient, or of the next one where there is none.
  pybind11::object GradientDtype() const;
  /// The version of `gradient`, less the additions: what autograd adds to one view is no write to
  /// another. None in inference mode.
  std::optional<int64_t> Version(const pybind11::object& gradient) const;
  /// Whether the gradient was reduced and not accumulated to since; it may have been written to.
  bool HoldsReduced(const pybind11::object& gradient) const;
  /// How this rank takes part with `gradient`, or None.
  farandole_vote Vote(const pybind11::object& gradient) const;
  /// The gradient as it stands is the reduced one. @param keeps_it  Not by a weak reference, with
  ///     which torch swaps no tensor.
  void NoteReduced(bool keeps_it);
  /// Keeps the gradient as it is about to be sent.
  void NoteSent(const pybind11::object& gradient);
  /// Whether the gradient is another one than the one that was sent, or was written to since.
  bool HasChanged() const;
  /// Of the parameter when its gradients were defined.
  pybind11::tuple Shape() const;
  /// Whether there is a gradient, or can be one.
  bool IsLive() const;
  /// Whether parameter and dtype of gradients are what they were when they were defined.
  bool LooksAsDefined() const;
};

/// What all optimizers get from torch, by the names of its attributes.
struct TorchFunctions {
  pybind11::object current_task;     ///< Gives the number of the graph task that runs.
  pybind11::object is_grad_enabled;  ///< torch.is_grad_enabled.
  pybind11::object count_owners;     ///< Gives how many own the storage at an address (`_cdata`);
                                     ///< None: nobody can tell.
  int64_t sole_owner = 0;            ///< What it gives of the storage of a tensor without views.
};

/// The gradients of one optimizer.
class Gradients : public Child, public std::enable_shared_from_this<Gradients> {
 public:
  struct Settings {
    int64_t group_bytes = 0;
    bool overlaps = true;    ///< Gradients are sent during the backward pass; otherwise at its end.
    bool is_average = true;  ///< A gradient may be added to one that was reduced.
  };
  /// How the gradients of one slot travel.
  struct Description {
    int32_t dtype = 0;
    std::vector<int64_t> shape;
  };

  /// @param owner  Weakly referenced; what is not done here is left to its methods:
  ///     before_accumulation(index) and accumulated(index): of hooks outside a running pass;
  ///     copy_in(gradient, stream): a copy made in that stream;
  ///     pack(slot, stream): gives the tensor to send of a gradient that cannot be sent as it lies,
  ///     or that is None and has a codec; or None; check(slot): raises if what was sent does not
  ///     fit; receive(slot) and receive_new(slot, tensor): give the parameter its result.
  /// @param named   Names and parameters.
  /// @param labels  What ranks compare at the wrap.
  Gradients(std::shared_ptr<Context> context, const Options& options, const pybind11::object& owner,
            const std::vector<std::pair<pybind11::object, pybind11::object>>& named,
            const std::vector<std::string>& labels, TorchFunctions torch, Settings settings);
  ~Gradients() override;

  const std::vector<std::shared_ptr<GradientSlot>>& slots() const { return slots_; }
  /// What to register with autograd, to be called before a gradient is added to `.grad` and after.
  pybind11::object Hook(int32_t index, bool is_after);

  /// Slots and their parameters as they look now, before a round. `like` is a parameter on the GPU
  /// where all gradients travel; None: in host memory.
  void Define(const std::vector<Description>& descriptions, const pybind11::object& like);
  /// More slots, which take part from the open or coming round on. @param describe  Gives the
  ///     Description of a slot.
  void Add(const std::vector<std::pair<pybind11::object, pybind11::object>>& named,
           const pybind11::object& describe);
  /// Whether every slot still is as it was defined.
  bool AreDefined() const;

  // What hooks call.
  void BeforeAccumulation(int32_t index);
  void AfterAccumulation(int32_t index);

  /// Goes on in another context after the end of its own, of which it keeps what is known of the
  /// gradients; see farandole_gradients_rebind. No gradient counts as reduced.
  /// @param set, labels  Of that context; as in the constructor.
  void Rebind(std::shared_ptr<Context> context, uint32_t set,
              const std::vector<std::string>& labels);
  /// A backward pass begins. @return whether it is the last of its window.
  bool CountPass(bool is_no_sync);
  void SetPasses(int passes);
  /// A round begins.
  void Open();
  /// A gradient was accumulated: sends the one that is due.
  /// @throw RuntimeError if the gradient was sent before.
  void Accumulated(int32_t index);
  /// The tensor to send for the slot's gradient, whose memory may be written: memory that somebody
  /// else owns too is not. Autograd gives `.grad` views of what later nodes of the pass, gradients
  /// of other tensors or the user hold, as of x + p.unsqueeze(0) with a batch of one. Such a
  /// gradient is replaced by a copy. A gradient that the user placed, as in a flat buffer, stays,
  /// and its copy is given.
  /// @param gradient  The slot's, as it is now.
  pybind11::object OwnMemory(GradientSlot& slot, const pybind11::object& gradient);
  /// Waits until all ranks have wrapped as many optimizers, and compares them. Interruptible.
  void Compare();
  /// Sends everything that was not sent, accumulated ones first, and checks what was; then ends the
  /// round. @throw ValueError for a gradient that does not fit, or was replaced in flight.
  void End(bool is_left_to_user);
  /// Ends the round, or one that was not opened, as failed on all ranks.
  void Fail(const std::string& why);
  /// The results of the round are not used: why, or nullopt, as the wait was interrupted.
  void NoteFailure(const std::optional<std::string>& why);
  /// The gradients are given up.
  void Forget();
  /// Waits for the round; on a GPU the current stream does. Interruptible.
  void Wait();
  /// The round is complete: gives every parameter its result.
  /// @param keeps_reduced  As NoteReduced() has it.
  void Receive(const pybind11::object& increment_versions, bool keeps_reduced);
  /// The round's sparse gradients have been gathered, if any rank contributed one.
  void ReleaseSparse();
  /// A round failed: what the memory holds counts as not reduced.
  void Drop();
  void Stepped();
  bool Skipped(int32_t i) const;
  /// A gradient that was assigned after the round that completed last; null: none was.
  std::shared_ptr<GradientSlot> FindAssigned() const;
  /// No gradient counts as reduced.
  void ForgetReduced();
  /// This rank has, or some rank had, a sparse gradient where this rank has one.
  bool HasSparse() const;
  /// All zero in a forked child.
  farandole_round_status Status() const;

  /// Whether the memory of all rounds waited for is touched no more.
  bool IsComplete() const;
  /// Releases the memory of the rounds that are complete.
  void ReleaseCompleted();
  /// Leaves what rounds still use to the context: nobody uses this any more.
  void Detach();
  /// Of rounds whose memory is kept.
  size_t kept() const { return kept_.size(); }
  bool Release() override;

  /// For the garbage collector: parameters may refer to the optimizer in their turn.
  int Traverse(visitproc visit, void* argument) const;
  void Clear();

  bool is_running = false;  ///< A backward pass is, and its first hook has been called.
  pybind11::object task =
      pybind11::none();  ///< The number of the graph task that was let in; None: none.

 private:
  friend class Context;
  /// Where a round puts the result of a gradient that this rank has not, as the engine's thread
  /// does.
  struct NewResult {
    std::vector<int64_t> shape;
    DLDataType dtype{};
    ManagedTensor tensor;
  };

  static void* AllocateResult(void* gradients, int32_t i, const int64_t* rows, int32_t ranks,
                              int64_t bytes);
  farandole_gradients* get() const;
  /// Released; or it is the parent's, and this a forked child.
  bool is_gone() const { return handle_ == nullptr || context_->is_forgotten(); }
  bool HasEnded();
  static std::vector<const char*> ToTexts(const std::vector<std::string>& labels);
  pybind11::object Owner() const;
  bool is_cuda() const { return device_.device_type == kDLCUDA; }
  std::optional<farandole_stream> StreamNow() const;
  std::optional<Layout> ReadDirectly(const GradientSlot& slot,
                                     const pybind11::object& gradient) const;
  void Send(int32_t index);
  void SendAbsent(GradientSlot& slot, int32_t index);
  pybind11::object Pack(GradientSlot& slot, int32_t index);
  void Mark(int32_t index, void* in, void* out, farandole_vote vote);
  void CheckSent(bool is_left_to_user);
  void ReceiveOne(int32_t index, pybind11::list& in_place);
  pybind11::object TakeNew(int32_t index);
  bool HasOtherOwner(const pybind11::object& gradient) const;
  void KeepMemory();
  std::optional<int64_t> CompleteRounds() const;
  pybind11::list Memory() const;

  const pybind11::object owner_;  // a weak reference
  const TorchFunctions torch_;
  const Settings settings_;
  const ArrayType* type_ = nullptr;         // of parameters; nullptr: there are none
  farandole_gradients* handle_ = nullptr;   // nullptr: the context has ended
  farandole_gradients* unbound_ = nullptr;  // that it was then, of no context
  std::vector<std::shared_ptr<GradientSlot>> slots_;
  std::mutex new_results_mutex_;  // of the next while a round is in flight
  std::vector<NewResult> new_results_;
  DLDevice device_{kDLCPU, 0};  // where gradients travel
  pybind11::object like_ = pybind11::none();
  int waiting_ = 0;
  std::deque<std::pair<int64_t, pybind11::object>> kept_;  // by the number of rounds waited for
};

}  // namespace farandole::python
