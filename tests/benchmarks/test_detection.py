"""Detection. COCO from raw files to arrays, bad input, scenes; average precision, computed in a second process.

The precision itself is tested in tests/in_framework/pytorch/detection.py.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.common.data import images
from benchmarks.common.data import published as published_sets
from benchmarks.common.data.problem import Problem
from benchmarks.detection import detections, preparation, scenes, tables, writer
from benchmarks.detection.annotations import DataSet, open_data
from encore import data, paths
from encore.errors import EncoreError
from tests import preparing
from tests.conftest import records
from tests.preparing import check_refusal, manifest, notes, refused, write_files
from tests.trainings import PATIENCE, Started, wait_until

Image = pytest.importorskip("PIL.Image")

IMAGES = {"train": 7, "val": 3}
WIDTH, HEIGHT = 64, 48
CATEGORIES = [{"id": 5, "name": "square"}, {"id": 2, "name": "corner"}, {"id": 90, "name": "crowd"}]
CORNER = [[1.5, 1, 1.5, 9, 11, 9]]
TWO_SQUARES = [[2, 3, 2, 13, 12, 13, 12, 3], [20, 3, 20, 13, 30, 13, 30, 3]]
RLE = {"counts": [0, 48, 63 * 48], "size": [HEIGHT, WIDTH]}

Content = dict[str, Any]


def object_of(number: int, image: int, category: int, box: list[float], segmentation: Any, **fields: Any) -> Content:
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": box,
        "area": box[2] * box[3],
        "segmentation": segmentation,
        "iscrowd": 0,
        **fields,
    }


def content_of(part: str) -> Content:
    # Annotations of a part: images in descending order of their ids, one without objects, one with three
    sizes = {"width": WIDTH, "height": HEIGHT}
    images = [{"id": 10 * n, "file_name": f"{10 * n:012}.jpg", **sizes} for n in range(IMAGES[part], 0, -1)]
    objects = [
        object_of(200, 20, 2, [1.5, 1, 9.5, 8], CORNER),
        object_of(300, 20, 90, [0, 0, 1, 48], RLE, iscrowd=1),
        *(object_of(100 + n, 10 * n, 5, [2, 3, 28, 10], TWO_SQUARES) for n in range(2, IMAGES[part] + 1)),
    ]
    return {"info": {}, "licenses": [], "images": images, "annotations": objects, "categories": list(CATEGORIES)}


def annotations(part: str, **changes: Any) -> dict[str, str]:
    return {f"annotations/instances_{part}2017.json": json.dumps(content_of(part) | changes)}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Toy data set in the layout of COCO, in folders
    root = tmp_path_factory.mktemp("published")
    for part in IMAGES:
        write_files(root, annotations(part))
        (root / f"{part}2017").mkdir()
        for entry in content_of(part)["images"]:
            picture = Image.effect_noise((WIDTH, HEIGHT), 40 + entry["id"]).convert("RGB")
            picture.save(root / f"{part}2017" / entry["file_name"])
    return root


@pytest.fixture
def source(published: Path, tmp_path: Path) -> Path:
    # A copy that a test may change; the files keep their times
    return Path(shutil.copytree(published, tmp_path / "raw"))


@pytest.fixture(scope="module")
def opened(published: Path, tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return prepare(published, tmp_path_factory.mktemp("opened") / "data")[0]


run = partial(preparing.run, "ssd", workers=0)


def prepare(source: Path, to: Path, *words: object) -> tuple[DataSet, str]:
    noted = notes(run(source, "-o", to, *words))
    return open_data(to), noted


# -- prepared data set ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), IMAGES.items())
def test_arrays_have_the_content_of_the_json_file(name: str, count: int, opened: DataSet) -> None:
    part = getattr(opened, name)
    arrays = {
        "image_ids": [10 * n for n in range(1, count + 1)],
        "sizes": [[WIDTH, HEIGHT]] * count,
        "offsets": [0, 0, 3, *range(4, count + 2)],
        # The second image has annotations 102, 200 and 300
        "boxes": [[2, 3, 28, 10], [1.5, 1, 9.5, 8], [0, 0, 1, 48], *[[2, 3, 28, 10]] * (count - 2)],
        "labels": [2, 1, 3, *[2] * (count - 2)],
        "areas": [280, 76, 48, *[280] * (count - 2)],
        "crowds": [False, False, True, *[False] * (count - 2)],
        "with_objects": list(range(1, count)),
    }
    assert {array: getattr(part, array).tolist() for array in arrays} == arrays
    assert (
        [part.path(n).name for n in range(count)] == [*part.files] == [f"{10 * n + 10:012}.jpg" for n in range(count)]
    )
    polygons = [[polygon.ravel().tolist() for polygon in part.polygons(number)] for number in range(4)]
    assert (polygons, [category.id for category in opened.categories]) == (
        [TWO_SQUARES, CORNER, [], TWO_SQUARES], [2, 5, 90]
    )  # fmt: skip
    assert min(path.stat().st_nlink for path in (part.json, part.path(0))) > 1, "files are linked, not copied"


def test_data_set_is_that_of_both_benchmarks(published: Path, opened: DataSet, tmp_path: Path) -> None:
    for benchmark in preparation.BENCHMARKS:
        notes(preparing.run(benchmark, "--verify", opened.folder))
        assert data.check_data(opened.folder, benchmark).name == published.name
    with pytest.raises(EncoreError, match="contains the data set"):
        data.check_data(opened.folder, "gnmt")
    # Without errors in the source, --skip-flawed changes nothing
    skipping = manifest(preparing.prepared("maskrcnn", published, tmp_path / "to", "--skip-flawed"))
    assert skipping == manifest(opened.folder) | {name: skipping[name] for name in ("how", "sha256")}


@pytest.mark.parametrize("layout", ["zips", "images"])
def test_other_layouts_give_the_same_data(source: Path, opened: DataSet, tmp_path: Path, layout: str) -> None:
    if layout == "zips":
        for archive, folder in (("train2017", "train2017"), ("val2017", "val2017"), ("annotations_trainval2017", "")):
            shutil.make_archive(str(source / archive), "zip", source, folder or "annotations")
            shutil.rmtree(source / (folder or "annotations"))
    else:
        (source / "images").mkdir()
        for name in ("train2017", "val2017"):
            (source / name).rename(source / "images" / name)
    assert prepare(source, tmp_path / "to")[0].manifest["id"] == opened.manifest["id"]
    notes(run("--verify", tmp_path / "to"))


# -- bad input ------------------------------------------------------------------------------------------

OBJECT_ERRORS: dict[str, tuple[Content, str]] = {
    "a box outside": (
        {"bbox": [60, 1, 9.5, 8]},
        "box outside its image: annotation {id}, [60, 1, 9.5, 8] in an image of 64 x 48",
    ),
    "a box far away": ({"bbox": [100, 100, 9, 9]}, "annotation {id}, [100, 100, 9, 9] in an image of 64 x 48"),
    "a box without area": ({"bbox": [1, 1, 0, 8]}, "box without area: annotation {id}, [1, 1, 0, 8]"),
    "a box without area in fp32": ({"bbox": [1, 1, 1e-60, 8]}, "annotation {id}, [1, 1, 1e-60, 8]"),
    "an empty annotation": ({"segmentation": []}, "empty annotation: annotation {id} of image 20"),
    "an empty box": ({"bbox": []}, "annotation {id}: bbox must be x, y, width and height"),
    "no number": ({"bbox": [1, 1, float("nan"), 8]}, "annotation {id}: bbox has nan, not a finite number"),
    "no box": ({"bbox": None}, "annotation {id}: 'NoneType' object is not iterable"),
    "a wrong category": ({"category_id": 3}, "unknown category: annotation {id}, category 3"),
    "a wrong image": ({"image_id": 3}, "annotation of an image without entry: annotation {id}, image 3"),
    "two points": (
        {"segmentation": [[1, 1, 2, 2]]},
        "polygon of less than three points: annotation {id} of image 20",
    ),
    "half a point": (
        {"segmentation": [[1, 1, 2, 2, 3, 3, 4]]},
        "polygon that is no list of x, y pairs: annotation {id} of image 20",
    ),
    "text": ({"segmentation": [["1", "2", "3", "4", "5", "6"]]}, "annotation {id} of image 20"),
    "an RLE of another size": (
        {"segmentation": {**RLE, "size": [WIDTH, HEIGHT]}, "iscrowd": 1},
        "RLE that does not fit its image: annotation {id} of image 20",
    ),
    "an RLE that ends early": (
        {"segmentation": {**RLE, "counts": [0, 48]}, "iscrowd": 1},
        "annotation {id} of image 20",
    ),
    "a compressed RLE that ends early": (
        {"segmentation": {**RLE, "counts": "0`1"}, "iscrowd": 1},
        "annotation {id} of image 20",
    ),
    "a compressed RLE with an endless count": (
        {"segmentation": {**RLE, "counts": "o" * 100_000}, "iscrowd": 1},
        "annotation {id} of image 20",
    ),
    "an RLE of an instance": (
        {"segmentation": RLE},
        "training needs polygons: convert it): annotation {id} of image 20",
    ),
    "a compressed RLE of an instance": (
        # The same counts, as pycocotools' frUncompressedRLE compresses them
        {"segmentation": {**RLE, "counts": "0`1`n2"}},
        "annotation {id} of image 20",
    ),
    "a far polygon": ({"segmentation": [[1, 1, 1e30, 2, 3, 3]]}, "annotation {id} of image 20"),
}


def skip_flawed(source: Path, files: preparing.Files, *flaws: str) -> tuple[int, int]:
    # Checks that the flaws are named, then skipped on request; returns the remaining images and objects of train
    check_refusal("ssd", source, files, [*flaws, "--skip-flawed"])
    opened, noted = prepare(source, source.with_name("to"), "--skip-flawed")
    # The JSON file, which the evaluation reads, has the same images and objects as the arrays
    content, train = json.loads(opened.train.json.read_text()), opened.train
    found = sorted(image["id"] for image in content["images"]), len(content["annotations"])
    assert ([text for text in flaws if text not in noted], *found) == ([], train.image_ids.tolist(), len(train.boxes))
    return len(train), len(train.boxes)


def test_files_and_entries_without_counterpart_are_named(source: Path) -> None:
    (source / "train2017" / "000000000030.jpg").rename(source / "train2017" / "stray.jpg")
    flaws = (
        f"1 images without file in {source}/train2017: 000000000030.jpg",
        f"1 files in {source}/train2017 without entry in {source}/annotations/instances_train2017.json: stray.jpg",
    )
    assert skip_flawed(source, {}, *flaws) == (6, 7)


def test_bad_images_are_named(source: Path) -> None:
    first, *images = content_of("train")["images"]
    files = {
        "train2017/000000000030.jpg": lambda content: content[:-700],
        "train2017/000000000040.jpg": "",
        "train2017/000000000050.jpg": "<html>not found</html>",
        **annotations("train", images=[{**first, "width": 65}, *images]),
    }
    flaws = (
        "4 train: images with errors: ",
        "000000000030.jpg: unusable: image file is truncated",
        "000000000040.jpg: unusable: no bytes",
        "000000000050.jpg: unusable: not an image format that Pillow reads",
        "000000000070.jpg: 64 x 48 pixels, its entry has 65 x 48",
    )
    assert skip_flawed(source, files, *flaws) == (3, 4)


@pytest.mark.parametrize(
    ("kind", "size", "error"),
    [
        # DALI decodes these differently
        *((kind, (WIDTH, HEIGHT), f"{kind} image: convert it to JPEG or PNG")
          for kind in ("GIF", "TIFF", "WEBP", "PPM", "TGA", "JPEG2000")),
        ("PNG", (100, 31), "100 x 31 pixels, more than 3,099"),
    ],
)  # fmt: skip
def test_unusable_image_is_named(kind: str, size: tuple[int, int], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 3099)
    encoded = io.BytesIO()
    Image.new("L", size, 100).save(encoded, kind)
    assert writer.image_error(encoded.getvalue(), size) == f"unusable: {error}"


def test_bad_objects_are_named(source: Path) -> None:
    objects = [
        object_of(number, 20, 2, [1.5, 1, 9.5, 8], CORNER) | fields
        for number, (fields, _) in enumerate(OBJECT_ERRORS.values(), 500)
    ]
    # The last one has the id of a complete one
    incomplete = [{"id": 600}, 7, {"id": 601, "image_id": [1]}, {"id": 300, "image_id": 20}]
    flaws = [text.format(id=number) for number, (_, text) in enumerate(OBJECT_ERRORS.values(), 500)]
    flaws += ["7 train: incomplete annotation", "annotation 600 has no image_id", "annotation ?: 'int' object"]
    files = annotations("train", annotations=[*content_of("train")["annotations"], *objects, *incomplete])
    assert skip_flawed(source, files, *flaws) == (7, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_id": "20"}, "annotation 7: image_id is '20', not a 64-bit integer"),
        ({"id": 1 << 70}, "not a 64-bit integer"),
        ({"bbox": [1, 1, 10**400, 8]}, "annotation 7: int too large to convert to float"),
        ({"area": -1}, "annotation 7: area must be 0 to 1e+10 (got -1)"),
        ({"area": "9"}, "annotation 7: area has '9', not a finite number"),
        ({"iscrowd": "0"}, "annotation 7: iscrowd must be 0 or 1 (got '0')"),
    ],
)
def test_fields_of_another_type_are_named(fields: Content, message: str) -> None:
    usable, errors = tables.check(object_of(7, 20, 2, [1.5, 1, 9.5, 8], CORNER) | fields, {20: (WIDTH, HEIGHT)}, {2: 1})
    assert usable is None and message in errors[tables.INCOMPLETE]


def duplicate(key: str) -> dict[str, str]:
    entries = content_of("val")[key]
    return annotations("val", **{key: [*entries, entries[-1]]})


# Files to change, and parts of the message
REFUSED: dict[str, tuple[preparing.Files, str, str]] = {
    "no images": ({"val2017": None}, "{raw} has no val2017/ and no val2017.zip", "cocodataset.org"),
    "no annotations": (
        {"annotations": None},
        "{raw} has no annotations/instances_train2017.json and no annotations_trainval2017.zip", "cocodataset.org"),
    "YOLO's labels": (
        {"annotations": None, "labels/train2017/1.txt": "45 0.479 0.688 0.955 0.595\n"},
        "{raw} has YOLO's layout, labels in text files such as labels/train2017/1.txt", "COCO's JSON"),
    "a cut zip": (
        {"val2017": None, "val2017.zip": b"PK\x03\x04 no end"}, "{raw}/val2017.zip is damaged", "download it again"),
    "a cut JSON file": (
        {"annotations/instances_val2017.json": lambda content: content[:-300]},
        "instances_val2017.json cannot be read: ", "again"),
    "other categories": (
        annotations("val", categories=CATEGORIES[:2]), "different categories: 90 crowd", "one list of categories"),
    "an image id twice": (duplicate("images"), "has the image id 10 twice", "remove one"),
    "an annotation id twice": (duplicate("annotations"), "has the annotation id 103 twice", "remove one"),
    "a category id twice": (duplicate("categories"), "has the category id 90 twice", "remove one"),
    "no list": (
        annotations("val", annotations=5), "instances_val2017.json cannot be read: 'int' object is not iterable",
        "download it again"),
    "no objects": (
        annotations("val", annotations=[]), "instances_val2017.json has no annotations", "download it again"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_source_is_refused(source: Path, case: str) -> None:
    files, *parts = REFUSED[case]
    check_refusal("ssd", source, files, parts, "--skip-flawed")


def test_boxes_may_exceed_their_image_by_less_than_a_pixel(source: Path, tmp_path: Path) -> None:
    first, *objects = content_of("train")["annotations"]
    write_files(source, annotations("train", annotations=[{**first, "bbox": [54, 1, 10.75, 8]}, *objects]))
    opened, noted = prepare(source, tmp_path / "to")
    parts = ("train: 1 boxes extend beyond their image, by 0.75 pixels at most", "1 of 7 images have no objects")
    assert ([part for part in parts if part not in noted], opened.train.boxes[1].tolist()) == ([], [54, 1, 10.75, 8])


# -- COCO 2017 itself -----------------------------------------------------------------------------------


TOY_COUNTS = {
    "images in train": 7, "images in val": 3, "images with annotations in train": 6,
    "images with annotations in val": 2, "categories": 3,
}  # fmt: skip


@pytest.fixture
def publish_toy_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    exactly = {f"facts.counts.{name}": count for name, count in TOY_COUNTS.items()}
    monkeypatch.setattr(published_sets, "load", lambda: {"coco2017": {"exactly": exactly}})


@pytest.mark.usefixtures("publish_toy_counts")
def test_only_the_published_counts_are_coco(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source.rename(tmp_path / "coco2017")
    assert prepare(source, tmp_path / "full")[0].manifest["name"] == "coco2017"
    monkeypatch.undo()
    check_refusal("ssd", source, {}, ["coco2017 with facts.counts.images in train 7 for 118,287"], "--name", "coco2017")
    assert prepare(source, tmp_path / "own")[0].manifest["name"] == "coco2017-own"


@pytest.mark.usefixtures("publish_toy_counts")
def test_flaws_of_the_published_set_are_reported_and_skipped(source: Path, tmp_path: Path) -> None:
    objects = [
        *content_of("train")["annotations"],
        object_of(901, 30, 5, [3, 3, 4, 0], TWO_SQUARES),
        object_of(902, 30, 5, [60, 3, 9, 9], TWO_SQUARES),
        object_of(903, 30, 5, [3, 3, 9, 9], [[1, 1, 2, 2], *CORNER]),
    ]
    opened, noted = prepare(write_files(source, annotations("train", annotations=objects)), tmp_path / "to")
    flaws = ("1 train: box without area: annotation 901", "box outside its image: annotation 902", "903")
    train, polygons = opened.train, [polygon.ravel().tolist() for polygon in opened.train.polygons(5)]
    found = [text for text in flaws if text not in noted], polygons, len(train.boxes), train.json.read_bytes()
    assert found == ([], CORNER, 8 + 2, (source / "annotations" / "instances_train2017.json").read_bytes())
    file = annotations("train", annotations=[{**objects[0], "category_id": 3}, *objects[1:]])
    problem = f"1 train: unknown category: annotation 200, category 3 in {source}/annotations/instances_train2017.json"
    assert refused(run(write_files(source, file), "-o", tmp_path / "other")).startswith(f"{problem} | ")


# -- interruptions and changes --------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "first"), [((), 10), (("--quick",), 20)], ids=["every byte", "quick"])
def test_verify_names_changed_images(published: Path, tmp_path: Path, words: tuple[str, ...], first: int) -> None:
    to = prepare(published, tmp_path / "to")[0].folder
    # Links to the source are replaced
    changes = {"train2017/000000000010": lambda content: content[:-1] + b"x", "train2017/000000000020": b""}
    write_files(to, {f"{name}.jpg": change for name, change in {**changes, "val2017/000000000030": None}.items()})
    error = run("--verify", to, *words)[1][-1]["error"]
    problems = [error["found"], *(problem["found"] for problem in error.get("more", ()))]
    names = [Path(text.replace(":", " ").split()[0]).name for text in problems]
    assert names == [f"{number:012}.jpg" for number in (10, 20, 30) if number >= first]


@pytest.mark.parametrize(
    ("file", "labels", "problem"),
    [
        ("train_labels.npy", 5, r"5 entries in train_labels\.npy"),
        ("annotations/boxes_train2017.json", 8, r"boxes_train2017\.json is missing"),
    ],
)
def test_inconsistent_arrays_are_refused(file: str, labels: int, problem: str, opened: DataSet, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(opened.folder, tmp_path / "copy"))
    (folder / file).unlink()
    np.save(folder / "train_labels.npy", np.ones(labels, np.int16))
    with pytest.raises(Problem, match=problem):
        open_data(folder)


# -- generated scenes -----------------------------------------------------------------------------------


# Two squares that touch at a corner; a notch and a hole, which belongs to its object as in COCO
@pytest.mark.parametrize(
    ("rows", "outlines"),
    [
        (
            ("......", "##....", "##....", "..##..", "..##.."),
            [[[0, 1], [2, 1], [2, 3], [0, 3]], [[2, 3], [4, 3], [4, 5], [2, 5]]],
        ),
        ((".......", ".###...", ".#.###.", ".##.##.", ".#####."), [[[1, 1], [4, 1], [4, 2], [6, 2], [6, 5], [1, 5]]]),
    ],
)
def test_outlines_of_a_mask(rows: tuple[str, ...], outlines: list[list[list[int]]]) -> None:
    mask = np.array([[pixel == "#" for pixel in row] for row in rows])
    assert [outline.tolist() for outline in scenes.outlines(mask)] == outlines


# Recorded when train and val had different digits: 1,500 and 297 of them
@pytest.mark.parametrize(("seed", "checksum"), [(0, 1023769172), (1, 4281826236)])
def test_scenes_are_the_recorded_ones(
    seed: int, checksum: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 17, (1797, 8, 8)).astype(float)
    monkeypatch.setattr(scenes, "_load_digits", lambda: scenes.Digits(images, np.arange(1797) % 10))
    scenes.write_scenes(tmp_path, seed, 12)
    files = (tmp_path / "annotations" / f"instances_{part}2017.json" for part in ("train", "val"))
    assert zlib.crc32(b"".join(path.read_bytes() for path in files)) == checksum


@pytest.mark.parametrize("masks", [None, [b"abc", b""]])
def test_detections_round_trip(masks: list[bytes] | None) -> None:
    boxes, labels = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32), np.array([3, 1], np.int16)
    written = detections.Detections(np.array([7, 9]), boxes, np.array([0.5, 0.25], np.float32), labels, masks)
    read = detections.from_bytes(detections.to_bytes(written))
    assert {name: getattr(read, name).dtype for name in detections.DTYPES} == detections.DTYPES
    assert (read.masks, detections.to_bytes(read)) == (masks, detections.to_bytes(written))


def start(python: Path, toy: Callable[[str], Path], folder: Path, **options: Any) -> Started:
    # Start detection_run.py in the background, on one rank
    folder.mkdir(exist_ok=True)
    content = {
        "targets": {"box_ap": 0.95, "mask_ap": 0.95},
        "spreads": [0.2, 0.05, 0.0, 0.0],
        "seconds": 0.02,
        **options,
    }
    program = paths.ROOT / "tests" / "in_framework" / "detection_run.py"
    command = [*map(str, (python, program, toy("ssd"), folder)), json.dumps(content)]
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return Started(subprocess.Popen(command, env=environment, **pipes), folder)


def evaluator_of(started: Started) -> psutil.Process:
    # The process that evaluates, once it has received detections
    def workers() -> list[psutil.Process]:
        children = psutil.Process(started.process.pid).children()
        return [child for child in children if "evaluation_worker" in " ".join(child.cmdline())]

    wait_until(lambda: any(started.results.glob("detections/*.npz")) and bool(workers()), "an evaluator")
    return workers()[0]


def results(folder: Path) -> list[Any]:
    return [(record["epoch"], record["qualities"]) for record in records(folder / "metrics.jsonl", "eval")]


@pytest.fixture(scope="module")
def reference(pytorch_python: Path, toy: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    started = start(pytorch_python, toy, tmp_path_factory.mktemp("reference"))
    started.ended(0)
    assert results(started.results)[-1] == (3, {"box_ap": 1.0, "mask_ap": 1.0})
    return started.results


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "concurrently", "problem", "hint"),
    [
        (signal.SIGKILL, True, "ended with signal 9 (SIGKILL)\n", "hint: see its message above"),
        (signal.SIGSTOP, False, "hangs: it gave no heartbeat for ", "hint: find out what stops processes"),
    ],
    ids=["dies", "hangs"],
)
def test_failed_evaluator_ends_the_run(
    pytorch_python: Path,
    toy: Callable[[str], Path],
    tmp_path: Path,
    reference: Path,
    number: signal.Signals,
    concurrently: bool,
    problem: str,
    hint: str,
) -> None:
    started = start(pytorch_python, toy, tmp_path, concurrently=concurrently)
    evaluator_of(started).send_signal(number)
    # Written by the launcher; the start of the evaluator may take longer than this
    write_files(tmp_path, {"ranks/hang_seconds": "0.6"})
    output = started.ended(1)
    parts = ("the process that evaluates epoch ", problem, "expected: the average precision", hint)
    assert [part for part in parts if part not in output] == [] and "Traceback" not in output, output
    write_files(tmp_path, {"ranks/hang_seconds": None})
    start(pytorch_python, toy, tmp_path, concurrently=concurrently).ended(0)
    assert results(tmp_path) == results(reference)


@pytest.mark.long
def test_evaluator_ends_with_its_training(pytorch_python: Path, toy: Callable[[str], Path], tmp_path: Path) -> None:
    started = start(pytorch_python, toy, tmp_path, seconds=0.2, workers=2)
    evaluator = evaluator_of(started)
    processes = [evaluator, *evaluator.children()]
    started.process.kill()
    started.process.communicate()
    assert psutil.wait_procs(processes, timeout=PATIENCE)[1] == []
