"""BERT's data from text: words, sentences, wikitext, dumps however they are packed, and the whole preparation."""

import bz2
import hashlib
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.bert import evaluation, stages, texts, wikipedia, writer
from benchmarks.common.data.problem import Problem
from benchmarks.language import FILES, vocabulary, wordpiece
from benchmarks.language.arrays import open_data
from benchmarks.language.vocabulary import SPECIAL, Vocabulary
from benchmarks.language.wordpiece import Tokenizer
from encore import paths
from tests.bert_data import (
    PAGES,
    PLAIN,
    SHORT,
    SIZES,
    WORDS,
    run,
    unpack,
    write_dump,
    write_packed,
    write_text,
)
from tests.preparing import refused
from tests.trainings import wait_until, with_other_offsets

# -- words ----------------------------------------------------------------------------------------------------

PIECES = ("un", "##able", "##aff", "##s", "real", "##ly", "we", "run", "a", "##b", "##c", "don", "t", "漢", "e")
MARKS = (",", ".", "?", "!", "'", "-", "[", "]", "mask", "¿", "σ", "##ς")
SMALL = Vocabulary((*SPECIAL, *PIECES, *MARKS))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Unaffable, réally?!", ["un", "##aff", "##able", ",", "real", "##ly", "?", "!"]),
        ("don't--RUNS", ["don", "'", "t", "-", "-", "run", "##s"]),
        ("a\u0301bc A\u200bb\x1cc", ["a", "##b", "##c", "a", "##b", "##c"]),
        ("漢we漢", ["漢", "we", "漢"]),
        ("we\u00a0run\u3000é \ufffd\x00", ["we", "run", "e"]),
        ("[MASK] ¿unknown", ["[", "mask", "]", "¿", "[UNK]"]),
        ("ΣΣ", ["σ", "##ς"]),
        ("Σ.a ΣΣİ", ["σ", ".", "a", "[UNK]"]),
        (f"{'a' + 'b' * 199} {'a' + 'b' * 200}", ["a", *["##b"] * 199, "[UNK]"]),
        (" \t\n", []),
    ],
    ids=["accents", "punctuation", "removed", "ideographs", "spaces", "marks", "sigma", "no sigma", "long", "nothing"],
)
def test_words_are_cut_as_bert_cuts_them(text: str, pieces: list[str]) -> None:
    assert Tokenizer(SMALL).pieces(text) == pieces


def test_offsets_are_those_of_the_text_as_it_was_given() -> None:
    text = "  Réally,\x00 unaffable İ 漢e"
    offsets = Tokenizer(SMALL).encode(text).offsets
    assert [text[begin:end] for begin, end in offsets] == ["Réal", "ly", ",", "un", "aff", "able", "İ", "漢", "e"]


PUBLISHED = {
    # As BertTokenizer of transformers 4.57.6 has them, slow and fast.
    "Unaffable, réally?!": "una ##ffa ##ble , really ? !",
    "naïve café Ångström": "naive cafe ang ##strom",
    "漢字kanji": "漢 [UNK] kan ##ji",
    "ﬁancée x\u200by": "ﬁ ##ance ##e x ##y",
    "$1,000.50 (US) C++ & C#": "$ 1 , 000 . 50 ( us ) c + + & c #",
    "İstanbul “quoted” — dash…": "istanbul “ quoted ” — dash …",
    "한국어": "ᄒ ##ᅡ ##ᆫ ##ᄀ ##ᅮ ##ᆨ ##ᄋ ##ᅥ",
    "e=mc² 🙂 ok": "e = mc ##² [UNK] ok",
    "\x1cab\x0bc\ufffd": "abc",
}


def test_published_vocabulary_gives_the_pieces_of_hugging_face(tmp_path: Path) -> None:
    path = next(unpack("bert_vocab.tar.xz", tmp_path).rglob("vocab.txt"))
    known = vocabulary.read(path)
    assert (known.size, known.unk, known.cls, known.mask) == (30522, 100, 101, 103)
    tokenizer = Tokenizer(known)
    assert {text: " ".join(tokenizer.pieces(text)) for text in PUBLISHED} == PUBLISHED


