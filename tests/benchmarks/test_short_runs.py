"""Trainings of a few steps in PyTorch: resume, different numbers of ranks, rejected settings, and every bench."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue
from tests.conftest import Encore, evaluations, logged, losses
from tests.json_schemas import validate
from tests.trainings import BareRuns, InFramework, assert_resumed, write_small_config

# Settings of a training whose target cannot be reached, on the small system of a benchmark, and the global batch (None:
# that of the small system)
SHORT: dict[str, tuple[tuple[str, ...], int | None]] = {
    "bert": (
        # 8 samples per part of a batch; with dropout the losses are noisy, so every bit of the state matters
        ("layers=1", "width=64", "heads=1", "inner_width=64", "max_steps=24", "accumulation=8", "warmup_steps=5",
         "eval_start_samples=1536", "eval_interval_samples=1536", "eval_batch_size=50", "quality_target=1.0"), 64,
    ),
    "bert-squad": (("epochs=2", "width=16", "heads=2", "inner_width=16", "quality_target=100.0"), 240),
    "dlrm": (("epochs=2", "quality_target=1.0"), None),
    "gnmt": (
        ("epochs=2", "width=16", "layers=3", "max_length_train=14", "warmup_steps=5", "beam_size=2", "dropout=0.0",
         "eval_batch_size=4", "max_length_test=20", "quality_target=100.0"), 192,
    ),
    "llama2-70b-lora": (("eval_interval_samples=12", "max_steps=10", "micro_batch=2", "quality_target=0.1"), 4),
    # Enough steps for a signal that is sent after the third one
    "llama31-8b": (
        ("eval_interval_samples=240", "max_steps=60", "warmup_steps=5", "eval_samples=10", "quality_target=0.1"), None,
    ),
    "maskrcnn": (
        ("epochs=1", "warmup_steps=8", "eval_batch_size=4", "box_target=0.99", "mask_target=0.99"), 8,
    ),
    # A smaller network, whose evaluation has several batches
    "ncf": (("layers=[32,16,8]", "factors=8", "epochs=12", "eval_batch_size=16384", "stop_at_target=false"), None),
    "ssd": (
        ("epochs=2", "width=8", "eval_steps=[20]", "decay_steps=[40]", "eval_batch_size=9", "quality_target=1.0"), 32,
    ),
    "transformer": (("epochs=3", "quality_target=100.0"), None),
}  # fmt: skip


@pytest.fixture(scope="module")
def short_runs(
    pytorch_python: Path, toy: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], BareRuns]]:
    """Return a function that gives the short runs of a benchmark."""
    runs: dict[str, BareRuns] = {}

    def runs_of(name: str) -> BareRuns:
        short, global_batch = SHORT[name]

        def write_config(path: Path, ranks: int, *settings: str) -> Path:
            size = [f"batch_size={global_batch // ranks}"] if global_batch else []
            return write_small_config(path, name, ranks, (*short, "log_interval=1", *size, *settings))

        module = f"{catalogue.choose(name).implementation.module}.train"
        return runs.setdefault(name, BareRuns(module, pytorch_python, toy(name), write_config, tmp_path_factory))

    return runs_of


STEP = ("metrics.jsonl", '"step"')
EVALUATION, END_OF_EVALUATION = ("result.txt", "eval_start"), ("result.txt", "eval_stop")


def occurs(path: Path, text: str, count: int) -> bool:
    return path.exists() and path.read_text(encoding="utf-8").count(text) >= count


def resume(name: str, ranks: int, *stops: Any, settings: tuple[str, ...] = (), is_long: bool = True) -> Any:
    marks = [pytest.mark.long] if is_long else []
    return pytest.param(name, ranks, settings, stops, id=f"{name}-{ranks}", marks=marks)


@pytest.mark.parametrize(
    ("name", "ranks", "settings", "stops"),
    [
        resume("ncf", 1, (STEP, 17), is_long=False),  # in the middle of the second epoch
        resume("llama31-8b", 2, (STEP, 3), is_long=False),  # FSDP
        resume("bert-squad", 2, (STEP, 10), settings=("dropout=0.1", "attention_dropout=0.1")),
        resume("dlrm", 2, (STEP, 150)),
        # An evaluation with so many batches that the second signal comes during it
        resume("dlrm", 1, (STEP, 64), (STEP, 128), settings=("eval_batch_size=4", "cache_eval_data=false")),
        resume("gnmt", 2, (STEP, 10), (EVALUATION, 1)),
        resume("maskrcnn", 2, (STEP, 13)),
        resume("ssd", 2, (STEP, 13)),
        resume("transformer", 2, (STEP, 70), (EVALUATION, 2), (END_OF_EVALUATION, 2)),
    ],
)
def test_resumed_run_has_bit_identical_losses(
    name: str,
    ranks: int,
    settings: tuple[str, ...],
    stops: tuple[tuple[tuple[str, str], int], ...],
    short_runs: Callable[[str], BareRuns],
    tmp_path: Path,
) -> None:
    runs, output = short_runs(name), tmp_path / "stopped"
    for (file, text), count in stops:
        runs.stop(output, ranks, *settings, once=partial(occurs, output / file, text, count))
        assert {checkpoint.name[:5] for checkpoint in (output / "checkpoint").iterdir()} == {"step_"}
    stopped_at = len(losses(output / "metrics.jsonl"))
    assert_resumed(runs.end(output, ranks, *settings), runs.uninterrupted(ranks, *settings))
    assert 0 < stopped_at < len(losses(output / "metrics.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings", "steps", "loss_difference", "quality_difference"),
    # Both see the same samples with the same weights. Sums in another order are the only difference; training lets it
    # grow, so only the first steps of some are compared.
    [
        ("bert", (), 24, 1e-3, 0.01),
        ("bert-squad", (), 60, 1e-3, 1.0),
        ("dlrm", (), 128, 1e-4, 1e-3),
        ("gnmt", (), 20, 1e-4, 1.0),
        ("llama2-70b-lora", (), 10, 5e-4, 5e-4),
        ("llama2-70b-lora", ("tensor_parallelism=2", "batch_size=4"), 10, 5e-4, 5e-4),
        # Both ranks together have as many proposals, but sample others
        ("maskrcnn", ("rpn_post_nms_top_n=500",), 1, 0.2, 0.2),
        ("ncf", (), 45, 1e-4, 0.01),
    ],
)
def test_two_ranks_train_like_one(
    name: str,
    settings: tuple[str, ...],
    steps: int,
    loss_difference: float,
    quality_difference: float,
    short_runs: Callable[[str], BareRuns],
) -> None:
    runs = short_runs(name)
    one, two = (runs.uninterrupted(ranks, *options) for ranks, options in ((1, ()), (2, settings)))
    first, second = (losses(run / "metrics.jsonl") for run in (one, two))
    assert len(first) == len(second) >= steps and second[:steps] == pytest.approx(first[:steps], abs=loss_difference)
    first, second = (
        [value for result in evaluations(run / "metrics.jsonl") for value in result["qualities"].values()]
        for run in (one, two)
    )
    assert second == pytest.approx(first, abs=quality_difference)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bert", "batch_size=40000 accumulation=1", "set a smaller batch_size, take fewer ranks, or more data"),
        ("bert", "positions=64", "set positions=128"),
        ("bert", "checkpoint=missing.pt", "give another file"),
        ("bert-squad", "batch_size=20000", "set a smaller batch_size, take fewer ranks, or more data"),
        ("bert-squad", "sequence_length=32", "set sequence_length=40"),
        ("bert-squad", "checkpoint=missing.pt", "--set checkpoint=FILE"),
        ("gnmt", "batch_size=8000", "use a smaller batch, fewer ranks, or more data"),
        ("maskrcnn", "backbone=missing.pkl", "set backbone=FILE"),
        ("ssd", "backbone=missing.pkl", "hint: name a file with --set backbone=FILE"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_rejected(
    name: str, settings: str, message: str, short_runs: Callable[[str], BareRuns], tmp_path: Path
) -> None:
    assert message in short_runs(name).refused(tmp_path / "run", 1, *settings.split())


BENCHED = {"bare", "synthetic", "real", "input", "evaluation"}  # Kinds that each bench has
KINDS = {
    "bert": {*BENCHED, "lamb by tensors", "lamb", "attention grouped", "attention padded"},
    "gnmt": {*BENCHED, "one by one"},
    "ncf": BENCHED - {"synthetic"},
    "transformer": {*BENCHED, "one by one"},
}
BENCH_SETTINGS = {
    "bert": ("layers=1", "width=64", "heads=1"),
    "gnmt": ("width=16", "layers=3", "batch_size=64", "beam_size=2", "max_length_test=20"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHORT, "gpt-oss-20b"])
def test_bench_measures_every_kind(name: str, encore: Encore, toy: Callable[[str], Path]) -> None:
    chosen = [word for value in BENCH_SETTINGS.get(name, ()) for word in ("--set", value)]
    command = ("bench", name, "--data", str(toy(name)), "--steps", "1", "--repeats", "1", "--json", *chosen)
    found = json.loads(encore(*command, code=0).stdout)
    validate("bench", found)
    assert {kind for kind, entry in found["measured"].items() if entry["median"] > 0} >= KINDS.get(name, BENCHED)


# -- single cases -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_run_stopped_in_the_middle_of_an_accumulation_has_bit_identical_losses(
    in_pytorch: InFramework, short_runs: Callable[[str], BareRuns], tmp_path: Path
) -> None:
    runs, output, dropout = short_runs("bert"), tmp_path / "stopped", ("dropout=0.1", "attention_dropout=0.1")
    config = runs.write_config(tmp_path / "config.json", 2, *dropout)
    # One rank gets the signal in the first of eight parts of step 10, both stop after the third part. The warm-up is a
    # step, too
    in_pytorch("bert_stop.py", str(11 * 8 + 1), str(config), str(runs.folder), str(output), ranks=2)
    (checkpoint,) = (output / "checkpoint").iterdir()
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    assert (state["step"], state["inside_step"]) == (10, True)
    assert_resumed(runs.end(output, 2, *dropout), runs.uninterrupted(2, *dropout))
    keys = [[event["key"] for event in logged(run / "result.txt")] for run in (output, runs.uninterrupted(2, *dropout))]
    assert (keys[0], keys[0].count("train_samples")) == (keys[1], 1)


@pytest.mark.long
def test_run_starts_with_the_weights_of_another_run(short_runs: Callable[[str], BareRuns], tmp_path: Path) -> None:
    runs = short_runs("bert")
    first = runs.uninterrupted(1)
    (weights,) = (first / "checkpoint").glob("step_00000024/shared")
    settings = (f"checkpoint={weights}", "max_steps=2", "eval_start_samples=64")
    second = runs.end(tmp_path / "second", 1, *settings)
    before, after = (losses(run / "metrics.jsonl") for run in (first, second))
    assert after[0] < before[1], "it continues at the last weights"
    # A network of another size is rejected, with the name of every weight that does not fit
    problem = "bert.encoder.layer.0.intermediate.dense.weight has [64, 64] instead of [128, 64]"
    assert problem in runs.refused(tmp_path / "third", 1, *settings, "inner_width=128")


@pytest.mark.long
def test_run_resumes_on_another_number_of_ranks_and_split(
    short_runs: Callable[[str], BareRuns], tmp_path: Path
) -> None:
    runs, output = short_runs("llama2-70b-lora"), tmp_path / "stopped"
    runs.stop(output, 2, "tensor_parallelism=2", "batch_size=4", once=partial(occurs, output / STEP[0], STEP[1], 5))
    (checkpoint,) = (output / "checkpoint").glob("step_*")
    # The adapters and two moments in fp32, of both ranks, without the base
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert size < (runs.folder / "base.safetensors").stat().st_size
    resumed, uninterrupted = (losses(run / "metrics.jsonl") for run in (runs.end(output, 1), runs.uninterrupted(1)))
    assert resumed == pytest.approx(uninterrupted, rel=1e-4) and len(resumed) == 10


@pytest.mark.long
def test_pickle_that_runs_a_command_is_rejected(short_runs: Callable[[str], BareRuns], tmp_path: Path) -> None:
    (tmp_path / "R-50.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    message = short_runs("maskrcnn").refused(tmp_path / "run", 1, f"backbone={tmp_path / 'R-50.pkl'}")
    assert "it names os.system" in message and "hint: set backbone=FILE" in message
