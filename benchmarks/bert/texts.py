"""Documents of plain text files, cut into sentences: a sentence a line, WikiExtractor's output, or WikiText's lines.

- SENTENCES: one sentence a line, an empty line between documents (``results/part-*`` of process_wiki.sh);
- PARAGRAPHS: the same with a paragraph a line;
- EXTRACTED: ``<doc ...>``, the title, paragraphs, ``</doc>`` (``wiki_00`` of WikiExtractor);
- WIKITEXT: `` = Title = `` and paragraphs, tokenized with ``@-@`` or not.

benchmarks/language/sentences.py splits paragraphs into sentences.
"""

import mmap
import re
from itertools import chain, groupby
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence, Tuple

from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.language.sentences import sentences_of

SENTENCES, PARAGRAPHS, EXTRACTED, WIKITEXT = "sentences", "paragraphs", "extracted", "wikitext"
SAMPLE_BYTES = 1 << 12  # bytes at a file's start that determine its form
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
_LONGEST = 1 << 28  # bytes without a document boundary: limit for worker memory


class Document(NamedTuple):
    # One document, cut into sentences.

    sentences: List[str]
    raw: str  # output of process_wiki.sh: MLPerf's list of evaluation articles has its md5

    @property
    def size(self) -> int:
        return sum(len(sentence.encode("utf-8")) for sentence in self.sentences)


def form_of(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES).decode("utf-8", "replace").lstrip("\ufeff")
    lines = [line for line in head.splitlines() if line.strip()]
    if lines and lines[0].startswith("<doc"):
        return EXTRACTED
    return WIKITEXT if lines and _TITLE.match(lines[0]) else SENTENCES


def cut(path: Path, form: str, size: int) -> List[Tuple[int, int]]:
    # Return ranges of about ``size`` bytes that start at document boundaries.
    return ranges(path, _BOUNDARIES[form], size)


def ranges(path: Path, boundary: "re.Pattern[bytes]", size: int) -> List[Tuple[int, int]]:
    """Return file ranges that start at 0 and after the first match from every ``size`` bytes."""
    begins, total = [0], path.stat().st_size
    if total > size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            while begins[-1] + size < total:
                match = boundary.search(content, begins[-1] + size)
                if match is None:
                    break
                begins.append(match.end())
    return list(zip(begins, [*begins[1:], total]))


def read(path: Path, form: str, start: int, end: int) -> Iterator[Document]:
    """Yield the documents in a range returned by ``cut``.

    Raises:
        Problem: the file is not UTF-8, or a document exceeds a worker's memory limit.
    """
    if end - start > _LONGEST:
        raise Problem(
            f"{path}: a document longer than {_LONGEST:,} characters",
            "documents apart",
            "separate documents by an empty line",
        )
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(end - start)
    try:
        lines = [line.lstrip("\ufeff").rstrip("\r") for line in content.decode("utf-8").split("\n")]
    except UnicodeDecodeError:
        raise text_files.not_utf8((path, str(path))) from None
    group_by = {EXTRACTED: _by_tag, WIKITEXT: _by_title}.get(form, _by_blank)
    for group in group_by(lines):
        if form == SENTENCES:
            sentences = [line.strip() for line in group]
        else:
            sentences = [sentence for line in group for sentence in sentences_of(line)]
        sentences = [sentence for sentence in sentences if sentence]
        if sentences:
            yield Document(sentences, "\n".join(group if form == SENTENCES else sentences).rstrip())


def _by_blank(lines: Sequence[str]) -> Iterator[List[str]]:
    return (list(group) for has_text, group in groupby(lines, lambda line: bool(line.strip())) if has_text)


def _by_tag(lines: Sequence[str]) -> Iterator[List[str]]:
    # Remove the tags and the title, which is the second line (cleanup_file.py).
    for document in re.split(r"^<doc.*\n", "\n".join(lines), flags=re.MULTILINE)[1:]:
        yield [line for line in document.split("\n")[1:] if line != "</doc>"]


def _by_title(lines: Sequence[str]) -> Iterator[List[str]]:
    # A title has empty lines around it: a formula in the text may look like one.
    group: List[str] = []
    previous, line = "", ""
    for after in chain(lines, ("",)):
        if _TITLE.match(line) and not previous.strip() and not after.strip():
            yield group
            group = []
        elif not _HEADING.match(line):
            group.append(_JOINED.sub(r"\1", line.strip()))
        previous, line = line, after
    yield group
