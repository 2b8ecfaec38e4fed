"""Adds up JUnit reports: `count_results.py FOLDER [STEP ...]` prints "N passed, N failed".

A report is pytest's, ctest's (`release.xml`), or that of one GoogleTest program (`asan.unit_core.xml`).

Every STEP named counts as one failure: it did not come to its tests. Failures are listed before the
last line, and so are the slowest tests and the reasons of tests that were skipped; one for which no
reason of ALLOWED stands counts as failed. A machine that cannot do what a test needs allows it by a
regular expression in FARANDOLE_TEST_MAY_SKIP. Exit status 1 if anything failed.
"""

import collections
import os
import pathlib
import re
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from typing import NamedTuple

# What ctest says of a test that chose not to run; any other "skipped" is one that could not.
CHOSEN = ("SKIP_REGULAR_EXPRESSION_MATCHED", "SKIP_RETURN_CODE")

SLOWEST = 20  #: of all reports together, that are printed

#: Skips that are meant: the report in which they may stand, and the reason. Both match as a whole.
ALLOWED = [
    (".*", r"disabled in its source: .*(SumsMoreThanTwoToThe31Elements|ForASeedOfEachRule)"),
    (".*", "this machine has NCCL"),
    ("asan", "the build found no libnccl.so.2 of a wheel"),  # is configured while the wheel is installed
    ("pytest.*", "could not import 'jax.numpy'.*"),
    ("pytest.*", "could not import '(paddle|tensorflow|cupy)'.*"),
    ("pytest(-older-torch)?", "could not import '(jax|mlx.core|tinygrad)'.*"),  # pytest-libraries has them
    ("pytest.*", "tensorboard is not installed"),
    ("pytest(-waiting|-older-torch|-openmpi5)", "could not import 'ray'.*"),  # has a report of its own
    ("pytest-waiting", "prometheus is not installed"),  # it is in the nightly run
    ("pytest-waiting", "could not import 'opentelemetry.*"),
    ("pytest.*", "could not import 'hta.*"),  # pytest-traces has it
    ("pytest-waiting", "FARANDOLE_TEST_INTEL_MPI is not set"),  # it is in the nightly run
    ("pytest", "not installed: (lightning and accelerate|transformers and ignite)"),  # so have they
    ("pytest.*", "not installed: deepspeed"),
    ("pytest(-older-torch|-openmpi5)?", r"not installed: \[.*\]"),  # pytest-frameworks has them
    ("pytest.*", "this torch brings NCCL"),
    ("pytest-older-torch", "views need torch 2.10"),
]


class Outcome(NamedTuple):
    """Of one test: "passed", "failed", or "skipped" with a reason."""

    report: str
    name: str
    kind: str
    seconds: float
    reason: str = ""


def outcomes(report: pathlib.Path) -> Iterator[Outcome]:
    """What became of each test of one report."""
    lane, _, program = report.stem.partition(".")
    for case in xml.parse(report).getroot().iter("testcase"):
        name = f"{report.stem}: {case.get('classname', '')}.{case.get('name', '')}"
        skipped, seconds = case.find("skipped"), float(case.get("time") or 0)
        if case.find("failure") is not None or case.find("error") is not None:
            yield Outcome(lane, name, "failed", seconds)
        elif case.get("status") == "disabled" or (program and case.get("status") == "notrun"):
            yield Outcome(lane, name, "skipped", seconds, f"disabled in its source: {case.get('name')}")
        elif skipped is not None and program:
            yield Outcome(lane, name, "skipped", seconds, skipped.get("message", "").partition("\n")[2].strip())
        elif skipped is not None and not report.stem.startswith("pytest"):
            chosen = any(text in skipped.get("message", "") for text in CHOSEN)
            yield Outcome(lane, name, "skipped" if chosen else "failed", seconds, _reason_of_gtest(case))
        elif skipped is not None:
            yield Outcome(lane, name, "skipped", seconds, _reason_of_pytest(skipped))
        else:
            yield Outcome(lane, name, "passed", seconds)


def _reason_of_gtest(case: xml.Element) -> str:
    """What follows "file:line: Skipped" in the output."""
    found = re.search(r": Skipped\n(.*)", case.findtext("system-out", ""))
    return found[1].strip() if found else "no reason"


def _reason_of_pytest(skipped: xml.Element) -> str:
    """Its message; of a whole module that skips itself the text has it."""
    message = skipped.get("message", "")
    if message != "collection skipped":
        return message
    found = re.search(r"[\"']Skipped: (.*)[\"']\)", skipped.text or "", re.S)
    return found[1] if found else message


def is_allowed(skipped: Outcome) -> bool:
    """Whether this skip is meant, or this machine's."""
    here = [(".*", os.environ["FARANDOLE_TEST_MAY_SKIP"])] if os.environ.get("FARANDOLE_TEST_MAY_SKIP") else []
    return any(
        re.fullmatch(report, skipped.report) and re.fullmatch(reason, skipped.reason, re.S)
        for report, reason in ALLOWED + here
    )


def main(folder: str, broken: list[str]) -> int:
    """Prints the skips, the failures and the sum; returns the exit status."""
    found = [outcome for report in sorted(pathlib.Path(folder).glob("*.xml"))
             for outcome in outcomes(report)]
    skipped = [outcome for outcome in found if outcome.kind == "skipped"]
    meant = collections.Counter((one.report, one.reason) for one in skipped if is_allowed(one))
    for (report, reason), count in meant.items():
        print(f"SKIPPED {report}: {count} of: {reason}", file=sys.stderr)
    failed = [one.name for one in found if one.kind == "failed"]
    failed += [f"{one.name}: skipped: {one.reason}" for one in skipped if not is_allowed(one)]
    failed += [f"step: {step}" for step in broken]
    for name in failed:
        print(f"FAILED {name}", file=sys.stderr)
    for one in sorted(found, key=lambda one: -one.seconds)[:SLOWEST]:
        print(f"SLOW {one.seconds:6.1f} s {one.name}", file=sys.stderr)
    passed = sum(one.kind == "passed" for one in found)
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
