"""Hints: the command that resumes a run, settings that need less memory, damaged checkpoints, and secrets."""

import io
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

from encore import job, launchers
from encore.cli.run import finish
from encore.errors import EncoreError, ExitCode
from encore.run import evaluate, hints, run_folder, run_metadata, runner
from encore.slurm import cluster
from tests.machine.machines import check_build
from tests.trainings import make_run, resolved


@pytest.mark.parametrize(("slurm", "command"), [("", "run"), ("12", "submit")])
def test_resume_hint_names_the_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: str, command: str
) -> None:
    # Valid in any folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENCORE_CLUSTER", "my cluster.toml")
    options = {"cluster_file": cluster.file_from_environment(), "arguments": ["run", "resnet", "--require-target"]}
    run = make_run(tmp_path / "my results", slurm=slurm, **options)
    monkeypatch.delenv("ENCORE_CLUSTER")
    monkeypatch.chdir("/")
    words = [command, "--resume", str(run.path), "--cluster", str(tmp_path / "my cluster.toml")]
    assert shlex.split(hints.resume(run.path))[1:] == [*words, *(["--require-target"] if slurm else [])]


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
def test_output_at_the_end_of_a_run(
    tmp_path: Path, ending: runner.Ending, require_target: bool, code: int, resume: bool, excused: bool
) -> None:
    stopped = run_folder.ExperimentState(status="interrupted", reason="stopped")
    run = make_run(tmp_path, [stopped], config={"quality_target": 0.9})
    screen = Console(file=io.StringIO(), width=200, record=True, soft_wrap=True)
    with pytest.raises(typer.Exit) as end:
        finish(screen, run, ending, as_json=False, require_target=require_target)
    printed = screen.export_text()
    assert end.value.exit_code == code and (f"resume with: {hints.resume(run.path)}" in printed) is resume
    assert ("a target was missed: exit code 0" in printed) is excused


@pytest.mark.parametrize(
    ("minutes", "line"),
    [
        ([0.5], "OK: trained on 4 CPU ranks to 0.9600 (target 0.95) in 30 s"),
        ([0.5, 1.0], "OK: 2 of 2 runs on 4 CPU ranks reached the target (0.95) in 30 to 60 s"),
        ([0.5, None], "NOT OK: 1 of 2 runs on 4 CPU ranks reached the target (0.95) in 30 s"),
        ([None], "NOT OK: 0 of 1 run on 4 CPU ranks reached the target (0.95)"),
    ],
)
def test_result_of_a_trial(minutes: list[float | None], line: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks_per_node=2)
    summaries: list[Any] = [
        SimpleNamespace(minutes=value, qualities={"accuracy": 0.96}, targets={"accuracy": 0.95}) for value in minutes
    ]
    assert evaluate.trial_result(run, summaries) == f"{line}; toy data, not a reproduction"


@pytest.mark.parametrize(
    ("name", "memory", "ways"),
    [
        ("bert", "GPU", "lower batch_size (now 32) or eval_batch_size (now 16), or a higher accumulation (now 1)"),
        (
            "resnet",
            "CPU",
            "lower batch_size (now 408) or dali_prefetch (now 5) or dali_threads (now 3), or fewer ranks on a machine"
            " (now 8)",
        ),
        (
            "minigo",
            "GPU",
            "lower batch_size (now 1024) or eval_batch_size (now 1024) or inference_batch (now 256) or"
            " concurrent_games (now 256)",
        ),
    ],
)
def test_settings_that_need_less_memory(name: str, memory: str, ways: str) -> None:
    hint = hints.less_memory(resolved(name, "dgxa100", "v0.7"), memory)
    assert hint == f"start a new run with a {ways}: --set KEY=VALUE"


def test_secret_is_not_stored_and_needed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = run_metadata.parse_environment(("MY_TOKEN=hush", "NOTE=a=b", "OWN"), {"OWN": "x"})
    stored = run_metadata.redact(variables)
    assert stored == {"MY_TOKEN": run_metadata.REDACTED, "NOTE": "a=b", "OWN": "x"}
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(EncoreError, match="the run used MY_TOKEN, whose value was not stored") as error:
        run_metadata.restore(stored, "encore run --resume RUN")
    assert error.value.hint == "set it again: MY_TOKEN=VALUE encore run --resume RUN"
    monkeypatch.setenv("MY_TOKEN", "hush")
    assert run_metadata.restore(stored, "") == variables


