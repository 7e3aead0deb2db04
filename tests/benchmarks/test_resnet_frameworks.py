"""ResNet in its three frameworks by the same tests: real runs on one and two ranks, and what is refused before one."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue, configuration
from encore.errors import EncoreError
from tests.conftest import Encore, evaluations, logged, losses, only_run
from tests.trainings import SEED, Started, assert_none_left, evaluated, exported, settings

TARGET = "0.3"
EPOCH = 24  # steps that go over the small data set once
AGREE = 36  # steps of which the last ones are compared: the loss falls by then
FRAMEWORKS = ("pytorch", "tensorflow")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    # Each framework in turn.
    return str(request.param)


# One reaches the target, and the others are compared with its first epochs.


@dataclass(frozen=True)
class Reached:
    # A run on two ranks that reached its target: its folder and what --json printed.
    folder: Path
    printed: dict[str, Any]

    @property
    def metrics(self) -> Path:
        # Its metrics stream.
        return self.folder / "experiment_0" / "metrics.jsonl"


@pytest.fixture(scope="module")
def reached(framework: str, encore: Encore, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Reached:
    # Trains until a target is reached that MXNet passes on its way to the small set's own: it is as far as all learn.
    results = tmp_path_factory.mktemp("reached")
    where = ("--data", str(digits), "--results", str(results))
    done = encore("run", f"resnet-{framework}", "2", *SEED, *where, *settings({"quality_target": TARGET}), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return Reached(only_run(results), json.loads(done.stdout))


def test_run_on_two_ranks_reaches_the_target(framework: str, reached: Reached) -> None:
    (experiment,) = reached.printed["experiments"]
    assert experiment["status"] == "reached"
    assert experiment["qualities"]["accuracy"] >= experiment["targets"]["accuracy"] == float(TARGET)
    assert experiment["minutes"] > 0
    compliance = experiment["compliance"]
    errors = [finding for finding in compliance["findings"] if finding["severity"] == "error"]
    assert {finding["kind"] for finding in errors} == {"small_data"}
    assert compliance["passed_but_for_data"]
    system = json.loads((reached.folder / "system.json").read_text(encoding="utf-8"))
    assert system["other_software_stack"][f"{framework}_version"].startswith("2.")
    keys = [event["key"] for event in logged(reached.folder / "result_0.txt")]
    for key in ("init_start", "init_stop", "run_start", "run_stop", "seed", "global_batch_size"):
        assert keys.count(key) == 1, key


def test_exported_model_is_the_one_that_reached_the_target(
    framework: str, reached: Reached, encore: Encore, serving_python: Path, tmp_path: Path
) -> None:
    # A server's clients get its quality too.
    formats = {"pytorch": "torch-export", "tensorflow": "saved-model"}
    content = exported(encore, reached.folder, tmp_path / "exported", formats[framework])
    assert content["reached"]
    evaluated(encore, tmp_path / "exported", reached.folder, content)


def test_two_ranks_agree_with_one(framework: str, reached: Reached, digits: Path, tmp_path: Path) -> None:
    # Two threads of one rank wait for each other in turns beside the gate's other trainings.
    started = Started.run(digits, tmp_path, "--env", "OMP_NUM_THREADS=1", name=f"resnet-{framework}", ranks=1)
    folder = started.wait_for_step(AGREE)
    started.process.send_signal(signal.SIGTERM)
    code, output = started.end()
    assert code == 130, output
    one, two = losses(folder / "metrics.jsonl"), losses(reached.metrics)
    # Two ranks draw other images into a step and normalize over half of the batch.
    last = slice(AGREE - 12, AGREE)
    assert sum(two[last]) == pytest.approx(sum(one[last]), rel=0.25)
    assert two[0] == pytest.approx(one[0], rel=0.1)


def test_signal_writes_a_checkpoint_resume_is_exact_and_a_rank_that_dies_is_named(
    framework: str, reached: Reached, digits: Path, tmp_path: Path
) -> None:
    started = Started.run(digits, tmp_path, name=f"resnet-{framework}")
    # Before the first evaluation, for which the ranks' statistics must be those that each of them had.
    folder = started.wait_for_step(EPOCH - 12)
    ranks = started.ranks(folder)
    started.process.send_signal(signal.SIGTERM)
    code, output = started.end()
    assert code == 130, output
    assert "a checkpoint was written" in output
    assert_none_left(ranks)

    resumed = Started.again(folder.parent)
    resumed.wait_for_step(EPOCH + 4)
    ranks = resumed.ranks(folder)
    os.kill(ranks[1].pid, signal.SIGKILL)
    code, output = resumed.end()
    assert code == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    assert_none_left(ranks)

    curve, unbroken = losses(folder / "metrics.jsonl"), losses(reached.metrics)
    assert len(curve) > EPOCH
    assert curve == unbroken[: len(curve)]
    found = evaluations(folder / "metrics.jsonl")
    assert len(found) == 1
    assert found == evaluations(reached.metrics)[:1]


EVERY = {
    "optimizer": "lars",
    "learning_rate": "4.0",
    "gradient_compression": "fp16",
    "epochs": "1",
    "warmup_epochs": "0.5",
}
# In fp32: a CPU without instructions for bf16 takes 40 times as long for it; steps in bf16 are in tests/in_framework.
SCALED = {
    **EVERY,
    "accumulation_steps": "2",
    "loss_scale": "128",
    "image_size": "16",
    "eval_resize": "16",
}
OPTIONS = {
    "resnet": {
        **EVERY, "schedule": "step", "decay_epochs": "[1]", "gradient_groups": "3", "depth": "50",
        "label_smoothing": "0", "mirror": "true", "eval_period": "2", "eval_offset": "1", "batch_size": "64",
        "log_interval": "1",
    },
    "resnet-pytorch": {**SCALED, "compile": "default", "bucket_mb": "8"},
    "resnet-tensorflow": {**SCALED, "gradient_groups": "3"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("mxnet_python", "pytorch_python", "tensorflow_python")
def test_every_option_of_the_step_trains(encore: Encore, few_digits: Path, tmp_path: Path, name: str) -> None:
    # LARS, both schedules, a scaled loss, micro-batches, fp16 on the wire in groups: two ranks, one epoch.
    where = ("--data", str(few_digits), "--results", str(tmp_path), "--seed", "7")
    done = encore("run", name, "2", *where, *settings({**OPTIONS[name], "quality_target": "1.0"}))
    assert done.returncode == 3, done.stdout + done.stderr
    folder = only_run(tmp_path)
    keys = [event["key"] for event in logged(folder / "result_0.txt")]
    assert ("lars_opt_base_learning_rate" in keys, keys.count("eval_accuracy")) == (True, 1)
    curve = losses(folder / "experiment_0" / "metrics.jsonl")
    assert len(curve) == (6 if name == "resnet" else EPOCH // 2)
    assert all(0 < loss < 10 for loss in curve)
    # Not enough to learn from, for a network of 50 layers.
    assert name == "resnet" or curve[-1] < 0.9 * curve[0]


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        ("resnet-pytorch", "precision=fp16", "set precision=fp32 or precision=bf16"),
        ("resnet-pytorch", "cuda_graph=true", "cuda_graph needs device=gpu"),
        ("resnet-pytorch", "accumulation_steps=3", "must be a multiple of accumulation_steps=3"),
        ("resnet-pytorch", "bucket_mb=0", "bucket_mb must be at least 1"),
        ("resnet-pytorch", "compile=fast", "default"),
        ("resnet-tensorflow", "precision=tf32", "set precision=fp32 or precision=bf16"),
        ("resnet-tensorflow", "layout=NCHW", "one of NHWC"),
        ("resnet-tensorflow", "gradient_groups=-1", "gradient_groups must be at least 0"),
        ("resnet", "dali_hw_decoder_load=1.5", "dali_hw_decoder_load must be in 0..1"),
        ("resnet", "dali_crop_hint=-1", "dali_crop_hint must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(name: str, setting: str, expected: str) -> None:
    choice = catalogue.choose(name)
    with pytest.raises(EncoreError) as refused:
        configuration.resolve(choice, catalogue.find_system(choice, "cpu", None), 1, 1, [setting])
    assert expected in str(refused.value) and refused.value.exit_code == 2


def test_system_of_another_framework_is_not_a_submitted_configuration(encore: Encore) -> None:
    shown = json.loads(encore("show", "resnet-tensorflow", "--system", "dgxa100", "--json").stdout)
    assert shown["submitted"] is False
    assert shown["deviations"] == [{"key": "framework", "text": "tensorflow instead of mxnet"}]
