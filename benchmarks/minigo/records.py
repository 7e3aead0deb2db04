"""Files of games: one per self-play worker and generation, appended game by game with checksums.

A record is its length and CRC-32 (two little-endian uint32), and a body: number, plies, outcome, margin, flags;
moves (int16) and values (float16) by ply; number of visited moves by ply (uint16), then the visited moves and their
visits (both uint16). A killed worker may leave an incomplete record at the end, which is truncated.
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
    offset = HEAD.size

    def take(kind: str, count: int) -> Array:
        nonlocal offset
        array = np.frombuffer(body, kind, count, offset)
        offset += array.nbytes
        return array

    moves, values, counts = take("<i2", plies), take("<f2", plies), take("<u2", plies)
    searched = int(counts.sum())
    visited, times = take("<u2", searched), take("<u2", searched)
    visits = np.zeros((plies, board_size**2 + 1), np.uint16)
    visits[np.repeat(np.arange(plies), counts), visited] = times
    ends = (outcome, margin, bool(flags & RESIGNED), bool(flags & MAY_RESIGN))
    return Game(number, moves, visits, values.astype(np.float32), *ends)


PLAYED_AGAIN = "remove {}, and start the run again: its games are played again"
NOT_PLAYED_AGAIN = "copy {} back from where it is whole, or begin a new run: the run has continued from its games"


# Bodies of the complete records, and their total length in bytes
def _bodies(path: Path, hint: str = PLAYED_AGAIN) -> Tuple[List[bytes], int]:
    data = path.read_bytes()
    bodies, offset = [], 0
    while offset + PREFIX.size <= len(data):
        length, checksum = PREFIX.unpack_from(data, offset)
        body = data[offset + PREFIX.size : offset + PREFIX.size + length]
        if len(body) < length:
            break
        if zlib.crc32(body) != checksum or length < HEAD.size:
            raise Problem(
                f"{path}: the record at byte {offset} differs from its checksum",
                "unmodified records of self-play",
                hint.format(path.name),
            )
        bodies.append(body)
        offset += PREFIX.size + length
    return bodies, offset


class GameFile:
    """A worker's games in a generation, for appending, with the numbers of existing games."""

    def __init__(self, path: Path) -> None:
        """Open the file, and truncate an incomplete record left by a killed worker."""
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
    """Return a generation's games in ascending order of numbers.

    Raises:
        Problem: a record is damaged, with ``hint``, or a game is duplicated.
    """
    paths = sorted(folder.glob("*.games"))
    games = [decode(body, board_size) for path in paths for body in _bodies(path, hint)[0]]
    games.sort(key=lambda game: game.number)
    twice = [number for number, count in Counter(game.number for game in games).items() if count > 1]
    if twice:
        raise Problem(f"{folder}: game {twice[0]} occurs twice", "each game once", f"remove {folder}")
    return games


# -- one game per generation with the final position, which `encore report` draws ----------------

# In the experiment folder: one line per game; a resumed run may repeat generations
SHOWN = "shown_games.jsonl"


def show(output: Path, generation: int, game: Game, config: Any) -> None:
    """Append a game of ``generation``, from 1: moves as row * size + column from the top left, and the final stones.

    Stones are 0 empty, 1 black and 2 white, in the order of points; outcome and margin are for black.
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
