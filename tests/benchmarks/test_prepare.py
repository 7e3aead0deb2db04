"""Preparing ResNet's data set: real images, true layouts, and everything that can go wrong on the way."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.common.data import passport as passports
from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.resnet.prepare import check
from tests.trainings import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 48
WORDNET_IDS = ("n01440764", "n01443537", "n02084071")

MAKE_IMAGES = f"""
import io, pathlib, sys
import numpy as np
import scipy.io
from PIL import Image

folder = pathlib.Path(sys.argv[1])
random = np.random.RandomState(0)

def picture(width, height):
    small = (random.rand(6, 8, 3) * 255).astype("uint8")
    return Image.fromarray(small).resize((width, height), Image.BICUBIC)

for number in range({IMAGES}):
    picture(80 + number, 60).save(folder / f"{{number:02}}.jpg")
for number in range(28):
    noise = (random.rand(700, 900, 3) * 255).astype("uint8")
    Image.fromarray(noise).save(folder / f"large{{number:02}}.jpg", quality=90)

odd = folder / "odd"
odd.mkdir()
image = picture(160, 120)
magic = bytes.fromhex("0a23d7ce")
for shift in range(4):
    image.save(odd / f"magic{{shift}}.jpg", comment=b"x" * shift + magic * 3)
image.save(odd / "progressive.jpg", progressive=True)
image.convert("L").save(odd / "gray.jpg")
image.convert("CMYK").save(odd / "cmyk.jpg")
image.save(odd / "png_inside.JPEG", "PNG")
image.save(odd / "rgb.png")
image.convert("P").save(odd / "palette.gif")
image.convert("RGBA").save(odd / "alpha.webp")
image.save(odd / "moving.gif", save_all=True, append_images=[picture(160, 120)])
deep = np.asarray(image.convert("L")).astype("uint16") * 256
Image.fromarray(deep).save(odd / "deep.png")

fields = "ILSVRC2012_ID WNID words gloss num_children children wordnet_height num_train_images".split()
synsets = np.zeros((5, 1), [(name, object) for name in fields])
# The true file numbers leaves in an order that is not that of their WordNet ids, inner nodes last.
names = ["n02084071", "n01440764", "n01443537", "n00001740", "n00015388"]
for row, name in enumerate(names):
    children = [] if row < 3 else [1, 2]
    synsets[row, 0] = (row + 1, name, "words", "gloss", len(children), np.array(children), 0, 16)
scipy.io.savemat(folder / "meta.mat", {{"synsets": synsets}})
"""

# Small parts let a test interrupt between them.
DRIVER = (
    "import sys\n"
    "from benchmarks.resnet import parts, prepare\n"
    "parts.PART_IMAGES = 4\n"
    "if __name__ == '__main__':\n"
    "    sys.exit(prepare.main(sys.argv[1:]))\n"
)


@pytest.fixture(scope="session")
def images(tmp_path_factory, mxnet_python) -> Path:
    """Folder of small JPEGs 00.jpg to 47.jpg, 28 large ones, odd ones in odd/, and a devkit's meta.mat."""
    folder = tmp_path_factory.mktemp("images")
    subprocess.run([mxnet_python, "-c", MAKE_IMAGES, str(folder)], check=True)
    return folder


