"""Host lists, the launchers' exact commands for 1 to 32 nodes, and what is refused before the start."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue, paths
from encore.configuration import resolve
from encore.containers import renderers, runtimes
from encore.containers.runtimes import Target
from encore.errors import EncoreError
from encore.job import training_job
from encore.machine import fitness, node, processes
from encore.machine.fitness import Need
from encore.machine.preflight import Check
from encore.run import planning
from encore.ssh import each_host, hosts, multi_host
from encore.ssh.hosts import Host
from tests.conftest import Encore

PAIR = (Host("n1", 4), Host("n2", 4))


def test_host_lists_and_files(tmp_path: Path) -> None:
    assert hosts.parse("n1:4, n2.cluster:4") == (Host("n1", 4), Host("n2.cluster", 4))
    file, three = tmp_path / "hosts", "# the first rack\nn1 slots=4\n\nn2:4 # spare\nn3  slots = 4 max_slots=8\n"
    for text, found in ((three, (*PAIR, Host("n3", 4))), (hosts.as_file(PAIR), PAIR)):
        file.write_text(text, encoding="utf-8")
        assert hosts.read(file) == found


@pytest.mark.parametrize(
    "text", ["", "n1", "n1:0", "n1:four", "n1:4,,n2:4", "-oProxyCommand=x:4", "n1;reboot:4", "me@n1:4", "n1:4,n1:4"]
)
def test_bad_host_lists_are_refused(text: str) -> None:
    with pytest.raises(EncoreError, match="n1 is listed twice" if text == "n1:4,n1:4" else "no host with a number of"):
        hosts.parse(text)


def test_bad_host_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nobody\n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, expected in (("empty", "names no host"), ("binary", "is no text"), ("none", "No such file")):
        with pytest.raises(EncoreError, match=expected):
            hosts.read(tmp_path / name)
    assert hosts.layout(PAIR, 8) == (2, 4)
    with pytest.raises(EncoreError, match="different numbers of slots"):
        hosts.layout((Host("n1", 4), Host("n2", 2)), 6)


# -- commands ----------------------------------------------------------------------------------------------


def rendered(launcher: str, nodes: int) -> str:
    """Return the command of a run on this many nodes with 8 GPUs each, a word group a line."""
    over = tuple(Host(f"n{number + 1}", 8) for number in range(nodes))
    choice = catalogue.choose("resnet")
    resolved = resolve(choice, catalogue.find_system(choice, "dgxa100", "v0.7"), nodes, 8, [])
    launch = multi_host.started_by(launcher, over, "/out", "ib0" if nodes > 1 else "", False)
    where = (Path("/data"), Path("/out"))
    job = training_job(resolved, *where, {"NCCL_DEBUG": "INFO"}, node.cores(), launch)
    command = renderers.host(job, Path("/env/bin/python"), {"PATH": "/usr/bin", "SECRET": "hush"})
    lines: list[list[str]] = [[]]
    for word in command.argv:
        if word.startswith("-") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    variables = [f"{name}={value}" for name, value in sorted(command.environment.items())]
    text = "\n".join([*variables, *(shlex.join(line) for line in lines)]) + "\n"
    return text.replace(sys.executable, "PYTHON").replace(str(paths.ROOT), "ROOT")


@pytest.mark.parametrize("nodes", [1, 2, 4, 32])
@pytest.mark.parametrize("launcher", sorted(multi_host.LAUNCHERS))
def test_commands_are_pinned(launcher: str, nodes: int, recorded: Callable[[str, Any], None]) -> None:
    text = rendered(launcher, nodes)
    recorded(f"{launcher}_{nodes}.txt", text)
    assert rendered(launcher, nodes) == text and "hush" not in text


def test_a_launcher_fits_its_framework() -> None:
    asked = ((None, "mxnet"), (None, "pytorch"), (None, "tensorflow"), ("mpirun", "tensorflow"))
    chosen = [multi_host.choose(*each, PAIR) for each in asked]
    assert chosen == ["horovodrun", "torchrun", "horovodrun", "mpirun"]
    assert multi_host.choose(None, "mxnet", ()) == ""
    with pytest.raises(EncoreError, match="mpirun"):
        multi_host.choose("mpirn", "mxnet", PAIR)


def test_ranks_of_gpus_are_bound_and_root_may_start_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    here = (Host("127.0.0.1", 2), Host("127.0.0.2", 2))
    bound, free = (multi_host.launch("mpirun", here, "/out", {}, gpus) for gpus in (True, False))
    assert ["OMP_NUM_THREADS" in each.environment for each in (bound, free)] == [True, False]
    assert "--allow-run-as-root" in free.outer


def test_names_of_the_ssh_configuration_are_known_and_the_first_host_is_not_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n[ $1 = -G ] && exec echo hostname 127.0.0.1\ncat >/dev/null\nexit 255\n", encoding="utf-8"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pair = (Host("my-node.invalid", 1), Host("other.invalid", 1))
    assert multi_host.is_here("my-node.invalid")
    assert multi_host.for_launcher(pair) == (Host("127.0.0.1", 1), pair[1])
    assert each_host.run(["my-node.invalid"], ("true",)) == 0
    assert each_host.run(["my-node.invalid", "other.invalid"], ("true",)) != 0


def test_each_host_gets_its_number_and_the_variables() -> None:
    text = each_host.script(("/usr/bin/env",), {"A": "x'y", "SSH_AUTH_SOCK": "/s"}, "/", 1)
    done = subprocess.run(["sh", "-s"], input=text, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["A=x'y", "PET_NODE_RANK=1"]


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "hint"),
    [
        ("me@n1: Permission denied (publickey).", "ssh-copy-id n1"),
        ("Host key verification failed.", "ssh n1"),
        ("ssh: Could not resolve hostname n1: Name or service not known", "~/.ssh/config"),
        ("ssh: connect to host n1 port 22: Connection refused", "start sshd"),
        ("no answer within 20 s", "ssh -o BatchMode=yes n1 true"),
    ],
)
def test_a_host_out_of_reach_has_a_hint(problem: str, hint: str) -> None:
    (check,) = multi_host.judge(PAIR[0], multi_host.Answer(problem=problem), [])
    assert problem in check.found and hint in check.hint


def asked(needs: list[Need], root: Path = paths.ROOT, python: str = sys.executable) -> multi_host.Answer:
    return multi_host.ask(("sh", "-s"), multi_host.probe(needs, root, Path(python)))


def test_a_host_is_asked_through_a_plain_shell(tmp_path: Path) -> None:
    needs = [Need("readable", "/it's not there", "copy it"), Need("interface", "lo", ""), Need("executable", "/x", "")]
    found = "/it's not there cannot be read; no /x"
    assert multi_host.judge(PAIR[0], asked(needs), needs) == [Check("FAIL", "host n1", found, "copy it")]
    assert multi_host.judge(PAIR[0], asked(needs[1:2]), needs) == []
    for answer, found, hint in (
        (asked([], tmp_path), f"no checkout in {tmp_path}", fitness.SHARE),
        (
            asked([], python="/no/python"),
            "no Python /no/python",
            "share the folder, or set XDG_CACHE_HOME to a shared one",
        ),
    ):
        wrong = f"n1 cannot be reached by ssh: {found}"
        assert multi_host.judge(PAIR[0], answer, []) == [Check("FAIL", "hosts", wrong, hint)]
    assert multi_host.ask(("no-such-program",), "").problem == "no-such-program: No such file or directory"


@pytest.mark.slow
def test_only_ranks_of_the_run_are_ended(tmp_path: Path) -> None:
    folder = tmp_path / "experiment_0"
    command = [sys.executable, "-c", "import time; time.sleep(60)", "--output"]
    rank, other = (subprocess.Popen([*command, name]) for name in (str(folder), f"{folder}0"))
    try:
        me = os.uname().nodename
        beats = [
            processes.Heartbeat(rank=n, pid=pid, host=me, step=1, time=0.0)
            for n, pid in enumerate((rank.pid, other.pid))
        ]
        elsewhere = [processes.Heartbeat(rank=2, pid=rank.pid, host="another-host", step=1, time=0.0)]
        subprocess.run(["sh", "-s"], input=multi_host.end_script(folder, elsewhere), text=True, check=True)
        assert rank.poll() is None
        subprocess.run(["sh", "-s"], input=multi_host.end_script(folder, beats), text=True, check=True)
        assert rank.wait(timeout=5) == -15
        assert other.poll() is None
    finally:
        for child in (rank, other):
            child.kill()
            child.wait()


def test_the_first_host_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(over: tuple[Host, ...], launcher: str, runtime: str) -> list[str]:
        return [f"{each.level} {each.found}" for each in multi_host.local_checks(over, launcher, runtime)]

    here = (Host("127.0.0.1", 1), Host("127.0.0.2", 1))
    assert multi_host.all_loopback(here)
    monkeypatch.setattr(multi_host.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert said(here, "mpirun", "host") == ["OK 127.0.0.1:1, 127.0.0.2:1 by mpirun"]
    assert said(here, "mpirun", "docker") == ["FAIL runtime docker is not started over ssh"]
    monkeypatch.setattr(multi_host.shutil, "which", lambda name: None)
    assert [said(here, launcher, "host") for launcher in ("mpirun", "torchrun")] == [
        ["FAIL no mpirun on PATH"], ["FAIL no ssh on PATH"],
    ]  # fmt: skip
    monkeypatch.setattr(multi_host, "addresses", lambda name: frozenset({"192.0.2.77"}))
    assert said(PAIR, "horovodrun", "host")[0] == "FAIL the first host, n1, is not this machine, where rank 0 runs"
    assert not multi_host.all_loopback(PAIR)


def test_hosts_take_the_runtime_that_can_serve_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtimes, "choose", lambda runtime, *rest: Target(runtime=f"chosen {runtime}"))
    for asked, hosts_, expected in (("auto", PAIR, "host"), ("docker", PAIR, "chosen docker"), ("auto", (), "chosen")):
        request = planning.Request(name="resnet", gpus=8, hosts=hosts_, runtime=asked, results=tmp_path)
        assert planning.make_plan(request).target.runtime.startswith(expected)


def test_a_host_that_cannot_be_reached_is_named(
    mxnet_python: Path, encore: Encore, digits: Path, tmp_path: Path
) -> None:
    """With the framework's environment, which is asked for before the hosts."""
    where = ("--data", str(digits), "--results", str(tmp_path / "results"))
    done = encore("run", "resnet", "2", *where, "--hosts", "127.0.0.1:1,no-such-host.invalid:1", code=2)
    assert "no-such-host.invalid cannot be reached by ssh" in done.stderr and "Traceback" not in done.stderr
