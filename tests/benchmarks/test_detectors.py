"""SSD and Mask R-CNN: schedules, training on ranks, resume, the log and bad input; see also tests/in_framework."""

import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.maskrcnn import events as maskrcnn_events
from benchmarks.ssd import events as ssd_events
from encore import catalogue, configuration, data
from encore.errors import EncoreError
from encore.results.compliance.compliance import check
from tests.conftest import Encore, evaluations, logged, losses, records
from tests.trainings import BENCHED, BareRuns, assert_resumed, benched, config_of, exported, reached, write_small_config

BOTH = pytest.mark.parametrize("benchmark", ["ssd", "maskrcnn"])


# -- schedules and systems -------------------------------------------------------------------------------


def test_ssds_learning_rate_is_the_submitted_one() -> None:
    config = config_of("ssd", "dgx1", "v0.7", 8)
    assert ssd_events.base_rate(config, 8) == pytest.approx(0.0875), "opt_base_learning_rate of its logs"
    found = [ssd_events.learning_rate(config, step, 8, 123) for step in (0, 1, 325, 650, 5411, 5412, 6765)]
    assert found == pytest.approx([0, 0.0875 / 650, 0.04375, 0.0875, 0.0875, 0.00875, 0.000875])
    later = config_of("ssd", "dgx1_n30", "v0.6", 240)
    assert ssd_events.base_rate(later, 240) == pytest.approx(0.1625)
    assert ssd_events.boundaries(later, 240, 70) == [3047, 3809]


def test_mask_rcnns_learning_rates_are_the_submitted_ones() -> None:
    config = config_of("maskrcnn", "dgxa100", "v0.7", 8)
    # WarmupMultiStepLR: 0.08 - (800 - step) * 0.0001, then tenths after 18,000 and 24,000 steps.
    weights = {0: 0.0, 400: 0.04, 799: 0.0799, 800: 0.08, 17999: 0.08, 18000: 0.008, 24000: 0.0008}
    # Biases have the same subtracted from twice the base value.
    biases = {0: 0.08, 400: 0.12, 799: 0.1599, 800: 0.16, 17999: 0.16, 18000: 0.016, 24000: 0.0016}
    for step in weights:
        assert maskrcnn_events.rates(config, step) == pytest.approx((weights[step], biases[step]))
    default = SimpleNamespace(**{**vars(config), "warmup_factor": 0.0})
    for step, share in ((0, 1 / 3), (400, 2 / 3), (800, 1)):
        assert maskrcnn_events.rates(default, step) == pytest.approx((0.08 * share, 0.16 * share))


# -- training --------------------------------------------------------------------------------------------

EPOCH = {"ssd": 31, "maskrcnn": 12}  # Steps of an epoch; SSD's evaluation comes within its first one


def settings(benchmark: str, ranks: int) -> tuple[str, ...]:
    # Two epochs that cannot reach their target, with one global batch for any number of ranks
    both = ("epochs=2", "log_interval=1")
    if benchmark == "ssd":
        # As v0.5 and v0.6 count, of 32 images: evaluations inside the first epoch and at the end, a drop between.
        steps = ("concurrent_evaluation=false", "eval_steps=[20]", "decay_steps=[40]", "eval_batch_size=9")
        return (*both, *steps, "quality_target=1.0", "width=8", f"batch_size={32 // ranks}")
    targets = ("box_target=0.99", "mask_target=0.99", "warmup_steps=8", "eval_batch_size=4")
    # A rank's batch shares its proposals: with as many for half of the images, more of them hold objects.
    return (*both, *targets, f"batch_size={8 // ranks}", f"rpn_post_nms_top_n={1000 // ranks}")


