"""Parallel text: the toy language, aligned files, WMT's archives, orders of batches, BLEU, and bad input."""

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
# Other lines of the same words: what is tested on is not trained on.
TURNED = {"en": [" ".join(line.split()[::-1]) for line in EN], "de": [" ".join(line.split()[::-1]) for line in DE]}
run = partial(preparing.run, "gnmt")


def lines_of(*texts: str) -> str:
    return "".join(text + "\n" for text in texts)


def write_text(folder: Path, source: list[str], target: list[str]) -> Path:
    folder.mkdir()
    for name, train in (("en", source), ("de", target)):
        (folder / f"train.{name}").write_text(lines_of(*train))
        (folder / f"test.{name}").write_text(lines_of(*TURNED[name]))
    return folder


@pytest.fixture
def split(tmp_path: Path) -> Path:
    # Aligned files whose words are split already, so that no package is needed to prepare them.
    return write_text(tmp_path / "raw", EN, DE)


def digest(folder: Path) -> str:
    # Checksum of all that is prepared.
    found = hashlib.sha256()
    for name in FILES:
        found.update(name.encode() + (folder / name).read_bytes())
    return found.hexdigest()


# -- the toy set -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("toy")
    assert run("-o", to / "gnmt", workers=2)[0] == 0
    return to / "gnmt"


@pytest.fixture(scope="module")
def toy(toy_folder: Path) -> DataSet:
    return open_data(toy_folder)


@pytest.mark.slow
def test_the_toy_set_is_the_same_everywhere(toy_folder: Path, tmp_path: Path) -> None:
    # Any benchmark, any number of workers, any machine: published qualities of this set depend on it.
    assert preparing.run("transformer", "-o", tmp_path / "transformer")[0] == 0
    assert digest(tmp_path / "transformer") == digest(toy_folder)
    assert digest(toy_folder) == "6755eadc4ff2ba7135b37e673577b995c2b7ac651b894eeb81f4289fd5fe17f1"


@pytest.mark.slow
def test_one_source_has_one_translation_and_copying_it_is_none(toy: DataSet) -> None:
    text = toy.vocabulary.text
    pairs = [(text(toy.train.source[place]), text(toy.train.target[place])) for place in range(len(toy.train))]
    assert len(dict(pairs)) == len(pairs) == 8000 and not set(dict(pairs)) & set(toy.sources)
    assert [text(toy.test.target[place]) for place in range(400)] == toy.references
    assert bleu.tokenized_score(toy.sources, toy.references) < 5
    assert bleu.tokenized_score(toy.references, toy.references) == pytest.approx(100)


@pytest.mark.slow
def test_a_set_is_verified_to_its_last_byte(toy_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy_folder, tmp_path / "copy"))
    assert run("--verify", folder)[0] == 0
    data = bytearray((folder / "train_target.npy").read_bytes())
    data[-1] ^= 1
    (folder / "train_target.npy").write_bytes(data)
    assert "train_target.npy has changed" in refused(run("--verify", folder))
    (folder / REFERENCES).write_text("one line\n")
    with pytest.raises(Problem, match=r"9 bytes in test_references\.txt"):
        open_data(folder)
    (folder / REFERENCES).unlink()
    with pytest.raises(Problem, match=r"test_references\.txt"):
        open_data(folder)
    (folder / "train_source.npy").write_bytes(b"")
    with pytest.raises(Problem, match="prepare it again"):
        open_data(folder)


# -- aligned files ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pairs_are_cleaned_and_compressed_files_are_as_good(split: Path, tmp_path: Path) -> None:
    for name, extra in (("en", "\nword\n" + "many " * 11 + "\none\r\n"), ("de", "wort\n \nviele\n\ufeffeins")):
        with (split / f"train.{name}").open("a", encoding="utf-8") as file:
            file.write(extra)
    code, lines = run(split, "-o", tmp_path / "to", "--longest", 10)
    assert code == 0, lines
    left_out = f"left out of training: 2 empty, 1 too long; the first is line 5 of {split}/train.en and train.de"
    assert [line["note"] for line in lines if "note" in line] == [left_out]
    found = open_data(tmp_path / "to")
    sentences = [found.vocabulary.tokens(found.train.source[place]) for place in range(5)]
    assert sentences == [line.split() for line in [*EN, "one"]]
    assert found.vocabulary.text(found.train.source[3]) == "it is raining 3,000 times"
    assert (found.vocabulary.tokens(found.train.target[4]), found.references) == (["eins"], TURNED["de"])
    assert found.vocabulary.entries[:9] == (*words.SPECIAL, ".", ",", "the", "3,000", "3.000")
    assert found.passport["facts"] == {
        "source_language": "en", "target_language": "de", "vocabulary": found.vocabulary.size, "kind": "bpe",
        "detokenized": False, "tokens": {"train": [24, 21], "test": [23, 20]},
    }  # fmt: skip
    for path in split.iterdir():
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    options = ("--longest", 10, "--languages", "de", "en")
    assert run(split, "-o", tmp_path / "other", *options)[0] == 0
    other = open_data(tmp_path / "other")
    assert (other.source_language, other.references) == ("de", [line.replace("@@ ", "") for line in TURNED["en"]])
    assert other.train.target.tokens.tolist() == found.train.source.tokens.tolist()


