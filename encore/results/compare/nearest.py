"""Find the submission that a run is to be compared with: the one named, its own, or the nearest.

from encore.results.compare.nearest import find_submission
cell, match = find_submission(side, "v0.7/NVIDIA/dgx1_ngc20.06_mxnet")
"""

import math
from dataclasses import dataclass
from enum import Enum

from encore.errors import EncoreError
from encore.names import unknown
from encore.results.compare.sides import Side, known_targets
from encore.results.logs.run_log import submitter_of
from encore.results.published.published import PublishedResult, load_published
from encore.results.published.systems import cells_at, family, framework_of
from encore.results.rules import canonical

_FAR = 10.0
_LISTED = 6


class How(str, Enum):
    GIVEN = "given"  # The user named it
    OWN_SYSTEM = "own_system"
    OWN_PLATFORM = "own_platform"
    STATED = "stated"
    NEAREST = "nearest"  # Nothing names it
    NONE = "none"

    @property
    def is_same_system(self) -> bool:
        return self in (How.OWN_SYSTEM, How.OWN_PLATFORM)


@dataclass(frozen=True)
class Match:
    """How a submission was found, or that there is none, and the same as a sentence."""

    how: How
    text: str


AS_GIVEN = Match(How.GIVEN, "as given")


def find_submission(side: Side, name: str | None = None) -> tuple[PublishedResult | None, Match]:
    """Return the published cell to compare with, and how it was found; None and why where there is none."""
    if name is not None:
        return _named(side, name), Match(How.GIVEN, "as named")
    if side.benchmark is None:
        return None, Match(How.NONE, "the logs do not say which benchmark they are of")
    ranked = rank(side)
    if not side.passport:
        named = cells_at(side.folder, side.round, side.benchmark) if side.folder is not None else []
        if named and named[0].score_minutes is not None:
            return named[0], Match(How.OWN_SYSTEM, "the system that the folder is named after")
        own = next((cell for cell in ranked if _is_platform(side, cell)), None)
        if own is not None:
            return own, Match(How.OWN_PLATFORM, "the submitter and the platform that the logs name")
    if side.submission.get("submitted") is True:
        # The submission that a run.json names, where the run is of its configuration.
        stated = (str(side.submission.get("of")).split("/")[-1], side.passport.get("round"), side.benchmark)
        for cell in load_published():
            if (cell.system, cell.round, cell.benchmark) == stated:
                return cell, Match(How.STATED, "the submission that the configuration was read from")
    if not ranked:
        return None, Match(How.NONE, f"no published result of {side.benchmark}")
    return ranked[0], Match(How.NEAREST, why(side, ranked[0]))


def rank(side: Side) -> list[PublishedResult]:
    """Return the published cells of the benchmark with a score, the nearest first.

    Never by the score: the submission with the nearest time would always be reproduced.
    """
    wanted = canonical(side.benchmark)
    cells = [cell for cell in load_published() if cell.benchmark == wanted and cell.score_minutes is not None]
    return sorted(cells, key=lambda cell: _distance(side, cell))


# Distance: round, division, submitter, hardware, framework and batch; the unknown in between.
def _distance(side: Side, cell: PublishedResult) -> tuple[float, ...]:
    ours, theirs = side.hardware, cell.hardware
    return (
        _differs(side.round, cell.round),
        float(bool(side.division and cell.division and side.division != cell.division)),
        _org_differs(side, cell),
        _differs(family(ours.accelerator), family(theirs.accelerator)),
        abs(math.log2(side.ranks / theirs.accelerators))
        if side.ranks and theirs.accelerators
        else _FAR / (2 if side.ranks else 1),
        _differs(
            framework_of(ours.framework, str(side.passport.get("implementation", ""))),
            framework_of(theirs.framework, cell.system),
        ),
        _differs(side.global_batch, cell.global_batch),
    )


def equally_near(side: Side, label: str) -> list[str]:
    """Return the names of the other submissions that are as near to the run as the one called ``label``."""
    ranked = rank(side)
    nearest = next((cell for cell in ranked if cell.name == label), None)
    if nearest is None:
        return []
    distance = _distance(side, nearest)
    return [cell.name for cell in ranked if cell.name != label and _distance(side, cell) == distance]


def listed(names: list[str]) -> str:
    left = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {left} more" if left > 0 else "")


# Log that names its submitter belongs to that submitter's systems first.
def _org_differs(side: Side, cell: PublishedResult) -> float:
    org = submitter_of(side.logs)
    return 0.0 if org is None or org.lower() == cell.submitter.lower() else 1.0


# Whether the logs name the cell's submitter, round and system: ``tpu-v4-16`` for ``tpu-v4-16-TF``.
def _is_platform(side: Side, cell: PublishedResult) -> bool:
    first = next((run for run in side.logs if run.org and run.platform), None)
    if first is None or cell.round != side.round or _org_differs(side, cell):
        return False
    system, platform = cell.system.lower(), (first.platform or "").lower()
    return system.startswith(platform) and not system[len(platform) : len(platform) + 1].isalnum()


def _differs(ours: object, theirs: object) -> float:
    if ours is None or theirs is None:
        return 0.5
    return 0.0 if ours == theirs else 1.0


def why(side: Side, cell: PublishedResult) -> str:
    """Say what run and submission have in common, and what is not known of the run."""
    ours, theirs = side.hardware, cell.hardware
    pairs = {
        "round": (side.round, cell.round),
        "accelerator": (family(ours.accelerator), family(theirs.accelerator)),
        "count": (side.ranks, theirs.accelerators),
        "batch": (side.global_batch, cell.global_batch),
    }
    same = [name for name, (mine, other) in pairs.items() if mine is not None and mine == other]
    unknown_here = [name for name, (mine, _) in pairs.items() if mine is None]
    text = f"the nearest: same {', '.join(['benchmark', *same])}"
    return f"{text}; not known: {', '.join(unknown_here)}" if unknown_here else text


# Cell called ``name`` of the run's benchmark; EncoreError offers the nearest name.
def _named(side: Side, name: str) -> PublishedResult:
    every = [cell for cell in load_published() if side.benchmark is None or cell.benchmark == side.benchmark]
    wanted = name.strip("/").lower()
    found = [cell for cell in every if cell.name.lower() == wanted]
    if not found and "/" not in wanted:
        found = [cell for cell in every if cell.system.lower() == wanted]
        found = [cell for cell in found if cell.round == side.round] or found
    if len({cell.name for cell in found}) == 1:
        return found[0]
    if found:
        expected = f"one of {listed([cell.name for cell in found])}"
        raise EncoreError(f"{name!r} is the name of several systems", expected=expected)
    elsewhere = [cell.benchmark or "?" for cell in load_published() if cell.name.lower() == wanted]
    if elsewhere:
        raise EncoreError(
            f"{name} has no result of {side.benchmark}",
            expected=f"a run of {', '.join(elsewhere)}",
            hint=f"see `encore published --benchmark {side.benchmark}`",
        )
    error = unknown("submission", name, {cell.name for cell in every})
    if not error.hint:
        error.hint = f"see `encore published{f' --benchmark {side.benchmark}' if side.benchmark else ''}`"
    raise error


def same_target(side: Side, other: Side) -> bool:
    if side.round is None or side.benchmark is None or not side.targets:
        return side.round == other.round
    return known_targets(other.round, side.benchmark, other.global_batch) == side.targets
