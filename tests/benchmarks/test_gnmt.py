"""GNMT: network and loss against their equations, schedule, order of v0.5, training on ranks, resume and bad input."""

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

from benchmarks.common.data.problem import Problem
from benchmarks.gnmt import schedule
from benchmarks.translation import orders
from encore import catalogue, configuration, data
from encore.results.compliance.compliance import check
from encore.results.logs.reader import read_events
from tests import trainings
from tests.conftest import Encore, evaluations, inside, logged, losses, only_run, quality, records
from tests.trainings import InFramework, exported, finish, result, steps_so_far, trained_once, write_small_config


@pytest.fixture(scope="module")
def language(pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data set."""
    folder = tmp_path_factory.mktemp("language") / "gnmt"
    data.prepare("gnmt", folder, data.Preparation(), pytorch_python)
    return folder


def config_of(system: str, round_: str, ranks: int) -> SimpleNamespace:
    choice = catalogue.choose("gnmt")
    found = catalogue.find_system(choice, system, round_)
    return SimpleNamespace(**configuration.resolve(choice, found, 1, ranks, []).plain())


# -- the network, the schedule, the order --------------------------------------------------------------


@pytest.fixture(scope="module")
def network(in_pytorch: InFramework) -> dict[str, Any]:
    """What tests/in_framework/gnmt_model.py found."""
    found: dict[str, Any] = result(in_pytorch("gnmt_model.py"))
    return found


def test_network_and_loss_are_the_equations(network: dict[str, Any]) -> None:
    assert network["equations"]["loss"] < 1e-12
    assert network["equations"]["derivative"] < 1e-6
    assert network["scores"]["largest error"] < 1e-12, "chunks of any size are the scores at once"
    assert network["initial"]["most"] <= 0.1
    assert network["initial"]["of scale"] == pytest.approx(12**-0.5)
    assert len(network["initial"]["constant"]) == 11


def test_decoding_step_by_step_is_decoding_at_once(network: dict[str, Any]) -> None:
    assert network["stepwise"]["forced"] < 1e-12
    assert network["stepwise"]["equations"] < 1e-12
    assert network["stepwise"]["rows"] == [2, 37]
    assert network["batched"]["learnt"] is True, "the translations end by themselves, at different lengths"
    assert network["batched"]["same"] is True


def test_every_precision_trains(network: dict[str, Any]) -> None:
    found = network["precisions"]
    for precision, tolerance in (("bf16", 0.02), ("fp16", 0.005)):
        assert found[precision] == pytest.approx(found["fp32"], rel=tolerance)
        assert found[precision] != found["fp32"]
        assert found[f"{precision} decodes"] is True
    assert found["fp32"][-1] < 0.8 * found["fp32"][0]
    assert found["overflow"]["unchanged"] is True
    assert found["overflow"]["scale"] == pytest.approx(1.5e38), "halved"


def test_update_is_clipped_adam_on_the_loss_per_sentence(network: dict[str, Any]) -> None:
    assert network["update"]["norm"] > 0.5, "or nothing is clipped"
    assert network["update"]["error"] < 1e-5
    assert network["update"]["reported"] < 1e-5


def test_learning_rate_is_the_submitted_one() -> None:
    config = config_of("dgxa100", "v0.7", 8)
    steps = (1, 100, 200, 201, 4053, 4054, 4559, 4560, 5065, 5066, 5571, 5572, 100_000)
    # Its WarmupMultiStepLR counts the first step as 1.
    found = [schedule.learning_rate(config, step - 1) / 2.875e-3 for step in steps]
    first = 0.01 ** (199 / 200)
    assert found == pytest.approx([first, 0.1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625])


def test_shards_are_sorted_and_differ_in_each_epoch() -> None:
    random = np.random.RandomState(0)
    source, target = random.randint(2, 60, (2, 5000))
    size = {"batch_size": 16, "ranks": 2, "seed": 1, "longest": 50, "shard_size": 10}
    first, second = (orders.by_shards(source, target, **size, epoch=epoch) for epoch in (0, 1))
    fitting = np.flatnonzero(np.maximum(source, target) <= 48)
    assert first.steps == second.steps == len(fitting) // 32
    assert len(set(first.sentences)) == first.steps * 32
    assert set(first.sentences) <= set(fitting)
    assert (first.sentences != second.sentences).any()
    sums = (source + target)[first.sentences].reshape(first.steps, 32)
    assert (np.diff(sums, axis=1) >= 0).all()
    # Steps of a shard share few lengths: a tenth of what random ones spread over.
    assert np.ptp(sums, axis=1).mean() < 0.25 * np.ptp(source + target)
    with pytest.raises(Problem, match="fewer than the 32,000 of a step"):
        orders.by_shards(source, target, **{**size, "batch_size": 16000}, epoch=0)


# -- training ------------------------------------------------------------------------------------------

SHORT = (
    *("epochs=2", "quality_target=100.0", "width=16", "layers=3", "max_length_train=14", "log_interval=1"),
    *("warmup_steps=5", "beam_size=2", "eval_batch_size=20", "max_length_test=20"),
)
GLOBAL_BATCH = 192
STEPS = 20
"""Less than an epoch has."""


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    """config.json of the small system with a fixed seed; a single rank logs in the dialect of v0.6."""
    size = f"batch_size={GLOBAL_BATCH // ranks}"
    return write_small_config(path, "gnmt", ranks, (*SHORT, size, *settings), "v0.6" if ranks == 1 else "v0.7")


start_ranks = partial(trainings.start_ranks, "benchmarks.gnmt.pytorch.train")


@pytest.fixture(scope="module")
def unbroken(pytorch_python: Path, language: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains two epochs without disturbance, once for each number of ranks and settings; its output."""

    def start(config: Path, output: Path, ranks: int) -> list[subprocess.Popen[str]]:
        return start_ranks(pytorch_python, config, language, output, ranks)

    return trained_once(tmp_path_factory, write_config, start)


def test_two_ranks_train_like_one(unbroken: Callable[..., Path]) -> None:
    one, two = (unbroken(ranks, "dropout=0.0") for ranks in (1, 2))
    first, second = (losses(output / "metrics.jsonl") for output in (one, two))
    assert len(first) == len(second) > 2 * STEPS
    # The same pairs and weights: sums in another order are the only difference, and training lets it grow.
    assert second[:STEPS] == pytest.approx(first[:STEPS], abs=1e-4)
    assert second == pytest.approx(first, abs=5e-3)
    texts = [(output / "translations.jsonl").read_text(encoding="utf-8").splitlines() for output in (one, two)]
    assert [len(each) for each in texts] == [400, 400]
    assert sum(a == b for a, b in zip(*texts, strict=True)) > 380, "of so small a network, by errors in the last bits"


def test_log_has_what_the_checker_of_v06_asks_for(unbroken: Callable[..., Path]) -> None:
    output = unbroken(1, "dropout=0.0")
    values = [event.value for event in read_events(output / "result.txt") if event.key == "eval_accuracy"]
    assert values == pytest.approx([quality(each) for each in evaluations(output / "metrics.jsonl")])
    report = check(output / "result.txt", "0.6.0")
    told = [finding.found for finding in report.findings if "opt_" in finding.expected or "max_seq" in finding.expected]
    assert told == []


def test_run_stopped_in_training_and_in_evaluation_and_resumed_is_an_unbroken_one(
    pytorch_python: Path, language: Path, unbroken: Callable[..., Path], tmp_path: Path
) -> None:
    # So many batches of an evaluation that the signal comes within it.
    settings = ("eval_batch_size=4",)
    expected = unbroken(2, *settings) / "metrics.jsonl"
    output, config = tmp_path / "stopped", write_config(tmp_path / "config.json", 2, *settings)
    metrics, log = output / "metrics.jsonl", output / "result.txt"

    def stopped_once(reached: Callable[[], bool]) -> None:
        children = start_ranks(pytorch_python, config, language, output, 2)
        while not reached():
            assert children[0].poll() is None, children[0].communicate()
            time.sleep(0.01)
        children[-1].send_signal(signal.SIGTERM)  # one rank is asked, all stop at the same place
        ended = finish(children)
        assert [code for code, _ in ended] == [0, 0], ended
        assert records(metrics, "end")[-1]["outcome"] == "interrupted"
        assert evaluations(metrics) == [], "it was stopped before the first evaluation was over"

    stopped_once(lambda: steps_so_far(metrics) >= STEPS // 2)
    stopped_once(lambda: "eval_start" in log.read_text(encoding="utf-8"))
    assert len(losses(metrics)) == len(losses(expected)) // 2
    ended = finish(start_ranks(pytorch_python, config, language, output, 2))
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(metrics) == losses(expected)
    assert evaluations(metrics) == evaluations(expected)
    assert len(evaluations(metrics)) == 2


@pytest.fixture(scope="module")
def reached(encore: Encore, language: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small system on two ranks, to its target."""
    results = tmp_path_factory.mktemp("reached")
    done = encore("run", "gnmt", "2", "--data", str(language), "--results", str(results), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(results)


def test_small_run_reaches_the_target_and_passes_the_checker(encore: Encore, reached: Path) -> None:
    assert "0 errors" in encore("check", str(reached)).stdout
    values = {each["key"]: each["value"] for each in logged(reached / "result_0.txt")}
    assert values["eval_samples"] == 400
    assert 0.6 <= values["eval_accuracy"] <= 1.0, "v0.7 logs BLEU as a share of 1"
    lines = (reached / "experiment_0" / "translations.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line) for line in lines]
    assert [each["index"] for each in texts] == list(range(400))
    assert np.mean([each["bleu"] for each in texts]) > 60
    assert sum(each["hypothesis"] == each["reference"] for each in texts) > 100


def test_exported_parts_translate_like_the_run(
    encore: Encore, reached: Path, serving_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So small a model is slower on many threads.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    content = exported(encore, reached, tmp_path / "exported", "onnx")
    assert list(content["parts"]) == ["encoder", "decoder"]
    found = result(inside(serving_python, (), "exported_step.py", str(tmp_path / "exported" / "decoder")))
    assert found["apart"] > 0.1, "hypotheses that are all alike show nothing"
    assert found["largest"] < 1e-4


def test_bench_shows_every_kind(encore: Encore, language: Path) -> None:
    command = ("bench", "gnmt", "--data", str(language), "--steps", "2", "--repeats", "1", "--json")
    small = ("width=16", "layers=3", "batch_size=64", "beam_size=2", "max_length_test=20")
    done = encore(*command, *(word for setting in small for word in ("--set", setting)))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["measured"]
    assert set(found) == {"bare", "synthetic", "real", "input", "one by one", "evaluation"}
    assert all(entry["median"] > 0 for entry in found.values())


def test_too_large_a_batch_is_refused(pytorch_python: Path, language: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", 2, "batch_size=8000")
    ended = finish(start_ranks(pytorch_python, config, language, tmp_path / "run", 2))
    assert [code for code, _ in ended] == [2, 2], ended
    assert "do this: set a smaller batch_size, take fewer ranks, or more data" in ended[0][1]
    assert "Traceback" not in ended[0][1] + ended[1][1]
