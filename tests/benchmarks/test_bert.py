"""BERT: schedule as submitted, a stop in the middle of an accumulation, and weights of another run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.bert import events
from tests.conftest import logged, losses, records
from tests.trainings import BareRuns, InFramework, assert_resumed, bare_runs, config_of, write_small_config


@pytest.fixture(scope="module")
def text(pytorch_python: Path, toy: Callable[[str], Path]) -> Path:
    return toy("bert")


def test_learning_rate_is_the_submitted_one() -> None:
    # The first step of LinearWarmupPolyDecayScheduler is 1; the warm-up began at -76.
    config = config_of("bert", "dgxa100_n256", None, 8, nodes=256)
    rates = [events.learning_rate(config, number - 1) / 0.00288293 for number in (1, 210, 211, 560)]
    assert rates == pytest.approx([77 / 287, 286 / 287, 1 - 211 / 560, 0])
    config = config_of("bert", "dgxa100", None, 8)
    assert events.learning_rate(config, 0) == pytest.approx(3.5e-4 * (1 - 1 / 13700))


def test_evaluations_are_those_of_the_submission() -> None:
    timeline = events.timeline(config_of("bert", "dgxa100", None, 8), 8)
    samples = [step * 256 for step in range(1, timeline.steps + 1) if timeline.evaluates_after(step)]
    assert samples[:3] == [3000064, 3500032, 3507200], "first train_samples of its log, last its max_steps"
    assert timeline.steps == 13700
    assert events.timeline(config_of("bert", "dgx1", None, 8), 8).steps == 13889


# -- training ---------------------------------------------------------------------------------------------

STEPS, PARTS = 10, 8
# A part of a batch has 8 samples. With dropout every bit of the state shows in the losses.
SHORT = (
    *("quality_target=1.0", "layers=1", "width=64", "heads=1", "inner_width=64", "log_interval=1", "max_steps=24"),
    *("eval_start_samples=1536", "eval_interval_samples=1536", "warmup_steps=5", "eval_batch_size=50"),
    *("dropout=0.1", "attention_dropout=0.1", f"accumulation={PARTS}"),
)


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    return write_small_config(path, "bert", ranks, (*SHORT, f"batch_size={64 // ranks}", *settings))


runs = bare_runs("benchmarks.bert.pytorch.train", "text", write_config)


@pytest.mark.long
def test_run_stopped_in_the_middle_of_an_accumulation_has_bit_identical_losses(
    in_pytorch: InFramework, text: Path, runs: BareRuns, tmp_path: Path
) -> None:
    output, config = tmp_path / "stopped", write_config(tmp_path / "config.json", 2)
    # One rank gets the signal in the first of eight parts, both stop after the third; the warm-up is a step, too
    first_part = (1 + STEPS) * PARTS + 1
    in_pytorch("bert_stop.py", str(first_part), str(config), str(text), str(output), ranks=2)
    assert records(output / "metrics.jsonl", "end")[-1]["outcome"] == "interrupted"
    (checkpoint,) = (output / "checkpoint").iterdir()
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    assert (state["step"], state["inside_step"]) == (STEPS, True)
    assert_resumed(runs.end(output, 2), runs.uninterrupted(2))
    keys = [[event["key"] for event in logged(run / "result.txt")] for run in (output, runs.uninterrupted(2))]
    assert keys[0] == keys[1]
    assert keys[0].count("train_samples") == 1


@pytest.mark.long
def test_run_starts_with_the_weights_of_another_run(runs: BareRuns, tmp_path: Path) -> None:
    dry = ("dropout=0.0", "attention_dropout=0.0")
    first = runs.uninterrupted(1, *dry)
    (weights,) = (first / "checkpoint").glob("step_00000024/shared")
    settings = (*dry, f"checkpoint={weights}", "max_steps=2", "eval_start_samples=64")
    second = runs.end(tmp_path / "second", 1, *settings)
    before, after = (losses(output / "metrics.jsonl") for output in (first, second))
    assert after[0] < before[1], "it continues at the last weights"
    # A network of another size is rejected, with the name of every weight that does not fit
    message = runs.refused(tmp_path / "third", 1, *settings, "inner_width=128")
    assert "bert.encoder.layer.0.intermediate.dense.weight has [64, 64] instead of [128, 64]" in message
