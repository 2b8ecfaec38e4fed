#!/usr/bin/env bash
# mlx 0.32.4 (mlx[cpu]), NumPy 2.4.6.
#
# Expected: mlx arrays are values: memoryview(x) is read-only, as of a jax array. And a float64 array of NumPy stays
#   float64, which mlx has on the CPU.
# Seen: the view is writable, and writing into it changes the array and every array that shares its memory. And
#   mx.array(float64) is float32 without a word (1/3 becomes 0.3333333432674408); dtype=mx.float64 keeps it.
# Output seen: read-only False; x = [9, 2] after a write; mx.array(np.float64 array).dtype = float32, int64 stays int64
source "$(dirname "$0")/packages.sh"
install 'mlx[cpu]==0.32.4' numpy==2.4.6

"$python" - <<'PYTHON'
import mlx.core as mx
import numpy as np

x = mx.array([1.0, 2.0])
view = memoryview(x)
np.asarray(view)[0] = 9
print(f"read-only {view.readonly}; x = {x.tolist()}")
assert not view.readonly and x.tolist() == [9, 2]
third = np.array([1 / 3])
made = mx.array(third)
print(f"{made.dtype} {made.item()}; dtype=mx.float64: {mx.array(third, dtype=mx.float64).dtype}")
assert made.dtype == mx.float32 and made.item() == float(np.float32(1 / 3))
assert mx.array(third, dtype=mx.float64).dtype == mx.float64
assert mx.array(np.array([2**40])).dtype == mx.int64
PYTHON
