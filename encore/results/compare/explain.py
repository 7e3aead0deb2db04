"""Rank the differences between two run sets: phases, hyperparameters, software, topology and environment.

    from encore.results.compare.explain import explain
    for difference in explain(current, baseline).differences:
        print(difference.sentence)

Measured differences come first, ranked by the time that they add relative to the baseline. A setting's weight is the
largest effect of such settings on speed or convergence, an estimate and not a measurement.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from encore import catalogue
from encore.results.compare.causes import find_causes
from encore.results.compare.run_set import RunSet, first_step_seconds, scaling_factors
from encore.results.published.published import PublishedResult, System
from encore.results.published.systems import family, framework_of

Area = Literal["cause", "score", "phases", "hyperparameters", "software", "topology", "environment", "configuration"]

_SAME_TIME = 0.02
_SAME_SHARE = 0.0005  # Fraction of the baseline time; smaller changes would be printed as 0.0 %
_SAME_NUMBER = 1e-6
_SHORTEST_S = 0.05
_ONE_SIDED = 0.25
_LONGEST_VALUE = 60
NOT_REPORTED = "(not reported)"
_NEARLY = 1.1  # Ratios below this are printed as per cent
# Benchmarks and keys that describe progress, not configuration: BERT's train_samples counts samples until the target.
_OUTCOMES = frozenset({("bert", "train_samples")})

_TIMED_PHASES = {"start_s": "start of training", "train_s": "training", "evaluate_s": "evaluation"}
_PARTS = {
    "init_s": "initialization (off the clock)",
    "first_step_s": "way to the first step",
    "first_epoch_s": "first epoch",
    "epoch_s": "epoch",
    "evaluation_s": "single evaluation",
}
_PART_WEIGHT = 0.5  # Part of a phase that is listed as well: sorted below the phase
_UNTIMED_WEIGHT = 0.01
_CAUSE_WEIGHT = 10.0

# Largest effect per kind of setting. Settings of equal weight are sorted by name.
_HYPERPARAMETERS: tuple[tuple[str, float], ...] = (
    (r"global_batch|^batch_size$|input_batch|train_samples|data\.id", 0.9),
    (r"opt_name|optimizer$|precision|depth|layout|num_layers|hidden_size|lora_rank", 0.8),
    (r"^(?:attention|compile|cuda_graph|first_layer|kernels|norm|optimizer_kernel|tf32|xla)\b", 0.3),
    (r"learning_rate(?!.*(?:warmup|decay))|base_learning_rate|^lr$", 0.6),
    (r"warmup|decay|schedule|momentum|lars|eta|beta|epsilon|smoothing|dropout|bn_span|loss_scale", 0.35),
    (r"sequence_length|max_sequence|image_size|crop|mirror|gradient_accumulation|clip|target", 0.4),
    (r"eval", 0.2),
    (r"dali|thread|prefetch|worker|interval|compression|groups", 0.15),
)
_OTHER_HYPERPARAMETER = 0.1
_NOT_COMPARED = re.compile(
    r"seed|cache_clear|_file$|start_warmup|tracked|samples_count|submission|clear_caches|^duplicate_|^benchmark$"
    # Progress that some logs of v1.0 and later report in the form of settings
    r"|^status$|loss ?$|current_lr|^lr_abs$|trained_samples|epoch_num$|tflops|^checkpoint$|^Total$|^$"
)
_SOFTWARE = (
    (r"framework", 0.2),
    (r"cuda_version|cudnn|cublas|trt", 0.12),
    (r"nccl|dali|horovod|mpi", 0.1),
    (r"driver", 0.06),
)
_TOPOLOGY = (
    ("accelerator", 0.95),
    ("accelerators", 0.95),
    ("nodes", 0.9),
    ("accelerator_interconnect", 0.3),
    ("accelerator_memory", 0.2),
    ("cpu", 0.2),
    ("storage", 0.12),
    ("cpus_per_node", 0.1),
    ("cores_per_cpu", 0.1),
    ("host_memory", 0.1),
    ("network", 0.08),
)
_ENVIRONMENT = (
    (r"^data\.", 0.5),
    (r"^image|^implementation|^system$", 0.4),
    (r"^nodes|^ranks", 0.9),
    (r"^runtime|^code\.", 0.15),
    (r"NCCL|OMP|CUDA|MXNET|HOROVOD|TORCH|TF_|DALI", 0.15),
    (r"^environment\.(?:PATH|PYTHONPATH|HOME|LANG)", 0.01),
    (r"^node\.", 0.05),
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference. ``weight`` ranks it: 0 to about 1, above 1 for differences that cost more."""

    area: Area
    name: str
    ours: str
    theirs: str
    weight: float
    sentence: str
    ratio: float | None = None  # ``ours`` over ``theirs``, if both are numbers


