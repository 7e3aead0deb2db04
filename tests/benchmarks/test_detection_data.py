"""COCO from raw files to arrays: folders and zips, every kind of bad input, interruptions, and the generated scenes."""

import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data import published as published_sets
from benchmarks.common.data.problem import Problem
from benchmarks.detection import preparation, scenes, writer
from benchmarks.detection.annotations import DataSet, open_data
from encore import data, paths
from encore.errors import EncoreError
from tests import preparing
from tests.preparing import notes, passport
from tests.trainings import with_other_offsets

Image = pytest.importorskip("PIL.Image")

IMAGES = {"train": 7, "val": 3}
WIDTH, HEIGHT = 64, 48
CATEGORIES = [{"id": 5, "name": "square"}, {"id": 2, "name": "corner"}, {"id": 90, "name": "crowd"}]
CORNER = [[1.5, 1, 1.5, 9, 11, 9]]
TWO_SQUARES = [[2, 3, 2, 13, 12, 13, 12, 3], [20, 3, 20, 13, 30, 13, 30, 3]]
RLE = {"counts": [0, 48, 63 * 48], "size": [HEIGHT, WIDTH]}

Content = dict[str, Any]


def object_of(number: int, image: int, category: int, box: list[float], segmentation: Any, crowd: int = 0) -> Content:
    facts = {"id": number, "image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3]}
    return {**facts, "segmentation": segmentation, "iscrowd": crowd}


def content_of(part: str) -> Content:
    # A part's JSON: images in falling order of their ids, one without objects, one with three
    count = IMAGES[part]
    images = [
        {"id": 10 * n, "file_name": f"{10 * n:012}.jpg", "width": WIDTH, "height": HEIGHT} for n in range(count, 0, -1)
    ]
    objects = [object_of(100 + n, 10 * n, 5, [2, 3, 28, 10], TWO_SQUARES) for n in range(2, count + 1)]
    objects.insert(0, object_of(300, 20, 90, [0, 0, 1, 48], RLE, 1))
    objects.insert(0, object_of(200, 20, 2, [1.5, 1, 9.5, 8], CORNER))
    lists = {"images": images, "annotations": objects, "categories": list(CATEGORIES)}
    return {"info": {}, "licenses": [], **lists}


def write_json(root: Path, part: str, content: Content) -> None:
    (root / "annotations").mkdir(exist_ok=True, parents=True)
    (root / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A toy data set laid out as COCO is published, in folders
    root = tmp_path_factory.mktemp("published")
    for part in IMAGES:
        content = content_of(part)
        write_json(root, part, content)
        (root / f"{part}2017").mkdir()
        for each in content["images"]:
            picture = Image.effect_noise((WIDTH, HEIGHT), 40 + each["id"])
            picture.convert("RGB").save(root / f"{part}2017" / each["file_name"])
    return root


@pytest.fixture
def source(published: Path, tmp_path: Path) -> Path:
    # A copy that a test may change; the files keep their times
    return Path(shutil.copytree(published, tmp_path / "raw"))


@pytest.fixture(scope="module")
def opened(published: Path, tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    folder = tmp_path_factory.mktemp("opened") / "data"
    code, lines = run(published, "-o", folder)
    assert code == 0, lines
    return open_data(folder)


run = partial(preparing.run, "ssd")


# -- what is written ------------------------------------------------------------------------------------


def test_arrays_hold_what_the_json_file_has(opened: DataSet) -> None:
    assert [each.id for each in opened.categories] == [2, 5, 90]
    for part, count in ((opened.train, 7), (opened.val, 3)):
        arrays = {
            "image_ids": [10 * n for n in range(1, count + 1)],
            "sizes": [[WIDTH, HEIGHT]] * count,
            "offsets": [0, 0, 3, *range(4, count + 2)],
            # The second image: annotations 102, 200 and 300.
            "boxes": [[2, 3, 28, 10], [1.5, 1, 9.5, 8], [0, 0, 1, 48], *[[2, 3, 28, 10]] * (count - 2)],
            "labels": [2, 1, 3, *[2] * (count - 2)],
            "areas": [280, 76, 48, *[280] * (count - 2)],
            "crowds": [False, False, True, *[False] * (count - 2)],
        }
        assert {name: getattr(part, name).tolist() for name in arrays} == arrays
        assert part.with_objects.tolist() == list(range(1, count))
        assert all(part.path(n).name == part.files[n] == f"{10 * (n + 1):012}.jpg" for n in range(count))
        outlines = [[polygon.ravel().tolist() for polygon in part.polygons(number)] for number in range(4)]
        assert outlines == [TWO_SQUARES, CORNER, [], TWO_SQUARES]
    train = {"images": 7, "images with annotations": 6, "objects": 8, "crowds": 1}
    val = {"images": 3, "images with annotations": 2, "objects": 4, "crowds": 1}
    counts = {f"{what} in {part}": count for part, of in (("train", train), ("val", val)) for what, count in of.items()}
    assert opened.passport["facts"]["counts"] == {"categories": 3, **counts}
    size = sum(path.stat().st_size for path in (opened.folder / "val2017").iterdir())
    assert opened.passport["splits"]["val"]["unlisted_bytes"] == size
    # Linked and not copied.
    assert (opened.folder / "annotations" / "instances_val2017.json").stat().st_nlink > 1
    assert opened.train.path(0).stat().st_nlink > 1


def test_one_data_set_serves_both_benchmarks(published: Path, opened: DataSet, tmp_path: Path) -> None:
    for benchmark in preparation.BENCHMARKS:
        assert preparing.run(benchmark, "--verify", opened.folder)[0] == 0
        assert data.check_data(opened.folder, benchmark).name == published.name
    with pytest.raises(EncoreError, match="holds the data set"):
        data.check_data(opened.folder, "gnmt")
    # Where there is no error, nothing is skipped, and the JSON files keep their bytes.
    assert preparing.run("maskrcnn", published, "-o", tmp_path / "to", "--skip-flawed")[0] == 0
    found = passport(tmp_path / "to")
    assert found == passport(opened.folder) | {name: found[name] for name in ("how", "sha256")}
    code, lines = preparing.run("maskrcnn", published, "-o", opened.folder)
    assert (code, "nothing to do" in notes(lines)) == (0, True)


@pytest.mark.parametrize("layout", ["zips", "images"])
def test_other_layouts_give_the_same_data(source: Path, opened: DataSet, tmp_path: Path, layout: str) -> None:
    if layout == "zips":
        for name in ("train2017", "val2017"):
            with zipfile.ZipFile(source / f"{name}.zip", "w") as archive:
                for path in sorted((source / name).iterdir()):
                    archive.write(path, f"{name}/{path.name}")
            shutil.rmtree(source / name)
        with zipfile.ZipFile(source / "annotations_trainval2017.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in (source / "annotations").iterdir():
                archive.write(path, f"annotations/{path.name}")
        shutil.rmtree(source / "annotations")
    else:
        (source / "images").mkdir()
        for name in ("train2017", "val2017"):
            (source / name).rename(source / "images" / name)
    code, lines = run(source, "-o", tmp_path / "to")
    assert code == 0, lines
    assert passport(tmp_path / "to")["id"] == opened.passport["id"]
    assert run("--verify", tmp_path / "to")[0] == 0


# -- bad input ------------------------------------------------------------------------------------------

OBJECT_ERRORS: dict[str, tuple[Content, str]] = {
    "a box outside": (
        {"bbox": [60, 1, 9.5, 8]},
        "box outside its image: annotation {id}, [60, 1, 9.5, 8] in an image of 64 x 48",
    ),
    "a box far away": ({"bbox": [100, 100, 9, 9]}, "annotation {id}, [100, 100, 9, 9] in an image of 64 x 48"),
    "a box without area": ({"bbox": [1, 1, 0, 8]}, "box without area: annotation {id}, [1, 1, 0, 8]"),
    "an empty annotation": ({"segmentation": []}, "empty annotation: annotation {id} of image 20"),
    "an empty box": ({"bbox": []}, "annotation {id}: bbox is no x, y, width and height"),
    "no number": ({"bbox": [1, 1, float("nan"), 8]}, "annotation {id}: bbox is no x, y, width and height"),
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
}


def refused_then_skipped(source: Path, to: Path, *wanted: str) -> DataSet:
    # Check that errors are refused by name, and return the data set without them
    code, lines = run(source, "-o", to)
    error = lines[-1]["error"]
    assert code == 2
    assert not [text for text in wanted if text not in error["found"]], error["found"]
    assert "--skip-flawed" in error["hint"]
    assert not (to / "dataset.json").exists()
    code, lines = run(source, "-o", to, "--skip-flawed")
    assert code == 0, lines
    assert not [text for text in wanted if text not in notes(lines)]
    opened = open_data(to)
    # The JSON file, which the evaluation compares with, and the arrays have the same images and objects.
    left = json.loads(opened.train.json.read_text())
    assert sorted(each["id"] for each in left["images"]) == opened.train.image_ids.tolist()
    assert len(left["annotations"]) == len(opened.train.boxes)
    return opened


def test_files_and_entries_that_do_not_match_are_named(source: Path, tmp_path: Path) -> None:
    (source / "train2017" / "000000000030.jpg").rename(source / "train2017" / "stray.jpg")
    opened = refused_then_skipped(
        source,
        tmp_path / "to",
        f"1 images without file in {source}/train2017: 000000000030.jpg",
        f"1 files in {source}/train2017 without entry in {source}/annotations/instances_train2017.json: stray.jpg",
    )
    assert (len(opened.train), len(opened.train.boxes)) == (6, 7)


def test_images_that_cannot_be_used_are_named(source: Path, tmp_path: Path) -> None:
    path = source / "train2017" / "000000000030.jpg"
    path.write_bytes(path.read_bytes()[:-700])
    (source / "train2017" / "000000000040.jpg").write_bytes(b"")
    (source / "train2017" / "000000000050.jpg").write_bytes(b"<html>not found</html>")
    content = content_of("train")
    content["images"][0]["width"] = 65
    write_json(source, "train", content)
    opened = refused_then_skipped(
        source,
        tmp_path / "to",
        "4 train: images with errors: ",
        "000000000030.jpg: damaged: image file is truncated",
        "000000000040.jpg: damaged: no bytes",
        "000000000050.jpg: damaged: no image of a format that Pillow reads",
        "000000000070.jpg: 64 x 48 pixels, its entry has 65 x 48",
    )
    assert (len(opened.train), len(opened.train.boxes)) == (3, 4)


def test_objects_with_errors_are_named(source: Path, tmp_path: Path) -> None:
    content = content_of("train")
    wanted = []
    for number, (fields, text) in enumerate(OBJECT_ERRORS.values(), 500):
        content["annotations"].append({**object_of(number, 20, 2, [1.5, 1, 9.5, 8], CORNER), **fields})
        wanted.append(text.format(id=number))
    # The last one has the id of one that can be used.
    content["annotations"] += [{"id": 600}, 7, {"id": 601, "image_id": [1]}, {"id": 300, "image_id": 20}]
    write_json(source, "train", content)
    wanted += ["7 train: incomplete annotation", "annotation 600 has no image_id", "annotation ?: 'int' object"]
    opened = refused_then_skipped(source, tmp_path / "to", *wanted)
    assert (len(opened.train), len(opened.train.boxes)) == (7, 8)


def cut_json(root: Path) -> None:
    path = root / "annotations" / "instances_val2017.json"
    path.write_text(path.read_text()[:-300])


def other_categories(root: Path) -> None:
    write_json(root, "val", content_of("val") | {"categories": CATEGORIES[:2]})


def twice(key: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        content = content_of("val")
        content[key].append(content[key][-1])
        write_json(root, "val", content)

    return change


def write_label(root: Path) -> None:
    (root / "labels" / "train2017").mkdir(parents=True)
    (root / "labels" / "train2017" / "1.txt").write_text("45 0.479 0.688 0.955 0.595\n")


def cut_zip(root: Path) -> None:
    shutil.rmtree(root / "val2017")
    (root / "val2017.zip").write_bytes(b"PK\x03\x04 and no end")


REFUSED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no images": (
        lambda root: shutil.rmtree(root / "val2017"),
        "{root} has no val2017/ and no val2017.zip",
        "cocodataset.org",
    ),
    "no annotations": (
        lambda root: shutil.rmtree(root / "annotations"),
        "{root} has no annotations/instances_train2017.json and no annotations_trainval2017.zip",
        "cocodataset.org",
    ),
    "YOLO's labels": (
        lambda root: (root / "annotations").rename(root / "old") and write_label(root),
        "{root} has YOLO's layout, labels in text files such as labels/train2017/1.txt",
        "COCO's JSON",
    ),
    "a cut zip": (cut_zip, "{root}/val2017.zip is no whole zip", "download it again"),
    "a cut JSON file": (cut_json, "instances_val2017.json cannot be read: ", "again"),
    "other categories": (other_categories, "different categories: 90 crowd", "one list of categories"),
    "an image id twice": (twice("images"), "has the image id 10 twice", "remove one"),
    "an annotation id twice": (twice("annotations"), "has the annotation id 103 twice", "remove one"),
    "a category id twice": (twice("categories"), "has the category id 90 twice", "remove one"),
    "no list": (
        lambda root: write_json(root, "val", content_of("val") | {"annotations": 5}),
        "instances_val2017.json cannot be read: 'int' object is not iterable",
        "download it again",
    ),
    "no objects": (
        lambda root: write_json(root, "val", content_of("val") | {"annotations": []}),
        "instances_val2017.json has no annotations",
        "download it again",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_skipped_is_refused(source: Path, tmp_path: Path, case: str) -> None:
    change, found, hint = REFUSED[case]
    change(source)
    code, lines = run(source, "-o", tmp_path / "to", "--skip-flawed")
    error = lines[-1]["error"]
    assert (code, found.format(root=source) in error["found"], hint in error["hint"]) == (2, True, True), error
    assert not (tmp_path / "to" / "dataset.json").exists()


def test_boxes_reach_out_by_a_pixel_in_published_sets(source: Path, tmp_path: Path) -> None:
    content = content_of("train")
    content["annotations"][0]["bbox"] = [54, 1, 10.75, 8]
    write_json(source, "train", content)
    code, lines = run(source, "-o", tmp_path / "to")
    assert code == 0, lines
    assert "train: 1 boxes reach out of their image, by 0.75 pixels at most" in notes(lines)
    assert "train: 1 of 7 images have no object" in notes(lines)
    assert open_data(tmp_path / "to").train.boxes[1].tolist() == [54, 1, 10.75, 8]


# -- COCO 2017 itself -----------------------------------------------------------------------------------

AS_PUBLISHED = {
    "images in train": 7,
    "images in val": 3,
    "images with annotations in train": 6,
    "images with annotations in val": 2,
    "categories": 3,
}


def take_the_toy_counts_for_cocos(patch: pytest.MonkeyPatch) -> None:
    for count, number in AS_PUBLISHED.items():
        patch.setitem(preparation.PUBLISHED, count, number)
    patch.setattr(published_sets, "known", dict)


def test_only_the_published_counts_are_coco(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = run(source, "-o", tmp_path / "to", "--name", "coco2017")
    assert (code, lines[-1]["error"]["found"]) == (2, "coco2017 with 7 images in train")
    assert lines[-1]["error"]["expected"] == "118,287"
    source = source.rename(tmp_path / "coco2017")
    assert run(source, "-o", tmp_path / "own")[0] == 0
    assert passport(tmp_path / "own")["name"] == "coco2017-own"
    with monkeypatch.context() as patch:
        take_the_toy_counts_for_cocos(patch)
        assert run(source, "-o", tmp_path / "whole")[0] == 0
    assert passport(tmp_path / "whole")["name"] == "coco2017"
    code, lines = run("--verify", tmp_path / "whole")
    assert (code, lines[-1]["error"]["expected"]) == (2, "118,287")


def test_known_errors_of_the_published_set_are_reported_and_not_trained(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_the_toy_counts_for_cocos(monkeypatch)
    content = content_of("train")
    content["annotations"] += [
        object_of(901, 30, 5, [3, 3, 4, 0], TWO_SQUARES),
        object_of(902, 30, 5, [60, 3, 9, 9], TWO_SQUARES),
        object_of(903, 30, 5, [3, 3, 9, 9], [[1, 1, 2, 2], *CORNER]),
    ]
    write_json(source, "train", content)
    before = (source / "annotations" / "instances_train2017.json").read_bytes()
    code, lines = run(source, "-o", tmp_path / "to")
    assert code == 0, lines
    for text in ("1 train: box without area: annotation 901", "box outside its image: annotation 902", "903"):
        assert text in notes(lines)
    train = open_data(tmp_path / "to").train
    assert train.json.read_bytes() == before
    assert len(train.boxes) == 8 + 2
    assert [polygon.ravel().tolist() for polygon in train.polygons(5)] == CORNER
    content["annotations"][0]["category_id"] = 3
    write_json(source, "train", content)
    code, lines = run(source, "-o", tmp_path / "other")
    assert (code, lines[-1]["error"]["found"]) == (2, "1 train: unknown category: annotation 200, category 3")


# -- interruptions and changes --------------------------------------------------------------------------


def test_images_that_were_done_are_not_read_again(
    source: Path, opened: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last image of train vanishes while the second of three tasks of images is done
    victim = source / "train2017" / "000000000070.jpg"
    monkeypatch.setattr(writer, "PART_IMAGES", 3)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_check_objects", lambda *_: victim.rename(tmp_path / "kept"))
        code, lines = run(source, "-o", tmp_path / "to")
    assert (code, f"{victim} cannot be read" in lines[-1]["error"]["found"]) == (1, True), lines
    (tmp_path / "kept").rename(victim)
    code, lines = run(source, "-o", tmp_path / "to")
    assert code == 0, lines
    # Another worker may have finished the part of val meanwhile.
    assert re.search("resuming: [23] of 4 parts of images were finished before", notes(lines))
    assert passport(tmp_path / "to")["id"] == opened.passport["id"]


@pytest.mark.parametrize("how", [(), ("--quick",)], ids=["every byte", "quick"])
def test_verify_names_changed_images(published: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    to = tmp_path / "to"
    assert run(published, "-o", to)[0] == 0
    for name, change in (("10", lambda data: data[:-1] + b"x"), ("20", lambda data: data[:-1])):
        path = to / "train2017" / f"0000000000{name}.jpg"
        changed = change(path.read_bytes())
        path.unlink()  # a link to the source
        path.write_bytes(changed)
    (to / "val2017" / "000000000030.jpg").unlink()
    code, lines = run("--verify", to, *how)
    error = lines[-1]["error"]
    found = [error["found"], *(each["found"] for each in error.get("more", ()))]
    assert code == 2
    names = [path.name for path in map(Path, (text.replace(":", " ").split()[0] for text in found))]
    assert names == (["000000000010.jpg"] if not how else []) + ["000000000020.jpg", "000000000030.jpg"]


def test_no_value_of_an_array_is_read_as_the_data_set_is_opened(opened: DataSet, tmp_path: Path) -> None:
    # Training opens it before the clock starts
    open_data(with_other_offsets(opened.folder, tmp_path / "copy"))


def test_arrays_that_do_not_fit_are_refused(opened: DataSet, tmp_path: Path) -> None:
    folder = shutil.copytree(opened.folder, tmp_path / "copy")
    np.save(folder / "train_labels.npy", np.ones(5, np.int16))
    with pytest.raises(Problem, match=r"5 entries in train_labels\.npy"):
        open_data(folder)
    (folder / "annotations" / "boxes_train2017.json").unlink()
    with pytest.raises(Problem, match=r"boxes_train2017\.json is missing"):
        open_data(folder)


# -- the generated set ----------------------------------------------------------------------------------


def painted(outline: np.ndarray, height: int, width: int) -> np.ndarray:
    # The pixels whose middle is inside an outline, by the even-odd rule: an independent way to fill it
    y, x = np.mgrid[:height, :width] + 0.5
    inside = np.zeros((height, width), bool)
    for (x1, y1), (x2, y2) in zip(outline, np.roll(outline, -1, axis=0), strict=True):
        if y1 != y2:
            crosses = (y > min(y1, y2)) & (y < max(y1, y2))
            inside ^= crosses & (x < x1 + (y - y1) * (x2 - x1) / (y2 - y1))
    return inside


def test_outlines_are_filled_to_the_mask() -> None:
    mask = np.zeros((12, 14), bool)
    mask[2:5, 3:6] = mask[5:8, 6:9] = True  # two squares that touch by a corner
    mask[9:12, 0:14] = True
    ring = np.zeros((12, 14), bool)
    ring[1:9, 2:10] = True
    ring[3:6, 4:7] = False
    found = scenes.outlines(mask)
    assert len(found) == 3
    assert (np.logical_or.reduce([painted(each, 12, 14) for each in found]) == mask).all()
    (outer,) = scenes.outlines(ring)
    ring[3:6, 4:7] = True  # a hole belongs to its object, as in COCO
    assert (painted(outer, 12, 14) == ring).all()
    generator = np.random.default_rng(3)
    noise = generator.random((12, 14)) < 0.5
    filled = np.logical_or.reduce([painted(each, 12, 14) for each in scenes.outlines(noise)])
    assert (filled[noise]).all()


def test_the_same_seed_generates_the_same_scenes(pytorch_python: Path, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((0, 0, 1)):
        to = tmp_path / str(number)
        command = [pytorch_python, "-m", "benchmarks.ssd.prepare", "--scenes", "12", "-o", to, "--seed", seed]
        subprocess.run(list(map(str, command)), cwd=paths.ROOT, check=True)
        found.append(passport(to)["id"])
    assert found[0] == found[1] != found[2]


def test_train_and_val_show_different_digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Every digit is drawn as a tone of its own number; the two parts draw none in common
    numbers = np.arange(1797)
    every = scenes.Digits(np.ones((1797, 8, 8)) * numbers[:, None, None], numbers % 10)
    seen: dict[str, set[int]] = {}

    def take(folder: Path, part: str, digits: scenes.Digits, count: int, generator: np.random.Generator) -> None:
        seen[part] = {int(image[0, 0]) for image in digits.images}

    monkeypatch.setattr(scenes, "_load_digits", lambda: every)
    monkeypatch.setattr(scenes, "_write_part", take)
    scenes.write_scenes(tmp_path, 0, 12)
    assert {part: len(found) for part, found in seen.items()} == {"train": 1500, "val": 297}
    assert not seen["train"] & seen["val"]
