"""Expand words and variables of shell scripts, and track the variables that values depend on.

Supports quotes, ``$NAME``, ``${NAME:-word}``, ``$((...))``; programs are never executed.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import translate

from encore.lab.submissions.safe_eval import OPERATORS, NoValueError, evaluate
from encore.lab.submissions.shell_lexer import MOST_NESTED, ShellError, element_end, split

LONGEST_VALUE = 64 * 1024
MOST_PARTS = 10_000  # Maximum parts per value
MOST_NOTES = 1000
# Maximum commands plus parts of all values and words; submitted configurations need some thousands
MOST_STEPS = 100_000
LONGEST_PATTERN = 64  # Maximum length of the pattern in ``${NAME/pattern/}``: longer patterns could be slow to match
LONGEST_CUT = 1024  # Characters of the text
# Variables that the shell, the cluster or the person who starts the scripts sets
FROM_OUTSIDE = frozenset({
    "RANDOM", "USER", "HOME", "HOSTNAME", "PWD", "PATH", "NEXP", "CONT", "LOGDIR", "DATESTAMP", "SECONDS",
    "PIPESTATUS", "UID", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
})  # fmt: skip
# Programs whose output is irrelevant for training: no note if it is missing
QUIET = re.compile(
    r"\s*(date|hostname|whoami|pwd|mktemp|od|ls|nproc|seq|squeue|scontrol|basename \$|dirname \$|nvidia-smi|id)\b"
)
_OWN_FOLDER = re.compile(
    r"\s*(cd\s+)?\"?\$?\(?\s*dirname\s+(--\s+)?\"?\$\{?(BASH_SOURCE(\[0\])?|0)\}?\"?\s*\)?\"?\s*(&&.*pwd.*)?"
)
_OWN_NAME = re.compile(r"\s*basename\s+\$\(\s*readlink\s+-f\s+\$\{?(BASH_SOURCE(\[0\])?|0)\}?\s*\)\s*\|\s*sed\b.*")
_PARAMETER = re.compile(r"(#|!)?([A-Za-z_]\w*|[0-9@*#?$!-])(\[[^\]]*\])?")
_WHOLE_ARRAY = re.compile(r'"\$\{(\w+)\[@\]\}"')  # Quoted word that expands to zero or more words
_SPECIAL = re.compile(r"""[\\'"$`]""")
_NUMBERS = re.compile(r"[\d\s+\-*/%()<>=!]*\Z")
_MOST_DIGITS = 18
# Syntax other than plain words, when ``eval`` parses a text again
_READ_AGAIN = re.compile(r"""['"\\$`;|&<>()#\n]""")


class UnsupportedSyntaxError(Exception):
    """Unsupported word part; the message is the reason."""


@dataclass(frozen=True)
class Value:
    """Text with the variables that it depends on."""

    text: str = ""
    sources: frozenset[str] = frozenset()  # Variables that it depends on, directly or indirectly
    # False if a part is known only on the submitter's machine, such as program output
    is_known: bool = True
    parts: tuple[Value, ...] = ()  # Concatenated parts, if their sources differ

    def flat_parts(self) -> tuple[Value, ...]:
        """Return the concatenated parts; the value if it is a single part, empty for an empty value."""
        return self.parts or ((self,) if self.text or self.sources or not self.is_known else ())

    def add_source(self, name: str) -> Value:
        """Return the value with the variable ``name`` as an additional source."""
        parts = tuple(replace(part, sources=part.sources | {name}) for part in self.parts)
        return replace(self, sources=self.sources | {name}, parts=parts)

    @property
    def shown(self) -> str:
        """Text for messages; unknown parts are marked."""
        return self.text if self.is_known else f"{self.text}..." if self.text else "not known here"

    def split(self) -> list[Value]:
        """Return the words with the sources of the parts."""
        fields, current = list[Value](), list[Value]()
        for part in (*(self.parts or (self,)), Value(" ")):
            for piece in re.findall(r"\s+|\S+", part.text) or [""]:
                if not piece.isspace():
                    current += Value(piece, part.sources, part.is_known).flat_parts()
                    continue
                word, current = concatenate(current), []
                fields += [word] if word.text or not word.is_known else []
        return fields


def concatenate(values: Iterable[Value]) -> Value:
    """Concatenate values; ValueError if the result is longer than in any submitted script."""
    parts, length = list[Value](), 0
    for value in values:
        parts += value.flat_parts()
        length += len(value.text)
        if length > LONGEST_VALUE or len(parts) > MOST_PARTS:
            raise ValueError(f"a value has more than {LONGEST_VALUE:,} characters or {MOST_PARTS:,} parts")
    if len(parts) < 2:
        return parts[0] if parts else Value()
    sources = frozenset[str]().union(*(part.sources for part in parts))
    return Value("".join(part.text for part in parts), sources, all(part.is_known for part in parts), tuple(parts))


UNKNOWN = Value("", is_known=False)
# Word part, or None between two array elements; and whether it is quoted (not split at spaces)
Piece = tuple[Value | None, bool]


@dataclass(frozen=True)
class Variable:
    """Variable with the last assignment; arrays have multiple values."""

    values: tuple[Value, ...]
    file: str
    line: int
    is_exported: bool = False

    @property
    def value(self) -> Value:
        """Value of ``$NAME``; the first element for arrays."""
        return self.values[0] if self.values else Value()

    @property
    def text(self) -> str:
        return " ".join(value.text for value in self.values)


@dataclass(frozen=True)
class Note:
    """Unsupported syntax in a script, and the assumed result."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Invocation:
    """Program that the script would start, with arguments; not started."""

    words: tuple[Value, ...]
    file: str
    line: int


@dataclass
class State:
    """Variables, invocations and notes of the interpreted scripts."""

    variables: dict[str, Variable] = field(default_factory=dict)
    invocations: list[Invocation] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    _steps: int = 0

    def spend(self, steps: int, line: int) -> None:
        """Add to the step count; ShellError above the limit for submitted scripts."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise ShellError(line, f"more than {MOST_STEPS:,} commands and parts of values")

    def note(self, file: str, line: int, reason: str) -> None:
        """Add a note if it is new and there are fewer than MOST_NOTES."""
        note = Note(file, line, reason)
        if len(self.notes) < MOST_NOTES and note not in self.notes:
            self.notes.append(note)


class Expander:
    def __init__(self, state: State, file: str) -> None:
        self._state = state
        self._file = file

    def expand_words(self, raw: str, line: int) -> list[Value]:
        """Return the words that ``raw`` expands to; unquoted parts are split at spaces."""
        if (array := _WHOLE_ARRAY.fullmatch(raw)) and array[1] in self._state.variables:
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
        groups = itertools.groupby(parts, lambda part: part is not None)
        return [concatenate(part for part in word if part is not None) for is_word, word in groups if is_word]

    def expand_text(self, raw: str, line: int, depth: int = 0) -> Value:
        """Return ``raw`` expanded to a single text, as in an assignment."""
        return concatenate(Value(" ") if value is None else value for value, _ in self._pieces(raw, line, depth))

    def eval_words(self, values: list[Value], line: int) -> list[Value]:
        """Return the words of the command that ``eval`` executes; empty if it is not a single known command."""
        text = concatenate(part for value in values for part in (value, Value(" ")))
        if not _READ_AGAIN.search(text.text):
            return text.split()
        tokens = split(text.text) if text.is_known else []
        if not tokens or not all(token.is_word for token in tokens):
            self._state.note(self._file, line, f"eval {_short(text.text)}: not a single known command; skipped")
            return []
        fields = [word for token in tokens for word in self.expand_words(token.text, line)]
        return [replace(word, sources=word.sources | text.sources) for word in fields]

    def _pieces(self, raw: str, line: int, depth: int) -> Iterator[Piece]:
        if depth > MOST_NESTED:
            raise ShellError(line, f"more than {MOST_NESTED} expansions in each other")
        pos, quoted = 0, False
        while pos < len(raw):
            sign = raw[pos]
            if sign == "\\" and pos + 1 < len(raw):
                escaped = raw[pos + 1]
                keeps = quoted and escaped not in '$`"\\'
                if escaped != "\n":
                    yield Value(f"\\{escaped}" if keeps else escaped), True
                pos += 2
            elif sign == "'" and not quoted:
                end = raw.index("'", pos + 1)
                yield Value(raw[pos + 1 : end]), True
                pos = end + 1
            elif sign == '"':
                quoted = not quoted
                yield Value(), True
                pos += 1
            elif sign in "$`":
                end = element_end(raw, pos)
                yield from self._expansion(raw[pos:end], line, quoted, depth)
                pos = end
            else:
                special = _SPECIAL.search(raw, pos + 1)
                end = special.start() if special else len(raw)
                yield Value(raw[pos:end]), True
                pos = end

    def _expansion(self, text: str, line: int, quoted: bool, depth: int) -> Iterator[Piece]:
        try:
            if text.startswith("$(("):
                yield self._arithmetic(text[3:-2], line, depth), quoted
            elif text.startswith(("$(", "`")):
                yield self._output(text[2:-1] if text[0] == "$" else text[1:-1], line), quoted
            elif text == "$":
                yield Value("$"), True
            else:
                body = text[2:-1] if text.startswith("${") else text[1:]
                for number, value in enumerate(self._parameter(body, line, depth)):
                    yield from [(None, quoted)] if number else []
                    yield value, quoted
        except UnsupportedSyntaxError as error:
            self._state.note(self._file, line, f"{_short(text)}: {error}; treated as unknown")
            yield UNKNOWN, quoted

    def _output(self, program: str, line: int) -> Value:
        # Program output; supported for scripts that determine the script name or folder
        if _OWN_NAME.fullmatch(program):
            # Configuration name as the scripts use it
            return Value(self._file.rpartition("/")[2].removeprefix("config_").removesuffix(".sh"))
        if _OWN_FOLDER.fullmatch(program):
            return Value(".")
        if not QUIET.match(program):
            self._state.note(self._file, line, f"$({_short(program)}): output of a program; treated as unknown")
        return UNKNOWN

    def _arithmetic(self, text: str, line: int, depth: int) -> Value:
        expression = re.sub(r"(?<![\w${#])([A-Za-z_]\w*)", r"${\1}", text)
        result = self.expand_text(expression, line, depth + 1)
        if not result.is_known:
            return Value("", result.sources, is_known=False)
        return Value(str(calculate(result.text)), result.sources)

    def _parameter(self, body: str, line: int, depth: int) -> tuple[Value, ...]:
        # Multiple values for ``[@]`` and ``[*]``
        match = _PARAMETER.match(body)
        if match is None or match[1] == "!":
            raise UnsupportedSyntaxError("this form of expansion is not supported")
        prefix, name, index = match.groups()
        if index not in (None, "[0]", "[@]", "[*]") and name in self._state.variables:
            raise UnsupportedSyntaxError("an element of an array")
        rest, is_whole = body[match.end() :], index in ("[@]", "[*]")
        values = self._lookup(name, is_whole)
        if prefix == "#" and name:
            length = len(values or ()) if is_whole else len(values[0].text if values else "")
            return (Value(str(length)),)
        if rest:
            return (self._modify(name, values, rest, line, depth),)
        if values is None:
            return (UNKNOWN if name in FROM_OUTSIDE else Value("", frozenset([name])),)
        return values

    def _lookup(self, name: str, is_whole: bool) -> tuple[Value, ...] | None:
        # Variable values, only the first unless ``is_whole``; None if it is not set
        if name in ("BASH_SOURCE", "0"):
            return (Value(f"./{self._file}"),)
        variable = self._state.variables.get(name)
        if variable is None:
            return None
        return variable.values if is_whole else (variable.value,)

    def _modify(self, name: str, values: tuple[Value, ...] | None, rest: str, line: int, depth: int) -> Value:
        # ``${NAME<rest>}``: a default, an alternative, or a value with a pattern removed
        value = values[0] if values else None
        if default := re.match(r"(:?)([-=+?])", rest):
            word = rest[default.end() :]
            is_set = value is not None and bool(value.text or not default[1] or not value.is_known)
            if default[2] == "+":
                return self.expand_text(word, line, depth + 1) if is_set else Value()
            if is_set and value is not None:
                return value
            if default[2] == "?" or name in FROM_OUTSIDE:
                return UNKNOWN
            result = self.expand_text(word, line, depth + 1)
            return Value(result.text, result.sources | {name}, result.is_known)
        if value is None:
            return Value()
        # The pattern is compared at every position of the text.
        self._state.spend(min(len(value.text), LONGEST_CUT), line)
        return Value(_remove_pattern(value.text, rest), value.sources, value.is_known)


def _remove_pattern(text: str, how: str) -> str:
    # ``text`` with a pattern removed or replaced: ``%``, ``%%``, ``#``, ``##`` and ``/``
    match = re.match(r"(%%|%|##|#|//|/|,,|\^\^)", how)
    if match is None or len(how) > LONGEST_PATTERN:
        raise UnsupportedSyntaxError("this form of expansion is not supported")
    sign, pattern = match[1], how[match.end() :]
    if sign in (",,", "^^"):
        return text.lower() if sign == ",," else text.upper()
    if len(text) > LONGEST_CUT or pattern.count("*") > 2 or re.search(r"[$`'\"\[\]]", pattern):
        raise UnsupportedSyntaxError("this form of pattern is not supported")
    if sign[0] == "/":
        glob, _, replacement = pattern.partition("/")
        expression = ".*".join(".".join(map(re.escape, part.split("?"))) for part in glob.split("*"))
        return re.sub(expression, lambda _: replacement, text, count=0 if sign == "//" else 1) if glob else text
    matches = re.compile(translate(pattern)).match
    positions = range(len(text) + 1)
    # The longest suffix starts leftmost, the longest prefix ends rightmost.
    for position in positions if sign in ("%%", "#") else reversed(positions):
        if sign[0] == "%" and matches(text, position):
            return text[:position]
        if sign[0] == "#" and matches(text, 0, position):
            return text[position:]
    return text


def calculate(text: str) -> int:
    """Evaluate a shell arithmetic expression to an integer; division rounds towards zero."""
    plain = text.strip() or "0"
    if len(plain) > 256 or not _NUMBERS.match(plain) or re.search(rf"\d{{{_MOST_DIGITS + 1}}}", plain):
        raise UnsupportedSyntaxError("this form of expression is not supported")
    without_zeros = re.sub(r"\b0+(?=\d)", "", plain)
    try:
        result = int(evaluate(without_zeros, str, {}, _ROUNDING_TOWARDS_ZERO))
    except NoValueError:
        raise UnsupportedSyntaxError("this has no value") from None
    if abs(result) >= 10**_MOST_DIGITS:
        raise UnsupportedSyntaxError("the number is too large")
    return result


def _quotient(dividend: int, divisor: int) -> int:
    return abs(dividend) // abs(divisor) * (1 if (dividend < 0) == (divisor < 0) else -1)


_ROUNDING_TOWARDS_ZERO = {
    **OPERATORS, ast.Div: _quotient, ast.Mod: lambda left, right: left - right * _quotient(left, right),
}  # fmt: skip


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= 60 else f"{plain[:57]}..."
