"""Host lists, commands of the launchers, and checks of the hosts before the start."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from encore.containers import renderers
from encore.errors import EncoreError
from encore.job import training_job
from encore.machine import host_requirements, node, preflight, processes
from encore.ssh import each_host, hosts, multi_host
from encore.ssh.hosts import Host
from tests.machine.machines import write_program
from tests.trainings import PATIENCE, resolved

PAIR = (Host("n1", 4), Host("n2", 4))


def test_host_lists_and_files(tmp_path: Path) -> None:
    assert hosts.parse("n1:4, n2.cluster:4") == (Host("n1", 4), Host("n2.cluster", 4))
    file, three = tmp_path / "hosts", "# the first rack\nn1 slots=4\n\nn2:4 # spare\nn3  slots = 4 max_slots=8\n"
    for text, expected in ((three, (*PAIR, Host("n3", 4))), (hosts.as_file(PAIR), PAIR)):
        file.write_text(text, encoding="utf-8")
        assert hosts.read(file) == expected
    assert hosts.layout(PAIR, 8) == (2, 4)
    with pytest.raises(EncoreError, match="different numbers of slots"):
        hosts.layout((Host("n1", 4), Host("n2", 2)), 6)


INVALID = ["", "n1", "n1:0", "n1:four", "n1:4,,n2:4", "-oProxyCommand=x:4", "n1;reboot:4", "me@n1:4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [*((text, "is not a host with a number of") for text in INVALID), ("n1:4,n1:4", "n1 is listed twice")],
)
def test_invalid_host_list_is_rejected(text: str, message: str) -> None:
    with pytest.raises(EncoreError, match=message):
        hosts.parse(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"# nobody\n", "lists no hosts"), (b"\xff\xfe\x00", "is not a text file"), (None, "No such file")],
)
def test_invalid_host_file_is_rejected(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(EncoreError, match=message):
        hosts.read(tmp_path / "hosts")


# -- commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 32])
@pytest.mark.parametrize("launcher", sorted(multi_host.LAUNCHERS))
def test_commands_match_the_golden_files(launcher: str, nodes: int, recorded: Callable[[str, Any], None]) -> None:
    # 8 GPUs a node; a line for each variable, then one for each option
    names = tuple(Host(f"n{number + 1}", 8) for number in range(nodes))
    configuration = resolved("resnet", "dgxa100", "v0.7", 8, nodes=nodes)
    launch = multi_host.launch_with(launcher, names, "/out", "ib0" if nodes > 1 else "", False)
    job = training_job(configuration, Path("/data"), Path("/out"), {"NCCL_DEBUG": "INFO"}, node.cores(), launch)
    # Of these the ranks get only PATH, HOME and LANG
    caller = {"PATH": "/usr/bin", "SECRET": "hush", "HOME": "/home/me", "LANG": "C", "LD_PRELOAD": "x.so"}
    command = renderers.host(job, Path("/env/bin/python"), {**caller, "NCCL_ALGO": "Tree"})
    variables = [f"{name}={value}" for name, value in sorted(command.environment.items())]
    text = "\n".join([*variables, shlex.join(command.argv).replace(" -", "\n-")])
    recorded(f"{launcher}_{nodes}.txt", text.replace(sys.executable, "PYTHON").replace(str(paths.ROOT), "ROOT"))


@pytest.mark.parametrize(
    ("launcher", "framework", "over", "expected"),
    [
        (None, "mxnet", PAIR, "horovodrun"),
        (None, "pytorch", PAIR, "torchrun"),
        (None, "tensorflow", PAIR, "horovodrun"),
        ("mpirun", "tensorflow", PAIR, "mpirun"),
        (None, "mxnet", (), ""),
    ],
)
def test_launcher_of_a_framework(launcher: str | None, framework: str, over: tuple[Host, ...], expected: str) -> None:
    assert multi_host.choose(launcher, framework, over) == expected
    with pytest.raises(EncoreError, match="mpirun"):
        multi_host.choose("mpirn", framework, PAIR)


def test_first_host_is_found_in_the_ssh_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An ssh that cannot connect: commands on the first host must run without it.
    write_program(tmp_path / "ssh", "[ $1 = -G ] && exec echo hostname 127.0.0.1\ncat >/dev/null\nexit 255\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pair = (Host("my-node.invalid", 1), Host("other.invalid", 1))
    assert multi_host.is_local(pair[0].name)
    assert multi_host.with_first_resolved(pair) == (Host("127.0.0.1", 1), pair[1])
    assert [bool(each_host.run([host.name for host in pair[:count]], ("true",))) for count in (1, 2)] == [False, True]


# -- checks ------------------------------------------------------------------------------------------------


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
def test_unreachable_host_has_a_hint(problem: str, hint: str) -> None:
    (check,) = multi_host.checks_of(PAIR[0], multi_host.Answer(problem=problem), [])
    assert problem in check.found and hint in check.hint


MISSING = host_requirements.Need("readable", "/it's not there", "copy it")
UNREACHABLE = "n1 cannot be reached by ssh: "


@pytest.mark.parametrize(
    ("needs", "options", "expected"),
    [
        ([host_requirements.Need("interface", "lo", "")], {}, []),
        (
            [MISSING, host_requirements.Need("interface", "lo", ""), host_requirements.Need("executable", "/x", "")],
            {},
            [preflight.Check("FAIL", "host n1", "/it's not there cannot be read; no /x", "copy it")],
        ),
        (
            [],
            {"root": Path("/no/root")},
            [preflight.Check("FAIL", "hosts", f"{UNREACHABLE}no checkout in /no/root", host_requirements.SHARE)],
        ),
        (
            [],
            {"python": Path("/no/python")},
            [
                preflight.Check(
                    "FAIL",
                    "hosts",
                    f"{UNREACHABLE}no Python /no/python",
                    "share the folder, or set XDG_CACHE_HOME to a shared folder",
                )
            ],
        ),
    ],
)
def test_host_is_probed_with_a_plain_shell(
    needs: list[host_requirements.Need], options: dict[str, Path], expected: list[preflight.Check]
) -> None:
    probe = multi_host.probe(needs, **{"root": paths.ROOT, "python": Path(sys.executable), **options})
    assert multi_host.checks_of(PAIR[0], multi_host.ask(("sh", "-s"), probe), needs) == expected


def test_plain_shell_gets_its_number_and_variables() -> None:
    text = each_host.script(("/usr/bin/env",), {"A": "x'y", "SSH_AUTH_SOCK": "/s"}, "/", 1)
    output = subprocess.run(["sh", "-s"], input=text, capture_output=True, text=True, check=True).stdout
    assert sorted(output.splitlines()) == ["A=x'y", "PET_NODE_RANK=1"]
    assert multi_host.ask(("no-such-program",), "").problem == "no-such-program: No such file or directory"


@pytest.mark.slow
def test_end_script_kills_only_ranks_of_the_run(tmp_path: Path) -> None:
    folder, here = tmp_path / "experiment_0", os.uname().nodename
    command = [sys.executable, "-c", "import time; time.sleep(600)", "--output"]
    # A rank, those of another host and of another run, and a process that got the number of a rank
    outputs, names, later = (folder, folder, f"{folder}0", folder), (here, "another-host", here, here), (0, 0, 0, 1)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(subprocess.Popen([*command, str(output)])) for output in outputs]
        for child in children:
            stack.callback(child.kill)
        started = [processes.start_ticks(child.pid) + ticks for child, ticks in zip(children, later, strict=True)]
        beats = [
            processes.Heartbeat(rank=0, pid=child.pid, host=name, step=1, time=0.0, started=ticks)
            for child, name, ticks in zip(children, names, started, strict=True)
        ]
        subprocess.run(["sh", "-s"], input=multi_host.kill_script(folder, beats), text=True, check=True)
        assert children[0].wait(timeout=PATIENCE) == -15
        assert [child.poll() for child in children[1:]] == [None] * 3


LOOPBACK = (Host("127.0.0.1", 1), Host("127.0.0.2", 1))


@pytest.mark.parametrize(
    ("over", "launcher", "runtime", "programs", "first"),
    [
        (LOOPBACK, "mpirun", "host", "/usr/bin", "OK 127.0.0.1:1, 127.0.0.2:1 by mpirun"),
        (LOOPBACK, "mpirun", "docker", "/usr/bin", "FAIL runtime docker is not supported over ssh"),
        (LOOPBACK, "mpirun", "host", None, "FAIL no mpirun on PATH"),
        (LOOPBACK, "torchrun", "host", None, "FAIL no ssh on PATH"),
        (PAIR, "horovodrun", "host", None, "FAIL the first host, n1, is not this machine, where rank 0 runs"),
    ],
)
def test_checks_of_this_machine(
    over: tuple[Host, ...], launcher: str, runtime: str, programs: str | None, first: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(multi_host.shutil, "which", lambda name: programs and f"{programs}/{name}")
    if over is PAIR:
        monkeypatch.setattr(multi_host, "addresses", lambda name: frozenset({"192.0.2.77"}))
    checks = multi_host.local_checks(over, launcher, runtime)
    assert f"{checks[0].level} {checks[0].found}" == first and (over is PAIR or len(checks) == 1)
    assert multi_host.all_loopback(over) is (over is LOOPBACK)
