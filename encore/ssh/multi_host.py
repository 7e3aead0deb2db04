"""Runs on multiple hosts over ssh: launchers, preflight checks and cleanup.

A host's user, port and key belong in ``~/.ssh/config``, which mpirun and horovodrun also read.

The launchers (horovodrun, mpirun, torchrun) are pure functions from hosts to :class:`~encore.launchers.Launch`. The
first host is this machine and runs rank 0. All folders have the same path on every host.
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

from encore import catalogue, environment, paths
from encore.errors import EncoreError, unknown_name
from encore.job import Command
from encore.launchers import HOROVOD_BY_GLOO, HOROVOD_BY_MPI, Launch
from encore.machine import binding, host_requirements, network, openmetrics, processes
from encore.machine.host_requirements import SHARE, Need, question
from encore.machine.preflight import Check
from encore.ssh import each_host
from encore.ssh.hosts import Host

# Rendezvous ports of torchrun, below the Linux range of ephemeral ports (32768 and up).
FIRST_PORT, PORTS = 20000, 10000


def launch_with(name: str, hosts: tuple[Host, ...], output: str, interface: str, as_root: bool = False) -> Launch:
    """Return the launch on ``hosts``. ``interface``: network interface of the ranks; empty: chosen by the launcher."""
    hostfile, ranks = f"{output}/hosts", str(sum(host.slots for host in hosts))
    if name == "horovodrun":
        # With Gloo: horovodrun connects to the other hosts by ssh and forwards its environment. Without an interface it
        # starts a service on every host to find the common interfaces.
        interfaces = ("--network-interfaces", interface) if interface else ()
        gloo = (
            "horovodrun",
            "--gloo",
            "-np",
            ranks,
            "--hostfile",
            hostfile,
            *interfaces,
            "--output-filename",
            f"{output}/ranks",
        )
        return Launch("horovodrun", inner=gloo, environment=HOROVOD_BY_GLOO)
    if name == "mpirun":
        # OpenMPI 4.1. Variables must be exported by name (-x). By default OpenMPI binds every rank to one core, which
        # would confine the threads of DALI and the framework to it. plm rsh: use ssh even inside a scheduler's
        # allocation, because the hosts were given. On GPUs only Horovod's control messages use MPI; the Horovod
        # documentation recommends ob1. nojobid: same file names as horovodrun.
        tcp_options = ("oob_tcp_if_include", "btl_tcp_if_include") if interface else ()
        mpi = (
            "mpirun", *(["--allow-run-as-root"] if as_root else []), "-np", ranks, "--hostfile", hostfile,
            "--map-by", "slot", "--bind-to", "none",
            "--mca", "plm", "rsh", "--mca", "plm_rsh_args", "-o BatchMode=yes",
            "--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp",
            *(word for option in tcp_options for word in ("--mca", option, interface)),
            "--output-filename", f"{output}/ranks:nojobid",
        )  # fmt: skip
        return Launch("mpirun", outer=mpi, environment=HOROVOD_BY_MPI, export=("-x",))
    # encore.ssh.each_host starts torchrun on every host and sets PET_NODE_RANK.
    names = ",".join(host.name for host in hosts)
    return Launch(
        "torchrun",
        inner=(
            "torchrun",
            f"--nnodes={len(hosts)}",
            f"--nproc-per-node={hosts[0].slots}",
            f"--master-addr={hosts[0].name}",
            f"--master-port={FIRST_PORT + zlib.crc32(output.encode()) % PORTS}",
            f"--log-dir={output}/ranks",
            "--redirects=3",
            "--no-python",
        ),
        outer=(sys.executable, "-m", "encore.ssh.each_host", "--hosts", names, "--"),
        environment={"GLOO_SOCKET_IFNAME": interface} if interface else {},
    )


# Launcher -> communication of the frameworks that it supports.
LAUNCHERS: Mapping[str, str] = {"horovodrun": "horovod", "mpirun": "horovod", "torchrun": "torch.distributed"}


def choose(name: str | None, framework: str, hosts: tuple[Host, ...]) -> str:
    """Return the launcher ``name``, or the default of the framework; empty without hosts.

    Raises:
        EncoreError: a launcher without hosts, or a launcher that does not support the framework.
    """
    if not hosts:
        if name is not None:
            raise EncoreError(f"--launcher {name} without hosts", hint="add --hosts n1:4,n2:4, or --hostfile FILE")
        return ""
    communication = catalogue.framework(framework).communication
    fitting = [launcher for launcher, starts in LAUNCHERS.items() if starts == communication]
    if name is None:
        return fitting[0]
    if name not in LAUNCHERS:
        raise unknown_name("launcher", name, LAUNCHERS)
    if name not in fitting:
        raise EncoreError(
            f"{name} does not support {framework}",
            expected=f"one of {', '.join(fitting)}",
            hint=f"--launcher {fitting[0]}",
        )
    return name


AGENT = "SSH_AUTH_SOCK"  # where ssh finds the caller's keys; for the launcher, not for the ranks


def local_checks(hosts: tuple[Host, ...], launcher: str, runtime: str) -> list[Check]:
    first, checks = hosts[0].name, []
    program, package = ("mpirun", "openmpi-bin libopenmpi-dev") if launcher == "mpirun" else ("ssh", "openssh-client")
    if runtime != "host":
        by_slurm = "--runtime host; multi-node containers need Slurm"
        checks.append(Check("FAIL", "hosts", f"runtime {runtime} is not supported over ssh", by_slurm))
    if not is_local(first):
        move = f"put {platform.node()} first, or start the run on {first}"
        checks.append(Check("FAIL", "hosts", f"the first host, {first}, is not this machine, where rank 0 runs", move))
    if shutil.which(program) is None:
        checks.append(Check("FAIL", "launcher", f"no {program} on PATH", f"apt-get install {package} (Debian, Ubuntu)"))
    return checks or [Check("OK", "hosts", f"{', '.join(map(str, hosts))} by {launcher}")]


def check_mpi(launcher: str) -> list[Check]:
    problem = environment.mpi_problem() if launcher == "mpirun" else ""
    hint = "apt-get install libopenmpi-dev (Debian, Ubuntu); the next run rebuilds Horovod"
    return [Check("FAIL", "launcher", f"{problem}, so Horovod is built without MPI", hint)] if problem else []


def addresses(name: str) -> frozenset[str]:
    """Return a host's IP addresses, resolved by DNS or ``~/.ssh/config``; empty if unknown."""
    return _resolve(name) or _resolve(ssh_hostname(name))


