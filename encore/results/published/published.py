"""All published results known to Encore, with their systems.

    from encore.results.published.published import load_published, select
    for result in select(load_published(), benchmark="resnet", round_="v0.7"):
        print(result.name, result.score_minutes)

Sources: ``encore/results/data/PROVENANCE.md``.
"""

import csv
import functools
import json
import lzma
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from encore.files import read_toml
from encore.results.rules import canonical

DATA = Path(__file__).parents[1] / "data"
DIGESTS = DATA / "digests"
DIGEST_DIGITS = 6  # Significant digits of phases and curves in the digests
_FIELDS = (
    "score_minutes", "fastest_minutes", "slowest_minutes", "cv", "samples_per_second", "init_seconds",
    "scaling_factor", "official_minutes",
)  # fmt: skip

_NODES = re.compile(r"(?:^|_)n(\d+)(?:_|$)")
_NAMED_BOXES = (
    (re.compile(r"dgx1(?:_|$)"), "Tesla V100-SXM2", 8),
    (re.compile(r"dgx2h?(?:_|$)"), "Tesla V100-SXM3", 16),
    (re.compile(r"dgxa100(?:_|$)"), "NVIDIA A100-SXM4", 8),
    (re.compile(r"dgxh100(?:_|$)"), "NVIDIA H100-SXM5", 8),
)
_CHIP = (
    r"(?:GB200|GB300|B200|B300|H100|H200|H800|A100X?|A800|A30|A40|A10|A2|V100S?|P100|T4|L4|L40S?"
    r"|MI300X|MI325X|MI350X|MI355X)"
)
_TPU = re.compile(r"tpu-v(\d)-(\d+)")
_COUNTED = re.compile(rf"(?:^|[x_\-\s])(\d+)x?({_CHIP})(?![0-9a-z])", re.IGNORECASE)
_COUNTED_AFTER = re.compile(rf"({_CHIP})[-\w]*?x(\d+)(?![0-9])", re.IGNORECASE)
_BOX_COUNT = re.compile(r"^(\d+)x(?=[A-Z])")
_FRAMEWORKS = (
    ("hugectr", "HugeCTR"), ("mxnet", "MXNet"), ("pytorch", "PyTorch"), ("nemo", "NeMo"),
    ("popart", "PopART"), ("mindspore", "MindSpore"), ("paddle", "PaddlePaddle"),
    ("tensorflow", "TensorFlow"), ("jax", "JAX"),
    ("-tf", "TensorFlow"), ("_tf", "TensorFlow"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class System:
    """System of a result. ``described``: from a system description, else derived from the system's name."""

    described: bool
    nodes: int | None = None
    accelerators_per_node: int | None = None
    accelerator: str | None = None
    accelerator_memory: str | None = None
    accelerator_interconnect: str | None = None
    cpu: str | None = None
    cpus_per_node: int | None = None
    cores_per_cpu: int | None = None
    host_memory: str | None = None
    storage: str | None = None
    network: str | None = None
    framework: str | None = None
    operating_system: str | None = None
    status: str | None = None
    software: Mapping[str, str] = field(default_factory=dict)
    caveat: str = ""  # Problem of the description file

    @property
    def accelerators(self) -> int | None:
        """Accelerators in all nodes together."""
        if self.accelerators_per_node is None:
            return None
        return self.accelerators_per_node * (self.nodes or 1)


@dataclass(frozen=True, kw_only=True)
class PublishedResult:
    """One published cell: a benchmark on a system in a round."""

    round: str
    submitter: str
    system: str
    benchmark: str | None  # None where the submitted logs do not say it
    runs: int
    converged: int | None
    score_minutes: float | None  # Raw score; None if the submitted logs have no score
    # MLCommons' factor from raw to official score, from scaling.json, or as `note` says; None without a factor.
    scaling_factor: float | None
    official_minutes: float | None  # The official score: the raw one times the factor, or as it is without a factor
    fastest_minutes: float | None
    slowest_minutes: float | None
    cv: float | None
    global_batch: int | None
    last_eval_epochs: str
    last_quality: str
    samples_per_second: float | None
    init_seconds: float | None
    division: str  # closed or open; empty where the submitter's description does not say it
    # As MLCommons' tables have it, such as Available on-premise; RDI is research, development or internal.
    availability: str
    note: str
    hardware: System

    @property
    def name(self) -> str:
        """Name on the command line: ``v0.7/NVIDIA/dgx1_ngc20.06_mxnet``."""
        return f"{self.round}/{self.submitter}/{self.system}"

    def as_json(self) -> dict[str, object]:
        """Return the result as plain data, including its name."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Study:
    """A text that figures were taken from."""

    key: str
    title: str
    authors: tuple[str, ...]
    publisher: str
    date: str
    url: str
    round: str
    about: str


@dataclass(frozen=True, kw_only=True)
class StudyFigure:
    """A figure as printed in a study; ``relation`` is "=", "~", "<", ">", "<=" or ">="."""

    source: str
    place: str
    model: str
    system: str
    gpus: int | None
    batch: int | None
    precision: str
    quantity: str
    relation: str
    printed: str
    unit: str
    context: str

    @property
    def value(self) -> float:
        """The printed figure as a number."""
        return float(self.printed)


@functools.cache
def load_published() -> tuple[PublishedResult, ...]:
    """Return every published result, in the order of rounds and submitters."""
    with (DATA / "published.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_result(row) for row in csv.DictReader(file))


def select(
    results: Iterable[PublishedResult],
    *,
    benchmark: str | None = None,
    round_: str | None = None,
    submitter: str | None = None,
    system: str | None = None,
    accelerator: str | None = None,
    division: str | None = None,
) -> list[PublishedResult]:
    """Filter results, ignoring case; system and accelerator match any part of the name."""
    canonical_name = canonical(benchmark) or benchmark
    return [
        result
        for result in results
        if (canonical_name is None or result.benchmark == canonical_name)
        and (round_ is None or result.round.lstrip("v") == round_.lower().lstrip("v"))
        and (submitter is None or result.submitter.lower() == submitter.lower())
        and (system is None or system.lower() in result.system.lower())
        and (accelerator is None or accelerator.lower() in (result.hardware.accelerator or "").lower())
        and (division is None or result.division == division)
    ]


def system_of(round_: str, submitter: str, system: str) -> System:
    """Return the submitter's system description, else the hardware encoded in the system name."""
    described = _described(round_).get(submitter, {}).get(system)
    if described is not None:
        return System(described=True, **described)
    # Submitters often encode the hardware in system names.
    framework = next((label for mark, label in _FRAMEWORKS if mark in system.lower()), None)
    nodes, per_node, accelerator = _hardware_from_name(system)
    return System(
        described=False, nodes=nodes, accelerators_per_node=per_node, accelerator=accelerator, framework=framework
    )


@functools.cache
def load_studies() -> tuple[Study, ...]:
    """Return the studies of ``load_figures``."""
    studies = read_toml(DATA / "studies.toml").items()
    return tuple(Study(key=key, **{**table, "authors": tuple(table["authors"])}) for key, table in studies)


@functools.cache
def load_figures() -> tuple[StudyFigure, ...]:
    """Return all figures printed in the studies."""
    with (DATA / "studies.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            StudyFigure(
                gpus=_optional_int(row.pop("gpus")),
                batch=_optional_int(row.pop("batch")),
                printed=row.pop("value"),
                **row,
            )
            for row in csv.DictReader(file)
        )


def _result(row: dict[str, str]) -> PublishedResult:
    typed: dict[str, Any] = {
        "benchmark": canonical(row["benchmark"]),
        "runs": _optional_int(row["runs"]) or 0,
        **{name: _optional_int(row[name]) for name in ("converged", "global_batch")},
        **{name: float(row[name]) if row[name] else None for name in _FIELDS},
    }
    texts = {f.name: row[f.name] for f in fields(PublishedResult) if f.name in row}
    hardware = system_of(row["round"], row["submitter"], row["system"])
    return PublishedResult(**{**texts, **typed}, hardware=hardware)


def _optional_int(text: str) -> int | None:
    return int(float(text)) if text else None


@functools.cache
def _described(round_: str) -> dict[str, dict[str, dict[str, Any]]]:
    path = DATA / "systems" / f"{round_}.json"
    systems: dict[str, dict[str, Any]] = {}
    for entry in json.loads(path.read_text("utf-8")) if path.is_file() else []:
        systems.setdefault(entry.pop("submitter"), {})[entry.pop("system")] = entry
    return systems


# Nodes, accelerators per node, and which.
def _hardware_from_name(name: str) -> tuple[int | None, int | None, str | None]:
    match = _NODES.search(name)
    nodes = int(match[1]) if match else None
    tpu = _TPU.search(name)
    if tpu:
        # Names count cores, descriptions count chips of two cores.
        return nodes, int(tpu[2]) // 2, f"TPU v{tpu[1]}"
    for pattern, accelerator, count in _NAMED_BOXES:
        if pattern.match(name):
            # v0.5 writes "multi" for a number of nodes that differs from benchmark to benchmark.
            several = "_multi_" in name
            return nodes or (None if several else 1), None if several else count, accelerator
    count_first = _COUNTED.search(name)
    boxes = _BOX_COUNT.match(name) if count_first and count_first.start() > 0 else None
    if count_first:
        return nodes or (int(boxes[1]) if boxes else None), int(count_first[1]), count_first[2]
    count_last = _COUNTED_AFTER.search(name)
    return (nodes, int(count_last[2]), count_last[1]) if count_last else (nodes, None, None)


@functools.lru_cache(maxsize=4)
def lines_of(round_: str) -> tuple[str, ...]:
    """Return a round's digest lines: the source, then one JSON line per set."""
    path = DIGESTS / f"{round_}.jsonl.xz"
    if not path.is_file():
        return ()
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return tuple(file)
