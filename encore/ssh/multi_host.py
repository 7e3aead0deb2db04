"""A run over hosts that ssh reaches: its checks, its launcher, and the end of what is left there."""

import functools
import ipaddress
import os
import platform
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from encore import environment
from encore.job import Command
from encore.launchers import Launch
from encore.machine import binding, network, processes
from encore.machine.preflight import Check
from encore.ssh import connection, ssh_launchers
from encore.ssh.hosts import Host

AGENT = "SSH_AUTH_SOCK"  # where ssh finds the caller's keys; for the launcher, not for the ranks


def local_checks(hosts: tuple[Host, ...], launcher: str, runtime: str) -> list[Check]:
    """Return what can be checked without asking anybody."""
    first, program = hosts[0].name, "mpirun" if launcher == "mpirun" else "ssh"
    by_slurm = "--runtime host; Slurm starts containers on many nodes"
    elsewhere = f"the first host, {first}, is not this machine, where rank 0 runs"
    package = "openssh-client" if program == "ssh" else "openmpi-bin libopenmpi-dev"
    install, move = (
        f"apt-get install {package} (Debian, Ubuntu)",
        f"put {platform.node()} first, or start the run on {first}",
    )
    wrong = [
        (runtime != "host", Check("FAIL", "hosts", f"runtime {runtime} is not started over ssh", by_slurm)),
        (not is_here(first), Check("FAIL", "hosts", elsewhere, move)),
        (shutil.which(program) is None, Check("FAIL", "launcher", f"no {program} on PATH", install)),
    ]
    found = [check for is_wrong, check in wrong if is_wrong]
    return found or [Check("OK", "hosts", f"{', '.join(map(str, hosts))} by {launcher}")]


def check_mpi(launcher: str, framework: str) -> list[Check]:
    """Return whether Horovod in the framework's environment talks MPI."""
    if launcher != "mpirun" or environment.describe(framework).mpi:
        return []
    hint = "apt-get install libopenmpi-dev (Debian, Ubuntu); the next run compiles Horovod again"
    return [Check("FAIL", "launcher", "no mpicc, so Horovod is built without MPI", hint)]


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
    made = ssh_launchers.launch(launcher, for_launcher(hosts), output, interface(hosts, extra), os.geteuid() == 0)
    variables = {**chosen, **made.environment}
    if not gpus:
        return replace(made, environment=variables)
    places = binding.of_this_machine(hosts[0].slots)
    variables["OMP_NUM_THREADS"] = str(binding.threads(places))
    wrapped = binding.bound((), places, with_numactl=shutil.which("numactl") is not None)
    return replace(made, inner=(*made.inner, *wrapped), environment=variables)


def complete(command: Command, hosts: tuple[Host, ...], output: Path, caller: Mapping[str, str]) -> Command:
    """Return the command with the caller's keys, and with the end of what it may leave on the hosts."""
    keys = {AGENT: caller[AGENT]} if AGENT in caller else {}
    variables = {**command.environment, **keys}
    cleanup = connection.cleanup(output, hosts[1:]) if hosts[1:] else ()
    return replace(command, environment=variables, cleanup=cleanup)


def interface(hosts: tuple[Host, ...], extra: Mapping[str, str]) -> str:
    """Return the network interface that the ranks talk through; empty if none was found."""
    return settings(hosts, extra).get("NCCL_SOCKET_IFNAME", "").lstrip("=")
