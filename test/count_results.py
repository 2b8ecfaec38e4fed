"""Adds up JUnit reports: `count_results.py FOLDER [STEP ...]` prints "N passed, N failed".

Every STEP named counts as one failure: it did not come to its tests. Failures are listed before the
last line. Exit status 1 if anything failed.
"""

import pathlib
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator

# What ctest says of a test that chose not to run; any other "skipped" is one that could not.
CHOSEN = ("SKIP_REGULAR_EXPRESSION_MATCHED", "SKIP_RETURN_CODE")


def outcomes(report: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields (test, "passed" | "failed" | "skipped") of one report."""
    for case in xml.parse(report).getroot().iter("testcase"):
        name = f"{report.stem}: {case.get('classname', '')}.{case.get('name', '')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed"
        elif case.get("status") == "disabled":
            yield name, "skipped"
        elif skipped is not None and not report.stem.startswith("pytest"):
            chosen = any(text in skipped.get("message", "") for text in CHOSEN)
            yield name, "skipped" if chosen else "failed"
        else:
            yield name, "passed" if skipped is None else "skipped"


def main(folder: str, broken: list[str]) -> int:
    """Prints the failures and the sum; returns the exit status."""
    found = [outcome for report in sorted(pathlib.Path(folder).glob("*.xml"))
             for outcome in outcomes(report)]
    failed = [name for name, outcome in found if outcome == "failed"]
    failed += [f"step: {step}" for step in broken]
    for name in failed:
        print(f"FAILED {name}", file=sys.stderr)
    passed = sum(outcome == "passed" for _, outcome in found)
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
