"""Checks of the self-test that measure loops of bench.py on data of real sizes, as far as a CPU can."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Dict, Mapping, Sequence

from benchmarks.common.checks import bench as bench_loops
from benchmarks.common.checks.agreement import Result
from benchmarks.common.checks.trainings import Skipped, run

if TYPE_CHECKING:
    from benchmarks.common.checks.selftest import Bench

EVALUATION, INPUT = "evaluation", "input"
IMAGES = {"gpu": 512, "cpu": 64}  # JPEGs of real size that are generated
ENOUGH_EPOCHS = 8  # an input may end with its last epoch, and those images are few


def measure(
    bench: Bench, name: str, config: Mapping[str, Any], loops: Sequence[str], steps: int
) -> Dict[str, Dict[str, Any]]:
    """Measure loops of bench.py on data of real sizes, as far as a CPU can; the speeds are samples/s."""
    folder, data = bench.work / name, bench.work / f"{name}-data"
    folder.mkdir(parents=True, exist_ok=True)
    bench.suite.write_real(data, IMAGES["cpu"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    where = [
        "--config",
        str(folder / "config.json"),
        "--data",
        str(data),
        "--steps",
        str(steps),
        "--repeats",
        "1",
        "--any-data",
    ]
    run([sys.executable, "-m", f"{bench.suite.module}.bench", *where, "--only", *loops], folder, {})
    printed = (folder / "output.txt").read_text(encoding="utf-8").splitlines()
    answer = [line for line in printed if line.startswith("{")][-1]
    found: Dict[str, Dict[str, Any]] = json.loads(answer)["measured"]
    return found


def evaluation(bench: Bench) -> Result:
    """Evaluate batches of noise with the network of a submitted system; on a GPU bench.py has measured that."""
    if bench.device == "cpu" and bench.suite.no_cpu_evaluation:
        raise Skipped(bench.suite.no_cpu_evaluation)
    if bench.full is None:
        raise Skipped("no submitted system: name one with --full")
    # What is computed is the submitted system's; how, is the small one's.
    how = {"device", "loss_scale", *(entry.partition("=")[0] for entry in bench.suite.varied)}
    config = {**bench.full, **{name: value for name, value in bench.base.items() if name in how}}
    measured = measure(bench, EVALUATION, config, [EVALUATION], 1)
    return Result("OK", f"{measured[EVALUATION]['median']:,.0f} samples/s with the full network")


def real_input(bench: Bench) -> Result:
    """Read JPEGs of real size; the step is the small network's, which no rate of the input is compared with."""
    config = {**bench.base, "epochs": ENOUGH_EPOCHS}
    speeds = measure(bench, INPUT, config, ["synthetic", "input"], bench_loops.READ_AHEAD)
    read, step = (speeds[name]["median"] for name in ("input", "synthetic"))
    return Result("OK", f"{read:,.0f} images/s of real size; the small network's step takes {step:,.0f}")
