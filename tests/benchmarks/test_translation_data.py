"""Parallel text: the small language, aligned files, WMT's archives, orders of batches, BLEU, and bad input."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.translation import arrays, bleu, judge, language, merges, orders, preparation, segment, wmt
from benchmarks.translation import vocabulary as words
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.subtokens import Subtokens, read_dictionary, split_tokens
from benchmarks.translation.vocabulary import BOS, EOS, PAD, SUBTOKENS, UNK, Vocabulary
from encore import paths

EN = ["the cat sat on the mat .", "dogs bark , cats do not .", "a small house", "it is raining 3,000 times"]
DE = ["die katze saß auf der matte .", "hunde bellen , katzen nicht .", "ein kleines haus", "es regnet 3.000 mal"]


Outcome = tuple[int, list[dict[str, Any]]]
"""Exit code and JSON lines of a preparation."""


def run(*argv: object, benchmark: str = "gnmt", python: Path | str = sys.executable, workers: int = 1) -> Outcome:
    command = [str(python), "-m", f"benchmarks.{benchmark}.prepare", "--progress", "json", *map(str, argv)]
    command += ["--workers", str(workers)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def refused(lines: list[dict[str, Any]]) -> str:
    return " | ".join(lines[-1]["error"].values())


def write_split(folder: Path, source: list[str] = EN, target: list[str] = DE) -> Path:
    """Aligned files whose words are split already, so that no package is needed to prepare them."""
    folder.mkdir(exist_ok=True)
    for name, lines in (("en", source), ("de", target)):
        for part, text in (("train", lines), ("test", backwards(lines))):
            (folder / f"{part}.{name}").write_text("".join(line + "\n" for line in text))
    return folder


def backwards(lines: list[str]) -> list[str]:
    """Return other lines of the same words: what is tested on is not trained on."""
    return [" ".join(line.split()[::-1]) for line in lines]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    source = write_split(tmp_path / "raw")
    lines = (source / "train.en").read_text().replace("raining", "rain@@ ing")
    (source / "train.en").write_text(lines)
    return source


# -- the small set ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("small")
    assert run("--to", to / "gnmt", workers=2)[0] == 0
    return to / "gnmt"


@pytest.fixture(scope="module")
def small(small_folder: Path) -> DataSet:
    return open_data(small_folder)


def test_the_small_set_is_what_the_grammar_says(small: DataSet) -> None:
    assert (len(small.train), len(small.test)) == (language.PAIRS["train"], language.PAIRS["test"])
    assert (small.source_language, small.target_language) == language.LANGUAGES
    assert 300 <= small.vocabulary.size <= 700
    texts = [small.vocabulary.text(small.test.target[place]) for place in range(len(small.test))]
    assert texts == small.references
    assert [small.vocabulary.text(small.test.source[place]) for place in range(len(small.test))] == small.sources
    lengths = [len(line.split()) for line in small.sources]
    assert language.LEAST_WORDS <= min(lengths) <= max(lengths) <= language.MOST_WORDS
    trained = {small.vocabulary.text(small.train.source[place]) for place in range(len(small.train))}
    assert len(trained) == len(small.train)
    assert not trained & set(small.sources)


def test_copying_the_source_gives_no_bleu(small: DataSet) -> None:
    assert bleu.tokenized_score(small.sources, small.references) < 5
    assert bleu.tokenized_score(small.references, small.references) == pytest.approx(100)


def test_one_source_has_one_translation(small: DataSet) -> None:
    # What a perfect model can reach is 100: the same words never have two translations.
    pairs = {}
    for place in range(len(small.train)):
        source, target = (small.vocabulary.text(each[place]) for each in (small.train.source, small.train.target))
        assert pairs.setdefault(source, target) == target


def test_both_benchmarks_and_any_workers_give_the_same_bytes(small_folder: Path, tmp_path: Path) -> None:
    assert run("--to", tmp_path / "transformer", benchmark="transformer")[0] == 0
    for name in arrays.FILES:
        assert (tmp_path / "transformer" / name).read_bytes() == (small_folder / name).read_bytes(), name


def test_a_set_is_verified_to_its_last_byte(small_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(small_folder, folder)
    assert run("--verify", folder)[0] == 0
    data = bytearray((folder / "train_target.npy").read_bytes())
    data[-1] ^= 1
    (folder / "train_target.npy").write_bytes(data)
    code, lines = run("--verify", folder)
    assert (code, "train_target.npy has changed" in refused(lines)) == (2, True)


def test_files_that_do_not_fit_together_are_named(small_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(small_folder, folder)
    (folder / arrays.REFERENCES).write_text("one line\n")
    with pytest.raises(Problem, match=r"9 bytes in test_references\.txt"):
        open_data(folder)
    (folder / "train_source.npy").write_bytes(b"")
    with pytest.raises(Problem, match="prepare it again"):
        open_data(folder)
    with pytest.raises(Problem, match="no folder"):
        open_data(tmp_path / "nowhere")


def test_the_declared_files_are_those_that_are_written() -> None:
    # preparation.py names them without numpy, so that the command line needs none.
    assert set(preparation.FILES) == set(arrays.FILES)


# -- aligned files ---------------------------------------------------------------------------------------------


def test_split_text_keeps_its_tokens(split: Path, tmp_path: Path) -> None:
    code, lines = run("--from", split, "--to", tmp_path / "to")
    assert code == 0, lines
    found = open_data(tmp_path / "to")
    tokens = [found.vocabulary.entries[each] for each in found.train.source[3]]
    assert tokens == ["it", "is", "rain@@", "ing", "3,000", "times"]
    assert found.vocabulary.text(found.train.source[3]) == EN[3]
    assert found.passport["facts"]["detokenized"] is False
    assert found.references == backwards(DE)
    assert found.train.source.tokens.dtype == np.uint16


def test_english_is_the_source_unless_another_one_is(split: Path, tmp_path: Path) -> None:
    assert run("--from", split, "--to", tmp_path / "to", "--languages", "de", "en")[0] == 0
    found = open_data(tmp_path / "to")
    assert (found.source_language, found.references) == ("de", backwards(EN))


def test_pairs_that_cannot_be_trained_on_are_left_out_and_counted(split: Path, tmp_path: Path) -> None:
    for name, extra in (("en", "\nword\n" + "many " * 12 + "\n"), ("de", "wort\n \nviele\n")):
        with (split / f"train.{name}").open("a") as file:
            file.write(extra)
    code, lines = run("--from", split, "--to", tmp_path / "to", "--longest", 10)
    assert code == 0, lines
    note = next(line["note"] for line in lines if "left out" in line.get("note", ""))
    assert "2 empty, 1 too long; the first is line 5 of" in note
    assert len(open_data(tmp_path / "to").train) == len(EN)
    code, lines = run("--from", split, "--to", tmp_path / "none", "--longest", 1)
    assert (code, "no pair is left to train on: 2 empty, 5 too long; the first is line 1" in refused(lines)) == (
        2,
        True,
    )


def append(name: str, text: bytes) -> Any:
    def change(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(text)

    return change


def remove(*names: str) -> Any:
    return lambda folder: [(folder / name).unlink() for name in names]


BAD = {
    "lines": (append("train.de", b"eine mehr\n"), ("train.en has 4 lines, ", "train.de has 5", "restore both")),
    "encoding": (append("train.de", b"gr\xfcn\n"), ("train.de has 5", "train.en has 4")),
    "empty test": (lambda folder: append("test.en", b"x\n")(folder) or append("test.de", b"\n")(folder),
                   ("line 5 of", "test.en and test.de is empty", "remove the pair from both files")),
    "no train": (remove("train.de"), ("has train.en", "train.XX and train.YY")),
    "no test": (remove("test.en", "test.de"), ("has train alone", "add test.en and test.de")),
    "three languages": (append("train.fr", b"le\n"), ("text in de, en, fr", "--languages")),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_with_what_to_do(kind: str, split: Path, tmp_path: Path) -> None:
    change, expected = BAD[kind]
    change(split)
    code, lines = run("--from", split, "--to", tmp_path / "to")
    assert code == 2, lines
    for each in expected:
        assert each in refused(lines), refused(lines)
    assert not (tmp_path / "to" / "dataset.json").exists()


def test_every_line_in_another_encoding_is_named(split: Path, tmp_path: Path) -> None:
    append("train.de", b"ein gr\xfcnes haus\n" * 25)(split)
    append("train.en", b"a green house\n" * 25)(split)
    # DE has a letter that is UTF-8, EN none: what converts one file would spoil the other.
    code, lines = run("--from", split, "--to", tmp_path / "to")
    said = refused(lines)
    assert (code, f"{split}/train.de: lines that are not UTF-8: 25\n    line 5: byte 0xfc at 7\n" in said) == (2, True)
    assert "line 24: byte 0xfc at 7\n    and 5 more" in said
    assert "iconv" not in said and "do not convert the others" in said
    (split / "train.de").write_text("".join(line + "\n" for line in [*DE, *["haus"] * 25]), encoding="latin1")
    said = refused(run("--from", split, "--to", tmp_path / "to")[1])
    assert "not UTF-8: 1\n    line 1: byte 0xdf at 13" in said and "iconv -f latin1" in said


def test_compressed_text_is_read_or_refused_at_once(split: Path, tmp_path: Path) -> None:
    assert run("--from", split, "--to", tmp_path / "plain")[0] == 0
    packed = Path(shutil.copytree(split, tmp_path / "packed"))
    for path in packed.iterdir():
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert run("--from", packed, "--to", tmp_path / "to")[0] == 0
    for name in arrays.FILES:
        assert (tmp_path / "to" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    train = packed / "train.de.gz"
    whole = train.read_bytes()
    # A message names what the user has, and not what it was unpacked to.
    train.write_bytes(gzip.compress(b"gr\xfcn\n" * 4))
    assert f"{train}: lines that are not UTF-8: 4" in refused(run("--from", packed, "--to", tmp_path / "bad")[1])
    for content, told in ((whole[:-9], f"{train} is damaged"), (b"no gzip", f"{train} is damaged")):
        train.write_bytes(content)
        assert told in refused(run("--from", packed, "--to", tmp_path / "bad")[1])
    train.unlink()
    for content, kind in ((whole, "gzip"), (b"BZh9", "bzip2"), (b"PK\x03\x04", "zip")):
        (packed / "train.de").write_bytes(content)
        told = refused(run("--from", packed, "--to", tmp_path / "bad")[1])
        assert f"{packed}/train.de is compressed by {kind}" in told


def test_of_several_test_parts_one_is_chosen(split: Path, tmp_path: Path) -> None:
    for name in ("en", "de"):
        (split / f"test.{name}").rename(split / f"test.2016.{name}")
        shutil.copy(split / f"train.{name}", split / f"test.2017.{name}")
    code, lines = run("--from", split, "--to", tmp_path / "to")
    assert (code, "add --test test.2016" in refused(lines)) == (2, True)
    assert run("--from", split, "--to", tmp_path / "to", "--test", "test.2016")[0] == 0


def test_a_last_line_without_its_end_counts(split: Path, tmp_path: Path) -> None:
    for name in ("train.en", "train.de"):
        (split / name).write_bytes((split / name).read_bytes().rstrip(b"\n"))
    assert run("--from", split, "--to", tmp_path / "to")[0] == 0
    assert len(open_data(tmp_path / "to").train) == len(EN)


def test_blocks_cover_every_line(tmp_path: Path) -> None:
    from benchmarks.translation import stages

    path = tmp_path / "text"
    for count, end in ((0, ""), (1, ""), (1, "\n"), (5, "\n"), (6, "\n"), (6, ""), (7, "")):
        lines = [f"line {number}" for number in range(count)]
        path.write_text("\n".join(lines) + (end if count else ""))
        total, offsets = stages.line_offsets(path, 3, lambda size: None)
        assert total == count
        assert [path.read_bytes()[each:].split(b"\n")[0].decode() for each in offsets] == (lines[::3] or [""])


# -- tokens ------------------------------------------------------------------------------------------------------


def test_merges_join_the_most_frequent_pairs() -> None:
    # "a b" occurs 5 times, "b c" 3 times until "a b" is merged; "x y" but once.
    assert merges.learn({"abc": 3, "abd": 2, "xy": 1}, 10) == [("a", "b"), ("ab", "c</w>"), ("ab", "d</w>")]
    assert merges.learn({"abc": 3, "abd": 2}, 1) == [("a", "b")]
    # Of equal ones the last by its letters.
    assert merges.learn({"ab": 2, "cd": 2}, 1) == [("c", "d</w>")]
    assert merges.merge(("a", "a", "a"), ("a", "a")) == ("aa", "a")


def test_codes_with_a_line_that_is_no_merge_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "codes"
    segment.write_codes([("a", "b"), ("ab", "c</w>")], path)
    assert segment.read_codes(path) == [("a", "b"), ("ab", "c</w>")]
    path.write_text("#version: 0.2\na b\na b c\n")
    with pytest.raises(Problem, match="line 3: 'a b c'"):
        segment.read_codes(path)
    path.write_text("")
    with pytest.raises(Problem, match="has no merges"):
        segment.read_codes(path)


def test_codes_that_leave_letters_belong_to_another_text(tmp_path: Path) -> None:
    judge.judge_foreign_codes(tmp_path, 200, Counter(word=100))
    with pytest.raises(Problem, match=r"splits a word into 4\.0 tokens on average"):
        judge.judge_foreign_codes(tmp_path, 400, Counter(word=100))


def test_special_entries_have_the_ids_of_the_constants() -> None:
    known = Vocabulary((*words.SPECIAL, "a@@", "b"))
    assert [known.entries[each] for each in (PAD, UNK, BOS, EOS)] == list(words.SPECIAL)
    assert known.text([BOS, 4, 5, 5, EOS, 4]) == "ab b"
    assert known.text([5, 4, PAD]) == "b a"
    assert known.text([UNK, 99]) == "<unk> <unk>"
    assert (known.size, known.padded(8)) == (6, 8)


ENTRIES = ["the_", ", _", "_", "._", "ho", "use_", *"abcdefghijklmnopqrstuvwxyz3\\;0123456789 _,.\n"]


def test_subtokens_give_every_line_back() -> None:
    cut = Subtokens((*words.SPECIAL, *dict.fromkeys(ENTRIES)))
    known = Vocabulary((*words.SPECIAL, *dict.fromkeys(ENTRIES)), SUBTOKENS)
    for line in ("the house, the mouse.", "a_b \\ c", "3,000 - über", "the house", "über_"):
        ids = cut.encode(line)
        assert UNK not in ids
        assert known.text(ids) == line
    assert [known.entries[each] for each in cut.encode("the house")] == ["the_", "ho", "use_"]
    assert split_tokens("ab, cd  e") == ["ab", ", ", "cd", "  ", "e"]
    # As the submission compares it, references included.
    assert known.joined(cut.encode("the house, the mouse.")) == "the house, the mouse."
    # Which leaves what is escaped as it is, and no white space inside of a token.
    assert known.joined(cut.encode("a_b \\ c , d ,\\")) == r"a \u b \\ c, d,\\"


def test_a_dictionary_is_read_as_the_submission_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "dictionary"
    path.write_text("'<pad>_'\n'<EOS>_'\n', _'\n'''\n'the_'\n")
    assert read_dictionary(path) == [", _", "'", "the_"]
    path.write_text("'the_'\nthe_\n")
    with pytest.raises(Problem, match="line 2: 'the_'"):
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


def lines_of(*texts: str) -> str:
    return "".join(text + "\n" for text in texts)


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """WMT17's archives with a few lines each, and a dictionary."""
    folder = tmp_path / "wmt"
    folder.mkdir()
    for number, each in enumerate(wmt.CORPORA["wmt17"]):
        texts = {"en": f"house {number}", "de": f"haus {number}"}
        pack(folder / each.archives[0], {f"deep/{each.stem}.{code}": lines_of(text) for code, text in texts.items()})
    for code in wmt.LANGUAGES:
        (folder / f"{wmt.TEST}.{code}").write_text(lines_of("house"))
    (folder / "reference_dictionary.ende.txt").write_text(
        "'<pad>_'\n'<EOS>_'\n" + "".join(f"'{each}'\n" for each in "abcdefghijklmnopqrstuvwxyz_ 0123456789;\\")
    )
    return folder


