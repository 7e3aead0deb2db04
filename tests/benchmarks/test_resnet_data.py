"""ResNet's data set from ImageNet's tars and class folders, corrupt images, interruptions and bad input.

Tests of all preparations are in test_data.py; what DALI decodes is tested in tests/in_framework/mxnet/prepare.py.
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
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import scipy.io
from PIL import Image

from benchmarks.common.data import manifest as manifests
from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.resnet import parts
from benchmarks.resnet.prepare import check
from encore import paths
from tests import preparing
from tests.trainings import PATIENCE, wait_until

WORDNET_IDS = ("n01440764", "n01443537", "n02084071")
# Parts of four images, so that a preparation can be interrupted between two
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
    # Small JPEGs 00.jpg to 47.jpg, and 28 large ones
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
    # Returns the lines of a preparation in this process, in parts of four images
    monkeypatch.setattr(parts, "PART_IMAGES", 4)

    def run(*words: object, code: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in preparing.here("resnet", *words, code=code).splitlines()]

    return run


def class_folders(root: Path, images: Path, counts: dict[str, int], first: int = 0) -> Path:
    names = [name for name, count in counts.items() for _ in range(count)]
    for name in counts:
        (root / name).mkdir(parents=True)
    for number, name in enumerate(names, first):
        shutil.copy2(images / f"{number:02}.jpg", root / name / f"{number:02}.jpg")
    return root


@pytest.fixture
def pets(tmp_path: Path, images: Path) -> Path:
    # 3 x 8 images in train/ and 3 x 2 in val/
    for split, count, first in (("train", 8, 0), ("val", 2, 24)):
        class_folders(tmp_path / "pets" / split, images, dict.fromkeys(("ant", "bee", "cow"), count), first)
    return tmp_path / "pets"


def records(folder: Path, split: str) -> list[tuple[float, bytes]]:
    with (folder / f"{split}.rec").open("rb") as file:
        return [unpack(read_record(file, offset)) for _, offset in read_index(folder / f"{split}.idx")]


def id_of(folder: Path) -> str:
    return str(preparing.manifest(folder)["id"])


# -- sources ------------------------------------------------------------------------------------------


def test_class_folders_give_labels_and_unchanged_images(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    (pets / "train" / "ant" / "notes.txt").write_text("no image")
    (pets / "README").write_text("no class")
    lines = prepare(pets, "-o", tmp_path / "out")
    assert "1 files left out: no images by their suffix" in preparing.notes(lines)
    for split, is_shuffled in (("train", True), ("val", False)):
        files = [
            (float(label), path.read_bytes())
            for label, name in enumerate(("ant", "bee", "cow"))
            for path in sorted((pets / split / name).glob("*.jpg"))
        ]
        written = records(tmp_path / "out", split)
        assert (sorted(written) == sorted(files), written != files) == (True, is_shuffled)
    # The order depends on the seed, not on the workers
    assert preparing.run("resnet", pets, "-o", tmp_path / "workers")[0] == 0
    prepare(pets, "-o", tmp_path / "other", "--seed", 1)
    assert id_of(tmp_path / "workers") == id_of(tmp_path / "out") != id_of(tmp_path / "other")
    assert preparing.manifest(tmp_path / "out")["name"] == "pets"


def test_one_tree_is_split_by_class(tmp_path: Path, images: Path, prepare: Prepare) -> None:
    source, out = class_folders(tmp_path / "tree", images, {"ant": 10, "bee": 20, "cow": 2}), tmp_path / "out"
    prepare(source, "-o", out, "--validation-fraction", 0.2)
    assert Counter(label for label, _ in records(out, "val")) == {0: 2, 1: 4, 2: 1}
    assert len(set(records(out, "train")) | set(records(out, "val"))) == 32


@pytest.fixture
def imagenet(tmp_path: Path, images: Path) -> Path:
    # ImageNet's tars in the published layout: three classes of eight images, and six validation images
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
    # As in the published file, leaves come first and are not in the order of their WordNet ids
    for row, name in enumerate(["n02084071", "n01440764", "n01443537", "n00001740", "n00015388"]):
        children = [] if row < 3 else [1, 2]
        synsets[row, 0] = (row + 1, name, "words", "gloss", len(children), np.array(children), 0, 16)
    scipy.io.savemat(tmp_path / "meta.mat", {"synsets": synsets})
    (tmp_path / "truth.txt").write_text("1\n2\n3\n3\n2\n1\n")
    with tarfile.open(folder / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as devkit:
        devkit.add(tmp_path / "meta.mat", "ILSVRC2012_devkit_t12/data/meta.mat")
        devkit.add(tmp_path / "truth.txt", "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt")
    return folder


def test_tars_of_imagenet_are_read(tmp_path: Path, images: Path, imagenet: Path, prepare: Prepare) -> None:
    out = tmp_path / "out"
    assert "imagenet with 3 classes" in prepare(imagenet, "-o", out, code=2)[-1]["error"]["found"]
    prepare(imagenet, "-o", out, "--name", "tiny-imagenet")
    assert preparing.manifest(out)["classes"] == list(WORDNET_IDS)
    contents = [(images / f"{number:02}.jpg").read_bytes() for number in range(30)]
    assert sorted(records(out, "train")) == sorted((number // 8, contents[number]) for number in range(24))
    # Classes 1 2 3 3 2 1 of the devkit, which numbers n02084071, n01440764, n01443537
    assert records(out, "val") == list(zip((2, 0, 1, 1, 0, 2), contents[24:], strict=True))
    (imagenet / "ILSVRC2012_img_val.tar").unlink()
    class_folders(imagenet / "val", images, dict.fromkeys(WORDNET_IDS, 2), first=24)
    prepare(imagenet, "-o", tmp_path / "folders", "--name", "tiny")
    assert [label for label, _ in records(tmp_path / "folders", "val")] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["devkit_t12.tar.gz", "img_train.tar", "img_val.tar"])
@pytest.mark.parametrize(("share", "problem"), [(0.0, "no ILSVRC2012_"), (0.5, "complete")])
def test_missing_or_truncated_tar_is_named(
    tmp_path: Path, imagenet: Path, prepare: Prepare, name: str, share: float, problem: str
) -> None:
    path = imagenet / f"ILSVRC2012_{name}"
    os.truncate(path, int(path.stat().st_size * share))
    if not share:
        path.unlink()
    found = prepare(imagenet, "-o", tmp_path / "out", "--name", "tiny", code=2)[-1]["error"]["found"]
    assert (problem in found, name in found) == (True, True), found


# -- images -------------------------------------------------------------------------------------------


def test_resize_sets_the_short_side_and_quality_encodes_again(
    tmp_path: Path, images: Path, pets: Path, prepare: Prepare
) -> None:
    shutil.copy2(images / "large00.jpg", pets / "val" / "ant" / "large.jpg")
    prepare(pets, "-o", tmp_path / "out", "--resize", 100)
    originals = {path.read_bytes() for path in (pets / "val").glob("*/??.jpg")}
    (changed,) = (image for _, image in records(tmp_path / "out", "val") if image not in originals)
    assert Image.open(io.BytesIO(changed)).size == (129, 100)
    prepare(pets, "-o", tmp_path / "low", "--quality", 40)
    assert not {image for _, image in records(tmp_path / "low", "val")} & originals


def test_corrupt_images_are_named_then_skipped(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    os.truncate(pets / "train" / "bee" / "10.jpg", (pets / "train" / "bee" / "10.jpg").stat().st_size - 200)
    (pets / "val" / "cow" / "28.jpg").write_text("<html>404</html>")
    (pets / "train" / "ant" / "00.jpg").write_bytes(b"")
    first, *lines = prepare(pets, "-o", tmp_path / "out", code=2)[-1]["error"]["found"].splitlines()
    assert (first, sorted(line.strip().split(" (")[0] for line in lines)) == ("3 corrupt images", [
        "train: ant/00.jpg: not an image format that Pillow reads",
        "train: bee/10.jpg: image file is truncated",
        "val: cow/28.jpg: not an image format that Pillow reads",
    ])  # fmt: skip
    assert not (tmp_path / "out" / "dataset.json").exists()
    code, lines = preparing.run("resnet", pets, "-o", tmp_path / "out", "--skip-corrupt")
    assert (code, "resuming: 8 of 8 parts" in preparing.notes(lines)) == (0, True)
    split = preparing.manifest(tmp_path / "out")["splits"]["train"]
    assert (split["count"], split["skipped"], split["skipped_names"]) == (22, 2, ["ant/00.jpg", "bee/10.jpg"])
    assert manifests.verify(tmp_path / "out", check=check) == []


SCALE = np.linspace(0, 1, 48 * 64).reshape(48, 64) ** 2  # Mean 1/3, so that an inverted image differs


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("deep.png", (SCALE * 65535).astype(np.uint16)),
        ("deep.tiff", (SCALE * 65535).astype(np.uint16)),
        ("palette.png", Image.fromarray((SCALE * 255).astype(np.uint8)).convert("P")),
        ("cmyk.tiff", Image.fromarray((SCALE * 255).astype(np.uint8)).convert("RGB").convert("CMYK")),
        ("alpha.png", Image.fromarray(np.dstack([(SCALE * 255).astype(np.uint8)] * 2))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pixels_of_any_type_keep_their_brightness(
    tmp_path: Path, pets: Path, prepare: Prepare, name: str, pixels: Any
) -> None:
    shutil.rmtree(pets / "val" / "ant")
    (pets / "val" / "ant").mkdir()
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    picture.save(pets / "val" / "ant" / name)
    prepare(pets, "-o", tmp_path / "out")
    stored = Image.open(io.BytesIO(records(tmp_path / "out", "val")[0][1]))
    assert stored.mode == "RGB" and abs(np.asarray(stored).mean() - SCALE.mean() * 255) < 1


@pytest.mark.parametrize(
    ("pixels", "tags", "message"),
    [
        (SCALE.astype(np.float32), {}, "TIFF with float pixels (mode F)"),
        ((SCALE * 255).astype(np.int32), {}, "TIFF with integer pixels of more than 8 bits (mode I)"),
        ((SCALE * 65535).astype(np.uint16), {262: 0}, "(mode I;16)"),  # White is zero
    ],
    ids=["float", "integer", "inverted"],
)
def test_pixels_without_a_range_are_named(
    tmp_path: Path, pets: Path, prepare: Prepare, pixels: Any, tags: dict[int, int], message: str
) -> None:
    Image.fromarray(pixels).save(pets / "train" / "bee" / "deep.tiff", tiffinfo=tags)
    found = prepare(pets, "-o", tmp_path / "out", code=2)[-1]["error"]["found"]
    assert found.startswith("1 corrupt images") and "train: bee/deep.tiff: " in found and message in found


def test_first_twenty_corrupt_images_are_named(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    for path in (pets / "train").glob("*/*.jpg"):
        path.write_bytes(b"no image")
    problem = prepare(pets, "-o", tmp_path / "out", code=2)[-1]["error"]["found"]
    assert problem.startswith("24 corrupt images") and problem.endswith("and 4 more") and problem.count(".jpg") == 20
    # No image of these classes would be left
    error = prepare(pets, "-o", tmp_path / "out", "--skip-corrupt", code=2)[-1]["error"]
    assert error["found"] == "train has no image of ant, bee, cow"


# -- interruptions ------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path, images: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    # A preparation of 24 + 4 images in its own process, which has finished a part; re-encoding makes it slow
    for number in range(28):
        split, label = "val" if number >= 24 else "train", "last" if number in (23, 27) else "other"
        folder = tmp_path / "slow" / split / label
        folder.mkdir(parents=True, exist_ok=True)
        os.link(images / f"large{number:02}.jpg", folder / f"{number}.jpg")
    words = [str(tmp_path / "slow"), "--quality", "95", "--workers", "2", "-o"]
    command = [sys.executable, "-c", DRIVER, *words, str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=paths.ROOT, **pipes) as child:
        done = (tmp_path / "out" / "parts").glob
        wait_until(lambda: any(done("train-*.json")) or child.poll() is not None, "a part")
        yield child, words


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_preparation_ends_its_workers_and_resumes(
    tmp_path: Path, started: tuple[subprocess.Popen[str], list[str]], prepare: Prepare, number: signal.Signals
) -> None:
    child, words = started
    workers = psutil.Process(child.pid).children()
    child.send_signal(number)
    printed, errors = child.communicate()
    assert child.returncode == (-9 if number == signal.SIGKILL else 130)
    assert number == signal.SIGKILL or "again to resume" in json.loads(printed.splitlines()[-1])["error"]["hint"]
    assert "Traceback" not in errors
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []
    assert "half-written" in manifests.verify(tmp_path / "out")[0].found
    prepare(*words, tmp_path / "out")
    prepare(*words, tmp_path / "reference")
    assert id_of(tmp_path / "out") == id_of(tmp_path / "reference")
    assert not (tmp_path / "out" / "parts").exists()


@pytest.mark.slow
def test_killed_worker_ends_the_preparation(started: tuple[subprocess.Popen[str], list[str]]) -> None:
    child, _ = started
    next(process for process in psutil.Process(child.pid).children() if "spawn_main" in str(process.cmdline())).kill()
    printed, _ = child.communicate()
    assert json.loads(printed.splitlines()[-1])["error"]["found"] == "a worker process was killed"
    assert child.returncode == 1


def test_preparation_resumes_wherever_the_disk_was_full(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    prepare(pets, "-o", tmp_path / "reference")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    # Room for no part, for some parts, then for all parts but not for the joined file
    for limit in range(4000, 40000, 4000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            prepare(pets, "-o", tmp_path / "out", code=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    prepare(pets, "-o", tmp_path / "out")
    assert id_of(tmp_path / "out") == id_of(tmp_path / "reference")


def test_too_little_disk_space_is_reported_before_the_start(
    tmp_path: Path, pets: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9999, 0, 9999))
    error = prepare(pets, "-o", tmp_path / "out", code=2)[-1]["error"]
    assert error["found"] == f"10.0 kB free on the disk of {tmp_path / 'out'}"
    assert not list((tmp_path / "out" / "parts").glob("*.rec"))


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "path", "problem"),
    [
        ({}, "nowhere", "does not exist"),
        ({"a/ant": 1}, "a/ant/00.jpg", "is not a folder"),
        ({"a/ant": 3}, "a", "all images are in one class folder, ant"),
        ({"a/ant": 1}, "a/ant", "has no class folders"),
        ({"a/ant": 0, "a/bee": 0}, "a", "hold no images"),
        ({"a/ant": 3, "a/bee": 3, "a/cow": 0, "a/yak": 0}, "a", "no image in 2 of 4 class folders"),
        ({"a/train/ant": 2, "a/train/bee": 0, "a/val/ant": 1, "a/val/bee": 1}, "a", "train: bee"),
        ({"a/train/ant": 2}, "a", "no held-out images"),
        ({"a/train/ant": 2, "a/train/bee": 2, "a/val/ant": 1}, "a", "val has no image of bee"),
        ({"a/train/ant": 2, "a/val/ant": 1, "a/val/yak": 1}, "a", "train has no image of yak"),
        ({"a/ant": 3, "a/bee": 1}, "a", "the class bee has a single image"),
    ],
)
def test_bad_source_is_refused(
    tmp_path: Path, images: Path, prepare: Prepare, folders: dict[str, int], path: str, problem: str
) -> None:
    class_folders(tmp_path / "raw", images, folders)
    error = prepare(tmp_path / "raw" / path, "-o", tmp_path / "out", code=2)[-1]["error"]
    assert problem in error["found"] and error["hint"]


@pytest.mark.parametrize(
    "words",
    [
        "-o x --resize 0", "-o x --quality 101", "-o x --workers none", "-o x --validation-fraction 1",
        "-o x --verify y", "--strange", "",
    ],
)  # fmt: skip
def test_bad_option_is_refused(prepare: Prepare, words: str) -> None:
    assert prepare(*words.split(), code=2)[-1]["error"]["found"]


def test_verifying_needs_the_standard_library_only(tmp_path: Path, pets: Path, prepare: Prepare) -> None:
    prepare(pets, "-o", tmp_path / "out")
    # -S: without site-packages
    command = [sys.executable, "-S", "-m", "benchmarks.resnet.prepare", "--verify", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=paths.ROOT)
    assert (done.returncode, "is complete (every byte): pets, 24 train, 6 val" in done.stderr) == (0, True), done.stderr
    (tmp_path / "out" / "val.rec").unlink()
    (tmp_path / "out" / "train.rec").write_bytes(b"")
    assert len(prepare("--verify", tmp_path / "out", "--quick", code=2)[-1]["error"]["more"]) == 1
