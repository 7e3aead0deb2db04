"""ResNet's data set from ImageNet's tars and class folders, corrupt images, interruptions and bad input.

Tests of all preparations are in test_data.py; what DALI decodes is tested in tests/in_framework/mxnet/dali.py.
"""

import io
import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from tests.preparing import check_refusal, notes, pack, prepared, ran, refused, write_files
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
run = partial(preparing.run, "resnet", workers=0)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Small JPEGs 00.jpg to 47.jpg, and 28 large ones
    folder, random = tmp_path_factory.mktemp("images"), np.random.RandomState(0)
    for number in range(48):
        small = Image.fromarray((random.rand(6, 8, 3) * 255).astype("uint8"))
        small.resize((80 + number, 60), Image.Resampling.BICUBIC).save(folder / f"{number:02}.jpg")
    for number in range(28):
        large = Image.fromarray((random.rand(700, 900, 3) * 255).astype("uint8"))
        large.save(folder / f"large{number:02}.jpg", quality=90)
    return folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_IMAGES", 4)


def class_folders(root: Path, images: Path, counts: dict[str, int], first: int = 0) -> Path:
    for name in counts:
        (root / name).mkdir(parents=True)
    names = [name for name, count in counts.items() for _ in range(count)]
    numbered = [(name, f"{number:02}.jpg") for number, name in enumerate(names, first)]
    return write_files(root, {f"{name}/{file}": (images / file).read_bytes() for name, file in numbered})


@pytest.fixture
def pets(tmp_path: Path, images: Path) -> Path:
    # 3 x 8 images in train/ and 3 x 2 in val/
    for split, count, first in (("train", 8, 0), ("val", 2, 24)):
        class_folders(tmp_path / "pets" / split, images, dict.fromkeys(("ant", "bee", "cow"), count), first)
    return tmp_path / "pets"


def records(folder: Path, split: str) -> list[tuple[float, bytes]]:
    with (folder / f"{split}.rec").open("rb") as file:
        return [unpack(read_record(file, offset)) for _, offset in read_index(folder / f"{split}.idx")]


# -- sources ------------------------------------------------------------------------------------------


def test_class_folders_give_labels_and_unchanged_images(tmp_path: Path, pets: Path) -> None:
    write_files(pets, {"train/ant/notes.txt": "no image", "README": "no class"})
    assert "1 files skipped: their suffixes are not those of images" in notes(run(pets, "-o", tmp_path / "out"))
    for split, is_shuffled in (("train", True), ("val", False)):
        files = [
            (float(label), path.read_bytes())
            for label, name in enumerate(("ant", "bee", "cow"))
            for path in sorted((pets / split / name).glob("*.jpg"))
        ]
        written = records(tmp_path / "out", split)
        assert (sorted(written) == sorted(files), written != files) == (True, is_shuffled)
    # The order depends on the seed, not on the workers
    same, other = (
        preparing.manifest(prepared("resnet", pets, tmp_path / f"{workers}", "--seed", seed, workers=workers))
        for seed, workers in ((0, 1), (1, 0))
    )
    made = preparing.manifest(tmp_path / "out")
    assert made["id"] == same["id"] != other["id"] and made["name"] == "pets"


def test_one_tree_is_split_by_class(tmp_path: Path, images: Path) -> None:
    source = class_folders(tmp_path / "tree", images, {"ant": 10, "bee": 20, "cow": 2})
    out = prepared("resnet", source, tmp_path / "out", "--validation-fraction", 0.2, workers=0)
    train, val = records(out, "train"), records(out, "val")
    assert (Counter(label for label, _ in val), len({*train, *val})) == ({0: 2, 1: 4, 2: 1}, 32)


