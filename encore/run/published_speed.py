"""Speeds of a benchmark per GPU: the best published ones, and those that this project measured.

They are in ``published_speed.toml`` and ``measured.toml`` in the benchmark's folder, each figure with its source.
"""

import re
from typing import Literal

from pydantic import Field

from encore import catalogue, paths

# Share of the speed that was measured on this GPU before, below which one is too slow, whatever the machine.
LEAST_SHARE = 0.7


class Figure(catalogue.Strict):
    gpu: str  # Part of the GPU's name, such as A100
    samples_per_second: float
    conditions: str
    source: str
    framework: str = ""  # This and the next two: of what this project measured
    loop: Literal["", "bare", "synthetic", "real", "input", "evaluation"] = ""  # The loop of bench.py
    date: str = ""


class Result(catalogue.Strict):
    what: str
    value: str
    device: str  # Key of ``devices``
    date: str
    command: str  # A command, a test file, or how else it was measured


class Step(catalogue.Strict):
    """A measured training step of one GPU, of whose gradients docs/scaling.md computes the sum over many."""

    parameters: int  # that are trained
    samples: int
    samples_per_second: float
    source: str

    @property
    def seconds(self) -> float:
        return self.samples / self.samples_per_second


class Figures(catalogue.Strict):
    """A file of figures; one of this project's measurements may have results of other kinds too."""

    figures: tuple[Figure, ...] = ()
    devices: dict[str, str] = Field(default_factory=dict)
    results: tuple[Result, ...] = ()
    step: Step | None = None


def read(benchmark: str, file: str) -> Figures:
    path = paths.benchmark_folder(benchmark) / file
    return catalogue.parse(Figures, path) if path.exists() else Figures()


def measured(benchmark: str) -> Figures:
    return read(benchmark, "measured.toml")


def is_of(figure: Figure, gpu: str) -> bool:
    """Return whether a figure is of a GPU with this name, whose words are those of NVML: GH200 is no H200."""
    return figure.gpu in re.split(r"[\s-]", gpu)


def find(benchmark: str, gpu: str) -> Figure | None:
    return next((figure for figure in read(benchmark, "published_speed.toml").figures if is_of(figure, gpu)), None)


def compare_measured(choice: catalogue.Choice, gpu: str, loop: str, speed: float) -> tuple[bool, str]:
    # Whether a speed is too slow for what was measured before, and the figure, to be put behind it.
    framework = choice.implementation.framework
    for figure in measured(choice.benchmark.name).figures:
        if is_of(figure, gpu) and (figure.framework, figure.loop) == (framework, loop):
            share = speed / figure.samples_per_second
            slow = f", less than {LEAST_SHARE:.0%}" if share < LEAST_SHARE else ""
            reference = f"{figure.samples_per_second:,.0f} ({figure.conditions}; {figure.date})"
            return share < LEAST_SHARE, f"; measured before {reference}: {share:.0%}{slow}"
    return False, ""


def next_to_published(benchmark: str, gpu: str, speed: float) -> str:
    figure = find(benchmark, gpu)
    if figure is None:
        return f"; nothing published for {gpu}"
    share = speed / figure.samples_per_second
    return f"; best published {figure.samples_per_second:,.0f} ({figure.conditions}): {share:.0%}"
