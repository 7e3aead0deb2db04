"""The source of a preparation: images of two splits with their labels, listed before one of them is read.

Class folders, ImageNet's official tars (read where they are: no file is unpacked), or scikit-learn's digits.
"""

import hashlib
import io
import os
import re
import tarfile
import zlib
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from benchmarks.common.data.problem import FAILED, Problem
from benchmarks.resnet.prepare import check_counts

Report = Callable[[int], None]


class Item(NamedTuple):
    """One image: a range of a container, or a file below it, or bytes that are in no file."""

    name: str  # class and file name, unique within its split
    kind: str  # name of its class
    container: str  # path of the tar, or of the folder that ``name`` is relative to
    offset: int  # byte at which it begins in the container; -1 for a file of its own
    size: int  # bytes
    changed: int  # time of change of the file or the container, nanoseconds
    payload: bytes = b""


class Source(NamedTuple):
    name: str
    classes: Tuple[str, ...]
    images: Dict[str, List[Item]]  # those of train and of val
    made: str  # description of it and of its split, for the manifest
    left_out: int = 0  # files that are no images by their suffix

    @property
    def labels(self) -> Dict[str, int]:
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def counts(self) -> Dict[str, int]:
        return {split: len(items) for split, items in self.images.items()}


def mixed(seed: int, name: str) -> bytes:
    """Sort key of a shuffle that depends on seed and names alone, on no version of a random generator."""
    return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()


def read_item(item: Item) -> bytes:
    """Return the bytes of an image, read where it is."""
    if item.payload:
        return item.payload
    is_file = item.offset < 0
    path = os.path.join(item.container, item.name) if is_file else item.container  # noqa: PTH118 - a million
    try:
        with open(path, "rb") as file:
            file.seek(0 if is_file else item.offset)
            data = file.read(-1 if is_file else item.size)
    except OSError as error:
        raise Problem(
            f"{item.name} cannot be read: {error.strerror or error}", "a readable image", "fix it", FAILED
        ) from None
    if len(data) != item.size:
        raise Problem(
            f"{item.name} changed while the data set was made: {len(data):,} bytes, it had {item.size:,}",
            "a source that stays as it is",
            "give the same command again when nothing writes to the source",
            FAILED,
        )
    return data


def by_class(items: Iterable[Item], seed: int) -> List[List[Item]]:
    """Group images by their class; a group is in the order in which images of it are held out, by seed and name."""
    groups: Dict[str, List[Item]] = {}
    for item in items:
        groups.setdefault(item.kind, []).append(item)
    return [sorted(groups[kind], key=lambda item: mixed(seed, "held out:" + item.name)) for kind in sorted(groups)]


def check_classes(source: Source) -> None:
    """Refuse a source of one class, and one of which a class is missing in a split, by the name of the class."""
    if len(source.classes) == 1:
        raise Problem(
            f"all images are in one class folder, {source.classes[0]}",
            "two classes or more, a folder each",
            f"if {source.classes[0]} holds the class folders, name it as the raw data",
        )
    for name in source.classes:
        if any("\ud800" <= character <= "\udfff" for character in name):  # os.fsdecode of invalid bytes
            raise Problem(f"the name of class folder {name!a} is not UTF-8", "UTF-8", "rename the folder")
    for split, items in source.images.items():
        absent = sorted(set(source.classes) - {item.kind for item in items})
        if absent:
            raise Problem(
                f"{split} has no image of {some(absent)}",
                "images of every class in both splits",
                "add images of it, or take the class out of the other split",
            )


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


VAL_FOLDERS = ("val", "validation", "test")
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def list_folders(origin: Path, seed: int, fraction: float, report: Report) -> Source:
    """List ``train/`` and ``val/`` (or ``validation/``, ``test/``), or one tree of class folders."""
    name = origin.resolve().name
    if not (origin / "train").is_dir():
        items, found, left_out = walk_classes(origin, report, 0)
        images = hold_out(items, seed, fraction)
        made = f"one tree of class folders, {fraction:g} of every class held out here"
        return Source(name, tuple(found), images, made, left_out)
    val = find_val(origin)
    if val is None:
        raise Problem(
            f"{origin} has train/ but no held-out images",
            "a folder val/, validation/ or test/ next to train/",
            f"add one, or prepare {origin / 'train'} to hold images of each class out",
        )
    train, trained, left_out = walk_classes(origin / "train", report, 0)
    held, seen, left_out_val = walk_classes(val, report, len(train))
    made = f"class folders, split into train and {val.name} by the source"
    classes = tuple(sorted({*trained, *seen}))
    return Source(name, classes, {"train": train, "val": held}, made, left_out + left_out_val)


def find_val(origin: Path) -> Optional[Path]:
    return next((origin / name for name in VAL_FOLDERS if (origin / name).is_dir()), None)


