"""Sweeps: the grid, real points on one and two ranks, resuming, the scheduler, what is reported, several nodes."""

import json
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from encore import catalogue
from encore.cli.app import app
from encore.errors import EncoreError, ExitCode
from encore.lab.studies import definition, nodes, sweep, throughput
from encore.lab.studies import folder as folders
from encore.lab.studies.folder import Folder
from encore.lab.studies.sweep import GridPoint, Sweep, batch_settings, hosts_of, request_of
from encore.lab.studies.throughput import Result
from encore.machine import node
from encore.results.statistics import Sample
from encore.run import planning, run_folder, submission
from encore.run.planning import Request
from encore.run.run_folder import ExperimentState
from encore.run.supervise import Limits
from encore.slurm import commands
from encore.ssh.hosts import Host
from tests.conftest import TINY, Encore, Study, losses, records
from tests.trainings import PATIENCE, in_background, wait_for_step


def of(benchmark: str, *gpus: int, request: dict[str, Any] | None = None, **values: Any) -> Sweep:
    return Sweep(request=Request(name=benchmark, gpus=None, **(request or {})), gpus=gpus, **values)


def here(point: GridPoint, folder: run_folder.RunFolder | None) -> Any:
    pytest.fail(f"{point.key} was run here")


def made_point(
    study: Folder[Sweep],
    point: GridPoint,
    speed: float,
    status: Any = "not_reached",
    unit: str = "samples",
    device: str = "gpu",
) -> Path:
    """Return a run folder of a point as a run of three epochs leaves it: the first one slow, the others fast."""
    passport = {"benchmark": "resnet", "round": "v0.7", "configuration": {"device": {"value": device}}}
    run = run_folder.create(study.at(point), "resnet-mxnet-cpu", lambda path: passport, {}, {}, [1])
    experiment = run.experiments()[0]
    stream: list[dict[str, Any]] = [{"kind": "start", "time": 0.0, "global_batch_size": 64, "batch_unit": unit}]
    stream += [
        {"kind": "epoch", "time": e, "epoch": e, "samples_per_second": s, "input_share": 0.1}
        for e, s in ((1, speed / 10), (2, speed), (3, speed))
    ]
    experiment.metrics.write_text("".join(json.dumps(record) + "\n" for record in stream), encoding="utf-8")
    experiment.set_state(ExperimentState(status=status))
    return run.path


# -- the grid -------------------------------------------------------------------------------------------


def test_points_are_every_combination_small_ones_first(tmp_path: Path) -> None:
    grid = of("resnet", 8, 4, 4, nodes=(2, 1), precisions=("fp16", "fp32"))
    keys = [point.key for point in grid.points()]
    four, eight, sixteen = ["1x4-fp16", "1x4-fp32"], ["1x8-fp16", "2x4-fp16", "1x8-fp32", "2x4-fp32"], ["2x8-fp16"]
    assert sorted(keys[:2]) == four and sorted(keys[2:6]) == sorted(eight) and keys[6:] == [*sixteen, "2x8-fp32"]
    several = of("", 1, 2, nodes=(1, 2), full_nodes=True, benchmarks={"resnet": "a.sif", "bert": None})
    assert [(point.key, point.axes) for point in several.points()][-1] == (
        "bert-2x2", {"nodes": 2, "gpus_per_node": 2, "benchmark": "bert"}
    )  # fmt: skip
    assert len(several.points()) == 2 * 3
    wanted = [request_of(several, point, tmp_path) for point in several.points()]
    assert {(each.name, each.image) for each in wanted} == {("resnet", "a.sif"), ("bert", None)}


