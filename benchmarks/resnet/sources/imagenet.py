"""ImageNet's official tars, read where they are: no file is unpacked."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.resnet.sources.folders import find_val, walk_classes
from benchmarks.resnet.sources.listing import Item, Report, Source

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
META = "data/meta.mat"


def list_imagenet(origin: Path, report: Report) -> Source:
    """List ILSVRC2012's tars in place: the training tar of class tars, the flat validation tar."""
    if not (origin / TRAIN_TAR).exists():
        raise Problem(f"{origin} has {VAL_TAR} but no {TRAIN_TAR}", "both", "download it from image-net.org")
    train: List[Tuple[str, Item]] = []
    for member in members(origin / TRAIN_TAR, 0, None):
        wordnet_id, suffix = os.path.splitext(member.name)  # noqa: PTH122
        if suffix == ".tar":
            for image in members(origin / TRAIN_TAR, member.offset, member.size, member.name):
                train.append((wordnet_id, image._replace(name=f"{wordnet_id}/{image.name}")))
            report(len(train))
    splits = {"train": train, "val": _list_val(origin, report, len(train))}
    classes = tuple(sorted({name for items in splits.values() for name, _ in items}))
    labels = {name: label for label, name in enumerate(classes)}
    images = {split: [item._replace(label=labels[name]) for name, item in items] for split, items in splits.items()}
    return Source("imagenet", classes, images, "ILSVRC2012's tars, their own split")


# List the validation images with their classes' names.
def _list_val(origin: Path, report: Report, before: int) -> List[Tuple[str, Item]]:
    if not (origin / VAL_TAR).exists():
        folder = find_val(origin)
        if folder is None:
            raise Problem(
                f"{origin} has no {VAL_TAR} and no folder val/",
                "the validation images",
                f"download {VAL_TAR} from image-net.org, or sort its images into val/CLASS/",
            )
        return [(item.name.split("/", 1)[0], item) for item in walk_classes(folder, report, before)[0]]
    images = sorted(members(origin / VAL_TAR, 0, None), key=lambda item: item.name)
    report(before + len(images))
    truth = ground_truth(origin / DEVKIT)
    if len(truth) != len(images):
        raise Problem(
            f"{len(images):,} images in {VAL_TAR}, {len(truth):,} labels in {DEVKIT}",
            "one label for each image",
            f"download both again: sha256sum {VAL_TAR} shows whether it is whole",
        )
    return [(truth[position], image) for position, image in enumerate(images)]


def members(tar: Path, begin: int, size: Optional[int], within: str = "") -> Iterator[Item]:
    """Yield the files in a tar, or in the tar inside ``tar`` from ``begin`` on, not unpacked and not labelled."""
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
                        yield Item(name, -1, str(tar), member.offset_data, member.size, facts.st_mtime_ns)
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
            meta = loadmat(io.BytesIO(_extract(archive, names[META])), squeeze_me=True)["synsets"]
            lines = _extract(archive, names[GROUND_TRUTH]).split()
        leaves = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in meta if int(s["num_children"]) == 0}
        return [leaves[int(line)] for line in lines]
    except (tarfile.TarError, OSError, EOFError, KeyError, ValueError, IndexError) as error:
        raise Problem(
            f"{devkit} is not the whole development kit: {error}",
            f"{META} and {GROUND_TRUTH}, as image-net.org gives them",
            "download it again",
        ) from None


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return b"" if file is None else file.read()
