// The gradients of one optimizer, and how long the memory of their rounds stays.
//
// Needs the GIL, as context.h says.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"
#include "bindings/python/context.h"

namespace farandole::python {

/// Descriptions of tensors from a Python sequence of (name or None, dtype number, shape).
class TensorList {
 public:
  explicit TensorList(const pybind11::sequence& descriptions);
  const farandole_tensor* data() const { return tensors_.data(); }
  int32_t count() const { return static_cast<int32_t>(tensors_.size()); }

 private:
  std::vector<std::string> names_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<farandole_tensor> tensors_;
};

/// The address behind `object`: None (null), an int, or an object with a contiguous buffer. The
/// caller keeps the memory alive.
/// @throw TypeError for anything else; BufferError or ValueError if `writable` and it is not.
void* Address(pybind11::handle object, bool writable);

/// None, or a pair (CUDA device number, stream handle as an int).
class Stream {
 public:
  explicit Stream(const pybind11::object& pair);
  /// nullptr for None.
  const farandole_stream* get() const { return given_ ? &stream_ : nullptr; }

 private:
  bool given_ = false;
  farandole_stream stream_{};
};

/// The gradients of one optimizer.
class Gradients : public Child, public std::enable_shared_from_this<Gradients> {
 public:
  Gradients(std::shared_ptr<Context> context, const farandole_params& params, const char* prefix,
            const TensorList& tensors, int64_t group_bytes);
  ~Gradients() override;

  void Redefine(const TensorList& tensors);
  void Mark(int32_t i, const pybind11::object& in, const pybind11::object& out, int32_t vote,
            const pybind11::object& stream);
  /// A gradient in host memory, read and written where it is.
  void MarkMemory(int32_t i, void* memory, farandole_vote vote);
  /// Numbers as in farandole_step.
  void InStep(int64_t step, int32_t passes, int32_t no_sync_passes, int32_t previous_passes,
              int32_t previous_no_sync_passes);
  void AnnounceStep();
  bool Marked(int32_t i) const;
  void End(const pybind11::object& failed);
  bool Wait(double timeout_s, const pybind11::object& stream);
  /// Whether the memory of all rounds waited for is touched no more.
  bool IsComplete();
  bool Skipped(int32_t i) const;
  int32_t Groups() const;
  /// Keeps the memory of the round last waited for until it is touched no more.
  void Keep(const pybind11::object& memory);
  /// Releases the memory of the rounds that are complete.
  void ReleaseCompleted();
  /// Leaves what is kept to the context: nobody uses this any more. With `is_pending` nobody has
  /// waited for the last round either, which uses `memory`.
  void Detach(const pybind11::object& memory, bool is_pending);
  /// Of rounds whose memory is kept.
  size_t kept() const { return kept_.size(); }
  bool Release() override;

 private:
  friend class Context;
  farandole_gradients* get() const;
  /// Released; or it is the parent's, and this a forked child.
  bool is_gone() const { return handle_ == nullptr || context_->is_forgotten(); }
  bool HasEnded();
  farandole_gradients* handle_ = nullptr;
  int waiting_ = 0;
  std::deque<std::pair<int64_t, pybind11::object>> kept_;  // by the number of rounds waited for
  bool has_ended_ = false;
};

}  // namespace farandole::python
