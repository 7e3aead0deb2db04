"""Sums of positive terms, fitted to few measured values, with predictions that say how sure they are.

    model = fit(rows=[[1.0, 0.0], [0.5, 1.0]], values=[2.0, 1.2], errors=[0.05, 0.05], priors=priors)
    print(model.predict([0.25, 1.5], error=0.05))

A value is ``sum_j row_j * exp(theta_j)``: parameters are positive by their form. ``scipy.optimize.least_squares``
minimizes the squared relative errors together with the squared distances of the parameters from their priors,
which are wide, and without which fewer points than parameters would determine nothing.

An interval is a profile likelihood's: a value is inside when a point that measured it, added to the points
that there are, costs the best fit no more than the chi-square quantile. No random numbers take part.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.95
_WIDEST = 40.0  # search for the ends of an interval no further than this in natural logarithms


@dataclass(frozen=True)
class Prior:
    """What is assumed of a parameter before anything was measured: log-normal."""

    median: float
    factor: float  # one standard deviation up multiplies the median by this, one down divides it


@dataclass(frozen=True)
class Prediction:
    """A predicted value in the unit of the fitted ones, and where a measurement of it would be."""

    value: float
    low: float
    high: float

    def holds(self, measured: float) -> bool:
        return self.low <= measured <= self.high


@dataclass(frozen=True, kw_only=True)
class PositiveSum:
    rows: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    errors: tuple[float, ...]
    priors: tuple[Prior, ...]
    parameters: tuple[float, ...]

    def at(self, row: Sequence[float]) -> float:
        return float(np.dot(row, self.parameters))

    def predict(self, row: Sequence[float], error: float, level: float = LEVEL) -> Prediction:
        """Return the value at ``row``, and the interval of a measurement with this relative error."""
        middle = float(np.log(self.at(row)))
        ends = [self._end(row, error, middle, direction, level) for direction in (-1.0, 1.0)]
        return Prediction(value=float(np.exp(middle)), low=float(np.exp(ends[0])), high=float(np.exp(ends[1])))

    def _end(self, row: Sequence[float], error: float, middle: float, direction: float, level: float) -> float:
        from scipy.optimize import brentq
        from scipy.stats import chi2

        allowed = float(chi2.ppf(level, 1))
        start = np.log(self.parameters)
        rows, errors = (*self.rows, tuple(row)), (*self.errors, error)
        least = _minimize(self.rows, self.values, self.errors, self.priors, start)[1]

        def excess(distance: float) -> float:
            values = (*self.values, float(np.exp(middle + direction * distance)))
            return _minimize(rows, values, errors, self.priors, start)[1] - least - allowed

        reach = 2 * error
        while excess(reach) < 0:
            reach *= 2
            if reach > _WIDEST:
                return middle + direction * _WIDEST
        return middle + direction * float(brentq(excess, 0.0, reach, xtol=1e-4))


def fit(
    *,
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    errors: Sequence[float],
    priors: Sequence[Prior],
) -> PositiveSum:
    """Fit one parameter per column of ``rows``; ``errors`` are relative standard deviations of ``values``."""
    frozen = tuple(tuple(float(cell) for cell in row) for row in rows)
    start = np.log([prior.median for prior in priors])
    best, _ = _minimize(frozen, tuple(values), tuple(errors), tuple(priors), start)
    return PositiveSum(
        rows=frozen,
        values=tuple(values),
        errors=tuple(errors),
        priors=tuple(priors),
        parameters=tuple(float(each) for each in np.exp(best)),
    )


def _minimize(
    rows: tuple[tuple[float, ...], ...],
    values: tuple[float, ...],
    errors: tuple[float, ...],
    priors: tuple[Prior, ...],
    start: Any,
) -> tuple[Any, float]:
    # Logarithms of the best parameters, and their sum of squares.
    from scipy.optimize import least_squares

    matrix, logs, scale = np.array(rows), np.log(values), np.array(errors)
    centres, widths = _logs(priors)

    def residuals(theta: Any) -> Any:
        misfits = (np.log(matrix @ np.exp(theta)) - logs) / scale
        return np.concatenate([misfits, (theta - centres) / widths])

    def jacobian(theta: Any) -> Any:
        terms = matrix * np.exp(theta)
        slopes = terms / terms.sum(axis=1, keepdims=True) / scale[:, None]
        return np.concatenate([slopes, np.diag(1 / widths)])

    found = least_squares(residuals, start, jac=jacobian, method="lm", xtol=1e-10, ftol=1e-10)
    return found.x, float(2 * found.cost)


@functools.lru_cache(maxsize=64)
def _logs(priors: tuple[Prior, ...]) -> tuple[Any, Any]:
    centres = np.log([prior.median for prior in priors])
    return centres, np.log([prior.factor for prior in priors])
