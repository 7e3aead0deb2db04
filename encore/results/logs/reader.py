"""Read MLPerf logs of every round: one streaming parser for all dialects.

    from encore.results.logs.reader import read_events
    for event in read_events("result_0.txt"):
        print(event.line, event.key, event.value)

The dialects, as they occur in the public result repositories:

* ``v0.5``   ``:::MLPv0.5.0 resnet 1541720386.7186 (fit.py:49) run_stop: {"success": true}``
* ``mll``    ``:::MLL 1560881731.835 run_start: {"value": null, "metadata": {...}}`` (v0.6)
* ``mllog``  ``:::MLLOG {"time_ms": 1592669288183, "key": "run_start", ...}`` (v0.7 and later)
* ``mlperf`` ``MLPerf: resnet [06/13/19 00:30:56], run_start`` (one submitter of v0.6)
"""

import calendar
import gzip
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from pydantic_core import from_json

from encore.files import Bounded, max_unpacked

Dialect = Literal["v0.5", "mll", "mllog", "mlperf"]
# Called with line number and text of lines with an event marker but without a valid event.
OnDamage = Callable[[int, str], None]

MAX_LINE = 1 << 20  # Longest line in bytes; the rest of longer lines is skipped to bound the memory
_BLOCK = 1 << 18
_EXCERPT = 1000
_MAX_EXACT_INT = 1 << 53
_LARGEST = 1e30  # Upper limit for all quantities; keeps sums and squares finite
_MAX_DAMAGED = 8
_GZIP_MAGIC = b"\x1f\x8b"
_MARKS = (b":::ML", b"MLPerf:")
_PLAIN = b":::MLLOG {"
_TOKEN = re.compile(r":::ML(?:Pv(?P<version>\d[\d.]*)|LOG|L)(?=[\s{])|(?<![A-Za-z0-9_])MLPerf:(?=\s)")
_V05 = re.compile(
    r"\s+(?P<benchmark>\S+)\s+(?P<time>[\d.]+)\s+\((?P<file>.*?):(?P<lineno>\d+)\)\s+(?P<key>\w+)(?P<rest>.*)",
    re.DOTALL | re.ASCII,
)
_MLL = re.compile(r"\s+(?P<time>[\d.]+)\s+(?P<key>\w+)\s*:\s*", re.ASCII)
_PERCENT = re.compile(r"\b(\d{1,3}(?:\.\d{1,9})?)%")
_MLPERF = re.compile(
    r"\s+(?P<benchmark>\w+)\s+\[(?P<time>\d\d/\d\d/\d\d \d\d:\d\d:\d\d)\],\s*(?P<key>\w+)(?P<rest>.*)",
    re.DOTALL | re.ASCII,
)

_decode_json = json.JSONDecoder().raw_decode
_NO_METADATA: Mapping[str, object] = MappingProxyType({})


class Event(NamedTuple):
    """One log event. ``time_s``: seconds since the epoch used by the log.

    In ``v0.5`` and ``mlperf``, all lines contain the benchmark's name: ``metadata["benchmark"]``.
    """

    # NamedTuple: logs have thousands of events, and creating frozen dataclasses takes three times as long.
    time_s: float | None
    key: str
    value: object
    metadata: Mapping[str, object] = _NO_METADATA
    line: int = 0
    dialect: Dialect = "mllog"
    namespace: str = ""
    refused_time: str = ""  # ``time_ms`` if it is not a valid time


ReadEvents = Callable[[Path, OnDamage], Iterator[Event]]


