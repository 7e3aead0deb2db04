"""Table of where a test run spends its time, printed above pytest's last line; see tests/run.sh."""

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

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
CPU_BEFORE = pytest.StashKey[float]()


def record(step: str, seconds: float) -> None:
    # Append a measured step to the file of times, if this test run has one
    if VARIABLE in os.environ:
        with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(f"{step}\t{seconds:.0f}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    # Add the CPU time of a phase to its report, including child processes that have ended
    report = yield
    now = sum(os.times()[:4])
    report.cpu_seconds = now - item.config.stash.get(CPU_BEFORE, now)
    item.config.stash[CPU_BEFORE] = now
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if VARIABLE not in os.environ:
        return
    wall: defaultdict[str, float] = defaultdict(float)
    cpu: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                group = next((group for mark, group in GROUPS.items() if mark in report.keywords), HOST_SIDE)
                wall[group] += report.duration
                cpu[group] += getattr(report, "cpu_seconds", 0.0)
    terminalreporter.section("seconds per step (tests: sum over all workers, waiting included; CPU seconds)")
    for line in Path(os.environ[VARIABLE]).read_text(encoding="utf-8").splitlines():
        step, seconds = line.split("\t")
        terminalreporter.write_line(f"{seconds:>7} {'':7}  {step}")
    for group in (HOST_SIDE, *GROUPS.values()):
        terminalreporter.write_line(f"{wall[group]:7.0f} {cpu[group]:7.0f}  {group}")
