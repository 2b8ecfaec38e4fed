#!/usr/bin/env bash
# torch 2.13.0: PrefixStore of torch.distributed.
#
# Expected: a PrefixStore is a store of its own: num_keys() counts what was set through it.
# Seen: it counts all keys of the store behind it, those of other prefixes and of the store itself too (a TCPStore has
#   one from the start, a HashStore none). Waiting until num_keys() reaches the number of ranks returns too early in the
#   second group, or never if compared for equality.
# Output seen: TCPStore: 1 key at first; PrefixStore "b" with no key of its own: 4 after three keys under "a"
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

"$python" - <<'PYTHON'
import datetime
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=20))
at_first = store.num_keys()
a, b = dist.PrefixStore("a", store), dist.PrefixStore("b", store)
for key in ("x", "y", "z"):
    a.set(key, "1")
print(f"TCPStore at first {at_first}, HashStore {dist.HashStore().num_keys()}; PrefixStore b, empty: {b.num_keys()}")
assert (at_first, dist.HashStore().num_keys(), b.num_keys()) == (1, 0, 4)
PYTHON
