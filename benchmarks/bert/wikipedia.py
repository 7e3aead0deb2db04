"""Read articles from a Wikipedia dump (pages-articles*.xml, plain or bz2) in ranges, with multiple processes.

A multistream bz2 file is a sequence of bz2 streams; a range contains complete streams. A page belongs to the range
in which it starts, even if it spans more than one stream, so the pages are the same for all ways to compress the
file. A bz2 file with one stream is one range: one process reads its pages, with bounded memory.

Paragraphs are extracted as by WikiExtractor, which the reference uses: running text, link text, bold and italic
words. Templates, tables, references, comments, files, categories, lists, headings, galleries and formulas are
removed. WikiExtractor expands templates with the definitions in the dump; here, only the few templates that
represent words in a sentence, such as a converted length, are expanded.

mwparserfromhell is ten times slower (1.2 vs 11.6 MB/s on 106 articles, one core) and does not expand templates
either.
"""

import bz2
import html
import re
from collections import Counter
from pathlib import Path
from typing import Callable, Iterator, List, Match, Sequence, Tuple, Union

from benchmarks.bert import texts
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.text_files import LONGEST_LINE
from benchmarks.language.sentences import sentences_of

DUMP = "dump"  # a file's form; texts.py has the others
RANGE_BYTES = {".xml": 16 << 20, ".bz2": 4 << 20}  # approximate range size: 4 MiB of bz2 are about 15 MiB of XML
_CHUNK = 1 << 20
_TAIL = 1 << 12
_PAGE, _PAGE_END, _END = b"<page>", b"</page>", b"</mediawiki>"
_BOUNDARIES = {
    ".xml": re.compile(rb"\n[ \t]*(?=<page>)"),
    # Stream header and magic number of the first block.
    ".bz2": re.compile(rb"(?=BZh[1-9]1AY&SY)"),
}
# Magic number at a bz2 stream's end, followed by a 32-bit checksum and up to 7 bits of padding.
_STREAM_END = 0x177245385090
_TITLE = re.compile(rb"<title>([^<]*)</title>")
_SPACE = re.compile(rb"<ns>(-?\d+)</ns>")
_TEXT = re.compile(rb"<text\b[^>]*?(?:/>|>(.*?)</text>)", re.DOTALL)
HINT = "get the file again and compare its size and checksum with those of dumps.wikimedia.org"


def is_dump(path: Path) -> bool:
    return path.name.endswith((".xml", ".xml.bz2")) or (path.suffix == ".bz2" and ".xml" in path.name)


