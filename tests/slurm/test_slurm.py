"""Slurm without a Slurm: scripts, srun commands, variables of a job, and rejected submissions."""

import contextlib
import errno
import os
import re
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from encore import paths
from encore.cli.run import as_request
from encore.cli.submit import _run_context
from encore.containers import engines
from encore.errors import EncoreError
from encore.machine import host_requirements, node, preflight, processes
from encore.run import ownership, planning, run_folder, runner, submission, supervise
from encore.slurm import cluster, cluster_checks, commands, queue, script, step
from tests.command_line import error_of, run_encore
from tests.machine.machines import write_program
from tests.slurm.jobs import in_queue, job
from tests.trainings import make_run

IMAGES = {
    "host": (),
    "pyxis": ("--runtime", "pyxis", "--image", "/images/resnet.sqsh"),
    "apptainer": ("--runtime", "apptainer", "--image", "/images/resnet.sif"),
    "docker": ("--runtime", "docker", "--image", "encore/resnet:latest"),
}
NODES = (1, 2, 32)
HOST_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "LOGNAME", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hide Slurm, container engines and the caller's variables, so that scripts are the same on every machine
    for name in list(os.environ):
        if name in HOST_VARIABLES or name.startswith(("SLURM_", "ENCORE_CLUSTER", "XDG_", "APPTAINER_", "DOCKER_")):
            monkeypatch.delenv(name)
    for name, value in (("HOME", "/home/me"), ("USER", "me"), ("PATH", "/usr/bin:/bin")):
        monkeypatch.setenv(name, value)
    for module, function, answer in (
        (node, "cores", Mock(return_value=16)),
        (commands, "is_installed", Mock(return_value=False)),
        (commands, "setting", Mock(return_value="")),
        (cluster, "default_files", tuple),
        (engines, "connect", Mock(side_effect=EncoreError("no engine"))),
    ):
        monkeypatch.setattr(module, function, answer)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def prepare(runtime: str, nodes: int, *options: str, **submission_options: Any) -> submission.Prepared:
    # Resnet on nodes with 8 GPUs (DGX A100), on the host runtime on the CPU system with 2 ranks a node
    system = ("--system", "dgxa100", "--data", "/data/imagenet") if runtime != "host" else ("--data", "/data/d")
    arguments = ("--results", "/results", *system, *IMAGES[runtime], *options)
    requested = script.Options(**{"nodes": nodes, "gpus_per_node": 8 if runtime != "host" else 2, **submission_options})
    return submission.prepare(as_request(_run_context("resnet", arguments).params), arguments, requested)


def portable(text: str) -> str:
    # Replace the parts of a script that differ between checkouts and machines
    text = text.replace(str(paths.ROOT), "/encore").replace(sys.executable, "/encore/.venv/bin/python")
    for pattern, replacement in (
        (r"[^\s:=']*/environments/mxnet-[0-9a-f]+", "/cache/mxnet"),
        (r"nofile=\d+:\d+|nproc=-?\d+:-?\d+", "LIMIT"),
        (r"--user \d+:\d+", "--user 1000:1000"),
        (r"(torchinductor|triton)_\d+", r"\1_1000"),
        (r"Encore \d[\w.]*", "Encore VERSION"),
    ):
        text = re.sub(pattern, replacement, text)
    return text


@pytest.mark.usefixtures("bare_machine")
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("runtime", IMAGES)
def test_scripts_match_the_golden_files(runtime: str, nodes: int, recorded: Callable[[str, Any], None]) -> None:
    prepared = prepare(runtime, nodes)
    recorded(f"{runtime}_{nodes}.sub", portable(prepared.script))
    step_command = runner.as_shell(prepared.step).replace(" --", " \\\n  --")
    recorded(f"{runtime}_{nodes}_step.sh", f"#!/usr/bin/env bash\n{portable(step_command)}")


