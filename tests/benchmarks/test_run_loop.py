"""Run's loop without a framework: its log, its evaluations, its caches, and how it stops, saves and resumes."""

import importlib
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import psutil
import pytest

from benchmarks.common.run import caches, checkpoints, choices, evidence, startup
from benchmarks.common.run.mllog import MLLog, Wording
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.timeline import Timeline
from encore import catalogue, configuration
from tests.benchmarks.loop import (
    FRAMEWORK,
    START,
    Training,
    by_epochs,
    every_two_steps,
    keys,
    signal_handlers,
    stop_at,
)  # fmt: skip
from tests.conftest import logged, losses, records
from tests.preparing import ran
from tests.trainings import assert_resumed

__all__ = ["signal_handlers"]
NEVER: Callable[[int], Mapping[str, float]] = lambda weight: {"accuracy": 0.0}  # noqa: E731


@pytest.mark.parametrize(
    ("timeline", "wording", "events", "results"),
    [
        (
            by_epochs(3, lambda epoch: epoch in (0, 2)), Wording("some"),
            [
                *("+block_start 1x1", "+epoch_start 1", "-epoch_stop 1"),
                *("+eval_start 1", "-eval_stop 1", "eval_accuracy 1", "-block_stop 1"),
                *("+block_start 2x2", "+epoch_start 2", "-epoch_stop 2", "+epoch_start 3", "-epoch_stop 3"),
                *("+eval_start 3", "-eval_stop 3", "eval_accuracy 3", "-block_stop 2", "-run_stop"),
            ],
            [(1, 0.3), (3, 0.9)],
        ),
        (
            every_two_steps(2), Wording("some", accuracy_first=True),
            [
                *("+block_start 1x1", "+epoch_start 1"),
                *(f"+eval_start {1 + 2 / 3}", f"eval_accuracy {1 + 2 / 3}", f"-eval_stop {1 + 2 / 3}"),
                *("-epoch_stop 1", "-block_stop 1", "+block_start 2x1", "+epoch_start 2"),
                *(f"+eval_start {1 + 4 / 3}", f"eval_accuracy {1 + 4 / 3}", f"-eval_stop {1 + 4 / 3}"),
                *("+eval_start 3.0", "eval_accuracy 3.0", "-eval_stop 3.0"),
                *("-epoch_stop 2", "-block_stop 2", "-run_stop"),
            ],
            [(1, 0.2), (2, 0.4), (2, 0.6)],
        ),
    ],
    ids=["after epochs", "inside epochs"],
)  # fmt: skip
def test_events_and_results_of_evaluations(
    tmp_path: Path, timeline: Timeline, wording: Wording, events: list[str], results: list[tuple[int, float]]
) -> None:
    training = Training(tmp_path, timeline, {"auc": 1.0}, wording)
    outcome, file = training.go(lambda weight: {"auc": weight / 10, "log_loss": 0.1}), tmp_path / "metrics.jsonl"
    found = [(record["epoch"], record["qualities"], record["log_loss"]) for record in records(file, "eval")]
    assert (outcome, keys(tmp_path), found) == (
        "not_reached", [*START, *events], [(epoch, {"auc": auc}, 0.1) for epoch, auc in results]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "qualities", "rules"),
    [
        (
            {"box": 0.377, "mask": 0.339},
            {3: {"box": 0.4, "mask": 0.3}, 6: {"box": 0.37, "mask": 0.4}, 9: {"box": 0.4, "mask": 0.4}},
            {},
        ),
        ({"auc": 0.8025}, {3: {"auc": 0.8024}, 6: {"auc": 0.8025}}, {}),
        # auc > threshold in DLRM's dist_train.py, acc > threshold in ResNet's fit.py; all others have >=
        ({"auc": 0.8025}, {3: {"auc": 0.8025}, 6: {"auc": 0.80251}}, {"target_is_exceeded": True}),
        (
            {"log_perplexity": 3.3},
            {3: {"log_perplexity": 3.4}, 6: {"log_perplexity": 3.3}},
            {"lower_is_better": True},
        ),
    ],
    ids=["two qualities", "equal", "exceeded", "lower is better"],
)
def test_run_ends_with_the_first_evaluation_that_reaches_all_targets(
    tmp_path: Path, targets: dict[str, float], qualities: dict[int, dict[str, float]], rules: dict[str, bool]
) -> None:
    assert Training(tmp_path, replace(by_epochs(9), **rules), targets).go(qualities.__getitem__) == "reached"
    found = [record["qualities"] for record in records(tmp_path / "metrics.jsonl", "eval")]
    assert (found, records(tmp_path / "metrics.jsonl", "start")[0]["targets"]) == ([*qualities.values()], targets)
    values = [event["value"] for event in logged(tmp_path / "result.txt") if event["key"] == "eval_accuracy"]
    assert values == [quality if len(quality) > 1 else sum(quality.values()) for quality in qualities.values()]


