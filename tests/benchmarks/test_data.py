"""All preparations: options, locked folders, interruptions, full disks, overlaps and finished data sets."""

import bz2
import fcntl
import gzip
import importlib
import itertools
import json
import lzma
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.data.problem import Problem
from encore import data, paths
from encore.cli.data import describe
from tests.preparing import Lines, manifest, notes, refused, run


def save_noise(path: Path, sigma: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("PIL.Image").effect_noise((64, 48), sigma).convert("RGB").save(path)


def write_pictures(folder: Path) -> None:
    for split, label, number in itertools.product(("train", "val"), ("ant", "bee"), range(3)):
        save_noise(folder / split / label / f"{number}.jpg", 60 + number)


def write_lines(path: Path, lines: Iterable[str], end: str = "\n") -> None:
    path.write_text("".join(line + end for line in lines))


def write_clicks(folder: Path) -> None:
    rows = ([str(n % 2), *["7"] * 13, *[f"{n % 9:08x}"] * 26] for n in range(300))
    write_lines(folder / "train.txt", map("\t".join, rows))


def write_ratings(folder: Path) -> None:
    rows = (f"{user}\t{item}\t4\t{user + item}" for user in range(9) for item in range(user, user + 4))
    write_lines(folder / "u.data", rows)


def write_pairs(folder: Path) -> None:
    for (part, end), (code, word) in itertools.product(
        (("train", "\n"), ("test", " s\n")), (("en", "house"), ("de", "haus"))
    ):
        write_lines(folder / f"{part}.{code}", (f"{word}@@ s {n % 7}" for n in range(40)), end)


def write_scenes(folder: Path) -> None:
    (folder / "annotations").mkdir()
    box = {"category_id": 7, "iscrowd": 0, "bbox": [2, 3, 10, 10], "area": 100}
    box["segmentation"] = [[2, 3, 2, 13, 12, 13, 12, 3]]
    content = {
        "images": [{"id": n, "file_name": f"{n}.jpg", "width": 64, "height": 48} for n in range(1, 5)],
        "annotations": [{"id": n, "image_id": n, **box} for n in range(1, 5)],
        "categories": [{"id": 7, "name": "square"}],
    }
    for part in ("train", "val"):
        (folder / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(content))
        for number in range(1, 5):
            save_noise(folder / f"{part}2017" / f"{number}.jpg", 60 + number)


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".")


def write_articles(folder: Path) -> None:
    words = ("the", "cat", "dog", "house", "town", "runs", "sees")
    write_lines(folder / "vocab.txt", (*SPECIAL, *words))
    lines = [" ".join(words[(a * n + b) % 7] for n in range(5)) + " ." for a in range(9) for b in range(9)]
    (folder / "articles.txt").write_text("\n\n".join("\n".join(lines[n : n + 9]) for n in range(0, 81, 9)) + "\n")


def write_questions(folder: Path) -> None:
    write_lines(folder / "vocab.txt", (*SPECIAL, *["what", "is", "the", "town", "of", "ada", "lives", "in", "bray"]))
    answer = {"text": "Bray", "answer_start": 13}
    for part, text in (("train", "What is the town of Ada"), ("dev", "Ada lives in what town")):
        questions = [{"id": f"{part}{n}", "question": text, "answers": [answer]} for n in range(9)]
        paragraph = {"context": "Ada lives in Bray.", "qas": questions}
        (folder / f"{part}-v1.1.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": [paragraph]}]}))


def write_texts(folder: Path) -> None:
    tokenization = pytest.importorskip("benchmarks.llama.tokenization")
    train, test = ([f"{word} of {number}" for number in range(9)] for word in ("town", "sea"))
    for part, texts in (("train", train), ("test", test)):
        (folder / f"{part}.txt").write_text("\n\n".join(texts) + "\n")
    tokenization.learn(train, 260).save(str(folder / "tokenizer.json"))


def write_packed(folder: Path) -> None:
    for part, first in (("train", 0), ("test", 100)):
        rows = [list(range(row, row + 16)) for row in range(first, first + 9)]
        write_lines(folder / f"{part}.jsonl", (json.dumps({"input_ids": row, "labels": row}) for row in rows))


