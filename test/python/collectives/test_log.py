"""The log on stderr: a reader that does not read must not stop the ranks."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import ranks

_FULL_STDERR = """
import fcntl, os, sys, time
import ranks
import numpy as np
import farandole as fd

flags = fcntl.fcntl(2, fcntl.F_GETFL)
fcntl.fcntl(2, fcntl.F_SETFL, flags | os.O_NONBLOCK)
for size in (4096, 1):
    try:
        while True:
            os.write(2, b"." * size)
    except BlockingIOError:
        pass
fcntl.fcntl(2, fcntl.F_SETFL, flags)

def body(rank):
    first = fd.allreduce_async(np.ones(4), name="late", op=fd.Sum) if rank == 0 else None
    time.sleep(1 if rank else 0)  # a stall of ten times the reported length
    first = first or fd.allreduce_async(np.ones(4), name="late", op=fd.Sum)
    assert fd.synchronize(first)[0] == 2
    return [fd.allreduce(np.ones(4), name="k", op=fd.Sum)[0] for _ in range(100)]

assert ranks.run_threads(2, body) == [[2.0] * 100] * 2
print("trained", flush=True)
sys.stdin.read()
"""


def test_collectives_go_on_while_nobody_reads_stderr():
    environment = os.environ | {"FARANDOLE_STALL_WARNING_S": "0.1", "PYTHONPATH": ranks.PYTHON_PATH}
    job = subprocess.Popen(
        [sys.executable, "-c", _FULL_STDERR], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        trained, _, _ = select.select([job.stdout], [], [], 30)
        assert trained, "a rank waits for a reader of stderr"
        _, said = job.communicate("", timeout=30)
    finally:
        job.kill()
    assert job.returncode == 0, said.lstrip(".")
    assert "late" in said, "what was said meanwhile comes once stderr is read"
