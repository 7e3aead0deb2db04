"""What Encore itself asks of other hosts by ssh: whether a run can take place there, and to end what is left.

User, port and key of a host belong in ``~/.ssh/config``, which mpirun and horovodrun read, too.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from encore.machine import fitness, processes
from encore.machine.fitness import SHARE, Need, question
from encore.machine.preflight import Check
from encore.ssh import each_host
from encore.ssh.hosts import Host

CONNECT_SECONDS = 5
ANSWER_SECONDS = 20.0
SOON = ("-o", f"ConnectTimeout={CONNECT_SECONDS}")  # give up soon


@dataclass(frozen=True)
class Answer:
    problems: tuple[tuple[int, str], ...] = ()
    problem: str = ""


def probe(needs: Sequence[Need], root: Path, python: Path) -> str:
    """Return the shell script that checks a host, by the Python that the ranks run on."""
    folder, program = shlex.quote(str(root)), shlex.quote(str(python))
    return (
        f"[ -f {folder}/encore/machine/on_node.py ] || {{ echo no checkout in {folder} >&2; exit 1; }}\n"
        f"[ -x {program} ] || {{ echo no Python {program} >&2; exit 1; }}\n"
        f"cd {folder} && exec {program} -m encore.machine.on_node check {shlex.quote(question(needs))}\n"
    )


def ask(argv: Sequence[str], script: str) -> Answer:
    """Return the answer of one host; ``argv`` reads the script from its standard input."""
    try:
        done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Answer(problem=f"no answer within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return Answer(problem=f"{argv[0]}: {error.strerror}")
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if answers:
        return Answer(tuple((number, text) for number, text in json.loads(answers[-1])["problems"]))
    said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return Answer(problem=said[-1])


def check(hosts: Sequence[Host], needs: Sequence[Need], root: Path, python: Path) -> list[Check]:
    script = probe(needs, root, python)
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(lambda host: ask(each_host.command(host.name, *SOON), script), hosts))
    return [check for host, answer in zip(hosts, answers, strict=True) for check in judge(host, answer, needs)]


SYMPTOMS = (
    (
        "Permission denied",
        "put your public key there (ssh-copy-id {host}); a key with a passphrase belongs into ssh-agent",
    ),
    ("Host key verification failed", "connect once and accept its key: ssh {host}"),
    ("Could not resolve hostname", "check the name, or give it an address in ~/.ssh/config"),
    ("Connection refused", "start sshd there, or give its port in ~/.ssh/config"),
    ("No such file or directory", "apt-get install openssh-client"),
    ("no checkout in", SHARE),
    ("no Python", "share the folder, or set XDG_CACHE_HOME to a shared one"),
)


def judge(host: Host, answer: Answer, needs: Sequence[Need]) -> list[Check]:
    if not answer.problem:
        return fitness.judge("host", host.name, answer.problems, needs)
    general = "check that `ssh -o BatchMode=yes {host} true` works"
    hint = next((hint for text, hint in SYMPTOMS if text in answer.problem), general)
    found = f"{host.name} cannot be reached by ssh: {answer.problem}"
    return [Check("FAIL", "hosts", found, hint.replace("{host}", host.name))]


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
    """Return the shell script that ends the ranks of the experiment in ``folder`` that are on the host it runs on."""
    ranks = "\n".join(f"{beat.host} {beat.pid}" for beat in beats)
    return f"folder={shlex.quote(str(folder))}\nranks={shlex.quote(ranks)}\n{END}"


def end_ranks(folder: Path, hosts: Sequence[str]) -> None:
    """End what is left of an experiment on ``hosts``, by the process numbers in its heartbeats."""
    beats = processes.heartbeats(folder / "heartbeat")
    if not beats:
        return
    script = end_script(folder, beats)
    with ThreadPoolExecutor(max_workers=32) as pool:
        list(pool.map(lambda host: ask(each_host.command(host, *SOON), script), hosts))


def cleanup(folder: Path, hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return the command by which a run leaves nothing on its hosts."""
    return (sys.executable, "-m", "encore.ssh.connection", str(folder), *(host.name for host in hosts))


if __name__ == "__main__":
    end_ranks(Path(sys.argv[1]), sys.argv[2:])
