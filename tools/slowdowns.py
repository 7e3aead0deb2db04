"""Inject slowdowns into trainings on two local ranks and measure how often the right cause is ranked first.

    $ .venv/bin/python -m tools.slowdowns WORK --unharmed 6             # healthy runs
    $ .venv/bin/python -m tools.slowdowns WORK --faults load-4,batch    # slow runs, compared with all healthy ones

Requires root for cgroups, network namespaces and disks. All runs stay in WORK, including those disturbed by other
programs. Without options, prints the table of all runs, and how often a cause is assigned to pairs of healthy runs.
GPU faults are healthy runs edited by tools/recorded_gpus.py.
"""

import itertools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
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
from encore.results.compare.causes import Cause, find_causes
from encore.results.compare.run_set import RunSet, load_run_sets
from tools import recorded_gpus, run

BENCHMARK = ("resnet", "2", "--seed", "1", "--set", "quality_target=1.0", "--set", "epochs=2")
QUIET = 0.15  # cores used by other programs, including the kernel
PAUSED_AT = 20  # Steps of 48
CGROUP = Path("/sys/fs/cgroup/cpu/encore-slowdowns")
Harm = Callable[[Path, Sequence[psutil.Process]], None]


@dataclass(frozen=True)
class Fault:
    cause: str  # cause that must be ranked first
    options: tuple[str, ...] = ()
    harm: Harm | None = None  # called repeatedly during the training
    under: tuple[str, ...] = ()
    start: str = "steps"  # start of the fault: start of the process, or first step
    load: int = 0  # number of additional busy programs
    paused: float = 0.0  # seconds between interruption and resume
    read_rate: int = 0  # Bytes per second from the disk that has the data set; 0: the folder as it is


def duty(share: float, ranks: slice, seconds: float = 0.5) -> Harm:
    """Suspend some ranks for a fraction of the time."""

    def harm(experiment: Path, rank_processes: Sequence[psutil.Process]) -> None:
        for process in rank_processes[ranks]:
            process.suspend()
        time.sleep(seconds * share)
        for process in rank_processes[ranks]:
            process.resume()
        time.sleep(seconds * (1 - share))

    return harm


def quota(share: float, ranks: slice) -> Harm:
    """Limit some ranks to ``share`` CPU cores in total."""

    def harm(experiment: Path, rank_processes: Sequence[psutil.Process]) -> None:
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / "cpu.cfs_quota_us").write_text(f"{int(share * 100_000)}")
        for process in rank_processes[ranks]:
            with suppress(OSError):
                (CGROUP / "cgroup.procs").write_text(str(process.pid))
        time.sleep(0.5)

    return harm


def while_(mark: str, seconds: float) -> Harm:
    """Suspend rank 0 whenever a file of this pattern is new."""
    known_files: set[Path] = set()

    def harm(experiment: Path, rank_processes: Sequence[psutil.Process]) -> None:
        new = set(experiment.glob(mark)) - known_files
        known_files.update(new)
        if new:
            rank_processes[0].suspend()
            time.sleep(seconds)
            rank_processes[0].resume()
        time.sleep(0.002)

    return harm


def at_start(seconds: float) -> Harm:
    """Suspend all ranks once."""
    done: list[bool] = []

    def harm(experiment: Path, rank_processes: Sequence[psutil.Process]) -> None:
        if not done and len(rank_processes) == 2:
            done.append(True)
            duty(1.0, slice(None), seconds)(experiment, rank_processes)
        time.sleep(0.05)

    return harm


def in_evaluations(seconds: float) -> Harm:
    """Suspend all ranks once per evaluation."""
    done: list[int] = []

    def harm(experiment: Path, rank_processes: Sequence[psutil.Process]) -> None:
        log = experiment / "result.txt"
        evaluations = log.read_text("utf-8").count('"eval_start"') if log.exists() else 0
        if evaluations > len(done):
            done.append(evaluations)
            duty(1.0, slice(None), seconds)(experiment, rank_processes)
        time.sleep(0.01)

    return harm


def slow_link(megabits: int) -> tuple[str, ...]:
    """Return a command prefix for a network namespace with limited loopback bandwidth."""
    limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {megabits}mbit burst 256kb latency 1s"
    return ("unshare", "--net", "sh", "-c", f'{limit} && exec "$@"', "sh")


