"""Parallel text: the toy language, aligned files, WMT's archives, batches, BLEU, and bad input."""

import gzip
import hashlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.translation import CODES, FILES, REFERENCES, bleu, orders, stages, wmt, writer
from benchmarks.translation import vocabulary as words
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.segment import Subtokens, read_dictionary, split_tokens
from benchmarks.translation.vocabulary import SUBTOKENS, Vocabulary
from tests import preparing
from tests.preparing import check_refusal, notes, prepared, ran, write_files

EN = ["the cat sat on the mat .", "dogs bark , cats do not .", "a small house", "it is rain@@ ing 3,000 times"]
DE = ["die katze saß auf der matte .", "hunde bellen , katzen nicht .", "ein kleines haus", "es regnet 3.000 mal"]
# The same words in reverse order, so that test lines are not training lines
REVERSED = {name: [" ".join(line.split()[::-1]) for line in lines] for name, lines in (("en", EN), ("de", DE))}
run = partial(preparing.run, "gnmt")


def lines_of(*texts: str) -> str:
    return "".join(text + "\n" for text in texts)


# Aligned files of words that are split already, which no package is needed for
RAW = {
    "train.en": lines_of(*EN), "train.de": lines_of(*DE),
    "test.en": lines_of(*REVERSED["en"]), "test.de": lines_of(*REVERSED["de"]),
}  # fmt: skip


def token_lists(dataset: DataSet, side: str, part: str = "train") -> list[list[str]]:
    pairs = getattr(dataset, part)
    return [dataset.vocabulary.tokens(getattr(pairs, side)[number]) for number in range(len(pairs))]


# -- the toy set -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("toy") / "gnmt"
    notes(run("-o", to, workers=2))
    return to


