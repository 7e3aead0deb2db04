"""Run's loop without a framework: which lines a log gets, when a run evaluates, stops, saves and resumes."""

import importlib
import json
import os
import subprocess
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

import psutil
import pytest

from benchmarks.common.run import checkpoints, choices, evidence, startup
from benchmarks.common.run import timeline as timelines
from benchmarks.common.run.mllog import MLLog, Wording
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.timeline import Timeline
from benchmarks.dlrm import events as dlrm
from benchmarks.resnet import events as resnet
from encore import catalogue, configuration
from tests.benchmarks.loop import (
    FRAMEWORK,
    START,
    STEPS,
    WORDING,
    Config,
    Training,
    every_two_steps,
    handlers,
    keys,
    stop_at,
)  # fmt: skip
from tests.conftest import logged, records

__all__ = ["handlers"]


def by_epochs(epochs: int, rule: Callable[[int], bool] = lambda epoch: True, interval: int = 0) -> Timeline:
    """Evaluations after the epochs of ``rule``, which count from 0."""
    return timelines.by_epochs(SimpleNamespace(epochs=epochs, checkpoint_interval=interval), STEPS, rule)


NEVER: Callable[[int], Mapping[str, float]] = lambda weight: {"accuracy": 0.0}  # noqa: E731


def test_blocks_of_epochs_end_in_an_evaluation(tmp_path: Path) -> None:
    training = Training(tmp_path, by_epochs(3, lambda epoch: epoch in (0, 2)), {"accuracy": 0.5})
    assert training.go(NEVER) == "not_reached"
    assert training.evaluated == [3, 9]
    assert keys(tmp_path) == [
        *START,
        *("+block_start 1x1", "+epoch_start 1", "-epoch_stop 1"),
        *("+eval_start 1", "-eval_stop 1", "eval_accuracy 1", "-block_stop 1"),
        *("+block_start 2x2", "+epoch_start 2", "-epoch_stop 2", "+epoch_start 3", "-epoch_stop 3"),
        *("+eval_start 3", "-eval_stop 3", "eval_accuracy 3", "-block_stop 2", "-run_stop"),
    ]


def test_evaluations_lie_inside_epochs(tmp_path: Path) -> None:
    training = Training(tmp_path, every_two_steps(2), {"auc": 0.5}, Wording("some", accuracy_first=True))
    assert training.go(lambda weight: {"auc": weight / 10, "log_loss": 0.1}) == "reached"
    assert training.evaluated == [2, 4, 6]
    assert keys(tmp_path)[len(START) :] == [
        *("+block_start 1x1", "+epoch_start 1"),
        *(f"+eval_start {1 + 2 / 3}", f"eval_accuracy {1 + 2 / 3}", f"-eval_stop {1 + 2 / 3}"),
        *("-epoch_stop 1", "-block_stop 1", "+block_start 2x1", "+epoch_start 2"),
        *(f"+eval_start {1 + 4 / 3}", f"eval_accuracy {1 + 4 / 3}", f"-eval_stop {1 + 4 / 3}"),
        *("+eval_start 3.0", "eval_accuracy 3.0", "-eval_stop 3.0"),
        *("-epoch_stop 2", "-block_stop 2", "-run_stop"),
    ]
    evaluations = records(tmp_path / "metrics.jsonl", "eval")
    assert [(each["epoch"], each["qualities"], each["log_loss"]) for each in evaluations] == [
        (1, {"auc": 0.2}, 0.1),
        (2, {"auc": 0.4}, 0.1),
        (2, {"auc": 0.6}, 0.1),
    ]


def test_every_quality_must_reach_its_target(tmp_path: Path) -> None:
    qualities = {3: {"box": 0.4, "mask": 0.3}, 6: {"box": 0.37, "mask": 0.4}, 9: {"box": 0.4, "mask": 0.4}}
    training = Training(tmp_path, by_epochs(9), {"box": 0.377, "mask": 0.339})
    assert training.go(qualities.__getitem__) == "reached"
    assert training.evaluated == [3, 6, 9]
    text = (tmp_path / "result.txt").read_text(encoding="utf-8")
    assert '"value": {"box": 0.4, "mask": 0.4}' in text
    assert records(tmp_path / "metrics.jsonl", "start")[0]["targets"] == {"box": 0.377, "mask": 0.339}


