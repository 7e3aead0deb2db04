"""Step times per rank in an experiment, and detection of slow ranks.

    from encore.results.logs.steps import slow_rank, windows_of
    print(slow_rank(windows_of(Path("RUN/experiment_0"))))

Written by benchmarks/common/run/step_times.py. In synchronous training, all ranks have the step time of the slowest
rank, which is visible because it waits less than the other ranks.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from encore.files import json_objects, lines_at_end
from encore.results.logs.metrics import lines_of
from encore.results.outliers import compare, lowest
from encore.results.table import Table

FOLDER = "steps"
_LAST_BYTES = 4096  # About a dozen lines
RECENT_SECONDS = 150.0  # Two one-minute windows, the last of which is up to a minute old
MIN_SECONDS = 60.0  # Recent windows per rank: less time shows start-up noise
# Fraction of time: healthy runs with 2 ranks on 2 shared cores stayed below it.
LEAST_WAIT = 0.15
MAX_CPU_DELAY = 0.1  # Fraction of time without a free core, above which shared cores are the cause


@dataclass(frozen=True, kw_only=True)
class Window:
    """About a minute of one rank; fractions are relative to its training time."""

    rank: int
    time: float  # End, in Unix seconds
    node: str
    local_rank: int
    step: int
    steps: int
    window: float  # Seconds
    median: float  # Median step time, seconds
    p99: float
    waiting: float | None  # Fraction of time waiting for other ranks, without running code; None on a GPU
    input: float | None  # Fraction of time the device waited for the next batch
    cpu: float  # CPU seconds of all threads
    delayed: float  # Seconds that runnable threads waited for a core


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """Rank that slows down all ranks; fractions are relative to the training time."""

    rank: int
    node: str
    local_rank: int
    waiting: float  # Fraction of time this rank waited
    others: float  # Median of the other ranks
    cpu_delay: float  # Fraction of time that runnable threads of this rank waited for a core

    def __str__(self) -> str:
        if self.cpu_delay > MAX_CPU_DELAY:
            return f"ranks share CPU cores: rank {self.rank} had no core for {self.cpu_delay:.0%} of its time"
        return (
            f"rank {self.rank} is slow ({self.node}, device {self.local_rank}): "
            f"the others wait {self.others:.0%} of their time, it {self.waiting:.0%}"
        )


def windows_of(experiment: Path, recent: bool = False) -> dict[int, list[Window]]:
    """Return the windows per rank, in order; ``recent``: only the last ones, which reads little data."""
    windows: dict[int, list[Window]] = {}
    names = {field.name for field in fields(Window)}
    for path in sorted((experiment / FOLDER).glob("rank_*.jsonl")):
        with suppress(OSError, ValueError):
            rank = int(path.stem[5:])
            windows[rank] = []
            for record in json_objects(lines_at_end(path, _LAST_BYTES) if recent else lines_of(path)):
                with suppress(TypeError):
                    window = Window(rank=rank, **{name: value for name, value in record.items() if name in names})
                    windows[rank].append(window)
    return dict(sorted(windows.items()))


def slow_rank(windows: Mapping[int, Sequence[Window]], now: float | None = None) -> SlowRank | None:
    """Return the slow rank at ``now`` (default: the last window), or None.

    All ranks need MIN_SECONDS of recent windows, and the same rank must wait least in both halves.
    """
    end = now or max((ranks[-1].time for ranks in windows.values() if ranks), default=0.0)
    recent = {
        rank: [w for w in ranks if end - RECENT_SECONDS < w.time <= end + 1 and w.waiting is not None]
        for rank, ranks in windows.items()
    }
    if any(len(ranks) < 2 or sum(w.window for w in ranks) < MIN_SECONDS for ranks in recent.values()):
        return None
    halves = (
        {rank: ranks[: len(ranks) // 2] for rank, ranks in recent.items()},
        {rank: ranks[len(ranks) // 2 :] for rank, ranks in recent.items()},
    )
    outlier, *parts = (
        lowest({rank: waiting_of(ranks) or 0.0 for rank, ranks in period.items()}) for period in (recent, *halves)
    )
    if outlier is None or outlier.others - outlier.value < LEAST_WAIT or not outlier.is_far:
        return None
    if any(part is None or part.name != outlier.name for part in parts):
        return None
    ranks = recent[outlier.name]
    return SlowRank(
        rank=outlier.name,
        node=ranks[-1].node,
        local_rank=ranks[-1].local_rank,
        waiting=outlier.value,
        others=outlier.others,
        cpu_delay=sum(w.delayed for w in ranks) / sum(w.window for w in ranks),
    )


def waiting_of(windows: Sequence[Window]) -> float | None:
    """Return the fraction of time a rank waited for other ranks, or None if unknown."""
    measured = [(window.waiting, window.window) for window in windows if window.waiting is not None]
    total = sum(seconds for _, seconds in measured)
    return sum(share * seconds for share, seconds in measured) / total if total else None


def late_shares(windows: Mapping[int, Sequence[Window]], edges: Sequence[float]) -> dict[int, list[float]]:
    """Return the lateness per rank and interval: the additional time fraction that the other ranks waited."""
    late_by_rank: dict[int, list[float]] = {rank: [] for rank in windows}
    for start, end in itertools.pairwise(edges):
        waiting = {
            rank: share
            for rank, rank_windows in windows.items()
            if (share := waiting_of([w for w in rank_windows if w.time > start and w.time - w.window < end]))
            is not None
        }
        late = {rank.name: rank.others - rank.value for rank in compare(waiting)}
        for rank, shares in late_by_rank.items():
            shares.append(max(0.0, late.get(rank, 0.0)))
    return late_by_rank


def table_of(windows: Mapping[int, Sequence[Window]], file: str) -> Table:
    """Return the step times per rank over the full run; ``file`` is the log's name."""
    columns = ("rank", "node", "device", "steps", "median s", "p99 s", "waits for others", "waits for data", "no core")
    return Table(
        title=f"Steps of the ranks, {file}",
        columns=columns,
        formats={"median s": ".4f", "p99 s": ".4f", **dict.fromkeys(columns[-3:], ".1%")},
        rows=tuple(
            (
                rank,
                rank_windows[-1].node,
                rank_windows[-1].local_rank,
                sum(w.steps for w in rank_windows),
                statistics.median(w.median for w in rank_windows),
                max(w.p99 for w in rank_windows),
                waiting_of(rank_windows),
                statistics.fmean([w.input for w in rank_windows if w.input is not None] or [0.0]),
                sum(w.delayed for w in rank_windows) / max(sum(w.window for w in rank_windows), 1e-9),
            )
            for rank, rank_windows in windows.items()
            if rank_windows
        ),
        note="Median of the windows' medians, largest 99th percentile of a window. A rank that waits less than the "
        "others is the slow one. No core: seconds in which its threads were ready to run, per second.",
    )
