"""BERT's pretraining data: tokens, sentences, wikitext, pairs and masks, records, the excerpt of a dump, bad input."""

from __future__ import annotations

import bz2
import hashlib
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.bert import (
    buckets,
    evaluation,
    markup,
    masking,
    overlap,
    prepare,
    records,
    sentences,
    texts,
    tfrecord,
    wikipedia,
)
from benchmarks.bert.masking import Documents, Settings
from benchmarks.common.data.problem import Problem
from benchmarks.language import arrays, learning, wordpiece
from benchmarks.language.arrays import DataSet, Samples, open_data
from benchmarks.language.wordpiece import SPECIAL, Tokenizer, Vocabulary
from encore import paths
from tests.trainings import wait_until

SHARED = paths.ROOT.parent / "shared" / "data"

# Small blocks, shards and buckets let a test see several of each, and interrupt between them.
DRIVER = (
    "import sys\n"
    "from benchmarks.bert import converting, prepare, stages, wikipedia, writer\n"
    "writer.BLOCK_BYTES, stages.SHARD_BYTES, writer.BUCKET_BYTES = 6000, 3000, 30000\n"
    "wikipedia.RANGE_BYTES = {'.xml': 4000, '.bz2': 1000}\n"
    "converting.BUCKET_BYTES = 4000\n"
    "if __name__ == '__main__':\n"
    "    sys.exit(prepare.main(sys.argv[1:]))\n"
)
Outcome = tuple[int, list[dict[str, Any]]]
"""Exit code and JSON lines of a preparation."""


def command(*argv: object, python: Path | str = sys.executable, workers: int = 1) -> list[str]:
    return [str(python), "-c", DRIVER, "--progress", "json", "--workers", str(workers), *map(str, argv)]