def test_a_step_that_changed_nothing_is_not_counted(tmp_path: Path) -> None:
    """As BERT's submission counts the samples that it trained on: by updates, of which an overflow is none."""
    run = Run(Config({"auc": 1.0}), FRAMEWORK, Path("data"), tmp_path, WORDING)
    overflows, batches, asked, evaluated = (2, 5), 0, 0, []

    def skipped() -> int:
        nonlocal asked
        before, asked = asked, sum(each <= batches for each in overflows)
        return asked - before

    with run.initialization():
        run.log({"global_batch_size": 4})
    with run.timed(
        replace(every_two_steps(2), evaluates_after=lambda step: step in (3, 6), steps_per_epoch=6, epochs=1)
    ):
        run.leave_out(skipped)
        for _ in run.blocks():
            for _ in run.steps():
                batches += 1
                # The device alone knows the rate, which comes with the loss.
                run.report(1.0, Fraction(batches, 8))
            if run.evaluates():
                evaluated.append((run.position, batches))
                run.evaluated({"auc": 0.5})
    # Three updates are four batches, six are eight; what is skipped behind an evaluation belongs to the next one.
    assert evaluated == [(3, 4), (6, 8)]
    assert [each["learning_rate"] for each in records(tmp_path / "metrics.jsonl", "step")] == [
        n / 8 for n in range(1, 9)
    ]


def test_a_target_is_reached_or_exceeded_as_submitted(tmp_path: Path) -> None:
    """auc > threshold in DLRM's dist_train.py, acc > threshold in ResNet's fit.py; all others have >=."""
    for exceeded, evaluated in ((False, [3]), (True, [3, 6])):
        timeline = replace(by_epochs(9), target_is_exceeded=exceeded)
        training = Training(tmp_path / str(exceeded), timeline, {"auc": 0.8025})
        assert training.go({3: {"auc": 0.8025}, 6: {"auc": 0.80251}}.__getitem__) == "reached"
        assert training.evaluated == evaluated
    config: Any = SimpleNamespace(epochs=2, eval_period=1, eval_offset=0, eval_interval=2, checkpoint_interval=0)
    assert resnet.timeline(config, 4).target_is_exceeded and dlrm.timeline(config, 4).target_is_exceeded


def test_a_loss_reaches_its_target_from_above(tmp_path: Path) -> None:
    training = Training(tmp_path, replace(by_epochs(9), lower_is_better=True), {"log_perplexity": 3.3})
    found = {3: {"log_perplexity": 3.4}, 6: {"log_perplexity": 3.3}}
    assert (training.go(found.__getitem__), training.evaluated) == ("reached", [3, 6])


def test_the_start_notes_what_the_libraries_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of a launcher's variables that differ from rank to rank, and no secret."""
    seen = {"NCCL_DEBUG": "WARN", "HOROVOD_CYCLE_TIME": "0.1", "OMPI_MCA_btl": "^openib"}
    others = {"HOROVOD_RANK": "0", "HOROVOD_SECRET_KEY": "x", "OMPI_MCA_ess_base_jobid": "7", "MY_TOKEN": "hush"}
    for name, value in {**seen, **others}.items():
        monkeypatch.setenv(name, value)
    Training(tmp_path, by_epochs(1), {"hit_rate": 0.1}).go(lambda position: {"hit_rate": 0.2})
    noted = records(tmp_path / "metrics.jsonl", "start")[0]["environment"]
    assert {name: noted.get(name) for name in (*seen, *others)} == {**seen, **dict.fromkeys(others)}


def test_lines_of_the_oldest_round(tmp_path: Path) -> None:
    training = Training(tmp_path, by_epochs(1), {"hit_rate": 0.1}, Wording("ncf"), round="v0.5")
    assert training.go(lambda weight: {"hit_rate": 0.2}) == "reached"
    lines = (tmp_path / "result.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(") ", 1)[1] for line in lines] == [
        *("init_start", f"init_stop: {json.dumps({'choices': training.run.choices})}"),
        *("run_start", "run_set_random_seed: 7", "input_batch_size: 4", "train_loop", "train_epoch: 0"),
        *("eval_start: 0", 'eval_accuracy: {"epoch": 0, "value": 0.2}', "eval_target: 0.1", "eval_stop: 0"),
        *('run_stop: {"success": true}', "run_final"),
    ]


