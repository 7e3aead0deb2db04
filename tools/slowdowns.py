"""Harm trainings on two ranks of this machine, and count how often the cause is named first: a measurement, not a test.

    $ .venv/bin/python -m tools.slowdowns WORK --unharmed 6              # runs of the configuration as it is
    $ .venv/bin/python -m tools.slowdowns WORK --faults few-cores,load   # harmed ones, compared with all of those

As root, for cgroups and network namespaces. Every run stays in WORK; without options the table of all of them is
printed, and how often each unharmed run compared with another one gets a cause.
"""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import typer

from encore import paths
from encore.machine import processes
from encore.results.compare.causes import Cause, causes_of
from encore.results.compare.sides import Side, load_sides
from tools import run

BENCHMARK = ("resnet", "2", "--seed", "1", "--set", "quality_target=1.0", "--set", "epochs=2")
CGROUP = Path("/sys/fs/cgroup/cpu/encore-slowdowns")
Harm = Callable[[Path, Sequence[psutil.Process]], None]


@dataclass(frozen=True)
class Fault:
    cause: str  # What has to be named first
    options: tuple[str, ...] = ()
    harm: Harm | None = None  # Called again and again while the ranks train
    under: tuple[str, ...] = ()
    at: str = "steps"  # When the harm begins: start, or with the steps
    load: int = 0  # Programs that compute next to the ranks


def duty(share: float, ranks: slice, seconds: float = 0.5) -> Harm:
    """Suspend some ranks for a share of the time."""

    def harm(experiment: Path, found: Sequence[psutil.Process]) -> None:
        for each in found[ranks]:
            each.suspend()
        time.sleep(seconds * share)
        for each in found[ranks]:
            each.resume()
        time.sleep(seconds * (1 - share))

    return harm


def quota(share: float, ranks: slice) -> Harm:
    """Give some ranks a share of a core, together."""

    def harm(experiment: Path, found: Sequence[psutil.Process]) -> None:
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / "cpu.cfs_quota_us").write_text(f"{int(share * 100_000)}")
        for each in found[ranks]:
            with suppress(OSError):
                (CGROUP / "cgroup.procs").write_text(str(each.pid))
        time.sleep(0.5)

    return harm


def while_(mark: str, seconds: float) -> Harm:
    """Suspend rank 0 whenever a file of this pattern is new."""
    seen: set[Path] = set()

    def harm(experiment: Path, found: Sequence[psutil.Process]) -> None:
        new = set(experiment.glob(mark)) - seen
        seen.update(new)
        if new:
            found[0].suspend()
            time.sleep(seconds)
            found[0].resume()
        time.sleep(0.002)

    return harm


def at_start(seconds: float) -> Harm:
    """Suspend all ranks once."""
    done: list[bool] = []

    def harm(experiment: Path, found: Sequence[psutil.Process]) -> None:
        if not done and len(found) == 2:
            done.append(True)
            duty(1.0, slice(None), seconds)(experiment, found)
        time.sleep(0.05)

    return harm


def slow_link(milliseconds: float) -> tuple[str, ...]:
    """Return what runs a command in a network namespace whose loopback delays each packet."""
    delay = f"ip link set lo up; tc qdisc add dev lo root netem delay {milliseconds}ms"
    return ("unshare", "--net", "sh", "-c", f'{delay}; exec "$@"', "sh")


