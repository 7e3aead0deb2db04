"""Interpret a shell script without executing programs: assignments, conditions, sourced files.

Programs are recorded with arguments and not started; loops and functions are skipped. Unsupported syntax is
recorded with file and line, and conditions that depend on it are false. Files are read only from the given folder.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from encore.lab.submissions.shell_expansion import (
    UNKNOWN,
    Expander,
    Invocation,
    State,
    UnsupportedSyntaxError,
    Value,
    Variable,
    calculate,
    concatenate,
)  # fmt: skip
from encore.lab.submissions.shell_lexer import IGNORED, ShellError, Token, split

MOST_SOURCED = 8  # Maximum depth of nested ``source``
LONGEST_SCRIPT = 128 * 1024  # Characters: the longest of any submission has 40,000
_MOST_TOKENS = 500  # Maximum tokens in a condition; submitted scripts have up to about 50
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_DECLARES = frozenset({"export", "declare", "typeset", "readonly", "local"})
_REDIRECTIONS = frozenset({">", ">>", "<", "<<", "<<-", "<<<", ">&", "<&", "&>"})
_ENDS_COMMAND = frozenset({"\n", ";", "&", "&&", "||", "|", "|&", ")", ";;", ""})
_FILE_TESTS = frozenset({"-f", "-e", "-d", "-r", "-s", "-x", "-L", "-w"})
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip
# ``-a`` is the minimum, ``-o`` the maximum; unknown is in between
_CERTAINTY = (False, None, True)

# Returns the file's text by path in the folder, None if it does not exist
ReadFile = Callable[[str], "str | None"]


class _Exit(Exception):
    """The script executed ``exit``."""


class Reader:
    """Interprets the folder's scripts in sequence with a shared state."""

    def __init__(self, read_file: ReadFile, environment: Mapping[str, str] | None = None) -> None:
        variables = {
            name: Variable((Value(text),), "", 0, is_exported=True) for name, text in (environment or {}).items()
        }
        self.state = State(variables=variables)
        self._read_file = read_file

    def read(self, file: str) -> None:
        """Read a script of the folder; ShellError if it cannot be parsed."""
        try:
            self.source(file, 0)
        except _Exit:
            pass
        except (ValueError, RecursionError) as error:
            reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
            raise ShellError(0, f"{file}: {reason}") from None

    def source(self, file: str, depth: int) -> None:
        """Read a script that is sourced at this ``depth``."""
        text = self._read_file(file)
        if text is None:
            raise ShellError(0, f"{file}: no such file in the folder")
        if len(text) > LONGEST_SCRIPT:
            raise ShellError(0, f"{file}: longer than {LONGEST_SCRIPT:,} characters")
        try:
            _Interpreter(self, split(text), file, depth).run()
        except ShellError as error:
            if error.line:
                raise ShellError(0, f"{file}:{error.line}: {error.reason}") from None
            raise

    def is_file(self, path: str) -> bool | None:
        """Whether a file is in the folder; None for one outside of it."""
        if path.startswith("/") or ".." in path.split("/") or not path:
            return None
        return self._read_file(path.removeprefix("./")) is not None