@dataclass(frozen=True)
class Explanation:
    """Differences between two run sets, largest weight first, and data that were not available for comparison."""

    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]


def explain(current: RunSet, baseline: RunSet) -> Explanation:
    # Causes from the telemetry of both machines come before all other differences.
    causes = [
        Difference(
            area="cause",
            name=cause.name,
            ours="",
            theirs="",
            weight=_CAUSE_WEIGHT + cause.share,
            sentence=f"{cause.message}: {cause.share:+.1%} of the baseline time",
        )
        for cause in find_causes(current, baseline)
    ]
    differences = [
        *causes,
        *_scaling(current, baseline),
        *_phases(current, baseline),
        *_hyperparameters(current, baseline),
        *_software(current.hardware, baseline.hardware),
        *_topology(current.hardware, baseline.hardware),
        *_environment(current, baseline),
    ]
    ranked = sorted(differences, key=lambda difference: (-difference.weight, difference.area, difference.name))
    return Explanation(tuple(ranked), tuple(_missing_data(current, baseline)))


def _missing_data(current: RunSet, baseline: RunSet) -> Iterator[str]:
    for run_set, label in ((current, "your run"), (baseline, baseline.label)):
        data = {
            "hyperparameters": run_set.hyperparameters,
            "phases": run_set.phases,
            "system description": run_set.hardware.described,
            "software versions": run_set.hardware.software,
        }
        if missing := [name for name, value in data.items() if not value]:
            yield f"unknown for {label}: {', '.join(missing)}"


# Factors of the official scores, which are not part of the measured times
def _scaling(current: RunSet, baseline: RunSet) -> Iterator[Difference]:
    factor, baseline_factor = scaling_factors(current, baseline)
    if factor and baseline_factor and abs(factor / baseline_factor - 1) >= _SAME_SHARE:
        for difference in _setting("score", "factor of the reference convergence", factor, baseline_factor, 1.0):
            text = f"{difference.sentence}: the official score is the time multiplied by it"
            yield replace(difference, weight=1.0 + abs(factor / baseline_factor - 1), sentence=text)


# Time per phase in both sets; the differences of the clocked phases add up to the total difference
def _phases(current: RunSet, baseline: RunSet) -> Iterator[Difference]:
    phases, baseline_phases = ({**run_set.phases, **first_step_seconds(run_set)} for run_set in (current, baseline))
    total = sum(baseline_phases.get(name, 0.0) for name in _TIMED_PHASES) or None
    for name, label in {**_TIMED_PHASES, **_PARTS}.items():
        seconds, baseline_seconds = phases.get(name, 0.0), baseline_phases.get(name, 0.0)
        share = abs(seconds - baseline_seconds) / total if total else _UNTIMED_WEIGHT
        is_clocked = bool(total) and name in _TIMED_PHASES
        same = (
            share < _SAME_SHARE
            if is_clocked
            else abs(seconds - baseline_seconds) <= _SAME_TIME * max(seconds, baseline_seconds)
        )
        if not (name in phases and name in baseline_phases) or same or max(seconds, baseline_seconds) < _SHORTEST_S:
            continue
        weight = min(share, 1.0) * _PART_WEIGHT if name != "init_s" else _UNTIMED_WEIGHT
        ratio = seconds / baseline_seconds if baseline_seconds > 0 else None
        change = (
            f", {(seconds - baseline_seconds) / total:+.1%} of their {_format_seconds(total)}"
            if is_clocked and total
            else ""
        )
        current_text, baseline_text = _format_seconds(seconds), _format_seconds(baseline_seconds)
        yield Difference(
            area="phases",
            name=label,
            ours=current_text,
            theirs=baseline_text,
            weight=1.0 + share if name in _TIMED_PHASES else weight,
            sentence=f"your {label} takes {_format_ratio(ratio)}: {current_text} against {baseline_text}{change}",
            ratio=ratio,
        )


def _format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "time where theirs takes none"
    if 1 / _NEARLY < ratio < _NEARLY:
        return f"{abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'less'} than theirs"
    return f"{ratio:.1f} times theirs" if ratio > 1 else f"{ratio:.2g} of theirs"


