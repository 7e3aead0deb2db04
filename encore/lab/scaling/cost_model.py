"""The cost of a training step by number of GPUs: compute, and an alpha-beta all-reduce of the gradients.

    model = fit_steps([Point(gpus=8, time=0.148, samples_per_gpu=208), Point(gpus=16, nodes=2, ...)])
    print(model.predict(Point(gpus=64, nodes=8, time=0.0, samples_per_gpu=26)))

    time(n) = compute * samples_per_gpu + fixed + latency * hops(n) + transfer * volume(n)

``hops`` and ``volume`` count messages one after the other, and how often a GPU sends the whole gradient:

* ring: hops 2(n-1), volume 2(n-1)/n (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
  of workstations", JPDC 69, 2009);
* tree: hops 2 log2(n), volume 2(n-1)/n (Rabenseifner's algorithm in Thakur, Rabenseifner and Gropp,
  "Optimization of collective communication operations in MPICH", IJHPCA 19, 2005; log2 is rounded up);
* hierarchical: a ring over the g GPUs of a node, each of which then takes part in a tree over the N nodes with
  its own g-th of the gradient: hops 2(g-1) + 2 log2(N), volume 2(g-1)/g inside and 2(N-1)/N/g between nodes.

The arithmetic of the reduction (their gamma) goes with the bytes and so is part of ``transfer``. Overlap of
communication and backward pass has no term: what is measured is what it leaves over.

Convergence is another factor: time to target = epochs(global batch) * steps per epoch * time of a step, with
epochs(B) = least * (1 + B / critical) (McCandlish et al. 2018, arXiv 1812.06162).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from encore.errors import EncoreError
from encore.lab.scaling.fitting import LEVEL, PositiveSum, Prediction, Prior, fit

Algorithm = Literal["ring", "tree", "hierarchical"]

# Standard deviation that a point is given where its own is not known or is smaller: no model is better.
RELATIVE_ERROR = 0.05
# Priors: fixed costs and one transfer of the gradient take a tenth of the shortest measured time, a hop a ten-
# thousandth (15 us of a step of 150 ms); each give or take a factor of 10.
_SHARE, _HOP_SHARE, _FACTOR = 0.1, 1e-4, 10.0
_COMPUTE_FACTOR = 100.0


@dataclass(frozen=True, kw_only=True)
class Point:
    gpus: int
    samples_per_gpu: float  # work of one GPU in ``time``; only the ratio between points matters
    time: float = math.nan  # measured time, in any unit that all points share
    nodes: int = 1
    relative_error: float = RELATIVE_ERROR

    @property
    def gpus_per_node(self) -> float:
        """GPUs of a node; a fraction where they are not spread evenly."""
        return self.gpus / self.nodes


@dataclass(frozen=True)
class StepModel:
    """The fitted cost of a step; parameters are in the unit of the points' times."""

    algorithm: Algorithm
    fitted: PositiveSum

    @property
    def parameters(self) -> dict[str, float]:
        """By name: compute (per sample), fixed, latency (per hop), transfer (of the whole gradient)."""
        return dict(zip(_names(self.algorithm), self.fitted.parameters, strict=True))

    def parts(self, point: Point) -> dict[str, float]:
        """Return the time of a step at ``point`` by its causes."""
        terms = zip(_row(point, self.algorithm), self.fitted.parameters, strict=True)
        return {name: a * b for name, (a, b) in zip(_names(self.algorithm), terms, strict=True)}

    def predict(self, point: Point, level: float = LEVEL) -> Prediction:
        """Return the time at ``point``, with the interval of a measurement there."""
        return self.fitted.predict(_row(point, self.algorithm), point.relative_error, level)


