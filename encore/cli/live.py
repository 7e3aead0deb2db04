"""What a person sees while a run lasts: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from encore.results import words
from encore.run import follow

PLAIN_SECONDS = 10.0  # Seconds between two lines where there is no terminal


def facts(progress: follow.Progress) -> str:
    # ``epoch 3/12  410 samples/s  loss 0.512  quality 0.9259 of 0.95 (epoch 2)  at most 0:00:31 to go``.
    parts = [f"epoch {max(progress.epoch, 1)}" + (f"/{progress.epochs}" if progress.epochs else "")]
    if progress.samples_per_second is not None:
        parts.append(f"{progress.samples_per_second:,.0f} {progress.batch_unit}/s")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.qualities:
        parts.append(
            f"{words.against_targets(progress.qualities, progress.targets)} (epoch {progress.evaluated_epoch})"
        )
    if progress.seconds_to_go is not None:
        parts.append(f"at most {clock(progress.seconds_to_go)} to go")
    if progress.slow:
        parts.append(progress.slow)
    return "  ".join(parts)


def clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def start(startup: Mapping[str, Mapping[str, float]]) -> str:
    # ``startup took 75.0 s (budget 60 s): compile 52.0 s (budget 10 s)``, with all parts above their budget
    seconds, budget = startup["seconds"], startup["budget"]
    text = f"startup took {sum(seconds.values()):.1f} s (budget {sum(budget.values()):.0f} s)"
    late = [
        f"{part} {taken:.1f} s (budget {budget[part]:.0f} s)" for part, taken in seconds.items() if taken > budget[part]
    ]
    return f"{text}: {', '.join(late)}" if late else text


def checkpoints(written: Mapping[str, float]) -> str:
    count = f"{written['count']:.0f} checkpoint{'s' if written['count'] > 1 else ''}"
    return f"{count} stopped training for {written['stopped']:.1f} s, and took {written['seconds']:.1f} s to write"


class RunView:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._next = 0.0
        self._seen: Mapping[str, float] = {}
        self._damaged: Mapping[str, str] = {}

    def __enter__(self) -> RunView:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[facts]}"),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, title: str) -> None:
        self._title = title
        self._seen = {}
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=None, facts="starting")
        else:
            self._console.print(f"{title}: starting")

    def update(self, progress: follow.Progress, pace: str = "") -> None:
        for name, damage in (progress.damaged if progress.damaged != self._damaged else {}).items():
            before = f"{self._title} resumed from the one before it, step {progress.step}"
            self._console.print(f"checkpoint {name} is damaged ({damage}): {before}", markup=False)
        self._damaged = progress.damaged
        if self._bar is not None and self._task is not None:
            text = "  ".join(filter(None, (facts(progress), pace))) if progress.epochs else "starting"
            self._bar.update(self._task, total=progress.total_steps or None, completed=progress.step, facts=text)
            return
        if progress.step and (progress.qualities != self._seen or time.monotonic() >= self._next):
            self._next = time.monotonic() + PLAIN_SECONDS
            self._seen = progress.qualities
            self._console.print(f"{self._title}: {'  '.join(filter(None, (facts(progress), pace)))}")
