"""Values of a shell script's words and variables, each with the variables that it was made from.

Expands quotes, ``$NAME``, ``${NAME:-word}``, ``$((...))``; programs are never run.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import translate

from encore.lab.submissions.safe_eval import OPERATORS, NoValueError, evaluate
from encore.lab.submissions.shell_lexer import MOST_NESTED, ShellError, behind, split

LONGEST_VALUE = 64 * 1024
MOST_PARTS = 10_000  # Of one value
MOST_NOTES = 1000
# Commands, and what the values of all variables and words are made of; in a real configuration it is some thousands
MOST_STEPS = 100_000
LONGEST_PATTERN = 64  # Characters of a pattern in ``${NAME/pattern/}``: a longer one could be slow to match
LONGEST_CUT = 1024  # Characters of the text
# Variables that the shell, the cluster or the person who starts the scripts sets
FROM_OUTSIDE = frozenset({
    "RANDOM", "USER", "HOME", "HOSTNAME", "PWD", "PATH", "NEXP", "CONT", "LOGDIR", "DATESTAMP", "SECONDS",
    "PIPESTATUS", "UID", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
})  # fmt: skip
# Programs whose output no training depends on: where it is missing, nothing is said
QUIET = re.compile(
    r"\s*(date|hostname|whoami|pwd|mktemp|od|ls|nproc|seq|squeue|scontrol|basename \$|dirname \$|nvidia-smi|id)\b"
)
_OWN_FOLDER = re.compile(
    r"\s*(cd\s+)?\"?\$?\(?\s*dirname\s+(--\s+)?\"?\$\{?(BASH_SOURCE(\[0\])?|0)\}?\"?\s*\)?\"?\s*(&&.*pwd.*)?"
)
_OWN_NAME = re.compile(r"\s*basename\s+\$\(\s*readlink\s+-f\s+\$\{?(BASH_SOURCE(\[0\])?|0)\}?\s*\)\s*\|\s*sed\b.*")
_PARAMETER = re.compile(r"(#|!)?([A-Za-z_]\w*|[0-9@*#?$!-])(\[[^\]]*\])?")
_WHOLE_ARRAY = re.compile(r'"\$\{(\w+)\[@\]\}"')  # The one word that becomes several, or none, in spite of its quotes
_SPECIAL = re.compile(r"""[\\'"$`]""")
_NUMBERS = re.compile(r"[\d\s+\-*/%()<>=!]*\Z")
_MOST_DIGITS = 18
# What is more than a word between spaces where ``eval`` reads a text once more
_READ_AGAIN = re.compile(r"""['"\\$`;|&<>()#\n]""")


class NotUnderstoodError(Exception):
    """A part of a word that is outside of what is read here; the text says which."""


@dataclass(frozen=True)
class Value:
    """A text with what it was made from."""

    text: str = ""
    sources: frozenset[str] = frozenset()  # Variables that it was read from, by way of others as well
    # False where a part is known on the submitter's machine alone, such as the output of a program
    is_known: bool = True
    parts: tuple[Value, ...] = ()  # What it was put together from, where that has different sources

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
        if length > LONGEST_VALUE or len(parts) > MOST_PARTS:
            raise ValueError(f"a value has more than {LONGEST_VALUE:,} characters or {MOST_PARTS:,} parts")
    if len(parts) < 2:
        return parts[0] if parts else Value()
    sources = frozenset[str]().union(*(part.sources for part in parts))
    return Value("".join(part.text for part in parts), sources, all(part.is_known for part in parts), tuple(parts))


UNKNOWN = Value("", is_known=False)
# A part of a word, None between two elements of an array; and whether it stays whole: else it is split at spaces
Piece = tuple[Value | None, bool]


@dataclass(frozen=True)
class Variable:
    """A variable as it was last assigned; an array has several values."""

    values: tuple[Value, ...]
    file: str
    line: int
    is_exported: bool = False

    @property
    def value(self) -> Value:
        """What ``$NAME`` gives: of an array its first element."""
        return self.values[0] if self.values else Value()

    @property
    def text(self) -> str:
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

    _steps: int = 0

    def spend(self, steps: int, line: int) -> None:
        """Count what was done; ShellError where that is more than any real script needs."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise ShellError(line, f"more than {MOST_STEPS:,} commands and parts of values")

    def note(self, file: str, line: int, reason: str) -> None:
        """Keep a note, once; behind MOST_NOTES of them nobody reads one more."""
        made = Note(file, line, reason)
        if len(self.notes) < MOST_NOTES and made not in self.notes:
            self.notes.append(made)


class Expander:
    def __init__(self, state: State, file: str) -> None:
        self._state = state
        self._file = file

    def words(self, raw: str, line: int) -> list[Value]:
        """Return the words that ``raw`` becomes, split at the spaces of what is not quoted."""
        array = _WHOLE_ARRAY.fullmatch(raw)
        if array and array[1] in self._state.variables:
            return list(self._state.variables[array[1]].values)
        parts: list[Value | None] = []
        for value, quoted in self._pieces(raw, line, 0):
            if value is None or quoted:
                parts.append(value)
                continue
            texts = re.split(r"\s+", value.text)
            for number, text in enumerate(texts):
                parts += [None] if number else []
                if text or (not value.is_known and len(texts) == 1):
                    parts.append(replace(value, text=text, parts=()))
        words = itertools.groupby(parts, lambda part: part is not None)
        return [joined(part for part in word if part is not None) for is_word, word in words if is_word]

    def whole(self, raw: str, line: int, depth: int = 0) -> Value:
        """Return ``raw`` as one text, as an assignment takes it."""
        return joined(Value(" ") if value is None else value for value, _ in self._pieces(raw, line, depth))

    def again(self, values: list[Value], line: int) -> list[Value]:
        """Return the words of the one command that ``eval`` makes of its own; none where it makes something else."""
        made = joined(part for value in values for part in (value, Value(" ")))
        if not _READ_AGAIN.search(made.text):
            return made.split()
        tokens = split(made.text) if made.is_known else []
        if not tokens or not all(token.is_word for token in tokens):
            self._state.note(self._file, line, f"eval {_short(made.text)}: not one command that is known; passed over")
            return []
        words = [word for token in tokens for word in self.words(token.text, line)]
        return [replace(word, sources=word.sources | made.sources) for word in words]

    def _pieces(self, raw: str, line: int, depth: int) -> Iterator[Piece]:
        if depth > MOST_NESTED:
            raise ShellError(line, f"more than {MOST_NESTED} expansions in each other")
        at, quoted = 0, False
        while at < len(raw):
            sign = raw[at]
            if sign == "\\" and at + 1 < len(raw):
                escaped = raw[at + 1]
                keeps = quoted and escaped not in '$`"\\'
                if escaped != "\n":
                    yield Value(f"\\{escaped}" if keeps else escaped), True
                at += 2
            elif sign == "'" and not quoted:
                end = raw.index("'", at + 1)
                yield Value(raw[at + 1 : end]), True
                at = end + 1
            elif sign == '"':
                quoted = not quoted
                yield Value(), True
                at += 1
            elif sign in "$`":
                end = behind(raw, at)
                yield from self._expansion(raw[at:end], line, quoted, depth)
                at = end
            else:
                special = _SPECIAL.search(raw, at + 1)
                end = special.start() if special else len(raw)
                yield Value(raw[at:end]), True
                at = end

    def _expansion(self, text: str, line: int, quoted: bool, depth: int) -> Iterator[Piece]:
        try:
            if text.startswith("$(("):
                yield self._arithmetic(text[3:-2], line, depth), quoted
            elif text.startswith(("$(", "`")):
                yield self._output(text[2:-1] if text[0] == "$" else text[1:-1], line), quoted
            elif text == "$":
                yield Value("$"), True
            else:
                inside = text[2:-1] if text.startswith("${") else text[1:]
                for number, value in enumerate(self._parameter(inside, line, depth)):
                    yield from [(None, quoted)] if number else []
                    yield value, quoted
        except NotUnderstoodError as error:
            self._state.note(self._file, line, f"{_short(text)}: {error}; taken for unknown")
            yield UNKNOWN, quoted

    def _output(self, program: str, line: int) -> Value:
        # What a program would print, where the scripts' usual ones ask for their own name or folder
        if _OWN_NAME.fullmatch(program):
            # What the scripts call the configuration
            return Value(self._file.rpartition("/")[2].removeprefix("config_").removesuffix(".sh"))
        if _OWN_FOLDER.fullmatch(program):
            return Value(".")
        if not QUIET.match(program):
            self._state.note(self._file, line, f"$({_short(program)}): a program's output; taken for unknown")
        return UNKNOWN

    def _arithmetic(self, text: str, line: int, depth: int) -> Value:
        named = re.sub(r"(?<![\w${#])([A-Za-z_]\w*)", r"${\1}", text)
        made = self.whole(named, line, depth + 1)
        if not made.is_known:
            return Value("", made.sources, is_known=False)
        return Value(str(calculate(made.text)), made.sources)

    def _parameter(self, inside: str, line: int, depth: int) -> tuple[Value, ...]:
        # Several values where all of an array are asked for
        match = _PARAMETER.match(inside)
        if match is None or match[1] == "!":
            raise NotUnderstoodError("an expansion of this form is not read")
        prefix, name, index = match.groups()
        if index not in (None, "[0]", "[@]", "[*]") and name in self._state.variables:
            raise NotUnderstoodError("an element of an array")
        rest, is_whole = inside[match.end() :], index in ("[@]", "[*]")
        values = self._lookup(name, is_whole)
        if prefix == "#" and name:
            length = len(values or ()) if is_whole else len(values[0].text if values else "")
            return (Value(str(length)),)
        if rest:
            return (self._changed(name, values, rest, line, depth),)
        if values is None:
            return (UNKNOWN if name in FROM_OUTSIDE else Value("", frozenset([name])),)
        return values

    def _lookup(self, name: str, is_whole: bool) -> tuple[Value, ...] | None:
        # The values of a variable, one unless ``is_whole``; None where it is not set
        if name in ("BASH_SOURCE", "0"):
            return (Value(f"./{self._file}"),)
        known = self._state.variables.get(name)
        if known is None:
            return None
        return known.values if is_whole else (known.value,)

    def _changed(self, name: str, values: tuple[Value, ...] | None, rest: str, line: int, depth: int) -> Value:
        # ``${NAME<rest>}``: a default, an alternative, or a value without a part of it
        value = values[0] if values else None
        default = re.match(r"(:?)([-=+?])", rest)
        if default:
            word = rest[default.end() :]
            is_set = value is not None and bool(value.text or not default[1] or not value.is_known)
            if default[2] == "+":
                return self.whole(word, line, depth + 1) if is_set else Value()
            if is_set and value is not None:
                return value
            if default[2] == "?" or name in FROM_OUTSIDE:
                return UNKNOWN
            made = self.whole(word, line, depth + 1)
            return Value(made.text, made.sources | {name}, made.is_known)
        if value is None:
            return Value()
        # Each place of the text is compared with the pattern.
        self._state.spend(min(len(value.text), LONGEST_CUT), line)
        return Value(_cut(value.text, rest), value.sources, value.is_known)


def _cut(text: str, how: str) -> str:
    # ``text`` without what a pattern matches, as ``%``, ``%%``, ``#``, ``##`` and ``/`` do it
    match = re.match(r"(%%|%|##|#|//|/|,,|\^\^)", how)
    if match is None or len(how) > LONGEST_PATTERN:
        raise NotUnderstoodError("an expansion of this form is not read")
    sign, pattern = match[1], how[match.end() :]
    if sign in (",,", "^^"):
        return text.lower() if sign == ",," else text.upper()
    if len(text) > LONGEST_CUT or pattern.count("*") > 2 or re.search(r"[$`'\"\[\]]", pattern):
        raise NotUnderstoodError("a pattern of this form is not read")
    if sign[0] == "/":
        wanted, _, replacement = pattern.partition("/")
        expression = ".*".join(".".join(map(re.escape, part.split("?"))) for part in wanted.split("*"))
        return re.sub(expression, lambda _: replacement, text, count=0 if sign == "//" else 1) if wanted else text
    matches = re.compile(translate(pattern)).match
    places = range(len(text) + 1)
    # The longest end begins furthest left, the longest beginning ends furthest right.
    for place in places if sign in ("%%", "#") else reversed(places):
        if sign[0] == "%" and matches(text, place):
            return text[:place]
        if sign[0] == "#" and matches(text, 0, place):
            return text[place:]
    return text


def calculate(text: str) -> int:
    """Return the whole number that an arithmetic expression of the shell gives; division rounds towards zero."""
    plain = text.strip()
    if not _NUMBERS.match(plain) or re.search(rf"\d{{{_MOST_DIGITS + 1}}}", plain):
        raise NotUnderstoodError("an expression of this form is not read")
    if not plain:
        return 0
    if len(plain) > 256:
        raise NotUnderstoodError("an expression of this length is not read")
    without_zeros = re.sub(r"\b0+(?=\d)", "", plain)
    try:
        made = int(evaluate(without_zeros, str, {}, _ROUNDING_TOWARDS_ZERO))
    except NoValueError:
        raise NotUnderstoodError("this has no value") from None
    if abs(made) >= 10**_MOST_DIGITS:
        raise NotUnderstoodError("the number is too large")
    return made


def _quotient(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_ROUNDING_TOWARDS_ZERO = {
    **OPERATORS, ast.Div: _quotient, ast.Mod: lambda left, right: left - right * _quotient(left, right),
}  # fmt: skip


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= 60 else f"{plain[:57]}..."
