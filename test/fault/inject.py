"""Injects faults into jobs of several ranks and says what became of them: ``inject.py --faults 1000 --seed random``.

Each job runs rank.py; a fault comes at a random time to a random rank. For every rank that should hear of it: the
time from the fault to its error, and whether the error names the rank and the kind of failure. For the job: how its
launcher ended, whether it ended at all, and what it left: processes, names in /dev/shm and in the temporary folder.
What is expected of each kind is in FAULTS.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(REPOSITORY / "test" / "python"))

import hosts  # noqa: E402

RANK = str(pathlib.Path(__file__).resolve().parent / "rank.py")
LAUNCHERS = ("farandolerun", "farandolerun --mpi", "mpirun", "env")
MARK = "INJECTED_INTO"  # in the environment of every process of a job: its folder
END_AFTER_S = 30.0  # past a fault's bound, a job that still runs hangs
MAX_EXITED_S = 5.0  # for what a job has started, once its launcher has ended


#: Says a launcher, and ends the other ranks.
_HOST_IS_LOST = re.compile("does not report it any more|ORTE was unable to reliably start")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens, and what must come of it.

    Attributes:
        raises: Who raises an error: "others", "all", or "none" of the ranks.
        kinds: What the error's attribute ``kind`` may be, if it has one.
        says: A pattern that its message has, after the number of the rank.
        bound_s: From the fault to the error, or to the end where none is raised.
        codes: Of farandolerun; None: any but 0. Of the other launchers it is the ranks' own that count.
        signal: Which the rank gets, from outside.
        per_job: How many come to one job, where it goes on.
        hosts: Two, between which the fault is.
        variables: Settings of the job.
        length_s: Of a job that is to end well.
    """

    raises: str = "others"
    kinds: tuple[str, ...] = ()
    says: str = ""
    bound_s: float = 1.0
    codes: tuple[int, ...] | None = None
    signal: int | None = None
    per_job: int = 1
    hosts: bool = False
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    length_s: float | None = None


def _killed(number: int) -> Fault:
    return Fault(kinds=("killed",), says=rf"killed by .*\b{number}\b", codes=(128 + number,), signal=number)


def _exited(code: int, launcher_code: int) -> Fault:
    return Fault(kinds=("exited",), says=rf"\bcode {code}\b", codes=(launcher_code,))


def _raised(error: str) -> Fault:
    return Fault(kinds=("error",), says=rf"{error}\b", codes=(1,))


_STALLS = {"FARANDOLE_STALL_WARNING_S": "1", "FARANDOLE_STALL_SHUTDOWN_S": "3"}
_DIVERGED = Fault(raises="all", kinds=("diverged",), says="loss", variables=_STALLS)
_MISMATCH = Fault(raises="all", kinds=("mismatch",), says="", bound_s=0.1, codes=(0,), per_job=20)
_ENDS_WELL = Fault(raises="none", bound_s=10.0, codes=(0,), length_s=0.5)

#: How all ranks end, once they have worked.
WELL = ("returns", "shutdown()", "exits", "works on alone", "works on alone, shutdown()", "work in flight",
        "daemon waits")  # fmt: skip
