"""The report of runs: Markdown, and one HTML page that needs nothing else.

from encore.results.report import write_report
write_report([Path("results/20260101T120000Z-resnet-mxnet-dgxa100")], Path("report"))
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from encore import __version__
from encore.errors import EncoreError, ExitCode
from encore.names import unknown
from encore.results.compare import WITHIN, Comparison, compare
from encore.results.explain import Explanation, explain
from encore.results.figures import Figure, all_figures, phase_bars
from encore.results.measurements import Measurement, of_published, of_side, of_study
from encore.results.published import load_published, load_studies
from encore.results.sides import Side, load_sides
from encore.results.studies import MICROWAY, findings
from encore.results.studies import tables as study_tables
from encore.results.tables import Table, all_tables
from encore.results.words import certainty, with_names

_CLOCK = ("start_s", "train_s", "evaluate_s")
_CLOCK_NAMES = ("start", "train", "evaluate")
_DIFFERENCES = 25


@dataclass(frozen=True, kw_only=True)
class Section:
    """One set of runs in the report."""

    key: str
    comparison: Comparison
    explanation: Explanation | None
    runs: Table
    factors: Table
    differences: Table | None
    phases: Figure | None
    sentences: tuple[str, ...]

    @property
    def side(self) -> Side:
        """The set of runs."""
        return self.comparison.ours


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the report shows."""

    created: str
    summary: Table
    sections: tuple[Section, ...]
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    studies: tuple[Table, ...]


def build_report(
    paths: Sequence[Path],
    *,
    name: str | None = None,
    logs: Path | None = None,
    within: float = WITHIN,
    baseline: str | None = None,
    study: str | None = None,
    published: str | None = None,
) -> Report:
    """Read every set of runs at or below ``paths`` and everything that can be said of them."""
    sides = [side for path in paths for side in load_sides(path)]
    sections = tuple(_section(number, compare(side, name, logs, within)) for number, side in enumerate(sides, 1))
    measured = [of_side(side) for side in sides] + measurements_of_study(study)
    measured += measurements_of_published(published, {each.benchmark for each in measured} or None)
    studied = [*study_tables(), findings()] if study == MICROWAY else []
    return Report(
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        summary=_summary(sections),
        sections=sections,
        tables=tuple(all_tables(measured, baseline)) if measured else (),
        figures=tuple(all_figures(measured, baseline)),
        studies=tuple(studied),
    )


def measurements_of_study(key: str | None) -> list[Measurement]:
    """Return the measurements of the study called ``key``; EncoreError offers the nearest name."""
    if key is None:
        return []
    known = [study.key for study in load_studies()]
    if key not in known:
        raise unknown("study", key, known)
    return of_study(key)


def measurements_of_published(part: str | None, benchmarks: Collection[str] | None = None) -> list[Measurement]:
    """Return the published results of these benchmarks with ``part`` in their name; EncoreError where there is none."""
    if part is None:
        return []
    cells = [
        cell
        for cell in load_published()
        if part.lower() in cell.name.lower()
        and cell.score_minutes
        and (benchmarks is None or cell.benchmark in benchmarks)
    ]
    if not cells:
        raise unknown("part of a published name", part, {cell.name for cell in load_published()})
    return [of_published(cell) for cell in cells]


def write_report(paths: Sequence[Path], folder: Path, **options: Any) -> list[Path]:
    """Write report.md, report.html and every table as CSV into ``folder``; return the files."""
    return write_files(build_report(paths, **options), folder)