# DNS is slow for unknown names, and a study's dry run resolves every host at every point.
@functools.cache
def _resolve(name: str) -> frozenset[str]:
    try:
        return frozenset(str(info[4][0]) for info in socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return frozenset()


def ssh_hostname(name: str) -> str:
    """Return the HostName in ``~/.ssh/config``, or ``name``."""
    match = re.search(r"^hostname (\S+)$", processes.output_of("ssh", "-G", name, seconds=10), re.MULTILINE)
    return match[1] if match else name


def with_first_resolved(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Replace the name of the first host by one that the other hosts can resolve; ssh uses the given names."""
    first = hosts[0]
    return hosts if _resolve(first.name) else (replace(first, name=ssh_hostname(first.name)), *hosts[1:])


def is_local(name: str) -> bool:
    local_addresses = {
        address.address.split("%")[0]
        for interface_addresses in psutil.net_if_addrs().values()
        for address in interface_addresses
    }
    return name == platform.node() or bool(addresses(name) & local_addresses)


def all_loopback(hosts: tuple[Host, ...]) -> bool:
    """Return whether all hosts are addresses of this machine's loopback, as in a trial run."""
    host_addresses = [address.split("%")[0] for host in hosts for address in addresses(host.name)]
    return bool(host_addresses) and all(ipaddress.ip_address(address).is_loopback for address in host_addresses)


def network_variables(hosts: tuple[Host, ...], extra: Mapping[str, str]) -> dict[str, str]:
    """Network variables of the ranks; values in ``extra`` take precedence."""
    variables = network.variables(network.read(), 1 if all_loopback(hosts) else len(hosts))
    return {**variables, **{name: value for name, value in extra.items() if name in variables}}


def launch(launcher: str, hosts: tuple[Host, ...], output: str, extra: Mapping[str, str], gpus: bool) -> Launch:
    """Launch all ranks with network variables; on GPUs, bind ranks to the cores local to the GPU.

    The topology is read on this machine; the other hosts are assumed to be identical.
    """
    network_settings = network_variables(hosts, extra)
    ranks = launch_with(launcher, with_first_resolved(hosts), output, interface(hosts, extra), os.geteuid() == 0)
    variables = {**network_settings, **ranks.environment}
    if not gpus:
        return replace(ranks, environment=variables)
    bindings = binding.of_this_machine(hosts[0].slots)
    variables["OMP_NUM_THREADS"] = str(binding.threads(bindings))
    wrapped = binding.wrap_command((), bindings, with_numactl=shutil.which("numactl") is not None)
    return replace(ranks, inner=(*ranks.inner, *wrapped), environment=variables)


def add_cleanup(command: Command, hosts: tuple[Host, ...], output: Path, caller: Mapping[str, str]) -> Command:
    """Add the caller's ssh agent, cleanup and telemetry to the command."""
    return replace(
        command,
        environment={**command.environment, **({AGENT: caller[AGENT]} if AGENT in caller else {})},
        cleanup=cleanup(output, hosts[1:]) if hosts[1:] else (),
        samplers=samplers(hosts[1:], output / "telemetry.jsonl"),
    )


def shell_command(host: str) -> tuple[str, ...]:
    """Return the ssh command that runs one more argument, a shell command, in the checkout on ``host``."""
    return ("ssh", "-o", "BatchMode=yes", *CONNECT_TIMEOUT, host, f"cd {shlex.quote(str(paths.ROOT))} && exec")


def samplers(hosts: Sequence[Host], telemetry: Path) -> tuple[tuple[str, ...], ...]:
    """Return the commands that sample the remote hosts into files beside ``telemetry``."""
    openmetrics_target = os.environ.get(openmetrics.VARIABLE, "")
    argv = (
        "env",
        f"{openmetrics.VARIABLE}={openmetrics_target}",
        sys.executable,
        "-m",
        "encore.machine.telemetry",
        str(telemetry),
    )
    return tuple((*shell_command(host.name), shlex.join(argv)) for host in hosts if not is_local(host.name))


def interface(hosts: tuple[Host, ...], extra: Mapping[str, str]) -> str:
    return network_variables(hosts, extra).get("NCCL_SOCKET_IFNAME", "").lstrip("=")


# -- preflight checks of the hosts -----------------------------------------------------------------------------

ANSWER_SECONDS = 20.0
CONNECT_TIMEOUT = ("-o", "ConnectTimeout=5")  # seconds


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
    """Run a script on a host; ``argv`` reads it from standard input."""
    try:
        done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Answer(problem=f"no answer within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return Answer(problem=f"{argv[0]}: {error.strerror}")
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if answers:
        return Answer(tuple((number, text) for number, text in json.loads(answers[-1])["problems"]))
    errors = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return Answer(problem=errors[-1])


def check_hosts(hosts: Sequence[Host], needs: Sequence[Need], root: Path, python: Path) -> list[Check]:
    script = probe(needs, root, python)
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(lambda host: ask(each_host.command(host.name, *CONNECT_TIMEOUT), script), hosts))
    return [check for host, answer in zip(hosts, answers, strict=True) for check in checks_of(host, answer, needs)]


SYMPTOMS = (
    (
        "Permission denied",
        "put your public key there (ssh-copy-id {host}); add a key with a passphrase to ssh-agent",
    ),
    ("Host key verification failed", "accept the host key: ssh {host}"),
    ("Could not resolve hostname", "check the name, or set HostName in ~/.ssh/config"),
    ("Connection refused", "start sshd there, or set Port in ~/.ssh/config"),
    ("No such file or directory", "apt-get install openssh-client"),
    ("no checkout in", SHARE),
    ("no Python", "share the folder, or set XDG_CACHE_HOME to a shared folder"),
)


def checks_of(host: Host, answer: Answer, needs: Sequence[Need]) -> list[Check]:
    if not answer.problem:
        return host_requirements.failed_checks("host", host.name, answer.problems, needs)
    general = "check that `ssh -o BatchMode=yes {host} true` works"
    hint = next((hint for text, hint in SYMPTOMS if text in answer.problem), general)
    message = f"{host.name} cannot be reached by ssh: {answer.problem}"
    return [Check("FAIL", "hosts", message, hint.replace("{host}", host.name))]


# -- cleanup ------------------------------------------------------------------------------------------------------

KILL_LOOP = r"""
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


def kill_script(folder: Path, beats: Sequence[processes.Heartbeat]) -> str:
    """Return the shell script that kills the local ranks of the experiment in ``folder``."""
    ranks = "\n".join(f"{beat.host} {beat.pid} {beat.started}" for beat in beats)
    return f"folder={shlex.quote(str(folder))}\nranks={shlex.quote(ranks)}\n{KILL_LOOP}"


def kill_ranks(folder: Path, hosts: Sequence[str]) -> None:
    """Kill an experiment's remaining ranks on ``hosts``, using the PIDs in the heartbeat files."""
    beats = processes.heartbeats(folder / "heartbeat")
    if not beats:
        return
    script = kill_script(folder, beats)
    with ThreadPoolExecutor(max_workers=32) as pool:
        list(pool.map(lambda host: ask(each_host.command(host, *CONNECT_TIMEOUT), script), hosts))


def cleanup(folder: Path, hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return the command that kills remaining ranks on the hosts."""
    return (sys.executable, "-m", "encore.ssh.multi_host", str(folder), *(host.name for host in hosts))


if __name__ == "__main__":
    kill_ranks(Path(sys.argv[1]), sys.argv[2:])