def read_events(path: str | PathLike[str], on_damage: OnDamage = lambda line, text: None) -> Iterator[Event]:
    """Yield the events in file order, ignoring all other content.

    Other text, invalid UTF-8, NUL bytes and endless lines are skipped; only ``OSError`` is raised. Damaged events
    are reported to ``on_damage`` and never yielded in part.
    """
    with Path(path).open("rb") as raw:
        compressed = raw.peek(2).startswith(_GZIP_MAGIC)
        try:
            stream = Bounded(gzip.GzipFile(fileobj=raw), max_unpacked(Path(path))) if compressed else raw
            for number, line in _marked_lines(stream):
                event = _plain_event(line, number)
                if event is not None:
                    yield event
                else:
                    yield from parse_line(line.decode("utf-8", "replace"), number, on_damage)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            on_damage(0, f":::ML the compressed file is damaged: {error}")


# Yield the lines with an event marker, and their numbers.
def _marked_lines(stream: BufferedReader | Bounded) -> Iterator[tuple[int, bytes]]:
    number = 0
    for block in _blocks(stream):
        either = _MARKS[1] in block
        if not either and _MARKS[0] not in block:
            number += block.count(b"\n")
            continue
        for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), number + 1):  # noqa: B020
            if _MARKS[0] in line or (either and _MARKS[1] in line):
                yield number, line[:MAX_LINE]


# Yield blocks of complete lines; at least MAX_LINE bytes of longer lines.
def _blocks(stream: BufferedReader | Bounded) -> Iterator[bytes]:
    rest = b""
    while block := stream.read1(_BLOCK):  # A single read keeps the data before a damaged block
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = block[end:]
        elif len(rest) < MAX_LINE:
            rest += block
    if rest:
        yield rest


# Fast path for lines with one event and no other text after it, which is almost all lines; None for other lines.
def _plain_event(line: bytes, number: int) -> Event | None:
    start = line.find(_MARKS[0])
    if not line.startswith(_PLAIN, start) or line.find(_MARKS[1], 0, start) >= 0:
        return None
    try:
        return _mllog_event(from_json(line[start + len(_PLAIN) - 1 :]), number)
    except ValueError:
        return None


def has_mark(path: Path) -> bool:
    """Return whether a line has an event marker or damage; True for unreadable files, which are reported later."""
    damaged: list[int] = []
    try:
        return any(True for _ in read_events(path, lambda line, _: damaged.append(line))) or bool(damaged)
    except OSError:
        return True


def parse_line(text: str, number: int = 0, on_damage: OnDamage = lambda line, text: None) -> Iterator[Event]:
    """Yield the events in a line of text: several if processes wrote at the same time."""
    match = _TOKEN.search(text)
    if match is None and ":::ML" in text:
        on_damage(number, text[:_EXCERPT])
    damaged = 0
    while match is not None:
        following = _TOKEN.search(text, match.end())
        event, end = _parse_event(text, match, following.start() if following else len(text), number)
        if event is not None:
            yield event
        elif text.startswith(":::", match.start()):
            damaged += 1
            on_damage(number, text[match.start() : end][:_EXCERPT])
            if damaged == _MAX_DAMAGED and following:
                yield from _parse_pieces(text[end:], number, on_damage)
                return
        # Event text may contain a marker (an echoed command): continue after the event.
        match = _TOKEN.search(text, end)


# Yield the remaining events in a line with many damaged events, cut at every marker: linear in the line's length.
def _parse_pieces(text: str, number: int, on_damage: OnDamage) -> Iterator[Event]:
    starts = [match.start() for match in _TOKEN.finditer(text)]
    for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
        yield from parse_line(text[start:stop], number, on_damage)


# Event at ``token``, and the end of the event.
def _parse_event(text: str, token: re.Match[str], limit: int, number: int) -> tuple[Event | None, int]:
    mark = token.group()
    if mark == ":::MLLOG":
        record, end = _json_at(text, token.end())
        event = _mllog_event(record, number)
        return (event, end) if event is not None else (None, limit)
    if mark == ":::MLL":
        return _parse_mll(text, token.end(), limit, number)
    if mark == "MLPerf:":
        return _parse_mlperf(text[token.end() : limit], number), limit
    return _parse_v05(text[token.end() : limit], number), limit


