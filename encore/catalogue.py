"""Catalogue of benchmarks, implementations and systems, read from TOML files."""

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, model_validator

from encore import paths
from encore.errors import EncoreError, unknown_name
from encore.files import read_toml

Parsed = TypeVar("Parsed", bound=BaseModel)


class Strict(BaseModel):
    """Model of a file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Horovod(Strict):
    version: str
    with_: str = Field(alias="with")
    without: tuple[str, ...]


class Framework(Strict):
    """Entry of environments.toml: a framework, shared by all implementations."""

    title: str
    requirements: str
    python: tuple[str, ...]  # Minor versions, the best first
    disk_gib: float  # Free space required to build it
    installed_gb: float = 0  # Size of the environment on disk
    check: str  # Python that proves that an environment works
    image_check: str = ""  # Module run by image tests in addition
    # Rendezvous and communication of ranks, which determines the launchers.
    communication: Literal["horovod", "torch.distributed"]
    imports: tuple[str, ...]  # Modules that every rank imports, in this order
    cuda: str  # Expression over these modules: CUDA version of the build; empty without CUDA
    gpus: str  # Expression over these modules: number of visible GPUs
    # Fields of a system description, with the package patterns that provide the version.
    software: dict[str, tuple[str, ...]]
    horovod: Horovod | None = None
    # Variables without which images may use another precision for ``precision=fp32``.
    fp32: dict[str, str] = Field(default_factory=dict)
    exports: tuple[str, ...] = ()  # Export formats, best first; see docs/serving.md


class Implementation(Strict):
    # Schema version of config.json; increased when a key is removed or changes its type.
    config_schema: int = 1
    framework: str  # Names the environment (requirements/environments.toml) and the container base
    module: str  # Python package with train.py, config.py and bench.py
    # Lowest tested versions, by field of a system description.
    needs: dict[str, str] = Field(default_factory=dict)
    # Minutes of `./run.sh NAME 2` with toy data and installed environment, on 2 cores of an AMD EPYC; 2026-11-27.
    toy_minutes: float


class Quality(Strict):
    title: str
    config: str  # Config field of the target
    log_name: str = ""  # Name in eval_accuracy if there are several qualities; default: the name in benchmark.toml


class Round(Strict):
    """Requirements of an MLPerf Training round, or figures from the publication if the benchmark is not in MLPerf."""

    targets: dict[str, float]  # Targets by quality, in the unit of the quality; reaching them stops the clock
    runs: int  # Runs per score


class Role(Strict):
    """Task of some ranks if not all ranks do the same; a rank may have several roles."""

    title: str
    config: str  # Field of Config with the number of ranks that have it; 0: all
    place: Literal["first", "last"]  # Position of these ranks
    trains: bool = False  # The global batch is the sum over these ranks

    def ranks(self, config: Mapping[str, Any], size: int) -> range:
        """Return the ranks of ``size`` that have this role in a resolved configuration."""
        count = min(config.get(self.config) or size, size)
        return range(count) if self.place == "first" else range(size - count, size)


class FullData(Strict):
    name: str
    train_samples: int
    eval_samples: int


class SmallData(Strict):
    name: str
    system: str  # System file that trains on it


class Weights(Strict):
    rounds: tuple[str, ...] = ()  # Empty: all
    title: str
    file: str  # File name, also in the data folder
    also: tuple[str, ...] = ()  # Files required in the same folder
    source: str  # Where to get it
    raw: str = ""  # Path in the raw data folder of encore data get
    # Accepted digests, or their prefixes.
    checksums: dict[Literal["md5", "sha256"], tuple[str, ...]] = Field(default_factory=dict)
    published: str = ""  # Where the digests are published


class Hub(Strict):
    """A repository of the Hugging Face Hub, or a part of it."""

    repository: str  # owner/name
    type: Literal["model", "dataset"] = "model"
    revision: str = Field(default="", pattern="^([0-9a-f]{40})?$")  # Commit; empty: not published, the user selects it
    include: tuple[str, ...] = ()  # Patterns of the files; empty: all
    # MD5 of the sorted MD5 of all files, as computed by hash.py of the submissions
    combined_md5: str = Field(default="", pattern="^([0-9a-f]{32})?$")
    terms: str = ""  # License to be accepted on the repository's page; empty: not gated


PLACES = ("url", "r2", "gs", "login", "hub")  # Fields of a raw file with its source


class RawFile(Strict):
    """A raw data file or folder, with exactly one source."""

    url: str = ""  # URL of a file; ``{number}`` counts from 0
    r2: str = ""  # Metadata (.uri) that MLCommons' R2 downloader reads
    gs: str = ""  # Object or pattern for gsutil
    login: str = ""  # Page on which a user may get it after a login
    hub: Hub | None = None
    variant: str = ""  # Name of an alternative to the file with the same ``file``; empty: the default
    file: str = ""  # File name in the folder; default: from the URL
    count: int = Field(default=1, ge=1)  # Number of files described by ``url``
    bytes: int = 0  # Total size; 0 if unpublished
    unpacked_bytes: int = 0  # The same, of gzip files that are unpacked before the preparation
    md5: str = Field(default="", pattern="^([0-9a-f]{32})?$")
    sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    source: str  # Where address, size and checksum are published

    @property
    def place(self) -> tuple[str, str]:
        kind = next(kind for kind in PLACES if getattr(self, kind))
        return kind, self.hub.repository if self.hub else getattr(self, kind)

    @model_validator(mode="after")
    def _has_one_place(self) -> "RawFile":
        if sum(bool(getattr(self, kind)) for kind in PLACES) != 1:
            raise ValueError(f"a raw file needs one of {', '.join(PLACES)}")
        return self


class Download(Strict):
    """Sources of a benchmark's raw data, and the inputs of the preparation."""

    same_as: str = ""  # Benchmark with the same data set
    files: tuple[RawFile, ...] = ()
    prepared_bytes: int = 0  # Largest size of the prepared data set plus temporary files
    # Raw data, such as DIR/a, and options of encore data prepare; may contain patterns
    prepare: tuple[str, ...] = ("DIR",)
    terms: str = ""  # On which they may be had
    needs: str = ""  # Files that the user has to add before the preparation


