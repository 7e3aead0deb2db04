"""Rules on copies of public runs: logs are looked up in the digests of the public sets."""

import bisect
import functools
import json
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encore.results.audit.anomalies import OFF_THE_CLOCK, Anomaly
from encore.results.format import count_of
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import ROUNDED_S, Length, curve_of, in_unit
from encore.results.published.published import DIGEST_DIGITS, System, lines_of, system_of
from encore.results.published.systems import model_of
from encore.results.rules import ROUNDS, benchmark_of, later_name
from encore.results.scores.score import Score

_LEAST_VALUES = 4  # Minimum of distinct qualities in a curve: fewer may agree by chance
_LEAST_RUNS = 3  # Minimum of runs whose times match a public set, up to a factor
_LARGEST_FACTOR = 5.0
# Ratios with smaller differences are equal: digests store evaluation times with six digits.
_SAME_FACTOR = 2e-4
_CHANCE = 1e-6  # Maximum probability of a chance match

_Values = tuple[tuple[str, tuple[float, ...]], ...]  # Qualities per evaluation by target name, six digits
_Key = tuple[str | None, _Values]  # Benchmark and first qualities of a curve


# A public set: name, such as ``v0.7/NVIDIA/dgxa100_ngc20.06_mxnet``, platform and sorted minutes of its runs
@dataclass(frozen=True)
class _PublicSet:
    name: str
    platform: str | None
    minutes: tuple[float, ...]


# Curve of a public run: minutes of the evaluations since run_start
@dataclass(frozen=True)
class _PublicRun:
    name: str
    minutes: tuple[float, ...]
    values: _Values


@dataclass(frozen=True)
class PublicSpeed:
    """Public training speed: median epochs or samples per second and accelerator."""

    name: str
    accelerators: int
    rate: float
    per_node: int = 0  # Accelerators


_Speeds = dict[tuple[str, str], list[PublicSpeed]]  # By benchmark and accelerator model


# Indices of the curves, sets and speeds in all digests
@functools.cache
def _load_public() -> tuple[dict[_Key, list[_PublicRun]], dict[str | None, list[_PublicSet]], _Speeds]:
    curves: dict[_Key, list[_PublicRun]] = defaultdict(list)
    sets: dict[str | None, list[_PublicSet]] = defaultdict(list)
    speeds: _Speeds = defaultdict(list)
    for round_ in ROUNDS:
        for line in lines_of(round_)[1:]:
            entry = json.loads(line)
            name, benchmark = entry["name"], entry["benchmark"]
            sets[benchmark].append(_PublicSet(name, entry["platform"], tuple(sorted(filter(None, entry["minutes"])))))
            for minutes, values in entry["curves"]:
                rounded = _round_values(values)
                key = _key(benchmark, rounded)
                if key is not None:
                    curves[key].append(_PublicRun(name, tuple(minutes), rounded))
            _add_speed(speeds, round_, entry)
    return curves, sets, speeds


def _add_speed(speeds: _Speeds, round_: str, entry: Mapping[str, Any]) -> None:
    _, submitter, system_name = entry["name"].split("/", 2)
    system = system_of(round_, submitter, system_name)
    curves = [minutes for minutes, _ in entry["curves"]]
    times = [60 * minutes[-1] if minutes else None for minutes in curves]
    lengths = [Length(length, entry["unit"]) if length and entry["unit"] else None for length in entry["lengths"]]
    task = (entry["benchmark"], round_, entry["train_samples"], entry["global_batch"])
    scored = [pair for *pair, end in zip(lengths, times, entry["minutes"], strict=True) if end]
    if speed := speed_of(system, *task, scored):
        key, accelerators, rate = speed
        per_node = accelerators // (system.nodes or 1)
        speeds[key].append(PublicSpeed(entry["name"], accelerators, rate, per_node))


