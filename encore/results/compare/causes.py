"""Explain why a run is slower: ranked causes, from the telemetry of both runs.

    from encore.results.compare.causes import find_causes
    for cause in find_causes(current, baseline):
        print(cause.message)

Requires run folders written by Encore: node telemetry, per-rank step times and metrics. Time in evaluation,
checkpoints, startup, pauses and data stalls is measured. Causes of slower training steps are inferred: a cause explains
as much of the slowdown as the evidence for it increased.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from encore.results.compare.run_set import RunSet
from encore.results.logs import steps, telemetry
from encore.results.logs.goodput import goodput_of
from encore.results.logs.metrics import experiment_of
from encore.results.logs.run_log import RunLog
from encore.results.logs.telemetry import THROTTLE, Reading
from encore.results.outliers import lowest

MIN_SLOWDOWN = 0.05  # Fraction of the baseline's time
# Two of six pairs of unmodified 43 s runs on 2 shared cores differed by 5 to 10 %.
MIN_SLOWDOWN_CPU = 0.15
MIN_SHARE = 0.02  # Smallest cause that is reported, fraction of the baseline's time
_BUSY_CORES = 0.2  # CPU use of other programs, in cores; monitoring uses less
_IDLE_FRACTION = 0.05  # Below this, no cores are free and programs compete
_IO_STALL_FRACTION = 0.02  # Fraction of the time with processes blocked on disk I/O
_DISK_READ_RATE = 2e6  # Bytes/s; in the baseline the data came from the page cache
# Fraction of the slowdown attributed to a changed setting. Not measured: the setting differs, the effect is unknown.
_HYPERPARAMETER_SHARE, _SOFTWARE_SHARE = 0.9, 0.8
# Same for a changed network path, used without wait times (GPU ranks do not record any).
_NETWORK_PATH_SHARE = 0.85
_TCP_RATE = 1e7  # Bytes/s over all nodes; logs and checkpoints cause less


@dataclass(frozen=True)
class Cause:
    name: str
    share: float  # Time added by this cause, as a fraction of the baseline's time
    message: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Means over the runs of one set; None if not recorded."""

    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # Wall-clock time by goodput category
    straggler: tuple[float, int, str] = (0.0, 0, "")  # Extra wait fraction of the other ranks, rank, node
    min_wait: float | None = None  # Minimum over the ranks, fraction of the time
    cpu_delay: float | None = None  # Time that runnable threads spent off-core, seconds per second per rank
    other_cores: float | None = None  # Cores used by other programs
    idle_fraction: float | None = None  # Unused fraction of all cores
    io_stall_fraction: float | None = None  # Fraction of the time with processes blocked on disk I/O
    disk_read_rate: float | None = None  # Bytes/s
    network_send_rate: float | None = None  # Bytes/s
    nvlink_send_rate: float | None = None  # Bytes/s, all GPUs
    sm_clock_mhz: float | None = None  # Mean over the GPUs
    slowest_gpu: tuple[float, str] = (1.0, "")  # SM clock relative to the median of the other GPUs, GPU name
    throttle_fractions: Mapping[str, float] = field(default_factory=dict)  # Fraction of the readings by reason


