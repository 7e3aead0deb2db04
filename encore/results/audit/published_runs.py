"""Rules on runs that are public ones: every log looked up in the digests of the public sets."""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encore.results.audit.oddities import Oddity
from encore.results.published import lines_of
from encore.results.rules import ROUNDS
from encore.results.run_log import RunLog
from encore.results.score import Score
from encore.results.timing import curve_of
from encore.results.words import count_of

_LEAST_VALUES = 4
"""Different qualities of a curve: fewer may agree by chance."""
_LEAST_RUNS = 3
"""Runs of a set whose times have to be those of a public set, but for one factor."""
_DIGITS = 6
_ROUNDED_S = 0.0016
"""Two times, each rounded to a millisecond."""
_LARGEST_FACTOR = 5.0
_SAME_FACTOR = 2e-4
"""Ratios of times that differ by less are one factor: digests keep six digits of an evaluation's time."""
_CHANCE = 1e-6
"""Probability that the times of another set agree, above which nothing is said."""

_Key = tuple[str | None, tuple[tuple[str, tuple[float, ...]], ...]]


@dataclass(frozen=True)
class _PublicSet:
    """One public set: its name, such as ``v0.7/NVIDIA/dgxa100_ngc20.06_mxnet``, and the minutes of its runs."""

    name: str
    benchmark: str | None
    minutes: tuple[float, ...]


@dataclass(frozen=True)
class _PublicRun:
    """The curve of one run of a public set: minutes of its evaluations since run_start."""

    name: str
    minutes: tuple[float, ...]


@functools.cache
def _public() -> tuple[dict[_Key, list[_PublicRun]], dict[str | None, list[_PublicSet]]]:
    """Return the curves and the sets of every digest, by what is looked up."""
    curves: dict[_Key, list[_PublicRun]] = defaultdict(list)
    sets: dict[str | None, list[_PublicSet]] = defaultdict(list)
    for round_ in ROUNDS:
        for line in lines_of(round_)[1:]:
            entry = json.loads(line)
            name, benchmark = entry["name"], entry["benchmark"]
            sets[benchmark].append(_PublicSet(name, benchmark, tuple(each for each in entry["minutes"] if each)))
            for minutes, values in entry["curves"]:
                key = _key(benchmark, values)
                if key is not None:
                    curves[key].append(_PublicRun(name, tuple(minutes)))
    return curves, sets


def _key(benchmark: str | None, values: dict[str, Sequence[float]]) -> _Key | None:
    """Return what two curves of the same run share; None where too few qualities could agree by chance."""
    rounded = tuple(
        (name, tuple(float(f"{each:.{_DIGITS}g}") for each in of_name)) for name, of_name in sorted(values.items())
    )
    enough = any(len(set(of_name)) >= _LEAST_VALUES for _, of_name in rounded)
    return (benchmark, rounded) if enough else None


def published_run(score: Score) -> Iterator[Oddity]:
    """Yield the public set that all runs are of, unless its folder says so itself."""
    for name, (ratio, runs) in _sets_of(score).items():
        if abs(ratio - 1) < _SAME_FACTOR and not _names(score, name):
            yield Oddity(f"{count_of(runs, 'run')} of {name}")


def altered_published_run(score: Score) -> Iterator[Oddity]:
    """Yield the public set whose runs these are with all times multiplied, and single runs of that kind."""
    scaled = {name: found for name, found in _sets_of(score).items() if abs(found[0] - 1) >= _SAME_FACTOR}
    for name, (ratio, runs) in scaled.items():
        yield Oddity(f"{count_of(runs, 'run')} of {name}, all times multiplied by {ratio:.4f}")
    if scaled:
        return
    for run in score.runs:
        for public, mine in _curves_like(score, run):
            ratios = [own / theirs for own, theirs in zip(mine, public.minutes, strict=True) if theirs > 0]
            if not ratios or _apart(ratios) > _SAME_FACTOR or abs(ratios[-1] - 1) < _SAME_FACTOR:
                continue
            yield Oddity(f"a run of {public.name}, all times multiplied by {ratios[-1]:.4f}", run.path)
            break


def published_curve(score: Score) -> Iterator[Oddity]:
    """Yield a log with the evaluations of a public run, digit by digit, at other times."""
    for run in score.runs:
        others = [
            public
            for public, mine in _curves_like(score, run)
            if _apart([own / theirs for own, theirs in zip(mine, public.minutes, strict=True) if theirs > 0])
            > _SAME_FACTOR
        ]
        same = [public for public, _ in _curves_like(score, run) if public not in others]
        if others and not same:
            line = run.quality[0].line
            yield Oddity(f"all {len(others[0].minutes)} evaluations as in a run of {others[0].name}", run.path, line)


def _apart(ratios: Sequence[float]) -> float:
    """Return how far the largest ratio is from the smallest."""
    return max(ratios) / min(ratios) - 1 if ratios and min(ratios) > 0 else 0.0


def _curves_like(score: Score, run: RunLog) -> Iterator[tuple[_PublicRun, tuple[float, ...]]]:
    """Yield each public run with the qualities of this one, and the minutes of these evaluations here."""
    curve = curve_of(run)
    key = _key(score.benchmark, dict(curve.values))
    for public in _public()[0].get(key, []) if key is not None else []:
        if len(public.minutes) == len(curve.minutes):
            yield public, curve.minutes


def _names(score: Score, name: str) -> bool:
    """Whether the folder is the public set's own place, in a checkout of a results repository."""
    return set(name.split("/")[1:]) <= set(score.folder.absolute().parts)


def _sets_of(score: Score) -> dict[str, tuple[float, int]]:
    """Return the public sets whose run times these are but for one factor, with it and the number of such runs."""
    mine = [run.elapsed_minutes for run in score.runs if run.elapsed_minutes]
    if len(mine) < _LEAST_RUNS:
        return {}
    found = {}
    for public in _public()[1].get(score.benchmark, []):
        ratios: Counter[float] = Counter()
        for theirs in public.minutes:
            ratio = mine[0] / theirs
            if 1 / _LARGEST_FACTOR < ratio < _LARGEST_FACTOR:
                matched = _matched(mine, public.minutes, ratio)
                if matched >= max(_LEAST_RUNS, len(mine) - 1) and _by_chance(public.minutes, ratio, matched) < _CHANCE:
                    ratios[ratio] = matched
        if ratios:
            (ratio, matched), *_ = ratios.most_common(1)
            found[public.name] = (ratio, matched)
    return found


def _near(ratio: float) -> float:
    """Return the minutes by which two roundings move a time that is multiplied."""
    return _ROUNDED_S / 60 * (1 + ratio)


def _by_chance(theirs: Sequence[float], ratio: float, matched: int) -> float:
    """Return the probability that so many times, spread as these are, agree by themselves once the first one does."""
    span = (max(theirs) - min(theirs)) * ratio
    one = min(1.0, 2 * _near(ratio) * len(theirs) / span) if span > 0 else 1.0
    return one ** (matched - 1)


def _matched(mine: Sequence[float], theirs: Sequence[float], ratio: float) -> int:
    """Return how many of our times are one of theirs multiplied by ``ratio``."""
    near = _near(ratio)
    left = sorted(theirs)
    count = 0
    for each in mine:
        hit = next((other for other in left if abs(other * ratio - each) <= near), None)
        if hit is not None:
            left.remove(hit)
            count += 1
    return count