def speed_of(
    system: System,
    benchmark: str | None,
    round_: str | None,
    train_samples: float | None,
    batch: float | None,
    runs: Iterable[Sequence[Any]],
) -> tuple[tuple[str, str], int, float] | None:
    """Return benchmark and accelerator model, number of accelerators, and median rate; None if a value is missing.

    ``runs``: training length, and seconds to the last evaluation.
    """
    # RetinaNet was called ssd before v5.0
    name, model = later_name(benchmark, round_), model_of(system.accelerator)
    rules = benchmark_of(name)
    is_known = name and name not in OFF_THE_CLOCK and system.nodes and system.accelerators
    if not is_known or rules is None or name is None or model is None or system.accelerators is None:
        return None
    rates = [
        value / seconds / system.accelerators
        for length, seconds in runs
        if length and seconds and (value := in_unit(length, rules.points_in, train_samples, batch))
    ]
    return ((name, model), system.accelerators, statistics.median(rates)) if rates else None


def speed_range(key: tuple[str, str], accelerators: int) -> tuple[PublicSpeed | None, PublicSpeed | None]:
    """Return the slowest and the fastest comparable public set with this benchmark and accelerator model.

    Scaling costs speed per accelerator. The slowest set has 0.5 to 2 times the accelerators; the fastest at least 0.5
    times, or the largest number published.
    """
    speeds = _load_public()[2].get(key, [])
    largest = max((speed.accelerators for speed in speeds), default=0)
    large = [speed for speed in speeds if speed.accelerators >= min(accelerators / 2, largest)]
    similar = [speed for speed in speeds if accelerators / 2 <= speed.accelerators <= accelerators * 2]
    rate = operator.attrgetter("rate")
    return min(similar, key=rate, default=None), max(large, key=rate, default=None)


def largest_node(model: str | None) -> int | None:
    """Return the largest number of accelerators per node in the public sets with this model; None if unknown."""
    if model is None or "TPU" in model:  # A pod may be described as one node
        return None
    groups = (speeds for (_, speeds_model), speeds in _load_public()[2].items() if speeds_model == model)
    return max((speed.per_node for group in groups for speed in group), default=None)


def _round_values(values: Mapping[str, Sequence[float]]) -> _Values:
    return tuple(
        (name, tuple(float(f"{value:.{DIGEST_DIGITS}g}") for value in qualities))
        for name, qualities in sorted(values.items())
    )


# Lookup key for curves; None if the qualities could agree by chance
def _key(benchmark: str | None, values: _Values) -> _Key | None:
    first = tuple((name, qualities[:_LEAST_VALUES]) for name, qualities in values)
    enough = any(len(set(qualities)) == _LEAST_VALUES for _, qualities in first)
    return (benchmark, first) if enough else None


def published_run(score: Score) -> Iterator[Anomaly]:
    for public, ratio, runs in _matching_sets(score):
        # Not in the public set's folder in a results repository checkout.
        if abs(ratio - 1) < _SAME_FACTOR and not set(public.name.split("/")[1:]) <= set(score.folder.absolute().parts):
            yield Anomaly(f"{count_of(runs, 'run')} of {public.name}")


def altered_published_run(score: Score) -> Iterator[Anomaly]:
    matches = _matching_sets(score)
    same = [public for public, ratio, _ in matches if abs(ratio - 1) < _SAME_FACTOR]
    platform = Counter(run.platform for run in score.runs if run.platform).most_common(1)
    if platform and same and platform[0][0] not in {public.platform for public in same}:
        yield Anomaly(f"the runs of {same[0].name} on {same[0].platform}, here on {platform[0][0]}")
    scaled = [match for match in matches if abs(match[1] - 1) >= _SAME_FACTOR]
    for public_set, ratio, runs in scaled:
        yield Anomaly(f"{count_of(runs, 'run')} of {public_set.name}, all times multiplied by {ratio:.4f}")
    if scaled:
        return
    for run in score.runs:
        for public, ratios in _matching_curves(score, run):
            if ratios and _ratio_spread(ratios) <= _SAME_FACTOR <= abs(ratios[-1] - 1):
                yield Anomaly(f"a run of {public.name}, all times multiplied by {ratios[-1]:.4f}", run.path)
                break


