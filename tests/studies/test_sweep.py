"""Sweeps: the grid, real points on one and two ranks, resuming, the scheduler, tables, and the study of nodes."""

import itertools
import json
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from filelock import FileLock

from encore import catalogue
from encore.errors import EncoreError, ExitCode
from encore.lab.studies import definition, multi_node, sweep, throughput
from encore.lab.studies import folder as folders
from encore.lab.studies.sweep import GridPoint, Sweep, batch_settings, point_hosts, point_request
from encore.machine import node
from encore.results.statistics import Sample
from encore.run import planning, run_folder, submission
from encore.run.supervise import Limits
from encore.slurm import commands
from encore.ssh.hosts import Host
from tests.command_line import output_of
from tests.conftest import TINY, Encore, Study, losses, records
from tests.results.result_logs import write_files
from tests.trainings import SEED, Started, in_background


def sweep_of(benchmark: str, *gpus: int, request: dict[str, Any] | None = None, **fields: Any) -> Sweep:
    return Sweep(request=planning.Request(name=benchmark, gpus=None, **(request or {})), gpus=gpus, **fields)


def here(point: GridPoint, folder: run_folder.RunFolder | None) -> Any:
    pytest.fail(f"{point.key} was run here")


def finish(
    study: folders.Folder[Sweep],
    point: GridPoint,
    speed: float = 100.0,
    status: Any = "not_reached",
    device: str = "gpu",
    **start: Any,
) -> run_folder.RunFolder:
    # Create the run folder of a point, with a slow first epoch and two fast ones
    passport = {"benchmark": "resnet", "round": "v0.7", "configuration": {"device": {"value": device}}}
    run = run_folder.create(study.point_folder(point), "resnet-mxnet-cpu", lambda path: passport, {}, {}, [1])
    (experiment,) = run.experiments()
    lines = [{"kind": "start", "time": 0.0, "global_batch_size": 64, **start}] + [
        {"kind": "epoch", "time": epoch, "epoch": epoch, "samples_per_second": samples, "input_share": 0.1}
        for epoch, samples in ((1, speed / 10), (2, speed), (3, speed))
    ]
    write_files(experiment.folder, {experiment.metrics.name: lines})
    experiment.set_state(run_folder.ExperimentState(status=status))
    return run


# -- the grid -------------------------------------------------------------------------------------------


def test_points_are_all_combinations_with_few_gpus_first(tmp_path: Path) -> None:
    keys = [point.key for point in sweep_of("resnet", 8, 4, 4, nodes=(2, 1), precisions=("fp16", "fp32")).points()]
    assert [sorted(keys[:2]), sorted(keys[2:6]), keys[6:]] == [
        ["1x4-fp16", "1x4-fp32"],
        ["1x8-fp16", "1x8-fp32", "2x4-fp16", "2x4-fp32"],
        ["2x8-fp16", "2x8-fp32"],
    ]
    grid = sweep_of("", 1, 2, nodes=(1, 2), full_nodes=True, benchmarks={"resnet": "a.sif", "bert": None})
    requests = {point.key: point_request(grid, point, tmp_path) for point in grid.points()}
    assert {key: (request.name, request.image) for key, request in requests.items()} == {
        f"{name}-{key}": (name, image)
        for name, image in (("resnet", "a.sif"), ("bert", None))
        for key in ("1x1", "1x2", "2x2")
    }
    assert grid.points()[-1].axes == {"nodes": 2, "gpus_per_node": 2, "benchmark": "bert"}


@pytest.mark.parametrize(
    ("system", "mode", "global_batch", "settings"),
    [
        ("dgx1", "strong", None, ("batch_size=832", "learning_rate=7.4")),
        ("dgx1", "weak", None, ()),  # the rule of a submitted system
        ("cpu", "strong", None, ()),
        ("cpu", "weak", None, ("batch_size=64", "learning_rate=0.2")),
        ("cpu", "strong", 128, ("batch_size=64", "learning_rate=0.1")),
    ],
)
def test_strong_scaling_keeps_batch_and_learning_rate(
    system: str, mode: sweep.Mode, global_batch: int | None, settings: tuple[str, ...]
) -> None:
    source = catalogue.find_system(catalogue.choose("resnet"), system, "v0.7")
    assert batch_settings(source, GridPoint(nodes=1, gpus_per_node=2), mode, global_batch) == settings


