"""Values of a shell script's variables, each with the variables that it was made from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from encore.lab.submissions.shell_tokens import ShellError

LONGEST_VALUE = 64 * 1024
MOST_WORDS = 10_000
MOST_COMMANDS = 20_000
MOST_NOTES = 1000
# What the values of all variables and commands are made of; in a real configuration it is some thousands
MOST_PARTS = 100_000


@dataclass(frozen=True)
class Value:
    """A text with what it was made from."""

    text: str = ""
    sources: frozenset[str] = frozenset()  # Variables that it was read from, by way of others as well
    # False where a part is known on the submitter's machine alone, such as the output of a program
    is_known: bool = True
    parts: tuple[Value, ...] = ()  # What it was put together from, where that has different sources

    def __add__(self, other: Value) -> Value:
        # Both, one behind the other; ValueError where that is longer than any real script's
        return joined((self, other))

    def own_parts(self) -> tuple[Value, ...]:
        """Return what it was put together from, itself if it is one piece, nothing if it is empty."""
        return self.parts or ((self,) if self.text or self.sources or not self.is_known else ())

    def also(self, name: str) -> Value:
        """Return the value as that of the variable ``name``."""
        parts = tuple(replace(each, sources=each.sources | {name}) for each in self.parts)
        return replace(self, sources=self.sources | {name}, parts=parts)

    @property
    def shown(self) -> str:
        """The text for a reader, with what is missing of it."""
        return self.text if self.is_known else f"{self.text}..." if self.text else "not known here"

    def split(self) -> list[Value]:
        """Return its words, each with the sources of its own parts."""
        words, current = list[Value](), list[Value]()
        for part in (*(self.parts or (self,)), Value(" ")):
            for piece in re.findall(r"\s+|\S+", part.text) or [""]:
                if not piece.isspace():
                    current += Value(piece, part.sources, part.is_known).own_parts()
                    continue
                word, current = joined(current), []
                words += [word] if word.text or not word.is_known else []
        return words


def joined(values: Iterable[Value]) -> Value:
    """Return values one behind the other; ValueError where that is longer than any real script's."""
    parts, length = list[Value](), 0
    for value in values:
        parts += value.own_parts()
        length += len(value.text)
        if length > LONGEST_VALUE or len(parts) > MOST_WORDS:
            raise ValueError(f"a value has more than {LONGEST_VALUE:,} characters or {MOST_WORDS:,} parts")
    if len(parts) < 2:
        return parts[0] if parts else Value()
    sources = frozenset[str]().union(*(part.sources for part in parts))
    return Value("".join(part.text for part in parts), sources, all(part.is_known for part in parts), tuple(parts))


UNKNOWN = Value("", is_known=False)


@dataclass(frozen=True)
class Variable:
    """A variable as it was last assigned; an array has several values."""

    values: tuple[Value, ...]
    file: str
    line: int
    is_array: bool = False
    is_exported: bool = False

    @property
    def value(self) -> Value:
        """What ``$NAME`` gives: of an array its first element."""
        return self.values[0] if self.values else Value()

    @property
    def text(self) -> str:
        """All of it in one line."""
        return " ".join(each.text for each in self.values)


@dataclass(frozen=True)
class Note:
    """A place in a script that was not understood, and what it was taken for."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Invocation:
    """A program that the script would start, with its words; it is never started."""

    words: tuple[Value, ...]
    file: str
    line: int


@dataclass
class State:
    """What a script has assigned, would have started, and what of it was not understood."""

    variables: dict[str, Variable] = field(default_factory=dict)
    invocations: list[Invocation] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    _commands: int = 0
    _parts: int = 0

    def count_command(self, line: int) -> None:
        """Count a command; ShellError for more of them than any real script has."""
        self._commands += 1
        if self._commands > MOST_COMMANDS:
            raise ShellError(line, f"more than {MOST_COMMANDS:,} commands")

    def count_parts(self, count: int, line: int) -> None:
        """Count what values are made of; ShellError where that is more than any real script's."""
        self._parts += count
        if self._parts > MOST_PARTS:
            raise ShellError(line, f"values of more than {MOST_PARTS:,} parts")

    def note(self, file: str, line: int, reason: str) -> None:
        """Keep a note, once; behind MOST_NOTES of them nobody reads one more."""
        made = Note(file, line, reason)
        if len(self.notes) < MOST_NOTES and made not in self.notes:
            self.notes.append(made)
