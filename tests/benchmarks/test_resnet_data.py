"""Preparing ResNet's data set: true layouts, corrupt images, and everything that can go wrong on the way.

What all preparations share is in test_data.py; what DALI decodes is in tests/in_framework/mxnet/prepare.py.
"""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from PIL import Image

from benchmarks.common.data import passport as passports
from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.resnet import parts
from benchmarks.resnet.prepare import check
from encore import paths
from tests import preparing

WORDNET_IDS = ("n01440764", "n01443537", "n02084071")
# Small parts let a test interrupt between them.
DRIVER = """
import sys
from benchmarks.resnet import parts, prepare
parts.PART_IMAGES = 4
if __name__ == "__main__":
    sys.exit(prepare.main([*sys.argv[1:], "--progress", "json"]))
"""
Prepare = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Small JPEGs 00.jpg to 47.jpg, and 28 large ones.
    folder, random = tmp_path_factory.mktemp("images"), np.random.RandomState(0)
    for number in range(48):
        small = Image.fromarray((random.rand(6, 8, 3) * 255).astype("uint8"))
        small.resize((80 + number, 60), Image.Resampling.BICUBIC).save(folder / f"{number:02}.jpg")
    for number in range(28):
        noise = (random.rand(700, 900, 3) * 255).astype("uint8")
        Image.fromarray(noise).save(folder / f"large{number:02}.jpg", quality=90)
    return folder


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    # Small parts, in this process; returns the lines that are reported.
    monkeypatch.setattr(parts, "PART_IMAGES", 4)

    def run(*words: object, code: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in preparing.here("resnet", *words, code=code).splitlines()]

    return run


def class_folders(root: Path, images: Path, plan: dict[str, int], begin: int = 0) -> Path:
    # That many images in each class.
    number = begin
    for name, count in plan.items():
        (root / name).mkdir(parents=True)
        for _ in range(count):
            shutil.copy2(images / f"{number:02}.jpg", root / name / f"{number:02}.jpg")
            number += 1
    return root


@pytest.fixture
def pets(tmp_path: Path, images: Path) -> Path:
    # train/ of 3 x 8 images and val/ of 3 x 2.
    class_folders(tmp_path / "pets" / "train", images, {"ant": 8, "bee": 8, "cow": 8})
    class_folders(tmp_path / "pets" / "val", images, {"ant": 2, "bee": 2, "cow": 2}, begin=24)
    return tmp_path / "pets"


def records(folder: Path, split: str) -> list[tuple[float, bytes]]:
    # Labels and image bytes of a split in their order.
    with (folder / f"{split}.rec").open("rb") as file:
        return [unpack(read_record(file, offset)) for _, offset in read_index(folder / f"{split}.idx")]


# -- sources ------------------------------------------------------------------------------------------


