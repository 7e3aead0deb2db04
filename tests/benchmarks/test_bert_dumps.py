"""The text of BERT's pretraining data: sentences, wikitext, dumps however they are packed, and damaged ones."""

import bz2
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bert import (
    markup,
    sentences,
    texts,
    wikipedia,
)
from benchmarks.common.data.problem import Problem
from tests.bert_data import (
    PAGES,
    PLAIN,
    write_dump,
)


def test_sentences_end_where_a_reader_ends_them() -> None:
    paragraph = (
        'Dr. Smith of St. Louis, b. 1901, said: "Stop!" Then J. R. Hall left the U.S. in Jan. 1930. '
        "Was it 3.5 km? (It was.) no. it goes on; see fig. 2. So did I. The end"
    )
    assert sentences.split(paragraph) == [
        'Dr. Smith of St. Louis, b. 1901, said: "Stop!"',
        "Then J. R. Hall left the U.S. in Jan. 1930.",
        "Was it 3.5 km?",
        "(It was.) no. it goes on; see fig. 2.",
        "So did I.",
        "The end",
    ]


WIKITEXT = """{{Infobox city|name={{nowrap|X}}|pop=5|map={|
| a
|}}}
'''Ada''' (10 December 1815{{snd}}1852; {{lang-fr|''Adèle''}}) was a [[mathematician|''mathematician'']]s' friend.<ref
name="a">{{cite web|url=http://x.org/a}}</ref><ref name="b" /> She <!-- not
this -->walked {{convert|5|km|mi}}.

[[File:Ada.jpg|thumb|An [[image]] with [http://x.org words] in [sic] it]]
== Life ==
* a list
{| class="wikitable"
! head
|-
| cell {{templ|x}}
|}
See [http://example.org the site] and [[:Category:Poets|poets]], [[fr:A]][[Category:P]]&amp;nbsp;AT&amp;amp;T {{t|x}}.
The sum <math>\\frac{1}{2}</math> of ''The Times'''s H<sub>2</sub>O, ( ; ) ok.
<gallery>
x.jpg|words
</gallery>
(a note)
"""


def test_wikitext_keeps_running_text_alone() -> None:
    assert markup.paragraphs(WIKITEXT.replace("&amp;", "&")) == [
        "Ada (10 December 1815 – 1852; Adèle) was a mathematicians' friend. She walked 5 km.",
        "See the site and poets, AT&T.",
        "The sum of The Times's H2O, ok.",
    ]


def pack(content: bytes, size: int) -> bytes:
    """Streams of so many bytes each, wherever pages are cut."""
    return b"".join(bz2.compress(content[place : place + size]) for place in range(0, len(content), size))


@pytest.mark.parametrize("form", ["xml", "one stream", "many streams", "streams within pages"])
def test_each_page_is_found_once_however_a_dump_is_packed(form: str, tmp_path: Path, monkeypatch: Any) -> None:
    content = write_dump(PAGES)
    packed = {"xml": content, "one stream": bz2.compress(content), "many streams": pack(content, 900)}
    path = tmp_path / ("dump.xml" if form == "xml" else "dump.xml.bz2")
    path.write_bytes(packed.get(form) or pack(content, 37))
    monkeypatch.setattr(wikipedia, "RANGE_BYTES", {".xml": 1500, ".bz2": 700})
    ranges = wikipedia.cut(path)
    assert (len(ranges) > 3) == (form != "one stream")
    counts: dict[str, int] = {}
    found = [page for begin, end in ranges for page in wikipedia.pages(path, begin, end, counts)]
    assert [page.title for page in found] == [f"Page {number}" for number in range(40)]
    assert [page.text for page in found] == PLAIN
    size = sum(map(len, re.findall(rb"<page>.*?</page>", content, re.DOTALL)))
    assert counts == {"redirects": 1, "pages of other namespaces": 1, "bytes of XML": size}


EXTRACTED = (
    '<doc id="12" url="x" title="A">\nA\n\nOne. Two is here.\n\nThree.\n</doc>\n<doc id="2">\nB\n\nFour.\n</doc>\n'
)
WIKI = (
    " \n = A = \n \n One @-@ two . It is 1 @,@ 000 . \n = 1 rad / s and k = \n 2 . \n"
    " \n = = Part = = \n \n Three . \n \n = B = \n \n Four . \n"
)


@pytest.mark.parametrize(
    ("content", "form", "documents"),
    [
        ("\ufeffOne.\nTwo is here.\n\n \nThree.\r\n", texts.SENTENCES, [["One.", "Two is here."], ["Three."]]),
        (EXTRACTED, texts.EXTRACTED, [["One.", "Two is here.", "Three."], ["Four."]]),
        (WIKI, texts.WIKITEXT, [["One-two .", "It is 1,000 .", "= 1 rad / s and k =", "2 .", "Three ."], ["Four ."]]),
    ],
    ids=["sentences", "extracted", "wikitext"],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_clean_text_is_read_in_its_forms(
    content: str, form: str, documents: list[list[str]], size: int, tmp_path: Path
) -> None:
    path = tmp_path / "text"
    path.write_bytes(content.encode())
    assert texts.form_of(path) == form
    ranges = texts.cut(path, form, size)
    assert (len(ranges) > 1) == (size == 1)
    found = [each for begin, end in ranges for each in texts.read(path, form, begin, end, lambda done: None)]
    assert [each.sentences for each in found] == documents


DUMP = write_dump(PAGES)
STREAMS = [bz2.compress(DUMP[place : place + 900]) for place in range(0, len(DUMP), 900)]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("d.xml", DUMP[:4000], "d.xml is truncated: there is no </mediawiki>"),
        ("d.xml.bz2", b"".join(STREAMS)[:-20], "d.xml.bz2 is truncated: the last bz2 stream has no end"),
        ("d.xml.bz2", b"".join(STREAMS[:4]), "d.xml.bz2 is truncated: "),
        (
            "d.xml.bz2",
            b"".join([*STREAMS[:2], STREAMS[2][:60], b"xxxx", *STREAMS[3:]]),
            "damaged in the bz2 stream at byte",
        ),
        ("d.xml.bz2", b"<mediawiki>", "does not begin as bz2 does"),
        ("d.xml", b"<html></html>", "does not begin as MediaWiki's XML does, with <mediawiki"),
        ("d.xml", b"", "d.xml is empty"),
        ("d.xml", DUMP.replace("é".encode(), b"\xe9"), "page 'Page 0': byte 0xe9 of its text is not UTF-8"),
    ],
    ids=["cut", "cut bz2", "streams missing", "damaged", "no bz2", "no dump", "nothing", "latin1"],
)
def test_dump_that_cannot_be_read_is_refused(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Problem) as found:
        for begin, end in wikipedia.cut(tmp_path / name):
            list(wikipedia.read(tmp_path / name, begin, end, {}, lambda done: None))
    assert told in found.value.found and found.value.hint
