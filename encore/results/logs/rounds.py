"""Find the round a log belongs to, from what the log says."""

import json
import re
from collections.abc import Collection, Set
from pathlib import Path

from encore.results.logs.reader import Dialect
from encore.results.rules import ROUNDS, rounds_at, rounds_of, rounds_with

ROUND_KEYS = frozenset({"run_stop", "gradient_accumulation_steps"})  # Keys that distinguish rounds
LATER_ROUNDS = rounds_with("mllog")  # Those with ``:::MLLOG`` lines
_FOLDER = re.compile(r"(?:training_results_)?v(\d+\.\d)(?:\.\d)?")
# Clues that fit most logs of a round but not all: logs of one round are submitted again in the next.
_GUESSES = frozenset({"date", "keys"})
_PASSPORT_LIMIT = 1 << 20
_SECONDS_PER_YEAR = 365.2425 * 86400


def find_round(
    path: Path,
    dialects: Set[Dialect],
    benchmark: str | None,
    division: str | None,
    keys: Collection[str],
    start_s: float | None,
) -> tuple[str | None, str, bool]:
    """Return the round of the log at ``path``, how it was found and whether it is a guess; or None and why not.

    ``keys`` are those of ``ROUND_KEYS`` that the log has.
    """
    if not dialects:
        return None, "no MLPerf event in the file", False
    own = _in_run_json(path)
    if own and own not in ROUNDS:
        return None, f"its run.json has {own!r}, which is no round of MLPerf", False
    folder = _folders_round(path)
    if not own and _is_newer(folder):
        return None, f"its folder is of {folder}, which is newer than the rounds that are known, to {ROUNDS[-1]}", False
    clues = {
        "dialect of the lines": frozenset().union(*map(rounds_with, dialects)),
        "benchmark": rounds_of(benchmark) if benchmark else frozenset(),
        "run folder's run.json": frozenset({own}),
        "folder's name": frozenset({folder}),
        "date": rounds_at(1970 + start_s / _SECONDS_PER_YEAR) if start_s else frozenset(),
    }
    # training_1.0.0/closed_common.yaml asks every closed log for gradient_accumulation_steps; 0.7.0 does
    # not, and neither do the open division's rules.
    if division == "closed" and "run_stop" in keys:
        later = "gradient_accumulation_steps" in keys
        clues["keys"] = LATER_ROUNDS - {"v0.7"} if later else frozenset({"v0.7"})
    left = frozenset(ROUNDS)
    used: list[str] = []
    for name, rounds in clues.items():
        narrowed = left & rounds
        if narrowed and narrowed != left:
            left = narrowed
            used.append(name)
        if len(left) == 1:
            guess = not _GUESSES.isdisjoint(used)
            return next(iter(left)), f"{'a guess ' if guess else ''}from the {', '.join(used)}", guess
    candidates = ", ".join(round_ for round_ in ROUNDS if round_ in left)
    return None, f"may be any of {candidates}: nothing in the log distinguishes them", False


# Round that the log's folder, or one above it, is named after, known or newer; "" without one.
def _folders_round(path: Path) -> str:
    for part in reversed(path.absolute().parts[:-1]):
        match = _FOLDER.fullmatch(part)
        if match and (f"v{match[1]}" in ROUNDS or _is_newer(f"v{match[1]}")):
            return f"v{match[1]}"
    return ""


def _is_newer(round_: str) -> bool:
    return bool(round_) and _number(round_) > _number(ROUNDS[-1])


def _number(round_: str) -> tuple[int, ...]:
    return tuple(int(part) for part in round_.removeprefix("v").split("."))


# Round that ``run.json`` of Encore's own run folder names, empty where there is none.
def _in_run_json(path: Path) -> str:
    passport = path.parent / "run.json"
    try:
        if passport.stat().st_size > _PASSPORT_LIMIT:
            return ""
        round_ = json.loads(passport.read_text("utf-8")).get("round")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return round_ if isinstance(round_, str) else ""
