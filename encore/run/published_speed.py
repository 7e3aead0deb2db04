"""Training speed per GPU: best published results and measurements of this project.

They are in ``published_speed.toml`` and ``measured.toml`` in the benchmark's folder, with sources.
"""

import re
from typing import Literal

from pydantic import Field

from encore import catalogue, paths

# Minimum ratio to the speed measured before on the same GPU; lower is too slow on any machine.
LEAST_SHARE = 0.7


class Figure(catalogue.Strict):
    gpu: str  # Part of the GPU's name, such as A100
    samples_per_second: float
    conditions: str
    source: str
    framework: str = ""  # This field and the next two are for measurements of this project
    loop: Literal["", "bare", "synthetic", "real", "input", "evaluation"] = ""  # The loop of bench.py
    date: str = ""


class Result(catalogue.Strict):
    what: str
    value: str
    device: str  # Key of ``devices``
    date: str
    command: str  # Command, test file, or other method


class Step(catalogue.Strict):
    """Measured training step on one GPU; docs/scaling.md uses its gradient size."""

    parameters: int  # that are trained
    samples: int
    samples_per_second: float
    source: str

    @property
    def seconds(self) -> float:
        return self.samples / self.samples_per_second


class Figures(catalogue.Strict):
    """Content of a figures file. Measurements of this project may include other results."""

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
    """Return whether a figure applies to a GPU, comparing the words of NVML's name: GH200 does not match H200."""
    return figure.gpu in re.split(r"[\s-]", gpu)


def find(benchmark: str, gpu: str) -> Figure | None:
    return next((figure for figure in read(benchmark, "published_speed.toml").figures if is_of(figure, gpu)), None)


def compare_measured(choice: catalogue.Choice, gpu: str, loop: str, speed: float) -> tuple[bool, str]:
    # Compare a speed with the previous measurement. Return whether it is too slow, and a text to append.
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
