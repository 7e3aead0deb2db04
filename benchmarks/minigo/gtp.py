"""The Go Text Protocol, version 2, over any evaluator: ``python -m benchmarks.minigo.gtp --model FILE``."""

import argparse
import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, TextIO

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import models, sgf
from benchmarks.minigo.engine import BLACK, WHITE, Evaluate, IllegalMove, Position, Rules, Search, Study, name_of
from benchmarks.minigo.engine.position import COLUMNS, fixed_handicap

UNIFORM = "uniform"  # Model with a uniform policy and value 0
COLORS = {"b": BLACK, "black": BLACK, "w": WHITE, "white": WHITE}


class Refused(Exception):
    """A command that fails, with the message of the protocol."""


class Server:
    """A player that answers the commands of the protocol."""

    def __init__(self, evaluate: Evaluate, rules: Rules, search: Search, seed: int = 0, name: str = "Encore") -> None:
        """Prepare a player; the network ``evaluate`` supports only the board size of ``rules``."""
        self._evaluate, self._rules, self._search, self._seed, self._name = evaluate, rules, search, seed, name
        self._commands: Dict[str, Callable[[List[str]], str]] = {
            "protocol_version": lambda _: "2",
            "name": lambda _: self._name,
            "version": lambda _: "",
            "known_command": lambda args: str(args[0] in self._commands).lower(),
            "list_commands": lambda _: "\n".join(self._commands),
            "quit": lambda _: "",
            "boardsize": self._boardsize,
            "clear_board": lambda _: self._start(Position(self._rules)),
            "komi": self._komi,
            "play": self._play,
            "genmove": self._genmove,
            "undo": self._undo,
            "fixed_handicap": lambda args: self._place_stones(fixed_handicap(self._rules.size, int(args[0]))),
            "place_free_handicap": lambda args: self._place_stones(fixed_handicap(self._rules.size, int(args[0]))),
            "set_free_handicap": lambda args: self._place_stones([_move(word, self._rules.size) for word in args]),
            "time_settings": lambda _: "",
            "time_left": lambda _: "",
            "final_score": self._final_score,
            "showboard": self._showboard,
            "loadsgf": self._loadsgf,
        }
        self._start(Position(self._rules))

    def serve(self, commands: Iterable[str], answers: TextIO) -> None:
        for line in commands:
            args = line.partition("#")[0].split()
            if not args:
                continue
            number = args.pop(0) if args[0].isdigit() else ""
            success, text = self.answer(args)
            answers.write(f"{'=' if success else '?'}{number} {text}\n\n")
            answers.flush()
            if args[:1] == ["quit"]:
                return

    def answer(self, args: List[str]) -> "tuple[bool, str]":
        command = self._commands.get(args[0]) if args else None
        if command is None:
            return False, "unknown command"
        try:
            return True, command(args[1:])
        except Refused as refused:
            return False, str(refused)
        except IllegalMove as error:
            return False, f"illegal move: {error.found}"
        except Problem as problem:
            return False, str(problem).replace("\n", ";")
        except (ValueError, IndexError):
            return False, "syntax error"

    @property
    def _position(self) -> Position:
        return self._study.position

    def _start(self, position: Position) -> str:
        self._study = Study(position, self._search, self._seed)
        return ""

    def _boardsize(self, args: List[str]) -> str:
        if int(args[0]) != self._rules.size:
            # The message of the protocol, followed by a hint.
            size = self._rules.size
            raise Refused(f"unacceptable size: the model plays on {size} x {size}; use a model of {args[0]}")
        return self._start(Position(self._rules))

    def _komi(self, args: List[str]) -> str:
        self._rules = replace(self._rules, komi=float(args[0]))
        return self._replay(self._position, self._position.moves)

    def _replay(self, start: Position, moves: Iterable[int]) -> str:
        position = start.initial(self._rules)
        for move in moves:
            position.play(move)
        return self._start(position)

    # Pass for the opponent if it is not the turn of this colour: the protocol allows consecutive moves by a player.
    def _turn(self, word: str) -> None:
        color = COLORS.get(word.lower())
        if color is None:
            raise Refused("syntax error: the colour is b or w")
        if color == self._position.to_play:
            return
        if self._position.moves:
            self._study.play(self._rules.size**2)
        else:
            self._start(self._position.initial(first=color))

    def _play(self, args: List[str]) -> str:
        move = _move(args[1], self._rules.size)
        previous = self._position.copy()
        self._turn(args[0])
        try:
            self._study.play(move)
        except IllegalMove:
            self._start(previous)
            raise
        return ""

    def _genmove(self, args: List[str]) -> str:
        self._turn(args[0])
        self._study.search_with(self._evaluate)
        value = self._study.value if self._position.to_play == BLACK else -self._study.value
        if self._search.disable_resign_pct < 1 and value < self._search.max_resign_threshold:
            return "resign"
        # After an opponent pass, no stone is played into unconditional life or dead areas.
        passed = self._position.moves[-1:] == (self._rules.size**2,)
        move = self._study.choose(restrict_pass_alive=passed)
        self._study.play(move)
        return name_of(move, self._rules.size)

    def _undo(self, _: List[str]) -> str:
        if not self._position.moves:
            raise Refused("cannot undo")
        return self._replay(self._position, self._position.moves[:-1])

    def _place_stones(self, points: List[int]) -> str:
        if self._position.moves or self._position.stones().any():
            raise Refused("board not empty")
        if len(set(points)) < len(points) or self._rules.size**2 in points:
            raise Refused("bad vertex list")
        self._start(Position(self._rules, points, to_play=WHITE))
        return " ".join(name_of(point, self._rules.size) for point in points)

    def _final_score(self, _: List[str]) -> str:
        score = self._position.score()
        return "0" if score == 0 else f"{'B' if score > 0 else 'W'}+{abs(score):g}"

    def _showboard(self, _: List[str]) -> str:
        columns = "   " + " ".join(COLUMNS[: self._rules.size])
        rows = [
            f"{self._rules.size - row:2} " + " ".join(".XO"[stone] for stone in stones)
            for row, stones in enumerate(self._position.stones())
        ]
        return "\n".join(["", columns, *rows, columns])

    def _loadsgf(self, args: List[str]) -> str:
        record = sgf.read(Path(args[0]), self._rules.features)
        if record.rules.size != self._rules.size:
            raise Refused(f"cannot load file: a board of {record.rules.size}, the model plays on {self._rules.size}")
        moves = record.moves[: int(args[1]) - 1] if len(args) > 1 else record.moves
        self._rules = replace(self._rules, komi=record.rules.komi)
        return self._replay(record.position(), moves)


