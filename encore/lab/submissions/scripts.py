"""Read one configuration with the scripts that use it, as the first rank of a Slurm job would."""

import re
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase

from encore.lab.submissions.option_mapping import Common, Implementation, Option, options_of
from encore.lab.submissions.safe_eval import NoValueError
from encore.lab.submissions.shell_expansion import Note, NotUnderstoodError, Value, Variable, calculate
from encore.lab.submissions.shell_interpreter import Reader
from encore.lab.submissions.shell_lexer import ShellError
from encore.lab.submissions.source import Source, layout_of, name_of

MOST_RANKS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Scripts:
    """What a configuration and its scripts come to."""

    variables: dict[str, Variable]
    of_configuration: frozenset[str]  # Names of the variables that the configuration, and what it includes, sets
    nodes: int
    gpus: int
    gpus_are_known: bool  # False: neither a variable nor the name has their number; 1 is assumed
    command: tuple[Value, ...]  # Words of the training command; empty where it was not found
    # First words of all that the scripts would start, where the training command was not found
    programs: tuple[str, ...]
    implementation: Implementation | None  # The one of several whose program the command has
    notes: tuple[Note, ...]

    def values(self) -> dict[str, Value]:
        return {name: each.value for name, each in self.variables.items()}

    def options(self) -> dict[str, Option]:
        if self.implementation is None:
            return options_of(self.command)
        return options_of(self.command, self.implementation.pairs_after, self.implementation.program)


def read(
    source: Source,
    file: str,
    candidates: list[Implementation],
    common: Common,
    given_nodes: int | None = None,
    given_gpus: int | None = None,
) -> Scripts:
    """Read a configuration's file and the scripts behind it; NoValueError if the file itself is not understood.

    The numbers of nodes, and of GPUs of each, are the configuration's unless they are given.
    """
    given = {"SLURM_LOCALID": "0", "DATADIR": "/data", "DGXSYSTEM": name_of(file)}
    reader = Reader(source.read, given)
    try:
        reader.read(file)
    except ShellError as error:
        raise NoValueError(str(error)) from error
    of_configuration = frozenset(name for name, each in reader.state.variables.items() if each.file)
    files = {each.file for each in reader.state.variables.values()} | {file}
    named_nodes, named_gpus = layout_of(name_of(file))
    nodes = given_nodes or _count(reader.state.variables, common.nodes) or named_nodes or 1
    known_gpus = given_gpus or _count(reader.state.variables, common.gpus) or named_gpus
    gpus = known_gpus or 1
    for name, count in (("SLURM_NTASKS", nodes * gpus), ("SLURM_JOB_NUM_NODES", nodes), ("SLURM_NNODES", nodes)):
        reader.state.variables.setdefault(name, Variable((Value(str(count)),), "", 0))
    failed, found = [], None
    for script in dict.fromkeys(script for each in candidates for script in each.scripts):
        if source.read(script) is None:
            failed.append(Note(script, 0, "is not in the folder"))
            continue
        try:
            reader.read(script)
        except ShellError as error:
            failed.append(Note(script, 0, str(error)))
        if found := _command(reader, candidates):
            break
    implementation, words, where = found or (None, (), None)
    notes = [
        note
        for note in reader.state.notes
        if note.file in files or where is None or note.file != where[0] or note.line <= where[1]
    ]
    # Where the command was found, another implementation's script is not missed.
    notes += [note for note in failed if implementation is None or note.file in implementation.scripts]
    names = dict.fromkeys(each.words[0].text for each in reader.state.invocations if each.words[0].text)
    return Scripts(
        variables=dict(reader.state.variables),
        of_configuration=of_configuration,
        nodes=nodes,
        gpus=gpus,
        gpus_are_known=known_gpus is not None,
        command=words,
        programs=tuple(names),
        implementation=implementation,
        notes=tuple(notes),
    )


def _count(variables: dict[str, Variable], patterns: tuple[str, ...]) -> int | None:
    # The number that the first variable of some patterns has; None where none has one
    names = [name for pattern in patterns for name in variables if fnmatchcase(name, pattern)]
    for name in names:
        if variables[name].value.is_known and variables[name].text:
            try:
                found = calculate(variables[name].text)
            except NotUnderstoodError:
                continue
            if 0 < found < MOST_RANKS:
                return found
    return None


def _command(
    reader: Reader, candidates: list[Implementation]
) -> tuple[Implementation, tuple[Value, ...], tuple[str, int] | None] | None:
    # The first command, in a variable or started, that has the program of an implementation, and where it is
    variables = reader.state.variables
    held = [(each, variables[each.command]) for each in candidates if each.command in variables]
    places = [([each], tuple(variable.value.split()), variable.file, variable.line) for each, variable in held]
    places += [(candidates, started.words, started.file, started.line) for started in reader.state.invocations]
    for possible, words, file, line in places:
        for each in possible:
            if any(word.text.rpartition("/")[2] in each.program for word in words):
                return each, words, (file, line)
    return None


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_EARLIER = re.compile(r"\$\{?(\w+)\}?")


def _instructions(text: str) -> list[tuple[str, str]]:
    without = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\[ \t]*\n", " ", without)
    found = re.findall(r"^[ \t]*(ARG|FROM|ENV)[ \t]+(.*)$", joined, re.MULTILINE | re.IGNORECASE)
    return [(name.upper(), rest.strip()) for name, rest in found]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _expanded(text: str, known: dict[str, str]) -> str:
    return _EARLIER.sub(lambda match: known.get(match[1], match[0])[:1024], text)[:4096]


def base_image(text: str) -> str:
    """Return the image of the last FROM that is no earlier stage; empty where there is none."""
    known: dict[str, str] = {}
    stages: set[str] = set()
    base = ""
    for name, rest in _instructions(text):
        if name == "ARG" and "=" in rest:
            variable, _, value = rest.partition("=")
            known[variable.strip()] = " ".join(_words(value))
        elif name == "FROM":
            words = [word for word in rest.split() if not word.startswith("--")]
            image = _expanded(words[0], known) if words else ""
            base = base if image in stages else image
            stages |= {words[2]} if len(words) > 2 else set()
    return base


def environment(text: str) -> dict[str, str]:
    """Return the variables that ENV sets; of one that is set twice, the last."""
    found: dict[str, str] = {}
    for name, rest in _instructions(text):
        if name != "ENV":
            continue
        # Docker's older form has one variable, and a space in place of the sign.
        form = rest if re.match(r"\w+=", rest) else re.sub(r"^(\w+)\s+", r"\1=", rest)
        found |= dict(word.split("=", 1) for word in _words(form) if _ASSIGNMENT.match(word))
    return found
