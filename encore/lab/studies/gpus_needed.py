"""How many GPUs train a benchmark within a day, four hours, two hours: by the cost model, with its interval.

from encore.lab.studies.gpus_needed import gpus_needed
print(gpus_needed(runs).as_markdown())
"""

from collections.abc import Sequence

from encore.lab.scaling.cost_model import Point, StepModel, fit_steps
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
    rows: list[tuple[Cell, ...]] = []
    for (benchmark, server), points in sorted(grouped.items()):
        counts = ", ".join(map(str, sorted(points)))
        for name, limit in LIMITS:
            rows.append((benchmark, server, counts, name, *_fewest(points, limit)))
    return Table(
        title="GPUs for a day, four hours, two hours",
        columns=(
            "benchmark", "server", "measured on", "within", "GPUs", "minutes", "95 % from", "95 % to",
            "GPUs to be sure", "how",
        ),
        rows=tuple(rows),
        note="GPUs: the fewest, a power of two, with which the expected minutes are within the limit; to be sure: with "
        "which the upper end of the 95 % interval is. The model takes as many epochs for every number of GPUs: where a "
        "larger batch needs more, more GPUs are needed.",
    )  # fmt: skip


def _fewest(points: dict[int, float], limit: float) -> tuple[Cell, ...]:
    if len(points) < 2:
        ((gpus, minutes),) = points.items()
        within = minutes <= limit
        how = "measured" if within else "not enough; measure on another number of GPUs for the model"
        return (gpus if within else None, minutes, None, None, None, how)
    model = fit_steps([Point(gpus=n, samples_per_gpu=1 / n, time=minutes) for n, minutes in sorted(points.items())])
    counts = [2**power for power in range(MOST_GPUS.bit_length())]
    found = next((n for n in counts if _expected(model, n) <= limit), None)
    # An interval takes a search: only where the expected minutes are within the limit can its upper end be.
    likely = [n for n in counts if n >= (found or 0) and _expected(model, n) <= limit]
    sure = next((n for n in likely if _minutes(model, n)[2] <= limit), None)
    if found is None:
        return (None, None, None, None, None, f"not with {MOST_GPUS} GPUs")
    how = "model, measured there" if found in points else "model"
    return (found, *_minutes(model, found), sure, how)


def _expected(model: StepModel, gpus: int) -> float:
    return sum(model.parts(Point(gpus=gpus, samples_per_gpu=1 / gpus)).values())


def _minutes(model: StepModel, gpus: int) -> tuple[float, float, float]:
    predicted = model.predict(Point(gpus=gpus, samples_per_gpu=1 / gpus))
    return predicted.value, predicted.low, predicted.high
