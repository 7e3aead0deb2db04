"""Slurm without a Slurm: scripts and srun lines word for word, what is read from its variables, refusals."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from encore import paths
from encore.cli.app import app
from encore.cli.run import as_request
from encore.cli.submit import _run_context
from encore.containers import engines
from encore.errors import EncoreError
from encore.machine import node, processes
from encore.machine.fitness import Need
from encore.machine.preflight import Check
from encore.run import ownership, planning, run_folder, runner, submission, supervise
from encore.run.planning import Request
from encore.run.run_folder import ExperimentState, RunFolder
from encore.run.submission import Prepared
from encore.slurm import cluster, commands, offers, queue, script, step
from encore.slurm.offers import Partition
from encore.slurm.queue import Allocation
from encore.slurm.script import Wanted
from tests.run_folders import made
from tests.slurm.jobs import in_queue, job

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
    monkeypatch.setattr(commands, "setting", lambda name: "")
    monkeypatch.setattr(engines, "connect", no_engine)
    monkeypatch.setattr(cluster, "places", lambda: ())


def prepared(runtime: str, nodes: int, *more: str, **wanted: Any) -> Prepared:
    """Return eight GPUs a node of DGX A100, by the given runtime; on the host the small CPU system."""
    of_gpus = ("--system", "dgxa100", "--data", "/data/imagenet") if runtime != "host" else ("--data", "/data/d")
    rest = ("--results", "/results", *of_gpus, *IMAGES[runtime], *more)
    per_node = wanted.pop("gpus_per_node", 8 if runtime != "host" else 2)
    asked = Wanted(nodes=nodes, gpus_per_node=per_node, **wanted)
    return submission.prepare(as_request(_run_context("resnet", rest).params), rest, asked)


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
def test_scripts_are_as_recorded(runtime: str, nodes: int, recorded: Callable[[str, Any], None]) -> None:
    found = prepared(runtime, nodes)
    recorded(f"{runtime}_{nodes}.sub", plain(found.script))
    step = runner.as_shell(found.step).replace(" --", " \\\n  --")
    recorded(f"{runtime}_{nodes}_step.sh", "#!/usr/bin/env bash\n" + plain(step))


def test_recorded_scripts_pass_shellcheck() -> None:
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker is not None
    files = sorted([*GOLDEN.iterdir(), paths.ROOT / "slurm" / "run.sub"])
    assert len(files) == 2 * len(IMAGES) * len(NODES) + 1
    done = subprocess.run([checker, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


FILE = """partition = "gpu"
account = "team"
gpu_option = "gres"
sbatch = ["--constraint=a100&nvlink"]
results = "/shared/results"
max_requeues = 2
"""
TWO_AT_ONCE = {"partition": "debug,short", "array": "0-9%2", "gpus_per_node": None, "require_target": True}
SITE = {
    "qos": "high", "reservation": "maint", "dependency": "afterok:12", "mail": "me@site.org", "job_name": "p42",
    "comment": "charge=7", "more": ("--exclude=n 7",),
}  # fmt: skip
TYPED_HEADER = "--array=0-9%2; --partition=debug,short; --time=03:00:00; --output=/results/slurm-%A_%a.out"
HEADERS = [
    # The file, what is asked for beyond it, and what of the header differs from that of two nodes without either.
    (
        FILE,
        {"array": "0-4", "minutes": 90, "account": "other"},
        "--partition=gpu; --account=other; --array=0-4; --time=01:30:00; --gres=gpu:8; --constraint=a100&nvlink; "
        "--output=/results/slurm-%A_%a.out",
    ),
    (
        "",
        SITE,
        "--job-name=encore-resnet-p42; --qos=high; --reservation=maint; --dependency=afterok:12; "
        '--mail-user=me@site.org; --mail-type=END,FAIL,REQUEUE; --comment=encore:/results||charge=7; "--exclude=n 7"',
    ),
    ('gpus_per_node = "gpu:a100:2"\ngpu_option = "gres"', TWO_AT_ONCE, f"--gres=gpu:a100:2; {TYPED_HEADER}"),
    ('sbatch = ["--gres=gpu:a100:2"]', TWO_AT_ONCE, f"--gres=gpu:a100:2; {TYPED_HEADER}"),
    ('sbatch = ["--gpus-per-node a100:2"]', TWO_AT_ONCE, f"--gpus-per-node=a100:2; {TYPED_HEADER}"),
    ('gpu_option = "none"\nsbatch = ["--gres=gpu:a100:8"]\n', {}, "--gres=gpu:a100:8"),
]


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("text", "wanted", "expected"), HEADERS)
def test_the_cluster_file_and_the_sites_options_reach_sbatch(
    text: str, wanted: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    plain, found = (prepared("docker", 2, **each).script for each in ({}, {"cluster": file, **wanted}))
    header, usual = ([line[8:] for line in each.splitlines() if line.startswith("#SBATCH")] for each in (found, plain))
    assert sorted(set(header) - set(usual)) == sorted(expected.split("; "))
    assert f"--cluster {file}" in found and ("--require-target" in found) is wanted.get("require_target", False)


def test_the_comment_names_the_run_besides_the_sites_own() -> None:
    own = replace(job("30", "PENDING"), title="encore-resnet-p42", comment="encore:/results||charge=7")
    assert (own.is_encores, own.results, own.resumes) == (True, Path("/results"), None)
    assert replace(own, comment="encore:/results|run1|charge=7").resumes == Path("/results/run1")


@pytest.mark.usefixtures("anywhere")
def test_the_time_limit_comes_from_the_published_time() -> None:
    # v0.7 ResNet on DGX A100, 8 GPUs: 39.78 minutes; twice that for 4 times the GPUs, and the set-up.
    found = prepared("docker", 4)
    assert found.submission.minutes == 20 + 20 and "39.78" in found.estimate.reason
    assert prepared("docker", 1, "--runs", "5").submission.minutes == 20 + 398


@pytest.mark.parametrize(("option", "refused"), [("gpus-per-node", True), ("gres", True), ("none", False)])
def test_a_cluster_of_gpus_needs_a_system_to_be_named(option: str, refused: bool, tmp_path: Path) -> None:
    """Where Slurm is asked for no GPUs, the nodes may have none."""
    file = tmp_path / "cluster.toml"
    file.write_text(f'runtime = "host"\ngpus_per_node = 2\ngpu_option = "{option}"\n', encoding="utf-8")
    where = ("--cluster", str(file), "--results", str(tmp_path))
    done = CliRunner().invoke(app, ["submit", "resnet", *where, "--dry-run"])
    assert ("no system named" in str(done.exception)) is refused, done.output
    assert done.exit_code == (1 if refused else 0), done.output


def test_without_slurm_nothing_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["submit", "resnet"])
    assert isinstance(done.exception, EncoreError) and "no Slurm here" in done.exception.found
    assert CliRunner().invoke(app, ["doctor", "--slurm"]).exit_code == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('partitoin = "gpu"', "partitoin"),
        *(
            (f'sbatch = ["{each}"]', "contradicts what Encore gives sbatch")
            for each in ("--time=1", "--gpus=16", "-J x")
        ),
        ('gpus_per_node = 4\nsbatch = ["--gres=gpu:a100:2"]', "contradicts gpus_per_node = 4"),
        ('gpus_per_node = "a100:2"\ngpu_type = "v100"', "contradicts gpu_type = 'v100'"),
        ('gpu_option = "gres"\nsbatch = ["--gpus-per-node=2"]', "contradicts gpu_option = 'gres'"),
        ('gpus_per_node = "a100:x"', "is no number of GPUs"),
        ('python = { pytroch = "/usr/bin/python3" }', "did you mean 'pytorch'"),
        ('mpi = "pmxi"', "no plugin of srun --mpi"),
        ('cpu_bind = "croes"', "no value of srun --cpu-bind"),
        ('data = "$SCRATCH/data"', "only $HOME, $USER"),
        ('results = "~other/results"', "only $HOME, $USER"),
        ('sbatch = ["constraint"]', "is no option of sbatch"),
    ],
)
def test_what_no_job_could_use_is_refused_in_the_cluster_file(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f"{line}\n", encoding="utf-8")
    (check,) = offers.check_cluster(file)
    assert (check.level, check.name, said in check.found, str(file) in check.found) == ("FAIL", "cluster", True, True)


SINFO = (
    "gpu*|up|6|idle|2-00:00:00|gpu:a100:8(S:0-1)\ngpu*|up|2|down*|2-00:00:00|gpu:a100:8(S:0-1)\n"
    "gpu*|up|3|mix|2-00:00:00|gpu:v100:4\ncpu|up|10|alloc|infinite|(null)\nold|down|9|idle|infinite|gpu:8\n"
)


def answers(*command: str) -> str:
    """Return what Slurm's programs print on a cluster of three partitions."""
    if command[:2] == ("sbatch", "--test-only"):
        raise EncoreError("sbatch: invalid qos")
    known = {"--version": "slurm 23.02\n", "--list-reasons": "n[2-3]|drained*|bad DIMM\n", "show": "JobRequeue = 1\n"}
    return next((text for word, text in known.items() if word in command), SINFO)


