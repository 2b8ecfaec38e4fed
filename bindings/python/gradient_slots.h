// The gradients of one optimizer's parameters, as autograd accumulates them and as they are sent.
//
// What is done for every parameter in every step is done here, and reads tensors by DLPack's C
// functions alone: the calls of autograd's hooks, sending a dense gradient in host memory as it is,
// and noting which gradients were reduced. Whatever else a gradient may be (sparse, compressed, on
// a GPU, of a torch without these functions) is left to the methods of a Python object, the *owner*
// (farandole/torch/_reducer.py), one gradient at a time.
//
// Needs the GIL, as context.h says; hooks may be called on any thread.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/python/arrays.h"
#include "bindings/python/gradients.h"

namespace farandole::python {

/// One parameter and its gradient. Python reads and writes the fields.
struct GradientSlot {
  pybind11::object name;
  pybind11::object parameter;
  pybind11::object codec;  ///< How its gradients travel; null before they were defined.
  bool is_direct = false;  ///< The codec sends a C-ordered gradient in host memory as it is.

  pybind11::object dtype;  ///< torch's, of the gradients as they were defined; null: never yet.
  pybind11::object last_dtype;  ///< Of the gradient seen last.

  /// A tensor in memory where ranks reduce without copies, like the gradients of a direct slot:
  /// these are moved there when they are accumulated or sent. Null: they stay where they are.
  pybind11::object view;

  // What the parameter of a direct slot looked like when it was defined.
  DLDataType element{};
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;

  int accumulated = 0;  ///< How often a gradient was accumulated in the pass that sends.
  int expected = 0;     ///< The most often that was so in earlier rounds; 0: never yet.
  pybind11::object stream = pybind11::none();  ///< In which it was accumulated last; None: host.
  /// Autograd chose the memory of `.grad`, which was None, and nothing was sent since.
  bool is_fresh = false;

  // Of the open round.
  pybind11::object sent;                ///< `.grad` as it was sent; null: there was none.
  std::optional<int64_t> sent_version;  ///< Its version then; none in inference mode.
  pybind11::object buffer;              ///< The tensor whose memory is read and written.
  pybind11::object sparse;  ///< This rank's sparse gradient, which is gathered; null: none.
  bool is_present = false;  ///< This rank contributes a gradient of whatever layout.
  bool was_sparse = false;  ///< Some rank had a sparse gradient in this round or before.

  // The gradient that was reduced last and has not been accumulated to since.
  pybind11::object reduced;  ///< A weak reference, or itself; null: there is none.
  std::optional<int64_t>
      version;  ///< Its version when it had been reduced; none in inference mode.

  pybind11::object gradient() const;
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
  /// Makes the view the gradient, with its values. Gives the gradient as it is then: what was
  /// there before if there is no view, or it cannot hold that.
  pybind11::object MoveIntoView();
};

/// The slots of one optimizer and its hooks.
class GradientSlots : public std::enable_shared_from_this<GradientSlots> {
 public:
  /// @param owner  Weakly referenced; what is not done here is left to its methods:
  ///     before_accumulation(index) and accumulated(index): of hooks outside a running pass;
  ///     send(index, stream): marks a gradient, made in `stream`; check(slot): raises if what was
  ///     sent does not fit; receive(slot): gives the parameter its result, and gives the gradient
  ///     if it was changed in place.
  /// @param current_task  Gives the number of the graph task that runs on this thread.
  /// @param is_grad_enabled  torch.is_grad_enabled.
  /// @param count_owners  Gives how many own the storage at an address (`_cdata`); None: nobody
  ///     can tell.
  /// @param sole_owner  What it gives of the storage of a tensor that has no views.
  /// @param overlaps  Gradients are sent during the backward pass; otherwise at its end.
  /// @param is_average  A gradient may be added to one that was reduced.
  GradientSlots(const pybind11::object& owner, pybind11::object current_task,
                pybind11::object is_grad_enabled, pybind11::object count_owners, int64_t sole_owner,
                bool overlaps, bool is_average);