def test_skipped_updates_are_not_counted(tmp_path: Path) -> None:
    # BERT's submission counts samples by updates; a step whose gradients overflow makes none
    timeline = replace(every_two_steps(1), evaluates_after=lambda step: step in (3, 6), steps_per_epoch=6)
    run, batches, evaluations = Training(tmp_path, timeline, {"auc": 1.0}).run, 0, []
    with run.timed(timeline):
        # One of the first three batches and one of the next three overflowed
        run.on_skipped_steps(iter((1, 0, 1, 0)).__next__)
        for _ in run.blocks():
            for _ in run.steps():
                batches += 1
                # The learning rate comes from the device, together with the loss
                run.report(1.0, Fraction(batches, 8))
            if run.evaluates():
                evaluations.append((run.position, batches))
                run.evaluated({"auc": 0.5})
    # Three updates take four batches, six take eight
    rates = [record["learning_rate"] for record in records(tmp_path / "metrics.jsonl", "step")]
    assert (evaluations, rates) == ([(3, 4), (6, 8)], [n / 8 for n in range(1, 9)])


def test_start_record_has_evidence_and_the_variables_of_libraries(tmp_path: Path) -> None:
    libraries = {"NCCL_DEBUG": "WARN", "HOROVOD_CYCLE_TIME": "0.1", "OMPI_MCA_btl": "^openib"}
    # Variables that differ from rank to rank, and secrets
    ignored = {"HOROVOD_RANK": "0", "HOROVOD_SECRET_KEY": "x", "OMPI_MCA_ess_base_jobid": "7", "MY_TOKEN": "hush"}
    age = time.time() - psutil.Process().create_time()
    with mock.patch.dict(os.environ, libraries | ignored):
        Training(tmp_path, by_epochs(1), {"accuracy": 0.1}, round="v6.1").go(lambda weight: {"accuracy": 0.2})
    (start,) = records(tmp_path / "metrics.jsonl", "start")
    # psutil computes the start of the process from a clock with a resolution of a second
    assert age - 2 < sum(start["startup"]["seconds"].values()) < age + 60
    recorded = {name: value for name, value in start["environment"].items() if name in libraries | ignored}
    assert (recorded, start["flops_per_sample"], start["gemm_precision"]) == (libraries, 5e6, "tf32")
    events = [(event["key"], event["value"]) for event in logged(tmp_path / "result.txt")]
    assert start["evidence"] and start["evidence"].items() <= {*events}


def test_all_ranks_are_synchronized_when_the_clock_starts_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = mock.Mock()
    calls.data_set.return_value = by_epochs(1)
    hooks = ("connect", "synchronize", "barrier", "finish")
    for owner, name in (*((FRAMEWORK, hook) for hook in hooks), (MLLog, "run_start"), (MLLog, "run_stop")):
        monkeypatch.setattr(owner, name, getattr(calls, name))
    training = Training(tmp_path, calls.data_set, {"accuracy": 0.5})
    calls.reset_mock()
    training.go(NEVER)
    assert [name for name, _, _ in calls.mock_calls] == [
        *("connect", "synchronize", "barrier", "run_start", "barrier", "data_set"),
        *("synchronize", "barrier", "run_stop", "finish"),
    ]


