"""Roofline and kernel profile of a training step.

    $ python -m benchmarks.common.checks.roofline --peaks gpu
    $ python -m benchmarks.common.checks.roofline benchmarks.resnet.pytorch --config config.json --data DATA

The step is the synthetic loop of the implementation's ``bench.py``. It is counted without compiler, CUDA graph and
Triton kernels, so that each operator is visible, and timed as configured. The last line of the output is the result
as JSON.
"""

import argparse
import gc
import importlib
import json
import statistics
import sys
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

from benchmarks.common.checks import kernel_table, measured_peaks, step_cost
from benchmarks.common.checks.selftest import alternatives
from benchmarks.common.data.problem import REFUSED, Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import configuration
from benchmarks.common.run.stopping import end_process
from benchmarks.common.run.timing import seconds_of

LOOP = "synthetic"
# Configuration keys that hide operators, with the values that show them; the first valid value is used.
PLAIN: Dict[str, List[Any]] = {
    "compile": ["none", False],
    "cuda_graph": [False],
    "kernels": ["plain"],
    "fp8": ["none"],
    "fused_relu": [False],  # FlopCounterMode does not count aten._addmm_activation
    "split_optimizer": [False],
}
REPEATS = 5


def plain(config: Any) -> Any:
    overrides: Dict[str, Any] = {}
    for field in fields(config):
        fitting = [value for value in PLAIN.get(field.name, ()) if value in alternatives(type(config), field.name)]
        if fitting:
            overrides[field.name] = fitting[0]
    return replace(config, **overrides)


def measure(module: str, config_path: Path, data: Path, steps: int, trace: Optional[Path] = None) -> Dict[str, Any]:
    """Count, time and profile the step of the implementation in ``module``; one rank."""
    try:
        bench = importlib.import_module(f"{module}.bench")
        config_class = importlib.import_module(f"{module}.config").Config
    except ImportError as error:
        raise Problem(
            found=f"{module} cannot be loaded: {error}",
            expected="a PyTorch implementation whose packages are installed",
            hint="run it in the environment of the implementation",
        ) from None
    config = configuration.load(config_class, config_path)
    ranks = pytorch.start(config)
    device: torch.device = ranks.context
    cost = _count_cost(bench.prepare(plain(config), ranks, data))
    gc.collect()
    with closing(bench.prepare(config, ranks, data)) as subject:
        step = _step(subject)
        seconds = time_steps(subject.loops[LOOP], steps)
        kernels = kernel_table.measure(step, device, trace=trace)
    return {
        "module": module,
        "title": subject.title,
        "device": device.type,
        "name": measured_peaks.name_of(device),
        "precision": config.precision,
        "batch_size": config.batch_size,
        "unit": subject.unit,
        "samples_per_step": subject.samples.get(LOOP, subject.samples_per_step),
        "seconds": seconds,
        "model_flops": subject.flops.get(LOOP),
        **asdict(cost),
        **kernels,
    }


def _count_cost(subject: Any) -> step_cost.Cost:
    with closing(subject):
        step = _step(subject)
        step()
        return step_cost.count(step)


def _step(subject: Any) -> Callable[[], Any]:
    if LOOP not in subject.loops:
        raise Problem(
            found=f"bench.py measures {', '.join(subject.loops)}",
            expected=f"a loop called {LOOP} with the training step",
            hint="this implementation's step is not counted",
        )
    return lambda: subject.loops[LOOP](1)


def time_steps(loop: Callable[[int], Any], steps: int) -> Dict[str, float]:
    loop(min(3, steps))
    times = [seconds_of(lambda: loop(steps), 1, pytorch.synchronize) / steps for _ in range(REPEATS)]
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", nargs="?", help="package of an implementation, such as benchmarks.resnet.pytorch")
    parser.add_argument("--peaks", choices=("cpu", "gpu"), help="measure the ceilings of this device")
    parser.add_argument("--config", type=Path, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, help="prepared data set")
    parser.add_argument("--steps", type=int, default=10, help="steps per measurement")
    parser.add_argument("--trace", type=Path, help="file for the trace of torch.profiler")
    arguments = parser.parse_args(argv)
    if arguments.module and not (arguments.config and arguments.data):
        parser.error("an implementation needs --config and --data")
    if not arguments.module and not arguments.peaks:
        parser.error("name an implementation, or --peaks")
    result: Dict[str, Any] = {}
    try:
        if arguments.peaks:
            kind = "cuda" if arguments.peaks == "gpu" else "cpu"
            result["peaks"] = measured_peaks.measure(torch.device(kind))
        if arguments.module:
            paths = arguments.config, arguments.data
            result["step"] = measure(arguments.module, *paths, arguments.steps, arguments.trace)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return REFUSED
    pytorch.finish()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    end_process(main)
