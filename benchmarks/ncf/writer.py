"""Writes interactions as arrays, in one process (some minutes for ml-20m), without resume."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Optional

import numpy as np

from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.progress import Progress
from benchmarks.ncf import interactions, paper, ratings
from benchmarks.ncf.interactions import Interactions

VERSION = "1"  # increase it if the output changes for the same source and options
ROOM_FACTOR = 8  # maximum ratio of output to source bytes, because of 999 negatives per user


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """Hash the source's files (names, sizes, times of change) and the options."""
    origin = args.origin
    listed = []
    if origin is not None:
        paths = sorted(path for path in origin.iterdir() if path.is_file()) if origin.is_dir() else [origin]
        listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = json.dumps([VERSION, listed, args.name, args.seed])
    return Listing(origin, hashlib.sha256(key.encode()).hexdigest())


def read(origin: Optional[Path], name: Optional[str], seed: int) -> Interactions:
    """Return the interactions of the source at ``origin``, or the toy data set; Problem if it is unusable."""
    if origin is None:
        return interactions.generate()
    negatives = sorted(origin.glob(f"*{paper.NEGATIVES}"))
    if negatives:
        return paper.read(negatives[0], name)
    # All ratings count as interactions, for any number of stars (implicit feedback; He et al. 2017, section 4.1).
    name, data, source = ratings.read(origin, name)
    description = f"{source}: the last rating of each user held out, {interactions.MLPERF_NEGATIVES} negatives drawn"
    return interactions.leave_one_out(name, data, source, description, seed)


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    """Read the interactions and write the arrays."""
    if args.origin is not None and args.origin.is_file():
        check_room(scratch, ROOM_FACTOR * args.origin.stat().st_size)
    progress.note(f"reading {args.origin}" if args.origin else "generating the toy data set")
    data = read(args.origin, args.name, args.seed)
    users, notes = len(data.test_items), data.notes()
    for note in notes:
        progress.note(note)
    # Use the smallest type for item ids: 999 negatives per user are most of the bytes.
    item_type = np.uint16 if data.items <= 1 << 16 else np.int32
    arrays = {
        "train_users.npy": data.train_users.astype(np.int32),
        "train_items.npy": data.train_items.astype(item_type),
        "test_items.npy": data.test_items.astype(item_type),
        "test_negatives.npy": data.negatives.astype(item_type),
    }
    for name, array in arrays.items():
        write_array(scratch / name, array)
    return Content(
        name=data.name,
        splits={
            "train": Split(len(data.train_users), ("train_users.npy", "train_items.npy")),
            "test": Split(users, ("test_items.npy", "test_negatives.npy")),
        },
        summary=f"{len(data.train_users):,} + {users:,}",
        facts={"users": users, "items": data.items, "negatives": int(data.negatives.shape[1])},
        how={"made": data.description, "notes": list(notes), "seed": args.seed},
        tool={"version": VERSION, "numpy": np.__version__},
    )
