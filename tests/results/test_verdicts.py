"""Statistics against known answers, verdicts by their properties, and the calibration that docs/compare.md states."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from encore.results.compare.compare import Verdict, decide, factor_of, length_factor
from encore.results.published.tables import load_calibration
from encore.results.statistics import Outcome, Sample, further_runs, interval, ratio_of, z_score
from tools.calibrate_verdicts import POPULATIONS, Runs, simulated, tally, verdict_of

A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"
GNMT = "v0.7/NVIDIA/dgxa100_ngc20.06_pytorch"
WITHIN = 0.05

# --- statistics -------------------------------------------------------------------------------------------


def test_interval_of_a_mean_is_students() -> None:
    values = [39.4, 40.1, 39.9, 40.6, 39.3, 41.0, 40.2]
    expected = stats.t.interval(0.90, len(values) - 1, loc=sum(values) / len(values), scale=stats.sem(values))
    assert interval(Sample.of(values)) == pytest.approx(expected)


def test_ratio_of_plain_means_is_welchs() -> None:
    """The delta method on logarithms, with the degrees of freedom that scipy gives Welch's test."""
    ours, theirs = [41.0, 42.0, 41.4, 41.9], [39.4, 40.1, 39.9, 40.6, 39.3]
    found = ratio_of(Sample.of(ours), Sample.of(theirs))
    one, two = (Sample.of(values) for values in (ours, theirs))
    scaled = [[value / sample.estimate for value in values] for values, sample in ((ours, one), (theirs, two))]
    assert found.freedom == pytest.approx(stats.ttest_ind(*scaled, equal_var=False).df)
    assert found.error == pytest.approx(math.hypot(stats.sem(scaled[0]), stats.sem(scaled[1])))
    low, high = found.interval() or (0.0, 0.0)
    half = stats.t.ppf(0.95, found.freedom) * (found.error or 0.0)
    assert (math.log(low), math.log(high)) == pytest.approx((found.log - half, found.log + half))


def test_trimmed_mean_is_scipys_and_its_error_the_larger_of_two() -> None:
    values = [18.3, 18.4, 18.5, 18.5, 18.6, 18.7, 18.4, 18.5, 23.2, 18.6]
    sample = Sample.of(values, trimmed=1)
    assert sample.estimate == pytest.approx(stats.trim_mean(values, 0.1))
    assert sample.spread == pytest.approx(stats.tstd(values))
    # One slow run: the plain error is larger.
    assert sample.relative_error == pytest.approx(stats.sem(values) / sample.estimate)
    halves = [4.0, 5.0, 4.0, 5.0, 4.0]
    # Two of five: the winsorized one is.
    winsorized = stats.tstd([4.0, 4.0, 4.0, 5.0, 5.0])
    robust = winsorized * math.sqrt(4 / (3 * 2))
    assert robust > stats.sem(halves)
    assert Sample.of(halves, trimmed=1).relative_error == pytest.approx(robust / stats.trim_mean(halves, 0.2))


def test_z_score_by_hand() -> None:
    """(103 - 100) / (2 * sqrt(1/4 + 1/12))."""
    ours = Sample(estimate=103.0, spread=9.0, count=4)
    theirs = Sample(estimate=100.0, spread=2.0, count=12)
    assert z_score(ours, theirs) == pytest.approx(3 / (2 * math.sqrt(1 / 3)))
    assert z_score(ours, Sample(estimate=100.0, spread=None, count=5)) is None


def test_two_one_sided_tests_by_hand() -> None:
    """The larger p-value of both is below 5 % just where the verdict is reproduced, and its complement is shown."""
    ours, theirs = Sample.of([40.2, 40.6, 39.9, 40.4, 40.1]), Sample.of([39.4, 40.1, 39.9, 40.6, 39.3])
    found = ratio_of(ours, theirs)
    for within in (0.005, 0.01, 0.02, 0.03, 0.05):
        margin = math.log1p(within)
        p = max(stats.t.sf((margin + sign * found.log) / found.error, found.freedom) for sign in (-1, 1))
        assert (found.outcome(within) is Outcome.WITHIN) == (p <= 0.05)
        if p <= 0.05:
            assert found.confidence(within) == pytest.approx(1 - p)


