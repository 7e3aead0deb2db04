"""BERT's data. Pretraining: WordPiece, sentences, wikitext, dumps, masks, records. SQuAD: scores, spans, windows."""

import bz2
import gzip
import hashlib
import re
import shutil
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bert import evaluation, masking, records, stages, texts, wikipedia, writer
from benchmarks.bert.sources import TFRECORD
from benchmarks.bert_squad import answers, squad, windows
from benchmarks.bert_squad import writer as squad_writer
from benchmarks.common.data.problem import Problem
from benchmarks.language import ARRAYS, tensorflow_files, vocabulary, wordpiece
from benchmarks.language.arrays import Samples, open_data
from benchmarks.language.sentences import sentences_of
from encore import paths
from tests import preparing
from tests.preparing import Files, Outcome, check_refusal, notes, prepared, ran, refused, write_files

run = partial(preparing.run, "bert")


def unpack(archive: str, to: Path) -> Path:
    path = (paths.ROOT.parent / "shared" / "data") / archive
    if not path.exists():
        pytest.skip(f"no {path.name}: it is not part of the project, it is put next to it")
    with tarfile.open(path) as file:
        file.extractall(to, filter="data")
    return to


PAGE = """  <page>
    <title>Page {0}</title>
    <ns>0</ns>
    <id>{0}</id>
    <revision>
      <text bytes="9" xml:space="preserve">{1}</text>
    </revision>
  </page>
"""
OTHER_PAGES = (
    '  <page>\n    <title>R</title>\n    <ns>0</ns>\n    <redirect title="x" />\n    <text>x</text>\n  </page>\n'
    "  <page>\n    <title>Talk:T</title>\n    <ns>1</ns>\n    <text>some talk</text>\n  </page>\n"
)


def write_dump(pages: int) -> bytes:
    texts = (f"Page {number} has é text. It is &lt;b&gt;short&lt;/b&gt;." for number in range(pages))
    content = "".join(PAGE.format(number, text) for number, text in enumerate(texts))
    return f"<mediawiki>\n{content}{OTHER_PAGES}</mediawiki>\n".encode()


def compress(content: bytes, size: int) -> list[bytes]:
    # bz2 streams of ``size`` bytes of content each, which may begin and end within a page
    return [bz2.compress(content[offset : offset + size]) for offset in range(0, len(content), size)]


DUMP = write_dump(40)
STREAMS = compress(DUMP, 900)


SHORT = ("--sequence-length", 40, "--duplication", 3)


WORDS = ("the", "cat", "dog", "sees", "a", "red", "old", "house", "in", "town", "and", "runs", "far", "near", "water")


def text_of(documents: int = 60, seed: int = 0) -> str:
    random, lines = np.random.RandomState(seed), list[str]()
    for _ in range(documents):
        sentences = [random.randint(len(WORDS), size=9) for _ in range(random.randint(6, 20))]
        lines += [*(" ".join(WORDS[index] for index in words) + " ." for words in sentences), ""]
    return "\n".join(lines)


def entries_of(entries: Iterable[str]) -> str:
    return "".join(f"{entry}\n" for entry in entries)


NUMBERS = vocabulary.Vocabulary((*vocabulary.SPECIAL, *map(str, range(60000))))


@cache
def drawn() -> Samples:
    # A unique id per token shows the source of each sample
    lengths = [[1 + (7 * doc + 5 * line) % 23 for line in range(30)] for doc in range(40)]
    ends = np.concatenate(([0], np.cumsum(lengths)))
    documents = masking.Documents(
        np.arange(5, 5 + ends[-1]).astype(np.uint16), ends.tolist(), list(range(0, len(ends), 30))
    )
    return masking.make_samples(
        documents, list(range(40)) * 60, masking.Settings(64, 9, 1), NUMBERS, masking.stream(3, 0, 0, 0)
    )


