"""What made runs slower: causes that the machine's own records show, ranked by the time that each explains.

    from encore.results.compare.causes import causes_of
    for cause in causes_of(ours, theirs):
        print(cause.sentence)

Only of runs that Encore made: the evidence is in the telemetry of all nodes, the step times of all ranks and the
metrics. The time of evaluations, checkpoints, the start, pauses and data stalls is measured. What slowed the steps
themselves is inferred: a cause explains as much of it as its evidence grew.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from encore.machine.node import THROTTLE
from encore.machine.outliers import lowest
from encore.results.compare.run_set import RunSet
from encore.results.logs import steps, telemetry
from encore.results.logs.goodput import goodput_of
from encore.results.logs.metrics import experiment_of
from encore.results.logs.run_log import RunLog
from encore.results.logs.telemetry import Reading

LEAST_SLOWER = 0.05  # Share of their time
LEAST_SLOWER_ON_CPUS = 0.15  # Two of six pairs of unharmed runs of 43 s on 2 shared cores differed by 5 to 10 %
LEAST_SHARE = 0.02  # Of a cause
_BUSY_CORES = 0.2  # Cores of other programs: fewer are a monitor's
_IDLE = 0.05  # Share of the cores: fewer are idle where programs compete for them
_STALLED = 0.02  # Share of the time in which processes waited for a disk
_READ_RATE = 2e6  # Bytes per second from disks, where data came from the page cache before
# What a setting explains of slower steps: nothing that is measured says more than that it differs.
_BY_SETTING, _BY_SOFTWARE = 0.9, 0.8
# What other links explain where no waiting is known, as on GPUs: that their traffic moved.
_BY_LINKS = 0.85
_TCP_RATE = 1e7  # Bytes per second, of all nodes: less are logs and checkpoints


@dataclass(frozen=True)
class Cause:
    name: str
    share: float  # Of their time: what it adds to ours
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Means over the runs of a side; None where nothing was recorded."""

    parts: Mapping[str, float] = field(default_factory=dict)  # Seconds, by goodput's names
    late: tuple[float, int, str] = (0.0, 0, "")  # Share by which the others waited longer for a rank; rank, node
    waiting: float | None = None  # Share in which even the rank that waits least waited
    delayed: float | None = None  # Seconds in which a rank's threads had no core, per second
    others: float | None = None  # Cores that other programs took
    idle: float | None = None  # Share of the machines' cores that nothing used
    io_stalled: float | None = None  # Share of the time in which processes waited for a disk
    read_rate: float | None = None  # Bytes per second from disks
    sent_rate: float | None = None  # Bytes per second over networks
    nvlink_rate: float | None = None  # Bytes per second over NVLink, of all GPUs
    clock: float | None = None  # SM clock of the GPUs, MHz
    low_clock: tuple[float, str] = (1.0, "")  # The slowest GPU's over the others' median, and which it is
    throttled: Mapping[str, float] = field(default_factory=dict)  # Share of the readings, by reason


def causes_of(current: RunSet, baseline: RunSet) -> list[Cause]:
    """Return what made ``current`` slower, the cause that explains most first; none where they are not slower."""
    mine, other = evidence_of(current.logs), evidence_of(baseline.logs)
    whole = sum(other.parts.values())
    least = LEAST_SLOWER if mine.clock or other.clock else LEAST_SLOWER_ON_CPUS
    if not mine.parts or not whole or sum(mine.parts.values()) < whole * (1 + least):
        return []
    # What slows the steps slows as much what is computed before and between them; cores that lack, all of it.
    computed = ("training", "evaluation", "start")
    pace = max(1.0, mine.parts["training"] / other.parts["training"]) if other.parts["training"] else 1.0
    usual = {part: other.parts[part] * (pace if part in computed else 1.0) for part in other.parts}
    ours_s, theirs_s = (sum(each.parts[part] for part in computed) for each in (mine, other))
    cores = _of_cores(mine, other, (ours_s - theirs_s) / whole, 1 - theirs_s / ours_s if ours_s else 0.0)
    if cores is not None:
        left = 1 - min(1.0, cores.share * whole / (ours_s - theirs_s))
        usual = {part: mine.parts[part] - left * max(0.0, mine.parts[part] - value) for part, value in usual.items()}
    found = [*([cores] if cores else []), *_measured(mine, other, usual)]
    found += _of_steps(current, baseline, mine, other, usual)
    return sorted((each for each in found if each.share >= LEAST_SHARE), key=lambda each: -each.share)


