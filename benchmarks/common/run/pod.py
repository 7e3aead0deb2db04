"""``python -m benchmarks.common.run.pod run --output DIR -- COMMAND``: run the ranks of a Kubernetes pod.

Replaces the supervision of `encore run` in a pod: puts files in place before the ranks start, forwards signals to
the ranks so that they write a checkpoint, kills hanging ranks, copies the metrics stream to standard output for the
pod log, and returns exit codes that distinguish failed from interrupted trainings. Standard library only.
"""

import argparse
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

from benchmarks.common.data.problem import INTERRUPTED

POLL_SECONDS = 0.5
# Shared file systems show another pod's last record late (NFS: up to 60 s); failed ranks may not write one.
LATE_SECONDS, LATE_SECONDS_OF_FAILED = 90.0, 5.0
WARM_UP_FACTOR = 3.0  # multiplies the step limit for the first step, as in encore/run/supervise.py
LOOK_SECONDS = 5.0  # between two readings of all heartbeats, which are on the network
STACKS_SECONDS = 2.0  # time for ranks to print their stacks before they are killed
REMAINS = ("result.txt", "metrics.jsonl")  # files from a previous attempt without a checkpoint
NUMBER = "PET_NODE_RANK"  # torchrun's node number, from 0; may be unset in a single pod


def prepare(files: Path, output: Path, data: Optional[Path]) -> None:
    """Copy the experiment ``files`` to ``output``, except an existing log; the first pod also writes node.json."""
    output.mkdir(parents=True, exist_ok=True)
    number = os.environ.get(NUMBER, "0")
    writing = output / ("config.json.%s.writing" % number)
    shutil.copyfile(str(files / "config.json"), str(writing))
    writing.replace(output / "config.json")
    if number != "0":
        return
    if not any((output / "checkpoint").glob("step_*")):
        for name in REMAINS:
            # A log with only the head lacks lines from ranks.
            if (output / name).exists() and not _same(output / name, files / name):
                (output / name).replace(output / (name + ".discarded"))
    if not (output / "result.txt").exists():
        shutil.copyfile(str(files / "result.txt"), str(output / "result.txt"))
    (output / "node.json").write_text(json.dumps(node_facts()) + "\n", encoding="utf-8")
    if data is not None and data.exists():
        shutil.copyfile(str(data), str(output / data.name))


def _same(path: Path, other: Path) -> bool:
    return other.exists() and path.read_bytes() == other.read_bytes()


def node_facts() -> Dict[str, object]:
    """Return the hardware of this node with the keys of encore/machine/node.py; unknown values are empty or missing."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    models = re.findall(r"^model name\s*: (.*)$", cpu, re.MULTILINE)
    query = "index,name,memory.total,driver_version"
    lines: List[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader,nounits"]
        lines = subprocess.run(
            command, stdout=subprocess.PIPE, universal_newlines=True, timeout=60, check=True
        ).stdout.splitlines()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "hostname": socket.gethostname(),
        "kernel": os.uname().release,
        "cpu": models[0] if models else "",
        "sockets": len(set(re.findall(r"^physical id\s*: (.*)$", cpu, re.MULTILINE))) or None,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": [_gpu(line) for line in lines if line.count(",") == 3],
    }


def _gpu(line: str) -> Dict[str, object]:
    index, name, memory, driver = (word.strip() for word in line.split(","))
    gib = round(int(memory) / 1024, 1) if memory.isdigit() else 0.0
    return {"index": int(index), "name": name, "memory_gib": gib, "driver": driver, "compute_capability": None}


class Relay:
    """Copy a growing JSON lines file to standard output; restart if a resumed run truncated it."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def copy(self) -> None:
        with suppress(OSError), self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0
            file.seek(self._offset)
            data = file.read()
            lines = data[: data.rfind(b"\n") + 1]
            self._offset += len(lines)
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()


class Beat(NamedTuple):
    """A rank's heartbeat file, as benchmarks/common/run/stopping.py writes it."""

    rank: int
    pid: int
    host: str
    step: int  # -1 before the first one
    time: float  # Unix time of the step
    alive: float  # the same of the writing


def beats_since(heartbeats: Path, began: float) -> List[Beat]:
    """Return the heartbeats of all pods' ranks that were written after the Unix time ``began``."""
    beats = []
    for path in heartbeats.glob("rank_*"):
        with suppress(OSError, ValueError):
            pid, host, step, when, alive, *_ = path.read_text(encoding="ascii").split()
            beats.append(Beat(int(path.name[5:]), int(pid), host, int(step), float(when), float(alive)))
    return [beat for beat in beats if beat.alive >= began]


