"""submitted.toml: mapping from options and variables of submitted implementations to configuration keys.

Each benchmark.toml has a submitted.toml in the same folder, with a table per implementation.
``benchmarks/common/submitted.toml`` covers variables common to all submissions: the cluster's, and those read by
frameworks and NCCL.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch, fnmatchcase
from functools import cache
from typing import Any, Literal

from pydantic import Field

from encore import paths
from encore.catalogue import Strict, parse
from encore.lab.submissions.safe_eval import NoValueError, evaluate
from encore.lab.submissions.shell_expansion import LONGEST_VALUE, Value, concatenate

_MOST_SETTINGS = 5000
VARIABLE = "variable."  # Prefix of options for variables in a log
NO_OPTION = "the command has no option"  # Start of the reason for a key without a value


class Implementation(Strict):
    """Submitted benchmark implementation, and the mapping from options to keys."""

    title: str
    framework: str
    # Benchmark and implementation for the keys, in command-line notation; empty: the default
    choice: str = ""
    # Patterns of the folder's path, such as ``*/resnet/implementations/*mxnet*``
    folders: tuple[str, ...] = Field(min_length=1)
    program: tuple[str, ...] = ()  # File names of the training program in the command
    # Variables of configurations whose program reads variables instead of options: only the configuration is read
    variables: tuple[str, ...] = ()
    # Scripts after the configuration, in this order, up to the script with the command
    scripts: tuple[str, ...] = ("run_and_time.sh",)
    command: str = ""  # Variable that holds the command, if it is passed as a text
    checked: tuple[str, ...]  # Rounds whose configurations were compared with this table
    last_round: str = ""  # The last with this task under these folders; empty: all
    afterwards: str = ""  # Reason for rejecting later rounds
    pairs_after: str = ""  # Option whose value is followed by ``KEY value`` pairs
    # Option that names a JSON file in the folder; entries of that file are also options: ``solver.batchsize``
    settings: str = ""
    # Files of options, by pattern of the configuration's name; a later file and the command have the last word
    flag_files: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    keep_global_batch: bool = False
    # Defaults of the submitted code for options that are not in the command
    defaults: dict[str, str] = Field(default_factory=dict)
    keys: dict[str, str]  # Key here: expression over the options
    # Additional keys by implementation
    implementations: dict[str, dict[str, str]] = Field(default_factory=dict)
    # Options, ``option=value`` (only for that value) or variables without counterpart. ``layers_*`` is a single line
    # for all unmapped options with that prefix.
    without: dict[str, str] = Field(default_factory=dict)
    # Expressions that are true for configurations that Encore cannot run, with the reason
    rejected: dict[str, str] = Field(default_factory=dict)


class Submitted(Strict):
    implementation: tuple[Implementation, ...] = ()
    # Key here: expression over the keys of an MLPerf log
    log: dict[str, str] = Field(default_factory=dict)


class Machine(Strict):
    """System, by a prefix of configuration names."""

    name: str
    accelerator: str


class Common(Strict):
    read: tuple[str, ...]  # Prefixes of the names of environment variables that frameworks, NCCL and MPI read
    left_out: dict[str, str]  # Common variables that no system sets, with the reason
    nodes: tuple[str, ...]  # Variables with the number of nodes, by pattern; the first that is set counts
    gpus: tuple[str, ...]  # The same for GPUs per node
    # Script variables other than hyperparameters, by pattern, with the counterpart
    variables: dict[str, str]
    options: dict[str, str]  # Common options other than hyperparameters
    machine: dict[str, Machine]  # By prefix of the configuration name

    def meaning(self, variable: str) -> str:
        """Return the counterpart of the variable; empty if unknown."""
        meanings = (text for pattern, text in self.variables.items() if fnmatchcase(variable, pattern))
        return next(meanings, self.left_out.get(variable, ""))


@cache
def common() -> Common:
    return parse(Common, paths.BENCHMARKS / "common" / "submitted.toml")


@cache
def submitted() -> dict[str, Submitted]:
    """Return the tables by the benchmark's folder name."""
    files = sorted(paths.BENCHMARKS.glob("*/submitted.toml"))
    return {file.parent.name: parse(Submitted, file) for file in files if (file.parent / "benchmark.toml").exists()}


