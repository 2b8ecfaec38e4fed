#!/usr/bin/env bash
# torch 2.13.0: HashStore, FileStore and TCPStore of torch.distributed.
#
# Expected: compare_set(key, expected, desired) returns the value that the store holds afterwards; for a key that nobody
#   has set, something empty or an error.
# Seen: if the key is missing and `expected` is not empty, it returns `expected`, a value that is nowhere in the store,
#   and sets nothing. Who loops "until the store says what I expected" believes that the key exists. Also: delete_key of
#   a missing key is True with FileStore, False with the others.
# Output seen, each store: compare_set(missing, "x", "y") = b'x', check = False
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

FILE=$folder/store "$python" - <<'PYTHON'
import datetime, os
import torch.distributed as dist

stores = [
    dist.HashStore(), dist.FileStore(os.environ["FILE"], 1),
    dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=20)),
]
for store in stores:
    name = type(store).__name__
    answer, exists = store.compare_set("missing", "x", "y"), store.check(["missing"])
    deleted = store.delete_key("missing too")
    print(f"{name}: compare_set(missing, 'x', 'y') = {answer}, check = {exists}; delete_key(missing) = {deleted}")
    assert answer == b"x" and not exists
    assert deleted is (name == "FileStore")
    assert store.compare_set("missing", "", "y") == b"y"  # the way that works
PYTHON
