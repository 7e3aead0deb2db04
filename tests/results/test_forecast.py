"""Forecasts of unfinished runs, on truncated and synthetic logs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from encore.results.compare.compare import Verdict, compare, format_certainty
from encore.results.compare.forecast import (
    Forecast,
    Pace,
    forecast,
    forecast_runs,
    pace_of,
    weighted_quantiles,
)
from encore.results.compare.run_set import load_run_set
from encore.results.logs.run_log import RunLog, read_run
from encore.results.logs.timing import Mark, length_of, marks_of
from tests.results.result_logs import START_MS, a100_texts, flux1_v61, log_of, mllog, resnet_v07, write_files, write_set


def read_text(folder: Path, text: str, round_: str = "v0.7", seconds: float | None = None) -> RunLog:
    # Without the lines that are later than ``seconds`` after run_start
    times = {line: json.loads(line[9:])["time_ms"] for line in text.splitlines(keepends=True)}
    (start,) = (time for line, time in times.items() if '"run_start"' in line)
    lines = [line for line, time in times.items() if seconds is None or time <= start + 1000 * seconds]
    return read_run(write_set(folder, ["".join(lines)]) / "result_0.txt", round_)


# A run of 39.8 minutes and 40 epochs on a DGX A100; the values are recorded.
@pytest.mark.parametrize(
    ("fraction", "low", "minutes", "high"),
    [(0.2, 38.63, 41.03, 58.00), (0.5, 31.95, 40.80, 45.36), (0.95, 35.82, 40.80, 45.36)],
)
def test_forecast_of_a_truncated_log(fraction: float, low: float, minutes: float, high: float, tmp_path: Path) -> None:
    (text,), seconds = a100_texts(runs=1), 39.8 * 60 * fraction
    complete, run = read_text(tmp_path / "complete", text), read_text(tmp_path / "cut", text, seconds=seconds)
    # The calibration truncates marks and not files
    assert marks_of(run) == [mark for mark in marks_of(complete) if mark.seconds <= seconds]
    assert marks_of(complete)[-1] == Mark(pytest.approx(39.8 * 60), length_of(complete).value, True)
    result = forecast(run)
    assert (result.low, result.minutes, result.high) == pytest.approx((low, minutes, high), abs=0.01)


def test_blocks_are_progress_between_evaluations(tmp_path: Path) -> None:
    complete, cut = (
        [(mark.length, mark.evaluated) for mark in marks_of(read_text(tmp_path / name, flux1_v61(), "v6.1", seconds))]
        for name, seconds in (("complete", None), ("cut", (round(40 * 60_000 / 28 * 3) - 0.5) / 1000))
    )
    evaluated = [(262_144.0 * number, True) for number in range(1, 29)]
    assert (complete, cut) == (evaluated, [*evaluated[:2], (262_144.0 * 3, False)])


# ``step`` counts samples if all of its values are multiples of the batch; epochs of 3D U-Net blocks are samples if all
# of them are multiples of the training set.
@pytest.mark.parametrize(
    ("benchmark", "round_", "size", "event", "position", "numbers", "lengths"),
    [
        *(
            ("llama31_8b", "v5.1", ("global_batch_size", 64), ("tracked_stats", {"loss": 1.0}), "step", *each)
            for each in (((64, 128, 192), [64.0, 128.0, 192.0]), ((31, 63, 95), []))
        ),
        *(
            ("unet3d", "v4.0", ("train_samples", 168), ("block_stop", None), "epoch_num", *each)
            for each in (((336, 672), [2.0, 4.0]), ((20, 336), [20.0, 336.0]), ((336,), [336]))
        ),
    ],
)
def test_positions_that_are_samples(
    benchmark: str,
    round_: str,
    size: tuple[str, int],
    event: tuple[str, object],
    position: str,
    numbers: tuple[int, ...],
    lengths: list[float],
    tmp_path: Path,
) -> None:
    lines = [mllog(*event, 1_640_000_000_000 + number * 10, **{position: number}) for number in numbers]
    text = log_of(benchmark, mllog(*size, 1_640_000_000_000), *lines)
    assert [mark.length for mark in marks_of(read_text(tmp_path, text, round_))] == lengths


# Evaluations every 10 s and 2 units, from 16 s on: a start of 6 s, which the second evaluation shows.
EVALUATED = [Mark(16.0 + 10 * number, 2.0 + 2 * number, True) for number in range(5)]


@pytest.mark.parametrize(
    ("marks", "stage", "seconds_per_unit"),
    [
        (EVALUATED[:1], "first mark", 8.0),
        ([Mark(9.0, 1.0), *EVALUATED[:1]], "marks", 7.0),
        ([Mark(9.0, 1.0), *EVALUATED[:3]], "evaluations", 5.0),
        (EVALUATED[:4], "many evaluations", 5.0),
    ],
)
def test_pace(marks: list[Mark], stage: str, seconds_per_unit: float) -> None:
    assert pace_of(marks) == Pace(*marks[-1][:2], seconds_per_unit, stage)
    assert pace_of([]) is None


def test_weighted_quantiles() -> None:
    values, weights = np.array([3.0, 1.0, 2.0, 7.0]), np.array([1.0, 4.0, 2.0, 3.0])
    assert weighted_quantiles(values, weights, [0, 0.35, 0.5, 0.65, 1]).tolist() == pytest.approx([1, 1.5, 2, 3, 7])


def test_text_and_expectation_of_a_forecast() -> None:
    known = Forecast(
        run="result_0.txt", elapsed_minutes=4.0, length=4.0, unit="epochs", minutes_per_length=1.0, minutes=41.2,
        low=40.1, high=42.9,
    )  # fmt: skip
    unknown = replace(known, minutes=None, low=None, high=None, why="why")
    assert [known.expects(minutes, 0.05) for minutes in (41.5, 40.0, 30.0, 50.0)] == ["yes", "open", "no", "no"]
    assert (known.text(40.0, 0.05), unknown.text(40.0, 0.05), unknown.expects(40.0, 0.05)) == (
        "on pace for 41.2 minutes (40.1 to 42.9); published 40.0; reproduction expected: open",
        "1 minutes per epoch so far; why",
        "open",
    )


SMALL = {"quality": (0.3, 0.5, 0.7605), "train_samples": 640}


def test_forecast_on_small_data_uses_only_runs_of_the_same_set(tmp_path: Path) -> None:
    first = read_text(tmp_path / "first", resnet_v07(4.0, **SMALL))
    unfinished = read_text(tmp_path / "second", resnet_v07(4.0, start_ms=START_MS + 1, **SMALL), seconds=170)
    (alone,), (result,) = forecast_runs([unfinished]), forecast_runs([first, unfinished])
    pace = pytest.approx(1 / 3, rel=0.01)
    assert (alone.minutes, alone.minutes_per_length, "not known" in alone.why) == (None, pace, True)
    forecasted = (result.length_to_target, result.runs, result.minutes)
    assert forecasted == (pytest.approx(12.0), 1, pytest.approx(4.0, rel=0.25))


# Sample counts that no training has, and an evaluation that goes back.
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
def test_invalid_sample_counts(tmp_path: Path, batch: float, counts: list[float]) -> None:
    start = 1_790_000_000_000
    lines = [
        mllog(("eval_accuracy", "block_stop")[n % 2], 0.7, start + 60_000 * (n + 1), samples_count=count)
        for n, count in enumerate(counts)
    ]
    text = log_of("flux1", mllog("global_batch_size", batch, start), *lines, start_ms=start)
    for result in forecast_runs([read_text(tmp_path, text.rpartition(":::MLLOG")[0], "v6.1")]):
        assert result.minutes is None or result.minutes >= result.elapsed_minutes > 0


def test_run_that_has_reached_its_target_has_no_forecast(tmp_path: Path) -> None:
    run = read_text(tmp_path, resnet_v07(40.0).rpartition(":::MLLOG")[0])
    assert (run.stop_s, len(run.met), forecast_runs([run])) == (None, 1, [])


def test_run_that_cannot_be_compared_has_no_expectation(tmp_path: Path) -> None:
    text = resnet_v07(4.0, **SMALL)
    read_text(tmp_path, text, seconds=170).path.rename(tmp_path / "result_1.txt")
    result = compare(
        load_run_set(write_set(tmp_path, [text.replace("1592", "1593")])), "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"
    )
    expected = [each.expected for each in result.as_json()["forecasts"]]
    assert (result.verdict, expected) == (Verdict.NOT_COMPARABLE, [None])
    assert not any("published" in line for line in format_certainty(result))


def test_forecast_of_an_experiment_of_a_run_folder(tmp_path: Path) -> None:
    # Its log and the steps in metrics.jsonl, with a line that a kill cut and one that is being written
    text = resnet_v07(40.0, quality=tuple(0.1 * n for n in range(9)))
    experiment = tmp_path / "experiment_0"
    read_text(experiment, text, seconds=10.0).path.rename(experiment / "result.txt")
    write_files(tmp_path, {"run.json": {"round": "v0.7"}})
    assert forecast_runs([], tmp_path) == []
    start = {"kind": "start", "steps_per_epoch": 385, "global_batch_size": 1664}
    first, last = ({"kind": "step", "step": step, "time": START_MS / 1000 + step * 0.2} for step in (20, 385))
    cut = '{"kind": "step", "step": 40, "t'
    write_files(experiment, {"metrics.jsonl": [start, first, f"{cut}\n", last, cut]})
    (result,) = forecast_runs([], tmp_path)
    pace = pytest.approx(385 * 0.2 / 60)
    assert (result.run, result.length, result.minutes_per_length) == ("experiment_0/result.txt", 1.0, pace)
    assert (result.minutes is None, forecast_runs([read_text(tmp_path, text)], tmp_path)) == (False, [])
