"""Table of where a test run spends its time, printed above pytest's last line; see tests/run.sh."""

import os
from collections import Counter
from pathlib import Path

import pytest

VARIABLE = "ENCORE_TEST_TIMES"  # Names a file with one line per measured step: "step<TAB>seconds"
# Groups of tests by their marker; the first that fits counts.
GROUPS = {
    "cluster": "Slurm",
    "engine": "container engine",
    "in_framework": "numerical tests inside the frameworks",
    "training": "tests that train, export or resume",
}
HOST_SIDE = "host-side tests"


def record(step: str, seconds: float) -> None:
    """Append a measured step to the file of times, if this test run has one."""
    if VARIABLE in os.environ:
        with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(f"{step}\t{seconds:.0f}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if VARIABLE not in os.environ:
        return
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                group = next((group for mark, group in GROUPS.items() if mark in report.keywords), HOST_SIDE)
                totals[group] += report.duration
    terminalreporter.section("seconds per step (tests: sum over all workers, waiting included)")
    lines = [line.split("\t") for line in Path(os.environ[VARIABLE]).read_text(encoding="utf-8").splitlines()]
    for step, seconds in [*lines, *((group, totals[group]) for group in (HOST_SIDE, *GROUPS.values()))]:
        terminalreporter.write_line(f"{float(seconds):7.0f}  {step}")