def find_hang(beats: Sequence[Beat], seconds: float) -> str:
    """Return a description of the hanging rank if no local rank has made a step in time, else an empty string.

    Only local ranks are checked, since their times come from the same clock: one hanging rank stops all others.
    """
    local_beats = [beat for beat in beats if beat.host == socket.gethostname()]
    if not local_beats:
        return ""
    silent = time.time() - max(beat.time for beat in local_beats)
    limit = seconds * (WARM_UP_FACTOR if max(beat.step for beat in local_beats) < 0 else 1)
    if silent < limit:
        return ""
    newest = max(beat.alive for beat in beats)
    slowest = min(beats, key=lambda beat: (newest - beat.alive <= limit / 2, beat.step, beat.time))
    reason = "gives no heartbeat" if newest - slowest.alive > limit / 2 else "came least far"
    return "rank %d on %s hangs: no step for %.0f s, and it %s (step %d)" % (
        slowest.rank, slowest.host, silent, reason, slowest.step,
    )  # fmt: skip


def kill(ranks: Sequence[Beat]) -> None:
    """Print the stacks of this pod's ranks, then kill them."""
    for number in (signal.SIGUSR1, signal.SIGKILL):
        for beat in ranks:
            if beat.host == socket.gethostname():
                with suppress(OSError):
                    os.kill(beat.pid, number)
        time.sleep(STACKS_SECONDS)


def raise_limits(stack: int, pinned: bool) -> None:
    """Raise the soft limits that Kubernetes cannot set: thread stack (bytes) and pinned memory."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (stack if hard_limit == -1 else min(stack, hard_limit), hard_limit))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard_limit, hard_limit))
    if pinned and hard_limit != resource.RLIM_INFINITY:
        print(
            "warning: no more than %d bytes can be pinned; raise the container runtime's memlock" % hard_limit,
            flush=True,
        )


def run(output: Path, command: Sequence[str], hang_seconds: float) -> int:
    """Run the ranks; return 0, their exit code, or INTERRUPTED if they stopped with a checkpoint."""
    heartbeats, is_first = output / "heartbeat", os.environ.get(NUMBER, "0") == "0"
    for beat in beats_since(heartbeats, 0.0):
        # Ranks from an earlier pod; the rank numbers are reused.
        if beat.host == socket.gethostname():
            with suppress(OSError):
                (heartbeats / ("rank_%d" % beat.rank)).unlink()
    relay, began = Relay(output / "metrics.jsonl"), time.time()
    next_look = began if hang_seconds > 0 else math.inf
    child = subprocess.Popen(command)

    def forward_signal(number: int, frame: object) -> None:
        ranks = [beat.pid for beat in beats_since(heartbeats, began) if beat.host == socket.gethostname()]
        for pid in ranks or [child.pid]:  # a launcher would end ranks that write a checkpoint
            with suppress(OSError):
                os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward_signal)
    while child.poll() is None:
        if is_first:
            relay.copy()
        beats: List[Beat] = []
        if time.time() >= next_look:
            next_look = time.time() + min(LOOK_SECONDS, hang_seconds / 4)
            beats = beats_since(heartbeats, began)
        hang = find_hang(beats, hang_seconds)
        if hang:
            print("error: " + hang, flush=True)
            kill(beats)
            break
        time.sleep(POLL_SECONDS)
    code = child.wait()
    until = time.time() + (LATE_SECONDS_OF_FAILED if code else LATE_SECONDS)
    while not outcome_of(output / "metrics.jsonl", began) and time.time() < until:
        time.sleep(POLL_SECONDS)
    if is_first:
        relay.copy()
    if outcome_of(output / "metrics.jsonl", began) == "interrupted":
        return INTERRUPTED
    return code if code >= 0 else 128 - code


def outcome_of(metrics: Path, since: float) -> str:
    """Return the outcome in the metrics stream since that Unix time, or an empty string."""
    with suppress(OSError, ValueError, IndexError, KeyError, TypeError):
        last = json.loads(metrics.read_bytes().splitlines()[-1])
        return str(last["outcome"]) if last["kind"] == "end" and last["time"] >= since else ""
    return ""


def main(arguments: Sequence[str]) -> int:
    argv = list(arguments)
    separator = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.common.run.pod", description=__doc__)
    parser.add_argument("action", choices=("prepare", "run"))
    parser.add_argument("--output", type=Path, required=True, help="folder of the experiment")
    parser.add_argument("--files", type=Path, help="prepare: folder with config.json and the header of result.txt")
    parser.add_argument("--data", type=Path, help="prepare: the data set's dataset.json, copied to the output")
    parser.add_argument("--stack", type=int, default=64 * 2**20, help="run: thread stack size in bytes")
    parser.add_argument("--hang-seconds", type=float, default=0.0, help="run: time limit of a step; 0: no limit")
    parser.add_argument("--pinned", action="store_true", help="run: warn where pinned memory is limited")
    options = parser.parse_args(argv[:separator])
    if options.action == "prepare":
        prepare(options.files, options.output, options.data)
        return 0
    raise_limits(options.stack, options.pinned)
    return run(options.output, argv[separator + 1 :], options.hang_seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
