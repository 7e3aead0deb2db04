"""Training positions from the games of the window or of the data set, as planes, policy and value.

In a prepared data set ``moves.npy`` (int16) has the concatenated moves of all games, ``starts.npy`` (int64) the
offsets, ``outcomes.npy`` (int8) 1 if black won and -1 if white won. The last ``held_out`` games are not used for
training. ``target.npz`` is the target model.
"""

import json
from pathlib import Path
from typing import Any, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import schedule
from benchmarks.minigo.engine import Game, Position
from benchmarks.minigo.models import PLANES
from benchmarks.minigo.records import NOT_PLAYED_AGAIN, PLAYED_AGAIN, generation_folder, read_generation
from benchmarks.minigo.schedule import rules_of, soft_moves

FILES = ("moves.npy", "starts.npy", "outcomes.npy", "target.npz")
TARGET = "target.npz"
Array = Any


class GoGames:
    """Games in a prepared folder, as records with one visit per move."""

    def __init__(self, folder: Path, board_size: int) -> None:
        """Open the folder; raises Problem if the board size differs."""
        manifest_facts = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["facts"]
        if manifest_facts["board_size"] != board_size:
            raise Problem(
                f"{folder} has games on {manifest_facts['board_size']} x {manifest_facts['board_size']}",
                f"{board_size} x {board_size}",
                "pass another data set with --data, or set board_size",
            )
        self._moves, self._starts, self._outcomes = (np.load(str(folder / name), mmap_mode="r") for name in FILES[:3])
        self._size, self.held_out = board_size, int(manifest_facts["held_out"])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Game:
        moves = np.asarray(self._moves[self._starts[number] : self._starts[number + 1]])
        visits = np.zeros((len(moves), self._size**2 + 1), np.uint16)
        visits[np.arange(len(moves)), moves] = 1
        outcome = float(self._outcomes[number])
        return Game(int(number), moves, visits, np.zeros(len(moves), np.float32), outcome, 0.0, False, False)

    def positions(self, held_out: bool) -> Array:
        """Return all positions of held-out games, or of training games: (positions, 2) of game and ply."""
        first = len(self) - self.held_out
        games = range(first, len(self)) if held_out else range(first)
        lengths = np.diff(self._starts)[games.start : games.stop]
        plies = np.concatenate([np.arange(length) for length in lengths] or [np.zeros(0, np.int64)])
        return np.stack([np.repeat(np.arange(games.start, games.stop), lengths), plies], 1)


def open_data(folder: Path) -> Tuple[int, int]:
    """Open a data set to verify it; return the numbers of training and held-out games."""
    manifest_facts = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["facts"]
    games = GoGames(folder, manifest_facts["board_size"])
    return len(games) - games.held_out, games.held_out


class Examples(NamedTuple):
    """Positions in training order."""

    planes: Array  # uint8 (positions, N, N, planes)
    policy: Array  # float32 (positions, N x N + 1): the search's visits as shares of 1, or the move that was played
    value: Array  # float32 (positions,): 1 if the player to move won, otherwise -1


def read_window(output: Path, config: Any, generation: int) -> List[Game]:
    """Return the games of the generations that ``generation`` is trained on.

    Raises:
        Problem: a record is damaged, or games are missing.
    """
    window_games: List[Game] = []
    for number in schedule.window(config, generation):
        folder = generation_folder(output, number)
        hint = PLAYED_AGAIN if number == generation else NOT_PLAYED_AGAIN
        games = read_generation(folder, config.board_size, hint)
        if len(games) != config.games:
            raise Problem(f"{folder} has {len(games)} games", f"{config.games}", hint.format(folder.name))
        window_games += games
    return window_games


def sample(games: Sequence[Game], config: Any, generation: int, global_batch: int) -> Array:
    """Sample a generation's positions: int32 (positions, 2) of game and ply, shuffled, equal on all ranks.

    The number of positions is rounded down to full steps, as in the submitted train.py, but not below one step.
    """
    searched = [np.flatnonzero(game.visits.any(axis=1)) for game in games]
    positions = np.concatenate([np.stack([np.full_like(plies, n), plies], 1) for n, plies in enumerate(searched)])
    generator = np.random.RandomState((config.seed + generation) % 2**32)
    order = generator.permutation(len(positions))
    count = int(len(positions) * config.sample_share) // global_batch * global_batch
    return positions[order[:count]] if count else positions[np.resize(order, global_batch)]


def rank_part(positions: Array, part: int, parts: int, batch: int) -> Array:
    """Return the positions for rank ``part`` out of ``parts``: ``batch`` in every step."""
    return positions.reshape(-1, parts, batch, 2)[:, part].reshape(-1, 2)


def build(games: Union[List[Game], GoGames], positions: Array, config: Any) -> Examples:
    """Replay the games up to the sampled positions."""
    size = config.board_size
    shape = (len(positions), size, size, PLANES[config.features])
    planes, policy = np.empty(shape, np.uint8), np.empty((len(positions), size**2 + 1), np.float32)
    value = np.empty(len(positions), np.float32)
    rules = rules_of(config)
    by_game = np.lexsort((positions[:, 1], positions[:, 0]))
    number = -1
    for row in by_game:
        if positions[row, 0] != number:
            number = int(positions[row, 0])
            game, position = games[number], Position(rules)
        for move in game.moves[len(position.moves) : positions[row, 1]]:
            position.play(int(move))
        ply = len(position.moves)
        position.planes(planes[row])
        policy[row] = searched_policy(game.visits[ply], ply, config)
        value[row] = game.outcome if ply % 2 == 0 else -game.outcome
    return Examples(planes, policy, value)


def searched_policy(visits: Array, ply: int, config: Any) -> Array:
    """Return the visits as a distribution, float32 (moves,).

    For sampled moves the exponent of the sampling is applied (CalculateSearchPi in cc/mcts_tree.cc, v0.7).
    """
    power = config.policy_softmax_temp if ply < soft_moves(config) else 1.0
    weights = visits.astype(np.float32) ** power
    return weights / weights.sum()


def turned(examples: Examples, generator: Any) -> Examples:
    """Return the examples, each with a random symmetry of the board."""
    planes, policy = np.empty_like(examples.planes), np.empty_like(examples.policy)
    size = planes.shape[1]
    kinds = generator.randint(0, 8, len(planes))
    for kind in range(8):
        rows = np.flatnonzero(kinds == kind)
        boards = examples.policy[rows, :-1].reshape(-1, size, size)
        planes[rows] = _turn(examples.planes[rows], kind)
        policy[rows, :-1] = _turn(boards, kind).reshape(len(rows), size**2)
    policy[:, -1] = examples.policy[:, -1]
    return Examples(planes, policy, examples.value)


def _turn(boards: Array, kind: int) -> Array:
    rotated = np.rot90(boards, kind % 4, axes=(1, 2))
    return rotated[:, :, ::-1] if kind >= 4 else rotated
