"""The lines of an MLPerf log that the launcher writes before the ranks start."""

from __future__ import annotations

import logging
from pathlib import Path

from encore.configuration import Configuration
from encore.node import Node


def write(path: Path, configuration: Configuration, machine: Node, cache_cleared: bool) -> None:
    """Start the log at ``path`` with what is run, by whom and on what, and the cache event.

    A submitted configuration is checked by the rules of the closed division, anything else by those of the
    open one; the status is always "research", since Encore submits nothing.
    """
    from mlperf_logging.mllog import constants
    from mlperf_logging.mllog.mllog import MLLogger

    logger = logging.Logger("encore.header", logging.INFO)
    handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    logger.addHandler(handler)
    log = MLLogger(logger=logger)
    try:
        log.event(constants.SUBMISSION_BENCHMARK, configuration.choice.benchmark.name)
        log.event(constants.SUBMISSION_ORG, "Encore")
        log.event(constants.SUBMISSION_DIVISION, configuration.division)
        log.event(constants.SUBMISSION_STATUS, "research")
        log.event(constants.SUBMISSION_PLATFORM, platform_name(configuration, machine))
        log.event(constants.CACHE_CLEAR, cache_cleared)
    finally:
        handler.close()


def platform_name(configuration: Configuration, machine: Node) -> str:
    """``8 x NVIDIA A100-SXM4-40GB`` or ``2 ranks on INTEL(R) XEON(R)``."""
    if configuration.get("device") == "gpu" and machine.gpus:
        return f"{configuration.ranks} x {machine.gpus[0].name}"
    return f"{configuration.ranks} ranks on {machine.cpu}"