def _format_seconds(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 600 else f"{seconds:.3g} s"


def _hyperparameters(current: RunSet, baseline: RunSet) -> Iterator[Difference]:
    values, baseline_values = current.hyperparameters, baseline.hyperparameters
    for name in sorted({*values, *baseline_values} if values and baseline_values else ()):
        if not _NOT_COMPARED.search(name) and (current.benchmark, name) not in _OUTCOMES:
            weight = _weight(name, _HYPERPARAMETERS, _OTHER_HYPERPARAMETER)
            yield from _setting("hyperparameters", name, values.get(name), baseline_values.get(name), weight)


def _software(current: System, baseline: System) -> Iterator[Difference]:
    versions, baseline_versions = dict(current.software), dict(baseline.software)
    if framework_of(current.framework) != framework_of(baseline.framework) or (
        current.described and baseline.described
    ):
        for software, system in ((versions, current), (baseline_versions, baseline)):
            software |= {"framework": system.framework or "", "operating_system": system.operating_system or ""}
    for name in sorted(
        name for name in {*versions} & {*baseline_versions} if versions[name] and baseline_versions[name]
    ):
        yield from _setting("software", name, versions[name], baseline_versions[name], _weight(name, _SOFTWARE, 0.03))


def _topology(current: System, baseline: System) -> Iterator[Difference]:
    for name, weight in _TOPOLOGY:
        value, baseline_value = getattr(current, name), getattr(baseline, name)
        same_family = name == "accelerator" and family(value) == family(baseline_value) is not None
        if value is not None and baseline_value is not None:
            yield from _setting("topology", name, value, baseline_value, weight * (_ONE_SIDED if same_family else 1.0))


# Settings in run.json for two runs of Encore; environment in the system file for a submission
def _environment(current: RunSet, baseline: RunSet) -> Iterator[Difference]:
    baseline_settings = baseline.settings or (
        _submitted_environment(current, baseline.published) if current.settings else {}
    )
    names = {*current.settings, *baseline_settings} if baseline.settings else {*baseline_settings}
    for name in sorted(names if current.settings else ()):
        plain = name.removeprefix("configuration.")
        area: Area = "configuration" if plain != name else "environment"
        weight = _weight(plain, _HYPERPARAMETERS if plain != name else _ENVIRONMENT, 0.1)
        if plain != "seed":
            yield from _setting(area, plain, current.settings.get(name), baseline_settings.get(name), weight)


# Environment variables that were submitted with ``cell``, if the current run uses the same framework and GPUs
def _submitted_environment(current: RunSet, cell: PublishedResult | None) -> dict[str, object]:
    choice = catalogue.choices().get(str(current.passport.get("name", ""))) if cell is not None else None
    if cell is None or choice is None or current.is_cpu:
        return {}
    matches = (system for system in catalogue.systems(choice) if system.submission == cell.system)
    submitted = next((system for system in matches if f"training_results_{cell.round}," in system.source), None)
    if submitted is None or submitted.framework not in ("", choice.implementation.framework):
        return {}
    return {f"environment.{name}": value for table in submitted.environment.values() for name, value in table.items()}


def _weight(name: str, table: tuple[tuple[str, float], ...], default: float) -> float:
    return next((weight for pattern, weight in table if re.search(pattern, name)), default)


# Difference of two values; equal numbers are compared with a tolerance
def _setting(area: Area, name: str, current: object, baseline: object, weight: float) -> Iterator[Difference]:
    if _is_same(current, baseline):
        return
    difference = Difference(
        area=area,
        name=name,
        ours=_format_value(current),
        theirs=_format_value(baseline),
        weight=weight,
        sentence=f"{name}: {_format_value(current)}, theirs {_format_value(baseline)}",
    )
    number, baseline_number = _finite_number(current), _finite_number(baseline)
    if current is None or baseline is None:
        difference = replace(difference, weight=weight * _ONE_SIDED)
    elif number is not None and baseline_number:
        ratio = number / baseline_number
        distance = min(abs(math.log(ratio)) / math.log(2), 1.0) if ratio > 0 else 1.0
        difference = replace(difference, ratio=ratio, weight=weight * (0.2 + 0.8 * distance))
    yield difference


def _is_same(current: object, baseline: object) -> bool:
    number, baseline_number = _finite_number(current), _finite_number(baseline)
    if number is not None and baseline_number is not None:
        return math.isclose(number, baseline_number, rel_tol=_SAME_NUMBER, abs_tol=1e-12)
    if isinstance(current, str) and isinstance(baseline, str):
        return " ".join(current.lower().split()) == " ".join(baseline.lower().split())
    return current == baseline


# Finite number; None for text, even digits: ``number_of`` would parse versions as numbers
def _finite_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _format_value(value: object) -> str:
    if value is None:
        return NOT_REPORTED
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."