def published_curve(score: Score) -> Iterator[Anomaly]:
    for run in score.runs:
        matches = [(public, ratios) for public, ratios in _matching_curves(score, run) if ratios]
        scaled = [public for public, ratios in matches if _ratio_spread(ratios) <= _SAME_FACTOR]
        evaluations = len(curve_of(run).minutes) if scaled else 0
        complete = [public for public in scaled if len(public.minutes) == evaluations]
        if matches and not complete:
            line = run.quality[0].line
            name = (scaled or [public for public, _ in matches])[0].name
            yield Anomaly(f"the evaluations of a run of {name}, except for the times or the end", run.path, line)


# Relative distance between the largest and the smallest ratio
def _ratio_spread(ratios: Sequence[float]) -> float:
    return max(ratios) / min(ratios) - 1 if ratios and min(ratios) > 0 else 0.0


# Public runs with equal qualities, except for the last one, with the ratios of the times
def _matching_curves(score: Score, run: RunLog) -> Iterator[tuple[_PublicRun, list[float]]]:
    curve = curve_of(run)
    values = _round_values(curve.values)
    key = _key(score.benchmark, values)
    for public in _load_public()[0].get(key, []) if key is not None else []:
        pairs = zip(values, public.values, strict=True)
        if all(
            log_values[:-1] == public_values[: len(log_values) - 1] for (_, log_values), (_, public_values) in pairs
        ):
            times = zip(curve.minutes, public.minutes, strict=False)
            yield public, [minutes / public_minutes for minutes, public_minutes in times if public_minutes > 0]


# Public sets whose times equal these up to a factor, with the factor and the number of matching runs
def _matching_sets(score: Score) -> list[tuple[_PublicSet, float, int]]:
    minutes = [run.elapsed_minutes for run in score.runs if run.elapsed_minutes]
    if len(minutes) < _LEAST_RUNS:
        return []
    matches = []
    for public in _load_public()[1].get(score.benchmark, []):
        ratios: Counter[float] = Counter()
        for public_minutes in public.minutes:
            ratio = minutes[0] / public_minutes
            if 1 / _LARGEST_FACTOR < ratio < _LARGEST_FACTOR:
                match_count = _count_matches(minutes, public.minutes, ratio)
                # Probability that a further time agrees by chance
                span = (public.minutes[-1] - public.minutes[0]) * ratio
                probability = 2 * _tolerance_minutes(ratio) * len(public.minutes) / span if span > 0 else 1.0
                enough = match_count >= max(_LEAST_RUNS, len(minutes) - 1)
                if enough and min(1.0, probability) ** (match_count - 1) < _CHANCE:
                    ratios[ratio] = match_count
        matches += [(public, ratio, match_count) for ratio, match_count in ratios.most_common(1)]
    return matches


# Tolerance in minutes for two roundings and a factor
def _tolerance_minutes(ratio: float) -> float:
    return ROUNDED_S / 60 * (1 + ratio)


# Number of times that equal a public time multiplied by ``ratio``; 0 after two misses. Public times are sorted.
def _count_matches(minutes: Sequence[float], public_minutes: Sequence[float], ratio: float) -> int:
    tolerance = _tolerance_minutes(ratio)
    used: set[int] = set()
    for number, run_minutes in enumerate(minutes):
        index = bisect.bisect_left(public_minutes, (run_minutes - tolerance) / ratio)
        while index in used:
            index += 1
        if index < len(public_minutes) and public_minutes[index] * ratio <= run_minutes + tolerance:
            used.add(index)
        elif number - len(used):
            return 0
    return len(used)
