"""All preparations: options, locked folders, interruptions, full disks, overlaps and finished data sets."""

import bz2
import fcntl
import gzip
import importlib
import itertools
import json
import lzma
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.common.data.workers import Workers
from encore import data, paths
from encore.cli.data import describe
from tests.preparing import Outcome, check_refusal, manifest, notes, ran, refused, run, write_files


def save_noise(path: Path, sigma: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("PIL.Image").effect_noise((64, 48), sigma).convert("RGB").save(path)


def write_pictures(folder: Path) -> Path:
    for split, label, number in itertools.product(("train", "val"), ("ant", "bee"), range(3)):
        save_noise(folder / split / label / f"{number}.jpg", 60 + number)
    return folder


def lines(values: Iterable[str], end: str = "\n") -> str:
    return "".join(value + end for value in values)


WORDS = {"en": "house", "de": "haus"}
PAIRS = {
    f"{part}.{code}": lines((f"{word}@@ s {n % 7}" for n in range(40)), end)
    for (part, end), (code, word) in itertools.product((("train", "\n"), ("test", " s\n")), WORDS.items())
}


def write_scenes(folder: Path) -> Path:
    square = {"bbox": [2, 3, 10, 10], "area": 100, "segmentation": [[2, 3, 2, 13, 12, 13, 12, 3]]}
    numbers = range(1, 5)
    content = {
        "images": [{"id": n, "file_name": f"{n}.jpg", "width": 64, "height": 48} for n in numbers],
        "annotations": [{"id": n, "image_id": n, "category_id": 7, "iscrowd": 0, **square} for n in numbers],
        "categories": [{"id": 7, "name": "square"}],
    }
    for part, number in itertools.product(("train", "val"), numbers):
        save_noise(folder / f"{part}2017" / f"{number}.jpg", 60 + number)
    files = {f"annotations/instances_{part}2017.json": json.dumps(content) for part in ("train", "val")}
    return write_files(folder, files)


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".")


CATS = ("the", "cat", "dog", "house", "town", "runs", "sees")
SENTENCES = [" ".join(CATS[(a * n + b) % 7] for n in range(5)) + " ." for a in range(9) for b in range(9)]
ARTICLES = {
    "vocab.txt": lines((*SPECIAL, *CATS)),
    "articles.txt": "\n".join(lines(SENTENCES[n : n + 9]) for n in range(0, 81, 9)),
}


def questions(part: str, text: str) -> str:
    answers = [{"text": "Bray", "answer_start": 13}]
    content = [{"id": f"{part}{n}", "question": text, "answers": answers} for n in range(9)]
    return json.dumps({"data": [{"title": "", "paragraphs": [{"context": "Ada lives in Bray.", "qas": content}]}]})


QUESTIONS = {
    "train-v1.1.json": questions("train", "What is the town of Ada"),
    "dev-v1.1.json": questions("dev", "Ada lives in what town"),
    "vocab.txt": lines((*SPECIAL, *["what", "is", "the", "town", "of", "ada", "lives", "in", "bray"])),
}
PACKED = {
    f"{name}.jsonl": lines(
        json.dumps({"input_ids": [*range(row, row + 16)], "labels": [*range(row, row + 16)]})
        for row in range(first, first + 9)
    )
    for name, first in (("train", 0), ("test", 100))
}


def write_texts(folder: Path) -> Path:
    tokenization = pytest.importorskip("benchmarks.llama.tokenization")
    train, test = ([f"{word} of {number}" for number in range(9)] for word in ("town", "sea"))
    files = {"train.txt": "\n\n".join(train) + "\n", "test.txt": "\n\n".join(test) + "\n"}
    return write_files(folder, {**files, "tokenizer.json": tokenization.learn(train, 260).to_str()})


# Raw data of a benchmark, or a function that writes it, and a file of the prepared set; the Transformer and Mask R-CNN
# use the preparation of gnmt and ssd
SOURCES: dict[str, tuple[Any, str]] = {
    "resnet": (write_pictures, "train.rec"),
    "dlrm": (
        {"train.txt": lines("\t".join([str(n % 2), *["7"] * 13, *[f"{n % 9:08x}"] * 26]) for n in range(300))},
        "train.bin",
    ),
    "ncf": (
        {"u.data": lines(f"{user}\t{item}\t4\t{user + item}" for user in range(9) for item in range(user, user + 4))},
        "train_users.npy",
    ),
    "gnmt": (PAIRS, "train_source.npy"),
    "ssd": (write_scenes, "train_boxes.npy"),
    "bert": (ARTICLES, "train_tokens.npy"),
    "bert_squad": (QUESTIONS, "train_tokens.npy"),
    "llama2_70b_lora": (PACKED, "train_tokens.npy"),
    "llama31_8b": (write_texts, "train.bin"),
}
ONE_PASS = ("ncf", "bert_squad", "llama2_70b_lora")  # Prepared again from the start in seconds
every_benchmark = pytest.mark.parametrize("benchmark", SOURCES)
# Code of common/data/prepare.py: for a benchmark with parts to resume from, and one without
two_benchmarks = pytest.mark.parametrize("benchmark", ["ncf", "dlrm"])
# Small enough for several parts


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {
        "benchmarks.bert.stages.SHARD_BYTES": 300,
        "benchmarks.bert.writer.BLOCK_BYTES": 600,
        "benchmarks.detection.writer.PART_IMAGES": 3,
        "benchmarks.dlrm.writer.PART_BYTES": 20_000,
        "benchmarks.resnet.parts.PART_IMAGES": 4,
    }.items():
        monkeypatch.setattr(name, size)


