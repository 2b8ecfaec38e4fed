#!/usr/bin/env bash
# torch 2.13.0 (CPU).
#
# Expected: the number of threads divides the rows of a product among cores; each element is the same sum as before, or,
#   if threads change the order of sums, more threads change more.
# Seen: a product of 64 x 1000 by 1000 x 64 has other bits with 2 threads than with 1, in elements of all rows; and what
#   is the same with 1 and 4 differs with 2. torch.use_deterministic_algorithms(True) says nothing. So a result can
#   be repeated only with the number of threads it was made with.
# Output seen (AVX-512): threads 1 and 4 agree; 2 differ from 1 in 3770 of 4096 elements
# Farandole: a Job fixes torch's number of threads (`threads=`, 1 by default), and says so.
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

"$python" - <<'PYTHON'
import torch

torch.use_deterministic_algorithms(True)
generator = torch.Generator().manual_seed(0)
a, b = torch.randn(64, 1000, generator=generator), torch.randn(1000, 64, generator=generator)
results = {}
for threads in (1, 2, 4):
    torch.set_num_threads(threads)
    results[threads] = a @ b
    assert torch.equal(results[threads], a @ b)  # with as many threads it is repeated
differ = {threads: int((results[threads] != results[1]).sum()) for threads in (2, 4)}
print(f"elements of {results[1].numel()} that differ from one thread's: 2 threads {differ[2]}, 4 threads {differ[4]}")
assert differ[2] > 0, "two threads give the bits of one"
PYTHON
