"""Read options from a result log: training command, parsed arguments, and the configuration of NeMo or Megatron.

Assignments that bash traced are options ``--variable.NAME=VALUE``.

Logs are parsed, not executed. Options record the line number.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from encore.lab.submissions.option_mapping import VARIABLE
from encore.lab.submissions.shell_expansion import LONGEST_VALUE, Value
from encore.lab.submissions.shell_lexer import split_words

_LONGEST_LINE = 1 << 16
_RANK = re.compile(r"^ *(\d+): ?")  # Prefix of srun -l
_ARGUMENT = re.compile(r"(\w+)=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|[^\s,()\[\]]+)")
_ONE_ENTRY = re.compile(r"^\[([^\],]*)\]$")
_MEGATRON = re.compile(r"^ *(\w+) \.{3,} (\S.*)$")
_ENTRY = re.compile(r"^( *)(\w+):(?: (\S.*))?$")
_ITEM = re.compile(r"^ *- ")
# run.sub ends its :::DLPAL line with the configuration name.
_LAYOUT = re.compile(r":::DLPAL .*tp(\d+)pp(\d+)cp(\d+)")
_ASSIGNMENT = re.compile(r"^\++ (?:export )?([A-Z]\w*)=(\S+)$")  # bash -x
_END_OF_COMMAND = frozenset({"|", "||", "&", "&&", ";", ">", "2>&1", "]"})


def printed_options(path: Path, programs: Collection[str]) -> tuple[Value, ...]:
    """Return the options in a log as command-line arguments; the last occurrence counts.

    Args:
        path: log file.
        programs: file names of training programs. The first command with one is read.
    """
    settings, arguments = dict[str, Value](), dict[str, Value]()
    command: tuple[Value, ...] = ()
    cut: dict[str, str] = {}  # srun cuts long lines: their first part, by rank
    parents: list[tuple[int, str]] = []
    for number, rank, part in _lines(path):
        line = cut.pop(rank, "") + part
        sources = frozenset({f"line {number}"})
        if "Namespace(" in line:
            is_cut = not line.endswith(")") and len(line) < _LONGEST_LINE
            cut |= {rank: line} if is_cut else {}
            arguments = {**_namespace(line.partition("Namespace(")[2], sources), **arguments}
        elif not command and any(program in line for program in programs):
            command = _command(line, programs, sources)
        elif match := _ASSIGNMENT.match(line):
            settings[match[1]] = Value(f"--{VARIABLE}{match[1]}={match[2]}"[:LONGEST_VALUE], sources)
        elif match := _LAYOUT.match(line):
            for name, size in zip(("tp", "pp", "cp"), match.groups(), strict=True):
                settings.setdefault(f"layout.{name}", Value(f"--layout.{name}={size}", sources))
        elif match := _MEGATRON.match(line):
            settings.setdefault(match[1], Value(f"--{match[1]}={match[2]}", sources))
        elif match := _ENTRY.match(line):
            # YAML: parents are earlier entries with smaller indentation
            parents = [parent for parent in parents if parent[0] < len(match[1])]
            path_in_file = ".".join([*(name for _, name in parents), match[2]])
            if match[3] and parents:
                settings.setdefault(path_in_file, Value(f"--{path_in_file}={match[3]}", sources))
            parents.append((len(match[1]), match[2]))
        elif not _ITEM.match(line):
            parents = []
    # Parsed arguments include options that the program adds to its command.
    return (*settings.values(), *command, *arguments.values())


def _lines(path: Path) -> Iterator[tuple[int, str, str]]:
    # Yield number, rank and text of lines without MLPerf events
    with path.open(encoding="utf-8", errors="replace") as file:
        number, at_start = 1, True
        while line := file.readline(_LONGEST_LINE):
            # Skip the rest of long lines
            if at_start and ":::MLL" not in line:
                match = _RANK.match(line)
                yield number, match[1] if match else "", line[match.end() if match else 0 :].rstrip("\r\n")
            at_start = line.endswith("\n")
            number += at_start


def _namespace(text: str, sources: frozenset[str]) -> dict[str, Value]:
    # Missing options are False or None. The last value of a cut line may be incomplete.
    pairs = [(match[1], _ONE_ENTRY.sub(r"\1", match[2]).strip("'\"")) for match in _ARGUMENT.finditer(text)]
    return {
        name: Value(f"--{name}" if value == "True" else f"--{name}={value[:LONGEST_VALUE]}", sources)
        for name, value in (pairs if text.endswith(")") else pairs[:-1])
        if value not in ("False", "None")
    }


def _command(line: str, programs: Collection[str], sources: frozenset[str]) -> tuple[Value, ...]:
    arguments = split_words(line)
    start = next((n for n, word in enumerate(arguments, 1) if word.rpartition("/")[2] in programs), len(arguments))
    end = next((n for n, word in enumerate(arguments) if n >= start and word in _END_OF_COMMAND), len(arguments))
    command = arguments[start:end]
    if not any(word.startswith("--") for word in command):
        return ()
    return tuple(Value(word, sources, "$" not in word) for word in command)