@pytest.fixture
def imagenet(tmp_path: Path, images: Path) -> Path:
    # ImageNet's tars in the published layout: three classes of eight images, and six validation images
    jpegs = [(images / f"{number:02}.jpg").read_bytes() for number in range(30)]
    classes = {
        f"{name}.tar": pack({f"{name}_{number}.JPEG": jpegs[number] for number in range(8 * label, 8 * label + 8)})
        for label, name in reversed(list(enumerate(WORDNET_IDS)))
    }
    val = {f"ILSVRC2012_val_{number + 1:08}.JPEG": jpegs[24 + number] for number in reversed(range(6))}
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "height", "num_train_images"]
    synsets, meta = np.zeros((5, 1), [(name, object) for name in fields]), io.BytesIO()
    # As in the published file, leaves come first and are not in the order of their WordNet ids
    for row, name in enumerate(["n02084071", "n01440764", "n01443537", "n00001740", "n00015388"]):
        children = [] if row < 3 else [1, 2]
        synsets[row, 0] = (row + 1, name, "words", "gloss", len(children), np.array(children), 0, 16)
    scipy.io.savemat(meta, {"synsets": synsets})
    truth = {"meta.mat": meta.getvalue(), "ILSVRC2012_validation_ground_truth.txt": b"1\n2\n3\n3\n2\n1\n"}
    devkit = {f"ILSVRC2012_devkit_t12/data/{name}": content for name, content in truth.items()}
    tars = {"img_train.tar": pack(classes), "img_val.tar": pack(val), "devkit_t12.tar.gz": pack(devkit, "w:gz")}
    return write_files(tmp_path / "imagenet", {f"ILSVRC2012_{name}": content for name, content in tars.items()})


