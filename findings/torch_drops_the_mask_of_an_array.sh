#!/usr/bin/env bash
# torch 2.13.0, jax 0.10.2, NumPy 2.4.6.
#
# Expected: a masked array of NumPy is refused, or its masked elements do not count.
# Seen: torch.from_numpy, torch.as_tensor and numpy.asarray give the data without the mask and without a warning: what
#   was marked as missing takes part in sums. jax refuses it (ValueError), so the same pipeline fails there.
# Output seen: torch [1, 2, 3] of [1, --, 3]; jax ValueError
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 jax==0.10.2 numpy==2.4.6

"$python" - <<'PYTHON'
import warnings
import jax.numpy as jnp
import numpy as np
import torch

warnings.simplefilter("error")
masked = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])
assert masked.sum() == 4
for convert in (torch.from_numpy, torch.as_tensor, torch.tensor, np.asarray):
    assert convert(masked).sum() == 6, convert
    print(f"{convert.__name__}: {convert(masked).tolist()}")
try:
    jnp.asarray(masked)
except ValueError as error:
    print(f"jax: ValueError: {error}")
else:
    raise AssertionError("jax takes masked arrays")
PYTHON