@pytest.fixture(scope="module")
def scenes(pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    # The toy data set, which both read, and 96 scenes of it for Mask R-CNN's short runs
    folder = tmp_path_factory.mktemp("scenes")
    data.prepare("ssd", folder / "ssd", data.Preparation(), pytorch_python)
    few = ["-m", "benchmarks.maskrcnn.prepare", "-o", str(folder / "maskrcnn"), "--scenes", "96"]
    subprocess.run([str(pytorch_python), *few], check=True, capture_output=True)
    return {"ssd": folder / "ssd", "maskrcnn": folder / "maskrcnn"}


@pytest.fixture(scope="module")
def runs(
    pytorch_python: Path, scenes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, BareRuns]:
    # The short runs of each
    def of(benchmark: str) -> BareRuns:
        def write_config(path: Path, ranks: int, *more: str) -> Path:
            return write_small_config(path, benchmark, ranks, (*settings(benchmark, ranks), *more), seed=7)

        module = f"benchmarks.{benchmark}.pytorch.train"
        return BareRuns(module, pytorch_python, scenes[benchmark], write_config, tmp_path_factory)

    return {benchmark: of(benchmark) for benchmark in EPOCH}


@BOTH
def test_stopped_and_resumed_run_is_an_uninterrupted_one(
    benchmark: str, runs: dict[str, BareRuns], tmp_path: Path
) -> None:
    output, uninterrupted = tmp_path / "stopped", runs[benchmark].uninterrupted(2)
    metrics = output / "metrics.jsonl"
    # Before SSD's first evaluation, and while the detections of Mask R-CNN's first one may still be compared.
    runs[benchmark].stop(output, 2, once=lambda: metrics.exists() and len(records(metrics, "step")) > 12)
    assert_resumed(runs[benchmark].end(output, 2), uninterrupted)
    assert (len(losses(metrics)), len(evaluations(metrics))) == (2 * EPOCH[benchmark], 2)


def test_ssd_evaluates_after_the_submitted_steps(runs: dict[str, BareRuns]) -> None:
    output = runs["ssd"].uninterrupted(2)
    keys = ("epoch_start", "eval_start", "eval_stop", "epoch_stop", "run_stop")
    order = [each["key"] for each in logged(output / "result.txt") if each["key"] in keys]
    assert order == ["epoch_start", "eval_start", "eval_stop", "epoch_stop"] * 2 + ["run_stop"]
    steps = records(output / "metrics.jsonl", "step")
    assert [each["step"] for each in steps] == list(range(1, 63))
    before = [each["time"] for each in records(output / "metrics.jsonl", "eval")]
    assert steps[19]["time"] < before[0], "its detections are those after 20 steps"
    rates = [each["learning_rate"] for each in steps]
    assert rates[40] == pytest.approx(rates[39] / 10, rel=0.1), "the warm-up continues"


def test_two_ranks_of_mask_rcnn_train_like_one(runs: dict[str, BareRuns]) -> None:
    one, two = (losses(runs["maskrcnn"].uninterrupted(ranks) / "metrics.jsonl") for ranks in (1, 2))
    # The same images and weights, other samples; each rank has a mean of its own, of not quite as many of them.
    assert two[0] == pytest.approx(one[0], rel=0.05)
    # The second epochs of six other seeds were 0 to 16 % apart.
    assert np.mean(two[12:]) == pytest.approx(np.mean(one[12:]), rel=0.25)
    assert max(np.mean(one[-6:]) / one[0], np.mean(two[-6:]) / two[0]) < 0.5


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "asked"),
    [
        ("ssd", "0.6.0", ("opt_", "model_bn_span", "max_samples", "global_batch")),
        ("maskrcnn", "0.6.0", ("opt_", "num_image", "_image_size")),
        ("maskrcnn", "0.7.0", ("opt_", "num_image", "_image_size")),
    ],
)
def test_log_has_what_the_checker_asks_for(
    benchmark: str, ruleset: str, asked: tuple[str, ...], runs: dict[str, BareRuns]
) -> None:
    output = runs[benchmark].uninterrupted(2)
    findings = [f"{each.found}, {each.expected}" for each in check(output / "result.txt", ruleset).findings]
    assert [each for each in findings if any(word in each for word in asked)] == []
    events = logged(output / "result.txt")
    accuracies = [each["value"] for each in events if each["key"] == "eval_accuracy"]
    qualities = [list(each["qualities"].values()) for each in evaluations(output / "metrics.jsonl")]
    if benchmark == "ssd":
        found = {each["key"]: each["value"] for each in events}
        assert (found["model_bn_span"], found["global_batch_size"]) == (16, 32)
        assert [[each] for each in accuracies] == [pytest.approx(each) for each in qualities]
    else:
        assert [[each["BBOX"], each["SEGM"]] for each in accuracies] == [pytest.approx(each) for each in qualities]