def implementations() -> list[tuple[str, Implementation]]:
    """Return all implementations with the benchmark's folder name."""
    return [(name, implementation) for name, tables in submitted().items() for implementation in tables.implementation]


def find_implementations(folder: str) -> list[tuple[str, Implementation]]:
    """Return the implementations that match a results repository folder."""
    path = f"/{folder.lower().strip('/')}"
    return [
        (name, implementation)
        for name, implementation in implementations()
        if any(fnmatch(path, p) for p in implementation.folders)
    ]


@dataclass(frozen=True)
class Option:
    """An option of the command as it was given."""

    name: str  # As expressions name it: ``batch_size`` for ``--batch-size``
    shown: str
    value: Value
    all_values: str = ""  # All values if the option is repeated, separated by spaces


def _plain(value: Value) -> Value:
    # Word without the quotes and spaces of Python dictionaries and tuples
    return Value(re.sub(r"['\s]", "", value.text), value.sources, value.is_known)


def parse_options(argv: tuple[Value, ...], pairs_after: str = "", programs: Collection[str] = ()) -> dict[str, Option]:
    """Return the command's options; the last occurrence counts.

    A name in ``programs`` is not a value of the preceding launcher option.
    """
    occurrences: list[tuple[str, list[Value]]] = []
    trailing: list[Value] = []  # values after the last option
    for word in map(_plain, argv):
        match = re.fullmatch(r"(--?[A-Za-z][\w.-]*)(?:=(.*))?", word.text, re.DOTALL)
        if match:
            values = [Value(match[2] or "", word.sources, match[2] is None or word.is_known)]
            occurrences.append((match[1], values))
            trailing = values if match[2] is None else []
        elif word.text.rpartition("/")[2] in programs:
            trailing = []
        else:
            trailing += [Value(" "), word] if len(trailing) > 1 else [word]
    options: dict[str, Option] = {}
    for spelling, values in occurrences:
        _add(options, spelling, concatenate(values))
    if pairs_after and pairs_after in [word.text for word in argv]:
        _add_pairs(options, argv, pairs_after)
    return options


def parse_json_options(text: str, sources: frozenset[str]) -> dict[str, Option]:
    """Return settings file entries by path, ``layers.fc1.size``; ValueError if it is not JSON.

    Objects in a list are identified by ``name``; lists of plain values are joined by spaces.
    """
    options: dict[str, Option] = {}
    waiting: list[tuple[str, Any]] = [("", json.loads(text))]
    while waiting and len(options) < _MOST_SETTINGS:
        path, value = waiting.pop()
        if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
            value = {str(entry.get("name", n)): entry for n, entry in enumerate(value) if isinstance(entry, dict)}
        if isinstance(value, dict):
            waiting += [(f"{path}.{name}" if path else name, entry) for name, entry in reversed(value.items())]
        elif path:
            parts = value if isinstance(value, list) else [value]
            plain = " ".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in parts)[:LONGEST_VALUE]
            _add(options, path, Value(plain, sources))
    return options


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_").replace(".", "_")


def _add(options: dict[str, Option], spelling: str, value: Value) -> None:
    name = _name(spelling)
    earlier = options[name].all_values + " " if name in options else ""
    options[name] = Option(name, spelling, value, (earlier + value.text)[-LONGEST_VALUE:])


def _add_pairs(options: dict[str, Option], argv: tuple[Value, ...], after: str) -> None:
    # Treat ``KEY value`` pairs after an option value as options
    plain = [_plain(word) for word in argv]
    first = next(n for n, word in enumerate(plain) if word.text == after) + 2
    value = plain[first - 1] if first <= len(plain) else Value()
    options[_name(after)] = replace(options[_name(after)], value=value, all_values="")
    for key, value in zip(plain[first::2], plain[first + 1 :: 2], strict=False):
        _add(options, key.text, Value(value.text, key.sources | value.sources, value.is_known))