def _mllog_event(record: object, number: int) -> Event | None:
    if not isinstance(record, dict):
        return None
    get = record.get
    key, metadata, namespace, milliseconds = get("key"), get("metadata"), get("namespace"), get("time_ms")
    if not isinstance(key, str):
        return None
    if not isinstance(metadata, dict):
        metadata = _NO_METADATA
    namespace = namespace[:80] if isinstance(namespace, str) else ""
    if type(milliseconds) is int and -_MAX_EXACT_INT < milliseconds < _MAX_EXACT_INT:
        return Event(milliseconds / 1000, key, get("value"), metadata, number, "mllog", namespace)
    seconds = _time_of(record)
    refused = "" if seconds is not None or milliseconds is None else str(milliseconds)[:80]
    return Event(seconds, key, get("value"), metadata, number, "mllog", namespace, refused)


def _parse_mll(text: str, start: int, limit: int, number: int) -> tuple[Event | None, int]:
    head = _MLL.match(text, start)
    if head is None:
        return None, limit
    record, end = _json_at(text, head.end())
    if record is None and "{'" in text[head.end() : limit]:
        # One submitter of v0.6 printed the metadata as a Python dictionary.
        record, end = _json_at(text[: head.end()] + text[head.end() : limit].replace("'", '"'), head.end())
    seconds = number_of(head["time"])
    if not isinstance(record, dict) or seconds is None:
        return None, limit
    metadata = record.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else _NO_METADATA
    return Event(seconds, head["key"], record.get("value"), metadata, number, "mll"), end


def _parse_v05(body: str, number: int) -> Event | None:
    match = _V05.match(body)
    seconds = number_of(match["time"]) if match else None
    if match is None or seconds is None:
        return None
    rest = match["rest"].strip()
    if rest and not rest.startswith(":"):
        return None
    # Python refuses to read a number of thousands of digits.
    lineno = int(match["lineno"]) if len(match["lineno"]) < 10 else None
    metadata = {"benchmark": match["benchmark"], "file": match["file"], "lineno": lineno}
    return Event(
        time_s=seconds, key=match["key"], value=_bare_or_json(rest[1:]), metadata=metadata, line=number, dialect="v0.5"
    )


def _parse_mlperf(body: str, number: int) -> Event | None:
    match = _MLPERF.match(body)
    if match is None:
        return None
    try:
        seconds = float(calendar.timegm(time.strptime(match["time"], "%m/%d/%y %H:%M:%S")))
    except ValueError:
        return None
    plain = _PERCENT.sub(lambda percent: repr(float(percent[1]) / 100), match["rest"])
    value = _bare_or_json(plain.strip().lstrip(":=,"))
    return Event(
        time_s=seconds,
        key=match["key"],
        value=value,
        metadata={"benchmark": match["benchmark"]},
        line=number,
        dialect="mlperf",
    )


# JSON value at ``start``, or None. RecursionError: thousands of brackets.
def _json_at(text: str, start: int) -> tuple[object, int]:
    while start < len(text) and text[start] in " \t":
        start += 1
    try:
        return _decode_json(text, start)
    except (ValueError, RecursionError):
        return None, start


# V0.5 value: JSON if possible, else the text, or None if empty.
def _bare_or_json(text: str) -> object:
    text = text.strip()
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# Seconds. Some logs have ``time_s: 0.0`` without ``time_ms``: such events lack a time.
def _time_of(record: Mapping[str, object]) -> float | None:
    milliseconds = number_of(record.get("time_ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    return number_of(record.get("time_s")) or None


def number_of(value: object) -> float | None:
    """Return a number, including numbers in text; None for other values and ``True``.

    ``float`` also accepts digits of other scripts and underscores, which loggers do not write.
    """
    if type(value) is float or type(value) is int:
        return float(value) if -_LARGEST < value < _LARGEST else None
    if value is None or isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and (not value.isascii() or "_" in value):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < _LARGEST else None
