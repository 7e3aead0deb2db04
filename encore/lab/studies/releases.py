"""Releases of an image compared with each other: the speed-up over the first one, next to what was published.

The published figures of a benchmark are in ``published_releases.toml``; they are marked as such.
"""

from collections.abc import Sequence

from encore import catalogue, paths
from encore.lab.studies.throughput import Result
from encore.results.report.figures import Figure, bars
from encore.results.table import Cell, Table

TITLE = "Speed-up by release of the image"
MEASURED = "this sweep"


class PublishedRelease(catalogue.Strict):
    release: str
    machine: str
    speed_up: float  # over the first one of its figure


class PublishedReleases(catalogue.Strict):
    source: str
    conditions: str
    figures: tuple[PublishedRelease, ...]


def published(benchmark: str) -> PublishedReleases | None:
    """Return the published figure of a benchmark, None where there is none."""
    path = paths.benchmark_folder(benchmark) / "published_releases.toml"
    return catalogue.parse(PublishedReleases, path) if path.exists() else None


def releases_table(results: Sequence[Result], figure: PublishedReleases | None) -> Table:
    """Return a row per release and number of GPUs, with its speed-up over the first release on as many."""
    rows: list[tuple[Cell, ...]] = []
    for each in results:
        speed = each.samples_per_second
        same = [r for r in results if (r.point.nodes, r.point.gpus, r.point.precision) == _place(each)]
        base = same[0].samples_per_second
        ratio = speed.estimate / base.estimate if speed and base else None
        rows.append((each.point.image, f"{each.point.gpus} GPUs", speed.estimate if speed else None, ratio, MEASURED))
    known = figure.figures if figure else ()
    rows += [(each.release, each.machine, None, each.speed_up, "published") for each in known]
    note = "Samples per second of training; speed-up over the first release on as many GPUs."
    if figure:
        note += f" Published: {figure.source}; {figure.conditions}; not measured here."
    return Table(
        title=TITLE,
        columns=("release", "machine", "samples/s", "speed-up", "from"),
        formats={"samples/s": ",.1f", "speed-up": ".2f"},
        rows=tuple(rows),
        note=note,
    )


def _place(each: Result) -> tuple[int, int, str | None]:
    return each.point.nodes, each.point.gpus, each.point.precision


def releases_figure(table: Table) -> Figure | None:
    """Return the bars of all rows that have a speed-up; None where the sweep itself has none."""
    known = tuple(row for row in table.rows if row[3] is not None)
    if not any(row[4] == MEASURED for row in known):
        return None
    shown = Table(title=table.title, columns=table.columns, formats=table.formats, rows=known, note=table.note)
    return bars("release-sweep", shown, label=(0, 1, 4), value=3, axis="speed-up")
