"""Tells what was found, as text or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from farandole.doctor.find import find_all
from farandole.doctor.finding import Finding
from farandole.doctor.two_ranks import TwoRanks, try_two_ranks


def as_dict(
    findings: Sequence[Finding], two_ranks: TwoRanks, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Everything under the names of the report, in lower case."""
    found: dict[str, Any] = {}
    for finding in findings:
        fields = dataclasses.asdict(finding)
        name = fields.pop("name").lower()
        found[name] = {"found": bool(finding.version), "missing": finding.is_missing, **fields}
    return found | {"two_ranks": dataclasses.asdict(two_ranks), "settings": dict(settings)}


def as_text(findings: Sequence[Finding], two_ranks: TwoRanks, settings: Mapping[str, str]) -> str:
    """The report: a line for each thing, the two ranks, the settings, and what would help."""
    lines = []
    for finding in findings:
        what = f"{finding.version}  {finding.where}".strip() or ("missing" * finding.is_missing)
        note = f"  ({finding.note})" if finding.note and what else finding.note
        lines.append(f"{finding.name:<17} {what}{note}")
    lines += [f"setting           {name}={value}" for name, value in settings.items()]
    lines += ["", _two_ranks_text(two_ranks)]
    for finding in findings:
        if finding.is_missing:
            lines += ["", f"{finding.name} is missing: {finding.why}.", f"  {finding.command}"]
    return "\n".join(lines)


def _two_ranks_text(two_ranks: TwoRanks) -> str:
    if not two_ranks.works:
        return "Two ranks do not work here:\n  " + two_ranks.reason.replace("\n", "\n  ")
    return (
        f"Two ranks work here: an allreduce of 4 bytes takes {two_ranks.latency_4_bytes_us} us, "
        f"one of 64 MiB runs at {two_ranks.bandwidth_64_mib_gb_per_s} GB/s."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """``farandole doctor``.

    Returns:
        The exit code: 0 if two ranks work here, else 1; 2 for wrong use (by SystemExit).
    """
    parser = argparse.ArgumentParser(
        prog="farandole doctor",
        description="Says what is installed, whether two ranks work here, and what would help.",
        epilog="Exit code 0 if two ranks work here, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    options = parser.parse_args(argv)
    findings = find_all(os.environ)
    two_ranks = try_two_ranks(os.environ)
    prefixes = ("FARANDOLE_", "HOROVOD_")
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}
    if options.json:
        print(json.dumps(as_dict(findings, two_ranks, settings), indent=2))
    else:
        print(as_text(findings, two_ranks, settings))
    return 0 if two_ranks.works else 1