def walk_classes(root: Path, report: Report, before: int) -> Tuple[List[Item], List[str], int]:
    """List the images below each class folder of ``root``; the classes; the number of files left out."""
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise Problem(
            f"{root} has no class folders",
            "one folder of images for each class",
            "name the folder above the class folders, or the one that holds ImageNet's tars",
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
            facts = os.stat(os.path.join(root, path))  # noqa: PTH116,PTH118
            items.append(Item(path, name, str(root), -1, facts.st_size, facts.st_mtime_ns))
            if len(items) % 256 == 0:
                report(before + len(items))
        if len(items) == before_class:
            empty.append(name)
    report(before + len(items))
    if not items:
        raise Problem(
            f"the folders {some(classes)} in {root} hold no images",
            "files with the suffixes " + " ".join(SUFFIXES),
            "name the folder above the class folders",
        )
    if empty:
        raise Problem(
            f"no image in {len(empty):,} of {len(classes):,} class folders of {root}: {some(empty)}",
            "files with the suffixes " + " ".join(SUFFIXES),
            "add images to these folders, or remove them",
        )
    return items, classes, left_out


def _files(root: Path, folder: str) -> Iterator[str]:
    with os.scandir(root / folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    for name, is_folder in found:
        path = f"{folder}/{name}"
        if is_folder:
            yield from _files(root, path)
        else:
            yield path


def hold_out(items: List[Item], seed: int, fraction: float) -> Dict[str, List[Item]]:
    """Hold the same fraction of every class out, at least one image, chosen by seed and name."""
    images: Dict[str, List[Item]] = {"train": [], "val": []}
    for group in by_class(items, seed):
        if len(group) < 2:
            raise Problem(
                f"the class {group[0].kind} has a single image",
                "at least two: one to train on, one to hold out",
                "add images to it or take its folder away",
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
    """List ILSVRC2012's tars in place: the training tar of class tars, the flat validation tar."""
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


def _list_val(origin: Path, report: Report, before: int) -> List[Item]:
    if not (origin / VAL_TAR).exists():
        folder = find_val(origin)
        if folder is None:
            raise Problem(
                f"{origin} has no {VAL_TAR} and no folder val/",
                "the validation images",
                f"download {VAL_TAR} from image-net.org, or sort its images into val/CLASS/",
            )
        return walk_classes(folder, report, before)[0]
    images = sorted(members(origin / VAL_TAR, 0, None), key=lambda item: item.name)
    report(before + len(images))
    truth = ground_truth(origin / DEVKIT)
    if len(truth) != len(images):
        raise Problem(
            f"{len(images):,} images in {VAL_TAR}, {len(truth):,} labels in {DEVKIT}",
            "one label for each image",
            f"download both again: sha256sum {VAL_TAR} shows whether it is whole",
        )
    return [image._replace(kind=kind) for image, kind in zip(images, truth)]


def members(tar: Path, begin: int, size: Optional[int], within: str = "") -> Iterator[Item]:
    """Yield the files in a tar, or in the tar inside ``tar`` from ``begin`` on, not unpacked, and of no class yet."""
    facts = tar.stat()
    place = f"{within} in {tar}" if within else str(tar)
    end = facts.st_size if size is None else min(begin + size, facts.st_size)
    with tar.open("rb", buffering=4096) as file:
        file.seek(begin)
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
                        yield Item(name, "", str(tar), member.offset_data, member.size, facts.st_mtime_ns)
        except tarfile.TarError as error:
            raise Problem(f"{place} is no whole tar: {error}", "the whole file", "download it again") from None


def ground_truth(devkit: Path) -> List[str]:
    """Read the WordNet ids of the validation images in the order of their names, from the development kit.

    ``meta.mat`` numbers the leaf synsets 1 to 1000 by ILSVRC2012_ID, which is not the order of their
    WordNet ids; the ground truth file has such a number on each line.
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
            f"{devkit} is not the whole development kit: {error}",
            f"{META} and {GROUND_TRUTH}, as image-net.org gives them",
            "download it again",
        ) from None


DIGITS_HELD_OUT = 297
DIGITS_SIDE = 32  # pixels. An 8x8 digit would be a single JPEG block, and no crop or resize would leave a stroke whole.
DIGITS_QUALITY = 95  # JPEG quality: high, because the blocks of a low one are as large as the strokes


def list_digits(seed: int) -> Source:
    """List scikit-learn's 1,797 handwritten digits: 1,500 to train on, 297 held out, every class in both alike.

    They are enlarged from 8x8 to 32x32 by the bicubic filter and stored as JPEG of quality 95, so that
    the whole path from decoding to cropping is the one that ImageNet takes.
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
    made = (
        f"scikit-learn's load_digits, 8x8 enlarged to {DIGITS_SIDE}x{DIGITS_SIDE} by the bicubic filter, "
        f"JPEG of quality {DIGITS_QUALITY}; {DIGITS_HELD_OUT} of {len(items):,} held out here"
    )
    # The k-th of n images of a class is at the fraction k/n: a cut through the sorted fractions takes
    # the same share of every class.
    ranked = sorted(
        ((place + 0.5) / len(group), item.kind, item)
        for group in by_class(items, seed)
        for place, item in enumerate(group)
    )
    chosen = [item for _, _, item in ranked]
    images = {"train": chosen[DIGITS_HELD_OUT:], "val": chosen[:DIGITS_HELD_OUT]}
    return Source("digits", classes, images, made)


WORDNET_ID = re.compile(r"n\d{8}")


def list_images(origin: Optional[Path], seed: int, fraction: float, report: Report) -> Source:
    """List the source at ``origin``; None is the toy data set. ``report`` is called with files found so far."""
    if origin is None:
        source = list_digits(seed)
    elif not origin.is_dir():
        expected = "a folder of images, or the folder that holds ImageNet's tars"
        raise Problem(f"{origin} is no folder", expected, "name that folder as the raw data")
    elif (origin / TRAIN_TAR).exists() or (origin / VAL_TAR).exists():
        source = list_imagenet(origin, report)
    else:
        source = list_folders(origin, seed, fraction, report)
    check_classes(source)
    # Class folders under any name are ImageNet by their classes' form and all of its counts.
    is_imagenet = not check_counts("imagenet", len(source.classes), source.counts)
    if is_imagenet and all(WORDNET_ID.fullmatch(name) for name in source.classes):
        source = source._replace(name="imagenet")
    # im2rec --shuffle does the same: a reader's shuffle buffer holds some thousand images, fewer than
    # ImageNet has in four classes, so the order on the disk must be mixed already.
    source.images["train"].sort(key=lambda item: mixed(seed, item.name))
    source.images["val"].sort(key=lambda item: item.name)
    return source
