"""Find the round a log belongs to, from what the log says."""

import json
import re
from collections.abc import Collection, Set
from pathlib import Path

from encore.results.logs.reader import Dialect
from encore.results.rules import ROUNDS, rounds_of

ROUND_KEYS = frozenset({"run_stop", "gradient_accumulation_steps"})
"""Keys that distinguish rounds."""
LATER_ROUNDS = frozenset(ROUNDS[ROUNDS.index("v0.7") :])
"""Those with ``:::MLLOG`` lines."""
_BY_DIALECT: dict[Dialect, frozenset[str]] = {
    "v0.5": frozenset({"v0.5"}),
    "mll": frozenset({"v0.6"}),
    "mlperf": frozenset({"v0.6"}),
    "mllog": LATER_ROUNDS,
}
_FOLDER = re.compile(r"(?:training_results_)?v(\d\.\d)(?:\.\d)?")
# When a round's logs were written, in years: up to its deadline in May or October.
_DATES = {
    "v0.7": (2020.00, 2020.75), "v1.0": (2020.75, 2021.45), "v1.1": (2021.45, 2021.85),
    "v2.0": (2021.85, 2022.45), "v2.1": (2022.45, 2022.85), "v3.0": (2022.85, 2023.45),
    "v3.1": (2023.45, 2023.85), "v4.0": (2023.85, 2024.45), "v4.1": (2024.45, 2024.85),
    "v5.0": (2024.85, 2025.45), "v5.1": (2025.45, 2026.00),
}  # fmt: skip
_GUESSES = frozenset({"date", "keys"})
"""Clues that fit most logs of a round but not all: logs of one round are submitted again in the next."""
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
    clues = {
        "dialect of the lines": frozenset().union(*(_BY_DIALECT[each] for each in dialects)),
        "benchmark": rounds_of(benchmark) if benchmark else frozenset(),
        "run folder's run.json": frozenset({own}),
        "folder's name": _rounds_in(path),
        "date": _rounds_at(start_s) if start_s else frozenset(),
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


def _rounds_in(path: Path) -> frozenset[str]:
    for part in reversed(path.absolute().parts[:-1]):
        match = _FOLDER.fullmatch(part)
        if match and f"v{match[1]}" in ROUNDS:
            return frozenset({f"v{match[1]}"})
    return frozenset()


def _in_run_json(path: Path) -> str:
    """Return the round that ``run.json`` of Encore's own run folder names, empty where there is none."""
    passport = path.parent / "run.json"
    try:
        if passport.stat().st_size > _PASSPORT_LIMIT:
            return ""
        round_ = json.loads(passport.read_text("utf-8")).get("round")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return round_ if isinstance(round_, str) else ""


def _rounds_at(seconds: float) -> frozenset[str]:
    year = 1970 + seconds / _SECONDS_PER_YEAR
    return frozenset(round_ for round_, (first, last) in _DATES.items() if first <= year < last)