FAULTS: dict[str, Fault] = {
    "SIGKILL": _killed(signal.SIGKILL),
    "SIGSEGV": _killed(signal.SIGSEGV),
    "SIGABRT": _killed(signal.SIGABRT),
    "SIGTERM": _killed(signal.SIGTERM),
    "SIGSTOP": Fault(kinds=("stopped",), says="stopped", bound_s=4.0, signal=signal.SIGSTOP),
    "_exit(0)": _exited(0, 1),
    "_exit(7)": _exited(7, 7),
    "sys.exit(3)": _exited(3, 3),
    "exception": _raised("KeyError"),
    "memory limit": _raised("MemoryError"),
    "GIL held": Fault(kinds=("blocked in c",), bound_s=7.0, variables=_STALLS),
    "endless loop": Fault(kinds=("blocked in python",), bound_s=7.0, variables=_STALLS),
    "link cut": Fault(raises="all", kinds=("link down",), says="cannot be reached", bound_s=4.0, hosts=True),
    "host killed": Fault(kinds=("killed", "link down"), says="killed|connection|reached", bound_s=4.0, hosts=True),
    "skipped": _DIVERGED,
    "swapped": _DIVERGED,
    "renamed": _DIVERGED,
    "other collective": _MISMATCH,
    "other shape": _MISMATCH,
    "other dtype": _MISMATCH,
    "disk full": Fault(raises="none", bound_s=5.0, codes=(0,), length_s=1.0),
    "pipe closed": Fault(raises="none", bound_s=5.0, codes=(141,)),
    "pipe full": Fault(raises="none", bound_s=8.0, codes=(0,), length_s=1.0),
    "launcher SIGKILL": Fault(raises="none", bound_s=2.0),
    "launcher SIGINT": Fault(raises="none", bound_s=5.0, codes=(130,)),
    "launcher SIGTERM": Fault(raises="none", bound_s=5.0, codes=(143,)),
    "fork": Fault(raises="none", bound_s=5.0, codes=(0,), length_s=1.0),
    **dict.fromkeys(WELL, _ENDS_WELL),
}
GROUPS = pathlib.Path("/sys/fs/cgroup/memory")  # version 1
if os.access(GROUPS / "cgroup.procs", os.W_OK):
    FAULTS["oom kill"] = Fault(kinds=("out of memory",), says="no memory left", codes=(137,))
#: Kinds that a launcher does not have.
WITHOUT: dict[str, tuple[str, ...]] = {
    "farandolerun": (),
    "farandolerun --mpi": (),
    "mpirun": ("pipe closed", "pipe full"),  # which is mpirun's own affair
    "env": tuple(kind for kind, fault in FAULTS.items() if fault.hosts or kind.startswith(("launcher", "pipe"))),
}


@dataclasses.dataclass
class Heard:
    """What one rank raised after a fault: how late, and what is wrong with what it says, if anything."""

    rank: int
    after_s: float | None  # None: nothing
    wrong: str
    message: str


@dataclasses.dataclass
class Outcome:
    """Of one fault, or of the job in which several came."""

    kind: str
    rank: int
    launcher: str
    seed: int
    faults: int
    heard: list[Heard]
    codes: list[int | None]  # of the launcher, or of the ranks
    are_codes_right: bool
    ended_s: float  # after the (last) fault
    hangs: bool
    leftovers: list[str]
    leftovers_of_mpi: list[str]
    output: str