FAULTS: Mapping[str, Fault] = {
    "load-2": Fault("other load", load=2),
    "load-4": Fault("other load", load=4),
    "load-8": Fault("other load", load=8),
    "quota-all-60": Fault("few cores", harm=quota(0.6, slice(None))),
    "quota-all-40": Fault("few cores", harm=quota(0.4, slice(None))),
    "quota-rank-0": Fault("slow rank", harm=quota(0.25, slice(0, 1))),
    "quota-rank-1": Fault("slow rank", harm=quota(0.2, slice(1, 2))),
    "suspended-rank-0": Fault("slow rank", harm=duty(0.5, slice(0, 1))),
    "suspended-rank-1": Fault("slow rank", harm=duty(0.7, slice(1, 2))),
    "netem-2ms": Fault("slow link", under=slow_link(2)),
    "netem-5ms": Fault("slow link", under=slow_link(5)),
    "netem-10ms": Fault("slow link", under=slow_link(10)),
    "slow-start-8": Fault("start", harm=at_start(8), at="start"),
    "slow-start-15": Fault("start", harm=at_start(15), at="start"),
    "slow-checkpoints": Fault("checkpoints", harm=while_("checkpoint/writing_*", 2.0)),
    "batch": Fault("other hyperparameters", options=("--set", "batch_size=16")),
    "library": Fault("another image or library", options=("--env", "DNNL_MAX_CPU_ISA=SSE41")),
}


@contextmanager
def loaded(count: int) -> Iterator[None]:
    programs = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in programs:
            each.kill()
            each.wait()


def train(fault: Fault, results: Path) -> None:
    command = (sys.executable, "-m", "encore.cli.app", "run", *BENCHMARK, *fault.options, "--results", str(results))
    child = subprocess.Popen(
        [*fault.under, *command], cwd=paths.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    with loaded(fault.load):
        while child.poll() is None:
            experiment = next(results.glob("[0-9]*/experiment_0"), None)
            beats = processes.heartbeats(experiment / "heartbeat") if experiment else []
            begun = bool(beats) and (fault.at == "start" or min(beat.step for beat in beats) >= 0)
            if fault.harm is not None and experiment is not None and begun:
                with suppress(psutil.Error):
                    fault.harm(experiment, [psutil.Process(beat.pid) for beat in beats])
            else:
                time.sleep(0.05)
    if child.returncode not in (0, 3):
        raise SystemExit(f"{results.name}: exit code {child.returncode}")


def side_of(results: Sequence[Path]) -> Side:
    found = [side for each in results for side in load_sides(each)]
    return replace(found[0], logs=tuple(log for side in found for log in side.logs))


def unharmed(work: Path) -> list[Path]:
    return sorted(work.glob("unharmed-*"))


def rows(work: Path) -> Iterator[tuple[str, str, list[Cause]]]:
    theirs = side_of(unharmed(work))
    for results in sorted(work.glob("fault-*")):
        name = results.name.removeprefix("fault-")
        yield name, FAULTS[name].cause, causes_of(side_of([results]), theirs)


def main(
    work: Path,
    unharmed_runs: Annotated[int, typer.Option("--unharmed", help="further runs that nothing harms")] = 0,
    faults: Annotated[str, typer.Option(help="names with commas, or all")] = "",
    seconds: Annotated[float, typer.Option(help="begin no further run after this time")] = float("inf"),
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    wanted = [(Fault(""), work / f"unharmed-{len(unharmed(work)) + number:03d}") for number in range(unharmed_runs)]
    names = FAULTS if faults == "all" else filter(None, faults.split(","))
    wanted += [(FAULTS[name], work / f"fault-{name}") for name in names if not (work / f"fault-{name}").exists()]
    ends = time.monotonic() + seconds
    for fault, results in wanted:
        if time.monotonic() < ends:
            train(fault, results)
    if len(unharmed(work)) < 2:
        return
    named = 0
    for name, expected, found in rows(work):
        first = found[0].name if found else "none"
        named += first == expected
        shown = "; ".join(f"{each.name} {each.share:+.0%}" for each in found[:3]) or "not slower"
        print(f"{'right' if first == expected else 'WRONG':<6} {name:<20} {expected:<26} {shown}")
    pairs = list(itertools.permutations(unharmed(work), 2))
    alarms = [(a.name, b.name, c) for a, b in pairs if (c := causes_of(side_of([a]), side_of([b])))]
    print(f"named first: {named} of {len(list(rows(work)))}; false alarms: {len(alarms)} of {len(pairs)} pairs")
    for mine, other, causes in alarms[:10]:
        print(f"  {mine} against {other}: {causes[0].sentence} {causes[0].share:+.0%}")


if __name__ == "__main__":
    run(main, __doc__)
