"""Games in the Smart Game Format (SGF 4), read into moves that the rules allow."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.text_files import read_bytes
from benchmarks.minigo.engine import BLACK, WHITE, IllegalMove, Position, Rules
from benchmarks.minigo.engine.position import SIZES

Node = Dict[str, List[str]]
_TOKEN = re.compile(
    r"[\s\0]*(?:(?P<mark>[();])|(?P<name>[A-Za-z]+)\s*(?=\[)|\[(?P<value>(?:\\.|[^\]\\])*)\])", re.DOTALL
)
_REST = re.compile(r"[\0 \t\r\n]*\Z")  # End of the file
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
HINT = "leave the file out, or export the game again from the program that wrote it"


@dataclass(frozen=True)
class Record:
    """A game's main line in an SGF file."""

    rules: Rules
    black: Tuple[int, ...]  # Stones placed before the first move, AB
    white: Tuple[int, ...]
    to_play: int
    moves: Tuple[int, ...]
    winner: int  # 1 black, 2 white, 0 draw or unknown
    margin: Optional[float]  # Lead of black in points according to RE; None without a count
    result: str  # RE as it is in the file

    def position(self) -> Position:
        return Position(self.rules, self.black, self.white, self.to_play)


def read(path: Path, features: str = "agz", superko: bool = True) -> Record:
    """Return the game in a file; ``superko=False`` also accepts games from servers with only the simple ko rule.

    Raises:
        Problem: the file cannot be read, or is not an SGF file of Go with board size 5, 9, 13 or 19.
        IllegalMove: a move is illegal, with its number.
    """
    try:
        text = read_bytes(path).decode("utf-8", "replace")
    except OSError as error:
        raise Problem(f"{path}: {error.strerror or error}", "a game in SGF", "give another file") from error
    return parse(text, str(path), features, superko)


def parse(text: str, name: str = "SGF", features: str = "agz", superko: bool = True) -> Record:
    """Return the game in a text; ``name`` is used in errors."""
    nodes = _main_line(text, name)
    if not nodes:
        raise Problem(f"{name}: no node", "a game in SGF, such as (;SZ[9];B[ee])", HINT)
    root = nodes[0]
    rules = replace(_rules(root, name, features), superko=superko)
    black, white = (_points(root.get(key, []), rules.size, name) for key in ("AB", "AW"))
    moves, to_play = _moves(nodes, rules.size, name)
    if not moves:
        to_play = {"W": WHITE, "B": BLACK}.get(root.get("PL", [""])[0][:1], WHITE if black else BLACK)
    result = root.get("RE", [""])[0]
    record = Record(rules, black, white, to_play, moves, *_result(result), result)
    replay(record, name)
    return record


def replay(record: Record, name: str = "SGF") -> Position:
    """Return the position at the end; IllegalMove names the file and the first move that the rules do not allow."""
    position = record.position()
    for move in record.moves:
        try:
            position.play(move)
        except IllegalMove as error:
            raise IllegalMove(f"{name}: {error.found}", "a game without illegal moves", HINT) from None
    return position


# The nodes of the first variation everywhere.
def _main_line(text: str, name: str) -> List[Node]:
    nodes: List[Node] = []
    start = text.find("(")
    offset, depth, key, has_ended = max(start, 0), 0, "", False
    while not _REST.match(text, offset):
        token = _TOKEN.match(text, offset)
        if token is None:
            raise _damaged(name, text, offset)
        offset = token.end()
        mark, word, value = token.group("mark", "name", "value")
        if mark == "(":
            depth += 1
        elif mark == ")":
            # Later text belongs to other variations and games.
            depth, has_ended = depth - 1, True
            if depth == 0:
                return nodes
        elif depth == 0:
            raise _damaged(name, text, offset)
        elif not has_ended and mark == ";":
            nodes.append({})
        elif not has_ended and word is not None:
            key = "".join(letter for letter in word if letter.isupper())
        elif not has_ended and value is not None and nodes and key:
            nodes[-1].setdefault(key, []).append(re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL))
    raise Problem(f"{name}: the file ends within a game", "balanced brackets", HINT)


def _damaged(name: str, text: str, offset: int) -> Problem:
    line = text.count("\n", 0, offset) + 1
    return Problem(
        f"{name}, line {line}: {text[offset : offset + 20]!r} is not SGF",
        "properties with values in brackets, such as ;B[ee]",
        HINT,
    )


def _rules(root: Node, name: str, features: str) -> Rules:
    def number(key: str, default: str) -> float:
        text = (root.get(key) or [default])[0].strip() or default
        try:
            return float(text)
        except ValueError:
            raise Problem(f"{name}: {key}[{text}]", "a number", HINT) from None

    if (root.get("GM") or ["1"])[0].strip() != "1":
        raise Problem(f"{name}: GM[{root['GM'][0]}], another game", "Go, GM[1]", HINT)
    size, komi = number("SZ", "19"), number("KM", "0")
    if size not in SIZES:
        raise Problem(f"{name}: a board of {size:g}", "5, 9, 13 or 19", "leave the file out")
    return Rules(size=int(size), komi=komi, features=features)


def _moves(nodes: List[Node], size: int, name: str) -> Tuple[Tuple[int, ...], int]:
    moves: List[int] = []
    first = 0
    for node in nodes:
        for key, color in (("B", BLACK), ("W", WHITE)):
            for value in node.get(key, []):
                first = first or color
                if (len(moves) % 2 == 0) != (color == first):
                    moves.append(size**2)
                moves.append(_point(value, size, name))
        if node is not nodes[0] and ("AB" in node or "AW" in node):
            raise Problem(f"{name}: stones are placed after the first node", "moves alone", "leave the file out")
    return tuple(moves), first or BLACK


def _point(value: str, size: int, name: str) -> int:
    value = value.strip()
    if value == "" or (value == "tt" and size <= 19):
        return size**2
    if len(value) != 2 or any(letter not in _LETTERS[:size] for letter in value):
        raise Problem(f"{name}: [{value}] is not a point on {size} x {size}", f"aa to {_LETTERS[size - 1] * 2}", HINT)
    return _LETTERS.index(value[1]) * size + _LETTERS.index(value[0])


# Points; ``aa:cc`` is a rectangle.
def _points(values: List[str], size: int, name: str) -> Tuple[int, ...]:
    points: List[int] = []
    for value in values:
        first, _, last = value.partition(":")
        corner = _point(first, size, name)
        opposite = _point(last or first, size, name)
        rows, columns = range(corner // size, opposite // size + 1), range(corner % size, opposite % size + 1)
        points += [row * size + column for row in rows for column in columns]
    return tuple(points)


# Who won, and black's lead where it was counted.
def _result(text: str) -> Tuple[int, Optional[float]]:
    match = re.fullmatch(r"\s*([BW])\+(.*)", text, re.DOTALL)
    if match is None:
        return 0, 0.0 if text.strip().lower() in ("0", "draw", "jigo") else None
    winner = BLACK if match.group(1) == "B" else WHITE
    try:
        points = float(match.group(2))
    except ValueError:
        return winner, None
    return winner, points if winner == BLACK else -points
