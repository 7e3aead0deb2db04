"""Reports about runs: Markdown, and one self-contained HTML page.

from encore.results.report.report import build_report, write_files
write_files(build_report([Path("results/20260101T120000Z-resnet-mxnet-dgxa100")]), Path("report"))
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from encore import __version__
from encore.errors import EncoreError, ExitCode, unknown_name
from encore.results import peaks
from encore.results.audit.audit import audit_scores
from encore.results.compare.compare import (
    Comparison,
    ComparisonJson,
    Factor,
    Verdict,
    compare,
    format_certainty,
)
from encore.results.compare.explain import Explanation, explain
from encore.results.compare.run_set import RunSet, build_run_set, submission
from encore.results.compliance.compliance import score_and_check
from encore.results.compliance.convergence import Convergence, convergence_of, report_of
from encore.results.findings import ComplianceReport, Finding, ReportJson
from encore.results.format import count_of, join_names, percent, with_names
from encore.results.logs import goodput
from encore.results.logs import steps as rank_steps
from encore.results.logs.metrics import experiment_of
from encore.results.logs.parallel import OnRead
from encore.results.logs.timing import length_of
from encore.results.published.published import load_published, load_studies
from encore.results.report.figures import (
    Figure,
    Plot,
    all_figures,
    phase_bars,
    quality_plots,
    ratio_line,
    run_dots,
    steps_map,
)
from encore.results.report.measurements import (
    Measurement,
    all_tables,
    measurement_of,
    study_measurements,
    title_of,
)
from encore.results.report.samples_view import (
    KEY,
    Detected,
    Game,
    board_svg,
    game_of,
    generation_plots,
    generations_table,
    image_svg,
    images_of,
    select_for_report,
    texts_table,
    translations_table,
)
from encore.results.rules import data_size
from encore.results.scores.score import Score, existing, no_log
from encore.results.statistics import LEVEL, interval
from encore.results.table import Table, grouped

SMALL = "small run"
_DIFFERENCES = 25
_TONES = {
    "reproduced": "good", "faster": "good", "slower": "bad", "not converged": "bad", "converges differently": "bad",
    "undecided": "open",
}  # fmt: skip


_Stat = tuple[str, str, str]  # Name, value and details


class SetJson(ComparisonJson):
    """A set in a report."""

    check: list[ReportJson]  # Of each of its logs
    convergence: Convergence | None  # Its comparison with the reference convergence points


class ReportedJson(TypedDict):
    """A report."""

    sets: list[SetJson]
    packages: list[ReportJson]  # Package checker reports, one per submitter tree


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    ruling: str  # Verdict, or a note that toy runs are not compared with submissions
    tone: str
    comparison: Comparison
    reports: tuple[ComplianceReport, ...]  # Compliance reports, one per log
    convergence: Convergence | None
    explanation: Explanation | None
    stats: tuple[_Stat, ...]
    compliance: str
    found: tuple[tuple[Finding, str], ...]  # Unique findings of the audit and the rules, with their locations
    runs: Table
    factors: Table
    differences: Table | None
    plots: tuple[Plot, ...]  # Quality over minutes, and enlarged at the target; losses and wins over generations
    bars: tuple[Plot, ...]  # Time per run, and time per phase
    sentences: tuple[str, ...]
    details: tuple[Table, ...]  # Goodput, step times per rank and run, automatic choices, sample texts
    detections: tuple[Detected, ...]  # Sample images with detected objects
    generations: Table | None  # Self-play generations
    game: Game | None  # Sample game of the last generation

    @property
    def run_set(self) -> RunSet:
        return self.comparison.current

    @property
    def official(self) -> float | None:
        """Official score, if it differs from the raw score."""
        return _official_minutes(self.run_set)

    @property
    def against(self) -> str:
        return title_of(self.comparison.baseline) if self.comparison.baseline else ""

    @property
    def ratio(self) -> str:
        """Ratio of the times with its interval as a small plot; empty without a ratio."""
        factor = self.comparison.score
        return ratio_line(factor, self.comparison.within) if factor is not None else ""

    @property
    def checked(self) -> str:
        return f"{sum(report.passed for report in self.reports)} of {len(self.reports)}" if self.reports else ""

    @property
    def audited(self) -> str:
        counts = Counter(finding.severity for finding in self.run_set.findings)
        texts = [count_of(counts[severity], severity) for severity in ("error", "warning") if counts[severity]]
        return ", ".join(texts) or "passed"

    @property
    def converged_as(self) -> str:
        """Outcome of the comparison with the reference convergence points; empty without one."""
        return self.convergence.outcome.value if self.convergence is not None else ""

    def as_json(self) -> SetJson:
        return {
            **self.comparison.as_json(),
            "check": [report.as_json() for report in self.reports],
            "convergence": self.convergence,
        }

    def factor_lines(self) -> list[str]:
        return [ratio_line(factor, self.comparison.within, labelled=False) for factor in self.comparison.factors]


def section(
    comparison: Comparison,
    reports: Sequence[ComplianceReport] = (),
    convergence: Convergence | None = None,
    *,
    is_selected: bool = False,
) -> Section:
    """Build the report section for a comparison and its compliance reports.

    ``is_selected``: the user selected the submission.
    """
    small = not is_selected and is_small(comparison)
    if small:
        comparison = replace(
            comparison, baseline=None, score=None, per_length=None, lengths=None, scaling=None, confidence=None,
            score_interval=None, further_runs=None, caveats=(),
        )  # fmt: skip
    current, baseline = comparison.current, comparison.baseline
    explanation = explain(current, baseline) if baseline is not None else None
    steps = {
        log.path.name: rank_steps.windows_of(experiment)
        for log in current.logs
        if (experiment := experiment_of(log.path))
    }
    heat = (steps_map(windows, file) for file, windows in steps.items())
    details = (
        goodput.table_of(current.logs),
        *(rank_steps.table_of(windows, file) for file, windows in steps.items() if len(windows) > 1),
        Table(
            title="Automatic choices for settings that are not configured",
            columns=("key", "choice"),
            rows=tuple(current.choices.items()),
        ),
        translations_table(current.folder),
        texts_table(current.folder),
    )
    bars = (run_dots(current, baseline, comparison.within), phase_bars(current, baseline), *heat)
    return Section(
        title=title_of(current),
        ruling=SMALL if small else comparison.verdict.value,
        tone=tone(comparison.verdict.value, comparison.lengths),
        comparison=comparison,
        reports=tuple(reports),
        convergence=convergence,
        explanation=explanation,
        stats=tuple(_stats(comparison)),
        compliance=_compliance(reports),
        found=tuple(_group_findings(current, [*reports, *([report_of(convergence)] if convergence else [])])),
        runs=Table(
            title="Runs",
            formats={"minutes": ".3f"},
            columns=("file", "minutes", current.length_unit or "epochs", "quality", "seed", "remark"),
            rows=tuple(
                (
                    run.path.name,
                    run.minutes,
                    length.value if (length := length_of(run)) else None,
                    with_names(run.best_quality, ".5g"),
                    str(run.seeds[0]) if run.seeds else "",
                    run.explanation,
                )
                for run in current.logs
            ),
        ),
        factors=_factors(comparison),
        differences=Table(
            title="What differs, by weight",
            formats={"ratio": ".3g"},
            columns=("rank", "area", "what", "yours", "theirs", "ratio"),
            rows=tuple(
                (rank, difference.area, difference.name, difference.ours, difference.theirs, difference.ratio)
                for rank, difference in enumerate(explanation.differences[:_DIFFERENCES], 1)
            ),
        )
        if explanation and explanation.differences
        else None,
        plots=(*quality_plots(current, baseline), *generation_plots(current.folder)),
        bars=tuple(filter(None, bars)),
        sentences=(*format_certainty(comparison), *_utilization(current)),
        details=tuple(table for table in details if table is not None and table.rows),
        detections=tuple(select_for_report(images_of(current.folder))),
        generations=generations_table(current.folder),
        game=game_of(current.folder),
    )


# Hardware utilization per run, from run.json.
def _utilization(run_set: RunSet) -> Iterable[str]:
    by_run = run_set.passport.get("utilization")
    for number, utilization in (by_run if isinstance(by_run, dict) else {}).items():
        yield f"Run {int(number) + 1}: {peaks.sentence(utilization)}."


def is_small(comparison: Comparison) -> bool:
    current = comparison.current
    if comparison.verdict is not Verdict.NOT_COMPARABLE:
        return False
    size = data_size(current.benchmark)
    full = (size.train if size is not None else None) or 0
    has_few_samples = bool(current.passport) and 0 < (current.train_samples or 0.0) < full / 2
    return has_few_samples or current.is_cpu or current.submission.get("kind") == "small"


def tone(ruling: str, lengths: Factor | None = None) -> str:
    """Return a verdict's tone: good, bad, open or plain. Needing fewer epochs is not bad."""
    if ruling == Verdict.CONVERGES_DIFFERENTLY.value and lengths is not None and (lengths.ratio or 1.0) < 1:
        return "plain"
    return _TONES.get(ruling, "plain")