def test_class_folders_keep_their_bytes_and_labels(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    (pets / "train" / "ant" / "notes.txt").write_text("no image")
    (pets / "README").write_text("no class")
    lines = prepare(pets, "-o", tmp_path / "out")
    assert "1 files left out: no images by their suffix" in preparing.notes(lines)
    for split, mixes in (("train", True), ("val", False)):
        files = [
            (float(label), path.read_bytes())
            for label, name in enumerate(("ant", "bee", "cow"))
            for path in sorted((pets / split / name).glob("*.jpg"))
        ]
        found = records(tmp_path / "out", split)
        assert sorted(found) == sorted(files)
        assert (found != files) == mixes, "the training images are mixed"
    assert preparing.passport(tmp_path / "out")["name"] == "pets"


def test_the_result_depends_on_the_seed_and_not_on_the_workers(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    prepare(pets, "-o", tmp_path / "here")
    prepare(pets, "-o", tmp_path / "other", "--seed", 1)
    assert preparing.run("resnet", pets, "-o", tmp_path / "worker")[0] == 0
    ids = [preparing.passport(tmp_path / name)["id"] for name in ("worker", "here", "other")]
    assert ids[0] == ids[1] != ids[2]


def test_one_tree_is_split_by_class(tmp_path: Path, images: Path, prepare: Prepare) -> None:
    source, out = class_folders(tmp_path / "tree", images, {"ant": 10, "bee": 20, "cow": 2}), tmp_path / "out"
    prepare(source, "-o", out, "--validation-fraction", 0.2)
    assert Counter(label for label, _ in records(out, "val")) == {0: 2, 1: 4, 2: 1}
    assert len(set(records(out, "train")) | set(records(out, "val"))) == 32


@pytest.fixture
def imagenet(tmp_path: Path, images: Path) -> Path:
    # ImageNet's tars in their true layout, with three classes of eight images and six held out.
    folder = tmp_path / "imagenet"
    folder.mkdir()
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w") as train:
        for label, name in reversed(list(enumerate(WORDNET_IDS))):
            with tarfile.open(tmp_path / f"{name}.tar", "w") as inner:
                for number in range(8 * label, 8 * label + 8):
                    inner.add(images / f"{number:02}.jpg", f"{name}_{number}.JPEG")
            train.add(tmp_path / f"{name}.tar", f"{name}.tar")
    with tarfile.open(folder / "ILSVRC2012_img_val.tar", "w") as val:
        for number in reversed(range(6)):
            val.add(images / f"{24 + number:02}.jpg", f"ILSVRC2012_val_{number + 1:08}.JPEG")
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "height", "num_train_images"]
    synsets = np.zeros((5, 1), [(name, object) for name in fields])
    # The true file numbers leaves in an order that is not that of their WordNet ids, inner nodes last.
    for row, name in enumerate(["n02084071", "n01440764", "n01443537", "n00001740", "n00015388"]):
        children = [] if row < 3 else [1, 2]
        synsets[row, 0] = (row + 1, name, "words", "gloss", len(children), np.array(children), 0, 16)
    scipy.io.savemat(tmp_path / "meta.mat", {"synsets": synsets})
    (tmp_path / "truth.txt").write_text("1\n2\n3\n3\n2\n1\n")
    with tarfile.open(folder / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as devkit:
        devkit.add(tmp_path / "meta.mat", "ILSVRC2012_devkit_t12/data/meta.mat")
        devkit.add(tmp_path / "truth.txt", "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt")
    return folder


def test_imagenets_tars_are_read_in_place(tmp_path: Path, images: Path, imagenet: Path, prepare: Prepare) -> None:
    out = tmp_path / "out"
    assert "imagenet with 3 classes" in prepare(imagenet, "-o", out, code=2)[-1]["error"]["found"]
    prepare(imagenet, "-o", out, "--name", "tiny-imagenet")
    assert preparing.passport(out)["classes"] == list(WORDNET_IDS)
    train = {image: label for label, image in records(out, "train")}
    assert train == {(images / f"{number:02}.jpg").read_bytes(): number // 8 for number in range(24)}
    # The ground truth 1 2 3 3 2 1 numbers n02084071, n01440764, n01443537.
    labels = (2, 0, 1, 1, 0, 2)
    val = [(label, (images / f"{24 + number:02}.jpg").read_bytes()) for number, label in enumerate(labels)]
    assert records(out, "val") == val
    (imagenet / "ILSVRC2012_img_val.tar").unlink()
    class_folders(imagenet / "val", images, dict.fromkeys(WORDNET_IDS, 2), begin=24)
    prepare(imagenet, "-o", tmp_path / "folders", "--name", "tiny")
    assert [label for label, _ in records(tmp_path / "folders", "val")] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["devkit_t12.tar.gz", "img_train.tar", "img_val.tar"])
@pytest.mark.parametrize(("kept", "found"), [(0.0, "no ILSVRC2012_"), (0.5, "whole")])
def test_a_missing_or_truncated_tar_is_named(
    tmp_path: Path, imagenet: Path, prepare: Prepare, name: str, kept: float, found: str
) -> None:
    path = imagenet / f"ILSVRC2012_{name}"
    content = path.read_bytes()[: int(path.stat().st_size * kept)]
    path.unlink()
    if kept:
        path.write_bytes(content)
    error = prepare(imagenet, "-o", tmp_path / "out", "--name", "tiny", code=2)[-1]["error"]
    assert found in error["found"] and name in error["found"]


# -- images -------------------------------------------------------------------------------------------


def test_resizing_reduces_the_short_side_and_quality_re_encodes(
    tmp_path: Path, images: Path, pets: Path, prepare: Prepare
) -> None:
    shutil.copy2(images / "large00.jpg", pets / "val" / "ant" / "large.jpg")
    prepare(pets, "-o", tmp_path / "out", "--resize", 100)
    originals = {path.read_bytes() for path in (pets / "val").glob("*/??.jpg")}
    (changed,) = (image for _, image in records(tmp_path / "out", "val") if image not in originals)
    assert Image.open(io.BytesIO(changed)).size == (129, 100)
    prepare(pets, "-o", tmp_path / "low", "--quality", 40)
    assert not {image for _, image in records(tmp_path / "low", "val")} & originals


def test_corrupt_images_are_named_then_fixed_or_skipped(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    truncated = pets / "train" / "bee" / "10.jpg"
    truncated.write_bytes(truncated.read_bytes()[:-200])
    (pets / "val" / "cow" / "28.jpg").write_text("<html>404</html>")
    (pets / "train" / "ant" / "00.jpg").write_bytes(b"")
    first, *lines = prepare(pets, "-o", tmp_path / "out", code=2)[-1]["error"]["found"].splitlines()
    unknown = "no image of a format that Pillow reads"
    expected = {
        f"train: ant/00.jpg: {unknown}",
        "train: bee/10.jpg: image file is truncated",
        f"val: cow/28.jpg: {unknown}",
    }
    assert (first, {line.strip().split(" (")[0] for line in lines}) == ("3 corrupt images", expected)
    assert not (tmp_path / "out" / "dataset.json").exists()
    code, again = preparing.run("resnet", pets, "-o", tmp_path / "out", "--skip-corrupt")
    assert (code, "resuming: 8 of 8 parts" in preparing.notes(again)) == (0, True)
    split = preparing.passport(tmp_path / "out")["splits"]["train"]
    assert (split["count"], split["skipped"], split["skipped_names"]) == (22, 2, ["ant/00.jpg", "bee/10.jpg"])
    assert passports.verify(tmp_path / "out", check=check) == []


def test_many_corrupt_images_are_counted_and_twenty_named(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    for path in (pets / "train").glob("*/*.jpg"):
        path.write_bytes(b"no image")
    found = prepare(pets, "-o", tmp_path / "out", code=2)[-1]["error"]["found"]
    assert found.startswith("24 corrupt images") and found.endswith("and 4 more")
    assert found.count(".jpg") == 20
    # Nothing is left of the classes, so they cannot be skipped either.
    error = prepare(pets, "-o", tmp_path / "out", "--skip-corrupt", code=2)[-1]["error"]
    assert error["found"] == "train has no image of ant, bee, cow"


# -- interruptions ------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path, images: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    # A preparation of 24 + 4 images in a process of its own, which has finished a part; it re-encodes, which takes a
    # while.
    for split, begin, count in (("train", 0, 24), ("val", 24, 4)):
        for number in range(count):
            folder = tmp_path / "slow" / split / ("more" if number == count - 1 else "all")
            folder.mkdir(parents=True, exist_ok=True)
            os.link(images / f"large{begin + number:02}.jpg", folder / f"{number}.jpg")
    words = [str(tmp_path / "slow"), "--quality", "95", "--workers", "2", "-o"]
    command = [sys.executable, "-c", DRIVER, *words, str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=paths.ROOT, **pipes) as child:
        while not list((tmp_path / "out" / "parts").glob("train-*.json")):
            assert child.poll() is None, child.communicate()
            time.sleep(0.002)
        yield child, words


def children(child: subprocess.Popen[str]) -> list[Path]:
    numbers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    return [Path("/proc", number) for number in numbers]


def is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_preparation_resumes_and_no_worker_outlives_it(
    tmp_path: Path, started: tuple[subprocess.Popen[str], list[str]], prepare: Prepare, number: signal.Signals
) -> None:
    child, words = started
    processes = children(child)
    child.send_signal(number)
    printed, errors = child.communicate()
    assert child.returncode == (-9 if number == signal.SIGKILL else 130)
    assert number == signal.SIGKILL or "it resumes" in json.loads(printed.splitlines()[-1])["error"]["hint"]
    assert "Traceback" not in errors
    while any(map(is_running, processes)):
        time.sleep(0.01)
    assert "half-written" in passports.verify(tmp_path / "out")[0].found
    prepare(*words, tmp_path / "out")
    prepare(*words, tmp_path / "whole")
    assert preparing.passport(tmp_path / "out")["id"] == preparing.passport(tmp_path / "whole")["id"]
    assert not (tmp_path / "out" / "parts").exists()


@pytest.mark.slow
def test_a_killed_worker_ends_the_preparation(started: tuple[subprocess.Popen[str], list[str]]) -> None:
    child, _ = started
    worker = next(each for each in children(child) if b"spawn_main" in (each / "cmdline").read_bytes())
    os.kill(int(worker.name), signal.SIGKILL)
    printed, _ = child.communicate()
    assert json.loads(printed.splitlines()[-1])["error"]["found"] == "a worker process was killed"
    assert child.returncode == 1


def test_joining_resumes_byte_for_byte(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    prepare(pets, "-o", tmp_path / "whole")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    # Not even room for a part, then for some, then for all of them and not for the joined file.
    for limit in range(4000, 40000, 4000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            prepare(pets, "-o", tmp_path / "out", code=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    prepare(pets, "-o", tmp_path / "out")
    assert preparing.passport(tmp_path / "out")["id"] == preparing.passport(tmp_path / "whole")["id"]


def test_too_little_room_is_reported_before_the_start(
    tmp_path: Path, pets: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9999, 0, 9999))
    error = prepare(pets, "-o", tmp_path / "out", code=2)[-1]["error"]
    assert error["found"] == f"10.0 kB free on the disk of {tmp_path / 'out'}"
    assert not list((tmp_path / "out" / "parts").glob("*.rec"))


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "place", "expected"),
    [
        ({}, "nowhere", "does not exist"),
        ({"a/ant": 1}, "a/ant/00.jpg", "is no folder"),
        ({"a/ant": 3}, "a", "all images are in one class folder, ant"),
        ({"a/ant": 1}, "a/ant", "has no class folders"),
        ({"a/ant": 0, "a/bee": 0}, "a", "hold no images"),
        ({"a/train/ant": 2}, "a", "no held-out images"),
        ({"a/train/ant": 2, "a/train/bee": 2, "a/val/ant": 1}, "a", "val has no image of bee"),
        ({"a/train/ant": 2, "a/val/ant": 1, "a/val/yak": 1}, "a", "train has no image of yak"),
        ({"a/ant": 3, "a/bee": 1}, "a", "the class bee has a single image"),
    ],
)
def test_a_bad_source_is_refused_by_name(
    tmp_path: Path, images: Path, prepare: Prepare, folders: dict[str, int], place: str, expected: str
) -> None:
    class_folders(tmp_path / "raw", images, folders)
    error = prepare(tmp_path / "raw" / place, "-o", tmp_path / "out", code=2)[-1]["error"]
    assert expected in error["found"] and error["hint"]


@pytest.mark.parametrize(
    "words",
    [
        "-o x --resize 0", "-o x --quality 101", "-o x --workers none", "-o x --validation-fraction 1",
        "-o x --verify y", "--strange", "",
    ],
)  # fmt: skip
def test_a_bad_option_is_refused(prepare: Prepare, words: str) -> None:
    assert prepare(*words.split(), code=2)[-1]["error"]["found"]


def test_verifying_needs_the_standard_library_only(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    prepare(pets, "-o", tmp_path / "out")
    # -S: no site-packages.
    command = [sys.executable, "-S", "-m", "benchmarks.resnet.prepare", "--verify", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=paths.ROOT)
    assert (done.returncode, "is whole (every byte): pets, 24 train, 6 val" in done.stderr) == (0, True), done.stderr
    (tmp_path / "out" / "val.rec").unlink()
    (tmp_path / "out" / "train.rec").write_bytes(b"")
    assert len(prepare("--verify", tmp_path / "out", "--quick", code=2)[-1]["error"]["more"]) == 1
