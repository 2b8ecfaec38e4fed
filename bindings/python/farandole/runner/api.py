"""``run(function, np=N)``: calls a function on several ranks and returns their results."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole.runner import cli, supervisor

_SERVE = "from farandole.runner.api import serve; serve()"


def run(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1, min_num_proc: int | None = None, max_num_proc: int | None = None,
    slots: int | None = None, reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None, hosts: str | None = None,
    hostfile: str | None = None, host_discovery_script: str | None = None,
    start_timeout: float | None = None, ssh_port: int | None = None,
    ssh_identity_file: str | None = None, disable_cache: bool | None = None,
    output_filename: str | None = None, verbose: bool | None = None, use_gloo: bool | None = None,
    use_mpi: bool | None = None, mpi_args: str | None = None, network_interface: str | None = None,
    network_interfaces: str | None = None, executable: str | None = None, np: int | None = None,
    min_np: int | None = None, max_np: int | None = None,
) -> list[Any]:  # fmt: skip
    """Calls ``func(*args, **kwargs)`` on every rank of a job and waits for all.

    cloudpickle carries the function: by value if the script or a notebook defines it, by name if another
    module does. The function calls ``init()`` itself. The output of the ranks appears here, marked with their
    rank. On the main thread Ctrl-C ends the job with KeyboardInterrupt.

    Args:
        func, args, kwargs: What each rank calls; the result must be picklable.
        num_proc, np: The number of ranks; ``np`` overrides ``num_proc``.
        executable: Python on the ranks; default: this one.
        min_num_proc, max_num_proc, min_np, max_np, reset_limit, cooldown_range: Refused: the number of ranks
            that return a result is fixed; ``farandolerun --elastic`` runs a program on one that changes.
        disable_cache: Ignored: nothing is cached.
        hosts: This and the others correspond to the flags of ``farandolerun``; slots is --slots-per-host.

    Returns:
        The results by rank.

    Raises:
        ValueError: An argument is wrong or has no meaning here.
        RuntimeError: A rank failed; the message names the rank that failed first and ends with its traceback.
    """
    import cloudpickle  # only here: farandolerun does not need it

    if os.environ.get("FARANDOLE_ALLOW_PICKLE") == "0":
        raise ValueError("FARANDOLE_ALLOW_PICKLE=0: a function travels as a pickle")
    refused = {
        "min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "min_np": min_np,
        "max_np": max_np, "reset_limit": reset_limit, "cooldown_range": cooldown_range,
    }  # fmt: skip
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} has no meaning here: the number of ranks is fixed, as each has a result"
            )
    flags = {
        "num-proc": num_proc if np is None else np, "hosts": hosts, "hostfile": hostfile,
        "host-discovery-script": host_discovery_script, "slots-per-host": slots,
        "start-timeout": start_timeout, "ssh-port": ssh_port, "ssh-identity-file": ssh_identity_file,
        "output-filename": output_filename, "mpi-args": mpi_args,
        "network-interfaces": network_interfaces or network_interface,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    words += ["--verbose"] * bool(verbose) + ["--gloo"] * bool(use_gloo) + ["--mpi"] * bool(use_mpi)
    options = cli.parse([*words, "--", executable or sys.executable, "-c", _SERVE], is_fixed=True)
    call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    job = cli.launch(options, cloudpickle.dumps((sys.path, call)))
    assert job is not None  # there was no --dry-run
    if job.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if job.failure.rank is not None:
        raise RuntimeError(f"{job.failure.message}\n{job.failure.error_text}".rstrip())
    missing = [rank for rank in range(options.np) if rank not in job.results]
    if missing or job.stopped_by is not None:
        raise RuntimeError(f"the job ended with exit code {job.code}; no result came from ranks {missing}")
    return [cloudpickle.loads(bytes(job.results[rank])) for rank in range(options.np)]


def serve() -> None:
    """A rank of :func:`run`: reads the function from stdin, calls it, and hands back what it returned."""
    import cloudpickle

    path, call = cloudpickle.loads(sys.stdin.buffer.read())
    sys.path += [folder for folder in path if folder not in sys.path]  # modules that pickles name
    func, args, kwargs = cloudpickle.loads(call)
    result = cloudpickle.dumps(func(*args, **kwargs))
    with open(os.environ[supervisor.RESULT_VARIABLE], "wb") as file:
        file.write(result)
