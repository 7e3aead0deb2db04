"""The preparation of BERT's data: workers, seeds, kills, evaluation set, toy data set, excerpt, bad input."""

import bz2
import hashlib
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.bert import (
    evaluation,
    markup,
    sentences,
)
from benchmarks.common.data.problem import Problem
from benchmarks.language import FILES, vocabulary
from benchmarks.language.arrays import DataSet, open_data
from benchmarks.language.vocabulary import SPECIAL
from benchmarks.language.wordpiece import Tokenizer
from encore import paths
from tests.bert_data import (
    PAGES,
    SHORT,
    WORDS,
    command,
    refused,
    run,
    unpack,
    write_dump,
    write_packed,
    write_text,
)
from tests.trainings import wait_until, with_other_offsets


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("packed"))


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
    """The source, prepared by one worker."""
    to = tmp_path_factory.mktemp("whole") / "bert"
    assert run(source, "-o", to, *SHORT)[0] == 0
    return to


@pytest.fixture
def raw(source: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(source, tmp_path / "raw"))


def arrays_of(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


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


def test_no_value_of_an_array_is_read_as_the_data_set_is_opened(whole: Path, tmp_path: Path) -> None:
    """Training opens it before the clock starts."""
    open_data(with_other_offsets(whole, tmp_path / "copy"))


def test_another_seed_gives_other_samples_of_the_same_text(source: Path, whole: Path, tmp_path: Path) -> None:
    assert run(source, "-o", tmp_path / "to", *SHORT, "--seed", 1)[0] == 0
    first, second = open_data(whole), open_data(tmp_path / "to")
    assert first.passport["how"]["text"] == second.passport["how"]["text"]
    assert first.passport["id"] != second.passport["id"]


@pytest.mark.parametrize("phase", ["clean", "mask", "shuffle"])
def test_killed_preparation_resumes_and_writes_the_same(phase: str, source: Path, whole: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    pattern = {"clean": "*.clean.json", "mask": "*.mask.json", "shuffle": "*.bucket.json"}[phase]
    argv = (source, "-o", to, *SHORT)
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    to = tmp_path_factory.mktemp("small") / "bert"
    words = [sys.executable, "-m", "benchmarks.bert.prepare", "-o", str(to)]
    subprocess.run(words, cwd=paths.ROOT, check=True, capture_output=True)
    return open_data(to)


def test_small_set_is_the_english_of_python(small: DataSet) -> None:
    assert (small.passport["name"], small.vocabulary.size, small.sequence_length) == ("python-text", 2048, 128)
    assert small.max_predictions == 20 and len(small.test) == 1000 and len(small.train) > 10000
    text = small.vocabulary.text(np.concatenate([small.train.original(number) for number in range(200)]))
    words = text.split()
    assert words.count("the") / len(words) > 0.02
    assert text.count("[UNK]") == 0


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
        [sys.executable, "-m", "benchmarks.bert.prepare", excerpt, "-o", tmp_path / "to", *TWICE],
        cwd=paths.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = open_data(tmp_path / "to")
    how, facts = data.passport["how"], data.passport["facts"]
    # The independent count: XML by its own parser, text by the paragraphs, tokens sentence by sentence.
    space = "{http://www.mediawiki.org/xml/export-0.10/}"
    content = bz2.decompress(dump.read_bytes())
    pages = ElementTree.fromstring(content).findall(f"{space}page")
    articles = [page for page in pages if page.findtext(f"{space}ns") == "0"]
    texts = [
        page.findtext(f"{space}revision/{space}text") or ""
        for page in articles
        if page.find(f"{space}redirect") is None
    ]
    documents = [[line for each in markup.paragraphs(text) for line in sentences.split(each)] for text in texts]
    documents = [each for each in documents if each]
    unknown = how["text"].pop("unknown")
    assert how["left_out"] == {
        "redirects": len(articles) - len(texts),
        "pages of other namespaces": len(pages) - len(articles),
        "pages without text": len(texts) - len(documents),
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


def test_options_that_contradict_each_other_are_refused(raw: Path, packed: Path, tmp_path: Path) -> None:
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