class Difference(Strict):
    what: str
    rounds: tuple[str, ...] = ()  # Empty: all
    submitted: str
    here: str


class Benchmark(Strict):
    """benchmark.toml: a task, shared by all implementations."""

    name: str  # Command line name; the folder is a Python package with ``_`` for ``-``
    title: str
    area: str
    data_set: str
    qualities: dict[str, Quality] = Field(min_length=1)
    default_implementation: str
    default_round: str
    # Keys in units of the learning rate, which follow the global batch with it.
    rates: tuple[str, ...] = ("learning_rate",)
    # Initial weights of the submissions, by the key for the file name, which may be empty.
    weights: dict[str, tuple[Weights, ...]] = Field(default_factory=dict)
    differences: tuple[Difference, ...] = ()  # Besides the image, which containers/images.toml has
    roles: dict[str, Role] = Field(default_factory=dict)  # Empty where all ranks do the same
    sample_ranks: tuple[str, ...] = ()  # Fields of Config; their product is the number of ranks that share a sample
    implementations: dict[str, Implementation]
    rounds: dict[str, Round]
    full_data: FullData
    small_data: SmallData
    download: Download = Download()

    @model_validator(mode="after")
    def _has_all_targets(self) -> "Benchmark":
        for name, round_ in self.rounds.items():
            if set(round_.targets) != set(self.qualities):
                raise ValueError(f"round {name} needs a target for each of {', '.join(self.qualities)}")
        return self

    def targets(self, config: Mapping[str, Any]) -> dict[str, float]:
        return {name: config[quality.config] for name, quality in self.qualities.items()}

    def submitted_weights(self, round_name: str) -> dict[str, Weights]:
        """Return the initial weights for a round's submissions, by the key for the file name."""
        return {
            key: weights
            for key, candidates in self.weights.items()
            for weights in candidates
            if not weights.rounds or round_name in weights.rounds
        }

    def data_parallel_ranks(self, config: Mapping[str, Any], size: int) -> int:
        """Return the number of ranks, or groups of ranks, that train on separate batches, out of ``size`` ranks.

        Raises:
            EncoreError: a number of ranks that share a sample is below 1.
        """
        training = next((len(role.ranks(config, size)) for role in self.roles.values() if role.trains), size)
        sizes = {name: int(config.get(name, 1)) for name in self.sample_ranks}
        if any(size < 1 for size in sizes.values()):
            raise EncoreError(", ".join(f"{name}={size}" for name, size in sizes.items()), expected="at least 1 each")
        # Preflight reports ranks that groups cannot divide; a bench measures one rank of a group
        return max(1, training // math.prod(sizes.values()))

    def named(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Map an evaluation's logged values to the names of the qualities."""
        if len(self.qualities) == 1:
            return dict(zip(self.qualities, logged.values(), strict=False))
        names = {name: quality.log_name or name for name, quality in self.qualities.items()}
        return {name: logged[log_name] for name, log_name in names.items() if log_name in logged}


# submitted: in ``round``; later: in a later round, trained here by this round's rules; study: published elsewhere;
# derived: adapted from a submission to other GPUs; small: for trying the code.
SystemKind = Literal["submitted", "later", "study", "derived", "small"]


class System(Strict):
    """systems/*.toml: values of a configuration, with their source."""

    kind: SystemKind
    round: str
    system: str
    submitter: str
    submission: str  # Result folder in the round's repository; empty if there was no submission
    # Submitted or published framework; empty: any. Other frameworks make it a different configuration.
    framework: str = ""
    source: str
    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    accelerator: str
    keep_global_batch: bool = False  # Keep the global batch, not the per-rank batch, for other numbers of ranks
    config: dict[str, Any]
    # Values of an implementation that override ``config``.
    implementations: dict[str, dict[str, Any]] = Field(default_factory=dict)
    # Environment variables of the ranks, by the file in ``source`` that sets them.
    environment: dict[str, dict[str, str]] = Field(default_factory=dict)
    file: str = ""  # Name of the file, set when it is read

    @model_validator(mode="after")
    def _sets_each_variable_once(self) -> "System":
        names_of = [name for variables in self.environment.values() for name in variables]
        twice = {name for name in names_of if names_of.count(name) > 1}
        if twice:
            raise ValueError(f"set twice: {', '.join(sorted(twice))}")
        return self


@dataclass(frozen=True)
class Choice:
    benchmark: Benchmark
    implementation_name: str

    @property
    def implementation(self) -> Implementation:
        return self.benchmark.implementations[self.implementation_name]

    @property
    def name(self) -> str:
        """``resnet`` for the default implementation, ``resnet-pytorch`` for other implementations."""
        default = self.implementation_name == self.benchmark.default_implementation
        return self.benchmark.name if default else f"{self.benchmark.name}-{self.implementation_name}"

    @property
    def folder(self) -> Path:
        return paths.ROOT / Path(*self.implementation.module.split("."))


def parse(model: type[Parsed], path: Path, **defaults: Any) -> Parsed:
    try:
        return model.model_validate({**defaults, **read_toml(path)})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise unknown_name(f"key in {path}:", key, _keys_next_to(model, first["loc"])) from error
        location = f"{path}: {key}" if key else str(path)
        raise EncoreError(f"{location}: {first['msg'].removeprefix('Value error, ')}", hint="fix the file") from error


def _keys_next_to(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    # Valid keys next to an unknown key.
    for part in location[:-1]:
        field = model.model_fields.get(str(part)) or model.model_fields.get("root")
        nested = (field.annotation, *typing.get_args(field.annotation)) if field else ()
        model = next(
            (annotation for annotation in nested if isinstance(annotation, type) and issubclass(annotation, BaseModel)),
            model,
        )
    return [".".join(map(str, (*location[:-1], name))) for name in model.model_fields]


@cache
def framework(name: str) -> Framework:
    frameworks = parse(RootModel[dict[str, Framework]], paths.REQUIREMENTS / "environments.toml").root
    if name not in frameworks:
        raise unknown_name("framework environment", name, frameworks)
    return frameworks[name]


@cache
def benchmarks() -> dict[str, Benchmark]:
    parsed = (parse(Benchmark, file) for file in sorted(paths.BENCHMARKS.glob("*/benchmark.toml")))
    return {benchmark.name: benchmark for benchmark in parsed}


@cache
def choices() -> dict[str, Choice]:
    """Return all benchmarks and implementations by command line name."""
    all_choices = (
        Choice(benchmark, implementation)
        for benchmark in benchmarks().values()
        for implementation in benchmark.implementations
    )
    return {choice.name: choice for choice in all_choices}


def choose(name: str) -> Choice:
    for choice in choices().values():
        if name in (choice.name, f"{choice.benchmark.name}-{choice.implementation_name}"):
            return choice
    raise unknown_name("benchmark", name, choices())


def systems(choice: Choice) -> list[System]:
    """Return an implementation's systems, ordered by round, number of GPUs and name.

    Systems in the benchmark's folder are for all implementations, systems in the implementation's folder only for
    it.
    """
    folders = (choice.folder.parent / "systems", choice.folder / "systems")
    files = [path for folder in folders for path in folder.glob("*.toml")]
    loaded = [_read_system(path, choice.implementation_name) for path in files]
    return sorted(loaded, key=lambda s: (s.round, s.nodes * s.gpus_per_node, s.system))


@cache
def _read_system(path: Path, implementation: str) -> System:
    system = parse(System, path)
    config = {**system.config, **system.implementations.get(implementation, {})}
    return system.model_copy(update={"file": path.name, "config": config})


ON_GPUS = "gpu"  # Toy system with ``device = "gpu"``, which has no file


def find_system(choice: Choice, name: str, round_name: str | None) -> System:
    """Return the system called ``name`` in ``round_name``, or in the newest round that has it."""
    candidates = systems(choice)
    candidates += [
        toy.model_copy(update={"system": ON_GPUS, "config": {**toy.config, "device": "gpu"}})
        for toy in candidates
        if toy.system == choice.benchmark.small_data.system
    ]
    matches = [system for system in candidates if system.system == name]
    if not matches:
        raise unknown_name(f"system of {choice.name}", name, {system.system for system in candidates})
    if round_name is None:
        return matches[-1]
    if round_name not in choice.benchmark.rounds:
        raise unknown_name("round", round_name, choice.benchmark.rounds)
    for system in matches:
        if system.round == round_name:
            return system
    if matches[-1].kind == "small":
        return matches[-1].model_copy(update={"round": round_name})
    rounds = ", ".join(system.round for system in matches)
    raise EncoreError(
        f"system {name!r} is not in round {round_name}",
        expected=f"one of the rounds {rounds}",
        hint=f"use --round {matches[-1].round}, or `encore list {choice.name}` to see the systems of a round",
    )
