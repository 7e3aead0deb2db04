"""Sweeps: the grid, real points on one and two ranks, resuming, the seam to a scheduler, what is reported."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from encore import catalogue
from encore.errors import EncoreError, ExitCode
from encore.lab.scaling import batch, plots, releases, sweep_folder, throughput
from encore.lab.scaling.grid import Grid, GridPoint, batch_settings, points, request_of
from encore.lab.scaling.sweep_folder import Here, Submitter
from encore.run import planning, run_folder
from encore.run.run_folder import ExperimentState
from encore.run.supervise import Limits
from tests.conftest import TINY, Encore, Study, losses, records
from tests.trainings import PATIENCE, in_background, wait_for_step

NOWHERE = Here(lambda point, folder: pytest.fail("a point was run"), Limits())


def made_point(
    study: sweep_folder.Study,
    point: GridPoint,
    speed: float,
    status: Any = "not_reached",
    unit: str = "samples",
    device: str = "gpu",
) -> Path:
    """Return a run folder of a point as a run of three epochs leaves it: the first one slow, the others fast."""
    passport = {"benchmark": "resnet", "round": "v0.7", "configuration": {"device": {"value": device}}}
    run = run_folder.create(study.folder(point), "resnet-mxnet-cpu", lambda path: passport, {}, {}, [1])
    experiment = run.experiments()[0]
    stream: list[dict[str, Any]] = [{"kind": "start", "time": 0.0, "global_batch_size": 64, "batch_unit": unit}]
    stream += [
        {"kind": "epoch", "time": e, "epoch": e, "samples_per_second": s, "input_share": 0.1}
        for e, s in ((1, speed / 10), (2, speed), (3, speed))
    ]
    experiment.metrics.write_text("".join(json.dumps(record) + "\n" for record in stream), encoding="utf-8")
    experiment.set_state(ExperimentState(status=status))
    return run.path


# -- releases of an image -------------------------------------------------------------------------------


def release_grid(**values: Any) -> Grid:
    return Grid(benchmark="bert-squad", gpus=(1,), images=("25.12", "21.11"), system="cpu", **values)


def test_releases_are_points_of_their_own_in_the_order_given(tmp_path: Path) -> None:
    grid = release_grid()
    assert [point.key for point in points(grid)] == ["1x1-25.12", "1x1-21.11"]
    images = [request_of(grid, point, tmp_path).image for point in points(grid)]
    assert images == [f"localhost/encore/bert-squad:{each}" for each in grid.images]
    with pytest.raises(EncoreError, match="release"):
        request_of(Grid(benchmark="bert-squad", gpus=(1,), images=("1.1",)), GridPoint(1, 1, None, "1.1"), tmp_path)
    with pytest.raises(EncoreError, match="--images with --image"):
        request_of(release_grid(image="other"), points(grid)[0], tmp_path)


def test_releases_are_listed_without_an_engine(encore: Encore) -> None:
    done = encore("sweep", "bert-squad", "--images", "25.12,21.11", "--system", "cpu", "--dry-run", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each["point"] for each in json.loads(done.stdout)["points"]] == ["1x1-25.12", "1x1-21.11"]


def test_speed_up_of_releases_is_next_to_the_published_one(tmp_path: Path) -> None:
    study = sweep_folder.create(release_grid(), tmp_path)
    for point, speed in zip(points(study.grid), (100.0, 150.0), strict=True):
        made_point(study, point, speed)
    results = throughput.measured(study)
    table = releases.releases_table(results, releases.published("bert-squad"))
    assert [row[3:] for row in table.rows[:2]] == [(1.0, releases.MEASURED), (1.5, releases.MEASURED)]
    theirs = [row for row in table.rows if row[4] == "published"]
    assert [(row[0], row[2], row[3]) for row in theirs] == [
        ("20.03", None, 1.0),
        ("20.06", None, 2.1),
        ("20.06", None, 4.9),
    ]
    assert "not measured here" in table.note
    figure = releases.releases_figure(table)
    assert figure is not None and "published" in figure.svg and ">1.50<" in figure.svg
    assert releases.releases_figure(releases.releases_table([], releases.published("bert-squad"))) is None
    assert releases.published("resnet") is None


# -- the grid -------------------------------------------------------------------------------------------


def test_points_are_every_combination_small_ones_first() -> None:
    grid = Grid(benchmark="resnet", gpus=(8, 4, 4), nodes=(1, 2), precisions=("fp16", "fp32"))
    keys = [point.key for point in points(grid)]
    assert keys[:4] == ["1x4-fp16", "1x4-fp32", "1x8-fp16", "1x8-fp32"]
    assert len(keys) == len(set(keys)) == 8


def test_strong_scaling_keeps_batch_and_learning_rate_weak_scaling_follows() -> None:
    system = catalogue.find_system(catalogue.choose("resnet"), "dgx1", "v0.7")
    batch, rate = system.config["batch_size"], system.config["learning_rate"]
    two = GridPoint(nodes=1, gpus_per_node=2)
    assert batch_settings(system, two, "strong") == (f"batch_size={batch * 4}", f"learning_rate={rate}")
    # Weak scaling is what Encore does with a submitted system anyway.
    assert batch_settings(system, two, "weak") == ()
    small = catalogue.find_system(catalogue.choose("resnet"), "cpu", None)
    assert batch_settings(small, two, "strong") == ()
    assert batch_settings(small, two, "weak") == ("batch_size=64", "learning_rate=0.2")
    assert batch_settings(small, two, "strong", 128) == ("batch_size=64", "learning_rate=0.1")


def test_the_submitted_count_stays_as_submitted() -> None:
    grid = Grid(benchmark="resnet", gpus=(8,), system="dgx1", round="v0.7", settings=("device=cpu",))
    for mode in ("strong", "weak"):
        request = request_of(
            Grid(benchmark="resnet", gpus=(8,), system="dgx1", round="v0.7", mode=mode),
            points(grid)[0],
            Path("results"),
        )
        assert not planning.make_plan(request).configuration.deviations


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "1,x"), "--gpus 1,x"),
        (("--gpus", "0"), "whole numbers from 1 on"),
        (("--gpus", "1", "--set", "batch_size=3"), "use --global-batch, or --weak"),
        (("--gpus", "1", "--precision", "fp32", "--set", "precision=fp32"), "use --precision"),
        (("--gpus", "1,2", "--precision", "fp16"), "device=cpu cannot run precision=fp16"),
        (("--gpus", "1", "--weak", "--global-batch", "64"), "--global-batch 64 with weak scaling"),
        (("--gpus", "3", "--global-batch", "64"), "cannot share a global batch of 64 evenly"),
        (("--gpus", "1", "--predict", "x"), "--predict x"),
        (("--gpus", "1", "--predict", "4"), "--predict with one number of GPUs"),
        (("--resume", "docs", "--gpus", "1"), "takes all that is to be run from the study folder"),
        (("--resume", "docs"), "is no study folder"),
        ((), "no numbers of GPUs given"),
    ],
)
def test_sweep_refuses(encore: Encore, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    first = () if "--resume" in arguments else ("resnet", "--results", str(tmp_path))
    done = encore("sweep", *first, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


# -- real points ----------------------------------------------------------------------------------------


def test_a_sweep_is_run_reported_and_not_run_again(encore: Encore, study: Study) -> None:
    printed, folder = study.printed, study.folder
    runs, totals = printed["tables"][:2]
    rows = {row[0]: dict(zip(runs["columns"], row, strict=True)) for row in runs["rows"]}
    assert set(rows) == {"1x1", "1x2"}
    assert [row["batch"] for row in rows.values()] == [64, 64]
    assert rows["1x1"]["speed-up"] == rows["1x1"]["efficiency"] == 1
    assert rows["1x2"]["efficiency"] == pytest.approx(rows["1x2"]["speed-up"] / 2)
    assert totals["rows"][0][0] == 4
    assert "Throughput by number of ranks" in (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert (folder / "report" / "speed-up.svg").exists()
    before = sorted(path for path in folder.glob("1x*/*/experiment_0/metrics.jsonl"))
    stamps = [path.stat().st_mtime_ns for path in before]
    again = encore("sweep", "--resume", str(folder))
    assert again.returncode == 0, again.stderr
    assert "never a reproduction" in again.stdout
    after = sorted(path for path in folder.glob("1x*/*/experiment_0/metrics.jsonl"))
    assert (after, [path.stat().st_mtime_ns for path in after]) == (before, stamps)


def test_a_sweep_whose_points_would_fail_again_is_not_to_be_resumed(tmp_path: Path) -> None:
    study = sweep_folder.create(Grid(benchmark="resnet", gpus=(1, 2)), tmp_path)
    first, second = points(study.grid)
    assert study.may_resume(), "nothing was run"
    made_point(study, first, 100.0)
    run = run_folder.RunFolder(made_point(study, second, 100.0, "failed"))
    assert study.may_resume()
    run.experiments()[0].set_state(ExperimentState(status="failed", reason="out of memory", is_final=True))
    assert (study.state(second), study.may_resume()) == ("failed", False)


def test_an_interrupted_point_is_resumed(encore: Encore, digits: Path, tmp_path: Path, study: Study) -> None:
    where = ("--data", str(digits), "--results", str(tmp_path))
    process = in_background("sweep", "resnet", "--gpus", "1", *where, *TINY, "--seed", "7")
    # Behind the checkpoint of the first epoch, which 24 steps make.
    wait_for_step(process, tmp_path, 26)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    (path,) = tmp_path.iterdir()
    assert process.returncode == ExitCode.INTERRUPTED, output
    assert f"encore sweep --resume {path}" in output
    found = sweep_folder.open_study(path)
    (point,) = points(found.grid)
    assert found.state(point) == "interrupted"
    done = encore("sweep", "--resume", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = path.glob("1x1/*/experiment_0/metrics.jsonl")
    assert [record["resumed_step"] > 0 for record in records(metrics, "start")] == [False, True]
    assert losses(metrics) == losses(study.of_ranks(1) / "metrics.jsonl"), "one rank, the same seed"
    assert found.state(point) == "done"


# -- the seam to a scheduler ----------------------------------------------------------------------------


def test_points_of_several_nodes_are_submitted_once(tmp_path: Path) -> None:
    study = sweep_folder.create(Grid(benchmark="resnet", gpus=(2,), nodes=(2, 4)), tmp_path)
    submitted: list[tuple[str, planning.Request]] = []
    live: set[str] = set()
    resumed: list[Path] = []

    def resume(run: run_folder.RunFolder) -> str:
        resumed.append(run.path)
        return "again"

    def submit(point: GridPoint, request: planning.Request) -> str:
        submitted.append((point.key, request))
        live.add(str(len(submitted)))
        return str(len(submitted))

    scheduler = Submitter(submit, live.__contains__, lambda point, request: None, resume)
    assert sweep_folder.run(study, NOWHERE, scheduler) == ExitCode.REACHED
    assert [(key, request.gpus) for key, request in submitted] == [("2x2", 4), ("4x2", 8)]
    assert submitted[0][1].results == study.path / "2x2"
    assert study.jobs() == {"2x2": "1", "4x2": "2"}
    assert {study.state(point) for point in points(study.grid)} == {"submitted"}
    sweep_folder.run(sweep_folder.open_study(study.path), NOWHERE, scheduler)
    assert len(submitted) == 2
    # One has ended, the other was lost behind a checkpoint.
    live.clear()
    first, second = points(study.grid)
    made_point(study, first, 100.0, "reached")
    lost = made_point(study, second, 100.0, "interrupted")
    sweep_folder.run(study, NOWHERE, scheduler)
    assert (len(submitted), resumed) == (2, [lost])
    assert (study.state(first), study.jobs()["4x2"]) == ("done", "again")


def test_all_points_can_be_submitted(tmp_path: Path) -> None:
    study = sweep_folder.create(Grid(benchmark="resnet", gpus=(1, 2)), tmp_path)
    scheduler = Submitter(
        lambda point, request: point.key, lambda job: True, lambda point, request: None, lambda run: ""
    )
    sweep_folder.run(study, NOWHERE, scheduler, submit_all=True)
    assert study.jobs() == {"1x1": "1x1", "1x2": "1x2"}
    # Without --submit they still belong to their jobs.
    assert sweep_folder.run(study, NOWHERE, scheduler) == ExitCode.REACHED


def test_a_point_is_the_job_of_encore_submit(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('partition = "main"\n', encoding="utf-8")
    grid = Grid(benchmark="resnet", gpus=(2,), nodes=(2,), mode="weak", system="cpu", seed=3, cluster=str(cluster))
    (point,) = points(grid)
    made = batch.prepared(point, request_of(grid, point, tmp_path / "2x2"), cluster)
    assert (made.submission.nodes, made.plan.configuration.ranks) == (2, 4)
    assert "#SBATCH --partition=main" in made.script
    last = shlex.split(made.script.splitlines()[-1])
    assert last[2:4] == ["resnet", "4"]
    for name, value in (
        ("--results", str(tmp_path / "2x2")), ("--seed", "3"), ("--set", "batch_size=64"), ("--system", "cpu"),
        ("--cluster", str(cluster)),
    ):  # fmt: skip
        assert last[last.index(name) + 1] == value


def test_without_slurm_several_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match="a point of 2 nodes needs a scheduler, and there is no Slurm here"):
        sweep_folder.refuse(Grid(benchmark="resnet", gpus=(1,), nodes=(2,)), tmp_path, None, False)
    with pytest.raises(EncoreError, match="--submit needs a scheduler"):
        sweep_folder.refuse(Grid(benchmark="resnet", gpus=(1,)), tmp_path, None, True)


def test_two_processes_never_run_the_same_study(tmp_path: Path) -> None:
    study = sweep_folder.create(Grid(benchmark="resnet", gpus=(1,)), tmp_path)
    with FileLock(study.path / ".lock"), pytest.raises(EncoreError, match="another process runs"):
        sweep_folder.run(study, NOWHERE, None)


def test_a_study_keeps_no_secret_and_is_read_back(tmp_path: Path) -> None:
    grid = Grid(benchmark="resnet", gpus=(1, 2), environment=("MY_TOKEN=hush", "NOTE=plain", "HOME"))
    study = sweep_folder.create(grid, tmp_path)
    assert "hush" not in (study.path / "study.json").read_text(encoding="utf-8")
    assert sweep_folder.open_study(study.path).grid.environment == ("MY_TOKEN", "NOTE=plain", "HOME")
    assert sweep_folder.open_study(study.path).grid.gpus == (1, 2)


# -- what is reported -----------------------------------------------------------------------------------


def test_throughput_leaves_out_what_warms_up(tmp_path: Path) -> None:
    study = sweep_folder.create(Grid(benchmark="resnet", gpus=(1, 2, 4)), tmp_path)
    for point, speed in zip(points(study.grid), (100.0, 180.0, 300.0), strict=True):
        made_point(study, point, speed, "failed" if point.gpus == 4 else "not_reached")
    results = throughput.measured(study)
    assert [each.state for each in results] == ["done", "done", "failed"]
    rows = throughput.throughput_table(results).rows
    assert rows[1][:3] == ("1x2", 64, 180.0)
    assert rows[1][4:6] == pytest.approx((1.8, 0.9))
    assert rows[2][-1] == "failed"
    assert throughput.speed_ups(results) == {"throughput": [(1, 1.0), (2, 1.8)]}


def test_ranks_of_a_cpu_are_no_gpus_and_positions_no_samples(tmp_path: Path) -> None:
    study = sweep_folder.create(Grid(benchmark="transformer", gpus=(1, 2)), tmp_path)
    for point in points(study.grid):
        made_point(study, point, 100.0 * point.gpus, unit="token positions", device="cpu")
    results = throughput.measured(study)
    predicted = throughput.predictions(study, results, [4])
    for table in (throughput.throughput_table(results), predicted):
        assert "GPU" not in f"{table.title} {table.columns} {table.note}" and "samples/s" not in table.columns
        assert "token positions/s" in table.columns
    assert plots.speed_up(throughput.speed_ups(results), predicted, throughput.devices(results)).svg.count(">ranks<")


def test_predicted_throughput_meets_what_was_measured(tmp_path: Path) -> None:
    study = sweep_folder.create(Grid(benchmark="resnet", gpus=(1, 2, 4, 8)), tmp_path)
    for point in points(study.grid):
        made_point(study, point, 64 / (0.64 / point.gpus + 0.01))
    (row,) = throughput.predictions(study, throughput.measured(study), [16]).rows
    assert row[:4] == (16, 1, "", 64)
    assert row[5] < 64 / (0.64 / 16 + 0.01) < row[6]


def test_nothing_is_predicted_from_one_number_of_gpus(tmp_path: Path) -> None:
    study = sweep_folder.create(Grid(benchmark="resnet", gpus=(1, 2)), tmp_path)
    made_point(study, points(study.grid)[0], 100.0)
    assert throughput.predictions(study, throughput.measured(study), [4]).rows == ()


def test_speed_of_a_single_epoch_is_taken_from_its_steps() -> None:
    stream: list[dict[str, Any]] = [{"kind": "start", "time": 0.0, "global_batch_size": 10}]
    stream += [{"kind": "step", "time": 50.0 + step, "step": step} for step in range(1, 11)]
    stream += [{"kind": "epoch", "epoch": 1, "samples_per_second": 1.0, "input_share": 0.0}]
    assert throughput.steady_speeds(stream) == [10.0]
    assert throughput.steady_speeds(stream[:2]) == []
