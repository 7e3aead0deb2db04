"""Data set sources: images in two splits with labels, listed before images are read.

Class folders, ImageNet's official tar files (read in place without unpacking), or scikit-learn's digits.
"""

import hashlib
import io
import os
import re
import tarfile
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from benchmarks.common.data import published, source_checks
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.source_checks import first_names

Report = Callable[[int], None]


class Item(NamedTuple):
    """Image: a range of bytes in a container, a file in a folder, or bytes in memory."""

    name: str  # class and file name, unique within the split
    kind: str  # class name
    container: str  # path of the tar, or of the folder that ``name`` is relative to
    offset: int  # first byte in the container; -1 for a separate file
    size: int  # bytes
    changed: int  # time of change of the file or the container, nanoseconds
    payload: bytes = b""


class Source(NamedTuple):
    name: str
    classes: Tuple[str, ...]
    images: Dict[str, List[Item]]  # by split, train and val
    description: str  # description of the source and the split, for dataset.json
    left_out: int = 0  # number of files without an image suffix

    @property
    def labels(self) -> Dict[str, int]:
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def counts(self) -> Dict[str, int]:
        return {split: len(items) for split, items in self.images.items()}

    @property
    def published_fields(self) -> Dict[str, Any]:
        """Fields of the manifest that are published for ImageNet."""
        splits = {split: {"count": count} for split, count in self.counts.items()}
        return {"name": self.name, "classes": self.classes, "splits": splits}


def shuffle_key(seed: int, name: str) -> bytes:
    """Sort key for shuffling that depends only on seed and name, and not on a random generator's version."""
    return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()


def read_item(item: Item) -> bytes:
    """Return an image's bytes."""
    if item.payload:
        return item.payload
    path = os.path.join(item.container, item.name) if item.offset < 0 else item.container  # noqa: PTH118 - a million
    return source_checks.read_unchanged(path, item.name, item.size, item.offset)


def by_class(items: Iterable[Item], seed: int) -> List[List[Item]]:
    """Group images by class; groups are sorted in the order for holding out images, from seed and name."""
    groups: Dict[str, List[Item]] = {}
    for item in items:
        groups.setdefault(item.kind, []).append(item)
    return [
        sorted(groups[kind], key=lambda item: shuffle_key(seed, "held out:" + item.name)) for kind in sorted(groups)
    ]


def check_classes(source: Source) -> None:
    """Reject sources with only one class, or with a class that is missing in a split."""
    if len(source.classes) == 1:
        raise Problem(
            f"all images are in one class folder, {source.classes[0]}",
            "at least two classes, one folder per class",
            f"if {source.classes[0]} contains the class folders, pass it as the raw data",
        )
    for name in source.classes:
        if any("\ud800" <= character <= "\udfff" for character in name):  # os.fsdecode of invalid bytes
            raise Problem(f"the name of class folder {name!a} is not UTF-8", "UTF-8", "rename the folder")
    for split, items in source.images.items():
        absent = sorted(set(source.classes) - {item.kind for item in items})
        if absent:
            raise Problem(
                f"{split} has no image of {first_names(absent)}",
                "images of every class in both splits",
                "add images of it, or remove the class from the other split",
            )


VAL_FOLDERS = ("val", "validation", "test")
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def list_folders(origin: Path, seed: int, fraction: float, report: Report) -> Source:
    """List ``train/`` and ``val/`` (or ``validation/``, ``test/``), or one tree of class folders."""
    name = origin.resolve().name
    if not (origin / "train").is_dir():
        items, class_names, left_out = walk_classes(origin, report, 0)
        images = hold_out(items, seed, fraction)
        description = f"one tree of class folders, {fraction:g} of every class held out here"
        return Source(name, tuple(class_names), images, description, left_out)
    val = find_val(origin)
    if val is None:
        raise Problem(
            f"{origin} has train/ but no held-out images",
            "a folder val/, validation/ or test/ next to train/",
            f"add one, or prepare {origin / 'train'} to hold out images of each class",
        )
    train, trained, left_out = walk_classes(origin / "train", report, 0)
    val_items, val_classes, left_out_val = walk_classes(val, report, len(train))
    description = f"class folders, split into train and {val.name} by the source"
    classes = tuple(sorted({*trained, *val_classes}))
    return Source(name, classes, {"train": train, "val": val_items}, description, left_out + left_out_val)


def find_val(origin: Path) -> Optional[Path]:
    return next((origin / name for name in VAL_FOLDERS if (origin / name).is_dir()), None)


