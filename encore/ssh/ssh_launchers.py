"""Launchers for many nodes without a scheduler, over ssh: horovodrun, mpirun, and torchrun on each host.

Pure functions from the hosts to a :class:`~encore.launchers.Launch`. The first host is this machine; rank 0
runs there. All folders are at the same path on every host.
"""

import sys
import zlib
from collections.abc import Mapping

from encore import catalogue, names
from encore.errors import EncoreError
from encore.launchers import HOROVOD_BY_GLOO, HOROVOD_BY_MPI, Launch
from encore.ssh.hosts import Host

# Where torchrun's ranks meet: below the ports that Linux gives to outgoing connections (32768 and up).
FIRST_PORT, PORTS = 20000, 10000


def horovodrun(hosts: tuple[Host, ...], output: str, interface: str) -> Launch:
    """Return a launch by horovodrun, over Gloo; it reaches the other hosts by ssh and hands on its environment."""
    ranks = str(sum(host.slots for host in hosts))
    command = ["horovodrun", "--gloo", "-np", ranks, "--hostfile", f"{output}/hosts"]
    # Without it horovodrun starts a service on each host to find the interfaces that all have.
    command += ["--network-interfaces", interface] if interface else []
    return Launch("horovodrun", inner=(*command, "--output-filename", f"{output}/ranks"), environment=HOROVOD_BY_GLOO)


def mpirun(hosts: tuple[Host, ...], output: str, interface: str, as_root: bool = False) -> Launch:
    """Return a launch by OpenMPI 4.1; each variable of the job is exported by name (``-x``), and no other travels."""
    ranks = str(sum(host.slots for host in hosts))
    command = ["mpirun", *(["--allow-run-as-root"] if as_root else [])]
    command += ["-np", ranks, "--hostfile", f"{output}/hosts", "--map-by", "slot"]
    # OpenMPI binds each rank to one core, which would hold DALI's and the framework's threads together there.
    command += ["--bind-to", "none"]
    # By ssh even inside an allocation of a scheduler: the hosts were named.
    command += ["--mca", "plm", "rsh", "--mca", "plm_rsh_args", "-o BatchMode=yes"]
    # Only Horovod's control messages go over MPI on GPUs. Horovod's documentation recommends ob1.
    command += ["--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp"]
    if interface:
        command += ["--mca", "oob_tcp_if_include", interface, "--mca", "btl_tcp_if_include", interface]
    # Without the job's number in the path, as horovodrun names the files.
    command += ["--output-filename", f"{output}/ranks:nojobid"]
    return Launch("mpirun", outer=tuple(command), environment=HOROVOD_BY_MPI, export=("-x",))


def torchrun(hosts: tuple[Host, ...], output: str, interface: str) -> Launch:
    """Return torchrun on every host, started by :mod:`encore.ssh.each_host` with PET_NODE_RANK for torchrun."""
    if len({host.slots for host in hosts}) > 1:
        raise EncoreError("torchrun needs as many ranks on every host", hint="give all hosts the same slots")
    port = FIRST_PORT + zlib.crc32(output.encode()) % PORTS
    names_of_hosts = ",".join(host.name for host in hosts)
    each = (sys.executable, "-m", "encore.ssh.each_host", "--hosts", names_of_hosts, "--")
    options = (
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={hosts[0].slots}",
        f"--master-addr={hosts[0].name}",
        f"--master-port={port}",
        f"--log-dir={output}/ranks",
        "--redirects=3",
        "--no-python",
    )
    environment = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return Launch("torchrun", inner=("torchrun", *options), outer=each, environment=environment)


# The communication of the ranks that each launcher can start.
LAUNCHERS: Mapping[str, str] = {"horovodrun": "horovod", "mpirun": "horovod", "torchrun": "torch.distributed"}


def choose(name: str | None, framework: str, hosts: tuple[Host, ...]) -> str:
    """Return the launcher that was asked for, or the framework's own; empty without hosts.

    Raises:
        EncoreError: a launcher without hosts, or one that does not start this framework.
    """
    if not hosts and name is not None:
        hint = "name them: --hosts n1:4,n2:4, or --hostfile FILE"
        raise EncoreError(f"--launcher {name} without hosts", hint=hint)
    if not hosts:
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


def launch(name: str, hosts: tuple[Host, ...], output: str, interface: str, as_root: bool) -> Launch:
    """Return the launch on ``hosts``; ``interface`` is what the ranks talk through, empty for the launcher's choice."""
    if name == "mpirun":
        return mpirun(hosts, output, interface, as_root)
    return (horovodrun if name == "horovodrun" else torchrun)(hosts, output, interface)