def cut(path: Path) -> List[Tuple[int, int]]:
    """Return a dump's ranges.

    Raises:
        Problem: the file is empty, not a dump, or truncated.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_TAIL)
        file.seek(max(0, total - _TAIL))
        end = file.read()
    if not total:
        raise Problem(f"{path} is empty", "a dump of Wikipedia", HINT)
    is_packed = path.suffix == ".bz2"
    if not (head.startswith(b"BZh") if is_packed else b"<mediawiki" in head):
        expected = "bz2 does" if is_packed else "MediaWiki's XML does, with <mediawiki"
        raise Problem(
            f"{path} does not start like {expected}", "a Wikipedia dump, plain or compressed with bzip2", HINT
        )
    if not (_ends_a_stream(end) if is_packed else _END in end):
        raise _truncated(path, "the last bz2 stream is incomplete" if is_packed else f"there is no {_END.decode()}")
    return texts.ranges(path, _BOUNDARIES[path.suffix], RANGE_BYTES[path.suffix])


def _ends_a_stream(tail: bytes) -> bool:
    bits = int.from_bytes(tail[-11:], "big")
    return any(bits >> (32 + padding) & (1 << 48) - 1 == _STREAM_END for padding in range(8))


def _truncated(path: Path, how: str) -> Problem:
    return Problem(f"{path} is truncated: {how}", "a whole dump", HINT)


# -- documents -----------------------------------------------------------------------------------------------


def read(
    path: Path, start: int, end: int, counts: "Counter[str]", report: Callable[[int], None]
) -> Iterator[texts.Document]:
    """Yield the articles in a range as sentences; ``counts`` counts the skipped pages by reason.

    Raises:
        Problem: the dump is truncated or damaged, or a page is not UTF-8.
    """
    for _, wikitext in pages(path, start, end, counts, report):
        sentences = [sentence for line in paragraphs(wikitext) for sentence in sentences_of(line)]
        if sentences:
            yield texts.Document(sentences, "\n".join(sentences))
        else:
            counts["pages without text"] += 1


def pages(
    path: Path, start: int, end: int, counts: "Counter[str]", report: Callable[[int], None] = lambda done: None
) -> Iterator[Tuple[str, str]]:
    # Yield title and wikitext of the articles in a range: only the article namespace, without redirects.
    for raw in _raw_pages(path, start, end, report):
        title = html.unescape(_first(_TITLE, raw).decode("utf-8", "replace"))
        counts["bytes of XML"] += len(raw)
        if _first(_SPACE, raw) not in (b"0", b""):
            counts["pages of other namespaces"] += 1
        elif b"<redirect " in raw:
            counts["redirects"] += 1
        else:
            text = _first(_TEXT, raw)
            try:
                yield title, html.unescape(text.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise Problem(
                    f"{path}, page {title!r}: byte {text[error.start]:#04x} of its text is not UTF-8",
                    "a dump in UTF-8",
                    HINT,
                ) from None


def _first(pattern: "re.Pattern[bytes]", raw: bytes) -> bytes:
    match = pattern.search(raw)
    return (match.group(1) or b"") if match else b""


def _raw_pages(path: Path, start: int, end: int, report: Callable[[int], None]) -> Iterator[bytes]:
    # Yield the XML of the pages that start in a range.
    buffer, tail, title = b"", b"", ""
    limit = None  # offset in ``buffer`` of the next range
    for chunk, position in _chunks(path, start, end):
        if position >= end and limit is None:
            limit = len(buffer)
        buffer += chunk
        tail = (tail + chunk)[-_TAIL:]
        report(min(position, end) - start)
        done, first = 0, buffer.find(_PAGE)
        while first >= 0 and (limit is None or first < limit) and (last := buffer.find(_PAGE_END, first)) >= 0:
            done = last + len(_PAGE_END)
            title = _first(_TITLE, buffer[first:done]).decode("utf-8", "replace")
            yield buffer[first:done]
            first = buffer.find(_PAGE, done)
        if limit is not None and (first < 0 or first >= limit):
            return
        # The buffer may end with an incomplete page or page tag.
        done = first if first >= 0 else max(done, len(buffer) - len(_PAGE))
        buffer, limit = buffer[done:], None if limit is None else limit - done
        if len(buffer) > LONGEST_LINE:
            raise Problem(f"{path}: a page of over {LONGEST_LINE:,} bytes after {title!r}", "whole pages", HINT)
    if _PAGE in buffer or (end == path.stat().st_size and _END not in tail):
        raise _truncated(path, f"it ends within or after page {title!r}")


def _chunks(path: Path, start: int, end: int) -> Iterator[Tuple[bytes, int]]:
    # Yield decompressed chunks and the file offset of their stream, also after ``end``.
    if path.suffix != ".bz2":
        with path.open("rb") as file:
            file.seek(start)
            while True:
                position = file.tell()
                chunk = file.read(min(_CHUNK, end - position) if position < end else _CHUNK)
                if not chunk:
                    return
                yield chunk, position
    with path.open("rb") as file:
        file.seek(start)
        raw, position, stream = file.read(_CHUNK), start, bz2.BZ2Decompressor()
        while raw or not stream.needs_input:
            try:
                chunk = stream.decompress(raw, _CHUNK)
            except (OSError, EOFError, ValueError) as error:
                raise Problem(
                    f"{path} is damaged in the bz2 stream at byte {position:,}: {error}",
                    "a whole dump",
                    HINT,
                    keeps=True,
                ) from None
            if chunk:
                yield chunk, position
            raw = b""
            if stream.eof:
                raw = stream.unused_data
                position, stream = file.tell() - len(raw), bz2.BZ2Decompressor()
            if stream.needs_input:
                raw = raw or file.read(_CHUNK)
    if position < path.stat().st_size:
        raise _truncated(path, f"the bz2 stream at byte {position:,} has no end")


# -- wikitext ------------------------------------------------------------------------------------------------

_NAMESPACE = re.compile(
    r"\s*(?:file|image|media|category|template|wikipedia|help|portal|user|talk|special|module|draft|mediawiki"
    r"|commons|meta|wikt|wiktionary|wikisource|wikibooks|wikiquote|[a-z]{2,3}(?:-[a-z-]+)?|simple)\s*:",
    re.IGNORECASE,
)
_KEPT_NAMESPACE = re.compile(r"\s*(?:w|wikt|wiktionary)\s*:\s*", re.IGNORECASE)


def _link(match: "re.Match[str]") -> str:
    # Return a link's text: the last part, or the target.
    target, _, rest = match.group(1).partition("|")
    if target.startswith(":"):
        target = target[1:]
    elif _KEPT_NAMESPACE.match(target):
        target = _KEPT_NAMESPACE.sub("", target, count=1)
    elif _NAMESPACE.match(target):
        return ""
    return (rest.rsplit("|", 1)[-1] or target).strip() if rest else target.strip()


# Templates that are replaced by an argument (index) or by text; other templates are removed.
_ARGUMENTS = {
    **dict.fromkeys(("nowrap", "nobr", "small", "smaller", "big", "em", "abbr", "tooltip", "sic", "visible anchor"), 0),
    **dict.fromkeys(
        ("vanchor", "nihongo", "transl", "transliteration", "formatnum", "formatnum:", "as of", "quote"), 0
    ),
    **dict.fromkeys(("lang", "color", "font color"), 1),
}
_TEXTS = {
    **dict.fromkeys(("ndash", "en dash", "–", "snd", "spnd", "spaced ndash"), " – "),
    **dict.fromkeys(("mdash", "em dash", "—"), "—"),
    **dict.fromkeys(("'", "'s"), "'s"),
    **dict.fromkeys(("nbsp", "·", "•", "dot"), " "),
}


def _template(match: "re.Match[str]") -> str:
    name, *arguments = match.group(1).split("|")
    name = " ".join(name.split()).lower().replace("_", " ")
    if name in ("convert", "cvt"):
        return _convert(arguments)
    index = 0 if name.startswith("lang-") else _ARGUMENTS.get(name)
    return _TEXTS.get(name, "") if index is None else _argument(arguments, index)


def _argument(arguments: Sequence[str], index: int) -> str:
    # Return a positional argument, or the argument named by its position.
    unnamed = [argument.strip() for argument in arguments if "=" not in argument]
    parted = (argument.partition("=") for argument in arguments)
    named_values = [value.strip() for key, mark, value in parted if mark and key.strip() == str(index + 1)]
    return (named_values or unnamed[index:] or [""])[0]


def _convert(arguments: Sequence[str]) -> str:
    # Return number and unit as they are given: ``{{convert|5|km|mi}}`` is "5 km".
    first, second, third, fourth = (_argument(arguments, index) for index in range(4))
    if second in ("-", "–"):
        return f"{first}{second}{third} {fourth}"
    if second in ("to", "and", "by", "x", "×", "or", "to about"):
        return f"{first} {second} {third} {fourth}"
    return f"{first} {second}"


_DROPPED = (
    "gallery|timeline|noinclude|pre|table|tr|td|th|caption|div|form|input|select|option|textarea|ul|li|ol|dl|dt|dd|menu"
    "|dir|ref|references|img|imagemap|source|syntaxhighlight|small|math|chem|score|graph|mapframe|indicator|includeonly"
)
_ANY_CASE = re.DOTALL | re.IGNORECASE
MOST_PASSES = 40  # maximum nesting depth; lines with deeper markup are dropped
# Markup, what replaces it, and the number of passes, from the inside out, in this order.
_MARKUP: Sequence[Tuple["re.Pattern[str]", "Union[str, Callable[[Match[str]], str]]", int]] = (
    # Comments, elements without content, elements with what they contain, parameters.
    (re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL), "", 1),
    (re.compile(rf"<(?:{_DROPPED}|section|templatestyles|nowiki|br|hr|wbr)\b[^<>]*/>", re.IGNORECASE), " ", 1),
    (re.compile(rf"<({_DROPPED})\b[^<>]*>(?:(?!<\1\b).)*?</\1\s*>", _ANY_CASE), "", MOST_PASSES),
    (re.compile(r"\{\{\{[^{}]*\}\}\}"), "", 1),
    # Templates, those with single braces inside, tables.
    (re.compile(r"\{\{([^{}]*)\}\}"), _template, MOST_PASSES),
    (re.compile(r"\{\{((?:[^{}]|\{(?!\{)|\}(?!\}))*)\}\}"), _template, MOST_PASSES),
    (re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL), "", MOST_PASSES),
    # External links, links, those with single brackets inside.
    (re.compile(r"\[(?:https?:|ftp:|mailto:|news:|irc:)?//[^\s\[\]]*[ \t]*([^\[\]]*)\]", re.IGNORECASE), r"\1", 1),
    (re.compile(r"\[\[([^\[\]]*)\]\]"), _link, MOST_PASSES),
    (re.compile(r"\[\[((?:[^\[\]]|\[(?!\[)|\](?!\]))*)\]\]"), _link, MOST_PASSES),
    # A possessive after italics, italics and bold, switches, other tags.
    (re.compile(r"(?<!')''([^'\n]+)'''s\b"), r"\1's", 1),
    (re.compile(r"'{2,}"), "", 1),
    (re.compile(r"__[A-Z]+__"), "", 1),
    (re.compile(r"</?[a-zA-Z][^<>]*>"), "", 1),
)
_SPACES = re.compile(r"[ \t\xa0\u2002-\u200b]+")
# What the removed markup leaves in a line.
_REMAINS = (
    (_SPACES, " "),
    (re.compile(r"[(\[][\s,;:.–—-]*[)\]]"), ""),
    (re.compile(r"([(\[])[\s,;]+"), r"\1"),
    (re.compile(r"\s+([,;:.)\]])"), r"\1"),
    (_SPACES, " "),
)
_HEADING = re.compile(r"^(=+).*\1\s*$")
LEAST_LETTERS = 2


def paragraphs(text: str) -> List[str]:
    # Return the paragraphs in an article's wikitext, one per line.
    for pattern, replacement, passes in _MARKUP:
        for _ in range(passes):
            text, count = pattern.subn(replacement, text)
            if not count:
                break
    # Unescape entities after removing tags: &lt;b&gt; in an article is text.
    lines = (_clean_line(line) for line in html.unescape(text).splitlines() if _is_prose(line))
    return [line for line in lines if sum(map(str.isalnum, line)) >= LEAST_LETTERS]


def _is_prose(line: str) -> bool:
    # Return whether a line is running text, not a list, heading, or remainder from a table or template.
    stripped = line.strip()
    if not stripped or stripped[0] in "*#;:|!{}" or stripped[-1] in "{}" or stripped.startswith("----"):
        return False
    if "{{" in line or "}}" in line or "[[" in line or "{|" in line or _HEADING.match(stripped):
        return False
    return not (stripped[0] == "(" and stripped[-1] == ")")


def _clean_line(line: str) -> str:
    for pattern, replacement in _REMAINS:
        line = pattern.sub(replacement, line)
    return line.replace(",,", ",").replace(",.", ".").strip()
