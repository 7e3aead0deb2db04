"""The best published speed of a benchmark per GPU: ``published_speed.toml`` in its folder, each figure with source."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from encore import catalogue, paths


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


def find(benchmark: str, gpu: str) -> Figure | None:
    """Return the figure for a GPU, None where nothing was published."""
    path = paths.benchmark_folder(benchmark) / "published_speed.toml"
    if not path.exists():
        return None
    return next((each for each in catalogue.parse(Figures, path).figures if each.gpu in gpu), None)


def beside(benchmark: str, gpu: str, speed: float) -> str:
    """Return a measured speed next to the published one, to be put behind it."""
    figure = find(benchmark, gpu)
    if figure is None:
        return f"; nothing published for {gpu}"
    share = speed / figure.samples_per_second
    return f"; best published {figure.samples_per_second:,.0f} ({figure.conditions}): {share:.0%}"