# -- small runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="reached")
def runs_to_targets(
    encore: Encore, scenes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    return cache(lambda benchmark: reached(encore, benchmark, scenes["ssd"], tmp_path_factory.mktemp(benchmark)))


@BOTH
def test_small_run_reaches_its_targets_and_passes_the_checker(
    benchmark: str, encore: Encore, reached: Callable[[str], Path]
) -> None:
    run = reached(benchmark)
    assert "0 errors" in encore("check", str(run)).stdout
    values = {each["key"]: each["value"] for each in logged(run / "result_0.txt")}
    if benchmark == "ssd":
        assert values["opt_learning_rate_decay_boundary_epochs"] == [12, 15]
        assert values["eval_accuracy"] >= 0.5
    else:
        assert values["eval_accuracy"]["BBOX"] >= 0.40 and values["eval_accuracy"]["SEGM"] >= 0.35
    curve = losses(run / "experiment_0" / "metrics.jsonl")
    assert np.mean(curve[-5:]) < 0.4 * np.mean(curve[:5])


@BOTH
def test_exported_model_finds_what_the_run_found(
    benchmark: str, encore: Encore, reached: Callable[[str], Path], tmp_path: Path
) -> None:
    content: dict[str, Any] = exported(encore, reached(benchmark), tmp_path / "exported")
    qualities = {"ssd": {"map"}, "maskrcnn": {"box_ap", "mask_ap"}}
    assert content["reached"] and set(content["checked"]["quality"]) == qualities[benchmark]
    if benchmark == "maskrcnn":
        assert content["checked"]["samples"] == 120
        assert content["inputs"][0]["shape"] == [-1, 3, -1, -1], "images of any size"


@BOTH
def test_bench_measures_every_kind(benchmark: str, encore: Encore, scenes: dict[str, Path]) -> None:
    assert benched(encore, benchmark, scenes[benchmark]) == BENCHED


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("cuda_graph=true", "cuda_graph needs device=gpu"),
        ("optimizer_kernel=apex", "device=cpu has no apex"),
        ("precision=tf32", "set precision=fp32 or precision=bf16"),
        ("eval_steps=[10]; concurrent_evaluation=true", "eval_steps needs concurrent_evaluation=false"),
        ("box_scales=[0.3, 0.2, 0.4, 0.6, 0.8]", "box_scales must rise"),
        ("blocks=[3, 4]", "blocks needs three numbers"),
        ("nms_threshold=2.0", "nms_threshold must be in 0..1"),
    ],
)
def test_impossible_settings_are_refused(setting: str, expected: str) -> None:
    choice = catalogue.choose("ssd")
    with pytest.raises(EncoreError, match=re.escape(expected)):
        configuration.resolve(choice, catalogue.find_system(choice, "cpu", "v0.7"), 1, 1, setting.split("; "))


@pytest.mark.parametrize(
    ("benchmark", "found", "hint"),
    [
        ("ssd", "R-50.pkl", "name a file with --set backbone=FILE"),
        ("maskrcnn", "it names os.system", "set backbone=FILE"),
    ],
)
def test_wrong_weights_are_refused_before_the_training(
    benchmark: str, found: str, hint: str, runs: dict[str, BareRuns], tmp_path: Path
) -> None:
    file = tmp_path / "R-50.pkl"
    if benchmark == "maskrcnn":
        file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle that calls os.system
    printed = runs[benchmark].refused(tmp_path / "run", 1, f"backbone={file}")
    assert found in printed and f"hint: {hint}" in printed
