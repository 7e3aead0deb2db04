"""The lines of an MLPerf log that the launcher writes before the ranks start."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from encore.configuration import Configuration
from encore.machine.node import Node


def write(path: Path, configuration: Configuration, machine: Node, cache_cleared: bool) -> None:
    """Start the log at ``path`` with what is run, by whom and on what, and the cache event.

    A submitted configuration is checked by the rules of the closed division, anything else by those of the
    open one; the status is always "research", since Encore submits nothing.
    """
    from mlperf_logging.mllog import constants

    benchmark = configuration.choice.benchmark
    events: dict[str, Any] = {
        constants.SUBMISSION_BENCHMARK: benchmark.name,
        constants.SUBMISSION_ORG: "Encore",
        constants.SUBMISSION_DIVISION: configuration.division,
        constants.SUBMISSION_STATUS: "research",
        constants.SUBMISSION_PLATFORM: platform_name(configuration, machine),
    }
    # Events of the first rounds as the ranks write theirs: benchmarks/common/run/mllog.py.
    lines = []
    if configuration.system.round == "v0.5":
        place = f":::MLPv0.5.0 {benchmark.name} {time.time():.9f} (log_header.py:0)"
        every = {**events, "run_clear_caches": cache_cleared}
        lines = [f"{place} {key}: {json.dumps(value)}\n" for key, value in every.items()]
    elif configuration.system.round == "v0.6":
        entry = {
            "hardware": events[constants.SUBMISSION_PLATFORM],
            "framework": configuration.choice.implementation.framework,
        }
        own = {"submission_entry": str(entry), "submission_poc_name": "none: not submitted"}
        every = {**events, **own, constants.CACHE_CLEAR: cache_cleared}
        contents = {
            key: {"value": value, "metadata": {"file": "log_header.py", "lineno": 0}} for key, value in every.items()
        }
        lines = [f":::MLL {time.time():.3f} {key}: {json.dumps(each)}\n" for key, each in contents.items()]
    else:
        _write_mllog(path, {**events, constants.CACHE_CLEAR: cache_cleared})
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def _write_mllog(path: Path, events: dict[str, Any]) -> None:
    from mlperf_logging.mllog.mllog import MLLogger

    logger = logging.Logger("encore.header", logging.INFO)
    handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    logger.addHandler(handler)
    log = MLLogger(logger=logger)
    try:
        for key, value in events.items():
            log.event(key, value)
    finally:
        handler.close()


def platform_name(configuration: Configuration, machine: Node) -> str:
    """Return ``8 x NVIDIA A100-SXM4-40GB`` or ``2 ranks on INTEL(R) XEON(R)``."""
    if configuration.get("device") == "gpu" and machine.gpus:
        return f"{configuration.ranks} x {machine.gpus[0].name}"
    return f"{configuration.ranks} ranks on {machine.cpu}"
