"""Slurm without a Slurm: scripts and srun lines word for word, what is read from its variables, refusals."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from encore.cli.run import as_request
from encore.cli.submit import _run_options
from encore.containers import engines
from encore.errors import EncoreError
from encore.machine import node, preflight
from encore.machine.fitness import Need
from encore.run import ownership, planning, run_folder, runner, slurm_job, status, submission, supervise
from encore.run.planning import Request
from encore.run.run_folder import Experiment, ExperimentState, RunFolder
from encore.run.submission import Prepared, Wanted
from encore.slurm import (
    allocation,
    cluster,
    cluster_check,
    commands,
    nodes,
    partitions,
    placement,
    queue,
    requeue,
    script,
)
from encore.slurm.allocation import Allocation
from encore.slurm.partitions import Partition
from tests.conftest import Encore
from tests.run.test_status import job

GOLDEN = paths.ROOT / "tests" / "golden" / "slurm"
IMAGES = {
    "host": (),
    "pyxis": ("--runtime", "pyxis", "--image", "/images/resnet.sqsh"),
    "apptainer": ("--runtime", "apptainer", "--image", "/images/resnet.sif"),
    "docker": ("--runtime", "docker", "--image", "encore/resnet:latest"),
}
NODES = (1, 2, 4, 32)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Slurm nor an engine nor a caller's variables, so that every machine renders the same."""

    def no_engine(name: str) -> engines.Engine:
        raise EncoreError(f"no {name}")

    for name in list(os.environ):
        if name.startswith(("SLURM_", "ENCORE_CLUSTER", "XDG_", "APPTAINER_", "DOCKER_")):
            monkeypatch.delenv(name)
    for name in ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "LOGNAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(node, "cores", lambda: 16)
    monkeypatch.setattr(commands, "is_installed", lambda: False)
    monkeypatch.setattr(placement, "setting", lambda name: "")
    monkeypatch.setattr(engines, "connect", no_engine)
    monkeypatch.setattr(cluster, "places", lambda: ())


def prepared(runtime: str, nodes: int, *more: str, **wanted: Any) -> Prepared:
    """Return eight GPUs a node of DGX A100, by the given runtime; on the host the small CPU system."""
    of_gpus = ("--system", "dgxa100", "--data", "/data/imagenet") if runtime != "host" else ("--data", "/data/d")
    rest = ("--results", "/results", *of_gpus, *IMAGES[runtime], *more)
    per_node = wanted.pop("gpus_per_node", 8 if runtime != "host" else 2)
    asked = Wanted(nodes=nodes, gpus_per_node=per_node, **wanted)
    return submission.prepare(as_request(_run_options("resnet", rest)), rest, asked)


def plain(text: str) -> str:
    """Return the text without what differs from checkout to checkout."""
    text = text.replace(str(paths.ROOT), "/encore").replace(sys.executable, "/encore/.venv/bin/python")
    text = re.sub(r"[^\s:=']*/environments/mxnet-[0-9a-f]+", "/cache/mxnet", text)
    text = re.sub(r"nofile=\d+:\d+|nproc=-?\d+:-?\d+", "LIMIT", text)
    text = re.sub(r"--user \d+:\d+", "--user 1000:1000", text)
    text = re.sub(r"(torchinductor|triton)_\d+", r"\1_1000", text)
    return re.sub(r"Encore \d[\w.]*", "Encore VERSION", text)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("runtime", IMAGES)
def test_scripts_are_as_recorded(runtime: str, nodes: int, tmp_path: Path) -> None:
    found = prepared(runtime, nodes)
    step = runner.as_shell(found.step).replace(" --", " \\\n  --")
    text = plain(found.script), "#!/usr/bin/env bash\n" + plain(step) + "\n"
    files = GOLDEN / f"{runtime}_{nodes}.sub", GOLDEN / f"{runtime}_{nodes}_step.sh"
    if os.environ.get("ENCORE_RECORD"):
        GOLDEN.mkdir(exist_ok=True)
        for file, content in zip(files, text, strict=True):
            file.write_text(content, encoding="utf-8")
    assert [file.read_text(encoding="utf-8") for file in files] == list(text)


