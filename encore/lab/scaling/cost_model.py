"""Training step time by number of GPUs: compute, and an alpha-beta all-reduce of the gradients.

    model = fit_steps([Point(gpus=8, time=0.148, samples_per_gpu=208), Point(gpus=16, nodes=2, ...)])
    print(model.predict(Point(gpus=64, nodes=8, time=0.0, samples_per_gpu=26)))

    time(n) = compute * samples_per_gpu + fixed + latency * hops(n) + transfer * volume(n)

``hops`` counts sequential messages, ``volume`` how often a GPU sends the full gradient:

* ring: hops 2(n-1), volume 2(n-1)/n (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
  of workstations", JPDC 69, 2009);
* tree: hops 2 log2(n), volume 2(n-1)/n (Rabenseifner's algorithm in Thakur, Rabenseifner and Gropp,
  "Optimization of collective communication operations in MPICH", IJHPCA 19, 2005; log2 is rounded up);
* hierarchical: a ring over the g GPUs of a node, then g trees over the N nodes, each for 1/g of the gradient:
  hops 2(g-1) + 2 log2(N), volume 2(g-1)/g intra-node and 2(N-1)/N/g inter-node.

The reduction arithmetic (gamma in the papers) is proportional to the bytes and therefore part of ``transfer``.
Overlap of communication with the backward pass has no term: the model is fitted to the exposed time.

Time to target = epochs(global batch) * steps per epoch * step time, with epochs(B) = least * (1 + B / critical)
(McCandlish et al. 2018, arXiv 1812.06162).

Both are sums of positive terms fitted to few values: ``sum_j row_j * exp(theta_j)``; the exponential keeps the
parameters positive. ``scipy.optimize.leastsq`` minimizes the squared relative errors plus the squared distances of
the parameters from wide priors; without priors, fewer points than parameters would be underdetermined. Intervals are
profile likelihood intervals: a value is inside if adding it as a measured point increases the minimum by no more
than the chi-square quantile. The computation is deterministic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from encore.errors import EncoreError

LEVEL = 0.95
_WIDEST = 40.0  # limit of the search for interval bounds, in natural logarithms
# Standard deviation assumed for a point if unknown or smaller: no model is more accurate.
RELATIVE_ERROR = 0.05
# Priors: fixed costs and one gradient transfer take a tenth of the shortest measured time, a hop a ten-thousandth (15
# us for a 150 ms step), all within a factor of 10.
_SHARE, _HOP_SHARE, _FACTOR = 0.1, 1e-4, 10.0
_COMPUTE_FACTOR = 100.0

Algorithm = Literal["ring", "tree", "hierarchical"]
Row = Sequence[float]


@dataclass(frozen=True)
class Prior:
    """Log-normal parameter prior."""

    median: float
    factor: float  # one standard deviation up multiplies the median by this, one down divides it


@dataclass(frozen=True)
class Prediction:
    """Predicted value in the unit of the fitted values, with its measurement interval."""

    value: float
    low: float
    high: float

    def holds(self, measured: float) -> bool:
        return self.low <= measured <= self.high


@dataclass(frozen=True, kw_only=True)
class PositiveSum:
    """Sum with one positive parameter per column of ``rows``, fitted to ``values``."""

    rows: Sequence[Row]
    values: Sequence[float]
    errors: Sequence[float]  # relative standard deviations of the values
    priors: Sequence[Prior]
    start: Any = None  # initial logarithms of the parameters; None: medians of the priors

    @property
    def parameters(self) -> tuple[float, ...]:
        return tuple(float(exponent) for exponent in np.exp(self._best[0]))

    @cached_property
    def _best(self) -> tuple[Any, float]:
        # Logarithms of the best parameters, and their sum of squares. ``least_squares`` uses the same algorithm, but is
        # three times slower for problems of this size.
        from scipy.optimize import leastsq

        matrix, logs, scale = np.array(self.rows, float), np.log(self.values), np.array(self.errors)
        centres, widths = np.log([(prior.median, prior.factor) for prior in self.priors]).T

        def residuals(theta: Any) -> Any:
            residuals = (np.log(matrix @ np.exp(theta)) - logs) / scale
            return np.concatenate([residuals, (theta - centres) / widths])

        def jacobian(theta: Any) -> Any:
            terms = matrix * np.exp(theta)
            slopes = terms / terms.sum(axis=1, keepdims=True) / scale[:, None]
            return np.concatenate([slopes, np.diag(1 / widths)])

        start = centres if self.start is None else self.start
        solution, _ = leastsq(residuals, start, Dfun=jacobian, xtol=1e-10, ftol=1e-10, gtol=1e-8)
        return solution, float(np.sum(residuals(solution) ** 2))

    def predict(self, row: Row, error: float = RELATIVE_ERROR) -> Prediction:
        """Return the value at ``row``; its interval is for a measurement with this relative error."""
        from scipy.optimize import brentq
        from scipy.stats import chi2

        best, least = self._best
        middle, allowed = float(np.log(np.dot(row, np.exp(best)))), float(chi2.ppf(LEVEL, 1))
        with_one_more = replace(self, rows=(*self.rows, row), errors=(*self.errors, error), start=best)

        def end(direction: float) -> float:
            def excess(distance: float) -> float:
                value = float(np.exp(middle + direction * distance))
                return replace(with_one_more, values=(*self.values, value))._best[1] - least - allowed

            reach = 2 * error
            while excess(reach) < 0:
                reach *= 2
                if reach > _WIDEST:
                    return float(np.exp(middle + direction * _WIDEST))
            return float(np.exp(middle + direction * float(brentq(excess, 0.0, reach, xtol=1e-4))))

        return Prediction(value=float(np.exp(middle)), low=end(-1.0), high=end(1.0))


@dataclass(frozen=True, kw_only=True)
class Point:
    gpus: int
    samples_per_gpu: float  # work per GPU in ``time``; only the ratio between points matters
    time: float = math.nan  # measured time, in any unit that all points share
    nodes: int = 1
    relative_error: float = RELATIVE_ERROR


@dataclass(frozen=True)
class StepModel:
    """Fitted step cost; parameters are in the time unit of the points."""

    algorithm: Algorithm
    fitted: PositiveSum

    @property
    def parameters(self) -> dict[str, float]:
        """By name: compute (per sample), fixed, latency (per hop), transfer (of the full gradient)."""
        names = ("compute", "fixed", "latency", "transfer", "transfer between nodes")
        return dict(zip(names, self.fitted.parameters, strict=False))

    def parts(self, point: Point) -> dict[str, float]:
        row = _row(point, self.algorithm)
        return {name: a * b for (name, b), a in zip(self.parameters.items(), row, strict=True)}

    def predict(self, point: Point) -> Prediction:
        """Return the predicted time at ``point`` with the interval for a measurement there."""
        return self.fitted.predict(_row(point, self.algorithm), point.relative_error)


def fit_steps(points: Sequence[Point], algorithm: Algorithm | None = None) -> StepModel:
    """Fit the model. Default algorithm: hierarchical if any point has multiple nodes, otherwise tree."""
    if len({point.gpus for point in points}) < 2:
        raise EncoreError(
            f"{len(points)} measured points on one number of GPUs",
            expected="at least two numbers of GPUs",
            hint="measure at a different GPU count: encore sweep BENCHMARK --gpus-per-node 1,2",
        )
    for point in points:
        if not (point.time > 0 and math.isfinite(point.time)):
            raise EncoreError(f"the time on {point.gpus} GPUs is {point.time}", expected="a positive time")
    resolved_algorithm: Algorithm = algorithm or (
        "hierarchical" if any(point.nodes > 1 for point in points) else "tree"
    )
    shortest = min(point.time for point in points)
    per_sample = Prior(min(point.time / point.samples_per_gpu for point in points), _COMPUTE_FACTOR)
    share = Prior(_SHARE * shortest, _FACTOR)
    priors = [per_sample, share, Prior(_HOP_SHARE * shortest, _FACTOR), share]
    fitted = PositiveSum(
        rows=[_row(point, resolved_algorithm) for point in points],
        values=[point.time for point in points],
        errors=[point.relative_error for point in points],
        priors=[*priors, share] if resolved_algorithm == "hierarchical" else priors,
    )
    return StepModel(resolved_algorithm, fitted)


def fit_strong_scaling(minutes: dict[int, float]) -> StepModel:
    """Fit total training minutes by GPU count for strong scaling."""
    return fit_steps([strong_scaling_point(gpus, minutes[gpus]) for gpus in sorted(minutes)])


def strong_scaling_point(gpus: int, time: float = math.nan) -> Point:
    """Return the point for a training divided among this number of GPUs."""
    return Point(gpus=gpus, samples_per_gpu=1 / gpus, time=time)


def volumes(gpus: int, nodes: int) -> tuple[float, float]:
    """Return how often a GPU sends the full gradient intra-node and inter-node (hierarchical)."""
    gpus_per_node = gpus / nodes
    return 2 * (gpus_per_node - 1) / gpus_per_node, 2 * (nodes - 1) / nodes / gpus_per_node


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second per GPU and direction, intra-node and inter-node."""

    intra_node_rate: float
    inter_node_rate: float
    gpus: int = 8  # GPUs per node