def test_all_ranks_are_there_when_the_clock_starts_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens connections comes before, and what depends on the data set behind."""
    order: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (order.append(name), call(*arguments))[1]

    for name in ("connect", "synchronize", "barrier", "finish"):
        monkeypatch.setattr(FRAMEWORK, name, noted(name, getattr(FRAMEWORK, name)))
    for name in ("run_start", "run_stop"):
        monkeypatch.setattr(MLLog, name, noted(name, getattr(MLLog, name)))
    training = Training(tmp_path, by_epochs(1), {"accuracy": 0.5})
    order.clear()
    training.timeline = noted("the data set", lambda: by_epochs(1))  # type: ignore[assignment]
    training.go(NEVER)
    before = ["connect", "synchronize", "barrier", "run_start", "barrier"]
    assert order == [*before, "the data set", "synchronize", "barrier", "run_stop", "finish"]


@pytest.mark.parametrize("timeline", [by_epochs(4, lambda epoch: epoch % 2 == 1), every_two_steps(4)])
@pytest.mark.parametrize("place", [*((None, step) for step in range(10)), *((batch, None) for batch in (0, 3))])
def test_a_stopped_run_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, timeline: Timeline, place: tuple[int | None, int | None]
) -> None:
    start = partial(Training, timeline=timeline, targets={"accuracy": 0.5})
    batch, step = place
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    start(whole).go(NEVER)

    first = start(broken)
    assert first.go(NEVER, stop_at(step), stop_at(batch)) == "interrupted"
    second = start(broken)
    assert second.run.resumed
    assert second.weight == first.weight
    assert second.go(NEVER) == "not_reached"
    assert keys(broken) == keys(whole)
    for kind, field in (("step", "loss"), ("eval", "qualities")):
        found, expected = (records(folder / "metrics.jsonl", kind) for folder in (broken, whole))
        assert [each[field] for each in found] == [each[field] for each in expected]


def test_what_auto_became_is_recorded_and_a_resumed_run_takes_it_again(tmp_path: Path) -> None:
    taken = {"kernels": {"gather": "triton"}, "optimizer_kernel": "apex", "tf32": {"matmul": True}}
    choices.record("attention", "of an earlier training of this process")
    first = Training(tmp_path, by_epochs(2), {"accuracy": 0.5})
    choices.record("optimizer_kernel", "apex")
    choices.record("kernels", {"gather": "triton"})
    assert first.go(NEVER, stop_at(1)) == "interrupted"
    (init_stop, *_) = [each for each in logged(tmp_path / "result.txt") if each["key"] == "init_stop"]
    assert init_stop["metadata"]["choices"] == taken
    second = Training(tmp_path, by_epochs(2), {"accuracy": 0.5})
    # Nothing is measured again: who resolves an "auto" is not asked, or finds another's place in the checkpoint.
    assert (second.run.config.optimizer_kernel, second.run.config.kernels) == ("apex", "auto")
    assert second.go(NEVER) == "not_reached"
    assert [each["choices"] for each in records(tmp_path / "metrics.jsonl", "start")] == [taken, taken]


def test_what_a_system_names_and_the_machine_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = []
    run = Training(tmp_path, by_epochs(1), {"accuracy": 0.5}).run
    run._framework = SimpleNamespace(finish=lambda: left.append(True))
    with pytest.raises(SystemExit, match="2"), run.initialization():
        raise choices.UnavailableError("kernels=apex: the image has no apex; use kernels=auto")
    assert "kernels=apex: the image has no apex" in capsys.readouterr().err
    assert left == [True], "all ranks raise it, and leave each other before they end"


def test_evidence_is_derived_from_every_configuration(recorded: Callable[[str, object], None]) -> None:
    """As each is by default, on a GPU, and in fp32, of which MXNet does not say whether it is TF32."""
    found: dict[str, object] = {}
    for name, choice in sorted(catalogue.choices().items()):
        config = importlib.import_module(f"{choice.implementation.module}.config").Config()
        for each in (config, replace(config, precision="fp32")):
            says = {"tf32": each.precision != "fp32"} if choice.implementation.framework != "mxnet" else {}
            derived = evidence.of(each, says)
            parts = [str(derived[f"lowest_numerical_precision_in_{part}"]) for part in ("linear", "attn", "comm")]
            found[f"{name}, {each.precision}"] = [*parts, derived["micro_batch_size"]]
            experts = 8 if name == "gpt-oss-20b" else 1
            assert [derived[key] for key in evidence.PARALLELISM] == [1, 1, 1, experts]
    recorded("evidence.json", found)
    bert = importlib.import_module("benchmarks.bert.pytorch.config").Config(
        fp8="scaled_mm", precision="bf16", batch_size=32, accumulation=4
    )
    assert list(evidence.of(bert, {}).values()) == ["fp8", "bfloat16", "fp32", 1, 1, 1, 1, 8, "config.json"]
    assert evidence.gemm_precision(bert) == "fp8"


def test_parts_of_the_start_add_up_to_it(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = {"now": 100.0}
        patch.setattr(startup, "_age", lambda: clock["now"])
        patch.setattr(startup.time, "perf_counter", lambda: clock["now"])
        startup.begin()
        with startup.part("ranks"):
            clock["now"] += 3
        clock["now"] += 0.5
        with startup.part("network"):
            clock["now"] += 2
            with startup.part("compile"):
                clock["now"] += 7
                with pytest.raises(ValueError, match="no kernel"), startup.part("kernels"):
                    clock["now"] += 1
                    raise ValueError("no kernel")
            clock["now"] += 4
        assert startup.taken() == {
            "imports": 100.0, "ranks": 3.0, "network": 6.0, "kernels": 1.0, "compile": 7.0, "rest": 0.5,
        }  # fmt: skip
    assert sum(startup.BUDGET.values()) == 60
    Training(tmp_path, by_epochs(1), {"accuracy": 0.1}).go(lambda weight: {"accuracy": 0.2})
    (start,) = records(tmp_path / "metrics.jsonl", "start")
    seconds = start["startup"]["seconds"]
    # Of this test's process, whose start is by another clock than its parts.
    began = psutil.Process().create_time()
    assert sum(seconds.values()) == pytest.approx(start["time"] - began, abs=1.0)


def test_a_round_that_asks_for_evidence_has_it_in_the_log(tmp_path: Path) -> None:
    for name, asks in (("v0.7", False), ("v6.0", False), ("v6.1", True), ("v10.0", True), ("published", False)):
        assert evidence.required_by(name) == asks
    training = Training(tmp_path, by_epochs(1), {"accuracy": 0.1}, round="v6.1")
    training.go(lambda weight: {"accuracy": 0.2})
    (start,) = records(tmp_path / "metrics.jsonl", "start")
    events = [(each["key"], each["value"]) for each in logged(tmp_path / "result.txt")]
    assert [each for each in events if each[0] in start["evidence"]] == list(start["evidence"].items())
    assert (start["flops_per_sample"], start["gemm_precision"]) == (5e6, "tf32")
    assert start["evidence"]["lowest_numerical_precision_in_linear"] == "tf32"


@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_every_key_that_may_be_auto_is_recorded(name: str) -> None:
    types = configuration.field_types(catalogue.choose(name).folder)
    may_be_auto = {key for key, wanted in types.items() if "auto" in get_args(wanted)}
    assert may_be_auto <= set(choices.KEYS)


def test_a_run_stopped_between_two_records_has_the_same_mean_losses(tmp_path: Path) -> None:
    timeline = timelines.by_epochs(SimpleNamespace(epochs=1, checkpoint_interval=0), 12, lambda epoch: True)
    start = partial(Training, tmp_path, timeline, {"accuracy": 0.5}, log_interval=5)
    first = start()
    assert first.go(NEVER, stop_at(5)) == "interrupted"
    assert first.weight == 8, "between the records of steps 5 and 10"
    assert start().go(NEVER) == "not_reached"
    found = [(each["step"], each["loss"]) for each in records(tmp_path / "metrics.jsonl", "step")]
    assert found == [(5, 2.0), (10, 7.0), (12, 10.5)]


def test_epochs_of_one_step_can_be_stopped(tmp_path):
    """What the ranks vote is read some steps later, or at the end of an epoch."""
    timeline = timelines.by_epochs(SimpleNamespace(epochs=9, checkpoint_interval=0), 1, lambda epoch: epoch == 8)
    first = Training(tmp_path, timeline, {"accuracy": 0.5})
    assert first.go(NEVER, stop_at(2)) == "interrupted"
    assert first.run.position == 3
    assert Training(tmp_path, timeline, {"accuracy": 0.5}).go(NEVER) == "not_reached"


def test_checkpoints_are_kept_at_their_interval_and_found(tmp_path: Path) -> None:
    training = Training(tmp_path, by_epochs(5, interval=2), {"accuracy": 0.5})
    (tmp_path / "checkpoint" / "writing_00000004").mkdir(parents=True)  # left by a run that was killed
    training.go(NEVER)
    kept = sorted((tmp_path / "checkpoint").iterdir())
    states = [json.loads((each / checkpoints.STATE_FILE).read_text(encoding="utf-8")) for each in kept]
    assert [(state["step"], state["evaluated"]) for state in states] == [(6, 6), (12, 12)]
    for each in kept:
        names = sorted(path.name for path in each.glob("*.sha256"))
        assert names == ["rank_0.sha256", "shared.sha256", "state.json.sha256"]
        subprocess.run(["sha256sum", "--check", "--strict", *names], cwd=each, check=True, capture_output=True)


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is in flight at most, it is no checkpoint before its end, and the end of the run waits for the last."""
    folder, may_write, whole, publish = tmp_path / "checkpoint", threading.Event(), [], checkpoints.publish
    losses: list[list[float]] = []

    def write(path: Path, content: Mapping[str, Any]) -> None:
        assert may_write.wait(60)
        checkpoints.save_arrays(path, content)

    def copied(content: Mapping[str, Any], before: Any) -> Mapping[str, Any]:
        whole.append(names("step_*"))
        return dict(content)

    def published(temporary: Path, final: Path, state: Mapping[str, Any]) -> None:
        losses.append(state["losses"])
        publish(temporary, final, state)

    def names(pattern: str) -> list[str]:
        return sorted(path.name for path in folder.glob(pattern))

    def on_step(step: int) -> None:
        if step == 3:
            assert (names("step_*"), names("writing_*")) == ([], ["writing_00000002"])
            may_write.set()

    monkeypatch.setattr(FRAMEWORK, "write", write)
    monkeypatch.setattr(FRAMEWORK, "copied", copied)
    monkeypatch.setattr(checkpoints, "publish", published)
    timeline = replace(every_two_steps(2), checkpoints_after=lambda step: step % 2 == 0)
    training = Training(tmp_path, timeline, {"auc": 0.5}, async_checkpoints=True, log_interval=5)
    assert training.go(lambda weight: {"auc": 0.0}, on_step) == "not_reached"
    assert whole[::2] == [[], ["step_00000002"], ["step_00000002", "step_00000004"]], "two files of each"
    assert names("*") == ["step_00000004", "step_00000006"]
    assert losses == [[0.0, 1.0], [3.0], []], "those that no record had when the save began"
    written = records(tmp_path / "metrics.jsonl", "checkpoint_written")
    stopped = records(tmp_path / "metrics.jsonl", "checkpoint")
    assert ([each["step"] for each in written], [each["step"] for each in stopped]) == ([2, 4, 6], [2, 4, 6])
    assert Training(tmp_path, timeline, {"auc": 0.5}).weight == 6


