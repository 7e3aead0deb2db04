"""Articles of a Wikipedia dump (pages-articles*.xml, plain or bz2), read in ranges by several processes.

A multistream bz2 file is a row of bz2 streams; a range holds whole streams. A page belongs to the range in which it
begins, whatever streams it is cut into, so that the same pages are found once however a file was packed. A bz2 file of
one stream is one range: its pages are read by one process, in bounded memory.
"""

from __future__ import annotations

import bz2
import html
import re
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

from benchmarks.bert import markup, sentences
from benchmarks.bert.texts import Document, find_begins
from benchmarks.common.data.problem import FAILED, Problem

RANGE_BYTES = {".xml": 16 << 20, ".bz2": 4 << 20}  # size of a range, about: 4 MiB of bz2 are about 15 MiB of XML
MOST_PAGE_BYTES = 1 << 26  # MediaWiki keeps a page below 2 MiB
_CHUNK = 1 << 20
_TAIL = 1 << 12
_PAGE, _PAGE_END, _END = b"<page>", b"</page>", b"</mediawiki>"
_BOUNDARIES = {
    ".xml": re.compile(rb"\n[ \t]*(?=<page>)"),
    # A stream's header and the magic number of its first block.
    ".bz2": re.compile(rb"(?=BZh[1-9]1AY&SY)"),
}
# Magic number of a bz2 stream's end, before its 32 bits of checksum and up to 7 of padding.
_STREAM_END = 0x177245385090
_TITLE = re.compile(rb"<title>([^<]*)</title>")
_SPACE = re.compile(rb"<ns>(-?\d+)</ns>")
_TEXT = re.compile(rb"<text\b[^>]*?(?:/>|>(.*?)</text>)", re.DOTALL)
HINT = "get the file again and compare its size and checksum with those of dumps.wikimedia.org"


class Page(NamedTuple):
    """One article."""

    title: str
    text: str  # wikitext


def is_dump(path: Path) -> bool:
    """Return whether a file is called as a dump is."""
    return path.name.endswith((".xml", ".xml.bz2")) or (path.suffix == ".bz2" and ".xml" in path.name)


