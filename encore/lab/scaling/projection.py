"""Projection of a submitted configuration from the speed of one GPU.

    step = model_factor * (compute of a GPU's samples + (1 - overlap) * all-reduce + activations)
    time to target = time_factor * (start + steps * step of the model * (1 + evaluations / training))

The all-reduce is hierarchical (cost_model.py) at the bandwidths of interconnect.toml; sharded gradients need the same
bytes, a reduce-scatter and an all-gather. Samples to the target, start and evaluations are medians of the public sets.
`tools/calibrate_projection.py` fits the overlap and both factors to published pairs on different numbers of GPUs, and
writes them with their 90 % intervals to projection.json.
"""

import functools
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from encore.catalogue import System, choose, find_system
from encore.configuration import Configuration, config_class, resolve
from encore.errors import EncoreError
from encore.files import read_toml
from encore.lab.scaling.cost_model import Links, allreduce_seconds
from encore.machine.node import Gpu
from encore.machine.preflight import family, memory_gib
from encore.results.published.published import DATA, PublishedResult, load_published
from encore.results.published.published import System as Hardware
from encore.results.rules import canonical, data_size, later_name, targets_of
from encore.run.planning import ROUNDING, Request
from encore.run.published_speed import measured

CALIBRATION = DATA / "projection.json"
NETWORK = "NVIDIA ConnectX-7"  # Source of the assumed adapter, one per GPU, if the description has none
_SAME_BATCH = math.log(1.25)
_ROUND = re.compile(r"training_results_(v\d\.\d)")
_ADAPTERS = re.compile(r"(\d+) ?x")


class Convergence(NamedTuple):
    """Median of the public sets with the same target and global batch."""

    target: str
    batch: float
    samples: float  # trained until the target is reached
    sets: int


class Phases(NamedTuple):
    """Median of the public sets with the same target and number of GPUs."""

    target: str
    gpus: float
    start_s: float
    evaluate_share: float  # time of all evaluations over the time of the training steps
    evaluations: float


class Calibration(TypedDict):
    """Content of projection.json for a benchmark."""

    overlap: float  # fraction of the all-reduce that the backward pass hides
    pairs: int
    submitters: int
    step: list[float]  # published over predicted values of pairs: quantiles 0.05, 0.5 and 0.95
    minutes: list[float]  # the same for the time to the target
    convergence: list[Convergence]
    phases: list[Phases]


class Projected(TypedDict):
    """Projection of a submitted system, next to its published result. Times of steps are in seconds."""

    system: str
    published: str  # Name for encore published
    accelerator: str
    gpus: int
    global_batch: int
    samples_per_gpu: float  # of a step; less than one if ranks share a sample
    accumulation: int
    parallelism: dict[str, int]  # tensor, pipeline, context or expert parallelism above 1
    device: str  # that was measured; empty with --measured
    samples_per_second: float | None  # of one GPU; null where the measured speed is of another configuration
    note: str  # Reason why there is no projection, or why it may be inaccurate
    compute_s: float | None
    gradient_bytes: float
    activation_bytes: float  # that a GPU sends per step for tensor and context parallelism
    bandwidths: dict[str, str]  # Intra-node and network bandwidth, with sources
    allreduce_s: float
    overlap: float  # fraction of the all-reduce that the backward pass hides
    exposed_s: float  # communication that extends a step, activations included
    step_s: float | None
    step_interval_s: list[float] | None  # 90 %
    samples_to_target: float
    public_sets: int  # that the samples to the target are the median of
    steps: float
    evaluations: float
    evaluation_samples: int | None  # per evaluation
    start_s: float
    evaluate_s: float | None
    minutes: float | None
    interval_minutes: list[float] | None  # 90 %
    published_minutes: float
    ratio: float | None  # projected over published minutes
    # of one GPU, for the published minutes; null if communication takes longer than the published time
    needed_samples_per_second: float | None
    calibration_pairs: int


# -- facts -------------------------------------------------------------------------------------------------------------