# Parts of the wall clock, whose time is measured, next to the usual time of each.
def _measured(mine: Evidence, other: Evidence, usual: Mapping[str, float]) -> Iterator[Cause]:
    whole = sum(other.parts.values())
    names = {
        "evaluation": "evaluations", "checkpoints": "checkpoints", "start": "the start", "end": "the end of the run",
        "stopped or repeated": "pauses and repeated steps",
    }  # fmt: skip
    for part, words in names.items():
        more = mine.parts[part] - usual[part]
        yield Cause(part, more / whole, f"{words}: {_longer(mine.parts[part], other.parts[part])}")
    stall = mine.parts["data stall"] - other.parts["data stall"]
    from_disk = (
        _grew(mine.read_rate, other.read_rate) > _READ_RATE or _grew(mine.io_stalled, other.io_stalled) > _STALLED
    )
    what = "cold or slow disk" if from_disk else "data stall"
    detail = f"; {_rate(mine.read_rate)} from disks, theirs {_rate(other.read_rate)}" if from_disk else ""
    longer = _longer(mine.parts["data stall"], other.parts["data stall"])
    yield Cause(what, stall / whole, f"{what}: the ranks waited {longer}{detail}")


# Cores that the ranks did not have, which makes longer all that is computed.
def _of_cores(mine: Evidence, other: Evidence, more: float, slower: float) -> Cause | None:
    delayed, loaded = _grew(mine.delayed, other.delayed), _grew(mine.others, other.others)
    if more <= 0 or slower <= 0:
        return None
    # With idle cores, programs are the cause only if they took about as many as the ranks' threads lack.
    if loaded > _BUSY_CORES and ((mine.idle or 0.0) < _IDLE or loaded > delayed / 2):
        text = f"other load: other programs took {mine.others or 0:.1f} cores, theirs {other.others or 0:.1f}"
        return Cause("other load", more * min(1.0, max(delayed, loaded) / slower), text)
    if delayed > 0 and mine.late[0] - other.late[0] < slower / 2:
        text = f"few cores: the threads of a rank waited {mine.delayed or 0:.2f} s a second for one"
        return Cause("few cores", more * min(1.0, delayed / slower), text)
    return None


# What slowed the steps: each cause by the growth of its evidence, as a share of how much slower they are.
def _of_steps(
    current: RunSet, baseline: RunSet, mine: Evidence, other: Evidence, usual: Mapping[str, float]
) -> Iterator[Cause]:
    whole = sum(other.parts.values())
    along = sum(min(mine.parts[part], usual[part]) - other.parts[part] for part in ("evaluation", "start"))
    more = (mine.parts["training"] - other.parts["training"] + max(along, 0.0)) / whole
    slower = 1 - other.parts["training"] / mine.parts["training"] if mine.parts["training"] else 0.0
    if more < LEAST_SHARE or slower <= 0:
        return

    def explained(growth: float) -> float:
        return more * min(1.0, max(0.0, growth) / slower)

    for reason in THROTTLE.values():
        share, before = mine.throttled.get(reason, 0.0), other.throttled.get(reason, 0.0)
        text = f"{reason}: GPUs were slowed by it in {share:.0%} of the readings, theirs in {before:.0%}"
        yield Cause(reason, more * max(0.0, share - before), text)
    if mine.clock and other.clock:
        reasons = {*mine.throttled, *other.throttled}
        grown = max((mine.throttled.get(each, 0.0) - other.throttled.get(each, 0.0) for each in reasons), default=0.0)
        text = f"lower clocks: {mine.clock:.0f} MHz, theirs {other.clock:.0f}"
        yield Cause("lower clocks", explained(1 - mine.clock / other.clock) * (1 - max(0.0, grown)), text)
    late, rank, node = mine.late
    low, gpu = mine.low_clock
    if low < other.low_clock[0] - LEAST_SLOWER:
        yield Cause("slow rank", explained(1 - low), f"slow rank: the clock of {gpu} is {low:.0%} of the others'")
    text = f"slow rank: the others waited {late:.0%} of their time longer than rank {rank} on {node}"
    yield Cause("slow rank", explained(late - other.late[0]), text)
    yield from _of_links(mine, other, more, slower)
    yield from _by_settings(current, baseline, more)


