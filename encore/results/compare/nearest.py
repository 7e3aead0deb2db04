"""Select the submission to compare a run with: by name, by system, or the nearest one.

from encore.results.compare.nearest import find_submission
cell, match = find_submission(run_set, "v0.7/NVIDIA/dgx1_ngc20.06_mxnet")
"""

import math
from dataclasses import dataclass
from enum import Enum

from encore.errors import EncoreError, unknown_name
from encore.results.compare.run_set import RunSet, targets_for
from encore.results.format import join_names
from encore.results.logs.run_log import submitter_of
from encore.results.published.published import PublishedResult, load_published
from encore.results.published.systems import cells_at, family, framework_of
from encore.results.rules import canonical

_UNKNOWN_DISTANCE = 10.0


class How(str, Enum):
    GIVEN = "given"  # The user named it
    OWN_SYSTEM = "own_system"
    OWN_PLATFORM = "own_platform"
    STATED = "stated"
    NEAREST = "nearest"  # Selected by similarity only
    NONE = "none"

    @property
    def is_same_system(self) -> bool:
        return self in (How.OWN_SYSTEM, How.OWN_PLATFORM)


@dataclass(frozen=True)
class Match:
    """How a submission was selected, as a keyword and as a sentence."""

    how: How
    text: str


AS_GIVEN = Match(How.GIVEN, "as given")


def find_submission(run_set: RunSet, name: str | None = None) -> tuple[PublishedResult | None, Match]:
    """Return the published cell to compare with, and how it was selected; None and the reason if no cell fits."""
    if name is not None:
        return _find_by_name(run_set, name), Match(How.GIVEN, "as named")
    if run_set.benchmark is None:
        return None, Match(How.NONE, "the logs do not name a benchmark")
    ranked = rank(run_set)
    if not run_set.passport:
        cells = cells_at(run_set.folder, run_set.round, run_set.benchmark) if run_set.folder is not None else []
        if cells and cells[0].score_minutes is not None:
            return cells[0], Match(How.OWN_SYSTEM, "the system in the folder's name")
        platform_cell = next((cell for cell in ranked if _is_platform(run_set, cell)), None)
        if platform_cell is not None:
            return platform_cell, Match(How.OWN_PLATFORM, "the submitter and the platform that the logs name")
    if run_set.submission.get("submitted") is True:
        # Submission named in run.json, if the run uses its configuration
        stated = (str(run_set.submission.get("of")).split("/")[-1], run_set.passport.get("round"), run_set.benchmark)
        for cell in load_published():
            if (cell.system, cell.round, cell.benchmark) == stated:
                return cell, Match(How.STATED, "the submission that the configuration was read from")
    if not ranked:
        return None, Match(How.NONE, f"no published result of {run_set.benchmark}")
    return ranked[0], Match(How.NEAREST, explain_match(run_set, ranked[0]))


def rank(run_set: RunSet) -> list[PublishedResult]:
    """Return the benchmark's published cells that have a score, nearest first.

    The score must not affect the order: the submission with the nearest time would always be reproduced.
    """
    benchmark = canonical(run_set.benchmark)
    cells = [cell for cell in load_published() if cell.benchmark == benchmark and cell.score_minutes is not None]
    return sorted(cells, key=lambda cell: _distance(run_set, cell))


# Distance: round, division, submitter, hardware, framework and batch; the unknown in between.
def _distance(run_set: RunSet, cell: PublishedResult) -> tuple[float, ...]:
    current, baseline = run_set.hardware, cell.hardware
    return (
        _differs(run_set.round, cell.round),
        float(bool(run_set.division and cell.division and run_set.division != cell.division)),
        _org_differs(run_set, cell),
        _differs(family(current.accelerator), family(baseline.accelerator)),
        abs(math.log2(run_set.ranks / baseline.accelerators))
        if run_set.ranks and baseline.accelerators
        else _UNKNOWN_DISTANCE / (2 if run_set.ranks else 1),
        _differs(
            framework_of(current.framework, str(run_set.passport.get("implementation", ""))),
            framework_of(baseline.framework, cell.system),
        ),
        _differs(run_set.global_batch, cell.global_batch),
    )