def padded(samples: Samples, width: int, most: int, is_hdf5: bool = False) -> dict[str, np.ndarray]:
    # Padded like the output of create_pretraining_data.py; HDF5 files lack masks and segments (NVIDIA v0.7)
    numbers = range(len(samples))
    tokens, masked = [samples[number] for number in numbers], [samples.masked(number) for number in numbers]
    lists = {
        "input_ids": tokens,
        "input_mask": [[not is_hdf5] * len(ids) for ids in tokens],
        "segment_ids": [
            [not is_hdf5 and place >= second for place in range(len(ids))]
            for ids, second in zip(tokens, samples.second, strict=True)
        ],
        "masked_lm_positions": [positions for positions, _ in masked],
        "masked_lm_ids": [labels for _, labels in masked],
    }
    rows = {
        key: np.array([np.pad(row, (0, (most if "lm" in key else width) - len(row))) for row in values], np.int64)
        for key, values in lists.items()
    }
    return {**rows, "next_sentence_labels": samples.next.astype(np.int64)[:, None]}


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def example(rows: dict[str, np.ndarray], number: int) -> bytes:
    ids = {key: field(3, field(1, b"".join(map(varint, map(int, values[number]))))) for key, values in rows.items()}
    features = {**ids, "masked_lm_weights": field(2, field(1, struct.pack("<2f", 1.0, 0.0)))}
    return field(1, b"".join(field(1, field(1, key.encode()) + field(2, value)) for key, value in features.items()))


def frames(rows: dict[str, np.ndarray]) -> bytes:
    return b"".join(tensorflow_files.frame(example(rows, number)) for number in range(len(rows["input_ids"])))


def take(first: int, end: int, samples: Samples | None = None) -> Samples:
    return (samples or drawn()).take(np.arange(first, end))


def packed(first: int, end: int, width: int = 64) -> bytes:
    return frames(padded(take(first, end), width, 9))


# -- words ----------------------------------------------------------------------------------------------------

SMALL = vocabulary.Vocabulary(
    (
        *vocabulary.SPECIAL,
        *("un", "##able", "##aff", "##s", "real", "##ly", "we", "run", "a", "##b", "##c", "don", "t", "漢", "e"),
        *(",", ".", "?", "!", "'", "-", "[", "]", "mask", "¿", "σ", "##ς"),
    )
)


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
    assert wordpiece.Tokenizer(SMALL).pieces(text) == pieces


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
    tokenizer = wordpiece.Tokenizer(published)
    assert {text: " ".join(tokenizer.pieces(text)) for text in PUBLISHED} == PUBLISHED


def test_learned_vocabulary_has_frequent_words_and_pieces_of_the_others() -> None:
    entries = wordpiece.learn({"banana": 50, "bandana": 9, "an": 30, "nab": 1}, 18)
    pieces = wordpiece.Tokenizer(vocabulary.Vocabulary(tuple(entries))).pieces("banana an nabdan")
    rest = "".join(piece.removeprefix("##") for piece in pieces[2:])
    assert (entries[:5], len(entries), pieces[:2], rest) == ([*vocabulary.SPECIAL], 18, ["banana", "an"], "nabdan")


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
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(wikipedia, "RANGE_BYTES", {".xml": 1500, ".bz2": 700})
    ranges, counts = wikipedia.cut(tmp_path / name), Counter[str]()
    pages = [page for span in ranges for page in wikipedia.pages(tmp_path / name, *span, counts)]
    size = sum(map(len, re.findall(rb"<page>.*?</page>", DUMP, re.DOTALL)))
    assert ((len(ranges) > 3), pages, counts) == (
        "one stream" not in name,
        [(f"Page {number}", f"Page {number} has é text. It is <b>short</b>.") for number in range(40)],
        {"redirects": 1, "pages of other namespaces": 1, "bytes of XML": size},
    )


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
    ranges = texts.cut(path, form, size)
    found = [document.sentences for span in ranges for document in texts.read(path, form, *span)]
    assert (texts.form_of(path), len(ranges) > 1, found) == (form, size == 1, documents)


# -- complete preparations --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_excerpt_of_wikipedia_is_prepared(tmp_path: Path) -> None:
    dump = next(unpack("enwiki_excerpt.tar.xz", tmp_path / "archive").rglob("enwiki-latest*.bz2"))
    entries = next(unpack("bert_vocab.tar.xz", tmp_path / "vocab").rglob("vocab.txt"))
    files = {"enwiki-pages-articles.xml.bz2": dump.read_bytes(), "vocab.txt": entries.read_bytes()}
    raw = write_files(tmp_path / "raw", files)
    manifest = open_data(prepared("bert", raw, tmp_path / "to", "--duplication", 2, workers=2)).manifest
    # Documents, sentences, redirects and bytes were counted from the XML by ElementTree as well
    assert (manifest["facts"], manifest["how"]["text"], manifest["how"]["left_out"]) == (
        {
            "vocabulary": 30522, "sequence_length": 512, "max_predictions": 76, "kind": "text", "duplication": 2,
            "tokens": {"train": 1359966, "test": 45703}, "masked": {"train": 202250, "test": 6793},
            "documents": {"train": 100, "test": 5},
        },
        {"documents": 105, "sentences": 18295, "bytes": 2541225, "unknown": 63},
        {
            "redirects": 99, "pages of other namespaces": 1, "pages without text": 1, "bytes of XML": 6086200,
            "copies of evaluation documents": 0,
        },
    )  # fmt: skip


