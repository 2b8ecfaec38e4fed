#!/usr/bin/env bash
# torch 2.13.0 (CPU).
#
# Expected: torch.optim.Adam(...) makes an object, and torch.use_deterministic_algorithms(True) sets a flag.
# Seen: whichever comes first imports torch's compiler, torch._dynamo and torch._inductor: 823 modules, about as much
#   processor time as `import torch` itself. A process that is to train soon, such as one that takes the place of a lost
#   one, pays it before its first step.
# Output seen, for both: dynamo and inductor [True, True], 823 modules, 1 s
# Farandole: a Job imports what its steps need before it joins, so that no other rank waits for that.
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

for first in "torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])" "torch.use_deterministic_algorithms(True)"; do
  python - "$first" <<'PYTHON'
import sys
import time

import torch

assert "torch._dynamo" not in sys.modules
modules, time_s = len(sys.modules), time.process_time()
exec(sys.argv[1])
time_s, modules = time.process_time() - time_s, len(sys.modules) - modules
has = ["torch._dynamo" in sys.modules, "torch._inductor" in sys.modules]
print(f"{sys.argv[1]}: dynamo and inductor {has}, {modules} modules, {time_s:.2f} s")
assert all(has) and modules > 100
PYTHON
done