# Writer of a benchmark's raw data, and a file of the prepared set; gnmt and ssd share their preparation with the
# Transformer and Mask R-CNN
SOURCES: dict[str, tuple[Callable[[Path], None], str]] = {
    "resnet": (write_pictures, "train.rec"),
    "dlrm": (write_clicks, "train.bin"),
    "ncf": (write_ratings, "train_users.npy"),
    "gnmt": (write_pairs, "train_source.npy"),
    "ssd": (write_scenes, "train_boxes.npy"),
    "bert": (write_articles, "train_tokens.npy"),
    "bert_squad": (write_questions, "train_tokens.npy"),
    "llama2_70b_lora": (write_packed, "train_tokens.npy"),
    "llama31_8b": (write_texts, "train.bin"),
}
ONE_PASS = ("ncf", "bert_squad", "llama2_70b_lora")  # Prepared again from the start in seconds
every_benchmark = pytest.mark.parametrize("benchmark", SOURCES)
# Code of common/data/prepare.py: for a benchmark with parts to resume from, and one without
two_benchmarks = pytest.mark.parametrize("benchmark", ["ncf", "dlrm"])


@pytest.fixture
def source(benchmark: str, tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    SOURCES[benchmark][0](tmp_path / "raw")
    return tmp_path / "raw"


def prepare(benchmark: str, source: Path, to: Path, *words: object, **options: int) -> tuple[int, Lines]:
    return run(benchmark, source, "-o", to, "--name", "mine", *words, **options)


def noted(outcome: tuple[int, Lines], note: str) -> None:
    assert outcome[0] == 0 and note in notes(outcome[1]), outcome


def failed(outcome: tuple[int, Lines], problem: str, code: int = 2) -> Any:
    error = outcome[1][-1]["error"]
    assert outcome[0] == code and problem in error["found"], outcome
    return error


@pytest.fixture
def interrupted(benchmark: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A preparation that was interrupted when all files but its manifest were complete
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.common.data.manifest.write", interrupt)
        failed(prepare(benchmark, source, tmp_path / "to"), "interrupted", code=130)
    assert (tmp_path / "to" / SOURCES[benchmark][1]).exists()
    return tmp_path / "to"


@pytest.mark.parametrize("benchmark", ["ncf"])
def test_preparation_waits_for_another_one(benchmark: str, source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    (to / "parts").mkdir(parents=True)
    command = [sys.executable, "-m", f"benchmarks.{benchmark}.prepare", "--workers", "1", "--progress", "json"]
    command += [str(source), "--name", "mine", "-o", str(to)]
    with (to / "parts" / "lock").open("wb") as lock, ThreadPoolExecutor(2) as threads:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        children = [subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for child in children:
            assert child.stdout is not None
            assert any("another preparation is writing" in line for line in child.stdout)
        assert [path.name for path in (to / "parts").iterdir()] == ["lock"]
        fcntl.lockf(lock, fcntl.LOCK_UN)
        outputs = [output for output, _ in threads.map(subprocess.Popen.communicate, children)]
    assert [child.returncode for child in children] == [0, 0]
    assert sum("nothing to do" in output for output in outputs) == 1
    assert not (to / "parts").exists()


@pytest.mark.slow
@two_benchmarks
def test_finished_set_is_not_replaced(benchmark: str, source: Path, tmp_path: Path) -> None:
    to, file = tmp_path / "to", tmp_path / "to" / SOURCES[benchmark][1]
    assert prepare(benchmark, source, to)[0] == 0
    modified = (to / "dataset.json").stat().st_mtime_ns
    noted(prepare(benchmark, source, to), "nothing to do")
    assert (to / "dataset.json").stat().st_mtime_ns == modified
    failed(prepare(benchmark, source, to, "--seed", 7), "from another source or with other options")
    assert prepare(benchmark, source, to, "--seed", 7, "--overwrite")[0] == 0
    file.write_bytes(b"")
    failed(prepare(benchmark, source, to, "--seed", 7), "have changed since")
    for manifest_text in ("{", ""):  # Files of another program
        file.write_bytes(b"precious")
        (to / "dataset.json").write_text(manifest_text)
        failed(prepare(benchmark, source, to), "without a manifest")
        assert file.read_bytes() == b"precious"


@pytest.mark.slow
@every_benchmark
def test_interrupted_preparation_resumes_to_the_same_set(
    benchmark: str, source: Path, tmp_path: Path, interrupted: Path
) -> None:
    code, lines = prepare(benchmark, source, interrupted)
    assert (code, benchmark in ONE_PASS or "resuming:" in notes(lines)) == (0, True)
    assert any(line.get("phase") == "index" for line in lines) == (benchmark == "resnet")
    assert prepare(benchmark, source, tmp_path / "reference")[0] == 0
    facts = manifest(interrupted)
    assert facts["id"] == manifest(tmp_path / "reference")["id"]
    assert not (interrupted / "parts").exists()
    assert ("classes" in describe(data.read_passport(interrupted))) == (benchmark in ("resnet", "ssd"))
    for words in ((), ("--quick",)):
        assert run(benchmark, "--verify", interrupted, *words)[0] == 0
    (interrupted / "dataset.json").write_text(json.dumps({**facts, "benchmark": "minigo", "shared_with": []}))
    failed(run(benchmark, "--verify", interrupted), "is a data set of minigo")
    (interrupted / SOURCES[benchmark][1]).write_bytes(b"")
    assert len(failed(run(benchmark, "--verify", interrupted, "--quick"), "")["more"]) == 2


@pytest.mark.slow
@two_benchmarks
@pytest.mark.parametrize("name", ["mine", "other"])
def test_other_source_or_options_start_over(benchmark: str, name: str, source: Path, interrupted: Path) -> None:
    if name == "mine":
        (file,) = source.iterdir()
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    noted(prepare(benchmark, source, interrupted, "--name", name), "starting over")
    assert manifest(interrupted)["name"] == name


@pytest.mark.slow
@every_benchmark
def test_full_disk_is_reported_and_parts_stay(benchmark: str, source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    error = failed(prepare(benchmark, source, to, limit=200), f"no room to write on in {to}: File too large", code=1)
    assert "finished parts are kept" in error["hint"]
    assert not [path for path in (to / "parts").glob("*.*") if path.suffix[1:].isdigit()]
    assert prepare(benchmark, source, to)[0] == 0


@pytest.mark.parametrize("benchmark", ["ncf"])
def test_unusable_folders_are_refused(benchmark: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for raw, to, problem in (
        (source, tmp_path / "file", "cannot write in"),
        (source, Path("/proc/encore"), "cannot write in"),
        (source, source / "to", "is within the source"),
        (tmp_path / "nowhere", tmp_path / "to", f"{tmp_path / 'nowhere'} does not exist"),
    ):
        failed(prepare(benchmark, raw, to), problem)
    assert not (tmp_path / "to").exists()


# Files for evaluation with the training files that replace them, the number reported, and the first one reported
COPIES = {
    "resnet": ({"val": "train"}, "6 of 6 evaluation images", "ant/0.jpg"),
    "dlrm": ({"test.txt": "train.txt"}, "300 of 300 evaluation rows", "line 1 of"),
    "gnmt": ({"test.en": "train.en", "test.de": "train.de"}, "40 of 40 evaluation pairs", "line 1 of"),
    "ssd": ({"val2017": "train2017"}, "4 of 4 evaluation images", "1.jpg"),
    "bert": ({"../held.txt": "articles.txt"}, "9 of 9 evaluation documents", "the one that begins: the the"),
    "bert_squad": ({"dev-v1.1.json": "train-v1.1.json"}, "9 of 9 evaluation questions", "train0"),
    "llama2_70b_lora": ({"test.jsonl": "train.jsonl"}, "9 of 9 evaluation samples", "row 1"),
    "llama31_8b": ({"test.txt": "train.txt"}, "9 of 9 evaluation documents", "the one that begins: town of 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", COPIES)
def test_evaluation_data_in_the_training_data_are_refused(benchmark: str, source: Path, tmp_path: Path) -> None:
    files, count, first = COPIES[benchmark]
    for test, train in files.items():
        shutil.rmtree(source / test, ignore_errors=True)
        subprocess.run(["cp", "-rT", source / train, source / test], check=True)
    words = ("--evaluation", tmp_path / "held.txt") if benchmark == "bert" else ()
    problem = f"{count} are in the training data as well, the first is "
    error = failed(prepare(benchmark, source, tmp_path / "to", *words), problem)
    assert error["found"].startswith(problem) and first in error["found"] and "--allow-overlap" in error["hint"]
    noted(prepare(benchmark, source, tmp_path / "to", *words, "--allow-overlap"), f"warning: {problem}")
    assert manifest(tmp_path / "to")["how"]["in_both"] == int(count.split()[0])


@pytest.mark.parametrize("benchmark", ["gnmt"])
def test_small_overlap_is_a_warning(source: Path, tmp_path: Path) -> None:
    for code in ("en", "de"):
        lines = (source / f"train.{code}").read_text().splitlines(keepends=True)
        with (source / f"test.{code}").open("a") as file:
            file.write(lines[0] * 4)
    noted(prepare("gnmt", source, tmp_path / "to"), "warning: 4 of 44 evaluation pairs are")


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


@pytest.mark.parametrize("benchmark", TEXTS)
def test_utf_16_is_refused(benchmark: str, source: Path, tmp_path: Path) -> None:
    path = source / TEXTS[benchmark]
    path.write_text(path.read_text(), encoding="utf-16")
    assert f"{path} is UTF-16" in refused(run(benchmark, source, "-o", tmp_path / "to"))


@pytest.mark.parametrize("benchmark", [name for name in TEXTS if name != "ssd"])
def test_zstandard_is_refused_with_its_command(benchmark: str, source: Path, tmp_path: Path) -> None:
    path = source / TEXTS[benchmark]
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(9))
    message = refused(run(benchmark, source, "-o", tmp_path / "to"))
    assert f"{path} is compressed by zstd" in message and f"zstd -d {path}.zst" in message


@pytest.mark.parametrize("benchmark", ["bert_squad", "llama2_70b_lora", "llama31_8b", "ncf"])
def test_byte_order_mark_is_ignored(benchmark: str, source: Path, tmp_path: Path) -> None:
    assert run(benchmark, source, "-o", tmp_path / "plain")[0] == 0
    for name in {TEXTS[benchmark], "vocab.txt"}:
        if (source / name).exists():
            (source / name).write_text((source / name).read_text(), encoding="utf-8-sig")
    assert run(benchmark, source, "-o", tmp_path / "marked")[0] == 0
    assert manifest(tmp_path / "marked")["id"] == manifest(tmp_path / "plain")["id"]


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
    (tmp_path / "raw").mkdir()
    write_texts(tmp_path / "raw")
    for part, last in (("train", text), ("test", "sea")):
        (tmp_path / "raw" / f"{part}.txt").unlink()
        rows = [JSON_LINES[benchmark](each) for each in ("town", "sea of town", last)]
        # Escaped only where UTF-8 cannot encode it
        lines = [json.dumps(row, ensure_ascii=case != "latin1") for row in rows]
        content = ("\n".join(lines) + "\n").encode()
        path = tmp_path / "raw" / f"{part}.jsonl{suffix if part == 'train' else ''}"
        path.write_bytes(change(content) if part == "train" else content)
    train = tmp_path / "raw" / f"train.jsonl{suffix}"
    message = refused(run(benchmark, tmp_path / "raw", "-o", tmp_path / "to"))
    assert f"{train}{problem.format(key=next(iter(JSON_LINES[benchmark](0))))}" in message
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("phase", ["list_source", "write"])
@two_benchmarks
def test_refused_preparation_leaves_no_folder(
    benchmark: str, phase: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        if len(args) == 4:
            (args[2] / "part").touch()
        raise Problem("no", "", "")

    declared = importlib.import_module(f"benchmarks.{benchmark}.prepare").DATA_SET
    monkeypatch.setattr(importlib.import_module(declared.writer), phase, refuse)
    (tmp_path / "empty").mkdir()
    for to in (tmp_path / "new" / "to", tmp_path / "empty"):
        assert failed(prepare(benchmark, source, to), "no")["found"] == "no"
    assert not (tmp_path / "new").exists()
    assert not [*(tmp_path / "empty").iterdir()]


OWN = {"resnet": ("--resize", "256"), "dlrm": ("--index-limit", "9"), "ssd": ("--scenes", "9")}


@pytest.mark.parametrize("owner", OWN)
@every_benchmark
def test_options_of_other_benchmarks_are_refused(benchmark: str, owner: str, tmp_path: Path) -> None:
    outcome = run(benchmark, "-o", tmp_path / "to", *OWN[owner], "--check-options")
    if benchmark == owner:
        assert outcome == (0, [])
    else:
        expected = failed(outcome, f"unrecognized arguments: {OWN[owner][0]}")["expected"]
        assert expected.startswith(f"the options of {benchmark.replace('_', '-')}: --output --verify --name")
        assert OWN[owner][0] not in expected
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(("benchmark", "package"), [("resnet", "PIL"), ("ncf", "numpy")])
def test_missing_package_is_named(benchmark: str, package: str, tmp_path: Path) -> None:
    # -S: without site-packages
    command = [sys.executable, "-S", "-m", f"benchmarks.{benchmark}.prepare", "-o", str(tmp_path / "to")]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, f"{package} is not installed in this Python" in done.stderr) == (2, True)