FAULTS: Mapping[str, Fault] = {
    **{f"load-{count}": Fault("other load", load=count) for count in (2, 3, 4, 6, 8)},
    **{f"quota-all-{share}": Fault("few cores", harm=quota(share / 100, slice(None))) for share in (60, 50, 40, 30)},
    "quota-rank-0-25": Fault("slow rank", harm=quota(0.25, slice(0, 1))),
    "quota-rank-0-35": Fault("slow rank", harm=quota(0.35, slice(0, 1))),
    "quota-rank-1-20": Fault("slow rank", harm=quota(0.2, slice(1, 2))),
    "quota-rank-1-30": Fault("slow rank", harm=quota(0.3, slice(1, 2))),
    "suspended-rank-0-40": Fault("slow rank", harm=duty(0.4, slice(0, 1))),
    "suspended-rank-0-50": Fault("slow rank", harm=duty(0.5, slice(0, 1))),
    "suspended-rank-1-50": Fault("slow rank", harm=duty(0.5, slice(1, 2))),
    "suspended-rank-1-70": Fault("slow rank", harm=duty(0.7, slice(1, 2))),
    **{f"link-{rate}-mbit": Fault("slow link", under=slow_link(rate)) for rate in (1600, 1200, 800, 600, 400)},
    **{f"slow-start-{seconds}": Fault("start", harm=at_start(seconds), start="start") for seconds in (8, 15, 25)},
    **{f"slow-checkpoints-{s}": Fault("checkpoints", harm=while_("checkpoint/writing_*", s)) for s in (2, 4)},
    **{f"slow-evaluations-{seconds}": Fault("evaluation", harm=in_evaluations(seconds)) for seconds in (3, 6)},
    **{f"paused-{seconds}": Fault("stopped or repeated", paused=seconds) for seconds in (5, 15)},
    "batch-8": Fault("other hyperparameters", options=("--set", "batch_size=8")),
    "batch-16": Fault("other hyperparameters", options=("--set", "batch_size=16")),
    "deeper": Fault("other hyperparameters", options=("--set", "depth=34")),
    "sse41": Fault("another image or library", options=("--env", "DNNL_MAX_CPU_ISA=SSE41")),
    "avx": Fault("another image or library", options=("--env", "DNNL_MAX_CPU_ISA=AVX")),
    **{f"disk-{rate}k": Fault("cold or slow disk", read_rate=rate * 1000) for rate in (60, 100, 150)},
}


