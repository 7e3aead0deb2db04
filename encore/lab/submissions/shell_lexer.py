"""Split a shell script into words and operators, without running anything.

The grammar is POSIX's (Shell Command Language, 2.2 Quoting and 2.3 Token Recognition) with bash's arrays and
``[[``: what the submitted configurations are written in.
"""

import re
from dataclasses import dataclass

MOST_NESTED = 40
_BLANK = re.compile(r"(?:\\\n|[ \t])+")
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|<<<|<<-|<<|>>|>&|<&|&>|[><|&;()\n]")
_ENDS_WORD = frozenset(" \t\n;&|()<>")
_CLOSING = {"(": ")", "{": "}", '"': '"'}
_QUOTES = {"'": "a quote", '"': "a double quote", "`": "a back quote"}
_EXPANDED = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")

# Programs and words of the shell that change nothing of what is read
IGNORED = frozenset({
    "echo", "printf", "set", "shift", "cd", "mkdir", "touch", "rm", "ln", "ls", "cp", "mv", "sleep", "true",
    "wait", "trap", "ulimit", "umask", "cat", "tee", "shopt", "unalias", "hash", "pushd", "popd", "date",
    "kill", "sync", "chmod", "pwd", "return", "break", "continue",
})  # fmt: skip


class ShellError(Exception):
    """A script that is not understood as a whole; ``line`` is where."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class Token:
    """A word with its quotes, or an operator; a line break is an operator, ``((...))`` a word."""

    text: str
    line: int
    is_word: bool
    joined: bool = False  # No space is between it and the one before


def behind(text: str, at: int, depth: int = 0) -> int:
    """Return the index behind the quoted part, the expansion or the single sign at ``at``."""
    sign = text[at]
    if sign == "\\":
        return at + 2
    if sign in "'`":
        closing = text.find(sign, at + 1)
        if closing < 0:
            raise ShellError(0, f"{_QUOTES[sign]} is not closed")
        return closing + 1
    if sign == '"':
        return _end(text, at, depth)
    if sign == "$" and text[at + 1 : at + 2] in ("(", "{"):
        return _end(text, at + 1, depth + 1)
    name = _EXPANDED.match(text, at + 1) if sign == "$" else None
    return name.end() if name else at + 1


def _end(text: str, start: int, depth: int = 0) -> int:
    # The index behind what closes the bracket or the double quote at ``start``
    if depth > MOST_NESTED:
        raise ShellError(0, f"more than {MOST_NESTED} brackets and expansions in each other")
    opening, at = text[start], start + 1
    while at < len(text):
        sign = text[at]
        if sign == _CLOSING[opening]:
            return at + 1
        if sign == opening:
            at = _end(text, at, depth + 1)
        elif sign == "#" and opening == "(" and text[at - 1] in " \t\n":
            at = _line_end(text, at)
        else:
            at = at + 1 if opening == '"' and sign == "'" else behind(text, at, depth)
    raise ShellError(0, f"{_QUOTES.get(opening, repr(opening))} is not closed")


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _end_of_arithmetic(text: str, start: int) -> int:
    # The index behind ``((...))``, or 0: without both brackets at its end it is one subshell in another
    end = _end(text, start) if text.startswith("((", start) else 0
    return end if text[end - 2 : end] == "))" else 0


def _end_of_word(text: str, start: int) -> int:
    at = start
    while at < len(text) and text[at] not in _ENDS_WORD:
        at = behind(text, at)
        if text[at : at + 1] == "(" and _ARRAY.match(text[start:at]):
            return _end(text, at)
    return min(at, len(text))


def _skip_documents(text: str, at: int, delimiters: list[str]) -> int:
    # The index behind the here-documents whose bodies begin at ``at``
    for delimiter in delimiters:
        while at < len(text):
            end = _line_end(text, at)
            line, at = text[at:end], end + 1
            if line.strip("\t") == delimiter:
                break
    return min(at, len(text))


def split(text: str) -> list[Token]:
    """Return the tokens of a script; ShellError with the line where one is not closed."""
    text = text.replace("\r\n", "\n")
    found: list[Token] = []
    delimiters: list[str] = []
    at, line, spaced = 0, 1, True
    try:
        while at < len(text):
            begin = at
            if blank := _BLANK.match(text, at):
                at, spaced = blank.end(), True
            elif text[at] == "#" and spaced:
                at = _line_end(text, at)
            elif end := _end_of_arithmetic(text, at):
                found.append(Token(text[at:end], line, is_word=True, joined=not spaced))
                at, spaced = end, False
            elif operator := _OPERATOR.match(text, at):
                found.append(Token(operator[0], line, is_word=False, joined=not spaced))
                at, spaced = operator.end(), True
                if operator[0] == "\n":
                    at, delimiters = _skip_documents(text, at, delimiters), []
            else:
                at = _end_of_word(text, at)
                if found and found[-1].text in ("<<", "<<-") and not found[-1].is_word:
                    delimiters.append(text[begin:at].strip("'\""))
                found.append(Token(text[begin:at], line, is_word=True, joined=not spaced))
                spaced = False
            line += text.count("\n", begin, at)
    except ShellError as error:
        raise ShellError(line, error.reason) from None
    return found