def run(*argv: object, python: Path | str = sys.executable, workers: int = 1) -> Outcome:
    words = command(*argv, python=python, workers=workers)
    done = subprocess.run(words, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def refused(outcome: Outcome) -> str:
    assert outcome[0] == 2, outcome
    return " | ".join(outcome[1][-1]["error"].values())


def unpack(archive: str, to: Path) -> Path:
    path = SHARED / archive
    if not path.exists():
        pytest.skip(f"no {path.name}: it is not part of the project, it is put next to it")
    with tarfile.open(path) as file:
        file.extractall(to, filter="data")
    return to


# -- tokens ------------------------------------------------------------------------------------------------------

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
        (f"{'a' + 'b' * 199} {'a' + 'b' * 200}", ["a", *["##b"] * 199, "[UNK]"]),
        (" \t\n", []),
    ],
    ids=["accents", "punctuation", "removed", "ideographs", "spaces", "marks", "sigma", "long", "nothing"],
)
def test_words_are_cut_as_bert_cuts_them(text: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer(SMALL)
    assert tokenizer.pieces(text) == pieces
    spans = tokenizer.spans(text)
    assert spans.ids == tokenizer.ids(text)
    assert all(begin < end for begin, end in zip(spans.begins, spans.ends, strict=True))


def test_spans_are_those_of_the_text_as_it_was_given() -> None:
    text = "  Réally,\x00 unaffable İ 漢e"
    spans = Tokenizer(SMALL).spans(text)
    assert [text[begin:end] for begin, end in zip(spans.begins, spans.ends, strict=True)] == [
        *("Réal", "ly", ",", "un", "aff", "able", "İ", "漢", "e")
    ]


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
    vocabulary = wordpiece.read(path)
    assert (vocabulary.size, vocabulary.pad, vocabulary.cls, vocabulary.mask) == (30522, 0, 101, 103)
    tokenizer = Tokenizer(vocabulary)
    assert {text: " ".join(tokenizer.pieces(text)) for text in PUBLISHED} == PUBLISHED


def test_learnt_vocabulary_has_the_frequent_words_whole_and_spells_the_others() -> None:
    words = {"banana": 50, "bandana": 9, "an": 30, "nab": 1}
    entries = learning.learn(words, 18)
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
        wordpiece.read(tmp_path / "vocab.txt")


# -- text --------------------------------------------------------------------------------------------------------


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


def write_dump(pages: list[str]) -> bytes:
    rows = [
        f"  <page>\n    <title>Page {number}</title>\n    <ns>0</ns>\n    <id>{number}</id>\n    <revision>\n"
        f'      <text bytes="9" xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
        for number, text in enumerate(pages)
    ]
    redirect = (
        '  <page>\n    <title>R</title>\n    <ns>0</ns>\n    <redirect title="x" />\n    <text>x</text>\n  </page>\n'
    )
    other = "  <page>\n    <title>Talk:T</title>\n    <ns>1</ns>\n    <text>some talk</text>\n  </page>\n"
    return ("<mediawiki>\n" + "".join(rows) + redirect + other + "</mediawiki>\n").encode()


PAGES = [f"Page {number} has é text. It is &lt;b&gt;short&lt;/b&gt;." for number in range(40)]
PLAIN = [f"Page {number} has é text. It is <b>short</b>." for number in range(40)]


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
    assert (counts["redirects"], counts["pages of other namespaces"]) == (1, 1)


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


# -- pairs and masks ---------------------------------------------------------------------------------------------

LENGTHS = [[1 + (7 * doc + 5 * place) % 23 for place in range(30)] for doc in range(40)]
NUMBERS = Vocabulary((*SPECIAL, *map(str, range(60000))))


@pytest.fixture(scope="module")
def numbered() -> Documents:
    """Every token has its own id, so that a sample shows where its text is from."""
    sizes = [size for document in LENGTHS for size in document]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    tokens = np.arange(5, 5 + ends[-1]).astype(np.uint16)
    return Documents(tokens, ends.tolist(), list(range(0, len(sizes) + 1, 30)))


@pytest.fixture(scope="module")
def drawn(numbered: Documents) -> Samples:
    settings = Settings(64, 9, 1)
    random = masking.stream(3, 0, 0, 0)
    return masking.make_samples(numbered, list(range(40)) * 60, settings, NUMBERS, random)


def test_second_segment_follows_or_is_from_another_document(numbered: Documents, drawn: Samples) -> None:
    bounds = np.array(numbered.sentences)[numbered.documents] + 5

    def document(token: int) -> int:
        return int(np.searchsorted(bounds, token, side="right"))

    cut = 0
    for number in range(len(drawn)):
        tokens, second = drawn.original(number), int(drawn.second[number])
        assert tokens[0] == NUMBERS.cls and tokens[second - 1] == tokens[-1] == NUMBERS.sep
        first, after = tokens[1 : second - 1].astype(int), tokens[second:-1].astype(int)
        assert len(first) and len(after) and len(tokens) <= 64
        for segment in (first, after):
            assert (np.diff(segment) == 1).all() and document(segment[0]) == document(segment[-1])
        if drawn.next[number]:
            assert document(first[0]) != document(after[0])
        else:
            assert document(first[0]) == document(after[0]) and after[0] > first[-1]
            cut += after[0] > first[-1] + 1
            assert after[0] == first[-1] + 1 or len(tokens) == 64  # what is between was cut to the length
    assert cut


def test_half_is_random_and_a_tenth_of_the_documents_is_short(drawn: Samples) -> None:
    # 50 %, and the samples of one sentence, which have no text that follows.
    assert 0.5 < drawn.next.mean() < 0.62
    assert drawn.lengths.max() == 64 and (drawn.lengths < 40).mean() > 0.05


def test_masks_are_15_percent_of_which_80_are_mask_and_10_stay(drawn: Samples) -> None:
    counts = np.diff(drawn.masked_offsets)
    assert (counts == np.clip(np.rint(drawn.lengths * 0.15), 1, 9)).all()
    shown = np.concatenate([drawn[number][drawn.masked(number)[0]] for number in range(len(drawn))])
    labels = drawn.masked_labels
    assert not np.isin(labels, [NUMBERS.cls, NUMBERS.sep]).any()
    # Over 20,000 draws: five standard deviations are 0.014.
    assert len(labels) > 20000
    assert abs((shown == NUMBERS.mask).mean() - 0.8) < 0.014
    assert abs((shown == labels).mean() - 0.1) < 0.011
    places = drawn.masked_places[:-1].astype(int)
    within = np.delete(np.diff(drawn.masked_places.astype(int)), drawn.masked_offsets[1:-1] - 1)
    assert (within > 0).all() and len(places)


@pytest.mark.parametrize("sizes", [(10, 10), (30, 3), (3, 30), (21, 20), (1, 40)])
def test_longer_segment_is_cut_as_one_by_one(sizes: tuple[int, int]) -> None:
    random = masking.stream(0, 0)
    for length in range(2, 20):
        left = list(sizes)
        while sum(left) > length:
            left[0 if left[0] > left[1] else 1] -= 1
        first, first_end, second, second_end = masking._cut(100, 100 + sizes[0], 500, 500 + sizes[1], length, random)
        assert [first_end - first, second_end - second] == left
        assert first >= 100 and first_end <= 100 + sizes[0]
        assert second >= 500 and second_end <= 500 + sizes[1]


# -- preparation -------------------------------------------------------------------------------------------------

WORDS = ("the", "cat", "dog", "sees", "a", "red", "old", "house", "in", "town", "and", "runs", "far", "near", "water")


def write_text(path: Path, documents: int = 60, seed: int = 0) -> Path:
    random = np.random.RandomState(seed)
    lines = []
    for _ in range(documents):
        for _ in range(random.randint(6, 20)):
            lines.append(" ".join(WORDS[place] for place in random.randint(len(WORDS), size=9)) + " .")
        lines.append("")
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_text(folder / "part-00000-of-00002")
    write_text(folder / "part-00001-of-00002", seed=1)
    # The same text twice: a published round had all of its shards the same.
    text = (folder / "part-00000-of-00002").read_text()
    (folder / "part-00002").write_text(f"the cat sees .\na dog runs .\n\n{text}")
    wordpiece.write(folder / "vocab.txt", (*SPECIAL, ".", *WORDS))
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, prepared by one worker."""
    to = tmp_path_factory.mktemp("whole") / "bert"
    assert run("--from", source, "--to", to, *SHORT)[0] == 0
    return to


@pytest.fixture
def raw(source: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(source, tmp_path / "raw"))


SHORT = ("--sequence-length", 40, "--duplication", 3)


def arrays_of(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in arrays.FILES}


def foreign_ids(found: arrays.DataSet) -> list[str]:
    """The arrays with an id that the vocabulary has not."""
    ids = {
        f"{part} {name}": getattr(samples, name)
        for part, samples in (("train", found.train), ("test", found.test))
        for name in ("tokens", "masked_labels")
    }
    return [name for name, array in ids.items() if len(array) and array.max() >= found.vocabulary.size]


def test_declared_files_are_those_of_the_format() -> None:
    assert prepare.FILES == arrays.FILES


def test_two_workers_write_the_same_and_no_shard_is_another_one(source: Path, whole: Path, tmp_path: Path) -> None:
    assert run("--from", source, "--to", tmp_path / "to", *SHORT, workers=2)[0] == 0
    assert arrays_of(tmp_path / "to") == arrays_of(whole)
    data = open_data(whole)
    assert foreign_ids(data) == []
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


def test_another_seed_gives_other_samples_of_the_same_text(source: Path, whole: Path, tmp_path: Path) -> None:
    assert run("--from", source, "--to", tmp_path / "to", *SHORT, "--seed", 1)[0] == 0
    first, second = open_data(whole), open_data(tmp_path / "to")
    assert first.passport["how"]["text"] == second.passport["how"]["text"]
    assert first.passport["id"] != second.passport["id"]


@pytest.mark.parametrize("phase", ["clean", "mask", "shuffle"])
def test_killed_preparation_resumes_and_writes_the_same(phase: str, source: Path, whole: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    pattern = {"clean": "*.clean.json", "mask": "*.mask.json", "shuffle": "*.bucket.json"}[phase]
    argv = ("--from", source, "--to", to, *SHORT)
    with subprocess.Popen(command(*argv), cwd=paths.ROOT, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: any((to / "parts").glob(pattern)) or process.poll() is not None, "a part")
        process.send_signal(signal.SIGKILL)
    if not (to / "dataset.json").exists():
        with pytest.raises(Problem, match="half-written"):
            open_data(to)
    code, lines = run(*argv, workers=2)
    assert code == 0, lines
    assert arrays_of(to) == arrays_of(whole)
    assert not (to / "parts").exists()


def test_a_changed_byte_is_found(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    content = bytearray((folder / "train_tokens.npy").read_bytes())
    content[-1] ^= 1
    (folder / "train_tokens.npy").write_bytes(content)
    assert "train_tokens.npy has changed" in refused(run("--verify", folder))
    (folder / "train_next.npy").write_bytes(b"")
    assert "train_next.npy has 0 bytes" in refused(run("--verify", folder, "--quick"))


def test_the_evaluation_set_is_one_article_of_each_part() -> None:
    assert evaluation.chosen_places(2) == [1]
    assert evaluation.chosen_places(60) == [10, 30, 50]
    many = evaluation.chosen_places(500 * 200)
    assert many == [200 * part + 42 for part in range(500)]


def test_listed_articles_are_the_evaluation_set(raw: Path, tmp_path: Path) -> None:
    documents = (raw / "part-00000-of-00002").read_text().split("\n\n")
    listed = tmp_path / "md5.txt"
    digests = [hashlib.md5(documents[place].rstrip().encode()).hexdigest() for place in (3, 17)]
    listed.write_text("\n".join(digests) + "\n")
    assert run("--from", raw, "--to", tmp_path / "to", *SHORT, "--evaluation-list", listed)[0] == 0
    data = open_data(tmp_path / "to")
    # The copy of the first file is left out too.
    assert data.passport["facts"]["documents"] == {"train": 177, "test": 2}
    wanted = " ".join(documents[3].split() + documents[17].split())
    for number in range(len(data.test)):
        tokens = data.test.original(number)
        assert data.vocabulary.text(tokens[1 : data.test.second[number] - 1]) in wanted
    listed.write_text("0" * 32 + "\n" + digests[0] + "\n")
    told = refused(run("--from", raw, "--to", tmp_path / "b", "--evaluation-list", listed))
    assert "1 of 2 documents of" in told and "0" * 32 in told


# -- the small set and the excerpt -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    to = tmp_path_factory.mktemp("small") / "bert"
    words = [sys.executable, "-m", "benchmarks.bert.prepare", "--to", str(to)]
    subprocess.run(words, cwd=paths.ROOT, check=True, capture_output=True)
    return open_data(to)


def test_small_set_is_the_english_of_python(small: DataSet) -> None:
    assert (small.passport["name"], small.vocabulary.size, small.sequence_length) == ("python-text", 2048, 128)
    assert small.max_predictions == 20 and len(small.test) == 1000 and len(small.train) > 10000
    text = small.vocabulary.text(np.concatenate([small.train.original(number) for number in range(200)]))
    words = text.split()
    assert words.count("the") / len(words) > 0.02
    assert text.count("[UNK]") == 0
    assert foreign_ids(small) == []


@pytest.fixture(scope="module")
def excerpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("excerpt")
    unpack("enwiki_excerpt.tar.xz", folder / "archive")
    dump = next((folder / "archive").rglob("enwiki-latest*.bz2"))
    raw = folder / "raw"
    raw.mkdir()
    dump.rename(raw / "enwiki-pages-articles.xml.bz2")
    unpack("bert_vocab.tar.xz", folder / "vocab")
    shutil.copy(next((folder / "vocab").rglob("vocab.txt")), raw / "vocab.txt")
    return raw


TWICE = ("--duplication", "2")


def test_excerpt_of_wikipedia_goes_through_the_whole_preparation(excerpt: Path, tmp_path: Path) -> None:
    dump = excerpt / "enwiki-pages-articles.xml.bz2"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bert.prepare", "--from", excerpt, "--to", tmp_path / "to", *TWICE],
        cwd=paths.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = open_data(tmp_path / "to")
    how, facts = data.passport["how"], data.passport["facts"]
    # The independent count: XML by its own parser, text by the paragraphs, tokens sentence by sentence.
    articles, redirects, others = [], 0, 0
    space = "{http://www.mediawiki.org/xml/export-0.10/}"
    content = bz2.decompress(dump.read_bytes())
    for page in ElementTree.fromstring(content):
        if page.tag != f"{space}page":
            continue
        if page.findtext(f"{space}ns") != "0":
            others += 1
        elif page.find(f"{space}redirect") is not None:
            redirects += 1
        else:
            articles.append(page.findtext(f"{space}revision/{space}text") or "")
    assert (how["left_out"]["redirects"], how["left_out"]["pages of other namespaces"]) == (redirects, others)
    assert len(articles) + redirects + others == 206
    found = [len(each) for each in re.findall(rb"<page>.*?</page>", content, re.DOTALL)]
    assert how["left_out"]["bytes of XML"] == sum(found)
    documents = [[line for each in markup.paragraphs(text) for line in sentences.split(each)] for text in articles]
    documents = [each for each in documents if each]
    assert how["text"]["documents"] == len(documents)
    assert how["text"]["sentences"] == sum(map(len, documents))
    assert how["text"]["bytes"] == sum(len(line.encode()) for each in documents for line in each)
    assert facts["documents"] == {"train": len(documents) - 5, "test": 5}
    # Every pass has about the text once: half of the second segments are other texts in its place.
    tokenizer = Tokenizer(data.vocabulary)
    tokens = sum(len(tokenizer.ids(line)) for each in documents for line in each)
    whole = sum(facts["tokens"].values()) - 3 * (len(data.train) + len(data.test))
    assert 0.95 < whole / (2 * tokens) < 1.6
    assert how["text"]["unknown"] < 0.001 * tokens


# -- records -----------------------------------------------------------------------------------------------------


def padded(samples: Samples, width: int, most: int, is_hdf5: bool = False) -> dict[str, np.ndarray]:
    """As create_pretraining_data.py pads them; its HDF5 files have no mask and no segments (NVIDIA v0.7)."""
    count = len(samples)
    rows = {key: np.zeros((count, width), np.int64) for key in ("input_ids", "input_mask", "segment_ids")}
    rows.update({key: np.zeros((count, most), np.int64) for key in ("masked_lm_positions", "masked_lm_ids")})
    for number in range(count):
        tokens, (places, labels) = samples[number], samples.masked(number)
        rows["input_ids"][number, : len(tokens)] = tokens
        if not is_hdf5:
            rows["input_mask"][number, : len(tokens)] = 1
            rows["segment_ids"][number, samples.second[number] : len(tokens)] = 1
        rows["masked_lm_positions"][number, : len(places)] = places
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
    frames = [tfrecord.frame(example(rows, number)) for number in range(len(rows["input_ids"]))]
    path.write_bytes(b"".join(frames))
    return path


def take(samples: Samples, begin: int, end: int) -> Samples:
    return buckets.take(samples, np.arange(begin, end))


@pytest.fixture(scope="module")
def packed(drawn: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files for training, one for evaluation whose documents are no others: it overlaps only where asked to."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "train").mkdir()
    (folder / "eval").mkdir()
    write_records(folder / "train" / "part-00000-of-00500", padded(take(drawn, 0, 50), 64, 9))
    write_records(folder / "train" / "b.tfrecord", padded(take(drawn, 50, 90), 64, 9))
    write_records(folder / "eval" / "eval.tfrecord", padded(take(drawn, 90, 120), 64, 9))
    wordpiece.write(folder / "vocab.txt", NUMBERS.entries)
    return folder


def convert(folder: Path, to: Path, *more: object) -> Outcome:
    options = ("--evaluation", folder / "eval", "--vocabulary", folder / "vocab.txt", *more)
    return run("--from", folder / "train", "--to", to, *options, workers=2)


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


def test_checksums_are_castagnoli_s() -> None:
    """Values of RFC 3720, B.4, and one of many lengths at once."""
    known = {b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E}
    assert tfrecord.crc32c(list(known)).tolist() == list(known.values())


def test_tensorflow_s_records_become_the_samples_that_they_were(packed: Path, drawn: Samples, tmp_path: Path) -> None:
    assert convert(packed, tmp_path / "to")[0] == 0
    data = open_data(tmp_path / "to")
    assert (data.sequence_length, data.max_predictions, data.passport["facts"]["kind"]) == (64, 9, "records")
    assert by_content(data.train) == by_content(take(drawn, 0, 90))
    # Evaluation takes the first samples in the order of the files.
    held = take(drawn, 90, 120)
    assert [bytes(data.test[number]) for number in range(30)] == [bytes(held[number]) for number in range(30)]
    assert foreign_ids(data) == []


MAKE_HDF5 = """
import sys, h5py, numpy as np
rows = np.load(sys.argv[1])
with h5py.File(sys.argv[2], "w") as file:
    for key in rows.files:
        file.create_dataset(key, data=rows[key])
"""


def test_hdf5_of_the_submission_is_read_where_h5py_is(
    packed: Path, drawn: Samples, pytorch_python: Path, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    for name, samples in (("train/part_0.hdf5", take(drawn, 0, 50)), ("eval.hdf5", take(drawn, 90, 120))):
        rows = padded(samples, 64, 9, is_hdf5=True)
        rows["next_sentence_labels"] = rows["next_sentence_labels"][:, 0]
        np.savez(tmp_path / "rows.npz", **rows)
        words = [str(pytorch_python), "-c", MAKE_HDF5, str(tmp_path / "rows.npz"), str(tmp_path / name)]
        subprocess.run(words, check=True)
    argv = ("--from", tmp_path / "train", "--evaluation", tmp_path / "eval.hdf5", "--vocabulary", packed / "vocab.txt")
    assert run(*argv, "--to", tmp_path / "to", python=pytorch_python)[0] == 0
    assert by_content(open_data(tmp_path / "to").train) == by_content(take(drawn, 0, 50))
    whole = (tmp_path / "train" / "part_0.hdf5").read_bytes()
    (tmp_path / "train" / "part_0.hdf5").write_bytes(whole[: len(whole) // 2])
    told = refused(run(*argv, "--to", tmp_path / "b", python=pytorch_python))
    assert "part_0.hdf5 cannot be read" in told


def test_hdf5_without_h5py_is_refused_in_words(packed: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(Problem, match="h5py is not installed"):
        list(records._rows(tmp_path / "x.hdf5", records.HDF5))


ROWS = {
    "mask": ("input_mask", (7, 63), 1),
    "place": ("masked_lm_positions", (5, 0), 64),
    "id": ("masked_lm_ids", (3, 1), 65535),
}
"""What is changed: array, place, value."""


def damage(path: Path, change: str, drawn: Samples) -> None:
    content = bytearray(path.read_bytes())
    if change in ROWS:
        rows = padded(take(drawn, 50, 90), 64, 9)
        name, place, value = ROWS[change]
        assert rows[name][place] != value
        rows[name][place] = value
        write_records(path, rows)
        return
    if change == "content":
        content[len(content) // 2] ^= 1
    elif change == "length":
        content[0] ^= 1
    path.write_bytes({"truncated": content[:-7], "none": b"", "text": b"no record at all"}.get(change, content))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("content", r"b.tfrecord, record \d+ at byte [\d,]+ is damaged: another checksum"),
        ("truncated", r"b.tfrecord, record 39 at byte [\d,]+ is truncated"),
        ("length", r"b.tfrecord, record 0 at byte 0 is damaged"),
        ("text", r"b.tfrecord, record 0 at byte 0 is damaged"),
        ("none", r"b.tfrecord holds no sample"),
        ("id", r"record 3: id 65,535\n.*ids below 60,005, the size of the vocabulary\n.*--vocabulary FILE"),
        ("mask", r"record 7: an input_mask that is not that of its tokens"),
        ("place", r"record 5: a masked place outside of the row"),
    ],
)
def test_damaged_record_is_named(change: str, told: str, packed: Path, drawn: Samples, tmp_path: Path) -> None:
    path = Path(shutil.copy(packed / "train" / "b.tfrecord", tmp_path))
    damage(path, change, drawn)
    task = records.Packed(
        0, "train", str(path), records.TFRECORD, 1, str(tmp_path / "x"), str(packed / "vocab.txt"), 1, 0
    )
    with pytest.raises(Problem) as found:
        records.convert(task, lambda count, size: None)
    assert re.search(told, str(found.value)), found.value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("same file", "part-00000-of-00500 and .*b.tfrecord hold the same samples"),
        ("other width", "b.tfrecord: 70 tokens, 9 masked; .*: 64 tokens, 9 masked"),
        ("small vocabulary", r"record \d+: id [\d,]+ \| ids below 5,000"),
        ("other vocabulary", r"record 0: no \[CLS\] a \[SEP\] b \[SEP\]"),
        ("trained on", "30 of 30 evaluation samples are in the training part, the first one is sample 0"),
    ],
)
def test_records_that_do_not_fit_together_are_refused(
    change: str, told: str, packed: Path, drawn: Samples, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "copy"))
    path = folder / "train" / "b.tfrecord"
    if change == "same file":
        shutil.copy(folder / "train" / "part-00000-of-00500", path)
    elif change == "other width":
        write_records(path, padded(take(drawn, 50, 90), 70, 9))
    elif change == "trained on":
        # Long segments, as those of a real set: a sample of 64 tokens is too short to be judged.
        text = np.random.RandomState(0).randint(5, 60000, size=40000).astype(np.uint16)
        numbered = Documents(text, list(range(0, 40001, 400)), list(range(0, 101, 50)))
        long = masking.make_samples(numbered, [0, 1], Settings(512, 76, 1), NUMBERS, masking.stream(0, 0))
        for name, samples in (("train/part-00000-of-00500", long), ("eval/eval.tfrecord", take(long, 10, 40))):
            write_records(folder / name, padded(samples, 512, 76))
        path.unlink()
    else:
        entries = NUMBERS.entries[:5000] if change == "small vocabulary" else sorted(NUMBERS.entries)
        wordpiece.write(folder / "vocab.txt", entries)
    assert re.search(told, refused(convert(folder, tmp_path / "to")))


def test_the_same_text_in_other_samples_is_found() -> None:
    text = np.random.RandomState(0).randint(5, 60000, size=40000).astype(np.uint16)
    documents = Documents(text, list(range(0, 40001, 20)), [0, 1000, 2000])
    # Random second segments are of the other document: the samples without one are of a single document.
    train, again, other = (
        _only_following(
            masking.make_samples(documents, numbers, Settings(512, 76, 1), NUMBERS, masking.stream(seed, 0))
        )
        for seed, numbers in ((0, [0] * 20), (1, [0]), (2, [1]))
    )
    for held, share in ((again, 1.0), (other, 0.0)):
        wanted = np.unique(overlap.runs_of(held, NUMBERS)[0])
        seen = np.zeros(len(wanted), bool)
        overlap.mark_seen(seen, wanted, train, NUMBERS)
        assert abs(seen.mean() - share) < 0.02
        if share:
            with pytest.raises(Problem, match="evaluation samples are in the training part"):
                overlap.refuse(held, NUMBERS, wanted, seen, Path("x"))
        else:
            assert overlap.refuse(held, NUMBERS, wanted, seen, Path("x")) == 0


def _only_following(samples: Samples) -> Samples:
    return buckets.take(samples, np.flatnonzero(samples.next == 0))


# -- bad input ---------------------------------------------------------------------------------------------------


DUMP = write_dump(PAGES)
STREAMS = [bz2.compress(DUMP[place : place + 900]) for place in range(0, len(DUMP), 900)]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("d.xml", DUMP[:4000], "d.xml is truncated: its last 4,000 bytes have no </mediawiki>"),
        ("d.xml.bz2", b"".join(STREAMS)[:-20], "d.xml.bz2 is truncated: the last bz2 stream has no end"),
        ("d.xml.bz2", b"".join(STREAMS[:4]), "d.xml.bz2 is truncated: "),
        (
            "d.xml.bz2",
            b"".join([*STREAMS[:2], STREAMS[2][:60], b"xxxx", *STREAMS[3:]]),
            "damaged in the bz2 stream at byte",
        ),
        ("d.xml.bz2", b"<mediawiki>", "does not begin as bz2 does"),
        ("d.xml", b"<html></html>", "does not begin with <mediawiki"),
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
    assert told in found.value.found and found.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("d.xml", DUMP[:4000], "d.xml is truncated"),
        ("d.xml", write_dump([]), "d.xml: 0 documents with text"),
        ("t.txt", "Un café.\n".encode("latin1") * 9, "t.txt, byte 6: 0xe9 is not UTF-8"),
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
    assert told in refused(run("--from", tmp_path / "raw", "--to", tmp_path / "to", *SHORT))
    assert not (tmp_path / "to" / "dataset.json").exists()


def test_options_that_contradict_each_other_are_refused(raw: Path, packed: Path, tmp_path: Path) -> None:
    to = ("--to", tmp_path / "to", *SHORT)
    held = write_text(tmp_path / "held.txt", documents=3)
    told = refused(run("--from", raw, *to, "--evaluation", held))
    assert "3 documents are in both parts, the first one begins: " in told and "--evaluation" in told
    assert "one of them" in refused(run("--from", raw, *to, "--vocabulary-size", 100))
    (raw / "vocab.txt").unlink()
    assert "has no vocab.txt" in refused(run("--from", raw, *to))
    told = refused(run("--from", packed / "train", *to, "--vocabulary", packed / "vocab.txt"))
    assert "records for training alone" in told
    assert "add --from" in refused(run(*to, "--evaluation", held))