def test_ranks_that_share_samples_keep_the_global_batch() -> None:
    choice, point = catalogue.choose("llama2-70b-lora"), GridPoint(nodes=1, gpus_per_node=4)
    ranks = [choice.benchmark.data_parallel_ranks({"tensor_parallelism": 4}, gpus) for gpus in (8, 4, 1)]
    system = catalogue.find_system(choice, "eos", "v4.1")
    settings = [batch_settings(system, point, "strong", batch, (), (ranks[0], ranks[1])) for batch in (None, 16)]
    assert (ranks, settings) == ([2, 1, 1], [("batch_size=8",), ("batch_size=16",)])


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (sweep_of("resnet", 1, precisions=("fp16:128",)), "fp16:128 with strong scaling"),
        (sweep_of("resnet", 1, precisions=("fp16:0",), mode="weak"), "a batch from 1 on"),
        (sweep_of("resnet", 4097), "--gpus-per-node 4097"),
        (sweep_of("resnet", 4, nodes=(2,), request={"hosts": (Host("n1", 4), Host("n2", 2))}),
         "hosts for the largest node count"),
        (sweep_of("bert-squad", 1, images=("1.1",)), "release"),
        (sweep_of("bert-squad", 1, images=("25.12",), request={"image": "other"}), "--images with --image"),
        (sweep_of("bert-squad", 1, images=("25.12",), request={"runtime": "host"}), "--images with --runtime host"),
    ],
)  # fmt: skip
def test_invalid_grid_is_rejected(grid: Sweep, message: str, tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match=message):
        point_request(grid, grid.points()[-1], tmp_path)


def test_releases_are_points_and_compared_with_the_published_ones(
    tmp_path: Path, recorded: Callable[[str, object], None]
) -> None:
    grid = sweep_of("bert-squad", 1, images=("25.12", "21.11"), request={"system": "cpu"})
    options = ("--images", "25.12,21.11", "--system", "cpu", "--dry-run", "--json")
    assert Sweep.model_validate(json.loads(output_of("sweep", "bert-squad", *options))["grid"]) == grid
    images = [point_request(grid, point, tmp_path).image for point in grid.points()]
    assert images == ["localhost/encore/bert-squad:25.12", "localhost/encore/bert-squad:21.11"]
    study = folders.create(grid, "sweep", tmp_path)
    for point, speed in zip(grid.points(), (100.0, 150.0), strict=True):
        finish(study, point, speed)
    table = throughput.sweep_tables(study, throughput.measured(study))[1]
    rows = "\n".join(f"<!-- {row} -->" for row in (*table.rows, table.note))
    recorded("releases.svg", f"{throughput.releases_figure(table).svg}\n{rows}")
    unmeasured = throughput.releases_figure(throughput.releases_table([], throughput.published("bert-squad")))
    assert (unmeasured, throughput.published("resnet")) == (None, None)


# -- real points ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_sweep_is_reported_and_not_run_again(encore: Encore, study: Study) -> None:
    assert [row[:2] for row in study.printed["tables"][0]["rows"]] == [["1x1", 64], ["1x2", 64]]
    assert "Throughput by number of ranks" in (study.folder / "report" / "report.md").read_text(encoding="utf-8")
    written = {path: path.stat().st_mtime_ns for path in study.folder.glob("1x*/*/experiment_0/metrics.jsonl")}
    assert "never a reproduction" in encore("sweep", "--resume", str(study.folder), code=0).stdout
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.long
def test_interrupted_point_is_resumed(encore: Encore, few_digits: Path, tmp_path: Path, study: Study) -> None:
    where = ("--data", str(few_digits), "--results", str(tmp_path))
    started = Started(in_background("sweep", "resnet", "--gpus-per-node", "1", *where, *TINY, *SEED), tmp_path)
    started.wait_for_step(14)  # after the checkpoint of the first epoch of 12 steps
    started.process.send_signal(signal.SIGINT)
    output, (path,) = started.ended(ExitCode.INTERRUPTED), tmp_path.iterdir()
    folder = folders.open_folder(path, Sweep)
    assert (f"encore sweep --resume {path}" in output, folder.summary()) == (True, "1 interrupted")
    encore("sweep", "--resume", str(path), code=0)
    (metrics,) = path.glob("1x1/*/experiment_0/metrics.jsonl")
    assert [record["resumed_step"] > 0 for record in records(metrics, "start")] == [False, True]
    assert (losses(metrics), folder.summary()) == (losses(study.of_ranks(1) / "metrics.jsonl"), "1 done")


# -- the scheduler --------------------------------------------------------------------------------------


