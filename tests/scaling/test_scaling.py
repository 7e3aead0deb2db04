"""The cost model: terms of a step, recorded fits and intervals, and points from published results."""

import math

import pytest

from encore.errors import EncoreError
from encore.lab.scaling import cost_model, validation
from encore.lab.scaling.cost_model import Algorithm, Point, PositiveSum, Prediction, Prior, fit_epochs, fit_steps
from encore.results.published.published import load_published

POINTS = (
    Point(gpus=8, samples_per_gpu=208, time=0.148),
    Point(gpus=16, nodes=2, samples_per_gpu=104, time=0.09),
    Point(gpus=64, nodes=8, samples_per_gpu=26, time=0.05),
)


def approximate(prediction: Prediction) -> object:
    return pytest.approx((prediction.value, prediction.low, prediction.high), rel=1e-4)


# Terms on 24 GPUs of 3 nodes: samples, 1, hops, and how often a GPU sends the gradient, hierarchical: inside a node and
# between nodes. By hand from the formulas of Patarasuk and Yuan (ring), Thakur et al. (tree), and a ring of 8 followed
# by a tree of 3 (hierarchical). The predictions on 256 GPUs of 32 nodes were recorded.
@pytest.mark.parametrize(
    ("algorithm", "terms", "prediction"),
    [
        ("ring", (5, 1, 46, 23 / 12), (0.04142641, 0.03377003, 0.11138959)),
        ("tree", (5, 1, 10, 23 / 12), (0.03936748, 0.03303155, 0.04663460)),
        ("hierarchical", (5, 1, 18, 7 / 4, 1 / 6), (0.03935932, 0.03302421, 0.04662554)),
        (None, (5, 1, 18, 7 / 4, 1 / 6), (0.03935932, 0.03302421, 0.04662554)),
    ],
)
def test_step_is_the_sum_of_its_terms(
    algorithm: Algorithm | None, terms: tuple[float, ...], prediction: tuple[float, ...]
) -> None:
    model = fit_steps(POINTS, algorithm)
    parts = model.parts(Point(gpus=24, nodes=3, samples_per_gpu=5))
    assert [part / model.parameters[name] for name, part in parts.items()] == pytest.approx(terms)
    assert prediction == approximate(model.predict(Point(gpus=256, nodes=32, samples_per_gpu=6.5)))


@pytest.mark.parametrize(
    ("gpus", "prediction"),
    [
        (8, (0.15092985, 0.12556121, 0.18788179)),
        (64, (0.04372449, 0.01938177, 0.08657493)),
        (512, (0.03046409, 0.00549883, 0.07439078)),
    ],
)
def test_interval_grows_with_the_distance(gpus: int, prediction: tuple[float, ...]) -> None:
    # Recorded from minutes 1 / n + 0.02; of simulated trainings on 128 GPUs more than 90 % were inside
    model = cost_model.strong({n: 1 / n + 0.02 for n in (1, 2, 4)})
    assert (model.algorithm, prediction) == ("tree", approximate(model.predict(cost_model.share_of(gpus))))


def test_more_points_leave_less_to_the_priors() -> None:
    rows = [(1 / n, 1.0) for n in (1, 2, 4, 8, 16, 32, 64)]
    wrong = [Prior(median=30.0, factor=100.0), Prior(median=3.0, factor=10.0)]  # by a factor of 30
    fit = PositiveSum(rows=rows, values=[a + 0.1 for a, _ in rows], errors=[0.01] * len(rows), priors=wrong)
    assert fit.parameters == pytest.approx((1.0, 0.1), rel=0.02)


@pytest.mark.parametrize(
    ("batches", "parameters", "prediction"),
    [
        # 50 epochs with a critical batch of 40,000 samples, which needs 90 epochs at 32,000
        ((1_000, 4_000, 16_000, 64_000), (50.0421735, 0.00124532014), (89.8924179, 79.9896356, 101.046257)),
        ((1_000,), (46.1402, 0.0051096), (209.649, 50.878, 1787.29)),  # the priors decide
    ],
)
def test_epochs_follow_the_critical_batch(
    batches: tuple[int, ...], parameters: tuple[float, ...], prediction: tuple[float, ...]
) -> None:
    fit = fit_epochs([(batch, 50 * (1 + batch / 40_000)) for batch in batches])
    assert fit.parameters == pytest.approx(parameters, rel=1e-3)
    assert prediction == approximate(fit.predict((1.0, 32_000)))


def test_relative_errors_of_a_product_add_in_quadrature() -> None:
    result = cost_model.product([Prediction(2, 1, 8), Prediction(3, 2, 4)], 10)
    down, up = math.hypot(math.log(2), math.log(1.5)), math.hypot(math.log(4), math.log(4 / 3))
    assert (60, 60 * math.exp(-down), 60 * math.exp(up)) == approximate(result)
    assert [result.holds(value) for value in (result.low, result.high, result.low * 0.999)] == [True, True, False]


@pytest.mark.parametrize(
    ("minutes", "message"),
    [
        ({8: 1.0}, "at least two numbers of GPUs"),
        ({1: 1.0, 2: math.nan}, "a positive time"),
        ({1: 0.0, 2: 1.0}, "a positive time"),
    ],
)
def test_points_that_cannot_be_fitted_are_rejected(minutes: dict[int, float], message: str) -> None:
    with pytest.raises(EncoreError, match=message):
        cost_model.strong(minutes)


# -- published results ----------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", ["resnet", "ssd"])
def test_larger_counts_are_predicted_from_smaller_ones(benchmark: str) -> None:
    # Every published result of NVIDIA's on more than two nodes; docs/scaling.md has the predictions
    checks = validation.checks(benchmark)
    assert all(max(check.fitted_on) < check.measured.point.gpus and len(check.fitted_on) >= 2 for check in checks)
    results = {
        result.name
        for result in load_published()
        if (result.benchmark, result.submitter, result.round in ("v0.6", "v0.7")) == (benchmark, "NVIDIA", True)
        and (result.hardware.nodes or 1) > 2
        and result.score_minutes
    }
    assert results and results <= {check.measured.cell.name for check in checks}


def test_step_of_a_published_result_is_the_time_divided_by_the_steps() -> None:
    series = next(series for series in validation.SERIES if series.name == "v0.7 NVIDIA A100")
    eight = validation.published_points(series, "resnet")[0]
    assert (eight.point.gpus, eight.point.samples_per_gpu, eight.epochs) == (8, 408, 41)
    assert eight.point.time == pytest.approx(39.7797 * 60 / (41 * 1_281_167 / 3264), rel=1e-3)
    with pytest.raises(EncoreError, match="did you mean 'resnet'"):
        validation.checks("resnt")