def equally_near(run_set: RunSet, label: str) -> list[str]:
    """Return the names of the other submissions at the same distance from the run as ``label``."""
    ranked = rank(run_set)
    distances = {cell.name: _distance(run_set, cell) for cell in ranked}
    return [name for name, distance in distances.items() if name != label and distance == distances.get(label)]


# If a log names its submitter, systems of that submitter come first.
def _org_differs(run_set: RunSet, cell: PublishedResult) -> float:
    org = submitter_of(run_set.logs)
    return 0.0 if org is None or org.lower() == cell.submitter.lower() else 1.0


# Whether the logs name the cell's submitter, round and system: ``tpu-v4-16`` for ``tpu-v4-16-TF``.
def _is_platform(run_set: RunSet, cell: PublishedResult) -> bool:
    first = next((run for run in run_set.logs if run.org and run.platform), None)
    if first is None or cell.round != run_set.round or _org_differs(run_set, cell):
        return False
    system, platform = cell.system.lower(), (first.platform or "").lower()
    return system.startswith(platform) and not system[len(platform) : len(platform) + 1].isalnum()


def _differs(current: object, baseline: object) -> float:
    if current is None or baseline is None:
        return 0.5
    return 0.0 if current == baseline else 1.0


def explain_match(run_set: RunSet, cell: PublishedResult) -> str:
    """Describe the common properties of run and submission, and the unknown properties of the run."""
    current, baseline = run_set.hardware, cell.hardware
    pairs = {
        "round": (run_set.round, cell.round),
        "accelerator": (family(current.accelerator), family(baseline.accelerator)),
        "count": (run_set.ranks, baseline.accelerators),
        "batch": (run_set.global_batch, cell.global_batch),
    }
    same = [name for name, (value, baseline_value) in pairs.items() if value is not None and value == baseline_value]
    unknown_here = [name for name, (value, _) in pairs.items() if value is None]
    text = f"the nearest: same {', '.join(['benchmark', *same])}"
    return f"{text}; not known: {', '.join(unknown_here)}" if unknown_here else text


# Cell called ``name`` of the run's benchmark; EncoreError offers the nearest name.
def _find_by_name(run_set: RunSet, name: str) -> PublishedResult:
    cells = [cell for cell in load_published() if run_set.benchmark is None or cell.benchmark == run_set.benchmark]
    query = name.strip("/").lower()
    matches = [cell for cell in cells if cell.name.lower() == query]
    if not matches and "/" not in query:
        matches = [cell for cell in cells if cell.system.lower() == query]
        matches = [cell for cell in matches if cell.round == run_set.round] or matches
    if len({cell.name for cell in matches}) == 1:
        return matches[0]
    if matches:
        expected = f"one of {join_names([cell.name for cell in matches])}"
        raise EncoreError(f"{name!r} is the name of several systems", expected=expected)
    elsewhere = [cell.benchmark or "?" for cell in load_published() if cell.name.lower() == query]
    if elsewhere:
        raise EncoreError(
            f"{name} has no result of {run_set.benchmark}",
            expected=f"a run of {', '.join(elsewhere)}",
            hint=f"see `encore published --benchmark {run_set.benchmark}`",
        )
    error = unknown_name("submission", name, {cell.name for cell in cells})
    if not error.hint:
        error.hint = f"see `encore published{f' --benchmark {run_set.benchmark}' if run_set.benchmark else ''}`"
    raise error


def same_target(run_set: RunSet, other: RunSet) -> bool:
    if run_set.round is None or run_set.benchmark is None or not run_set.targets:
        return run_set.round == other.round
    return targets_for(other.round, run_set.benchmark, other.global_batch) == run_set.targets
