"""Read a shell script as the shell would, without running anything: assignments, conditions, sourced files.

Programs are noted with their words and never started; loops and functions are passed over. What is not understood is
noted with file and line, and a condition that depends on it does not hold. Files are looked for in the folder that
was handed over and nowhere else.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from encore.lab.submissions import shell_conditions
from encore.lab.submissions.shell_expansion import Expander
from encore.lab.submissions.shell_tokens import IGNORED, ShellError, Token, split
from encore.lab.submissions.shell_values import UNKNOWN, Invocation, State, Value, Variable

MOST_SOURCED = 8  # Depth to which files source each other
LONGEST_SCRIPT = 128 * 1024  # Characters: the longest of any submission has 40,000
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_DECLARES = frozenset({"export", "declare", "typeset", "readonly", "local"})
_LOOPS = frozenset({"for", "while", "until", "select"})
_REDIRECTIONS = frozenset({">", ">>", "<", "<<", "<<-", "<<<", ">&", "<&", "&>"})
_ENDS_COMMAND = frozenset({"\n", ";", "&", "&&", "||", "|", "|&", ")", ";;"})

# Returns the text of a file by its path inside the folder; None where there is none
ReadFile = Callable[[str], "str | None"]


class _Exit(Exception):
    """The script ends here."""


@dataclass(frozen=True)
class _Script:
    file: str
    name: str  # What the scripts call the configuration: its file's name without ``config_`` and ``.sh``
    depth: int


class Reader:
    """Reads the scripts of one folder, one after another, into one state."""

    def __init__(self, read_file: ReadFile, given: Mapping[str, str] | None = None) -> None:
        self.state = State()
        self._read_file = read_file
        for name, text in (given or {}).items():
            self.state.variables[name] = Variable((Value(text),), "", 0, is_exported=True)

    def read(self, file: str, arguments: tuple[Value, ...] = ()) -> None:
        """Read a script of the folder; ShellError if it is not understood as a whole."""
        try:
            self._source(file, 0, arguments)
        except _Exit:
            pass
        except (ValueError, RecursionError) as error:
            reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
            raise ShellError(0, f"{file}: {reason}") from None

    def _source(self, file: str, depth: int, arguments: tuple[Value, ...] = ()) -> None:
        text = self._read_file(file)
        if text is None:
            raise ShellError(0, f"{file}: there is no such file in the folder")
        if len(text) > LONGEST_SCRIPT:
            raise ShellError(0, f"{file}: longer than {LONGEST_SCRIPT:,} characters")
        name = file.rpartition("/")[2].removeprefix("config_").removesuffix(".sh")
        script = _Script(file, name, depth)
        try:
            _Run(self, split(text), script, Expander(self.state, file, name, arguments)).all()
        except ShellError as error:
            if error.line:
                raise ShellError(0, f"{file}:{error.line}: {error.reason}") from None
            raise

    def source(self, wanted: Value, script: _Script, line: int) -> bool:
        """Read a file that a script sources, if it is one of the folder."""
        path = wanted.text.removeprefix("./").removeprefix("/")
        outside = not wanted.is_known or wanted.text.startswith("/") or ".." in path.split("/")
        if outside or self._read_file(path) is None:
            self.state.note(script.file, line, f"sources {wanted.text or 'a file'}, which is not in the folder")
            return False
        if script.depth >= MOST_SOURCED:
            self.state.note(script.file, line, f"sources {path} at a depth of {MOST_SOURCED}; passed over")
            return False
        self._source(path, script.depth + 1)
        return True

    def is_file(self, path: str) -> bool | None:
        """Whether a file is in the folder; None for one outside of it."""
        if path.startswith("/") or ".." in path.split("/") or not path:
            return None
        return self._read_file(path.removeprefix("./")) is not None


class _Run:
    # Goes over the tokens of one script once; ``active`` is false where a condition does not hold

    def __init__(self, reader: Reader, tokens: list[Token], script: _Script, expander: Expander) -> None:
        self._reader = reader
        self._tokens = tokens
        self._script = script
        self._expander = expander
        self._at = 0

    def all(self) -> None:
        while self._at < len(self._tokens):
            self._block((), active=True)
            self._at += 1  # a closing word or bracket that nothing opened

    def _peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next_is(self, texts: Collection[str]) -> bool:
        token = self._peek()
        return token is not None and token.text in texts

    def _expect(self, text: str) -> None:
        token = self._peek()
        if token is None or token.text != text:
            line = token.line if token else (self._tokens[-1].line if self._tokens else 0)
            raise ShellError(line, f"{text!r} is missing")
        self._at += 1

    def _block(self, stops: Collection[str], *, active: bool) -> bool | None:
        # Read commands up to one of ``stops``; return the status of the last, None where it is unknown
        status: bool | None = True
        while (token := self._peek()) is not None:
            if token.text in stops or token.text in (")", ";;"):
                break
            if token.text in ("\n", ";", "&"):
                self._at += 1
                continue
            status = self._and_or(active)
        return status

    def _and_or(self, active: bool) -> bool | None:
        status = self._pipeline(active)
        while self._next_is(("&&", "||")):
            wanted = self._tokens[self._at].text == "&&"
            self._at += 1
            self._skip_lines()
            runs = status is wanted
            made = self._pipeline(active and runs)
            status = made if runs else status
        return status

    def _pipeline(self, active: bool) -> bool | None:
        negated = self._next_is("!")
        self._at += negated
        status = self._command(active)
        while self._next_is(("|", "|&")):
            self._at += 1
            self._skip_lines()
            status = self._command(active)
        return status if status is None or not negated else not status

    def _command(self, active: bool) -> bool | None:
        token = self._peek()
        if token is None:
            return True
        self._reader.state.count_command(token.line)
        following = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else None
        if token.is_word and token.text in ("if", "case", "[[", *_LOOPS):
            self._at += 1
            kinds = {"if": self._if, "case": self._case, "[[": self._test}
            return kinds.get(token.text, self._loop)(active)
        if (token.is_word and token.text == "function") or (following and following.text == "(" and following.joined):
            return self._function(token)
        if token.text == "(" and following and following.text == "(" and following.joined:
            return self._arithmetic_command(token, active)
        if token.text in ("{", "("):
            self._at += 1
            status = self._block(("}",) if token.text == "{" else (), active=active)
            self._expect({"{": "}", "(": ")"}[token.text])
            self._skip_redirections()
            return status
        return self._simple(active)

    def _if(self, active: bool) -> bool | None:
        done = False
        status: bool | None = True
        while True:
            held = self._block(("then",), active=active and not done)
            self._expect("then")
            runs = active and not done and held is True
            made = self._block(("elif", "else", "fi"), active=runs)
            status, done = (made, True) if runs else (status, done)
            if not self._next_is(("elif",)):
                break
            self._at += 1
        if self._next_is(("else",)):
            self._at += 1
            self._block(("fi",), active=active and not done)
        self._expect("fi")
        return status

    def _case(self, active: bool) -> bool | None:
        subject = self._peek()
        if subject is None:
            raise ShellError(0, "'case' has no word")
        value = self._expander.whole(subject.text, subject.line) if active else Value()
        self._at += 1
        self._skip_lines()
        self._expect("in")
        self._skip_lines()
        done = False
        while not self._next_is(("esac",)):
            patterns = self._patterns()
            runs = active and not done and value.is_known and shell_conditions.matches(value.text, patterns)
            self._block(("esac",), active=runs)
            done = done or runs
            self._at += self._next_is((";;",))
            self._skip_lines()
        self._expect("esac")
        return True

    def _patterns(self) -> list[str]:
        found = []
        self._at += self._next_is("(")
        while not self._next_is((")",)):
            token = self._peek()
            if token is None:
                raise ShellError(self._tokens[-1].line, "'esac' is missing")
            found += [token.text] if token.is_word else []
            self._at += 1
        self._at += 1
        return [pattern.strip("'\"") for pattern in found]

    def _loop(self, active: bool) -> bool | None:
        # Pass over a loop: what it assigns is not known
        begin = self._tokens[self._at - 1]
        self._block(("do",), active=False)
        self._expect("do")
        inside = self._at
        self._block(("done",), active=False)
        assigned = [t.text for t in self._tokens[inside : self._at] if t.is_word and _ASSIGNMENT.match(t.text)]
        self._expect("done")
        self._skip_redirections()
        if active and assigned:
            self._note(begin.line, f"a loop that assigns {assigned[0].partition('=')[0]}; passed over")
        return True

    def _function(self, token: Token) -> bool | None:
        while not self._next_is(("{",)):
            if self._peek() is None:
                raise ShellError(token.line, "a function has no body")
            self._at += 1
        self._at += 1
        self._block(("}",), active=False)
        self._expect("}")
        return True

    def _arithmetic_command(self, token: Token, active: bool) -> bool | None:
        depth = 0
        while (part := self._peek()) is not None:
            depth += {"(": 1, ")": -1}.get(part.text, 0)
            self._at += 1
            if depth == 0:
                break
        if active:
            self._note(token.line, "((...)) is not read; taken for false")
        return None

    def _test(self, active: bool) -> bool | None:
        # Whether ``[[ ... ]]`` holds
        begin = self._at
        while not self._next_is(("]]",)):
            if self._peek() is None:
                raise ShellError(self._tokens[begin - 1].line, "']]' is missing")
            self._at += 1
        inside = self._tokens[begin : self._at]
        self._at += 1
        return self._condition(inside, begin) if active else None

    def _condition(self, inside: list[Token], begin: int) -> bool | None:
        found = shell_conditions.holds(inside, self._expander, self._reader.is_file)
        if found is None:
            shown = " ".join(token.text for token in inside)
            self._note(self._tokens[begin - 1].line, f"[ {shown} ] is not known here; taken for false")
        return found

    def _skip_lines(self) -> None:
        while self._next_is("\n"):
            self._at += 1

    def _skip_redirections(self) -> None:
        while self._next_is(_REDIRECTIONS):
            self._at += 2

    def _simple(self, active: bool) -> bool | None:
        words: list[Token] = []
        begin = self._at
        while (token := self._peek()) is not None and not (token.text in _ENDS_COMMAND and not token.is_word):
            if not token.is_word:
                if words and token.joined and words[-1].text.isdigit():
                    words.pop()  # the number of a file that is redirected
                self._at += 1 if token.text == "(" else 2
                continue
            words.append(token)
            self._at += 1
        if self._at == begin:
            self._at += 1
        if not active or not words:
            return True if active else None
        if words[0].text == "[":
            return self._condition(words[1:-1] if words[-1].text == "]" else words[1:], begin + 1)
        return self._perform(words)

    def _perform(self, words: list[Token]) -> bool | None:
        count = next((n for n, word in enumerate(words) if not _ASSIGNMENT.match(word.text)), len(words))
        if count == len(words):
            for word in words:
                self._assign(word)
            return True
        named, rest = words[count], words[count + 1 :]
        match named.text:
            case declares if declares in _DECLARES:
                self._declare(declares, rest)
            case "source" | ".":
                path = self._expander.words(rest[0].text, named.line) if rest else []
                return self._reader.source(path[0] if path else UNKNOWN, self._script, named.line)
            case ":":
                self._defaults(rest)
            case "unset":
                for word in rest:
                    self._reader.state.variables.pop(word.text, None)
            case "exit":
                raise _Exit
            case "eval":
                self._invoke(rest, again=True)
            case program if program not in IGNORED:
                self._invoke(words[count:])
        return True

    def _invoke(self, words: list[Token], *, again: bool = False) -> None:
        made = [value for word in words for value in self._expander.words(word.text, word.line)]
        if again and made:
            made = self._expander.again(made, words[0].line)
        if made:
            self._reader.state.count_parts(sum(1 + len(each.parts) for each in made), words[0].line)
            self._reader.state.invocations.append(Invocation(tuple(made), self._script.file, words[0].line))

    def _defaults(self, words: list[Token]) -> None:
        # Assign what ``: ${NAME:=word}`` assigns
        for word in words:
            match = re.fullmatch(r'"?\$\{([A-Za-z_]\w*):?=(.*)\}"?', word.text, re.DOTALL)
            if match:
                variable = replace(word, text=f'{match[1]}="${{{match[1]}:-{match[2]}}}"')
                self._assign(variable)

    def _declare(self, how: str, words: list[Token]) -> None:
        exports = how == "export" or any(re.fullmatch(r"-\w*x\w*", word.text) for word in words)
        for word in words:
            if _ASSIGNMENT.match(word.text):
                self._assign(word, exports=exports)
            elif exports and _NAME.fullmatch(word.text) and word.text in self._reader.state.variables:
                known = self._reader.state.variables[word.text]
                self._reader.state.variables[word.text] = replace(known, is_exported=True)

    def _assign(self, word: Token, *, exports: bool = False) -> None:
        match = _ASSIGNMENT.match(word.text)
        if match is None:
            return
        name, index, appends = match.groups()
        raw = word.text[match.end() :]
        known = self._reader.state.variables.get(name)
        if index:
            self._note(word.line, f"{name}{index}: an element of an array; passed over")
            return
        is_array = raw.startswith("(")
        if is_array:
            parts = [t for t in split(raw[1:-1]) if t.is_word]
            values = tuple(value for part in parts for value in self._expander.words(part.text, word.line))
        else:
            values = (self._expander.whole(raw, word.line),)
        if appends and known is not None:
            values = (*known.values, *values) if is_array else (known.value + values[0], *known.values[1:])
        self._reader.state.count_parts(sum(1 + len(each.parts) for each in values), word.line)
        values = tuple(value.also(name) for value in values)
        exported = exports or (known is not None and known.is_exported)
        # A default that the variable has already been given by another file changes nothing.
        keeps = known is not None and f"${{{name}" in raw and known.values == values
        file, line = (known.file, known.line) if keeps and known else (self._script.file, word.line)
        self._reader.state.variables[name] = Variable(
            values, file, line, is_array=is_array or (known is not None and bool(appends) and known.is_array),
            is_exported=exported,
        )  # fmt: skip

    def _note(self, line: int, reason: str) -> None:
        self._reader.state.note(self._script.file, line, reason)
