"""Progress of a run: the live line, rates, checkpoints, and qualities from metrics and result log."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from encore import catalogue, files, peaks
from encore.cli import live
from encore.cli.jobs import describe
from encore.cli.live import facts
from encore.results.words import against_targets, with_names
from encore.run import follow, judge, run_folder, status
from encore.run.run_folder import ExperimentState
from tests import run_folders
from tests.results.result_logs import resnet_v07

BOX_AND_MASK = {"box": 0.377, "mask": 0.339}


def start(targets: dict[str, float], **fields: Any) -> dict[str, Any]:
    scale = {"ranks": 2, "global_batch_size": 64, "steps_per_epoch": 10, "epochs": 12}
    return {"kind": "start", "time": 0.0, **scale, "targets": targets, "resumed_step": 0, **fields}


def evaluation(epoch: int, **qualities: float) -> dict[str, Any]:
    return {"kind": "eval", "time": 9.0, "epoch": epoch, "qualities": qualities, "seconds": 1.0}


def step(number: int, time: float) -> dict[str, Any]:
    return {"kind": "step", "time": time, "epoch": 1 + (number - 1) // 10, "step": number, "loss": 5.0 / number}


def progress_of(*records: dict[str, Any]) -> follow.Progress:
    progress = follow.Progress()
    for record in records:
        progress.add(record)
    return progress


# 20 of 120 steps and an evaluation in 100 s: steps 2 to 10 took 8 s, steps 12 to 20 took 5 s
FIRST_EPOCH = [step(2, 102.0), step(4, 104.0), step(10, 110.0)]
TWO_EPOCHS = [*FIRST_EPOCH, evaluation(1, accuracy=0.5), step(12, 195.0), step(20, 200.0)]


def two_qualities() -> catalogue.Benchmark:
    resnet = catalogue.choose("resnet").benchmark.model_dump()
    qualities = {
        "box": {"title": "box mAP", "config": "box_target", "log_name": "BBOX"},
        "mask": {"title": "mask mAP", "config": "mask_target", "log_name": "SEGM"},
    }
    rounds = {"v0.7": {"targets": BOX_AND_MASK, "runs": 5}}
    return catalogue.Benchmark.model_validate({**resnet, "qualities": qualities, "rounds": rounds})


def make_experiment(
    results: Path, state: run_folder.Status, log: str, *records: dict[str, Any]
) -> run_folder.Experiment:
    ended = ExperimentState(status=state, started="2026-11-20T19:00:00Z", ended="2026-11-20T19:40:00Z")
    (experiment,) = run_folders.make_run(results, [ended], config={"quality_target": 0.759}).experiments()
    experiment.metrics.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    experiment.log.write_text(log, encoding="utf-8")
    experiment.publish_log()
    return experiment


def test_live_line_names_its_numbers() -> None:
    begun = start({"accuracy": 0.95}, time=100.0, batch_unit="token positions")
    line = facts(progress_of(begun, *FIRST_EPOCH))
    assert "token positions/s" in line and "to go" not in line
    # The quality keeps its epoch in the next one; the remaining time includes evaluations
    expected = "loss 0.2500  quality 0.5000 of 0.95 (epoch 1)  at most 0:08:20 to go"
    assert facts(progress_of(begun, *TWO_EPOCHS)).endswith(expected)


def test_speed_of_a_training_leaves_out_evaluations() -> None:
    begun = start({"accuracy": 0.95}, time=100.0, flops_per_sample=24.5e9, gemm_precision="fp16")
    progress = progress_of(begun, *TWO_EPOCHS)
    assert progress.trained_per_second == pytest.approx(16 * 64 / 13)
    assert (progress.flops_per_sample, progress.gemm_precision) == (24.5e9, "fp16")
    assert progress_of(start({})).trained_per_second is None


def test_speed_is_compared_with_the_data_sheet() -> None:
    utilization = peaks.utilization(24.5e9, 63_601, "samples", "NVIDIA H200", "fp16", 8)
    assert utilization["mfu"] == pytest.approx(24.5e9 * 63_601 / (8 * 989.5e12))
    assert peaks.sentence(utilization) == (
        "24.5 GFLOP a sample x 63,601 samples/s = 1.56 PFLOP/s: MFU 19.7% of the 7.92 PFLOP/s of NVIDIA H100 and H200 "
        "data sheets, SXM"
    )
    assert peaks.sentence(peaks.utilization(1.2e6, 50.0, "token positions", "", "fp32", 2)) == (
        "1.2 MFLOP a token position x 50.0 token positions/s = 60 MFLOP/s; no data sheet of the device is known"
    )


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("NVIDIA GB200", "fp8", 5000),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA H100 NVL", "fp16", None),
        ("NVIDIA GeForce RTX 4090", "fp16", None),
    ],
)
def test_data_sheet_of_a_gpu(gpu: str, precision: str, tflops: float | None) -> None:
    peak = peaks.peak_of(gpu, precision)
    assert (peak and peak[0]) == (None if tflops is None else 1e12 * tflops)


def test_start_reports_parts_over_budget() -> None:
    startup = {
        "seconds": {"imports": 8.0, "compile": 52.04},
        "budget": {"imports": 12.0, "compile": 10.0, "rest": 38.0},
    }
    assert live.start(startup) == "startup took 60.0 s (budget 60 s): compile 52.0 s (budget 10 s)"
    assert live.start({**startup, "seconds": {"imports": 8.0}}) == "startup took 8.0 s (budget 60 s)"


def test_cost_of_checkpoints() -> None:
    saves = [
        {"kind": "checkpoint", "time": 1.0, "step": 10, "seconds": 0.25},
        {"kind": "checkpoint_written", "time": 3.0, "step": 10, "seconds": 2.0},
        {"kind": "checkpoint", "time": 4.0, "step": 20, "seconds": 0.5},
        {"kind": "checkpoint_written", "time": 7.0, "step": 20, "seconds": 3.0},
        {"kind": "checkpoint", "time": 9.0, "step": 20, "seconds": 9.0},  # at the end of the run
    ]
    written = progress_of(start(BOX_AND_MASK), *saves).written
    assert live.checkpoints(written) == "2 checkpoints stopped training for 0.8 s, and took 5.0 s to write"
    assert progress_of(start(BOX_AND_MASK), *saves[:1], *saves[-1:]).written == {}


def test_live_line_has_every_quality() -> None:
    progress = progress_of(start(BOX_AND_MASK), evaluation(4, box=0.31, mask=0.28))
    assert facts(progress) == "epoch 1/12  box 0.3100 of 0.377, mask 0.2800 of 0.339 (epoch 4)"
    texts = [with_names(progress.qualities), with_names(progress.targets, "g"), with_names({"auc": 0.8})]
    assert texts == ["box 0.3100, mask 0.2800", "box 0.377, mask 0.339", "0.8000"]
    assert (with_names({}), against_targets({}, BOX_AND_MASK)) == ("", "")


@pytest.mark.parametrize(
    ("state", "minutes", "epochs", "accuracy", "line"),
    [
        ("reached", pytest.approx(40.0), 8, 0.7605, "epoch 8/12  quality 0.7605 of 0.759"),
        ("interrupted", None, 0, 0.3, "epoch 1/12  quality 0.3000 of 0.759"),
    ],
)
def test_finished_run_shows_its_log_and_another_its_metrics(
    tmp_path: Path, state: run_folder.Status, minutes: float | None, epochs: int, accuracy: float, line: str
) -> None:
    # The last evaluation is in the log only
    records = (start({"accuracy": 0.759}), evaluation(4, accuracy=0.3))
    experiment = make_experiment(tmp_path, state, resnet_v07(40.0, quality=(0.3, 0.7605)), *records)
    (result,) = judge.judge(run_folder.RunFolder(experiment.folder.parent))
    assert (result.minutes, result.epochs, result.planned_epochs) == (minutes, epochs, 12)
    assert (result.qualities, result.targets) == ({"accuracy": accuracy}, {"accuracy": 0.759})
    (row,) = status.overview(tmp_path, status.Queue(), None)
    assert (describe(row), result.log is None) == (line, minutes is None)


def test_qualities_are_read_from_a_log_by_their_log_names(tmp_path: Path) -> None:
    value = json.dumps({"BBOX": 0.381, "SEGM": 0.3435})
    log = (
        resnet_v07(40.0)
        .replace('"value": "resnet"', '"value": "maskrcnn"')
        .replace('"value": 0.7605', f'"value": {value}')
    )
    experiment = make_experiment(tmp_path, "reached", log, start(BOX_AND_MASK))
    files.write_json(experiment.config, {"box_target": 0.377, "mask_target": 0.339})
    result = judge.judge_experiment(experiment, two_qualities())
    expected = ({"box": 0.381, "mask": 0.3435}, BOX_AND_MASK, pytest.approx(40.0))
    assert (result.qualities, result.targets, result.minutes) == expected


def test_round_needs_a_target_for_each_quality() -> None:
    benchmark = two_qualities().model_dump()
    benchmark["rounds"]["v0.7"]["targets"] = {"box": 0.377}
    with pytest.raises(ValidationError, match=r"round v0\.7 needs a target for each of box, mask"):
        catalogue.Benchmark.model_validate(benchmark)


def test_log_name_of_a_quality_defaults_to_its_name() -> None:
    benchmark = two_qualities()
    assert benchmark.named({"BBOX": 0.1}) == {"box": 0.1}
    qualities = {name: quality.model_copy(update={"log_name": ""}) for name, quality in benchmark.qualities.items()}
    plain = benchmark.model_copy(update={"qualities": qualities})
    assert plain.named({"box": 0.1, "mask": 0.2, "loss": 3.0}) == {"box": 0.1, "mask": 0.2}