def cut(path: Path) -> List[Tuple[int, int]]:
    """Return ranges of a dump.

    Raises:
        Problem: it is empty, no dump, or ends too early.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(_TAIL)
        file.seek(max(0, total - _TAIL))
        end = file.read()
    if not total:
        raise Problem(f"{path} is empty", "a dump of Wikipedia", HINT)
    is_packed = path.suffix == ".bz2"
    if not (begin.startswith(b"BZh") if is_packed else b"<mediawiki" in begin):
        expected = "bz2 does" if is_packed else "MediaWiki's XML does, with <mediawiki"
        raise Problem(f"{path} does not begin as {expected}", "a dump of Wikipedia, packed by bzip2 or plain", HINT)
    if not (_ends_a_stream(end) if is_packed else _END in end):
        raise _truncated(path, "the last bz2 stream has no end" if is_packed else f"there is no {_END.decode()}")
    begins = find_begins(path, _BOUNDARIES[path.suffix], RANGE_BYTES[path.suffix])
    return list(zip(begins, [*begins[1:], total]))


def _ends_a_stream(tail: bytes) -> bool:
    bits = int.from_bytes(tail[-11:], "big")
    return any(bits >> (32 + padding) & (1 << 48) - 1 == _STREAM_END for padding in range(8))


def _truncated(path: Path, how: str) -> Problem:
    return Problem(f"{path} is truncated: {how}", "a whole dump", HINT)


# -- documents -----------------------------------------------------------------------------------------------


def read(path: Path, begin: int, end: int, counts: Dict[str, int], report: Callable[[int], None]) -> Iterator[Document]:
    """Yield the articles of a range as sentences; ``counts`` gets the pages that were left out, by their reason.

    Raises:
        Problem: the dump is truncated or damaged, or a page is not UTF-8.
    """
    for page in pages(path, begin, end, counts, report):
        found = [sentence for line in markup.paragraphs(page.text) for sentence in sentences.split(line)]
        if found:
            yield Document(found, "\n".join(found))
        else:
            counts["pages without text"] = counts.get("pages without text", 0) + 1


def pages(
    path: Path, begin: int, end: int, counts: Dict[str, int], report: Callable[[int], None] = lambda done: None
) -> Iterator[Page]:
    """Yield the articles of a range: no redirects, and nothing but the namespace of articles."""
    for raw in _raw_pages(path, begin, end, report):
        title = html.unescape(_first(_TITLE, raw).decode("utf-8", "replace"))
        counts["bytes of XML"] = counts.get("bytes of XML", 0) + len(raw)
        if _first(_SPACE, raw) not in (b"0", b""):
            reason = "pages of other namespaces"
        elif b"<redirect " in raw:
            reason = "redirects"
        else:
            text = _first(_TEXT, raw)
            try:
                yield Page(title, html.unescape(text.decode("utf-8")))
            except UnicodeDecodeError as error:
                found = f"{path}, page {title!r}: byte {text[error.start]:#04x} of its text is not UTF-8"
                raise Problem(found, "a dump in UTF-8", HINT) from None
            continue
        counts[reason] = counts.get(reason, 0) + 1


def _first(pattern: "re.Pattern[bytes]", raw: bytes) -> bytes:
    match = pattern.search(raw)
    return (match.group(1) or b"") if match else b""


def _raw_pages(path: Path, begin: int, end: int, report: Callable[[int], None]) -> Iterator[bytes]:
    # Yield the XML of each page that begins in a range.
    held, tail, title = b"", b"", ""
    limit = None  # place in ``held`` where the next range begins
    for chunk, place in _chunks(path, begin, end):
        if place >= end and limit is None:
            limit = len(held)
        held += chunk
        tail = (tail + chunk)[-_TAIL:]
        report(min(place, end) - begin)
        done, first = 0, held.find(_PAGE)
        while first >= 0 and (limit is None or first < limit) and (last := held.find(_PAGE_END, first)) >= 0:
            done = last + len(_PAGE_END)
            title = _first(_TITLE, held[first:done]).decode("utf-8", "replace")
            yield held[first:done]
            first = held.find(_PAGE, done)
        if limit is not None and (first < 0 or first >= limit):
            return
        # The beginning of a page, or of its tag, may be at the end of what is held.
        done = first if first >= 0 else max(done, len(held) - len(_PAGE))
        held, limit = held[done:], None if limit is None else limit - done
        if len(held) > MOST_PAGE_BYTES:
            raise Problem(f"{path}: a page of over {MOST_PAGE_BYTES:,} bytes after {title!r}", "whole pages", HINT)
    if _PAGE in held or (end == path.stat().st_size and _END not in tail):
        raise _truncated(path, f"it ends within or after page {title!r}")


def _chunks(path: Path, begin: int, end: int) -> Iterator[Tuple[bytes, int]]:
    # Yield what is unpacked with the place in the file where its stream begins, also beyond ``end``.
    if path.suffix != ".bz2":
        with path.open("rb") as file:
            file.seek(begin)
            while True:
                place = file.tell()
                chunk = file.read(min(_CHUNK, end - place) if place < end else _CHUNK)
                if not chunk:
                    return
                yield chunk, place
    with path.open("rb") as file:
        file.seek(begin)
        raw, place, stream = file.read(_CHUNK), begin, bz2.BZ2Decompressor()
        while raw:
            try:
                chunk = stream.decompress(raw)
            except (OSError, EOFError, ValueError) as error:
                found = f"{path} is damaged in the bz2 stream at byte {place:,}: {error}"
                raise Problem(found, "a whole dump", HINT, FAILED) from None
            if chunk:
                yield chunk, place
            raw = b""
            if stream.eof:
                raw = stream.unused_data
                place, stream = file.tell() - len(raw), bz2.BZ2Decompressor()
            raw = raw or file.read(_CHUNK)
    if place < path.stat().st_size:
        raise _truncated(path, f"the bz2 stream at byte {place:,} has no end")