def published_result(system: System, benchmark: str) -> PublishedResult:
    """Return the published result of a submitted system file."""
    if not system.submission:
        raise EncoreError(
            f"system {system.system} was not submitted",
            expected="a system with a submission",
            hint=_listed(benchmark),
        )
    source = _ROUND.search(system.source)
    name, round_ = canonical(benchmark.replace("-", "_")), source[1] if source else system.round
    # v0.5 has submitters in lower case.
    key = (round_, system.submitter.lower(), system.submission, name)
    for cell in load_published():
        if (cell.round, cell.submitter.lower(), cell.system, cell.benchmark) == key and cell.score_minutes:
            return cell
    raise EncoreError(
        f"no published result of {benchmark} for {round_}/{system.submitter}/{system.submission}",
        hint=f"list the results: encore published --benchmark {benchmark} --round {round_}",
    )


@functools.cache
def calibrations() -> dict[str, Calibration]:
    loaded: dict[str, Calibration] = json.loads(CALIBRATION.read_text("utf-8"))
    return loaded


def calibration_of(cell: PublishedResult) -> Calibration:
    benchmark = later_name(cell.benchmark, cell.round) or ""
    if benchmark not in calibrations():
        raise EncoreError(
            f"{benchmark}: the projection is not calibrated for it",
            expected=f"one of {', '.join(calibrations())}",
            hint="measure more GPUs: encore sweep --help",
        )
    return calibrations()[benchmark]


@functools.cache
def _interconnects() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("interconnect.toml"))


def _sheet(table: str, name: str) -> tuple[float, str] | None:
    sheets = (sheet for sheet in _interconnects()[table] if re.search(sheet["name"], name))
    return next(((sheet["gigabytes"] * 1e9, sheet["source"]) for sheet in sheets), None)


def links_of(hardware: Hardware, gpus_per_node: int) -> tuple[Links, dict[str, str]] | None:
    """Return bandwidths per GPU with their sources; None for accelerators without a data sheet."""
    intra_node = _sheet("intra_node", hardware.accelerator or "")
    if intra_node is None:
        return None
    text = hardware.network or ""
    compute = text.partition("Compute:")[2].partition("Management")[0] or text
    adapter = _sheet("network", compute)
    count = _ADAPTERS.search(compute)
    adapters = min(int(count[1]) if count else 1, gpus_per_node) if adapter else gpus_per_node
    rate, source = adapter or _sheet("network", "NDR") or (0.0, "")
    network = rate * adapters / gpus_per_node
    assumed = "" if adapter else "; assumed, one per GPU: not in the system description"
    sources = {
        "intra_node": f"{intra_node[0] / 1e9:g} GB/s ({intra_node[1]})",
        "network": f"{network / 1e9:g} GB/s per GPU ({source}{assumed})",
    }
    return Links(intra_node_rate=intra_node[0], inter_node_rate=network, gpus=gpus_per_node), sources


@functools.cache
def gradient_bytes(benchmark: str) -> float:
    """Return the bytes of the gradients that data-parallel ranks reduce per step, in 16 bits; 0 if unknown."""
    step = measured(benchmark).step
    parameters = step.parameters if step else _interconnects()["parameters"].get(benchmark, 0)
    return 2.0 * parameters


def activation_bytes(config: Any) -> float:
    """Return the bytes that a GPU sends per step to the ranks that share its samples.

    Tensor parallelism reduces the activations twice in the forward and twice in the backward pass of a layer
    (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Context parallelism gathers keys and values in both passes and
    scatters their gradients.
    """
    tensor, context = (getattr(config, f"{name}_parallelism", 1) for name in ("tensor", "context"))
    if tensor * context == 1 or not hasattr(config, "shape"):
        return 0.0
    shape = config.shape(1)
    element, tokens = 2, config.batch_size * config.sequence_length / context
    reduced = 4 * config.width * tokens * 2 * (tensor - 1) / tensor
    gathered = 3 * 2 * shape.keys / tensor * tokens * (context - 1)
    return float(element * config.layers * (reduced + gathered))


def target_of(round_: str, benchmark: str | None) -> str:
    """Return a name of the target: rounds with the same one need the same samples."""
    targets = targets_of(round_, benchmark or later_name(benchmark, round_) or "")
    return " ".join(f"{target.value:g}" for target in targets)


# -- model -------------------------------------------------------------------------------------------------------------


