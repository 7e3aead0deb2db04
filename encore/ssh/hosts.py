"""The hosts that a run is spread over without a scheduler: ``--hosts n1:4,n2:4`` or a host file."""

import re
from dataclasses import dataclass
from pathlib import Path

from encore.errors import EncoreError

# Host names and IPv4 addresses, which cannot be mistaken for options. User, port and key belong in ``~/.ssh/config``.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LINE = re.compile(r"(?P<name>\S+?)(?::(?P<count>\d+)|\s+slots\s*=\s*(?P<slots>\d+)(?:\s+max[-_]slots\s*=\s*\d+)?)?")
EXAMPLE = "n1:4,n2:4"


@dataclass(frozen=True)
class Host:
    """Host name for ssh and number of ranks (GPUs)."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse(text: str) -> tuple[Host, ...]:
    return _validate([part.strip() for part in text.split(",")], "--hosts")


def read(path: Path) -> tuple[Host, ...]:
    """Read a host file: OpenMPI's ``n1 slots=4`` or ``n1:4``, one host per line; # starts a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not a text file"
        raise EncoreError(
            f"the host file {path} cannot be read: {reason}", hint=f"--hostfile FILE, or --hosts {EXAMPLE}"
        ) from error
    plain = (line.split("#", 1)[0].strip() for line in lines)
    return _validate([line for line in plain if line], f"the host file {path}")


def _validate(texts: list[str], source: str) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for text in texts:
        match = LINE.fullmatch(text)
        slots = match and (match["count"] or match["slots"])
        if match is None or not NAME.fullmatch(match["name"]) or not slots or int(slots) < 1:
            raise EncoreError(
                f"{source}: {text!r} is not a host with a number of slots",
                expected="n1:4, or in a file n1 slots=4",
                hint="give the number of GPUs of every host; put user names and ports into ~/.ssh/config",
            )
        if match["name"] in hosts:
            raise EncoreError(f"{source}: {match['name']} is listed twice", hint="list every host once")
        hosts[match["name"]] = Host(match["name"], int(slots))
    if not hosts:
        raise EncoreError(f"{source} lists no hosts", hint=f"such as {EXAMPLE}")
    return tuple(hosts.values())


def layout(hosts: tuple[Host, ...], gpus: int) -> tuple[int, int]:
    """Return the number of nodes and ranks per node. Raise EncoreError unless slots are equal with sum ``gpus``."""
    total = sum(host.slots for host in hosts)
    text = ",".join(map(str, hosts))
    if total != gpus:
        raise EncoreError(
            f"{gpus} GPUs requested, the hosts have {total} slots ({text})",
            expected="slots that add up to the GPUs",
            hint=f"request {total} GPUs, or change the slots",
        )
    if len({host.slots for host in hosts}) > 1:
        raise EncoreError(
            f"the hosts have different numbers of slots ({text})",
            expected="the same number of ranks on every host, as in all submitted configurations",
            hint="use the same number of slots on all hosts",
        )
    return len(hosts), hosts[0].slots


def as_file(hosts: tuple[Host, ...]) -> str:
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)
