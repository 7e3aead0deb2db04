"""The passport of a data set that is plain files: written last, so that a folder without it is half-written.

``dataset.json`` has the fields that the host side reads from every passport; a split lists its ``files``. The
``id`` depends on the content alone. Image sets in RecordIO have a passport of their own, passport.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from benchmarks.common.passport import (
    FILE_NAME,
    SCHEMA,
    File,
    Finding,
    Tell,
    describe_file,
)


class Split(NamedTuple):
    """Samples of a split, and the names of its files in the data folder."""

    count: int
    files: Sequence[str]


def write(
    directory: Path,
    benchmark: str,
    name: str,
    splits: Mapping[str, Split],
    facts: Mapping[str, Any],
    how: Mapping[str, Any],
    tell: Optional[Tell] = None,
) -> Path:
    """Describe the files of ``splits`` and write the passport, whole or not at all.

    ``facts`` are sizes that the training needs (users, items, rows of a table) and belong to the ``id``;
    ``how`` tells how the set was made (source, options, versions) and does not. ``tell`` is called with the
    bytes read since its last call.
    """
    described = {}
    for key, split in splits.items():
        files = [asdict(describe_file(directory / file, tell)) for file in split.files]
        described[key] = {"count": split.count, "files": files}
    passport = {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "name": name,
        "id": data_id(benchmark, described, facts),
        "classes": [],
        "splits": described,
        "facts": dict(facts),
        "how": dict(how),
    }
    path = directory / FILE_NAME
    temporary = directory / (FILE_NAME + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(passport, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def data_id(benchmark: str, splits: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Identifies a data set by its content, not by its place, name or history."""
    content = {
        key: [split["count"], [file["sha256"] for file in split["files"]]] for key, split in splits.items()
    }
    text = json.dumps({"benchmark": benchmark, "facts": dict(facts), "splits": content}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read(directory: Path) -> Dict[str, Any]:
    """The passport's fields; ValueError says in words what is wrong with it."""
    path = directory / FILE_NAME
    try:
        passport: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if passport["schema"] != SCHEMA or not isinstance(passport["facts"], dict):
            raise KeyError("schema")
        for split in passport["splits"].values():
            for file in split["files"]:
                File(**file)
    except FileNotFoundError:
        raise ValueError(f"{directory} has no {FILE_NAME}: it is no prepared data set") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    return passport


def verify(
    directory: Path, quick: bool = False, benchmark: Optional[str] = None, tell: Optional[Tell] = None
) -> List[Finding]:
    """Compares a data folder with its passport; an empty list means that it is whole. Quick reads no file."""
    again = f"prepare it again: the same command with --to {directory} --overwrite"
    try:
        passport = read(directory)
    except ValueError as error:
        return [Finding(str(error), "a prepared data set", again)]
    findings = []
    if benchmark is not None and passport["benchmark"] != benchmark:
        found = f"{directory} is a data set of {passport['benchmark']}"
        findings.append(
            Finding(found, f"a data set of {benchmark}", f"name the folder of {benchmark}'s data set")
        )
    if data_id(passport["benchmark"], passport["splits"], passport["facts"]) != passport["id"]:
        found = f"{directory / FILE_NAME} was edited: its id is not that of its content"
        findings.append(Finding(found, "the passport as it was written", again))
    for split in passport["splits"].values():
        for file in split["files"]:
            finding = _verify_file(directory, File(**file), quick, again, tell)
            if finding is not None:
                findings.append(finding)
    return findings


def _verify_file(
    directory: Path, file: File, quick: bool, again: str, tell: Optional[Tell]
) -> Optional[Finding]:
    path = directory / file.name
    try:
        size = path.stat().st_size
        if size != file.bytes:
            return Finding(f"{path} has {size:,} bytes", f"{file.bytes:,} bytes", again)
        if not quick and describe_file(path, tell).sha256 != file.sha256:
            return Finding(f"{path} has changed: another sha256", f"sha256 {file.sha256}", again)
    except OSError as error:
        return Finding(f"{path}: {error.strerror}", "a readable file", again)
    return None