def test_doctor_checks_the_cluster_file_against_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "require", lambda: None)
    monkeypatch.setattr(commands, "call", answers)
    monkeypatch.setattr(processes, "output_of", lambda *command, **options: "MPI plugin types are...\n\tpmi2\n")
    file, results = tmp_path / "cluster.toml", tmp_path / "results"
    file.write_text(
        f'partition = "gpu,old"\ngpus_per_node = "v100:4"\nresults = "{results}"\nruntime = "enroot"\n'
        f'network_interface = "z9"\npython = {{ pytorch = "/no/python", mxnet = "{sys.executable}" }}\n',
        encoding="utf-8",
    )
    monkeypatch.setattr(offers, "existing", lambda path: path if path == tmp_path else tmp_path)
    found = [f"{each.level} {each.name}: {each.found}" for each in offers.check_cluster(file)]
    assert [line.replace(str(tmp_path), "TMP").partition(", which has")[0] for line in found] == [
        "OK cluster file: TMP/cluster.toml", "OK Slurm: slurm 23.02",
        "OK partition: gpu: 9 of 11 nodes up, 2880 min at most", "FAIL partition: old is down",
        "WARN nodes: n[2-3] drained: bad DIMM", "OK GPUs: 4 a node, on 3 of 11 nodes",
        "FAIL submission: sbatch: invalid qos", "WARN MPI: srun has no pmix, Horovod cannot start",
        "WARN results: TMP/results does not exist", "FAIL Python: pytorch: /no/python is no program on this node",
        f"OK Python: mxnet: {sys.executable}", "WARN runtime: on this node: no enroot on PATH",
        "WARN network: no interface z9 on this node", "OK requeue: allowed: jobs resume after the time limit and after"
        " a lost node",
    ]  # fmt: skip
    (check,) = offers._folders(cluster.Cluster(results=tmp_path))
    assert (check.level, check.found) == ("OK", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for folder, said in ((results, f"{results} does not exist"), (tmp_path, f"{tmp_path} is not writable")):
        (check,) = offers._folders(cluster.Cluster(results=folder))
        assert (check.level, check.found) == ("FAIL", said)


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


def test_the_example_of_a_cluster_file_is_valid() -> None:
    assert cluster.load(paths.ROOT / "slurm" / "cluster.example.toml")[0].gpus_per_node == 8


ARRAY = {"JOB_ID": "10", "TASK_ID": "5", "TASK_MIN": "1", "TASK_MAX": "9", "TASK_STEP": "2", "TASK_COUNT": "5"}
OF_ARRAY = {f"ARRAY_{name}": value for name, value in ARRAY.items()}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CPUS_ON_NODE": "64"}, {"cores_per_node": 64}),
        ({"JOB_CPUS_PER_NODE": "32(x4)"}, {"cores_per_node": 32}),
        (
            {
                "GPUS_ON_NODE": "8",
                "NTASKS_PER_NODE": "4",
                "RESTART_COUNT": "2",
                "JOB_PARTITION": "p",
                "CLUSTER_NAME": "c",
            },
            {"gpus_per_node": 8, "tasks_per_node": 4, "restarts": 2, "partition": "p", "cluster": "c"},
        ),
        (OF_ARRAY, {"array_job": "10", "array_task": 5, "array_index": 2, "array_count": 5}),
        (
            {**OF_ARRAY, "ARRAY_TASK_MAX": "19"},
            {"array_job": "10", "array_task": 5, "array_index": None, "array_count": 5},
        ),
    ],
)
def test_the_allocation_comes_from_slurms_variables(variables: dict[str, str], expected: dict[str, Any]) -> None:
    given = {"JOB_ID": "12", "JOB_NODELIST": "n1", **variables}
    found = queue.this_allocation({f"SLURM_{name}": value for name, value in given.items()})
    assert found == Allocation(job="12", nodes=("n1",), **expected)
    assert (found.name, found.folder_mark) == (("10_5", "job10") if found.array_job else ("12", "job12"))
    assert queue.this_allocation({}) is None
    if found.array_index is None:
        with pytest.raises(EncoreError, match="not numbered evenly"):
            planning.make_plan(Request(name="resnet", gpus=8, system="dgxa100"), allocation=found)