def _of_links(mine: Evidence, other: Evidence, more: float, slower: float) -> Iterator[Cause]:
    moved = _moved_traffic(mine, other, slower)
    if mine.waiting is not None and other.waiting is not None:
        text = f"every rank waited for others, {mine.waiting:.0%} of its time, theirs {other.waiting:.0%}"
        share = min(1.0, max(0.0, mine.waiting - other.waiting) / slower)
        yield Cause("slow link", more * share, "; ".join(("slow link: " + text, *moved)))
    elif moved:
        yield Cause("slow link", more * _BY_LINKS, "; ".join((f"slow link: {moved[0]}", *moved[1:])))


# The same steps move the same bytes, in a longer time.
def _moved_traffic(mine: Evidence, other: Evidence, slower: float) -> list[str]:
    moved = []
    if (mine.sent_rate or 0.0) > max(_TCP_RATE, 2 * (other.sent_rate or 0.0)):
        moved.append(f"{_rate(mine.sent_rate)} over TCP, theirs {_rate(other.sent_rate)}: a fallback")
    if mine.nvlink_rate is not None and mine.nvlink_rate < (other.nvlink_rate or 0.0) * (1 - slower) / 2:
        moved.append(f"{_rate(mine.nvlink_rate)} over NVLink, theirs {_rate(other.nvlink_rate)}")
    return moved


# Settings that change how long a step takes: not the seed, and not what ends a run or comes between steps.
_OF_STEPS = re.compile(r"configuration\.(?!seed|epochs|quality_target|targets|checkpoint|log_interval|eval)")
_OF_SOFTWARE = re.compile(
    r"image|implementation|runtime|code\.|environment\.(ATEN|CUBLAS|CUDA|CUDNN|DALI|DNNL|HOROVOD|KMP|LD_|MALLOC|MKL|MXNET"
    r"|NCCL|OMP|ONEDNN|PYTORCH|TF_|TORCH|XLA)"
)


def _by_settings(current: RunSet, baseline: RunSet, more: float) -> Iterator[Cause]:
    names = sorted({*current.settings, *baseline.settings})
    differ = [name for name in names if current.settings.get(name) != baseline.settings.get(name)]
    for pattern, name, share in (
        (_OF_STEPS, "other hyperparameters", _BY_SETTING),
        (_OF_SOFTWARE, "another image or library", _BY_SOFTWARE),
    ):
        found = [each for each in differ if pattern.match(each)]
        if found:
            first, mine, other = found[0], current.settings.get(found[0]), baseline.settings.get(found[0])
            others = f" and {len(found) - 1} more" if len(found) > 1 else ""
            shown = first.removeprefix("configuration.")
            yield Cause(name, more * share, f"{name}: {shown} is {mine}, theirs {other}{others}")


def _grew(mine: float | None, other: float | None) -> float:
    return mine - other if mine is not None and other is not None else 0.0


def _longer(mine: float, other: float) -> str:
    return f"{mine:.3g} s, theirs {other:.3g} s"


def _rate(rate: float | None) -> str:
    return f"{(rate or 0.0) / 1e6:.1f} MB/s"


# -- evidence -------------------------------------------------------------------------------------------------------


def evidence_of(logs: Sequence[RunLog]) -> Evidence:
    of_runs = [found for log in logs if (found := _of_run(log)) is not None]
    if not of_runs:
        return Evidence()
    first = of_runs[0]
    reasons = {reason for each in of_runs for reason in each.throttled}

    def mean(name: str) -> float | None:
        return _mean(getattr(each, name) for each in of_runs)

    return Evidence(
        parts={name: statistics.fmean(each.parts[name] for each in of_runs) for name in first.parts},
        # Unharmed runs are late by chance, each at another rank.
        late=(statistics.fmean(each.late[0] for each in of_runs), *max(each.late for each in of_runs)[1:]),
        low_clock=min((each.low_clock for each in of_runs), key=lambda low: low[0]),
        throttled={reason: statistics.fmean(each.throttled.get(reason, 0.0) for each in of_runs) for reason in reasons},
        **{
            name: mean(name)
            for name in (
                "waiting",
                "delayed",
                "others",
                "idle",
                "io_stalled",
                "read_rate",
                "sent_rate",
                "nvlink_rate",
                "clock",
            )
        },
    )


