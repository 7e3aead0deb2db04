"""Target models that MLPerf gave out: frozen graphs of TensorFlow 1, and how a data set keeps one.

A graph comes as ``target.pb`` (v0.6, the graph alone) or as ``target.minigo.tf`` (v0.7, minigo_model.py: a header, a
line of JSON and the graph). A data set keeps it as ``target.npz``, an archive with the bytes of the graph and what
they describe. Nothing here needs TensorFlow; ``read`` asks an implementation that has it.
"""

from __future__ import annotations

import importlib
import json
import struct
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem

MAGIC = b"<minigo>"
HEADER = struct.Struct("<QQQ")
"""Version, size of the file, size of the JSON; after MAGIC."""
GRAPH, ABOUT = "graph", "about"
READER = "benchmarks.minigo.tensorflow.frozen"
REMEDY = "name a model of a run (models/*.npz in its folder) or MLPerf's frozen graph (target.pb, target.minigo.tf)"


@dataclass(frozen=True)
class About:
    """What a graph takes."""

    board_size: int
    features: str
    layout: str
    """``nhwc`` or ``nchw``: where the planes are in its input."""


def is_archive(path: Path) -> bool:
    """Return whether a file is a NumPy archive, as models of runs are; Problem if it cannot be read."""
    try:
        return zipfile.is_zipfile(str(path)) or path.read_bytes()[:2] == b"PK"
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None


def unreadable(path: Path, reason: str) -> Problem:
    """Return the error of a file that is no model."""
    return Problem(f"{path} cannot be read as a model: {reason}", "a network's weights, or a frozen graph", REMEDY)


def unpacked(path: Path) -> Tuple[Dict[str, Any], bytes]:
    """Return what the header of a file says, which may be nothing, and the graph's bytes; Problem if it is cut off."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    if not data.startswith(MAGIC):
        return {}, data
    begin = len(MAGIC) + HEADER.size
    if len(data) < begin:
        raise unreadable(path, "the file ends in its header")
    version, size, length = HEADER.unpack_from(data, len(MAGIC))
    if version != 1 or size != len(data):
        raise unreadable(path, f"version {version} with {len(data):,} of {size:,} bytes; version 1 is known")
    try:
        return json.loads(data[begin : begin + length].decode()), data[begin + length :]
    except ValueError as error:
        raise unreadable(path, str(error)) from None


def read(path: Path, board_size: int) -> Tuple[About, bytes]:
    """Return what a frozen graph takes, and its bytes.

    Raises:
        Problem: it is none, lacks an input or output of the reference's, or is for another board.
    """
    found: Tuple[About, bytes] = importlib.import_module(READER).read(path, board_size)
    return found


def save(path: Path, about: About, graph: bytes) -> None:
    """Write a graph as a data set keeps it."""
    text = np.frombuffer(json.dumps(asdict(about)).encode(), np.uint8)
    arrays: Dict[str, Any] = {ABOUT: text, GRAPH: np.frombuffer(graph, np.uint8)}
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def holds_graph(path: Path) -> bool:
    """Return whether a data set's target is a frozen graph; a file that cannot be read is none."""
    try:
        with zipfile.ZipFile(str(path)) as archive:
            return f"{GRAPH}.npy" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def load(path: Path, board_size: int) -> Tuple[About, bytes]:
    """Read what ``save`` wrote; Problem if it is damaged or for another board."""
    try:
        with np.load(str(path)) as archive:
            about = About(**json.loads(archive[ABOUT].tobytes().decode()))
            graph = archive[GRAPH].tobytes()
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise unreadable(path, str(error)) from None
    check_board(path, about.board_size, board_size)
    return about, graph


def check_board(path: Path, found: int, wanted: int) -> None:
    """Raise Problem if a model is for another board than the one played on."""
    if found != wanted:
        text = f"{path} is a model for {found} x {found}"
        raise Problem(text, f"one for {wanted} x {wanted}", "name another model, or set board_size")
