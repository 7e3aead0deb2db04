"""BERT: schedule, training on ranks, resume and bad input; network and step are in tests/in_framework/pytorch."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bert import events
from tests.conftest import Encore, evaluations, logged, losses, quality, records
from tests.trainings import (
    BENCHED,
    BareRuns,
    InFramework,
    assert_resumed,
    bare_runs,
    benched,
    config_of,
    exported,
    reached,
    write_small_config,
)


@pytest.fixture(scope="module")
def text(pytorch_python: Path, toy: Callable[[str], Path]) -> Path:
    return toy("bert")


# -- schedule and timeline -----------------------------------------------------------------------------


def test_learning_rate_is_the_submitted_one() -> None:
    # LinearWarmupPolyDecayScheduler, whose first step is 1; the warm-up began at -76.
    config = config_of("bert", "dgxa100_n256", None, 8, nodes=256)
    found = [events.learning_rate(config, number - 1) / 0.00288293 for number in (1, 210, 211, 560)]
    assert found == pytest.approx([77 / 287, 286 / 287, 1 - 211 / 560, 0])
    config = config_of("bert", "dgxa100", None, 8)
    assert events.learning_rate(config, 0) == pytest.approx(3.5e-4 * (1 - 1 / 13700))


def test_evaluations_are_those_of_the_submission() -> None:
    timeline = events.timeline(config_of("bert", "dgxa100", None, 8), 8)
    evaluates = [step * 256 for step in range(1, timeline.steps + 1) if timeline.evaluates_after(step)]
    assert evaluates[:3] == [3000064, 3500032, 3507200], "the first is train_samples of its log, the last its max_steps"
    assert timeline.steps == 13700
    assert events.timeline(config_of("bert", "dgx1", None, 8), 8).steps == 13889


# -- training ------------------------------------------------------------------------------------------

SHORT = (
    *("quality_target=1.0", "layers=1", "width=64", "heads=1", "inner_width=64", "log_interval=1", "max_steps=24"),
    *("eval_start_samples=1536", "eval_interval_samples=1536", "warmup_steps=5", "eval_batch_size=50"),
    # Each part of a batch is 8 samples; the loss is noisy, and every bit counts.
    *("dropout=0.1", "attention_dropout=0.1"),
)
GLOBAL_BATCH, STEPS, PARTS = 64, 10, 8


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    # config.json of the small system with a fixed seed.
    size = (f"batch_size={GLOBAL_BATCH // ranks}", f"accumulation={PARTS}")
    return write_small_config(path, "bert", ranks, (*SHORT, *size, *settings))


runs = bare_runs("benchmarks.bert.pytorch.train", "text", write_config)
DRY = ("dropout=0.0", "attention_dropout=0.0")


def test_run_stopped_in_the_middle_of_an_accumulation_resumes_as_an_uninterrupted_one(
    in_pytorch: InFramework, text: Path, runs: BareRuns, tmp_path: Path
) -> None:
    output, config = tmp_path / "stopped", write_config(tmp_path / "config.json", 2)
    # One rank is asked in the first of eight parts, both stop behind the third; the warm-up is a step, too.
    first_part = (1 + STEPS) * PARTS + 1
    in_pytorch("bert_stop.py", str(first_part), str(config), str(text), str(output), ranks=2)
    assert records(output / "metrics.jsonl", "end")[-1]["outcome"] == "interrupted"
    (checkpoint,) = (output / "checkpoint").iterdir()
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    assert (state["step"], state["inside_step"]) == (STEPS, True)
    assert_resumed(runs.end(output, 2), runs.uninterrupted(2))
    keys = [[event["key"] for event in logged(each / "result.txt")] for each in (output, runs.uninterrupted(2))]
    assert keys[0] == keys[1]
    assert keys[0].count("train_samples") == 1


def test_two_ranks_train_like_one(runs: BareRuns) -> None:
    one, two = (losses(runs.uninterrupted(ranks, *DRY) / "metrics.jsonl") for ranks in (1, 2))
    # The same samples and weights: sums in another order are the only difference.
    assert len(one) == 24 and two == pytest.approx(one, abs=1e-3)


def test_a_run_begins_with_the_weights_of_another(runs: BareRuns, tmp_path: Path) -> None:
    first = runs.uninterrupted(1, *DRY)
    (trained,) = (first / "checkpoint").glob("step_00000024/shared")
    settings = (*DRY, f"checkpoint={trained}", "max_steps=2", "eval_start_samples=64")
    second = runs.end(tmp_path / "second", 1, *settings)
    before, after = (losses(output / "metrics.jsonl") for output in (first, second))
    assert after[0] < before[1], "it continues where the other one ended"
    # A network of another size is refused, and each weight that does not fit is named.
    words = runs.refused(tmp_path / "third", 1, *settings, "inner_width=128")
    assert "bert.encoder.layer.0.intermediate.dense.weight has [64, 64] instead of [128, 64]" in words


def test_small_run_reaches_the_target_and_passes_the_checker(encore: Encore, text: Path, tmp_path: Path) -> None:
    folder = reached(encore, "bert", text, tmp_path)
    checked = encore("check", str(folder)).stdout
    values = {each["key"]: each["value"] for each in logged(folder / "result_0.txt")}
    target = config_of("bert", "cpu", None, 1).quality_target
    # Less than 0.712 is all that the checker finds.
    assert "0 errors" in checked, checked
    labels = np.load(text / "test_masked_labels.npy")
    assert values["eval_accuracy"] >= target > 2 * np.bincount(labels).max() / len(labels)
    assert values["train_samples"] % values["global_batch_size"] == 0
    assert values["eval_samples"] == 1000
    (last,) = evaluations(folder / "experiment_0" / "metrics.jsonl")[-1:]
    assert quality(last) == pytest.approx(values["eval_accuracy"])
    assert exported(encore, folder, tmp_path / "exported")["reached"]


def test_bench_shows_every_kind(encore: Encore, text: Path) -> None:
    found = benched(encore, "bert", text, "layers=1", "width=64", "heads=1")
    assert found == {*BENCHED, "lamb by tensors", "lamb", "attention grouped", "attention padded"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("batch_size=40000", "accumulation=1"), "set a smaller batch_size, take fewer ranks, or more data"),
        (("positions=64",), "set positions=128"),
        (("checkpoint=gone.pt",), "give another file"),
    ],
    ids=["batch", "positions", "checkpoint"],
)
def test_what_cannot_train_is_refused(runs: BareRuns, tmp_path: Path, settings: tuple[str, ...], words: str) -> None:
    assert words in runs.refused(tmp_path / "run", 1, *settings)
