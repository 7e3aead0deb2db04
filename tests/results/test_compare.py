"""The verdicts of comparisons, and which submission a run is compared with."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from encore import catalogue
from encore.errors import EncoreError
from encore.results.compare.compare import (
    SAME_RUNS,
    Comparison,
    Verdict,
    compare,
    compare_with,
    decide,
    factor_of,
    length_factor,
)
from encore.results.compare.explain import Difference, explain
from encore.results.compare.nearest import AS_GIVEN, How, Match, find_submission
from encore.results.compare.sides import Side, load_side, load_sides, side_of, submission
from encore.results.findings import Finding
from encore.results.logs.timing import phases_of
from encore.results.published.published import load_published
from encore.results.published.tables import load_calibration
from encore.results.scores.score import Lack, Score, find_sets
from encore.results.statistics import Outcome, Sample, further_runs, interval, ratio_of, z_score
from tests.results.result_logs import a100_texts, resnet_v07, timed_log, write_set
from tools.calibrate_verdicts import POPULATIONS, Runs, simulated, tally, verdict_of

A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"


# --- verdicts ---------------------------------------------------------------------------------------------


# Set of runs that says it is NVIDIA's DGX A100.
def a100_run(folder: Path, *arguments: float, **changed: object) -> Path:
    return write_set(folder, a100_texts(*arguments, **changed))


def verdict(folder: Path, name: str | None = A100) -> Comparison:
    return compare(load_side(folder), name)


# NCF of v0.5 scores the first 50 of 100 runs that converge, and says so in words of its own.
def test_a_set_with_too_few_runs_that_converged_has_not_converged(tmp_path: Path) -> None:
    score = Score(
        folder=tmp_path, round="v0.5", benchmark="ncf", runs=(), required=100, lack=Lack.NOT_CONVERGED, missing="?"
    )
    side = replace(side_of(score), score=Sample.of([1.0, 1.1]), runs=100, converged=40)
    cell = next(each for each in load_published() if (each.round, each.benchmark) == ("v0.5", "ncf"))
    assert compare_with(side, submission(cell), Match(How.OWN_SYSTEM, "?")).verdict is Verdict.NOT_CONVERGED


# --- finding the submission -------------------------------------------------------------------------------


# Logs that say nothing of their hardware are compared with no system, whatever their time is near to.
@pytest.mark.slow
def test_the_time_does_not_choose_the_submission(tmp_path: Path) -> None:
    platform = {"submission_platform": "box", "global_batch_size": 1632}
    found = [
        verdict(a100_run(tmp_path / f"{minutes}", minutes, spread=0.004 * minutes, **platform), None)
        for minutes in (105.5, 39.8, 23.7, 4.1, 0.77)
    ]
    assert {each.verdict for each in found} == {Verdict.NOT_COMPARABLE}
    assert len({(each.theirs.label, each.match.text, each.reasons[0]) for each in found}) == 1
    known = [verdict(a100_run(tmp_path / f"a100-{minutes}", minutes), None) for minutes in (30.0, 50.0)]
    assert known[0].theirs.label == known[1].theirs.label


# The same logs, in any order and folder; the same times with other qualities; a doubtful set; another division.
def test_two_sets_of_logs_against_each_other(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    box = a100_run(tmp_path / "a", submission_platform="box")
    texts = [path.read_text("utf-8") for path in sorted(box.iterdir())]
    unknown = load_side(box)
    doubtful = replace(unknown, findings=(Finding(line=None, rule="late_start", expected="", found="", hint=""),))
    others = {
        "reversed": load_side(write_set(tmp_path / "d", texts[::-1])),
        "other qualities": load_side(write_set(tmp_path / "c", [each.replace("0.7605", "0.7606") for each in texts])),
        "open": load_side(a100_run(tmp_path / "b", 40.0, submission_division="open")),
    }
    found = {name: compare_with(unknown, other, AS_GIVEN) for name, other in others.items()}
    found["itself, doubtful"] = compare_with(doubtful, unknown, AS_GIVEN)
    found["other qualities, doubtful"] = compare_with(doubtful, others["other qualities"], AS_GIVEN)
    recorded("pairs.json", {name: [each.verdict.value, each.reasons, each.caveats] for name, each in found.items()})


# --- damaged input ----------------------------------------------------------------------------------------

BROKEN_NUMBERS = st.sampled_from(["0", "-1", "1e400", "NaN", "null", '"text"', "[]", "9" * 40, "1592669288183"])
BROKEN_VALUES = BROKEN_NUMBERS | st.sampled_from(
    ["{}", '[{"text": 1}, 2]', '{"submitted": true, "of": [], "kind": {}}']
)


# Only EncoreError, whatever numbers are in a log, a run.json or a system.json.
@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_logs_and_passports_raise_nothing(tmp_path: Path, data: st.DataObject) -> None:
    lines = resnet_v07(40.0, quality=(0.3, 0.5, 0.7605)).splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["drop", "double", "number", "move"]))
        if change == "drop":
            lines[at] = ""
        elif change == "double":
            lines[at] *= 2
        elif change == "move":
            lines.append(lines[at])
        else:
            lines[at] = re.sub(r"(?<=: )[\d.]+", data.draw(BROKEN_NUMBERS), lines[at])
    (tmp_path / "result_0.txt").write_text("".join(lines))
    value = data.draw(BROKEN_VALUES)
    names = ("nodes", "ranks_per_node", "node", "environment", "configuration", "deviations", "data", "submission")
    passport = ", ".join(f'"{name}": {value}' for name in names)
    (tmp_path / "run.json").write_text(f'{{"round": "v0.7", {passport}}}')
    (tmp_path / "system.json").write_text(f'{{"accelerators_per_node": {value}, "number_of_nodes": {value}}}')
    try:
        side = load_side(tmp_path)
        found = compare(side)
        json.dumps(found.as_json())
        if found.theirs is not None:
            explain(side, found.theirs)
    except EncoreError:
        pass


# --- the public logs --------------------------------------------------------------------------------------

# The archive holds one log of five or ten of these: what one run comes to is no score.
INCOMPLETE = {
    ("v0.6/NVIDIA/dgx1_ngc19.05_pytorch", "maskrcnn"): Verdict.UNDECIDED,
    ("v0.6/NVIDIA/dgx1_ngc19.05_tensorflow", "minigo"): Verdict.UNDECIDED,
    ("v0.7/NVIDIA/dgx1_ngc20.06_pytorch", "maskrcnn"): Verdict.REPRODUCED,
    ("v0.7/NVIDIA/dgx1_ngc20.06_pytorch", "bert"): Verdict.NOT_CONVERGED,
    ("v0.7/NVIDIA/dgxa100_ngc20.06_pytorch", "bert"): Verdict.UNDECIDED,
}


@pytest.mark.slow
def test_every_published_cell_is_recognized_by_its_own_logs(public_logs: Path) -> None:
    complete = 0
    for side in load_sides(public_logs):
        found = compare(side)
        cell = (found.theirs.label, side.benchmark)
        assert found.theirs.label == "/".join((side.folder or Path()).parts[-4:-1])
        if cell in INCOMPLETE:
            assert found.verdict is INCOMPLETE[cell], cell
            continue
        complete += 1
        assert found.verdict is Verdict.SAME_RUNS, cell
        assert found.reasons[0] == SAME_RUNS
        for factor in found.factors:
            assert factor.ratio == pytest.approx(1.0, abs=5e-4), (cell, factor.name)
    assert complete == 47


# Submitter, platform, framework and batch are enough for most cells of the archive; the others are named.
@pytest.mark.slow
def test_the_logs_are_found_without_their_folder_s_name(public_logs: Path, tmp_path: Path) -> None:
    elsewhere = []
    for number, (folder, files) in enumerate(find_sets(public_logs)):
        bare = tmp_path / str(number)
        bare.mkdir()
        for file in files:
            shutil.copyfile(file, bare / file.name)
        found = compare(load_side(bare))
        name = "/".join(folder.parts[-4:-1])
        if found.theirs is None or found.theirs.label != name:
            elsewhere.append(name)
            assert found.verdict is not Verdict.REPRODUCED, name
            assert "name one of them" in " ".join([*found.reasons, *found.caveats]), name
    assert len(elsewhere) == 12
    # Logs of v0.5 say nothing of hardware or batch, Dell's of v0.7 name a box.
    assert {name.split("/")[1] for name in elsewhere} == {"google", "nvidia", "DellEMC", "NVIDIA"}


@pytest.mark.slow
def test_submitted_logs_replace_what_is_kept_of_them(public_logs: Path, tmp_path: Path) -> None:
    folder = a100_run(tmp_path)
    kept = compare(load_side(folder), A100)
    read = compare(load_side(folder), A100, public_logs)
    assert read.theirs.logs
    assert [f.ratio for f in kept.factors] == pytest.approx([f.ratio for f in read.factors], rel=1e-6)


def test_every_published_name_is_found_as_named(tmp_path: Path) -> None:
    side = load_side(a100_run(tmp_path))
    cells = [cell for cell in load_published() if cell.benchmark == "resnet" and cell.score_minutes]
    for cell in cells[::7]:
        found = compare(side, cell.name)
        assert found.theirs.label == cell.name


def test_a_submission_that_nobody_made_offers_five_of_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as refused:
        find_submission(load_side(a100_run(tmp_path)), "nonsense")
    offered = refused.value.expected.partition(", such as ")[2].split(", ")
    assert len(offered) == 5
    assert set(offered) <= {cell.name for cell in load_published() if cell.benchmark == "resnet"}


def one(folder: Path, text: str) -> Side:
    return load_side(write_set(folder, [text]))


# Runs that vary, of which one missed its target: medians of the phases would add up to another one.
def test_the_shares_of_the_phases_add_up_to_the_ratio_that_compare_prints(tmp_path: Path) -> None:
    logs = [timed_log(60.0 + 2 * n**2, 3.0 + n, 4 + n % 2, seed=n) for n in range(4)]
    missed = timed_log(60.0, 3.0).replace('"success"', '"aborted"').replace("0.761", "0.7")
    ours = load_side(write_set(tmp_path / "a", [*logs, missed]))
    theirs = load_side(write_set(tmp_path / "b", [timed_log(50.0 + n, 9.0, seed=n) for n in (0, 1, 2, 4, 9)]))
    compared, clock = compare_with(ours, theirs, AS_GIVEN), ("start of training", "training", "evaluation")
    assert compared.score.ratio == pytest.approx((335 + 297 + 425) / (245 + 249 + 257))
    shares = [
        float(each.sentence.split(", ")[-1].split("%")[0]) / 100
        for each in explain(ours, theirs).differences
        if each.name in clock
    ]
    assert sum(shares) == pytest.approx(compared.score.ratio - 1, abs=0.0015)
    assert compared.per_length.ratio * compared.lengths.ratio == pytest.approx(compared.score.ratio)
    scaled = compare_with(replace(ours, scaling_factor=1.02), replace(theirs, scaling_factor=1.0), AS_GIVEN)
    assert math.prod(each.ratio or 0.0 for each in scaled.factors[1:]) == pytest.approx(scaled.factors[0].ratio)
    assert len(scaled.factors) == 4
    (factor,) = (each.sentence for each in explain(scaled.ours, theirs).differences if each.area == "score")
    assert factor.startswith("factor of the reference convergence: 1.02, theirs 1: the official score is the time")


# Its train_samples are those until the target; of other benchmarks they are the data set's.
def test_the_samples_that_bert_took_are_no_setting(tmp_path: Path) -> None:
    sides = [
        one(tmp_path / name, timed_log(60, 3, train_samples=n)) for name, n in (("a", 1_281_167), ("b", 1_300_000))
    ]
    assert [each.name for each in explain(*sides).differences] == ["train_samples"]
    bert = [replace(side, benchmark="bert") for side in sides]
    assert explain(*bert).differences == ()


def passport(folder: Path, **changed: object) -> Path:
    content = {
        "round": "v0.7",
        "nodes": 1,
        "ranks_per_node": 2,
        "runtime": "host",
        "environment": {"NCCL_DEBUG": "INFO"},
        "code": {"commit": "a" * 40},
        "data": {"name": "digits", "id": "1"},
        "configuration": {"precision": {"value": "fp32", "origin": "default"}},
        **changed,
    }
    (folder / "run.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("choices", [3, [], {"0": 1}, {"0": {"kernels": None}}, {"0": {"kernels": [1]}}])
def test_choices_of_a_foreign_run_json_are_no_traceback(tmp_path: Path, choices: object) -> None:
    write_set(tmp_path, [timed_log(60, 3)])
    passport(tmp_path, choices=choices)
    assert set(load_side(tmp_path).choices) <= {"kernels"}


# What rank 0 saw counts before what was given.
def test_the_environment_of_a_submission_is_that_of_its_system(tmp_path: Path) -> None:
    write_set(tmp_path, [timed_log(60, 3)])
    system = catalogue.find_system(catalogue.choose("resnet"), "dgx1", "v0.7")
    given = {name: value for variables in system.environment.values() for name, value in variables.items()}
    passport(tmp_path, name="resnet", environment=given, rank_environment={"HOROVOD_CYCLE_TIME": "5"})
    theirs = compare(load_side(tmp_path), "v0.7/NVIDIA/dgx1_ngc20.06_mxnet").theirs
    found = [each for each in explain(load_side(tmp_path), theirs).differences if each.area == "environment"]
    assert [(each.name, each.ours, each.theirs) for each in found] == [("environment.HOROVOD_CYCLE_TIME", "5", "0.1")]


# DellEMC's DSS8440 against the DGX-1: another card, and a faster evaluation.
def test_against_a_submission_by_what_is_kept_of_its_logs(public_logs: Path) -> None:
    ours = load_side(public_logs / "v0.7" / "DellEMC" / "DSS8440" / "resnet")
    theirs = compare(ours, "v0.7/NVIDIA/dgx1_ngc20.06_mxnet").theirs
    by_name: dict[str, Difference] = {each.name: each for each in explain(ours, theirs).differences}
    assert by_name["accelerator"].area == "topology"
    assert by_name["evaluation"].ratio == pytest.approx(32.7 / 41.5, rel=0.01)


@pytest.mark.slow
def test_phases_of_every_public_set_are_sensible(public_logs: Path) -> None:
    for side in load_sides(public_logs):
        for run in side.logs:
            phases = phases_of(run)
            if run.elapsed_minutes is not None and "train_s" in phases:
                total = sum(phases.get(name, 0.0) for name in ("start_s", "train_s", "evaluate_s"))
                assert total == pytest.approx(run.elapsed_minutes * 60, abs=0.01)
                assert phases["train_s"] >= 0, run.path


DGX_A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"
GNMT = "v0.7/NVIDIA/dgxa100_ngc20.06_pytorch"
WITHIN = 0.05

# --- statistics -------------------------------------------------------------------------------------------


def test_interval_of_a_mean_is_students() -> None:
    values = [39.4, 40.1, 39.9, 40.6, 39.3, 41.0, 40.2]
    expected = stats.t.interval(0.90, len(values) - 1, loc=sum(values) / len(values), scale=stats.sem(values))
    assert interval(Sample.of(values)) == pytest.approx(expected)


# The delta method on logarithms, with the degrees of freedom that scipy gives Welch's test.
def test_ratio_of_plain_means_is_welchs() -> None:
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


# (103 - 100) / (2 * sqrt(1/4 + 1/12)).
def test_z_score_by_hand() -> None:
    ours = Sample(estimate=103.0, spread=9.0, count=4)
    theirs = Sample(estimate=100.0, spread=2.0, count=12)
    assert z_score(ours, theirs) == pytest.approx(3 / (2 * math.sqrt(1 / 3)))
    assert z_score(ours, Sample(estimate=100.0, spread=None, count=5)) is None


# The larger p-value of both is below 5 % just where the verdict is reproduced, and its complement is shown.
def test_two_one_sided_tests_by_hand() -> None:
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


# The number found is the first at which a set of the same mean and spread is decided.
def test_further_runs_decide_as_soon_as_they_say() -> None:
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# All submitted runs took 40 epochs and ours 44: that may be chance. A slower epoch is not.
def test_one_run_shows_no_difference_in_epochs() -> None:
    theirs = [(40.0 + 0.01 * n, 40.0) for n in range(5)]
    assert verdict_of([(44.0, 44.0)], theirs) is Verdict.UNDECIDED
    assert verdict_of([(44.0, 40.0)], theirs) is Verdict.SLOWER
    assert verdict_of([(44.0, 44.0), (44.01, 44.0), (43.99, 44.0)], theirs) is Verdict.CONVERGES_DIFFERENTLY
    alone = length_factor("epochs", Sample.of([44.0]), Sample.of([40.0] * 5))
    assert alone.interval is None


# --- comparisons ------------------------------------------------------------------------------------------


# An epoch 6 % slower, a tenth fewer epochs in two runs of five: the time is what was submitted.
def test_a_factor_alone_decides_nothing(tmp_path: Path) -> None:
    score = factor_of("time", "min", Sample.of([40.0, 40.1, 39.9]), Sample.of([40.0, 40.1, 39.9]))
    slow = factor_of("minutes per epoch", "min", Sample.of([1.10, 1.101, 1.099]), Sample.of([1.0, 1.001, 0.999]))
    assert slow.is_beyond(WITHIN)
    assert decide(score, slow, None, WITHIN, single=False)[0] is Verdict.REPRODUCED
    open_score = factor_of("time", "min", Sample.of([40.0, 46.0, 49.0]), Sample.of([40.0, 41.1, 39.9]))
    assert decide(open_score, slow, None, WITHIN, single=False)[0] is Verdict.UNDECIDED


# --- calibration ------------------------------------------------------------------------------------------


def share(line: dict[str, str], what: str) -> float:
    return int(line[what]) / int(line["trials"])


# What docs/compare.md says of the table: the rates of error, with three standard errors for the trials.
def test_stated_rates_hold() -> None:
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


# Whoever measures again finds the same numbers.
def test_the_table_is_that_of_the_seed() -> None:
    name = "time per epoch, spread 1 %"
    line = next(line for line in load_calibration() if line["population"] == name and line["apart"] == "0.05")
    sizes = int(line["ours"]), int(line["theirs"])
    found = tally(simulated(name, sizes, int(line["trials"]), (POPULATIONS[name], POPULATIONS[name])), 0.05)
    assert {what: str(found[what]) for what in ("trials", "reproduced", "different")}.items() <= line.items()
