"""Parallel text: the toy language, aligned files, WMT's archives, batches, BLEU, and bad input."""

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.translation import CODES, FILES, REFERENCES, VOCABULARY, bleu, orders, segment, stages, wmt, writer
from benchmarks.translation import vocabulary as words
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.segment import Subtokens, read_dictionary, split_tokens
from benchmarks.translation.vocabulary import BOS, EOS, PAD, SUBTOKENS, UNK, Vocabulary
from encore import paths
from tests import preparing
from tests.preparing import refused

EN = ["the cat sat on the mat .", "dogs bark , cats do not .", "a small house", "it is rain@@ ing 3,000 times"]
DE = ["die katze saß auf der matte .", "hunde bellen , katzen nicht .", "ein kleines haus", "es regnet 3.000 mal"]
# The same words in reverse order, so that test lines are not training lines
REVERSED = {name: [" ".join(line.split()[::-1]) for line in lines] for name, lines in (("en", EN), ("de", DE))}
run = partial(preparing.run, "gnmt")


def lines_of(*texts: str) -> str:
    return "".join(text + "\n" for text in texts)


def write_text(folder: Path, source: list[str], target: list[str]) -> Path:
    folder.mkdir()
    for name, train in (("en", source), ("de", target)):
        (folder / f"train.{name}").write_text(lines_of(*train))
        (folder / f"test.{name}").write_text(lines_of(*REVERSED[name]))
    return folder


@pytest.fixture
def split(tmp_path: Path) -> Path:
    # Aligned files of words that are split already, which no package is needed for
    return write_text(tmp_path / "raw", EN, DE)


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(name.encode() + (folder / name).read_bytes() for name in FILES)).hexdigest()


def token_lists(dataset: DataSet, side: str, part: str = "train") -> list[list[str]]:
    pairs = getattr(dataset, part)
    return [dataset.vocabulary.tokens(getattr(pairs, side)[number]) for number in range(len(pairs))]


# -- the toy set -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("toy") / "gnmt"
    assert run("-o", to, workers=2)[0] == 0
    return to


@pytest.mark.slow
def test_toy_set_is_the_same_everywhere(toy_folder: Path) -> None:
    # The published qualities of this set depend on it
    assert digest(toy_folder) == "6755eadc4ff2ba7135b37e673577b995c2b7ac651b894eeb81f4289fd5fe17f1"
    toy = open_data(toy_folder)
    text = toy.vocabulary.text
    pairs = [(text(toy.train.source[number]), text(toy.train.target[number])) for number in range(len(toy.train))]
    assert len(dict(pairs)) == len(pairs) == 8000 and not set(dict(pairs)) & set(toy.sources)
    assert [text(toy.test.target[number]) for number in range(400)] == toy.references
    # Copies of the sources are no translations
    assert bleu.tokenized_score(toy.sources, toy.references) < 5


@pytest.mark.slow
def test_damaged_arrays_are_found(toy_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy_folder, tmp_path / "copy"))
    assert run("--verify", folder)[0] == 0
    content = (folder / "train_target.npy").read_bytes()
    (folder / "train_target.npy").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "train_target.npy has changed" in refused(run("--verify", folder))
    for name, damage, problem in (
        (REFERENCES, lambda path: path.write_text("one line\n"), r"9 bytes in test_references\.txt"),
        (REFERENCES, Path.unlink, r"test_references\.txt"),
        ("train_source.npy", lambda path: path.write_bytes(b""), "prepare it again"),
    ):
        damage(folder / name)
        with pytest.raises(Problem, match=problem):
            open_data(folder)


