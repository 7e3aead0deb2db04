"""The report of runs: Markdown, and one HTML page that needs nothing else.

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

from encore import __version__, peaks
from encore.errors import EncoreError, ExitCode
from encore.names import unknown
from encore.results.audit.audit import audit_scores
from encore.results.compare.compare import (
    WITHIN,
    Comparison,
    ComparisonJson,
    Factor,
    Verdict,
    compare,
    format_certainty,
)
from encore.results.compare.explain import Explanation, explain
from encore.results.compare.run_set import RunSet, build_run_set
from encore.results.compliance.compliance import score_and_check
from encore.results.compliance.convergence import Convergence, convergence_of, report_of
from encore.results.findings import ComplianceReport, Finding, ReportJson
from encore.results.format import count_of, percent, with_names
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
from encore.results.report.measurements import Measurement, all_tables, measurement_of, of_published, of_study, title_of
from encore.results.report.samples_view import (
    KEY,
    Detected,
    Game,
    board,
    drawing,
    game_of,
    generation_plots,
    generations_table,
    images_of,
    shown_in_report,
    texts_table,
    translations_table,
)
from encore.results.rules import data_size
from encore.results.scores.score import Score, existing, no_log
from encore.results.statistics import LEVEL, interval
from encore.results.table import Table, grouped

SMALL = "small run"
_DIFFERENCES = 25
_MOST_PLACES = 6
_TONES = {
    "reproduced": "good", "faster": "good", "slower": "bad", "not converged": "bad", "converges differently": "bad",
    "undecided": "open",
}  # fmt: skip


_Stat = tuple[str, str, str]  # Name, value and what there is to know of it


class SetJson(ComparisonJson):
    """A set in a report."""

    check: list[ReportJson]  # Of each of its logs
    convergence: Convergence | None  # Its comparison with the reference convergence points


class ReportedJson(TypedDict):
    """A report."""

    sets: list[SetJson]
    packages: list[ReportJson]  # What the package checker says of the submitters' trees


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    ruling: str  # The verdict's words, or that this is a run on a toy data set, which no submission is compared with
    tone: str
    comparison: Comparison
    reports: tuple[ComplianceReport, ...]  # The check of each log
    convergence: Convergence | None
    explanation: Explanation | None
    stats: tuple[_Stat, ...]
    compliance: str
    found: tuple[tuple[Finding, str], ...]  # What audit and rules found, each thing once, with its places
    runs: Table
    factors: Table
    differences: Table | None
    plots: tuple[Plot, ...]  # Quality over minutes, and enlarged at the target; losses and wins over generations
    bars: tuple[Plot, ...]  # The time of each run, and where it went
    sentences: tuple[str, ...]
    machine: tuple[Table, ...]  # Goodput, and the steps of the ranks of each run
    choices: Table | None  # What the runs took where their configuration leaves it open
    translations: Table | None  # A few of a run that translates
    texts: Table | None  # A few that a language model continued
    detections: tuple[Detected, ...]  # A few images of a run that detects objects
    generations: Table | None  # Those of a run that learns from games against itself
    game: Game | None  # One of its last generation

    @property
    def side(self) -> RunSet:
        return self.comparison.current

    @property
    def official(self) -> float | None:
        """The official score, where it is another number than the raw one."""
        return official_minutes(self.side)

    @property
    def against(self) -> str:
        return title_of(self.comparison.baseline) if self.comparison.baseline else ""

    @property
    def ratio(self) -> str:
        """The ratio of the times with its interval, as a small plot; empty where there is none."""
        factor = self.comparison.score
        return ratio_line(factor, self.comparison.within) if factor is not None else ""

    @property
    def checked(self) -> str:
        return f"{sum(each.passed for each in self.reports)} of {len(self.reports)}" if self.reports else ""

    @property
    def audited(self) -> str:
        counts = Counter(each.severity for each in self.side.findings)
        found = [count_of(counts[severity], severity) for severity in ("error", "warning") if counts[severity]]
        return ", ".join(found) or "passed"

    @property
    def converged_as(self) -> str:
        """What the comparison with the reference convergence points comes to; empty where there is none."""
        return self.convergence.outcome.value if self.convergence is not None else ""

    def as_json(self) -> SetJson:
        return {
            **self.comparison.as_json(),
            "check": [each.as_json() for each in self.reports],
            "convergence": self.convergence,
        }

    def factor_lines(self) -> list[str]:
        return [ratio_line(factor, self.comparison.within, named=False) for factor in self.comparison.factors]


def section(
    compared: Comparison,
    reports: Sequence[ComplianceReport] = (),
    convergence: Convergence | None = None,
    *,
    named: bool = False,
) -> Section:
    """Return what is shown of a set and of the check of its logs; ``named``: the user chose the submission."""
    small = not named and is_small(compared)
    if small:
        compared = replace(
            compared, baseline=None, score=None, per_length=None, lengths=None, scaling=None, confidence=None,
            score_interval=None, further_runs=None, caveats=(),
        )  # fmt: skip
    ours, theirs = compared.current, compared.baseline
    explanation = explain(ours, theirs) if theirs is not None else None
    steps = {log.path.name: rank_steps.windows_of(place) for log in ours.logs if (place := experiment_of(log.path))}
    heat = (steps_map(windows, file) for file, windows in steps.items())
    bars = (run_dots(ours, theirs, compared.within), phase_bars(ours, theirs), *heat)
    return Section(
        title=title_of(ours),
        ruling=SMALL if small else compared.verdict.value,
        tone=tone(compared.verdict.value, compared.lengths),
        comparison=compared,
        reports=tuple(reports),
        convergence=convergence,
        explanation=explanation,
        stats=tuple(_stats(compared)),
        compliance=_compliance(reports),
        found=tuple(_found(ours, [*reports, *([report_of(convergence)] if convergence else [])])),
        runs=Table(
            title="Runs",
            formats={"minutes": ".3f"},
            columns=("file", "minutes", ours.length_unit or "epochs", "quality", "seed", "remark"),
            rows=tuple(
                (
                    run.path.name,
                    run.minutes,
                    length.value if (length := length_of(run)) else None,
                    with_names(run.best_quality, ".5g"),
                    str(run.seeds[0]) if run.seeds else "",
                    run.explanation,
                )
                for run in ours.logs
            ),
        ),
        factors=_factors(compared),
        differences=Table(
            title="What differs, by weight",
            formats={"ratio": ".3g"},
            columns=("rank", "area", "what", "yours", "theirs", "ratio"),
            rows=tuple(
                (rank, each.area, each.name, each.ours, each.theirs, each.ratio)
                for rank, each in enumerate(explanation.differences[:_DIFFERENCES], 1)
            ),
        )
        if explanation and explanation.differences
        else None,
        plots=(*quality_plots(ours, theirs), *generation_plots(ours.folder)),
        bars=tuple(plot for plot in bars if plot is not None),
        sentences=(*format_certainty(compared), *_utilization(ours)),
        machine=tuple(_machine(ours, steps)),
        choices=Table(title="What the runs took", columns=("key", "choice"), rows=tuple(ours.choices.items()))
        if ours.choices
        else None,
        translations=translations_table(ours.folder),
        texts=texts_table(ours.folder),
        detections=tuple(shown_in_report(images_of(ours.folder))),
        generations=generations_table(ours.folder),
        game=game_of(ours.folder),
    )


# What each run made of its devices, as run.json has it.
def _utilization(ours: RunSet) -> Iterable[str]:
    found = ours.passport.get("utilization")
    for number, each in (found if isinstance(found, dict) else {}).items():
        yield f"Run {int(number) + 1}: {peaks.sentence(each)}."


def _machine(ours: RunSet, steps: Mapping[str, Mapping[int, Sequence[rank_steps.Window]]]) -> Iterable[Table]:
    if (table := goodput.table_of(ours.logs)) is not None:
        yield table
    for file, windows in steps.items():
        if len(windows) > 1:
            yield rank_steps.table_of(windows, file)


def is_small(compared: Comparison) -> bool:
    ours = compared.current
    if compared.verdict is not Verdict.NOT_COMPARABLE:
        return False
    size = data_size(ours.benchmark)
    full = size.train if size is not None else None
    few = bool(ours.passport and full and ours.train_samples and ours.train_samples < full / 2)
    return few or ours.is_cpu or ours.submission.get("kind") == "small"


def tone(ruling: str, lengths: Factor | None = None) -> str:
    """Return good, bad, open or plain: how a verdict looks. To need fewer epochs is nothing bad."""
    if ruling == Verdict.CONVERGES_DIFFERENTLY.value and lengths is not None and (lengths.ratio or 1.0) < 1:
        return "plain"
    return _TONES.get(ruling, "plain")


def _stats(compared: Comparison) -> Iterable[_Stat]:
    ours, theirs = compared.current, compared.baseline
    yield from _scores("Your", ours, compared.score_interval)
    if theirs is not None:
        yield from _scores("Published", theirs, interval(theirs.score) if theirs.score else None)
    if compared.score is not None and compared.score.ratio is not None:
        span = compared.score.interval
        detail = f"{percent(LEVEL)}: {span[0]:.3f} to {span[1]:.3f}" if span else "no interval is known"
        yield "Ratio of the times", f"{compared.score.ratio:.3f}", detail
    needed = f"{ours.required} required" if ours.required else ""
    yield "Reached the target", f"{ours.converged} of {ours.runs}", needed


# Yield the score; where MLCommons multiplies it by a factor, the raw one and the official one.
def _scores(whose: str, side: RunSet, span: tuple[float, float] | None) -> Iterable[_Stat]:
    if side.score is None or side.raw_minutes is None:
        return
    detail = f"{percent(LEVEL)}: {span[0]:.2f} to {span[1]:.2f}" if span else ""
    official = official_minutes(side)
    if official is None:
        name = "score" if side.score_is_official else "mean, not a score"
        yield f"{whose} {name}", f"{side.score.estimate:.3f} min", detail
        return
    of_official = side.score_kind == "official"
    yield f"{whose} raw score", f"{side.raw_minutes:.3f} min", "" if of_official else detail
    factor = f"raw score × {side.scaling_factor:.6g}"
    yield f"{whose} official score", f"{official:.3f} min", f"{factor}; {detail}" if of_official and detail else factor


def official_minutes(side: RunSet) -> float | None:
    """Return the official score where it is another number than the raw one."""
    return None if side.scaling_factor == 1.0 else side.official_minutes


def _compliance(reports: Sequence[ComplianceReport]) -> str:
    if not reports:
        return "no log was checked"
    passed, but = sum(each.passed for each in reports), sum(each.passed_but_for_data for each in reports)
    rulesets = ", ".join(sorted({each.ruleset or "no known round" for each in reports}))
    checkers = "; ".join(sorted({each.checker for each in reports}))
    text = f"{passed} of {len(reports)} logs pass the rules of {rulesets} ({checkers})"
    return text + (f"; {but} but for the size of the data set" if but > passed else "")


# Yield what the audit and the rules found, each thing once, errors first.
def _found(side: RunSet, reports: Sequence[ComplianceReport]) -> Iterable[tuple[Finding, str]]:
    every = [(each, each.path.name if each.path else "") for each in side.findings if each.severity != "note"]
    every += [(each, report.path.name) for report in reports for each in report.findings]
    alike = grouped(every, lambda each: (each[0].severity, each[0].rule, each[0].expected, each[0].found)).values()
    for found in sorted(alike, key=lambda found: found[0][0].label != "error"):
        places = [file if each.line is None else f"{file or 'line'}:{each.line}" for each, file in found]
        shown = [place for place in dict.fromkeys(places) if place]
        more = f" and {len(shown) - _MOST_PLACES} more" if len(shown) > _MOST_PLACES else ""
        yield found[0][0], ", ".join(shown[:_MOST_PLACES]) + more


def summary(sections: Sequence[Section]) -> Table:
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
                each.title,
                each.side.benchmark or "?",
                each.ruling,
                each.comparison.score.ratio if each.comparison.score else None,
                each.side.raw_minutes,
                official_minutes(each.side),
                f"{each.side.converged} of {each.side.runs}",
                each.checked,
                each.audited,
                each.converged_as,
                each.against if each.against != each.title else "",
            )
            for each in sections
        ),
    ).filled()


def _factors(compared: Comparison) -> Table:
    low, high = f"{percent(LEVEL)} from", f"{percent(LEVEL)} to"
    return Table(
        title="Factors",
        columns=("factor", "yours", "theirs", "ratio", low, high, "z"),
        formats={"ratio": ".3f", low: ".3f", high: ".3f", "z": ".1f"},
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
            for factor in compared.factors
        ),
    )


# The report's own; templates of other folders may take what is there, such as its styles, by ``part(FILE)``.
TEMPLATES = Path(__file__).parents[1] / "templates"


def page(folder: Path, template: str, **values: Any) -> str:
    """Return a page through a template of ``folder``, which sees ``values``; one of HTML escapes them."""
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
    # Imported templates see globals alone.
    environment.globals.update({**always, **values})
    return environment.get_template(template).render()


def write(contents: Mapping[str, str], folder: Path, what: str = "report") -> list[Path]:
    """Write a page's files into ``folder``, which is made; return them. EncoreError if the disk does not take them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            (folder / file).write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise EncoreError(
            f"the {what} cannot be written to {folder}: {error.strerror or error}",
            hint="give a folder that you may write to: -o DIR",
            exit_code=ExitCode.FAILED,
        ) from error
    return [folder / file for file in contents]


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
        return summary(self.sections)

    @property
    def tally(self) -> list[tuple[str, str, int]]:
        counted = Counter((each.ruling, each.tone) for each in self.sections)
        return [(ruling, tone, count) for (ruling, tone), count in counted.most_common()]

    def as_json(self) -> ReportedJson:
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
    read = [_read_sets(path, on_read) for path in paths]
    reports = {report.path: report for _, checked in read for report in checked}
    audits = audit_scores([score for scores, _ in read for score in scores])
    sides = [build_run_set(audit.score, audit.findings) for audit in audits]
    sections = tuple(
        section(
            compare(side, name, logs, within),
            [reports[run.path] for run in side.logs],
            convergence_of(audit.score),
            named=name is not None,
        )
        for side, audit in zip(sides, audits, strict=True)
    )
    measured = measurements(sides, study, published)
    return Report(
        sections=sections,
        tables=tuple(all_tables(measured, baseline)) if measured else (),
        figures=tuple(all_figures(measured, baseline)),
        studies=tuple(studied),
        packages=tuple(packages),
    )


# Every set at or below a path, and the check of each of their logs.
def _read_sets(path: Path, on_read: OnRead | None) -> tuple[list[Score], list[ComplianceReport]]:
    scores, reports = score_and_check(existing(path), on_read=on_read)
    if not scores:
        raise no_log(path)
    return scores, reports


def measurements(sides: Sequence[RunSet], study: str | None, published: str | None) -> list[Measurement]:
    """Return those of our own sets, of a study, and of the published results with this part in their name."""
    found = [measurement_of(side) for side in sides] + measurements_of_study(study)
    return found + measurements_of_published(published, {each.benchmark for each in found} or None)


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
    return write(files, folder)


def render(report: Report, template: str) -> str:
    return page(TEMPLATES, template, report=report, detections_key=KEY)