def fit_steps(points: Sequence[Point], algorithm: Algorithm | None = None) -> StepModel:
    """Fit the model; hierarchical where a point has several nodes, else a tree, unless given."""
    if len({point.gpus for point in points}) < 2:
        raise EncoreError(
            f"{len(points)} measured points on one number of GPUs",
            expected="at least two numbers of GPUs",
            hint="measure another: encore sweep BENCHMARK --gpus-per-node 1,2",
        )
    for point in points:
        if not (point.time > 0 and math.isfinite(point.time)):
            raise EncoreError(f"the time on {point.gpus} GPUs is {point.time}", expected="a positive time")
    several = any(point.nodes > 1 for point in points)
    chosen: Algorithm = algorithm or ("hierarchical" if several else "tree")
    shortest = min(point.time for point in points)
    per_sample = min(point.time / point.samples_per_gpu for point in points)
    share = Prior(median=_SHARE * shortest, factor=_FACTOR)
    priors = [
        Prior(median=per_sample, factor=_COMPUTE_FACTOR),
        share,
        Prior(median=_HOP_SHARE * shortest, factor=_FACTOR),
        share,
        *([share] if chosen == "hierarchical" else []),
    ]
    fitted = fit(
        rows=[_row(point, chosen) for point in points],
        values=[point.time for point in points],
        errors=[point.relative_error for point in points],
        priors=priors,
    )
    return StepModel(algorithm=chosen, fitted=fitted)


def _names(algorithm: Algorithm) -> tuple[str, ...]:
    between = ("transfer between nodes",) if algorithm == "hierarchical" else ()
    return ("compute", "fixed", "latency", "transfer", *between)


def _row(point: Point, algorithm: Algorithm) -> tuple[float, ...]:
    # The factors of compute, fixed, latency and transfer at a point.
    n = point.gpus
    if algorithm == "hierarchical":
        g, nodes = point.gpus_per_node, point.nodes
        hops = 2 * (g - 1) + 2 * math.ceil(math.log2(nodes))
        within, between = 2 * (g - 1) / g, 2 * (nodes - 1) / nodes / g
        return (point.samples_per_gpu, 1.0, hops, within, between)
    hops = 2.0 * (n - 1) if algorithm == "ring" else 2.0 * math.ceil(math.log2(n))
    return (point.samples_per_gpu, 1.0, hops, 2 * (n - 1) / n)


@dataclass(frozen=True)
class EpochModel:
    """Epochs to the target by global batch."""

    fitted: PositiveSum

    @property
    def least(self) -> float:
        """Epochs that a small batch needs."""
        return self.fitted.parameters[0]

    @property
    def critical_batch(self) -> float:
        """Global batch that needs twice as many epochs as a small one."""
        return self.fitted.parameters[0] / self.fitted.parameters[1]

    def predict(self, batch: float, level: float = LEVEL) -> Prediction:
        """Return epochs with this global batch, and the interval of a measurement."""
        return self.fitted.predict((1.0, batch), RELATIVE_ERROR, level)


def fit_epochs(measured: Sequence[tuple[float, float]]) -> EpochModel:
    """Fit epochs over global batch from pairs of both; one pair will do, with a wide interval."""
    if not measured:
        raise EncoreError("no epochs were measured", hint="run to the target on at least one number of GPUs")
    largest = max(batch for batch, _ in measured)
    fewest = min(epochs for _, epochs in measured)
    priors = [
        Prior(median=fewest, factor=_COMPUTE_FACTOR),
        Prior(median=_SHARE * fewest / largest, factor=_FACTOR),
    ]
    fitted = fit(
        rows=[(1.0, batch) for batch, _ in measured],
        values=[epochs for _, epochs in measured],
        errors=[RELATIVE_ERROR] * len(measured),
        priors=priors,
    )
    return EpochModel(fitted=fitted)


@dataclass(frozen=True)
class Product:
    """Two predictions multiplied: their relative errors add in quadrature, each side for itself."""

    parts: tuple[Prediction, ...]

    @property
    def prediction(self) -> Prediction:
        value = math.prod(part.value for part in self.parts)
        down = math.hypot(*(math.log(part.value / part.low) for part in self.parts))
        up = math.hypot(*(math.log(part.high / part.value) for part in self.parts))
        return Prediction(value=value, low=value * math.exp(-down), high=value * math.exp(up))