@pytest.fixture
def array_run(anywhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of five experiments that the array 12 began; 1 and 3 have ended."""
    ended = ExperimentState(status="not_reached")
    run = made(tmp_path, [None, ended, None, ended, None], "-job12", "12_0", ranks_per_node=8)
    found = prepared("docker", 2).plan
    monkeypatch.setattr(planning, "plan_of", lambda folder, allocation: found)
    monkeypatch.setattr(queue, "is_there", lambda: False)
    return run


def test_an_array_is_resumed_by_what_is_left_of_it(array_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = submission.prepare_resume(array_run.path, Wanted())
    assert "#SBATCH --array=0,2,4\n" in found.script and f"|{array_run.path.name}\n" in found.script
    # 39.78 minutes on 8 GPUs, half of it on 16 and twice that, one run a task; and the set-up.
    assert found.submission.minutes == 20 + 40
    with pytest.raises(EncoreError, match="--array 0-1, and 3 runs are left"):
        submission.prepare_resume(array_run.path, Wanted(array="0-1"))
    assert submission.prepare_resume(array_run.path, Wanted(array="0-2")).submission.array == (0, 2, 4)
    in_queue(monkeypatch, [job("30", "PENDING", comment=f"encore:{array_run.path.parent}|{array_run.path.name}")])
    with pytest.raises(EncoreError, match=r"job 30 of cluster here, of .*, waits in the queue to resume"):
        submission.prepare_resume(array_run.path, Wanted())
    for experiment in array_run.experiments():
        experiment.set_state(ExperimentState(status="reached"))
    with pytest.raises(EncoreError, match="nothing is left to run"):
        submission.prepare_resume(array_run.path, Wanted())


@pytest.mark.parametrize(
    ("restarts", "status", "received", "asked", "goes_on", "dies"),
    [
        # scancel: it is over. Preempted, or the node of its batch script lost: Slurm has counted the restart.
        ("0", "interrupted", signal.SIGTERM, False, False, False),
        ("1", "interrupted", signal.SIGTERM, False, True, False),
        ("1", "failed", 0, False, True, False),
        ("0", "failed", 0, False, False, False),
        # The warning before the time limit.
        ("0", "interrupted", signal.SIGUSR1, True, True, False),
        ("1", "interrupted", signal.SIGUSR1, True, True, True),
        ("0", "interrupted", signal.SIGUSR1, True, False, True),
    ],
)
def test_a_job_that_slurm_requeues_goes_on_by_itself(
    array_run: RunFolder, monkeypatch: pytest.MonkeyPatch,
    restarts: str, status: run_folder.Status, received: int, asked: bool, goes_on: bool, dies: bool,
) -> None:  # fmt: skip
    """Where scontrol is one of the processes that Slurm ends after it has counted the restart, too."""
    called: list[tuple[str, ...]] = []
    counted = "0" if dies else restarts

    def call(*command: str) -> str:
        nonlocal counted
        called.append(command)
        if command[1] == "requeue" and dies:
            counted = restarts
            raise EncoreError("scontrol: no reason given")
        return f"JobId=9 Requeue=1 Restarts={counted} BatchFlag=1"

    monkeypatch.setattr(commands, "call", call)
    mine, signals, said = Allocation(job="9", nodes=("n1",)), supervise.Signals(), []
    signals.received = received
    plan = types.SimpleNamespace(allocation=mine, cluster=cluster.Cluster())
    hooks = types.SimpleNamespace(step=said.append)
    outcome = supervise.Outcome(status, "stopped")
    assert runner._requeue(plan, outcome, signals, hooks) is goes_on  # type: ignore[arg-type]
    assert (("scontrol", "requeue", "9") in called) is asked
    assert bool(said) is (goes_on or dies)


def test_a_disk_that_is_full_at_the_end_hides_no_outcome(array_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said: list[str] = []
    monkeypatch.setattr(RunFolder, "note_ranks", full)
    hooks = types.SimpleNamespace(step=said.append)
    runner._note_ranks(None, array_run, array_run.experiments()[0], hooks, {})  # type: ignore[arg-type]
    assert said == ["run.json lacks what the ranks reported, it cannot be written: No space left on device"]
    monkeypatch.setattr(runner, "clear_remains", full)
    plan, experiment = types.SimpleNamespace(allocation=None), array_run.experiments()[0]
    with ownership.owned(experiment, "") as mine:
        given: Any = (plan, experiment, None, supervise.Signals(), None, mine)
        assert runner._run_experiment(*given).status == "failed"
    state = experiment.state()
    assert (state.status, state.reason) == ("failed", "the run folder cannot be written: No space left on device")


def test_a_task_runs_the_experiment_of_its_place_or_its_number(array_run: RunFolder) -> None:
    def chosen(array: str, task: int, index: int | None) -> list[int]:
        mine = Allocation(job="9", nodes=("n1",), array_job=array, array_task=task, array_index=index, array_count=3)
        return [each.number for each in runner.experiments_of(array_run, mine)]

    assert chosen("12", 5, 2) == [2] and chosen("30", 4, None) == [4]
    assert chosen("30", 0, 0) == [0]
    with pytest.raises(EncoreError, match="task 7 of the array has no experiment"):
        chosen("30", 7, None)
    assert runner.begun(array_run.path.parent, submission.pretended(1, 1, 0), ["run", "resnet"]) is None


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        (None, None, (4, 8)),
        (32, None, (4, 8)),
        (4, None, (4, 1)),
        (2, None, (1, 2)),
        (8, 2, (2, 4)),
        (6, 1, (1, 6)),
        (6, None, "evenly"),
        (8, 5, "5 nodes asked for"),
    ],
)
def test_gpus_are_spread_over_the_nodes(gpus: int | None, nodes: int | None, expected: tuple[int, int] | str) -> None:
    request, held = planning.Request(name="resnet", gpus=gpus, nodes=nodes), submission.pretended(4, 8, 0)
    if isinstance(expected, str):
        with pytest.raises(EncoreError, match=expected):
            planning.spread_over(held, request, cluster.Cluster(), node.this_node())
    else:
        assert planning.spread_over(held, request, cluster.Cluster(), node.this_node()) == expected


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Partition]:
    monkeypatch.setattr(commands, "call", lambda *command: SINFO)
    return offers.partitions()


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
    check = offers.check_partition(asked, names, kind)
    assert f"{check.level} {check.found}" == said


def test_a_dry_run_reports_a_wrong_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("sinfo", SINFO), ("sbatch", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}EOF\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = CliRunner().invoke(app, ["submit", "resnet", "--nodes", "2", "--partition", "gppu", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "FAIL partition: unknown partition 'gppu'" in done.output and "did you mean 'gpu'?" in done.output


def test_slurms_refusals_name_the_hint() -> None:
    error = commands.explain("sbatch", "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job")
    assert error.found == "sbatch: invalid partition specified: gpuu" and "sinfo" in error.hint


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
    assert step.check_nodes(2, [Need("readable", str(tmp_path), "")]) == []
    what = (f"{tmp_path}/dataset.json cannot be read", "copy it there; or leave the node out: sbatch --exclude=NODE")
    assert step.check_nodes(2, [missing]) == [Check("FAIL", f"node {name}", *what) for name in ("n1", "n2")]
    with pytest.raises(EncoreError, match="1 of 3 nodes cannot start"):
        step.check_nodes(3, [])
