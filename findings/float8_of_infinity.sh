#!/usr/bin/env bash
# torch 2.13.0, ml_dtypes 0.6.0, NumPy 2.4.6.
#
# Expected: a cast of infinity to float8_e4m3fn, which has no infinity, gives nan everywhere, so that an overflow of a
#   gradient is seen behind the cast.
# Seen: torch saturates: inf becomes 448, a finite number, and so do 500 and 1e6; a test for finite values behind the
#   cast passes. ml_dtypes (and so jax) gives nan for all three.
# Output seen: torch [448, 448, 448], ml_dtypes [nan, nan, nan]
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 ml_dtypes==0.6.0 numpy==2.4.6

"$python" - <<'PYTHON'
import ml_dtypes
import numpy as np
import torch

values = [500.0, 1e6, float("inf")]
by_torch = torch.tensor(values).to(torch.float8_e4m3fn).float().tolist()
by_ml_dtypes = np.array(values, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()
print(f"torch {by_torch}, ml_dtypes {by_ml_dtypes}")
assert by_torch == [448.0, 448.0, 448.0]
assert np.isnan(by_ml_dtypes).all()
PYTHON
