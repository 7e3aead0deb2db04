"""SSD: boxes, losses and detections against float64, its network and input, training on ranks, resume and the rules."""

from __future__ import annotations

import json
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.ssd import schedule
from encore import catalogue, configuration, data
from encore.results.compliance.compliance import check
from tests import trainings
from tests.conftest import Encore, evaluations, logged, losses, only_run, quality, records
from tests.trainings import InFramework, exported, finish, result, write_small_config


@pytest.fixture(scope="module")
def scenes(pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data set."""
    folder = tmp_path_factory.mktemp("scenes") / "ssd"
    data.prepare("ssd", folder, data.Preparation(), pytorch_python)
    return folder


def config_of(system: str, round_: str, ranks: int) -> SimpleNamespace:
    choice = catalogue.choose("ssd")
    found = catalogue.find_system(choice, system, round_)
    return SimpleNamespace(**configuration.resolve(choice, found, 1, ranks, []).plain())


# -- the mathematics, the network, the input -------------------------------------------------------------


@pytest.fixture(scope="module")
def mathematics(in_pytorch: InFramework) -> dict[str, Any]:
    """What tests/in_framework/ssd_math.py found."""
    found: dict[str, Any] = result(in_pytorch("ssd_math.py"))
    return found


def test_default_boxes_are_the_references(mathematics: dict[str, Any]) -> None:
    found = mathematics["boxes"]
    assert found["count"] == 8732
    assert found["error"] < 1e-15
    assert found["maps"]["300"] == [38, 19, 10, 5, 3, 1]
    assert found["maps"]["96"] == [12, 6, 3, 2]


def test_objects_are_matched_and_coded_as_in_float64(mathematics: dict[str, Any]) -> None:
    found = mathematics["coding"]
    assert found["labels"] is True and found["DALI's labels"] is True
    assert found["positives"] >= 13, "each object has a box, some have more"
    assert found["offsets"] < 1e-12
    assert found["DALI's offsets"] < 1e-4, "it computes in fp32"
    assert found["there and back"] < 1e-14
    assert found["gradients"] is True


def test_loss_is_that_of_sorted_negatives(mathematics: dict[str, Any]) -> None:
    found = mathematics["loss"]
    assert 0 in found["positives"] and max(found["positives"]) > 30, "no object, and fewer negatives than wanted"
    assert found["error"] < 1e-12
    assert found["fp16"] < 1e-3
    assert found["gradients"] is True
    third = pytest.approx(2 / 3)
    assert found["ties"] == [[0, third, third, 0, third], pytest.approx([0.6] * 5), [1, 0, 1, 1, 1]]


def test_detections_are_those_of_plain_loops(mathematics: dict[str, Any]) -> None:
    found = mathematics["detections"]
    assert found["images"] == [0] * 7 + [2] * 7, "as many as are kept, and none in an image of background"
    assert found["same"] is True
    assert found["error"] < 1e-6


def test_operations_on_boxes(mathematics: dict[str, Any]) -> None:
    found = mathematics["operations"]
    assert max(found["overlaps"], found["xywh"], found["centre"]) < 1e-14
    assert found["of points"] == [[0.0]]
    assert found["clipped"] == [[0.0, pytest.approx(0.2), 0.5, 2.0]]


@pytest.fixture(scope="module")
def network(in_pytorch: InFramework) -> dict[str, Any]:
    """What tests/in_framework/ssd_network.py found on one rank."""
    found: dict[str, Any] = result(in_pytorch("ssd_network.py"))
    return found


def test_network_has_the_submitted_sizes_in_every_layout(network: dict[str, Any]) -> None:
    assert network["sizes"]["predictions"] == [2, 8732, 4 + 81]
    # torchvision's ResNet-34 without its fourth stage (13,114,368) and last layer (513,000), and 64 x 49 weights more.
    assert network["sizes"]["backbone"] == 21_797_672 - 13_114_368 - 513_000 + 3136
    assert network["layouts"]["error"] < 1e-5 * network["layouts"]["scale"]


def test_every_precision_trains(network: dict[str, Any]) -> None:
    found = network["precisions"]
    for name, tolerance in (("bf16", 0.08), ("fp16", 0.05)):
        assert found[name] == pytest.approx(found["fp32"], rel=tolerance)
        assert found[name] != found["fp32"]
    for name in ("fp32", "as on GPUs"):
        assert found[name][-1] < 0.8 * found[name][0]
    assert found["warmed up"] == found["fp32"], "a warm-up leaves nothing behind"
    assert network["rate"] < 1e-6


def test_backbone_comes_from_a_file_in_torchvisions_names(network: dict[str, Any]) -> None:
    found = network["file"]
    assert found["equal, padded False"] is True and found["equal, padded True"] is True
    assert "missing.pth" in found["missing.pth"]
    assert "(3, 3) for layer1.0.conv1.weight" in found["other.pth"]
    for name in ("missing.pth", "damaged.pth", "other.pth"):
        assert "do this: name a file with --set backbone=FILE" in found[name]


def test_batch_norm_over_two_ranks_is_that_of_one(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("ssd_network.py", ranks=2))
    assert max(found["losses"]) < 1e-3
    assert found["statistics"] < 1e-4
    assert found["averaged"] == {"True": [0.5, 0.5], "False": [0.0, 0.0]}, "of rank 0, whose own are 0"
    apex = found["apex"]
    assert apex["found"] == [["cudnn_gbn", "groupbn"], []], "fakes of its modules, and none where it is not installed"
    assert apex["chosen"] in ("plain", "groupbn")
    # The right one was measured.
    assert re.search(r"cudnn_gbn wrong by 0\.1 of the largest value, groupbn [0-9.]+ ms, plain [0-9.]+", apex["said"])
    assert apex["groupbn"] == pytest.approx(apex["plain"], rel=1e-3)
    assert apex["groupbn names"] == apex["plain names"], "a checkpoint and a backbone's file have one set of names"
    assert apex["groupbn detects"] == pytest.approx(apex["plain detects"], rel=0.02)
    assert "apex's groupbn, is not here: resume in the image of the run" in apex["elsewhere"]


def test_input_has_every_image_once_and_resumes_exactly(in_pytorch: InFramework, scenes: Path) -> None:
    found = result(in_pytorch("ssd_input.py", str(scenes)))
    assert found["evaluated"] == {size: {"each once": True, "again": True} for size in ("1", "2", "3")}
    assert found["resumed"] == [True, True]
    assert found["unchanged"]["share"] > 0.98, "but for boxes at the edge of a match, in fp32"
    assert found["flipped"] < 1e-5
    assert found["cropped"] == {"objects": True, "repeats": True, "differs": True, "finite": True}
    # v0.5 resized without antialiasing for training; all submissions evaluate on what Pillow resized.
    assert found["smoothed"] == {"training": False, "evaluation": True}


# -- schedule and rules ----------------------------------------------------------------------------------


def test_learning_rate_is_the_submitted_one() -> None:
    config = config_of("dgx1", "v0.7", 8)
    steps = 123
    assert schedule.base_rate(config, 8) == pytest.approx(0.0875), "opt_base_learning_rate of its logs"
    found = [schedule.learning_rate(config, step, 8, steps) for step in (0, 1, 325, 650, 5411, 5412, 6765)]
    assert found == pytest.approx([0, 0.0875 / 650, 0.04375, 0.0875, 0.0875, 0.00875, 0.000875])
    later = config_of("dgx1_n30", "v0.6", 240)
    assert schedule.base_rate(later, 240) == pytest.approx(0.1625)
    assert schedule.boundaries(later, 240, 70) == [3047, 3809]


# -- training --------------------------------------------------------------------------------------------

SHORT = ("epochs=2", "quality_target=1.0", "log_interval=1", "eval_epochs=[1, 2]", "width=8", "eval_batch_size=9")
IN_STEPS = ("concurrent_evaluation=false", "eval_steps=[20]", "decay_steps=[40]")
"""As v0.5 and v0.6 count, of 32 images: an evaluation inside the first epoch of 31, one at the end, a drop between."""
STEPS = 12
"""Before the first evaluation."""


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    """config.json of the small system with a fixed seed and fewer, larger steps."""
    return write_small_config(path, "ssd", ranks, (*SHORT, f"batch_size={32 // ranks}", *settings))


start_ranks = partial(trainings.start_ranks, "benchmarks.ssd.pytorch.train")


@pytest.fixture(scope="module")
def unbroken(pytorch_python: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs on two ranks without disturbance; its output."""
    output = tmp_path_factory.mktemp("unbroken") / "run"
    config = write_config(output.parent / "config.json", 2, *IN_STEPS)
    ended = finish(start_ranks(pytorch_python, config, scenes, output, 2))
    assert [code for code, _ in ended] == [0, 0], ended
    return output


def test_stopped_and_resumed_run_is_an_unbroken_one(
    pytorch_python: Path, scenes: Path, unbroken: Path, tmp_path: Path
) -> None:
    output, config = tmp_path / "stopped", write_config(tmp_path / "config.json", 2, *IN_STEPS)
    children = start_ranks(pytorch_python, config, scenes, output, 2)
    metrics = output / "metrics.jsonl"
    while not metrics.exists() or len(records(metrics, "step")) < STEPS:
        assert children[0].poll() is None, children[0].communicate()
        time.sleep(0.01)
    children[-1].send_signal(signal.SIGTERM)  # one rank is asked, all stop at the same place
    assert [code for code, _ in finish(children)] == [0, 0]
    assert records(metrics, "end")[-1]["outcome"] == "interrupted"
    ended = finish(start_ranks(pytorch_python, config, scenes, output, 2))
    assert [code for code, _ in ended] == [0, 0], ended
    expected = unbroken / "metrics.jsonl"
    assert losses(metrics) == losses(expected)
    assert evaluations(metrics) == evaluations(expected)
    assert len(evaluations(metrics)) == 2


def test_evaluations_come_after_the_submitted_steps(unbroken: Path) -> None:
    keys = ("epoch_start", "eval_start", "eval_stop", "epoch_stop", "run_stop")
    order = [each["key"] for each in logged(unbroken / "result.txt") if each["key"] in keys]
    assert order == ["epoch_start", "eval_start", "eval_stop", "epoch_stop"] * 2 + ["run_stop"]
    steps = records(unbroken / "metrics.jsonl", "step")
    assert [each["step"] for each in steps] == list(range(1, 63))
    before = [each["time"] for each in records(unbroken / "metrics.jsonl", "eval")]
    assert steps[19]["time"] < before[0], "its detections are those after 20 steps"
    rates = [each["learning_rate"] for each in steps]
    assert rates[40] == pytest.approx(rates[39] / 10, rel=0.1), "the warm-up goes on"


def test_log_has_what_the_checker_of_v06_asks_for(unbroken: Path) -> None:
    found = {each["key"]: each["value"] for each in logged(unbroken / "result.txt")}
    assert found["model_bn_span"] == 16 and found["global_batch_size"] == 32
    report = check(unbroken / "result.txt", "0.6.0")
    asked = ("opt_", "model_bn_span", "max_samples", "global_batch")
    assert [each.found for each in report.findings if any(word in each.expected for word in asked)] == []


@pytest.fixture(scope="module")
def small_run(encore: Encore, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the small system on two ranks, which reaches its target."""
    results = tmp_path_factory.mktemp("small")
    done = encore("run", "ssd", "2", "--data", str(scenes), "--results", str(results), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(results)


def test_small_run_reaches_the_target_and_passes_the_checker(encore: Encore, small_run: Path) -> None:
    assert "0 errors" in encore("check", str(small_run)).stdout
    values = {each["key"]: each["value"] for each in logged(small_run / "result_0.txt")}
    assert values["opt_learning_rate_decay_boundary_epochs"] == [12, 15]
    assert values["eval_accuracy"] >= 0.5
    last = evaluations(small_run / "experiment_0" / "metrics.jsonl")[-1]
    assert quality(last) == pytest.approx(values["eval_accuracy"])


def test_exported_model_detects_alike(encore: Encore, small_run: Path, tmp_path: Path) -> None:
    assert exported(encore, small_run, tmp_path / "exported")["reached"]


def test_small_run_learns_throughout(small_run: Path) -> None:
    curve = losses(small_run / "experiment_0" / "metrics.jsonl")
    assert np.mean(curve[-5:]) < 0.4 * np.mean(curve[:5])


def test_bench_shows_every_kind(encore: Encore, scenes: Path) -> None:
    command = ("bench", "ssd", "--data", str(scenes), "--steps", "1", "--repeats", "1", "--json")
    done = encore(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["measured"]
    assert set(found) == {"bare", "synthetic", "real", "input", "evaluation"}
    assert all(entry["median"] > 0 for entry in found.values())


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("cuda_graph=true", "cuda_graph needs device=gpu"),
        ("optimizer_kernel=apex", "device=cpu has no apex"),
        ("precision=tf32", "set precision=fp32 or precision=bf16"),
        ("eval_steps=[10]; concurrent_evaluation=true", "eval_steps needs concurrent_evaluation=false"),
        ("box_scales=[0.3, 0.2, 0.4, 0.6, 0.8]", "box_scales must rise"),
        ("blocks=[3, 4]", "blocks needs three numbers"),
        ("nms_threshold=2.0", "nms_threshold must lie in 0..1"),
    ],
)
def test_impossible_settings_are_refused(encore: Encore, setting: str, expected: str) -> None:
    options = [word for each in setting.split("; ") for word in ("--set", each)]
    done = encore("run", "ssd", "1", "--system", "cpu", *options, "--dry-run")
    assert done.returncode == 2
    assert expected in done.stderr


def test_missing_weights_are_refused_before_the_training(pytorch_python: Path, scenes: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", 1, "backbone=nothing.pth")
    ((code, words),) = finish(start_ranks(pytorch_python, config, scenes, tmp_path / "run", 1))
    assert code == 2, words
    assert "nothing.pth" in words and "Traceback" not in words