# Also in an epoch of one step, and several epochs before the evaluation
@pytest.mark.parametrize(
    ("timeline", "batch", "step"),
    [
        *(
            (timeline, *stop)
            for timeline in (by_epochs(4, lambda epoch: epoch % 2 == 1), every_two_steps(4))
            for stop in (*((None, step) for step in range(10)), (0, None), (3, None))
        ),
        (by_epochs(9, lambda epoch: epoch == 8, steps=1), None, 2),
    ],
)
def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, timeline: Timeline, batch: int | None, step: int | None
) -> None:
    reference, resumed = tmp_path / "reference", tmp_path / "resumed"
    start = partial(Training, timeline=timeline, targets={"accuracy": 0.5})
    start(reference).go(NEVER)
    first = start(resumed)
    assert first.go(NEVER, stop_at(step), stop_at(batch)) == "interrupted"
    second = start(resumed)
    assert (second.run.resumed, second.weight, second.go(NEVER)) == (True, first.weight, "not_reached")
    assert keys(resumed) == keys(reference)
    assert_resumed(resumed, reference)


def test_choices_are_recorded_and_taken_again_by_the_resumed_run(tmp_path: Path) -> None:
    recorded = {"kernels": {"gather": "triton"}, "optimizer_kernel": "apex", "tf32": {"matmul": True}}
    choices.record("attention", "of an earlier training of this process")
    first = Training(tmp_path, by_epochs(2), {"accuracy": 0.5})
    for name in ("optimizer_kernel", "kernels"):
        choices.record(name, recorded[name])
    assert first.go(NEVER, stop_at(1)) == "interrupted"
    second = Training(tmp_path, by_epochs(2), {"accuracy": 0.5})
    # Nothing is measured again: "auto" is replaced, or its value read from the checkpoint
    config = second.run.config
    assert (config.optimizer_kernel, config.kernels, second.go(NEVER)) == ("apex", "auto", "not_reached")
    event = next(event for event in logged(tmp_path / "result.txt") if event["key"] == "init_stop")
    starts = records(tmp_path / "metrics.jsonl", "start")
    assert [entry["choices"] for entry in (event["metadata"], *starts)] == [recorded] * 3


def test_missing_library_ends_all_ranks_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Training(tmp_path, by_epochs(1), {"accuracy": 0.5}).run
    run._framework = mock.Mock()
    with pytest.raises(SystemExit, match="2"), run.initialization():
        raise choices.UnavailableError("kernels=apex: the image has no apex; use kernels=auto")
    # A rank that exits without leaving the others aborts them
    run._framework.finish.assert_called_once_with()
    assert "kernels=apex: the image has no apex" in capsys.readouterr().err


def test_evidence_of_every_configuration(recorded: Callable[[str, object], None]) -> None:
    # Default precision on a GPU, and fp32, for which MXNet does not report whether it is TF32
    table: dict[str, object] = {}
    for name, choice in sorted(catalogue.choices().items()):
        default = importlib.import_module(f"{choice.implementation.module}.config").Config()
        for config in (default, replace(default, precision="fp32")):
            tf32 = {"tf32": config.precision != "fp32"} if choice.implementation.framework != "mxnet" else {}
            table[f"{name}, {config.precision}"] = list(evidence.log_keys(config, tf32).values())
    bert = importlib.import_module("benchmarks.bert.pytorch.config").Config(
        fp8="scaled_mm", precision="bf16", batch_size=32, accumulation=4
    )
    recorded(
        "evidence.json", {**table, "bert, fp8": [*evidence.log_keys(bert, {}).values(), evidence.gemm_precision(bert)]}
    )


def test_start_up_times_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Begin and end of `ranks`, begin of `network`, begin and end of `kernels`, end of `network`
    times = iter([100.0, 103.0, 103.5, 105.5, 106.5, 110.5])
    monkeypatch.setattr(startup, "time", SimpleNamespace(perf_counter=times.__next__))
    monkeypatch.setattr(startup, "_age", iter([100.0, 110.5]).__next__)
    startup.reset()
    with startup.part("ranks"):
        pass
    with startup.part("network"), pytest.raises(ValueError, match="no kernel"), startup.part("kernels"):
        raise ValueError("no kernel")
    assert startup.seconds_by_part() == {"imports": 100.0, "ranks": 3.0, "network": 6.0, "kernels": 1.0, "rest": 0.5}