FILE = """partition = "gpu"
account = "team"
gpu_option = "gres"
sbatch = ["--constraint=a100&nvlink"]
results = "/shared/results"
max_requeues = 2
"""
TYPED_GPUS = {"partition": "debug,short", "array": "0-9%2", "gpus_per_node": None, "require_target": True}
SITE = {
    "qos": "high", "reservation": "maint", "dependency": "afterok:12", "mail": "me@site.org", "job_name": "p42",
    "comment": "charge=7", "sbatch": ("--exclude=n 7",),
}  # fmt: skip
TYPED_HEADER = "--array=0-9%2; --partition=debug,short; --time=03:00:00; --output=/results/slurm-%A_%a.out"
# Cluster file, options of the submission, and the #SBATCH lines that they change or add.
HEADERS = [
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
    ('gpus_per_node = "gpu:a100:2"\ngpu_option = "gres"', TYPED_GPUS, f"--gres=gpu:a100:2; {TYPED_HEADER}"),
    ('sbatch = ["--gres=gpu:a100:2"]', TYPED_GPUS, f"--gres=gpu:a100:2; {TYPED_HEADER}"),
    ('sbatch = ["--gpus-per-node a100:2"]', TYPED_GPUS, f"--gpus-per-node=a100:2; {TYPED_HEADER}"),
    ('gpu_option = "none"\nsbatch = ["--gres=gpu:a100:8"]\n', {}, "--gres=gpu:a100:8"),
]


@pytest.mark.usefixtures("bare_machine")
@pytest.mark.parametrize(("text", "options", "expected"), HEADERS)
def test_cluster_file_and_site_options_in_sbatch_header(
    text: str, options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "cluster.toml", text)
    default, custom = (prepare("docker", 2, **values).script for values in ({}, {"cluster": file, **options}))
    header, default_header = (set(re.findall("^#SBATCH (.*)", content, re.M)) for content in (custom, default))
    assert sorted(header - default_header) == sorted(expected.split("; "))
    assert f"--cluster {file}" in custom and ("--require-target" in custom) is options.get("require_target", False)


@pytest.mark.usefixtures("bare_machine")
def test_time_limit_is_estimated_from_the_published_time() -> None:
    # 39.78 minutes on 8 GPUs (ResNet, DGX A100, v0.7); twice the time of linear scaling plus 20 for the set-up
    four, five_runs = prepare("docker", 4), prepare("docker", 1, "--runs", "5")
    assert (four.submission.minutes, five_runs.submission.minutes) == (20 + 20, 20 + 398)
    assert "39.78" in four.estimate.reason


@pytest.mark.parametrize(("option", "code"), [("gpus-per-node", 1), ("gres", 1), ("none", 0)])
def test_cluster_with_gpus_needs_a_system(option: str, code: int, tmp_path: Path) -> None:
    # Without a GPU request to Slurm the nodes may have no GPUs
    file = write(tmp_path / "cluster.toml", f'runtime = "host"\ngpus_per_node = 2\ngpu_option = "{option}"\n')
    result = run_encore("submit", "resnet", "--cluster", file, "--results", tmp_path, "--dry-run")
    assert (result.exit_code, "no system given" in str(result.exception)) == (code, code == 1), result.output


def test_commands_fail_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no Slurm here" in error_of("submit", "resnet").found
    assert run_encore("doctor", "--slurm").exit_code == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('partitoin = "gpu"', "partitoin"),
        ('sbatch = ["--time=1"]', "conflicts with an option that Encore sets"),
        ('sbatch = ["--gpus=16"]', "conflicts with an option that Encore sets"),
        ('sbatch = ["-J x"]', "conflicts with an option that Encore sets"),
        ('gpus_per_node = 4\nsbatch = ["--gres=gpu:a100:2"]', "contradicts gpus_per_node = 4"),
        ('gpus_per_node = "a100:2"\ngpu_type = "v100"', "contradicts gpu_type = 'v100'"),
        ('gpu_option = "gres"\nsbatch = ["--gpus-per-node=2"]', "contradicts gpu_option = 'gres'"),
        ('gpus_per_node = "a100:x"', "is not a number of GPUs"),
        ('python = { pytroch = "/usr/bin/python3" }', "did you mean 'pytorch'"),
        ('mpi = "pmxi"', "is not a plugin of srun --mpi"),
        ('cpu_bind = "croes"', "is not a value of srun --cpu-bind"),
        ('data = "$SCRATCH/data"', "only $HOME, $USER"),
        ('results = "~other/results"', "only $HOME, $USER"),
        ('sbatch = ["constraint"]', "is not an sbatch option"),
        ('partition = "a\\n#SBATCH --wrap=b"', "line break or a shell metacharacter"),
        ('account = "a;b"', "shell metacharacter"),
        ('network_interface = "$(b)"', "shell metacharacter"),
        ('image = "--b"', "shell metacharacter"),
        ('results = "/a\\nb"', "line break"),
        ('textfile = "/a`b`"', "shell metacharacter"),
    ],
)
def test_invalid_cluster_file_is_rejected(line: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "cluster.toml", f"{line}\n")
    (check,) = cluster_checks.check_cluster(file)
    assert (check.level, check.name, message in check.found, str(file) in check.found) == (
        "FAIL", "cluster", True, True,
    )  # fmt: skip


