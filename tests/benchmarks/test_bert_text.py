"""BERT's pretraining data: WordPiece, sentences, wikitext, dumps, masks, records, and complete preparations."""

import bz2
import gzip
import hashlib
import re
import shutil
import struct
import subprocess
import tarfile
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bert import evaluation, masking, overlap, records, stages, texts, wikipedia, writer
from benchmarks.bert.masking import Documents, Settings
from benchmarks.bert.sources import TFRECORD
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.workers import Workers
from benchmarks.language import ARRAYS, FILES, tensorflow_files, vocabulary, wordpiece
from benchmarks.language.arrays import Samples, open_data
from benchmarks.language.sentences import sentences_of
from benchmarks.language.vocabulary import SPECIAL, Vocabulary
from benchmarks.language.wordpiece import Tokenizer
from encore import paths
from tests import preparing
from tests.preparing import Lines, refused
from tests.trainings import with_other_offsets

SHARED = paths.ROOT.parent / "shared" / "data"

run = partial(preparing.run, "bert")


def unpack(archive: str, to: Path) -> Path:
    path = SHARED / archive
    if not path.exists():
        pytest.skip(f"no {path.name}: it is not part of the project, it is put next to it")
    with tarfile.open(path) as file:
        file.extractall(to, filter="data")
    return to


def write_dump(pages: list[str]) -> bytes:
    rows = [
        f"  <page>\n    <title>Page {number}</title>\n    <ns>0</ns>\n    <id>{number}</id>\n    <revision>\n"
        f'      <text bytes="9" xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
        for number, text in enumerate(pages)
    ]
    rows += [
        '  <page>\n    <title>R</title>\n    <ns>0</ns>\n    <redirect title="x" />\n    <text>x</text>\n  </page>\n',
        "  <page>\n    <title>Talk:T</title>\n    <ns>1</ns>\n    <text>some talk</text>\n  </page>\n",
    ]
    return ("<mediawiki>\n" + "".join(rows) + "</mediawiki>\n").encode()


PAGES = [f"Page {number} has é text. It is &lt;b&gt;short&lt;/b&gt;." for number in range(40)]

SHORT = ("--sequence-length", 40, "--duplication", 3)


WORDS = ("the", "cat", "dog", "sees", "a", "red", "old", "house", "in", "town", "and", "runs", "far", "near", "water")


def write_text(path: Path, documents: int = 60, seed: int = 0) -> Path:
    random = np.random.RandomState(seed)
    lines = []
    for _ in range(documents):
        for _ in range(random.randint(6, 20)):
            lines.append(" ".join(WORDS[index] for index in random.randint(len(WORDS), size=9)) + " .")
        lines.append("")
    path.write_text("\n".join(lines))
    return path


LENGTHS = [[1 + (7 * doc + 5 * line) % 23 for line in range(30)] for doc in range(40)]
NUMBERS = Vocabulary((*SPECIAL, *map(str, range(60000))))


@cache
def numbered_documents() -> Documents:
    # A unique id per token shows the source of each sample
    ends = np.concatenate(([0], np.cumsum(LENGTHS)))
    return Documents(np.arange(5, 5 + ends[-1]).astype(np.uint16), ends.tolist(), list(range(0, len(ends), 30)))


@cache
def drawn_samples() -> Samples:
    documents, random = list(range(40)) * 60, masking.stream(3, 0, 0, 0)
    return masking.make_samples(numbered_documents(), documents, Settings(64, 9, 1), NUMBERS, random)


