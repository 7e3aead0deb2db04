"""What the report says of one set of runs: the verdict, its figures, what was found, plots and tables.

from encore.results.report.sections import section
print(section(1, compare(side)).ruling)
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from encore.results.compare.compare import Comparison, Factor, Verdict, certainty
from encore.results.compare.explain import Explanation, explain
from encore.results.compare.sides import Side
from encore.results.compliance.convergence import Convergence, report_of
from encore.results.findings import ComplianceReport, Finding
from encore.results.logs.timing import length_of
from encore.results.report.detections import Detected, images_of, shown_in_report
from encore.results.report.generations import Game, game_of, generation_plots, generations_table
from encore.results.report.measurements import title_of
from encore.results.report.set_figures import Plot, phase_bars, quality_plots, ratio_line, run_dots
from encore.results.report.translations import translations_table
from encore.results.rules import data_size
from encore.results.statistics import LEVEL, interval
from encore.results.table import Table
from encore.results.words import count_of, percent, with_names

SMALL = "small run"
_DIFFERENCES = 25
_MOST_PLACES = 6
_TONES = {
    "reproduced": "good", "faster": "good", "slower": "bad", "not converged": "bad", "converges differently": "bad",
    "undecided": "open",
}  # fmt: skip


@dataclass(frozen=True)
class Stat:
    """One figure of a set, large, with what it needs to be read."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One finding, with every place where it occurs."""

    finding: Finding
    places: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One set of runs in the report."""

    key: str
    title: str
    ruling: str  # The verdict's words, or that this is a run on a toy data set, which no submission is compared with
    tone: str
    comparison: Comparison
    reports: tuple[ComplianceReport, ...]  # The check of each log
    convergence: Convergence | None
    explanation: Explanation | None
    stats: tuple[Stat, ...]
    compliance: str
    found: tuple[Found, ...]
    runs: Table
    factors: Table
    differences: Table | None
    plots: tuple[Plot, ...]  # Quality over minutes, and enlarged at the target; losses and wins over generations
    bars: tuple[Plot, ...]  # The time of each run, and where it went
    sentences: tuple[str, ...]
    choices: Table | None  # What the runs took where their configuration leaves it open
    translations: Table | None  # A few of a run that translates
    detections: tuple[Detected, ...]  # A few images of a run that detects objects
    generations: Table | None  # Of a run that learns from games against itself
    game: Game | None  # One of its last generation

    @property
    def side(self) -> Side:
        """The set of runs."""
        return self.comparison.ours

    @property
    def official(self) -> float | None:
        """The official score, where it is another number than the raw one."""
        return official_minutes(self.side)

    @property
    def against(self) -> str:
        """The whole name of what it was compared with."""
        return title_of(self.comparison.theirs) if self.comparison.theirs else ""

    @property
    def ratio(self) -> str:
        """The ratio of the times with its interval, as a small plot; empty where there is none."""
        factor = self.comparison.score
        return ratio_line(factor, self.comparison.within) if factor is not None else ""

    @property
    def checked(self) -> str:
        """How many logs pass the rules of their round."""
        return f"{sum(each.passed for each in self.reports)} of {len(self.reports)}" if self.reports else ""

    @property
    def audited(self) -> str:
        """How many errors and warnings the audit has."""
        counts = Counter(each.severity for each in self.side.findings)
        found = [count_of(counts[severity], severity) for severity in ("error", "warning") if counts[severity]]
        return ", ".join(found) or "passed"

    @property
    def converged_as(self) -> str:
        """What the comparison with the reference convergence points comes to; empty where there is none."""
        return self.convergence.outcome.value if self.convergence is not None else ""

    def as_json(self) -> dict[str, Any]:
        """Return everything about the set as plain data; its audit is in ``findings``."""
        return {
            **self.comparison.as_json(),
            "check": [each.as_json() for each in self.reports],
            "convergence": self.convergence.as_json() if self.convergence is not None else None,
        }

    def factor_lines(self) -> list[str]:
        """Return the small plot of each factor."""
        return [ratio_line(factor, self.comparison.within, named=False) for factor in self.comparison.factors]


def section(
    number: int,
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
            compared, theirs=None, score=None, per_length=None, lengths=None, scaling=None, confidence=None,
            score_interval=None, further_runs=None, caveats=(),
        )  # fmt: skip
    ours, theirs = compared.ours, compared.theirs
    explanation = explain(ours, theirs) if theirs is not None else None
    bars = (run_dots(ours, theirs, compared.within), phase_bars(ours, theirs))
    return Section(
        key=f"run-{number}",
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
        runs=_runs(ours),
        factors=_factors(compared),
        differences=_differences(explanation) if explanation and explanation.differences else None,
        plots=(*quality_plots(ours, theirs), *generation_plots(ours.folder)),
        bars=tuple(plot for plot in bars if plot is not None),
        sentences=tuple(certainty(compared)),
        choices=_choices(ours) if ours.choices else None,
        translations=translations_table(ours.folder),
        detections=tuple(shown_in_report(images_of(ours.folder))),
        generations=generations_table(ours.folder),
        game=game_of(ours.folder),
    )


def is_small(compared: Comparison) -> bool:
    """Return whether this is a run for trying the code: on CPUs, or on a part of the data set."""
    ours = compared.ours
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


def _stats(compared: Comparison) -> Iterable[Stat]:
    ours, theirs = compared.ours, compared.theirs
    yield from _scores("Your", ours, compared.score_interval)
    if theirs is not None:
        yield from _scores("Published", theirs, interval(theirs.score) if theirs.score else None)
    if compared.score is not None and compared.score.ratio is not None:
        span = compared.score.interval
        detail = f"{percent(LEVEL)}: {span[0]:.3f} to {span[1]:.3f}" if span else "no interval is known"
        yield Stat("Ratio of the times", f"{compared.score.ratio:.3f}", detail)
    needed = f"{ours.required} required" if ours.required else ""
    yield Stat("Reached the target", f"{ours.converged} of {ours.runs}", needed)


# Yield the score; where MLCommons multiplies it by a factor, the raw one and the official one.
def _scores(whose: str, side: Side, span: tuple[float, float] | None) -> Iterable[Stat]:
    if side.score is None or side.raw_minutes is None:
        return
    detail = f"{percent(LEVEL)}: {span[0]:.2f} to {span[1]:.2f}" if span else ""
    official = official_minutes(side)
    if official is None:
        name = "score" if side.score_is_official else "mean, not a score"
        yield Stat(f"{whose} {name}", f"{side.score.estimate:.3f} min", detail)
        return
    of_official = side.score_kind == "official"
    yield Stat(f"{whose} raw score", f"{side.raw_minutes:.3f} min", "" if of_official else detail)
    factor = f"raw score × {side.scaling_factor:.6g}"
    yield Stat(
        f"{whose} official score", f"{official:.3f} min", "; ".join([factor, *([detail] * of_official)]).strip("; ")
    )


def official_minutes(side: Side) -> float | None:
    """Return the official score where it is another number than the raw one."""
    if not side.score_is_official or side.raw_minutes is None or side.scaling_factor in (None, 1.0):
        return None
    return side.raw_minutes * (side.scaling_factor or 1.0)


def _compliance(reports: Sequence[ComplianceReport]) -> str:
    if not reports:
        return "no log was checked"
    passed, but = sum(each.passed for each in reports), sum(each.passed_but_for_data for each in reports)
    rulesets = ", ".join(sorted({each.ruleset or "no known round" for each in reports}))
    checkers = "; ".join(sorted({each.checker for each in reports}))
    text = f"{passed} of {len(reports)} logs pass the rules of {rulesets} ({checkers})"
    return text + (f"; {but} but for the size of the data set" if but > passed else "")


# Yield what the audit and the rules found, each thing once, errors first.
def _found(side: Side, reports: Sequence[ComplianceReport]) -> Iterable[Found]:
    grouped: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    every = [(each, each.path.name if each.path else "") for each in side.findings if each.severity != "note"]
    every += [(each, report.path.name) for report in reports for each in report.findings]
    for finding, file in every:
        key = (finding.severity, finding.rule, finding.expected, finding.found)
        place = file if finding.line is None else f"{file or 'line'}:{finding.line}"
        grouped.setdefault(key, (finding, []))[1].append(place)
    for finding, places in sorted(grouped.values(), key=lambda pair: pair[0].severity != "error"):
        shown = [place for place in dict.fromkeys(places) if place]
        more = f" and {len(shown) - _MOST_PLACES} more" if len(shown) > _MOST_PLACES else ""
        yield Found(finding=finding, places=", ".join(shown[:_MOST_PLACES]) + more)


def summary(sections: Sequence[Section]) -> Table:
    """Return one row per set."""
    return Table(
        title="Summary",
        columns=(
            "benchmark",
            "verdict",
            "ratio",
            "minutes",
            "official",
            "converged",
            "check",
            "audit",
            "convergence",
            "run",
            "compared with",
        ),
        formats={"minutes": ".3f", "official": ".3f", "ratio": ".3f"},
        rows=tuple(
            (
                each.side.benchmark or "?",
                each.ruling,
                each.comparison.score.ratio if each.comparison.score else None,
                each.side.raw_minutes,
                official_minutes(each.side),
                f"{each.side.converged} of {each.side.runs}",
                each.checked,
                each.audited,
                each.converged_as,
                each.title,
                each.against if each.against != each.title else "",
            )
            for each in sections
        ),
    ).filled()


def _runs(side: Side) -> Table:
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
                run.explanation,
            )
            for run in side.logs
        ),
    )


def _choices(side: Side) -> Table:
    return Table(title="What the runs took", columns=("key", "choice"), rows=tuple(side.choices.items()))


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