def test_learnt_vocabulary_has_the_frequent_words_whole_and_spells_the_others() -> None:
    words = {"banana": 50, "bandana": 9, "an": 30, "nab": 1}
    entries = wordpiece.learn(words, 18)
    assert entries[:5] == list(SPECIAL) and len(entries) == 18
    tokenizer = Tokenizer(Vocabulary(tuple(entries)))
    assert tokenizer.pieces("banana an") == ["banana", "an"]
    assert "".join(piece.removeprefix("##") for piece in tokenizer.pieces("nabdan")) == "nabdan"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a\nb\n", "lacks [PAD]"),
        ("\n".join([*SPECIAL[:-1], "a"]).encode(), "lacks [MASK]"),
        ("\n".join([*SPECIAL, "a", "b", "a"]).encode(), "line 8: 'a' again"),
        (b"[PAD]\n\xff\n", "not UTF-8"),
        ("\n".join([*SPECIAL, *map(str, range(1 << 16))]).encode(), "65,541 entries"),
    ],
    ids=["none", "mask", "twice", "encoding", "many"],
)
def test_vocabulary_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(Problem, match=re.escape(told)):
        vocabulary.read(tmp_path / "vocab.txt")


# -- text and dumps -------------------------------------------------------------------------------------------


def test_sentences_end_where_a_reader_ends_them() -> None:
    paragraph = (
        'Dr. Smith of St. Louis, b. 1901, said: "Stop!" Then J. R. Hall left the U.S. in Jan. 1930. '
        "Was it 3.5 km? (It was.) no. it goes on; see fig. 2. So did I. The end"
    )
    assert texts.sentences_of(paragraph) == [
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
    assert wikipedia.paragraphs(WIKITEXT.replace("&amp;", "&")) == [
        "Ada (10 December 1815 – 1852; Adèle) was a mathematicians' friend. She walked 5 km.",
        "See the site and poets, AT&T.",
        "The sum of The Times's H2O, ok.",
    ]


def pack(content: bytes, size: int) -> bytes:
    # Streams of so many bytes each, wherever pages are cut.
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
    counts: Counter[str] = Counter()
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
    found = [each for begin, end in ranges for each in texts.read(path, form, begin, end)]
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
            list(wikipedia.read(tmp_path / name, begin, end, Counter(), lambda done: None))
    assert told in found.value.found and found.value.hint


# -- the whole preparation --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_small_set_is_the_english_of_python(tmp_path: Path) -> None:
    assert run("-o", tmp_path / "bert", workers=2)[0] == 0
    small = open_data(tmp_path / "bert")
    assert (small.passport["name"], small.vocabulary.size, small.sequence_length) == ("python-text", 2048, 128)
    assert small.max_predictions == 20 and len(small.test) == 1000 and len(small.train) > 10000
    text = small.vocabulary.text(np.concatenate([small.train.original(number) for number in range(200)]))
    words = text.split()
    assert words.count("the") / len(words) > 0.02
    assert text.count("[UNK]") == 0


@pytest.mark.slow
def test_excerpt_of_wikipedia_goes_through_the_whole_preparation(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    packed = next(unpack("enwiki_excerpt.tar.xz", tmp_path / "archive").rglob("enwiki-latest*.bz2"))
    dump = packed.rename(raw / "enwiki-pages-articles.xml.bz2")
    shutil.copy(next(unpack("bert_vocab.tar.xz", tmp_path / "vocab").rglob("vocab.txt")), raw)
    assert run(raw, "-o", tmp_path / "to", "--duplication", 2, workers=2)[0] == 0
    data = open_data(tmp_path / "to")
    how, facts = data.passport["how"], data.passport["facts"]
    # The independent count: XML by its own parser, text by the paragraphs, tokens sentence by sentence.
    space = "{http://www.mediawiki.org/xml/export-0.10/}"
    content = bz2.decompress(dump.read_bytes())
    pages = ElementTree.fromstring(content).findall(f"{space}page")
    articles = [page for page in pages if page.findtext(f"{space}ns") == "0"]
    contents = [
        page.findtext(f"{space}revision/{space}text") or ""
        for page in articles
        if page.find(f"{space}redirect") is None
    ]
    documents = [
        [line for each in wikipedia.paragraphs(text) for line in texts.sentences_of(each)] for text in contents
    ]
    documents = [each for each in documents if each]
    unknown = how["text"].pop("unknown")
    assert how["left_out"] == {
        "redirects": len(articles) - len(contents),
        "pages of other namespaces": len(pages) - len(articles),
        "pages without text": len(contents) - len(documents),
        "bytes of XML": sum(map(len, re.findall(rb"<page>.*?</page>", content, re.DOTALL))),
        "copies of evaluation documents": 0,
    }
    assert how["text"] == {
        "documents": len(documents),
        "sentences": sum(map(len, documents)),
        "bytes": sum(len(line.encode()) for each in documents for line in each),
    }
    assert len(pages) == 206 and facts["documents"] == {"train": len(documents) - 5, "test": 5}
    # Every pass has about the text once: half of the second segments are other texts in its place.
    tokenizer = Tokenizer(data.vocabulary)
    tokens = sum(len(tokenizer.encode(line).ids) for each in documents for line in each)
    whole = sum(facts["tokens"].values()) - 3 * (len(data.train) + len(data.test))
    assert 0.95 < whole / (2 * tokens) < 1.6
    assert unknown < 0.001 * tokens


def cut_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "BLOCK_BYTES", 6000)
    patch.setattr(stages, "SHARD_BYTES", 3000)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch)


