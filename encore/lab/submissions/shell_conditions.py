"""Decide ``[ ... ]`` and ``[[ ... ]]``: true, false, or not known here."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from encore.lab.submissions.shell_expansion import Expander, NotUnderstoodError, calculate
from encore.lab.submissions.shell_tokens import Token
from encore.lab.submissions.shell_values import Value

_FILE_TESTS = frozenset({"-f", "-e", "-d", "-r", "-s", "-x", "-L", "-w"})
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b, "-lt": lambda a, b: a < b, "-le": lambda a, b: a <= b,
}  # fmt: skip

IsFile = Callable[[str], "bool | None"]


def matches(text: str, patterns: Sequence[str]) -> bool:
    """Whether a text is of one of the shell's patterns; overlong ones, which could be slow to match, are of none."""
    short = [pattern for pattern in patterns if len(pattern) <= 256 and pattern.count("*") <= 8]
    return len(text) <= 4096 and any(fnmatchcase(text, pattern) for pattern in short)


def holds(tokens: Sequence[Token], expander: Expander, is_file: IsFile) -> bool | None:
    """Return whether what is between the brackets holds; None where that is not known here."""
    try:
        return _Condition(list(tokens), expander, is_file).whole()
    except (IndexError, NotUnderstoodError):
        return None


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _either(left: bool | None, right: bool | None) -> bool | None:
    if left is True or right is True:
        return True
    return None if left is None or right is None else False


class _Condition:
    def __init__(self, tokens: list[Token], expander: Expander, is_file: IsFile) -> None:
        self._tokens = tokens
        self._expander = expander
        self._is_file = is_file
        self._at = 0

    def whole(self) -> bool | None:
        found = self._or()
        return found if self._at == len(self._tokens) else None

    def _text(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _or(self) -> bool | None:
        found = self._and()
        while self._text() in ("||", "-o"):
            self._at += 1
            found = _either(found, self._and())
        return found

    def _and(self) -> bool | None:
        found = self._not()
        while self._text() in ("&&", "-a"):
            self._at += 1
            found = _both(found, self._not())
        return found

    def _not(self) -> bool | None:
        if self._text() == "!":
            self._at += 1
            found = self._not()
            return None if found is None else not found
        if self._text() == "(":
            self._at += 1
            found = self._or()
            self._at += self._text() == ")"
            return found
        return self._single()

    def _value(self) -> Value:
        token = self._tokens[self._at]
        self._at += 1
        return self._expander.whole(token.text, token.line)

    def _single(self) -> bool | None:
        sign = self._text()
        if sign in ("-z", "-n"):
            self._at += 1
            # An expansion of nothing without quotes is no word at all to [.
            value = self._value() if self._text() not in ("", "&&", "||", ")") else Value()
            return (value.text == "") == (sign == "-z") if value.is_known else None
        if sign in _FILE_TESTS:
            self._at += 1
            value = self._value()
            return self._is_file(value.text) if value.is_known else None
        left = self._value()
        following = self._text()
        if following in ("", "&&", "||", "-a", "-o", ")"):
            return left.text != "" if left.is_known else None
        self._at += 1
        return self._compared(left, following)

    def _compared(self, left: Value, sign: str) -> bool | None:
        raw = self._text()
        right = self._value()
        if not (left.is_known and right.is_known):
            return None
        if sign in _NUMBERS:
            return _NUMBERS[sign](calculate(left.text), calculate(right.text))
        if sign in ("=", "==", "!="):
            is_pattern = not raw.startswith(("'", '"')) or "*" in raw.split('"')[-1] + raw.split('"')[0]
            same = matches(left.text, [right.text]) if is_pattern else left.text == right.text
            return same == (sign != "!=")
        return None
