"""What all preparations share: options, the claim on a folder, resuming, full disks and the look at a finished set."""

import fcntl
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.data.problem import Problem
from encore import data, paths
from encore.cli.data import describe
from tests.preparing import notes, passport, run


def write_pictures(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for label in ("ant", "bee"):
            (folder / split / label).mkdir(parents=True)
            for number in range(3):
                noise = image.effect_noise((64, 48), 60 + number)
                noise.convert("RGB").save(folder / split / label / f"{number}.jpg")


def write_clicks(folder: Path) -> None:
    rows = ["\t".join([str(number % 2), *["7"] * 13, *[f"{number % 9:08x}"] * 26]) + "\n" for number in range(300)]
    (folder / "train.txt").write_text("".join(rows))


def write_ratings(folder: Path) -> None:
    rows = [(user, item, 4, user + item) for user in range(9) for item in range(user, user + 4)]
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


def write_pairs(folder: Path) -> None:
    for part in ("train", "test"):
        for language, word in (("en", "house"), ("de", "haus")):
            lines = (f"{word}@@ s {n % 7}" + (" s" if part == "test" else "") + "\n" for n in range(40))
            (folder / f"{part}.{language}").write_text("".join(lines))


def write_scenes(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (folder / "annotations").mkdir()
    square = [2, 3, 2, 13, 12, 13, 12, 3]
    for part in ("train", "val"):
        (folder / f"{part}2017").mkdir()
        images, objects = [], []
        for number in range(1, 5):
            image.effect_noise((64, 48), 60 + number).save(folder / f"{part}2017" / f"{number}.jpg")
            images.append({"id": number, "file_name": f"{number}.jpg", "width": 64, "height": 48})
            facts = {"id": number, "image_id": number, "category_id": 7, "iscrowd": 0}
            objects.append({**facts, "bbox": [2, 3, 10, 10], "area": 100, "segmentation": [square]})
        content = {"images": images, "annotations": objects, "categories": [{"id": 7, "name": "square"}]}
        (folder / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(content))


def write_articles(folder: Path) -> None:
    words = ("the", "cat", "dog", "house", "town", "runs", "sees")
    (folder / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words)) + "\n")
    lines = [" ".join(words[(a * n + b) % 7] for n in range(5)) + " ." for a in range(9) for b in range(9)]
    (folder / "articles.txt").write_text("\n\n".join("\n".join(lines[n : n + 9]) for n in range(0, 81, 9)) + "\n")


def write_questions(folder: Path) -> None:
    words = ("what", "is", "the", "town", "of", "ada", "lives", "in", "bray")
    (folder / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words)) + "\n")
    answer = {"text": "Bray", "answer_start": 13}
    for part, text in (("train", "What is the town of Ada"), ("dev", "Ada lives in what town")):
        asked = [{"id": f"{part}{n}", "question": text, "answers": [answer]} for n in range(9)]
        paragraph = {"context": "Ada lives in Bray.", "qas": asked}
        (folder / f"{part}-v1.1.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": [paragraph]}]}))


def write_texts(folder: Path) -> None:
    tokenization = pytest.importorskip("benchmarks.llama.tokenization")
    texts = {
        part: [f"{word} of {number}" for number in range(9)] for part, word in (("train", "town"), ("test", "sea"))
    }
    for part, found in texts.items():
        (folder / f"{part}.txt").write_text("\n\n".join(found) + "\n")
    tokenization.learn(texts["train"], 260).save(str(folder / "tokenizer.json"))


def write_packed(folder: Path) -> None:
    for part, first in (("train", 0), ("test", 100)):
        rows = [list(range(first + row, first + row + 16)) for row in range(9)]
        (folder / f"{part}.jsonl").write_text(
            "".join(f"{json.dumps({'input_ids': row, 'labels': row})}\n" for row in rows)
        )


SOURCES: dict[str, Callable[[Path], None]] = {
    "resnet": write_pictures,
    "dlrm": write_clicks,
    "ncf": write_ratings,
    # The Transformer's prepare.py has the same code behind it.
    "gnmt": write_pairs,
    # Mask R-CNN's too.
    "ssd": write_scenes,
    "bert": write_articles,
    "bert_squad": write_questions,
    "llama2_70b_lora": write_packed,
    "llama31_8b": write_texts,
}
FILES = {
    "resnet": "train.rec",
    "dlrm": "train.bin",
    "ncf": "train_users.npy",
    "gnmt": "train_source.npy",
    "ssd": "train_boxes.npy",
    "bert": "train_tokens.npy",
    "bert_squad": "train_tokens.npy",
    "llama2_70b_lora": "train_tokens.npy",
    "llama31_8b": "train.bin",
}
ONE_PASS = ("ncf", "bert_squad", "llama2_70b_lora")  # prepared again from the start in seconds
every_benchmark = pytest.mark.parametrize("benchmark", SOURCES)
# What common/data/prepare.py does alike for all: for one that has parts to resume from, and one that has none.
two_benchmarks = pytest.mark.parametrize("benchmark", ["ncf", "dlrm"])


