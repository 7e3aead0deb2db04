"""ImageNet's official tars, read where they lie: no file is unpacked."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.resnet.sources.folders import VAL_FOLDERS, walk_classes
from benchmarks.resnet.sources.listing import Item, Source, Tell

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
META = "data/meta.mat"


def list_imagenet(origin: Path, tell: Tell) -> Source:
    """Lists ILSVRC2012's tars in place: the training tar of class tars, the flat validation tar."""
    if not (origin / TRAIN_TAR).exists():
        raise Problem(f"{origin} has {VAL_TAR} but no {TRAIN_TAR}", "both", "download it from image-net.org")
    train: List[Tuple[str, Item]] = []
    for member in members(origin / TRAIN_TAR, 0, None):
        wordnet_id, suffix = os.path.splitext(member.name)  # noqa: PTH122
        if suffix == ".tar":
            for image in members(origin / TRAIN_TAR, member.offset, member.size, member.name):
                train.append((wordnet_id, image._replace(name=f"{wordnet_id}/{image.name}")))
            tell(len(train))
    val = _imagenet_val(origin, tell, len(train))
    classes = tuple(sorted({name for name, _ in train} | {name for name, _ in val}))
    labels = {name: label for label, name in enumerate(classes)}
    listed = [[item._replace(label=labels[name]) for name, item in split] for split in (train, val)]
    return Source("imagenet", classes, listed[0], listed[1], "ILSVRC2012's tars, their own split")


def _imagenet_val(origin: Path, tell: Tell, before: int) -> List[Tuple[str, Item]]:
    if not (origin / VAL_TAR).exists():
        folder = next((origin / name for name in VAL_FOLDERS if (origin / name).is_dir()), None)
        if folder is None:
            raise Problem(
                f"{origin} has no {VAL_TAR} and no folder val/",
                "the validation images",
                f"download {VAL_TAR} from image-net.org, or sort its images into val/CLASS/",
            )
        return [(item.name.split("/", 1)[0], item) for item in walk_classes(folder, tell, before)[0]]
    images = sorted(members(origin / VAL_TAR, 0, None), key=lambda item: item.name)
    tell(before + len(images))
    truth = ground_truth(origin / DEVKIT)
    if len(truth) != len(images):
        raise Problem(
            f"{len(images):,} images in {VAL_TAR}, {len(truth):,} labels in {DEVKIT}",
            "one label for each image",
            f"download both again: sha256sum {VAL_TAR} tells whether it is whole",
        )
    return [(truth[position], image) for position, image in enumerate(images)]


def members(tar: Path, begin: int, size: Optional[int], within: str = "") -> Iterator[Item]:
    """Files in a tar, or in the tar that lies in ``tar`` from ``begin`` on, not unpacked and not labelled."""
    facts = tar.stat()
    place = f"{within} in {tar}" if within else str(tar)
    with io.FileIO(tar) as file:
        end = facts.st_size if size is None else begin + size
        window = io.BufferedReader(_Window(file, begin, end), 4096)
        try:
            with tarfile.open(fileobj=window, mode="r:") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined] # it would keep every header
                    offset = begin + member.offset_data
                    if offset + member.size > min(end, facts.st_size):
                        raise tarfile.ReadError("it ends within " + member.name)
                    if member.isfile():
                        name = member.name[2:] if member.name.startswith("./") else member.name
                        yield Item(name, -1, str(tar), offset, member.size, facts.st_mtime_ns)
        except tarfile.TarError as error:
            raise Problem(
                f"{place} is no whole tar: {error}", "the whole file", "download it again"
            ) from None


class _Window(io.RawIOBase):
    """A range of a file as a file, so that a tar within a tar is read in place."""

    def __init__(self, file: io.RawIOBase, begin: int, end: int) -> None:
        self._file, self._begin, self._end = file, begin, end
        self._position = begin

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        origin = (self._begin, self._position, self._end)[whence]
        self._position = origin + offset
        return self._position - self._begin

    def readinto(self, buffer: bytearray) -> int:
        self._file.seek(self._position)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._end - self._position)]) or 0
        self._position += count
        return count


def ground_truth(devkit: Path) -> List[str]:
    """WordNet ids of the validation images in the order of their names, from the development kit.

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