def _stats(comparison: Comparison) -> Iterable[_Stat]:
    current, baseline = comparison.current, comparison.baseline
    yield from _scores("Your", current, comparison.score_interval)
    if baseline is not None:
        yield from _scores("Published", baseline, interval(baseline.score) if baseline.score else None)
    if comparison.score is not None and comparison.score.ratio is not None:
        span = comparison.score.interval
        detail = f"{percent(LEVEL)}: {span[0]:.3f} to {span[1]:.3f}" if span else "no interval is known"
        yield "Ratio of the times", f"{comparison.score.ratio:.3f}", detail
    needed = f"{current.required} required" if current.required else ""
    yield "Reached the target", f"{current.converged} of {current.runs}", needed


# Yield the score; where MLCommons multiplies it by a factor, the raw one and the official one.
def _scores(whose: str, run_set: RunSet, span: tuple[float, float] | None) -> Iterable[_Stat]:
    if run_set.score is None or run_set.raw_minutes is None:
        return
    detail = f"{percent(LEVEL)}: {span[0]:.2f} to {span[1]:.2f}" if span else ""
    official = _official_minutes(run_set)
    if official is None:
        name = "score" if run_set.score_is_official else "mean, not a score"
        yield f"{whose} {name}", f"{run_set.score.estimate:.3f} min", detail
        return
    of_official = run_set.score_kind == "official"
    yield f"{whose} raw score", f"{run_set.raw_minutes:.3f} min", "" if of_official else detail
    factor = f"raw score × {run_set.scaling_factor:.6g}"
    yield f"{whose} official score", f"{official:.3f} min", f"{factor}; {detail}" if of_official and detail else factor