SINFO = (
    "gpu*|up|6|idle|2-00:00:00|gpu:a100:8(S:0-1)\ngpu*|up|2|down*|2-00:00:00|gpu:a100:8(S:0-1)\n"
    "gpu*|up|3|mix|2-00:00:00|gpu:v100:4\ncpu|up|10|alloc|infinite|(null)\nold|down|9|idle|infinite|gpu:8\n"
)


def call_on_three_partitions(*command: str) -> str:
    # Output of Slurm's programs on a cluster with the partitions gpu, cpu and old
    if command[:2] == ("sbatch", "--test-only"):
        raise EncoreError("sbatch: invalid qos")
    outputs = {"--version": "slurm 23.02\n", "--list-reasons": "n[2-3]|drained*|bad DIMM\n", "show": "JobRequeue = 1\n"}
    return next((text for word, text in outputs.items() if word in command), SINFO)


@pytest.mark.parametrize(
    ("setting", "folder"),
    [("/srv/spool", "/srv/spool"), ("/srv/slurmd.%n", "/srv"), ("/srv/%h/slurmd", "/srv"), (None, "/var/spool/slurmd")],
)
def test_spool_folder_has_no_name_of_a_node(setting: str | None, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "setting", {"SlurmdSpoolDir": setting}.get)
    assert step.spool_folder() == folder


def test_doctor_compares_the_cluster_file_with_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "require", lambda: None)
    monkeypatch.setattr(commands, "call", call_on_three_partitions)
    monkeypatch.setattr(processes, "output_of", lambda *command, **options: "MPI plugin types are...\n\tpmi2\n")
    results = tmp_path / "results"
    file = write(
        tmp_path / "cluster.toml",
        f'partition = "gpu,old"\ngpus_per_node = "v100:4"\nresults = "{results}"\nruntime = "enroot"\n'
        f'network_interface = "z9"\npython = {{ pytorch = "/no/python", mxnet = "{sys.executable}" }}\n',
    )
    monkeypatch.setattr(cluster_checks, "existing", lambda path: path if path == tmp_path else tmp_path)
    lines = [f"{check.level} {check.name}: {check.found}" for check in cluster_checks.check_cluster(file)]
    assert [line.replace(str(tmp_path), "TMP").partition(", which has")[0] for line in lines] == [
        "OK cluster file: TMP/cluster.toml", "OK Slurm: slurm 23.02",
        "OK partition: gpu: 9 of 11 nodes up, limit 2880 min", "FAIL partition: old is down",
        "WARN nodes: n[2-3] drained: bad DIMM", "OK GPUs: 4 per node, on 3 of 11 nodes",
        "FAIL submission: sbatch: invalid qos", "WARN MPI: srun does not support pmix; Horovod cannot start",
        "WARN results: TMP/results does not exist", "FAIL Python: pytorch: /no/python is not executable on this node",
        f"OK Python: mxnet: {sys.executable}", "WARN runtime: on this node: no enroot on PATH",
        "WARN network: no interface z9 on this node", "OK requeue: allowed: jobs resume after the time limit and after"
        " a lost node",
    ]  # fmt: skip

    for folder, access, level, problem in (
        (tmp_path, True, "OK", ""), (tmp_path, False, "FAIL", " is not writable"),
        (results, False, "FAIL", " does not exist"),
    ):  # fmt: skip
        # Root can write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode, access=access: access)
        (check,) = cluster_checks._folders(cluster.Cluster(results=folder))
        assert (check.level, check.found) == (level, f"{folder}{problem}")


