"""Documents of plain text files, cut into sentences: a sentence a line, WikiExtractor's output, or WikiText's lines.

- SENTENCES: one sentence a line, an empty line between documents (``results/part-*`` of process_wiki.sh);
- PARAGRAPHS: the same with a paragraph a line;
- EXTRACTED: ``<doc ...>``, the title, paragraphs, ``</doc>`` (``wiki_00`` of WikiExtractor);
- WIKITEXT: `` = Title = `` and paragraphs, tokenized with ``@-@`` or not.

The reference cuts sentences by NLTK's punkt (do_sentence_segmentation.py), whose model is a download of its own and
differs between releases. A sentence ends here at ".", "!" or "?", with what closes a quotation or a bracket, where a
space and a capital, a digit or an opening mark follow; not behind a known abbreviation, an initial or a list's number.
"""

import mmap
import re
from itertools import chain, groupby
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence, Tuple

from benchmarks.common.data import text_files
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
# What may stand before the full stop of an abbreviation that is rarely a sentence's last word.
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        """
        adm al apr approx art aug ave b bros c ca capt cf ch cmdr co col comdr cpl d dec dept dr ed eds eg e.g esp est
        et feb fig figs fl fr ft gen gov hon i.e ie illus inc jan jr jul jun lat lit lt ltd maj mar messrs mr mrs ms mt
        no nos nov oct op p par pl pp prof pron pt rd ref rep rev r sec sen sept sep ser sgt sr st supt transl trans
        univ v var viz vol vols vs
        """,
    )
)
_END = re.compile(r"""([.!?]+)(["'”’)\]]*)\s+(?=["'“‘(\[]*[A-Z0-9À-ÖØ-Þ])""")
_LAST_WORD = re.compile(r"""(?:^|[\s("'“‘\[])([^\s("'“‘\[]*)$""")
_INITIAL = re.compile(r"^(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z])$")
LOOK_BACK = 32  # characters before a full stop in which its word is looked for


class Document(NamedTuple):
    # One document, cut into sentences.

    sentences: List[str]
    raw: str  # as process_wiki.sh leaves it: its md5 is what MLPerf's list of evaluation articles has

    @property
    def size(self) -> int:
        return sum(len(sentence.encode("utf-8")) for sentence in self.sentences)


def sentences_of(paragraph: str) -> List[str]:
    # Return the sentences of a paragraph, without spaces around them; none is empty.
    sentences, start = [], 0
    for match in _END.finditer(paragraph):
        if match.group(1) == "." and not match.group(2) and _is_abbreviated(paragraph, match.start()):
            continue
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_abbreviated(paragraph: str, stop: int) -> bool:
    match = _LAST_WORD.search(paragraph[max(0, stop - LOOK_BACK) : stop])
    word = match.group(1) if match else ""
    if _INITIAL.match(word):
        return word != "I"
    return word.lower() in _ABBREVIATIONS


# -- files -----------------------------------------------------------------------------------------------------


def form_of(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES).decode("utf-8", "replace").lstrip("\ufeff")
    lines = [line for line in head.splitlines() if line.strip()]
    if lines and lines[0].startswith("<doc"):
        return EXTRACTED
    return WIKITEXT if lines and _TITLE.match(lines[0]) else SENTENCES


def cut(path: Path, form: str, size: int) -> List[Tuple[int, int]]:
    # Return ranges of about ``size`` bytes that begin where a document does.
    return ranges(path, _BOUNDARIES[form], size)


def ranges(path: Path, boundary: "re.Pattern[bytes]", size: int) -> List[Tuple[int, int]]:
    """Return ranges of a file that begin at 0 and behind the first match after each ``size`` bytes."""
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
    """Yield the documents of a range that ``cut`` found.

    Raises:
        Problem: it is not UTF-8, or a document is longer than a worker should hold.
    """
    if end - start > _LONGEST:
        raise Problem(
            f"{path}: a document of over {_LONGEST:,} characters",
            "documents apart",
            "put an empty line between documents",
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
    # Leave out the tags and the title, which is the line behind the first one (cleanup_file.py).
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
