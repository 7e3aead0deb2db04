"""Resolve a configuration: the values of config.py with their origins.

Precedence, lowest first: the defaults in config.py, the round's quality targets in benchmark.toml, the system file,
the rule for a changed number of ranks, ``--set``. Environment variables: the system file, ``--env``.
"""

import dataclasses
import importlib.util
import json
import math
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from encore import paths
from encore.catalogue import Choice, System, Weights
from encore.errors import EncoreError, unknown_name

# Reasons why system files are not submitted configurations, by kind.
UNSUBMITTED = {
    "later": "submitted in a later round, trained by the rules of this one",
    "study": "a study, not a submission",
    "derived": "derived from a submission",
    "small": "the toy data set",
}
MOST_INT = 2**31 - 1  # Largest integer in a configuration: frameworks store most integers in 32 bits


@dataclass(frozen=True)
class Value:
    value: Any
    origin: str


@dataclass(frozen=True)
class Deviation:
    key: str  # Configuration key, ``gpus`` or ``framework``
    text: str


@dataclass(frozen=True, kw_only=True)
class Configuration:
    choice: Choice
    system: System
    nodes: int
    ranks_per_node: int
    values: dict[str, Value]
    deviations: tuple[Deviation, ...]  # Differences from the system file; empty: identical

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def global_batch(self) -> int:
        batch: int = self.get("batch_size")
        return batch * self.choice.benchmark.data_parallel_ranks(self.plain(), self.ranks)

    @property
    def is_submitted(self) -> bool:
        return self.system.kind == "submitted" and not self.deviations

    @property
    def why_not_submitted(self) -> str:
        return "; ".join(deviation.text for deviation in self.deviations) or UNSUBMITTED[self.system.kind]

    @property
    def division(self) -> str:
        # MLPerf division for the compliance check.
        return "closed" if self.is_submitted else "open"

    @property
    def needed_weights(self) -> dict[str, Weights]:
        # Initial weights of the submission, by the key for the file name; skips empty keys.
        candidates = _submitted_weights(self.choice, self.system, self.get("device"))
        return {key: weights for key, weights in candidates.items() if self.get(key)}

    @property
    def environment(self) -> dict[str, Value]:
        """Environment variables of the system file, by name.

        They are specific to a framework on GPUs: empty for other frameworks and on CPUs.
        """
        if self.system.framework not in ("", self.choice.implementation.framework) or self.get("device") == "cpu":
            return {}
        files = self.system.environment.items()
        return {name: Value(value, file) for file, variables in files for name, value in variables.items()}

    def plain(self) -> dict[str, Any]:
        return {name: value.value for name, value in self.values.items()}

    def accepts(self, key: str, value: Any) -> bool:
        try:
            config_class(self.choice.folder)(**{**self.plain(), key: value})
        except (TypeError, ValueError):
            return False
        return True

    def mismatches(self, manifest: Mapping[str, Any], memory: float) -> list[tuple[str, str, str]]:
        """Return why the ranks would reject a data set: problem, expectation and fix, from Config.

        ``manifest`` has the fields of dataset.json; ``memory`` is the limit per rank, in bytes.
        """
        config = config_class(self.choice.folder)(**self.plain())
        return config.mismatches(manifest, self.ranks, memory) if hasattr(config, "mismatches") else []

    def get(self, name: str) -> Any:
        return self.values[name].value