def _official_minutes(run_set: RunSet) -> float | None:
    return None if run_set.scaling_factor == 1.0 else run_set.official_minutes


def _compliance(reports: Sequence[ComplianceReport]) -> str:
    if not reports:
        return "no log was checked"
    passed = sum(report.passed for report in reports)
    passed_but_for_data = sum(report.passed_but_for_data for report in reports)
    rulesets = ", ".join(sorted({report.ruleset or "no known round" for report in reports}))
    checkers = "; ".join(sorted({report.checker for report in reports}))
    text = f"{passed} of {len(reports)} logs pass the rules of {rulesets} ({checkers})"
    return text + (f"; {passed_but_for_data} but for the size of the data set" if passed_but_for_data > passed else "")


# Yield unique findings of the audit and the rules, errors first.
def _group_findings(run_set: RunSet, reports: Sequence[ComplianceReport]) -> Iterable[tuple[Finding, str]]:
    findings = [
        (finding, finding.path.name if finding.path else "")
        for finding in run_set.findings
        if finding.severity != "note"
    ]
    findings += [(finding, report.path.name) for report in reports for finding in report.findings]
    groups = grouped(
        findings, lambda finding: (finding[0].severity, finding[0].rule, finding[0].expected, finding[0].found)
    ).values()
    for group in sorted(groups, key=lambda group: group[0][0].label != "error"):
        locations = [file if finding.line is None else f"{file or 'line'}:{finding.line}" for finding, file in group]
        unique = [location for location in dict.fromkeys(locations) if location]
        yield group[0][0], join_names(unique)


