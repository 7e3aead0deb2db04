"""A run over hosts that ssh reaches: its launcher, whether it can take place there, and the end of what is left.

User, port and key of a host belong in ``~/.ssh/config``, which mpirun and horovodrun read, too.

The launchers, horovodrun, mpirun and torchrun on each host, are pure functions from the hosts to a
:class:`~encore.launchers.Launch`. The first host is this machine; rank 0 runs there. All folders are at the same path
on every host.
"""

import functools
import ipaddress
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from encore import catalogue, environment, names, paths
from encore.errors import EncoreError
from encore.job import Command
from encore.launchers import HOROVOD_BY_GLOO, HOROVOD_BY_MPI, Launch
from encore.machine import binding, host_requirements, network, openmetrics, processes
from encore.machine.host_requirements import SHARE, Need, question
from encore.machine.preflight import Check
from encore.ssh import each_host
from encore.ssh.hosts import Host

# Where torchrun's ranks meet: below the ports that Linux gives to outgoing connections (32768 and up).
FIRST_PORT, PORTS = 20000, 10000


def started_by(name: str, hosts: tuple[Host, ...], output: str, interface: str, as_root: bool = False) -> Launch:
    """Return the launch on ``hosts``; ``interface`` is what the ranks talk through, empty for the launcher's choice."""
    over, ranks = f"{output}/hosts", str(sum(host.slots for host in hosts))
    if name == "horovodrun":
        # Over Gloo; it reaches the other hosts by ssh and hands on its environment. Without an interface it starts a
        # service on each host to find those that all have.
        by = ("--network-interfaces", interface) if interface else ()
        gloo = ("horovodrun", "--gloo", "-np", ranks, "--hostfile", over, *by, "--output-filename", f"{output}/ranks")
        return Launch("horovodrun", inner=gloo, environment=HOROVOD_BY_GLOO)
    if name == "mpirun":
        # OpenMPI 4.1; each variable of the job is exported by name (-x), and no other travels. OpenMPI binds each rank
        # to one core, which would hold DALI's and the framework's threads together there. By ssh even inside an
        # allocation of a scheduler: the hosts were named. Only Horovod's control messages go over MPI on GPUs; its
        # documentation recommends ob1. Files are named as horovodrun names them, without the job's number.
        through = ("oob_tcp_if_include", "btl_tcp_if_include") if interface else ()
        mpi = (
            "mpirun", *(["--allow-run-as-root"] if as_root else []), "-np", ranks, "--hostfile", over,
            "--map-by", "slot", "--bind-to", "none",
            "--mca", "plm", "rsh", "--mca", "plm_rsh_args", "-o BatchMode=yes",
            "--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp",
            *(word for option in through for word in ("--mca", option, interface)),
            "--output-filename", f"{output}/ranks:nojobid",
        )  # fmt: skip
        return Launch("mpirun", outer=mpi, environment=HOROVOD_BY_MPI, export=("-x",))
    # On every host, started by encore.ssh.each_host with PET_NODE_RANK for torchrun.
    every = ",".join(host.name for host in hosts)
    torchrun = (
        "torchrun",
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={hosts[0].slots}",
        f"--master-addr={hosts[0].name}",
        f"--master-port={FIRST_PORT + zlib.crc32(output.encode()) % PORTS}",
        f"--log-dir={output}/ranks",
        "--redirects=3",
        "--no-python",
    )
    return Launch(
        "torchrun",
        inner=torchrun,
        outer=(sys.executable, "-m", "encore.ssh.each_host", "--hosts", every, "--"),
        environment={"GLOO_SOCKET_IFNAME": interface} if interface else {},
    )


# The communication of the ranks that each launcher can start.
LAUNCHERS: Mapping[str, str] = {"horovodrun": "horovod", "mpirun": "horovod", "torchrun": "torch.distributed"}