SOURCE = {
    "part-00000-of-00002": text_of(),
    "part-00001-of-00002": text_of(seed=1),
    # The same text twice: all shards of a published round were equal
    "part-00002": f"the cat sees .\na dog runs .\n\n{text_of()}",
    "vocab.txt": entries_of((*vocabulary.SPECIAL, ".", *WORDS)),
}


@pytest.mark.slow
def test_prepared_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 6000)
    monkeypatch.setattr(stages, "SHARD_BYTES", 3000)
    raw = write_files(tmp_path / "raw", SOURCE)
    data, same, other = (
        open_data(prepared("bert", raw, tmp_path / name, *SHORT, "--seed", seed, workers=workers))
        for name, seed, workers in (("one", 0, 0), ("two", 0, 2), ("other", 1, 0))
    )
    assert data.manifest["id"] == same.manifest["id"] != other.manifest["id"], "the workers do not change it"
    facts, how = data.manifest["facts"], data.manifest["how"]
    copies = how["left_out"]["copies of evaluation documents"]
    found = facts["max_predictions"], facts["documents"], how["text"]["documents"], how["text"]["unknown"]
    assert copies and found == (6, {"train": 172 - copies, "test": 9}, 181, 0)
    # Neither evaluation documents nor their copies are trained on: every sentence of this text is unique
    test, train = (
        {bytes(part.original(number)[1:12]) for number in range(len(part))} for part in (data.test, data.train)
    )
    assert not test & train


def test_evaluation_set_is_one_article_per_part() -> None:
    places = [evaluation.chosen_places(count) for count in (2, 60, 500 * 200)]
    assert places == [[1], [10, 30, 50], [200 * part + 42 for part in range(500)]]


@pytest.mark.slow
def test_listed_articles_are_the_evaluation_set(tmp_path: Path) -> None:
    documents = [SOURCE["part-00000-of-00002"].split("\n\n")[index].rstrip() for index in (3, 17)]
    digests = entries_of(hashlib.md5(document.encode()).hexdigest() for document in documents)
    raw = write_files(tmp_path / "raw", {**SOURCE, "../md5.txt": digests})
    data = open_data(prepared("bert", raw, tmp_path / "to", *SHORT, "--evaluation-list", tmp_path / "md5.txt"))
    # The copy of the first file is left out too
    assert data.manifest["facts"]["documents"] == {"train": 177, "test": 2}
    text = " ".join(" ".join(documents).split())
    firsts = [data.test.original(number)[1 : second - 1] for number, second in enumerate(data.test.second)]
    assert [first for first in map(data.vocabulary.text, firsts) if first not in text] == []