def communication_seconds(benchmark: str, gpus: int, nodes: int, links: Links | None) -> float:
    if links is None or gpus == 1:
        return 0.0
    per_node = Links(intra_node_rate=links.intra_node_rate, inter_node_rate=links.inter_node_rate, gpus=gpus // nodes)
    return allreduce_seconds(gradient_bytes(benchmark), gpus, per_node)


def samples_to_target(rows: Iterable[Convergence], target: str, batch: float) -> tuple[float, int]:
    """Return the median samples of the sets with a similar global batch, else of the nearest, and their number."""
    same = [row for row in rows if row.target == target] or list(rows)
    distances = [abs(math.log(row.batch / batch)) for row in same]
    limit = max(_SAME_BATCH, min(distances) + 1e-9)
    near = [row for row, distance in zip(same, distances, strict=True) if distance <= limit]
    return statistics.median([row.samples for row in near for _ in range(row.sets)]), sum(row.sets for row in near)


def nearest_phases(rows: Sequence[Phases], target: str, gpus: int) -> Phases:
    same = [row for row in rows if row.target == target] or rows
    unknown = Phases(target, gpus, 0.0, 0.0, 0.0)
    return min(same, key=lambda row: abs(math.log(row.gpus / gpus)), default=unknown)


class Measured(NamedTuple):
    """Speed of one GPU; ``samples_per_second`` is None if the measured configuration is not the submitted one."""

    samples_per_second: float | None
    device: str = ""
    note: str = ""


class Share(NamedTuple):
    """Layout of a submitted configuration, of which a GPU computes the same part as all others."""

    system: str
    accelerator: str
    gpus: int
    nodes: int
    batch: int  # global
    accumulation: int = 1
    parallelism: Mapping[str, int] = MappingProxyType({})
    activation_bytes: float = 0.0


def project(cell: PublishedResult, share: Share, speed: Measured) -> Projected:
    """Project step time and time to the target of a published result's configuration from the speed of one GPU."""
    benchmark, calibration = later_name(cell.benchmark, cell.round) or "", calibration_of(cell)
    hardware = replace(cell.hardware, accelerator=cell.hardware.accelerator or share.accelerator)
    links, bandwidths = links_of(hardware, share.gpus // share.nodes) or (None, {})
    communication = communication_seconds(benchmark, share.gpus, share.nodes, links)
    exposed = (1 - calibration["overlap"]) * communication
    exposed += share.activation_bytes / links.intra_node_rate if links else 0.0
    target = target_of(cell.round, benchmark)
    samples, sets = samples_to_target([Convergence(*row) for row in calibration["convergence"]], target, share.batch)
    phases = nearest_phases([Phases(*row) for row in calibration["phases"]], target, share.gpus)
    per_gpu, steps = share.batch / share.gpus, samples / share.batch
    low, middle, high = calibration["minutes"]
    step_low, step_middle, step_high = calibration["step"]
    published = cell.score_minutes or 0.0
    rate = speed.samples_per_second
    compute = per_gpu / rate if rate else None
    step = compute + exposed if compute else None
    minutes = to_target(step, steps, phases) if step else None
    needed = (published * 60 / middle - phases.start_s) / (1 + phases.evaluate_share) / steps - exposed
    size = data_size(benchmark)
    return Projected(
        system=share.system,
        published=cell.name,
        accelerator=share.accelerator,
        gpus=share.gpus,
        global_batch=share.batch,
        samples_per_gpu=per_gpu,
        accumulation=share.accumulation,
        parallelism=dict(share.parallelism),
        device=speed.device,
        samples_per_second=rate,
        note=speed.note,
        compute_s=compute,
        gradient_bytes=gradient_bytes(benchmark),
        activation_bytes=share.activation_bytes,
        bandwidths=bandwidths,
        allreduce_s=communication,
        overlap=calibration["overlap"],
        exposed_s=exposed,
        step_s=step and step * step_middle,
        step_interval_s=[step * step_low, step * step_high] if step else None,
        samples_to_target=samples,
        public_sets=sets,
        steps=steps,
        evaluations=phases.evaluations,
        evaluation_samples=size.evaluate if size else None,
        start_s=phases.start_s,
        evaluate_s=step and step * steps * phases.evaluate_share,
        minutes=minutes and minutes * middle,
        interval_minutes=[minutes * low, minutes * high] if minutes else None,
        published_minutes=published,
        ratio=minutes and minutes * middle / published,
        needed_samples_per_second=per_gpu / needed if needed > 0 else None,
        calibration_pairs=calibration["pairs"],
    )


def to_target(step: float, steps: float, phases: Phases) -> float:
    """Return the minutes to the target."""
    return (phases.start_s + steps * step * (1 + phases.evaluate_share)) / 60


# -- command -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SubmittedSystem:
    """A submitted system with its published result; its configuration is for all GPUs."""

    cell: PublishedResult
    configuration: Configuration

    @property
    def share(self) -> Share:
        configuration, values = self.configuration, self.configuration.plain()
        config = config_class(configuration.choice.folder)(**values)
        return Share(
            system=configuration.system.system,
            accelerator=configuration.system.accelerator,
            gpus=configuration.ranks,
            nodes=configuration.nodes,
            batch=configuration.global_batch,
            accumulation=int(getattr(config, "accumulation", 1)),
            parallelism={
                key: value
                for key, value in values.items()
                if key.endswith("_parallelism") and isinstance(value, int) and value > 1
            },
            activation_bytes=activation_bytes(config),
        )

    def settings_for(self, gpus: Sequence[Gpu], settings: Sequence[str]) -> tuple[str, ...]:
        """Return the settings that give one GPU its batch; EncoreError if the GPU is too small."""
        if any(setting.startswith("batch_size=") for setting in settings):
            return tuple(settings)
        batch, accelerator = self.configuration.get("batch_size"), self.configuration.system.accelerator
        is_cut = {"layers", "tensor_parallelism"} <= self.configuration.values.keys()
        if not is_cut and gpus and memory_gib(accelerator) > ROUNDING * gpus[0].memory_gib:
            raise EncoreError(
                f"{gpus[0].name} has less memory than {accelerator}: a batch of {batch} may not fit",
                expected="a model of identical layers, of which some can be measured, or a GPU of this size",
                hint="measure a smaller batch: --set batch_size=N",
            )
        return (*settings, f"batch_size={batch}")

    def parse_speed(self, text: str) -> Measured:
        """Return the speed of ``--measured``: seconds per step, or samples/s if it ends with /s."""
        number, value = text.removesuffix("/s"), 0.0
        with suppress(ValueError):
            value = float(number)
        if not (value > 0 and math.isfinite(value)):
            raise EncoreError(
                f"--measured {text}",
                expected="positive seconds per step, or samples/s of one GPU",
                hint="such as --measured 0.053, or --measured 7493/s",
            )
        return Measured(value if number != text else self.share.batch / self.share.gpus / value)

    def read_bench(self, result: Mapping[str, Any], gpus: Sequence[Gpu]) -> Measured:
        """Return the speed of one GPU in samples/s from the output of bench.py."""
        speed = result["measured"].get("synthetic") or result["measured"]["real"]
        if result["device"] != "gpu":
            text = f"{speed['median']:,.1f} {result.get('unit', 'samples')}/s of {result['title']}"
            return Measured(None, result["device"], f"a CPU measurement is not a projection of a GPU record: {text}")
        device, accelerator = gpus[0].name if gpus else "gpu", self.configuration.system.accelerator
        note = "" if family(accelerator) in device else f"measured on {device}, submitted on {accelerator}"
        if result.get("unit", "samples") == "samples":
            return Measured(speed["median"], device, note)
        flops = read_toml(DATA / "flops.toml").get(self.cell.benchmark or "")
        if not flops or "flops_per_second" not in speed:
            raise EncoreError(
                f"the speed of {self.cell.benchmark} is in {result['unit']}/s",
                expected="samples/s",
                hint="pass the time of a step: --measured SECONDS",
            )
        return Measured(speed["flops_per_second"] / flops, device, note or f"FLOP/s of {result['title']}")

    def project(self, speed: Measured) -> Projected:
        return project(self.cell, self.share, speed)


def open_system(request: Request) -> SubmittedSystem:
    """Return the submitted system of a request; EncoreError without submission, published result or calibration."""
    if request.system is None:
        raise EncoreError("--project without --system", expected="a submitted system", hint=_listed(request.name))
    choice = choose(request.name)
    system = find_system(choice, request.system, request.round)
    cell = published_result(system, choice.benchmark.name)
    configuration = resolve(choice, system, system.nodes, system.gpus_per_node, [])
    calibration_of(cell)
    return SubmittedSystem(cell=cell, configuration=configuration)


def _listed(benchmark: str) -> str:
    return f"list them: encore list {benchmark}"