def test_state_of_a_point_is_that_of_its_run(tmp_path: Path) -> None:
    study = folders.create(sweep_of("resnet", 1, 2, 4, 8, 16), "sweep", tmp_path)
    *points, last = study.study.points()
    statuses = ("reached", "failed", "running", "interrupted")
    runs = [finish(study, point, status=status) for point, status in zip(points, statuses, strict=True)]
    assert [tuple(point.values()) for point in study.as_json()["points"]] == [
        ("1x1", "done", 1, 1), ("1x2", "failed", 1, 2), ("1x4", "running", 1, 4), ("1x8", "interrupted", 1, 8),
        ("1x16", "to do", 1, 16),
    ]  # fmt: skip
    assert (study.may_resume(), study.summary()) == (True, "1 done, 1 failed, 1 interrupted, 1 running, 1 to do")
    for run in (finish(study, last), *runs[1:]):
        run.experiments()[0].set_state(
            run_folder.ExperimentState(status="failed", reason="out of memory", is_final=True)
        )
    assert not study.may_resume()


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch) -> Mock:
    # Slurm with jobs 1, 2 ..., which run until a test replaces show_job
    submit = Mock(side_effect=map(str, itertools.count(1)))
    for module, name, value in (
        (commands, "is_installed", lambda: True), (commands, "show_job", lambda job: {"JobState": "RUNNING"}),
        (submission, "prepare_resume", lambda path, request: path), (submission, "submit", submit),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return submit


def test_points_with_several_nodes_are_submitted_once(
    submit: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = folders.create(sweep_of("resnet", 2, nodes=(2, 4)), "sweep", tmp_path)
    first, second = study.study.points()
    codes = [sweep.run(folders.open_folder(study.path, Sweep), here, Limits()) for _ in range(2)]
    jobs = [
        (job.submission.nodes, job.plan.configuration.ranks, job.plan.results) for (job,), _ in submit.call_args_list
    ]
    assert (codes, jobs) == ([ExitCode.REACHED] * 2, [(2, 4, study.path / "2x2"), (4, 8, study.path / "4x2")])
    assert (study.jobs(), {*map(study.state, (first, second))}) == ({"2x2": "1", "4x2": "2"}, {"submitted"})
    # One job has ended, the other was lost after a checkpoint
    monkeypatch.setattr(commands, "show_job", lambda job: {})
    finish(study, first, status="reached")
    lost = finish(study, second, status="interrupted")
    sweep.run(study, here, Limits())
    assert (submit.call_count, submit.call_args) == (3, call(lost.path))
    assert (study.state(first), study.jobs()) == ("done", {"2x2": "1", "4x2": "3"})


@pytest.mark.parametrize(("nodes", "message"), [(2, "a point of 2 nodes needs a scheduler"), (1, "--submit needs")])
def test_submission_without_slurm_is_refused(
    nodes: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "is_installed", lambda: False)
    with pytest.raises(EncoreError, match=message):
        sweep.refuse(sweep_of("resnet", 1, nodes=(nodes,)), tmp_path, submit_all=nodes == 1)


def test_submitted_point_is_a_job_of_encore_submit(tmp_path: Path) -> None:
    cluster = write_files(tmp_path, {"cluster.toml": 'partition = "main"\n'}) / "cluster.toml"
    request = {"system": "cpu", "seed": 3, "cluster": cluster, "environment": ("A=b",), "drop_caches": False}
    grid = sweep_of("resnet", 2, nodes=(2,), mode="weak", request=request)
    prepared = sweep.prepare_job(grid.points()[0], point_request(grid, grid.points()[0], tmp_path / "2x2"))
    lines = prepared.script.splitlines()
    assert (prepared.plan.configuration.ranks, "#SBATCH --partition=main" in lines) == (4, True)
    assert shlex.split(lines[-1])[2:] == [
        "resnet", "4", "--system", "cpu", "--results", str(tmp_path / "2x2"), "--runs", "1", "--seed", "3",
        "--set", "batch_size=64", "--set", "learning_rate=0.4", "--env", "A=b", "--no-drop-caches",
        "--cluster", str(cluster),
    ]  # fmt: skip


def test_study_has_one_process_and_no_secrets(tmp_path: Path) -> None:
    request = {"environment": ("MY_TOKEN=hush", "NOTE=plain", "HOME"), "data": tmp_path, "hosts": (Host("n1", 2),)}
    study = folders.create(sweep_of("resnet", 1, 2, request=request), "sweep", tmp_path)
    assert "hush" not in (study.path / "study.json").read_text(encoding="utf-8")
    redacted = sweep_of("resnet", 1, 2, request={**request, "environment": ("MY_TOKEN", "NOTE=plain", "HOME")})
    assert folders.open_folder(study.path, Sweep) == folders.Folder(study.path, redacted)
    with pytest.raises(EncoreError, match="other fields"):
        folders.open_folder(study.path, definition.Study)
    with FileLock(study.path / ".lock"), pytest.raises(EncoreError, match="another process measures"):
        sweep.run(study, here, Limits())


# -- the report -----------------------------------------------------------------------------------------


def study_of(
    benchmark: str, folder: Path, speeds: dict[int, float], **start: Any
) -> tuple[folders.Folder[Sweep], list[throughput.Result]]:
    # Create a study with these speeds by number of GPUs; 0: failed
    study = folders.create(sweep_of(benchmark, *speeds), "sweep", folder)
    for point, speed in zip(study.study.points(), speeds.values(), strict=True):
        finish(study, point, speed or 1.0, "not_reached" if speed else "failed", **start)
    return study, throughput.measured(study)


def test_tables_of_a_sweep(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    # The first epoch does not count. CPUs have ranks, and the Transformer counts token positions
    _, results = study_of("resnet", tmp_path / "gpus", {1: 100.0, 2: 180.0, 4: 0.0})
    options = {"batch_unit": "token positions", "device": "cpu"}
    cpus, on_cpus = study_of("transformer", tmp_path / "cpus", {1: 100.0, 2: 200.0}, **options)
    study, exact = study_of("resnet", tmp_path / "exact", {n: 64 / (0.64 / n + 0.01) for n in (1, 2, 4, 8)})
    tables = {
        "three points": throughput.throughput_table(results),
        "ranks": throughput.throughput_table(on_cpus),
        "predicted of ranks": throughput.predictions(cpus, on_cpus, [4]),
        "predicted": throughput.predictions(study, exact, [16]),  # 1,280 samples a second
        "predicted by one": throughput.predictions(study, exact[:1], [4]),
    }
    texts = {
        name: [table.title, table.columns, *map(table.texts, table.rows), table.note] for name, table in tables.items()
    }
    recorded("sweep.json", {**texts, "speed-ups": throughput.speed_ups(results)})
    lines, devices = throughput.speed_ups(on_cpus), throughput.devices(on_cpus)
    recorded("speed_up.svg", throughput.speed_up_figure(lines, tables["predicted of ranks"], devices).svg)


def test_speed_of_a_single_epoch_is_that_of_its_steps() -> None:
    start = {"kind": "start", "time": 0.0, "global_batch_size": 10}
    steps = [{"kind": "step", "time": 50.0 + step, "step": step} for step in range(1, 11)]
    epoch = {"kind": "epoch", "epoch": 1, "samples_per_second": 1.0, "input_share": 0.0}
    assert [throughput.steady_speeds(part) for part in ([start, *steps, epoch], [start, steps[0]])] == [[10.0], []]


# -- the study of several nodes -------------------------------------------------------------------------

HOSTS = tuple(Host(f"n{number}", 4) for number in (1, 2, 3, 4))


def test_points_and_tables_of_the_node_study(recorded: Callable[[str, object], None]) -> None:
    # 16 GPUs are 14 times as fast as one, and fp16 is 1.7 times as fast as fp32
    def result(point: GridPoint) -> throughput.Result:
        speed = 300.0 * (1 + (point.gpus - 1) * 13 / 15) * (1.7 if point.precision == "fp16" else 1.0)
        return throughput.Result(
            point=point, state="done", samples_per_second=Sample.of([speed * f for f in (0.99, 1.0, 1.01)])
        )

    study = multi_node.load("multi-node")
    grid = multi_node.sweep_of(study, False, planning.Request(name="", gpus=None, hosts=HOSTS))
    points, results = grid.points(), [*map(result, grid.points())]
    assert (point_hosts(grid, points[0]), point_hosts(grid, points[-1])) == ((), HOSTS)
    tables = {table.title: [table.columns, *table.rows, table.note] for table in multi_node.tables(study, results)}
    recorded("nodes.json", {"points": [[point.key, point.gpus, point.batch] for point in points], **tables})
    on_cpus = multi_node.tables(study, [replace(result, on_cpu=True) for result in results])
    assert "GPU" not in "".join("".join((*table.columns, table.note)) for table in on_cpus)


@pytest.mark.slow
def test_dry_run_of_the_node_study_prints_every_command() -> None:
    options = ["--hosts", ",".join(map(str, HOSTS)), "--system", "dgxa100", "--runtime", "apptainer", "--data", "/tmp"]
    options += ["--image", "MXNet=mx.sif", "--image", "PyTorch=torch.sif", "--dry-run", "--json"]
    entries = json.loads(output_of("study", "run", "multi-node", *options))
    commands = [(entry["point"], entry["command"]) for entry in entries if "apptainer" in entry["command"]]
    assert (len(commands), "-np 16 --hostfile" in dict(commands)["resnet-4x4-fp32"]) == (2 * 2 * 6, True)


def test_dry_run_of_the_node_study_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "gpus", tuple)
    output = output_of("study", "run", "multi-node", "--dry-run")
    lines = (
        "MXNet resnet-4x4-fp16, 128 a GPU:\n  a job of the scheduler",
        "PyTorch resnet-pytorch-1x4-fp32, 64 a GPU:\n  the command depends on the GPUs, and this machine has none",
        "24 points",
    )
    assert [line for line in lines if line not in output] == []
