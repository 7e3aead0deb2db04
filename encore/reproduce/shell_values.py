"""Values of a shell script's variables, each with the variables that it was made from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

LONGEST_VALUE = 64 * 1024
MOST_WORDS = 10_000


@dataclass(frozen=True)
class Value:
    """A text with what it was made from."""

    text: str = ""
    sources: frozenset[str] = frozenset()
    """Variables that it was read from, by way of others as well."""
    is_known: bool = True
    """False where a part is known on the submitter's machine alone, such as the output of a program."""
    parts: tuple[Value, ...] = ()
    """What it was put together from, where that has different sources."""

    def __add__(self, other: Value) -> Value:
        """Return both, one behind the other; ValueError where that is longer than any real script's."""
        parts = [each for side in (self, other) for each in side.parts or (side,) if each != Value()]
        if len(self.text) + len(other.text) > LONGEST_VALUE or len(parts) > MOST_WORDS:
            raise ValueError(f"a value has more than {LONGEST_VALUE:,} characters")
        if len(parts) < 2:
            return parts[0] if parts else Value()
        known = self.is_known and other.is_known
        return Value(self.text + other.text, self.sources | other.sources, known, tuple(parts))

    def also(self, name: str) -> Value:
        """Return the value as that of the variable ``name``."""
        parts = tuple(replace(each, sources=each.sources | {name}) for each in self.parts)
        return replace(self, sources=self.sources | {name}, parts=parts)

    def split(self) -> list[Value]:
        """Return its words, each with the sources of its own parts."""
        words, current = list[Value](), Value()
        for part in self.parts or (self,):
            for piece in re.findall(r"\s+|\S+", part.text) or [""]:
                if piece.isspace():
                    words, current = [*words, *([current] if current != Value() else [])], Value()
                else:
                    current = current + Value(piece, part.sources, part.is_known)
        return [*words, *([current] if current.text or not current.is_known else [])]


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

    def note(self, file: str, line: int, reason: str) -> None:
        """Keep a note, once."""
        made = Note(file, line, reason)
        if made not in self.notes:
            self.notes.append(made)
