"""Expand the words of a shell script: quotes, ``$NAME``, ``${NAME:-word}``, ``$((...))``; programs are never run."""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from encore.lab.submissions.expressions import OPERATORS, NoValueError, evaluate
from encore.lab.submissions.shell_tokens import ShellError, end_of_expansion, split
from encore.lab.submissions.shell_values import MOST_WORDS, UNKNOWN, State, Value, joined

MOST_NESTED = 40
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
_NUMBERS = re.compile(r"[\d\s+\-*/%()<>=!]*\Z")
_MOST_DIGITS = 18
# What is more than a word between spaces where ``eval`` reads a text once more
_READ_AGAIN = re.compile(r"""['"\\$`;|&<>()#\n]""")


class NotUnderstoodError(Exception):
    """A part of a word that is outside of what is read here; the text says which."""


@dataclass(frozen=True)
class Piece:
    """A part of a word: quoted text stays whole, the rest is split at spaces."""

    value: Value
    is_quoted: bool
    ends_word: bool = False  # Between two elements of an array


class Expander:
    """Expands the words of one script."""

    def __init__(self, state: State, file: str, name: str, arguments: tuple[Value, ...] = ()) -> None:
        self._state = state
        self._file = file
        self._name = name
        self._arguments = arguments

    def words(self, raw: str, line: int) -> list[Value]:
        """Return the words that ``raw`` becomes, split at the spaces of what is not quoted."""
        array = _WHOLE_ARRAY.fullmatch(raw)
        if array and array[1] in self._state.variables:
            return list(self._state.variables[array[1]].values)
        parts: list[Value | None] = []
        for piece in self._pieces(raw, line, 0):
            if piece.ends_word or piece.is_quoted:
                parts.append(None if piece.ends_word else piece.value)
                continue
            texts = re.split(r"\s+", piece.value.text)
            for number, text in enumerate(texts):
                parts += [None] if number else []
                if text or (not piece.value.is_known and len(texts) == 1):
                    parts.append(Value(text, piece.value.sources, piece.value.is_known))
        words = itertools.groupby(parts, lambda part: part is not None)
        found = [joined(part for part in word if part is not None) for is_word, word in words if is_word]
        if len(found) > MOST_WORDS:
            raise ShellError(line, f"more than {MOST_WORDS:,} words")
        return found

    def whole(self, raw: str, line: int, depth: int = 0) -> Value:
        """Return ``raw`` as one text, as an assignment takes it."""
        return joined(Value(" ") if piece.ends_word else piece.value for piece in self._pieces(raw, line, depth))

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
                yield from _escaped(raw[at + 1], quoted)
                at += 2
            elif sign == "'" and not quoted:
                end = raw.index("'", at + 1)
                yield Piece(Value(raw[at + 1 : end]), is_quoted=True)
                at = end + 1
            elif sign == '"':
                quoted = not quoted
                yield Piece(Value(), is_quoted=True)
                at += 1
            elif sign in "$`":
                end = end_of_expansion(raw, at)
                yield from self._expansion(raw[at:end], line, quoted, depth)
                at = end
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in "\\'\"$`":
                    end += 1
                yield Piece(Value(raw[at:end]), is_quoted=True)
                at = end

    def _expansion(self, text: str, line: int, quoted: bool, depth: int) -> Iterator[Piece]:
        try:
            if text.startswith("$(("):
                yield Piece(self._arithmetic(text[3:-2], line, depth), quoted)
            elif text.startswith(("$(", "`")):
                yield Piece(self._output(text[2:-1] if text[0] == "$" else text[1:-1], line), quoted)
            elif text == "$":
                yield Piece(Value("$"), is_quoted=True)
            else:
                inside = text[2:-1] if text.startswith("${") else text[1:]
                yield from self._parameter(inside, line, quoted, depth)
        except NotUnderstoodError as error:
            self._state.note(self._file, line, f"{_short(text)}: {error}; taken for unknown")
            yield Piece(UNKNOWN, quoted)

    def _output(self, program: str, line: int) -> Value:
        # What a program would print, where the scripts' usual ones ask for their own name or folder
        if _OWN_NAME.fullmatch(program):
            return Value(self._name)
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

    def _parameter(self, inside: str, line: int, quoted: bool, depth: int) -> Iterator[Piece]:
        match = _PARAMETER.match(inside)
        if match is None or match[1] == "!":
            raise NotUnderstoodError("an expansion of this form is not read")
        prefix, name, index = match.groups()
        rest = inside[match.end() :]
        values = self._lookup(name, index)
        if prefix == "#" and name:
            length = len(values or ()) if index in ("[@]", "[*]") else len(values[0].text if values else "")
            yield Piece(Value(str(length)), quoted)
        elif rest:
            yield Piece(self._changed(name, values, rest, line, depth), quoted)
        elif values is None:
            yield Piece(UNKNOWN if name in FROM_OUTSIDE else Value("", frozenset([name])), quoted)
        else:
            for number, value in enumerate(values):
                yield from [Piece(Value(), quoted, ends_word=True)] if number else []
                yield Piece(value, quoted)

    def _lookup(self, name: str, index: str | None) -> tuple[Value, ...] | None:
        # The values of a variable, one unless all of an array are asked for; None where it is not set
        if name in ("BASH_SOURCE", "0"):
            return (Value(f"./{self._file}"),)
        if name.isdigit():
            number = int(name)
            return (self._arguments[number - 1],) if 0 < number <= len(self._arguments) else None
        known = self._state.variables.get(name)
        if known is None:
            return None
        if index in ("[@]", "[*]"):
            return known.values
        if index is None or index == "[0]":
            return (known.value,)
        raise NotUnderstoodError("an element of an array")

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
        self._state.count_parts(len(value.text) // 8, line)
        return Value(_cut(value.text, rest), value.sources, value.is_known)


def _escaped(sign: str, quoted: bool) -> Iterator[Piece]:
    if sign == "\n":
        return
    keeps = quoted and sign not in '$`"\\'
    yield Piece(Value(f"\\{sign}" if keeps else sign), is_quoted=True)


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
    from_the_left = range(len(text) + 1)
    if sign[0] == "%":
        ends = from_the_left if sign == "%%" else reversed(from_the_left)
        return next((text[:end] for end in ends if fnmatchcase(text[end:], pattern)), text)
    ends = from_the_left if sign == "#" else reversed(from_the_left)
    return next((text[end:] for end in ends if fnmatchcase(text[:end], pattern)), text)


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