def _load(path: Path, name: str) -> Any:
    # Load the module in ``path`` as ``name``.
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EncoreError(f"{path} cannot be loaded", hint="restore the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def config_class(folder: Path) -> Any:
    # Load the implementation's Config dataclass from its file: host code does not import benchmarks.
    for path in (paths.BENCHMARKS / "common" / "config_checks.py", folder.parent / "config.py"):
        # Use the module name that the implementation imports, to avoid importing the package.
        if path.exists():
            _load(path, f"benchmarks.{path.parent.name}.{path.stem}")
    return _load(folder / "config.py", f"_config_of_{folder.parent.name}_{folder.name}").Config


def memory_model(folder: Path) -> Any | None:
    # Load the benchmark's GPU memory model from its file; None without one.
    config_class(folder)
    modules = [folder.parent / f"{name}.py" for name in ("architecture", "memory")]
    if not all(path.exists() for path in modules):
        return None
    return [_load(path, f"benchmarks.{path.parent.name}.{path.stem}") for path in modules][-1]


@cache
def written_records() -> Any:
    # Load the record types written by trainings and preparations from their file.
    return _load(paths.BENCHMARKS / "common" / "records.py", "benchmarks.common.records")


def field_types(folder: Path) -> dict[str, Any]:
    return typing.get_type_hints(config_class(folder))


@cache  # creating one takes as long as validating a hundred values
def _adapter(type_: Any) -> TypeAdapter[Any]:
    return TypeAdapter(type_, config=ConfigDict(strict=True, allow_inf_nan=False))


def checked(name: str, value: Any, type_: Any) -> Any:
    if type_ is int and isinstance(value, int) and abs(value) > MOST_INT:
        raise EncoreError(f"{name} = {value} is too large", expected=f"a whole number up to {MOST_INT}")
    try:
        # Validate as JSON, which lacks tuples: accept lists for tuples, without other conversions.
        return _adapter(type_).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        if typing.get_origin(type_) is not Literal:
            raise EncoreError(f"{name} = {value!r} has the wrong type", expected=_type_name(type_)) from error
        # Config checks which of the choices the device supports.
        raise EncoreError(
            f"{name} = {value!r} is not possible",
            expected=f"one of {', '.join(map(str, typing.get_args(type_)))}",
            hint=f"--set {name}=VALUE with one of them",
        ) from error


def _type_name(type_: Any) -> str:
    if typing.get_origin(type_) is tuple:
        return f"a list of {_type_name(typing.get_args(type_)[0])}, such as [1, 2]"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(type_, str(type_))


def parse_setting(setting: str, types_of: dict[str, Any]) -> tuple[str, Any]:
    # Split ``key=value`` and convert the value to the field's type; raises EncoreError.
    name, separator, text = setting.partition("=")
    name = name.strip()
    if name == "seed":
        raise EncoreError("--set seed", expected="a seed per experiment", hint="use --seed N for the first one")
    if not separator:
        raise EncoreError(f"--set {setting!r} has no '='", expected="key=value", hint="--set learning_rate=0.1")
    if name not in types_of:
        raise unknown_name("configuration key", name, types_of)
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = {"True": True, "False": False}.get(text, text)
    if types_of[name] is str and not isinstance(value, str):
        value = text
    return name, checked(name, value, types_of[name])


def _shorter_warmup(system: System, overrides: dict[str, Value]) -> dict[str, Value]:
    # Shorten the warm-up of toy systems that train fewer epochs than it has.
    epochs = overrides.get("epochs")
    warmup = system.config.get("warmup_epochs", 0)
    if system.kind != "small" or epochs is None or "warmup_epochs" in overrides or not 0 < epochs.value < warmup:
        return {}
    return {"warmup_epochs": Value(float(epochs.value), f"rule: {warmup:g}, and at most epochs")}


def scaled(
    system: System, submitted_ranks: int, ranks: int, rates: Sequence[str], keeps_batch: bool
) -> dict[str, Value]:
    """Return batch and learning rate for a number of data-parallel ranks that differs from the system file.

    The batch of a data-parallel rank stays, and the learning rate follows the global batch: linearly for SGD (Goyal et
    al. 2017, arXiv 1706.02677, section 2.1), with the square root for LARS, which is between linear scaling and the
    submissions (20 times the batch of DGX-1 at 2.9 times the rate in v0.7), and for Adam, similar to the submissions
    (8 times the batch at 2.5 times the rate, GNMT in v0.7). With ``keeps_batch`` the ranks divide the global batch
    instead. ``rates`` are the keys in units of the learning rate.
    """
    if ranks == submitted_ranks:
        return {}
    batch = system.config["batch_size"]
    total = batch * submitted_ranks
    if keeps_batch:
        if ranks > total:
            raise EncoreError(
                f"{ranks} data-parallel ranks cannot share a global batch of {total}",
                expected=f"at most {total} data-parallel ranks",
                hint="request fewer GPUs, or use another system",
            )
        rest = total % ranks
        rounded = f", rounded down to {total - rest}" if rest else ""
        return {"batch_size": Value(total // ranks, f"rule: global batch {total} over {ranks} ranks{rounded}")}
    ratio = ranks / submitted_ranks
    factor = ratio if system.config["optimizer"] == "sgd" else math.sqrt(ratio)
    scaling = "in proportion to" if system.config["optimizer"] == "sgd" else "with the square root of"
    rule = f"scaled {scaling} the global batch, {total} to {batch * ranks}"
    submitted = {name: system.config[name] for name in rates if system.config.get(name)}
    return {name: Value(float(f"{rate * factor:.6g}"), f"rule: {rate:g} {rule}") for name, rate in submitted.items()}


def _submitted_weights(choice: Choice, system: System, device: str) -> dict[str, Weights]:
    # Initial weights for a submission in any round; empty on CPUs, which only test the code.
    has_weights = system.kind in ("submitted", "later", "derived") and device == "gpu"
    return choice.benchmark.submitted_weights(system.round) if has_weights else {}


def resolve(
    choice: Choice,
    system: System,
    nodes: int,
    ranks_per_node: int,
    settings: list[str],
    manifest: Mapping[str, Any] | None = None,
) -> Configuration:
    """Resolve every value; EncoreError for unknown keys, wrong types and impossible combinations.

    ``manifest`` has the fields of the data set's dataset.json; some values follow from it unless they are set.
    """
    types = field_types(choice.folder)
    config = config_class(choice.folder)
    values = {field.name: Value(field.default, "default") for field in dataclasses.fields(config)}
    for name, target in choice.benchmark.rounds[system.round].targets.items():
        key = choice.benchmark.qualities[name].config
        values[key] = Value(target, f"benchmark.toml, round {system.round}")
    values["round"] = Value(system.round, "the system's round")
    for name, value in system.config.items():
        if name not in types:
            raise unknown_name(f"key in system {system.system}", name, types)
        values[name] = Value(checked(name, value, types[name]), f"systems/{system.file}")
    parsed = [parse_setting(setting, types) for setting in settings]
    needed = _submitted_weights(choice, system, dict(parsed).get("device", values["device"].value))
    values.update({key: Value(weights.file, "benchmark.toml, weights") for key, weights in needed.items()})
    of_system = {name: value.value for name, value in values.items()}
    submitted = choice.benchmark.data_parallel_ranks(of_system, system.nodes * system.gpus_per_node)
    training = choice.benchmark.data_parallel_ranks({**of_system, **dict(parsed)}, nodes * ranks_per_node)
    has_other_split = (
        bool(choice.benchmark.sample_ranks) and nodes * ranks_per_node == system.nodes * system.gpus_per_node
    )
    keeps_batch = system.keep_global_batch or has_other_split
    overrides = scaled(system, submitted, training, choice.benchmark.rates, keeps_batch)
    if manifest and hasattr(config, "data_settings"):
        determined = config.data_settings(manifest).items()
        overrides.update({key: Value(value, "data set") for key, value in determined if value != values[key].value})
    for name, value in parsed:
        if name == "round":
            raise EncoreError("round cannot be set: it also determines the targets", hint=f"use --round {value}")
        overrides[name] = Value(value, "--set")
    overrides.update(_shorter_warmup(system, overrides))
    deviations, framework = [], choice.implementation.framework
    if system.framework not in ("", framework):
        deviations.append(Deviation("framework", f"{framework} instead of {system.framework}"))
    if (nodes, ranks_per_node) != (system.nodes, system.gpus_per_node) and not system.keep_global_batch:
        layout = f"{nodes} x {ranks_per_node} GPUs instead of {system.nodes} x {system.gpus_per_node}"
        deviations.append(Deviation("gpus", layout))
    deviations += [
        Deviation(name, f"{name} = {'empty' if value.value == '' else value.value} ({value.origin})")
        for name, value in overrides.items()
        # Weight files may be in any location: checksums are verified elsewhere.
        if value.value != values[name].value and not (name in needed and value.value)
    ]
    values.update(overrides)
    try:
        config(**{name: value.value for name, value in values.items()})
    except ValueError as error:
        hint = "change these keys with --set KEY=VALUE"
        raise EncoreError(f"impossible configuration: {error}", hint=hint) from error
    return Configuration(
        choice=choice,
        system=system,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        values=values,
        deviations=tuple(deviations),
    )


def describe_scale(configuration: Configuration) -> str:
    # ``2 x 32 = global batch 64`` with the training ranks, and the ranks per role.
    batch, total = configuration.get("batch_size"), configuration.global_batch
    roles = configuration.choice.benchmark.roles.values()
    role_ranks = [(role.title, role.ranks(configuration.plain(), configuration.ranks)) for role in roles]
    roles_text = "".join(f"; {title}: ranks {ranks[0]} to {ranks[-1]}" for title, ranks in role_ranks)
    return f"{total // batch} x {batch} = global batch {total}{roles_text}"