def test_strong_scaling_keeps_batch_and_learning_rate_weak_scaling_follows() -> None:
    system = catalogue.find_system(catalogue.choose("resnet"), "dgx1", "v0.7")
    small = catalogue.find_system(catalogue.choose("resnet"), "cpu", None)
    two = GridPoint(nodes=1, gpus_per_node=2)
    batch, rate = system.config["batch_size"], system.config["learning_rate"]
    assert [
        batch_settings(system, two, "strong"),
        # Weak scaling is what Encore does with a submitted system anyway.
        batch_settings(system, two, "weak"),
        batch_settings(small, two, "strong"),
        batch_settings(small, two, "weak"),
        batch_settings(small, two, "strong", 128),
    ] == [
        (f"batch_size={batch * 4}", f"learning_rate={rate}"),
        (),
        (),
        ("batch_size=64", "learning_rate=0.2"),
        ("batch_size=64", "learning_rate=0.1"),
    ]


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_the_submitted_count_stays_as_submitted(mode: str) -> None:
    grid = of("resnet", 8, mode=mode, request={"system": "dgx1", "round": "v0.7"})
    request = request_of(grid, grid.points()[0], Path("results"))
    assert not planning.make_plan(request).configuration.deviations


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (of("resnet", 1, precisions=("fp16:128",)), "fp16:128 with strong scaling"),
        (of("resnet", 1, precisions=("fp16:0",), mode="weak"), "a batch from 1 on"),
        (of("resnet", 4097), "--gpus-per-node 4097"),
        (of("resnet", 4, nodes=(2,), request={"hosts": (Host("n1", 4), Host("n2", 2))}), "as many hosts as the most"),
        (of("bert-squad", 1, images=("1.1",)), "release"),
        (of("bert-squad", 1, images=("25.12",), request={"image": "other"}), "--images with --image"),
        (of("bert-squad", 1, images=("25.12",), request={"runtime": "host"}), "--images with --runtime host"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_refused(grid: Sweep, message: str, tmp_path: Path) -> None:
    with pytest.raises(EncoreError) as raised:
        request_of(grid, grid.points()[-1], tmp_path)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus-per-node", "1,x"), "--gpus-per-node 1,x"),
        (("--gpus-per-node", "0"), "whole numbers from 1 on"),
        (("--gpus-per-node", "1", "--set", "batch_size=3"), "use --global-batch, or --weak"),
        (("--gpus-per-node", "1", "--precision", "fp32", "--set", "precision=fp32"), "use --precision"),
        (("--gpus-per-node", "1,2", "--precision", "fp16"), "device=cpu cannot run precision=fp16"),
        (("--gpus-per-node", "1", "--weak", "--global-batch", "64"), "--global-batch 64 with weak scaling"),
        (("--gpus-per-node", "3", "--global-batch", "64"), "cannot share a global batch of 64 evenly"),
        (("--gpus-per-node", "1", "--predict", "4"), "--predict with one number of GPUs"),
        (("--resume", "docs", "--gpus-per-node", "1"), "takes all that is to be run from the study folder"),
        (("--resume", "docs"), "is no folder of a study"),
        ((), "no numbers of GPUs given"),
    ],
)
def test_sweep_refuses(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    first = () if "--resume" in arguments else ("resnet", "--results", str(tmp_path))
    done = CliRunner().invoke(app, ["sweep", *first, *arguments])
    assert isinstance(done.exception, EncoreError) and message in str(done.exception), done.output
    assert not list(tmp_path.iterdir())


def test_releases_are_points_listed_without_an_engine_and_shown_next_to_the_published_ones(tmp_path: Path) -> None:
    grid = of("bert-squad", 1, images=("25.12", "21.11"), request={"system": "cpu"})
    asked = ["sweep", "bert-squad", "--images", "25.12,21.11", "--system", "cpu", "--dry-run", "--json"]
    printed = json.loads(CliRunner().invoke(app, asked).stdout)
    assert [each["point"] for each in printed["points"]] == ["1x1-25.12", "1x1-21.11"]
    assert Sweep.model_validate(printed["grid"]) == grid
    images = [request_of(grid, point, tmp_path).image for point in grid.points()]
    assert images == [f"localhost/encore/bert-squad:{each}" for each in grid.images]
    study = folders.create(grid, "sweep", tmp_path)
    for point, speed in zip(grid.points(), (100.0, 150.0), strict=True):
        made_point(study, point, speed)
    table = throughput.tables_of(study, throughput.measured(study))[1]
    assert [(row[0], *row[2:]) for row in table.rows] == [
        ("25.12", 100.0, 1.0, throughput.MEASURED),
        ("21.11", 150.0, 1.5, throughput.MEASURED),
        ("20.03", None, 1.0, "published"),
        ("20.06", None, 2.1, "published"),
        ("20.06", None, 4.9, "published"),
    ]
    assert "not measured here" in table.note
    figure = throughput.releases_figure(table)
    assert figure is not None and "published" in figure.svg and ">1.50<" in figure.svg
    assert throughput.releases_figure(throughput.releases_table([], throughput.published("bert-squad"))) is None
    assert throughput.published("resnet") is None


# -- real points ----------------------------------------------------------------------------------------


def test_a_sweep_is_run_reported_and_not_run_again(encore: Encore, study: Study) -> None:
    printed, folder = study.printed, study.folder
    runs, totals = printed["tables"][:2]
    one, two = (dict(zip(runs["columns"], row, strict=True)) for row in runs["rows"])
    assert [(each["point"], each["batch"]) for each in (one, two)] == [("1x1", 64), ("1x2", 64)]
    assert one["speed-up"] == one["efficiency"] == 1 and two["efficiency"] == pytest.approx(two["speed-up"] / 2)
    assert totals["rows"][0][0] == 4
    assert "Throughput by number of ranks" in (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert (folder / "report" / "speed-up.svg").exists()

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.glob("1x*/*/experiment_0/metrics.jsonl")}

    before = written()
    again = encore("sweep", "--resume", str(folder))
    assert again.returncode == 0 and "never a reproduction" in again.stdout and written() == before, again.stderr


def test_the_state_of_a_point_is_that_of_its_run(tmp_path: Path) -> None:
    study = folders.create(of("resnet", 1, 2, 4, 8, 16), "sweep", tmp_path)
    points = study.study.points()
    runs = [run_folder.RunFolder(made_point(study, point, 100.0)) for point in points[:4]]
    assert study.may_resume(), "one was not run"
    for run, status in zip(runs, ("reached", "failed", "running", "interrupted"), strict=True):
        run.experiments()[0].set_state(ExperimentState(status=status))
    assert [study.state(point) for point in points] == ["done", "failed", "running", "interrupted", "to do"]
    assert study.summary() == "1 done, 1 failed, 1 interrupted, 1 running, 1 to do"
    found = study.as_json()["points"]
    assert found[1] == {"point": "1x2", "state": "failed", "nodes": 1, "gpus_per_node": 2}
    made_point(study, points[4], 100.0)
    for run in runs[1:]:
        run.experiments()[0].set_state(ExperimentState(status="failed", reason="out of memory", is_final=True))
    assert not study.may_resume(), "each would fail again"


def test_an_interrupted_point_is_resumed(encore: Encore, few_digits: Path, tmp_path: Path, study: Study) -> None:
    where = ("--data", str(few_digits), "--results", str(tmp_path))
    process = in_background("sweep", "resnet", "--gpus-per-node", "1", *where, *TINY, "--seed", "7")
    # Behind the checkpoint of the first epoch, which 12 steps make.
    wait_for_step(process, tmp_path, 14)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    (path,) = tmp_path.iterdir()
    assert process.returncode == ExitCode.INTERRUPTED and f"encore sweep --resume {path}" in output, output
    found = folders.open_folder(path, Sweep)
    (point,) = found.study.points()
    assert found.state(point) == "interrupted"
    done = encore("sweep", "--resume", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = path.glob("1x1/*/experiment_0/metrics.jsonl")
    assert [record["resumed_step"] > 0 for record in records(metrics, "start")] == [False, True]
    assert losses(metrics) == losses(study.of_ranks(1) / "metrics.jsonl"), "one rank, the same seed"
    assert found.state(point) == "done"


# -- the scheduler --------------------------------------------------------------------------------------


class Scheduler:
    """Stands for Slurm: keeps what is submitted, each job alive until it is taken out of ``live``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.submitted: list[Any] = []
        self.live: set[str] = set()
        monkeypatch.setattr(commands, "is_installed", lambda: True)
        monkeypatch.setattr(commands, "show_job", lambda job: {"JobState": "RUNNING"} if job in self.live else {})
        monkeypatch.setattr(submission, "prepare_resume", lambda path, wanted: path)
        monkeypatch.setattr(submission, "submit", self.submit)

    def submit(self, prepared: Any) -> str:
        self.submitted.append(prepared)
        self.live.add(str(len(self.submitted)))
        return str(len(self.submitted))


def test_points_of_several_nodes_are_submitted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    study = folders.create(of("resnet", 2, nodes=(2, 4)), "sweep", tmp_path)
    first, second = study.study.points()
    assert sweep.run(study, here, Limits()) == ExitCode.REACHED
    assert [(each.submission.nodes, each.plan.configuration.ranks) for each in scheduler.submitted] == [(2, 4), (4, 8)]
    assert scheduler.submitted[0].plan.results == study.path / "2x2"
    assert study.jobs() == {"2x2": "1", "4x2": "2"}
    assert [study.state(point) for point in (first, second)] == ["submitted", "submitted"]
    sweep.run(folders.open_folder(study.path, Sweep), here, Limits())
    assert len(scheduler.submitted) == 2
    # One has ended, the other was lost after a checkpoint.
    scheduler.live.clear()
    made_point(study, first, 100.0, "reached")
    lost = made_point(study, second, 100.0, "interrupted")
    sweep.run(study, here, Limits())
    assert scheduler.submitted[2:] == [lost]
    assert (study.state(first), study.jobs()) == ("done", {"2x2": "1", "4x2": "3"})


@pytest.mark.parametrize(
    ("nodes", "message"), [(2, "a point of 2 nodes needs a scheduler, and there is no Slurm"), (1, "--submit needs")]
)
def test_without_slurm_nothing_is_submitted(
    nodes: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "is_installed", lambda: False)
    with pytest.raises(EncoreError, match=message):
        sweep.refuse(of("resnet", 1, nodes=(nodes,)), tmp_path, submit_all=nodes == 1)


def test_points_that_were_submitted_belong_to_their_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Scheduler(monkeypatch)
    study = folders.create(of("resnet", 1, 2), "sweep", tmp_path)
    assert [sweep.run(study, here, Limits(), submit_all) for submit_all in (True, False)] == [ExitCode.REACHED] * 2
    assert study.jobs() == {"1x1": "1", "1x2": "2"}


def test_a_point_is_the_job_of_encore_submit(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('partition = "main"\n', encoding="utf-8")
    given = {"system": "cpu", "seed": 3, "cluster": cluster, "environment": ("A=b",), "drop_caches": False}
    grid = of("resnet", 2, nodes=(2,), mode="weak", request=given)
    (point,) = grid.points()
    made = sweep.prepared(point, request_of(grid, point, tmp_path / "2x2"))
    assert (made.submission.nodes, made.plan.configuration.ranks) == (2, 4)
    assert "#SBATCH --partition=main" in made.script
    assert shlex.split(made.script.splitlines()[-1])[2:] == [
        "resnet", "4", "--system", "cpu", "--results", str(tmp_path / "2x2"), "--runs", "1", "--seed", "3",
        "--set", "batch_size=64", "--set", "learning_rate=0.4", "--env", "A=b", "--no-drop-caches",
        "--cluster", str(cluster),
    ]  # fmt: skip


def test_a_study_is_measured_by_one_process_keeps_no_secret_and_is_read_back(tmp_path: Path) -> None:
    given = {"environment": ("MY_TOKEN=hush", "NOTE=plain", "HOME"), "data": tmp_path, "hosts": (Host("n1", 2),)}
    study = folders.create(of("resnet", 1, 2, request=given), "sweep", tmp_path)
    assert "hush" not in (study.path / "study.json").read_text(encoding="utf-8")
    kept = {**given, "environment": ("MY_TOKEN", "NOTE=plain", "HOME")}
    assert folders.open_folder(study.path, Sweep) == Folder(study.path, of("resnet", 1, 2, request=kept))
    with pytest.raises(EncoreError, match="other fields"):
        folders.open_folder(study.path, definition.Study)
    with FileLock(study.path / ".lock"), pytest.raises(EncoreError, match="another process measures"):
        sweep.run(study, here, Limits())


# -- what is reported -----------------------------------------------------------------------------------


def ended(benchmark: str, tmp_path: Path, speeds: dict[int, float], **run: Any) -> tuple[Folder[Sweep], list[Result]]:
    """Return a study of these speeds by GPUs; one of 0 failed."""
    study = folders.create(of(benchmark, *speeds), "sweep", tmp_path)
    for point, speed in zip(study.study.points(), speeds.values(), strict=True):
        made_point(study, point, speed or 1.0, "not_reached" if speed else "failed", **run)
    return study, throughput.measured(study)


def test_what_is_reported(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    """Speeds leave out what warms up; a CPU has ranks and no GPUs, and its Transformer counts token positions.

    On 16 GPUs the third machine has 1,280 samples a second. Nothing is predicted from one number of GPUs.
    """
    _, results = ended("resnet", tmp_path / "gpus", {1: 100.0, 2: 180.0, 4: 0.0})
    cpus, on_cpus = ended("transformer", tmp_path / "cpus", {1: 100.0, 2: 200.0}, unit="token positions", device="cpu")
    study, known = ended("resnet", tmp_path / "known", {n: 64 / (0.64 / n + 0.01) for n in (1, 2, 4, 8)})
    tables = {
        "three points": throughput.throughput_table(results),
        "ranks": throughput.throughput_table(on_cpus),
        "predicted of ranks": throughput.predictions(cpus, on_cpus, [4]),
        "predicted": throughput.predictions(study, known, [16]),
        "predicted by one": throughput.predictions(study, known[:1], [4]),
    }
    found = {
        name: [table.title, table.columns, *map(table.texts, table.rows), table.note] for name, table in tables.items()
    }
    recorded("sweep.json", {**found, "speed-ups": throughput.speed_ups(results)})
    lines, table = throughput.speed_ups(on_cpus), tables["predicted of ranks"]
    figure = throughput.speed_up_figure(lines, table, throughput.devices(on_cpus))
    assert figure is not None and ">ranks<" in figure.svg


def test_speed_of_a_single_epoch_is_taken_from_its_steps() -> None:
    stream: list[dict[str, Any]] = [{"kind": "start", "time": 0.0, "global_batch_size": 10}]
    stream += [{"kind": "step", "time": 50.0 + step, "step": step} for step in range(1, 11)]
    stream += [{"kind": "epoch", "epoch": 1, "samples_per_second": 1.0, "input_share": 0.0}]
    assert [throughput.steady_speeds(part) for part in (stream, stream[:2])] == [[10.0], []]


# -- the study of several nodes, which is a sweep of each framework's benchmark ------------------------------

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
    found = [on_its_gpus(point) for point in sweep_of(study).points()]
    tables = nodes.tables(study, found)
    recorded("nodes.json", {table.title: [table.columns, *table.rows, table.note] for table in tables})
    for table in nodes.tables(study, [replace(each, on_cpu=True) for each in found]):
        assert not any("GPU" in word for word in (*table.columns, table.note))


def on_its_gpus(point: GridPoint) -> Result:
    speed = 300.0 * (1 + (point.gpus - 1) * 13 / 15) * (1.7 if point.precision == "fp16" else 1.0)
    return Result(point=point, state="done", samples_per_second=Sample.of([speed * f for f in (0.99, 1.0, 1.01)]))


@pytest.mark.slow
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
