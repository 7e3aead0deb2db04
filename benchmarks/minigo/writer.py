"""Writes games as arrays, and the target model, in one process without resume."""

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from benchmarks.common.data import source_checks
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.prepare import Content, Listing, Split
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.minigo import models, sgf
from benchmarks.minigo.engine import BLACK, Games, IllegalMove, Rules, Search

VERSION = "1"  # Increase it if the output changes for the same source and options
NO_RESULT = "no result"
FLAWLESS = "SGF with a result, such as RE[B+R], and moves that the rules allow"
SMALL_GAMES = 400
SMALL_KOMI = 7.5
SMALL_SHAPE = {"features": "agz", "conv_width": 8, "trunk_layers": 1, "fc_width": 8}
Array = Any
Game = Tuple[Array, int]  # Moves, and 1 where black won, -1 where white did


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """Hash the source's files (names, sizes, times of change) and the options."""
    paths = sorted(args.origin.rglob("*.sgf")) if args.origin is not None else []
    if args.origin is not None and not paths:
        raise Problem(f"{args.origin} contains no *.sgf files", "games in SGF, at any depth", "pass another folder")
    listed = [(str(path.relative_to(args.origin)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = json.dumps([VERSION, listed, _digest(args), args.name, args.seed, args.board_size, args.held_out])
    return Listing(paths, hashlib.sha256(key.encode()).hexdigest())


def _digest(args: argparse.Namespace) -> str:
    has_target = args.target is not None and args.target.is_file()
    return hashlib.sha256(args.target.read_bytes()).hexdigest() if has_target else ""


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    size = args.board_size or (19 if listing.source else 5)
    write_target = _target(args, size)
    left_out: Dict[str, int] = {}
    progress.note(f"reading {len(listing.source)} files" if listing.source else "generating the toy data set")
    games = _read(listing.source, args, size, left_out, progress) if listing.source else generate(size, args.seed)
    if len(games) < 2:
        raise Problem(f"{len(games)} games on {size} x {size}", "at least 2", "set --board-size, or other raw data")
    held_out = max(1, int(len(games) * args.held_out))
    order = np.random.RandomState(args.seed % 2**32).permutation(len(games))
    games = [games[number] for number in order]
    held_out_moves = {moves.tobytes() for moves, _ in games[-held_out:]}
    trained = [game for game in games[:-held_out] if game[0].tobytes() not in held_out_moves]
    left_out["copies of held-out games"] = len(games) - held_out - len(trained)
    games = trained + games[-held_out:]
    for reason, count in sorted(left_out.items()):
        if count:
            progress.note(f"left out: {count} games, {reason}")
    write_target(scratch / "target.npz")
    lengths = [len(moves) for moves, _ in games]
    write_array(scratch / "moves.npy", np.concatenate([moves for moves, _ in games]).astype(np.int16))
    write_array(scratch / "starts.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    write_array(scratch / "outcomes.npy", np.array([outcome for _, outcome in games], np.int8))
    files = ("moves.npy", "starts.npy", "outcomes.npy")
    return Content(
        name=args.name or (args.origin.name if listing.source else f"go-{size}x{size}"),
        splits={"train": Split(len(games) - held_out, files), "test": Split(held_out, ("target.npz",))},
        summary=f"{len(games) - held_out:,} + {held_out:,} games, {sum(lengths):,} moves",
        facts={"board_size": size, "held_out": held_out},
        how={
            "made": "read" if listing.source else "generated",
            "left_out": left_out,
            "seed": args.seed,
            "target": _digest(args),
        },
        tool={"version": VERSION, "numpy": np.__version__},
    )


# Validate the target model, and return a function that writes it
def _target(args: argparse.Namespace, size: int) -> Callable[[Path], None]:
    if args.target is not None and not models.is_archive(args.target):
        from benchmarks.minigo.tensorflow import networks  # TensorFlow is only needed for frozen graphs

        content = networks.read(args.target, size)
        return lambda path: networks.save(path, *content)
    if args.target is not None:
        shape, arrays = models.load(args.target, size)
        return lambda path: models.save(path, shape, arrays)
    shape = models.Shape(board_size=size, **SMALL_SHAPE)  # type: ignore[arg-type]
    arrays = models.initial_weights(shape, args.seed)
    # Uniform policy and value 0: the search only sees ends of games.
    blind = {name: np.zeros_like(a) for name, a in arrays.items() if name.startswith(("policy_dense", "value_dense"))}
    return lambda path: models.save(path, shape, {**arrays, **blind})


# Return the games of SGF files on boards of ``size``; counts skipped games by reason.
#
# Raises:
#     Problem: files that are not games, have illegal moves or no result: all in one error.
def _read(
    paths: Sequence[Path], args: argparse.Namespace, size: int, left_out: Dict[str, int], progress: Progress
) -> List[Game]:
    games: List[Game] = []
    flaws: List[str] = []
    for path in paths:
        try:
            # Games of servers with only the simple ko rule may repeat positions.
            record = sgf.read(path, superko=False)
        except Problem as error:
            flaws.append(error.found)
            continue
        reason = _reason(record, size)
        if reason == NO_RESULT:
            flaws.append(f"{path}: {reason}" + (f", RE[{record.result}]" if record.result else ""))
        elif reason:
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            games.append((np.array(record.moves, np.int16), 1 if record.winner == BLACK else -1))
    source_checks.damaged(flaws, "games with flaws", FLAWLESS, args.skip_corrupt, progress, keeps=False)
    left_out["with flaws"] = len(flaws)
    return games


def _reason(record: sgf.Record, size: int) -> str:
    if record.rules.size != size:
        return f"not on {size} x {size}"
    if record.black or record.white or record.to_play != BLACK or not record.moves:
        return "with stones set before the first move, white first, or no moves"
    if not record.winner:
        return "drawn" if record.margin == 0 else NO_RESULT
    try:
        sgf.replay(replace(record, rules=replace(record.rules, superko=True)))
    except IllegalMove:
        return "a position comes again (superko)"
    return ""


def generate(size: int, seed: int) -> List[Game]:
    """Return games played with a search that counts stones, for the toy data set."""
    rules = Rules(size=size, komi=SMALL_KOMI)
    search = Search(readouts=64, parallel_leaves=2, soft_pick_cutoff=6)
    games = Games(rules, [search], SMALL_GAMES, seed, count=SMALL_GAMES)
    planes = np.zeros((1024, size, size, rules.planes), np.uint8)
    finished_games = []
    while games.running:
        rows = games.leaves(planes)
        stones = planes[:rows, :, :, :2].sum(axis=(1, 2), dtype=np.float32)
        value = np.tanh((stones[:, 0] - stones[:, 1]) / size)
        policy = np.full((rows, size**2 + 1), 1 / (size**2 + 1), np.float32)
        finished_games += games.answer(policy, value.astype(np.float32))
    return [
        (game.moves, 1 if game.outcome > 0 else -1) for game in sorted(finished_games, key=lambda game: game.number)
    ]
