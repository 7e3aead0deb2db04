"""The command that resumes a run: whole, quoted, right in any folder, and not printed where nobody is to give it."""

import io
import shlex
from pathlib import Path

import pytest
import typer
from rich.console import Console

from encore import catalogue, configuration
from encore.cli.live import RunView
from encore.cli.run import finish
from encore.errors import EncoreError, ExitCode
from encore.run import follow, hints, passport, run_folder, runner
from encore.slurm import cluster
from tests.run_folders import made


@pytest.mark.parametrize(("slurm", "command"), [("", "run"), ("12", "submit")])
def test_a_hint_names_the_cluster_file_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: str, command: str
) -> None:
    begun, read = tmp_path / "begun here", tmp_path / "read here"
    for folder in (begun, read):
        folder.mkdir()
    monkeypatch.chdir(begun)
    monkeypatch.setenv("ENCORE_CLUSTER", "my cluster.toml")
    given = ["run", "resnet", "--require-target"]
    run = made(tmp_path / "my results", slurm=slurm, cluster_file=cluster.named(), arguments=given)
    monkeypatch.delenv("ENCORE_CLUSTER")
    monkeypatch.chdir(read)
    assert shlex.split(hints.resume(run.path))[1:] == [
        command,
        "--resume",
        str(run.path),
        "--cluster",
        str(begun / "my cluster.toml"),
        *given[2:] * bool(slurm),
    ]


@pytest.mark.parametrize(
    ("ending", "require_target", "code", "resume", "excused"),
    [
        (runner.Ending(ExitCode.INTERRUPTED), True, ExitCode.INTERRUPTED, True, False),
        (runner.Ending(ExitCode.INTERRUPTED, goes_on=True), True, ExitCode.INTERRUPTED, False, False),
        (runner.Ending(ExitCode.INTERRUPTED, is_final=True), True, ExitCode.INTERRUPTED, False, False),
        (runner.Ending(ExitCode.NOT_REACHED), False, 0, False, True),
        (runner.Ending(ExitCode.NOT_REACHED), True, ExitCode.NOT_REACHED, False, False),
        (runner.Ending(ExitCode.FAILED), False, ExitCode.FAILED, True, False),
    ],
)
def test_what_a_run_prints_at_its_end(
    tmp_path: Path, ending: runner.Ending, require_target: bool, code: int, resume: bool, excused: bool
) -> None:
    stopped = run_folder.ExperimentState(status="interrupted", reason="stopped")
    run = made(tmp_path, [stopped], config={"quality_target": 0.9})
    screen = Console(file=io.StringIO(), width=200, record=True, soft_wrap=True)
    with pytest.raises(typer.Exit) as ended:
        finish(screen, run, ending, as_json=False, require_target=require_target)
    printed = screen.export_text()
    assert ended.value.exit_code == code and (f"resume with: {hints.resume(run.path)}" in printed) is resume
    assert ("a target was missed: exit code 0" in printed) is excused


@pytest.mark.parametrize(
    ("name", "memory", "advice"),
    [
        (
            "bert",
            "GPU",
            "lower batch_size (now 32) or eval_batch_size (now 16), or a higher accumulation (now 1): --set",
        ),
        (
            "resnet",
            "CPU",
            "lower batch_size (now 408) or dali_prefetch (now 5) or dali_threads (now 3), or fewer ranks",
        ),
        ("minigo", "GPU", "eval_batch_size (now 1024) or inference_batch (now 256) or concurrent_games (now 256): --"),
    ],
)
def test_what_to_lower_is_named_with_its_value(name: str, memory: str, advice: str) -> None:
    choice = catalogue.choose(name)
    system = catalogue.find_system(choice, "dgxa100", "v0.7")
    asked = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
    assert advice in hints.less_memory(asked, memory)
    assert ("fewer ranks" in hints.less_memory(asked, memory)) is (memory == "CPU")


def test_a_damaged_checkpoint_is_named_once_by_the_run(tmp_path: Path) -> None:
    screen = Console(file=io.StringIO(), width=200, record=True, soft_wrap=True)
    scale = {"epochs": 2, "steps_per_epoch": 4, "global_batch_size": 8, "targets": {}}
    damaged = {"step_00000004": "rank_1 differs from its checksum"}
    progress = follow.Progress()
    progress.add({"kind": "start", "time": 1.0, **scale, "resumed_step": 2, "damaged": damaged})
    with RunView(screen) as view:
        view.start("experiment 1/1")
        for _ in range(3):
            view.update(progress)
    said = "checkpoint step_00000004 is damaged (rank_1 differs from its checksum): experiment 1/1 resumed from"
    assert screen.export_text().count(f"{said} the one before it, step 2") == 1


def test_a_secret_is_not_kept_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = passport.parse_environment(("MY_TOKEN=hush", "NOTE=a=b", "OWN"), {"OWN": "x"})
    kept = passport.redact(given)
    assert kept == {"MY_TOKEN": passport.REDACTED, "NOTE": "a=b", "OWN": "x"}
    words = ["run", "--env=MY_TOKEN=hush", "MY_TOKEN=hush", "NOTE=a=b"]
    hidden = [f"{start}MY_TOKEN={passport.REDACTED}" for start in ("--env=", "")]
    assert passport.redact_arguments(words) == ["run", *hidden, "NOTE=a=b"]
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(EncoreError, match="the run was given MY_TOKEN, whose value is not kept") as refused:
        passport.restore(kept, "encore run --resume RUN")
    assert refused.value.hint == "set it again: MY_TOKEN=VALUE encore run --resume RUN"
    monkeypatch.setenv("MY_TOKEN", "hush")
    assert passport.restore(kept, "") == given
    for setting, found in (("1x=2", "names no variable"), ("NONE", "the variable is not set")):
        with pytest.raises(EncoreError, match=found):
            passport.parse_environment((setting,), {})
