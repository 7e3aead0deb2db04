"""Reads a large JSON object piece by piece: COCO's 450 MB of training annotations take some GiB when loaded at once."""

from __future__ import annotations

import json
from typing import IO, Any, Callable, Iterator, Tuple

CHUNK = 4 << 20
"""Characters read at once; many times the longest annotation of COCO."""
_SPACE = " \t\r\n"


class BrokenJson(ValueError):
    """The text is not a JSON object; says where it breaks."""


class _Text:
    """The unread part of a file."""

    def __init__(self, file: IO[str], report: Callable[[int], None]) -> None:
        self._file, self._report = file, report
        self._decoder = json.JSONDecoder()
        self._buffer, self._position, self._before = "", 0, 0
        self._is_whole = False

    def _more(self) -> bool:
        """Read on; return whether there was anything left."""
        if self._is_whole:
            return False
        piece = self._file.read(CHUNK)
        self._is_whole = not piece
        self._before += self._position
        self._buffer, self._position = self._buffer[self._position :] + piece, 0
        self._report(self._before)
        return not self._is_whole

    def peek(self) -> str:
        """Return the next character that is no space, empty at the end."""
        while True:
            while self._position < len(self._buffer) and self._buffer[self._position] in _SPACE:
                self._position += 1
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._more():
                return ""

    def take(self, expected: str) -> str:
        """Return the next character, which must be one of ``expected``."""
        found = self.peek()
        if not found or found not in expected:
            raise self.broken(f"{found!r} where {' or '.join(expected)} is expected" if found else "it ends early")
        self._position += 1
        return found

    def value(self) -> Any:
        """Return the next value."""
        self.peek()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._buffer, self._position)
            except ValueError as error:
                if not self._more():
                    raise self.broken(str(error).partition(":")[0]) from None
                continue
            if end == len(self._buffer) and self._more():
                continue  # a number might go on
            self._position = end
            return found

    def broken(self, why: str) -> BrokenJson:
        """Return the error with the place that is being read."""
        return BrokenJson(f"{why}, at character {self._before + self._position:,}")


def entries(file: IO[str], report: Callable[[int], None] = lambda characters: None) -> Iterator[Tuple[str, Any]]:
    """Yield (key, element) of each list of a JSON object and (key, value) of what is no list, in their order.

    ``report`` is called with the characters read so far.

    Raises:
        BrokenJson: the text ends early or is no JSON object.
    """
    text = _Text(file, report)
    text.take("{")
    if text.peek() == "}":
        return
    while True:
        key = text.value()
        text.take(":")
        if text.peek() == "[":
            text.take("[")
            is_empty = text.peek() == "]"
            while not is_empty:
                yield key, text.value()
                if text.take(",]") == "]":
                    break
            if is_empty:
                text.take("]")
        else:
            yield key, text.value()
        if text.take(",}") == "}":
            return