TRAIN = {name: lines_of(*lines).encode() for name, lines in (("en", EN), ("de", DE))}
GREEN = "ein gr\xfcnes haus\n".encode("latin1")
TWO_TESTS = {f"test.{year}.{name}": TRAIN[name] for year in (2016, 2017) for name in TRAIN}
# Files that are written (nothing: removed), options, and what the refusal has.
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
    # DE has a letter that is UTF-8, EN none: what converts one file would spoil the other.
    "lines in another encoding": (
        {"train.de": TRAIN["de"] + GREEN * 25, "train.en": TRAIN["en"] + b"a house\n" * 25}, (),
        ("/train.de: lines that are not UTF-8: 25\n    line 5: byte 0xfc at 7\n",
         "line 24: byte 0xfc at 7\n    and 5 more", "do not convert the others")),
    "another encoding": (
        {"train.de": TRAIN["de"].decode().encode("latin1")}, (),
        ("not UTF-8: 1\n    line 1: byte 0xdf at 13", "iconv -f latin1")),
    # A message names what the user has, and not what it was unpacked to.
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
    files, options, expected = BAD[kind]
    for name, content in files.items():
        (split / name).write_bytes(content) if content is not None else (split / name).unlink()
    found = refused(run(split, "-o", tmp_path / "to", *options))
    assert [each for each in expected if each not in found] == [], found
    assert not (tmp_path / "to" / "dataset.json").exists()


