"""Slow ranks in status and follow, telemetry of other nodes, and doctor without a job."""

import io
import json
import platform
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from encore import paths
from encore.cli import live
from encore.cli.app import app
from encore.cli.jobs import describe
from encore.machine import node, openmetrics
from encore.run import follow, status
from encore.run.run_folder import ExperimentState
from encore.slurm import step
from encore.slurm.queue import Allocation
from encore.ssh import multi_host
from encore.ssh.hosts import Host
from tests.run_folders import make_run


def write_steps(experiment: Path, *waits: float, age: float = 5.0) -> None:
    (experiment / "steps").mkdir(exist_ok=True)
    for rank, share in enumerate(waits):
        line = {"node": "n1", "local_rank": rank, "step": 9, "steps": 9, "window": 40.0, "median": 1.0, "p99": 1.0}
        line |= {"waiting": share, "input": 0.0, "cpu": 1.0, "delayed": 0.0}
        lines = [json.dumps({"time": time.time() - seconds, **line}) + "\n" for seconds in (age + 40.0, age)]
        (experiment / "steps" / f"rank_{rank}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_heartbeats(experiment: Path, host: str, *ages: float) -> None:
    (experiment / "heartbeat").mkdir(exist_ok=True)
    for rank, age in enumerate(ages):
        alive = time.time() - age
        (experiment / "heartbeat" / f"rank_{rank}").write_text(f"1 {host} 9 {alive:.3f} {alive:.3f}\n", "ascii")


def test_slow_rank_is_the_one_that_waits_least(tmp_path: Path) -> None:
    assert follow.slow_rank(tmp_path) == ""
    write_steps(tmp_path, 0.6, 0.1)
    assert follow.slow_rank(tmp_path) == "rank 1 is slow (n1, device 1): the others wait 60% of their time, it 10%"
    write_steps(tmp_path, 0.6, 0.1, age=300.0)
    assert follow.slow_rank(tmp_path) == ""


@pytest.mark.parametrize(
    ("host", "age", "is_slow"), [(platform.node(), 8.0, True), ("n7", 8.0, False), ("n7", 95.0, True)]
)
def test_suspended_rank_is_slow(tmp_path: Path, host: str, age: float, is_slow: bool) -> None:
    write_heartbeats(tmp_path, host, 0.1, age)
    text = follow.slow_rank(tmp_path)
    assert text.startswith("rank 1 is slow (process 1 on ") == is_slow, text


def test_status_and_follow_show_a_slow_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ExperimentState(status="running", started="2026-11-20T10:00:00Z")
    (experiment,) = make_run(tmp_path, [state], config={"quality_target": 1.0}).experiments()
    start = {"kind": "start", "time": time.time(), "resumed_step": 0, "epochs": 3, "steps_per_epoch": 5, "targets": {}}
    experiment.metrics.write_text(json.dumps(start) + "\n", encoding="utf-8")
    write_steps(experiment.folder, 0.6, 0.1)
    monkeypatch.setattr(status, "forecast_of", lambda experiment: None)
    (row,) = status.overview(tmp_path, status.Queue(), None)
    row = status._progress(status.replace(row, state="running"))
    assert row.slow.startswith("rank 1 is slow") and row.slow in describe(row) and row.as_json()["slow"] == row.slow
    monkeypatch.setattr(follow, "SLOW_SECONDS", 0.0)
    assert follow.SlowRankWatch(experiment.folder).look() == row.slow


def test_lines_of_a_run_are_not_repeated() -> None:
    screen = Console(file=io.StringIO(), width=80)
    view, progress = live.RunView(screen), follow.Progress(epochs=3, step=4, epoch=1, loss=0.5)
    view.start("experiment 1/1")
    for slow in ("", "rank 1 is slow", "rank 1 is slow", ""):
        progress.slow = slow
        view.update(progress)
        view._next = 0.0
    progress.qualities, progress.targets, progress.evaluated_epoch = {"accuracy": 0.9}, {"accuracy": 0.95}, 1
    view.update(progress)
    assert screen.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "experiment 1/1: starting",
        "experiment 1/1: epoch 1/3  loss 0.5000",
        "experiment 1/1: rank 1 is slow",
        "experiment 1/1: epoch 1/3  quality 0.9000 of 0.95 (epoch 1)  loss 0.5000",
    ]


def test_bar_fits_80_columns() -> None:
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None, legacy_windows=False)
    progress = follow.Progress(epochs=12, step=40, epoch=3, steps_per_epoch=100, loss=0.5, evaluated_epoch=2)
    progress.qualities, progress.targets = {"accuracy": 0.9}, {"accuracy": 0.95}
    with live.RunView(screen) as view:
        view.start("experiment 1/1")
        view.update(progress)
    (line,) = re.findall(r"experiment 1/1 [^\r\n]*epoch 3/12.*", screen.file.getvalue())  # type: ignore[attr-defined]
    assert len(line) <= 80 and "epoch 3/12  quality 0.9000 of 0.95" in line


def test_other_nodes_of_a_job_are_sampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, job = tmp_path / "telemetry.jsonl", Allocation(job="7", nodes=("n1", "n2", "n3", "n4"))
    monkeypatch.setattr(node, "name", lambda: "n1")
    ((*srun, python, _, module, output),) = step.samplers(job, 3, file)
    assert (python, module, output) == (sys.executable, "encore.machine.telemetry", str(file))
    assert {"srun", "--nodes=2", "--nodelist=n2,n3", "--overlap"} <= set(srun) and "--input=none" not in srun
    assert step.samplers(job, 1, file) == () == step.samplers(Allocation(job="JOB", nodes=("n1", "n2")), 2, file)


def test_other_hosts_are_sampled_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "telemetry.jsonl"
    monkeypatch.setattr(multi_host, "is_here", lambda name: name == "n1")
    monkeypatch.setenv(openmetrics.VARIABLE, "/metrics")
    ((*ssh, host, change, script),) = multi_host.samplers([Host("n1", 4), Host("n2", 4)], file)
    assert (ssh[0], host, change) == ("ssh", "n2", f"cd {paths.ROOT} && exec")
    assert script == f"env ENCORE_TEXTFILE=/metrics {sys.executable} -m encore.machine.telemetry {file}"


def test_doctor_without_a_job_checks_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    output = CliRunner().invoke(app, ["doctor", "--nodes", "--quick", "--disk", str(tmp_path), "--json"])
    nodes = [entry["node"] for entry in json.loads(output.stdout)["nodes"]]
    assert (nodes, output.exit_code) == ([node.name()], 0), output.output
    assert (tmp_path / "encore" / "gate" / f"{node.name()}.json").exists()
    assert CliRunner().invoke(app, ["doctor", "--quick"]).exit_code == 1