def write_files(report: Report, folder: Path) -> list[Path]:
    """Write a report that was built into ``folder``; return the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {"report.html": render(report, "report.html.j2"), "report.md": render(report, "report.md.j2")}
        for figure in report.figures:
            files[f"{figure.key}.csv"] = figure.table.as_csv()
            files[f"{figure.key}.svg"] = figure.svg
        for number, table in enumerate(report.tables, 1):
            files[f"table_{number}.csv"] = table.as_csv()
        for file, content in files.items():
            (folder / file).write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise EncoreError(
            f"the report cannot be written to {folder}: {error.strerror or error}",
            remedy="give a folder that you may write to: -o DIR",
            exit_code=ExitCode.FAILED,
        ) from error
    return [folder / file for file in files]


def render(report: Report, template: str) -> str:
    """Return the report through one of the templates of this package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def part(file: str) -> Markup:
        return Markup((Path(__file__).parent / "templates" / file).read_text("utf-8"))

    environment = Environment(
        loader=PackageLoader("encore.results", "templates"),
        autoescape=template.endswith("html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = _plain
    return environment.get_template(template).render(report=report, part=part, version=__version__, svg=Markup)


def _plain(text: object) -> str:
    """Return a log's text on one line of Markdown."""
    return " ".join(str(text).split()).replace("|", "/").replace("<", "&lt;")


def _section(number: int, comparison: Comparison) -> Section:

    ours, theirs = comparison.ours, comparison.theirs
    explanation = explain(ours, theirs) if theirs is not None else None
    sides = [("yours", ours)] + ([("theirs", theirs)] if theirs is not None else [])
    bars = [
        (label, [side.phases.get(name, 0.0) / 60 for name in _CLOCK])
        for label, side in sides
        if "train_s" in side.phases
    ]
    phases = phase_bars(_CLOCK_NAMES, bars, "minutes") if bars else None
    return Section(
        key=f"run-{number}",
        comparison=comparison,
        explanation=explanation,
        runs=_runs(ours),
        factors=_factors(comparison),
        differences=_differences(explanation) if explanation and explanation.differences else None,
        phases=_keyed(phases, number),
        sentences=tuple(certainty(comparison)),
    )


def _keyed(figure: Figure | None, number: int) -> Figure | None:
    """Return a figure that occurs once per section: its names must differ within the page."""
    from dataclasses import replace

    if figure is None:
        return None
    key = f"{figure.key}-{number}"
    svg = figure.svg.replace(f'id="{figure.key}-', f'id="{key}-').replace(f"#{figure.key}-", f"#{key}-")
    return replace(figure, key=key, svg=svg)


def _summary(sections: Sequence[Section]) -> Table:
    return Table(
        title="Summary",
        columns=("benchmark", "verdict", "ratio", "minutes", "converged", "run", "compared with"),
        formats={"minutes": ".3f", "ratio": ".3f"},
        rows=tuple(
            (
                section.side.benchmark or "?",
                section.comparison.verdict.value,
                section.comparison.score.ratio if section.comparison.score else None,
                section.side.score.estimate if section.side.score else None,
                f"{section.side.converged} of {section.side.runs}",
                section.side.label,
                section.comparison.theirs.label if section.comparison.theirs else "",
            )
            for section in sections
        ),
    )


def _runs(side: Side) -> Table:
    from encore.results.timing import length_of

    return Table(
        title="Runs",
        formats={"minutes": ".3f"},
        columns=("file", "minutes", side.length_unit or "epochs", "quality", "seed", "remark"),
        rows=tuple(
            (
                run.path.name,
                run.minutes,
                length.value if (length := length_of(run)) else None,
                with_names(run.best_quality, ".5g"),
                str(run.seeds[0]) if run.seeds else "",
                "; ".join([run.explanation, *run.flags]).strip("; "),
            )
            for run in side.logs
        ),
    )


def _factors(comparison: Comparison) -> Table:
    return Table(
        title="Factors",
        columns=("factor", "yours", "theirs", "ratio", "95 % from", "95 % to", "z"),
        formats={"ratio": ".3f", "95 % from": ".3f", "95 % to": ".3f", "z": ".1f"},
        rows=tuple(
            (
                factor.name,
                factor.ours,
                factor.theirs,
                factor.ratio,
                factor.interval[0] if factor.interval else None,
                factor.interval[1] if factor.interval else None,
                round(factor.z, 1) if factor.z is not None else None,
            )
            for factor in comparison.factors
        ),
    )


def _differences(explanation: Explanation) -> Table:
    return Table(
        title="What differs, by weight",
        formats={"ratio": ".3g"},
        columns=("rank", "area", "what", "yours", "theirs", "ratio"),
        rows=tuple(
            (rank, each.area, each.name, each.ours, each.theirs, each.ratio)
            for rank, each in enumerate(explanation.differences[:_DIFFERENCES], 1)
        ),
    )
