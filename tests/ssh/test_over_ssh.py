"""Real training over ssh: two hosts on the loopback, the second behind an sshd with a host name of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from encore import paths
from encore.machine import processes
from tests.conftest import Encore, losses, only_run, records
from tests.trainings import HANGS, PATIENCE, assert_none_left, held_port, wait_for_step, wait_until

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

HOSTS = "encore-first:1,encore-second:1"  # names that only ssh's configuration knows, of 127.0.0.1 and 127.0.0.2
# Two ranks on two cores: with one thread each, and without OpenMPI's waiting in a loop.
QUICK = (
    "--env", "OMP_NUM_THREADS=1", "--env", "OMPI_MCA_mpi_yield_when_idle=1",
    "--set", "epochs=1", "--set", "warmup_epochs=0", "--set", "quality_target=1.0", "--seed", "7",
)  # fmt: skip


@dataclass(frozen=True)
class Sshd:
    """An sshd of the test's own on 127.0.0.2, and the PATH on which ``ssh`` finds it."""

    path: str
    host: str  # name of the machine behind it


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    held = held_port("127.0.0.2")
    port = held.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.2\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\n",
        encoding="utf-8",
    )
    (folder / "ssh_config").write_text(
        "Host encore-first\n  HostName 127.0.0.1\nHost encore-second 127.0.0.2\n"
        f"  HostName 127.0.0.2\n  Port {port}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  LogLevel ERROR\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking accept-new\n",
        encoding="utf-8",
    )
    # ssh reads the configuration of the user in /etc/passwd, whatever HOME says: the test brings its own ssh.
    programs = folder / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {NEEDED["ssh"]} -F {folder}/ssh_config "$@"\n', encoding="utf-8")
    (programs / "ssh").chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    command = [str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]
    with (folder / "sshd.log").open("wb") as log:
        child = subprocess.Popen([*another_host(), *command], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Sshd(f"{programs}{os.pathsep}{os.environ['PATH']}", wait_for(programs / "ssh", folder / "sshd.log"))
    finally:
        processes.end(processes.family(child.pid), grace_seconds=2.0)
        child.wait(timeout=PATIENCE)
        held.close()


def another_host() -> tuple[str, ...]:
    """Return what gives a command another host name, which Gloo can resolve; nothing where the kernel forbids it."""
    command = ("unshare", "--uts", "sh", "-c", 'hostname localhost && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode != 0:
        return ()
    return command


def wait_for(ssh: Path, log: Path) -> str:
    end = time.monotonic() + PATIENCE
    while True:
        done = subprocess.run([ssh, "127.0.0.2", "uname -n"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
        assert time.monotonic() < end, done.stderr + log.read_text(encoding="utf-8")
        time.sleep(0.1)


def started(sshd: Sshd, few_digits: Path, results: Path, launcher: str, *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "encore.cli.app", "run", "resnet", "2", "--hosts", HOSTS, "--launcher", launcher,
        "--runtime", "host", "--data", str(few_digits), "--results", str(results), *QUICK, *more,
    ]  # fmt: skip
    variables = {**os.environ, "PATH": sshd.path, "SECRET_OF_THE_SHELL": "hush"}
    return subprocess.Popen(
        command, cwd=paths.ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(folder: Path) -> list[psutil.Process]:
    return [psutil.Process(beat.pid) for beat in processes.heartbeats(folder / "heartbeat")]


def ssh_sessions(sshd: Sshd) -> list[psutil.Process]:
    """Return the clients of this test's sshd alone: others may test on the same machine."""
    configuration = str(Path(sshd.path.partition(os.pathsep)[0]).parent / "ssh_config")
    return [each for each in psutil.process_iter(["cmdline"]) if configuration in (each.info["cmdline"] or [])]


@pytest.fixture(scope="module")
def by_mpirun(sshd: Sshd, few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("mpirun")
    child = started(sshd, few_digits, results, "mpirun")
    output = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 3, output
    return only_run(results)


def test_mpirun_trains_on_two_hosts(by_mpirun: Path, sshd: Sshd) -> None:
    beats = processes.heartbeats(by_mpirun / "experiment_0" / "heartbeat")
    assert [beat.host for beat in beats] == [os.uname().nodename, sshd.host]
    assert len(records(by_mpirun / "experiment_0" / "metrics.jsonl", "step")) == 12
    assert (by_mpirun / "experiment_0" / "hosts").read_text() == "127.0.0.1 slots=1\nencore-second slots=1\n"
    assert {path.name for path in (by_mpirun / "experiment_0" / "ranks").iterdir()} >= {"rank.0", "rank.1"}
    assert "hush" not in (by_mpirun / "run.json").read_text(encoding="utf-8")
    assert not ssh_sessions(sshd)


def test_horovodrun_stops_resumes_and_trains_the_same(
    sshd: Sshd, few_digits: Path, tmp_path: Path, encore: Encore, by_mpirun: Path
) -> None:
    child = started(sshd, few_digits, tmp_path, "horovodrun")
    folder = wait_for_step(child, tmp_path, 5)
    ranks = ranks_of(folder)
    assert [beat.host for beat in processes.heartbeats(folder / "heartbeat")] == [
        os.uname().nodename,
        sshd.host,
    ]
    child.send_signal(signal.SIGTERM)
    output = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 130, output
    assert "a checkpoint was written" in output
    assert_none_left(ranks)
    encore("run", "--resume", str(folder.parent), environment={"PATH": sshd.path}, code=3)
    whole = losses(by_mpirun / "experiment_0" / "metrics.jsonl")
    assert losses(folder / "metrics.jsonl") == pytest.approx(whole, rel=1e-3)
    assert not ssh_sessions(sshd)


def test_a_rank_that_hangs_on_the_other_host_is_named_and_ended(sshd: Sshd, few_digits: Path, tmp_path: Path) -> None:
    child = started(sshd, few_digits, tmp_path, "horovodrun", *HANGS)
    folder = wait_for_step(child, tmp_path, 3)
    ranks = ranks_of(folder)
    ranks[1].send_signal(signal.SIGSTOP)
    output = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 1, output
    assert "hangs" in output and sshd.host in output
    wait_until(lambda: not any(map(processes.is_running, ranks)), "the ranks' end")
    assert not ssh_sessions(sshd)


@pytest.mark.slow
def test_the_same_command_runs_on_every_host(sshd: Sshd, tmp_path: Path) -> None:
    show = 'echo "$(uname -n) $PET_NODE_RANK ${SECRET_OF_THE_SHELL-none}" > {}/$PET_NODE_RANK; exit $PET_NODE_RANK'
    command = [sys.executable, "-m", "encore.ssh.each_host", "--hosts", "no-such-host.invalid,127.0.0.2", "--"]
    variables: dict[str, Any] = {"PATH": sshd.path, "PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(
        [*command, "sh", "-c", show.replace("{}", str(tmp_path))], env=variables, check=False, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert (tmp_path / "1").read_text() == f"{sshd.host} 1 none\n"


def test_no_host_is_asked_for_a_password(sshd: Sshd, encore: Encore, few_digits: Path, tmp_path: Path) -> None:
    arguments = ("--hosts", "127.0.0.1:1,127.0.0.3:1", "--data", str(few_digits), "--results", str(tmp_path))
    done = encore("run", "resnet", "2", *arguments, environment={"PATH": sshd.path}, timeout=PATIENCE, code=2)
    assert "127.0.0.3 cannot be reached by ssh" in done.stderr and "hint:" in done.stderr