# -- aligned files ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pairs_are_cleaned_and_files_may_be_compressed(split: Path, tmp_path: Path) -> None:
    for name, extra in (("en", "\nword\n" + "many " * 11 + "\none\r\n"), ("de", "wort\n \nviele\n\ufeffeins")):
        with (split / f"train.{name}").open("a", encoding="utf-8") as file:
            file.write(extra)
    code, lines = run(split, "-o", tmp_path / "to", "--longest", 10)
    assert code == 0, lines
    skipped = f"left out of training: 2 empty, 1 too long; the first is line 5 of {split}/train.en and train.de"
    assert [line["note"] for line in lines if "note" in line] == [skipped]
    first = open_data(tmp_path / "to")
    assert token_lists(first, "source") == [line.split() for line in [*EN, "one"]]
    assert token_lists(first, "target")[4] == ["eins"]
    assert first.vocabulary.text(first.train.source[3]) == "it is raining 3,000 times"
    assert first.vocabulary.entries[:9] == (*words.SPECIAL, ".", ",", "the", "3,000", "3.000")
    assert (first.references, first.manifest["facts"]) == (REVERSED["de"], {
        "source_language": "en", "target_language": "de", "vocabulary": first.vocabulary.size, "kind": "bpe",
        "detokenized": False, "tokens": {"train": [24, 21], "test": [23, 20]},
    })  # fmt: skip
    for path in split.iterdir():
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert run(split, "-o", tmp_path / "other", "--longest", 10, "--languages", "de", "en")[0] == 0
    second = open_data(tmp_path / "other")
    assert (second.source_language, second.references) == ("de", [line.replace("@@ ", "") for line in REVERSED["en"]])
    assert second.train.target.tokens.tolist() == first.train.source.tokens.tolist()