def test_one_run_takes_the_spread_of_the_submission_and_one_without_runs_takes_ours() -> None:
    theirs = Sample.of([39.0, 40.0, 41.0, 40.5, 39.5])
    assert interval(Sample.of([42.0])) is None
    low, high = interval(Sample.of([42.0]).with_spread_of(theirs)) or (0.0, 0.0)
    half = 42.0 * (theirs.cv or 0.0) * stats.t.ppf(0.95, 4)
    assert (low, high) == pytest.approx((42 - half, 42 + half))
    alone = ratio_of(Sample.of([42.0]), theirs)
    published = ratio_of(theirs, Sample(estimate=42.0, spread=None, count=1))
    assert alone.error == published.error
    assert alone.freedom == published.freedom == 4
    nothing = ratio_of(Sample.of([42.0]), Sample(estimate=40.0, spread=None, count=5))
    assert nothing.outcome(WITHIN) is Outcome.UNDECIDED
    assert nothing.interval() is None


def test_further_runs_decide_as_soon_as_they_say() -> None:
    """The number found is the first at which a set of the same mean and spread is decided."""
    ours = Sample(estimate=101.0, spread=6.0, count=5)
    theirs = Sample(estimate=100.0, spread=3.0, count=10)
    more = further_runs(ours, theirs, WITHIN)
    assert more > 1

    def undecided(count: int) -> bool:
        found = ratio_of(Sample(estimate=101.0, spread=6.0, count=count), theirs)
        return found is not None and found.outcome(WITHIN) is Outcome.UNDECIDED

    assert undecided(5 + more - 1)
    assert not undecided(5 + more)
    assert further_runs(Sample(estimate=100.0, spread=0.5, count=5), theirs, WITHIN) == 0
    assert further_runs(Sample(estimate=104.9, spread=6.0, count=5), theirs, WITHIN) is None
    assert further_runs(Sample.of([100.0]), Sample(estimate=100.0, spread=None, count=5), WITHIN) is None


ANY = st.floats(min_value=0.0, max_value=1.7e308) | st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1e300, math.inf])


@settings(max_examples=300, deadline=None)
@given(ours=st.lists(ANY, min_size=1, max_size=6), theirs=st.lists(ANY, min_size=1, max_size=6))
def test_no_numbers_raise_anything(ours: list[float], theirs: list[float]) -> None:
    for trimmed in (0, 1):
        samples = Sample.of(ours, trimmed), Sample.of(theirs, trimmed)
        score = factor_of("time", "min", *samples)
        further_runs(*samples, WITHIN)
        interval(samples[0])
        if score is not None and score.interval is not None:
            assert all(math.isfinite(end) for end in score.interval)
            assert score.interval[0] <= score.interval[1]


def test_more_spread_than_mean_and_none_at_all() -> None:
    wild = ratio_of(Sample.of([1.0, 2.0, 400.0, 1.5, 3.0], 1), Sample.of([2.0, 2.0, 2.0, 2.0, 2.0], 1))
    assert wild.outcome(WITHIN) is Outcome.UNDECIDED
    same = ratio_of(Sample.of([2.0] * 5), Sample.of([2.0] * 5))
    assert same.interval() == (1.0, 1.0)
    assert same.confidence(WITHIN) == 1.0
    assert ratio_of(Sample.of([2.2] * 5), Sample.of([2.0] * 5)).outcome(WITHIN) is Outcome.ABOVE


# --- properties of verdicts -------------------------------------------------------------------------------

RUNS = st.lists(
    st.tuples(st.floats(min_value=30.0, max_value=60.0), st.integers(min_value=30, max_value=50).map(float)),
    min_size=1,
    max_size=10,
)
MIRRORED = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}


@settings(max_examples=150, deadline=None)
@given(ours=RUNS, theirs=RUNS, unit=st.sampled_from([1e-3, 0.25, 60.0, 1e6]))
def test_the_unit_of_time_does_not_matter(ours: Runs, theirs: Runs, unit: float) -> None:
    scaled = [[(minutes * unit, epochs) for minutes, epochs in runs] for runs in (ours, theirs)]
    assert verdict_of(*scaled) is verdict_of(ours, theirs)


@settings(max_examples=150, deadline=None)
@given(ours=RUNS, theirs=RUNS)
def test_swapping_the_sides_mirrors_the_verdict(ours: Runs, theirs: Runs) -> None:
    if min(len(ours), len(theirs)) > 1:
        here, there = verdict_of(ours, theirs), verdict_of(theirs, ours)
        assert there is MIRRORED.get(here, here)


