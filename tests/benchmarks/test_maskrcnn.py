"""Mask R-CNN: every part against references, schedule, training on ranks, resume, stops, the log and bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.maskrcnn import schedule
from encore import catalogue, configuration, data, paths
from encore.results.compliance.compliance import check
from tests import trainings
from tests.conftest import Encore, logged, losses, only_run, records
from tests.trainings import PATIENCE, InFramework, exported, finish, result, trained_once, write_small_config

SCENES, GLOBAL_BATCH, PROPOSALS = 96, 8, 1000
STEPS = SCENES // GLOBAL_BATCH
"""Of an epoch."""
SHORT = ("epochs=2", "log_interval=1", "warmup_steps=8", "eval_batch_size=4", "box_target=0.99", "mask_target=0.99")


@pytest.fixture(scope="module")
def parts(in_pytorch: InFramework) -> dict[str, Any]:
    """What tests/in_framework/maskrcnn_parts.py and maskrcnn_network.py found."""
    found: dict[str, Any] = result(in_pytorch("maskrcnn_parts.py"))
    return {**found, **result(in_pytorch("maskrcnn_network.py"))}


def test_suppression_keeps_what_one_by_one_keeps(parts: dict[str, Any]) -> None:
    assert all(same for same, _ in parts["suppression"].values())
    assert parts["suppression"]["150 in 1"][1] < 150, "something was removed"


def test_anchors_offsets_and_matches_are_the_published_ones(parts: dict[str, Any]) -> None:
    assert parts["published_anchors"] == 0
    assert parts["offsets"]["encode"] < 1e-12
    assert parts["offsets"]["decode"] < 1e-10
    assert parts["offsets"]["largest"] == pytest.approx(1000)
    assert parts["matching"]["overlaps"] < 1e-12
    assert all(parts["matching"][name] for name in ("True", "False", "of nothing"))


def test_samples_are_of_each_image_and_the_same_for_any_ranks(parts: dict[str, Any]) -> None:
    found = parts["sampling"]
    assert found["positive"] == [16, 7, 0]
    assert found["filled"] == found["distinct"] == [64, 64, 10]
    assert found["right"] and found["same"] and found["other"] and found["alone"]
    assert found["mean"] == pytest.approx(0.5, abs=0.01)
    assert found["deviation"] == pytest.approx(1, abs=0.01)


def test_proposals_are_limited_over_the_batch(parts: dict[str, Any]) -> None:
    assert parts["proposals"] == {"same": True, "of batch": 14, "of each": [5, 5]}


def test_pooling_and_masks_are_those_of_loops(parts: dict[str, Any]) -> None:
    assert parts["roi_align"]["largest error"] < 1e-12
    assert parts["roi_align"]["gradients"] is True
    assert len(parts["roi_align"]["levels"]) >= 3
    assert parts["roi_align"]["none"] == [0, 3, 3, 3]
    assert parts["projection"]["differ"] == 0
    assert 0 < parts["projection"]["drawn"] < parts["projection"]["pixels"]
    assert parts["pasting"] == 0


def test_inclusive_boxes_are_pooled_by_the_submitted_kernels_formula(parts: dict[str, Any]) -> None:
    found = parts["inclusive"]
    assert max(found[name] for name in ("values", "gradient", "exported")) < 1e-12
    assert found["plain"] < 1e-6, "whose points are of fp32"
    assert found["continuous"] > 0.01, "what is a pixel wider has other values"
    assert found["levels"][8] == 1 and set(found["levels"]) == {0, 1, 2, 3}, "by the area with the last pixel"


def test_boxes_are_inclusive_where_the_submitted_code_has_them_so(parts: dict[str, Any]) -> None:
    four = {"begins": 0.0, "drawn": True}
    assert parts["corners"] == {
        "True": {"edges": [1.0] * 4, "ends": 1.0, **four},
        "False": {"edges": [0.0] * 4, "ends": 0.0, **four},
    }
    assert parts["objects"] == {
        "error": pytest.approx(0, abs=1e-4),
        "kept": [[1, 2, 3, 5]] * 2,
        "back": pytest.approx(0, abs=1e-4),
    }


def test_evaluation_lets_cudnn_measure_nothing(parts: dict[str, Any]) -> None:
    assert parts["tuning"] == [True, False, True]


def test_weights_and_biases_have_rates_of_their_own(parts: dict[str, Any]) -> None:
    weights, biases, twice = (parts["of_each_rate"][rates] for rates in ("(0.01, 0.0)", "(0.0, 0.01)", "(0.0, 0.02)"))
    assert weights[0] > 0 and weights[1] == 0
    assert biases[0] == twice[0] == 0
    assert twice[1] == pytest.approx(2 * biases[1], rel=1e-3) and biases[1] > 0


def test_losses_are_the_equations(parts: dict[str, Any]) -> None:
    assert parts["loss_values"]["largest error"] < 1e-12
    assert parts["loss_values"]["finite"] is True, "a box without area has no finite offset"
    assert parts["loss_values"]["gradients"] is True
    assert parts["loss_values"]["of nothing"] == [0, 0]


def test_batch_norm_of_either_file_is_folded(parts: dict[str, Any]) -> None:
    assert parts["folded"] == {"largest error": pytest.approx(0, abs=1e-10), "shifts": False}
    assert parts["frozen"] == {"same": True, "trained": True}


def test_every_precision_trains_and_detects(parts: dict[str, Any]) -> None:
    found = parts["precisions"]
    for precision in ("fp32", "bf16", "fp16"):
        assert found[precision][-1] < 0.8 * found[precision][0]
        assert found[precision] == pytest.approx(found["fp32"], rel=0.2), "what is proposed depends on the last bits"
        assert found[f"{precision} detects"] is True
    assert found["bf16"] != found["fp32"] != found["fp16"]


def test_fixed_shapes_of_gpus_give_the_same_losses(parts: dict[str, Any]) -> None:
    assert parts["fixed_shapes"] < 1e-5


def test_program_of_fixed_shapes_finds_what_the_training_code_finds(parts: dict[str, Any]) -> None:
    for found in parts["served"].values():
        assert found["difference"] < 1e-4
    assert parts["served"]["full"]["detections"] == parts["served"]["full"]["places"], "a place for the best ones alone"
    assert 0 < parts["served"]["sparse"]["detections"] < parts["served"]["sparse"]["places"], "places that are empty"


def test_step_on_a_gpu_waits_for_nothing(parts: dict[str, Any]) -> None:
    found = parts["waiting"]
    assert found["true"] == []
    assert set(found["false"]) == {"_local_scalar_dense", "nonzero"}, "the watch sees what a CPU may wait for"
    assert found["operators"] > 500


def test_graph_holds_batches_with_any_number_of_edges(parts: dict[str, Any]) -> None:
    plainly, held = parts["captured"]["losses"]
    assert held == plainly
    assert parts["captured"]["graphs"] == ["graph", None, None]


def test_pixels_are_doubled_as_interpolated(parts: dict[str, Any]) -> None:
    same, error = parts["doubled"]
    assert same is True and error < 1e-12


def test_warming_up_changes_nothing(parts: dict[str, Any]) -> None:
    assert parts["precisions"]["warmed"] == parts["precisions"]["fp16"]


def test_torchvision_is_used_where_it_is_right(parts: dict[str, Any]) -> None:
    found = parts["with_torchvision"]
    assert found["wanted"] == {
        "suppression": "torchvision",
        "matching": "plain",
        "roi_align": "torchvision",
        "project_masks": "plain",
    }
    assert found["error"] < 2e-5
    assert found["wrong"] == "plain"
    assert found["resumed"] is True


def test_checkpoint_continues_to_the_bit(parts: dict[str, Any]) -> None:
    first, second = parts["resumed"]
    assert first == second


def test_each_rank_groups_its_own_images_by_aspect(parts: dict[str, Any]) -> None:
    found = parts["ordering"]
    assert all(len(set(steps)) == 1 for steps in found["steps"]), "all ranks have as many"
    assert found["missing"] == 0 and max(found["mixed"]) <= 1
    assert found["same shapes"] == [True, False, False], "each rank has shapes of its own"
    assert found["published"] == [[1066, 800], [800, 1066], [1335, 267]], "as the submitted code rounds"
    wanted = ("as sampled", "fits", "evaluated once", "same", "another epoch", "known")
    assert [name for name in wanted if not found[name]] == []


# -- schedule and systems --------------------------------------------------------------------------------


def config_of(system: str, round_: str, ranks: int) -> SimpleNamespace:
    choice = catalogue.choose("maskrcnn")
    found = catalogue.find_system(choice, system, round_)
    return SimpleNamespace(**configuration.resolve(choice, found, 1, ranks, []).plain())


def test_learning_rate_is_the_submitted_one() -> None:
    config = config_of("dgxa100", "v0.7", 8)
    # WarmupMultiStepLR: 0.08 - (800 - step) * 0.0001, then tenths after 18,000 and 24,000 steps.
    expected = {0: 0.0, 400: 0.04, 799: 0.0799, 800: 0.08, 17999: 0.08, 18000: 0.008, 24000: 0.0008}
    assert {step: schedule.rates(config, step).weights for step in expected} == pytest.approx(expected)
    # Of biases the same is subtracted from twice the base value.
    biases = {0: 0.08, 400: 0.12, 799: 0.1599, 800: 0.16, 17999: 0.16, 18000: 0.016, 24000: 0.0016}
    assert {step: schedule.rates(config, step).biases for step in biases} == pytest.approx(biases)
    default = SimpleNamespace(**{**vars(config), "warmup_factor": 0.0})
    assert schedule.rates(default, 0) == pytest.approx((0.08 / 3, 0.16 / 3))
    assert schedule.rates(default, 400) == pytest.approx((0.08 * 2 / 3, 0.16 * 2 / 3))


def test_submitted_systems_have_the_submitted_global_batch() -> None:
    batches = {"dgx1": 48, "dgx2": 96, "dgxa100": 64, "dgxa100_n32": 256, "dgx2_n16": 256, "dgxa100_n4": 128}
    choice = catalogue.choose("maskrcnn")
    for name, batch in batches.items():
        system = catalogue.find_system(choice, name, "v0.7")
        resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, []).plain()
        assert resolved["batch_size"] * system.nodes * system.gpus_per_node == batch


# -- training --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the small data set."""
    folder = tmp_path_factory.mktemp("scenes") / "maskrcnn"
    command = [str(pytorch_python), "-m", "benchmarks.maskrcnn.prepare", "--to", str(folder), "--scenes", str(SCENES)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return folder


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    # A rank's batch shares its proposals: with as many for half of the images, more of them hold objects.
    share = (f"batch_size={GLOBAL_BATCH // ranks}", f"proposals_train={PROPOSALS // ranks}")
    values = (*SHORT, *share, *settings)
    return write_small_config(path, "maskrcnn", ranks, values, seed=7)


start_ranks = partial(trainings.start_ranks, "benchmarks.maskrcnn.pytorch.train")


def found_qualities(metrics: Path) -> list[dict[str, float]]:
    return [each["qualities"] for each in records(metrics, "eval")]


@pytest.fixture(scope="module")
def unbroken(pytorch_python: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Trains two epochs without disturbance, once for each number of ranks; its output."""

    def start(config: Path, output: Path, ranks: int) -> list[subprocess.Popen[str]]:
        return start_ranks(pytorch_python, config, scenes, output, ranks)

    return trained_once(tmp_path_factory, write_config, start)


def test_two_ranks_train_like_one(unbroken: Callable[[int], Path]) -> None:
    one, two = (losses(unbroken(ranks) / "metrics.jsonl") for ranks in (1, 2))
    assert len(one) == len(two) == 2 * STEPS
    # The same images and weights, other samples; each rank has a mean of its own, of not quite as many of them.
    assert two[0] == pytest.approx(one[0], rel=0.05)
    # Of six other seeds the second epochs were 0 to 16 % apart.
    assert np.mean(two[STEPS:]) == pytest.approx(np.mean(one[STEPS:]), rel=0.25)
    assert max(np.mean(one[-6:]) / one[0], np.mean(two[-6:]) / two[0]) < 0.5


def test_log_names_both_qualities_and_passes_but_for_the_targets(unbroken: Callable[[int], Path]) -> None:
    output = unbroken(2)
    values = [each["value"] for each in logged(output / "result.txt") if each["key"] == "eval_accuracy"]
    assert [set(value) for value in values] == [{"BBOX", "SEGM"}] * 2
    assert [[value["BBOX"], value["SEGM"]] for value in values] == [
        pytest.approx([each["box_ap"], each["mask_ap"]]) for each in found_qualities(output / "metrics.jsonl")
    ]
    for ruleset in ("0.6.0", "0.7.0"):
        told = [finding.found for finding in check(output / "result.txt", ruleset).findings]
        assert [text for text in told if "opt_" in text or "num_image" in text or "_image_size" in text] == []


def test_stopped_and_resumed_run_is_an_unbroken_one(
    pytorch_python: Path, scenes: Path, unbroken: Callable[[int], Path], tmp_path: Path
) -> None:
    expected = unbroken(2) / "metrics.jsonl"
    output, config = tmp_path / "stopped", write_config(tmp_path / "config.json", 2)
    children = start_ranks(pytorch_python, config, scenes, output, 2)
    metrics = output / "metrics.jsonl"
    # In the second epoch, while the first one's detections may still be evaluated.
    while not metrics.exists() or len(records(metrics, "step")) <= STEPS:
        assert children[0].poll() is None, children[0].communicate()
        time.sleep(0.01)
    children[-1].send_signal(signal.SIGTERM)  # one rank is asked, all stop at the same place
    assert [code for code, _ in finish(children)] == [0, 0]
    assert records(metrics, "end")[-1]["outcome"] == "interrupted"
    ended = finish(start_ranks(pytorch_python, config, scenes, output, 2))
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(metrics) == losses(expected)
    assert found_qualities(metrics) == found_qualities(expected)
    assert len(found_qualities(metrics)) == 2


def test_wrong_backbone_is_refused(pytorch_python: Path, scenes: Path, tmp_path: Path) -> None:
    file = tmp_path / "R-50.pkl"
    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle that calls os.system
    config = write_config(tmp_path / "config.json", 1, f"backbone={file}")
    ((code, words),) = finish(start_ranks(pytorch_python, config, scenes, tmp_path / "run", 1))
    assert code == 2
    assert "it names os.system" in words
    assert "do this: set backbone=FILE" in words
    assert "Traceback" not in words


@pytest.fixture(scope="module")
def reached(encore: Encore, pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, until both targets are reached; its folder."""
    folder = tmp_path_factory.mktemp("reached")
    data.prepare("maskrcnn", folder / "data", data.Preparation(), pytorch_python)
    where = ("--data", str(folder / "data"), "--results", str(folder / "results"), "--seed", "1")
    done = encore("run", "maskrcnn", "2", *where)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder / "results")


def test_small_run_reaches_both_targets_and_passes_the_checker(encore: Encore, reached: Path) -> None:
    assert "0 errors" in encore("check", str(reached)).stdout
    values = [each["value"] for each in logged(reached / "result_0.txt") if each["key"] == "eval_accuracy"]
    assert max(value["BBOX"] for value in values) >= 0.40
    assert max(value["SEGM"] for value in values) >= 0.35


def test_exported_model_finds_what_the_run_found(encore: Encore, reached: Path, tmp_path: Path) -> None:
    content = exported(encore, reached, tmp_path / "exported")
    assert content["reached"] and set(content["checked"]["quality"]) == {"box_ap", "mask_ap"}
    assert content["checked"]["samples"] == 120
    assert content["inputs"][0]["shape"] == [-1, 3, -1, -1], "images of any size"


def test_bench_shows_every_kind(encore: Encore, scenes: Path) -> None:
    done = encore("bench", "maskrcnn", "--data", str(scenes), "--steps", "1", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["measured"]
    assert set(found) == {"bare", "synthetic", "real", "input", "evaluation"}
    assert all(entry["median"] > 0 for entry in found.values())
