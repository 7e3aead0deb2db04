"""Split a shell script into words and operators without executing it.

The grammar is POSIX (Shell Command Language, 2.2 Quoting and 2.3 Token Recognition) with bash arrays and ``[[``,
which the submitted configurations use.
"""

import re
import shlex
from dataclasses import dataclass

MOST_NESTED = 40
_BLANK = re.compile(r"(?:\\\n|[ \t])+")
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|<<<|<<-|<<|>>|>&|<&|&>|[><|&;()\n]")
_ENDS_WORD = frozenset(" \t\n;&|()<>")
_CLOSING = {"(": ")", "{": "}", '"': '"'}
_QUOTES = {"'": "a quote", '"': "a double quote", "`": "a back quote"}
_EXPANDED = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")

# Programs and builtins that do not change variables
IGNORED = frozenset({
    "echo", "printf", "set", "shift", "cd", "mkdir", "touch", "rm", "ln", "ls", "cp", "mv", "sleep", "true",
    "wait", "trap", "ulimit", "umask", "cat", "tee", "shopt", "unalias", "hash", "pushd", "popd", "date",
    "kill", "sync", "chmod", "pwd", "return", "break", "continue",
})  # fmt: skip


class ShellError(Exception):
    """Unreadable script; ``line`` is the position."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class Token:
    """Word with quotes, or operator. A line break is an operator, ``((...))`` a word."""

    text: str
    line: int
    is_word: bool
    joined: bool = False  # No space before the token


def element_end(text: str, start: int, depth: int = 0) -> int:
    """Return the end index of the quoted part, expansion or character at ``start``."""
    sign = text[start]
    if sign == "\\":
        return start + 2
    if sign in "'`":
        closing = text.find(sign, start + 1)
        if closing < 0:
            raise ShellError(0, f"{_QUOTES[sign]} is not closed")
        return closing + 1
    if sign == '"':
        return _end(text, start, depth)
    if sign == "$" and text[start + 1 : start + 2] in ("(", "{"):
        return _end(text, start + 1, depth + 1)
    name = _EXPANDED.match(text, start + 1) if sign == "$" else None
    return name.end() if name else start + 1


def _end(text: str, start: int, depth: int = 0) -> int:
    # End index of the bracket or double-quoted string that opens at ``start``
    if depth > MOST_NESTED:
        raise ShellError(0, f"more than {MOST_NESTED} brackets and expansions in each other")
    opening, pos = text[start], start + 1
    while pos < len(text):
        sign = text[pos]
        if sign == _CLOSING[opening]:
            return pos + 1
        if sign == opening:
            pos = _end(text, pos, depth + 1)
        elif sign == "#" and opening == "(" and text[pos - 1] in " \t\n":
            pos = _line_end(text, pos)
        else:
            pos = pos + 1 if opening == '"' and sign == "'" else element_end(text, pos, depth)
    raise ShellError(0, f"{_QUOTES.get(opening, repr(opening))} is not closed")


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _end_of_arithmetic(text: str, start: int) -> int:
    # End index of ``((...))``; 0 if it does not end with both brackets: nested subshells
    end = _end(text, start) if text.startswith("((", start) else 0
    return end if text[end - 2 : end] == "))" else 0


def _end_of_word(text: str, start: int) -> int:
    pos = start
    while pos < len(text) and text[pos] not in _ENDS_WORD:
        pos = element_end(text, pos)
        if text[pos : pos + 1] == "(" and _ARRAY.match(text[start:pos]):
            return _end(text, pos)
    return min(pos, len(text))


def _skip_documents(text: str, pos: int, delimiters: list[str]) -> int:
    # End index of the here-documents whose bodies start at ``pos``
    for delimiter in delimiters:
        while pos < len(text):
            end = _line_end(text, pos)
            line, pos = text[pos:end], end + 1
            if line.strip("\t") == delimiter:
                break
    return min(pos, len(text))


def split_words(line: str) -> list[str]:
    """Return the words of a command; words separated by spaces if a quote is not closed."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def split(text: str) -> list[Token]:
    """Return the script's tokens; ShellError with the line of the unclosed quote or bracket."""
    text = text.replace("\r\n", "\n")
    tokens: list[Token] = []
    delimiters: list[str] = []
    pos, line, spaced = 0, 1, True
    try:
        while pos < len(text):
            start = pos
            if blank := _BLANK.match(text, pos):
                pos, spaced = blank.end(), True
            elif text[pos] == "#" and spaced:
                pos = _line_end(text, pos)
            elif end := _end_of_arithmetic(text, pos):
                tokens.append(Token(text[pos:end], line, is_word=True, joined=not spaced))
                pos, spaced = end, False
            elif operator := _OPERATOR.match(text, pos):
                tokens.append(Token(operator[0], line, is_word=False, joined=not spaced))
                pos, spaced = operator.end(), True
                if operator[0] == "\n":
                    pos, delimiters = _skip_documents(text, pos, delimiters), []
            else:
                pos = _end_of_word(text, pos)
                if tokens and tokens[-1].text in ("<<", "<<-") and not tokens[-1].is_word:
                    delimiters.append(text[start:pos].strip("'\""))
                tokens.append(Token(text[start:pos], line, is_word=True, joined=not spaced))
                spaced = False
            line += text.count("\n", start, pos)
    except ShellError as error:
        raise ShellError(line, error.reason) from None
    return tokens
