"""Split a shell script into words and operators, without running anything.

The grammar is POSIX's (Shell Command Language, 2.2 Quoting and 2.3 Token Recognition) with bash's arrays and
``[[``: what the submitted configurations are written in.
"""

import re
from dataclasses import dataclass

MOST_NESTED = 40
_OPERATORS = ("&&", "||", ";;", "|&", "<<<", "<<-", "<<", ">>", ">&", "<&", "&>", ">", "<", "|", "&", ";", "(", ")")
_ENDS_WORD = frozenset(" \t\n;&|()<>")
_CLOSING = {"(": ")", "{": "}"}
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
    """A word with its quotes, or an operator; a line break is an operator."""

    text: str
    line: int
    is_word: bool
    joined: bool = False  # No space is between it and the one before


def end_of_expansion(text: str, start: int, depth: int = 0) -> int:
    """Return the index behind the expansion that begins with ``$`` or a back quote at ``start``."""
    if text[start] == "`":
        return _behind(text, "`", start, "a back quote")
    if text[start + 1 : start + 2] in _CLOSING:
        return end_of_group(text, start + 1, depth + 1)
    name = _EXPANDED.match(text, start + 1)
    return name.end() if name else start + 1


def end_of_group(text: str, start: int, depth: int = 0) -> int:
    """Return the index behind the bracket that closes the one at ``start``, with regard to quotes in between."""
    return _end(text, start, _CLOSING[text[start]], depth, f"{text[start]!r}")


def _end(text: str, start: int, closing: str, depth: int, name: str) -> int:
    # The index behind what closes the bracket or the double quote at ``start``
    if depth > MOST_NESTED:
        raise ShellError(0, f"more than {MOST_NESTED} brackets and expansions in each other")
    opening, quoted = text[start], closing == '"'
    at = start + 1
    while at < len(text):
        sign = text[at]
        if sign == closing:
            return at + 1
        if sign == opening:
            at = end_of_group(text, at, depth + 1)
        elif sign == "#" and opening == "(" and text[at - 1] in " \t\n":
            at = _line_end(text, at)
        else:
            at = at + 1 if quoted and sign == "'" else _after(text, at, depth)
    raise ShellError(0, f"{name} is not closed")


def _behind(text: str, sign: str, start: int, name: str) -> int:
    closing = text.find(sign, start + 1)
    if closing < 0:
        raise ShellError(0, f"{name} is not closed")
    return closing + 1


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _after(text: str, at: int, depth: int) -> int:
    # The index behind the quoted part, the expansion or the single sign at ``at``
    match text[at]:
        case "\\":
            return at + 2
        case "'":
            return _behind(text, "'", at, "a quote")
        case '"':
            return _end(text, at, '"', depth, "a double quote")
        case "$" | "`":
            return end_of_expansion(text, at, depth)
    return at + 1


def _end_of_word(text: str, start: int) -> int:
    at = start
    while at < len(text) and text[at] not in _ENDS_WORD:
        at = _after(text, at, 0)
        if text[at : at + 1] == "(" and _ARRAY.match(text[start:at]):
            return end_of_group(text, at)
    return min(at, len(text))


def _skip_documents(text: str, at: int, documents: list[str]) -> int:
    # The index behind the here-documents whose bodies begin at ``at``
    for delimiter in documents:
        while at < len(text):
            end = _line_end(text, at)
            line, at = text[at:end], end + 1
            if line.strip("\t") == delimiter:
                break
    documents.clear()
    return min(at, len(text))


def split(text: str) -> list[Token]:
    """Return the tokens of a script; ShellError with the line where one is not closed."""
    text = text.replace("\r\n", "\n")
    found: list[Token] = []
    documents: list[str] = []
    at, line, spaced = 0, 1, True
    while at < len(text):
        begin = at
        if text.startswith("\\\n", at):
            at, spaced = at + 2, True
        elif text[at] in " \t":
            at, spaced = at + 1, True
        elif text[at] == "#" and spaced:
            at = _line_end(text, at)
        elif text[at] == "\n":
            found.append(Token("\n", line, is_word=False))
            at, spaced = _skip_documents(text, at + 1, documents), True
        else:
            at = _append(text, at, line, spaced, found)
            if len(found) > 1 and found[-1].is_word and found[-2].text in ("<<", "<<-") and not found[-2].is_word:
                documents.append(found[-1].text.strip("'\""))
            spaced = not found[-1].is_word
        line += text.count("\n", begin, at)
    return found


def _append(text: str, at: int, line: int, spaced: bool, found: list[Token]) -> int:
    # Append the operator or the word at ``at``; return the index behind it
    operator = next((each for each in _OPERATORS if text.startswith(each, at)), None)
    if operator:
        found.append(Token(operator, line, is_word=False, joined=not spaced))
        return at + len(operator)
    try:
        end = _end_of_word(text, at)
    except ShellError as error:
        raise ShellError(line, error.reason) from None
    found.append(Token(text[at:end], line, is_word=True, joined=not spaced))
    return end