@pytest.mark.usefixtures("bare_machine")
def test_cluster_file_expands_the_home_folder_and_user(tmp_path: Path) -> None:
    file = write(
        tmp_path / "cluster.toml",
        'data = "~/data"\nresults = "/scratch/${USER}/r"\nimage = "$HOME/i.sif"\nmpi = "pmix_v4"\n'
        'cpu_bind = "verbose,map_cpu:0,1"\npython = { pytorch = "~/env/bin/python" }\n',
    )
    settings, _ = cluster.load(file)
    assert [str(path) for path in (settings.data, settings.results, settings.image, settings.python["pytorch"])] == [
        "/home/me/data", "/scratch/me/r", "/home/me/i.sif", "/home/me/env/bin/python",
    ]  # fmt: skip
    assert cluster.load(paths.ROOT / "slurm" / "cluster.example.toml")[0].gpus_per_node == 8


ARRAY = {
    "ARRAY_JOB_ID": "10", "ARRAY_TASK_ID": "5", "ARRAY_TASK_MIN": "1", "ARRAY_TASK_MAX": "9", "ARRAY_TASK_STEP": "2",
    "ARRAY_TASK_COUNT": "5",
}  # fmt: skip
MEMBERSHIP = {"array_job": "10", "array_task": 5, "array_count": 5}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CPUS_ON_NODE": "64"}, {"cores_per_node": 64}),
        ({"JOB_CPUS_PER_NODE": "32(x4)"}, {"cores_per_node": 32}),
        (
            {"GPUS_ON_NODE": "8", "NTASKS_PER_NODE": "4", "RESTART_COUNT": "2", "JOB_PARTITION": "p",
             "CLUSTER_NAME": "c"},
            {"gpus_per_node": 8, "tasks_per_node": 4, "restarts": 2, "partition": "p", "cluster": "c"},
        ),
        (ARRAY, {**MEMBERSHIP, "array_index": 2}),
        ({**ARRAY, "ARRAY_TASK_MAX": "19"}, {**MEMBERSHIP, "array_index": None}),
    ],
)  # fmt: skip
def test_allocation_is_read_from_slurm_variables(variables: dict[str, str], expected: dict[str, Any]) -> None:
    job_variables = {"JOB_ID": "12", "JOB_NODELIST": "n1", **variables}
    allocation = queue.this_allocation({f"SLURM_{name}": value for name, value in job_variables.items()})
    assert allocation == queue.Allocation(job="12", nodes=("n1",), **expected) and queue.this_allocation({}) is None
    name = ("10_5", "job10") if "array_job" in expected else ("12", "job12")
    assert (allocation.name, allocation.folder_mark) == name
    if allocation.array_index is None:
        with pytest.raises(EncoreError, match="not evenly spaced"):
            planning.make_plan(planning.Request(name="resnet", gpus=8, system="dgxa100"), allocation=allocation)


