"""Compare one published configuration with the systems here, key by key."""

import json
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from encore import catalogue, configuration
from encore.catalogue import Choice, System
from encore.errors import EncoreError
from encore.lab.submissions import option_mapping, scripts
from encore.lab.submissions.option_mapping import Common, Implementation, Mapped
from encore.lab.submissions.scripts import Scripts
from encore.lab.submissions.shell_expansion import Note, Value, Variable
from encore.lab.submissions.source import Source, name_of
from encore.results.format import count_of

COMPARED = ("submitted", "later")
_MOST_LINES_OF_FLAGS = 2000


@dataclass(frozen=True)
class Left:
    """An option or a variable that becomes no key, and what that means."""

    name: str
    value: str
    meaning: str  # Empty: the mapping does not know it


@dataclass(frozen=True)
class Difference:
    """A key or variable with another value than in a system here; None: not set."""

    name: str
    published: Any
    ours: Any


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One configuration of a published folder, and what of it can be reproduced here."""

    source: Source
    file: str
    benchmark: str  # Folder of the benchmark here; empty where there is none for what was published
    implementation: Implementation | None
    nodes: int
    gpus: int
    gpus_are_known: bool = True
    mapped: tuple[Mapped, ...] = ()
    missing: dict[str, str]  # Keys that have no value, with the reason
    left: tuple[Left, ...] = ()
    environment: dict[str, dict[str, str]]
    base: str  # Image that the submitted Dockerfile begins with
    notes: tuple[Note, ...] = ()
    refused: str = ""  # Why there is no system; empty where there is one
    system: System | None = None
    nearest: System | None = None  # The system here with the fewest differences
    alternative: tuple[Choice, System] | None = None  # Nearest system, if the options cannot be mapped
    differences: tuple[Difference, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.file)

    @property
    def choice(self) -> Choice | None:
        return _choice(self.benchmark, self.implementation) if self.implementation else None

    @property
    def equals(self) -> bool:
        """Whether the nearest system is this configuration, key by key."""
        return self.nearest is not None and not self.differences and not self.missing

    @property
    def is_checked(self) -> bool:
        """Whether the mapping was compared with configurations of this round."""
        return self.implementation is not None and self.source.round in self.implementation.checked

    @property
    def known_left(self) -> tuple[Left, ...]:
        return tuple(each for each in self.left if each.meaning)

    @property
    def unknown_left(self) -> tuple[Left, ...]:
        return tuple(each for each in self.left if not each.meaning)


def _choice(benchmark: str, implementation: Implementation) -> Choice:
    if implementation.choice:
        return catalogue.choose(implementation.choice)
    choices = _choices(benchmark)
    same_framework = [choice for choice in choices if choice.implementation.framework == implementation.framework]
    return (same_framework or choices)[0]


def _choices(benchmark: str) -> list[Choice]:
    return [choice for choice in catalogue.choices().values() if choice.folder.parent.name == benchmark]


_MIN_LETTERS = 6  # Shortest abbreviation of a benchmark in a path: llama2_70b for llama2_70b_lora


def _unmapped(folder: str) -> str:
    """Return the benchmark without submitted.toml that a path names, else an empty string."""
    parts = [re.sub(r"[^a-z0-9]", "", part.lower()) for part in folder.split("/")]
    unmapped = {choice.folder.parent.name for choice in catalogue.choices().values()}
    unmapped -= {name for name, _ in option_mapping.implementations()}
    for name in sorted(unmapped):
        if any(len(part) >= _MIN_LETTERS and name.replace("_", "").startswith(part) for part in parts):
            return name
    return ""


def _alternative(made: Reproduction) -> tuple[Choice, System] | None:
    # Nearest system by source, round, accelerator and number of GPUs
    accelerator = machine.accelerator if (machine := _machine(made.name)) else ""

    def similarity(system: System) -> tuple[bool, ...]:
        return (
            system.source.endswith(f"{made.source.shown}, configuration {made.name}"),
            system.round == made.source.round,
            system.accelerator == accelerator,
            (system.nodes, system.gpus_per_node) == (made.nodes, made.gpus),
            system.kind == "submitted",
        )

    choices = [choice for choice in _choices(made.benchmark) if choice.name == choice.benchmark.name]
    systems = [system for choice in choices for system in catalogue.systems(choice) if system.kind != "small"]
    return (choices[0], max(systems, key=similarity)) if systems else None


def _machine(configuration_name: str) -> option_mapping.Machine | None:
    machines = reversed(option_mapping.common().machine.items())
    return next((machine for prefix, machine in machines if configuration_name.startswith(prefix)), None)


def reproduce(source: Source, file: str, nodes: int | None = None, gpus: int | None = None) -> Reproduction:
    """Read a configuration and compare it with the systems here; NoValueError if its file is not understood.

    ``nodes`` and ``gpus`` of each are for a configuration that does not set them.
    """
    common = option_mapping.common()
    known = option_mapping.of_folder(source.shown) or option_mapping.of_folder(source.folder)
    benchmark = known[0][0] if known else _unmapped(source.shown) or _unmapped(source.folder)
    read = scripts.read(source, file, [each for _, each in known], common, nodes, gpus)
    text = source.read("Dockerfile") or ""
    environment = _environment(read, scripts.environment(text), common)
    made = Reproduction(
        source=source, file=file, benchmark=benchmark, implementation=read.implementation, nodes=read.nodes,
        gpus=read.gpus, gpus_are_known=read.gpus_are_known, missing={}, environment=environment,
        base=scripts.base_image(text), notes=read.notes,
    )  # fmt: skip
    implementation, refused = read.implementation, "Encore has no benchmark for this folder"
    if implementation is None and known:
        programs = ", ".join(read.programs[:6]) or "nothing"
        refused = f"the training program of {benchmark} was not found in the scripts, which start {programs}"
    elif implementation is None and benchmark:
        refused = f"the options of {_choices(benchmark)[0].benchmark.title} are not mapped yet (no submitted.toml)"
    if implementation is None and benchmark:
        made = replace(made, alternative=_alternative(made))
    if implementation is not None:
        last = implementation.last_round
        if not (last and source.round and _numbers(source.round) > _numbers(last)):
            return _as_system(made, read, common, implementation)
        refused = implementation.afterwards
    return replace(made, implementation=None, left=_left(read, [], common, None), refused=refused)


def _numbers(round_name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", round_name))


def _as_system(made: Reproduction, read: Scripts, common: Common, implementation: Implementation) -> Reproduction:
    choice = _choice(made.benchmark, implementation)
    rounds = list(choice.benchmark.rounds)
    facts = {
        "round": made.source.round, "configuration": made.name, "nodes": read.nodes, "gpus": read.gpus,
        "ranks": read.nodes * read.gpus,
    }  # fmt: skip
    given, unread = _with_settings(made.source, implementation, read)
    made = replace(made, notes=(*made.notes, *unread))
    options = {**_flags(made.source, implementation, made.name), **given}
    mapped, missing = option_mapping.map_options(
        implementation, choice.implementation_name, options, facts, read.values()
    )
    if not read.gpus_are_known:
        missing["gpus_per_node"] = "neither a variable nor the name has the number of GPUs: give --gpus-per-node"
    made = replace(made, mapped=tuple(mapped), missing=missing, left=_left(read, mapped, common, implementation, given))
    machine = _machine(made.name)
    base = machine.name if machine else _slug(made.name)
    values = {each.key: list(each.value) if isinstance(each.value, tuple) else each.value for each in mapped}
    own = {
        key: values[key] for key in implementation.implementations.get(choice.implementation_name, {}) if key in values
    }
    try:
        system = System(
            kind="submitted" if made.source.round in rounds else "later",
            round=made.source.round if made.source.round in rounds else rounds[-1],
            system=f"{base}_n{read.nodes}" if read.nodes > 1 else base,
            submitter=made.source.shown.split("/")[0] if "/" in made.source.shown else "",
            submission=made.source.submission,
            framework=implementation.framework,
            source=f"mlcommons/training_results_{made.source.round}, {made.source.shown}, configuration {made.name}",
            nodes=read.nodes,
            gpus_per_node=read.gpus,
            accelerator=machine.accelerator if machine else "GPU",
            keep_global_batch=implementation.keep_global_batch,
            config={key: value for key, value in values.items() if key not in own},
            implementations={choice.implementation_name: own} if own else {},
            environment=made.environment,
        )  # fmt: skip
        whole = system.model_copy(update={"config": values})
        resolved = configuration.resolve(choice, whole, system.nodes, system.gpus_per_node, [])
    except (EncoreError, ValidationError) as error:
        return replace(made, refused=" ".join(str(error).split("\n  "))[:500])
    nearest, differences = _nearest(choice, system, resolved)
    if differences:
        system = system.model_copy(update={"system": _free_name(choice, system, made)})
    return replace(made, system=system, nearest=nearest, differences=differences)


def _free_name(choice: Choice, system: System, made: Reproduction) -> str:
    # A name that no system of the round has: of two with one name, one would never be found
    taken = {ours.system for ours in catalogue.systems(choice) if ours.round == system.round}
    whole = _slug(made.name)
    later = f"{whole}_{made.source.round or 'new'}"
    return next((name for name in (system.system, whole, later) if name not in taken), f"{later}_new")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _flags(source: Source, implementation: Implementation, name: str) -> dict[str, option_mapping.Option]:
    # The options of the files that the command names, for this configuration
    found: dict[str, option_mapping.Option] = {}
    for pattern, files in implementation.flag_files.items():
        if re.fullmatch(pattern.replace("*", ".*"), name):
            for file in files:
                lines = (source.read(file) or "").splitlines()[:_MOST_LINES_OF_FLAGS]
                words = tuple(Value(line.strip()) for line in lines if line.lstrip().startswith("--"))
                found |= option_mapping.options_of(words)
    return found


def _with_settings(
    source: Source, implementation: Implementation, read: Scripts
) -> tuple[dict[str, option_mapping.Option], list[Note]]:
    # The options of the command with the entries of the JSON file that one of them names
    options = read.options()
    named = options.get(implementation.settings) if implementation.settings else None
    if named is None:
        return options, []
    file = named.value.text
    try:
        found = option_mapping.options_of_json(source.read(file) or "", named.value.sources)
    except (ValueError, RecursionError):
        return options, [Note(file or named.shown, 0, "is no JSON file of the folder: its settings are not known")]
    return {**found, **options}, []


def _environment(read: Scripts, image: dict[str, str], common: Common) -> dict[str, dict[str, str]]:
    # The variables that frameworks, NCCL and MPI read, by the file that has the last word
    found: dict[str, dict[str, str]] = {"Dockerfile": {}}
    for name, value in image.items():
        if _is_read(name, common) and name not in read.variables:
            found["Dockerfile"][name] = value
    for name, variable in read.variables.items():
        is_set = variable.is_exported and variable.file and variable.value.is_known
        if is_set and _is_read(name, common):
            found.setdefault(variable.file, {})[name] = variable.text.strip()
    return {file: values for file, values in found.items() if values}


def _is_read(name: str, common: Common) -> bool:
    return name.startswith(common.read) and name not in common.left_out


def left_options(
    options: dict[str, option_mapping.Option], mapped: list[Mapped], without: dict[str, str], common: Common
) -> list[Left]:
    """Return the options that no key was made from."""
    used = {option for each in mapped for option in each.options}
    patterns = [name for name in without if name.endswith("*")]
    found: list[Left] = []
    together: dict[str, int] = {}
    for option in options.values():
        if option.shown in used:
            continue
        stated = without.get(f"{option.name}={option.value.text}") or without.get(option.name)
        pattern = next((each for each in patterns if fnmatchcase(option.name, each)), None)
        if pattern and not stated:
            together[pattern] = together.get(pattern, 0) + 1
            continue
        found.append(Left(option.shown, option.value.shown, stated or common.options.get(option.name, "")))
    return found + [Left(name, count_of(count, "option"), without[name]) for name, count in together.items()]


def _left(
    read: Scripts,
    mapped: list[Mapped],
    common: Common,
    implementation: Implementation | None,
    given: dict[str, option_mapping.Option] | None = None,
) -> tuple[Left, ...]:
    # The options and the configuration's variables that become no key
    without = implementation.without if implementation else {}
    used_variables = {name for each in mapped for name in each.sources}
    found = left_options(given or read.options(), mapped, without, common)
    unknown = {name for option in read.options().values() for name in option.value.sources}
    for name in sorted(read.of_configuration - used_variables):
        if _is_read(name, common) and read.variables[name].is_exported:
            continue
        meaning = without.get(name) or common.meaning(name)
        # One that is in an option was stated there.
        if meaning or name not in unknown:
            unused = "" if implementation is None else "no option of the training command has it"
            found.append(Left(name, _shown(read.variables[name]), meaning or unused))
    return tuple(found)


def _shown(variable: Variable) -> str:
    return " ".join(each.shown for each in variable.values)


def _nearest(
    choice: Choice, system: System, resolved: configuration.Configuration
) -> tuple[System | None, tuple[Difference, ...]]:
    # The system here with the fewest differences, and those
    found: list[tuple[System, tuple[Difference, ...]]] = []
    for ours in catalogue.systems(choice):
        if ours.kind in COMPARED and ours.round == system.round and ours.framework in (system.framework, ""):
            theirs = configuration.resolve(choice, ours, ours.nodes, ours.gpus_per_node, [])
            found.append((ours, _differences(system, resolved, ours, theirs)))
    if not found:
        return None, ()
    return min(found, key=lambda each: (len(each[1]), each[0].system != system.system))


def _differences(
    system: System, resolved: configuration.Configuration, ours: System, theirs: configuration.Configuration
) -> tuple[Difference, ...]:
    published: dict[str, Any] = {"nodes": system.nodes, "gpus_per_node": system.gpus_per_node, **resolved.plain()}
    here: dict[str, Any] = {"nodes": ours.nodes, "gpus_per_node": ours.gpus_per_node, **theirs.plain()}
    published |= _variables(system)
    here |= _variables(ours)
    names = dict.fromkeys([*published, *here])
    pairs = ((name, _plain(published.get(name)), _plain(here.get(name))) for name in names)
    return tuple(Difference(name, left, right) for name, left, right in pairs if left != right)


def _variables(system: System) -> dict[str, str]:
    return {f"${name}": value for variables in system.environment.values() for name, value in variables.items()}


_PLACE = ("nodes", "gpus_per_node")
_HEAD = (
    "kind", "round", "system", "submitter", "submission", "framework", "source", "nodes", "gpus_per_node", "accelerator"
)  # fmt: skip


def command(made: Reproduction, data: Path | None = None) -> list[str]:
    """Return the words behind ``encore``; empty where there is no command.

    The system here with the fewest differences, and ``--set`` and ``--env`` for each: so that a configuration that
    has no system file runs as it was published. A variable that the published one lacks is set to nothing.
    """
    choice, nearest = made.choice, made.nearest
    if choice is None or made.system is None or nearest is None:
        return []
    words = start(choice, nearest.system, made.system, data)
    published = {each.name: each.published for each in made.differences}
    # With another number of GPUs the rules would change the rate and the batch: what was published counts.
    if published.keys() & {*_PLACE}:
        kept = [name for name in ("batch_size", *choice.benchmark.rates) if name in made.system.config]
        published = {**published, **{name: made.system.config[name] for name in kept if name not in published}}
    for name, value in published.items():
        if name.startswith("$"):
            words += ["--env", f"{name[1:]}={value or ''}"]
        elif name not in (*_PLACE, "round"):
            words += ["--set", f"{name}={json.dumps(value)}"]
    return words


def start(choice: Choice, name: str, system: System, data: Path | None) -> list[str]:
    """Return the words after ``encore`` that start system ``name`` with the round, nodes and GPUs of ``system``."""
    nodes, gpus = system.nodes, system.gpus_per_node
    folder = data or Path("data") / choice.benchmark.full_data.name
    runs = choice.benchmark.rounds[system.round].runs
    if nodes > 1:
        words = ["submit", choice.name, "--nodes", str(nodes), "--gpus-per-node", str(gpus)]
    else:
        words = ["run", choice.name, str(gpus)]
    return [*words, "--system", name, "--round", system.round, "--data", str(folder), "--runs", str(runs)]


def _value(value: object) -> str:
    # A value as TOML has it: lists, texts, numbers and truth values are as JSON's
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_toml(made: Reproduction, system: System) -> str:
    title = made.implementation.title if made.implementation else made.benchmark
    ranks = f"{system.nodes} x {system.gpus_per_node} GPUs"
    lines = [f"# {title}, configuration {made.name} of {system.submitter or 'a folder'}: {ranks}.".replace("\n", " ")]
    lines += [f"{name} = {_value(getattr(system, name))}" for name in _HEAD]
    lines += ["keep_global_batch = true"] if system.keep_global_batch else []
    tables = {
        "config": system.config,
        **{f"implementations.{name}": values for name, values in system.implementations.items()},
        **{f"environment.{_value(file)}": variables for file, variables in system.environment.items()},
    }
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{name} = {_value(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def write_system(made: Reproduction, path: Path) -> None:
    """Write the system file; EncoreError where there is none to write, or a file is there already."""
    if made.system is None:
        raise EncoreError(f"there is no system to write: {made.refused}", expected="a configuration that maps")
    if path.exists():
        raise EncoreError(f"{path} is there already", hint="name a new file with -o")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_toml(made, made.system), encoding="utf-8")
    except OSError as error:
        raise EncoreError(f"{path} cannot be written: {error}", hint="name another file with -o") from error
