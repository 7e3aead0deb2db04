"""Plausible training speeds: below the peak rate of the accelerators, and near the public sets on them."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from encore.files import read_toml
from encore.results import peaks
from encore.results.audit.anomalies import Anomaly
from encore.results.audit.declarations import PRECISION, accelerators, declared_values
from encore.results.audit.kernels import BITS
from encore.results.audit.published_runs import PublicSpeed, largest_node, speed_of, speed_range
from encore.results.logs.reader import number_of
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import deciding, length_of
from encore.results.published.published import DATA, System
from encore.results.published.systems import model_of, rounds_system
from encore.results.scores.score import Score

_PEAKS = {4: "fp4", 6: "fp8", 8: "fp8", 16: "bf16"}  # Names in peaks.toml by bits
MARGIN = 1.1  # Speed above the fastest public set; error rates: docs/audit.md


@functools.cache
def _flops() -> Mapping[str, float]:
    return read_toml(DATA / "flops.toml")


def above_peak(score: Score) -> Iterator[Anomaly]:
    """Find runs that would need more than the peak rate of their accelerators."""
    system, count = accelerators(score)
    accelerator = (system.accelerator if system is not None else None) or ""
    flops = _flops().get(score.benchmark or "")
    # SSD is RetinaNet since v2.0.
    if count is None or flops is None or (score.benchmark == "ssd" and (score.round or "") >= "v2.0"):
        return
    # Logs of runs that did not converge may count the samples of the data set
    for run in score.converged:
        rate, sheet = _samples_per_second(run), peak_rate(accelerator, run)
        needed = rate * flops / count
        if sheet is not None and needed > sheet[0]:
            message = f"{rate:.4g} samples/s on {count} accelerators: {peaks.written(needed)}/s each"
            yield Anomaly(f"{message}, {needed / sheet[0]:.1f} times the peak of {sheet[1]}", run.path)


def peak_rate(accelerator: str, run: RunLog) -> tuple[float, str] | None:
    """Return FLOP/s and data sheet at the declared precision of linear layers, else in the fastest precision."""
    declared = declared_values(run).get(f"{PRECISION}linear")
    precision = _PEAKS.get(BITS.get(str(declared), 0), "")
    return peaks.peak_of(accelerator, precision) or peaks.peak_of(accelerator, None)


# Trained samples until the evaluation that ended the run, per second since run_start; 0 if unknown
def _samples_per_second(run: RunLog) -> float:
    point, length, seconds = deciding(run), length_of(run), _seconds_to_last_evaluation(run)
    if point is None or length is None or not seconds:
        return 0.0
    # BERT and the language models count samples, and may call them epochs.
    in_epochs = run.benchmark in ("resnet", "ssd")
    samples = point.samples or length.value * ((run.train_samples or 0.0) if in_epochs else 1.0)
    return samples / seconds


def above_published(score: Score) -> Iterator[Anomaly]:
    """Find sets with a higher speed per accelerator than all public sets on the same accelerator."""
    return _compare(score, lambda rate, slowest, fastest: fastest if rate > MARGIN * fastest.rate else None)


def below_published(score: Score) -> Iterator[Anomaly]:
    """Find sets with a lower speed per accelerator than all public sets on similar systems."""
    return _compare(score, lambda rate, slowest, fastest: slowest if slowest and rate * MARGIN < slowest.rate else None)


def _compare(
    score: Score, outlier: Callable[[float, PublicSpeed | None, PublicSpeed], PublicSpeed | None]
) -> Iterator[Anomaly]:
    runs = score.converged
    if not runs:
        return
    system = accelerators(score)[0] or rounds_system(score.folder, score.round, runs[0].platform)
    lengths = [(length_of(run), _seconds_to_last_evaluation(run)) for run in runs]
    speed = speed_of(system, score.benchmark, score.round, runs[0].train_samples, runs[0].global_batch, lengths)
    if speed is None:
        return
    key, count, rate = speed
    slowest, fastest = speed_range(key, count)
    if fastest is not None and (public := outlier(rate, slowest, fastest)) is not None:
        message = f"{rate / public.rate:.2g} times the speed per accelerator of {public.name}"
        yield Anomaly(f"{count} x {key[1]}: {message} ({public.accelerators} accelerators)")


_ACCELERATOR = r"(?:[ABHV][123]00|GH200|GB[23]00|L40S?|A[34]0|MI3\d\dX)"
# Numbers in names of platforms and result folders, with the fields of the system description that may be meant.
# TPUs of v2 to v4 are counted by cores, two per chip.
_STATED = tuple(
    (re.compile(pattern), fields)
    for pattern, fields in (
        (r"^(\d+)x(?=[A-Za-z])(?!.*x\d+x\d)", ("nodes", "accelerators")),
        (r"(?:^|[_-])n(\d+)(?=[_-]|$)", ("nodes",)),
        (r"(?:^|[_-])(\d+)[-_]?(?:N|nodes?)(?=[_-]|$)", ("nodes",)),
        (r"(?:ngpu|POD)(\d+)", ("accelerators",)),
        (r"tpu-?v[234][a-z]*-(\d+)", ("cores",)),
        (rf"(?<=[_x-])(\d+)x?{_ACCELERATOR}", ("accelerators per node", "accelerators")),
        (rf"{_ACCELERATOR}[A-Za-z0-9-]*x(\d+)$", ("accelerators per node", "accelerators")),
    )
)
# Architectures: A100 and A30, H100 and H200, B200 and GB300 are not distinguished, as platforms name either
_MODEL = re.compile(r"(?:^|[^A-Za-z]|[dh]gx|x)G?([ABHLV]|MI)(?:\d00|[34]0)(?!\d)", re.IGNORECASE)
_DGX, _PER_DGX = re.compile(r"DGX ?([ABH][123]00)"), 8
_FACTOR = 2  # Between a stated number and the system description


def contradicted_system(score: Score) -> Iterator[Anomaly]:
    """Find system descriptions with other numbers of accelerators than names, batches and public nodes have."""
    system, count = accelerators(score)
    if system is None or count is None or not system.nodes or not system.accelerators_per_node or not score.runs:
        return
    folder = score.folder.parent.name if score.folder.parent.parent.name == "results" else ""
    places = (score.runs[0].platform or "", folder)
    largest = largest_node(model_of(system.accelerator))
    for text in contradictions(system, places, score.runs[0], largest):
        yield Anomaly(f"{text}: {system.nodes} x {system.accelerators_per_node} in the system description")


def contradictions(system: System, names: Iterable[str], run: RunLog, largest: int | None) -> Iterator[str]:
    """Return statements that contradict the accelerators of a description: the model, or the number by a factor of two.

    ``largest``: number of accelerators per node in the public sets with this accelerator.
    """
    nodes, per_node, accelerator = system.nodes or 0, system.accelerators_per_node or 0, system.accelerator or ""
    count = nodes * per_node
    described = {"nodes": nodes, "accelerators per node": per_node, "accelerators": count, "cores": 2 * count}
    for name in dict.fromkeys(names):
        for pattern, fields in _STATED:
            match = pattern.search(name)
            if match and all(_differs(int(match[1]), described[field]) for field in fields):
                yield f"{match[1]} {' or '.join(fields)} in the name {name}"
        if (models := _architectures(name)) and models.isdisjoint(_architectures(accelerator) or models):
            yield f"no {accelerator} in the name {name}"
        if (dgx := _DGX.search(name)) and dgx[1] in accelerator and _differs(_PER_DGX, per_node):
            yield f"{_PER_DGX} accelerators per node in a {dgx[0]}"
    ranks, packing = _ranks(run)
    if ranks and (ranks >= _FACTOR * packing * count or count >= _FACTOR * ranks):
        yield f"global batch {run.global_batch:g} is {ranks:g} local batches"
    if largest and per_node >= _FACTOR * largest:
        yield f"at most {largest} accelerators per node in the public sets with this accelerator"


def _architectures(name: str) -> set[str]:
    return {match.upper() for match in _MODEL.findall(name)}


def _differs(stated: int, described: int) -> bool:
    return stated > 0 and max(stated / described, described / stated) >= _FACTOR


# Data-parallel ranks by the batch sizes, and the largest number of samples that BERT packs into a row; 0 if unknown
def _ranks(run: RunLog) -> tuple[float, int]:
    logged = run.hyperparameters
    local = number_of(logged.get("d_batch_size", logged.get("local_batch_size"))) or 0.0
    is_known = run.benchmark in ("resnet", "ssd", "retinanet", "bert") and local > 0 and run.global_batch
    steps = number_of(logged.get("gradient_accumulation_steps")) or 1.0
    return (run.global_batch or 0.0) / local / steps if is_known else 0.0, 2 if run.benchmark == "bert" else 1


def _seconds_to_last_evaluation(run: RunLog) -> float | None:
    point = deciding(run)
    if point is None or point.time_s is None or run.start_s is None:
        return None
    return max(point.time_s - run.start_s, 0.0)