def choose(name: str | None, framework: str, hosts: tuple[Host, ...]) -> str:
    """Return the launcher that was asked for, or the framework's own; empty without hosts.

    Raises:
        EncoreError: a launcher without hosts, or one that does not start this framework.
    """
    if not hosts:
        if name is not None:
            hint = "name them: --hosts n1:4,n2:4, or --hostfile FILE"
            raise EncoreError(f"--launcher {name} without hosts", hint=hint)
        return ""
    communication = catalogue.framework(framework).communication
    fitting = [each for each, starts in LAUNCHERS.items() if starts == communication]
    if name is None:
        return fitting[0]
    if name not in LAUNCHERS:
        raise names.unknown("launcher", name, LAUNCHERS)
    if name not in fitting:
        raise EncoreError(
            f"{name} does not start {framework}",
            expected=f"one of {', '.join(fitting)}",
            hint=f"--launcher {fitting[0]}",
        )
    return name


AGENT = "SSH_AUTH_SOCK"  # where ssh finds the caller's keys; for the launcher, not for the ranks


def local_checks(hosts: tuple[Host, ...], launcher: str, runtime: str) -> list[Check]:
    first, found = hosts[0].name, []
    program, package = ("mpirun", "openmpi-bin libopenmpi-dev") if launcher == "mpirun" else ("ssh", "openssh-client")
    if runtime != "host":
        by_slurm = "--runtime host; Slurm starts containers on many nodes"
        found.append(Check("FAIL", "hosts", f"runtime {runtime} is not started over ssh", by_slurm))
    if not is_here(first):
        move = f"put {platform.node()} first, or start the run on {first}"
        elsewhere = f"the first host, {first}, is not this machine, where rank 0 runs"
        found.append(Check("FAIL", "hosts", elsewhere, move))
    if shutil.which(program) is None:
        found.append(Check("FAIL", "launcher", f"no {program} on PATH", f"apt-get install {package} (Debian, Ubuntu)"))
    return found or [Check("OK", "hosts", f"{', '.join(map(str, hosts))} by {launcher}")]


def check_mpi(launcher: str) -> list[Check]:
    problem = environment.mpi_problem() if launcher == "mpirun" else ""
    hint = "apt-get install libopenmpi-dev (Debian, Ubuntu); the next run compiles Horovod again"
    return [Check("FAIL", "launcher", f"{problem}, so Horovod is built without MPI", hint)] if problem else []


def addresses(name: str) -> frozenset[str]:
    """Return IP addresses of a host, whose name may be known to ssh alone; empty if nobody knows it."""
    return _resolved(name) or _resolved(by_ssh(name))


