"""The study of several nodes: its points, their hosts and batches, and the printed figures next to ours."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.lab.studies import nodes
from encore.lab.studies.sweep import GridPoint, Sweep, hosts_of
from encore.lab.studies.throughput import Result
from encore.machine import node
from encore.results.statistics import Sample
from encore.run.planning import Request
from encore.ssh.hosts import Host

HOSTS = tuple(Host(f"n{number}", 4) for number in (1, 2, 3, 4))


def sweep_of(study: nodes.NodeStudy, **request: Any) -> Sweep:
    return nodes.sweep_of(study, False, Request(name="", gpus=None, **request))


def test_points_are_the_study_s() -> None:
    grid = sweep_of(nodes.load("multi-node"), hosts=HOSTS)
    found = [each for each in grid.points() if each.benchmark == "resnet"]
    assert [each.gpus for each in found if each.precision == "fp16"] == [1, 2, 4, 8, 12, 16]
    assert {(each.precision, each.batch) for each in found} == {("fp32", 64), ("fp16", 128)}
    assert (hosts_of(grid, found[0]), hosts_of(grid, found[-1])) == ((), HOSTS)


def test_printed_figures_are_next_to_ours(recorded: Callable[[str, object], None]) -> None:
    """A machine on which 16 GPUs are 14 times as fast as one, and fp16 is 1.7 times as fast as fp32."""
    study = nodes.load("multi-node")
    found = [ended(point) for point in sweep_of(study).points()]
    tables = nodes.tables(study, found)
    recorded("nodes.json", {table.title: [table.columns, *table.rows, table.note] for table in tables})
    for table in nodes.tables(study, [replace(each, on_cpu=True) for each in found]):
        assert not any("GPU" in word for word in (*table.columns, table.note))


def ended(point: GridPoint) -> Result:
    speed = 300.0 * (1 + (point.gpus - 1) * 13 / 15) * (1.7 if point.precision == "fp16" else 1.0)
    return Result(point=point, state="done", samples_per_second=Sample.of([speed * f for f in (0.99, 1.0, 1.01)]))


def test_a_dry_run_has_every_command() -> None:
    given = ["--hosts", ",".join(map(str, HOSTS)), "--system", "dgxa100", "--runtime", "apptainer", "--data", "/tmp"]
    images = ["--image", "MXNet=mx.sif", "--image", "PyTorch=torch.sif"]
    done = CliRunner().invoke(app, ["study", "run", "multi-node", *given, *images, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert ["apptainer" in each["command"] for each in found] == [True] * 2 * 2 * 6
    (widest,) = [each for each in found if (each["framework"], each["point"]) == ("MXNet", "resnet-4x4-fp32")]
    assert "-np 16 --hostfile" in widest["command"]


def test_a_dry_run_without_a_gpu_has_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "gpus", tuple)
    done = CliRunner().invoke(app, ["study", "run", "multi-node", "--dry-run"])
    assert done.exit_code == 0, done.output
    wanted = (
        "MXNet resnet-4x4-fp16, 128 a GPU:\n  a job of the scheduler",
        "PyTorch resnet-pytorch-1x4-fp32, 64 a GPU:\n  its command depends on the GPUs, of which there are none here",
        "24 points",
    )
    assert [said for said in wanted if said not in done.stdout] == []
