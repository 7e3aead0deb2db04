"""What Encore itself asks of other hosts by ssh: whether a run can take place there, and to end what is left.

User, port and key of a host belong in ``~/.ssh/config``, which mpirun and horovodrun heed as well.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from encore.machine import processes
from encore.machine.preflight import Check
from encore.ssh.hosts import Host

CONNECT_SECONDS = 5
ANSWER_SECONDS = 20.0
OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
"""Never ask for a password, and give up soon."""

SCRIPT = r"""
say() { printf '%s=%s\n' "$1" "$2"; }
is() { if [ "$1" "$2" ]; then echo yes; else echo no; fi; }
say code "$(cd "$root" 2>/dev/null && find benchmarks -name '*.py' | LC_ALL=C sort | xargs cat 2>/dev/null | cksum)"
say data "$(cksum <"$data/dataset.json" 2>/dev/null)"
say results "$(is -e "$mark")"
say python "$(is -x "$python")"
say interface "$([ -z "$interface" ] && echo yes || is -e "/sys/class/net/$interface")"
say gpus "$(ls /proc/driver/nvidia/gpus 2>/dev/null | wc -l)"
"""
"""Asks a host, with nothing but POSIX tools."""


@dataclass(frozen=True)
class Wanted:
    """What has to be the same on every host."""

    root: Path
    data: Path
    mark: Path
    """A file in the results folder that was written a moment ago."""
    python: Path
    interface: str = ""
    """Network interface that the ranks talk through; empty: not chosen."""
    gpus: bool = False
    """Whether each rank takes a GPU."""


@dataclass(frozen=True)
class Answer:
    """What a host said; ``problem`` is ssh's message where it said nothing."""

    told: Mapping[str, str]
    problem: str = ""


def command(host: str, remote: str) -> tuple[str, ...]:
    """The ssh command that lets the shell of ``host`` run ``remote``."""
    return ("ssh", *OPTIONS, host, remote)


def probe(wanted: Wanted) -> str:
    """The shell script that asks a host for what is ``wanted``."""
    given = {
        "root": str(wanted.root),
        "data": str(wanted.data),
        "mark": str(wanted.mark),
        "python": str(wanted.python),
        "interface": wanted.interface,
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items()) + SCRIPT


def ask(argv: Sequence[str], script: str) -> Answer:
    """The answer of one host; ``argv`` reads the script from its standard input."""
    try:
        done = subprocess.run(
            argv, input=script, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer({}, f"no answer within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return Answer({}, f"{argv[0]}: {error.strerror}")
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if "gpus" not in told:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Answer({}, lines[-1] if lines else f"exit code {done.returncode}")
    return Answer(told)


def check(hosts: Sequence[Host], wanted: Wanted) -> list[Check]:
    """Asks all hosts at once, and this machine for comparison."""
    script = probe(wanted)
    here = ask(("sh", "-s"), script)
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(lambda host: ask(command(host.name, "sh -s"), script), hosts))
    found = [judge(host, answer, here, wanted) for host, answer in zip(hosts, answers, strict=True)]
    failed = [each for each in found if each is not None]
    told = ", ".join(host.name for host in hosts)
    return failed or [Check("OK", "hosts", f"{told}: reachable, with the same code, data and results")]


SYMPTOMS = (
    (
        "Permission denied",
        "put your public key there (ssh-copy-id {host}); a key with a passphrase belongs into ssh-agent",
    ),
    ("Host key verification failed", "connect once by hand and accept its key: ssh {host}"),
    ("Could not resolve hostname", "check the name, or give it an address in ~/.ssh/config"),
    ("Connection refused", "start sshd there, or give its port in ~/.ssh/config"),
    ("No such file or directory", "apt-get install openssh-client"),
)


def judge(host: Host, answer: Answer, here: Answer, wanted: Wanted) -> Check | None:
    """The first thing that is wrong with a host."""
    name = host.name
    if answer.problem:
        fitting = [remedy for text, remedy in SYMPTOMS if text in answer.problem]
        remedy = (fitting or ["check that `ssh -o BatchMode=yes {host} true` works"])[0].format(host=name)
        return Check("FAIL", "hosts", f"{name} cannot be reached by ssh: {answer.problem}", remedy)
    told = answer.told
    share = "share the folder over the network, at the same path on all hosts"
    faults = (
        ("code", f"{name} has not this checkout in {wanted.root}", share),
        ("data", f"{name} has not this data set in {wanted.data}", f"{share}, or copy it there"),
        ("results", f"{name} does not see the results folder {wanted.mark.parent}", share),
        (
            "python",
            f"{name} has no {wanted.python}",
            "share the folder, or set XDG_CACHE_HOME to a shared one",
        ),
        (
            "interface",
            f"{name} has no network interface {wanted.interface}",
            "name the right ones: --env NCCL_SOCKET_IFNAME=...",
        ),
    )
    for key, found, remedy in faults:
        if told.get(key) != here.told.get(key):
            return Check("FAIL", "hosts", found, remedy)
    if wanted.gpus and int(told["gpus"]) < host.slots:
        return Check(
            "FAIL", "hosts", f"{name} has {told['gpus']} GPUs and {host.slots} slots", "give it fewer slots"
        )
    return None


# -- what is left ------------------------------------------------------------------------------------------

END = r"""
for number in TERM KILL; do
  while read -r host pid; do
    [ "$host" = "$(uname -n)" ] || continue
    # The number may belong to another process by now: a rank of this run has its folder as an argument.
    tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF -- "$folder" || continue
    kill -"$number" "$pid" 2>/dev/null && again=1
  done <<EOF
$ranks
EOF
  [ -n "${again-}" ] && [ "$number" = TERM ] && sleep 2
done
exit 0
"""


def end_script(folder: Path, beats: Sequence[processes.Heartbeat]) -> str:
    """The shell script that ends the ranks of the experiment in ``folder`` that are on the host it runs on."""
    ranks = "\n".join(f"{beat.host} {beat.pid}" for beat in beats)
    return f"folder={shlex.quote(str(folder))}\nranks={shlex.quote(ranks)}\n{END}"


def end_ranks(folder: Path, hosts: Sequence[str]) -> None:
    """End what is left of an experiment on ``hosts``, by the process numbers in its signs of life."""
    beats = processes.heartbeats(folder / "heartbeat")
    if not beats:
        return
    script = end_script(folder, beats)
    with ThreadPoolExecutor(max_workers=32) as pool:
        list(pool.map(lambda host: ask(command(host, "sh -s"), script), hosts))


def cleanup(folder: Path, hosts: Sequence[Host]) -> tuple[str, ...]:
    """The command by which a run leaves nothing on its hosts."""
    return (sys.executable, "-m", "encore.ssh.connection", str(folder), *(host.name for host in hosts))


if __name__ == "__main__":
    end_ranks(Path(sys.argv[1]), sys.argv[2:])