  std::shared_ptr<GradientSlot> Add(pybind11::object name, pybind11::object parameter);
  const std::vector<std::shared_ptr<GradientSlot>>& slots() const { return slots_; }
  /// What to register with autograd, to be called before a gradient is added to `.grad` and after.
  pybind11::object Hook(int32_t index, bool is_after);

  /// A new codec, for gradients of codec.dtype; `is_direct` holds as far as DLPack can tell.
  void Define(GradientSlot& slot, pybind11::object codec, bool is_direct);
  /// Whether every slot's codec still fits its parameter and the dtype of its gradients.
  bool AreDefined() const;

  // What hooks call.
  void BeforeAccumulation(int32_t index);
  void AfterAccumulation(int32_t index);

  /// A round begins.
  void Open();
  /// A gradient was accumulated in a running pass: sends it, or the one before, if it is due.
  /// @throw RuntimeError if the gradient was sent before.
  void Accumulated(int32_t index);
  /// The tensor to send for the slot's gradient, whose memory may be written: memory that somebody
  /// else owns too is not. Autograd gives `.grad` views of what later nodes of the pass, gradients
  /// of other tensors or the user hold, as of x + p.unsqueeze(0) with a batch of one. Such a
  /// gradient is replaced by a copy. A gradient that the user placed, as in a flat buffer, stays,
  /// and its copy is given.
  pybind11::object OwnMemory(GradientSlot& slot);
  /// Sends everything that was not sent, accumulated ones first, and checks what was.
  /// @throw ValueError for a gradient that does not fit, or was replaced in flight.
  void SendRest(bool is_left_to_user);
  /// The round is complete: gives every parameter its result. @return which were skipped.
  /// @param keeps_reduced  As NoteReduced() has it.
  std::vector<bool> Receive(const pybind11::object& increment_versions, bool keeps_reduced);
  /// The round's sparse gradients have been gathered, if any rank contributed one.
  void ReleaseSparse();
  /// A round failed: what the memory holds counts as not reduced.
  void Drop();
  /// A gradient that was assigned after the round that completed last; null: none was.
  std::shared_ptr<GradientSlot> FindAssigned() const;
  /// No gradient counts as reduced.
  void ForgetReduced();
  /// Objects whose memory the open round uses.
  pybind11::list Memory() const;
  /// This rank has, or some rank had, a sparse gradient where this rank has one.
  bool HasSparse() const;

  /// For the garbage collector: parameters may refer to the optimizer in their turn.
  int Traverse(visitproc visit, void* argument) const;
  void Clear();

  std::shared_ptr<Gradients> gradients;  ///< Of the rounds; null before they were defined.
  pybind11::object current_stream =
      pybind11::none();        ///< None; or gives the calling thread's current stream.
  bool is_open = false;        ///< A round is: accumulated gradients belong to it.
  bool is_running = false;     ///< A backward pass is, and its first hook has been called.
  bool has_sent = false;       ///< Something was sent in the open round.
  bool has_unreduced = false;  ///< Gradients were accumulated that no completed round has seen.
  pybind11::object task =
      pybind11::none();  ///< The number of the graph task that was let in; None: none.

 private:
  pybind11::object Owner() const;
  /// @throw HorovodInternalError after shutdown().
  Gradients& Rounds() const;
  void Send(int32_t index);
  bool HasOtherOwner(const pybind11::object& gradient) const;

  const pybind11::object owner_;  // a weak reference
  const pybind11::object current_task_;
  const pybind11::object is_grad_enabled_;
  const pybind11::object count_owners_;
  const int64_t sole_owner_;
  const bool overlaps_;
  const bool is_average_;
  std::vector<std::shared_ptr<GradientSlot>> slots_;
  std::vector<int32_t> order_;  // of the first accumulation in the open round
  int32_t due_ = -1;            // to be sent when the next gradient is accumulated
};

}  // namespace farandole::python
