"""Compare one published configuration with the systems here, key by key."""

import itertools
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from encore import catalogue, configuration
from encore.catalogue import Choice, System
from encore.errors import EncoreError
from encore.lab.submissions import option_mapping, scripts
from encore.lab.submissions.log_options import printed_options
from encore.lab.submissions.option_mapping import Common, Implementation, Mapped, Submitted
from encore.lab.submissions.scripts import Scripts
from encore.lab.submissions.shell_expansion import Note, Value
from encore.lab.submissions.source import Source, Tree, configuration_name, open_source
from encore.results.format import count_of
from encore.results.logs.reader import read_events
from encore.results.logs.run_log import RunLog, read_run
from encore.results.published.systems import nearest_description, rounds_system
from encore.results.table import grouped

COMPARED = ("submitted", "later")
_MOST_LINES_OF_FLAGS = 2000
_VARIABLES = re.compile(r"variable\('(\w+)'")  # In expressions of submitted.toml


@dataclass(frozen=True)
class UnmappedOption:
    """Unmapped option or variable, with the meaning."""

    name: str
    value: str
    meaning: str  # Empty: the mapping does not know it


@dataclass(frozen=True)
class Difference:
    """Key or variable that differs from a system in Encore; None: not set."""

    name: str
    published: Any
    ours: Any


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Published configuration, and the reproducible part."""

    source: Source
    file: str
    benchmark: str  # Benchmark folder in Encore; empty if it is not implemented
    implementation: Implementation | None
    nodes: int
    gpus: int
    gpus_are_known: bool = True
    mapped: tuple[Mapped, ...] = ()
    missing: dict[str, str]  # Keys without a value, with the reason
    left: tuple[UnmappedOption, ...] = ()
    environment: dict[str, dict[str, str]]
    base: str  # Base image of the submitted Dockerfile
    notes: tuple[Note, ...] = ()
    refused: str = ""  # Reason for a missing system, otherwise empty
    system: System | None = None
    nearest: System | None = None  # The system here with the fewest differences
    alternative: tuple[Choice, System] | None = None  # Nearest system, if the options cannot be mapped
    differences: tuple[Difference, ...] = ()
    assumed: dict[str, Any] = field(default_factory=dict)  # Keys that a log does not have, from the nearest system

    @property
    def name(self) -> str:
        return configuration_name(self.file)

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
    def known_left(self) -> tuple[UnmappedOption, ...]:
        return tuple(option for option in self.left if option.meaning)

    @property
    def unknown_left(self) -> tuple[UnmappedOption, ...]:
        return tuple(option for option in self.left if not option.meaning)


def _choice(benchmark: str, implementation: Implementation) -> Choice:
    if implementation.choice:
        return catalogue.choose(implementation.choice)
    choices = _choices(benchmark)
    same_framework = [choice for choice in choices if choice.implementation.framework == implementation.framework]
    return (same_framework or choices)[0]


def _choices(benchmark: str) -> list[Choice]:
    return [choice for choice in catalogue.choices().values() if choice.folder.parent.name == benchmark]


_MIN_LETTERS = 6  # Shortest benchmark abbreviation in a path: llama2_70b for llama2_70b_lora


def _unmapped(folder: str) -> str:
    """Return the benchmark without submitted.toml in a path, otherwise an empty string."""
    parts = [re.sub(r"[^a-z0-9]", "", part.lower()) for part in folder.split("/")]
    unmapped = {choice.folder.parent.name for choice in catalogue.choices().values()}
    unmapped -= {name for name, _ in option_mapping.implementations()}
    prefixes = tuple(part for part in parts if len(part) >= _MIN_LETTERS)
    return next((name for name in sorted(unmapped) if any(map(name.replace("_", "").startswith, prefixes))), "")


def _alternative(reproduction: Reproduction) -> tuple[Choice, System] | None:
    # Nearest system by source, round, accelerator and number of GPUs
    accelerator = machine.accelerator if (machine := _machine(reproduction.name)) else ""

    def similarity(system: System) -> tuple[bool, ...]:
        return (
            system.source.endswith(f"{reproduction.source.shown}, configuration {reproduction.name}"),
            system.round == reproduction.source.round,
            system.accelerator == accelerator,
            (system.nodes, system.gpus_per_node) == (reproduction.nodes, reproduction.gpus),
            system.kind == "submitted",
        )

    choices = [choice for choice in _choices(reproduction.benchmark) if choice.name == choice.benchmark.name]
    systems = [system for choice in choices for system in catalogue.systems(choice) if system.kind != "small"]
    return (choices[0], max(systems, key=similarity)) if systems else None


def _machine(configuration_name: str) -> option_mapping.Machine | None:
    machines = reversed(option_mapping.common().machine.items())
    return next((machine for prefix, machine in machines if configuration_name.startswith(prefix)), None)


def reproduce(source: Source, file: str, nodes: int | None = None, gpus: int | None = None) -> Reproduction:
    """Read a configuration and compare it with the systems in Encore; NoValueError if it cannot be parsed.

    ``nodes`` and ``gpus`` (per node) are for configurations without these values.
    """
    common = option_mapping.common()
    matches = option_mapping.find_implementations(source.shown) or option_mapping.find_implementations(source.folder)
    benchmark = matches[0][0] if matches else _unmapped(source.shown) or _unmapped(source.folder)
    read = scripts.read(source, file, [candidate for _, candidate in matches], common, nodes, gpus)
    text = source.read("Dockerfile") or ""
    environment = _environment(read, scripts.environment(text), common)
    reproduction = Reproduction(
        source=source, file=file, benchmark=benchmark, implementation=read.implementation, nodes=read.nodes,
        gpus=read.gpus, gpus_are_known=read.gpus_are_known, missing={}, environment=environment,
        base=scripts.base_image(text), notes=read.notes,
    )  # fmt: skip
    implementation, refused = read.implementation, "Encore has no benchmark for this folder"
    if implementation is None and matches:
        programs = ", ".join(read.programs[:6]) or "nothing"
        refused = f"the training program of {benchmark} was not found in the scripts, which start {programs}"
    elif implementation is None and benchmark:
        refused = f"the options of {_choices(benchmark)[0].benchmark.title} are not mapped yet (no submitted.toml)"
    if implementation is None and benchmark:
        reproduction = replace(reproduction, alternative=_alternative(reproduction))
    if implementation is not None:
        last = implementation.last_round
        if not (last and source.round and _numbers(source.round) > _numbers(last)):
            return _build_system(reproduction, read, common, implementation)
        refused = implementation.afterwards
    return replace(reproduction, implementation=None, left=_unmapped_settings(read, [], common, None), refused=refused)


def reproduce_log(path: Path, round_name: str | None, nodes: int | None, gpus: int | None) -> Reproduction:
    """Compare the hyperparameters and options in a result log with the systems in Encore.

    Keys that the log does not have are those of the nearest system (``assumed``). ``nodes`` and ``gpus`` (per node)
    override the system description next to the log.

    Raises:
        EncoreError: the file is not a result log, or keys do not follow from its content.
    """
    run = read_run(path, round_name)
    tables = option_mapping.submitted()
    table = tables.get(run.benchmark or "", Submitted())
    description = nearest_description(path.parent)
    if description is None or not description.described:
        description = rounds_system(path.parent, run.round, run.platform)
    known_gpus = gpus or description.accelerators_per_node
    node_count, gpu_count = nodes or description.nodes or 1, known_gpus or 1
    layout = {
        "round": run.round, "configuration": path.stem, "nodes": node_count, "gpus": gpu_count,
        "ranks": node_count * gpu_count,
    }  # fmt: skip
    programs = frozenset(name for entry in table.implementation for name in entry.program)
    # A log without a benchmark may be unreadable
    logged, printed = (_logged_options(run), printed_options(path, programs)) if run.benchmark else ((), ())
    printed = (*_named_flags(path, table, logged, printed), *printed)
    implementation = _logged_implementation(run, table, logged, printed, layout)
    if run.benchmark is None or implementation is None:
        names = ", ".join(name for name, entry in tables.items() if entry.log)
        found = run.benchmark or run.unknown_benchmark or run.explanation or "no benchmark"
        raise EncoreError(f"{path}: {found}", expected=f"a result log of {names}")
    read = Scripts(
        variables={}, of_configuration=frozenset(), nodes=node_count, gpus=gpu_count,
        gpus_are_known=known_gpus is not None, command=(*logged, *printed), programs=(),
        implementation=implementation, notes=(),
    )  # fmt: skip
    source = Source(
        tree=Tree(path.parent), folder="", shown=str(path), round=run.round or "", configurations=(path.name,)
    )
    reproduction = Reproduction(
        source=source, file=path.stem, benchmark=run.benchmark, implementation=implementation, nodes=read.nodes,
        gpus=read.gpus, gpus_are_known=read.gpus_are_known, missing={}, environment={}, base="",
    )  # fmt: skip
    result = _build_system(reproduction, read, option_mapping.common(), implementation, only_mapped=True)
    result = replace(result, left=())
    if result.system is None or result.nearest is None or result.choice is None:
        return result
    further = result.nearest.implementations.get(result.choice.implementation_name, {})
    nearest_keys = {**result.nearest.config, **further}
    assumed = {key: value for key, value in nearest_keys.items() if key not in result.system.config}
    missing = {key: why for key, why in result.missing.items() if not why.startswith(option_mapping.NO_OPTION)}
    origin = {"source": f"log {path.name}", "accelerator": description.accelerator or result.nearest.accelerator}
    system, config = result.system, {**assumed, **result.system.config}
    # The log has the global batch, but it may lack the number of ranks that share a sample
    batch = (run.global_batch or 0) * math.prod(config.get(key, 1) for key in result.choice.benchmark.sample_ranks)
    if assumed.keys() & {*result.choice.benchmark.sample_ranks} and batch and batch % layout["ranks"] == 0:
        assumed.pop("batch_size", None)
        config["batch_size"] = int(batch // layout["ranks"])
        result = _set_batch(result, config["batch_size"], result.nearest.config["batch_size"])
    system = system.model_copy(update={**origin, "config": config})
    return replace(result, assumed=assumed, missing=missing, system=system)


def _set_batch(result: Reproduction, batch: int, nearest: int) -> Reproduction:
    # Replace the batch that was computed for one rank per sample
    mapped = tuple(replace(entry, value=batch) if entry.key == "batch_size" else entry for entry in result.mapped)
    differences = [difference for difference in result.differences if difference.name != "batch_size"]
    differences += [Difference("batch_size", batch, nearest)] if batch != nearest else []
    return replace(result, mapped=mapped, differences=tuple(differences))


def _named_flags(
    path: Path, table: Submitted, logged: tuple[Value, ...], printed: tuple[Value, ...]
) -> tuple[Value, ...]:
    # The command in a log of Minigo names a flag file, which is in the scripts of the submission
    option = option_mapping.parse_options(printed).get("flagfile")
    groups = (files for entry in table.implementation for files in entry.flag_files.values())
    files = next((group for group in groups if option and any(file.endswith(option.value.text) for file in group)), ())
    if not files:
        return ()
    flags: tuple[Value, ...] = ()
    with suppress(EncoreError):
        flags = _read_flags(open_source(path.parent, None, None), files)
    stated = {option.text.partition("=")[0] for option in (*logged, *printed)}
    return tuple(flag for flag in flags if flag.text.partition("=")[0] not in stated)


def _logged_implementation(
    run: RunLog, table: Submitted, logged: tuple[Value, ...], printed: tuple[Value, ...], layout: Mapping[str, Any]
) -> Implementation | None:
    # Merge the mapping of MLPerf keys with the submitted implementation that maps the largest number of options
    def mapped_keys(implementation: Implementation, command: tuple[Value, ...]) -> dict[str, str]:
        options = option_mapping.parse_options(command, implementation.pairs_after, implementation.program)
        mapped, _ = option_mapping.map_options(implementation, "", options, layout, {})
        return {entry.key: implementation.keys[entry.key] for entry in mapped if entry.origin == "command"}

    def is_known(expression: str) -> bool:
        return traced.issuperset(f"--{option_mapping.VARIABLE}{name}" for name in _VARIABLES.findall(expression))

    traced = {word.text.partition("=")[0] for word in printed}
    choices = _choices(run.benchmark or "")
    if not choices:
        return None
    choice = choices[0]
    base = Implementation(
        title=f"{choice.benchmark.title}, from a log",
        framework=choice.implementation.framework,
        folders=("*",),
        checked=tuple(choice.benchmark.rounds),
        keys=table.log,
    )
    last_rounds = [(entry, _numbers(entry.last_round)) for entry in table.implementation if not entry.variables]
    candidates = [entry for entry, last in last_rounds if not last or _numbers(run.round or "") <= last]
    program = max(candidates, key=lambda entry: len(mapped_keys(entry, printed)), default=base)
    if program is base or not mapped_keys(program, printed):
        return base if base.keys else None
    from_log, from_program = mapped_keys(base, (*logged, *printed)), mapped_keys(program, printed)
    # The default of a variable that is not in the log would be a guess
    constants, *further = (
        {key: expression for key, expression in entries.items() if is_known(expression)}
        for entries in (program.keys, *program.implementations.values())
    )
    keys = {**base.keys, **constants, **from_program, **from_log}
    implementations = dict(zip(program.implementations, further, strict=True))
    update = {"title": base.title, "checked": base.checked, "keys": keys, "implementations": implementations}
    return program.model_copy(update=update)


def _logged_options(run: RunLog) -> tuple[Value, ...]:
    # The hyperparameters in a log as options of a command, with their lines
    lines = {event.key: event for event in reversed(list(read_events(run.path))) if event.key in run.hyperparameters}
    options = [
        Value(
            f"--{key}={event.value if isinstance(event.value, str) else json.dumps(event.value)}",
            frozenset({f"line {event.line}"}),
        )
        for key, event in lines.items()
    ]
    evaluations = [point for point in run.quality if point.samples]
    for first, second in itertools.pairwise(evaluations[:2]):
        interval = (second.samples or 0.0) - (first.samples or 0.0)
        sources = frozenset({f"line {first.line}", f"line {second.line}"})
        options.append(Value(f"--evaluation.interval={interval:.0f}", sources))
    return tuple(options)


def _numbers(round_name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", round_name))


def _build_system(
    reproduction: Reproduction,
    read: Scripts,
    common: Common,
    implementation: Implementation,
    only_mapped: bool = False,
) -> Reproduction:
    # ``only_mapped``: compare mapped keys only
    choice = _choice(reproduction.benchmark, implementation)
    rounds = list(choice.benchmark.rounds)
    training_code = filter(None, map(reproduction.source.read, ("train.py", "src/train.py")))
    constants = {
        "round": reproduction.source.round, "configuration": reproduction.name, "nodes": read.nodes, "gpus": read.gpus,
        "ranks": read.nodes * read.gpus, "train_py": next(training_code, ""),
    }  # fmt: skip
    refused = option_mapping.rejection(implementation, constants, read.values())
    if refused:
        left = _unmapped_settings(read, [], common, implementation)
        return replace(reproduction, implementation=implementation, refused=refused, left=left)
    published_options, unread = _add_settings(reproduction.source, implementation, read)
    reproduction = replace(reproduction, notes=(*reproduction.notes, *unread))
    options = {**_flags(reproduction.source, implementation, reproduction.name), **published_options}
    mapped, missing = option_mapping.map_options(
        implementation, choice.implementation_name, options, constants, read.values()
    )
    if not read.gpus_are_known:
        missing["gpus_per_node"] = "neither a variable nor the name has the number of GPUs: give --gpus-per-node"
    reproduction = replace(
        reproduction,
        mapped=tuple(mapped),
        missing=missing,
        left=_unmapped_settings(read, mapped, common, implementation, published_options),
    )
    machine = _machine(reproduction.name)
    base, accelerator = (machine.name, machine.accelerator) if machine else (_slug(reproduction.name), "GPU")
    values = {mapped_key.key: _plain(mapped_key.value) for mapped_key in mapped}
    implementation_values = {
        key: values[key] for key in implementation.implementations.get(choice.implementation_name, {}) if key in values
    }
    try:
        system = System(
            kind="submitted" if reproduction.source.round in rounds else "later",
            round=reproduction.source.round if reproduction.source.round in rounds else rounds[-1],
            system=f"{base}_n{read.nodes}" if read.nodes > 1 else base,
            submitter=reproduction.source.shown.split("/")[0] if "/" in reproduction.source.shown else "",
            submission=reproduction.source.submission,
            framework=implementation.framework,
            source=f"mlcommons/training_results_{reproduction.source.round}, {reproduction.source.shown},"
            f" configuration {reproduction.name}",
            nodes=read.nodes,
            gpus_per_node=read.gpus,
            accelerator=accelerator,
            keep_global_batch=implementation.keep_global_batch,
            config={key: value for key, value in values.items() if key not in implementation_values},
            implementations={choice.implementation_name: implementation_values} if implementation_values else {},
            environment=reproduction.environment,
        )  # fmt: skip
        full_system = system.model_copy(update={"config": values})
        resolved = configuration.resolve(choice, full_system, system.nodes, system.gpus_per_node, [])
    except (EncoreError, ValidationError) as error:
        return replace(reproduction, refused=" ".join(str(error).split("\n  "))[:500])
    nearest, differences = _nearest(choice, system, resolved, {*_PLACE, *values} if only_mapped else None)
    if differences:
        system = system.model_copy(update={"system": _free_name(choice, system, reproduction)})
    return replace(reproduction, system=system, nearest=nearest, differences=differences)


def _free_name(choice: Choice, system: System, reproduction: Reproduction) -> str:
    # Name not used by a system of the round: a duplicate would be unreachable
    used_names = {existing.system for existing in catalogue.systems(choice) if existing.round == system.round}
    full_name = _slug(reproduction.name)
    later = f"{full_name}_{reproduction.source.round or 'new'}"
    return next((name for name in (system.system, full_name, later) if name not in used_names), f"{later}_new")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _flags(source: Source, implementation: Implementation, name: str) -> dict[str, option_mapping.Option]:
    # The options of the files that the command names, for this configuration
    options: dict[str, option_mapping.Option] = {}
    for pattern, files in implementation.flag_files.items():
        if re.fullmatch(pattern.replace("*", ".*"), name):
            options |= option_mapping.parse_options(_read_flags(source, files))
    return options


def _read_flags(source: Source, files: tuple[str, ...]) -> tuple[Value, ...]:
    # An option in a later file replaces all its occurrences in earlier files
    options: dict[str, list[Value]] = {}
    for file in files:
        lines = (source.read(file) or "").splitlines()[:_MOST_LINES_OF_FLAGS]
        flags = [Value(line.strip(), frozenset({file})) for line in lines if line.lstrip().startswith("--")]
        options |= grouped(flags, lambda flag: flag.text.partition("=")[0])
    return tuple(itertools.chain.from_iterable(options.values()))


def _add_settings(
    source: Source, implementation: Implementation, read: Scripts
) -> tuple[dict[str, option_mapping.Option], list[Note]]:
    # Options of the command and entries of the JSON settings file
    options = read.options()
    settings_option = options.get(implementation.settings) if implementation.settings else None
    if settings_option is None:
        return options, []
    file = settings_option.value.text
    with suppress(ValueError, RecursionError):
        settings = option_mapping.parse_json_options(source.read(file) or "", settings_option.value.sources)
        return {**settings, **options}, []
    reason = "is not a JSON file in the folder: its settings are unknown"
    return options, [Note(file or settings_option.shown, 0, reason)]


def _environment(read: Scripts, image: dict[str, str], common: Common) -> dict[str, dict[str, str]]:
    # The variables that frameworks, NCCL and MPI read, by the file that has the last word
    of_image = {n: value for n, value in image.items() if _is_read(n, common) and n not in read.variables}
    variables = {"Dockerfile": of_image}
    for name, variable in read.variables.items():
        is_set = variable.is_exported and variable.file and variable.value.is_known
        if is_set and _is_read(name, common):
            variables.setdefault(variable.file, {})[name] = variable.text.strip()
    return {file: values for file, values in variables.items() if values}


def _is_read(name: str, common: Common) -> bool:
    return name.startswith(common.read) and name not in common.left_out


def left_options(
    options: dict[str, option_mapping.Option], mapped: list[Mapped], without: dict[str, str], common: Common
) -> list[UnmappedOption]:
    """Return the unmapped options."""
    used = {option for key in mapped for option in key.options}
    patterns = [name for name in without if name.endswith("*")]
    unmapped: list[UnmappedOption] = []
    together: dict[str, int] = {}
    for option in options.values():
        if option.shown in used:
            continue
        stated = without.get(f"{option.name}={option.value.text}") or without.get(option.name)
        pattern = next((glob for glob in patterns if fnmatchcase(option.name, glob)), None)
        if pattern and not stated:
            together[pattern] = together.get(pattern, 0) + 1
            continue
        unmapped.append(UnmappedOption(option.shown, option.value.shown, stated or common.options.get(option.name, "")))
    return unmapped + [
        UnmappedOption(name, count_of(count, "option"), without[name]) for name, count in together.items()
    ]


def _unmapped_settings(
    read: Scripts,
    mapped: list[Mapped],
    common: Common,
    implementation: Implementation | None,
    published_options: dict[str, option_mapping.Option] | None = None,
) -> tuple[UnmappedOption, ...]:
    # The options and the configuration's variables that become no key
    without = implementation.without if implementation else {}
    used_variables = {name for key in mapped for name in key.sources}
    if implementation and not mapped:  # a rejected configuration: the variables that its keys would have read
        used_variables.update(_VARIABLES.findall(" ".join(implementation.keys.values())))
    unmapped = left_options(published_options or read.options(), mapped, without, common)
    unknown = {name for option in read.options().values() for name in option.value.sources}
    for name in sorted((read.of_configuration - used_variables) & read.variables.keys()):
        if _is_read(name, common) and read.variables[name].is_exported:
            continue
        meanings = (meaning for pattern, meaning in without.items() if fnmatchcase(name, pattern))
        meaning = next(meanings, "") or common.meaning(name)
        # Variables in an option are already reported there.
        if meaning or name not in unknown:
            reads_options = implementation is not None and not implementation.variables
            unused = "no option of the training command has it" if reads_options else ""
            shown = " ".join(element.shown for element in read.variables[name].values)
            unmapped.append(UnmappedOption(name, shown, meaning or unused))
    return tuple(unmapped)


def _nearest(
    choice: Choice, system: System, resolved: configuration.Configuration, stated: set[str] | None
) -> tuple[System | None, tuple[Difference, ...]]:
    # System with the fewest differences, and the differences
    candidates: list[tuple[System, tuple[Difference, ...]]] = []
    for candidate in catalogue.systems(choice):
        is_comparable = candidate.kind in COMPARED and candidate.round == system.round
        if is_comparable and candidate.framework in (system.framework, ""):
            candidate_config = configuration.resolve(choice, candidate, candidate.nodes, candidate.gpus_per_node, [])
            differences = _differences(system, resolved, candidate, candidate_config)
            candidates.append((candidate, tuple(d for d in differences if stated is None or d.name in stated)))
    return min(candidates, key=lambda pair: (len(pair[1]), pair[0].system != system.system), default=(None, ()))


def _differences(
    system: System, resolved: configuration.Configuration, nearest: System, nearest_config: configuration.Configuration
) -> tuple[Difference, ...]:
    published, here = (
        {
            "nodes": described.nodes,
            "gpus_per_node": described.gpus_per_node,
            **config.plain(),
            **{f"${name}": text for variables in described.environment.values() for name, text in variables.items()},
        }
        for described, config in ((system, resolved), (nearest, nearest_config))
    )
    pairs = ((name, _plain(published.get(name)), _plain(here.get(name))) for name in {**published, **here})
    return tuple(Difference(name, theirs, ours) for name, theirs, ours in pairs if theirs != ours)


_PLACE = ("nodes", "gpus_per_node")
_HEAD = (
    "kind", "round", "system", "submitter", "submission", "framework", "source", "nodes", "gpus_per_node", "accelerator"
)  # fmt: skip


def command(reproduction: Reproduction, data: Path | None = None) -> list[str]:
    """Return the arguments of ``encore``; empty if none.

    The command starts the nearest system with ``--set`` and ``--env`` for all differences, to run configurations
    without a system file as published. Variables that the published configuration lacks are set to an empty
    value.
    """
    choice, nearest = reproduction.choice, reproduction.nearest
    if choice is None or reproduction.system is None or nearest is None:
        return []
    argv = start(choice, nearest.system, reproduction.system, data)
    published = {difference.name: difference.published for difference in reproduction.differences}
    # The rules would adapt rate and batch to a different number of GPUs: use the published values.
    if published.keys() & {*_PLACE}:
        overridden = [name for name in ("batch_size", *choice.benchmark.rates) if name in reproduction.system.config]
        published |= {name: reproduction.system.config[name] for name in overridden if name not in published}
    for name, value in published.items():
        if name.startswith("$"):
            argv += ["--env", f"{name[1:]}={value or ''}"]
        elif name not in (*_PLACE, "round"):
            argv += ["--set", f"{name}={json.dumps(value)}"]
    return argv


def start(choice: Choice, name: str, system: System, data: Path | None) -> list[str]:
    """Return the arguments that start system ``name`` with the round, nodes and GPUs of ``system``."""
    nodes, gpus = system.nodes, system.gpus_per_node
    folder = data or Path("data") / choice.benchmark.full_data.name
    runs = choice.benchmark.rounds[system.round].runs
    if nodes > 1:
        argv = ["submit", choice.name, "--nodes", str(nodes), "--gpus-per-node", str(gpus)]
    else:
        argv = ["run", choice.name, str(gpus)]
    return [*argv, "--system", name, "--round", system.round, "--data", str(folder), "--runs", str(runs)]


def _value(value: object) -> str:
    # A value as TOML has it: lists, texts, numbers and truth values are as JSON's
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_toml(reproduction: Reproduction, system: System) -> str:
    title = reproduction.implementation.title if reproduction.implementation else reproduction.benchmark
    ranks = f"{system.nodes} x {system.gpus_per_node} GPUs"
    lines = [
        f"# {title}, configuration {reproduction.name} of {system.submitter or 'a folder'}: {ranks}.".replace("\n", " ")
    ]
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


def write_system(reproduction: Reproduction, path: Path) -> None:
    """Write the system file; EncoreError without a system, or if the file exists."""
    if reproduction.system is None:
        raise EncoreError(f"no system to write: {reproduction.refused}", expected="a configuration that maps")
    if path.exists():
        raise EncoreError(f"{path} already exists", hint="name a new file with -o")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_toml(reproduction, reproduction.system), encoding="utf-8")
    except OSError as error:
        raise EncoreError(f"{path} cannot be written: {error}", hint="choose a different file with -o") from error