@pytest.mark.parametrize(
    ("round_name", "is_required"),
    [("v0.7", False), ("v6.0", False), ("v6.1", True), ("v10.0", True), ("published", False)],
)
def test_evidence_is_required_from_round_v6_1_on(round_name: str, is_required: bool) -> None:
    assert evidence.required_by(round_name) == is_required


@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_every_key_with_an_automatic_value_is_recorded(name: str) -> None:
    types = configuration.field_types(catalogue.choose(name).folder)
    assert {key for key, annotation in types.items() if "auto" in get_args(annotation)} <= set(choices.KEYS)


def test_mean_losses_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    start = partial(Training, tmp_path, by_epochs(1, steps=12), {"accuracy": 0.5}, log_interval=5)
    first = start()
    # It ends between the records of steps 5 and 10
    assert (first.go(NEVER, stop_at(5)), first.weight, start().go(NEVER)) == ("interrupted", 8, "not_reached")
    steps = records(tmp_path / "metrics.jsonl", "step")
    assert [(record["step"], record["loss"]) for record in steps] == [(5, 2.0), (10, 7.0), (12, 10.5)]


FILES = ("rank_0", "shared", "state.json")  # Of a checkpoint


def test_checkpoints_are_saved_at_their_interval_with_checksums(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "writing_00000004").mkdir(parents=True)  # left by a run that was killed
    Training(tmp_path, by_epochs(5, interval=2), {"accuracy": 0.5}).go(NEVER)
    folders = sorted((tmp_path / "checkpoint").iterdir())
    states = [json.loads((folder / checkpoints.STATE_FILE).read_text(encoding="utf-8")) for folder in folders]
    assert [(state["step"], state["evaluated"]) for state in states] == [(6, 6), (12, 12)]
    for folder in folders:
        ran("sha256sum", "--check", "--strict", *(f"{name}.sha256" for name in FILES), cwd=folder, check=True)


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is published at its end; the run waits for the last one
    may_write, publish = threading.Event(), mock.Mock(wraps=checkpoints.publish)

    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "checkpoint").iterdir())

    def write(path: Path, content: Mapping[str, Any]) -> None:
        assert may_write.wait(60)
        checkpoints.save_arrays(path, content)

    def on_step(step: int) -> None:
        if step == 3:
            assert names() == ["writing_00000002"]
            may_write.set()

    monkeypatch.setattr(FRAMEWORK, "write", write)
    monkeypatch.setattr(checkpoints, "publish", publish)
    timeline = replace(every_two_steps(2), checkpoints_after=lambda step: step % 2 == 0)
    training = Training(tmp_path, timeline, {"auc": 0.5}, async_checkpoints=True, log_interval=5)
    assert training.go(lambda weight: {"auc": 0.0}, on_step) == "not_reached"
    # Losses that were in no record when the checkpoint began
    losses = [call.args[2]["losses"] for call in publish.call_args_list]
    steps = [
        [record["step"] for record in records(tmp_path / "metrics.jsonl", kind)]
        for kind in ("checkpoint", "checkpoint_written")
    ]
    assert (names(), losses, steps, Training(tmp_path, timeline, {"auc": 0.5}).weight) == (
        ["step_00000004", "step_00000006"], [[0.0, 1.0], [3.0], []], [[2, 4, 6]] * 2, 6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("file", "error"),
    [("rank_1.failed", "rank_1 could not write its part of .*: see its output"), ("rank_1.sha256", "")],
)
def test_checkpoint_needs_the_files_of_all_ranks(tmp_path: Path, file: str, error: str) -> None:
    saved = checkpoints.Checkpoints(tmp_path, (), FRAMEWORK, Ranks(0, 2, 0, 2, None))
    saved.save_async(1, {}, dict, dict)
    assert saved.poll_save(waits=False) is None, "another rank still writes"
    (tmp_path / "writing_00000001" / file).touch()
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        assert saved.poll_save(waits=True) is not None
    assert (tmp_path / "step_00000001").exists() == (not error) and saved.poll_save(waits=True) is None