def test_what_keeps_a_rank_from_writing_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    def saved(folder: str) -> checkpoints.Checkpoints:
        made = checkpoints.Checkpoints(tmp_path / folder, (), FRAMEWORK, Ranks(0, 2, 0, 2, None))
        made.begin(1, {}, dict, dict)
        return made

    for left, error in (
        ("rank_1.failed", "rank_1 could not write its part of .*: see its output"),
        ("rank_1.sha256", ""),
    ):
        other = saved(left)
        assert other.ended(waits=False) is None, "another rank still writes"
        (tmp_path / left / "writing_00000001" / left).touch()
        with pytest.raises(RuntimeError, match=error) if error else nullcontext():
            assert other.ended(waits=True) is not None
        assert (tmp_path / left / "step_00000001").exists() == (not error)
        assert other.ended(waits=True) is None
    monkeypatch.setattr(FRAMEWORK, "write", full)
    training = Training(tmp_path, by_epochs(3, interval=1), {"accuracy": 0.5}, async_checkpoints=True)
    with pytest.raises(OSError, match="No space left"):
        training.go(NEVER)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["writing_00000003"]
    assert (tmp_path / "checkpoint" / "writing_00000003" / "rank_0.failed").exists()


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


@pytest.mark.parametrize("name", ["shared", "rank_0", "state.json", "shared.sha256"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    timeline = by_epochs(6, interval=2)
    assert Training(tmp_path, timeline, {"accuracy": 0.5}).go(NEVER, stop_at(13)) == "interrupted"
    older, newest = sorted((tmp_path / "checkpoint").iterdir())
    DAMAGES[damage](newest / name)
    again = Training(tmp_path, timeline, {"accuracy": 0.5})
    assert f"checkpoint {newest.name} is damaged: {name.removesuffix(checkpoints.DIGEST)}" in capsys.readouterr().err
    assert f"step_{again.weight:08d}" == older.name
    assert again.go(NEVER) == "not_reached"
    first, second = (each["damaged"] for each in records(tmp_path / "metrics.jsonl", "start"))
    assert (first, list(second)) == ({}, [newest.name])
    assert second[newest.name].startswith(name.removesuffix(checkpoints.DIGEST))
    assert [each["step"] for each in records(tmp_path / "metrics.jsonl", "step")] == list(range(1, 19))
    assert not list((tmp_path / "checkpoint").glob("damaged_*"))


def test_a_run_whose_checkpoints_are_all_damaged_ends_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = by_epochs(4, interval=2)
    Training(tmp_path, timeline, {"accuracy": 0.5}).go(NEVER)
    for each in (tmp_path / "checkpoint").iterdir():
        flip(each / "rank_0")
    left: list[bool] = []
    monkeypatch.setattr(FRAMEWORK, "finish", lambda: left.append(True))
    for _ in range(2):  # and not begun anew the second time
        with pytest.raises(SystemExit, match=r"cannot be resumed\n  found: step_.* rank_0 differs.*\n  hint"):
            Training(tmp_path, timeline, {"accuracy": 0.5})
    assert left == [True, True], "a rank that just exits aborts the others"


def test_a_log_that_changed_is_noticed(tmp_path: Path) -> None:
    timeline = by_epochs(4, interval=2)
    Training(tmp_path, timeline, {"accuracy": 0.5}).go(NEVER)
    content = (tmp_path / "metrics.jsonl").read_bytes()
    for damage, said in ((lambda path: os.truncate(path, 10), "is shorter than"), (flip, "differs from what")):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        damage(tmp_path / "metrics.jsonl")
        with pytest.raises(SystemExit, match=f"metrics.jsonl {said} it was then"):
            Training(tmp_path, timeline, {"accuracy": 0.5})


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = Training(tmp_path, by_epochs(2), {"accuracy": 0.5}).run
    with (
        pytest.raises(SystemExit, match=r"not finite at step 2: found nan\n  hint"),
        run.timed(by_epochs(2)),
    ):
        for _ in run.blocks():
            for step in run.steps():
                run.report(float("nan") if step == 1 else 1.0, 0.1)
    assert "run_stop" not in (tmp_path / "result.txt").read_text(encoding="utf-8")


def test_an_evaluation_that_is_forgotten_is_an_error(tmp_path: Path) -> None:
    run = Training(tmp_path, by_epochs(2), {"accuracy": 0.5}).run
    with pytest.raises(RuntimeError, match="was not reported"), run.timed(by_epochs(2)):
        for _ in run.blocks():
            for _ in run.steps():
                run.report(1.0, 0.1)


def test_ranges_of_steps_end_at_epochs_and_evaluations(tmp_path: Path) -> None:
    run = Training(tmp_path, every_two_steps(2), {"auc": 0.5}).run
    found = []
    with run.timed(every_two_steps(2)):
        for _ in run.blocks():
            for steps in run.step_ranges(100):
                found.append(list(steps))
                run.report(1.0, 0.1, samples=len(steps))
            if run.evaluates():
                run.evaluated({"auc": 0.0})
    assert found == [[0, 1], [2], [3], [4, 5]]


def test_stages_of_a_step_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.time()]
    for name in ("time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: clock[0])

    def advance() -> None:
        clock[0] += 0.25

    run = Training(tmp_path, by_epochs(1), {"accuracy": 0.5}).run
    with run.timed(by_epochs(1)):
        for _ in run.blocks():
            for _ in run.steps():
                with run.stage("forward"):
                    run.wait_for(advance)
                advance()
                run.report(1.0, 0.1)
            if run.evaluates():
                run.evaluated({"accuracy": 1.0})
    (epoch,) = records(tmp_path / "metrics.jsonl", "epoch")
    assert epoch["stages"] == {"forward": 0.75}
    assert epoch["input_share"] == 0.5