@dataclass(frozen=True)
class Mapped:
    key: str
    value: Any
    options: tuple[str, ...]  # Options that the command gave
    sources: frozenset[str]  # Script variables that the value depends on
    origin: Literal["command", "code"]  # code: default of the submitted code, not changed by an option


@dataclass
class _Lookup:
    # Records the options and variables used by an expression

    options: dict[str, Option]
    defaults: dict[str, str]
    facts: Mapping[str, Any]
    variables: Mapping[str, Value]
    used: dict[str, Value] = field(default_factory=dict)

    def option(self, name: str, default: str | None = None) -> str:
        option = self.options.get(_name(name))
        if option is not None:
            if not option.value.is_known:
                raise NoValueError(f"{option.shown} is known only on the submitter's machine")
            self.used[option.name] = option.value
            return option.value.text
        default = self.defaults.get(_name(name), default)
        if default is None:
            raise NoValueError(f"{NO_OPTION} {name}")
        return default

    def all_values(self, name: str) -> str:
        self.option(name)
        return self.options[_name(name)].all_values

    def has(self, name: str) -> bool:
        option = self.options.get(_name(name))
        if option is not None:
            self.used[option.name] = option.value
        return option is not None

    def variable(self, name: str, default: str | None = None) -> str:
        traced = self.options.get(_name(f"{VARIABLE}{name}"))
        variable = traced.value if traced else self.variables.get(name)
        if variable is not None and not variable.is_known:
            raise NoValueError(f"{name} is known only on the submitter's machine")
        if variable is None or (not variable.text and default is not None):
            if default is None:
                raise NoValueError(f"{name} is not set")
            return default
        self.used[name] = Value(variable.text, variable.sources | {name})
        return variable.text

    def name(self, name: str) -> Any:
        return self.facts[name] if name in self.facts else self.option(name)

    def evaluate(self, expression: str) -> Any:
        functions: dict[str, Callable[..., Any]] = {
            "option": self.option, "has": self.has, "every": self.all_values, "variable": self.variable,
        }  # fmt: skip
        return evaluate(expression, self.name, functions)


def map_options(
    implementation: Implementation,
    implementation_name: str,
    options: dict[str, Option],
    constants: Mapping[str, Any],
    variables: Mapping[str, Value],
) -> tuple[list[Mapped], dict[str, str]]:
    """Return the keys determined by the options, and the undetermined keys with the reason.

    ``implementation_name`` names the implementation in Encore, which may have additional keys. Expressions can also
    use ``variables`` of the scripts, and ``constants``: round, configuration, nodes, gpus (per node), ranks.
    """
    mapped, missing = [], {}
    defaults = {_name(name): value for name, value in implementation.defaults.items()}
    for key, expression in {
        **implementation.keys,
        **implementation.implementations.get(implementation_name, {}),
    }.items():
        reading = _Lookup(options, defaults, constants, variables)
        try:
            value = reading.evaluate(expression)
        except NoValueError as error:
            missing[key] = str(error)
            continue
        sources = frozenset(name for used in reading.used.values() for name in used.sources)
        options_used = tuple(options[name].shown if name in options else name for name in reading.used)
        mapped.append(Mapped(key, value, options_used, sources, "command" if options_used else "code"))
    return mapped, missing


def rejection(implementation: Implementation, constants: Mapping[str, Any], variables: Mapping[str, Value]) -> str:
    """Return why Encore cannot run a configuration, by the variables of the scripts; empty if it can."""
    for expression, reason in implementation.rejected.items():
        try:
            if _Lookup({}, {}, constants, variables).evaluate(expression):
                return reason
        except NoValueError:
            continue
    return ""