@pytest.mark.slow
def test_toy_set_is_the_same_everywhere(toy_folder: Path) -> None:
    # The published qualities of this set depend on it
    notes(run("--verify", toy_folder))
    content = b"".join(name.encode() + (toy_folder / name).read_bytes() for name in FILES)
    assert hashlib.sha256(content).hexdigest() == "6755eadc4ff2ba7135b37e673577b995c2b7ac651b894eeb81f4289fd5fe17f1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (REFERENCES, "one line\n", r"9 bytes in test_references\.txt"),
        (REFERENCES, None, r"test_references\.txt"),
        ("train_source.npy", "", "prepare it again"),
    ],
)
def test_damaged_arrays_are_found(
    name: str, content: str | None, problem: str, toy_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(Problem, match=problem):
        open_data(write_files(Path(shutil.copytree(toy_folder, tmp_path / "copy")), {name: content}))


# -- aligned files ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pairs_are_cleaned_and_files_may_be_compressed(tmp_path: Path) -> None:
    more = {"train.en": "\nword\n" + "many " * 11 + "\none\r\n", "train.de": "wort\n \nviele\n\ufeffeins"}
    files = {name: text + more.get(name, "") for name, text in RAW.items()}
    raw = write_files(tmp_path / "raw", files)
    noted = notes(run(raw, "-o", tmp_path / "to", "--longest", 10))
    assert noted == f"excluded from training: 2 empty, 1 too long; the first is line 5 of {raw}/train.en and train.de"
    first = open_data(tmp_path / "to")
    sides = token_lists(first, "source"), token_lists(first, "target")[4], first.vocabulary.text(first.train.source[3])
    assert (*sides, first.vocabulary.entries[:9]) == (
        [line.split() for line in [*EN, "one"]], ["eins"], "it is raining 3,000 times",
        (*words.SPECIAL, ".", ",", "the", "3,000", "3.000"),
    )  # fmt: skip
    assert (first.references, first.manifest["facts"]) == (REVERSED["de"], {
        "source_language": "en", "target_language": "de", "vocabulary": first.vocabulary.size, "kind": "bpe",
        "detokenized": False, "tokens": {"train": [24, 21], "test": [23, 20]},
    })  # fmt: skip
    packed = write_files(tmp_path / "gz", {f"{name}.gz": gzip.compress(text.encode()) for name, text in files.items()})
    second = open_data(prepared("gnmt", packed, tmp_path / "de-en", "--longest", 10, "--languages", "de", "en"))
    assert (second.source_language, second.references, second.train.target.tokens.tolist()) == (
        "de", [line.replace("@@ ", "") for line in REVERSED["en"]], first.train.source.tokens.tolist(),
    )  # fmt: skip


GREEN = "ein gr\xfcnes haus\n".encode("latin1")
# Files to change, options, and parts of the error message
BAD: dict[str, tuple[preparing.Files, tuple[str, ...], tuple[str, ...]]] = {
    "lines": (
        {"train.de": RAW["train.de"] + "eine\n"}, (), ("train.en has 4 lines, ", "train.de has 5", "restore both")),
    "empty test": (
        {"test.en": b"a\nx\n", "test.de": b"b\n\n"}, (),
        ("line 2 of", "test.en and test.de is empty", "remove the pair from both files")),
    "overlap": ({"test.en": b"a small house\n", "test.de": b"ein kleines haus\n"}, (), ("1 of 1 evaluation pairs",)),
    "nothing left": ({}, ("--longest", "1"), ("no training pairs remain: 4 too long; the first is line 1",)),
    "no train": ({"train.de": None}, (), ("has train.en", "train.XX and train.YY")),
    "no test": ({"test.en": None, "test.de": None}, (), ("has train alone", "add test.en and test.de")),
    "two tests": (
        {"test.en": None, "test.de": None, "test.2016.en": "a\n", "test.2016.de": "b\n", "test.2017.en": "c\n",
         "test.2017.de": "d\n"}, (), ("add --test test.2016",)),
    "three languages": ({"train.fr": b"le\n"}, (), ("text in de, en, fr", "--languages")),
    "not these languages": ({}, ("--languages", "en", "fr"), ("train.fr", "name other --languages")),
    "subtokens": ({}, ("--tokens", "subtokens"), ("is split by BPE", "add --tokens bpe")),
    # DE has a letter in UTF-8: converting the file would damage it
    "lines in another encoding": (
        {"train.de": RAW["train.de"].encode() + GREEN * 25, "train.en": RAW["train.en"] + "a house\n" * 25}, (),
        ("/train.de: lines that are not UTF-8: 25\n    line 5: byte 0xfc at 7\n",
         "line 24: byte 0xfc at 7\n    and 5 more", "do not convert the others")),
    "another encoding": (
        {"train.de": RAW["train.de"].encode("latin1")}, (),
        ("not UTF-8: 1\n    line 1: byte 0xdf at 13", "iconv -f latin1")),
    # Messages name the file of the user, not its unpacked copy
    "encoding, packed": (
        {"train.de": None, "train.de.gz": gzip.compress(GREEN * 4)}, (), ("train.de.gz: lines that are not UTF-8: 4",)),
    "cut gzip": (
        {"train.de": None, "train.de.gz": gzip.compress(RAW["train.de"].encode())[:-9]}, (),
        ("train.de.gz is damaged",)),
    "no gzip": ({"train.de": None, "train.de.gz": b"no gzip"}, (), ("train.de.gz is damaged",)),
    "gzip without a name": ({"train.de": gzip.compress(b"x")}, (), ("train.de is compressed by gzip", "gunzip")),
    "bzip2": ({"train.de": b"BZh9"}, (), ("train.de is compressed by bzip2",)),
    "bzip2 with its suffix": (
        {"train.de": None, "train.de.bz2": b"BZh9"}, (), ("train.de.bz2 is compressed by bzip2", "bunzip2")),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_with_a_hint(kind: str, tmp_path: Path) -> None:
    files, options, parts = BAD[kind]
    check_refusal("gnmt", write_files(tmp_path / "raw", RAW), files, parts, *options)


@pytest.mark.parametrize(
    ("count", "end"), [(0, ""), (1, ""), (1, "\n"), (5, "\n"), (6, "\n"), (6, ""), (7, "")], ids=str
)
def test_blocks_begin_at_every_third_line(tmp_path: Path, count: int, end: str) -> None:
    path, lines = tmp_path / "text", [f"line {number}" for number in range(count)]
    path.write_text("\n".join(lines) + end)
    total, offsets = stages.line_offsets(path, 3, lambda size: None, str(path))
    first_lines = [path.read_bytes()[offset:].split(b"\n")[0].decode() for offset in offsets]
    assert (total, first_lines) == (count, lines[::3] or [""])


# -- tokens ------------------------------------------------------------------------------------------------------


def test_codes_of_another_text_are_refused(tmp_path: Path) -> None:
    writer.check_foreign_codes(tmp_path, {"a": 200, "b": 100}, {"word": 100})
    with pytest.raises(Problem, match=r"splits a word into 3\.1 tokens on average"):
        writer.check_foreign_codes(tmp_path, {"a": 310}, {"word": 100})


def test_subtokens_are_reversible() -> None:
    entries = (
        *words.SPECIAL,
        *dict.fromkeys(["the_", ", _", "_", "._", "ho", "use_", *"abcdefghijklmnopqrstuvwxyz3\\;0123456789 _,.\n"]),
    )
    subtokens, vocabulary = Subtokens(entries), Vocabulary(entries, SUBTOKENS)
    lines = ["the house, the mouse.", "a_b \\ c", "3,000 - über", "the house", "über_"]
    assert [vocabulary.text(subtokens.encode(line)) for line in lines] == lines
    assert [vocabulary.entries[number] for number in subtokens.encode("the house")] == ["the_", "ho", "use_"]
    assert split_tokens("ab, cd  e") == ["ab", ", ", "cd", "  ", "e"]
    # The submission compares escaped text without white space inside of tokens
    assert vocabulary.joined(subtokens.encode("a_b \\ c , d ,\\")) == r"a \u b \\ c, d,\\"
    assert Subtokens((*words.SPECIAL, "a", "_")).encode("ab") == [4, 1, 1, 1, 1, 5]


@pytest.mark.parametrize(
    ("read", "text", "content"),
    [
        (read_dictionary, "'<pad>_'\n'<EOS>_'\n', _'\n'''\n'the_'\n", [", _", "'", "the_"]),
        (wmt.read_sgm, '<refset>\n<seg id="1"> one &amp; </seg>\n<SEG id="2">two\nlines</SEG>\n</refset>',
         ["one &amp;", "two lines"]),
    ],
)  # fmt: skip
def test_published_files_are_read(read: Callable[[Path], object], text: str, content: object, tmp_path: Path) -> None:
    (tmp_path / "published").write_text(text)
    assert read(tmp_path / "published") == content


# -- WMT's archives ---------------------------------------------------------------------------------------------


pack = partial(preparing.pack, mode="w:gz", links=("../../evil.en", "europarl-v7.de-en.en"))


@pytest.fixture
def wmt17(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # WMT17's archives with one line each; KNOWN_MD5 has the checksums of this newstest2014
    archives = {
        corpus.archives[0]: pack(
            {f"deep/{corpus.stem}.en": b"house %d\n" % number, f"deep/{corpus.stem}.de": b"haus %d\n" % number}
        )
        for number, corpus in enumerate(wmt.CORPORA["wmt17"])
    }
    tests = {f"{wmt.TEST}.{code}": "house\n" for code in wmt.LANGUAGES}
    monkeypatch.setattr(wmt, "KNOWN_MD5", dict.fromkeys(tests, hashlib.md5(b"house\n").hexdigest()))
    entries = ["<pad>_", "<EOS>_", *"abcdefghijklmnopqrstuvwxyz_ 0123456789;\\"]
    dictionary = {"reference_dictionary.ende.txt": lines_of(*(f"'{entry}'" for entry in entries))}
    return write_files(tmp_path / "wmt", {**archives, **tests, **dictionary})


def test_archives_are_joined_in_the_submitted_order(wmt17: Path, tmp_path: Path) -> None:
    dataset = open_data(prepared("transformer", wmt17, tmp_path / "to"))
    targets = [dataset.vocabulary.text(dataset.train.target[number]) for number in range(3)]
    kind = dataset.manifest["name"], dataset.manifest["facts"]["kind"], dataset.vocabulary.size, dataset.references
    assert (targets, *kind) == (["haus 0", "haus 1", "haus 2"], "own data", SUBTOKENS, 44, ["house"])
    assert not list(tmp_path.rglob("evil*"))


CRAWL = "training-parallel-commoncrawl.tgz"
CRAWL_HAS = f"{CRAWL} is damaged: "


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({CRAWL: None}, f"lacks {CRAWL} (http://www.statmt.org/wmt13/"),
        ({CRAWL: lambda content: content[:-40]}, CRAWL_HAS),
        # Changes gzip's checksum
        ({CRAWL: lambda content: content[:-6] + b"?" + content[-5:]}, CRAWL_HAS + "CRC check failed"),
        ({CRAWL: "<html>"}, CRAWL_HAS),
        ({CRAWL: pack({"other.en": b"x\n"})}, f"{CRAWL} has no commoncrawl.de-en.de, commoncrawl.de-en.en"),
        ({"reference_dictionary.ende.txt": None}, "has no reference_dictionary.ende.txt"),
    ],
    ids=["missing", "truncated", "flipped", "no archive", "another one", "no dictionary"],
)
def test_damaged_archives_are_named(files: preparing.Files, problem: str, wmt17: Path) -> None:
    check_refusal("transformer", wmt17, files, [problem])


def test_test_part_with_another_checksum_is_refused(wmt17: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    published = "dabf51a9c02b2235632f3cee75c72d49, as verify_dataset.sh of v0.5 has it"
    check_refusal("transformer", wmt17, {}, ["newstest2014.en has md5 ", published])


# -- orders ---------------------------------------------------------------------------------------------------


def lengths_of_text(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    # Log-normal lengths of news text: 25 tokens on average, the target in proportion
    random = np.random.RandomState(0)
    source = np.clip(np.exp(random.randn(pairs) * 0.6 + 3.0), 1, 120).astype(np.int32)
    return source, np.clip(source * np.exp(random.randn(pairs) * 0.2) + 1, 1, 120).astype(np.int32)


LENGTHS = lengths_of_text(4000)


@pytest.mark.parametrize(
    ("rule", "options", "recorded"),
    # Steps, pairs and checksum of the orders of two epochs, which a resumed run computes again
    [
        (orders.by_sentences, {"batch_size": 16, "ranks": 1, "longest": 75},
         (243, 3888, "1242cc62d78b717c57f07ac2b4a63ab7")),
        (orders.by_sentences, {"batch_size": 16, "ranks": 3, "longest": 75},
         (79, 3792, "498cc30bb11c8713abb16da88e4dee5b")),
        (orders.by_shards, {"batch_size": 16, "ranks": 2, "longest": 50, "shard_size": 10},
         (113, 3616, "1649b337930feda1f1d0af51624f8d6c")),
        (orders.by_shards, {"batch_size": 16, "ranks": 2, "longest": 50},
         (113, 3616, "bd405363fa7d6a390b6077459f699eaa")),
        (orders.by_tokens, {"tokens": 1024, "ranks": 2, "longest": 80, "length_multiple": 2},
         (64, 3915, "c8d4c4e48cbd0f7e71a9a73129e41f57")),
        (orders.by_tokens, {"tokens": 1024, "ranks": 2, "longest": 80, "multiple": 1},
         (59, 3926, "7cfab288dccb1f0c24c0da3fff7dca81")),
    ],
    ids=["buckets, 1 rank", "buckets, 3 ranks", "shards", "lengths", "tokens, multiples", "tokens"],
)  # fmt: skip
def test_orders_equal_the_recorded_ones(
    rule: Callable[..., orders.Order], options: dict[str, int], recorded: tuple[int, int, str]
) -> None:
    first, second = (rule(*LENGTHS, seed=(1 << 33) + 3, epoch=epoch, **options) for epoch in (0, 1))
    content = b"".join(
        np.int64(part).tobytes() for order in (first, second) for part in (order.sentences, order.bounds)
    )
    assert (first.steps, len(first.sentences), hashlib.md5(content).hexdigest()) == recorded
    ranks, bounds = options["ranks"], first.bounds
    last_of_step_1 = first.sentences[bounds[2 * ranks - 1] : bounds[2 * ranks]]
    assert first.batch(1, ranks - 1, ranks).tolist() == last_of_step_1.tolist()


@pytest.mark.parametrize(("count", "ranks", "sizes"), [(1, 2, [1, 0]), (7, 2, [4, 3]), (100, 3, [17] * 4 + [16] * 2)])
def test_evaluation_has_every_sentence_once(count: int, ranks: int, sizes: list[int]) -> None:
    lengths = LENGTHS[0][:count]
    order = orders.for_evaluation(lengths, batch_size=17, ranks=ranks)
    assert (sorted(order.sentences), order.steps, np.diff(order.bounds).tolist()) == (
        [*range(count)], len(sizes) // ranks, sizes,
    )  # fmt: skip
    assert (np.diff(lengths[order.sentences]) <= 0).all()


SIZE = {"batch_size": 32, "ranks": 2, "longest": 75}


@pytest.mark.parametrize(
    ("rule", "options", "problem"),
    [
        (orders.by_sentences, SIZE, "no bucket of 20 pairs has the 64 of a step"),
        (orders.by_shards, {**SIZE, "shard_size": 1}, "fewer than the 64 of a step"),
        (orders.by_tokens, {"tokens": 4096, "ranks": 9, "longest": 120}, "for 9 ranks"),
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


# -- in the environment of the framework --------------------------------------------------------------------------


def test_raw_text_is_tokenized_and_split(tmp_path: Path, pytorch_python: Path) -> None:
    # Repeated sentences, so that there are pairs to merge
    text = {"train.en": lines_of(*EN * 5).replace("@@ ", ""), "train.de": lines_of(*DE * 5)}
    test = {"test.en": lines_of(*REVERSED["en"][:3], "times 3,000 raining is it"), "test.de": RAW["test.de"]}
    raw, to = write_files(tmp_path / "raw", {**text, **test}), tmp_path / "to"
    ran(pytorch_python, "-m", "benchmarks.gnmt.prepare", raw, "-o", to, "--merges", 60, check=True)
    dataset, codes = open_data(to), (to / CODES).read_text()
    assert (codes.count("\n"), codes.startswith("#version: 0.2\nm a\ni n\ne s</w>\n")) == (61, True)
    assert (dataset.references, dataset.manifest["facts"]["detokenized"]) == (REVERSED["de"], True)
    assert words.join_bpe(token_lists(dataset, "source")[3]) == "it is raining 3,000 times"
    # The text that these codes split is accepted with them
    sides = {
        f"{part}.{code}": lines_of(*map(" ".join, token_lists(dataset, side, part)))
        for part in ("train", "test")
        for code, side in (("en", "source"), ("de", "target"))
    }
    again = prepared("gnmt", write_files(tmp_path / "split", {**sides, "codes": codes}), tmp_path / "again")
    assert (again / "train_source.npy").read_bytes() == (to / "train_source.npy").read_bytes()
