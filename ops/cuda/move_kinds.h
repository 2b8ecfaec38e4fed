// The element types a move knows, and how a pair of them is found for a MoveSpec.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/types.h"

namespace farandole {

template <class T>
struct MoveType {
  using Type = T;
};

/// Calls fn(MoveType<T>()) for a floating type.
template <class Fn>
void VisitFloating(DType dtype, const Fn& fn) {
  if (dtype == DType::kFloat16) return fn(MoveType<Float16>());
  if (dtype == DType::kBfloat16) return fn(MoveType<Bfloat16>());
  if (dtype == DType::kFloat32) return fn(MoveType<float>());
  return fn(MoveType<double>());
}

/// Calls fn(MoveType<T>()) for an integer type; bool is moved as uint8.
template <class Fn>
void VisitInteger(DType dtype, const Fn& fn) {
  if (dtype == DType::kInt8) return fn(MoveType<int8_t>());
  if (dtype == DType::kInt16) return fn(MoveType<int16_t>());
  if (dtype == DType::kInt32) return fn(MoveType<int32_t>());
  if (dtype == DType::kInt64) return fn(MoveType<int64_t>());
  return fn(MoveType<uint8_t>());
}

/// Calls fn(MoveType<T>()) for any type.
template <class Fn>
void VisitMoveType(DType dtype, const Fn& fn) {
  IsFloating(dtype) ? VisitFloating(dtype, fn) : VisitInteger(dtype, fn);
}

}  // namespace farandole
