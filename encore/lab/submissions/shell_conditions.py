"""Decide ``[ ... ]`` and ``[[ ... ]]``: true, false, or not known here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from encore.lab.submissions.shell_expansion import Expander, NotUnderstoodError, calculate
from encore.lab.submissions.shell_tokens import Token
from encore.lab.submissions.shell_values import Value

_FILE_TESTS = frozenset({"-f", "-e", "-d", "-r", "-s", "-x", "-L", "-w"})
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b, "-lt": lambda a, b: a < b, "-le": lambda a, b: a <= b,
}  # fmt: skip

_MOST_TOKENS = 500  # Of a condition: real ones have some tens

IsFile = Callable[[str], "bool | None"]


def matches(text: str, patterns: Sequence[str]) -> bool:
    """Whether a text is of one of the shell's patterns; overlong ones, which could be slow to match, are of none."""
    short = [pattern for pattern in patterns if len(pattern) <= 256 and pattern.count("*") <= 8]
    return len(text) <= 4096 and any(fnmatchcase(text, pattern) for pattern in short)


def holds(tokens: Sequence[Token], expander: Expander, is_file: IsFile) -> bool | None:
    """Return whether what is between the brackets holds; None where that is not known here."""
    try:
        return _Condition(expander, is_file).holds(tokens)
    except (IndexError, NotUnderstoodError):
        return None


_CERTAINTY = (False, None, True)  # What ``-a`` takes the least of and ``-o`` the most: what is not known is in between


def _parted(tokens: Sequence[Token], signs: Sequence[str]) -> list[list[Token]]:
    # The tokens between the signs that are in no parentheses
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text == "(") - (token.text == ")")
        if depth == 0 and token.text in signs:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


@dataclass(frozen=True)
class _Condition:
    expander: Expander
    is_file: IsFile

    def holds(self, tokens: Sequence[Token]) -> bool | None:
        if len(tokens) > _MOST_TOKENS:
            return None
        for signs, choose in ((("||", "-o"), max), (("&&", "-a"), min)):
            parts = _parted(tokens, signs)
            if len(parts) > 1:
                return choose(map(self.holds, parts), key=_CERTAINTY.index)
        match [token.text for token in tokens]:
            case ["!", *_]:
                found = self.holds(tokens[1:])
                return None if found is None else not found
            case ["(", *_, ")"]:
                return self.holds(tokens[1:-1])
            case ["-z" | "-n" as sign, *operand] if len(operand) < 2:
                # An expansion of nothing without quotes is no word at all to [.
                value = self._value(tokens[1]) if operand else Value()
                return (value.text == "") == (sign == "-z") if value.is_known else None
            case [sign, *_] if sign in _FILE_TESTS:
                value = self._value(tokens[1])
                return self.is_file(value.text) if value.is_known else None
            case [_]:
                value = self._value(tokens[0])
                return value.text != "" if value.is_known else None
            case [_, sign, raw]:
                return self._compared(self._value(tokens[0]), sign, raw, self._value(tokens[2]))
        return None

    def _value(self, token: Token) -> Value:
        return self.expander.whole(token.text, token.line)

    def _compared(self, left: Value, sign: str, raw: str, right: Value) -> bool | None:
        if not (left.is_known and right.is_known):
            return None
        if sign in _NUMBERS:
            return _NUMBERS[sign](calculate(left.text), calculate(right.text))
        if sign in ("=", "==", "!="):
            is_pattern = not raw.startswith(("'", '"')) or "*" in raw.split('"')[-1] + raw.split('"')[0]
            same = matches(left.text, [right.text]) if is_pattern else left.text == right.text
            return same == (sign != "!=")
        return None