def test_tars_of_imagenet_are_read(tmp_path: Path, images: Path, imagenet: Path) -> None:
    out, contents = tmp_path / "out", [(images / f"{number:02}.jpg").read_bytes() for number in range(30)]
    assert "imagenet with splits.train.count 24 for 1,281,167" in refused(run(imagenet, "-o", out))
    notes(run(imagenet, "-o", out, "--name", "tiny-imagenet"))
    # Classes 1 2 3 3 2 1 of the devkit, which numbers n02084071, n01440764, n01443537
    assert (preparing.manifest(out)["classes"], sorted(records(out, "train")), records(out, "val")) == (
        list(WORDNET_IDS),
        sorted((number // 8, contents[number]) for number in range(24)),
        list(zip((2, 0, 1, 1, 0, 2), contents[24:], strict=True)),
    )
    (imagenet / "ILSVRC2012_img_val.tar").unlink()
    class_folders(imagenet / "val", images, dict.fromkeys(WORDNET_IDS, 2), first=24)
    folders = prepared("resnet", imagenet, tmp_path / "folders", "--name", "tiny", workers=0)
    assert [label for label, _ in records(folders, "val")] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["devkit_t12.tar.gz", "img_train.tar", "img_val.tar"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [(None, "no ILSVRC2012_"), (lambda content: content[: len(content) // 2], "complete")],
    ids=["missing", "truncated"],
)
def test_missing_or_truncated_tar_is_named(imagenet: Path, name: str, change: Any, problem: str) -> None:
    check_refusal("resnet", imagenet, {f"ILSVRC2012_{name}": change}, [problem, name], "--name", "tiny")


# -- images -------------------------------------------------------------------------------------------


def test_resize_sets_the_short_side_and_quality_encodes_again(tmp_path: Path, images: Path, pets: Path) -> None:
    write_files(pets, {"val/ant/large.jpg": (images / "large00.jpg").read_bytes()})
    originals = {path.read_bytes() for path in (pets / "val").glob("*/??.jpg")}
    small, low = (
        {image for _, image in records(prepared("resnet", pets, tmp_path / word, word, value, workers=0), "val")}
        for word, value in (("--resize", 100), ("--quality", 40))
    )
    (changed,), unchanged = small - originals, low & originals
    assert (Image.open(io.BytesIO(changed)).size, unchanged) == ((129, 100), set())


def test_corrupt_images_are_named_then_skipped(tmp_path: Path, pets: Path) -> None:
    files = {
        "train/bee/10.jpg": lambda content: content[:-200],
        "val/cow/28.jpg": "<html>404</html>",
        "train/ant/00.jpg": "",
    }
    messages = (
        "3 corrupt images\n",
        "train: ant/00.jpg: not an image format that Pillow reads",
        "train: bee/10.jpg: image file is truncated",
        "val: cow/28.jpg: not an image format that Pillow reads",
    )
    check_refusal("resnet", pets, files, messages)
    assert "resuming: 8 of 8 parts" in notes(run(pets, "-o", tmp_path / "to", "--skip-corrupt", workers=1))
    split = preparing.manifest(tmp_path / "to")["splits"]["train"]
    found = split["count"], split["skipped"], split["skipped_names"], manifests.verify(tmp_path / "to", check=check)
    assert found == (22, 2, ["ant/00.jpg", "bee/10.jpg"], [])


SCALE = np.linspace(0, 1, 48 * 64).reshape(48, 64) ** 2  # Mean 1/3, so that an inverted image differs


@pytest.mark.parametrize(
    ("name", "picture"),
    [
        ("deep.png", Image.fromarray((SCALE * 65535).astype(np.uint16))),
        ("deep.tiff", Image.fromarray((SCALE * 65535).astype(np.uint16))),
        ("palette.png", Image.fromarray((SCALE * 255).astype(np.uint8)).convert("P")),
        ("cmyk.tiff", Image.fromarray((SCALE * 255).astype(np.uint8)).convert("RGB").convert("CMYK")),
        ("alpha.png", Image.fromarray(np.dstack([(SCALE * 255).astype(np.uint8)] * 2))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pixels_of_any_type_keep_their_brightness(tmp_path: Path, pets: Path, name: str, picture: Any) -> None:
    picture.save(pets / "val" / "ant" / f"0 {name}")  # The first image
    stored = Image.open(io.BytesIO(records(prepared("resnet", pets, tmp_path / "out", workers=0), "val")[0][1]))
    assert stored.mode == "RGB" and abs(np.asarray(stored).mean() - SCALE.mean() * 255) < 1


@pytest.mark.parametrize(
    ("pixels", "tags", "message"),
    [
        (SCALE.astype(np.float32), {}, "TIFF with float pixels (mode F)"),
        ((SCALE * 255).astype(np.int32), {}, "TIFF with integer pixels of more than 8 bits (mode I)"),
        ((SCALE * 65535).astype(np.uint16), {262: 0}, "(mode I;16)"),  # White is zero
        ((SCALE * 255).astype(np.uint8), {339: 2}, "TIFF with signed pixels"),
    ],
    ids=["float", "integer", "inverted", "signed"],
)
def test_pixels_without_a_range_are_named(pets: Path, pixels: Any, tags: dict[int, int], message: str) -> None:
    Image.fromarray(pixels).save(pets / "train" / "bee" / "deep.tiff", tiffinfo=tags)
    check_refusal("resnet", pets, {}, ["1 corrupt images", "train: bee/deep.tiff: ", message])


# -- interruptions ------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path, images: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    # A preparation of 24 + 4 images in its own process, which has finished a part; re-encoding makes it slow
    names = {
        f"{'val' if number >= 24 else 'train'}/{'last' if number in (23, 27) else 'other'}/{number}.jpg": number
        for number in range(28)
    }
    source = write_files(
        tmp_path / "slow", {name: (images / f"large{number:02}.jpg").read_bytes() for name, number in names.items()}
    )
    words = [str(source), "--quality", "95", "--workers", "2", "-o"]
    command = [sys.executable, "-c", DRIVER, *words, str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=paths.ROOT, **pipes) as child:
        done = (tmp_path / "out" / "parts").glob
        wait_until(lambda: any(done("train-*.json")) or child.poll() is not None, "a part")
        yield child, words


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_preparation_ends_its_workers_and_resumes(
    tmp_path: Path, started: tuple[subprocess.Popen[str], list[str]], number: signal.Signals
) -> None:
    child, words = started
    workers = psutil.Process(child.pid).children()
    child.send_signal(number)
    printed, errors = child.communicate()
    assert (child.returncode, "Traceback" in errors) == (-9 if number == signal.SIGKILL else 130, False)
    assert number == signal.SIGKILL or "again to resume" in json.loads(printed.splitlines()[-1])["error"]["hint"]
    left, problem = psutil.wait_procs(workers, timeout=PATIENCE)[1], manifests.verify(tmp_path / "out")[0].found
    assert not left and "incomplete" in problem
    resumed, reference = (
        preparing.manifest(prepared("resnet", Path(words[0]), tmp_path / name, *words[1:3], workers=0))
        for name in ("out", "reference")
    )
    assert (resumed["id"], (tmp_path / "out" / "parts").exists()) == (reference["id"], False)


@pytest.mark.slow
def test_killed_worker_ends_the_preparation(started: tuple[subprocess.Popen[str], list[str]]) -> None:
    child, _ = started
    next(process for process in psutil.Process(child.pid).children() if "spawn_main" in str(process.cmdline())).kill()
    error = json.loads(child.communicate()[0].splitlines()[-1])["error"]["found"]
    assert (child.returncode, error) == (1, "a worker process was killed")


def test_too_little_disk_space_is_reported_before_the_start(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9999))
    check_refusal("resnet", pets, {}, [f"10.0 kB free on the disk of {pets.with_name('to')} | "])
    assert not list((pets.with_name("to") / "parts").glob("*.rec"))


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "path", "problem"),
    [
        ({}, "nowhere", "does not exist"),
        ({"a/ant": 1}, "a/ant/00.jpg", "is not a folder"),
        ({"a/ant": 3}, "a", "all images are in one class folder, ant"),
        ({"a/ant": 1}, "a/ant", "has no class folders"),
        ({"a/ant": 0, "a/bee": 0}, "a", "contain no images"),
        ({"a/ant": 3, "a/bee": 3, "a/cow": 0, "a/yak": 0}, "a", "no image in 2 of 4 class folders"),
        ({"a/train/ant": 2, "a/train/bee": 0, "a/val/ant": 1, "a/val/bee": 1}, "a", "train: bee"),
        ({"a/train/ant": 2}, "a", "no held-out images"),
        ({"a/train/ant": 2, "a/train/bee": 2, "a/val/ant": 1}, "a", "val has no image of bee"),
        ({"a/train/ant": 2, "a/val/ant": 1, "a/val/yak": 1}, "a", "train has no image of yak"),
        ({"a/ant": 3, "a/bee": 1}, "a", "the class bee has a single image"),
    ],
)
def test_bad_source_is_refused(tmp_path: Path, images: Path, folders: dict[str, int], path: str, problem: str) -> None:
    class_folders(tmp_path / "raw", images, folders)
    assert problem in refused(run(tmp_path / "raw" / path, "-o", tmp_path / "out"))


@pytest.mark.parametrize(
    "words",
    [
        "-o x --resize 0", "-o x --quality 101", "-o x --workers none", "-o x --validation-fraction 1",
        "-o x --verify y", "-o x --index-limit 9", "-o x --resize 256 --scenes 9 --check-options", "--strange", "",
    ],
)  # fmt: skip
def test_bad_option_is_refused(words: str) -> None:
    assert refused(run(*words.split()))


def test_verifying_needs_the_standard_library_only(tmp_path: Path, pets: Path) -> None:
    notes(run(pets, "-o", tmp_path / "out"))
    # -S: without site-packages
    done = ran(sys.executable, "-S", "-m", "benchmarks.resnet.prepare", "--verify", tmp_path / "out")
    assert (done.returncode, "is complete (every byte): pets, 24 train, 6 val" in done.stderr) == (0, True), done.stderr