class Job:
    """A job whose fault comes; a context that leaves no process behind."""

    def __init__(self, kind: str, launcher: str, ranks: int, seed: int, count: int) -> None:
        self.kind, self.fault, self.launcher, self.ranks, self.seed = kind, FAULTS[kind], launcher, ranks, seed
        self.random = random.Random(seed)
        self.count = count
        self.target = self.random.randrange(ranks)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="injected-"))
        self.processes: list[subprocess.Popen[Any]] = []
        self._output: IO[Any] | None = None
        self.hosts: hosts.TwoHosts | None = None
        self._stack = contextlib.ExitStack()
        self._names_before = set(os.listdir("/dev/shm"))

    def __enter__(self) -> Job:
        for name in ("tmp", "shm"):
            (self.folder / name).mkdir()
        self._output = self._stack.enter_context((self.folder / "output").open("w"))
        if self.fault.hosts:
            self.hosts = self._stack.enter_context(hosts.TwoHosts(self.folder, output=self._output))
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            _kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()
        for file in self.folder.glob("*.pid"):
            with contextlib.suppress(OSError):  # only of "oom kill"
                (GROUPS / f"injected-{file.read_text()}").rmdir()
        self._stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What it is made of

    def _spec(self) -> str:
        delays_s = [self.random.uniform(0.01, 0.3)] + [self.random.uniform(0, 0.05) for _ in range(self.count - 1)]
        from_within = self.fault.signal is None and not self.kind.startswith(("launcher", "disk", "pipe"))
        from_within &= not self.fault.hosts and self.kind not in WELL
        length_s = sum(delays_s) + 0.5 if self.fault.per_job > 1 else self.fault.length_s
        return json.dumps({
            "folder": str(self.folder), "seed": self.seed, "rank": self.target,
            "kinds": [self.kind] * self.count if from_within else [],
            "end": self.kind if self.kind in WELL else "returns",
            "delays_s": delays_s, "length_s": length_s, "line": "x" * 20_000 if "pipe" in self.kind else "",
        })  # fmt: skip

    def _variables(self) -> dict[str, str]:
        own = {
            MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rtc_hwloc_vmhole": "none",
            "OMPI_MCA_orte_enable_recovery": "1", "OMPI_MCA_btl_vader_backing_directory": str(self.folder / "shm"),
        }  # fmt: skip
        if self.kind == "disk full":
            own["FARANDOLE_TIMELINE"] = "/dev/full"
        return own | self.fault.variables

    def _start(self) -> None:
        program = [sys.executable, RANK, self._spec()]
        if self.launcher == "mpirun":  # which does not tell how each of its ranks ends
            note = f'"$@"; code=$?; echo $code > {self.folder}/$OMPI_COMM_WORLD_RANK.code; exit $code'
            program = ["sh", "-c", note, "sh", *program]
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
        environment = clean | self._variables()
        if self.hosts is not None:
            self.processes = [self._start_on_hosts(self.hosts, program)]
        elif self.launcher == "env":
            with socket.socket() as one:
                one.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{one.getsockname()[1]}"
            for rank in range(self.ranks):
                own = {"FARANDOLE_RANK": str(rank), "FARANDOLE_SIZE": str(self.ranks), "FARANDOLE_ADDRESS": address}
                self._run(program, environment | own)
        else:
            launch = {
                "farandolerun": [sys.executable, "-m", "farandole.runner"],
                "farandolerun --mpi": [sys.executable, "-m", "farandole.runner", "--mpi"],
                "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none"],
            }[self.launcher]
            self._run([*launch, "-np", str(self.ranks), *program], environment)

    def _start_on_hosts(self, two: hosts.TwoHosts, program: list[str]) -> subprocess.Popen[str]:
        if self.launcher == "mpirun":
            return two.start(self.ranks // 2, program, **self._variables())
        network = "--mpi" if self.launcher.endswith("--mpi") else "--gloo"
        return two.farandolerun(self.ranks // 2, program, network, **self._variables())

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        """Its output goes to a file, which takes all, or to a pipe that is the fault."""
        error: Any = subprocess.PIPE if self.kind.startswith("pipe") else self._output
        self.processes.append(subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self._output, stderr=error,
            start_new_session=True,
        ))  # fmt: skip

    # What is seen of it

    def alive(self) -> list[int]:
        """All processes of this job, by their environment."""
        mark = f"{MARK}={self.folder}".encode()
        return [pid for pid in _pids() if mark in _read(pid, "environ").split(b"\0") and _state(pid) != "Z"]

    def pid(self, rank: int) -> int:
        return int((self.folder / f"{rank}.pid").read_text())

    def is_up(self) -> bool:
        return all((self.folder / f"{rank}.pid").exists() for rank in range(self.ranks))

    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def rank_has_ended(self, rank: int) -> bool:
        return _state(self.pid(rank)) in ("", "Z")

    def fault_times(self) -> list[float]:
        file = self.folder / "faults"
        return [float(line) for line in file.read_text().split()] if file.exists() else []

    def errors(self, rank: int) -> list[dict[str, Any]]:
        file = self.folder / f"{rank}.errors"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def leftovers(self) -> list[str]:
        """What is still there after the end; waits a little for it to go."""
        _wait(lambda: not self.alive() and not self._shared_names(), MAX_EXITED_S)
        left = [f"process {pid}: {_read(pid, 'cmdline').decode(errors='replace')[:60]}" for pid in self.alive()]
        left += self._shared_names()
        left += [str(path.relative_to(self.folder)) for top in ("shm", "tmp") for path in _files(self.folder / top)]
        return left

    def _shared_names(self) -> list[str]:
        """In /dev/shm, since this job began, but those of jobs that run beside it."""
        new = [name for name in set(os.listdir("/dev/shm")) - self._names_before if "farandole" in name]
        return [f"/dev/shm/{name}" for name in new if not _is_used(name.encode())]


def _is_used(name: bytes) -> bool:
    return any(name in _read(pid, "environ") + _read(pid, "cmdline") for pid in _pids())


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return pathlib.Path("/proc", str(pid), name).read_bytes()
    except OSError:
        return b""


def _state(pid: int) -> str:
    """A letter as in ps; empty: there is no such process."""
    return _read(pid, "stat").decode(errors="replace").rpartition(") ")[2][:1]


def _files(top: pathlib.Path) -> Iterator[pathlib.Path]:
    return (path for path in top.rglob("*") if not path.is_dir())


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(condition: Any, seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True


# One job


def run(kind: str, launcher: str, ranks: int, seed: int, count: int) -> Outcome:
    """Starts a job, injects ``count`` faults of a kind, and waits for its end."""
    with Job(kind, launcher, ranks, seed, count) as job:
        if not _wait(lambda: job.is_up() or not job.is_running(), 60) or not job.is_up():
            raise RuntimeError(f"{kind}, seed {seed}: the job did not start:\n{job.output()}")
        _inject_from_outside(job)
        hangs = not _wait_for_the_end(job)
        codes = _codes(job)
        left = [] if hangs else job.leftovers()
        of_mpi = [name for name in left if name.startswith(("shm/vader_segment", "tmp/ompi.")) or "orted" in name]
        end_s = time.monotonic()
        times = job.fault_times() or [end_s]
        heard = [one for number, at_s in enumerate(times) for one in _hear(job, number, at_s)]
        are_right = _are_codes_right(job, codes)
        return Outcome(
            kind, job.target, launcher, seed, count, heard, codes, are_right, end_s - times[-1], hangs,
            [name for name in left if name not in of_mpi], of_mpi, job.output()[-6000:],
        )  # fmt: skip


def _inject_from_outside(job: Job) -> None:
    """The faults that a rank does not bring about itself."""
    if job.fault.signal is None and not job.fault.hosts and not job.kind.startswith(("launcher", "pipe")):
        return
    time.sleep(job.random.uniform(0.01, 0.3))
    begin_s = time.monotonic()
    if job.fault.signal is not None:
        _kill(job.pid(job.target), job.fault.signal)
    elif job.kind == "link cut":
        assert job.hosts is not None
        job.hosts.cut()
    elif job.kind == "host killed":
        assert job.hosts is not None
        job.hosts.kill_second()
    elif job.kind.startswith("launcher"):
        _kill(job.processes[0].pid, getattr(signal, job.kind.split()[1]))
    elif job.kind == "pipe closed":
        job.processes[0].stderr.close()  # type: ignore[union-attr]
    else:  # is full until somebody reads again
        time.sleep(3)
        with job.processes[0].stderr as pipe:  # type: ignore[union-attr]
            while pipe.read(1 << 16):
                pass
    (job.folder / "faults").write_text(f"{begin_s}\n")


def _wait_for_the_end(job: Job) -> bool:
    """Whether the job ended by itself, as far as Farandole can see to that: who stops and loops only farandolerun ends,
    and mpirun may wait for a host that it has lost."""
    last_s = job.fault.bound_s + END_AFTER_S + (job.fault.length_s or 0) + 0.1 * job.count
    if job.launcher.startswith("farandolerun") or job.fault.raises == "none":
        return _wait(lambda: not job.is_running(), last_s)
    deaf = _victims(job) if job.fault.raises == "others" else []
    if not _wait(lambda: all(job.rank_has_ended(rank) for rank in range(job.ranks) if rank not in deaf), last_s):
        return False
    for rank in deaf:
        _kill(job.pid(rank), signal.SIGKILL)
    if job.fault.hosts and not _wait(lambda: not job.is_running(), 2):
        job.processes[0].kill()
    return _wait(lambda: not job.is_running(), last_s)


def _victims(job: Job) -> list[int]:
    """Ranks that fail, of which the others must hear."""
    return [*range(job.ranks // 2, job.ranks)] if job.fault.hosts else [job.target]


def _codes(job: Job) -> list[int | None]:
    """Of farandolerun, else of all ranks; None: it has not ended. As a shell has them."""
    if job.launcher == "mpirun":
        files = [job.folder / f"{rank}.code" for rank in range(job.ranks)]
        return [int(file.read_text()) if file.exists() else None for file in files]
    codes = [process.poll() for process in job.processes]
    return [code if code is None or code >= 0 else 128 - code for code in codes]


def _are_codes_right(job: Job, codes: list[int | None]) -> bool:
    """The launcher's; else those of the ranks that should raise an error, or end well."""
    fault = job.fault
    if job.launcher.startswith("farandolerun"):
        return codes[0] in fault.codes if fault.codes is not None else codes[0] not in (0, None)
    if job.kind.startswith("launcher"):
        return True
    deaf = _victims(job) if fault.raises == "others" else []
    wanted: tuple[int | None, ...] = (0,) if fault.codes == (0,) else (1,)
    if job.fault.hosts:  # then mpirun may end the ranks, too
        wanted += (None,)
    return all(code in wanted for rank, code in enumerate(codes) if rank not in deaf)


def _hear(job: Job, number: int, at_s: float) -> Iterator[Heard]:
    """What ranks raised after the fault of this number."""
    for rank in range(job.ranks):
        errors = job.errors(rank)
        is_deaf = job.fault.raises == "others" and rank in _victims(job)
        if job.fault.raises == "none":
            if errors and not job.kind.startswith("launcher"):
                yield Heard(rank, errors[0]["at_s"] - at_s, "an error", errors[0]["message"])
        elif not is_deaf and number < len(errors):
            one = errors[number]
            yield Heard(rank, one["at_s"] - at_s, _what_is_wrong(job, rank, one), one["message"])
        elif not is_deaf and not (job.kind == "host killed" and _HOST_IS_LOST.search(job.output())):
            yield Heard(rank, None, "nothing heard", "")  # and the launcher has not ended it for the same cause


def _what_is_wrong(job: Job, rank: int, error: dict[str, Any]) -> str:
    """Of what an error says; empty if it names what happened, and to whom."""
    fault, half = job.fault, job.ranks // 2
    if fault is _MISMATCH and (error["type"], error["tensor"]) != ("MismatchError", "loss"):
        return f"{error['type']} of {error['tensor']}"
    if error["kind"] is not None and error["kind"] not in fault.kinds:
        return f"kind {error['kind']}"
    may_fail = {job.target}
    if job.fault.hosts:
        may_fail = {*range(half, job.ranks)} if rank < half else {*range(half)}
    elif fault is _DIVERGED:
        may_fail = {*range(job.ranks)}
    if not set(error["failed_ranks"]) <= may_fail:
        return f"ranks {error['failed_ranks']}"
    named = "|".join(map(str, may_fail))
    is_said = re.search(rf"\branks? (\d+[,-] ?)*({named})\b.*({fault.says})", error["message"], re.S)
    return "" if is_said else f'"{error["message"]}"'


# All jobs


def kinds_in_turn(launcher: str, faults: int, only: list[str]) -> list[tuple[str, int]]:
    """Jobs as (kind, faults of it), so that every kind has the same share."""
    faults_alone = [kind for kind in FAULTS if kind not in WELL]
    kinds = [kind for kind in only or faults_alone if kind not in WITHOUT[launcher]]
    jobs = []
    for number, kind in enumerate(kinds):
        share = faults // len(kinds) + (number < faults % len(kinds))
        per_job = FAULTS[kind].per_job
        jobs += [(kind, min(per_job, share - begin)) for begin in range(0, share, per_job)]
    return jobs


def inject(launcher: str, ranks: int, faults: int, seed: int, only: list[str] = []) -> list[Outcome]:  # noqa: B006
    """Runs the jobs one after the other, in random order."""
    jobs = kinds_in_turn(launcher, faults, only)
    order = random.Random(seed)
    order.shuffle(jobs)
    outcomes = []
    for kind, count in jobs:
        outcomes.append(run(kind, launcher, ranks, order.randrange(1 << 30), count))
        _tell(outcomes[-1])
    return outcomes


def _tell(one: Outcome) -> None:
    """A line about what is not as it should be."""
    wrong = sorted({heard.wrong for heard in one.heard if heard.wrong})
    wrong += [] if one.are_codes_right else [f"exit codes {one.codes}"]
    wrong += ["hangs"] if one.hangs else []
    wrong += one.leftovers
    if wrong:
        print(f"{one.kind}, rank {one.rank}, seed {one.seed}: {', '.join(wrong)}", file=sys.stderr, flush=True)


def _quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else float("nan")


def table(outcomes: list[Outcome]) -> str:
    """A row per kind, and one of all."""
    rows = collections.defaultdict(list)
    for one in outcomes:
        rows[one.kind].append(one)
    lines = [
        "| fault | count | named | p50 ms | p99 ms | max ms | late | ended s | codes | leftovers | MPI's | hangs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(kind, rows[kind]) for kind in FAULTS if kind in rows]
    return "\n".join([*lines, _row("all", outcomes)])


def _row(name: str, outcomes: list[Outcome]) -> str:
    heard = [one for outcome in outcomes for one in outcome.heard]
    times = [1000 * one.after_s for one in heard if one.after_s is not None]
    named = f"{100 * sum(not one.wrong for one in heard) / len(heard):.1f} %" if heard else "-"
    figures = [_quantile(times, 0.5), _quantile(times, 0.99), max(times, default=0)]
    cells = [
        name, sum(one.faults for one in outcomes), named, *(f"{value:.0f}" if times else "-" for value in figures),
        sum(_is_late(one.kind, heard) for one in outcomes for heard in one.heard),
        f"{max(one.ended_s for one in outcomes):.1f}",
        f"{sum(one.are_codes_right for one in outcomes)}/{len(outcomes)}", sum(bool(one.leftovers) for one in outcomes),
        sum(bool(one.leftovers_of_mpi) for one in outcomes), sum(one.hangs for one in outcomes),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _is_late(kind: str, heard: Heard) -> bool:
    return heard.after_s is not None and heard.after_s > FAULTS[kind].bound_s


def is_well(outcomes: list[Outcome]) -> bool:
    """Whether nothing hangs or is left, and at least 95 % of errors and of exit codes are right."""
    heard = [one for outcome in outcomes for one in outcome.heard]
    named = sum(not one.wrong for one in heard) >= 0.95 * len(heard)
    codes = sum(one.are_codes_right for one in outcomes) >= 0.95 * len(outcomes)
    return named and codes and not any(one.hangs or one.leftovers for one in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=len(FAULTS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", default="random", help="a number, or random")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="farandolerun")
    parser.add_argument("--kind", action="append", default=[], choices=FAULTS, help="only these; may be repeated")
    parser.add_argument("--json", type=pathlib.Path, help="a file for everything that was seen")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if given.seed == "random" else int(given.seed)
    print(f"seed {seed}", flush=True)
    begin_s = time.monotonic()
    outcomes = inject(given.launcher, given.ranks, given.faults, seed, given.kind)
    print(table(outcomes))
    print(f"{time.monotonic() - begin_s:.0f} s")
    if given.json is not None:
        given.json.write_text(json.dumps([dataclasses.asdict(one) for one in outcomes], indent=1))
    return 0 if is_well(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
