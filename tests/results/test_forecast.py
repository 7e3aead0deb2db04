"""The forecast of a run that still trains, on public logs that are cut and on synthetic ones."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from encore.results.compare.compare import Verdict, certainty, compare
from encore.results.compare.forecast import (
    Forecast,
    Lengths,
    Pace,
    forecast,
    forecasts_of,
    known_lengths,
    pace_of,
    weighted_quantiles,
)
from encore.results.compare.sides import load_side
from encore.results.logs.run_log import RunLog, read_run
from encore.results.logs.timing import Mark, length_of, marks_of
from tests.results.result_logs import START_MS, flux1_v61, log_of, mllog, resnet_v07, write_set
from tools import calibrate_forecast


# Lines of a log up to some seconds after its start.
def cut(log: Path, seconds: float, to: Path) -> Path:
    start: float | None = None
    kept = []
    for line in log.read_text("utf-8").splitlines(keepends=True):
        event = json.loads(line[line.index("{") :]) if ":::MLLOG {" in line else {}
        start = event["time_ms"] if event.get("key") == "run_start" and start is None else start
        if start is not None and event and event["time_ms"] > start + seconds * 1000:
            break
        kept.append(line)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text("".join(kept), "utf-8")
    return to


SETS = ("dgxa100_ngc20.06_mxnet/resnet", "dgxa100_n2_ngc20.06_mxnet/resnet")


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.95])
def test_the_forecast_of_a_cut_log_holds_its_time(public_logs: Path, tmp_path: Path, name: str, share: float) -> None:
    log = public_logs / "v0.7" / "NVIDIA" / name / "result_0.txt"
    whole = read_run(log, "v0.7")
    assert whole.minutes is not None
    seconds = whole.minutes * 60 * share
    run = read_run(cut(log, seconds, tmp_path / "result_0.txt"), "v0.7")
    # The calibration cuts marks and not files.
    assert marks_of(run) == [mark for mark in marks_of(whole) if mark.seconds <= seconds]
    found = forecast(run)
    assert found is not None and found.minutes and found.low and found.high
    assert found.low <= whole.minutes <= found.high
    assert found.low <= found.minutes <= found.high
    assert found.minutes == pytest.approx(whole.minutes, rel=0.05)
    assert found.elapsed_minutes <= found.low


def test_a_log_that_ends_is_where_its_forecast_was(public_logs: Path) -> None:
    run = read_run(public_logs / "v0.7" / "NVIDIA" / SETS[0] / "result_0.txt", "v0.7")
    last, length = marks_of(run)[-1], length_of(run)
    assert length is not None and (last.length, last.evaluated) == (length.value, True)
    assert run.minutes is not None and last.seconds / 60 == pytest.approx(run.minutes, rel=0.01)


# Samples of a log of Flux.1 by evaluations, and by the ends of the blocks before them.
def test_blocks_are_progress_between_evaluations(tmp_path: Path) -> None:
    run = read_run(write_set(tmp_path, [flux1_v61()]) / "result_0.txt", "v6.1")
    marks = marks_of(run)
    assert [mark.length for mark in marks] == [262_144.0 * number for number in range(1, 29)]
    assert all(mark.evaluated for mark in marks)
    third = round(40 * 60_000 / 28 * 3) - 0.5
    between = read_run(cut(tmp_path / "result_0.txt", third / 1000, tmp_path / "cut" / "result_0.txt"), "v6.1")
    assert [(mark.length, mark.evaluated) for mark in marks_of(between)][-1] == (262_144.0 * 3, False)


# ``step`` counts samples where every one is a multiple of the batch.
@pytest.mark.parametrize(("steps", "samples"), [((64, 128, 192), [64.0, 128.0, 192.0]), ((31, 63, 95), [])])
def test_steps_that_are_samples(tmp_path: Path, steps: Sequence[int], samples: list[float]) -> None:
    lines = [mllog("tracked_stats", {"loss": 1.0}, 1_640_000_000_000 + step * 10, step=step) for step in steps]
    text = log_of("llama31_8b", mllog("global_batch_size", 64, 1_640_000_000_000), *lines)
    run = read_run(write_set(tmp_path, [text]) / "result_0.txt", "v5.1")
    assert [mark.length for mark in marks_of(run)] == samples


# Evaluations every 10 s and 2 units, from 16 s on: a start of 6 s, which the second evaluation shows.
EVALUATED = [Mark(16.0 + 10 * number, 2.0 + 2 * number, True) for number in range(5)]


@pytest.mark.parametrize(
    ("marks", "stage", "each"),
    [
        (EVALUATED[:1], "first mark", 8.0),
        ([Mark(9.0, 1.0), *EVALUATED[:1]], "marks", 7.0),
        ([Mark(9.0, 1.0), *EVALUATED[:3]], "evaluations", 5.0),
        (EVALUATED[:4], "many evaluations", 5.0),
    ],
)
def test_pace(marks: list[Mark], stage: str, each: float) -> None:
    found = pace_of(marks)
    assert found is not None and (found.stage, found.each) == (stage, each)
    assert (found.seconds, found.length) == marks[-1][:2]
    assert pace_of([]) is None


def test_weighted_quantiles_are_those_of_repeated_values() -> None:
    values, counts = np.array([3.0, 1.0, 2.0, 7.0]), np.array([1, 4, 2, 3])
    middle = weighted_quantiles(values, counts.astype(float), [0.5])
    assert 1.0 < middle[0] < 3.0
    assert weighted_quantiles(values, np.ones(4), [0.5])[0] == np.median(values)
    assert weighted_quantiles(values, counts.astype(float), [0.0, 1.0]).tolist() == [1.0, 7.0]


def test_reproduced_is_to_be_expected() -> None:
    known = Forecast(
        run="result_0.txt", elapsed_minutes=4.0, length=4.0, unit="epochs", minutes_per_length=1.0, minutes=41.2,
        low=40.1, high=42.9,
    )  # fmt: skip
    assert [known.expects(minutes, 0.05) for minutes in (41.5, 40.0, 30.0, 50.0)] == ["yes", "open", "no", "no"]
    assert known.text(40.0, 0.05) == (
        "on pace for 41.2 minutes (40.1 to 42.9); published 40.0; reproduced is to be expected: open"
    )
    unknown = replace(known, minutes=None, low=None, high=None, why="why")
    assert (unknown.text(40.0, 0.05), unknown.expects(40.0, 0.05)) == ("1 minutes per epoch so far; why", "open")


# A batch without a set near by: its length follows the regression on the batch, and the nearest hyperparameters count.
def test_public_runs_with_the_same_hyperparameters_weigh_most(public_logs: Path) -> None:
    run = read_run(public_logs / "v0.7" / "NVIDIA" / SETS[0] / "result_0.txt", "v0.7")
    with_own = known_lengths(run)
    assert with_own is not None and with_own.runs > 1000 and with_own.points > 5
    assert np.exp(with_own.quantiles([0.5]))[0] == pytest.approx(41, abs=1)
    without = known_lengths(run, without={"v0.7"})
    assert without is not None and without.runs < with_own.runs


def test_on_small_data_own_runs_count_alone(tmp_path: Path) -> None:
    texts = [resnet_v07(4.0, quality=(0.3, 0.5, 0.7605), train_samples=640, start_ms=START_MS + n) for n in range(2)]
    whole = write_set(tmp_path / "whole", texts)
    unfinished = read_run(cut(whole / "result_1.txt", 170, tmp_path / "result_1.txt"), "v0.7")
    alone = forecasts_of([unfinished])
    assert len(alone) == 1 and alone[0].minutes is None and "not known" in alone[0].why
    assert alone[0].minutes_per_length == pytest.approx(1 / 3, rel=0.01)
    found = forecasts_of([read_run(whole / "result_0.txt", "v0.7"), unfinished])
    assert found[0].length_to_target == pytest.approx(12.0) and found[0].runs == 1
    assert found[0].minutes is not None and found[0].minutes == pytest.approx(4.0, rel=0.25)


# Counts that no training has, and an evaluation that goes back: a forecast, or none, but no traceback.
@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (-512, [262_144, 524_288, 786_432]),
        (512, [-100, 262_144, 524_288]),
        (262_144, [262_144, 524_288, 262_144, 786_432]),
        (1e300, [1e300, 2e300]),
        (0, [0, 0, 0]),
    ],
)
def test_odd_counts(tmp_path: Path, batch: float, counts: list[float]) -> None:
    start = 1_790_000_000_000
    lines = [
        mllog(
            "block_stop" if number % 2 else "eval_accuracy", 0.7, start + 60_000 * number + 60_000, samples_count=each
        )
        for number, each in enumerate(counts)
    ]
    text = log_of("flux1", mllog("global_batch_size", batch, start), *lines, start_ms=start)
    log = write_set(tmp_path, [text.rpartition(":::MLLOG")[0]]) / "result_0.txt"
    for each in forecasts_of([read_run(log, "v6.1")]):
        assert each.minutes is None or each.minutes >= each.elapsed_minutes > 0


def test_a_run_that_has_reached_its_target_has_none(tmp_path: Path) -> None:
    text = resnet_v07(40.0).rpartition(":::MLLOG")[0]
    run = read_run(write_set(tmp_path, [text]) / "result_0.txt", "v0.7")
    assert run.stop_s is None and run.met
    assert forecasts_of([run]) == []


def test_a_run_that_cannot_be_compared_expects_nothing(tmp_path: Path) -> None:
    whole = resnet_v07(4.0, quality=(0.3, 0.5, 0.7605), train_samples=640)
    write_set(tmp_path / "v0.7" / "resnet", [whole, whole.replace("1592", "1593")])
    cut(tmp_path / "v0.7" / "resnet" / "result_1.txt", 170, tmp_path / "v0.7" / "resnet" / "result_1.txt")
    found = compare(load_side(tmp_path / "v0.7" / "resnet"), "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet")
    assert found.verdict is Verdict.NOT_COMPARABLE and found.forecasts
    assert all("published" not in line for line in certainty(found))
    assert all(each.expected is None for each in found.as_json()["forecasts"])


# A run folder of Encore whose first experiment still runs: its log, and the steps of its metrics.
def test_an_experiment_that_runs(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment_0"
    text = resnet_v07(40.0, quality=tuple(0.1 * n for n in range(9)))
    cut(write_set(tmp_path / "made", [text]) / "result_0.txt", 10.0, experiment / "result.txt")
    (tmp_path / "run.json").write_text(json.dumps({"round": "v0.7"}))
    assert forecasts_of([], tmp_path) == []
    records = [{"kind": "start", "steps_per_epoch": 385, "global_batch_size": 1664}]
    records += [{"kind": "step", "step": step, "time": START_MS / 1000 + step * 0.2} for step in (20, 40, 385)]
    lines = [json.dumps(each) + "\n" for each in records]
    # A line that a kill tore, and one that is written just now
    torn = [lines[0], lines[1], lines[2][:30] + "\n", lines[3], lines[3][:30]]
    (experiment / "metrics.jsonl").write_text("".join(torn))
    (found,) = forecasts_of([], tmp_path)
    assert (found.run, found.length) == ("experiment_0/result.txt", 1.0)
    assert found.minutes_per_length == pytest.approx(385 * 0.2 / 60) and found.minutes is not None
    (tmp_path / "result_0.txt").write_text(text)
    assert forecasts_of([read_run(tmp_path / "result_0.txt")], tmp_path) == []


def test_the_calibration_writes_what_the_forecast_reads(
    public_logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for round_ in ("v0.6", "v0.7"):
        (tmp_path / f"training_results_{round_}").symlink_to(public_logs / round_)
    monkeypatch.setattr(calibrate_forecast, "DATA", tmp_path)
    calibrate_forecast.main([tmp_path / "training_results_v0.6", tmp_path / "training_results_v0.7"])
    content = json.loads((tmp_path / "forecast.json").read_text())
    every = {line["cut"]: line for line in content["held_out"] if line["benchmark"] == "all"}
    assert set(every) == set(calibrate_forecast.CUTS)
    assert all(0 <= line["inside"] <= 1 and line["forecasts"] <= line["runs"] for line in every.values())
    assert sum(line["forecasts"] for line in content["by_round"]) == sum(line["forecasts"] for line in every.values())
    assert content["moves"]["any"] and not content["moves"]["dlrm"]  # DLRM is in one of the two rounds
    assert all(math.isfinite(each) for moves in content["moves"].values() for of in moves.values() for each in of)


# A round's forecasts are made without its runs, and judged by moves that its own times do not change.
def test_the_calibration_holds_out_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []

    def known(run: RunLog, without: set[str]) -> Lengths:
        asked.append(without)
        return Lengths(np.log(np.array([38.0, 40.0, 42.0])), np.ones(3), 3, 0)

    monkeypatch.setattr(calibrate_forecast, "known_lengths", known)
    pace = Pace(60.0, 4.0, 15.0, "marks")

    def sets(minutes_of_last: float) -> list[calibrate_forecast.Read]:
        times = {"v4.0": 10.0, "v4.1": 10.5, "v5.0": minutes_of_last}
        return [
            calibrate_forecast.Read(
                benchmark="resnet",
                round=name,
                first=RunLog(path=Path("result_0.txt")),
                cuts=[
                    calibrate_forecast.Cut(cut="10 %", pace=pace, elapsed=60.0, minutes=minutes + number / 100)
                    for number in range(calibrate_forecast.FEWEST)
                ],
            )
            for name, minutes in times.items()
        ]

    def inside(minutes_of_last: float) -> dict[str, object]:
        rows, others = calibrate_forecast.of_benchmark(sets(minutes_of_last))
        found = calibrate_forecast.by_round(calibrate_forecast.judged(rows, others, []))
        return {str(line["round"]): line["inside"] for line in found}

    near, far = inside(10.2), inside(30.0)
    assert asked[:2] == [{"v4.1", "v4.0"}, {"v5.0", "v4.0"}] and {"v4.0"} in asked
    # A round of three times the minutes is outside: what it is judged by does not know it.
    assert near["v5.0"] == 1.0 and far["v5.0"] == 0.0


# True times are 1 to 100 % above the low end and below the high one, in two rounds of different size.
def test_moves_leave_as_many_outside_as_the_level_says() -> None:
    rows = [
        calibrate_forecast.Row(round=name, cut="5 %", stage="marks", times=(1.0, 1.5, 2.0), true=true)
        for name, count in (("v4.0", 1000), ("v5.0", 100))
        for true in np.linspace(0.0, 3.0, count).tolist()
    ]
    moves = calibrate_forecast.moves_of(rows, "marks")
    assert moves is not None
    below, middle, above = moves
    inside = [1.0 - below <= row.true <= 2.0 + above for row in rows]
    assert sum(inside) / len(rows) == pytest.approx(calibrate_forecast.LEVEL, abs=0.01)
    assert middle == pytest.approx(0.0, abs=0.01)
    assert calibrate_forecast.moves_of(rows, "first mark") is None
