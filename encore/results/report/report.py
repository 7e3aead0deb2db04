"""The report of runs: Markdown, and one HTML page that needs nothing else.

from encore.results.report.report import write_report
write_report([Path("results/20260101T120000Z-resnet-mxnet-dgxa100")], Path("report"))
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from encore.names import unknown
from encore.results.audit.judge import audit_scores
from encore.results.compare.compare import WITHIN, compare
from encore.results.compare.sides import side_of
from encore.results.compliance.compliance import score_and_check
from encore.results.compliance.convergence import convergence_of
from encore.results.findings import ComplianceReport
from encore.results.logs.parallel import OnRead
from encore.results.published.published import load_published, load_studies
from encore.results.report import pages
from encore.results.report.detections import KEY, drawing
from encore.results.report.figures import Figure, all_figures
from encore.results.report.generations import drawing as board
from encore.results.report.measurements import Measurement, of_published, of_side, of_study
from encore.results.report.sections import Section, section, summary
from encore.results.report.tables import all_tables
from encore.results.scores.score import Score, existing, no_log
from encore.results.table import Table


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A part of a report with words of its own, such as a question and its answer."""

    key: str  # Names its tables' files
    title: str
    sentence: str = ""
    note: str = ""  # What has to be known of every figure in it
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()  # Tables that are shown on demand
    terms: tuple[tuple[str, str], ...] = ()  # A list at its end: a term and what is to be said of it


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the report shows."""

    sections: tuple[Section, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    studies: tuple[Table, ...] = ()
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
    title: str = "Encore report"
    packages: tuple[ComplianceReport, ...] = ()  # What the package checker says of each submitter's tree
    about: str = ""  # The first paragraph
    chapters: tuple[Chapter, ...] = ()
    notices: tuple[str, ...] = ()  # What a reader has to know first, such as that nothing here ran on a GPU

    @property
    def summary(self) -> Table:
        """Return a row for each set."""
        return summary(self.sections)

    @property
    def tally(self) -> list[tuple[str, str, int]]:
        """Return each verdict with its looks and its number of sets."""
        counted = Counter((each.ruling, each.tone) for each in self.sections)
        return [(ruling, tone, count) for (ruling, tone), count in counted.most_common()]

    def as_json(self) -> dict[str, Any]:
        """Return every set and package as plain data."""
        return {
            "sets": [each.as_json() for each in self.sections],
            "packages": [each.as_json() for each in self.packages],
        }


def build_report(
    paths: Sequence[Path],
    *,
    name: str | None = None,
    logs: Path | None = None,
    within: float = WITHIN,
    baseline: str | None = None,
    study: str | None = None,
    published: str | None = None,
    studied: Sequence[Table] = (),
    packages: Sequence[ComplianceReport] = (),
    on_read: OnRead | None = None,
) -> Report:
    """Read every set of runs at or below ``paths`` and everything that can be said of them.

    ``studied`` are a study's own tables, ``packages`` what the package checker says of the submitters' trees.
    """
    read = [_read(path, on_read) for path in paths]
    reports = {report.path: report for _, checked in read for report in checked}
    audits = audit_scores([score for scores, _ in read for score in scores])
    sides = [side_of(audit.score, audit.findings) for audit in audits]
    sections = tuple(
        section(
            number,
            compare(side, name, logs, within),
            [reports[run.path] for run in side.logs],
            convergence_of(audit.score),
            named=name is not None,
        )
        for number, (side, audit) in enumerate(zip(sides, audits, strict=True), 1)
    )
    measured = [of_side(side) for side in sides] + measurements_of_study(study)
    measured += measurements_of_published(published, {each.benchmark for each in measured} or None)
    return Report(
        sections=sections,
        tables=tuple(all_tables(measured, baseline)) if measured else (),
        figures=tuple(all_figures(measured, baseline)),
        studies=tuple(studied),
        packages=tuple(packages),
    )


# Every set at or below a path, and the check of each of their logs.
def _read(path: Path, on_read: OnRead | None) -> tuple[list[Score], list[ComplianceReport]]:
    scores, reports = score_and_check(existing(path), on_read=on_read)
    if not scores:
        raise no_log(path)
    return scores, reports


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
    """Build a report and write its files into ``folder``; see ``write_files``."""
    return write_files(build_report(paths, **options), folder)


def write_files(report: Report, folder: Path) -> list[Path]:
    """Write report.md, report.html and every table as CSV into ``folder``; return the files."""
    files = {"report.html": render(report, "report.html.j2"), "report.md": render(report, "report.md.j2")}
    for figure in report.figures:
        files[f"{figure.key}.csv"] = figure.table.as_csv()
        files[f"{figure.key}.svg"] = figure.alone()
    for chapter in report.chapters:
        files.update({f"{figure.key}.svg": figure.alone() for figure in chapter.figures})
        tables = enumerate((*chapter.tables, *chapter.folded), 1)
        files.update({f"{chapter.key}_{number}.csv": table.as_csv() for number, table in tables})
    for number, table in enumerate(report.tables, 1):
        files[f"table_{number}.csv"] = table.as_csv()
    for number, part in enumerate(report.sections, 1):
        files.update({f"detections_{number}_{each.name}.svg": drawing(each) for each in part.detections})
        if part.game is not None:
            files[f"game_{number}.svg"] = board(part.game)
    return pages.write(files, folder)


def render(report: Report, template: str) -> str:
    """Return the report through one of the templates of this package."""
    return pages.render(pages.TEMPLATES, template, report=report, detections_key=KEY)