def padded(samples: Samples, width: int, most: int, is_hdf5: bool = False) -> dict[str, np.ndarray]:
    # Padded like the output of create_pretraining_data.py; HDF5 files lack masks and segments (NVIDIA v0.7)
    count = len(samples)
    rows = {key: np.zeros((count, width), np.int64) for key in ("input_ids", "input_mask", "segment_ids")}
    rows.update({key: np.zeros((count, most), np.int64) for key in ("masked_lm_positions", "masked_lm_ids")})
    for number in range(count):
        tokens, (positions, labels) = samples[number], samples.masked(number)
        rows["input_ids"][number, : len(tokens)] = tokens
        if not is_hdf5:
            rows["input_mask"][number, : len(tokens)] = 1
            rows["segment_ids"][number, samples.second[number] : len(tokens)] = 1
        rows["masked_lm_positions"][number, : len(positions)] = positions
        rows["masked_lm_ids"][number, : len(labels)] = labels
    rows["next_sentence_labels"] = samples.next.astype(np.int64)[:, None]
    return rows


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def example(rows: dict[str, np.ndarray], number: int) -> bytes:
    entries = b""
    for key, values in rows.items():
        packed = field(1, b"".join(varint(int(value)) for value in values[number]))
        entries += field(1, field(1, key.encode()) + field(2, field(3, packed)))
    weights = field(1, struct.pack("<2f", 1.0, 0.0))
    entries += field(1, field(1, b"masked_lm_weights") + field(2, field(2, weights)))
    return field(1, entries)


def write_records(path: Path, rows: dict[str, np.ndarray]) -> Path:
    frames = [tensorflow_files.frame(example(rows, number)) for number in range(len(rows["input_ids"]))]
    path.write_bytes(b"".join(frames))
    return path


def take(samples: Samples, begin: int, end: int) -> Samples:
    return samples.take(np.arange(begin, end))


def write_packed(folder: Path) -> Path:
    # Two files for training and one for evaluation, of the same documents but too short to be an overlap
    files = {"train/part-00000-of-00001": (0, 50), "train/b.tfrecord": (50, 90), "eval/eval.tfrecord": (90, 120)}
    for name, (begin, end) in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_records(folder / name, padded(take(drawn_samples(), begin, end), 64, 9))
    vocabulary.write(folder / "vocab.txt", NUMBERS.entries)
    return folder


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
def test_wordpiece_equals_bert(text: str, pieces: list[str]) -> None:
    assert Tokenizer(SMALL).pieces(text) == pieces


def test_offsets_refer_to_the_original_text() -> None:
    text = "  Réally,\x00 unaffable İ 漢e"
    words = [text[begin:end] for begin, end in Tokenizer(SMALL).encode(text).offsets]
    assert words == ["Réal", "ly", ",", "un", "aff", "able", "İ", "漢", "e"]


PUBLISHED = {
    # Output of BertTokenizer and BertTokenizerFast, transformers 4.57.6
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


def test_wordpiece_equals_hugging_face(tmp_path: Path) -> None:
    published = vocabulary.read(next(unpack("bert_vocab.tar.xz", tmp_path).rglob("vocab.txt")))
    assert (published.size, published.unk, published.cls, published.mask) == (30522, 100, 101, 103)
    tokenizer = Tokenizer(published)
    assert {text: " ".join(tokenizer.pieces(text)) for text in PUBLISHED} == PUBLISHED


def test_learned_vocabulary_has_frequent_words_and_pieces_of_the_others() -> None:
    entries = wordpiece.learn({"banana": 50, "bandana": 9, "an": 30, "nab": 1}, 18)
    assert (entries[:5], len(entries)) == (list(SPECIAL), 18)
    pieces = Tokenizer(Vocabulary(tuple(entries))).pieces("banana an nabdan")
    assert pieces[:2] == ["banana", "an"]
    assert "".join(piece.removeprefix("##") for piece in pieces[2:]) == "nabdan"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a\nb\n", "lacks [PAD]"),
        ("\n".join([*SPECIAL[:-1], "a"]).encode(), "lacks [MASK]"),
        ("\n".join([*SPECIAL, "a", "b", "a"]).encode(), "line 8: 'a' again"),
        (b"[PAD]\n\xff\n", "not UTF-8"),
        ("\n".join([*SPECIAL, *map(str, range(1 << 16))]).encode(), "65,541 entries"),
    ],
    ids=["none", "mask", "twice", "encoding", "many"],
)
def test_bad_vocabulary_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(Problem, match=re.escape(problem)):
        vocabulary.read(tmp_path / "vocab.txt")


# -- text and dumps -------------------------------------------------------------------------------------------


def test_paragraph_is_split_into_sentences() -> None:
    sentences = [
        'Dr. Smith of St. Louis, b. 1901, said: "Stop!"',
        "Then J. R. Hall left the U.S. in Jan. 1930.",
        "Was it 3.5 km?",
        "(It was.) no. it goes on; see fig. 2.",
        "So did I.",
        "The end",
    ]
    assert sentences_of(" ".join(sentences)) == sentences


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


