"""The passport of a data set: written last, so that a folder without it is half-written.

Standard library only, and nothing of this project but the RecordIO reader. A folder holds
``train.rec train.idx val.rec val.idx dataset.json``; the passport's ``id`` depends on their content
alone, so equal data have equal ids wherever they lie.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from benchmarks.common.recordio import RecordIOError, RecordReader, read_index, unpack

FILE_NAME = "dataset.json"
PARTS = "parts"
"""Folder of an unfinished preparation, inside the data folder."""
SCHEMA = 1
SKIPPED_NAMES = 20
"""Names of corrupt images that a passport lists; it counts all of them."""
IMAGENET_COUNTS = {"train": 1281167, "val": 50000}
IMAGENET_CLASSES = 1000
CHUNK = 1 << 20
"""Bytes read at once."""

Tell = Callable[[int], None]


class Finding(NamedTuple):
    """A problem with a data set: what was found, what was expected, what to do."""

    found: str
    expected: str
    remedy: str


class PassportError(Exception):
    """There is no passport, or it cannot be read; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


@dataclass(frozen=True)
class File:
    """A file of the data set."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """One image record; ``sha256`` is of the image bytes behind the header."""

    key: int
    label: float
    sha256: str


@dataclass(frozen=True)
class Split:
    """One split: its two files, and what was left out of it."""

    count: int
    """Records, which is the images of the source less the skipped ones."""
    records: File
    index: File
    first: Record
    last: Record
    skipped: int
    """Corrupt images left out on request."""
    skipped_names: Tuple[str, ...]
    """The first SKIPPED_NAMES of them."""


@dataclass(frozen=True)
class Passport:
    """All that is known about a prepared data set; ``dataset.json`` has the same fields."""

    schema: int
    benchmark: str
    name: str
    id: str
    """sha256 over benchmark, class names and files: the same data have the same id."""
    classes: Tuple[str, ...]
    """Class names in the order of their labels."""
    splits: Dict[str, Split]
    options: Dict[str, Any]
    """How it was prepared: short side, quality, seed, validation fraction, whether images were decoded."""
    source: str
    """sha256 of the source's listing and of the options: names, labels, sizes and times of change."""
    tool: Dict[str, str]
    """What made it, with versions: another JPEG encoder gives other bytes."""

    @property
    def count(self) -> int:
        """Records of all splits."""
        return sum(split.count for split in self.splits.values())


