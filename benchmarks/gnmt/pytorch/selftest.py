"""Checks of `encore selftest` for GNMT in PyTorch, see benchmarks/common/checks/selftest.py."""

from functools import partial

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite
from benchmarks.translation import noise

ENTRIES = 32316  # entries of the submitted vocabulary, which is padded to 32,320
ROUNDED = Tolerance(0.005, 0.02)
SUITE = Suite(
    module="benchmarks.gnmt.pytorch",
    # Dropout uses the device's generator.
    device=Tolerance(0.1, 0.1),
    settings={"dropout": 0.0, "epochs": 1},
    two_ranks=ROUNDED,
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={"precision": ROUNDED, "optimizer_kernel": ROUNDED, "split_optimizer": ROUNDED},
    left_out=("optimizer_kernel=apex",),
    real_sizes=partial(noise.write, benchmark="gnmt", entries=ENTRIES),
    programs={"optimizers": "benchmarks.common.checks.compare_optimizers"},
)