@contextmanager
def load_cores(count: int) -> Iterator[None]:
    programs = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def slow_disk(rate: int, work: Path) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield options for a data set on a separate disk, and a command prefix that limits the read rate."""
    if not rate:
        yield (), ()
        return
    image, folder, group = work / "disk.img", work / "disk", Path("/sys/fs/cgroup/blkio/encore-slowdowns")
    for path in (folder, group):
        path.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(("mkfs.ext4", "-q", "-F", str(image)), check=True)
    for cold in (False, True):
        subprocess.run(("mount", "-o", "loop", str(image), str(folder)), check=True)
        if not cold:
            shutil.copytree(paths.ROOT / "data" / BENCHMARK[0], folder / "data")
            subprocess.run(("umount", str(folder)), check=True)
    device = folder.stat().st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {rate}"
    try:
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        yield ("--data", str(folder / "data")), ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
    finally:
        subprocess.run(("umount", str(folder)), check=True)
        image.unlink()


def train(fault: Fault, results: Path, tries: int = 3) -> None:
    """Train into ``results``; repeat while other programs use more than QUIET cores."""
    for number in range(tries):
        started, busy, own_start = time.monotonic(), _busy(), _own_cpu()
        attempt(fault, results)
        other_load = (_busy() - busy - (_own_cpu() - own_start)) / (time.monotonic() - started)
        print(f"{results.name}: other programs took {other_load:.2f} cores", flush=True)
        if other_load <= QUIET or number == tries - 1:
            return
        results.rename(results.with_name(f"noisy-{results.name}-{number}"))


def _busy() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def attempt(fault: Fault, results: Path) -> None:
    command = (sys.executable, "-m", "encore.cli.app", "run")
    with slow_disk(fault.read_rate, results.parent) as (options, under), load_cores(fault.load):
        first = (*command, *BENCHMARK, *fault.options, *options, "--results", str(results))
        code = train_with_harm(fault, results, (*fault.under, *under, *first))
        if fault.paused:
            time.sleep(fault.paused)
            (run_folder,) = results.iterdir()
            code = train_with_harm(replace(fault, paused=0.0), results, (*command, "--resume", str(run_folder)))
    if code not in (0, 3):
        raise SystemExit(f"{results.name}: exit code {code}")


def train_with_harm(fault: Fault, results: Path, command: Sequence[str]) -> int:
    child = subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    while child.poll() is None:
        experiment = next(results.glob("[0-9]*/experiment_0"), None)
        beats = processes.heartbeats(experiment / "heartbeat") if experiment else []
        step = min((beat.step for beat in beats), default=-1)
        if fault.paused and step >= PAUSED_AT:
            child.terminate()
            return child.wait()
        if fault.harm is not None and experiment is not None and beats and (fault.start == "start" or step >= 0):
            with suppress(psutil.Error):
                fault.harm(experiment, [psutil.Process(beat.pid) for beat in beats])
        else:
            time.sleep(0.05)
    return child.returncode


def join_run_sets(results: Sequence[Path]) -> RunSet:
    run_sets = [run_set for folder in results for run_set in load_run_sets(folder)]
    return replace(run_sets[0], logs=tuple(log for run_set in run_sets for log in run_set.logs))


def unharmed(work: Path) -> list[Path]:
    return sorted(work.glob("unharmed-*"))


def rows(work: Path) -> Iterator[tuple[str, str, list[Cause]]]:
    baseline = join_run_sets(unharmed(work))
    for results in sorted(work.glob("fault-*")):
        name = results.name.removeprefix("fault-")
        yield name, FAULTS[name].cause, find_causes(join_run_sets([results]), baseline)
    with tempfile.TemporaryDirectory() as folder:
        recorded = join_run_sets(list(recorded_gpus.unharmed(unharmed(work), Path(folder))))
        for name, cause, results in recorded_gpus.faults(unharmed(work), Path(folder)):
            yield name, cause, find_causes(join_run_sets([results]), recorded)


def main(
    work: Path,
    unharmed_runs: Annotated[int, typer.Option("--unharmed", help="number of additional healthy runs")] = 0,
    faults: Annotated[str, typer.Option(help="names with commas, or all")] = "",
    seconds: Annotated[float, typer.Option(help="start no further run after this time")] = float("inf"),
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    trainings = [(Fault(""), work / f"unharmed-{len(unharmed(work)) + number:03d}") for number in range(unharmed_runs)]
    names = FAULTS if faults == "all" else filter(None, faults.split(","))
    trainings += [(FAULTS[name], work / f"fault-{name}") for name in names if not (work / f"fault-{name}").exists()]
    ends = time.monotonic() + seconds
    for fault, results in trainings:
        if time.monotonic() < ends:
            train(fault, results)
    if len(unharmed(work)) < 2:
        return
    table = list(rows(work))
    for name, expected, causes in table:
        first = causes[0].name if causes else "none"
        listed = "; ".join(f"{cause.name} {cause.share:+.0%}" for cause in causes[:3]) or "not slower"
        print(f"{'right' if first == expected else 'WRONG':<6} {name:<22} {expected:<26} {listed}")
    right = sum(bool(causes) and causes[0].name == expected for _, expected, causes in table)
    pairs = list(itertools.permutations(unharmed(work), 2))
    sides = {cause: join_run_sets([cause]) for cause in unharmed(work)}
    alarms = [(a.name, b.name, causes) for a, b in pairs if (causes := find_causes(sides[a], sides[b]))]
    print(f"named first: {right} of {len(table)}; false alarms: {len(alarms)} of {len(pairs)} pairs")
    for current, baseline, causes in alarms[:10]:
        print(f"  {current} against {baseline}: {causes[0].message} {causes[0].share:+.0%}")


if __name__ == "__main__":
    run(main, __doc__)
