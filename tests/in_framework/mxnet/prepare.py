"""Preparing ResNet's data set: real images, true layouts, and everything that can go wrong on the way.

What all preparations share is in tests/benchmarks/test_data.py.
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
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from benchmarks.common.data import passport as passports
from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.resnet import parts
from benchmarks.resnet.prepare import check, main

DALI = pytest.importorskip("nvidia.dali")
WORDNET_IDS = ("n01440764", "n01443537", "n02084071")
# Small parts let a test interrupt between them.
DRIVER = """
import sys
from benchmarks.resnet import parts, prepare
parts.PART_IMAGES = 4
if __name__ == "__main__":
    sys.exit(prepare.main([*sys.argv[1:], "--progress", "json"]))
"""


def picture(random, width=160, height=120):
    small = (random.rand(6, 8, 3) * 255).astype("uint8")
    return Image.fromarray(small).resize((width, height), Image.BICUBIC)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    # Folder of small JPEGs 00.jpg to 47.jpg, and 28 large ones.
    folder, random = tmp_path_factory.mktemp("images"), np.random.RandomState(0)
    for number in range(48):
        picture(random, 80 + number, 60).save(folder / f"{number:02}.jpg")
    for number in range(28):
        noise = (random.rand(700, 900, 3) * 255).astype("uint8")
        Image.fromarray(noise).save(folder / f"large{number:02}.jpg", quality=90)
    return folder


@pytest.fixture
def prepare(monkeypatch, capsys):
    # Runs the command line with small parts; returns exit code, the error or passport, and the notes.
    monkeypatch.setattr(parts, "PART_IMAGES", 4)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words, limit=resource.RLIM_INFINITY):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        capsys.readouterr()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            code = main([*map(str, words), "--progress", "json"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        notes = [line["note"] for line in told if "note" in line]
        return code, told[-1].get("error", told[-1]), notes

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def class_folders(root, images, plan, begin=0):
    # Makes class folders with that many images each.
    numbers = iter(range(begin, begin + sum(plan.values())))
    for name, count in plan.items():
        (root / name).mkdir(parents=True)
        for number in (next(numbers) for _ in range(count)):
            shutil.copy2(images / f"{number:02}.jpg", root / name / f"{number:02}.jpg")
    return root


@pytest.fixture
def pets(tmp_path, images):
    # Source with train/ of 3 x 8 images and val/ of 3 x 2.
    class_folders(tmp_path / "pets" / "train", images, {"ant": 8, "bee": 8, "cow": 8})
    class_folders(tmp_path / "pets" / "val", images, {"ant": 2, "bee": 2, "cow": 2}, begin=24)
    return tmp_path / "pets"


def records(folder, split):
    # Labels and image bytes of a split in their order.
    with (folder / f"{split}.rec").open("rb") as file:
        return [unpack(read_record(file, offset)) for _, offset in read_index(folder / f"{split}.idx")]


# -- sources ------------------------------------------------------------------------------------------


def test_the_small_set(tmp_path, prepare):
    assert prepare("-o", tmp_path)[:2] == (0, {"passport": str(tmp_path / "dataset.json")})
    passport = passports.read(tmp_path)
    assert (passport["name"], passport["benchmark"], "".join(passport["classes"])) == ("digits", "resnet", "0123456789")
    assert passports.verify(tmp_path, check=check) == []
    train, held = records(tmp_path, "train"), records(tmp_path, "val")
    assert (len(train), len(held), len({image for _, image in (*train, *held)})) == (1500, 297, 1797)
    assert set(Counter(label for label, _ in held).values()) <= {29, 30}
    names = ["dataset.json", "train.idx", "train.rec", "val.idx", "val.rec"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_class_folders_keep_their_bytes_and_labels(tmp_path, pets, prepare):
    (pets / "train" / "ant" / "notes.txt").write_text("no image")
    (pets / "README").write_text("no class")
    code, _, notes = prepare(pets, "-o", tmp_path / "out")
    assert (code, notes[0]) == (0, "1 files left out: no images by their suffix")
    train = records(tmp_path / "out", "train")
    files = [
        (label, path)
        for label, name in enumerate(("ant", "bee", "cow"))
        for path in (pets / "train" / name).glob("*.jpg")
    ]
    assert sorted(train) == sorted((float(label), path.read_bytes()) for label, path in files)
    labels = [label for label, _ in train]
    assert labels != sorted(labels), "the training images are mixed"
    assert passports.read(tmp_path / "out")["name"] == "pets"


def test_the_result_depends_on_the_seed_and_not_on_the_workers(tmp_path, pets, prepare):
    ids = []
    for number, options in enumerate((["--workers", 1], ["--workers", 3], ["--seed", 1])):
        assert prepare(pets, "-o", tmp_path / str(number), *options)[0] == 0
        ids.append(passports.read(tmp_path / str(number))["id"])
    assert ids[0] == ids[1] != ids[2]


def test_one_tree_is_split_by_class(tmp_path, images, prepare):
    source = class_folders(tmp_path / "tree", images, {"ant": 10, "bee": 20, "cow": 2})
    out = tmp_path / "out"
    assert prepare(source, "-o", out, "--validation-fraction", 0.2)[0] == 0
    assert Counter(label for label, _ in records(out, "val")) == {0: 2, 1: 4, 2: 1}
    assert len(set(records(out, "train")) | set(records(out, "val"))) == 32


@pytest.fixture
def imagenet(tmp_path, images):
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


def test_imagenets_tars_are_read_in_place(tmp_path, images, imagenet, prepare):
    out = tmp_path / "out"
    assert "imagenet with 3 classes" in prepare(imagenet, "-o", out)[1]["found"]
    assert prepare(imagenet, "-o", out, "--name", "tiny-imagenet")[0] == 0
    assert passports.read(out)["classes"] == list(WORDNET_IDS)
    train = {image: label for label, image in records(out, "train")}
    assert train == {(images / f"{number:02}.jpg").read_bytes(): number // 8 for number in range(24)}
    # The ground truth 1 2 3 3 2 1 numbers n02084071, n01440764, n01443537.
    labels = (2, 0, 1, 1, 0, 2)
    val = [(label, (images / f"{24 + number:02}.jpg").read_bytes()) for number, label in enumerate(labels)]
    assert records(out, "val") == val


def test_validation_images_of_imagenet_may_be_in_class_folders(tmp_path, images, imagenet, prepare):
    (imagenet / "ILSVRC2012_img_val.tar").unlink()
    class_folders(imagenet / "val", images, dict.fromkeys(WORDNET_IDS, 2), begin=24)
    assert prepare(imagenet, "-o", tmp_path / "out", "--name", "tiny")[0] == 0
    assert [label for label, _ in records(tmp_path / "out", "val")] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["devkit_t12.tar.gz", "img_train.tar", "img_val.tar"])
@pytest.mark.parametrize(("kept", "found"), [(0.0, "no ILSVRC2012_"), (0.5, "whole")])
def test_a_missing_or_truncated_tar_is_named(tmp_path, imagenet, prepare, name, kept, found):
    path = imagenet / f"ILSVRC2012_{name}"
    content = path.read_bytes()[: int(path.stat().st_size * kept)]
    path.unlink()
    if kept:
        path.write_bytes(content)
    code, error, _ = prepare(imagenet, "-o", tmp_path / "out", "--name", "tiny")
    assert (code, found in error["found"], name in error["found"]) == (2, True, True), error


# -- images -------------------------------------------------------------------------------------------


def test_odd_images_become_what_dali_decodes(tmp_path, images, prepare):
    odd = tmp_path / "odd"
    odd.mkdir()
    random = np.random.RandomState(1)
    image = picture(random)
    for shift in range(4):
        image.save(odd / f"magic{shift}.jpg", comment=b"x" * shift + bytes.fromhex("0a23d7ce") * 3)
    image.save(odd / "progressive.jpg", progressive=True)
    for name, mode in (
        ("gray.jpg", "L"),
        ("cmyk.jpg", "CMYK"),
        ("rgb.png", "RGB"),
        ("palette.gif", "P"),
        ("alpha.webp", "RGBA"),
    ):
        image.convert(mode).save(odd / name)
    image.save(odd / "png_inside.JPEG", "PNG")
    image.save(odd / "moving.gif", save_all=True, append_images=[picture(random)])
    Image.fromarray(np.asarray(image.convert("L")).astype("uint16") * 256).save(odd / "deep.png")
    for split in ("train", "val"):
        shutil.copytree(odd, tmp_path / "source" / split / "all")
        (tmp_path / "source" / split / "more").mkdir()
        os.link(images / "00.jpg", tmp_path / "source" / split / "more" / "00.jpg")
    assert prepare(tmp_path / "source", "-o", tmp_path / "out", "--allow-overlap")[0] == 0
    stored = {image for _, image in records(tmp_path / "out", "val")}
    kept = ("progressive.jpg", "gray.jpg", "cmyk.jpg", *(f"magic{shift}.jpg" for shift in range(4)))
    assert [name for name in kept if (odd / name).read_bytes() not in stored] == []
    fn, names = DALI.fn, sorted(path.name for path in odd.iterdir())

    @DALI.pipeline_def(batch_size=len(names), num_threads=1, device_id=None)
    def read():
        files = {"path": [str(tmp_path / "out" / "val.rec")], "index_path": [str(tmp_path / "out" / "val.idx")]}
        jpegs, labels = fn.readers.mxnet(**files)
        return fn.decoders.image(jpegs, output_type=DALI.types.RGB), labels

    pipeline = read()
    pipeline.build()
    for name, decoded in zip(names, pipeline.run()[0]):
        image = Image.open(odd / name)
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image) // 256).astype("uint8"))
        # Means of 8x8 pixels: JPEG blurs the dither of a palette, and that is no fault.
        expected = np.asarray(image.convert("RGB").reduce(8)).astype(int)
        found = np.asarray(Image.fromarray(np.asarray(decoded)).reduce(8)).astype(int)
        assert abs(found - expected).mean() < 2, name


def test_resizing_reduces_the_short_side_and_quality_re_encodes(tmp_path, images, pets, prepare):
    shutil.copy2(images / "large00.jpg", pets / "val" / "ant" / "large.jpg")
    assert prepare(pets, "-o", tmp_path / "out", "--resize", 100)[0] == 0
    originals = {path.read_bytes() for path in (pets / "val").glob("*/??.jpg")}
    (changed,) = (image for _, image in records(tmp_path / "out", "val") if image not in originals)
    assert Image.open(io.BytesIO(changed)).size == (129, 100)
    assert prepare(pets, "-o", tmp_path / "low", "--quality", 40)[0] == 0
    assert not {image for _, image in records(tmp_path / "low", "val")} & originals


def test_corrupt_images_are_named_then_fixed_or_skipped(tmp_path, pets, prepare):
    truncated = pets / "train" / "bee" / "10.jpg"
    truncated.write_bytes(truncated.read_bytes()[:-200])
    (pets / "val" / "cow" / "28.jpg").write_text("<html>404</html>")
    (pets / "train" / "ant" / "00.jpg").write_bytes(b"")
    words = (pets, "-o", tmp_path / "out")
    code, error, _ = prepare(*words)
    first, *lines = error["found"].splitlines()
    unknown = "no image of a format that Pillow reads"
    expected = {
        f"train: ant/00.jpg: {unknown}",
        "train: bee/10.jpg: image file is truncated",
        f"val: cow/28.jpg: {unknown}",
    }
    assert (code, first, {line.strip().split(" (")[0] for line in lines}) == (2, "3 corrupt images", expected)
    assert not (tmp_path / "out" / "dataset.json").exists()
    code, _, notes = prepare(*words, "--skip-corrupt")
    assert (code, notes[0]) == (0, "resuming: 8 of 8 parts of convert were finished before")
    split = passports.read(tmp_path / "out")["splits"]["train"]
    assert (split["count"], split["skipped"], split["skipped_names"]) == (22, 2, ["ant/00.jpg", "bee/10.jpg"])
    assert passports.verify(tmp_path / "out", check=check) == []


def test_many_corrupt_images_are_counted_and_twenty_named(tmp_path, pets, prepare):
    for path in (pets / "train").glob("*/*.jpg"):
        path.write_bytes(b"no image")
    found = prepare(pets, "-o", tmp_path / "out")[1]["found"]
    assert found.startswith("24 corrupt images") and found.endswith("and 4 more")
    assert found.count(".jpg") == 20
    # Nothing is left of the classes, so they cannot be skipped either.
    code, error, _ = prepare(pets, "-o", tmp_path / "out", "--skip-corrupt")
    assert (code, error["found"]) == (2, "train has no image of ant, bee, cow")


# -- interruptions ------------------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path, images):
    # Words of a command whose 24 + 4 images take a while, since they are re-encoded; it writes in out/.
    for split, begin, count in (("train", 0, 24), ("val", 24, 4)):
        for number in range(count):
            folder = tmp_path / "slow" / split / ("more" if number == count - 1 else "all")
            folder.mkdir(parents=True, exist_ok=True)
            os.link(images / f"large{begin + number:02}.jpg", folder / f"{number}.jpg")
    return (tmp_path / "slow", "--quality", 95, "--workers", 2, "-o", tmp_path / "out")


def started(words, pattern="train-*.json"):
    # Return a preparation in a process of its own that has come as far as a file of its parts.
    command = [sys.executable, "-c", DRIVER, *map(str, words)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list((words[-1] / "parts").glob(pattern)):
        assert child.poll() is None, child.communicate()
        time.sleep(0.002)
    return child


def error_of(child):
    stdout, stderr = child.communicate()
    assert "Traceback" not in stderr
    return json.loads(stdout.splitlines()[-1])["error"]


def workers(child):
    # Processes of a preparation.
    return Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_preparation_resumes_and_no_worker_outlives_it(tmp_path, slow, prepare, number):
    child = started(slow)
    processes = workers(child)
    child.send_signal(number)
    if number != signal.SIGKILL:
        assert "it resumes" in error_of(child)["hint"]
    assert child.wait() == (-9 if number == signal.SIGKILL else 130)
    while any(map(is_running, processes)):
        time.sleep(0.01)
    assert "half-written" in passports.verify(tmp_path / "out")[0].found
    code, _, notes = prepare(*slow)
    assert (code, notes[0].split(":")[0]) == (0, "resuming")
    assert prepare(*slow[:-1], tmp_path / "whole")[0] == 0
    assert passports.read(tmp_path / "out")["id"] == passports.read(tmp_path / "whole")["id"]
    assert not (tmp_path / "out" / "parts").exists()


def test_a_killed_worker_ends_the_preparation(slow):
    child = started(slow)
    worker = next(each for each in workers(child) if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes())
    os.kill(int(worker), signal.SIGKILL)
    assert error_of(child)["found"] == "a worker process was killed"
    assert child.returncode == 1


def test_joining_resumes_byte_for_byte(tmp_path, pets, prepare):
    assert prepare(pets, "-o", tmp_path / "whole")[0] == 0
    # Not even room for a part, then for some, then for all of them and not for the joined file.
    limits = range(4000, 40000, 4000)
    codes = [prepare(pets, "-o", tmp_path / "out", limit=limit)[0] for limit in limits]
    assert codes[0] == 1
    assert prepare(pets, "-o", tmp_path / "out")[0] == 0
    assert passports.read(tmp_path / "out")["id"] == passports.read(tmp_path / "whole")["id"]


def test_too_little_room_is_reported_before_the_start(tmp_path, pets, prepare, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9999, 0, 9999))
    code, error, _ = prepare(pets, "-o", tmp_path / "out")
    assert (code, error["found"]) == (2, f"10.0 kB free on the disk of {tmp_path / 'out'}")
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
def test_a_bad_source_is_refused_by_name(tmp_path, images, prepare, folders, place, expected):
    class_folders(tmp_path / "raw", images, folders)
    code, error, _ = prepare(tmp_path / "raw" / place, "-o", tmp_path / "out")
    assert (code, expected in error["found"], bool(error["hint"])) == (2, True, True), error


@pytest.mark.parametrize(
    "words",
    [
        "-o x --resize 0", "-o x --quality 101", "-o x --workers none", "-o x --validation-fraction 1",
        "-o x --verify y", "--strange", "",
    ],
)  # fmt: skip
def test_a_bad_option_is_refused(prepare, words):
    code, error, _ = prepare(*words.split())
    assert (code, bool(error["found"])) == (2, True)


def test_verifying_needs_the_standard_library_only(tmp_path, pets, prepare):
    assert prepare(pets, "-o", tmp_path / "out")[0] == 0
    # -S: no site-packages.
    command = [sys.executable, "-S", "-m", "benchmarks.resnet.prepare", "--verify", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "is whole (every byte): pets, 24 train, 6 val" in done.stderr) == (0, True), done.stderr
    (tmp_path / "out" / "val.rec").unlink()
    (tmp_path / "out" / "train.rec").write_bytes(b"")
    code, error, _ = prepare("--verify", tmp_path / "out", "--quick")
    assert (code, len(error["more"])) == (2, 1)
