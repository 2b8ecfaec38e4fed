"""torch's own tests of a backend, which its wheel ships, over gloo and over Farandole.

    python test/torch_suite/run.py --json build/torch_suite.json

Those are the methods of ``torch.testing._internal.distributed.distributed_test``. Each runs over one backend after
the other, in processes of its own, with a time limit. Prints a line for each test whose results differ or that
fails, and the counts; exits with 1 if less than ``--least`` percent of what gloo passes passes over Farandole, or,
of one backend, if anything fails.

torch decides at the import of its tests which ones a backend by that name runs. Here it decides for gloo, so that
Farandole runs those of gloo, and a test that asks whether its backend is gloo is told yes (`_Ours`). What goes by
the name in torch itself stays: no search for a profiler's events of collectives.

Needs the package ``expecttest``.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import logging
import multiprocessing
import os
import pathlib
import re
import sys
import time
import unittest

REFERENCE, OURS = "gloo", "farandole"


class _Ours(str):
    """Our name. Where a test asks whether its backend is gloo, to use the CPU, the answer is yes."""

    def __eq__(self, other):
        return str.__eq__(self, other) or other == REFERENCE

    __hash__ = str.__hash__


def load(size, limit_s):
    """torch's module of tests, as if for gloo."""
    os.environ.update(
        BACKEND=REFERENCE, WORLD_SIZE=str(size), INIT_METHOD="file://set for each test",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(limit_s),
    )  # fmt: skip
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    import farandole.torch.distributed  # noqa: F401  (registers the backend)

    logging.disable(logging.INFO)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add(OURS)
    return distributed_test


def make_case(module):
    class OneBackend(module.TestDistBackend, module.DistributedTest._DistTestBase):
        """Processes are forked: torch is imported once."""

        def setUp(self):
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]  # a file of this test
            self._start_processes(multiprocessing.get_context("fork").Process)
            self.started = list(self.processes)

        def tearDown(self):
            super().tearDown()
            for process in self.started:
                process.join(5)
                process.kill()
                process.join()

    return OneBackend


def run_one(module, case, name, backend):
    """Returns "passed", "skipped" or "failed", and why."""
    os.environ["BACKEND"] = backend
    module.BACKEND = _Ours(backend) if backend == OURS else backend
    result = unittest.TestResult()
    sys.stdout, own = io.StringIO(), sys.stdout
    try:
        case(name).run(result)
    finally:
        sys.stdout = own
    problems = result.errors + result.failures
    if problems:
        return "failed", problems[0][1]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return ("failed", "passed unexpectedly") if result.unexpectedSuccesses else ("passed", "")


def last_error(text):
    """The line of a trace-back that says what went wrong, of the first rank that has one."""
    lines = [line.strip() for line in text.splitlines() if re.match(r"(\w+\.)*\w*(Error|Exception|Failure)\b", line)]
    lines = [line for line in lines if "exited with error code" not in line] or text.strip().splitlines()[-1:]
    return lines[0][:300] if lines else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["test_*"], help="names, with * and ? (default: all)")
    parser.add_argument("--share", default="0/1", metavar="K/N", help="of each N tests the one with number K")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--backends", nargs="+", default=[REFERENCE, OURS])
    parser.add_argument("--limit", type=int, default=60, help="seconds for a test")
    parser.add_argument("--least", type=float, default=95, help="percent of what gloo passes")
    parser.add_argument("--json", type=pathlib.Path, help="write the results, with whole errors, to this file")
    parser.add_argument("--verbose", action="store_true", help="a line for each test")
    arguments = parser.parse_args()
    module = load(arguments.size, arguments.limit)
    case = make_case(module)
    names = unittest.TestLoader().getTestCaseNames(case)
    names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.tests)]
    which, share = map(int, arguments.share.split("/"))
    table = {}
    for name in names[which::share]:
        row = table[name] = {}
        for backend in arguments.backends:
            start_s = time.monotonic()
            outcome, why = run_one(module, case, name, backend)
            row[backend] = {"outcome": outcome, "why": why, "seconds": round(time.monotonic() - start_s, 1)}
        outcomes = [one["outcome"] for one in row.values()]
        if arguments.verbose or len(set(outcomes)) > 1 or "failed" in outcomes:
            ends = (f"{backend} {end['outcome']} {last_error(end['why'])}" for backend, end in row.items())
            print(f"{name}: {'; '.join(ends)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(table, indent=1))
    return report(table, arguments)


def report(table, arguments):
    for backend in arguments.backends:
        outcomes = [row[backend]["outcome"] for row in table.values()]
        seconds = sum(row[backend]["seconds"] for row in table.values())
        counts = ", ".join(f"{outcomes.count(o)} {o}" for o in ("passed", "skipped", "failed"))
        print(f"{backend}, {arguments.size} ranks: {counts}; {seconds:.0f} s")
    if set(arguments.backends) != {REFERENCE, OURS}:
        return int(any(end["outcome"] == "failed" for row in table.values() for end in row.values()))
    reference = [row for row in table.values() if row[REFERENCE]["outcome"] == "passed"]
    ours = sum(row[OURS]["outcome"] == "passed" for row in reference)
    percent = 100 * ours / max(len(reference), 1)
    print(f"{ours} of the {len(reference)} that {REFERENCE} passes pass over {OURS}: {percent:.1f} %")
    return 0 if percent >= arguments.least else 1


if __name__ == "__main__":
    sys.exit(main())
