"""What the cluster offers, as sinfo reports it, against what a submission asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from encore import names
from encore.errors import EncoreError
from encore.slurm import commands
from encore.slurm.script import Submission, clock


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition."""

    name: str
    is_default: bool
    nodes: int
    """Nodes that are not down, drained or in maintenance."""
    max_minutes: int | None
    """None: no limit."""
    gpus: int | None
    """Most GPUs that Slurm manages on a node; None: it manages none."""


def partitions() -> dict[str, Partition]:
    """Return every partition by name; several lines of sinfo may be of one."""
    text = commands.call("sinfo", "--noheader", "--format=%P|%D|%t|%l|%G")
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        label, count, state, limit, generic = line.split("|")
        name = label.rstrip("*")
        usable = 0 if re.match(r"(down|drain|drng|maint|fail|boot|power)", state) else int(count)
        gpus = [int(number) for number in re.findall(r"gpu(?::[^,():]+)?:(\d+)", generic)]
        before = found.get(name)
        found[name] = Partition(
            name=name,
            is_default=label.endswith("*"),
            nodes=usable + (before.nodes if before else 0),
            max_minutes=parse_limit(limit),
            gpus=max([*gpus, *([before.gpus] if before and before.gpus else [])], default=None),
        )
    return found


def parse_limit(text: str) -> int | None:
    """Return the whole minutes of ``1-02:03:04``, ``02:03:04`` or ``03:04``; None for ``infinite``."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes


def choose(known: dict[str, Partition], name: str) -> Partition:
    """Return the partition that was named, else the default; EncoreError offers the nearest name."""
    if name:
        if name not in known:
            raise names.unknown("partition", name, known)
        return known[name]
    defaults = [partition for partition in known.values() if partition.is_default]
    if not defaults:
        raise EncoreError(
            "no partition given, and this cluster has no default",
            expected=f"one of {', '.join(sorted(known))}",
            remedy='--partition NAME, or partition = "NAME" in cluster.toml',
        )
    return defaults[0]


def refuse_impossible(submission: Submission, partition: Partition) -> None:
    """Refuse what would wait in the queue for ever."""
    if submission.nodes > partition.nodes:
        raise EncoreError(
            f"{submission.nodes} nodes asked for, partition {partition.name} has {partition.nodes} that are up",
            remedy=f"--nodes {partition.nodes}, or another partition: sinfo" if partition.nodes else "sinfo -R",
        )
    if submission.gpus_per_node and partition.gpus is not None and submission.gpus_per_node > partition.gpus:
        raise EncoreError(
            f"{submission.gpus_per_node} GPUs a node asked for, a node of {partition.name} has {partition.gpus}",
            remedy=f"--gpus-per-node {partition.gpus}",
        )
    limit = partition.max_minutes
    if submission.minutes is not None and limit is not None and submission.minutes > limit:
        raise EncoreError(
            f"{clock(submission.minutes)} asked for, partition {partition.name} allows {clock(limit)}",
            remedy=f"--time {limit}: the run writes checkpoints, and the job resumes after a requeue",
        )
