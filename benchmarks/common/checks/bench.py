"""Measure a training step and a bare loop in the same run, for any framework.

``bench.py`` of a benchmark defines the loops as a :class:`Subject`; the step is ``train_step`` of its ``train.py``.
The loops take turns for several repeats, in alternating order; the median is reported.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.common.run import choices, configuration, evidence
from benchmarks.common.run.metrics import MetricsStream, StepReports
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.stopping import end_process

TITLES = {
    "bare": "bare loop, synthetic data",
    "synthetic": "training step, synthetic data",
    "real": "training step, real data",
    "input": "input pipeline alone",
    "evaluation": "evaluation step, synthetic data",
}
EVALUATION = "evaluation"  # the loop of evaluation batches, of every benchmark
READ_AHEAD = 8  # batches that an input pipeline may prefetch
RATE = 0.01
# Runs a number of steps; returns the fraction of the time spent waiting for data, if known.
Loop = Callable[[int], Optional[float]]


@dataclass(frozen=True)
class Subject:
    """Loops to measure, by the keys of TITLES; all others are compared with ``bare``."""

    title: str
    samples_per_step: int
    loops: Mapping[str, Loop]
    titles: Mapping[str, str] = field(default_factory=dict)  # titles that differ from TITLES
    # Samples per step and loop, if different from ``samples_per_step``
    samples: Mapping[str, int] = field(default_factory=dict)
    # The loop with which a loop is compared, where it is not ``bare``.
    against: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None  # end the threads of the loops
    unit: str = "samples"  # unit of ``samples_per_step``
    # Model FLOPs per training step and loop (benchmarks/common/flops.py), if known
    flops: Mapping[str, float] = field(default_factory=dict)


def repeated(call: Callable[[], Any]) -> Loop:
    def loop(count: int) -> None:
        for _ in range(count):
            call()

    return loop


def training_loop(
    framework: Any, config: Any, ranks: Ranks, step: Callable[[Any], Any], next_batch: Callable[[], Any]
) -> Loop:
    """Return a step loop on batches from ``next_batch``, with training reports; ``step`` returns a loss."""
    stream, sums = MetricsStream(Path("/dev/null"), 0), framework.LaggedSums(ranks, "step")
    batch_size = config.batch_size * ranks.size
    wait = framework.input_wait(ranks)
    reports = StepReports(stream, sums, wait, ranks, batch_size, 1 << 30, config.log_interval)

    def loop(count: int) -> float:
        reports.start()
        for number in range(count):
            reports.add(range(number, number + 1), step(reports.wait_for(next_batch)), False, RATE)
        framework.synchronize()
        return reports.input_share()

    return loop


def refuse_unknown(subject: Subject, only: Sequence[str]) -> None:
    unknown = [name for name in only if name not in subject.loops]
    if unknown:
        raise Problem(f"no loop {', '.join(unknown)}", ", ".join(subject.loops), "--only LOOP")


def measure(
    subject: Subject, synchronize: Callable[[], None], steps: int, repeats: int, only: Sequence[str] = ()
) -> Tuple[Dict[str, Any], Optional[float]]:
    """Measure each loop's samples per second, in turn, and the waiting fraction with real data."""
    loops = {name: loop for name, loop in subject.loops.items() if not only or name in only}
    titles = {**TITLES, **subject.titles}
    speeds: Dict[str, List[float]] = {name: [] for name in loops}
    shares: List[float] = []
    for name, loop in loops.items():
        try:
            loop(min(3, steps))  # compile, fill the pipelines
            # Otherwise a device may report the error of this loop in the next one.
            synchronize()
        except Exception:
            print(f"failed: {titles[name]}", file=sys.stderr)
            raise
    for number in range(repeats):
        # Alternate the order: the speed of the machine also drifts during a turn.
        for name, loop in list(loops.items())[:: -1 if number % 2 else 1]:
            if name == "input":
                loop(min(READ_AHEAD, steps))  # otherwise a short measurement would use prefetched batches
            synchronize()
            started = time.time()
            share = loop(steps)
            synchronize()
            samples = steps * subject.samples.get(name, subject.samples_per_step)
            speeds[name].append(samples / (time.time() - started))
            if name == "real" and share is not None:
                shares.append(share)
        print(f"measurement {number + 1} of {repeats} done", file=sys.stderr)
    measured: Dict[str, Dict[str, Any]] = {}
    for name, values in speeds.items():
        # Compare with the loop of the same turn.
        against = speeds.get(subject.against.get(name, "bare"), [])
        ratios = [value / base for value, base in zip(values, against)]
        measured[name] = {
            "title": titles[name],
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "ratio": statistics.median(ratios) if ratios else None,
        }
        if name in subject.flops:
            flops = subject.flops[name] / subject.samples.get(name, subject.samples_per_step)
            measured[name].update(flops_per_sample=flops, flops_per_second=flops * measured[name]["median"])
    if shares:
        return measured, statistics.median(shares)
    both = "real" in measured and "input" in measured
    return measured, measured["real"]["median"] / measured["input"]["median"] if both else None


# GEMM peak FLOP/s in the configured precision; only measured by PyTorch.
def _peak(framework: Any, config: Any, ranks: Ranks) -> Optional[float]:
    if not framework.__name__.endswith(".pytorch"):
        return None
    from benchmarks.common.checks import measured_peaks

    is_measurable = config.precision in measured_peaks.PRECISIONS[ranks.context.type]
    return measured_peaks.flops_per_second(ranks.context, config.precision) if is_measurable else None


def main(
    description: Optional[str],
    config_class: Any,
    framework: Any,
    prepare: Callable[[Any, Ranks, Path], Subject],
    epochs: bool = False,
    for_one_rank: Callable[[Any], Any] = lambda config: config,
) -> NoReturn:
    """Run the command line of a ``bench.py``; ``epochs``: a step of the measurement is an epoch.

    ``for_one_rank`` makes a configuration that a single rank can compute; if it changes the configuration, the speed
    is that of a part of the training.
    """
    end_process(lambda: _main(description, config_class, framework, prepare, epochs, for_one_rank))


def _main(
    description: Optional[str],
    config_class: Any,
    framework: Any,
    prepare: Callable[[Any, Ranks, Path], Subject],
    epochs: bool,
    for_one_rank: Callable[[Any], Any],
) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="prepared data set")
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement; ignored if it is an epoch")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement")
    parser.add_argument("--only", nargs="+", default=(), metavar="LOOP", help="loops to measure; default: all")
    parser.add_argument(
        "--any-data",
        action="store_true",
        help="accept data that cannot be trained on, for speed measurements only",
    )
    arguments = parser.parse_args()
    full_config = configuration.load(config_class, arguments.config)
    config = for_one_rank(full_config)
    ranks = framework.start(config)
    try:
        if not arguments.any_data:
            configuration.reject_mismatches(config, arguments.data, ranks.size)
        subject = prepare(config, ranks, arguments.data)
        refuse_unknown(subject, arguments.only)
    except (choices.UnavailableError, Problem) as problem:
        raise SystemExit(str(problem)) from None
    steps = 1 if epochs else arguments.steps
    try:
        measured, share = measure(subject, framework.synchronize, steps, arguments.repeats, arguments.only)
        peak = _peak(framework, config, ranks) if subject.flops else None
    finally:
        subject.close()
    result = {
        "title": subject.title,
        "is_part": config != full_config,
        "unit": subject.unit,
        "measured": measured,
        "input_share": share,
        "device": config.device,
        "precision": evidence.gemm_precision(config),
        "peak_flops_per_second": peak,
    }
    framework.finish()
    print(json.dumps(result))
    return 0