def walk_classes(root: Path, report: Report, count_before: int) -> Tuple[List[Item], List[str], int]:
    """List the images in the class folders of ``root``, the classes, and the number of ignored files."""
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise Problem(
            f"{root} has no class folders",
            "one folder of images per class",
            "pass the folder above the class folders, or the one with ImageNet's tars",
        )
    items: List[Item] = []
    left_out = 0
    empty: List[str] = []
    for name in classes:
        before_class = len(items)
        for path in _files(root, name):
            if os.path.splitext(path)[1].lower() not in SUFFIXES:  # noqa: PTH122 - a million times
                left_out += 1
                continue
            stat = os.stat(os.path.join(root, path))  # noqa: PTH116,PTH118
            items.append(Item(path, name, str(root), -1, stat.st_size, stat.st_mtime_ns))
            if len(items) % 256 == 0:
                report(count_before + len(items))
        if len(items) == before_class:
            empty.append(name)
    report(count_before + len(items))
    if not items:
        raise Problem(
            f"the folders {first_names(classes)} in {root} contain no images",
            "files with the suffixes " + " ".join(SUFFIXES),
            "name the folder above the class folders",
        )
    if empty:
        raise Problem(
            f"no image in {len(empty):,} of {len(classes):,} class folders of {root}: {first_names(empty)}",
            "files with the suffixes " + " ".join(SUFFIXES),
            "add images to these folders, or remove them",
        )
    return items, classes, left_out


def _files(root: Path, folder: str) -> Iterator[str]:
    with os.scandir(root / folder) as entries:
        entries_sorted = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    for name, is_folder in entries_sorted:
        path = f"{folder}/{name}"
        if is_folder:
            yield from _files(root, path)
        else:
            yield path


def hold_out(items: List[Item], seed: int, fraction: float) -> Dict[str, List[Item]]:
    """Hold out the same fraction of every class, at least one image, selected by seed and name."""
    images: Dict[str, List[Item]] = {"train": [], "val": []}
    for group in by_class(items, seed):
        if len(group) < 2:
            raise Problem(
                f"the class {group[0].kind} has a single image",
                "at least two: one to train on, one to hold out",
                "add images to it, or remove its folder",
            )
        count = min(max(1, round(len(group) * fraction)), len(group) - 1)
        images["val"] += group[:count]
        images["train"] += group[count:]
    return images


TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
META = "data/meta.mat"


def list_imagenet(origin: Path, report: Report) -> Source:
    """List ILSVRC2012's tar files in place: the training tar of class tars and the flat validation tar."""
    if not (origin / TRAIN_TAR).exists():
        raise Problem(f"{origin} has {VAL_TAR} but no {TRAIN_TAR}", "both", "download it from image-net.org")
    train: List[Item] = []
    for member in members(origin / TRAIN_TAR, 0, None):
        wordnet_id, suffix = os.path.splitext(member.name)  # noqa: PTH122
        if suffix == ".tar":
            for image in members(origin / TRAIN_TAR, member.offset, member.size, member.name):
                train.append(image._replace(name=f"{wordnet_id}/{image.name}", kind=wordnet_id))
            report(len(train))
    images = {"train": train, "val": _list_val(origin, report, len(train))}
    classes = tuple(sorted({item.kind for items in images.values() for item in items}))
    return Source("imagenet", classes, images, "ILSVRC2012's tars, their own split")


def _list_val(origin: Path, report: Report, count_before: int) -> List[Item]:
    if not (origin / VAL_TAR).exists():
        folder = find_val(origin)
        if folder is None:
            raise Problem(
                f"{origin} has no {VAL_TAR} and no folder val/",
                "the validation images",
                f"download {VAL_TAR} from image-net.org, or sort its images into val/CLASS/",
            )
        return walk_classes(folder, report, count_before)[0]
    images = sorted(members(origin / VAL_TAR, 0, None), key=lambda item: item.name)
    report(count_before + len(images))
    truth = ground_truth(origin / DEVKIT)
    if len(truth) != len(images):
        raise Problem(
            f"{len(images):,} images in {VAL_TAR}, {len(truth):,} labels in {DEVKIT}",
            "one label per image",
            f"download both again: sha256sum {VAL_TAR} shows whether it is complete",
        )
    return [image._replace(kind=kind) for image, kind in zip(images, truth)]


def members(tar: Path, start: int, size: Optional[int], within: str = "") -> Iterator[Item]:
    """Yield the files in a tar, or in the tar inside ``tar`` at byte ``start``; ``kind`` is empty."""
    stat = tar.stat()
    location = f"{within} in {tar}" if within else str(tar)
    end = stat.st_size if size is None else min(start + size, stat.st_size)
    with tar.open("rb", buffering=4096) as file:
        file.seek(start)
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                first = archive.firstmember  # type: ignore[attr-defined]
                if first is None or first.offset >= end:
                    raise tarfile.ReadError("no file in it")
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined] # it would keep every header
                    if member.offset >= end:
                        break  # a tar inside ``tar`` without the blocks of zeros that end it
                    if member.offset_data + member.size > end:
                        raise tarfile.ReadError("it ends within " + member.name)
                    if member.isfile():
                        name = member.name[2:] if member.name.startswith("./") else member.name
                        yield Item(name, "", str(tar), member.offset_data, member.size, stat.st_mtime_ns)
        except tarfile.TarError as error:
            raise Problem(
                f"{location} is not a complete tar file: {error}", "the complete file", "download it again"
            ) from None


