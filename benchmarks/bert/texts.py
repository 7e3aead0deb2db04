"""Documents of plain text files: one sentence a line, WikiExtractor's output, or WikiText's lines.

- SENTENCES: one sentence a line, an empty line between documents (``results/part-*`` of process_wiki.sh);
- PARAGRAPHS: the same with a paragraph a line;
- EXTRACTED: ``<doc ...>``, the title, paragraphs, ``</doc>`` (``wiki_00`` of WikiExtractor);
- WIKITEXT: `` = Title = `` and paragraphs, tokenized with ``@-@`` or not.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from benchmarks.bert import sentences
from benchmarks.common.data import source_checks
from benchmarks.common.data.problem import Problem

SENTENCES, PARAGRAPHS, EXTRACTED, WIKITEXT = "sentences", "paragraphs", "extracted", "wikitext"
SAMPLE_BYTES = 1 << 12  # at the beginning of a file, where its form is looked for
_TITLE = re.compile(r"^ = [^=].* = \s*$")
_HEADING = re.compile(r"^ =( =)+ .* =( =)+ \s*$")
_JOINED = re.compile(r" @([-,.])@ ")
_BLANK = re.compile(rb"\n[ \t\r]*\n(?=[^\s])")
_BOUNDARIES = {
    SENTENCES: _BLANK,
    PARAGRAPHS: _BLANK,
    EXTRACTED: re.compile(rb"\n(?=<doc )"),
    WIKITEXT: re.compile(rb"\n[ \t]*\n(?= = [^=\n]+ = ?\n[ \t]*\n)"),
}
_LONGEST = 1 << 28  # bytes without a document's end: more than a worker should hold
_CHUNK = 1 << 20


class Document(NamedTuple):
    """One document, cut into sentences."""

    sentences: List[str]
    raw: str  # as process_wiki.sh leaves it: its md5 is what MLPerf's list of evaluation articles has


def form_of(path: Path) -> str:
    """Return the form of a file, by how it begins."""
    with path.open("rb") as file:
        begin = file.read(SAMPLE_BYTES).decode("utf-8", "replace").lstrip("\ufeff")
    lines = [line for line in begin.splitlines() if line.strip()]
    if lines and lines[0].startswith("<doc"):
        return EXTRACTED
    return WIKITEXT if lines and _TITLE.match(lines[0]) else SENTENCES


def cut(path: Path, form: str, size: int) -> List[Tuple[int, int]]:
    """Return ranges of about ``size`` bytes that begin where a document does."""
    begins = find_begins(path, _BOUNDARIES[form], size)
    return list(zip(begins, [*begins[1:], path.stat().st_size]))


def find_begins(path: Path, boundary: "re.Pattern[bytes]", size: int) -> List[int]:
    """Return 0 and the ends of the first match after each ``size`` bytes; reads no more than it has to."""
    total = path.stat().st_size
    begins = [0]
    with path.open("rb") as file:
        while begins[-1] + size < total:
            found = _next_begin(file, begins[-1] + size, boundary)
            if found is None:
                break
            begins.append(found)
    return begins


def _next_begin(file: BinaryIO, place: int, boundary: "re.Pattern[bytes]") -> Optional[int]:
    file.seek(place)
    held, base = b"", place
    while True:
        chunk = file.read(_CHUNK)
        held += chunk
        match = boundary.search(held)
        if match:
            return base + match.end()
        if not chunk:
            return None
        # What is kept is longer than any boundary with the title behind it.
        base, held = base + max(0, len(held) - SAMPLE_BYTES), held[-SAMPLE_BYTES:]


def read(path: Path, form: str, begin: int, end: int, report: Callable[[int], None]) -> Iterator[Document]:
    """Yield the documents of a range that ``cut`` found.

    Raises:
        Problem: it is not UTF-8, or a document is longer than a worker should hold.
    """
    lines = _lines(path, begin, end, report)
    grouped = {SENTENCES: _by_blank, PARAGRAPHS: _by_blank, EXTRACTED: _by_tag, WIKITEXT: _by_title}[form](lines)
    for group in grouped:
        if sum(map(len, group)) > _LONGEST:
            hint = "put an empty line between documents"
            raise Problem(f"{path}: a document of over {_LONGEST:,} characters", "documents apart", hint)
        if form == SENTENCES:
            found = [line.strip() for line in group]
        else:
            found = [sentence for line in group for sentence in sentences.split(line)]
        found = [sentence for sentence in found if sentence]
        if found:
            yield Document(found, "\n".join(group if form == SENTENCES else found).rstrip())


def _lines(path: Path, begin: int, end: int, report: Callable[[int], None]) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(begin)
        place = begin
        while place < end:
            line = file.readline()
            if not line:
                return
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                raise source_checks.not_utf8((path, str(path))) from None
            place += len(line)
            report(place - begin)
            yield text.lstrip("\ufeff").rstrip("\r\n")


def _by_blank(lines: Iterable[str]) -> Iterator[List[str]]:
    group: List[str] = []
    for line in lines:
        if line.strip():
            group.append(line)
        elif group:
            yield group
            group = []
    yield group


def _by_tag(lines: Iterable[str]) -> Iterator[List[str]]:
    # Leave out the tags and the title, which is the line behind the first one (cleanup_file.py).
    group: List[str] = []
    is_title = False
    for line in lines:
        if line.startswith("<doc"):
            yield group
            group, is_title = [], True
        elif not is_title and line != "</doc>":
            group.append(line)
        else:
            is_title = False
    yield group


def _by_title(lines: Iterable[str]) -> Iterator[List[str]]:
    # A title has empty lines around it: a formula in the text may look like one.
    group: List[str] = []
    before, line = "", ""
    for after in chain(lines, ("",)):
        if _TITLE.match(line) and not before.strip() and not after.strip():
            yield group
            group = []
        elif not _HEADING.match(line):
            group.append(_JOINED.sub(r"\1", line.strip()))
        before, line = line, after
    yield group
