"""The hosts that a run is spread over without a scheduler: ``--hosts n1:4,n2:4`` or a host file."""

import re
from dataclasses import dataclass
from pathlib import Path

from encore.errors import EncoreError

# Host names and IPv4 addresses; nothing that a program could take for an option. User, port and key belong in
# ``~/.ssh/config``.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LINE = re.compile(r"(?P<name>\S+?)(?::(?P<count>\d+)|\s+slots\s*=\s*(?P<slots>\d+)(?:\s+max[-_]slots\s*=\s*\d+)?)?")
EXAMPLE = "n1:4,n2:4"


@dataclass(frozen=True)
class Host:
    """A host by the name that ssh knows it by, with the number of ranks (GPUs) that it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse(text: str) -> tuple[Host, ...]:
    return _checked([part.strip() for part in text.split(",")], "--hosts")


def read(path: Path) -> tuple[Host, ...]:
    """Return hosts of a host file: OpenMPI's ``n1 slots=4`` or plain ``n1:4``, one a line; # begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise EncoreError(
            f"the host file {path} cannot be read: {reason}", hint=f"--hostfile FILE, or --hosts {EXAMPLE}"
        ) from error
    plain = (line.split("#", 1)[0].strip() for line in lines)
    return _checked([line for line in plain if line], f"the host file {path}")


def _checked(texts: list[str], where: str) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for text in texts:
        match = LINE.fullmatch(text)
        slots = match and (match["count"] or match["slots"])
        if match is None or not NAME.fullmatch(match["name"]) or not slots or int(slots) < 1:
            raise EncoreError(
                f"{where}: {text!r} is no host with a number of slots",
                expected="n1:4, or in a file n1 slots=4",
                hint="give each host the number of GPUs that it has for this run; a user name or a port belongs in "
                "~/.ssh/config",
            )
        if match["name"] in hosts:
            raise EncoreError(f"{where}: {match['name']} is listed twice", hint="name each host once")
        hosts[match["name"]] = Host(match["name"], int(slots))
    if not hosts:
        raise EncoreError(f"{where} names no host", hint=f"such as {EXAMPLE}")
    return tuple(hosts.values())


def layout(hosts: tuple[Host, ...], gpus: int) -> tuple[int, int]:
    """Return nodes, and ranks on each; EncoreError unless the slots are ``gpus`` in all and equal on every host."""
    total = sum(host.slots for host in hosts)
    text = ",".join(map(str, hosts))
    if total != gpus:
        raise EncoreError(
            f"{gpus} GPUs asked for, the hosts have {total} slots ({text})",
            expected="slots that add up to the GPUs",
            hint=f"ask for {total} GPUs, or change the slots",
        )
    if len({host.slots for host in hosts}) > 1:
        raise EncoreError(
            f"the hosts have different numbers of slots ({text})",
            expected="as many ranks on every host, as in every submitted configuration",
            hint="give all hosts the same number",
        )
    return len(hosts), hosts[0].slots


def as_file(hosts: tuple[Host, ...]) -> str:
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)
