"""Time of the all-reduce of the gradients: bytes over links, what overlap hides, and the tables."""

import pytest

from encore.lab.scaling.overlap import DGX_H100, Links, lost, overlap_table, sum_seconds, sums_table
from encore.run.published_speed import Step

SLOW = Links(inside=1e9, between=1e8, gpus=4)


def step(seconds: float, megabytes: int) -> Step:
    return Step(parameters=megabytes * 1_000_000 // 2, samples=1, samples_per_second=1 / seconds, source="")


# A ring of n sends 2 (n - 1) / n of 100 MB; between two nodes each of the four GPUs sends a fourth of the gradient.
@pytest.mark.parametrize(("gpus", "seconds"), [(1, 0.0), (2, 0.1), (4, 0.15), (8, 0.4), (16, 0.525)])
def test_all_reduce_takes_its_bytes_over_the_links(gpus: int, seconds: float) -> None:
    assert sum_seconds(1e8, gpus, SLOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "megabytes", "without", "overlapped"),
    [
        (100.0, 100, 0.15, 0.15 * 0.262144),  # all but the last of the buckets of 25 MiB is hidden
        (0.06, 100, 0.15, 0.15 - 0.04 * (1 - 0.262144)),  # what takes longer than the backward pass is not
        (0.06, 20, 0.03, 0.03),  # less than a bucket
    ],
)
def test_overlap_hides_full_buckets_in_the_backward_pass(
    seconds: float, megabytes: int, without: float, overlapped: float
) -> None:
    times = [lost(step(seconds, megabytes), 4, SLOW, overlap=overlap) for overlap in (False, True)]
    assert times == pytest.approx([without, overlapped])


def test_tables() -> None:
    rows = overlap_table().rows
    assert (len(rows), DGX_H100.between) == (24, 50e9)
    assert all(0 <= float(row[-1] or 0) < 0.25 for row in rows)
    # The 336,232,258 parameters of BERT in fp16: 8 GPUs by 18 NVLinks of 20.6 GB/s, 64 GPUs also by 50 GB/s
    assert rows[0][:5] == ("bert", pytest.approx(672.464516), 256, pytest.approx(406.671962), 8)
    assert [row[5:] for row in rows[:4:3]] == [
        pytest.approx((3.17371333, 0.123719525, 0.00744181039)),
        pytest.approx((3.17371333, 0.123719525, 0.106677788)),
    ]
    assert rows[1][5] == pytest.approx(6.11574559)
    assert [sums_table(ranks, 1e9).rows[0][2] for ranks in (2, 8)] == pytest.approx([672.464516, 1176.812903])