# A name that no server knows is answered late, and a dry run of a study asks for each of its hosts at each point.
@functools.cache
def _resolved(name: str) -> frozenset[str]:
    try:
        return frozenset(str(each[4][0]) for each in socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return frozenset()


def by_ssh(name: str) -> str:
    """Return the host name that ``~/.ssh/config`` gives to a name; the name itself where it gives none."""
    match = re.search(r"^hostname (\S+)$", processes.output_of("ssh", "-G", name, seconds=10), re.MULTILINE)
    return match[1] if match else name


def for_launcher(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Return the hosts, the first by a name that the others can look up; ssh finds those by the names given."""
    first = hosts[0]
    return hosts if _resolved(first.name) else (replace(first, name=by_ssh(first.name)), *hosts[1:])


def is_here(name: str) -> bool:
    mine = {each.address.split("%")[0] for found in psutil.net_if_addrs().values() for each in found}
    return name == platform.node() or bool(addresses(name) & mine)


def all_loopback(hosts: tuple[Host, ...]) -> bool:
    """Return whether all hosts are addresses of this machine's loopback, as in a trial run."""
    found = [address.split("%")[0] for host in hosts for address in addresses(host.name)]
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def settings(hosts: tuple[Host, ...], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the network settings of the ranks; ``extra`` is what the caller chose."""
    found = network.variables(network.read(), 1 if all_loopback(hosts) else len(hosts))
    return {**found, **{name: value for name, value in extra.items() if name in found}}


def launch(launcher: str, hosts: tuple[Host, ...], output: str, extra: Mapping[str, str], gpus: bool) -> Launch:
    """Return all ranks on the hosts, with network settings, and on GPUs bound to the cores of their GPU.

    Read on this machine; the other hosts are taken to be alike.
    """
    chosen = settings(hosts, extra)
    made = started_by(launcher, for_launcher(hosts), output, interface(hosts, extra), os.geteuid() == 0)
    variables = {**chosen, **made.environment}
    if not gpus:
        return replace(made, environment=variables)
    places = binding.of_this_machine(hosts[0].slots)
    variables["OMP_NUM_THREADS"] = str(binding.threads(places))
    wrapped = binding.bound((), places, with_numactl=shutil.which("numactl") is not None)
    return replace(made, inner=(*made.inner, *wrapped), environment=variables)


def complete(command: Command, hosts: tuple[Host, ...], output: Path, caller: Mapping[str, str]) -> Command:
    """Return the command with the caller's keys, and with the end of what it may leave on the hosts."""
    variables = {**command.environment, **({AGENT: caller[AGENT]} if AGENT in caller else {})}
    left = cleanup(output, hosts[1:]) if hosts[1:] else ()
    return replace(
        command, environment=variables, cleanup=left, samplers=samplers(hosts[1:], output / "telemetry.jsonl")
    )


def by_shell(host: str) -> tuple[str, ...]:
    """Return ssh to a host in the checkout there; a command for its shell follows, as one word."""
    return ("ssh", "-o", "BatchMode=yes", *SOON, host, f"cd {shlex.quote(str(paths.ROOT))} && exec")


def samplers(hosts: Sequence[Host], telemetry: Path) -> tuple[tuple[str, ...], ...]:
    """Return a command for each host that is another machine, which samples it next to the file ``telemetry``."""
    named = os.environ.get(openmetrics.VARIABLE, "")
    argv = ("env", f"{openmetrics.VARIABLE}={named}", sys.executable, "-m", "encore.machine.telemetry", str(telemetry))
    return tuple((*by_shell(host.name), shlex.join(argv)) for host in hosts if not is_here(host.name))


def interface(hosts: tuple[Host, ...], extra: Mapping[str, str]) -> str:
    return settings(hosts, extra).get("NCCL_SOCKET_IFNAME", "").lstrip("=")


# -- what Encore itself asks of other hosts ------------------------------------------------------------------

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
        f"[ -f {folder}/encore/machine/host_actions.py ] || {{ echo no checkout in {folder} >&2; exit 1; }}\n"
        f"[ -x {program} ] || {{ echo no Python {program} >&2; exit 1; }}\n"
        f"cd {folder} && exec {program} -m encore.machine.host_actions check {shlex.quote(question(needs))}\n"
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


def check_hosts(hosts: Sequence[Host], needs: Sequence[Need], root: Path, python: Path) -> list[Check]:
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
        return host_requirements.failed_checks("host", host.name, answer.problems, needs)
    general = "check that `ssh -o BatchMode=yes {host} true` works"
    hint = next((hint for text, hint in SYMPTOMS if text in answer.problem), general)
    found = f"{host.name} cannot be reached by ssh: {answer.problem}"
    return [Check("FAIL", "hosts", found, hint.replace("{host}", host.name))]


# -- what is left ------------------------------------------------------------------------------------------

END = r"""
for number in TERM KILL; do
  while read -r host pid ticks; do
    [ "$host" = "$(uname -n)" ] && [ -O "/proc/$pid" ] || continue
    # The PID may belong to another process by now: compare its start time and arguments.
    [ "$(sed 's/.*) //' "/proc/$pid/stat" | cut -d ' ' -f 20)" = "$ticks" ] || continue
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
    ranks = "\n".join(f"{beat.host} {beat.pid} {beat.started}" for beat in beats)
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
    return (sys.executable, "-m", "encore.ssh.multi_host", str(folder), *(host.name for host in hosts))


if __name__ == "__main__":
    end_ranks(Path(sys.argv[1]), sys.argv[2:])
