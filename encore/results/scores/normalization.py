"""Raw and official scores: the factor by which MLCommons multiplies a score, from ``scaling.json``.

    from encore.results.scores.normalization import read_scaling
    print(read_scaling(Path("results/XE9680x8H100-SXM-80GB/resnet")).factor)

A set that converges in fewer epochs than the reference is held to the reference's epochs: from v2.0 on mlperf-logging's
package checker writes the factor into the set's folder, and its result_summarizer multiplies the score by it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from encore.results.rules import ROUNDS

_LARGEST_FILE = 1 << 16
_LARGEST_FACTOR = 10
"""The largest of 497 public factors is 1.19."""
SCALING_FILE = "scaling.json"
SCALED_SINCE = "v2.0"
"""The first round with a scaling.json, of one set; from v2.1 on every set that needs one has one."""


@dataclass(frozen=True)
class Scaling:
    """The factor of a set; None without a ``scaling.json``, or with an unusable one, which ``flag`` then says."""

    factor: float | None = None
    flag: str = ""


def read_scaling(folder: Path, round_: str | None = None) -> Scaling:
    """Return the factor in the folder's ``scaling.json``; in a round that had none it is not used."""
    path = folder / SCALING_FILE
    if path.is_file() and round_ in ROUNDS and ROUNDS.index(round_) < ROUNDS.index(SCALED_SINCE):
        return Scaling(flag=f"{SCALING_FILE} is not used: {round_} had none")
    try:
        if path.stat().st_size > _LARGEST_FILE:
            return Scaling(flag=f"{SCALING_FILE} is not used: larger than {_LARGEST_FILE} bytes")
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return Scaling()
    except (OSError, ValueError, RecursionError) as error:
        return Scaling(flag=f"{SCALING_FILE} is not used: {type(error).__name__}, expected one JSON object")
    found = content.get("scaling_factor") if isinstance(content, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return Scaling(flag=f"{SCALING_FILE} is not used: it has no number called scaling_factor")
    if not 1.0 <= found <= _LARGEST_FACTOR:
        # mlperf-logging writes none below 1: it would make the official score better than the logs.
        return Scaling(flag=f"{SCALING_FILE} is not used: a factor of {str(found)[:20]}, expected 1 to 10")
    return Scaling(float(found))


def official(minutes: float | None, factor: float | None) -> float | None:
    """Return the official score of a raw one; None where the factor is not known."""
    return minutes * factor if minutes is not None and factor is not None else None


def official_in_words(minutes: float, factor: float) -> str:
    """Return ``official score 13.218 minutes (x 1.0042, reference convergence)``."""
    return f"official score {minutes:.3f} minutes (x {factor:.4f}, reference convergence)"
