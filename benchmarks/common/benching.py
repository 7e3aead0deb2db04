"""Measure a training step beside a bare loop, in one run, for any framework."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

TITLES = {
    "bare": "bare loop, synthetic data",
    "synthetic": "training step, synthetic data",
    "real": "training step, real data",
    "input": "input pipeline alone",
}
Loop = Callable[[int], float]
"""Does so many steps, waits for them, and returns the share of the time that it waited for data."""


def parse_arguments(description: Optional[str]) -> argparse.Namespace:
    """The command line that every bench.py has: config, data, steps, repeats."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="folder of a prepared data set")
    parser.add_argument("--steps", type=int, default=20, help="steps of a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    return parser.parse_args()


def measure(
    loops: Dict[str, Loop], samples_per_step: int, steps: int, repeats: int, bare_title: str = TITLES["bare"]
) -> Tuple[Dict[str, Any], float]:
    """Samples per second of each loop, measured in turn, and the share of waiting with real data.

    ``loops`` has the keys of TITLES; ``ratio`` in the result is a loop's speed over that of ``bare``.
    """
    speeds: Dict[str, List[float]] = {name: [] for name in loops}
    shares = []
    for loop in loops.values():
        loop(3)  # compile, fill the pipelines
    for number in range(repeats):
        for name, loop in loops.items():
            started = time.time()
            share = loop(steps)
            speeds[name].append(steps * samples_per_step / (time.time() - started))
            if name == "real":
                shares.append(share)
        print(f"measurement {number + 1} of {repeats} done", file=sys.stderr)
    measured = {}
    for name, values in speeds.items():
        # Each against the bare loop of its own turn: the machine's speed drifts.
        ratios = [value / bare for value, bare in zip(values, speeds["bare"])]
        measured[name] = {
            "title": bare_title if name == "bare" else TITLES[name],
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "ratio": statistics.median(ratios),
        }
    return measured, statistics.median(shares)