def _factors(comparison: Comparison) -> Table:
    low_column, high_column = f"{percent(LEVEL)} from", f"{percent(LEVEL)} to"
    return Table(
        title="Factors",
        columns=("factor", "yours", "theirs", "ratio", low_column, high_column, "z"),
        formats={"ratio": ".3f", low_column: ".3f", high_column: ".3f", "z": ".1f"},
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


# Templates of reports. Templates in other folders can include these files with ``part(FILE)``, such as styles.
TEMPLATES = Path(__file__).parents[1] / "templates"


def page(folder: Path, template: str, **values: Any) -> str:
    """Render a template in ``folder`` with ``values``; HTML templates escape them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def part(file: str) -> Markup:
        return Markup((TEMPLATES / file).read_text("utf-8"))

    is_html = template.endswith("html.j2")
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=is_html,
        # Markdown contains HTML as it is
        finalize=None if is_html else lambda value: str(value).replace("<", "&lt;"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = lambda text: " ".join(str(text).split()).replace("|", "/").replace("[", "\\[")
    environment.filters["breakable"] = lambda name: Markup("_<wbr>").join(str(name).split("_"))
    always = {"part": part, "version": __version__, "svg": Markup, "level": percent(LEVEL)}
    # Imported templates only see globals.
    environment.globals.update({**always, **values})
    return environment.get_template(template).render()


def write(contents: Mapping[str, str], folder: Path, name: str = "report") -> list[Path]:
    """Create ``folder``, write the files and return their paths; raises EncoreError on write errors."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            (folder / file).write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise EncoreError(
            f"the {name} cannot be written to {folder}: {error.strerror or error}",
            hint="give a folder that you may write to: -o DIR",
            exit_code=ExitCode.FAILED,
        ) from error
    return [folder / file for file in contents]


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A report chapter with text, such as a question and its answer."""

    key: str  # Prefix of the table files
    title: str
    sentence: str = ""
    note: str = ""  # Note about all figures of the chapter
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()  # Tables that are shown on demand
    terms: tuple[tuple[str, str], ...] = ()  # Glossary at the end: terms and definitions


@dataclass(frozen=True, kw_only=True)
class Report:
    sections: tuple[Section, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    studies: tuple[Table, ...] = ()
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
    title: str = "Encore report"
    packages: tuple[ComplianceReport, ...] = ()  # Package checker reports, one per submitter tree
    about: str = ""  # The first paragraph
    chapters: tuple[Chapter, ...] = ()
    notices: tuple[str, ...] = ()  # Notices at the top, such as that no run used a GPU

    @property
    def summary(self) -> Table:
        return Table(
            title="Summary",
            columns=(
                "run",
                "benchmark",
                "verdict",
                "ratio",
                "minutes",
                "official",
                "converged",
                "check",
                "audit",
                "convergence",
                "compared with",
            ),
            formats={"minutes": ".3f", "official": ".3f", "ratio": ".3f"},
            rows=tuple(
                (
                    section_.title,
                    section_.run_set.benchmark or "?",
                    section_.ruling,
                    section_.comparison.score.ratio if section_.comparison.score else None,
                    section_.run_set.raw_minutes,
                    section_.official,
                    f"{section_.run_set.converged} of {section_.run_set.runs}",
                    section_.checked,
                    section_.audited,
                    section_.converged_as,
                    section_.against if section_.against != section_.title else "",
                )
                for section_ in self.sections
            ),
        ).filled()

    @property
    def tally(self) -> list[tuple[str, str, int]]:
        counts = Counter((section_.ruling, section_.tone) for section_ in self.sections)
        return [(ruling, tone, count) for (ruling, tone), count in counts.most_common()]

    def as_json(self) -> ReportedJson:
        return {
            "sets": [item.as_json() for item in self.sections],
            "packages": [item.as_json() for item in self.packages],
        }


def build_report(
    paths: Sequence[Path],
    *,
    name: str | None = None,
    logs: Path | None = None,
    baseline: str | None = None,
    study: str | None = None,
    published: str | None = None,
    studied: Sequence[Table] = (),
    packages: Sequence[ComplianceReport] = (),
    on_read: OnRead | None = None,
) -> Report:
    """Read all run sets at or below ``paths`` and build the report.

    ``studied`` are study tables, ``packages`` are package checker reports of submitter trees.
    """
    all_scores: list[Score] = []
    reports: dict[Path, ComplianceReport] = {}
    for path in paths:
        scores, checked = score_and_check(existing(path), on_read=on_read)
        if not scores:
            raise no_log(path)
        all_scores += scores
        reports |= {report.path: report for report in checked}
    audits = audit_scores(all_scores)
    run_sets = [build_run_set(audit.score, audit.findings) for audit in audits]
    sections = tuple(
        section(
            compare(run_set, name, logs),
            [reports[run.path] for run in run_set.logs],
            convergence_of(audit.score),
            is_selected=name is not None,
        )
        for run_set, audit in zip(run_sets, audits, strict=True)
    )
    measured = measurements(run_sets, study, published)
    return Report(
        sections=sections,
        tables=tuple(all_tables(measured, baseline)) if measured else (),
        figures=tuple(all_figures(measured, baseline)),
        studies=tuple(studied),
        packages=tuple(packages),
    )


def measurements(run_sets: Sequence[RunSet], study: str | None, published: str | None) -> list[Measurement]:
    """Return measurements from the run sets, the study, and published results with this part in the name."""
    selected = [measurement_of(run_set) for run_set in run_sets] + measurements_of_study(study)
    return selected + measurements_of_published(published, {measurement.benchmark for measurement in selected} or None)


def measurements_of_study(key: str | None) -> list[Measurement]:
    """Return the measurements of the study called ``key``; EncoreError offers the nearest name."""
    if key is None:
        return []
    keys = [study.key for study in load_studies()]
    if key not in keys:
        raise unknown_name("study", key, keys)
    return study_measurements(key)


def measurements_of_published(part: str | None, benchmarks: Collection[str] | None = None) -> list[Measurement]:
    """Return published results with ``part`` in the name; raises EncoreError if none matches."""
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
        raise unknown_name("part of a published name", part, {cell.name for cell in load_published()})
    return [measurement_of(submission(cell)) for cell in cells]


def write_files(report: Report, folder: Path) -> list[Path]:
    """Write report.md, report.html and every table as CSV into ``folder``; return the files."""
    files = {"report.html": render(report, "report.html.j2"), "report.md": render(report, "report.md.j2")}
    for figure in report.figures:
        files[f"{figure.key}.csv"] = figure.table.as_csv()
        files[f"{figure.key}.svg"] = figure.standalone_svg()
    for chapter in report.chapters:
        files |= {f"{figure.key}.svg": figure.standalone_svg() for figure in chapter.figures}
        tables = enumerate((*chapter.tables, *chapter.folded), 1)
        files |= {f"{chapter.key}_{number}.csv": table.as_csv() for number, table in tables}
    files |= {f"table_{number}.csv": table.as_csv() for number, table in enumerate(report.tables, 1)}
    for number, part in enumerate(report.sections, 1):
        files |= {f"detections_{number}_{image.name}.svg": image_svg(image) for image in part.detections}
        if part.game is not None:
            files[f"game_{number}.svg"] = board_svg(part.game)
    return write(files, folder)


def render(report: Report, template: str) -> str:
    return page(TEMPLATES, template, report=report, detections_key=KEY)