@pytest.fixture
def source(benchmark: str, tmp_path: Path) -> Path:
    raw = SOURCES[benchmark][0]
    return write_files(tmp_path / "raw", raw) if isinstance(raw, dict) else raw(tmp_path / "raw")


def prepare(benchmark: str, source: Path, to: Path, *words: object, **options: int) -> Outcome:
    return run(benchmark, source, "-o", to, "--name", "mine", *words, **options)


def interrupt(benchmark: str, source: Path, to: Path, finished: float = math.inf) -> None:
    # After a number of tasks, at the latest when all files but the manifest are complete
    count = itertools.count()

    def run_tasks(self: Workers, phase: str, unit: str, function: Any, tasks: Any, *options: Any) -> None:
        for task in tasks:
            if next(count) == finished:
                raise KeyboardInterrupt
            function(task, lambda *progress: None)

    manifest_writer = mock.patch("benchmarks.common.data.manifest.write", side_effect=KeyboardInterrupt)
    with mock.patch.object(Workers, "run", run_tasks), manifest_writer:
        assert "run the same command again to resume" in refused(prepare(benchmark, source, to), code=130)


@pytest.mark.parametrize("benchmark", ["ncf"])
def test_preparation_waits_for_another_one(benchmark: str, source: Path, tmp_path: Path) -> None:
    parts = tmp_path / "to" / "parts"
    parts.mkdir(parents=True)
    program, options = f"benchmarks.{benchmark}.prepare", ("--workers", "1", "--progress", "json", "--name", "mine")
    command = [sys.executable, "-m", program, str(source), *options, "-o", str(parts.parent)]
    with (parts / "lock").open("wb") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        children = [subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        waiting = [any("another preparation is writing" in line for line in child.stdout or ()) for child in children]
        assert (waiting, [path.name for path in parts.iterdir()]) == ([True, True], ["lock"])
    outputs = [child.communicate()[0] for child in children]
    assert ([child.returncode for child in children], parts.exists()) == ([0, 0], False)
    assert sum("nothing to do" in output for output in outputs) == 1


@pytest.mark.slow
@two_benchmarks
def test_finished_set_is_not_replaced(benchmark: str, source: Path, tmp_path: Path) -> None:
    to, file = tmp_path / "to", tmp_path / "to" / SOURCES[benchmark][1]
    notes(prepare(benchmark, source, to))
    modified = (to / "dataset.json").stat().st_mtime_ns
    noted = notes(prepare(benchmark, source, to))
    assert "nothing to do" in noted and (to / "dataset.json").stat().st_mtime_ns == modified
    assert "from another source or with other options" in refused(prepare(benchmark, source, to, "--seed", 7))
    notes(prepare(benchmark, source, to, "--seed", 7, "--overwrite"))
    file.write_bytes(b"")
    assert "have changed since" in refused(prepare(benchmark, source, to, "--seed", 7))
    for manifest_text in ("{", ""):  # Files of another program
        write_files(to, {file.name: b"precious", "dataset.json": manifest_text})
        assert "without a manifest" in refused(prepare(benchmark, source, to)) and file.read_bytes() == b"precious"


@pytest.mark.slow
@every_benchmark
def test_interrupted_preparation_resumes_to_the_same_set(benchmark: str, source: Path, tmp_path: Path) -> None:
    notes(prepare(benchmark, source, tmp_path / "reference", workers=0))
    facts = manifest(tmp_path / "reference")
    for finished in (math.inf,) if benchmark in ONE_PASS else (2, 5, math.inf):
        to = tmp_path / f"after {finished}"
        interrupt(benchmark, source, to, finished)
        outcome = prepare(benchmark, source, to)
        assert benchmark in ONE_PASS or "resuming:" in notes(outcome), outcome
        is_indexed = any(line.get("phase") == "index" for line in outcome[1])
        assert (manifest(to)["id"], (to / "parts").exists(), is_indexed) == (facts["id"], False, benchmark == "resnet")
    assert ("classes" in describe(data.read_passport(to))) == (benchmark in ("resnet", "ssd"))
    notes(run(benchmark, "--verify", to))
    # Training opens the data set before the clock starts: no value of an array is read
    names = [path.name for path in to.glob("*offsets.npy")]
    write_files(to, dict.fromkeys(names, lambda content: content[:-1] + bytes([content[-1] ^ 0x40])))
    assert not importlib.import_module(f"benchmarks.{benchmark}.prepare").DATA_SET.check(to, facts)
    (to / "dataset.json").write_text(json.dumps({**facts, "benchmark": "minigo", "shared_with": []}))
    assert "is a data set of minigo" in refused(run(benchmark, "--verify", to))
    (to / SOURCES[benchmark][1]).write_bytes(b"")
    assert len(run(benchmark, "--verify", to, "--quick")[1][-1]["error"]["more"]) == 2


@pytest.mark.slow
@two_benchmarks
@pytest.mark.parametrize("name", ["mine", "other"])
def test_other_source_or_options_start_over(benchmark: str, name: str, source: Path, tmp_path: Path) -> None:
    interrupt(benchmark, source, tmp_path / "to")
    if name == "mine":
        (file,) = source.iterdir()
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    noted = notes(prepare(benchmark, source, tmp_path / "to", "--name", name))
    assert ("starting over" in noted, manifest(tmp_path / "to")["name"]) == (True, name)


@pytest.mark.slow
@every_benchmark
def test_full_disk_is_reported_and_parts_stay(benchmark: str, source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    # Room for no part, then for some parts
    for limit in (200, 2000):
        outcome = prepare(benchmark, source, to, limit=limit)
        if limit == 200 or outcome[0]:
            message = refused(outcome, code=1)
            assert message.startswith(f"no space left in {to}: File too large") and "finished parts are kept" in message
            assert not [path for path in (to / "parts").glob("*.*") if path.suffix[1:].isdigit()], "unfinished files"
    for folder, workers in ((to, 1), (tmp_path / "reference", 0)):
        notes(prepare(benchmark, source, folder, workers=workers))
    assert manifest(to)["id"] == manifest(tmp_path / "reference")["id"]


@pytest.mark.parametrize("benchmark", ["ncf"])
@pytest.mark.parametrize(
    ("raw", "to", "problem"),
    [
        ("raw", "file", "cannot write to"),
        ("raw", "/proc/encore", "cannot write to"),
        ("raw", "raw/to", "is inside the source"),
        ("nowhere", "to", "/nowhere does not exist"),
    ],
)
def test_unusable_folders_are_refused(raw: str, to: str, problem: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert problem in refused(prepare("ncf", tmp_path / raw, tmp_path / to)) and not (tmp_path / "to").exists()


# Files for evaluation with the training files that replace them, the number reported, and the first one reported
COPIES = {
    "resnet": ({"val": "train"}, "6 of 6 evaluation images", "ant/0.jpg"),
    "dlrm": ({"test.txt": "train.txt"}, "300 of 300 evaluation rows", "line 1 of"),
    "gnmt": ({"test.en": "train.en", "test.de": "train.de"}, "40 of 40 evaluation pairs", "line 1 of"),
    "ssd": ({"val2017": "train2017"}, "4 of 4 evaluation images", "1.jpg"),
    "bert": ({"../held.txt": "articles.txt"}, "9 of 9 evaluation documents", "the one that starts with: the the"),
    "bert_squad": ({"dev-v1.1.json": "train-v1.1.json"}, "9 of 9 evaluation questions", "train0"),
    "llama2_70b_lora": ({"test.jsonl": "train.jsonl"}, "9 of 9 evaluation samples", "row 1"),
    "llama31_8b": ({"test.txt": "train.txt"}, "9 of 9 evaluation documents", "the one that starts with: town of 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", COPIES)
def test_evaluation_data_in_the_training_data_are_refused(benchmark: str, source: Path, tmp_path: Path) -> None:
    files, count, first = COPIES[benchmark]
    for test, train in files.items():
        ran("cp", "-rT", source / train, source / test, check=True)
    words = ("--evaluation", tmp_path / "held.txt") if benchmark == "bert" else ()
    problem = f"{count} are in the training data as well, the first is "
    message = refused(prepare(benchmark, source, tmp_path / "to", *words))
    assert message.startswith(problem) and first in message and "--allow-overlap" in message
    noted = notes(prepare(benchmark, source, tmp_path / "to", *words, "--allow-overlap"))
    in_both = manifest(tmp_path / "to")["how"]["in_both"]
    assert (f"warning: {problem}" in noted, in_both) == (True, int(count.split()[0]))


@pytest.mark.parametrize("benchmark", ["gnmt"])
def test_small_overlap_is_a_warning(source: Path, tmp_path: Path) -> None:
    more = {f"test.{code}": PAIRS[f"test.{code}"] + f"{word}@@ s 0\n" * 4 for code, word in WORDS.items()}
    assert "warning: 4 of 44 evaluation pairs are" in notes(prepare("gnmt", write_files(source, more), tmp_path / "to"))


TEXTS = {
    "dlrm": "train.txt",
    "ncf": "u.data",
    "gnmt": "train.en",
    "ssd": "annotations/instances_train2017.json",
    "bert": "articles.txt",
    "bert_squad": "train-v1.1.json",
    "llama2_70b_lora": "train.jsonl",
    "llama31_8b": "train.txt",
}


ZSTD = b"\x28\xb5\x2f\xfd" + bytes(9)
OTHER_FORMS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (lambda content: content.decode().encode("utf-16"), ("{file} is UTF-16",)),
    (ZSTD, ("{file} is compressed by zstd", "zstd -d {file}.zst")),
)


@pytest.mark.parametrize(("change", "parts"), OTHER_FORMS, ids=["utf-16", "zstd"])
@pytest.mark.parametrize("benchmark", TEXTS)
def test_text_in_another_form_is_refused(benchmark: str, change: Any, parts: tuple[str, ...], source: Path) -> None:
    name = TEXTS[benchmark]
    # COCO's JSON is not looked at for compression
    problems = [part.format(file=source / name) for part in parts if (benchmark, change) != ("ssd", ZSTD)]
    check_refusal(benchmark, source, {name: change}, problems)


JSON_LINES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama2_70b_lora": lambda text: {"input": text, "output": "sea"},
    "llama31_8b": lambda text: {"text": text},
}
BAD_LINES: dict[str, tuple[Any, str, Callable[[bytes], bytes], str]] = {
    # Third text, suffix, change of the content, and a part of the error message
    "a surrogate": ("a \ud800", "", bytes, ", line 3: {key} has an unpaired surrogate, U+D800, at character 2"),
    "a number": (7, "", bytes, ", line 3: {key} is int"),
    "latin1": ("caf\xe9", "", lambda content: content.decode().encode("latin1"), ": lines that are not UTF-8: 1\n"),
    "no JSON": ("town", "", lambda content: content[:-9], ", line 3: not a JSON object"),
    "a cut gzip": ("town", ".gz", lambda content: gzip.compress(content)[:-9], " is damaged after line "),
    "a flipped gzip": (
        "town", ".gz", lambda content: gzip.compress(content)[:-6] + bytes(6), " is damaged after line 3 ("),
    "a cut bzip2": ("town", ".bz2", lambda content: bz2.compress(content)[:-9], " is damaged after line "),
    "a cut xz": ("town", ".xz", lambda content: lzma.compress(content)[:-9], " is damaged after line "),
    "zstd": ("town", ".zst", lambda content: b"\x28\xb5\x2f\xfd" + content, " is compressed by zstd"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LINES)
@pytest.mark.parametrize("benchmark", JSON_LINES)
def test_bad_json_lines_are_named(benchmark: str, case: str, tmp_path: Path) -> None:
    text, suffix, change, problem = BAD_LINES[case]
    row_of, raw = JSON_LINES[benchmark], write_texts(tmp_path / "raw")
    # Escaped only where UTF-8 cannot encode it
    train, test = (
        lines(
            json.dumps(row_of(word), ensure_ascii=case != "latin1") for word in ("town", "sea of town", last)
        ).encode()
        for last in (text, "sea")
    )
    files = {"train.txt": None, "test.txt": None, "test.jsonl": test, f"train.jsonl{suffix}": change(train)}
    check_refusal(benchmark, raw, files, [f"{raw}/train.jsonl{suffix}{problem.format(key=next(iter(row_of(0))))}"])


@pytest.mark.parametrize(
    ("benchmark", "option", "problem"),
    [("bert", "--evaluation", "pass the text"), ("llama31_8b", "--tokenizer", "both only with your own text")],
)
def test_option_of_a_text_needs_the_text(benchmark: str, option: str, problem: str, tmp_path: Path) -> None:
    assert problem in refused(
        run(benchmark, "-o", tmp_path / "to", option, write_files(tmp_path / "raw", {"x": "a"}) / "x")
    )


@pytest.mark.parametrize(("benchmark", "package"), [("resnet", "PIL"), ("ncf", "numpy")])
def test_missing_package_is_named(benchmark: str, package: str, tmp_path: Path) -> None:
    # -S: without site-packages
    done = ran(sys.executable, "-S", "-m", f"benchmarks.{benchmark}.prepare", "-o", tmp_path / "to")
    assert (done.returncode, f"{package} is not installed in this Python" in done.stderr) == (2, True)
