"""One preparation of NCF's data set: read the source, split, write the arrays, and last the passport."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Dict, Optional

import numpy as np

from benchmarks.common import file_passport
from benchmarks.common.file_passport import Split
from benchmarks.common.passport import FILE_NAME, Finding
from benchmarks.common.preparing import Problem, Progress, check_room
from benchmarks.ncf.sources import read_source
from benchmarks.ncf.sources.interactions import Interactions

BENCHMARK = "ncf"
VERSION = "1"
"""Raise it when the same source and options give other bytes."""
FILES = {
    "train": ("train_users.npy", "train_items.npy"),
    "test": ("test_items.npy", "test_negatives.npy"),
}
ROOM_FACTOR = 8
"""Bytes written per byte of a text source, at most: 999 negatives for each user."""


def prepare(args: argparse.Namespace, progress: Progress) -> int:
    """Makes the data set that the command line asks for."""
    _check_places(args.to, args.origin)
    fingerprint = _fingerprint(args.origin, args.name, args.seed)
    if _is_complete(args.to, fingerprint, args.overwrite):
        path = args.to / FILE_NAME
        progress.note("nothing to do: {} was made from the same source with the same options".format(args.to))
        progress.end(path, str(path))
        return 0
    if args.origin is not None and args.origin.is_file():
        check_room(args.to, ROOM_FACTOR * args.origin.stat().st_size)
    progress.update("index", 0, None)
    data = read_source(args.origin, args.name, args.seed)
    for note in data.notes:
        progress.note(note)
    (args.to / FILE_NAME).unlink(missing_ok=True)
    path = write(data, args.to, {"fingerprint": fingerprint, "seed": args.seed}, progress)
    progress.end(path, "{}: {}, {:,} + {:,}".format(path, data.name, len(data.train_users), data.users))
    return 0


def write(data: Interactions, folder: Path, how: Dict[str, object], progress: Progress) -> Path:
    """Writes the arrays, each under another name first, and the passport."""
    # The smallest type that holds every item id: 999 negatives a user are most of the bytes.
    item_type = np.uint16 if data.items <= 1 << 16 else np.int32
    arrays = {
        "train_users.npy": data.train_users.astype(np.int32),
        "train_items.npy": data.train_items.astype(item_type),
        "test_items.npy": data.test_items.astype(item_type),
        "test_negatives.npy": data.negatives.astype(item_type),
    }
    for name, array in arrays.items():
        temporary = folder / (name + ".partial")
        with temporary.open("wb") as file:
            np.save(file, array)
        temporary.replace(folder / name)
    splits = {
        "train": Split(len(data.train_users), FILES["train"]),
        "test": Split(data.users, FILES["test"]),
    }
    facts = {"users": data.users, "items": data.items, "negatives": int(data.negatives.shape[1])}
    how = {"source": data.made, "notes": list(data.notes), "numpy": np.__version__, **how}
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        done += size
        progress.update("join", done, None, done)

    return file_passport.write(folder, BENCHMARK, data.name, splits, facts, how, tell)


def _check_places(to: Path, origin: Optional[Path]) -> None:
    if origin is not None and not origin.exists():
        raise Problem(
            "{} does not exist".format(origin), "a file or a folder of raw data", "name it with --from"
        )
    if origin is not None and origin.is_dir() and origin.resolve() in (to.resolve(), *to.resolve().parents):
        raise Problem(
            "{} lies within the source {}".format(to, origin), "a folder outside it", "choose another --to"
        )
    if to.exists() and not to.is_dir():
        raise Problem("{} is no folder".format(to), "a folder", "choose another --to")
    to.mkdir(parents=True, exist_ok=True)


def _fingerprint(origin: Optional[Path], name: Optional[str], seed: int) -> str:
    """Hash of the source's files (names, sizes, times of change) and of the options."""
    listed = []
    if origin is not None:
        paths = sorted(path for path in origin.iterdir() if path.is_file()) if origin.is_dir() else [origin]
        listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    facts = json.dumps([VERSION, listed, name, seed])
    return hashlib.sha256(facts.encode()).hexdigest()


def _is_complete(to: Path, fingerprint: str, overwrite: bool) -> bool:
    """Whether the folder has this data set already; Problem if it has another one."""
    if not (to / FILE_NAME).exists():
        return False
    try:
        same = file_passport.read(to)["how"].get("fingerprint") == fingerprint
    except ValueError:
        same = False
    if same and not overwrite and not file_passport.verify(to, quick=True, benchmark=BENCHMARK):
        return True
    if not overwrite:
        raise Problem(
            "{} holds another data set".format(to),
            "an empty folder, or one with the same data set",
            "choose another --to, or replace it with --overwrite",
        )
    return False


def verify(directory: Path, quick: bool, progress: Progress) -> int:
    """Checks a data folder against its passport and tells every difference."""
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        done += size
        progress.update("verify", done, None, done)

    findings = file_passport.verify(directory, quick, BENCHMARK, tell) or _check_arrays(directory)
    if findings:
        return progress.fail(*(Problem(*finding) for finding in findings))
    how = "sizes" if quick else "every byte"
    progress.end(directory / FILE_NAME, "{} is whole ({})".format(directory, how))
    return 0


def _check_arrays(directory: Path) -> list:
    """Shapes that do not fit the passport."""
    facts = file_passport.read(directory)["facts"]
    shape = np.load(str(directory / "test_negatives.npy"), mmap_mode="r").shape
    if shape == (facts["users"], facts["negatives"]):
        return []
    return [
        Finding("test_negatives.npy has shape {}".format(shape), str(facts), "prepare the data set again")
    ]
