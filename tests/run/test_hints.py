"""The command that resumes a run: whole, quoted, right in any folder, and not printed where nobody is to give it."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest
import typer
from rich.console import Console

from encore.cli.run import finish
from encore.errors import ExitCode
from encore.run import hints, run_folder
from encore.run.run_folder import ExperimentState, RunFolder
from encore.run.runner import Ending
from encore.slurm import cluster


def made(results: Path, **facts: object) -> RunFolder:
    """Return a run whose only experiment was interrupted."""
    known = {"schema": run_folder.SCHEMA, "name": "resnet", "round": "v0.7", "seeds": [1], "nodes": 1, **facts}
    passport = {**dict.fromkeys(run_folder.NEEDED), "submission": {"text": ""}, "data": {"name": "digits"}, **known}
    run = run_folder.create(results, "resnet", lambda path: passport, {}, {"quality_target": 0.9}, [1])
    run.experiments()[0].set_state(ExperimentState(status="interrupted", reason="stopped"))
    return run


@pytest.mark.parametrize(("slurm", "command"), [(None, "run"), ({"job": "12"}, "submit")])
def test_a_hint_names_the_cluster_file_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: object, command: str
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
    words = shlex.split(hints.resume(run.path))
    assert words[1:] == [
        command,
        "--resume",
        str(run.path),
        "--cluster",
        str(begun / "my cluster.toml"),
        *given[2:] * bool(slurm),
    ]


@pytest.mark.parametrize(("goes_on", "is_final"), [(False, False), (True, False), (False, True)])
def test_a_job_that_goes_on_by_itself_does_not_advise_to_resume(tmp_path: Path, goes_on: bool, is_final: bool) -> None:
    run, screen = made(tmp_path), Console(file=io.StringIO(), width=200, record=True, soft_wrap=True)
    with pytest.raises(typer.Exit) as ended:
        finish(screen, run, Ending(ExitCode.INTERRUPTED, goes_on, is_final), as_json=False)
    assert ended.value.exit_code == ExitCode.INTERRUPTED
    assert (f"resume with: {hints.resume(run.path)}" in screen.export_text()) is not (goes_on or is_final)


@pytest.mark.parametrize(("code", "left"), [(ExitCode.NOT_REACHED, 0), (ExitCode.FAILED, 1)])
def test_only_a_missed_target_is_excused(tmp_path: Path, code: ExitCode, left: int) -> None:
    screen = Console(file=io.StringIO(), width=200, record=True, soft_wrap=True)
    with pytest.raises(typer.Exit) as ended:
        finish(screen, made(tmp_path), Ending(code), as_json=False, require_target=False)
    assert ended.value.exit_code == left
    assert ("a target was missed: exit code 0" in screen.export_text()) is (left == 0)