def test_full_disk_ends_the_run_and_is_visible_to_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FRAMEWORK, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
    training = Training(tmp_path, by_epochs(3, interval=1), {"accuracy": 0.5}, async_checkpoints=True)
    with pytest.raises(OSError, match="No space left"):
        training.go(NEVER)
    files = {path.relative_to(tmp_path / "checkpoint").as_posix() for path in tmp_path.glob("checkpoint/**/*")}
    assert files == {"writing_00000003", "writing_00000003/rank_0.failed"}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", [*FILES, "shared.sha256"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_reported_and_the_previous_one_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    start = partial(Training, tmp_path, by_epochs(6, interval=2), {"accuracy": 0.5})
    start().go(NEVER, stop_at(13))
    previous, newest = sorted((tmp_path / "checkpoint").iterdir())
    DAMAGES[damage](newest / name)
    resumed, file = start(), name.removesuffix(checkpoints.DIGEST)
    assert f"checkpoint {newest.name} is damaged: {file}" in capsys.readouterr().err
    assert (f"step_{resumed.weight:08d}", resumed.go(NEVER)) == (previous.name, "not_reached")
    first, second = (record["damaged"] for record in records(tmp_path / "metrics.jsonl", "start"))
    assert (first, list(second)) == ({}, [newest.name]) and second[newest.name].startswith(file)
    assert not list((tmp_path / "checkpoint").glob("damaged_*"))


def test_run_without_an_intact_checkpoint_ends_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, finish = partial(Training, tmp_path, by_epochs(4, interval=2), {"accuracy": 0.5}), mock.Mock()
    start().go(NEVER)
    for folder in (tmp_path / "checkpoint").iterdir():
        flip(folder / "rank_0")
    monkeypatch.setattr(FRAMEWORK, "finish", finish)
    for _ in range(2):  # The second attempt does not start a new run either
        with pytest.raises(SystemExit, match=r"cannot be resumed\n  found: step_.* rank_0 differs.*\n  hint"):
            start()
    assert finish.call_count == 2, "a rank that exits without leaving the others aborts them"


@pytest.mark.parametrize(
    ("damage", "problem"), [(lambda path: os.truncate(path, 10), "is shorter than"), (flip, "has changed since")]
)
def test_changed_log_prevents_resuming(tmp_path: Path, damage: Callable[[Path], None], problem: str) -> None:
    start = partial(Training, tmp_path, by_epochs(4, interval=2), {"accuracy": 0.5})
    start().go(NEVER)
    damage(tmp_path / "metrics.jsonl")
    with pytest.raises(SystemExit, match=f"metrics.jsonl {problem} (when )?it was written"):
        start()


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (float("nan"), SystemExit, r"not finite at step 2: found nan\n  hint"),
        (1.0, RuntimeError, "was not reported"),  # The loop below reports no evaluation
    ],
)
def test_loss_that_is_not_finite_or_unreported_evaluation_ends_the_run(
    tmp_path: Path, loss: float, error: type[BaseException], message: str
) -> None:
    run = Training(tmp_path, by_epochs(2), {"accuracy": 0.5}).run
    with pytest.raises(error, match=message), run.timed(by_epochs(2)):
        for _ in run.blocks():
            for step in run.steps():
                run.report(loss if step == 1 else 1.0, 0.1)
    assert "run_stop" not in (tmp_path / "result.txt").read_text(encoding="utf-8")


PROGRAM = """
import atexit, os, sys
from pathlib import Path
from benchmarks.common.run.stopping import Heartbeat, end_process

class ThreadState:
    "Like the state of a framework's thread, it cannot be freed while the interpreter shuts down"
    def __del__(self):
        os.abort()

state = ThreadState()
atexit.register(lambda: print("left the other ranks"))
heartbeat = Heartbeat(Path(sys.argv[1]), 0)

def main():
    {body}

end_process(main)
"""


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        pytest.param("return 0", 0, "", id="done"),
        pytest.param("raise SystemExit(2)", 2, "", id="refused"),
        pytest.param("raise SystemExit", 0, "", id="left"),
        pytest.param("raise SystemExit('found that, do this')", 1, "found that, do this\n", id="said"),
        pytest.param("raise OSError('disk')", 1, "OSError: disk\n", id="broke"),
    ],
)
def test_exit_code_is_that_of_the_training(tmp_path: Path, body: str, code: int, message: str) -> None:
    done = ran(sys.executable, "-c", PROGRAM.format(body=body), tmp_path)
    found = done.returncode, done.stdout, done.stderr.endswith(message), "Traceback" in done.stderr
    assert found == (code, "left the other ranks\n", True, "OSError" in message), done.stderr


