"""Speeds of a benchmark per GPU: the best published ones, and those that this project measured.

They are in ``published_speed.toml`` and ``measured.toml`` in the benchmark's folder, each figure with its source.
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

from encore import catalogue, paths
from encore.catalogue import Choice

LEAST_SHARE = 0.7
"""Of what was measured of this GPU before, below which a speed is too slow, whatever the machine around it."""


class Figure(BaseModel):
    """What one GPU of a family trained per second."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str
    """Part of the GPU's name, such as A100."""
    samples_per_second: float
    conditions: str
    source: str


class Figures(BaseModel):
    """A file of figures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    figures: tuple[Figure, ...]


class Measured(Figure):
    """What this project measured on one GPU."""

    framework: str
    loop: str
    """Of bench.py."""
    date: str


class MeasuredFigures(BaseModel):
    """A file of figures that this project measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    figures: tuple[Measured, ...]


def is_of(figure: Figure, gpu: str) -> bool:
    """Return whether a figure is of a GPU with this name, whose words are those of NVML: GH200 is no H200."""
    return figure.gpu in re.split(r"[\s-]", gpu)


def find(benchmark: str, gpu: str) -> Figure | None:
    """Return the figure for a GPU, None where nothing was published."""
    path = paths.benchmark_folder(benchmark) / "published_speed.toml"
    if not path.exists():
        return None
    return next((each for each in catalogue.parse(Figures, path).figures if is_of(each, gpu)), None)


def measured(benchmark: str) -> tuple[Measured, ...]:
    """Return all that was measured of a benchmark."""
    path = paths.benchmark_folder(benchmark) / "measured.toml"
    return catalogue.parse(MeasuredFigures, path).figures if path.exists() else ()


def compare_measured(choice: Choice, gpu: str, loop: str, speed: float) -> tuple[bool, str]:
    """Return whether a speed is too slow for what was measured before, and the figure, to be put behind it."""
    framework = choice.implementation.framework
    for each in measured(choice.benchmark.name):
        if is_of(each, gpu) and (each.framework, each.loop) == (framework, loop):
            share = speed / each.samples_per_second
            slow = f", less than {LEAST_SHARE:.0%}" if share < LEAST_SHARE else ""
            before = f"{each.samples_per_second:,.0f} ({each.conditions}; {each.date})"
            return share < LEAST_SHARE, f"; measured before {before}: {share:.0%}{slow}"
    return False, ""


def beside(benchmark: str, gpu: str, speed: float) -> str:
    """Return a measured speed next to the published one, to be put behind it."""
    figure = find(benchmark, gpu)
    if figure is None:
        return f"; nothing published for {gpu}"
    share = speed / figure.samples_per_second
    return f"; best published {figure.samples_per_second:,.0f} ({figure.conditions}): {share:.0%}"
