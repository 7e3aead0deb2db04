"""Read a configuration with the scripts that use it, like rank 0 in a Slurm job."""

import re
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from encore.lab.submissions.option_mapping import Common, Implementation, Option, parse_options
from encore.lab.submissions.safe_eval import NoValueError
from encore.lab.submissions.shell_expansion import Note, UnsupportedSyntaxError, Value, Variable, calculate
from encore.lab.submissions.shell_interpreter import Reader
from encore.lab.submissions.shell_lexer import ShellError, split_words
from encore.lab.submissions.source import Source, configuration_name, parse_layout

MOST_RANKS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Scripts:
    """Variables and command from a configuration and scripts."""

    variables: dict[str, Variable]
    of_configuration: frozenset[str]  # Names of the variables set by the configuration and the files it includes
    nodes: int
    gpus: int
    gpus_are_known: bool  # False: the GPU count is neither in a variable nor in the name; 1 is assumed
    command: tuple[Value, ...]  # Training command with arguments; empty if not found
    # First words of all commands in the scripts, if the training command was not found
    programs: tuple[str, ...]
    implementation: Implementation | None  # Implementation whose program is in the command
    notes: tuple[Note, ...]

    def values(self) -> dict[str, Value]:
        return {name: variable.value for name, variable in self.variables.items()}

    def options(self) -> dict[str, Option]:
        if self.implementation is None:
            return parse_options(self.command)
        return parse_options(self.command, self.implementation.pairs_after, self.implementation.program)


def read(
    source: Source,
    file: str,
    candidates: list[Implementation],
    common: Common,
    given_nodes: int | None = None,
    given_gpus: int | None = None,
) -> Scripts:
    """Read a configuration file and the scripts after it; NoValueError if the configuration cannot be parsed.

    ``given_nodes`` and ``given_gpus`` (per node) override the numbers of the configuration.
    """
    initial = {"SLURM_LOCALID": "0", "DATADIR": "/data", "DGXSYSTEM": configuration_name(file)}
    reader = Reader(source.read, initial)
    try:
        reader.read(file)
    except ShellError as error:
        raise NoValueError(str(error)) from error
    of_configuration = frozenset(name for name, entry in reader.state.variables.items() if entry.file)
    files = {entry.file for entry in reader.state.variables.values()} | {file}
    named_nodes, named_gpus = parse_layout(configuration_name(file))
    nodes = given_nodes or _count(reader.state.variables, common.nodes) or named_nodes or 1
    known_gpus = given_gpus or _count(reader.state.variables, common.gpus) or named_gpus
    gpus = known_gpus or 1
    for name, count in (("SLURM_NTASKS", nodes * gpus), ("SLURM_JOB_NUM_NODES", nodes), ("SLURM_NNODES", nodes)):
        reader.state.variables.setdefault(name, Variable((Value(str(count)),), "", 0))
    failed: list[Note] = []
    command: tuple[Implementation, tuple[Value, ...], tuple[str, int] | None] | None = None
    by_variables = [
        entry for entry in candidates if entry.variables and reader.state.variables.keys() >= set(entry.variables)
    ]
    if by_variables:
        candidates, command = [], (by_variables[0], (), None)
    for script in dict.fromkeys(script for entry in candidates for script in entry.scripts):
        if source.read(script) is None:
            failed.append(Note(script, 0, "is not in the folder"))
            continue
        try:
            reader.read(script)
        except ShellError as error:
            failed.append(Note(script, 0, str(error)))
        if command := _command(reader, candidates):
            break
    implementation, argv, location = command or (None, (), None)
    notes = [
        note
        for note in reader.state.notes
        if note.file in files or location is None or note.file != location[0] or note.line <= location[1]
    ]
    # If the command was found, missing scripts of other implementations do not matter.
    notes += [note for note in failed if implementation is None or note.file in implementation.scripts]
    names = dict.fromkeys(entry.words[0].text for entry in reader.state.invocations if entry.words[0].text)
    return Scripts(
        variables=dict(reader.state.variables),
        of_configuration=of_configuration,
        nodes=nodes,
        gpus=gpus,
        gpus_are_known=known_gpus is not None,
        command=argv,
        programs=tuple(names),
        implementation=implementation,
        notes=tuple(notes),
    )


def _count(variables: dict[str, Variable], patterns: tuple[str, ...]) -> int | None:
    # The number that the first variable of some patterns has; None where none has one
    names = [name for pattern in patterns for name in variables if fnmatchcase(name, pattern)]
    for name in names:
        if variables[name].value.is_known and variables[name].text:
            with suppress(UnsupportedSyntaxError):
                count = calculate(variables[name].text)
                if 0 < count < MOST_RANKS:
                    return count
    return None


def _command(
    reader: Reader, candidates: list[Implementation]
) -> tuple[Implementation, tuple[Value, ...], tuple[str, int] | None] | None:
    # First command, in a variable or started, with an implementation's program, and the position
    variables = reader.state.variables
    in_variables = [
        ([implementation], tuple(variable.value.split()), variable.file, variable.line)
        for implementation in candidates
        if (variable := variables.get(implementation.command))
    ]
    started = [(candidates, entry.words, entry.file, entry.line) for entry in reader.state.invocations]
    commands = (
        (implementation, argv, (file, line))
        for possible, argv, file, line in [*in_variables, *started]
        for implementation in possible
        if any(word.text.rpartition("/")[2] in implementation.program for word in argv)
    )
    return next(commands, None)


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_EARLIER = re.compile(r"\$\{?(\w+)\}?")


def _instructions(text: str) -> list[tuple[str, str]]:
    without = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\[ \t]*\n", " ", without)
    matches = re.findall(r"^[ \t]*(ARG|FROM|ENV)[ \t]+(.*)$", joined, re.MULTILINE | re.IGNORECASE)
    return [(name.upper(), rest.strip()) for name, rest in matches]


def _expand(text: str, variables: dict[str, str]) -> str:
    return _EARLIER.sub(lambda match: variables.get(match[1], match[0])[:1024], text)[:4096]


def base_image(text: str) -> str:
    """Return the image of the last FROM that is not an earlier stage; empty if none."""
    variables: dict[str, str] = {}
    stages: set[str] = set()
    base = ""
    for name, rest in _instructions(text):
        if name == "ARG" and "=" in rest:
            variable, _, value = rest.partition("=")
            variables[variable.strip()] = " ".join(split_words(value))
        elif name == "FROM":
            arguments = [word for word in rest.split() if not word.startswith("--")]
            image = _expand(arguments[0], variables) if arguments else ""
            base = base if image in stages else image
            stages |= {arguments[2]} if len(arguments) > 2 else set()
    return base


def environment(text: str) -> dict[str, str]:
    """Return the variables that ENV sets; the last assignment counts."""
    variables: dict[str, str] = {}
    for name, rest in _instructions(text):
        if name != "ENV":
            continue
        # Docker's old form: a single variable, separated by a space instead of ``=``
        form = rest if re.match(r"\w+=", rest) else re.sub(r"^(\w+)\s+", r"\1=", rest)
        variables |= dict(word.split("=", 1) for word in split_words(form) if _ASSIGNMENT.match(word))
    return variables
