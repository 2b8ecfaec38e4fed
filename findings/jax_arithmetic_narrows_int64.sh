#!/usr/bin/env bash
# jax 0.10.2 (CPU), NumPy 2.4.6.
#
# Expected: an int64 array keeps its dtype wherever it goes; jax_enable_x64 decides what *new* arrays are.
# Seen: an int64 array that was made under jax.enable_x64(True) is int64 everywhere, but any arithmetic on it outside,
#   even `x * 1`, gives int32, and 2**40 becomes 0. jnp.asarray of a NumPy int64 array gives the same 0 without a
#   warning, and so does from_dlpack.
# Output seen: x.dtype int64; (x * 1) = [0 1] int32; jnp.asarray(numpy) = [0 1] int32; from_dlpack: [0 1] int32
source "$(dirname "$0")/packages.sh"
install jax==0.10.2 numpy==2.4.6

"$python" - <<'PYTHON'
import warnings
import jax
import jax.numpy as jnp
import numpy as np

with jax.enable_x64(True):
    x = jnp.array([2**40, 1])
assert x.dtype == np.int64 and int(np.asarray(x)[0]) == 2**40
wide = np.array([2**40, 1])
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    seen = [jnp.asarray(wide), jnp.from_dlpack(wide), x * 1]
for what, y in zip(("asarray of NumPy", "from_dlpack", "x * 1"), seen, strict=True):
    print(f"{what}: {y} {y.dtype}")
    assert y.dtype == np.int32 and y.tolist() == [0, 1]
PYTHON