VOCABULARY_ONLY = {"vocab.txt": SOURCE["vocab.txt"]}
BAD: dict[str, tuple[Any, ...]] = {
    "cut": ({"d.xml": DUMP[:4000], **VOCABULARY_ONLY}, "d.xml is truncated"),
    "no article": ({"d.xml": write_dump(0), **VOCABULARY_ONLY}, "d.xml: 0 documents with text"),
    "latin1": ({"t.txt": "Un café.\n".encode("latin1") * 9, **VOCABULARY_ONLY}, "t.txt: lines that are not UTF-8: 9"),
    "no text": ({"readme.md": "x", **VOCABULARY_ONLY}, "contains none of these"),
    "one document": ({"t.txt": "One.\nTwo.\n", **VOCABULARY_ONLY}, "1 documents with text"),
    "compressed": ({"t.txt.gz": gzip.compress(b"One.\n"), **VOCABULARY_ONLY}, "t.txt.gz is compressed by gzip"),
    "missing shard": (
        {"part-00000-of-00002": "One.\nTwo.\n", **VOCABULARY_ONLY},
        "has 1 of 2 files part*-of-00002, number 1 is missing"),
    "overlap": (
        {**SOURCE, "../held_out.txt": text_of(documents=3)},
        "3 of 3 evaluation documents are in the training data as well", "--evaluation", "{raw}/../held_out.txt"),
    "unlisted": (
        {**SOURCE, "../md5.txt": entries_of(["0" * 32, hashlib.md5(text_of().split("\n\n")[3].encode()).hexdigest()])},
        "1 of 2 documents of {raw}/../md5.txt are not among the 181 of the source, such as " + "0" * 32,
        "--evaluation-list", "{raw}/../md5.txt"),
    "two vocabularies": (SOURCE, "one of them", "--vocabulary-size", 100),
    "no vocabulary": ({**SOURCE, "vocab.txt": None}, "has no vocab.txt"),
    "no evaluation": (
        {"a.tfrecord": packed(0, 50), "vocab.txt": entries_of(NUMBERS.entries)}, "training records only",
        "--vocabulary", "{raw}/vocab.txt"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_source_is_refused(case: str, tmp_path: Path) -> None:
    files, problem, *words = BAD[case]
    check_refusal("bert", tmp_path / "raw", files, [problem], *SHORT, *words)


# -- masks ----------------------------------------------------------------------------------------------------


def test_samples_of_a_seed_are_the_recorded_ones() -> None:
    # Segments and masks, 80 % [MASK] and 10 % unchanged, were checked when the digest was recorded; the streams of
    # RandomState do not change
    content = b"".join(getattr(drawn(), name).astype(kind).tobytes() for name, kind in ARRAYS.items())
    assert hashlib.md5(content).hexdigest() == "cd71c3aecfdebfc52ae4e0fd012facd2"


# -- records --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Two files for training and one for evaluation, of the same documents but too short to be an overlap
    files = {"train/part-00000-of-00001": (0, 50), "train/b.tfrecord": (50, 90), "eval/eval.tfrecord": (90, 120)}
    content = {name: packed(*numbers) for name, numbers in files.items()}
    return write_files(tmp_path_factory.mktemp("packed"), content | {"vocab.txt": entries_of(NUMBERS.entries)})


def convert(folder: Path, to: Path, *words: object) -> Outcome:
    options = ("--evaluation", folder / "eval", "--vocabulary", folder / "vocab.txt", *words)
    return run(folder / "train", "-o", to, *options, workers=2)


def by_content(samples: Samples) -> list[tuple[Any, ...]]:
    numbers = range(len(samples))
    labels = (samples.masked(number)[1].tolist() for number in numbers)
    return sorted(zip(map(bytes, map(samples.__getitem__, numbers)), samples.second, samples.next, labels, strict=True))


@pytest.mark.slow
def test_records_of_tensorflow_are_converted(folder: Path, tmp_path: Path) -> None:
    notes(convert(folder, tmp_path / "to"))
    data = open_data(tmp_path / "to")
    assert (data.sequence_length, data.max_predictions, data.manifest["facts"]["kind"]) == (64, 9, "records")
    assert by_content(data.train) == by_content(take(0, 90))
    # Evaluation reads the samples in the order of the files
    assert [bytes(data.test[number]) for number in range(30)] == [bytes(drawn()[number]) for number in range(90, 120)]


MAKE_HDF5 = """
import sys, h5py, numpy as np
rows = np.load(sys.argv[1])
with h5py.File(sys.argv[2], "w") as file:
    for key in rows.files:
        file.create_dataset(key, data=rows[key])
"""


@pytest.mark.long
def test_hdf5_files_of_the_submission_are_converted(folder: Path, pytorch_python: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name, samples in (("train/part_0.hdf5", take(0, 50)), ("eval.hdf5", take(90, 120))):
        rows = padded(samples, 64, 9, is_hdf5=True)
        np.savez(tmp_path / "rows.npz", **{**rows, "next_sentence_labels": rows["next_sentence_labels"][:, 0]})
        ran(pytorch_python, "-c", MAKE_HDF5, tmp_path / "rows.npz", tmp_path / name, check=True)
    argv = (tmp_path / "train", "--evaluation", tmp_path / "eval.hdf5", "--vocabulary", folder / "vocab.txt")
    ran(pytorch_python, "-m", "benchmarks.bert.prepare", *argv, "-o", tmp_path / "to", check=True)
    assert by_content(open_data(tmp_path / "to").train) == by_content(take(0, 50))
    assert "h5py is not installed" in refused(run(*argv, "-o", tmp_path / "a"))


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def changed_rows(name: str, index: tuple[int, int], value: int) -> bytes:
    rows = padded(take(50, 90), 64, 9)
    rows[name][index] = value
    return frames(rows)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: flip(content, len(content) // 2), r"record \d+ at byte [\d,]+ is damaged: wrong checksum"),
        (lambda content: content[:-7], r"b.tfrecord, record 39 at byte [\d,]+ is truncated"),
        (lambda content: flip(content, 0), r"b.tfrecord, record 0 at byte 0 is damaged"),
        (lambda content: b"no record at all", r"b.tfrecord, record 0 at byte 0 is damaged"),
        (lambda content: b"", r"b.tfrecord contains no samples"),
        (
            lambda content: changed_rows("masked_lm_ids", (3, 1), 65535),
            r"record 3: an id beyond the 60,005 entries of the vocabulary\n.*\n.*--vocabulary FILE",
        ),
        (lambda content: changed_rows("input_mask", (7, 63), 1), r"record 7: input_mask that its tokens do not have"),
        (
            lambda content: changed_rows("masked_lm_positions", (5, 0), 64),
            r"record 5: a masked position outside the row",
        ),
    ],
    ids=["content", "truncated", "length", "text", "nothing", "id", "mask", "place"],
)
def test_damaged_record_is_named(change: Callable[[bytes], bytes], problem: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "b.tfrecord"
    path.write_bytes(change((folder / "train" / "b.tfrecord").read_bytes()))
    task = records.Packed(0, "train", str(path), TFRECORD, 1, str(tmp_path / "x"), str(folder / "vocab.txt"), 0)
    with pytest.raises(Problem, match=problem):
        records.convert(task, lambda count, size: None)


def make_long_samples() -> dict[str, bytes | None]:
    # Samples of 64 tokens are too short to be compared
    text = np.random.RandomState(0).randint(5, 60000, size=40000).astype(np.uint16)
    documents = masking.Documents(text, list(range(0, 40001, 400)), list(range(0, 101, 50)))
    long = masking.make_samples(documents, [0, 1], masking.Settings(512, 76, 1), NUMBERS, masking.stream(0, 0))
    train, test = (frames(padded(samples, 512, 76)) for samples in (long, take(10, 40, long)))
    return {"train/part-00000-of-00001": train, "eval/eval.tfrecord": test, "train/b.tfrecord": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (lambda: {"train/b.tfrecord": packed(0, 50)}, "part-00000-of-00001 and .*b.tfrecord contain the same samples"),
        (
            lambda: {"train/b.tfrecord": packed(50, 90, width=70)},
            "b.tfrecord: 70 tokens, 9 masked; .*: 64 tokens, 9 masked",
        ),
        (lambda: {"vocab.txt": entries_of(NUMBERS.entries[:5000])}, r"record \d+: an id beyond the 5,000 entries"),
        (lambda: {"vocab.txt": entries_of(sorted(NUMBERS.entries))}, r"record 0: no \[CLS\] a \[SEP\] b \[SEP\]"),
        (
            make_long_samples,
            "30 of 30 evaluation samples are in the training data as well, the first is sample 0",
        ),
    ],
    ids=["same file", "other width", "small vocabulary", "other vocabulary", "trained on"],
)
def test_records_that_do_not_fit_together_are_refused(
    files: Callable[[], preparing.Files], problem: str, folder: Path, tmp_path: Path
) -> None:
    copy = write_files(Path(shutil.copytree(folder, tmp_path / "copy")), files())
    assert re.search(problem, refused(convert(copy, tmp_path / "to")))


# -- scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "f1"),
    [
        ("The cat's, dog.", "cats dog", 1.0, 1.0),
        ("U.S.", "us", 1.0, 1.0),
        ("a theatre", "theatre an", 1.0, 1.0),
        ("cat dog cat", "cat cat bird", 0.0, 2 / 3),
        ("cat dog", "cat", 0.0, 2 / 3),
        ("10,000 (dog)", "10000 \u2013 dog", 0.0, 4 / 5),
        ("\u00e9t\u00e9", "ete", 0.0, 0.0),
        ("the", "", 1.0, 0.0),
    ],
)
def test_scores_of_the_official_script(prediction: str, reference: str, exact: float, f1: float) -> None:
    # Values of SQuAD's evaluate-v1.1.py
    found = answers.exact_match(prediction, reference), answers.f1(prediction, reference)
    assert found == (exact, pytest.approx(f1))


def test_question_is_scored_with_its_best_reference() -> None:
    scores = answers.score(["The cat sat.", "dog"], [["a dog", "cat sat"], ["cat", "big dog", "bird"]])
    assert scores == (pytest.approx(100 * (1 + 2 / 3) / 2), 50.0)


# -- spans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "longest", "spans"),
    [
        (3, 3, [(9, 4, 11)]),
        (5, 3, [(9, 4, 11), (9, 12, 15), (7, 4, 15), (7, 8, 11), (7, 8, 15)]),
        (5, 7, [(11, 4, 27), (11, 12, 27), (9, 4, 11), (9, 4, 15), (9, 12, 15)]),
        (4, 1, []),
    ],
)
def test_best_spans(count: int, longest: int, spans: list[tuple[float, int, int]]) -> None:
    # Worked out by hand with the rule of run_squad.py. Tokens 0 and 1 are the question's, token 9 a mark; tokens 5 and
    # 6 have the same characters; tokens 7 and 8 have more context in another window.
    begins = np.array([0, 0, 0, 4, 8, 12, 12, 20, 24, 0])
    ends = np.array([0, 0, 3, 7, 11, 15, 15, 23, 27, 0])
    places = begins, ends, np.array([0, 0, 1, 1, 1, 1, 1, 0, 0, 0], bool)
    start = np.array([9, 0, 1, 4, 2, 4, 0, 8, 0, 0], np.float32)
    end = np.array([9, 0, 0, 1, 5, 3, 5, 2, 7, 0], np.float32)
    assert [tuple(span) for span in answers.best_spans(start, end, places, count, longest)] == spans


