"""submitted.toml: which option or variable of a submitted implementation is which key of a benchmark here.

One file next to each benchmark.toml, one table per implementation, and ``benchmarks/common/submitted.toml`` for what
all submissions share: the cluster's variables, and those that frameworks and NCCL read.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch, fnmatchcase
from functools import cache
from typing import Any, Literal

from pydantic import Field

from encore import paths
from encore.catalogue import Strict, parse
from encore.lab.submissions.safe_eval import NoValueError, evaluate
from encore.lab.submissions.shell_expansion import LONGEST_VALUE, Value, joined

_MOST_SETTINGS = 5000


class Implementation(Strict):
    """One submitted implementation of a benchmark, and how its options become keys."""

    title: str
    framework: str
    # Benchmark and implementation here that take its keys, as the command line names them; empty: the default
    choice: str = ""
    # Patterns of the folder's path, such as ``*/resnet/implementations/*mxnet*``
    folders: tuple[str, ...] = Field(min_length=1)
    program: tuple[str, ...] = ()  # File names of the training program in the command
    # Read behind the configuration, in this order, up to the one with the command
    scripts: tuple[str, ...] = ("run_and_time.sh",)
    command: str = ""  # Variable that holds the command, where it is handed over as a text
    checked: tuple[str, ...]  # Rounds whose configurations this table was compared with
    last_round: str = ""  # The last with this task under these folders; empty: all
    afterwards: str = ""  # What they hold since
    pairs_after: str = ""  # Option behind whose value the command has pairs ``KEY value``
    # Option that names a JSON file of the folder, whose entries are options as well: ``solver.batchsize``
    settings: str = ""
    # Files of options, by pattern of the configuration's name; a later file and the command have the last word
    flag_files: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    keep_global_batch: bool = False
    # What the submitted code takes for an option that the command lacks
    defaults: dict[str, str] = Field(default_factory=dict)
    keys: dict[str, str]  # Key here: expression over the options
    # The same for keys that one implementation here has alone
    implementations: dict[str, dict[str, str]] = Field(default_factory=dict)
    # Option, ``option=value`` where only that value has this meaning, or variable without counterpart.  ``layers_*``
    # stands for all options of which no key is made and that begin so; they are one line together.
    without: dict[str, str] = Field(default_factory=dict)


class Submitted(Strict):
    implementation: tuple[Implementation, ...]


class Machine(Strict):
    """A system that the names of configurations begin with."""

    name: str
    accelerator: str


class Common(Strict):
    read: tuple[str, ...]  # Beginnings of the names of environment variables that frameworks, NCCL and MPI read
    left_out: dict[str, str]  # Variables among them that no system here sets: why
    nodes: tuple[str, ...]  # Variables with the number of nodes, by pattern; the first that is set counts
    gpus: tuple[str, ...]  # The same for the GPUs of a node
    # Variables of the scripts that are no hyperparameters, by pattern: what takes their place here
    variables: dict[str, str]
    options: dict[str, str]  # Options of many programs that are no hyperparameters
    machine: dict[str, Machine]  # By the beginning of a configuration's name

    def meaning(self, variable: str) -> str:
        """Return what takes the place of a variable; empty where nothing is known of it."""
        found = (text for pattern, text in self.variables.items() if fnmatchcase(variable, pattern))
        return next(found, self.left_out.get(variable, ""))


@cache
def common() -> Common:
    return parse(Common, paths.BENCHMARKS / "common" / "submitted.toml")


@cache
def implementations() -> list[tuple[str, Implementation]]:
    """Return every implementation with the name of its benchmark's folder."""
    files = sorted(paths.BENCHMARKS.glob("*/submitted.toml"))
    of_benchmarks = [file for file in files if (file.parent / "benchmark.toml").exists()]
    return [(file.parent.name, each) for file in of_benchmarks for each in parse(Submitted, file).implementation]


def of_folder(folder: str) -> list[tuple[str, Implementation]]:
    """Return the implementations that a folder of a results repository may be, by its path."""
    path = f"/{folder.lower().strip('/')}"
    return [(name, each) for name, each in implementations() if any(fnmatch(path, p) for p in each.folders)]


@dataclass(frozen=True)
class Option:
    """An option of the command as it was given."""

    name: str  # As expressions name it: ``batch_size`` for ``--batch-size``
    shown: str
    value: Value
    every: str = ""  # All its values where it was given more than once, with spaces between


def _plain(value: Value) -> Value:
    # A word without the quotes and spaces of a dictionary or tuple of Python's
    return Value(re.sub(r"['\s]", "", value.text), value.sources, value.is_known)


def options_of(words: tuple[Value, ...], pairs_after: str = "", programs: Collection[str] = ()) -> dict[str, Option]:
    """Return the options of a command; of one that is given twice, the last.

    The name of one of the ``programs`` is no value of the launcher's option before it.
    """
    given: list[tuple[str, list[Value]]] = []
    behind: list[Value] = []  # where the values behind the last option go
    for word in map(_plain, words):
        match = re.fullmatch(r"(--?[A-Za-z][\w.-]*)(?:=(.*))?", word.text, re.DOTALL)
        if match:
            values = [Value(match[2] or "", word.sources, match[2] is None or word.is_known)]
            given.append((match[1], values))
            behind = values if match[2] is None else []
        elif word.text.rpartition("/")[2] in programs:
            behind = []
        else:
            behind += [Value(" "), word] if len(behind) > 1 else [word]
    found: dict[str, Option] = {}
    for shown, values in given:
        _add(found, shown, joined(values))
    if pairs_after and _name(pairs_after) in found:
        _add_pairs(found, words, pairs_after)
    return found


