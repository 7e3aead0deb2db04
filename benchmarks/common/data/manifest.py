"""Data set manifest, ``dataset.json``. It is written last: a folder without it is incomplete.

``DataSet`` in benchmarks/common/records.py defines the fields.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from benchmarks.common.data.files import in_one_step
from benchmarks.common.data.problem import Problem
from benchmarks.common.records import DataSet, plain

FILE_NAME = "dataset.json"
PARTS = "parts"  # subfolder for an unfinished preparation
SCHEMA = 1
FIELDS = ("benchmark", "name", "classes", "splits", "facts", "how")
CHUNK = 1 << 20  # read size in bytes

File = Dict[str, Any]
Manifest = Dict[str, Any]
Add = Callable[[int], None]  # called with the number of bytes read since the last call
# A benchmark's content check for a folder whose files have the right size
Check = Callable[[Path, Manifest], Sequence[Problem]]
# The same for files that are not in the manifest: quick, or every byte with a report of the bytes read
CheckUnlisted = Callable[[Path, Manifest, bool, Add], Sequence[Problem]]


def prepare_again(directory: Path) -> str:
    return f"prepare it again with --overwrite ({directory})"


def data_id(manifest: Manifest) -> str:
    """Return an id of the content, independent of path, name and history."""
    facts, splits = manifest["facts"], manifest["splits"]
    hashes = {name: [file["sha256"] for file in split["files"]] for name, split in splits.items()}
    content: Dict[str, Any] = {"benchmark": manifest["benchmark"]}
    if manifest["classes"]:
        content["classes"] = list(manifest["classes"])
    if facts:
        content["facts"] = facts
        content["splits"] = {name: [split["count"], hashes[name]] for name, split in splits.items()}
    else:
        # Data sets without facts keep the format of the first manifests, so that existing ids stay valid.
        content["splits"] = {name: [split["count"], *hashes[name]] for name, split in splits.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(content: Manifest) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write(manifest: Manifest, directory: Path) -> Path:
    """Add schema and id, and write the manifest atomically."""
    fields = {field: manifest[field] for field in FIELDS}
    shared = list(manifest.get("shared_with", ()))
    content = plain(DataSet(schema=SCHEMA, id=data_id(manifest), sha256="", shared_with=shared, **fields))
    content["sha256"] = _checksum(content)
    for partial in directory.glob(f"{FILE_NAME}.*"):  # left by a killed process
        partial.unlink()
    with in_one_step(directory / FILE_NAME, durable=True) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    return directory / FILE_NAME


def read(directory: Path) -> Manifest:
    """Read a data folder's manifest.

    Raises:
        Problem: folder or manifest is missing, incomplete, damaged, or has a different schema.
    """
    return _read(directory)[0]


# Return the manifest's fields, and whether its checksum and id are valid.
def _read(directory: Path) -> Tuple[Manifest, bool]:
    path, again = directory / FILE_NAME, prepare_again(directory)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content.get("schema")
        if schema != SCHEMA:
            raise Problem(f"{path} has schema {schema}", f"schema {SCHEMA}", again)
        is_genuine = content.get("sha256") == _checksum(content)
        manifest = {field: content[field] for field in ("id", *FIELDS)}
        for split in manifest["splits"].values():
            split["count"] = int(split["count"])
            for file in split["files"]:
                _ = file["name"], file["sha256"], int(file["bytes"])
        if "shared_with" in content:
            manifest["shared_with"] = list(content["shared_with"])
        return manifest, is_genuine and data_id(manifest) == manifest["id"]
    except (FileNotFoundError, NotADirectoryError):
        if (directory / PARTS).exists():
            problem = f"{directory} is incomplete: an unfinished preparation, no {FILE_NAME}"
            raise Problem(problem, "a finished preparation", "run the same prepare command again to resume") from None
        problem = f"{directory} has no {FILE_NAME}" if directory.is_dir() else f"no folder {directory}"
        raise Problem(problem, "a prepared data set", f"prepare one in {directory}") from None
    except (OSError, ValueError) as error:
        raise Problem(f"{path}: {error}", "a readable manifest", again) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise Problem(f"{path}: {error!r}", "all fields of a manifest", again) from None


def files_of(manifest: Manifest) -> List[File]:
    by_name = {file["name"]: file for split in manifest["splits"].values() for file in split["files"]}
    return list(by_name.values())


def total_bytes(manifest: Manifest) -> int:
    unlisted = sum(int(split.get("unlisted_bytes", 0)) for split in manifest["splits"].values())
    return unlisted + sum(int(file["bytes"]) for file in files_of(manifest))


def describe_file(path: Path, add: Add = lambda size: None) -> File:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
            size += len(chunk)
            add(len(chunk))
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


def verify(
    directory: Path,
    quick: bool = False,
    benchmark: Optional[str] = None,
    add: Add = lambda size: None,
    check: Check = lambda directory, manifest: (),
) -> List[Problem]:
    """Compare a data folder with its manifest; return an empty list if it is complete.

    ``quick``: only file sizes and ``check``. Otherwise read all files and compare their sha256.
    """
    try:
        manifest, is_genuine = _read(directory)
    except Problem as problem:
        return [problem]
    again = prepare_again(directory)
    problems = []
    if benchmark is not None and benchmark not in (manifest["benchmark"], *manifest.get("shared_with", ())):
        message = f"{directory} is a data set of {manifest['benchmark']}"
        problems.append(Problem(message, f"a data set of {benchmark}", f"name the folder of {benchmark}'s data set"))
    if not is_genuine:
        message = f"{directory / FILE_NAME} was edited: id or checksum does not match the content"
        problems.append(Problem(message, "an unmodified manifest", again))
    differences = (compare(directory / file["name"], file, quick, add) for file in files_of(manifest))
    problems += [Problem(*difference, again) for difference in differences if difference is not None]
    try:
        return problems or list(check(directory, manifest))
    except (KeyError, TypeError) as error:
        return [Problem(f"{directory / FILE_NAME}: {error!r}", "all fields of a manifest", again)]


def compare(path: Path, file: Mapping[str, Any], quick: bool, add: Add) -> Optional[Tuple[str, str]]:
    """Return a file's actual and expected state if size or sha256 differs, else None."""
    try:
        size = path.stat().st_size
        if size != file["bytes"]:
            return f"{path} has {size:,} bytes", f"{file['bytes']:,} bytes"
        if not quick and describe_file(path, add)["sha256"] != file["sha256"]:
            return f"{path} has changed: different sha256", f"sha256 {file['sha256']}"
    except OSError as error:
        return f"{path}: {error.strerror}", "a readable file"
    return None