def allreduce_seconds(size: float, gpus: int, links: Links) -> float:
    """Return the seconds to all-reduce ``size`` bytes hierarchically on otherwise idle links, without latency."""
    intra_node, inter_node = volumes(gpus, max(1, gpus // links.gpus))
    return size * (intra_node / links.intra_node_rate + inter_node / links.inter_node_rate)


def _row(point: Point, algorithm: Algorithm) -> tuple[float, ...]:
    # Factors of compute, fixed, latency, transfer, and inter-node transfer in a hierarchy.
    n, nodes = point.gpus, point.nodes
    if algorithm == "hierarchical":
        hops = 2 * (n / nodes - 1) + 2 * math.ceil(math.log2(nodes))
        return (point.samples_per_gpu, 1.0, hops, *volumes(n, nodes))
    hops = 2.0 * (n - 1) if algorithm == "ring" else 2.0 * math.ceil(math.log2(n))
    return (point.samples_per_gpu, 1.0, hops, 2 * (n - 1) / n)


def fit_epochs(measured: Sequence[tuple[float, float]]) -> PositiveSum:
    """Fit epochs to the target from pairs of global batch and epochs; one pair suffices, with a wide interval.

    Each row has two terms, 1 and the global batch: the parameters are the epochs at small batches and the increase
    per sample. Their ratio is the critical batch, which doubles the epochs.
    """
    if not measured:
        raise EncoreError("no epochs were measured", hint="run to the target on at least one number of GPUs")
    fewest = min(epochs for _, epochs in measured)
    by_batch = Prior(_SHARE * fewest / max(batch for batch, _ in measured), _FACTOR)
    return PositiveSum(
        rows=[(1.0, batch) for batch, _ in measured],
        values=[epochs for _, epochs in measured],
        errors=[RELATIVE_ERROR] * len(measured),
        priors=[Prior(fewest, _COMPUTE_FACTOR), by_batch],
    )


def product(parts: Sequence[Prediction], factor: float) -> Prediction:
    """Return predictions and a factor multiplied: relative errors add in quadrature, separately for both bounds."""
    value = math.prod(part.value for part in parts)
    down = math.hypot(*(math.log(part.value / part.low) for part in parts))
    up = math.hypot(*(math.log(part.high / part.value) for part in parts))
    return Prediction(value * factor, value * math.exp(-down) * factor, value * math.exp(up) * factor)