def options_of_json(text: str, sources: frozenset[str]) -> dict[str, Option]:
    """Return the entries of a file of settings by their path, ``layers.fc1.size``; ValueError if it is not JSON.

    Of a list of objects each counts by its own ``name``; a list of plain values is their text with spaces between.
    """
    found: dict[str, Option] = {}
    waiting: list[tuple[str, Any]] = [("", json.loads(text))]
    while waiting and len(found) < _MOST_SETTINGS:
        path, value = waiting.pop()
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            value = {str(each.get("name", n)): each for n, each in enumerate(value) if isinstance(each, dict)}
        if isinstance(value, dict):
            waiting += [(f"{path}.{name}" if path else name, each) for name, each in reversed(value.items())]
        elif path:
            parts = value if isinstance(value, list) else [value]
            plain = " ".join(each if isinstance(each, str) else json.dumps(each) for each in parts)[:LONGEST_VALUE]
            _add(found, path, Value(plain, sources))
    return found


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_").replace(".", "_")


def _add(found: dict[str, Option], shown: str, value: Value) -> None:
    name = _name(shown)
    earlier = found[name].every + " " if name in found else ""
    found[name] = Option(name, shown, value, (earlier + value.text)[-LONGEST_VALUE:])


def _add_pairs(found: dict[str, Option], words: tuple[Value, ...], after: str) -> None:
    # Take ``KEY value`` pairs behind an option's value for options of their own
    plain = [_plain(word) for word in words]
    begin = next(n for n, word in enumerate(plain) if word.text == after) + 2
    rest = plain[begin:]
    option = found[_name(after)]
    found[_name(after)] = Option(option.name, option.shown, plain[begin - 1] if begin <= len(plain) else Value())
    for key, value in zip(rest[::2], rest[1::2], strict=False):
        _add(found, key.text, Value(value.text, key.sources | value.sources, value.is_known))


@dataclass(frozen=True)
class Mapped:
    key: str
    value: Any
    options: tuple[str, ...]  # Options that the command gave
    sources: frozenset[str]  # Variables of the scripts that they were made from
    origin: Literal["command", "code"]  # code: the submitted code's own value, which no option changed


@dataclass
class _Reading:
    # Notes what one expression asks for

    options: dict[str, Option]
    defaults: dict[str, str]
    facts: Mapping[str, Any]
    variables: Mapping[str, Value]
    used: dict[str, Value] = field(default_factory=dict)

    def option(self, name: str, default: str | None = None) -> str:
        found = self.options.get(_name(name))
        if found is not None:
            if not found.value.is_known:
                raise NoValueError(f"{found.shown} is known on the submitter's machine alone")
            self.used[found.name] = found.value
            return found.value.text
        default = self.defaults.get(_name(name), default)
        if default is None:
            raise NoValueError(f"the command has no option {name}")
        return default

    def every(self, name: str) -> str:
        self.option(name)
        return self.options[_name(name)].every

    def has(self, name: str) -> bool:
        found = self.options.get(_name(name))
        if found is not None:
            self.used[found.name] = found.value
        return found is not None

    def variable(self, name: str, default: str | None = None) -> str:
        found = self.variables.get(name)
        if found is None or (not found.text and default is not None):
            if default is None:
                raise NoValueError(f"{name} is not set")
            return default
        if not found.is_known:
            raise NoValueError(f"{name} is known on the submitter's machine alone")
        self.used[name] = Value(found.text, found.sources | {name})
        return found.text

    def name(self, name: str) -> Any:
        return self.facts[name] if name in self.facts else self.option(name)


def map_options(
    implementation: Implementation,
    own: str,
    options: dict[str, Option],
    facts: Mapping[str, Any],
    variables: Mapping[str, Value],
) -> tuple[list[Mapped], dict[str, str]]:
    """Return every key that the options give, and those that they do not, with the reason.

    ``own`` names the implementation here, which may have keys that the others have not. Expressions also know
    ``variables`` of the scripts, and ``facts``: round, configuration, nodes, gpus (of a node), ranks.
    """
    mapped, missing = [], {}
    defaults = {_name(name): value for name, value in implementation.defaults.items()}
    for key, expression in {**implementation.keys, **implementation.implementations.get(own, {})}.items():
        reading = _Reading(options, defaults, facts, variables)
        functions: dict[str, Callable[..., Any]] = {
            "option": reading.option, "has": reading.has, "every": reading.every, "variable": reading.variable,
        }  # fmt: skip
        try:
            value = evaluate(expression, reading.name, functions)
        except NoValueError as error:
            missing[key] = str(error)
            continue
        sources = frozenset(name for each in reading.used.values() for name in each.sources)
        given = tuple(options[name].shown if name in options else name for name in reading.used)
        mapped.append(Mapped(key, value, given, sources, "command" if given else "code"))
    return mapped, missing
