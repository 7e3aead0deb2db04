"""Compares the factor that Encore computes from the reference convergence points with every public scaling.json.

    python -m tools.convergence_factors CHECKOUTS [v5.0 v5.1 ...]    # the folder with training_results_v2.0 ...

Prints the table of docs/results.md and lists every difference. All rounds take some minutes.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from encore.results.compliance.convergence import convergence_of
from encore.results.rules import ROUNDS
from encore.results.scores.score import SCALED_SINCE, read_scaling, score_folder
from encore.results.table import Table
from tools import Folder, run

COLUMNS = (
    "round", "sets", "passed", "too few epochs", "no reference point", "not checked",
    "with scaling.json", "equal", "within 0.001", "different", "computed alone",
)  # fmt: skip
_EQUAL, _NEAR = 1e-9, 1e-3


def kind(stated: float | None, computed: float | None) -> str | None:
    if stated is None:
        return "computed alone" if (computed or 1.0) > 1 else None
    off = abs(stated - (computed or 1.0))
    return "equal" if off < _EQUAL else "within 0.001" if off < _NEAR else "different"


def of_round(checkout: Path, round_: str, listed: list[str]) -> Iterator[str]:
    # Yield the counter keys per set; append differences to ``listed``
    for score in score_folder(checkout, round_):
        stated, convergence = read_scaling(score.folder).factor, convergence_of(score)
        yield "sets"
        yield from ["with scaling.json"] if stated else []
        yield from [convergence.outcome.value] if convergence else []
        # If a set needs too few epochs, the computed factor counts only if a review accepted the set.
        computed = convergence.factor if convergence and (stated or convergence.outcome.value == "passed") else None
        outcome = kind(stated, computed)
        yield from [outcome] if outcome else []
        if outcome in ("within 0.001", "different", "computed alone"):
            state = convergence.outcome.value if convergence else "no points"
            listed.append(f"{outcome}: {round_}/{score.folder.relative_to(checkout)}: {stated} {computed} ({state})")


def main(checkouts: Folder, rounds: Annotated[list[str], typer.Argument()] = ()) -> None:
    listed: list[str] = []
    rows = []
    for round_ in rounds or ROUNDS[ROUNDS.index(SCALED_SINCE) :]:
        counts = Counter(of_round(checkouts / f"training_results_{round_}", round_, listed))
        rows.append((round_, *(counts[column] for column in COLUMNS[1:])))
    print(Table(title="", columns=COLUMNS, rows=tuple(rows)).as_markdown())
    print("\n".join(listed))


if __name__ == "__main__":
    run(main, __doc__)