@pytest.fixture
def source(benchmark: str, tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    SOURCES[benchmark](tmp_path / "raw")
    return tmp_path / "raw"


def prepare(benchmark: str, source: Path, to: Path, *words: object, **how: int) -> tuple[int, list[dict[str, Any]]]:
    return run(benchmark, source, "-o", to, "--name", "mine", *words, **how)


def problem(lines: list[dict[str, Any]]) -> str:
    return str(lines[-1]["error"]["found"])


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A preparation is interrupted when all but its passport is written; the test undoes it."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.common.data.passport.write", stop)
    yield


@pytest.mark.parametrize("benchmark", ["ncf"])
def test_of_two_preparations_the_second_waits(benchmark: str, source: Path, tmp_path: Path) -> None:
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
        said = [out for out, _ in threads.map(subprocess.Popen.communicate, children)]
    assert [child.returncode for child in children] == [0, 0]
    assert sum("nothing to do" in each for each in said) == 1
    assert not (to / "parts").exists()


@pytest.mark.slow
@two_benchmarks
def test_a_finished_set_is_left_alone_and_another_one_refused(benchmark: str, source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert prepare(benchmark, source, to)[0] == 0
    before = (to / "dataset.json").stat().st_mtime_ns
    code, lines = prepare(benchmark, source, to)
    assert (code, "nothing to do" in notes(lines)) == (0, True)
    assert (to / "dataset.json").stat().st_mtime_ns == before
    code, lines = prepare(benchmark, source, to, "--seed", 7)
    assert (code, "from another source or with other options" in problem(lines)) == (2, True)
    assert prepare(benchmark, source, to, "--seed", 7, "--overwrite")[0] == 0
    (to / FILES[benchmark]).write_bytes(b"")
    code, lines = prepare(benchmark, source, to, "--seed", 7)
    assert (code, "have changed since" in problem(lines)) == (2, True)
    for torn in ("{", ""):  # files of somebody else
        (to / FILES[benchmark]).write_bytes(b"precious")
        (to / "dataset.json").write_text(torn)
        code, lines = prepare(benchmark, source, to)
        assert (code, "without a passport" in problem(lines)) == (2, True)
        assert (to / FILES[benchmark]).read_bytes() == b"precious"


@pytest.mark.slow
@every_benchmark
def test_what_was_interrupted_before_its_passport_resumes_to_the_same_set(
    benchmark: str, source: Path, tmp_path: Path, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = prepare(benchmark, source, tmp_path / "to")
    assert (code, problem(lines)) == (130, "interrupted")
    assert (tmp_path / "to" / FILES[benchmark]).exists()
    monkeypatch.undo()
    code, lines = prepare(benchmark, source, tmp_path / "to")
    assert code == 0
    assert benchmark in ONE_PASS or "resuming:" in notes(lines)
    assert any(line.get("phase") == "index" for line in lines) == (benchmark == "resnet")
    assert prepare(benchmark, source, tmp_path / "unbroken")[0] == 0
    assert passport(tmp_path / "to")["id"] == passport(tmp_path / "unbroken")["id"]
    assert not (tmp_path / "to" / "parts").exists()
    described = describe(data.read_passport(tmp_path / "to"))
    assert ("classes" in described) == (benchmark in ("resnet", "ssd")), described
    for how in ((), ("--quick",)):
        assert run(benchmark, "--verify", tmp_path / "to", *how)[0] == 0
    facts = passport(tmp_path / "to")
    (tmp_path / "to" / "dataset.json").write_text(json.dumps({**facts, "benchmark": "minigo", "shared_with": []}))
    code, lines = run(benchmark, "--verify", tmp_path / "to")
    assert (code, "is a data set of minigo" in problem(lines)) == (2, True)
    (tmp_path / "to" / FILES[benchmark]).write_bytes(b"")
    code, lines = run(benchmark, "--verify", tmp_path / "to", "--quick")
    assert len(lines[-1]["error"]["more"]) == 2


@pytest.mark.slow
@two_benchmarks
@pytest.mark.parametrize("name", ["mine", "other"])
def test_another_source_or_other_options_start_over(
    benchmark: str, name: str, source: Path, tmp_path: Path, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare(benchmark, source, tmp_path / "to")[0] == 130
    monkeypatch.undo()
    if name == "mine":
        (file,) = source.iterdir()
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    code, lines = prepare(benchmark, source, tmp_path / "to", "--name", name)
    assert (code, "starting over" in notes(lines)) == (0, True)
    assert passport(tmp_path / "to")["name"] == name


@pytest.mark.slow
@every_benchmark
def test_a_full_disk_is_one_line(benchmark: str, source: Path, tmp_path: Path) -> None:
    code, lines = prepare(benchmark, source, tmp_path / "to", limit=200)
    assert code == 1
    assert problem(lines) == f"no room to write on in {tmp_path / 'to'}: File too large"
    assert "finished parts are kept" in lines[-1]["error"]["hint"]
    assert not [path for path in (tmp_path / "to" / "parts").glob("*.*") if path.suffix[1:].isdigit()]
    assert prepare(benchmark, source, tmp_path / "to")[0] == 0


@pytest.mark.parametrize("benchmark", ["ncf"])
def test_places_that_cannot_be_used_are_refused(benchmark: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc/encore")):
        code, lines = prepare(benchmark, source, place)
        assert (code, "cannot write in" in problem(lines)) == (2, True)
    code, lines = prepare(benchmark, source, source / "to")
    assert (code, "is within the source" in problem(lines)) == (2, True)
    code, lines = prepare(benchmark, tmp_path / "nowhere", tmp_path / "to")
    assert (code, problem(lines)) == (2, f"{tmp_path / 'nowhere'} does not exist")
    assert not (tmp_path / "to").exists()


# Evaluation data by what they are a copy of, and how many are reported, of which the first.
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
def test_evaluation_data_that_are_trained_on_are_seen(benchmark: str, source: Path, tmp_path: Path) -> None:
    files, count, first = COPIES[benchmark]
    for held, trained in files.items():
        shutil.rmtree(source / held, ignore_errors=True)
        subprocess.run(["cp", "-rT", source / trained, source / held], check=True)
    words = ("--evaluation", tmp_path / "held.txt") if benchmark == "bert" else ()
    code, lines = prepare(benchmark, source, tmp_path / "to", *words)
    said = f"{count} are in the training data as well, the first is "
    assert (code, problem(lines).startswith(said), first in problem(lines)) == (2, True, True), lines[-1]
    assert "--allow-overlap" in lines[-1]["error"]["hint"]
    code, lines = prepare(benchmark, source, tmp_path / "to", *words, "--allow-overlap")
    assert (code, f"warning: {said}" in notes(lines)) == (0, True)
    assert passport(tmp_path / "to")["how"]["in_both"] == int(count.split()[0])


@pytest.mark.parametrize("benchmark", ["gnmt"])
def test_a_few_that_are_trained_on_are_a_warning(source: Path, tmp_path: Path) -> None:
    for language in ("en", "de"):
        trained, held = source / f"train.{language}", source / f"test.{language}"
        held.write_text(held.read_text() + trained.read_text().splitlines(keepends=True)[0] * 4)
    code, lines = prepare("gnmt", source, tmp_path / "to")
    assert (code, "warning: 4 of 44 evaluation pairs are" in notes(lines)) == (0, True)


@pytest.mark.parametrize("phase", ["list_source", "write"])
@two_benchmarks
def test_a_refused_preparation_leaves_no_folder(
    benchmark: str, phase: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        if len(args) == 4:
            (args[2] / "part").touch()
        raise Problem("no", "", "")

    declared = importlib.import_module(f"benchmarks.{benchmark}.prepare").DATA_SET
    monkeypatch.setattr(importlib.import_module(declared.writer), phase, refuse)
    (tmp_path / "there").mkdir()
    for to in (tmp_path / "new" / "to", tmp_path / "there"):
        code, lines = prepare(benchmark, source, to)
        assert (code, problem(lines)) == (2, "no")
    assert not (tmp_path / "new").exists()
    assert not [*(tmp_path / "there").iterdir()]


OWN = {"resnet": ("--resize", "256"), "dlrm": ("--index-limit", "9"), "ssd": ("--scenes", "9")}


@pytest.mark.parametrize("owner", OWN)
@every_benchmark
def test_the_options_of_another_benchmark_are_refused(benchmark: str, owner: str, tmp_path: Path) -> None:
    code, lines = run(benchmark, "-o", tmp_path / "to", *OWN[owner], "--check-options")
    if benchmark == owner:
        assert (code, lines) == (0, [])
    else:
        assert (code, problem(lines)) == (2, f"unrecognized arguments: {OWN[owner][0]}")
        expected = f"the options of {benchmark.replace('_', '-')}: --output --verify --name"
        assert lines[-1]["error"]["expected"].startswith(expected)
        assert OWN[owner][0] not in lines[-1]["error"]["expected"]
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("benchmark", ["resnet", "ncf"])
def test_a_package_that_is_missing_is_named(benchmark: str, tmp_path: Path) -> None:
    # -S: no site-packages.
    command = [sys.executable, "-S", "-m", f"benchmarks.{benchmark}.prepare", "-o", str(tmp_path / "to")]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{'PIL' if benchmark == 'resnet' else 'numpy'} is not installed in this Python" in done.stderr