# -- steps of many parts, as those of BERT ----------------------------------------------------------------

PARTS = 8


class PartialSteps(Training):
    """The loss of a part is its number in the run; the run is stopped in part ``stop`` of a step."""

    def __init__(self, output: Path, *stop: int) -> None:
        super().__init__(output, every_two_steps(2), {"accuracy": 0.5})
        self.losses, self.stop = self.run.saved.get("losses", b""), stop

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"weight": self.weight}, {"losses": self.losses}

    def train_step(self, step: int) -> float | None:
        for part in self.run.interruptible(range(len(self.losses), PARTS)):
            self.losses += bytes([step * PARTS + part])
            if self.stop == (step, part):
                signal.raise_signal(signal.SIGTERM)
        if len(self.losses) < PARTS:
            return None
        loss, self.losses = float(sum(self.losses)), b""
        self.weight += 1
        return loss


@pytest.mark.parametrize(
    "stops",
    # In the first, the second, an evaluated, the second epoch's and the last step; twice in the same step
    [*([(step, part)] for step in (0, 1, 2, 3, 5) for part in (0, 3, 6)), [(0, 0), (0, 3)]],
    ids=str,
)
def test_run_resumes_in_the_middle_of_a_step(tmp_path: Path, stops: list[tuple[int, int]]) -> None:
    for step, part in stops:
        # The votes of the ranks are read two parts later; after the last part, that is in the evaluation or next step
        end = (step, part + 3) if part + 3 < PARTS else (step + 1, 3 if step == 0 else 0)
        training = PartialSteps(tmp_path, step, part)
        assert (training.go(NEVER), training.weight, len(training.losses)) == ("interrupted", *end)
    assert [PartialSteps(folder).go(NEVER) for folder in (tmp_path, tmp_path / "reference")] == ["not_reached"] * 2
    # Sums of 0 to 7, 8 to 15 and so on
    assert losses(tmp_path / "metrics.jsonl") == [28.0, 92.0, 156.0, 220.0, 284.0, 348.0]
    assert keys(tmp_path) == keys(tmp_path / "reference")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    tmp_path.chmod(0o1777)
    return tmp_path


@pytest.mark.parametrize("mode", [None, 0o700, 0o755])
def test_cache_is_private(shared: Path, mode: int | None) -> None:
    folder = shared / "cache"
    if mode is not None:
        folder.mkdir(mode)
    assert [caches.private_folder(path) for path in (folder, folder / "triton")] == [folder, folder / "triton"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("plant", "user"),
    [
        (lambda folder: folder.symlink_to(folder.parent), 0),
        (lambda folder: folder.symlink_to(folder.parent / "missing"), 0),
        (lambda folder: folder.write_text(""), 0),
        (lambda folder: (folder.mkdir(), folder.chmod(0o777)), 0),
        (caches.private_folder, 1),
    ],
    ids=["symlink", "dangling symlink", "file", "open to all", "of another user"],
)
def test_planted_cache_is_rejected(
    shared: Path,
    capsys: pytest.CaptureFixture[str],
    plant: Callable[[Path], object],
    user: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(shared / "cache")
    monkeypatch.setattr(os, "getuid", lambda: shared.stat().st_uid + user)
    with pytest.raises(SystemExit, match="2"):
        caches.private_folder(shared / "cache")
    assert "is a symbolic link, or other users can change it" in capsys.readouterr().err


def test_cuda_cache_is_in_a_private_folder_below_a_shared_home(shared: Path) -> None:
    default, own = {"HOME": str(shared)}, {"HOME": str(shared), "CUDA_CACHE_PATH": "/own"}
    private = {"HOME": str(caches.private_folder(shared / "home"))}
    for environment in (default, own, private):
        caches.set_cuda_cache(environment)
    cache = Path(default["CUDA_CACHE_PATH"])
    assert (cache.parent, stat.S_IMODE(cache.stat().st_mode)) == (shared, 0o700)
    assert (own["CUDA_CACHE_PATH"], len(private)) == ("/own", 1)
