"""A slow rank is named while the run lasts, in status and follow; every node is sampled, and asked by doctor."""

import json
import platform
import sys
import time
from pathlib import Path

import pytest
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
from tests.run_folders import made


def steps(experiment: Path, *waiting: float, ago: float = 5.0) -> None:
    (experiment / "steps").mkdir(exist_ok=True)
    for rank, share in enumerate(waiting):
        line = {"time": time.time() - ago, "node": "n1", "local_rank": rank, "step": 9, "steps": 9, "window": 10.0}
        line |= {"median": 1.0, "p99": 1.0, "waiting": share, "input": 0.0, "cpu": 1.0, "delayed": 0.0}
        (experiment / "steps" / f"rank_{rank}.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")


def beats(experiment: Path, host: str, *silent: float) -> None:
    (experiment / "heartbeat").mkdir(exist_ok=True)
    for rank, seconds in enumerate(silent):
        alive = time.time() - seconds
        (experiment / "heartbeat" / f"rank_{rank}").write_text(f"1 {host} 9 {alive:.3f} {alive:.3f}\n", "ascii")


def test_the_steps_name_the_rank_that_others_wait_for(tmp_path: Path) -> None:
    assert follow.slow_rank(tmp_path) == ""
    steps(tmp_path, 0.6, 0.1)
    beats(tmp_path, platform.node(), 0.1, 0.2)
    assert follow.slow_rank(tmp_path) == ("rank 1 is slow (n1, device 1): the others wait 60% of their time, it 10%")
    steps(tmp_path, 0.6, 0.1, ago=300.0)
    assert follow.slow_rank(tmp_path) == "", "what is long ago says nothing of now"


@pytest.mark.parametrize(("host", "silent", "named"), [("here", 8.0, True), ("n7", 8.0, False), ("n7", 95.0, True)])
def test_a_suspended_rank_is_named_by_its_heartbeat(tmp_path: Path, host: str, silent: float, named: bool) -> None:
    beats(tmp_path, platform.node() if host == "here" else host, 0.1, silent)
    found = follow.slow_rank(tmp_path)
    assert found.startswith("rank 1 is slow (process 1 on ") == named, found


def test_status_and_follow_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(
        tmp_path, (ExperimentState(status="running", started="2026-11-20T10:00:00Z"),), config={"quality_target": 1.0}
    )
    experiment = run.experiments()[0]
    start = {"kind": "start", "time": time.time(), "resumed_step": 0, "epochs": 3, "steps_per_epoch": 5}
    experiment.metrics.write_text(json.dumps({**start, "targets": {}}) + "\n", encoding="utf-8")
    steps(experiment.folder, 0.6, 0.1)
    monkeypatch.setattr(status, "forecast_of", lambda experiment: None)
    (row,) = status.overview(tmp_path, status.Queue(), None)
    row = status._progress(status.replace(row, state="running"))
    assert row.slow.startswith("rank 1 is slow") and row.slow in describe(row) and row.as_json()["slow"] == row.slow
    monkeypatch.setattr(follow, "SLOW_SECONDS", 0.0)
    watch = follow.SlowRankWatch(experiment.folder)
    progress = follow.Progress(slow=watch.look())
    assert live.facts(progress).endswith(row.slow)


def test_each_other_node_is_sampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "telemetry.jsonl"
    job = Allocation(job="7", nodes=("n1", "n2", "n3", "n4"))
    monkeypatch.setattr(node, "name", lambda: "n1")
    ((*srun, python, _, module, where),) = step.samplers(job, 3, file)
    assert (python, module, where) == (sys.executable, "encore.machine.telemetry", str(file))
    assert {"srun", "--nodes=2", "--nodelist=n2,n3", "--overlap"} <= set(srun) and "--input=none" not in srun
    assert step.samplers(job, 1, file) == () == step.samplers(Allocation(job="JOB", nodes=("n1", "n2")), 2, file)
    monkeypatch.setattr(multi_host, "is_here", lambda name: name == "n1")
    monkeypatch.setenv(openmetrics.VARIABLE, "/metrics")
    ((*ssh, host, change, script),) = multi_host.samplers([Host("n1", 4), Host("n2", 4)], file)
    assert ssh[0] == "ssh" and host == "n2" and change == f"cd {paths.ROOT} && exec"
    assert script == f"env ENCORE_TEXTFILE=/metrics {sys.executable} -m encore.machine.telemetry {file}"


def test_doctor_checks_this_node_alone_where_there_is_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    where = ["doctor", "--nodes", "--quick", "--disk", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, where)
    found = json.loads(done.stdout)["nodes"]
    assert [each["node"] for each in found] == [node.name()] and done.exit_code == 0, done.output
    assert (tmp_path / "encore" / "gate" / f"{node.name()}.json").exists()
    assert CliRunner().invoke(app, ["doctor", "--quick"]).exit_code == 1
