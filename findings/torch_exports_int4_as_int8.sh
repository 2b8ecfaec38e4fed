#!/usr/bin/env bash
# torch 2.13.0, NumPy 2.4.6.
#
# Expected: DLPack, which has a field for the number of bits, keeps torch.int4 and torch.uint1, or the export fails.
# Seen: a tensor of int4 leaves as int8, one of uint1 as uint8, without a warning; what comes back is another dtype, and
#   arithmetic on it, which int4 does not have, works on the containers.
# Output seen: int4 -> int8, uint1 -> uint8
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

"$python" - <<'PYTHON'
import numpy as np
import torch

plain = torch.tensor([7, 200, 3], dtype=torch.uint8)
for small, container in ((torch.int4, torch.int8), (torch.uint1, torch.uint8)):
    x = plain.view(small)
    assert x.dtype == small
    back, array = torch.from_dlpack(x), np.from_dlpack(x)
    print(f"{small} -> {back.dtype}, NumPy {array.dtype}")
    assert back.dtype == container and str(array.dtype) == str(container).removeprefix("torch.")
PYTHON