def data_id(benchmark: str, classes: Tuple[str, ...], splits: Dict[str, Split]) -> str:
    """Identifies a data set by its content, not by its place, name or history."""
    facts = {
        "benchmark": benchmark,
        "classes": list(classes),
        "splits": {
            name: [split.count, split.records.sha256, split.index.sha256] for name, split in splits.items()
        },
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def write(passport: Passport, directory: Path) -> Path:
    """Writes the passport in one step: it is there whole or not at all."""
    path = directory / FILE_NAME
    temporary = directory / (FILE_NAME + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(asdict(passport), file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def read(directory: Path) -> Passport:
    """Reads the passport of a data folder.

    Raises:
        PassportError: the folder or its passport is missing, half-written, or of another schema.
    """
    path = directory / FILE_NAME
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise PassportError(_absent(directory)) from None
    except (OSError, ValueError) as error:
        raise PassportError(Finding(f"{path}: {error}", "a readable passport", _again(directory))) from None
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        schema = facts.get("schema") if isinstance(facts, dict) else None
        raise PassportError(
            Finding(f"{path} has schema {schema}", f"schema {SCHEMA}", "prepare the data set again")
        )
    try:
        return _parse(facts)
    except (KeyError, TypeError, ValueError) as error:
        finding = Finding(f"{path}: {error!r}", "all fields of a passport", _again(directory))
        raise PassportError(finding) from None


def _parse(facts: Dict[str, Any]) -> Passport:
    splits = {}
    for name, split in facts["splits"].items():
        splits[name] = Split(
            count=int(split["count"]),
            records=File(**split["records"]),
            index=File(**split["index"]),
            first=Record(**split["first"]),
            last=Record(**split["last"]),
            skipped=int(split["skipped"]),
            skipped_names=tuple(split["skipped_names"]),
        )
    return Passport(**{**facts, "classes": tuple(facts["classes"]), "splits": splits})


def _again(directory: Path) -> str:
    return f"prepare it again: the same command with --to {directory} --overwrite"


def _absent(directory: Path) -> Finding:
    if not directory.is_dir():
        return Finding(
            f"no folder {directory}", "a prepared data set", "prepare one with --to " + str(directory)
        )
    if (directory / PARTS).exists():
        return Finding(
            f"{directory} is half-written: an interrupted preparation, no {FILE_NAME}",
            "a finished preparation",
            "give the same prepare command again: it goes on where it stopped",
        )
    return Finding(
        f"{directory} has no {FILE_NAME}", "a prepared data set", "prepare one with --to " + str(directory)
    )


def describe_file(path: Path, tell: Optional[Tell] = None) -> File:
    """Size and sha256 of a file; ``tell`` is called with the bytes read since its last call."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
            size += len(chunk)
            if tell is not None:
                tell(len(chunk))
    return File(path.name, size, digest.hexdigest())


def describe_record(key: int, record: bytes) -> Record:
    """What a passport keeps of a record.

    Raises:
        ValueError: it is no image record with a single label.
    """
    header, image = unpack(record)
    if isinstance(header.label, tuple):
        raise ValueError(f"record {key} has {len(header.label)} labels, expected one")
    return Record(key, header.label, hashlib.sha256(image).hexdigest())


def verify(
    directory: Path, quick: bool = False, benchmark: Optional[str] = None, tell: Optional[Tell] = None
) -> List[Finding]:
    """Compares a data folder with its passport; an empty list means that it is whole.

    Quick: files, sizes, the count of the index, first and last record. Otherwise the sha256 of every
    file too, which reads all of it; ``tell`` is then called with the bytes read since its last call.
    """
    try:
        passport = read(directory)
    except PassportError as error:
        return [error.finding]
    findings = []
    if benchmark is not None and passport.benchmark != benchmark:
        findings.append(
            Finding(
                f"{directory} is a data set of {passport.benchmark}",
                f"a data set of {benchmark}",
                f"name the folder of {benchmark}'s data set",
            )
        )
    if data_id(passport.benchmark, passport.classes, passport.splits) != passport.id:
        findings.append(
            Finding(
                f"{directory / FILE_NAME} was edited: its id is not that of its content",
                "the passport as it was written",
                _again(directory),
            )
        )
    findings += check_counts(
        passport.name,
        len(passport.classes),
        {name: split.count + split.skipped for name, split in passport.splits.items()},
    )
    for split in passport.splits.values():
        findings += _verify_split(directory, split, quick, tell)
    return findings


def check_counts(name: str, classes: int, images: Dict[str, int]) -> List[Finding]:
    """ImageNet is ImageNet only with all of its classes and images; other names may have any number."""
    if name != "imagenet":
        return []
    remedy = "complete the source, or give the data set another name with --name"
    findings = []
    if classes != IMAGENET_CLASSES:
        findings.append(Finding(f"imagenet with {classes:,} classes", f"{IMAGENET_CLASSES:,}", remedy))
    for split, expected in IMAGENET_COUNTS.items():
        if images.get(split, 0) != expected:
            found = f"imagenet with {images.get(split, 0):,} images in {split}"
            findings.append(Finding(found, f"{expected:,}", remedy))
    return findings


def _verify_split(directory: Path, split: Split, quick: bool, tell: Optional[Tell]) -> List[Finding]:
    findings = []
    for file in (split.records, split.index):
        finding = _verify_file(directory, file, quick, tell)
        if finding is not None:
            findings.append(finding)
    return findings or _verify_records(directory, split)


def _verify_file(directory: Path, file: File, quick: bool, tell: Optional[Tell]) -> Optional[Finding]:
    path = directory / file.name
    try:
        size = path.stat().st_size
        if size != file.bytes:
            return Finding(f"{path} has {size:,} bytes", f"{file.bytes:,} bytes", _again(directory))
        if not quick and describe_file(path, tell).sha256 != file.sha256:
            return Finding(f"{path} has changed: another sha256", f"sha256 {file.sha256}", _again(directory))
    except OSError as error:
        return Finding(f"{path}: {error.strerror}", "a readable file", _again(directory))
    return None


def _verify_records(directory: Path, split: Split) -> List[Finding]:
    path = directory / split.records.name
    try:
        count, first, last, end = inspect(path, directory / split.index.name)
    except (OSError, ValueError) as error:  # RecordIOError is a ValueError
        return [Finding(str(error), "whole records", _again(directory))]
    findings = []
    if count != split.count:
        findings.append(
            Finding(f"{count:,} records in {split.index.name}", f"{split.count:,}", _again(directory))
        )
    for place, record, expected in (("first", first, split.first), ("last", last, split.last)):
        if record != expected:
            found = f"{path}: the {place} record is {record}"
            findings.append(Finding(found, str(expected), _again(directory)))
    if end != split.records.bytes:
        findings.append(
            Finding(
                f"{path}: the last record ends at byte {end:,}", f"{split.records.bytes:,}", _again(directory)
            )
        )
    return findings


def inspect(records: Path, index: Path) -> Tuple[int, Record, Record, int]:
    """Count, first and last record, and the byte at which the last one ends.

    Raises:
        RecordIOError: the index is empty or broken, or does not point at records.
    """
    count = 0
    begin = end = (0, 0)
    for count, end in enumerate(read_index(index), 1):
        if count == 1:
            begin = end
    if count == 0:
        raise RecordIOError(index, 0, "no records")
    with RecordReader(records) as reader:
        first = describe_record(begin[0], reader.read_at(begin[1]))
        last = describe_record(end[0], reader.read_at(end[1]))
        return count, first, last, reader.tell()