@pytest.fixture
def array_run(bare_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run_folder.RunFolder:
    # A run with five experiments that array job 12 started; 1 and 3 have ended
    end = run_folder.ExperimentState(status="not_reached")
    run = make_run(tmp_path, [None, end, None, end, None], "-job12", "12_0", ranks_per_node=8)
    plan = prepare("docker", 2).plan
    monkeypatch.setattr(planning, "plan_of", lambda folder, allocation: plan)
    monkeypatch.setattr(queue, "is_available", lambda: False)
    return run


def test_resumed_array_has_the_remaining_experiments(
    array_run: run_folder.RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = submission.prepare_resume(array_run.path, script.Options())
    assert "#SBATCH --array=0,2,4\n" in prepared.script and f"|{array_run.path.name}\n" in prepared.script
    # 39.78 minutes on 8 GPUs are 20 on 16. Twice that for the one run of a task, plus 20 for the set-up.
    assert prepared.submission.minutes == 20 + 40
    assert submission.prepare_resume(array_run.path, script.Options(array="0-2")).submission.array == (0, 2, 4)

    with pytest.raises(EncoreError, match="--array 0-1, and 3 runs are left"):
        submission.prepare_resume(array_run.path, script.Options(array="0-1"))
    in_queue(monkeypatch, [job("30", "PENDING", comment=f"encore:{array_run.path.parent}|{array_run.path.name}")])
    for message in ("job 30 of cluster here, of .*, is queued to resume", "nothing left to run"):
        with pytest.raises(EncoreError, match=message):
            submission.prepare_resume(array_run.path, script.Options())
        for experiment in array_run.experiments():
            experiment.set_state(run_folder.ExperimentState(status="reached"))


@pytest.mark.parametrize(
    ("restarts", "status", "received", "asks_slurm", "continues", "is_killed"),
    [
        # scancel ends the job. Slurm has counted a restart after preemption or after the loss of the first node.
        ("0", "interrupted", signal.SIGTERM, False, False, False),
        ("1", "interrupted", signal.SIGTERM, False, True, False),
        ("1", "failed", 0, False, True, False),
        ("0", "failed", 0, False, False, False),
        # Warning before the time limit
        ("0", "interrupted", signal.SIGUSR1, True, True, False),
        ("1", "interrupted", signal.SIGUSR1, True, True, True),
        ("0", "interrupted", signal.SIGUSR1, True, False, True),
    ],
)
def test_requeued_job_continues(
    monkeypatch: pytest.MonkeyPatch, restarts: str, status: run_folder.Status, received: int, asks_slurm: bool,
    continues: bool, is_killed: bool,
) -> None:  # fmt: skip
    # ``is_killed``: Slurm ends scontrol with the job after it has counted the restart
    requeues: list[tuple[str, ...]] = []

    def call(*command: str) -> str:
        if command[1] == "requeue":
            requeues.append(command)
            if is_killed:
                raise EncoreError("scontrol: no reason given")
        return f"JobId=9 Requeue=1 Restarts={restarts if requeues or not is_killed else '0'} BatchFlag=1"

    monkeypatch.setattr(commands, "call", call)
    signals, hooks = Mock(received=received), Mock()
    plan = types.SimpleNamespace(allocation=queue.Allocation(job="9", nodes=("n1",)), cluster=cluster.Cluster())
    assert runner._requeue(plan, supervise.Outcome(status, "stopped"), signals, hooks) is continues  # type: ignore[arg-type]
    assert (requeues, hooks.step.called) == ([("scontrol", "requeue", "9")] * asks_slurm, continues or is_killed)


def test_full_disk_at_the_end_does_not_hide_the_outcome(
    array_run: run_folder.RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    experiment, hooks, plan = array_run.experiments()[0], Mock(), Mock(allocation=None)
    monkeypatch.setattr(run_folder.RunFolder, "note_ranks", raise_full)
    runner._note_ranks(None, array_run, experiment, hooks, {})  # type: ignore[arg-type]
    hooks.step.assert_called_once_with("the report of the ranks cannot be added to run.json: No space left on device")
    monkeypatch.setattr(runner, "clear_remains", raise_full)
    with ownership.acquire(experiment, "") as owner:
        runner._run_experiment(plan, experiment, None, supervise.Signals(), None, owner)  # type: ignore[arg-type]
    state = experiment.state()
    assert (state.status, state.reason) == ("failed", "the run folder cannot be written: No space left on device")


def test_array_task_runs_the_experiment_of_its_index_or_number(array_run: run_folder.RunFolder) -> None:
    task = queue.Allocation(job="9", nodes=("n1",), array_count=3)
    for array, number, index, expected in (("12", 5, 2, 2), ("30", 4, None, 4), ("30", 0, 0, 0)):
        allocation = replace(task, array_job=array, array_task=number, array_index=index)
        assert runner.experiments_of(array_run, allocation) == [array_run.experiments()[expected]]
    with pytest.raises(EncoreError, match="task 7 of the array has no experiment"):
        runner.experiments_of(array_run, replace(task, array_job="30", array_task=7))
    assert runner.existing_run(array_run.path.parent, submission.dummy_allocation(1, 1, 0), ["run", "resnet"]) is None


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
        (8, 5, "5 nodes requested"),
    ],
)
def test_gpus_are_spread_over_the_nodes(gpus: int | None, nodes: int | None, expected: tuple[int, int] | str) -> None:
    request = planning.Request(name="resnet", gpus=gpus, nodes=nodes)
    allocation = submission.dummy_allocation(4, 8, 0)
    with pytest.raises(EncoreError, match=expected) if isinstance(expected, str) else contextlib.nullcontext():
        assert planning.spread_over(allocation, request, cluster.Cluster(), node.this_node()) == expected


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> dict[str, cluster_checks.Partition]:
    monkeypatch.setattr(commands, "call", lambda *command: SINFO)
    return cluster_checks.partitions()


@pytest.mark.usefixtures("partitions")
@pytest.mark.parametrize(
    ("options", "names", "gpu_type", "message"),
    [
        ({"nodes": 9}, "gpu", "", "FAIL 9 nodes requested, partition gpu has 8 with 8 GPUs"),
        ({"nodes": 8}, "gpu", "", "WARN 8 nodes requested, 6 of gpu are up: the job will wait"),
        ({"nodes": 6}, "gpu", "a100", "OK gpu, 6 nodes up"),
        (
            {"gpus_per_node": 4, "nodes": 4},
            "gpu",
            "v100",
            "FAIL 4 nodes requested, partition gpu has 3 with 4 v100 GPUs",
        ),
        ({"gpus_per_node": 16}, "gpu", "", "FAIL 16 GPUs per node requested, nodes of gpu have 8"),
        ({"minutes": 3000}, "gpu", "", "FAIL 50:00:00 requested, partition gpu allows 48:00:00"),
        ({}, "old", "", "FAIL partition old is down"),
        ({"minutes": 3000}, "gpu,cpu", "", "OK cpu, 10 nodes up"),
    ],
)
def test_submission_is_compared_with_the_partition(
    options: dict[str, int], names: str, gpu_type: str, message: str
) -> None:
    values = {"nodes": 1, "gpus_per_node": 8, "minutes": 60, **options}
    job_options = script.Submission(**values, name="resnet", results=Path("/r"), arguments=())
    check = cluster_checks.check_partition(job_options, names, gpu_type)
    assert f"{check.level} {check.found}" == message


@pytest.fixture
def program_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_dry_run_reports_an_unknown_partition(program_folder: Path) -> None:
    for name, text in (("sinfo", SINFO), ("sbatch", "")):
        write_program(program_folder / name, f"cat <<'EOF'\n{text}EOF\n")
    output = run_encore("submit", "resnet", "--nodes", "2", "--partition", "gppu", "--dry-run").output
    assert re.search("(?s)FAIL partition: unknown partition 'gppu'.*did you mean 'gpu'?", output), output


def test_nodes_without_a_requirement_are_rejected(program_folder: Path) -> None:
    # Runs the command once for each of two nodes
    options = 'while [ "${1#-}" != "$1" ]; do shift; done\n'
    write_program(program_folder / "srun", options + 'SLURMD_NODENAME=n1 "$@"\nSLURMD_NODENAME=n2 "$@"\n')
    there, missing = (host_requirements.Need("readable", f"{program_folder}{end}", "copy it") for end in ("", "/x"))
    assert step.check_nodes(2, [there]) == []
    finding, hint = f"{program_folder}/x cannot be read", "copy it; or exclude the node: sbatch --exclude=NODE"
    assert step.check_nodes(2, [missing]) == [
        preflight.Check("FAIL", f"node {name}", finding, hint) for name in ("n1", "n2")
    ]
    with pytest.raises(EncoreError, match="1 of 3 nodes cannot start"):
        step.check_nodes(3, [])