def test_recorded_scripts_pass_shellcheck() -> None:
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker is not None
    files = sorted([*GOLDEN.iterdir(), paths.ROOT / "slurm" / "run.sub"])
    assert len(files) == 2 * len(IMAGES) * len(NODES) + 1
    done = subprocess.run([checker, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("anywhere")
def test_every_node_count_is_served() -> None:
    for count in range(1, 65):
        argv = prepared("apptainer", count).step.argv
        assert {f"--nodes={count}", f"--ntasks={8 * count}", "--ntasks-per-node=8"} <= set(argv)


@pytest.mark.usefixtures("anywhere")
def test_the_array_and_the_cluster_file_reach_sbatch(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        'partition = "gpu"\naccount = "team"\ngpu_option = "gres"\nsbatch = ["--constraint=a100&nvlink"]\n'
        'results = "/shared/results"\nmax_requeues = 2\n',
        encoding="utf-8",
    )
    text = prepared("pyxis", 4, cluster=file, array="5", minutes=90, account="other").script
    for line in (
        "--partition=gpu", "--account=other", "--gres=gpu:8", "--array=0-4", "--time=01:30:00",
        "--constraint=a100&nvlink", "--output=/results/slurm-%A_%a.out",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert f"--cluster {file}" in text


@pytest.mark.usefixtures("anywhere")
def test_the_time_limit_comes_from_the_published_time() -> None:
    # v0.7 ResNet on DGX A100, 8 GPUs: 39.78 minutes; twice that for 4 times the GPUs, and the set-up.
    found = prepared("docker", 4)
    assert found.submission.minutes == 20 + 20
    assert "39.78" in found.estimate.reason
    assert prepared("docker", 1, "--runs", "5").submission.minutes == 20 + 398


BAD = [
    (("--nodes", "0"), "--nodes 0"),
    (("--nodes", "2", "--gpus-per-node", "a100:99"), "--gpus-per-node 99"),
    (("--nodes", "2", "--gpus-per-node", "a100:"), "or with its type: a100:8"),
    (("--nodes", "2", "--array", "0"), "--array 0"),
    (("--nodes", "2", "--array", "3", "--runs", "2"), "in an array of 3 tasks"),
    (("--nodes", "2", "--cluster", "/nosuch.toml"), "no cluster file"),
    (("--nodes", "2", "--array", "1-4"), "--array 1-4"),
    (("--nodes", "2", "--array", "0,2"), "--array 0,2"),
    (("--nodes", "2", "--time", "1"), "--time 1"),
    (("--nodes", "2", "--sbatch", "constraint"), "no option of sbatch"),
    (("--nodes", "2", "--sbatch=--time=2:00:00"), "give it to Encore: --time MINUTES"),
    (("--nodes", "2", "--sbatch=--tim=1"), "give it to Encore: --time MINUTES"),
    (("--nodes", "2", "--sbatch=-t5"), "give it to Encore: --time MINUTES"),
    (("--nodes", "2", "--sbatch=-N 4"), "give it to Encore: --nodes N"),
    (("--nodes", "2", "--sbatch=--job-name=mine"), "contradicts what Encore gives sbatch"),
    (("--nodes", "2", "--set", "epoch=2"), "unknown configuration key 'epoch'"),
    (("--nodes", "2", "--resume", "x"), "--resume takes all"),
]


@pytest.mark.parametrize(("options", "said"), BAD)
def test_bad_submissions_are_refused(encore: Encore, options: tuple[str, ...], said: str) -> None:
    done = encore("submit", "resnet", *options, "--dry-run")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_slurm_nothing_is_submitted(encore: Encore, tmp_path: Path) -> None:
    done = encore("submit", "resnet", environment={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "no Slurm here" in done.stderr
    assert encore("doctor", "--cluster", environment={"PATH": str(tmp_path)}).returncode == 2


def test_unknown_keys_of_the_cluster_file_are_refused(encore: Encore, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('partitoin = "gpu"\n', encoding="utf-8")
    done = encore("submit", "resnet", "--cluster", str(file), "--dry-run")
    assert done.returncode == 2
    assert "partitoin" in done.stderr


@pytest.mark.usefixtures("anywhere")
def test_options_that_undo_encores_own_are_refused_in_the_cluster_file_too(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    for option in ("--time=1", "--job-name=mine", "--gpus=16"):
        file.write_text(f'sbatch = ["{option}"]\n', encoding="utf-8")
        with pytest.raises(EncoreError, match=rf"sbatch = \['{option}'\] in {file} contradicts") as refused:
            prepared("docker", 2, cluster=file)
        assert "take it out there; " in refused.value.remedy
    file.write_text('gpu_option = "none"\nsbatch = ["--gres=gpu:a100:8"]\n', encoding="utf-8")
    assert "#SBATCH --gres=gpu:a100:8\n" in prepared("docker", 2, cluster=file).script


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('sbatch = ["--time=5"]', "contradicts what Encore gives sbatch"),
        ('python = { pytroch = "/usr/bin/python3" }', "did you mean 'pytorch'"),
        ('python = { pytorch = "/no/such/python" }', "/no/such/python is no program on this node"),
        ('mpi = "pmxi"', "no plugin of srun --mpi"),
        ('cpu_bind = "croes"', "no value of srun --cpu-bind"),
        ('data = "$SCRATCH/data"', "only $HOME, $USER"),
        ('results = "~other/results"', "only $HOME, $USER"),
    ],
)
def test_doctor_fails_for_what_no_job_could_use(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f"{line}\n", encoding="utf-8")
    monkeypatch.setattr(commands, "require", lambda: None)
    monkeypatch.setattr(commands, "call", lambda *command: "gpu*|up|2|idle|infinite|(null)\n")
    monkeypatch.setattr(commands, "call_for_errors", lambda *command: "pmix")
    assert [check.found for check in cluster_check.check(file) if check.level == "FAIL" and said in check.found]


def test_the_home_folder_is_put_in_and_other_values_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USER", "me")
    file = tmp_path / "cluster.toml"
    file.write_text(
        'data = "~/data"\nresults = "/scratch/${USER}/r"\nimage = "$HOME/i.sif"\nmpi = "pmix_v4"\n'
        'cpu_bind = "verbose,map_cpu:0,1"\npython = { pytorch = "~/env/bin/python" }\n',
        encoding="utf-8",
    )
    found, _ = cluster.load(file)
    paths_of = (found.data, found.results, Path(found.image), found.python["pytorch"])
    assert [str(path) for path in paths_of] == [
        "/home/me/data", "/scratch/me/r", "/home/me/i.sif", "/home/me/env/bin/python",
    ]  # fmt: skip


def test_a_results_folder_that_does_not_exist_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def level(folder: Path) -> str:
        (check,) = cluster_check._folders(cluster.Cluster(results=folder))
        return f"{check.level} {check.found}"

    assert level(tmp_path) == f"OK {tmp_path}"
    assert level(tmp_path / "none") == f"WARN {tmp_path / 'none'} does not exist"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert level(tmp_path / "none") == f"FAIL {tmp_path / 'none'} does not exist"


def test_the_example_of_a_cluster_file_is_valid() -> None:
    found, file = cluster.load(paths.ROOT / "slurm" / "cluster.example.toml")
    assert found.gpus_per_node == 8
    assert file is not None


SLURM = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "64"}


def test_the_allocation_comes_from_slurms_variables() -> None:
    assert allocation.current({}) is None
    alone = allocation.current(SLURM)
    assert alone is not None
    assert (alone.name, alone.folder_mark, alone.nodes, alone.cores_per_node) == ("12", "job12", ("n1",), 64)
    in_shell = {name: value for name, value in SLURM.items() if name != "SLURM_CPUS_ON_NODE"}
    held = allocation.current({**in_shell, "SLURM_JOB_CPUS_PER_NODE": "32(x4)"})
    assert held is not None
    assert held.cores_per_node == 32
    array = {
        "JOB_ID": "10",
        "TASK_ID": "5",
        "TASK_MIN": "1",
        "TASK_MAX": "9",
        "TASK_STEP": "2",
        "TASK_COUNT": "5",
    }
    task = allocation.current({**SLURM, **{f"SLURM_ARRAY_{name}": value for name, value in array.items()}})
    assert task is not None
    assert (task.name, task.folder_mark, task.array_index, task.array_count) == ("10_5", "job10", 2, 5)
    array["TASK_MAX"] = "19"
    uneven = allocation.current({**SLURM, **{f"SLURM_ARRAY_{name}": value for name, value in array.items()}})
    assert uneven is not None
    assert (uneven.array_index, uneven.array_task) == (None, 5)
    with pytest.raises(EncoreError, match="not numbered evenly"):
        planning.make_plan(Request(name="resnet", gpus=8, system="dgxa100"), allocation=uneven)


@pytest.fixture
def array_run(anywhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of five experiments that the array 12 began; 1 and 3 have ended."""
    known = {
        "schema": run_folder.SCHEMA,
        "seeds": list(range(5)),
        "nodes": 2,
        "ranks_per_node": 8,
        "slurm": {"job": "12_0"},
    }
    passport = {**dict.fromkeys(run_folder.NEEDED), **known}
    run = run_folder.create(tmp_path, "resnet-mxnet-dgxa100-job12", lambda path: passport, {}, {}, list(range(5)))
    for number in (1, 3):
        run.experiments()[number].set_state(ExperimentState(status="not_reached"))
    found = prepared("docker", 2).plan
    monkeypatch.setattr(planning, "plan_of", lambda folder, allocation: found)
    monkeypatch.setattr(queue, "is_there", lambda: False)
    monkeypatch.setattr(status, "ask", status.Queue)
    return run


def test_an_array_is_resumed_by_what_is_left_of_it(array_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = submission.prepare_resume(array_run.path, Wanted())
    assert "#SBATCH --array=0,2,4\n" in found.script
    assert f"|{array_run.path.name}\n" in found.script
    # 39.78 minutes on 8 GPUs, half of it on 16 and twice that, one run a task; and the set-up.
    assert found.submission.minutes == 20 + 40
    with pytest.raises(EncoreError, match="--array 2, and 3 runs are left"):
        submission.prepare_resume(array_run.path, Wanted(array="2"))
    assert submission.prepare_resume(array_run.path, Wanted(array="3")).submission.array == (0, 2, 4)
    waiting = replace(job("30", "PENDING"), comment=f"encore:{array_run.path.parent}|{array_run.path.name}")
    monkeypatch.setattr(queue, "is_there", lambda: True)
    monkeypatch.setattr(queue, "this_cluster", lambda: "encore")
    monkeypatch.setattr(status, "ask", lambda: status.Queue((waiting,), answers=True))
    monkeypatch.setattr(queue, "numbered", lambda name: [waiting] if name == "30" else [])
    with pytest.raises(EncoreError, match=r"job 30 of cluster encore, of .*, waits in the queue to resume"):
        submission.prepare_resume(array_run.path, Wanted())
    for experiment in array_run.experiments():
        experiment.set_state(ExperimentState(status="reached"))
    with pytest.raises(EncoreError, match="nothing is left to run"):
        submission.prepare_resume(array_run.path, Wanted())


@pytest.mark.parametrize(
    ("restarts", "status", "received", "asked", "goes_on"),
    [
        # scancel: it is over. Preempted, or the node of its batch script lost: Slurm has counted the restart.
        ("0", "interrupted", signal.SIGTERM, False, False),
        ("1", "interrupted", signal.SIGTERM, False, True),
        ("1", "failed", 0, False, True),
        ("0", "failed", 0, False, False),
        # The warning before the time limit.
        ("0", "interrupted", signal.SIGUSR1, True, True),
    ],
)
def test_a_job_that_slurm_requeues_goes_on_by_itself(
    array_run: RunFolder, monkeypatch: pytest.MonkeyPatch,
    restarts: str, status: run_folder.Status, received: int, asked: bool, goes_on: bool,
) -> None:  # fmt: skip
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        commands,
        "call",
        lambda *command: called.append(command) or f"JobId=9 Requeue=1 Restarts={restarts} BatchFlag=1",
    )
    mine, signals, said = Allocation(job="9", nodes=("n1",)), supervise.Signals(), []
    signals.received = received
    plan = types.SimpleNamespace(allocation=mine, cluster=cluster.Cluster())
    hooks = types.SimpleNamespace(step=said.append)
    outcome = supervise.Outcome(status, "stopped")
    assert runner._requeue(plan, outcome, signals, hooks) is goes_on  # type: ignore[arg-type]
    assert (("scontrol", "requeue", "9") in called) is asked
    assert bool(said) is goes_on


def test_a_disk_that_is_full_at_the_end_hides_no_outcome(array_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: RunFolder, *seen: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said: list[str] = []
    monkeypatch.setattr(RunFolder, "note_ranks", full)
    hooks = types.SimpleNamespace(step=said.append)
    runner._note_ranks(array_run, array_run.experiments()[0], hooks)  # type: ignore[arg-type]
    assert said == ["run.json lacks what the ranks reported, it cannot be written: No space left on device"]


def test_the_state_says_that_the_disk_is_full(array_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(experiment: Experiment) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runner, "_clear_remains", full)
    plan, experiment = types.SimpleNamespace(allocation=None), array_run.experiments()[0]
    with ownership.owned(experiment, "") as mine:
        given: Any = (plan, experiment, None, None, supervise.Signals(), None, mine)
        assert runner._run_experiment(*given).status == "failed"
    state = experiment.state()
    assert (state.status, state.reason) == ("failed", "the run folder cannot be written: No space left on device")


@pytest.mark.parametrize("resumes", [False, True])
def test_a_resume_is_not_advised_to_take_another_results_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    monkeypatch.setattr(preflight, "RESULTS_GIB", 1e9)
    assert ("--results" in preflight.check_results(tmp_path, resumes).remedy) is not resumes


def test_a_task_runs_the_experiment_of_its_place_or_its_number(array_run: RunFolder) -> None:
    def chosen(array: str, task: int, index: int | None) -> list[int]:
        mine = Allocation(job="9", nodes=("n1",), array_job=array, array_task=task, array_index=index, array_count=3)
        return [each.number for each in slurm_job.experiments_of(array_run, mine)]

    assert chosen("12", 5, 2) == [2]
    assert chosen("30", 4, None) == [4]
    assert chosen("30", 0, 0) == [0]
    with pytest.raises(EncoreError, match="task 7 of the array has no experiment"):
        chosen("30", 7, None)


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        (None, None, (4, 8)),
        (32, None, (4, 8)),
        (4, None, (4, 1)),
        (2, None, (1, 2)),
        (8, 2, (2, 4)),
        (6, 1, (1, 6)),
    ],
)
def test_gpus_are_spread_over_the_nodes(
    gpus: int | None, nodes: int | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = planning.Request(name="resnet", gpus=gpus, nodes=nodes)
    held = submission.pretended(4, 8, None)
    assert planning.spread_over(held, request, cluster.Cluster(), node.this_node()) == expected


@pytest.mark.parametrize(("gpus", "nodes", "said"), [(6, None, "evenly"), (8, 5, "5 nodes asked for")])
def test_gpus_that_cannot_be_spread_are_refused(gpus: int, nodes: int | None, said: str) -> None:
    request = planning.Request(name="resnet", gpus=gpus, nodes=nodes)
    with pytest.raises(EncoreError, match=said):
        planning.spread_over(submission.pretended(4, 8, None), request, cluster.Cluster(), node.this_node())


SINFO = (
    "gpu*|up|6|idle|2-00:00:00|gpu:a100:8(S:0-1)\ngpu*|up|2|down*|2-00:00:00|gpu:a100:8(S:0-1)\n"
    "gpu*|up|3|mix|2-00:00:00|gpu:v100:4\ncpu|up|10|alloc|infinite|(null)\nold|down|9|idle|infinite|gpu:8\n"
)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Partition]:
    monkeypatch.setattr(commands, "call", lambda *command: SINFO)
    return partitions.partitions()


def test_partitions_are_read_from_sinfo(known: dict[str, Partition]) -> None:
    gpu, cpu, old = known["gpu"], known["cpu"], known["old"]
    assert (gpu.is_default, gpu.max_minutes, gpu.gpus, gpu.nodes(), gpu.nodes(up=True)) == (True, 2880, 8, 11, 9)
    assert (gpu.nodes(8), gpu.nodes(4), gpu.nodes(4, "v100"), gpu.nodes(8, "v100")) == (8, 11, 3, 0)
    assert (cpu.gpus, cpu.nodes(), cpu.max_minutes, old.state, old.gpus) == (None, 10, None, "down", 8)


@pytest.mark.parametrize(
    ("wanted", "names", "kind", "said"),
    [
        ({"nodes": 9}, "gpu", "", "FAIL 9 nodes asked for, partition gpu has 8 with 8 GPUs"),
        ({"nodes": 8}, "gpu", "", "WARN 8 nodes asked for, 6 of gpu are up: the job waits for the others"),
        ({"nodes": 6}, "gpu", "a100", "OK gpu, 6 nodes up"),
        (
            {"gpus_per_node": 4, "nodes": 4},
            "gpu",
            "v100",
            "FAIL 4 nodes asked for, partition gpu has 3 with 4 v100 GPUs",
        ),
        ({"gpus_per_node": 16}, "gpu", "", "FAIL 16 GPUs a node asked for, a node of gpu has 8"),
        ({"minutes": 3000}, "gpu", "", "FAIL 50:00:00 asked for, partition gpu allows 48:00:00"),
        ({}, "old", "", "FAIL partition old is down"),
        ({"minutes": 3000}, "gpu,cpu", "", "OK cpu, 10 nodes up"),
    ],
)
def test_what_would_wait_for_ever_is_refused(
    wanted: dict[str, int], names: str, kind: str, said: str, known: dict[str, Partition]
) -> None:
    asked = script.Submission(**{"nodes": 1, "gpus_per_node": 8, "minutes": 60, **wanted}, name="resnet",
                              results=Path("/r"), arguments=())  # fmt: skip
    check = partitions.check(asked, partitions.choose(known, names), kind)
    assert f"{check.level} {check.found}" == said


def test_doctor_names_drained_nodes_with_slurms_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"--list-reasons": "n[2-3]|drained*|bad DIMM\n"}
    monkeypatch.setattr(commands, "call", lambda *command: answers.get(command[2], SINFO))
    found = cluster_check._partition(cluster.Cluster(partition="gpu,old"), partitions.partitions())
    assert [f"{check.level} {check.found}" for check in found] == [
        "OK gpu: 9 of 11 nodes up, 2880 min at most", "FAIL old is down", "WARN n[2-3] drained: bad DIMM",
    ]  # fmt: skip


@pytest.mark.usefixtures("anywhere")
def test_typed_gpus_and_the_width_of_an_array_reach_sbatch(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    for gpus, option in (
        ('gpus_per_node = "gpu:a100:2"\ngpu_option = "gres"', "--gres=gpu:a100:2"),
        ('sbatch = ["--gres=gpu:a100:2"]', "--gres=gpu:a100:2"),
        ('sbatch = ["--gpus-per-node a100:2"]', "--gpus-per-node=a100:2"),
    ):
        file.write_text(f'{gpus}\npartition = "debug,short"\n', encoding="utf-8")
        text = prepared("docker", 2, cluster=file, array="0-9%2", gpus_per_node=None, require_target=True).script
        for line in (f"#SBATCH {option}", "#SBATCH --array=0-9%2", "#SBATCH --partition=debug,short", "resnet 4"):
            assert text.count(line) == 1
        assert "--require-target" in text


@pytest.mark.parametrize(
    "text",
    [
        'gpus_per_node = 4\nsbatch = ["--gres=gpu:a100:2"]', 'gpus_per_node = "a100:2"\ngpu_type = "v100"',
        'gpu_option = "gres"\nsbatch = ["--gpus-per-node=2"]', 'gpus_per_node = "a100:x"',
    ],
)  # fmt: skip
def test_gpus_that_are_given_twice_must_agree(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(EncoreError, match=rf"^{file}: .*(contradicts|is no number of GPUs)"):
        cluster.load(file)


@pytest.mark.usefixtures("anywhere")
def test_the_sites_options_reach_sbatch_and_the_comment_still_names_the_run() -> None:
    given = {"qos": "high", "reservation": "maint", "dependency": "afterok:12", "mail": "me@site.org"}
    text = prepared("docker", 2, **given, job_name="p42", comment="charge=7").script
    for line in (
        "--qos=high", "--reservation=maint", "--dependency=afterok:12", "--mail-user=me@site.org",
        "--mail-type=END,FAIL,REQUEUE", "--job-name=encore-resnet-p42", "--comment=encore:/results||charge=7",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    own = replace(job("30", "PENDING"), title="encore-resnet-p42", comment="encore:/results||charge=7")
    assert (own.is_encores, own.results, own.resumes) == (True, Path("/results"), None)
    assert replace(own, comment="encore:/results|run1|charge=7").resumes == Path("/results/run1")
    with pytest.raises(EncoreError, match="--comment"):
        prepared("docker", 2, comment="a b")


def test_a_dry_run_reports_a_wrong_partition(encore: Encore, tmp_path: Path) -> None:
    for name, text in (("sinfo", SINFO), ("sbatch", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}EOF\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = encore("submit", "resnet", "--nodes", "2", "--partition", "gppu", "--dry-run", environment=path)
    assert done.returncode == 0, done.stderr
    assert "FAIL partition: unknown partition 'gppu'" in done.stderr
    assert "did you mean 'gpu'?" in done.stderr


def test_slurms_refusals_name_the_remedy() -> None:
    error = commands.explain("sbatch", "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job")
    assert error.found == "sbatch: invalid partition specified: gpuu"
    assert "sinfo" in error.remedy


def test_a_job_that_was_not_requeued_starts_a_new_run(tmp_path: Path) -> None:
    assert slurm_job.begun(tmp_path, submission.pretended(1, 1, None), ["run", "resnet"]) is None


# -- nodes -------------------------------------------------------------------------------------------------

SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
SLURMD_NODENAME=n1 "$@"
SLURMD_NODENAME=n2 "$@"
"""


def test_a_node_that_lacks_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN, encoding="utf-8")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    missing = Need("readable", str(tmp_path / "dataset.json"), "copy it there")
    assert nodes.check(2, [Need("readable", str(tmp_path), "")]) == []
    found = nodes.check(2, [missing])
    assert [check.name for check in found] == ["node n1", "node n2"]
    assert found[0].found == f"{tmp_path}/dataset.json cannot be read"
    assert found[0].remedy == "copy it there; or leave the node out: sbatch --exclude=NODE"
    with pytest.raises(EncoreError, match="1 of 3 nodes cannot start"):
        nodes.check(3, [])


@pytest.mark.parametrize(("restarts", "goes_on"), [("1", True), ("0", False)])
def test_a_requeue_that_ends_scontrol_too_is_seen(
    monkeypatch: pytest.MonkeyPatch, restarts: str, goes_on: bool
) -> None:
    """Slurm counts the restart, then ends the processes of the job, of which scontrol is one."""
    counted = "0"

    def call(*words: str) -> str:
        nonlocal counted
        counted = restarts
        raise EncoreError("scontrol: no reason given")

    monkeypatch.setattr(requeue.commands, "call", call)
    monkeypatch.setattr(requeue.commands, "show_job", lambda job: {"Restarts": counted})
    found = requeue.request(Allocation(job="2", nodes=("n1",)), 3)
    assert found[0] is goes_on
    assert ("not requeued" in found[1]) is not goes_on
