"""Run progress: a bar on terminals, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from encore.results.format import against_targets
from encore.run import follow

PLAIN_SECONDS = 10.0  # Interval between plain lines
WIDE = 120  # Minimum terminal width for the bar and the number of steps


def facts(progress: follow.Progress) -> str:
    # ``epoch 3/12  max. 0:00:31 left  quality 0.9259 of 0.95 (epoch 2)  loss 0.512  410 samples/s``: a narrow terminal
    # cuts the end.
    qualities, speed = progress.qualities, progress.samples_per_second
    parts = (
        progress.position,
        f"max. {clock(progress.seconds_to_go)} left" if progress.seconds_to_go is not None else "",
        f"{against_targets(qualities, progress.targets)} ({progress.evaluated_position})" if qualities else "",
        f"loss {progress.loss:.4f}" if progress.loss is not None else "",
        f"{speed:,.0f} {progress.batch_unit}/s" if speed is not None else "",
    )
    return "  ".join(filter(None, parts))


def clock(seconds: float) -> str:
    total = int(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


def start(startup: Mapping[str, Mapping[str, float]]) -> str:
    # ``startup took 75.0 s (budget 60 s): compile 52.0 s (budget 10 s)``, with all parts over budget
    seconds, budget = startup["seconds"], startup["budget"]
    text = f"startup took {sum(seconds.values()):.1f} s (budget {sum(budget.values()):.0f} s)"
    late = [
        f"{part} {duration:.1f} s (budget {budget[part]:.0f} s)"
        for part, duration in seconds.items()
        if duration > budget[part]
    ]
    return f"{text}: {', '.join(late)}" if late else text


def checkpoints(durations: Mapping[str, float]) -> str:
    count = f"{durations['count']:.0f} checkpoint{'s' if durations['count'] > 1 else ''}"
    return f"{count} stopped training for {durations['stopped']:.1f} s, and took {durations['seconds']:.1f} s to write"


class RunView:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_wide = console.width >= WIDE
        self._bar = Progress(
            TextColumn("{task.description}"),
            *([BarColumn(bar_width=24), MofNCompleteColumn()] if self._is_wide else []),
            TimeElapsedColumn(),
            TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            expand=True,
            disable=True,  # Until the view is entered on a terminal
        )
        self._task = TaskID(0)
        self._title = ""
        self._next = 0.0
        self._qualities: Mapping[str, float] = {}
        self._damaged: Mapping[str, str] = {}
        self._printed = ""
        self._slow = ""

    def __enter__(self) -> RunView:
        self._bar.disable = not self._console.is_terminal
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start(self, title: str) -> None:
        self._title = title
        self._qualities = {}
        if self._bar.disable:
            self._console.print(f"{title}: starting")
        # A narrow terminal has no room for a bar and a long title: time and quality are more important.
        short = title if self._is_wide else title.removeprefix("experiment ")
        self._task = self._bar.add_task(short, total=None, facts="starting")

    def update(self, progress: follow.Progress, pace: str = "") -> None:
        """Update the bar, or print a line for new progress."""
        for name, damage in (progress.damaged if progress.damaged != self._damaged else {}).items():
            earlier = f"{self._title} resumed from an earlier one, step {progress.step}"
            self._console.print(f"checkpoint {name} is damaged ({damage}): {earlier}", markup=False)
        self._damaged = progress.damaged
        if progress.slow and progress.slow != self._slow:
            self._console.print(f"{self._title}: {progress.slow}", markup=False)
        self._slow = progress.slow
        line = "  ".join(filter(None, (facts(progress), pace)))
        status = line if progress.epochs else "starting"
        self._bar.update(self._task, total=progress.total_steps or None, completed=progress.step, facts=status)
        is_due = progress.qualities != self._qualities or time.monotonic() >= self._next
        if self._bar.disable and progress.step and is_due and line != self._printed:
            self._next = time.monotonic() + PLAIN_SECONDS
            self._qualities, self._printed = progress.qualities, line
            self._console.print(f"{self._title}: {line}")