@pytest.mark.parametrize(
    ("setting", "problem"), [("1x=2", "is not a variable name"), ("NONE", "the variable is not set")]
)
def test_invalid_variable_is_rejected(setting: str, problem: str) -> None:
    with pytest.raises(EncoreError, match=problem):
        run_metadata.parse_environment((setting,), {})


TRAIN = (
    "python", "-m", "benchmarks.resnet.mxnet.train",
    "--config", "/out/config.json", "--data", "/data", "--output", "/out",
)  # fmt: skip


@pytest.mark.parametrize(
    ("system", "ranks", "gpus", "threads"),
    [
        ("dgxa100", 8, 8, "1"),  # as submitted, on any number of cores
        ("a100-40gb", 1, 1, None),
        ("cpu", 1, 0, "16"),
        ("cpu", 4, 0, "4"),
        ("cpu", 32, 0, "1"),
    ],
)
def test_ranks_of_one_node(system: str, ranks: int, gpus: int, threads: str | None) -> None:
    config = resolved("resnet", system, "v0.7", ranks, nodes=1)
    training = job.training_job(config, Path("/data"), Path("/out"), {}, 16)
    launcher = ("horovodrun", "--gloo", "-np", str(ranks), "--output-filename", "/out/ranks") if ranks > 1 else ()
    result = (training.argv, training.ranks, training.gpus, training.environment.get("OMP_NUM_THREADS"))
    assert result == (launcher + TRAIN, ranks, gpus, threads)


GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
MPI = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


@pytest.mark.parametrize(
    ("framework", "ranks", "controller", "as_root", "expected", "variables"),
    [
        ("pytorch", 2, "gloo", True, "torchrun --standalone --nproc-per-node=2 --log-dir=/out/ranks --redirects=3"
         " --no-python", {}),
        ("pytorch", 1, "gloo", False, "", {}),
        ("mxnet", 1, "gloo", False, "", GLOO),
        ("mxnet", 1, "mpi", False, "", MPI),
        ("mxnet", 8, "mpi", False, "mpirun --bind-to none -np 8 --output-filename /out/ranks:nojobid", MPI),
        ("tensorflow", 8, "mpi", True, "mpirun --allow-run-as-root --bind-to none -np 8 --output-filename"
         " /out/ranks:nojobid", MPI),
    ],
)  # fmt: skip
def test_launchers_of_one_node(
    framework: str, ranks: int, controller: Any, as_root: bool, expected: str, variables: dict[str, str]
) -> None:
    launch = launchers.on_one_node(framework, ranks, "/out", controller, as_root)
    assert (" ".join(launch.inner), launch.environment) == (expected, variables)


BUILDS = {
    "mxnet": (("MPI", "Gloo"), ("MPI", "Gloo")),
    "tensorflow": (("MPI", "Gloo"), ("MPI", "Gloo")),
    "mpi_alone": (("MPI",), ("NCCL", "MPI")),
    "neither": ((), ()),
}


@pytest.mark.parametrize(
    ("name", "mpirun", "ranks", "expected"),
    [
        ("mxnet", True, 8, "gloo"),
        ("tensorflow", False, 8, "gloo"),
        ("mpi_alone", True, 8, "mpi"),
        ("mpi_alone", False, 8, None),
        ("mpi_alone", False, 1, "mpi"),
        ("neither", True, 8, None),
    ],
)
def test_controller_depends_on_the_build_of_horovod(name: str, mpirun: bool, ranks: int, expected: str | None) -> None:
    build = launchers.parse_check_build(f"a greeting\n{check_build(name)}")
    assert (build, launchers.controller(build, mpirun, ranks)) == (launchers.HorovodBuild(*BUILDS[name]), expected)
    assert launchers.controller(launchers.parse_check_build("horovodrun: not found\n"), False, ranks) == "gloo"
