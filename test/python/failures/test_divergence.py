"""Ranks that wait for different operations are named on all ranks at once; no rank that can go on is."""

from __future__ import annotations

import ast
import pathlib
import re
import tempfile
import textwrap
from typing import NamedTuple

import pytest

from ranks import communicate, start_forked

pytestmark = pytest.mark.once

_HEAD = """
import os, pathlib, threading, time
import numpy as np
import torch
import farandole as fl
import farandole.torch as flt
fl.init()
rank, size = fl.rank(), fl.size()
x = np.ones(4, np.float32)
def reduce(name, **options): fl.allreduce(x, name=name, **options)
def gather(name): fl.allgather(x, name=name)
def train(steps, skipped=()):
    layer = torch.nn.Linear(2, 2)
    optimizer = flt.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters())
    for step in range(steps):
        if step not in skipped:
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        reduce("metric")
reduce("first")
"""
# Who has told waits for the others, which would name a rank that has left.
_TAIL = """
try:
    program()
except fl.HorovodInternalError as error:
    end = (type(error).__name__, error.kind, error.failed_ranks, str(error))
else:
    end = (None, None, (), "no error")
folder = pathlib.Path(os.environ["ENDS"])
(folder / f".{rank}").write_text(repr(end))
(folder / f".{rank}").rename(folder / f"{rank}")
while len(list(folder.glob("[0-9]*"))) < size: time.sleep(0.02)
"""


class _End(NamedTuple):
    raised: str | None
    kind: str | None
    ranks: tuple[int, ...]
    text: str


def _run(size: int, program: str, **variables: str) -> list[_End]:
    """How the ranks end that run the body of a function."""
    body = textwrap.indent(textwrap.dedent(program), "    ")
    script = f"{_HEAD}def program():\n{body}\n{_TAIL}"
    with tempfile.TemporaryDirectory() as folder:
        communicate(start_forked(size, ["-c", script], ENDS=folder, **variables))
        return [_End(*ast.literal_eval(pathlib.Path(folder, str(rank)).read_text())) for rank in range(size)]


_DIVERGED = {
    "another name": ('reduce("loss" if rank else "losss")', 'did you mean one name by "losss" and "loss"?'),
    "another order": (
        "for step in range(3):\n    for name in ('a', 'b') if rank or step < 2 else ('b', 'a'): reduce(name)",
        "all of them were run before: the orders of the calls differ",
    ),
    "another collective": ('gather("x") if rank == 0 else reduce("y")', 'rank 0 waits for allgather "x"'),
    "without names": ("fl.allreduce(x) if rank else fl.allgather(x)", "an allreduce without a name"),
    "skipped backward": ("train(3, skipped=() if rank else (1,))", "the gradients of optimizer 1"),
    "a barrier": ("fl.barrier() if rank else reduce('a')", "barrier"),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", _DIVERGED)
def test_all_ranks_say_which_waits_for_what(case: str, size: int) -> None:
    program, expected = _DIVERGED[case]
    # A stall would be reported after a minute, by which this would have given up.
    ends = _run(size, program, FARANDOLE_STALL_WARNING_S="60")
    assert len(set(map(str, ends))) == 1, ends
    assert ends[0].raised == "MismatchError" and ends[0].kind == "diverged", ends[0]
    # A rank that does not wait yet is not among them.
    assert 0 in ends[0].ranks and 2 <= len(ends[0].ranks) <= size, ends[0]
    assert ends[0].text.startswith("ranks wait for different operations, and none can go on: rank 0 waits for ")
    assert expected in ends[0].text
    assert ends[0].text.count(" at <string>:") >= 2, ends[0].text


@pytest.mark.parametrize("complete", ["backward", "step"])
def test_one_that_skips_a_collective_is_the_odd_one(complete: str) -> None:
    ends = _run(
        4,
        f"""
        layer = torch.nn.Linear(2, 2)
        optimizer = flt.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters(), complete="{complete}")
        for step in range(3):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if rank < 3 or step < 1: reduce("metric")
        """,
    )
    text = ends[0].text
    assert [end.text for end in ends] == [text] * 4 and ends[0].kind == "diverged", ends
    named = {int(rank) for ranks in re.findall(r"ranks? ([0-3](?:, [0-3])*)", text) for rank in ranks.split(", ")}
    assert named == {0, 1, 2, 3}, text  # each waits for something, or has not come that far
    assert ("rank 3 is the odd one out" in text) == ("not come that far" not in text), text
    assert "give DistributedOptimizer" not in text and "backward() is such a call" in text


def test_ranks_of_different_process_sets_that_wait_for_each_other() -> None:
    ends = _run(
        3,
        """
        sets = [fl.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
        order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
        for i in order: reduce("x", process_set=sets[i])
        """,
    )
    assert [end.kind for end in ends] == ["diverged"] * 3, ends
    assert ends[0].ranks == (0, 1, 2)


_FINE = {
    "a rank that is slow": "if rank == 1: time.sleep(1)\nreduce('a')",
    "a rank that polls": """
        work = fl.allreduce_async(x, name="a" if rank else "b")
        end = time.monotonic() + 0.5
        while not work.poll() and time.monotonic() < end: time.sleep(0.01)
        reduce("b" if rank else "a")
        work.wait()
        """,
    "another thread that has called": """
        def other():
            reduce("warm")
            time.sleep(0.5)
            reduce("b" if rank else "a")
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.2)
        reduce("a" if rank else "b")
        thread.join()
        """,
    "another thread that has not called yet": """
        def other():
            time.sleep(0.5)
            reduce("b" if rank else "a")
        thread = threading.Thread(target=other)
        thread.start()
        reduce("a" if rank else "b")
        thread.join()
        """,
    "a daemon that has not called yet": """
        def other():
            time.sleep(0.5)
            reduce("b" if rank else "a")
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        reduce("a" if rank else "b")
        thread.join()
        """,
    "a rank that has joined": "if rank: reduce('a')\nfl.join()",
}


@pytest.mark.parametrize("case", _FINE)
def test_ranks_that_can_go_on_do(case: str) -> None:
    ends = _run(3, _FINE[case])
    assert [end.raised for end in ends] == [None] * 3, ends