def ground_truth(devkit: Path) -> List[str]:
    """Read the WordNet ids of the validation images, in the order of their names, from the development kit.

    ``meta.mat`` numbers the leaf synsets 1 to 1000 by ILSVRC2012_ID, which is not the order of WordNet ids; the
    ground truth file has one of these numbers per line.
    """
    if not devkit.exists():
        raise Problem(
            f"no {devkit.name} in {devkit.parent}",
            f"the development kit of tasks 1 and 2, which has the labels of {VAL_TAR}",
            "download it from image-net.org, or sort the validation images into val/CLASS/",
        )
    try:
        from scipy.io import loadmat
    except ImportError:
        raise Problem("scipy is not installed in this Python", "scipy", "pip install scipy") from None
    try:
        with tarfile.open(devkit) as archive:
            names = {member.name.split("/", 1)[-1]: member for member in archive if member.isfile()}
            meta, truth = (archive.extractfile(names[name]) for name in (META, GROUND_TRUTH))
            assert meta and truth  # both are files
            synsets = loadmat(io.BytesIO(meta.read()), squeeze_me=True)["synsets"]
            lines = truth.read().split()
        leaves = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets if int(s["num_children"]) == 0}
        return [leaves[int(line)] for line in lines]
    except (tarfile.TarError, zlib.error, OSError, EOFError, LookupError, ValueError, TypeError) as error:
        raise Problem(
            f"{devkit} is not a complete development kit: {error}",
            f"{META} and {GROUND_TRUTH}, as published on image-net.org",
            "download it again",
        ) from None


DIGITS_HELD_OUT = 297
DIGITS_SIDE = 32  # pixels. An 8x8 digit would be a single JPEG block, and crops and resizing would destroy the strokes
DIGITS_QUALITY = 95  # JPEG quality: high, because blocks of low quality are as large as the strokes


def list_digits(seed: int) -> Source:
    """List scikit-learn's 1,797 handwritten digits: 1,500 for training, 297 held out, with equal fractions of all
    classes.

    The digits are enlarged from 8x8 to 32x32 by the bicubic filter and stored as JPEG of quality 95, so that the
    same steps from decoding to cropping as for ImageNet are used.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Problem(
            f"{error.name} is not installed in this Python", "scikit-learn", "pip install scikit-learn pillow"
        ) from None
    digits = load_digits()
    items = []
    for number, label in enumerate(digits.target):
        gray = Image.fromarray((digits.images[number] * (255 / 16)).round().astype("uint8"))
        buffer = io.BytesIO()
        large = gray.resize((DIGITS_SIDE, DIGITS_SIDE), Image.BICUBIC).convert("RGB")
        large.save(buffer, "JPEG", quality=DIGITS_QUALITY)
        payload = buffer.getvalue()
        items.append(Item(f"{label}/{number:04}.jpg", str(label), "", -1, len(payload), 0, payload))
    classes = tuple(str(label) for label in range(10))
    description = (
        f"scikit-learn's load_digits, 8x8 enlarged to {DIGITS_SIDE}x{DIGITS_SIDE} by the bicubic filter, "
        f"JPEG of quality {DIGITS_QUALITY}; {DIGITS_HELD_OUT} of {len(items):,} held out here"
    )
    # Image k of n in a class has the fraction k/n: a cut through the sorted fractions takes the same fraction of all
    # classes.
    ranked = sorted(
        ((rank + 0.5) / len(group), item.kind, item)
        for group in by_class(items, seed)
        for rank, item in enumerate(group)
    )
    val_digits = [item for _, _, item in ranked]
    images = {"train": val_digits[DIGITS_HELD_OUT:], "val": val_digits[:DIGITS_HELD_OUT]}
    return Source("digits", classes, images, description)


WORDNET_ID = re.compile(r"n\d{8}")


def list_images(origin: Optional[Path], seed: int, fraction: float, report: Report) -> Source:
    """List the source at ``origin``; None is the toy data set. ``report`` is called with files found so far."""
    if origin is None:
        source = list_digits(seed)
    elif not origin.is_dir():
        raise Problem(
            f"{origin} is not a folder",
            "a folder of images, or the folder with ImageNet's tars",
            "pass that folder",
        )
    elif (origin / TRAIN_TAR).exists() or (origin / VAL_TAR).exists():
        source = list_imagenet(origin, report)
    else:
        source = list_folders(origin, seed, fraction, report)
    check_classes(source)
    # Class folders with any name are identified as ImageNet by class names and counts.
    is_imagenet = not published.shortfall(source._replace(name="imagenet").published_fields)
    if is_imagenet and all(WORDNET_ID.fullmatch(name) for name in source.classes):
        source = source._replace(name="imagenet")
    # As im2rec --shuffle: a reader's shuffle buffer has a few thousand images, less than four classes of ImageNet, so
    # the order in the file must be shuffled.
    source.images["train"].sort(key=lambda item: shuffle_key(seed, item.name))
    source.images["val"].sort(key=lambda item: item.name)
    return source
