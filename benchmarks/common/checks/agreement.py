"""Loss comparison between two trainings: the first steps individually, and the epoch means."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

FIRST_STEPS = 4  # where rounding has not grown yet


class Tolerance(NamedTuple):
    """Largest relative difference between two trainings that agree."""

    step: float  # limit for the losses of the first steps
    epoch: float  # limit for the epoch's mean loss


Losses = List[List[Tuple[int, float]]]  # per epoch: number of steps (usually 1) and their mean loss


@dataclass(frozen=True)
class Result:
    result: str
    found: str
    lines: Tuple[str, ...] = ()


def compare_losses(actual: Losses, expected: Losses, tolerance: Tolerance, fewer_steps: int = 0) -> Result:
    """Compare the losses of the first steps, if they are reported individually, and the epoch means."""
    steps = [[sum(count for count, _ in epoch) for epoch in losses] for losses in (actual, expected)]
    if len(actual) != len(expected) or any(not 0 <= b - a <= fewer_steps for a, b in zip(*steps)):
        return Result("FAIL", f"steps per epoch {steps[0]} against {steps[1]}")
    means = [(_mean(a), _mean(b)) for a, b in zip(actual, expected)]
    epoch = max(abs(a - b) / abs(b) for a, b in means)
    summary = (
        f"loss {means[-1][0]:.4f} for {means[-1][1]:.4f}; epochs differ by {epoch:.2%} (limit {tolerance.epoch:.1%})"
    )
    first = [(a, b) for (n, a), (m, b) in zip(actual[0][:FIRST_STEPS], expected[0]) if n == m == 1]
    if not first:
        return Result("OK" if epoch <= tolerance.epoch else "FAIL", f"{summary}, one loss for all steps of an epoch")
    step = max(abs(a - b) / abs(b) for a, b in first)
    summary += f", first steps by {step:.2%} ({tolerance.step:.1%})"
    return Result("OK" if step <= tolerance.step and epoch <= tolerance.epoch else "FAIL", summary)


def _mean(epoch: Sequence[Tuple[int, float]]) -> float:
    return sum(count * loss for count, loss in epoch) / sum(count for count, _ in epoch)


def truncate_losses(end: Losses, losses: Losses) -> Losses:
    """Truncate ``losses`` to the epochs and steps in ``end``."""
    return [epoch[: len(prefix)] for epoch, prefix in zip(losses, end)]


def read_losses(folder: Path) -> Losses:
    epochs: Dict[int, List[Tuple[int, float]]] = {}
    done = 0
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            epochs.setdefault(record["epoch"], []).append((record["step"] - done, record["loss"]))
            done = record["step"]
    return [losses for _, losses in sorted(epochs.items())]