def find_causes(current_set: RunSet, baseline_set: RunSet) -> list[Cause]:
    """Return the causes of the slowdown of the current runs, largest first; empty if it is not slower."""
    current, baseline = collect_evidence(current_set.logs), collect_evidence(baseline_set.logs)
    total = sum(baseline.phase_seconds.values())
    min_slowdown = MIN_SLOWDOWN if current.sm_clock_mhz or baseline.sm_clock_mhz else MIN_SLOWDOWN_CPU
    if not current.phase_seconds or not total or sum(current.phase_seconds.values()) < total * (1 + min_slowdown):
        return []
    # Whatever slows the training steps slows startup and evaluation as well; missing cores slow all computation.
    compute_phases = ("training", "evaluation", "start")
    training, baseline_training = current.phase_seconds["training"], baseline.phase_seconds["training"]
    slowdown = max(1.0, training / baseline_training) if baseline_training else 1.0
    expected = {
        phase: seconds * (slowdown if phase in compute_phases else 1.0)
        for phase, seconds in baseline.phase_seconds.items()
    }
    compute_s, baseline_compute_s = (
        sum(evidence.phase_seconds[phase] for phase in compute_phases) for evidence in (current, baseline)
    )
    cpu_cause = _cpu_contention(
        current,
        baseline,
        (compute_s - baseline_compute_s) / total,
        1 - baseline_compute_s / compute_s if compute_s else 0.0,
    )
    if cpu_cause is not None:
        unexplained = 1 - min(1.0, cpu_cause.share * total / (compute_s - baseline_compute_s))
        expected = {
            phase: current.phase_seconds[phase] - unexplained * max(0.0, current.phase_seconds[phase] - seconds)
            for phase, seconds in expected.items()
        }
    causes = [*([cpu_cause] if cpu_cause else []), *_slower_phases(current, baseline, expected)]
    causes += _slower_steps(current_set, baseline_set, current, baseline, expected)
    return sorted((cause for cause in causes if cause.share >= MIN_SHARE), key=lambda cause: -cause.share)


def _slower_phases(current: Evidence, baseline: Evidence, expected: Mapping[str, float]) -> Iterator[Cause]:
    # Phases with measured wall-clock time, compared with their expected time.
    total = sum(baseline.phase_seconds.values())
    labels = {
        "evaluation": "evaluation", "checkpoints": "checkpoints", "start": "startup", "end": "shutdown",
        "stopped or repeated": "pauses and repeated steps",
    }  # fmt: skip
    for phase, label in labels.items():
        extra = current.phase_seconds[phase] - expected[phase]
        times = _compare_seconds(current.phase_seconds[phase], baseline.phase_seconds[phase])
        yield Cause(phase, extra / total, f"{label}: {times}")
    stall = current.phase_seconds["data stall"] - baseline.phase_seconds["data stall"]
    from_disk = (
        _increase(current.disk_read_rate, baseline.disk_read_rate) > _DISK_READ_RATE
        or _increase(current.io_stall_fraction, baseline.io_stall_fraction) > _IO_STALL_FRACTION
    )
    name = "cold or slow disk" if from_disk else "data stall"
    read_rates = (
        f"; disk reads {_format_rate(current.disk_read_rate)} (baseline {_format_rate(baseline.disk_read_rate)})"
    )
    times = _compare_seconds(current.phase_seconds["data stall"], baseline.phase_seconds["data stall"])
    yield Cause(name, stall / total, f"{name}: waiting for data {times}{read_rates if from_disk else ''}")


def _cpu_contention(current: Evidence, baseline: Evidence, extra: float, slowdown: float) -> Cause | None:
    # Missing CPU cores, which slow all phases that compute.
    delay_increase = _increase(current.cpu_delay, baseline.cpu_delay)
    load_increase = _increase(current.other_cores, baseline.other_cores)
    if extra <= 0 or slowdown <= 0:
        return None
    # If cores are idle, other programs are the cause only if their load is comparable to the delay.
    no_idle_cores = (current.idle_fraction or 0.0) < _IDLE_FRACTION
    if load_increase > _BUSY_CORES and (no_idle_cores or load_increase > delay_increase / 2):
        used, baseline_used = current.other_cores or 0, baseline.other_cores or 0
        message = f"other load: other programs used {used:.1f} cores (baseline {baseline_used:.1f})"
        return Cause("other load", extra * min(1.0, max(delay_increase, load_increase) / slowdown), message)
    if delay_increase > 0 and current.straggler[0] - baseline.straggler[0] < slowdown / 2:
        message = f"few cores: rank threads waited {current.cpu_delay or 0:.2f} s per second for a core"
        return Cause("few cores", extra * min(1.0, delay_increase / slowdown), message)
    return None


