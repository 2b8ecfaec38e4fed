"""One rank of a job that inject.py starts: ``rank.py SPEC``, with the words of ``Plan`` there as JSON.

It loops as a training does, lets faults that come from within happen in their time, and writes down what it sees:
``N.pid`` once it is at work, a line in ``N.errors`` for each error, and in ``faults`` the times of its own faults.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

import farandole as fl

FACTS = ("kind", "cause", "tensor", "failed_ranks", "signal", "exit_code", "host", "pid", "last")
GRADIENTS = [np.ones(count, np.float32) for count in (10, 1_000, 100_000)]


class Training:
    """The loop, and the faults that its rank is told to have, one after the other."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank = fl.rank()
        self._folder = pathlib.Path(spec["folder"])
        self._mine: list[str] = spec["kinds"] if spec["rank"] == self.rank else []
        self._random = random.Random(spec["seed"])
        self._delays_s: list[float] = spec["delays_s"]
        self._length_s: float | None = spec["length_s"]
        self._line = spec["line"]
        self._due_s = 0.0

    def run(self) -> None:
        """Steps until ``length_s`` have passed, or for ever."""
        self._step({})
        self._write(f"{self.rank}.pid", str(os.getpid()))
        begin_s = time.monotonic()
        self._plan_next(begin_s)
        while True:
            self._step(self._next_fault())
            if self._line:
                print(self._line, file=sys.stderr)
            is_over = self._length_s is not None and time.monotonic() - begin_s > self._length_s
            if fl.broadcast(np.array([is_over]), 0, name="over")[0]:
                return
            time.sleep(self._random.uniform(0, 0.004))

    def _plan_next(self, now_s: float) -> None:
        self._due_s = now_s + self._delays_s.pop(0) if self._delays_s else float("inf")

    def _next_fault(self) -> dict[str, Any]:
        """What this step does otherwise than it should; a fault of another sort happens here."""
        if not self._mine or time.monotonic() < self._due_s:
            return {}
        kind = self._mine.pop(0)
        self._plan_next(time.monotonic())
        if kind in WRONG_CALLS:
            return WRONG_CALLS[kind]
        self.note_fault()
        HAPPENINGS[kind]()
        return {}

    def note_fault(self) -> None:
        """Of this rank, now."""
        self._append("faults", str(time.monotonic()))

    def _step(self, wrong: dict[str, Any]) -> None:
        handles = [fl.allreduce_async(gradient, name=f"gradient.{i}") for i, gradient in enumerate(GRADIENTS)]
        for handle in handles:
            fl.synchronize(handle)
        names = wrong.get("order", ("loss", "norm"))
        for name in names:
            here = wrong if name == "loss" else {}
            value = np.ones(here.get("count", 2), here.get("dtype", np.float32))
            if wrong and name == names[0]:
                self.note_fault()
            try:
                here.get("call", fl.allreduce)(value, name=here.get("name", name))
            except fl.MismatchError as error:
                if getattr(error, "kind", None) == "diverged":  # is final
                    raise
                self.note_error(error)

    def note_error(self, error: BaseException) -> None:
        """What came of a fault, here."""
        facts = {name: getattr(error, name, None) for name in FACTS}
        text = {"at_s": time.monotonic(), "type": type(error).__name__, "message": str(error), **facts}
        self._append(f"{self.rank}.errors", json.dumps(text))

    def _append(self, name: str, line: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(line + "\n")

    def _write(self, name: str, text: str) -> None:
        part = self._folder / f"{name}.part"
        part.write_text(text)
        part.rename(self._folder / name)


#: How a step differs, of the kinds where a rank calls what the others do not.
WRONG_CALLS: dict[str, dict[str, Any]] = {
    "skipped": {"order": ("norm",)},
    "swapped": {"order": ("norm", "loss")},
    "renamed": {"name": "losss"},
    "other collective": {"call": fl.allgather},
    "other shape": {"count": 3},
    "other dtype": {"dtype": np.float64},
}


def raise_error() -> NoReturn:
    raise KeyError("a bug in the training script")


def run_out_of_memory() -> None:
    """By a limit of the process, so that no other is harmed."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (32 << 20),) * 2)
    kept = []
    while True:
        kept.append(np.ones(1 << 20))


def own_group() -> pathlib.Path:
    return pathlib.Path(f"/sys/fs/cgroup/memory/injected-{os.getpid()}")


def join_own_group() -> None:
    """Before init, as the others look there for what the system kills."""
    own_group().mkdir()
    (own_group() / "cgroup.procs").write_text(str(os.getpid()))


def be_killed_for_memory() -> None:
    used = int((own_group() / "memory.usage_in_bytes").read_text())
    (own_group() / "memory.limit_in_bytes").write_text(str(used + (16 << 20)))
    kept = []
    while True:
        kept.append(np.ones(1 << 20))


def hold_the_gil() -> None:
    """PyDLL keeps the interpreter's lock during the call."""
    ctypes.PyDLL(None).sleep(60)


def loop_for_ever() -> None:
    while True:
        pass


def fork_and_exit() -> None:
    """The child leaves as any program does, with all that runs at exit."""
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)


def leave_from_a_thread(code: int) -> None:
    """In the middle of whatever the main thread does a little later."""
    threading.Timer(random.uniform(0, 0.005), os._exit, [code]).start()


HAPPENINGS: dict[str, Callable[[], Any]] = {
    "_exit(0)": lambda: leave_from_a_thread(0),
    "_exit(7)": lambda: leave_from_a_thread(7),
    "sys.exit(3)": lambda: sys.exit(3),
    "exception": raise_error,
    "memory limit": run_out_of_memory,
    "oom kill": be_killed_for_memory,
    "GIL held": hold_the_gil,
    "endless loop": loop_for_ever,
    "fork": fork_and_exit,
}


def work_alone() -> None:
    """Of rank 0, while the others have ended their work."""
    end_s = time.monotonic() + ALONE_S * (fl.rank() == 0)
    while time.monotonic() < end_s:
        sum(range(10_000)), time.sleep(0.02)


def leave_work_in_flight(folder: pathlib.Path) -> None:
    """Of all ranks, when the first one leaves."""
    for number in range(60):
        IN_FLIGHT.append(fl.allreduce_async(np.ones(1 << 18), name=str(number)))
    (folder / f"{fl.rank()}.submitted").touch()
    while len(list(folder.glob("*.submitted"))) < fl.size():
        pass


def wait_in_a_daemon() -> None:
    threading.Thread(target=fl.allreduce, args=[np.ones(1)], kwargs={"name": "never"}, daemon=True).start()
    time.sleep(0.3)


IN_FLIGHT: list[Any] = []
ALONE_S = float(os.environ.get("FARANDOLE_TEST_EVALUATION_S", "8"))
#: How ranks end after the loop.
ENDS: dict[str, Callable[[pathlib.Path], Any]] = {
    "returns": lambda _: None,
    "shutdown()": lambda _: fl.shutdown(),
    "exits": lambda _: sys.exit(0),
    "works on alone": lambda _: work_alone(),
    "works on alone, shutdown()": lambda _: (work_alone(), fl.shutdown()),
    "work in flight": leave_work_in_flight,
    "daemon waits": lambda _: wait_in_a_daemon(),
}


def main() -> None:
    spec = json.loads(sys.argv[1])
    if "oom kill" in spec["kinds"]:
        join_own_group()
    fl.init()
    training = Training(spec)
    try:
        training.run()
        ENDS[spec["end"]](pathlib.Path(spec["folder"]))
    except fl.HorovodInternalError as error:
        training.note_error(error)
        raise


main()
