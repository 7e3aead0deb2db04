"""How many GPUs train a benchmark within a day, four hours, two hours: by the cost model, with its interval.

from encore.lab.studies.gpus_needed import gpus_needed
print(gpus_needed(runs).as_markdown())
"""

from collections.abc import Sequence

from encore.lab.scaling.cost_model import share_of, strong
from encore.lab.studies.servers import ServerRun
from encore.results.table import Cell, Table

LIMITS = (("a day", 1440.0), ("four hours", 240.0), ("two hours", 120.0))  # minutes that the study asks for
MOST_GPUS = 4096


def gpus_needed(runs: Sequence[ServerRun]) -> Table:
    """Return the fewest GPUs, a power of two, per benchmark and server, and the interval of the minutes on them.

    Where one number of GPUs was measured there is no model: what was measured is compared with the limit.
    """
    grouped: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        each = run.measured
        if each.gpus and each.minutes:
            points = grouped.setdefault((each.benchmark, run.server), {})
            points[each.gpus] = min(each.minutes, points.get(each.gpus, each.minutes))
    return Table(
        title="GPUs for a day, four hours, two hours",
        columns=(
            "benchmark", "server", "measured on", "within", "GPUs", "minutes", "95 % from", "95 % to",
            "GPUs to be sure", "how",
        ),
        rows=tuple(
            (benchmark, server, ", ".join(map(str, sorted(points))), name, *_fewest(points, limit))
            for (benchmark, server), points in sorted(grouped.items())
            for name, limit in LIMITS
        ),
        note="GPUs: the fewest, a power of two, with which the expected minutes are within the limit; to be sure: with "
        "which the upper end of the 95 % interval is. The model takes as many epochs for every number of GPUs: where a "
        "larger batch needs more, more GPUs are needed.",
    )  # fmt: skip


def _fewest(points: dict[int, float], limit: float) -> tuple[Cell, ...]:
    if len(points) < 2:
        ((gpus, minutes),) = points.items()
        if minutes <= limit:
            return (gpus, minutes, None, None, None, "measured")
        return (None, minutes, None, None, None, "not enough; measure on another number of GPUs for the model")
    model = strong(points)
    counts = [2**power for power in range(MOST_GPUS.bit_length())]
    # An interval takes a search: only where the expected minutes are within the limit can its upper end be.
    likely = [n for n in counts if sum(model.parts(share_of(n)).values()) <= limit]
    if not likely:
        return (None, None, None, None, None, f"not with {MOST_GPUS} GPUs")
    fewest, sure = likely[0], next((n for n in likely if model.predict(share_of(n)).high <= limit), None)
    found = model.predict(share_of(fewest))
    how = "model, measured there" if fewest in points else "model"
    return (fewest, found.value, found.low, found.high, sure, how)