@settings(max_examples=150, deadline=None)
@given(ours=RUNS, theirs=RUNS, margins=st.tuples(st.floats(0.001, 1.0), st.floats(0.001, 1.0)))
def test_a_wider_margin_never_takes_reproduced_back(ours: Runs, theirs: Runs, margins: tuple[float, float]) -> None:
    score = factor_of("time", "min", *(Sample.of([minutes for minutes, _ in runs]) for runs in (ours, theirs)))
    narrow, wide = (decide(score, None, None, within, single=False)[0] for within in sorted(margins))
    if narrow is Verdict.REPRODUCED:
        assert wide is Verdict.REPRODUCED
    if wide in MIRRORED:
        assert narrow is wide


def test_more_runs_of_the_same_spread_are_called_reproduced_more_often() -> None:
    population = POPULATIONS["time per epoch, spread 2 %"]
    shares = []
    for count in (2, 3, 5, 10, 20):
        found = tally(simulated("more", (count, count), 300, (population, population)), 0.0)
        shares.append(found["reproduced"])
    assert shares == sorted(shares)
    assert shares[-1] == 300


def test_one_run_shows_no_difference_in_epochs() -> None:
    """All submitted runs took 40 epochs and ours 44: that may be chance. A slower epoch is not."""
    theirs = [(40.0 + 0.01 * n, 40.0) for n in range(5)]
    assert verdict_of([(44.0, 44.0)], theirs) is Verdict.UNDECIDED
    assert verdict_of([(44.0, 40.0)], theirs) is Verdict.SLOWER
    assert verdict_of([(44.0, 44.0), (44.01, 44.0), (43.99, 44.0)], theirs) is Verdict.CONVERGES_DIFFERENTLY
    alone = length_factor("epochs", Sample.of([44.0]), Sample.of([40.0] * 5))
    assert alone.interval is None


# --- comparisons ------------------------------------------------------------------------------------------


def test_a_factor_alone_decides_nothing(tmp_path: Path) -> None:
    """An epoch 6 % slower, a tenth fewer epochs in two runs of five: the time is what was submitted."""
    score = factor_of("time", "min", Sample.of([40.0, 40.1, 39.9]), Sample.of([40.0, 40.1, 39.9]))
    slow = factor_of("minutes per epoch", "min", Sample.of([1.10, 1.101, 1.099]), Sample.of([1.0, 1.001, 0.999]))
    assert slow.is_beyond(WITHIN)
    assert decide(score, slow, None, WITHIN, single=False)[0] is Verdict.REPRODUCED
    open_score = factor_of("time", "min", Sample.of([40.0, 46.0, 49.0]), Sample.of([40.0, 41.1, 39.9]))
    assert decide(open_score, slow, None, WITHIN, single=False)[0] is Verdict.UNDECIDED


# --- calibration ------------------------------------------------------------------------------------------


def share(line: dict[str, str], what: str) -> float:
    return int(line[what]) / int(line["trials"])


def test_stated_rates_hold() -> None:
    """What docs/compare.md says of the table: the rates of error, with three standard errors for the trials."""
    lines = [line for line in load_calibration() if line["apart"] != "shift"]
    assert {line["population"] for line in lines} > {*POPULATIONS}
    for line in lines:
        slack = 3 * math.sqrt(0.05 * 0.95 / int(line["trials"]))
        if line["apart"] == "0":
            assert share(line, "different") <= 0.02, line
        else:
            assert share(line, "reproduced") <= 0.05 + slack, line
        if line["apart"] == "0.05":
            assert share(line, "different") <= 0.05 + slack, line
        if line["apart"] in ("0.1", "0.2"):
            assert share(line, "reproduced") <= 0.03, line


def test_the_table_is_that_of_the_seed() -> None:
    """Whoever measures again finds the same numbers."""
    name = "time per epoch, spread 1 %"
    line = next(line for line in load_calibration() if line["population"] == name and line["apart"] == "0.05")
    sizes = int(line["ours"]), int(line["theirs"])
    found = tally(simulated(name, sizes, int(line["trials"]), (POPULATIONS[name], POPULATIONS[name])), 0.05)
    assert {what: str(found[what]) for what in ("trials", "reproduced", "different")}.items() <= line.items()
