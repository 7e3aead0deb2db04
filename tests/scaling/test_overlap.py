"""What overlap saves: limits of the model, and its bytes and links written down a second time."""

import pytest

from encore.lab.scaling.overlap import DGX_H100, Links, lost, measured_steps, overlap_table, sum_seconds, sums_table
from encore.run.published_speed import Step

SLOW = Links(inside=1e9, between=1e8, gpus=4)


def step(seconds: float, megabytes: int) -> Step:
    return Step(parameters=megabytes * 1_000_000 // 2, samples=1, samples_per_second=1 / seconds, source="")


@pytest.mark.parametrize(
    ("gpus", "seconds"),
    [
        (1, 0.0),
        (2, 2 * 1 / 2 * 0.1),
        (4, 2 * 3 / 4 * 0.1),
        # Two nodes: each GPU carries a fourth of the gradient between them.
        (8, 2 * 3 / 4 * 0.1 + 2 * 1 / 2 / 4 * 1.0),
        (16, 2 * 3 / 4 * 0.1 + 2 * 3 / 4 / 4 * 1.0),
    ],
)
def test_a_sum_takes_its_bytes_over_the_links(gpus: int, seconds: float) -> None:
    assert sum_seconds(1e8, gpus, SLOW) == pytest.approx(seconds)


def test_a_long_backward_pass_hides_all_but_the_last_bucket() -> None:
    long, size = step(100.0, 100), 100e6 / (25 << 20)
    assert lost(long, 4, SLOW, overlap=False) == pytest.approx(0.15)
    assert lost(long, 4, SLOW, overlap=True) == pytest.approx(0.15 / size)


def test_a_short_one_hides_its_own_time_and_small_gradients_nothing() -> None:
    short = step(0.06, 100)
    assert lost(short, 4, SLOW, overlap=True) == pytest.approx(0.15 - 0.04 * (1 - (25 << 20) / 100e6))
    small = step(0.06, 20)
    assert lost(small, 4, SLOW, overlap=True) == lost(small, 4, SLOW, overlap=False)


def test_tables() -> None:
    rows = overlap_table().rows
    assert len(rows) == len(measured_steps()) * 2 * 3 == 24
    assert all(0 <= float(row[-1] or 0) < 0.25 for row in rows)
    first = rows[0]
    bert = 336_232_258 * 2 * 2 * 7 / 8 / (18 * 20.6e9)
    assert first[5] == pytest.approx(bert * 1e3) and DGX_H100.between == 50e9
    assert sums_table(2, 1e9).rows[0][2] == pytest.approx(336_232_258 * 2 / 1e9 * 1e3)