def _slower_steps(
    current_set: RunSet, baseline_set: RunSet, current: Evidence, baseline: Evidence, expected: Mapping[str, float]
) -> Iterator[Cause]:
    # Causes of slower training steps.
    total = sum(baseline.phase_seconds.values())
    training, baseline_training = current.phase_seconds["training"], baseline.phase_seconds["training"]
    # Evaluation and startup slow down along with the steps.
    side_effects = sum(
        min(current.phase_seconds[phase], expected[phase]) - baseline.phase_seconds[phase]
        for phase in ("evaluation", "start")
    )
    extra = (training - baseline_training + max(side_effects, 0.0)) / total
    slowdown = 1 - baseline_training / training if training else 0.0
    if extra < MIN_SHARE or slowdown <= 0:
        return

    def explained(increase: float) -> float:
        return extra * min(1.0, max(0.0, increase) / slowdown)

    throttled, baseline_throttled = current.throttle_fractions, baseline.throttle_fractions
    for reason in THROTTLE.values():
        fraction, baseline_fraction = throttled.get(reason, 0.0), baseline_throttled.get(reason, 0.0)
        message = f"{reason}: active in {fraction:.0%} of the GPU readings (baseline {baseline_fraction:.0%})"
        yield Cause(reason, extra * max(0.0, fraction - baseline_fraction), message)
    if current.sm_clock_mhz and baseline.sm_clock_mhz:
        reasons = {*throttled, *baseline_throttled}
        by_throttling = max((throttled.get(r, 0.0) - baseline_throttled.get(r, 0.0) for r in reasons), default=0.0)
        message = f"lower clocks: {current.sm_clock_mhz:.0f} MHz (baseline {baseline.sm_clock_mhz:.0f})"
        share = explained(1 - current.sm_clock_mhz / baseline.sm_clock_mhz) * (1 - max(0.0, by_throttling))
        yield Cause("lower clocks", share, message)
    relative_clock, gpu = current.slowest_gpu
    if relative_clock < baseline.slowest_gpu[0] - MIN_SLOWDOWN:
        message = f"slow rank: {gpu} runs at {relative_clock:.0%} of the median clock"
        yield Cause("slow rank", explained(1 - relative_clock), message)
    extra_wait, rank, node = current.straggler
    message = f"slow rank: rank {rank} on {node} waits {extra_wait:.0%} of the time less than the other ranks"
    yield Cause("slow rank", explained(extra_wait - baseline.straggler[0]), message)
    yield from _slow_links(current, baseline, extra, slowdown)
    yield from _changed_settings(current_set, baseline_set, extra)


def _slow_links(current: Evidence, baseline: Evidence, extra: float, slowdown: float) -> Iterator[Cause]:
    # Bytes per step are equal in both runs, so a slower run should send at a proportionally lower rate.
    changes = []
    sent, baseline_sent = current.network_send_rate, baseline.network_send_rate
    if (sent or 0.0) > max(_TCP_RATE, 2 * (baseline_sent or 0.0)):
        changes.append(f"{_format_rate(sent)} over TCP (baseline {_format_rate(baseline_sent)}), probably a fallback")
    nvlink, baseline_nvlink = current.nvlink_send_rate, baseline.nvlink_send_rate
    if nvlink is not None and nvlink < (baseline_nvlink or 0.0) * (1 - slowdown) / 2:
        changes.append(f"{_format_rate(nvlink)} over NVLink (baseline {_format_rate(baseline_nvlink)})")
    share = _NETWORK_PATH_SHARE
    if current.min_wait is not None and baseline.min_wait is not None:
        waits = f"all ranks wait at least {current.min_wait:.0%} of the time (baseline {baseline.min_wait:.0%})"
        share, changes = min(1.0, max(0.0, current.min_wait - baseline.min_wait) / slowdown), [waits, *changes]
    if changes:
        yield Cause("slow link", extra * share, f"slow link: {'; '.join(changes)}")