in_small_shards = pytest.mark.usefixtures("small_shards")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_text(folder / "part-00000-of-00002")
    write_text(folder / "part-00001-of-00002", seed=1)
    # The same text twice: a published round had all of its shards the same.
    text = (folder / "part-00000-of-00002").read_text()
    (folder / "part-00002").write_text(f"the cat sees .\na dog runs .\n\n{text}")
    vocabulary.write(folder / "vocab.txt", (*SPECIAL, ".", *WORDS))
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The source, prepared by one worker.
    to = tmp_path_factory.mktemp("whole") / "bert"
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        assert run(source, "-o", to, *SHORT)[0] == 0
    return to


@pytest.fixture
def raw(source: Path, tmp_path: Path) -> Path:
    # A copy that a test may change.
    return Path(shutil.copytree(source, tmp_path / "raw"))


def arrays_of(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


@pytest.mark.slow
@in_small_shards
def test_two_workers_write_the_same_and_no_shard_is_another_one(source: Path, whole: Path, tmp_path: Path) -> None:
    assert run(source, "-o", tmp_path / "to", *SHORT, workers=2)[0] == 0
    assert arrays_of(tmp_path / "to") == arrays_of(whole)
    data = open_data(whole)
    assert max(data.train.tokens.max(), data.train.masked_labels.max()) < data.vocabulary.size
    facts, how = data.passport["facts"], data.passport["how"]
    assert (facts["sequence_length"], facts["max_predictions"], facts["duplication"]) == (40, 6, 3)
    assert how["text"]["documents"] == 181 and how["text"]["unknown"] == 0
    copies = how["left_out"]["copies of evaluation documents"]
    assert copies and facts["documents"] == {"train": 172 - copies, "test": 9}
    # Nothing of an evaluation document is trained on, its copies neither: no sentence is in the text by chance twice.
    held = {bytes(data.test.original(number)[1:12]) for number in range(len(data.test))}
    seen = {bytes(data.train.original(number)[1:12]) for number in range(len(data.train))}
    assert not held & seen
    samples = {bytes(data.train[number]) for number in range(len(data.train))}
    assert len(samples) > 0.99 * len(data.train)


@pytest.mark.slow
def test_no_value_of_an_array_is_read_as_the_data_set_is_opened(whole: Path, tmp_path: Path) -> None:
    # Training opens it before the clock starts.
    open_data(with_other_offsets(whole, tmp_path / "copy"))


@pytest.mark.slow
@in_small_shards
def test_another_seed_gives_other_samples_of_the_same_text(source: Path, whole: Path, tmp_path: Path) -> None:
    assert run(source, "-o", tmp_path / "to", *SHORT, "--seed", 1)[0] == 0
    first, second = open_data(whole), open_data(tmp_path / "to")
    assert first.passport["how"]["text"] == second.passport["how"]["text"]
    assert first.passport["id"] != second.passport["id"]


@pytest.mark.slow
@in_small_shards
@pytest.mark.parametrize("phase", ["clean", "mask"])
def test_killed_preparation_resumes_and_writes_the_same(phase: str, source: Path, whole: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    argv = (str(source), "-o", str(to), *map(str, SHORT))
    program = f"{SIZES}\nif __name__ == '__main__':\n    prepare.main({argv!r})\n"
    with subprocess.Popen([sys.executable, "-c", program], cwd=paths.ROOT, stdout=subprocess.DEVNULL) as process:
        done = (to / "parts").glob
        wait_until(lambda: any(done(f"*.{phase}.json")) or process.poll() is not None, "a part")
        process.send_signal(signal.SIGKILL)
    if not (to / "dataset.json").exists():
        with pytest.raises(Problem, match="half-written"):
            open_data(to)
    code, lines = run(*argv, workers=2)
    assert code == 0, lines
    assert arrays_of(to) == arrays_of(whole)
    assert not (to / "parts").exists()


def test_the_evaluation_set_is_one_article_of_each_part() -> None:
    assert evaluation.chosen_places(2) == [1]
    assert evaluation.chosen_places(60) == [10, 30, 50]
    many = evaluation.chosen_places(500 * 200)
    assert many == [200 * part + 42 for part in range(500)]


@pytest.mark.slow
@in_small_shards
def test_listed_articles_are_the_evaluation_set(raw: Path, tmp_path: Path) -> None:
    documents = (raw / "part-00000-of-00002").read_text().split("\n\n")
    listed = tmp_path / "md5.txt"
    digests = [hashlib.md5(documents[place].rstrip().encode()).hexdigest() for place in (3, 17)]
    listed.write_text("\n".join(digests) + "\n")
    assert run(raw, "-o", tmp_path / "to", *SHORT, "--evaluation-list", listed)[0] == 0
    data = open_data(tmp_path / "to")
    # The copy of the first file is left out too.
    assert data.passport["facts"]["documents"] == {"train": 177, "test": 2}
    wanted = " ".join(documents[3].split() + documents[17].split())
    for number in range(len(data.test)):
        tokens = data.test.original(number)
        assert data.vocabulary.text(tokens[1 : data.test.second[number] - 1]) in wanted
    listed.write_text("0" * 32 + "\n" + digests[0] + "\n")
    told = refused(run(raw, "-o", tmp_path / "b", "--evaluation-list", listed))
    assert "1 of 2 documents of" in told and "0" * 32 in told


@in_small_shards
@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("d.xml", write_dump(PAGES)[:4000], "d.xml is truncated"),
        ("d.xml", write_dump([]), "d.xml: 0 documents with text"),
        ("t.txt", "Un café.\n".encode("latin1") * 9, "t.txt: lines that are not UTF-8: 9"),
        ("readme.md", b"x", "holds none of these"),
        ("t.txt", b"One.\nTwo.\n", "1 documents with text"),
    ],
    ids=["cut", "no article", "latin1", "no text", "one document"],
)
def test_source_that_cannot_be_prepared_is_refused(
    name: str, content: bytes, told: str, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "raw").mkdir()
    shutil.copy(source / "vocab.txt", tmp_path / "raw")
    (tmp_path / "raw" / name).write_bytes(content)
    assert told in refused(run(tmp_path / "raw", "-o", tmp_path / "to", *SHORT))
    assert not (tmp_path / "to" / "dataset.json").exists()


@in_small_shards
def test_options_that_contradict_each_other_are_refused(raw: Path, tmp_path: Path) -> None:
    packed = write_packed(tmp_path)
    to = ("-o", tmp_path / "to", *SHORT)
    held = write_text(tmp_path / "held.txt", documents=3)
    told = refused(run(raw, *to, "--evaluation", held))
    assert "3 of 3 evaluation documents are in the training data as well, the first is the one that begins: " in told
    assert "one of them" in refused(run(raw, *to, "--vocabulary-size", 100))
    (raw / "vocab.txt").unlink()
    assert "has no vocab.txt" in refused(run(raw, *to))
    told = refused(run(packed / "train", *to, "--vocabulary", packed / "vocab.txt"))
    assert "records for training alone" in told
    assert "name the text" in refused(run(*to, "--evaluation", held))