TRAIN = {name: lines_of(*lines).encode() for name, lines in (("en", EN), ("de", DE))}
GREEN = "ein gr\xfcnes haus\n".encode("latin1")
TWO_TESTS = {f"test.{year}.{name}": TRAIN[name] for year in (2016, 2017) for name in TRAIN}
# Files to write (None: to remove), options, and parts of the error message
BAD: dict[str, tuple[dict[str, bytes | None], tuple[str, ...], tuple[str, ...]]] = {
    "lines": ({"train.de": TRAIN["de"] + b"eine\n"}, (), ("train.en has 4 lines, ", "train.de has 5", "restore both")),
    "empty test": (
        {"test.en": b"a\nx\n", "test.de": b"b\n\n"}, (),
        ("line 2 of", "test.en and test.de is empty", "remove the pair from both files")),
    "overlap": ({"test.en": b"a small house\n", "test.de": b"ein kleines haus\n"}, (), ("1 of 1 evaluation pairs",)),
    "nothing left": ({}, ("--longest", "1"), ("no pair is left to train on: 4 too long; the first is line 1",)),
    "no train": ({"train.de": None}, (), ("has train.en", "train.XX and train.YY")),
    "no test": ({"test.en": None, "test.de": None}, (), ("has train alone", "add test.en and test.de")),
    "two tests": ({"test.en": None, "test.de": None, **TWO_TESTS}, (), ("add --test test.2016",)),
    "three languages": ({"train.fr": b"le\n"}, (), ("text in de, en, fr", "--languages")),
    "not these languages": ({}, ("--languages", "en", "fr"), ("train.fr", "name other --languages")),
    "subtokens": ({}, ("--tokens", "subtokens"), ("is split by BPE", "add --tokens bpe")),
    # DE has a letter in UTF-8: converting the file would damage it
    "lines in another encoding": (
        {"train.de": TRAIN["de"] + GREEN * 25, "train.en": TRAIN["en"] + b"a house\n" * 25}, (),
        ("/train.de: lines that are not UTF-8: 25\n    line 5: byte 0xfc at 7\n",
         "line 24: byte 0xfc at 7\n    and 5 more", "do not convert the others")),
    "another encoding": (
        {"train.de": TRAIN["de"].decode().encode("latin1")}, (),
        ("not UTF-8: 1\n    line 1: byte 0xdf at 13", "iconv -f latin1")),
    # Messages name the file of the user, not its unpacked copy
    "encoding, packed": (
        {"train.de": None, "train.de.gz": gzip.compress(GREEN * 4)}, (), ("train.de.gz: lines that are not UTF-8: 4",)),
    "cut gzip": (
        {"train.de": None, "train.de.gz": gzip.compress(TRAIN["de"])[:-9]}, (), ("train.de.gz is damaged",)),
    "no gzip": ({"train.de": None, "train.de.gz": b"no gzip"}, (), ("train.de.gz is damaged",)),
    "gzip without a name": ({"train.de": gzip.compress(b"x")}, (), ("train.de is compressed by gzip", "gunzip")),
    "bzip2": ({"train.de": b"BZh9"}, (), ("train.de is compressed by bzip2",)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_with_a_hint(kind: str, split: Path, tmp_path: Path) -> None:
    files, options, parts = BAD[kind]
    for name, content in files.items():
        (split / name).write_bytes(content) if content is not None else (split / name).unlink()
    message = refused(run(split, "-o", tmp_path / "to", *options))
    assert [part for part in parts if part not in message] == [], message
    assert not (tmp_path / "to" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("count", "end"), [(0, ""), (1, ""), (1, "\n"), (5, "\n"), (6, "\n"), (6, ""), (7, "")], ids=str
)
def test_blocks_begin_at_every_third_line(tmp_path: Path, count: int, end: str) -> None:
    path, lines = tmp_path / "text", [f"line {number}" for number in range(count)]
    path.write_text("\n".join(lines) + end)
    total, offsets = stages.line_offsets(path, 3, lambda size: None)
    first_lines = [path.read_bytes()[offset:].split(b"\n")[0].decode() for offset in offsets]
    assert (total, first_lines) == (count, lines[::3] or [""])


# -- tokens ------------------------------------------------------------------------------------------------------


def test_bad_codes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "codes"
    for text, problem in (("#version: 0.2\na b\na b c\n", "line 3: 'a b c'"), ("", "line 1: ''")):
        path.write_text(text)
        with pytest.raises(Problem, match=problem):
            segment.check_codes(path)
    writer.check_foreign_codes(path, {"a": 200, "b": 100}, {"word": 100})
    with pytest.raises(Problem, match=r"splits a word into 3\.1 tokens on average"):
        writer.check_foreign_codes(path, {"a": 310}, {"word": 100})


def test_special_entries_and_text_of_ids() -> None:
    vocabulary = Vocabulary((*words.SPECIAL, "a@@", "b"))
    assert [vocabulary.entries[number] for number in (PAD, UNK, BOS, EOS)] == list(words.SPECIAL)
    texts = [vocabulary.text(ids) for ids in ([BOS, 4, 5, 5, EOS, 4], [5, 4, PAD], [UNK, 99, 6])]
    assert texts == ["ab b", "b a", "<unk> <unk> <unk>"]
    assert (vocabulary.size, vocabulary.padded(8), vocabulary.padded(6)) == (6, 8, 6)


ENTRIES = ["the_", ", _", "_", "._", "ho", "use_", *"abcdefghijklmnopqrstuvwxyz3\\;0123456789 _,.\n"]


def test_subtokens_are_reversible() -> None:
    entries = (*words.SPECIAL, *dict.fromkeys(ENTRIES))
    subtokens, vocabulary = Subtokens(entries), Vocabulary(entries, SUBTOKENS)
    lines = ["the house, the mouse.", "a_b \\ c", "3,000 - über", "the house", "über_"]
    assert [vocabulary.text(subtokens.encode(line)) for line in lines] == lines
    assert [vocabulary.entries[number] for number in subtokens.encode("the house")] == ["the_", "ho", "use_"]
    assert split_tokens("ab, cd  e") == ["ab", ", ", "cd", "  ", "e"]
    # The submission compares escaped text without white space inside of tokens
    assert vocabulary.joined(subtokens.encode("a_b \\ c , d ,\\")) == r"a \u b \\ c, d,\\"
    assert Subtokens((*words.SPECIAL, "a", "_")).encode("ab") == [4, 1, 1, 1, 1, 5]


def test_dictionary_of_the_submission_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dictionary"
    path.write_text("'<pad>_'\n'<EOS>_'\n', _'\n'''\n'the_'\n")
    assert read_dictionary(path) == [", _", "'", "the_"]
    for text, problem in (("'the_'\nthe_\n", "line 2: 'the_'"), ("'the_'\n'the_'\n", "line 2: \"'the_'\" again")):
        path.write_text(text)
        with pytest.raises(Problem, match=problem):
            read_dictionary(path)


# -- WMT's archives ---------------------------------------------------------------------------------------------


def pack(path: Path, members: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in ("../../evil.en", "europarl-v7.de-en.en"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
        for name, text in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    # WMT17's archives of one line each, and a dictionary
    folder = tmp_path / "wmt"
    folder.mkdir()
    for number, corpus in enumerate(wmt.CORPORA["wmt17"]):
        texts = {"en": f"house {number}", "de": f"haus {number}"}
        members = {f"deep/{corpus.stem}.{code}": lines_of(text) for code, text in texts.items()}
        pack(folder / corpus.archives[0], members)
    for code in wmt.LANGUAGES:
        (folder / f"{wmt.TEST}.{code}").write_text(lines_of("house"))
    entries = ["<pad>_", "<EOS>_", *"abcdefghijklmnopqrstuvwxyz_ 0123456789;\\"]
    (folder / "reference_dictionary.ende.txt").write_text(lines_of(*(f"'{entry}'" for entry in entries)))
    return folder


@pytest.fixture
def wmt17(archives: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The archives, with the checksums of their newstest2014 as the published ones
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in archives.glob(f"{wmt.TEST}.??")}
    monkeypatch.setattr(wmt, "KNOWN_MD5", sums)
    return archives


def test_archives_are_joined_in_the_submitted_order(wmt17: Path, tmp_path: Path) -> None:
    code, lines = preparing.run("transformer", wmt17, "-o", tmp_path / "to")
    assert code == 0, lines
    dataset = open_data(tmp_path / "to")
    targets = [dataset.vocabulary.text(dataset.train.target[number]) for number in range(3)]
    assert targets == ["haus 0", "haus 1", "haus 2"]
    kind = dataset.manifest["name"], dataset.manifest["facts"]["kind"], dataset.vocabulary.size, dataset.references
    assert kind == ("own data", SUBTOKENS, 44, ["house"])
    assert not list(tmp_path.rglob("evil*"))


CRAWL = "training-parallel-commoncrawl.tgz"
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, f"lacks {CRAWL} (http://www.statmt.org/wmt13/"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-40]), f"{CRAWL} is damaged: "),
    # Changes gzip's checksum
    "flipped": (
        lambda path: path.write_bytes(path.read_bytes()[:-6] + b"?" + path.read_bytes()[-5:]),
        f"{CRAWL} is damaged: CRC check failed",
    ),
    "no archive": (lambda path: path.write_text("<html>"), f"{CRAWL} is damaged: "),
    "another one": (
        lambda path: pack(path, {"other.en": "x\n"}),
        f"{CRAWL} has no commoncrawl.de-en.de, commoncrawl.de-en.en",
    ),
    "checksum": (
        lambda path: (path.parent / "SHA256SUMS").write_text(f"{'0' * 64}  {path.name}\n"),
        f"{CRAWL} has sha256 ",
    ),
    "no dictionary": (
        lambda path: (path.parent / "reference_dictionary.ende.txt").unlink(),
        "has no reference_dictionary.ende.txt",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_archives_are_named(kind: str, wmt17: Path, tmp_path: Path) -> None:
    change, problem = DAMAGED[kind]
    change(wmt17 / CRAWL)
    assert problem in refused(preparing.run("transformer", wmt17, "-o", tmp_path / "to"))


def test_test_part_with_another_checksum_is_refused(archives: Path, tmp_path: Path) -> None:
    message = refused(preparing.run("transformer", archives, "-o", tmp_path / "to"))
    assert "newstest2014.en has md5 " in message
    assert "dabf51a9c02b2235632f3cee75c72d49, as verify_dataset.sh of v0.5 has it" in message


def test_sgm_and_lists_of_checksums_are_read(tmp_path: Path) -> None:
    sgm, sums = tmp_path / "x.sgm", tmp_path / "MD5SUMS"
    sgm.write_text('<refset>\n<seg id="1"> one &amp; </seg>\n<SEG id="2">two\nlines</SEG>\n</refset>')
    sums.write_text(f"{'A' * 32} *a.tgz\n\n{'b' * 32}  b c.tgz \n")
    assert wmt.read_sgm(sgm) == ["one &amp;", "two lines"]
    assert wmt.listed_sums(tmp_path) == {"a.tgz": "a" * 32, "b c.tgz": "b" * 32}
    sgm.write_text("nothing")
    sums.write_text("\nMD5 (a.tgz) = 1\n")
    for read, path, problem in ((wmt.read_sgm, sgm, "has no <seg>"), (wmt.listed_sums, tmp_path, "line 2")):
        with pytest.raises(Problem, match=problem):
            read(path)


# -- orders ---------------------------------------------------------------------------------------------------


def lengths_of_text(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    # Log-normal lengths of news text: 25 tokens on average, the target in proportion
    random = np.random.RandomState(0)
    source = np.clip(np.exp(random.randn(pairs) * 0.6 + 3.0), 1, 120).astype(np.int32)
    return source, np.clip(source * np.exp(random.randn(pairs) * 0.2) + 1, 1, 120).astype(np.int32)


def padding(order: orders.Order, source: np.ndarray, target: np.ndarray) -> list[float]:
    # Fraction of each batch that is padding, both sides together, EOS included
    batches = [order.sentences[begin:end] for begin, end in pairwise(order.bounds)]
    lengths = [np.stack((source[batch], target[batch])) + 1 for batch in batches]
    return [float(1 - pair.sum() / (pair.max(axis=1).sum() * pair.shape[1])) for pair in lengths]


LENGTHS = lengths_of_text(4000)
ORDERS: dict[str, tuple[Callable[..., orders.Order], dict[str, int]]] = {
    "buckets, 1 rank": (orders.by_sentences, {"batch_size": 16, "ranks": 1, "longest": 75}),
    "buckets, 3 ranks": (orders.by_sentences, {"batch_size": 16, "ranks": 3, "longest": 75}),
    "shards": (orders.by_shards, {"batch_size": 16, "ranks": 2, "longest": 50, "shard_size": 10}),
    "lengths": (orders.by_shards, {"batch_size": 16, "ranks": 2, "longest": 50}),
    "tokens, multiples": (orders.by_tokens, {"tokens": 1024, "ranks": 2, "longest": 80, "length_multiple": 2}),
    "tokens": (orders.by_tokens, {"tokens": 1024, "ranks": 2, "longest": 80, "multiple": 1}),
}
# Steps, pairs and checksum of the orders of two epochs, which a resumed run computes again
RECORDED: dict[str, tuple[int, int, str]] = {
    "buckets, 1 rank": (243, 3888, "1242cc62d78b717c57f07ac2b4a63ab7"),
    "buckets, 3 ranks": (79, 3792, "498cc30bb11c8713abb16da88e4dee5b"),
    "shards": (113, 3616, "1649b337930feda1f1d0af51624f8d6c"),
    "lengths": (113, 3616, "bd405363fa7d6a390b6077459f699eaa"),
    "tokens, multiples": (64, 3915, "c8d4c4e48cbd0f7e71a9a73129e41f57"),
    "tokens": (59, 3926, "7cfab288dccb1f0c24c0da3fff7dca81"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_equal_the_recorded_ones(name: str) -> None:
    rule, options = ORDERS[name]
    source, target = LENGTHS
    first, second = (rule(source, target, seed=(1 << 33) + 3, epoch=epoch, **options) for epoch in (0, 1))
    content = b"".join(
        np.int64(part).tobytes() for order in (first, second) for part in (order.sentences, order.bounds)
    )
    assert (first.steps, len(first.sentences), hashlib.md5(content).hexdigest()) == RECORDED[name]
    assert second.steps == first.steps and second.sentences.tolist() != first.sentences.tolist()
    assert len(set(first.sentences.tolist())) == len(first.sentences)
    ranks, bounds = options["ranks"], first.bounds
    assert len(bounds) == first.steps * ranks + 1
    last_of_step_1 = first.sentences[bounds[2 * ranks - 1] : bounds[2 * ranks]]
    assert first.batch(1, ranks - 1, ranks).tolist() == last_of_step_1.tolist()
    assert np.maximum(source, target)[first.sentences].max() == options["longest"] - (1 if "tokens" in options else 2)
    assert np.mean(padding(first, source, target)) < (0.15 if "tokens" in options else 0.4)


def test_sorting_by_both_lengths_reduces_padding() -> None:
    # Independent lengths, as in the set for measuring the speed of a step
    source, target = np.random.RandomState(0).randint(4, 50, (2, 1 << 14)).astype(np.int32)
    size = {"batch_size": 256, "ranks": 2, "seed": 0, "epoch": 0, "longest": 75}
    shares = [
        np.mean(padding(rule(source, target, **size), source, target))
        for rule in (orders.by_sentences, orders.by_shards)
    ]
    assert shares == pytest.approx([0.32, 0.12], abs=0.02)


def test_batches_of_tokens_have_limited_padding() -> None:
    # A few short sources with very long targets among many short pairs
    source, target = np.full(500, 5, np.int32), np.full(500, 5, np.int32)
    target[::50] = 70
    order = orders.by_tokens(source, target, tokens=2048, ranks=1, seed=0, epoch=0, longest=100)
    assert max(padding(order, source, target)) <= orders.MOST_PADDING
    assert sorted(order.sentences) == list(range(500))


@pytest.mark.parametrize(("count", "ranks", "sizes"), [(1, 2, [1, 0]), (7, 2, [4, 3]), (100, 3, [17] * 4 + [16] * 2)])
def test_evaluation_has_every_sentence_once(count: int, ranks: int, sizes: list[int]) -> None:
    lengths = LENGTHS[0][:count]
    order = orders.for_evaluation(lengths, batch_size=17, ranks=ranks)
    assert (sorted(order.sentences), order.steps) == (list(range(count)), len(sizes) // ranks)
    assert np.diff(order.bounds).tolist() == sizes
    assert (np.diff(lengths[order.sentences]) <= 0).all()


SIZE = {"batch_size": 32, "ranks": 2, "longest": 75}


@pytest.mark.parametrize(
    ("rule", "options", "problem"),
    [
        (orders.by_sentences, SIZE, "no bucket of 20 pairs has the 64 of a step"),
        (orders.by_shards, {**SIZE, "shard_size": 1}, "fewer than the 64 of a step"),
        (orders.by_tokens, {"tokens": 4096, "ranks": 9, "longest": 120}, "for 9 ranks"),
        (orders.by_tokens, {"tokens": 64, "ranks": 1, "longest": 75}, "pairs of up to 75 positions in batches of 64"),
    ],
)
def test_too_few_pairs_are_refused(rule: Callable[..., orders.Order], options: dict[str, int], problem: str) -> None:
    with pytest.raises(Problem, match=problem):
        rule(LENGTHS[0][:20], LENGTHS[1][:20], seed=0, epoch=0, **options)


# -- BLEU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "hypotheses", "references", "expected"),
    [
        # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples, 0 of 3 fours, which count as half a match
        (bleu.plain_score, ["a b c x e f"], ["a b c d e f"], 100 * (5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25),
        # Brevity penalty: four of eight words, all of them correct
        (bleu.plain_score, ["a b c d"], ["a b c d e f g h"], 100 * np.exp(1 - 2)),
        (bleu.plain_score, [""], ["a b"], 0),
        (bleu.tokenized_score, ["The 3,000-year-old House!"], ["the 3,000 - year - old house !"], 100),
        # v0.5 never matches <unk>: 5 of 6 words, 4 of 5 pairs, 3 of 4 triples, 2 of 3 fours
        (bleu.fairseq_score, ["the house on the hill <unk>"], ["The house on the hill <unk>"],
         100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25),
        # v0.5 keeps punctuation at its word, and scores 0 if no fours match
        (bleu.fairseq_score, ["a b c d."], ["a b c d ."], 0),
        # In v0.5 the end of an empty line is a word: 4 of 5 words match, and 5 are shorter than 6
        (bleu.fairseq_score, ["a b c d", ""], ["a b c d", "e f"], 100 * (4 / 5) ** 0.25 * np.exp(1 - 6 / 5)),
    ],
)  # fmt: skip
def test_bleu_by_hand(score: Any, hypotheses: list[str], references: list[str], expected: float) -> None:
    assert score(hypotheses, references) == pytest.approx(expected)


def test_words_of_bleu() -> None:
    # In v0.6 and v0.7 a backslash splits nothing: it escapes a bracket in the class of punctuation
    split = bleu.split_words(r"a state-of-the-art 3.5 % a\ub, [c]")
    assert split == ["a", "state", "-", "of", "-", "the", "-", "art", "3.5", "%", r"a\ub", ",", "[", "c", "]"]
    with pytest.raises(ValueError, match="1 hypotheses for 2 references"):
        bleu.plain_score(["a"], ["a", "b"])


# -- in the environment of the framework --------------------------------------------------------------------------


def test_raw_text_is_tokenized_and_split(tmp_path: Path, pytorch_python: Path) -> None:
    # Repeated sentences, so that there are pairs to merge
    raw = write_text(tmp_path / "raw", [line.replace("@@ ", "") for line in EN * 5], DE * 5)
    (raw / "test.en").write_text(lines_of(*REVERSED["en"][:3]) + "times 3,000 raining is it\n")

    def run(*words: object) -> tuple[int, preparing.Lines]:
        command = [
            str(word) for word in (pytorch_python, "-m", "benchmarks.gnmt.prepare", "--progress", "json", *words)
        ]
        done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    code, lines = run(raw, "-o", tmp_path / "to", "--merges", 60)
    assert code == 0, lines
    dataset, codes = open_data(tmp_path / "to"), (tmp_path / "to" / CODES).read_text().splitlines()
    assert (dataset.manifest["facts"]["detokenized"], dataset.references) == (True, REVERSED["de"])
    assert (codes[:4], len(codes)) == (["#version: 0.2", "m a", "i n", "e s</w>"], 61)
    assert words.join_bpe(token_lists(dataset, "source")[3]) == "it is raining 3,000 times"
    # The text that these codes split is accepted with them, and refused with other codes
    split = tmp_path / "split"
    split.mkdir()
    for part in ("train", "test"):
        for name, side in (("en", "source"), ("de", "target")):
            (split / f"{part}.{name}").write_text(lines_of(*map(" ".join, token_lists(dataset, side, part))))
    shutil.copy(tmp_path / "to" / CODES, split / "codes")
    assert run(split, "-o", tmp_path / "again")[0] == 0
    for name in ("train_source.npy", VOCABULARY):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "to" / name).read_bytes()
    (split / "codes").write_text("#version: 0.2\nh o\no u\n")
    message = refused(run(split, "-o", tmp_path / "other"))
    assert "splits into " in message and "the codes that the text was split by" in message