# Settings that affect step time. Excluded: the seed, stopping criteria, and work between steps.
_HYPERPARAMETERS = re.compile(r"configuration\.(?!seed|epochs|quality_target|targets|checkpoint|log_interval|eval)")
_SOFTWARE = re.compile(
    r"image|implementation|runtime|code\.|environment\.(ATEN|CUBLAS|CUDA|CUDNN|DALI|DNNL|HOROVOD|KMP|LD_|MALLOC|MKL|MXNET"
    r"|NCCL|OMP|ONEDNN|PYTORCH|TF_|TORCH|XLA)"
)


def _changed_settings(current_set: RunSet, baseline_set: RunSet, extra: float) -> Iterator[Cause]:
    settings, baseline_settings = current_set.settings, baseline_set.settings
    changed = [
        name for name in sorted({*settings, *baseline_settings}) if settings.get(name) != baseline_settings.get(name)
    ]
    for pattern, cause, share in (
        (_HYPERPARAMETERS, "other hyperparameters", _HYPERPARAMETER_SHARE),
        (_SOFTWARE, "another image or library", _SOFTWARE_SHARE),
    ):
        matches = [name for name in changed if pattern.match(name)]
        if matches:
            key, value, baseline_value = matches[0], settings.get(matches[0]), baseline_settings.get(matches[0])
            remaining = f" and {len(matches) - 1} more" if len(matches) > 1 else ""
            label = key.removeprefix("configuration.")
            message = f"{cause}: {label} is {value} (baseline {baseline_value}){remaining}"
            yield Cause(cause, extra * share, message)


def _increase(current: float | None, baseline: float | None) -> float:
    return current - baseline if current is not None and baseline is not None else 0.0


def _compare_seconds(current: float, baseline: float) -> str:
    return f"{current:.3g} s (baseline {baseline:.3g} s)"


def _format_rate(rate: float | None) -> str:
    return f"{(rate or 0.0) / 1e6:.1f} MB/s"


# -- evidence -------------------------------------------------------------------------------------------------------


def collect_evidence(logs: Sequence[RunLog]) -> Evidence:
    runs = [evidence for log in logs if (evidence := _run_evidence(log)) is not None]
    if not runs:
        return Evidence()
    reasons = {reason for run in runs for reason in run.throttle_fractions}

    return Evidence(
        phase_seconds={
            phase: statistics.fmean(run.phase_seconds[phase] for run in runs) for phase in runs[0].phase_seconds
        },
        # The mean over the runs: in healthy runs a random rank is the straggler.
        straggler=(statistics.fmean(run.straggler[0] for run in runs), *max(run.straggler for run in runs)[1:]),
        slowest_gpu=min((run.slowest_gpu for run in runs), key=lambda gpu: gpu[0]),
        throttle_fractions={
            reason: statistics.fmean(run.throttle_fractions.get(reason, 0.0) for run in runs) for reason in reasons
        },
        **{
            name: _mean(getattr(run, name) for run in runs)
            for name in (
                "min_wait",
                "cpu_delay",
                "other_cores",
                "idle_fraction",
                "io_stall_fraction",
                "disk_read_rate",
                "network_send_rate",
                "nvlink_send_rate",
                "sm_clock_mhz",
            )
        },
    )


