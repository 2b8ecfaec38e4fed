// What XLA hands a handler, read by XLA's C API (xla/ffi/api/c_api.h).
//
// Only what version 0.1 of that API has is used, and 0.1 is the version that is declared, whichever
// header this was compiled with: jaxlib 0.6 and all newer ones take it. The C++ layer above it
// (ffi.h) would declare its own version, which older runtimes refuse.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bindings/c/farandole.h"
#include "xla/ffi/api/c_api.h"

#if XLA_FFI_API_MAJOR != 0
#error "farandole's handlers are written for version 0 of XLA's FFI"
#endif

namespace farandole::xla {

constexpr int kApiMajor = 0;
constexpr int kApiMinor = 1;

/// The attributes of one collective, in the order of their names, in which XLA gives them.
struct Attributes {
  int64_t devices;  ///< 0: a scalar operand, the last, numbers the device; else how many call alike
  int64_t kind;     ///< farandole_kind; so are op, root, set and wire those of farandole_params
  std::string name;
  int64_t number;  ///< of the calls of this name in the program, from 0; -1: nothing has ordered it
  int64_t op;
  double postscale;
  double prescale;
  int64_t rank;  ///< of this process in the set when the program was traced
  int64_t root;  ///< of an allreduce: only this rank gets the result, the others zeros; -1: all do
  int64_t set;
  int64_t size;  ///< of the set when the program was traced
  int64_t wire;
};

/// The arrays of one collective. What it refers to lives as long as the call frame.
struct Arrays {
  std::vector<farandole_tensor> tensors;  ///< What this rank contributes.
  std::vector<const void*> in;
  std::vector<farandole_output> out;  ///< As `in`, of the results.
  std::vector<int64_t> rows;          ///< As `in`, the first dimensions of the results.
  uint32_t device = 0;                ///< Which of the process's devices calls.
  bool become_zero = false;           ///< Of a reduction whose result is another rank's.
};

/// The error that a handler returns for a farandole_code.
XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, int code, const std::string& message);
/// Of the program that calls: the same on all devices that run it together. 0: XLA does not tell.
int64_t RunIdOf(const XLA_FFI_CallFrame& frame);
/// Whether XLA only asks for the version that the handler was written for, which this answers.
bool AnswerMetadata(const XLA_FFI_CallFrame& frame);
/// @return false if these are not the attributes that farandole.jax gives.
bool Read(const XLA_FFI_Attrs& given, Attributes* attributes);
/// Operands are the tensors, a token, which orders calls, and a device number if `has_device`;
/// results are the tensors' and a token. A barrier has operands, which it comes after, but no
/// tensors.
/// @return what is wrong; nullptr: nothing.
const char* Read(const XLA_FFI_CallFrame& frame, bool has_device, Arrays* arrays);

}  // namespace farandole::xla