class _Interpreter:
    # Single pass over the script's tokens; ``active`` is false in untaken branches. Methods that read a command
    # return its status, None if unknown.

    def __init__(self, reader: Reader, tokens: list[Token], file: str, depth: int) -> None:
        self._reader = reader
        self._state = reader.state
        self._tokens = [*tokens, Token("", tokens[-1].line if tokens else 0, is_word=False)]  # with an end
        self._file = file
        self._depth = depth
        self._expander = Expander(reader.state, file)
        self._at = 0

    def run(self) -> None:
        while self._next.text:
            self._block(active=True)
            self._at += 1  # closing word or bracket without an opening

    # -- tokens ------------------------------------------------------------------------------------------

    @property
    def _next(self) -> Token:
        return self._tokens[min(self._at, len(self._tokens) - 1)]

    def _next_is(self, *texts: str) -> bool:
        return self._next.text in texts

    def _take(self, *texts: str) -> bool:
        matches = self._next_is(*texts)
        self._at += matches
        return matches

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise ShellError(self._next.line, f"{text!r} is missing")

    def _until(self, text: str, line: int, reason: str) -> list[Token]:
        # Consume the tokens up to and including ``text``
        start = self._at
        while not self._take(text):
            if not self._next.text:
                raise ShellError(line, reason)
            self._at += 1
        return self._tokens[start : self._at - 1]

    def _skip_lines(self) -> None:
        while self._take("\n"):
            pass

    def _skip_redirections(self) -> None:
        while self._next_is(*_REDIRECTIONS):
            self._at += 2

    # -- grammar -----------------------------------------------------------------------------------------

    def _block(self, *stops: str, active: bool) -> bool | None:
        # Commands up to one of ``stops``; returns the status of the last
        status: bool | None = True
        while self._next.text and not self._next_is(*stops, ")", ";;"):
            if not self._take("\n", ";", "&"):
                status = self._and_or(active)
        return status

    def _and_or(self, active: bool) -> bool | None:
        status = self._pipeline(active)
        while self._next_is("&&", "||"):
            runs = status is self._next_is("&&")
            self._at += 1
            self._skip_lines()
            next_status = self._pipeline(active and runs)
            status = next_status if runs else status
        return status

    def _pipeline(self, active: bool) -> bool | None:
        negated = self._take("!")
        status = self._command(active)
        while self._take("|", "|&"):
            self._skip_lines()
            status = self._command(active)
        return status if status is None or not negated else not status

    def _command(self, active: bool) -> bool | None:
        token = self._next
        self._state.spend(1, token.line)
        is_call = any(token_.text == "(" and token_.joined for token_ in self._tokens[self._at + 1 : self._at + 2])
        compound = {
            "if": self._if, "case": self._case, "[[": self._test, "{": self._group, "(": self._group,
            **dict.fromkeys(("for", "while", "until", "select"), self._loop),
        }  # fmt: skip
        if token.is_word and token.text not in compound and (is_call or token.text == "function"):
            self._until("{", token.line, "a function has no body")
            self._block("}", active=False)
            self._expect("}")
            return True
        if token.text.startswith("(("):
            self._at += 1
            if active:
                self._note(token.line, "((...)) is not supported; treated as false")
            return None
        if token.text in compound:
            self._at += 1
            return compound[token.text](token, active)
        return self._simple(active)

    def _group(self, opening: Token, active: bool) -> bool | None:
        closing = {"{": "}", "(": ")"}[opening.text]
        status = self._block(closing, active=active)
        self._expect(closing)
        self._skip_redirections()
        return status

    def _if(self, _: Token, active: bool) -> bool | None:
        done = False
        status: bool | None = True
        while True:
            condition = self._block("then", active=active and not done)
            self._expect("then")
            runs = active and not done and condition is True
            branch_status = self._block("elif", "else", "fi", active=runs)
            status, done = (branch_status, True) if runs else (status, done)
            if not self._take("elif"):
                break
        if self._take("else"):
            self._block("fi", active=active and not done)
        self._expect("fi")
        return status

    def _case(self, keyword: Token, active: bool) -> bool | None:
        if not self._next.text:
            raise ShellError(keyword.line, "'case' has no word")
        value = self._value(self._next) if active else Value()
        self._at += 1
        self._skip_lines()
        self._expect("in")
        self._skip_lines()
        done = False
        while not self._take("esac"):
            self._take("(")
            patterns = [
                token for token in self._until(")", self._tokens[-1].line, "'esac' is missing") if token.is_word
            ]
            globs = [token.text.strip("'\"") for token in patterns]
            runs = active and not done and value.is_known and matches(value.text, globs)
            self._block("esac", active=runs)
            done = done or runs
            self._take(";;")
            self._skip_lines()
        return True

    def _loop(self, keyword: Token, active: bool) -> bool | None:
        # Loops are skipped: assigned variables are unknown
        self._block("do", active=False)
        self._expect("do")
        body_start = self._at
        self._block("done", active=False)
        assigned = [t.text for t in self._tokens[body_start : self._at] if t.is_word and _ASSIGNMENT.match(t.text)]
        self._expect("done")
        self._skip_redirections()
        if active and assigned:
            self._note(keyword.line, f"a loop that assigns {assigned[0].partition('=')[0]}; skipped")
        return True

    def _test(self, keyword: Token, active: bool) -> bool | None:
        operands = self._until("]]", keyword.line, "']]' is missing")
        return self._condition(operands, keyword.line) if active else None

    def _simple(self, active: bool) -> bool | None:
        arguments: list[Token] = []
        start = self._at
        while (token := self._next).is_word or token.text not in _ENDS_COMMAND:
            if token.is_word:
                arguments.append(token)
                self._at += 1
                continue
            if arguments and token.joined and arguments[-1].text.isdigit():
                arguments.pop()  # redirected file descriptor
            self._at += 1 if token.text == "(" else 2
        if self._at == start:
            self._at += 1
        if not active or not arguments:
            return True if active else None
        if arguments[0].text == "[":
            return self._condition(arguments[1:-1] if arguments[-1].text == "]" else arguments[1:], arguments[0].line)
        return self._execute(arguments)

    # -- conditions --------------------------------------------------------------------------------------

    def _condition(self, operands: list[Token], line: int) -> bool | None:
        result = None
        with contextlib.suppress(IndexError, UnsupportedSyntaxError):
            result = self._evaluate(operands)
        if result is None:
            text = " ".join(token.text for token in operands)
            self._note(line, f"[ {text} ] is not supported; treated as false")
        return result

    def _evaluate(self, tokens: Sequence[Token]) -> bool | None:
        if len(tokens) > _MOST_TOKENS:
            return None
        for signs, choose in ((("||", "-o"), max), (("&&", "-a"), min)):
            parts = _split_at(tokens, signs)
            if len(parts) > 1:
                return choose(map(self._evaluate, parts), key=_CERTAINTY.index)
        match [token.text for token in tokens]:
            case ["!", *_]:
                negated = self._evaluate(tokens[1:])
                return None if negated is None else not negated
            case ["(", *_, ")"]:
                return self._evaluate(tokens[1:-1])
            case ["-z" | "-n" as sign, *operand] if len(operand) < 2:
                # An unquoted empty expansion is not an argument of [.
                value = self._value(tokens[1]) if operand else Value()
                return (value.text == "") == (sign == "-z") if value.is_known else None
            case [sign, *_] if sign in _FILE_TESTS:
                value = self._value(tokens[1])
                return self._reader.is_file(value.text) if value.is_known else None
            case [text] if text.startswith("(("):  # inside [[ ]] they only group
                return self._evaluate([replace(inner, line=tokens[0].line) for inner in split(text[1:-1])])
            case [_]:
                value = self._value(tokens[0])
                return value.text != "" if value.is_known else None
            case [_, sign, raw]:
                return _compare(self._value(tokens[0]), sign, raw, self._value(tokens[2]))
        return None

    def _value(self, token: Token) -> Value:
        return self._expander.expand_text(token.text, token.line)

    # -- commands ----------------------------------------------------------------------------------------

    def _execute(self, tokens: list[Token]) -> bool | None:
        count = next((n for n, word in enumerate(tokens) if not _ASSIGNMENT.match(word.text)), len(tokens))
        if count == len(tokens):
            for word in tokens:
                self._assign(word)
            return True
        program_word, rest = tokens[count], tokens[count + 1 :]
        match program_word.text:
            case declares if declares in _DECLARES:
                self._declare(declares, rest)
            case "source" | ".":
                path = self._expander.expand_words(rest[0].text, program_word.line) if rest else []
                return self._source(path[0] if path else UNKNOWN, program_word.line)
            case ":":
                for word in rest:
                    # ``: ${NAME:=word}``
                    if match := re.fullmatch(r'"?\$\{([A-Za-z_]\w*):?=(.*)\}"?', word.text, re.DOTALL):
                        self._assign(replace(word, text=f'{match[1]}="${{{match[1]}:-{match[2]}}}"'))
            case "unset":
                for word in rest:
                    self._state.variables.pop(word.text, None)
            case "exit":
                raise _Exit
            case "eval":
                values = self._expand_words(rest)
                self._invoke(self._expander.eval_words(values, rest[0].line) if values else [], rest)
            case program if program not in IGNORED:
                self._invoke(self._expand_words(tokens[count:]), tokens[count:])
        return True

    def _expand_words(self, tokens: Sequence[Token]) -> list[Value]:
        return [value for word in tokens for value in self._expander.expand_words(word.text, word.line)]

    def _invoke(self, values: list[Value], tokens: list[Token]) -> None:
        if values:
            self._count(values, tokens[0].line)
            self._state.invocations.append(Invocation(tuple(values), self._file, tokens[0].line))

    def _source(self, target: Value, line: int) -> bool:
        path = target.text.removeprefix("./").removeprefix("/")
        if not target.is_known or not self._reader.is_file(target.text):
            self._note(line, f"sources {target.text or 'a file'}, which is not in the folder")
        elif self._depth >= MOST_SOURCED:
            self._note(line, f"sources {path} at a depth of {MOST_SOURCED}; skipped")
        else:
            self._reader.source(path, self._depth + 1)
            return True
        return False

    def _declare(self, how: str, tokens: list[Token]) -> None:
        exports = how == "export" or any(re.fullmatch(r"-\w*x\w*", word.text) for word in tokens)
        for word in tokens:
            variable = self._state.variables.get(word.text)
            if _ASSIGNMENT.match(word.text):
                self._assign(word, exports=exports)
            elif exports and variable is not None and _NAME.fullmatch(word.text):
                self._state.variables[word.text] = replace(variable, is_exported=True)

    def _assign(self, word: Token, *, exports: bool = False) -> None:
        match = _ASSIGNMENT.match(word.text)
        if match is None:
            return
        name, index, appends = match.groups()
        raw = word.text[match.end() :]
        variable = self._state.variables.get(name)
        if index:
            self._note(word.line, f"{name}{index}: an element of an array; skipped")
            return
        if raw.startswith("("):
            values = self._expand_words([replace(part, line=word.line) for part in split(raw[1:-1]) if part.is_word])
            values = [*variable.values, *values] if appends and variable is not None else values
        else:
            values = [self._expander.expand_text(raw, word.line)]
            if appends and variable is not None:
                values = [concatenate((variable.value, *values)), *variable.values[1:]]
        self._count(values, word.line)
        new_values = tuple(value.add_source(name) for value in values)
        # A default does not change a variable that another file has set.
        if variable is None or f"${{{name}" not in raw or variable.values != new_values:
            was_exported = variable is not None and variable.is_exported
            variable = Variable(new_values, self._file, word.line, is_exported=was_exported)
        self._state.variables[name] = replace(variable, is_exported=exports or variable.is_exported)

    def _count(self, values: Sequence[Value], line: int) -> None:
        self._state.spend(sum(1 + len(value.parts) for value in values), line)

    def _note(self, line: int, reason: str) -> None:
        self._state.note(self._file, line, reason)


def matches(text: str, patterns: Sequence[str]) -> bool:
    """Return whether a text matches a shell pattern. Overlong patterns could be slow and never match."""
    short = [pattern for pattern in patterns if len(pattern) <= 256 and pattern.count("*") <= 8]
    return len(text) <= 4096 and any(fnmatchcase(text, pattern) for pattern in short)


def _split_at(tokens: Sequence[Token], signs: Collection[str]) -> list[list[Token]]:
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


def _compare(lhs: Value, sign: str, raw: str, rhs: Value) -> bool | None:
    if not (lhs.is_known and rhs.is_known):
        return None
    if sign in _NUMBERS:
        return _NUMBERS[sign](calculate(lhs.text), calculate(rhs.text))
    if sign in ("=", "==", "!="):
        is_pattern = not raw.startswith(("'", '"')) or "*" in raw.split('"')[-1] + raw.split('"')[0]
        same = matches(lhs.text, [rhs.text]) if is_pattern else lhs.text == rhs.text
        return same == (sign != "!=")
    return None
