"""CPU runs edited to look like runs on a node with eight GPUs, healthy or slowed down by a fault.

No GPU was involved. FAULTS defines the changes per fault. The remaining noise comes from the original run, except
for the run time, which is replaced by the time of longer runs: run times vary less on GPUs than on shared cores.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from encore.files import unix_time

GPUS = 8
SECONDS, SPREAD = 300.0, 0.01  # healthy run time: mean, and standard deviation as a fraction of the mean
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A fault, and the traces in the run records; the run time is multiplied by ``slower``."""

    cause: str = ""
    slower: float = 1.0
    harmed: int = GPUS  # GPUs
    clock: float = 1.0  # Factor on the SM clock of these GPUs
    reasons: int = 0  # NVML clock event reasons in nine of ten readings of these GPUs
    sent_rate: float = 2e4  # Bytes per second over TCP
    nvlink_rate: float = 5e7  # KiB per second and GPU
    read_rate: float = 1e4  # Bytes per second from disks
    input_share: float = 0.002  # Fraction of the training that a rank waits for data
    image: str = "sha256:1"


FAULTS: Mapping[str, Recorded] = {
    "gpu-heat": Recorded(cause="heat (hardware)", slower=1.25, clock=0.8, reasons=0x40),
    "gpu-heat-software": Recorded(cause="heat (software)", slower=1.1, clock=0.9, reasons=0x20),
    "gpu-power-cap": Recorded(cause="power cap", slower=1.15, clock=0.87, reasons=0x04),
    "gpu-power-brake": Recorded(cause="power brake", slower=1.8, clock=0.5, reasons=0x80),
    "gpu-hardware-slowdown": Recorded(cause="hardware slowdown", slower=1.5, clock=0.6, reasons=0x08),
    "gpu-clocks-80": Recorded(cause="lower clocks", slower=1.2, clock=0.8),
    "gpu-clocks-90": Recorded(cause="lower clocks", slower=1.1, clock=0.9),
    "gpu-one-slow": Recorded(cause="slow rank", slower=1.25, harmed=1, clock=0.75),
    "gpu-one-hot": Recorded(cause="slow rank", slower=1.4, harmed=1, clock=0.7, reasons=0x40),
    "gpu-tcp": Recorded(cause="slow link", slower=1.6, sent_rate=3e9),
    "gpu-no-nvlink": Recorded(cause="slow link", slower=1.4, nvlink_rate=0),
    "gpu-cold-disk": Recorded(cause="cold or slow disk", slower=1.3, read_rate=2e8, input_share=0.24),
    "gpu-data-stall": Recorded(cause="data stall", slower=1.25, input_share=0.21),
    "gpu-image": Recorded(cause="another image or library", slower=1.12, image="sha256:2"),
}


def record(source: Path, target: Path, fault: Recorded) -> None:
    """Copy the results folder ``source``, with a single run, to ``target`` with the traces of ``fault``."""
    shutil.copytree(source, target, symlinks=True)
    (folder,) = target.iterdir()
    experiment, chance = folder / "experiment_0", random.Random(target.name)
    text = (experiment / "result.txt").read_text("utf-8")
    start, stop = (float(match[1]) / 1000 for key in ("run_start", "run_stop") if (match := _event(text, key)))

    factor = fault.slower * SECONDS * chance.gauss(1, SPREAD) / (stop - start)

    def later(time: float) -> float:
        return time + (factor - 1) * (min(max(time, start), stop) - start)

    def moved(line: Line) -> Line:
        return {**line, "time": later(line["time"])}

    for path in (experiment / "result.txt", folder / "result_0.txt"):
        path.write_text(
            re.sub(r'(?<="time_ms": )\d+', lambda timestamp: str(round(later(int(timestamp[0]) / 1000) * 1000)), text)
        )
    _rewrite(experiment / "telemetry.jsonl", lambda line: _reading(moved(line), later(start), fault, chance))
    for path in experiment.glob("steps/*.jsonl"):
        _rewrite(path, lambda line: _window(moved(line), factor))
    share = {"input_share": fault.input_share * chance.uniform(0.8, 1.2)}
    _rewrite(experiment / "metrics.jsonl", lambda line: {**moved(line), **(share if line["kind"] == "epoch" else {})})
    state = json.loads((experiment / "state.json").read_text("utf-8"))
    end_time = later(unix_time(state["ended"]) or stop)
    (experiment / "state.json").write_text(json.dumps({**state, "ended": end_time}), encoding="utf-8")
    passport = json.loads((folder / "run.json").read_text("utf-8"))
    passport["image"] = {"reference": "localhost/encore/resnet:latest", "digest": fault.image}
    (folder / "run.json").write_text(json.dumps(passport), encoding="utf-8")


def unharmed(sources: list[Path], work: Path) -> Iterator[Path]:
    """Yield a recording with GPUs per healthy run."""
    for source in sources:
        record(source, work / source.name, Recorded())
        yield work / source.name


def faults(sources: list[Path], work: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield name, cause and recording per fault, based on different healthy runs."""
    for number, (name, fault) in enumerate(FAULTS.items()):
        record(sources[number % len(sources)], work / name, fault)
        yield name, fault.cause, work / name


def _event(log: str, key: str) -> re.Match[str] | None:
    return re.search(rf'"time_ms": (\d+)[^\n]*"key": "{key}"', log)


def _rewrite(path: Path, change: Callable[[Line], Line]) -> None:
    lines = [json.dumps(change(json.loads(line))) for line in path.read_text("utf-8").splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _reading(line: Line, start: float, fault: Recorded, chance: random.Random) -> Line:
    seconds = line["time"] - start
    rates = {"network_sent_bytes": fault.sent_rate, "disk_read_bytes": fault.read_rate}
    cards = [_gpu(replace(fault, clock=1, reasons=0) if i >= fault.harmed else fault, chance) for i in range(GPUS)]
    nvlink = {"nvlink_sent_kib": int(seconds * fault.nvlink_rate / fault.slower)}
    return {
        **line,
        **{name: int(seconds * rate * chance.uniform(0.9, 1.1)) for name, rate in rates.items()},
        "gpus": [{**card, **nvlink} for card in cards],
    }


def _gpu(fault: Recorded, chance: random.Random) -> Line:
    # A busy GPU occasionally reaches the power limit.
    usual = 0x04 if chance.random() < 0.1 else 0
    return {
        "use_percent": 98,
        "sm_mhz": round(chance.gauss(1755, 12) * fault.clock),
        "power_watts": round(chance.gauss(640, 15) * fault.clock, 1),
        "throttle": usual | (fault.reasons if chance.random() < 0.9 else 0),
    }


def _window(line: Line, factor: float) -> Line:
    # Waiting for other ranks is not measured on GPUs.
    longer = {name: line[name] * factor for name in ("window", "median", "p99", "cpu", "delayed")}
    return {**line, **longer, "waiting": None}
