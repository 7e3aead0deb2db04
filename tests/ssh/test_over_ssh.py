"""Training over ssh: two hosts on the loopback interface, the second one an sshd with another host name."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from encore.machine import processes
from tests.conftest import Encore, losses, only_run, records
from tests.machine.machines import write_program
from tests.results.result_logs import write_files
from tests.trainings import HANGS, PATIENCE, Started, assert_none_left, held_port, in_background, wait_until

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
NEEDED = {
    "sshd": SSHD,
    "ssh": shutil.which("ssh"),
    "mpirun": shutil.which("mpirun"),
    "mpicc": shutil.which("mpicc"),
}
MISSING = [name for name, path in NEEDED.items() if path is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"NOTHING WAS TRAINED OVER SSH: no {', '.join(MISSING)}; "
    "apt-get install openssh-server openssh-client openmpi-bin libopenmpi-dev",
)

HOSTS = "encore-first:1,encore-second:1"  # names of 127.0.0.1 and 127.0.0.2 in the ssh configuration
# Two ranks on two cores: one thread each, and OpenMPI yields the core while it waits.
QUICK = (
    "--env", "OMP_NUM_THREADS=1", "--env", "OMPI_MCA_mpi_yield_when_idle=1",
    "--set", "epochs=1", "--set", "warmup_epochs=0", "--set", "quality_target=1.0", "--seed", "7",
)  # fmt: skip


@dataclass(frozen=True)
class Sshd:
    """An sshd on 127.0.0.2."""

    path: str  # PATH with an ssh that uses the configuration of the test
    host: str  # host name of commands that it starts


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    reserved = held_port("127.0.0.2")
    port = reserved.getsockname()[1]
    write_files(folder, {
        "sshd_config":
            f"Port {port}\nListenAddress 127.0.0.2\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            "PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\n",
        "ssh_config":
            "Host encore-first\n  HostName 127.0.0.1\nHost encore-second 127.0.0.2\n"
            f"  HostName 127.0.0.2\n  Port {port}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  LogLevel ERROR\n  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking accept-new\n",
    })  # fmt: skip
    # ssh ignores HOME and reads the configuration of the user in /etc/passwd, so an ssh with -F comes first on PATH.
    programs = write_program(folder / "ssh", f'exec {NEEDED["ssh"]} -F {folder}/ssh_config "$@"\n').parent
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    command = [*other_host_name(), str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]
    with (folder / "sshd.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def host_name() -> str:
        show = [programs / "ssh", "127.0.0.2", "uname -n"]
        return subprocess.run(show, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()

    try:
        wait_until(lambda: bool(host_name()), f"sshd; see {folder}/sshd.log")
        yield Sshd(f"{programs}{os.pathsep}{os.environ['PATH']}", host_name())
    finally:
        processes.end(processes.family(child.pid), grace_seconds=2.0)
        child.wait(timeout=PATIENCE)
        reserved.close()


def other_host_name() -> tuple[str, ...]:
    # Return a prefix that sets another host name, which Gloo can resolve; empty if the kernel forbids it
    command = ("unshare", "--uts", "sh", "-c", 'hostname localhost && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode != 0:
        return ()
    return command


def start_run(sshd: Sshd, data: Path, results: Path, launcher: str, *options: str) -> Started:
    hosts = ("--hosts", HOSTS, "--launcher", launcher, "--runtime", "host")
    folders = ("--data", str(data), "--results", str(results))
    variables = {"PATH": sshd.path, "SECRET_OF_THE_SHELL": "hush"}
    command = ("run", "resnet", "2", *hosts, *folders, *QUICK, *options)
    return Started(in_background(*command, environment=variables), results)


def assert_no_ssh_session(sshd: Sshd) -> None:
    # Check that no ssh client with the configuration of the test runs; other tests may use ssh at the same time
    configuration = f"{sshd.path.partition(os.pathsep)[0]}/ssh_config"
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if configuration in command]


@pytest.fixture(scope="module")
def mpirun_run(sshd: Sshd, few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("mpirun")
    start_run(sshd, few_digits, results, "mpirun").ended(3)
    return only_run(results)


def test_mpirun_trains_on_two_hosts(mpirun_run: Path, sshd: Sshd) -> None:
    experiment = mpirun_run / "experiment_0"
    assert [beat.host for beat in processes.heartbeats(experiment / "heartbeat")] == [os.uname().nodename, sshd.host]
    assert len(records(experiment / "metrics.jsonl", "step")) == 12
    assert (experiment / "hosts").read_text() == "127.0.0.1 slots=1\nencore-second slots=1\n"
    assert {path.name for path in (experiment / "ranks").iterdir()} >= {"rank.0", "rank.1"}
    assert "hush" not in (mpirun_run / "run.json").read_text(encoding="utf-8")
    assert_no_ssh_session(sshd)


@pytest.mark.long
def test_horovodrun_resumes_with_the_same_losses(
    sshd: Sshd, few_digits: Path, tmp_path: Path, encore: Encore, mpirun_run: Path
) -> None:
    started = start_run(sshd, few_digits, tmp_path, "horovodrun")
    folder = started.wait_for_step(5)
    ranks = started.ranks(folder)
    assert [beat.host for beat in processes.heartbeats(folder / "heartbeat")] == [os.uname().nodename, sshd.host]
    started.process.send_signal(signal.SIGTERM)
    assert "a checkpoint was written" in started.ended(130)
    assert_none_left(ranks)
    encore("run", "--resume", str(folder.parent), environment={"PATH": sshd.path}, code=3)
    uninterrupted = losses(mpirun_run / "experiment_0" / "metrics.jsonl")
    assert losses(folder / "metrics.jsonl") == pytest.approx(uninterrupted, rel=1e-3)
    assert_no_ssh_session(sshd)


@pytest.mark.long
def test_hanging_rank_on_the_other_host_is_ended(sshd: Sshd, few_digits: Path, tmp_path: Path) -> None:
    started = start_run(sshd, few_digits, tmp_path, "horovodrun", *HANGS)
    ranks = started.ranks(started.wait_for_step(3))
    ranks[1].send_signal(signal.SIGSTOP)
    output = started.ended(1)
    assert "hangs" in output and sshd.host in output, output
    wait_until(lambda: not any(map(processes.is_running, ranks)), "the end of the ranks")
    assert_no_ssh_session(sshd)


@pytest.mark.parametrize("host", ["127.0.0.3", "no-such-host.invalid"])
def test_unreachable_host_is_reported_without_asking_for_a_password(
    host: str, sshd: Sshd, encore: Encore, few_digits: Path, tmp_path: Path
) -> None:
    arguments = ("--hosts", f"127.0.0.1:1,{host}:1", "--data", str(few_digits), "--results", str(tmp_path))
    process = encore("run", "resnet", "2", *arguments, environment={"PATH": sshd.path}, timeout=PATIENCE, code=2)
    text = process.stderr
    assert f"{host} cannot be reached by ssh" in text and "hint:" in text and "Traceback" not in text, text