def test_blocks_cover_every_line(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for count, end in ((0, ""), (1, ""), (1, "\n"), (5, "\n"), (6, "\n"), (6, ""), (7, "")):
        lines = [f"line {number}" for number in range(count)]
        path.write_text("\n".join(lines) + (end if count else ""))
        total, offsets = stages.line_offsets(path, 3, lambda size: None)
        assert total == count
        assert [path.read_bytes()[each:].split(b"\n")[0].decode() for each in offsets] == (lines[::3] or [""])


# -- tokens ------------------------------------------------------------------------------------------------------


def test_codes_that_are_none_or_of_another_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "codes"
    for text, found in (("#version: 0.2\na b\na b c\n", "line 3: 'a b c'"), ("", "line 1: ''")):
        path.write_text(text)
        with pytest.raises(Problem, match=found):
            segment.check_codes(path)
    writer.check_foreign_codes(path, {"a": 200, "b": 100}, {"word": 100})
    with pytest.raises(Problem, match=r"splits a word into 3\.1 tokens on average"):
        writer.check_foreign_codes(path, {"a": 310}, {"word": 100})


def test_special_entries_have_the_ids_of_the_constants() -> None:
    known = Vocabulary((*words.SPECIAL, "a@@", "b"))
    assert [known.entries[each] for each in (PAD, UNK, BOS, EOS)] == list(words.SPECIAL)
    texts = [known.text(ids) for ids in ([BOS, 4, 5, 5, EOS, 4], [5, 4, PAD], [UNK, 99, 6])]
    assert texts == ["ab b", "b a", "<unk> <unk> <unk>"]
    assert (known.size, known.padded(8), known.padded(6)) == (6, 8, 6)


ENTRIES = ["the_", ", _", "_", "._", "ho", "use_", *"abcdefghijklmnopqrstuvwxyz3\\;0123456789 _,.\n"]


def test_subtokens_give_every_line_back() -> None:
    cut = Subtokens((*words.SPECIAL, *dict.fromkeys(ENTRIES)))
    known = Vocabulary((*words.SPECIAL, *dict.fromkeys(ENTRIES)), SUBTOKENS)
    lines = ["the house, the mouse.", "a_b \\ c", "3,000 - über", "the house", "über_"]
    assert [known.text(cut.encode(line)) for line in lines] == lines
    assert [known.entries[each] for each in cut.encode("the house")] == ["the_", "ho", "use_"]
    assert split_tokens("ab, cd  e") == ["ab", ", ", "cd", "  ", "e"]
    # As the submission compares it: what is escaped stays, and no white space is inside of a token.
    assert known.joined(cut.encode("a_b \\ c , d ,\\")) == r"a \u b \\ c, d,\\"
    assert Subtokens((*words.SPECIAL, "a", "_")).encode("ab") == [4, 1, 1, 1, 1, 5]


def test_a_dictionary_is_read_as_the_submission_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "dictionary"
    path.write_text("'<pad>_'\n'<EOS>_'\n', _'\n'''\n'the_'\n")
    assert read_dictionary(path) == [", _", "'", "the_"]
    for text, found in (("'the_'\nthe_\n", "line 2: 'the_'"), ("'the_'\n'the_'\n", "line 2: \"'the_'\" again")):
        path.write_text(text)
        with pytest.raises(Problem, match=found):
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
    # WMT17's archives with a line each, and a dictionary.
    folder = tmp_path / "wmt"
    folder.mkdir()
    for number, each in enumerate(wmt.CORPORA["wmt17"]):
        texts = {"en": f"house {number}", "de": f"haus {number}"}
        pack(folder / each.archives[0], {f"deep/{each.stem}.{code}": lines_of(text) for code, text in texts.items()})
    for code in wmt.LANGUAGES:
        (folder / f"{wmt.TEST}.{code}").write_text(lines_of("house"))
    entries = ["<pad>_", "<EOS>_", *"abcdefghijklmnopqrstuvwxyz_ 0123456789;\\"]
    (folder / "reference_dictionary.ende.txt").write_text(lines_of(*(f"'{each}'" for each in entries)))
    return folder


@pytest.fixture
def known(archives: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The archives with their newstest2014 as the known one.
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in archives.glob(f"{wmt.TEST}.??")}
    monkeypatch.setattr(wmt, "KNOWN_MD5", sums)
    return archives


def test_archives_are_joined_in_the_submitted_order(known: Path, tmp_path: Path) -> None:
    code, lines = preparing.run("transformer", known, "-o", tmp_path / "to")
    assert code == 0, lines
    found = open_data(tmp_path / "to")
    assert [found.vocabulary.text(found.train.target[place]) for place in range(3)] == ["haus 0", "haus 1", "haus 2"]
    facts = found.passport["name"], found.references, found.passport["facts"]["kind"], found.vocabulary.size
    assert facts == ("own data", ["house"], SUBTOKENS, 44)
    assert not list(tmp_path.rglob("evil*"))


CRAWL = "training-parallel-commoncrawl.tgz"
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, f"lacks {CRAWL} (http://www.statmt.org/wmt13/"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-40]), f"{CRAWL} is damaged: "),
    # Another byte of gzip's checksum.
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
def test_archives_that_cannot_be_used_are_named(kind: str, known: Path, tmp_path: Path) -> None:
    change, expected = DAMAGED[kind]
    change(known / CRAWL)
    assert expected in refused(preparing.run("transformer", known, "-o", tmp_path / "to"))


def test_a_test_part_with_another_checksum_is_refused(archives: Path, tmp_path: Path) -> None:
    found = refused(preparing.run("transformer", archives, "-o", tmp_path / "to"))
    assert "newstest2014.en has md5 " in found
    assert "dabf51a9c02b2235632f3cee75c72d49, as verify_dataset.sh of v0.5 has it" in found


def test_sgm_and_lists_of_checksums_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.sgm"
    path.write_text('<refset>\n<seg id="1"> one &amp; </seg>\n<SEG id="2">two\nlines</SEG>\n</refset>')
    assert wmt.read_sgm(path) == ["one &amp;", "two lines"]
    (tmp_path / "MD5SUMS").write_text(f"{'A' * 32} *a.tgz\n\n{'b' * 32}  b c.tgz \n")
    assert wmt.listed_sums(tmp_path) == {"a.tgz": "a" * 32, "b c.tgz": "b" * 32}
    path.write_text("nothing")
    (tmp_path / "MD5SUMS").write_text("\nMD5 (a.tgz) = 1\n")
    for read, place, found in ((wmt.read_sgm, path, "has no <seg>"), (wmt.listed_sums, tmp_path, "line 2")):
        with pytest.raises(Problem, match=found):
            read(place)


# -- orders ---------------------------------------------------------------------------------------------------