def known_sums(folder: Path) -> str:
    """Python that lets this test's newstest2014 be the known one."""
    sums = {
        f"{wmt.TEST}.{code}": hashlib.md5((folder / f"{wmt.TEST}.{code}").read_bytes()).hexdigest()
        for code in ("en", "de")
    }
    return f"from benchmarks.translation import wmt\nwmt.KNOWN_MD5 = {sums!r}\n"


def run_archives(folder: Path, to: Path, before: str | None = None) -> Outcome:
    before = known_sums(folder) if before is None else before
    driver = f"import sys\nfrom benchmarks.transformer import prepare\n{before}\n"
    driver += "if __name__ == '__main__':\n    sys.exit(prepare.main(sys.argv[1:]))\n"
    command = [sys.executable, "-c", driver, "--from", str(folder), "--to", str(to), "--progress", "json"]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_archives_are_joined_in_the_submitted_order(archives: Path, tmp_path: Path) -> None:
    code, lines = run_archives(archives, tmp_path / "to")
    assert code == 0, lines
    found = open_data(tmp_path / "to")
    assert [found.vocabulary.text(found.train.target[place]) for place in range(3)] == ["haus 0", "haus 1", "haus 2"]
    assert (found.passport["name"], found.references) == ("own data", ["house"])
    assert found.passport["facts"]["kind"] == SUBTOKENS
    assert not list(tmp_path.rglob("evil*"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # in gzip's checksum
    path.write_bytes(data)


def list_another_sum(path: Path) -> None:
    (path.parent / "SHA256SUMS").write_text(f"{'0' * 64}  {path.name}\n")


def empty_archive(path: Path) -> None:
    pack(path, {"other.en": "x\n"})


DAMAGED = {
    "missing": (Path.unlink, "lacks training-parallel-commoncrawl.tgz (http://www.statmt.org/wmt13/"),
    "truncated": (truncate, "training-parallel-commoncrawl.tgz is damaged: "),
    "flipped": (flip, "training-parallel-commoncrawl.tgz is damaged: CRC check failed"),
    "no archive": (lambda path: path.write_text("<html>"), "training-parallel-commoncrawl.tgz is damaged: "),
    "another one": (
        empty_archive,
        "training-parallel-commoncrawl.tgz has no commoncrawl.de-en.de, commoncrawl.de-en.en",
    ),
    "checksum": (list_another_sum, "training-parallel-commoncrawl.tgz has sha256 "),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_archives_that_cannot_be_used_are_named(kind: str, archives: Path, tmp_path: Path) -> None:
    change, expected = DAMAGED[kind]
    change(archives / "training-parallel-commoncrawl.tgz")
    code, lines = run_archives(archives, tmp_path / "to")
    assert (code, expected in refused(lines), "download" in refused(lines)) == (2, True, True), refused(lines)


def test_a_test_part_with_another_checksum_is_refused(archives: Path, tmp_path: Path) -> None:
    code, lines = run_archives(archives, tmp_path / "to", before="")
    assert code == 2
    assert "newstest2014.en has md5 " in refused(lines)
    assert "dabf51a9c02b2235632f3cee75c72d49, as verify_dataset.sh of v0.5 has it" in refused(lines)


def test_subtokens_without_a_dictionary_are_refused(archives: Path, tmp_path: Path) -> None:
    (archives / "reference_dictionary.ende.txt").unlink()
    code, lines = run_archives(archives, tmp_path / "to")
    assert (code, "has no reference_dictionary.ende.txt" in refused(lines)) == (2, True)


def test_sgm_becomes_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.sgm"
    path.write_text('<refset>\n<seg id="1"> one &amp; </seg>\n<SEG id="2">two\nlines</SEG>\n</refset>')
    assert wmt.read_sgm(path) == ["one &amp;", "two lines"]
    path.write_text("nothing")
    with pytest.raises(Problem, match="has no <seg>"):
        wmt.read_sgm(path)


def test_lists_of_checksums_are_read(tmp_path: Path) -> None:
    (tmp_path / "MD5SUMS").write_text(f"{'A' * 32} *a.tgz\n\n{'b' * 32}  b.tgz\n")
    assert wmt.listed_sums(tmp_path) == {"a.tgz": "a" * 32, "b.tgz": "b" * 32}
    (tmp_path / "MD5SUMS").write_text("MD5 (a.tgz) = 1\n")
    with pytest.raises(Problem, match="line 1"):
        wmt.listed_sums(tmp_path)


# -- orders ---------------------------------------------------------------------------------------------------


def lengths_of_text(pairs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lengths as of news text: 25 tokens on average, the target in proportion."""
    random = np.random.RandomState(seed)
    source = np.clip(np.exp(random.randn(pairs) * 0.6 + 3.0), 1, 120).astype(np.int32)
    target = np.clip(source * np.exp(random.randn(pairs) * 0.2) + 1, 1, 120).astype(np.int32)
    return source, target


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_of_sentences_are_as_submitted(ranks: int) -> None:
    source, target = lengths_of_text(4000)
    made = [
        orders.by_sentences(source, target, batch_size=16, ranks=ranks, seed=3, epoch=epoch, longest=75)
        for epoch in (0, 1)
    ]
    assert made[0].steps == made[1].steps
    assert not np.array_equal(made[0].sentences, made[1].sentences)
    again = orders.by_sentences(source, target, batch_size=16, ranks=ranks, seed=3, epoch=1, longest=75)
    assert np.array_equal(again.sentences, made[1].sentences)
    for order in made:
        assert set(np.diff(order.bounds)) == {16}
        assert len(order.bounds) == order.steps * ranks + 1
        assert len(set(order.sentences.tolist())) == len(order.sentences)
        longer = np.maximum(source, target)[order.sentences] + 2
        assert longer.max() <= 75
        # 75 in 5 buckets: every pair of a step is from the same 15 lengths, the last one has what is left.
        buckets = np.minimum(longer // 15, 4).reshape(order.steps, -1)
        assert (buckets == buckets[:, :1]).all()
        assert order.padding < orders.MOST_PADDING


@pytest.mark.parametrize(("multiple", "length_multiple"), [(8, 1), (8, 2), (1, 1)])
def test_batches_of_tokens_are_full_and_hardly_padded(multiple: int, length_multiple: int) -> None:
    source, target = lengths_of_text(6000)
    how: dict[str, Any] = {
        "tokens": 1024,
        "ranks": 2,
        "longest": 80,
        "multiple": multiple,
        "length_multiple": length_multiple,
    }
    made = [orders.by_tokens(source, target, seed=3, epoch=epoch, **how) for epoch in (0, 1)]
    assert made[0].steps == made[1].steps
    assert not np.array_equal(made[0].sentences, made[1].sentences)
    for order in made:
        assert len(set(order.sentences.tolist())) == len(order.sentences)
        sizes = np.diff(order.bounds)
        for begin, end in pairwise(order.bounds):
            longest = max(source[order.sentences[begin:end]].max(), target[order.sentences[begin:end]].max()) + 1
            assert longest <= 80
            assert (end - begin) * -(-longest // length_multiple) * length_multiple <= 1024
        per = multiple // length_multiple
        assert np.mean(sizes[sizes > per] % per == 0) > 0.95
        assert orders.padding_of_batches(order, source, target).max() <= orders.MOST_PADDING
        assert order.padding < 0.15
        # At most one step of the epoch is left out, and what is too long.
        fitting = int((np.maximum(source, target) < 80).sum())
        assert len(order.sentences) >= fitting - sizes.max()


def test_no_batch_of_tokens_is_padding_for_the_most_part() -> None:
    # One short source with a very long target among many pairs that are short on both sides.
    source, target = np.full(500, 5, np.int32), np.full(500, 5, np.int32)
    target[::50] = 70
    order = orders.by_tokens(source, target, tokens=2048, ranks=1, seed=0, epoch=0, longest=100)
    assert orders.padding_of_batches(order, source, target).max() <= orders.MOST_PADDING
    assert sorted(order.sentences) == list(range(500))


@pytest.mark.parametrize(("count", "ranks"), [(1, 2), (7, 2), (400, 3), (64, 1)])
def test_evaluation_has_every_sentence_once(count: int, ranks: int) -> None:
    lengths = lengths_of_text(count)[0]
    order = orders.for_evaluation(lengths, batch_size=16, ranks=ranks)
    assert sorted(order.sentences) == list(range(count))
    sizes = np.diff(order.bounds)
    assert len(sizes) == order.steps * ranks
    assert sizes.max() <= 16
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(lengths[order.sentences]) <= 0).all()


def test_too_little_data_is_refused() -> None:
    source, target = lengths_of_text(20)
    with pytest.raises(Problem, match="no bucket of 20 pairs has the 64 of a step"):
        orders.by_sentences(source, target, batch_size=32, ranks=2, seed=0, epoch=0, longest=75)
    with pytest.raises(Problem, match="for 9 ranks"):
        orders.by_tokens(source, target, tokens=4096, ranks=9, seed=0, epoch=0, longest=120)
    with pytest.raises(Problem, match="pairs of up to 75 positions in batches of 64"):
        orders.by_tokens(source, target, tokens=64, ranks=1, seed=0, epoch=0, longest=75)


# -- BLEU -----------------------------------------------------------------------------------------------------


def test_bleu_by_hand() -> None:
    # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples, none of 3 fours: which counts as half a match.
    score = bleu.plain_score(["a b c x e f"], ["a b c d e f"])
    assert score == pytest.approx(100 * (5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25)
    # Four of eight words, all right: the brevity penalty alone.
    assert bleu.plain_score(["a b c d"], ["a b c d e f g h"]) == pytest.approx(100 * np.exp(1 - 2))
    assert bleu.tokenized_score(["The 3,000-year-old House!"], ["the 3,000 - year - old house !"]) == pytest.approx(100)
    assert bleu.split_words("a state-of-the-art 3.5 %") == ["a", "state", "-", "of", "-", "the", "-", "art", "3.5", "%"]
    assert bleu.plain_score([""], ["a b"]) == 0
    # A backslash splits nothing in the submission of v0.6 and v0.7: it escapes a bracket in the class of punctuation.
    assert bleu.split_words(r"a\ub, [c]") == [r"a\ub", ",", "[", "c", "]"]


def test_bleu_of_the_transformer_in_v05_by_hand() -> None:
    # The unknown word of a reference matches none: 5 of 6 words, 4 of 5 pairs, 3 of 4 triples, 2 of 3 fours.
    line = "The house on the hill <unk>"
    assert bleu.fairseq_score([line.lower()], [line]) == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    # Marks stay with their words, and an order without matches leaves nothing.
    assert bleu.fairseq_score(["a b c d."], ["a b c d ."]) == 0
    # A line without words has its end as one: 4 of 5 words match, and 5 are short of 6.
    assert bleu.fairseq_score(["a b c d", ""], ["a b c d", "e f"]) == pytest.approx(
        100 * (4 / 5 * 3 / 3 * 2 / 2 * 1 / 1) ** 0.25 * np.exp(1 - 6 / 5)
    )


def test_bleu_refuses_sides_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="1 hypotheses for 2 references"):
        bleu.plain_score(["a"], ["a", "b"])


# -- with the packages of the framework's environment -------------------------------------------------------------


COMPARE = """
import io, json, sys
from pathlib import Path
from subword_nmt.learn_bpe import learn_bpe
from benchmarks.translation import bleu, merges, segment, vocabulary
from benchmarks.translation.arrays import open_data

data = open_data(Path(sys.argv[1]))
words = {}
for line in data.references:
    for word in line.split():
        words[word] = words.get(word, 0) + 1
output = io.StringIO()
learn_bpe((f"{word} {count}\\n" for word, count in sorted(words.items())), output, 300, is_dict=True)
theirs = [tuple(line.split()) for line in output.getvalue().split("\\n")[1:-1]]
hypotheses = [" ".join(line.split()[1:]) for line in data.references]
tokens = segment.tokenizer("en")("Don't \\"stop\\" it, Mr. O'Neil!")
print(json.dumps({
    "merges": theirs == merges.learn(words, 300) and len(theirs),
    "intl": bleu.sacrebleu_score(hypotheses, data.references),
    "ours": bleu.tokenized_score(hypotheses, data.references),
    "tokens": tokens,
    "text": vocabulary.detokenize(" ".join(tokens), "en"),
}))
"""


def test_packages_agree_with_what_replaces_them(pytorch_python: Path, small_folder: Path) -> None:
    command = [str(pytorch_python), "-c", COMPARE, str(small_folder)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["merges"] == 300
    assert found["intl"] == round(found["ours"], 2) != found["ours"], "the target of GNMT is compared with two decimals"
    assert found["tokens"] == ["Don", "&apos;t", "&quot;", "stop", "&quot;", "it", ",", "Mr.", "O", "&apos;Neil", "!"]
    assert found["text"] == "Don't \"stop\" it, Mr. O'Neil!"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Text as it was written, the same sentences many times so that there is something to merge."""
    return write_split(tmp_path / "raw", [line.capitalize() for line in EN * 5], [line.capitalize() for line in DE * 5])


def test_raw_text_is_tokenized_and_split(raw: Path, tmp_path: Path, pytorch_python: Path) -> None:
    code, lines = run("--from", raw, "--to", tmp_path / "to", "--merges", 60, python=pytorch_python)
    assert code == 0, lines
    found = open_data(tmp_path / "to")
    assert found.passport["facts"]["detokenized"] is True
    assert len(segment.read_codes(tmp_path / "to" / "codes.txt")) == 60
    assert any(entry.endswith(words.JOIN) for entry in found.vocabulary.entries)
    # Codes that split this text are taken for it, and refused for a text that they do not split so.
    split = tmp_path / "split"
    split.mkdir()
    for part, pairs in (("train", found.train), ("test", found.test)):
        for name, sentences in (("en", pairs.source), ("de", pairs.target)):
            tokens = [" ".join(found.vocabulary.tokens(each)) for each in sentences]
            (split / f"{part}.{name}").write_text(lines_of(*tokens))
    shutil.copy(tmp_path / "to" / "codes.txt", split / "codes")
    assert run("--from", split, "--to", tmp_path / "again", python=pytorch_python)[0] == 0
    assert (tmp_path / "again" / "train_source.npy").read_bytes() == (tmp_path / "to" / "train_source.npy").read_bytes()
    segment.write_codes([("h", "o"), ("o", "u")], split / "codes")
    code, lines = run("--from", split, "--to", tmp_path / "other", python=pytorch_python)
    assert (code, "splits into " in refused(lines), "the codes that the text was split by" in refused(lines)) == (
        2,
        True,
        True,
    )