def _run_evidence(log: RunLog) -> Evidence | None:
    goodput, experiment = goodput_of(log), experiment_of(log.path)
    if goodput is None or experiment is None:
        return None
    windows_by_rank = {rank: windows for rank, windows in steps.windows_of(experiment).items() if windows}
    windows = [window for rank_windows in windows_by_rank.values() for window in rank_windows]
    nodes = telemetry.by_node(log)
    readings = [reading for node_readings in nodes.values() for reading in node_readings]
    wait_fractions = {
        rank: fraction
        for rank, rank_windows in windows_by_rank.items()
        if (fraction := steps.waiting_of(rank_windows)) is not None
    }
    seconds = sum(window.window for window in windows)
    rank_cores = sum(window.cpu for window in windows) / (seconds / len(windows_by_rank)) if windows else None
    busy_cores = _mean(r["cpu_percent"] / 100 * r["cores"] for r in readings if r.get("cores") is not None)
    gpus = _active_gpus(nodes)
    gpu_readings = [reading for gpu in gpus.values() for reading in gpu]
    other_cores = None if busy_cores is None or rank_cores is None else max(0.0, busy_cores * len(nodes) - rank_cores)
    clocks = {name: _mean(reading.get("sm_mhz") for reading in gpu) for name, gpu in gpus.items()}
    slow = lowest({name: clock for name, clock in clocks.items() if clock is not None})
    # The straggler is the rank with the lowest wait fraction: it blocks the other ranks.
    straggler = lowest(wait_fractions)
    return Evidence(
        phase_seconds=goodput.parts,
        straggler=(straggler.others - straggler.value, straggler.name, windows_by_rank[straggler.name][-1].node)
        if straggler
        else (0.0, 0, ""),
        min_wait=min(wait_fractions.values(), default=None),
        cpu_delay=sum(window.delayed for window in windows) / seconds if windows else None,
        other_cores=other_cores,
        idle_fraction=_mean(1 - r["cpu_percent"] / 100 for r in readings if "cpu_percent" in r),
        io_stall_fraction=_counter_rate(nodes, "io_stall_us", 1e-6),
        disk_read_rate=_counter_rate(nodes, "disk_read_bytes", 1.0),
        network_send_rate=_counter_rate(nodes, "network_sent_bytes", 1.0),
        nvlink_send_rate=_counter_rate(_nvlink_counters(nodes), "nvlink_sent_kib", 1024.0),
        sm_clock_mhz=_mean(gpu.get("sm_mhz") for gpu in gpu_readings),
        slowest_gpu=(slow.value / slow.others, slow.name) if slow and slow.others else (1.0, ""),
        throttle_fractions=_throttle_fractions(gpu_readings),
    )


def _active_gpus(nodes: Mapping[str, Sequence[Reading]]) -> dict[str, list[Reading]]:
    # Telemetry covers all GPUs in the node. Idle GPUs have low clocks and must not count as slow.
    gpus: dict[str, list[Reading]] = {}
    for node, readings in nodes.items():
        for reading in readings:
            for index, gpu in enumerate(reading.get("gpus", ())):
                gpus.setdefault(f"GPU {index} of {node}", []).append(gpu)
    return {name: readings for name, readings in gpus.items() if any(telemetry.in_use(reading) for reading in readings)}


def _throttle_fractions(gpu_readings: Sequence[Mapping[str, int | None]]) -> dict[str, float]:
    masks = [mask for reading in gpu_readings if (mask := reading.get("throttle")) is not None]
    counts = {reason: sum(bool(mask & bit) for mask in masks) for bit, reason in THROTTLE.items()}
    return {reason: count / len(masks) for reason, count in counts.items() if count}


def _nvlink_counters(nodes: Mapping[str, Sequence[Reading]]) -> dict[str, list[Reading]]:
    counters: dict[str, list[Reading]] = {}
    for node, readings in nodes.items():
        for reading in readings:
            sent = [gpu.get("nvlink_sent_kib") for gpu in reading.get("gpus", ())]
            if sent and None not in sent:
                counters.setdefault(node, []).append({"time": reading["time"], "nvlink_sent_kib": sum(sent)})
    return counters


def _counter_rate(nodes: Mapping[str, Sequence[Reading]], name: str, unit: float) -> float | None:
    # Sum over the nodes; per node from the first and last value of the counter.
    rates = []
    for readings in nodes.values():
        samples = [(float(r["time"]), float(r[name])) for r in readings if r.get(name) is not None]
        if len(samples) > 1 and samples[-1][0] > samples[0][0]:
            rates.append((samples[-1][1] - samples[0][1]) * unit / (samples[-1][0] - samples[0][0]))
    return sum(rates) if rates else None


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None