def lengths_of_text(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    # Lengths as of news text: 25 tokens on average, the target in proportion.
    random = np.random.RandomState(0)
    source = np.clip(np.exp(random.randn(pairs) * 0.6 + 3.0), 1, 120).astype(np.int32)
    target = np.clip(source * np.exp(random.randn(pairs) * 0.2) + 1, 1, 120).astype(np.int32)
    return source, target


def padding(order: orders.Order, source: np.ndarray, target: np.ndarray) -> list[float]:
    # Share of each batch that is padding, both sides together, EOS included.
    shares = []
    for begin, end in pairwise(order.bounds):
        sides = [side[order.sentences[begin:end]] + 1 for side in (source, target)]
        shares.append(1 - sum(each.sum() for each in sides) / sum(len(each) * each.max() for each in sides))
    return shares


LENGTHS = lengths_of_text(4000)
ORDERS: dict[str, tuple[Callable[..., orders.Order], dict[str, int]]] = {
    "buckets, 1 rank": (orders.by_sentences, {"batch_size": 16, "ranks": 1, "longest": 75}),
    "buckets, 3 ranks": (orders.by_sentences, {"batch_size": 16, "ranks": 3, "longest": 75}),
    "shards": (orders.by_shards, {"batch_size": 16, "ranks": 2, "longest": 50, "shard_size": 10}),
    "lengths": (orders.by_shards, {"batch_size": 16, "ranks": 2, "longest": 50}),
    "tokens, multiples": (orders.by_tokens, {"tokens": 1024, "ranks": 2, "longest": 80, "length_multiple": 2}),
    "tokens": (orders.by_tokens, {"tokens": 1024, "ranks": 2, "longest": 80, "multiple": 1}),
}
# Steps, pairs and checksum of two epochs' orders: a run that is resumed anywhere continues with the same pairs.
RECORDED: dict[str, tuple[int, int, str]] = {
    "buckets, 1 rank": (243, 3888, "1242cc62d78b717c57f07ac2b4a63ab7"),
    "buckets, 3 ranks": (79, 3792, "498cc30bb11c8713abb16da88e4dee5b"),
    "shards": (113, 3616, "1649b337930feda1f1d0af51624f8d6c"),
    "lengths": (113, 3616, "bd405363fa7d6a390b6077459f699eaa"),
    "tokens, multiples": (64, 3915, "c8d4c4e48cbd0f7e71a9a73129e41f57"),
    "tokens": (59, 3926, "7cfab288dccb1f0c24c0da3fff7dca81"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_the_recorded_ones_with_every_pair_once(name: str) -> None:
    rule, how = ORDERS[name]
    source, target = LENGTHS
    made = [rule(source, target, seed=(1 << 33) + 3, epoch=epoch, **how) for epoch in (0, 1)]
    content = b"".join(np.int64(each).tobytes() for order in made for each in (order.sentences, order.bounds))
    first, other = made
    assert (first.steps, len(first.sentences), hashlib.md5(content).hexdigest()) == RECORDED[name]
    assert other.steps == first.steps and other.sentences.tolist() != first.sentences.tolist()
    assert len(set(first.sentences.tolist())) == len(first.sentences)
    assert len(first.bounds) == first.steps * how["ranks"] + 1
    assert first.batch(1, how["ranks"] - 1, how["ranks"]).tolist() == (
        first.sentences[first.bounds[2 * how["ranks"] - 1] : first.bounds[2 * how["ranks"]]].tolist()
    )
    assert np.maximum(source, target)[first.sentences].max() == how["longest"] - (1 if "tokens" in how else 2)
    assert np.mean(padding(first, source, target)) < (0.15 if "tokens" in how else 0.4)


def test_pairs_sorted_by_both_lengths_have_little_padding_on_either_side() -> None:
    # Lengths that have nothing to do with each other, as in the set that the speed of a step is measured on.
    source, target = np.random.RandomState(0).randint(4, 50, (2, 1 << 14)).astype(np.int32)
    size = {"batch_size": 256, "ranks": 2, "seed": 0, "epoch": 0, "longest": 75}
    made = (rule(source, target, **size) for rule in (orders.by_sentences, orders.by_shards))
    assert [np.mean(padding(order, source, target)) for order in made] == pytest.approx([0.32, 0.12], abs=0.02)


def test_no_batch_of_tokens_is_padding_for_the_most_part() -> None:
    # A few short sources with very long targets among many pairs that are short on both sides.
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


def test_too_little_data_is_refused() -> None:
    source, target = (each[:20] for each in LENGTHS)
    size = {"batch_size": 32, "ranks": 2, "longest": 75}
    for rule, how, found in (
        (orders.by_sentences, size, "no bucket of 20 pairs has the 64 of a step"),
        (orders.by_shards, {**size, "shard_size": 1}, "fewer than the 64 of a step"),
        (orders.by_tokens, {"tokens": 4096, "ranks": 9, "longest": 120}, "for 9 ranks"),
        (orders.by_tokens, {"tokens": 64, "ranks": 1, "longest": 75}, "pairs of up to 75 positions in batches of 64"),
    ):
        with pytest.raises(Problem, match=found):
            rule(source, target, seed=0, epoch=0, **how)


# -- BLEU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "pair", "wanted"),
    [
        # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples, none of 3 fours: which counts as half a match.
        (bleu.plain_score, ("a b c x e f", "a b c d e f"), 100 * (5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25),
        # Four of eight words, all right: the brevity penalty alone.
        (bleu.plain_score, ("a b c d", "a b c d e f g h"), 100 * np.exp(1 - 2)),
        (bleu.plain_score, ("", "a b"), 0),
        (bleu.tokenized_score, ("The 3,000-year-old House!", "the 3,000 - year - old house !"), 100),
        # v0.5 matches no unknown word of a reference: 5 of 6 words, 4 of 5 pairs, 3 of 4 triples, 2 of 3 fours.
        (bleu.fairseq_score, ("the house on the hill <unk>", "The house on the hill <unk>"),
         100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25),
        # Marks stay with their words, and an order without matches leaves nothing.
        (bleu.fairseq_score, ("a b c d.", "a b c d ."), 0),
    ],
)  # fmt: skip
def test_bleu_by_hand(score: Any, pair: tuple[str, str], wanted: float) -> None:
    assert score([pair[0]], [pair[1]]) == pytest.approx(wanted)


def test_words_and_lines_are_those_of_the_submissions() -> None:
    # A line without words has its end as one in v0.5: 4 of 5 words match, and 5 are short of 6.
    found = bleu.fairseq_score(["a b c d", ""], ["a b c d", "e f"])
    assert found == pytest.approx(100 * (4 / 5) ** 0.25 * np.exp(1 - 6 / 5))
    split = bleu.split_words(r"a state-of-the-art 3.5 % a\ub, [c]")
    # A backslash splits nothing in v0.6 and v0.7: it escapes a bracket in the class of punctuation.
    assert split == ["a", "state", "-", "of", "-", "the", "-", "art", "3.5", "%", r"a\ub", ",", "[", "c", "]"]
    with pytest.raises(ValueError, match="1 hypotheses for 2 references"):
        bleu.plain_score(["a"], ["a", "b"])


# -- with the packages of the framework's environment -------------------------------------------------------------


def test_raw_text_is_tokenized_and_split(tmp_path: Path, pytorch_python: Path) -> None:
    # The same sentences many times so that there is something to merge.
    raw = write_text(tmp_path / "raw", [line.replace("@@ ", "") for line in EN * 5], DE * 5)
    (raw / "test.en").write_text(lines_of(*TURNED["en"][:3]) + "times 3,000 raining is it\n")
    prepare = [pytorch_python, "-m", "benchmarks.gnmt.prepare", "--progress", "json"]

    def run(*words: object) -> tuple[int, preparing.Lines]:
        command = [str(word) for word in (*prepare, *words)]
        done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    code, lines = run(raw, "-o", tmp_path / "to", "--merges", 60)
    assert code == 0, lines
    found = open_data(tmp_path / "to")
    codes = (tmp_path / "to" / CODES).read_text().splitlines()
    assert found.passport["facts"]["detokenized"] is True and found.references == TURNED["de"]
    assert (codes[:4], len(codes)) == (["#version: 0.2", "m a", "i n", "e s</w>"], 61)
    words_of = words.join_bpe(found.vocabulary.tokens(found.train.source[3]))
    assert words_of == "it is raining 3,000 times"
    # Codes that split this text are taken for it, and refused for a text that they do not split so.
    split = tmp_path / "split"
    split.mkdir()
    for part, pairs in (("train", found.train), ("test", found.test)):
        for name, sentences in (("en", pairs.source), ("de", pairs.target)):
            tokens = [" ".join(found.vocabulary.tokens(sentences[place])) for place in range(len(sentences))]
            (split / f"{part}.{name}").write_text(lines_of(*tokens))
    shutil.copy(tmp_path / "to" / CODES, split / "codes")
    assert run(split, "-o", tmp_path / "again")[0] == 0
    for name in ("train_source.npy", VOCABULARY):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "to" / name).read_bytes()
    (split / "codes").write_text("#version: 0.2\nh o\no u\n")
    text = refused(run(split, "-o", tmp_path / "other"))
    assert "splits into " in text and "the codes that the text was split by" in text
