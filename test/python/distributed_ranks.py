"""Scripts on ranks of torch.distributed, and what distributed_job.py says on them."""

import pathlib
import textwrap

import distributed_job
from ranks import GUARD_S, communicate, start_forked

JOB = pathlib.Path(distributed_job.__file__)
PRELUDE = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import farandole
import farandole.torch.distributed
torch.set_num_threads(1)
R, N = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", -1))

def tell(text):
    sys.stdout.write(f"{text}\\n")  # in one write: ranks may share a pipe
    sys.stdout.flush()
"""


def run(size, arguments, codes=None, timeout_s=GUARD_S):
    """Returns the outputs by rank. ``codes``: the expected exit codes."""
    return communicate(start_forked(size, arguments), codes, timeout_s)


def run_script(size, script, **options):
    return run(size, ["-c", PRELUDE + textwrap.dedent(script)], **options)


def expect_same(work, outputs, results=("same",)):
    for output in outputs:
        lines = [line for line in output.splitlines() if line.endswith(tuple(f": {result}" for result in results))]
        assert [line.split(":")[0] for line in lines] == [one.__name__ for one in work], output
