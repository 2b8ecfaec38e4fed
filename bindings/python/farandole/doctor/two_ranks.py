"""Runs a real job of two ranks through the launcher."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping

_TIMEOUT_S = 120
_START_TIMEOUT_S = 30
_REASON_LINES = 12


@dataclasses.dataclass(frozen=True)
class TwoRanks:
    """Whether two ranks work here, and how fast.

    Attributes:
        works: They found each other and added up correctly.
        latency_4_bytes_us: Median time of an allreduce of one float32, in microseconds.
        bandwidth_64_mib_gb_per_s: 64 MiB of float32 by the median time of their allreduce, in 10^9
            bytes per second.
        reason: What the launcher said if they do not work.
    """

    works: bool
    latency_4_bytes_us: float | None = None
    bandwidth_64_mib_gb_per_s: float | None = None
    reason: str = ""


def _reason(text: str) -> str:
    return "\n".join(text.strip().splitlines()[:_REASON_LINES]) or "nothing was said"


def try_two_ranks(environment: Mapping[str, str]) -> TwoRanks:
    """Runs measure.py with ``farandolerun -np 2`` in this environment."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "farandole.run", "-np", "2",
            "--start-timeout", str(_START_TIMEOUT_S), "--output-filename", folder,
            sys.executable, "-m", "farandole.doctor.measure",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=dict(environment), capture_output=True, text=True, check=False,
                timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return TwoRanks(False, reason=f"they were not done after {_TIMEOUT_S} s")
        if done.returncode != 0:
            return TwoRanks(False, reason=_reason(done.stderr))
        found = json.loads(pathlib.Path(folder, "rank.0", "stdout").read_text().splitlines()[-1])
    if found["ranks"] != 2:
        return TwoRanks(False, reason=f"a job of 2 ranks became one of {found['ranks']}")
    return TwoRanks(True, found["latency_4_bytes_us"], found["bandwidth_64_mib_gb_per_s"])