LETTERS_AND_DIGITS = "abcdefghijklmnopqrstuvwxyz0123456789"


def test_answer_has_the_characters_of_the_paragraph() -> None:
    context = "In the caf\u00e9 Zo\u00eb's U.S. friends (1895-1943)."
    pieces = (f"##{character}" for character in LETTERS_AND_DIGITS)
    tokenizer = wordpiece.Tokenizer(
        vocabulary.Vocabulary((*squad_writer.SPECIAL, *sorted({*LETTERS_AND_DIGITS, *"'.()-"}), *pieces))
    )
    text, decomposed = (windows.tokenized(words, tokenizer) for words in (context, "cafe\u0301 x"))
    for answer in ("café", "Zoë's", "U.S.", "1895", "1895-1943"):
        first, last = windows.answer_tokens(text, squad.Answer(answer, context.index(answer)))  # type: ignore[misc]
        assert context[text.begins[first] : text.ends[last]] == answer
    assert decomposed.ends[3] == len("cafe\u0301"), "a combining accent belongs to its letter"


# -- windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "parts", "changes"),
    [
        (1, [(0, 1)], []),
        (30, [(0, 30)], []),
        (31, [(0, 30), (12, 19)], [21]),
        (64, [(0, 30), (12, 30), (24, 30), (36, 28)], [21, 33, 45]),
    ],
)
def test_windows_and_the_one_with_most_context(length: int, parts: list[tuple[int, int]], changes: list[int]) -> None:
    assert windows.parts(length, 30, 12) == parts
    owners = windows.most_context(length, parts)
    assert owners.tolist() == [sum(place >= change for change in changes) for place in range(length)]


# -- data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({"readme": ""}, (), "train-v1.1.json is not there"),
        ({"readme": ""}, ("--sequence-length", "32"), "--sequence-length 32 with --question-length 64"),
        (
            {f"{squad.TRAIN}.gz": gzip.compress(b"{}", mtime=0)},
            (),
            "{raw}/train-v1.1.json.gz is compressed by gzip | train-v1.1.json without compression | gunzip",
        ),
    ],
)
def test_bad_source_of_squad_is_rejected(files: Files, words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    check_refusal("bert_squad", tmp_path / "raw", files, [message], *words)