def test_only_running_text_of_wikitext_is_left() -> None:
    assert wikipedia.paragraphs(WIKITEXT.replace("&amp;", "&")) == [
        "Ada (10 December 1815 – 1852; Adèle) was a mathematicians' friend. She walked 5 km.",
        "See the site and poets, AT&T.",
        "The sum of The Times's H2O, ok.",
    ]


def compress(content: bytes, size: int) -> list[bytes]:
    # bz2 streams of ``size`` bytes of content each, which may begin and end within a page
    return [bz2.compress(content[offset : offset + size]) for offset in range(0, len(content), size)]


DUMP = write_dump(PAGES)
STREAMS = compress(DUMP, 900)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dump.xml", DUMP),
        ("one stream.xml.bz2", bz2.compress(DUMP)),
        ("many streams.xml.bz2", b"".join(STREAMS)),
        ("streams within pages.xml.bz2", b"".join(compress(DUMP, 37))),
    ],
)
def test_every_page_is_read_once_in_any_packing(
    name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    monkeypatch.setattr(wikipedia, "RANGE_BYTES", {".xml": 1500, ".bz2": 700})
    ranges, counts = wikipedia.cut(path), Counter[str]()
    assert (len(ranges) > 3) == ("one stream" not in name)
    pages = [page for begin, end in ranges for page in wikipedia.pages(path, begin, end, counts)]
    assert [(page.title, page.text) for page in pages] == [
        (f"Page {number}", f"Page {number} has é text. It is <b>short</b>.") for number in range(40)
    ]
    size = sum(map(len, re.findall(rb"<page>.*?</page>", DUMP, re.DOTALL)))
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
    assert [document.sentences for span in ranges for document in texts.read(path, form, *span)] == documents


@pytest.mark.parametrize(
    ("name", "content", "problem"),
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
def test_unreadable_dump_is_refused(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Problem) as caught:
        for begin, end in wikipedia.cut(tmp_path / name):
            list(wikipedia.read(tmp_path / name, begin, end, Counter(), lambda done: None))
    assert problem in caught.value.found and caught.value.hint


# -- complete preparations --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_toy_set_is_the_documentation_of_python(tmp_path: Path) -> None:
    assert run("-o", tmp_path / "bert", workers=2)[0] == 0
    toy = open_data(tmp_path / "bert")
    sizes = toy.vocabulary.size, toy.sequence_length, toy.max_predictions, len(toy.test), len(toy.train) > 10000
    assert (toy.manifest["name"], *sizes) == ("python-text", 2048, 128, 20, 1000, True)
    words = toy.vocabulary.text(np.concatenate([toy.train.original(number) for number in range(200)])).split()
    assert words.count("the") / len(words) > 0.02 and "[UNK]" not in words


@pytest.mark.slow
def test_excerpt_of_wikipedia_is_prepared(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    packed = next(unpack("enwiki_excerpt.tar.xz", tmp_path / "archive").rglob("enwiki-latest*.bz2"))
    packed.rename(raw / "enwiki-pages-articles.xml.bz2")
    shutil.copy(next(unpack("bert_vocab.tar.xz", tmp_path / "vocab").rglob("vocab.txt")), raw)
    assert run(raw, "-o", tmp_path / "to", "--duplication", 2, workers=2)[0] == 0
    data = open_data(tmp_path / "to")
    # Documents, sentences, redirects and bytes were counted from the XML by ElementTree as well
    assert data.manifest["facts"] == {
        "vocabulary": 30522, "sequence_length": 512, "max_predictions": 76, "kind": "text", "duplication": 2,
        "tokens": {"train": 1359966, "test": 45703}, "masked": {"train": 202250, "test": 6793},
        "documents": {"train": 100, "test": 5},
    }  # fmt: skip
    assert data.manifest["how"]["text"] == {"documents": 105, "sentences": 18295, "bytes": 2541225, "unknown": 63}
    assert data.manifest["how"]["left_out"] == {
        "redirects": 99, "pages of other namespaces": 1, "pages without text": 1, "bytes of XML": 6086200,
        "copies of evaluation documents": 0,
    }  # fmt: skip


def use_small_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "BLOCK_BYTES", 6000)
    patch.setattr(stages, "SHARD_BYTES", 3000)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_shards(monkeypatch)


in_small_shards = pytest.mark.usefixtures("small_shards")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    text = write_text(folder / "part-00000-of-00002").read_text()
    write_text(folder / "part-00001-of-00002", seed=1)
    # The same text twice: all shards of a published round were equal
    (folder / "part-00002").write_text(f"the cat sees .\na dog runs .\n\n{text}")
    vocabulary.write(folder / "vocab.txt", (*SPECIAL, ".", *WORDS))
    return folder


@pytest.fixture(scope="module")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The source, prepared by one worker
    to = tmp_path_factory.mktemp("prepared") / "bert"
    with pytest.MonkeyPatch.context() as patch:
        use_small_shards(patch)
        assert run(source, "-o", to, *SHORT)[0] == 0
    return to


@pytest.fixture
def raw(source: Path, tmp_path: Path) -> Path:
    # A copy that a test may change
    return Path(shutil.copytree(source, tmp_path / "raw"))


def arrays_of(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


@pytest.mark.slow
@in_small_shards
def test_prepared_arrays(source: Path, prepared: Path, tmp_path: Path) -> None:
    assert run(source, "-o", tmp_path / "to", *SHORT, workers=2)[0] == 0
    assert arrays_of(tmp_path / "to") == arrays_of(prepared), "they depend on the number of workers"
    open_data(with_other_offsets(prepared, tmp_path / "copy"))  # Reads no values of arrays
    data = open_data(prepared)
    assert max(data.train.tokens.max(), data.train.masked_labels.max()) < data.vocabulary.size
    facts, how = data.manifest["facts"], data.manifest["how"]
    assert (facts["sequence_length"], facts["max_predictions"], facts["duplication"]) == (40, 6, 3)
    copies = how["left_out"]["copies of evaluation documents"]
    assert copies and facts["documents"] == {"train": 172 - copies, "test": 9}
    assert (how["text"]["documents"], how["text"]["unknown"]) == (181, 0)
    # Neither evaluation documents nor their copies are trained on: every sentence of this text is unique
    test, train = (
        {bytes(part.original(number)[1:12]) for number in range(len(part))} for part in (data.test, data.train)
    )
    assert not test & train
    assert len({bytes(data.train[number]) for number in range(len(data.train))}) > 0.99 * len(data.train)
    assert run(source, "-o", tmp_path / "other", *SHORT, "--seed", 1)[0] == 0
    other = open_data(tmp_path / "other").manifest
    assert (other["how"]["text"], other["id"] != data.manifest["id"]) == (how["text"], True)


@in_small_shards
@pytest.mark.parametrize("phase", ["clean", "mask"])
def test_interrupted_preparation_resumes_to_the_same_arrays(
    phase: str, source: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Workers, name: str, unit: str, function: Any, tasks: Any, *options: Any) -> None:
        preparing.one_by_one(self, name, unit, function, tasks[:2] if name == phase else tasks)
        if name == phase:
            raise KeyboardInterrupt

    argv = (source, "-o", tmp_path / "to", *SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "run", interrupt)
        assert run(*argv)[0] == 130
    with pytest.raises(Problem, match="half-written"):
        open_data(tmp_path / "to")
    code, lines = run(*argv, workers=2)
    assert (code, "resuming: 2 of " in preparing.notes(lines)) == (0, True), lines
    assert arrays_of(tmp_path / "to") == arrays_of(prepared)
    assert not (tmp_path / "to" / "parts").exists()


def test_evaluation_set_is_one_article_per_part() -> None:
    assert [evaluation.chosen_places(count) for count in (2, 60)] == [[1], [10, 30, 50]]
    assert evaluation.chosen_places(500 * 200) == [200 * part + 42 for part in range(500)]


@pytest.mark.slow
@in_small_shards
def test_listed_articles_are_the_evaluation_set(raw: Path, tmp_path: Path) -> None:
    documents = (raw / "part-00000-of-00002").read_text().split("\n\n")
    digests = [hashlib.md5(documents[index].rstrip().encode()).hexdigest() for index in (3, 17)]
    listed = tmp_path / "md5.txt"
    listed.write_text("\n".join(digests) + "\n")
    assert run(raw, "-o", tmp_path / "to", *SHORT, "--evaluation-list", listed)[0] == 0
    data = open_data(tmp_path / "to")
    # The copy of the first file is left out too
    assert data.manifest["facts"]["documents"] == {"train": 177, "test": 2}
    text = " ".join(documents[3].split() + documents[17].split())
    for number, second in enumerate(data.test.second):
        assert data.vocabulary.text(data.test.original(number)[1 : second - 1]) in text
    listed.write_text("0" * 32 + "\n" + digests[0] + "\n")
    problem = refused(run(raw, "-o", tmp_path / "b", "--evaluation-list", listed))
    assert "1 of 2 documents of" in problem and "0" * 32 in problem


@in_small_shards
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("d.xml", DUMP[:4000], "d.xml is truncated"),
        ("d.xml", write_dump([]), "d.xml: 0 documents with text"),
        ("t.txt", "Un café.\n".encode("latin1") * 9, "t.txt: lines that are not UTF-8: 9"),
        ("readme.md", b"x", "holds none of these"),
        ("t.txt", b"One.\nTwo.\n", "1 documents with text"),
        ("t.txt", "One.\n".encode("utf-16"), "t.txt is UTF-16"),
        ("t.txt.gz", gzip.compress(b"One.\n"), "t.txt.gz is compressed by gzip"),
        ("part-00000-of-00002", b"One.\nTwo.\n", "has 1 of 2 files part*-of-00002, number 1 is missing"),
    ],
    ids=["cut", "no article", "latin1", "no text", "one document", "utf-16", "compressed", "missing shard"],
)
def test_bad_source_is_refused(name: str, content: bytes, problem: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    shutil.copy(source / "vocab.txt", tmp_path / "raw")
    (tmp_path / "raw" / name).write_bytes(content)
    assert problem in refused(run(tmp_path / "raw", "-o", tmp_path / "to", *SHORT))
    assert not (tmp_path / "to" / "dataset.json").exists()


@in_small_shards
def test_contradicting_options_are_refused(raw: Path, tmp_path: Path) -> None:
    packed, held_out = write_packed(tmp_path), write_text(tmp_path / "held_out.txt", documents=3)
    no_vocabulary = Path(shutil.copytree(raw, tmp_path / "no_vocabulary"))
    (no_vocabulary / "vocab.txt").unlink()
    for words, problem in (
        ((raw, "--evaluation", held_out), "3 of 3 evaluation documents are in the training data as well"),
        ((raw, "--vocabulary-size", 100), "one of them"),
        ((no_vocabulary,), "has no vocab.txt"),
        ((packed / "train", "--vocabulary", packed / "vocab.txt"), "records for training alone"),
        (("--evaluation", held_out), "name the text"),
    ):
        assert problem in refused(run(*words, "-o", tmp_path / "to", *SHORT))


@pytest.fixture(scope="module")
def drawn() -> Samples:
    return drawn_samples()


# -- masks ----------------------------------------------------------------------------------------------------


def test_samples_of_a_seed_are_the_recorded_ones(drawn: Samples) -> None:
    # Segments and masks were checked when the digest was recorded; the streams of RandomState do not change
    content = b"".join(getattr(drawn, name).astype(kind).tobytes() for name, kind in ARRAYS.items())
    assert hashlib.md5(content).hexdigest() == "cd71c3aecfdebfc52ae4e0fd012facd2"
    # 80 % of the masked tokens are [MASK], 10 % are unchanged; five standard deviations of 20,000 draws are 0.014
    shown = np.concatenate([drawn[number][drawn.masked(number)[0]] for number in range(len(drawn))])
    assert abs((shown == NUMBERS.mask).mean() - 0.8) < 0.014
    assert abs((shown == drawn.masked_labels).mean() - 0.1) < 0.011


@pytest.mark.parametrize("sizes", [(10, 10), (30, 3), (3, 30), (21, 20), (1, 40)])
def test_longer_segment_is_truncated(sizes: tuple[int, int]) -> None:
    random = masking.stream(0, 0)
    for length in range(2, 20):
        lengths = list(sizes)
        while sum(lengths) > length:
            lengths[0 if lengths[0] > lengths[1] else 1] -= 1
        first, first_end, second, second_end = masking._cut(100, 100 + sizes[0], 500, 500 + sizes[1], length, random)
        assert [first_end - first, second_end - second] == lengths
        assert 100 <= first <= first_end <= 100 + sizes[0] and 500 <= second <= second_end <= 500 + sizes[1]


# -- records --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("packed"))


def convert(folder: Path, to: Path, *words: object) -> tuple[int, Lines]:
    options = ("--evaluation", folder / "eval", "--vocabulary", folder / "vocab.txt", *words)
    return run(folder / "train", "-o", to, *options, workers=2)


def by_content(samples: Samples) -> list[tuple[Any, ...]]:
    return sorted(
        (
            bytes(samples[number]),
            int(samples.second[number]),
            int(samples.next[number]),
            *samples.masked(number)[1].tolist(),
        )
        for number in range(len(samples))
    )


@pytest.mark.slow
def test_records_of_tensorflow_are_converted(packed: Path, drawn: Samples, tmp_path: Path) -> None:
    assert convert(packed, tmp_path / "to")[0] == 0
    data = open_data(tmp_path / "to")
    assert (data.sequence_length, data.max_predictions, data.manifest["facts"]["kind"]) == (64, 9, "records")
    assert by_content(data.train) == by_content(take(drawn, 0, 90))
    # Evaluation reads the samples in the order of the files
    held = take(drawn, 90, 120)
    assert [bytes(data.test[number]) for number in range(30)] == [bytes(held[number]) for number in range(30)]


MAKE_HDF5 = """
import sys, h5py, numpy as np
rows = np.load(sys.argv[1])
with h5py.File(sys.argv[2], "w") as file:
    for key in rows.files:
        file.create_dataset(key, data=rows[key])
"""


@pytest.mark.long
def test_hdf5_files_of_the_submission_are_converted(
    packed: Path, drawn: Samples, pytorch_python: Path, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    for name, samples in (("train/part_0.hdf5", take(drawn, 0, 50)), ("eval.hdf5", take(drawn, 90, 120))):
        rows = padded(samples, 64, 9, is_hdf5=True)
        rows["next_sentence_labels"] = rows["next_sentence_labels"][:, 0]
        np.savez(tmp_path / "rows.npz", **rows)
        words = [str(pytorch_python), "-c", MAKE_HDF5, str(tmp_path / "rows.npz"), str(tmp_path / name)]
        subprocess.run(words, check=True)
    argv = (tmp_path / "train", "--evaluation", tmp_path / "eval.hdf5", "--vocabulary", packed / "vocab.txt")
    program = (pytorch_python, "-m", "benchmarks.bert.prepare", *argv, "-o")
    subprocess.run([*program, tmp_path / "to"], cwd=paths.ROOT, check=True)
    assert by_content(open_data(tmp_path / "to").train) == by_content(take(drawn, 0, 50))
    assert "h5py is not installed" in refused(run(*argv, "-o", tmp_path / "a"))
    whole = (tmp_path / "train" / "part_0.hdf5").read_bytes()
    (tmp_path / "train" / "part_0.hdf5").write_bytes(whole[: len(whole) // 2])
    done = subprocess.run([*program, tmp_path / "b"], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "part_0.hdf5 cannot be read" in done.stderr) == (2, True)


# Array, index and new value of a change
ROWS = {
    "mask": ("input_mask", (7, 63), 1),
    "place": ("masked_lm_positions", (5, 0), 64),
    "id": ("masked_lm_ids", (3, 1), 65535),
}


def damage(path: Path, change: str, drawn: Samples) -> None:
    content = bytearray(path.read_bytes())
    if change in ROWS:
        rows = padded(take(drawn, 50, 90), 64, 9)
        name, index, value = ROWS[change]
        rows[name][index] = value
        write_records(path, rows)
        return
    if change == "content":
        content[len(content) // 2] ^= 1
    elif change == "length":
        content[0] ^= 1
    path.write_bytes({"truncated": content[:-7], "none": b"", "text": b"no record at all"}.get(change, content))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("content", r"b.tfrecord, record \d+ at byte [\d,]+ is damaged: another checksum"),
        ("truncated", r"b.tfrecord, record 39 at byte [\d,]+ is truncated"),
        ("length", r"b.tfrecord, record 0 at byte 0 is damaged"),
        ("text", r"b.tfrecord, record 0 at byte 0 is damaged"),
        ("none", r"b.tfrecord holds no sample"),
        ("id", r"record 3: an id beyond the 60,005 entries of the vocabulary\n.*\n.*--vocabulary FILE"),
        ("mask", r"record 7: input_mask that its tokens do not have"),
        ("place", r"record 5: a masked place outside of the row"),
    ],
)
def test_damaged_record_is_named(change: str, problem: str, packed: Path, drawn: Samples, tmp_path: Path) -> None:
    path = Path(shutil.copy(packed / "train" / "b.tfrecord", tmp_path))
    damage(path, change, drawn)
    task = records.Packed(0, "train", str(path), TFRECORD, 1, str(tmp_path / "x"), str(packed / "vocab.txt"), 0)
    with pytest.raises(Problem) as caught:
        records.convert(task, lambda count, size: None)
    assert re.search(problem, str(caught.value)), caught.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("same file", "part-00000-of-00001 and .*b.tfrecord hold the same samples"),
        ("other width", "b.tfrecord: 70 tokens, 9 masked; .*: 64 tokens, 9 masked"),
        ("small vocabulary", r"record \d+: an id beyond the 5,000 entries"),
        ("other vocabulary", r"record 0: no \[CLS\] a \[SEP\] b \[SEP\]"),
        ("trained on", "30 of 30 evaluation samples are in the training data as well, the first is sample 0"),
    ],
)
def test_records_that_do_not_fit_together_are_refused(
    change: str, problem: str, packed: Path, drawn: Samples, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "copy"))
    path = folder / "train" / "b.tfrecord"
    if change == "same file":
        shutil.copy(folder / "train" / "part-00000-of-00001", path)
    elif change == "other width":
        write_records(path, padded(take(drawn, 50, 90), 70, 9))
    elif change == "trained on":
        # Samples of 64 tokens are too short to be compared
        text = np.random.RandomState(0).randint(5, 60000, size=40000).astype(np.uint16)
        numbered = Documents(text, list(range(0, 40001, 400)), list(range(0, 101, 50)))
        long = masking.make_samples(numbered, [0, 1], Settings(512, 76, 1), NUMBERS, masking.stream(0, 0))
        for name, samples in (("train/part-00000-of-00001", long), ("eval/eval.tfrecord", take(long, 10, 40))):
            write_records(folder / name, padded(samples, 512, 76))
        path.unlink()
    else:
        entries = NUMBERS.entries[:5000] if change == "small vocabulary" else sorted(NUMBERS.entries)
        vocabulary.write(folder / "vocab.txt", entries)
    assert re.search(problem, refused(convert(folder, tmp_path / "to")))


def test_same_text_in_other_samples_is_found() -> None:
    text = np.random.RandomState(0).randint(5, 60000, size=40000).astype(np.uint16)
    documents = Documents(text, list(range(0, 40001, 20)), [0, 1000, 2000])
    # Samples without a random second segment have text of one document
    train, again, other = (
        _only_following(
            masking.make_samples(documents, numbers, Settings(512, 76, 1), NUMBERS, masking.stream(seed, 0))
        )
        for seed, numbers in ((0, [0] * 20), (1, [0]), (2, [1]))
    )
    for held, share in ((again, 1.0), (other, 0.0)):
        runs = np.unique(overlap.runs_of(held, NUMBERS)[0])
        in_training = np.zeros(len(runs), bool)
        overlap.mark_seen(in_training, runs, train, NUMBERS)
        assert abs(in_training.mean() - share) < 0.02
        assert bool(overlap.find(held, NUMBERS, runs, in_training)) == bool(share)


def _only_following(samples: Samples) -> Samples:
    return samples.take(np.flatnonzero(samples.next == 0))
