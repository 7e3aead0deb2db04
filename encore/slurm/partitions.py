"""What the cluster offers, as sinfo reports it, against what a submission asks for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from encore import names
from encore.errors import EncoreError
from encore.machine.preflight import Check
from encore.slurm import commands
from encore.slurm.script import Submission, clock


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    nodes: int
    is_up: bool  # neither down, drained nor in maintenance
    gpus: int | None = None  # GPUs that Slurm manages on a node; None: it manages none
    types: frozenset[str] = frozenset()  # types of these GPUs, where Slurm has names for them


@dataclass(frozen=True, kw_only=True)
class Partition:
    name: str
    is_default: bool
    state: str  # up, down, drain or inact: only one that is up starts jobs
    max_minutes: int | None  # None: no limit
    groups: tuple[NodeGroup, ...]

    @property
    def gpus(self) -> int | None:
        return max((group.gpus for group in self.groups if group.gpus is not None), default=None)

    def nodes(self, gpus: int = 0, kind: str = "", up: bool = False) -> int:
        """Return how many nodes have this many GPUs, of a type where one is given; ``up``: those that are up now."""
        return sum(
            group.nodes
            for group in self.groups
            if (group.is_up or not up)
            and (self.gpus is None or not gpus or ((group.gpus or 0) >= gpus and kind in ("", *group.types)))
        )


def partitions() -> dict[str, Partition]:
    # Each line of sinfo is a group of nodes.
    found: dict[str, Partition] = {}
    for line in commands.call("sinfo", "--noheader", "--format=%P|%a|%D|%t|%l|%G").splitlines():
        label, available, count, state, limit, generic = line.split("|")
        name, seconds = label.rstrip("*"), commands.seconds_of(limit)
        gpus = re.findall(r"\bgpu(?::([^,():]+(?=:\d)))?:(\d+)", generic)
        group = NodeGroup(
            nodes=int(count),
            is_up=not re.match(r"(down|drain|drng|maint|fail|boot|power)", state),
            gpus=sum(int(number) for _, number in gpus) if gpus else None,
            types=frozenset(kind for kind, _ in gpus if kind),
        )
        found[name] = Partition(
            name=name,
            is_default=label.endswith("*"),
            state=available,
            max_minutes=None if seconds is None else int(seconds // 60),
            groups=(*(found[name].groups if name in found else ()), group),
        )
    return found


def unusable(names_of: str) -> dict[str, str]:
    """Return Slurm's reason for each list of nodes that are down or drained; of partitions where some are named."""
    only = (f"--partition={names_of}",) if names_of else ()
    text = commands.call("sinfo", "--noheader", "--list-reasons", *only, "--format=%N|%T|%E")
    rows = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    return {nodes: f"{state.rstrip('*~#!%$@+^-')}: {reason.strip()}" for nodes, state, reason in rows}


def choose(known: dict[str, Partition], name: str) -> tuple[Partition, ...]:
    """Return the partitions that were named, ``debug,short``, else the default; EncoreError offers the nearest name."""
    chosen = name.split(",") if name else [each.name for each in known.values() if each.is_default][:1]
    if not chosen:
        raise EncoreError(
            "no partition given, and this cluster has no default",
            expected=f"one of {', '.join(sorted(known))}",
            hint='--partition NAME, or partition = "NAME" in cluster.toml',
        )
    for each in chosen:
        if each not in known:
            raise names.unknown("partition", each, known)
    return tuple(known[each] for each in chosen)


def check(submission: Submission, candidates: Sequence[Partition], kind: str = "") -> Check:
    """Return whether one of the partitions can ever start the job, and whether it can now; ``kind`` is of the GPUs."""
    problems = {each.name: impossible(submission, each, kind) for each in candidates}
    fitting = [each for each in candidates if problems[each.name] is None]
    first = problems[candidates[0].name]
    if not fitting and first is not None:
        return Check.of(first, "partition")
    best = max(fitting, key=lambda partition: partition.nodes(submission.gpus_per_node, kind, up=True))
    up = best.nodes(submission.gpus_per_node, kind, up=True)
    if up < submission.nodes:
        found = f"{submission.nodes} nodes asked for, {up} of {best.name} are up: the job waits for the others"
        return Check("WARN", "partition", found, "see why with: sinfo -R")
    return Check("OK", "partition", f"{best.name}, {up} nodes up")


def impossible(submission: Submission, partition: Partition, kind: str = "") -> EncoreError | None:
    name, gpus, limit = partition.name, submission.gpus_per_node, partition.max_minutes
    if partition.state != "up":
        return EncoreError(f"partition {name} is {partition.state}", hint="another partition: --partition; see sinfo")
    what = f"{kind} GPUs" if kind else "GPUs"
    if gpus and partition.gpus is not None and not partition.nodes(gpus, kind):
        return EncoreError(
            f"{gpus} {what} a node asked for, a node of {name} has {partition.gpus}",
            hint=f"--gpus-per-node {partition.gpus}" if not kind else "see the types with: sinfo --format='%P %G'",
        )
    fitting = partition.nodes(gpus, kind)
    if submission.nodes > fitting:
        return EncoreError(
            f"{submission.nodes} nodes asked for, partition {name} has {fitting}"
            + (f" with {gpus} {what}" if gpus else ""),
            hint=f"--nodes {fitting}, or another partition: sinfo" if fitting else "another partition: sinfo",
        )
    if submission.minutes is not None and limit is not None and submission.minutes > limit:
        return EncoreError(
            f"{clock(submission.minutes)} asked for, partition {name} allows {clock(limit)}",
            hint=f"--time {limit}: the run writes checkpoints, and the job resumes after a requeue",
        )
    return None
