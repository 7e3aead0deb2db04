"""Games in files: one for each self-play worker and generation, appended in whole games, each with a checksum.

A record is its length and CRC-32 (two little-endian uint32), and a body: number, plies, outcome, margin, flags; moves
(int16) and values (float16) of the plies; for each ply how many moves were visited (uint16), then those moves and
their visits (uint16 each). A worker that was killed leaves at most one part of a record, at the end: it is cut off.
"""

import json
import os
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterable, List, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine import Game, Position
from benchmarks.minigo.schedule import rules_of

PREFIX = struct.Struct("<II")
HEAD = struct.Struct("<qiffi")
RESIGNED, MAY_RESIGN = 1, 2
Array = Any


def encode(game: Game) -> bytes:
    plies = len(game.moves)
    flags = RESIGNED * bool(game.resigned) + MAY_RESIGN * bool(game.resignation_allowed)
    rows, moves = np.nonzero(game.visits)
    parts = (
        np.asarray(game.moves, "<i2"),
        np.asarray(game.values, "<f2"),
        np.bincount(rows, minlength=plies).astype("<u2"),
        moves.astype("<u2"),
        np.asarray(game.visits)[rows, moves].astype("<u2"),
    )
    body = HEAD.pack(game.number, plies, game.outcome, game.margin, flags) + b"".join(part.tobytes() for part in parts)
    return PREFIX.pack(len(body), zlib.crc32(body)) + body


def decode(body: bytes, board_size: int) -> Game:
    number, plies, outcome, margin, flags = HEAD.unpack_from(body)
    at = HEAD.size

    def take(kind: str, count: int) -> Array:
        nonlocal at
        found = np.frombuffer(body, kind, count, at)
        at += found.nbytes
        return found

    moves, values, counts = take("<i2", plies), take("<f2", plies), take("<u2", plies)
    searched = int(counts.sum())
    visited, times = take("<u2", searched), take("<u2", searched)
    visits = np.zeros((plies, board_size**2 + 1), np.uint16)
    visits[np.repeat(np.arange(plies), counts), visited] = times
    ends = (outcome, margin, bool(flags & RESIGNED), bool(flags & MAY_RESIGN))
    return Game(number, moves, visits, values.astype(np.float32), *ends)


PLAYED_AGAIN = "remove {}, and start the run again: its games are played again"
NOT_PLAYED_AGAIN = "copy {} back from where it is whole, or begin a new run: the run has continued from its games"


# The bodies of the whole records, and the length in bytes of all of them.
def _bodies(path: Path, hint: str = PLAYED_AGAIN) -> Tuple[List[bytes], int]:
    data = path.read_bytes()
    bodies, at = [], 0
    while at + PREFIX.size <= len(data):
        length, checksum = PREFIX.unpack_from(data, at)
        body = data[at + PREFIX.size : at + PREFIX.size + length]
        if len(body) < length:
            break
        if zlib.crc32(body) != checksum or length < HEAD.size:
            found = f"{path}: the record at byte {at} differs from its checksum"
            raise Problem(found, "records as self-play wrote them", hint.format(path.name))
        bodies.append(body)
        at += PREFIX.size + length
    return bodies, at


class GameFile:
    """The games of one worker in one generation, for appending; knows which ones it has."""

    def __init__(self, path: Path) -> None:
        """Open the file; what a killed worker left of an unfinished record is cut off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115
        bodies, length = _bodies(path)
        self._file.truncate(length)
        self.numbers = {HEAD.unpack_from(body)[0] for body in bodies}

    def add(self, games: Iterable[Any]) -> None:
        new: Dict[int, Any] = {game.number: game for game in games if game.number not in self.numbers}
        self._file.write(b"".join(map(encode, new.values())))
        self._file.flush()
        self.numbers |= set(new)

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def generation_folder(output: Path, generation: int) -> Path:
    return output / "games" / f"{generation:06d}"


def read_generation(folder: Path, board_size: int, hint: str = PLAYED_AGAIN) -> List[Game]:
    """Return the games of a generation in the order of their numbers.

    Raises:
        Problem: a record is damaged, for which ``hint`` says what to do, or a game is there twice.
    """
    paths = sorted(folder.glob("*.games"))
    games = [decode(body, board_size) for path in paths for body in _bodies(path, hint)[0]]
    games.sort(key=lambda game: game.number)
    twice = [number for number, count in Counter(game.number for game in games).items() if count > 1]
    if twice:
        raise Problem(f"{folder}: game {twice[0]} is there twice", "each game once", f"remove {folder}")
    return games


# -- one game of each generation with the position at its end, which `encore report` draws ----------------

# In the folder of an experiment: one line a game; a resumed run may write that of a generation again
SHOWN = "shown_games.jsonl"


def show(output: Path, generation: int, game: Game, config: Any) -> None:
    """Append a game of ``generation``, from 1: its moves, row * size + column from the top left, and the last stones.

    Stones are 0 empty, 1 black and 2 white, in the order of the points; outcome and margin are black's.
    """
    position = Position(rules_of(config))
    for move in game.moves.tolist():
        position.play(move)
    line = {
        "generation": generation,
        "game": game.number,
        "size": config.board_size,
        "moves": game.moves.tolist(),
        "stones": position.stones().ravel().tolist(),
        "outcome": game.outcome,
        "margin": game.margin,
        "resigned": game.resigned,
    }
    with (output / SHOWN).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
