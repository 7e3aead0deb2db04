"""Statistics and verdicts of comparisons, the choice of the submission, and the band that seeds make of losses."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encore import catalogue
from encore.results.compare.compare import Verdict, compare, compare_with, decide, make_factor
from encore.results.compare.explain import explain
from encore.results.compare.loss_curve import loss_verdict
from encore.results.compare.nearest import AS_GIVEN, How, Match
from encore.results.compare.noise import (
    LEVEL,
    Series,
    losses_of,
    noise_of,
    run_in_band,
)
from encore.results.compare.run_set import RunSet, digests, load_run_set
from encore.results.findings import Finding
from encore.results.published.published import System
from encore.results.statistics import Outcome, Sample, further_runs, interval, ratio_of, z_score
from tests.command_line import output_of
from tests.results.result_logs import a100_texts, log_of, mllog, timed_log, write_files, write_set
from tools.calibrate_verdicts import Runs, verdict_of

A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"
MARGIN = 0.05
UNKNOWN = Sample(estimate=100.0, spread=None, count=5)


def load_texts(folder: Path, *texts: str) -> RunSet:
    return load_run_set(write_set(folder, list(texts)))


# --- statistics -------------------------------------------------------------------------------------------


def test_means_and_ratios_equal_those_of_scipy() -> None:
    # All expected values are from scipy 1.16: t.interval and sem, ttest_ind(equal_var=False) on logarithms (delta
    # method), trim_mean and tstd. The winsorized error is 0.5477 * sqrt(4 / 6) / 4.3333.
    ratio = ratio_of(Sample.of([41.0, 42.0, 41.4, 41.9]), Sample.of([39.4, 40.1, 39.9, 40.6, 39.3]))
    # The plain standard error of a sample with an outlier is the larger one
    outlier = Sample.of([18.3, 18.4, 18.5, 18.5, 18.6, 18.7, 18.4, 18.5, 23.2, 18.6], trimmed=1)
    winsorized = Sample.of([4.0, 5.0, 4.0, 5.0, 4.0], trimmed=1)
    assert [
        *interval(Sample.of([39.4, 40.1, 39.9, 40.6, 39.3, 41.0, 40.2])),
        *(ratio.freedom, ratio.error, *ratio.interval()),
        *(outlier.estimate, outlier.spread, outlier.relative_error, winsorized.estimate, winsorized.relative_error),
    ] == pytest.approx([
        39.62324307, 40.51961407, 6.9579646398, 0.008175642833, 1.02697975933, 1.05932212451,
        18.525, 1.49074925233, 0.02544757386, 4.33333333333, 0.10320313742,
    ])  # fmt: skip


# The larger p-value of two one-sided t tests with scipy 1.16, here 1 minus it.
@pytest.mark.parametrize(
    ("within", "outcome", "confidence"),
    [
        (0.01, Outcome.UNDECIDED, None), (0.02, Outcome.UNDECIDED, None), (0.03, Outcome.WITHIN, 0.98781576921),
        (0.05, Outcome.WITHIN, 0.99943305660),
    ],
)  # fmt: skip
def test_two_one_sided_tests(within: float, outcome: Outcome, confidence: float | None) -> None:
    ratio = ratio_of(Sample.of([40.2, 40.6, 39.9, 40.4, 40.1]), Sample.of([39.4, 40.1, 39.9, 40.6, 39.3]))
    assert (ratio.outcome(within), ratio.confidence(within)) == (outcome, pytest.approx(confidence))


def test_a_sample_without_spread_borrows_the_spread_of_the_other() -> None:
    theirs, single = Sample.of([39.0, 40.0, 41.0, 40.5, 39.5]), Sample.of([42.0])
    # 42 -+ 42 * 0.01976 * t.ppf(0.95, 4)
    assert interval(single.with_spread_of(theirs)) == pytest.approx((40.2303584898, 43.7696415102))
    ratios = (ratio_of(single, theirs), ratio_of(theirs, single))
    assert [(ratio.error, ratio.freedom) for ratio in ratios] == [(pytest.approx(0.0216506350946), 4)] * 2
    unknown = ratio_of(single, UNKNOWN)
    assert (unknown.outcome(MARGIN), unknown.interval(), interval(single)) == (Outcome.UNDECIDED, None, None)
    # (103 - 100) / (2 * sqrt(1/4 + 1/12))
    three_percent, spread = Sample(estimate=103.0, spread=9.0, count=4), Sample(estimate=100.0, spread=2.0, count=12)
    scores = [z_score(three_percent, reference) for reference in (spread, UNKNOWN)]
    assert scores == [pytest.approx(1.5 * math.sqrt(3)), None]


@pytest.mark.parametrize(
    ("estimate", "spread", "count", "further"),
    [(101.0, 6.0, 5, 5), (101.0, 6.0, 9, 1), (101.0, 6.0, 10, 0), (100.0, 0.5, 5, 0), (104.9, 6.0, 5, None)],
)
def test_number_of_further_runs_until_the_ratio_is_decided(
    estimate: float, spread: float, count: int, further: int | None
) -> None:
    samples = (
        Sample(estimate=estimate, spread=spread, count=count),
        Sample(estimate=100.0, spread=3.0, count=10),
    )
    is_undecided = ratio_of(*samples).outcome(MARGIN) is Outcome.UNDECIDED
    assert (further_runs(*samples, MARGIN), is_undecided) == (further, further != 0)
    assert further_runs(Sample.of([100.0]), UNKNOWN, MARGIN) is None


EXTREME = ([0.0], [0.0, 5e-324], [1e-300, 1.0, 1e300], [1.7e308] * 3, [math.inf, 1.0], [2.0] * 5, [1.0, 2.0, 400.0])


@pytest.mark.parametrize(("ours", "theirs"), [*product(EXTREME, EXTREME)], ids=str)
def test_extreme_times_have_a_finite_interval_or_none(ours: list[float], theirs: list[float]) -> None:
    for trimmed in (0, 1):
        samples = Sample.of(ours, trimmed), Sample.of(theirs, trimmed)
        assert further_runs(*samples, MARGIN) is None or interval(samples[0]) is not None
        factor = make_factor("time", "min", *samples)
        low, high = factor.interval if factor is not None and factor.interval is not None else (0, 1)
        assert 0 <= low <= high < math.inf


# --- verdicts ---------------------------------------------------------------------------------------------


RUNS = st.lists(st.tuples(st.floats(30.0, 60.0), st.integers(30, 50).map(float)), min_size=2, max_size=10)
MIRROR = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ours=RUNS, theirs=RUNS, unit=st.sampled_from([1e-3, 60.0]), margins=st.tuples(*[st.floats(0.001, 1.0)] * 2))
def test_verdicts_are_symmetric_and_independent_of_the_unit_of_time(
    ours: Runs, theirs: Runs, unit: float, margins: tuple[float, float]
) -> None:
    verdict = verdict_of(ours, theirs)
    in_unit = verdict_of(*([(unit * minutes, epochs) for minutes, epochs in runs] for runs in (ours, theirs)))
    assert (in_unit, verdict_of(theirs, ours)) == (verdict, MIRROR.get(verdict, verdict))
    score = make_factor("time", "min", *(Sample.of([minutes for minutes, _ in runs]) for runs in (ours, theirs)))
    narrow, wide = (decide(score, None, None, margin, single=False)[0] for margin in sorted(margins))
    assert narrow is wide or (narrow is not Verdict.REPRODUCED and wide not in MIRROR)


# --- comparisons ------------------------------------------------------------------------------------------


def test_two_sets_of_logs_against_each_other(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    texts = a100_texts(submission_platform="box")
    box = load_texts(tmp_path / "box", *texts)
    doubtful = replace(box, findings=(Finding(line=None, rule="late_start", expected="", found="", hint=""),))
    other = load_texts(tmp_path / "other", *(text.replace("0.7605", "0.7606") for text in texts))
    slower = load_texts(tmp_path / "slower", *a100_texts(41.0))
    pairs = {
        "reversed": (box, load_texts(tmp_path / "reversed", *texts[::-1]), AS_GIVEN),
        "other qualities": (box, other, AS_GIVEN),
        "open": (box, load_texts(tmp_path / "open", *a100_texts(40.0, submission_division="open")), AS_GIVEN),
        "itself, doubtful": (doubtful, box, AS_GIVEN),
        "other qualities, doubtful": (doubtful, other, AS_GIVEN),
        "nearest of unknown hardware": (
            load_texts(tmp_path / "ours", *a100_texts()),
            replace(slower, label="v0.7/Lab/box", hardware=System(described=False)),
            Match(How.NEAREST, "?"),
        ),
    }
    results = {name: compare_with(*sides) for name, sides in pairs.items()}
    recorded("pairs.json", {name: [each.verdict, each.reasons, each.caveats] for name, each in results.items()})


def test_phase_fractions_add_up_to_the_printed_ratio(tmp_path: Path) -> None:
    # Runs of different lengths, one of which missed its target: medians of the phases would add up to another ratio.
    runs = [timed_log(60.0 + 2 * n**2, 3.0 + n, 4 + n % 2, seed=n) for n in range(4)]
    missed = timed_log(60.0, 3.0).replace('"success"', '"aborted"').replace("0.761", "0.7")
    ours = load_texts(tmp_path / "a", *runs, missed)
    theirs = load_texts(tmp_path / "b", *(timed_log(50.0 + n, 9.0, seed=n) for n in (0, 1, 2, 4, 9)))
    result = compare_with(ours, theirs, AS_GIVEN)
    ratio = pytest.approx((335 + 297 + 425) / (245 + 249 + 257))
    assert [result.score.ratio, result.per_length.ratio * result.lengths.ratio] == [ratio, ratio]
    percent = sum(
        float(difference.sentence.split(", ")[-1].split("%")[0])
        for difference in explain(ours, theirs).differences
        if difference.name in ("start of training", "training", "evaluation")
    )
    assert percent == pytest.approx(100 * (result.score.ratio - 1), abs=0.15)


def test_train_samples_of_bert_are_no_hyperparameter(tmp_path: Path) -> None:
    # BERT logs the samples until the target, other benchmarks the size of the data set
    sides = [load_texts(tmp_path / str(n), timed_log(60, 3, train_samples=n)) for n in (1_281_167, 1_300_000)]
    assert [difference.name for difference in explain(*sides).differences] == ["train_samples"]
    assert explain(*(replace(side, benchmark="bert") for side in sides)).differences == ()


NAMES = (
    "global_batch_size", "opt_name", "kernels", "opt_base_learning_rate", "opt_learning_rate_warmup_epochs", "crop",
    "eval_interval", "dali_threads", "label", "seed", "environment.NCCL_DEBUG", "environment.PATH", "node.kernel",
    "data.id", "image", "ranks_per_node", "runtime",
)  # fmt: skip


def test_weight_of_every_kind_of_difference(recorded: Callable[[str, object], None]) -> None:
    # Numbers differ by a factor of 1.5, 0.5 or 4, one is missing, and one is equal but for rounding
    values = [dict(zip(NAMES, (2.0, 4.0, 2.0, 1.0, None) * 4, strict=False)), dict.fromkeys(NAMES, 3.0)]
    described = {item.name: f"{item.name} of a" for item in fields(System) if item.type == str | None}
    counts = {"described": True, "nodes": 1, "accelerators_per_node": 8, "cpus_per_node": 2, "cores_per_cpu": 64}
    software = dict.fromkeys(("cuda_version", "nccl_version", "driver", "python"), "1")
    system = System(**{**described, **counts, "software": software})
    other = replace(
        system, **{name: f"{text[:-1]}b" for name, text in described.items()}, nodes=2, cores_per_cpu=48,
        software=dict.fromkeys(software, "2"),
    )  # fmt: skip
    sides = [
        RunSet(
            label=label, round="v0.7", benchmark="resnet", hardware=hardware, hyperparameters=numbers, settings=numbers,
            phases={"start_s": start, "train_s": 600.0, "evaluate_s": 0.04 * start, "init_s": start, "epoch_s": start},
            scaling_factor=1 + start / 1000,
        )
        for label, hardware, numbers, start in zip("ab", (system, other), values, (30.0, 40.0), strict=True)
    ]  # fmt: skip
    recorded("weights.json", [[item.area, item.sentence, item.weight] for item in explain(*sides).differences])


# --- run.json ---------------------------------------------------------------------------------------------


def test_environment_of_rank_0_is_compared_with_that_of_the_system(tmp_path: Path) -> None:
    system = catalogue.find_system(catalogue.choose("resnet"), "dgx1", "v0.7")
    environment = {name: value for variables in system.environment.values() for name, value in variables.items()}
    passport = {
        "round": "v0.7", "nodes": 1, "ranks_per_node": 2, "name": "resnet", "environment": environment,
        "rank_environment": {"HOROVOD_CYCLE_TIME": "5"},
    }  # fmt: skip
    ours = load_run_set(write_files(tmp_path, {"result_0.txt": timed_log(60, 3), "run.json": passport}))
    differences = explain(ours, compare(ours, "v0.7/NVIDIA/dgx1_ngc20.06_mxnet").baseline).differences
    assert [(item.name, item.ours, item.theirs) for item in differences if item.area == "environment"] == [
        ("environment.HOROVOD_CYCLE_TIME", "5", "0.1")
    ]


PASSPORT_KEYS = (
    "nodes", "ranks_per_node", "node", "environment", "configuration", "deviations", "data", "submission", "choices",
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        "0", "-1", "1e400", "NaN", "null", '"text"', "[]", "9" * 40, "{}", '[{"text": 1}, 2]', '{"0": 1}',
        '{"submitted": true, "of": [], "kind": {}}', '{"0": {"kernels": null}}', '{"0": {"kernels": [1]}}',
    ],
)  # fmt: skip
def test_damaged_descriptions_are_compared_or_rejected(value: str, tmp_path: Path) -> None:
    damaged = ", ".join(f'"{key}": {value}' for key in PASSPORT_KEYS)
    system = f'{{"accelerators_per_node": {value}, "number_of_nodes": {value}}}'
    descriptions = {"run.json": f'{{"round": "v0.7", {damaged}}}', "system.json": system}
    side = load_run_set(write_files(write_set(tmp_path, a100_texts(runs=1)), descriptions))
    result = compare(side, A100)
    assert (result.as_json()["submission"], {*side.choices} <= {"kernels"}) == (A100, True)
    assert explain(side, result.baseline).differences


# --- the band of seeds -----------------------------------------------------------------------------------

LOSSES = json.loads((Path(__file__).parents[1] / "golden" / "results" / "ncf_losses.json").read_text("utf-8"))
REFERENCE, OTHER_SEEDS = LOSSES["reference"], LOSSES["other_seeds"]


def series(values: Sequence[float], number: int = 1) -> Series:
    return Series(number=number, at=tuple(range(1, len(values) + 1)), values=tuple(map(float, values)))


def metrics(losses: list[float], resumed_step: int = 0) -> list[dict[str, Any]]:
    steps = enumerate(losses[resumed_step:], resumed_step)
    return [
        {"kind": "start", "resumed_step": resumed_step, "global_batch_size": 100},
        *({"kind": "step", "epoch": n // 15 + 1, "step": n + 1, "loss": loss} for n, loss in steps),
    ]


def write_side(folder: Path, runs: list[list[float]], **configuration: object) -> RunSet:
    # Run folder with one experiment per list
    write_files(folder, {f"experiment_{n}/metrics.jsonl": metrics(losses) for n, losses in enumerate(runs)})
    return RunSet(
        label=folder.name,
        round="v0.5",
        benchmark="ncf",
        hardware=System(described=False),
        folder=folder,
        hyperparameters={"opt_learning_rate": 0.008, **configuration},
        passport={"seeds": configuration.get("seeds")},
    )


def test_recorded_losses_of_ncf(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    five, one = (write_side(tmp_path / name, REFERENCE[:count]) for name, count in (("reference", 5), ("one", 1)))
    pairs = (
        (write_side(tmp_path / "other_seeds", OTHER_SEEDS), five),
        (write_side(tmp_path / "learning_rate", LOSSES["learning_rate"], opt_learning_rate=0.012), five),
        (five, one),
        (one, write_side(tmp_path / "one of other_seeds", OTHER_SEEDS[:1])),
    )
    results = [result for pair in pairs for result in noise_of(*pair)]
    json.dumps([result.as_json() for result in results], allow_nan=False)
    recorded("noise.txt", "\n".join(line for result in results for line in result.lines()))


@pytest.mark.parametrize(
    ("runs", "verdict", "text"),
    [
        (OTHER_SEEDS, "matches", f"{len(OTHER_SEEDS)} runs against 5 in 6,000 samples; a difference of"),
        (LOSSES["learning_rate"], "differs", "samples, more than"),
        ([run[:12] for run in LOSSES["learning_rate"]], "matches", "in 1,200 samples; a difference of"),
        ([[0.9 * loss for loss in OTHER_SEEDS[0]]], "differs", "9.9% below up to 3,000 samples, more than"),
        ([[*OTHER_SEEDS[0][:20], math.nan, *OTHER_SEEDS[0][21:]]], "differs", "not finite within 3,000 samples"),
        ([OTHER_SEEDS[0][:3]], "not enough data", "fewer than 4 losses in 300 samples"),
    ],
    ids=["other seeds", "learning rate", "twelve steps", "10 % less", "not a number", "three losses"],
)
def test_verdict_on_losses_so_far(runs: list[list[float]], verdict: str, text: str, tmp_path: Path) -> None:
    # Logs of NCF have no global batch: it is that of the metrics
    ours, five, two = (
        write_side(tmp_path / name, losses)
        for name, losses in (("ours", runs), ("five", REFERENCE), ("two", REFERENCE[:2]))
    )
    result = loss_verdict(ours, five)
    assert (result.verdict, text in result.text, loss_verdict(ours, two).verdict) == (verdict, True, "not enough data")
    json.dumps(asdict(result), allow_nan=False)
    assert loss_verdict(ours, replace(five, benchmark="dlrm")) is None


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "matches"), (1.03, "differs")])
def test_truncated_log_against_a_submission(
    factor: float, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first fifth of a run of another submitter with the same hyperparameters
    digest = next(side for side in digests("v5.1") if side.label == "v5.1/Lenovo/SR780aV3-8xB200_SXM_180GB"
                  and side.benchmark == "llama31_8b")  # fmt: skip
    start, values = 1_759_900_000_000, {"global_batch_size": 16, "submission_division": "closed", "eval_samples": 1024}
    events = [
        *(mllog(key, value) for key, value in values.items()),
        *(
            mllog("tracked_stats", {"reduced_train_loss": factor * loss}, start + samples, samples_count=samples)
            for samples, loss in [*zip(*digest.losses[0], strict=True)][:9]
        ),
    ]
    folder = write_set(tmp_path / "llama31_8b", [log_of("llama31_8b", *events, start_ms=start).rpartition(":::ML")[0]])
    printed = output_of("compare", folder, "v5.1/NVIDIA/tyche_ngpu8_ngc25.09_nemo", "--all")
    assert f"training loss: {verdict} (1 run against 10" in printed


def test_damaged_metrics_and_another_interval_of_steps(tmp_path: Path) -> None:
    losses = OTHER_SEEDS[0]
    ours = write_side(tmp_path / "ours", [losses] * 2, seeds="unknown")
    # Steps that a resumed run wrote again, after a torn and a foreign line
    repeated = metrics([*losses[:20], *[9.0] * 40])
    junk = ['{"kind": "st\n', '{"kind": "step", "step": 1e400, "loss": []}\n', "\udcff[]\n", "[" * 70_000 + "\n"]
    # Means of two steps, one mean not finite
    steps = metrics(losses)[1:]
    pairs = [{**b, "loss": (a["loss"] + b["loss"]) / 2} for a, b in zip(steps[::2], steps[1::2], strict=True)]
    pairs[20]["loss"] = math.nan
    resumed = {"experiment_0/metrics.jsonl": [*repeated, *junk, *metrics(losses, 20)]}
    write_files(ours.folder, {**resumed, "experiment_1/metrics.jsonl": pairs})
    assert losses_of(ours)[0].values == tuple(losses)
    (result,) = noise_of(ours, write_side(tmp_path / "theirs", [*REFERENCE, [math.inf], REFERENCE[0][:9]]))
    complete, nan = result.runs
    assert (complete.verdict, len(complete.at), result.references) == ("inside", 60, 5)
    assert (nan.first.at, nan.first.epoch, nan.outside, nan.at) == (42, 3, 1, tuple(range(2, 41, 2)))
    assert "2 runs of theirs left out" in result.note + json.dumps(result.as_json(), allow_nan=False)
    assert "first outside at step 42 (epoch 3): not finite" in [*result.lines()][-1]


@pytest.mark.parametrize(("count", "steps"), [(2, 2), (2, 300), (6, 60)])
def test_properties_of_the_band(count: int, steps: int) -> None:
    rows = 3 / np.sqrt(np.arange(1, steps + 1)) + 0.05 * np.random.default_rng(7).standard_normal((count + 1, steps))
    mean, start = rows[1:].mean(0), steps // 2
    run, *references = [series(row, number) for number, row in enumerate(rows, 1)]
    band, reverse, same, centre = (
        run_in_band(one, others, True, LEVEL, others, {})
        for one, others in (
            (run, references), (run, references[::-1]), (references[0], references), (series(mean), references),
        )
    )  # fmt: skip
    assert (same.verdict, same.twin, same.outside, centre.verdict) == ("identical", references[0].number, 0, "inside")
    assert reverse.half_width == pytest.approx(band.half_width)
    # A shift by three bands is found where it begins, or a fiftieth of the run later
    shifted = series(mean + 3 * max(band.half_width) * (np.arange(steps) >= start))
    late = run_in_band(shifted, references, True, LEVEL, references, {})
    assert start < late.first.at <= start + 1 + steps / 50 + steps / len(late.at)


def test_same_seed_that_trains_differently_from_a_step_on(tmp_path: Path) -> None:
    twin = [*REFERENCE[1][:40], *(loss * 1.0001 for loss in REFERENCE[1][40:])]
    theirs = write_side(tmp_path / "theirs", REFERENCE, seeds=[11, 12, 13, 14, 15])
    (result,) = noise_of(write_side(tmp_path / "ours", [twin, OTHER_SEEDS[0]], seeds=[12, 13]), theirs)
    texts = (
        "(no difference of configuration is known)\n"
        "  run 1: identical to run 2 of theirs up to step 40, then different; inside the 95 % band",
        "\n  run 2: different from run 3 of theirs, which has the same seed, from the first step on",
    )
    assert [text in "\n".join(result.lines()) for text in texts] == [True, True]