# Move for a vertex such as ``D4`` or ``pass``; raises ValueError for other text
def _move(word: str, size: int) -> int:
    if word.lower() == "pass":
        return size**2
    column, row = COLUMNS.index(word[0].upper()), int(word[1:])
    if column >= size or not 1 <= row <= size:
        raise Refused("invalid vertex: it is off the board")
    return (size - row) * size + column


def uniform(planes: Any) -> "tuple[Any, Any]":
    """Return a uniform policy and value 0."""
    import numpy as np

    return np.ones((len(planes), planes.shape[1] ** 2 + 1), np.float32), np.zeros(len(planes), np.float32)


def evaluator_of(model: str, size: int, implementation: str, batch: int) -> "tuple[Evaluate, Rules]":
    """Return the network in a file, for batches of ``batch`` positions, and the rules for its board.

    Raises:
        Problem: the file does not exist, or the model is for a board other than ``size`` (0: any).
    """
    if model == UNIFORM:
        return uniform, Rules(size=size or 9)
    if not Path(model).exists():
        raise Problem(f"no model {model}", f"a file that a run has written, or {UNIFORM}", "give its path")
    shape, _ = models.load(Path(model), size)
    # GTP clients show standard error to the user.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    rules = Rules(size=shape.board_size, features=shape.features)
    config = importlib.import_module(f"{implementation}.config").Config(
        device="cpu",
        precision="fp32",
        inference_batch=batch,
        parallel_leaves=batch,
        board_size=shape.board_size,
        features=shape.features,
    )
    return importlib.import_module(f"{implementation}.networks").load_evaluator(Path(model), config), rules


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help=f"file of a run's model, or {UNIFORM}")
    parser.add_argument("--implementation", default="benchmarks.minigo.tensorflow", help="package of its network")
    parser.add_argument("--size", type=int, default=0, help="refuse a model of another board")
    parser.add_argument("--readouts", type=int, default=400, help="playouts added for each move")
    parser.add_argument("--parallel-leaves", type=int, default=8, help="positions evaluated at once")
    parser.add_argument("--resign", type=float, default=None, help="value below which it resigns, such as -0.95")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        batch = options.parallel_leaves
        evaluate, rules = evaluator_of(options.model, options.size, options.implementation, batch)
        search = Search(
            readouts=options.readouts,
            parallel_leaves=batch,
            noise_mix=0.0,
            soft_pick_cutoff=0,
            cache_entries=1 << 15,
            disable_resign_pct=1.0 if options.resign is None else 0.0,
            max_resign_threshold=-1.0 if options.resign is None else options.resign,
        )
        Server(evaluate, rules, search, options.seed).serve(sys.stdin, sys.stdout)
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