def _of_run(log: RunLog) -> Evidence | None:
    goodput, experiment = goodput_of(log), experiment_of(log.path)
    if goodput is None or experiment is None:
        return None
    windows = {rank: each for rank, each in steps.windows_of(experiment).items() if each}
    every = [window for each in windows.values() for window in each]
    nodes = telemetry.by_node(log)
    shares = {rank: share for rank, each in windows.items() if (share := steps.waiting_of(each)) is not None}
    used = sum(w.cpu for w in every) / (sum(w.window for w in every) / len(windows)) if every else None
    busy = _mean(
        r["cpu_percent"] / 100 * r["cores"] for each in nodes.values() for r in each if r.get("cores") is not None
    )
    gpus = _gpus_in_use(nodes)
    cards = [reading for each in gpus.values() for reading in each]
    return Evidence(
        parts=goodput.parts,
        late=_late(windows, shares),
        waiting=min(shares.values(), default=None),
        delayed=sum(w.delayed for w in every) / sum(w.window for w in every) if every else None,
        others=max(0.0, busy * len(nodes) - used) if busy is not None and used is not None else None,
        idle=_mean(1 - r["cpu_percent"] / 100 for each in nodes.values() for r in each if "cpu_percent" in r),
        io_stalled=_rate_of(nodes, "io_stall_us", 1e-6),
        read_rate=_rate_of(nodes, "disk_read_bytes", 1.0),
        sent_rate=_rate_of(nodes, "network_sent_bytes", 1.0),
        nvlink_rate=_rate_of(_with_nvlink(nodes), "nvlink_sent_kib", 1024.0),
        clock=_mean(gpu.get("sm_mhz") for gpu in cards),
        low_clock=_low_clock(gpus),
        throttled=_throttled(cards),
    )


def _late(windows: Mapping[int, Sequence[steps.Window]], shares: Mapping[int, float]) -> tuple[float, int, str]:
    slow = lowest(shares)
    return (slow.others - slow.value, slow.name, windows[slow.name][-1].node) if slow else (0.0, 0, "")


def _gpus_in_use(nodes: Mapping[str, Sequence[Reading]]) -> dict[str, list[Reading]]:
    # Telemetry has all GPUs of a node: one that computed nothing has a low clock and no part in the run.
    found: dict[str, list[Reading]] = {}
    for node, readings in nodes.items():
        for reading in readings:
            for number, gpu in enumerate(reading.get("gpus", ())):
                found.setdefault(f"GPU {number} of {node}", []).append(gpu)
    return {name: each for name, each in found.items() if any(telemetry.in_use(gpu) for gpu in each)}


def _low_clock(gpus: Mapping[str, Sequence[Reading]]) -> tuple[float, str]:
    clocks = {name: _mean(gpu.get("sm_mhz") for gpu in each) for name, each in gpus.items()}
    slow = lowest({name: each for name, each in clocks.items() if each is not None})
    return (slow.value / slow.others, slow.name) if slow and slow.others else (1.0, "")


def _throttled(cards: Sequence[Mapping[str, int | None]]) -> dict[str, float]:
    known = [int(gpu["throttle"] or 0) for gpu in cards if gpu.get("throttle") is not None]
    shares = {reason: sum(bool(each & bit) for each in known) / len(known) for bit, reason in THROTTLE.items() if known}
    return {reason: share for reason, share in shares.items() if share}


def _with_nvlink(nodes: Mapping[str, Sequence[Reading]]) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {}
    for node, readings in nodes.items():
        for reading in readings:
            sent = [gpu.get("nvlink_sent_kib") for gpu in reading.get("gpus", ())]
            if sent and None not in sent:
                found.setdefault(node, []).append({"time": reading["time"], "nvlink_sent_kib": sum(sent)})
    return found


def _rate_of(nodes: Mapping[str, Sequence[Reading]], name: str, unit: float) -> float | None:
    # Per second, of all nodes together, by the first and the last value of a counter.
    rates = []
    for readings in nodes.values():
        known = [(float(r["time"]), float(r[name])) for r in readings if r.get(name) is not None]
        if len(known) > 1 and known[-1][0] > known[0][0]:
            rates.append((known[-1][1] - known[0][1]) * unit / (known[-1][0] - known[0][0]))
    return sum(rates) if rates else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
