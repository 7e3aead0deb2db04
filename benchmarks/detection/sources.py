"""Where COCO's files are: folders or zips as published, listed without reading an image."""

import hashlib
import os
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from benchmarks.common.data import source_checks, text_files
from benchmarks.common.data.problem import Problem
from benchmarks.detection.layout import PARTS, images_folder, json_file

ANNOTATIONS_ZIP = "annotations_trainval2017.zip"
LAYOUT = (
    "train2017/ and val2017/ with the images, annotations/instances_train2017.json and instances_val2017.json: COCO "
    "2017 as published, in folders or zips, or a set of your own"
)
DOWNLOAD = "download it from cocodataset.org, or pass the folder that contains them"
AGAIN = "download it again: the published checksum shows whether it is complete"


class SourceFile(NamedTuple):
    """File, or zip member."""

    path: str
    member: str = ""  # empty: ``path`` is the file
    size: int = 0  # bytes

    def __str__(self) -> str:
        return f"{self.member} in {self.path}" if self.member else self.path


class Images(NamedTuple):
    container: str  # the folder, or the zip
    prefix: str  # path before the names in the zip file; empty for a folder
    sizes: Mapping[str, int]  # file size in bytes by name
    fingerprint: str

    @property
    def is_zip(self) -> bool:
        return Path(self.container).is_file()


class Source(NamedTuple):
    images: Mapping[str, Images]
    annotations: Mapping[str, SourceFile]

    @property
    def fingerprint(self) -> str:
        """Hash of names, sizes and modification times, but not of the location."""
        entries: List[Any] = [self.images[part].fingerprint for part in PARTS]
        for part in PARTS:
            file = self.annotations[part]
            entries.append((file.size, Path(file.path).stat().st_mtime_ns))
        return hashlib.sha256(repr(entries).encode()).hexdigest()


def find(origin: Path) -> Source:
    """List COCO's files in ``origin``; images may also be in ``origin/images``.

    Raises:
        Problem: a folder, zip file or JSON file is missing, or a zip file is incomplete.
    """
    if not origin.is_dir():
        raise Problem(f"{origin} is not a folder", LAYOUT, "pass the folder that contains them")
    annotations = {part: _find_annotations(origin, part) for part in PARTS}
    return Source({part: _find_images(origin, part) for part in PARTS}, annotations)


def _find_images(origin: Path, part: str) -> Images:
    name = images_folder(part)
    for root in (origin, origin / "images"):
        if (root / name).is_dir():
            return _list_folder(root / name)
        if (root / f"{name}.zip").is_file():
            return _list_zip(root / f"{name}.zip")
    raise Problem(f"{origin} has no {name}/ and no {name}.zip", LAYOUT, DOWNLOAD)


def _list_folder(folder: Path) -> Images:
    with os.scandir(folder) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if not entry.name.startswith("."))
    listing = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])
    sizes = {name: stat.st_size for name, stat in files}
    return Images(str(folder), "", sizes, hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest())


def _list_zip(path: Path) -> Images:
    with open_zip(path) as archive:
        files = [member for member in archive.infolist() if not member.is_dir()]
    prefixes = {member.filename.rpartition("/")[0] for member in files}
    if len(prefixes) != 1:
        raise Problem(f"{path} has images in {len(prefixes)} folders", f"one folder, {path.stem}/", AGAIN)
    prefix = f"{prefixes.pop()}/".lstrip("/")
    sizes = {member.filename[len(prefix) :]: member.file_size for member in files}
    stat = path.stat()
    return Images(str(path), prefix, sizes, repr((path.name, stat.st_size, stat.st_mtime_ns)))


def _find_annotations(origin: Path, part: str) -> SourceFile:
    name = json_file(part)
    for path in (origin / name, origin / Path(name).name):
        if path.is_file():
            return SourceFile(str(path), "", path.stat().st_size)
    path = origin / ANNOTATIONS_ZIP
    if not path.is_file():
        label = next(origin.glob("**/labels/**/*.txt"), None)
        if label is not None:
            raise Problem(
                f"{origin} has YOLO's layout, labels in text files such as {label.relative_to(origin)}",
                LAYOUT,
                "convert the labels to COCO's JSON, with a segmentation for Mask R-CNN",
            )
        raise Problem(f"{origin} has no {name} and no {ANNOTATIONS_ZIP}", LAYOUT, DOWNLOAD)
    with open_zip(path) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(Path(name).name)]
    if not members:
        raise Problem(f"{path} has no {name}", "the zip of COCO 2017's train and val annotations", AGAIN)
    return SourceFile(str(path), members[0].filename, members[0].file_size)


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; raises Problem if it, or data read from it, is damaged."""
    with text_files.undamaged(path, "a complete zip"), zipfile.ZipFile(path) as archive:
        yield archive


def read_content(file: SourceFile) -> bytes:
    """Return file or zip member content."""
    if not file.member:
        return Path(file.path).read_bytes()
    with open_zip(Path(file.path)) as archive:
        return archive.read(file.member)


def read_all(images: Images, names: Sequence[str]) -> Iterator[Tuple[str, bytes]]:
    """Yield names and bytes of images; no bytes for damaged zip members."""
    if not images.is_zip:
        for name in names:
            path = str(Path(images.container, name))
            yield name, source_checks.read_unchanged(path, path, images.sizes[name])
        return
    with open_zip(Path(images.container)) as archive:
        for name in names:
            try:
                yield name, archive.read(images.prefix + name)
            except text_files.DAMAGED:
                yield name, b""
