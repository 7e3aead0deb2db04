"""The study of several nodes: its points, their hosts and batches, and the printed figures next to ours."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.scaling.grid import Grid, GridPoint, hosts_of, points
from encore.lab.scaling.throughput import Result
from encore.lab.studies import nodes
from encore.machine import node
from encore.results.statistics import Sample

HOSTS = ("n1:4", "n2:4", "n3:4", "n4:4")


def test_points_are_the_study_s() -> None:
    grid = nodes.grids(nodes.load("multi-node"), False, hosts=HOSTS)["MXNet"]
    assert [each.gpus for each in points(grid) if each.precision == "fp16"] == [1, 2, 4, 8, 12, 16]
    assert {(each.precision, each.batch) for each in points(grid)} == {("fp32", 64), ("fp16", 128)}
    largest = points(grid)[-1]
    assert [str(each) for each in hosts_of(grid, largest)] == list(HOSTS)
    assert hosts_of(grid, points(grid)[0]) == ()


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (Grid(benchmark="resnet", gpus=(1,), precisions=("fp16:128",)), "--weak"),
        (Grid(benchmark="resnet", gpus=(1,), precisions=("fp16:no",), mode="weak"), "a batch"),
        (Grid(benchmark="resnet", gpus=(4,), nodes=(2,), hosts=("n1:4", "n2:2")), "more hosts"),
    ],
    ids=["strong", "no number", "few slots"],
)
def test_grids_that_cannot_be_are_refused(grid: Grid, said: str) -> None:
    with pytest.raises(EncoreError) as raised:
        hosts_of(grid, points(grid)[-1])
    assert said in f"{raised.value.expected} {raised.value.remedy}"


def test_printed_figures_stand_next_to_ours() -> None:
    """A machine on which 16 GPUs are 14 times as fast as one, and fp16 is 1.7 times as fast as fp32."""
    study = nodes.load("multi-node")
    found = {name: [ended(point) for point in points(grid)] for name, grid in nodes.grids(study, False).items()}
    inputs, speeds, gains = nodes.tables(study, found)
    assert ("MXNet", "fp16", 128, "MXNet", "128", "1") in inputs.rows
    rows = {row[:4]: dict(zip(speeds.columns, row, strict=True)) for row in speeds.rows}
    row = rows["MXNet", "fp32", 4, 16]
    assert (row["speed-up"], row["printed speed-up"]) == (pytest.approx(14.0), "15.4")
    assert row["from"] < 14.0 < row["to"]
    assert rows["PyTorch", "fp16", 4, 16]["printed speed-up"] == "13.6"
    assert rows["PyTorch", "fp16", 1, 1]["speed-up"] is None
    printed = {row[:3]: row[-1] for row in gains.rows}
    assert printed["PyTorch", 3, 12] == "29.26"
    assert printed["MXNet", 1, 4] == "63.28 to 82.79"
    assert {round(row[3]) for row in gains.rows} == {70}
    on_cpu = {name: [replace(each, on_cpu=True) for each in results] for name, results in found.items()}
    for table in nodes.tables(study, on_cpu):
        assert not any("GPU" in word for word in (*table.columns, table.note))


def ended(point: GridPoint) -> Result:
    speed = 300.0 * (1 + (point.gpus - 1) * 13 / 15) * (1.7 if point.precision == "fp16" else 1.0)
    return Result(point=point, state="done", samples_per_second=Sample.of([speed * f for f in (0.99, 1.0, 1.01)]))


def test_a_dry_run_has_every_command() -> None:
    given = ["--hosts", ",".join(HOSTS), "--system", "dgxa100", "--runtime", "apptainer", "--data", "/tmp"]
    images = ["--image", "MXNet=mx.sif", "--image", "PyTorch=torch.sif"]
    done = CliRunner().invoke(app, ["study", "multi-node", *given, *images, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found) == 2 * 2 * 6
    assert all("apptainer" in each["command"] for each in found)
    (widest,) = [each for each in found if (each["framework"], each["point"]) == ("MXNet", "4x4-fp32")]
    assert "-np 16 --hostfile" in widest["command"]


def test_a_dry_run_without_a_gpu_has_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "gpus", tuple)
    done = CliRunner().invoke(app, ["study", "multi-node", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "MXNet 4x4-fp16, 128 a GPU:\n  a job of the scheduler" in done.stdout
    assert "PyTorch 1x4-fp32, 64 a GPU:\n  its command depends on the GPUs, of which there are none here" in done.stdout
    assert "24 points" in done.stdout