@pytest.fixture
def prepare(mxnet_python):
    """Runs the command line with small parts; returns exit code and the JSON lines it told."""

    def run(*words: object, limit: int | None = None) -> tuple[int, list[dict]]:
        def restrict() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = [mxnet_python, "-c", DRIVER, *map(str, words), "--progress", "json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, preexec_fn=restrict)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    return run


def class_folders(root: Path, images: Path, plan: dict[str, int], begin: int = 0) -> Path:
    """Makes class folders with that many images each."""
    number = begin
    for name, count in plan.items():
        (root / name).mkdir(parents=True)
        for _ in range(count):
            shutil.copy2(images / f"{number:02}.jpg", root / name / f"{number:02}.jpg")
            number += 1
    return root


def split_folders(root: Path, images: Path) -> Path:
    """Makes train/ with 3 x 8 images and val/ with 3 x 2."""
    class_folders(root / "train", images, {"ant": 8, "bee": 8, "cow": 8})
    class_folders(root / "val", images, {"ant": 2, "bee": 2, "cow": 2}, begin=24)
    return root


def records(folder: Path, split: str) -> list[tuple[float, bytes]]:
    """Labels and image bytes of a split in their order."""
    with (folder / f"{split}.rec").open("rb") as file:
        return [unpack(read_record(file, offset)) for _, offset in read_index(folder / f"{split}.idx")]


def error_of(told: list[dict]) -> dict:
    """The error with which a command ended."""
    assert set(told[-1]) == {"error"}, told
    return told[-1]["error"]


# -- sources ------------------------------------------------------------------------------------------


def test_the_small_set(tmp_path, prepare):
    code, told = prepare("--to", tmp_path / "digits")
    assert code == 0
    assert told[-1] == {"passport": str(tmp_path / "digits" / "dataset.json")}
    passport = passports.read(tmp_path / "digits")
    assert (passport["name"], passport["benchmark"]) == ("digits", "resnet")
    assert passport["classes"] == list("0123456789")
    counts = {name: split["count"] for name, split in passport["splits"].items()}
    assert counts == {"train": 1500, "val": 297}
    assert passports.verify(tmp_path / "digits", check=check) == []
    held = Counter(label for label, _ in records(tmp_path / "digits", "val"))
    assert set(held.values()) <= {29, 30}
    assert not {image for _, image in records(tmp_path / "digits", "train")} & {
        image for _, image in records(tmp_path / "digits", "val")
    }
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == [
        "dataset.json",
        "train.idx",
        "train.rec",
        "val.idx",
        "val.rec",
    ]


def test_class_folders_keep_their_bytes_and_labels(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    (source / "train" / "ant" / "notes.txt").write_text("no image")
    (source / "README").write_text("no class")
    code, told = prepare("--from", source, "--to", tmp_path / "out")
    assert code == 0
    assert any("1 files left out" in line.get("note", "") for line in told)
    expected = {
        (float(label), (path).read_bytes())
        for label, name in enumerate(("ant", "bee", "cow"))
        for path in (source / "train" / name).glob("*.jpg")
    }
    train = records(tmp_path / "out", "train")
    assert set(train) == expected
    labels = [label for label, _ in train]
    assert labels != sorted(labels), "the training images are mixed"
    assert passports.read(tmp_path / "out")["name"] == "pets"


def test_the_result_depends_on_the_seed_and_not_on_the_workers(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    ids = []
    for number, options in enumerate((["--workers", 1], ["--workers", 3], ["--seed", 1])):
        assert prepare("--from", source, "--to", tmp_path / str(number), *options)[0] == 0
        ids.append(passports.read(tmp_path / str(number))["id"])
    assert ids[0] == ids[1] != ids[2]


def test_one_tree_is_split_by_class(tmp_path, images, prepare):
    source = class_folders(tmp_path / "tree", images, {"ant": 10, "bee": 20, "cow": 2})
    out = tmp_path / "out"
    assert prepare("--from", source, "--to", out, "--validation-fraction", 0.2)[0] == 0
    assert Counter(label for label, _ in records(out, "val")) == {0: 2, 1: 4, 2: 1}
    assert len(set(records(out, "train")) | set(records(out, "val"))) == 32


def fake_imagenet(folder: Path, images: Path, flat_val: bool = True) -> Path:
    """ImageNet's tars in their true layout, with three classes of eight images and six held out."""
    folder.mkdir()
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w") as train:
        for label, name in reversed(list(enumerate(WORDNET_IDS))):
            with tarfile.open(folder / f"{name}.tar", "w") as inner:
                for number in range(8 * label, 8 * label + 8):
                    inner.add(images / f"{number:02}.jpg", f"{name}_{number}.JPEG")
            train.add(folder / f"{name}.tar", f"{name}.tar")
            (folder / f"{name}.tar").unlink()
    if not flat_val:
        class_folders(folder / "val", images, dict.fromkeys(WORDNET_IDS, 2), begin=24)
        return folder
    with tarfile.open(folder / "ILSVRC2012_img_val.tar", "w") as val:
        for number in reversed(range(6)):
            val.add(images / f"{24 + number:02}.jpg", f"ILSVRC2012_val_{number + 1:08}.JPEG")
    truth = folder / "truth.txt"
    truth.write_text("1\n2\n3\n3\n2\n1\n")
    with tarfile.open(folder / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as devkit:
        data = "ILSVRC2012_devkit_t12/data"
        devkit.add(images / "meta.mat", f"{data}/meta.mat")
        devkit.add(truth, f"{data}/ILSVRC2012_validation_ground_truth.txt")
    truth.unlink()
    return folder


def test_imagenets_tars_are_read_in_place(tmp_path, images, prepare):
    source = fake_imagenet(tmp_path / "raw", images)
    out = tmp_path / "out"
    code, told = prepare("--from", source, "--to", out, "--name", "tiny-imagenet")
    assert code == 0, told
    assert passports.read(out)["classes"] == list(WORDNET_IDS)
    train = {image: label for label, image in records(out, "train")}
    assert train == {(images / f"{number:02}.jpg").read_bytes(): number // 8 for number in range(24)}
    # The ground truth 1 2 3 3 2 1 numbers n02084071, n01440764, n01443537.
    val = [(label, image) for label, image in records(out, "val")]
    assert val == [
        (label, (images / f"{24 + number:02}.jpg").read_bytes()) for number, label in enumerate((2, 0, 1, 1, 0, 2))
    ]


def test_validation_images_of_imagenet_may_lie_in_class_folders(tmp_path, images, prepare):
    source = fake_imagenet(tmp_path / "raw", images, flat_val=False)
    assert prepare("--from", source, "--to", tmp_path / "out", "--name", "tiny")[0] == 0
    assert [label for label, _ in records(tmp_path / "out", "val")] == [0, 0, 1, 1, 2, 2]


def test_imagenet_is_refused_when_images_are_missing(tmp_path, images, prepare):
    code, told = prepare("--from", fake_imagenet(tmp_path / "raw", images), "--to", tmp_path / "out")
    assert code == 2
    assert "imagenet with 3 classes" in error_of(told)["found"]


@pytest.mark.parametrize(
    ("damage", "told_about"),
    [
        ("ILSVRC2012_devkit_t12.tar.gz", "no ILSVRC2012_devkit_t12.tar.gz"),
        ("ILSVRC2012_img_train.tar", "no ILSVRC2012_img_train.tar"),
        ("ILSVRC2012_img_val.tar", "no ILSVRC2012_img_val.tar"),
    ],
)
def test_a_missing_tar_is_named(tmp_path, images, prepare, damage, told_about):
    source = fake_imagenet(tmp_path / "raw", images)
    (source / damage).unlink()
    code, told = prepare("--from", source, "--to", tmp_path / "out", "--name", "tiny")
    assert code == 2
    assert told_about in error_of(told)["found"]


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", "ILSVRC2012_devkit_t12.tar.gz"])
def test_a_truncated_tar_is_named(tmp_path, images, prepare, name):
    source = fake_imagenet(tmp_path / "raw", images)
    path = source / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, told = prepare("--from", source, "--to", tmp_path / "out", "--name", "tiny")
    assert code == 2
    assert "whole" in error_of(told)["found"]
    assert name in error_of(told)["found"]


# -- images -------------------------------------------------------------------------------------------


def test_odd_images_become_what_dali_decodes(tmp_path, images, prepare, mxnet_python):
    source = tmp_path / "odd"
    for split in ("train", "val"):
        shutil.copytree(images / "odd", source / split / "all")
        (source / split / "more").mkdir()
        os.link(images / "00.jpg", source / split / "more" / "00.jpg")
    assert prepare("--from", source, "--to", tmp_path / "out", "--allow-overlap")[0] == 0
    stored = {image for _, image in records(tmp_path / "out", "val")}
    for kept in ("progressive.jpg", "gray.jpg", "cmyk.jpg", *(f"magic{shift}.jpg" for shift in range(4))):
        assert (images / "odd" / kept).read_bytes() in stored, kept
    script = """
import io, sys
import numpy as np
from nvidia.dali import fn, pipeline_def, types
from PIL import Image
names = sorted(__import__("os").listdir(sys.argv[2]))
@pipeline_def(batch_size=len(names), num_threads=1, device_id=None)
def read():
    jpegs, labels = fn.readers.mxnet(path=[sys.argv[1] + "/val.rec"], index_path=[sys.argv[1] + "/val.idx"])
    return fn.decoders.image(jpegs, output_type=types.RGB), labels
pipeline = read()
pipeline.build()
decoded = pipeline.run()[0]
for number, name in enumerate(names):
    image = Image.open(sys.argv[2] + "/" + name)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) // 256).astype("uint8"))
    # Means of 8x8 pixels: JPEG blurs the dither of a palette, and that is no fault.
    expected = np.asarray(image.convert("RGB").reduce(8)).astype(int)
    found = np.asarray(Image.fromarray(np.asarray(decoded[number])).reduce(8)).astype(int)
    assert abs(found - expected).mean() < 2, (name, abs(found - expected).mean())
"""
    command = [mxnet_python, "-c", script, str(tmp_path / "out"), str(images / "odd")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_resizing_reduces_the_short_side_and_enlarges_nothing(tmp_path, images, prepare, mxnet_python):
    source = split_folders(tmp_path / "pets", images)
    shutil.copy2(images / "large00.jpg", source / "val" / "ant" / "large.jpg")
    assert prepare("--from", source, "--to", tmp_path / "out", "--resize", 100)[0] == 0
    stored = records(tmp_path / "out", "val")
    originals = {path.read_bytes() for path in (source / "val").glob("*/??.jpg")}
    changed = [image for _, image in stored if image not in originals]
    assert len(changed) == 1
    (tmp_path / "changed.jpg").write_bytes(changed[0])
    script = "import sys; from PIL import Image; print(Image.open(sys.argv[1]).size)"
    done = subprocess.run([mxnet_python, "-c", script, str(tmp_path / "changed.jpg")], capture_output=True, text=True)
    assert done.stdout.strip() == "(129, 100)"


def test_a_quality_re_encodes_every_image(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    assert prepare("--from", source, "--to", tmp_path / "out", "--quality", 40)[0] == 0
    total = sum(path.stat().st_size for path in (source / "val").glob("*/*.jpg"))
    assert sum(len(image) for _, image in records(tmp_path / "out", "val")) < total


def test_corrupt_images_are_named_then_mended_or_skipped(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    truncated, text = source / "train" / "bee" / "10.jpg", source / "val" / "cow" / "28.jpg"
    truncated.write_bytes(truncated.read_bytes()[:-200])
    text.write_text("<html>404</html>")
    (source / "train" / "ant" / "00.jpg").write_bytes(b"")
    words = ("--from", source, "--to", tmp_path / "out")
    code, told = prepare(*words)
    assert code == 2
    found = error_of(told)["found"]
    assert "3 corrupt images" in found
    unknown = "no image of a format that Pillow reads"
    for name in ("train: bee/10.jpg: image file is truncated", "val: cow/28.jpg", "train: ant/00.jpg"):
        assert name in found
    assert f"val: cow/28.jpg: {unknown}" in found
    assert "BytesIO" not in found
    assert not (tmp_path / "out" / "dataset.json").exists()
    code, told = prepare(*words, "--skip-corrupt")
    assert code == 0
    assert any("resuming: 8 of 8 parts" in line.get("note", "") for line in told)
    split = passports.read(tmp_path / "out")["splits"]["train"]
    assert (split["count"], split["skipped"]) == (22, 2)
    assert split["skipped_names"] == ["ant/00.jpg", "bee/10.jpg"]
    assert passports.verify(tmp_path / "out", check=check) == []


def test_many_corrupt_images_are_counted_and_twenty_named(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    for path in (source / "train").glob("*/*.jpg"):
        path.write_bytes(b"no image")
    code, told = prepare("--from", source, "--to", tmp_path / "out")
    found = error_of(told)["found"]
    assert "24 corrupt images" in found
    assert found.count(".jpg") == 20
    assert "and 4 more" in found
    # Nothing is left of the classes, so they cannot be skipped either.
    code, told = prepare("--from", source, "--to", tmp_path / "out", "--skip-corrupt")
    assert code == 2
    assert "train has no image of ant, bee, cow" in error_of(told)["found"]


# -- interruptions ------------------------------------------------------------------------------------


@pytest.fixture
def slow_source(tmp_path, images) -> Path:
    """Source of 24 + 4 images that takes a while when it is re-encoded."""
    source = tmp_path / "slow"
    for split, begin, count in (("train", 0, 24), ("val", 24, 4)):
        for number in range(count):
            folder = source / split / ("more" if number == count - 1 else "all")
            folder.mkdir(parents=True, exist_ok=True)
            os.link(images / f"large{begin + number:02}.jpg", folder / f"{number}.jpg")
    return source


def start(python: Path, *words: object) -> subprocess.Popen:
    command = [python, "-c", DRIVER, *map(str, words), "--progress", "json"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(folder: Path, pattern: str, child: subprocess.Popen) -> None:
    while not list(folder.glob(pattern)):
        assert child.poll() is None, child.communicate()
        time.sleep(0.002)


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_preparation_goes_on(tmp_path, slow_source, prepare, mxnet_python, with_signal):
    words = ("--from", slow_source, "--quality", 95, "--workers", 2, "--to")
    out = tmp_path / "out"
    child = start(mxnet_python, *words, out)
    wait_for(out / "parts", "*.json", child)
    wait_for(out / "parts", "train-*.json", child)
    child.send_signal(with_signal)
    stdout, stderr = child.communicate(timeout=PATIENCE)
    assert "Traceback" not in stderr
    if with_signal is not signal.SIGKILL:
        assert child.returncode == 130
        assert "it resumes" in error_of([json.loads(line) for line in stdout.splitlines()])["remedy"]
    assert "half-written" in passports.verify(out)[0].found
    code, told = prepare(*words, out)
    assert code == 0, told
    assert any("resuming:" in line.get("note", "") for line in told)
    assert prepare(*words, tmp_path / "unbroken")[0] == 0
    assert passports.read(out)["id"] == passports.read(tmp_path / "unbroken")["id"]
    assert not (out / "parts").exists()


def test_no_worker_outlives_a_killed_preparation(tmp_path, slow_source, mxnet_python):
    child = start(mxnet_python, "--from", slow_source, "--quality", 95, "--to", tmp_path / "out")
    wait_for(tmp_path / "out" / "parts", "train-*.json", child)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    child.kill()
    child.communicate()
    wait_until(lambda: not any(is_running(process) for process in children), "the workers' end")


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_ends_the_preparation(tmp_path, slow_source, mxnet_python):
    child = start(mxnet_python, "--from", slow_source, "--quality", 95, "--to", tmp_path / "out")
    wait_for(tmp_path / "out" / "parts", "train-*.json", child)
    for process in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(int(process), signal.SIGKILL)
            break
    stdout, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 1
    assert "signal 9" in error_of([json.loads(line) for line in stdout.splitlines()])["found"]


def test_a_changed_source_starts_over_and_says_so(tmp_path, slow_source, prepare, mxnet_python):
    words = ("--from", slow_source, "--quality", 95, "--to", tmp_path / "out")
    child = start(mxnet_python, *words)
    wait_for(tmp_path / "out" / "parts", "train-*.json", child)
    child.kill()
    child.communicate()
    (slow_source / "train" / "all" / "0.jpg").unlink()
    code, told = prepare(*words)
    assert code == 0
    assert any("starting over" in line.get("note", "") for line in told)
    assert passports.read(tmp_path / "out")["splits"]["train"]["count"] == 23


@pytest.mark.parametrize("phase", ["parts", "join"])
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, images, prepare, phase):
    source = split_folders(tmp_path / "pets", images)
    sizes = [path.stat().st_size for path in (source / "train").glob("*/*.jpg")]
    # Room for a whole part of four images and not for the six parts joined, or not even for a part.
    limit = 5 * max(sizes) if phase == "join" else 3 * min(sizes)
    words = ("--from", source, "--to", tmp_path / "out")
    code, told = prepare(*words, limit=limit)
    assert code == 1
    error = error_of(told)
    assert "no room" in error["found"]
    assert "\n" not in error["found"]
    assert "finished parts are kept" in error["remedy"]
    assert prepare(*words)[0] == 0
    assert passports.verify(tmp_path / "out", check=check) == []
    assert len(records(tmp_path / "out", "train")) == 24


def test_a_joining_that_was_interrupted_goes_on_byte_for_byte(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    assert prepare("--from", source, "--to", tmp_path / "whole")[0] == 0
    for limit in range(8000, 40000, 4000):
        code, _ = prepare("--from", source, "--to", tmp_path / "out", limit=limit)
        if code == 0:
            break
    assert code == 0 or prepare("--from", source, "--to", tmp_path / "out")[0] == 0
    assert passports.read(tmp_path / "out")["id"] == passports.read(tmp_path / "whole")["id"]


def test_too_little_room_is_told_before_the_start(tmp_path, images, mxnet_python):
    source = split_folders(tmp_path / "pets", images)
    driver = (
        "import shutil, sys\nfrom collections import namedtuple\n"
        "shutil.disk_usage = lambda path: namedtuple('usage', 'total used free')(9999, 0, 9999)\n"
        "from benchmarks.resnet import prepare\nsys.exit(prepare.main(sys.argv[1:]))\n"
    )
    command = [mxnet_python, "-c", driver, "--from", str(source), "--to", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "10.0 kB free on the disk of" in done.stderr
    assert not list((tmp_path / "out" / "parts").glob("*.rec"))


def test_a_second_preparation_of_one_folder_waits_for_the_first(tmp_path, slow_source, prepare, mxnet_python):
    words = ("--from", slow_source, "--quality", 95, "--to", tmp_path / "out")
    child = start(mxnet_python, *words)
    wait_for(tmp_path / "out" / "parts", "plan.json", child)
    code, told = prepare(*words)
    child.communicate()
    assert (child.returncode, code) == (0, 0), told
    notes = [line["note"] for line in told if "note" in line]
    assert "another preparation is writing" in notes[0]
    assert "nothing to do" in notes[-1]
    assert not (tmp_path / "out" / "parts").exists()
    assert passports.verify(tmp_path / "out", False, "resnet") == []


def test_a_second_preparation_with_other_options_is_refused_after_the_first(
    tmp_path, slow_source, prepare, mxnet_python
):
    words = ("--from", slow_source, "--to", tmp_path / "out", "--quality")
    child = start(mxnet_python, *words, 95)
    wait_for(tmp_path / "out" / "parts", "plan.json", child)
    code, told = prepare(*words, 90)
    child.communicate()
    assert (child.returncode, code) == (0, 2), told
    assert "other options" in error_of(told)["found"]
    assert passports.read(tmp_path / "out")["how"]["options"]["quality"] == 95
    assert not (tmp_path / "out" / "parts").exists()


# -- folders that are there already -------------------------------------------------------------------


def test_a_complete_set_is_left_alone_and_another_is_refused(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    out = tmp_path / "out"
    assert prepare("--from", source, "--to", out)[0] == 0
    before = (out / "train.rec").stat().st_mtime_ns
    code, told = prepare("--from", source, "--to", out)
    assert code == 0
    assert any("nothing to do" in line.get("note", "") for line in told)
    assert (out / "train.rec").stat().st_mtime_ns == before
    code, told = prepare("--from", source, "--to", out, "--resize", 32)
    assert code == 2
    assert "other options" in error_of(told)["found"]
    assert prepare("--from", source, "--to", out, "--resize", 32, "--overwrite")[0] == 0
    assert passports.read(out)["how"]["options"]["resize"] == 32


def test_a_set_that_changed_since_is_not_taken_for_complete(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    assert prepare("--from", source, "--to", tmp_path / "out")[0] == 0
    (tmp_path / "out" / "val.rec").write_bytes(b"")
    code, told = prepare("--from", source, "--to", tmp_path / "out")
    assert code == 2
    assert "have changed since" in error_of(told)["found"]
    assert prepare("--from", source, "--to", tmp_path / "out", "--overwrite")[0] == 0


def test_files_of_somebody_else_are_not_replaced(tmp_path, images, prepare):
    source = split_folders(tmp_path / "pets", images)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.rec").write_bytes(b"precious")
    code, told = prepare("--from", source, "--to", tmp_path / "out")
    assert code == 2
    assert "without a passport" in error_of(told)["found"]
    assert (tmp_path / "out" / "train.rec").read_bytes() == b"precious"


# -- bad input ----------------------------------------------------------------------------------------


def no_folder(folder: Path, images: Path) -> Path:
    return folder / "nowhere"


def a_file(folder: Path, images: Path) -> Path:
    return images / "00.jpg"


def no_classes(folder: Path, images: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def no_images(folder: Path, images: Path) -> Path:
    (folder / "tree" / "ant").mkdir(parents=True)
    (folder / "tree" / "ant" / "a.txt").touch()
    return folder / "tree"


def only_train(folder: Path, images: Path) -> Path:
    class_folders(folder / "half" / "train", images, {"ant": 2})
    return folder / "half"


def class_missing(folder: Path, images: Path) -> Path:
    source = split_folders(folder / "pets", images)
    shutil.rmtree(source / "val" / "bee")
    return source


def class_too_many(folder: Path, images: Path) -> Path:
    source = split_folders(folder / "pets", images)
    class_folders(source / "val", images, {"yak": 1}, begin=40)
    return source


def single_image(folder: Path, images: Path) -> Path:
    return class_folders(folder / "tree", images, {"ant": 3, "bee": 1})


def one_class(folder: Path, images: Path) -> Path:
    return class_folders(folder / "tree", images, {"ant": 3})


BAD_SOURCES = {
    one_class: "all images are in one class folder, ant",
    no_folder: "does not exist",
    a_file: "is no folder",
    no_classes: "has no class folders",
    no_images: "hold no images",
    only_train: "no held-out images",
    class_missing: "val has no image of bee",
    class_too_many: "train has no image of yak",
    single_image: "the class bee has a single image",
}


@pytest.mark.parametrize("make", BAD_SOURCES, ids=lambda make: make.__name__)
def test_a_bad_source_is_refused_by_name(tmp_path, images, prepare, make):
    code, told = prepare("--from", make(tmp_path, images), "--to", tmp_path / "out")
    assert code == 2
    error = error_of(told)
    assert BAD_SOURCES[make] in error["found"]
    assert error["remedy"]


@pytest.mark.parametrize(
    "words",
    [
        ["--to", "x", "--resize", "0"],
        ["--to", "x", "--quality", "101"],
        ["--to", "x", "--workers", "none"],
        ["--to", "x", "--validation-fraction", "1"],
        ["--to", "x", "--verify", "y"],
        ["--strange"],
        [],
    ],
)
def test_a_bad_option_is_refused(prepare, words):
    code, told = prepare(*words)
    assert code == 2
    assert error_of(told)["found"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path, images, prepare):
    (tmp_path / "file").touch()
    source = split_folders(tmp_path / "pets", images)
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/encore")):
        code, told = prepare("--from", source, "--to", place)
        assert code == 2
        assert "cannot write in" in error_of(told)["found"]
    code, told = prepare("--from", source, "--to", source / "train" / "out")
    assert "is within the source" in error_of(told)["found"]


def test_verifying_needs_the_standard_library_only(tmp_path, images, prepare, mxnet_python):
    source = split_folders(tmp_path / "pets", images)
    assert prepare("--from", source, "--to", tmp_path / "out")[0] == 0
    # -S: no site-packages.
    command = [mxnet_python, "-S", "-m", "benchmarks.resnet.prepare", "--verify", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is whole (every byte): pets, 24 train, 6 val" in done.stderr
    (tmp_path / "out" / "val.rec").unlink()
    (tmp_path / "out" / "train.rec").write_bytes(b"")
    code, told = prepare("--verify", tmp_path / "out", "--quick")
    assert code == 2
    assert len(error_of(told)["more"]) == 1
