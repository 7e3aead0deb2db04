"""Checks of `encore selftest` for the Transformer in PyTorch, see benchmarks/common/checks/selftest.py."""

from functools import partial

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite
from benchmarks.translation import noise

ENTRIES = 33708  # of the submitted vocabulary

ROUNDED = Tolerance(0.005, 0.01)
ANOTHER_DRAW = Tolerance(0.05, 0.05)  # dropout masks differ between devices and numbers of ranks
SUITE = Suite(
    module="benchmarks.transformer.pytorch",
    device=ROUNDED,
    two_ranks=ANOTHER_DRAW,
    fewer_steps=1,  # batches with an empty rank are skipped
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={
        "precision": Tolerance(0.01, 0.02),
        "attention": ROUNDED,
        "attention=flash": Tolerance(0.01, 0.02),
        "optimizer_kernel": ROUNDED,
        "split_optimizer": ROUNDED,
        "compile": ROUNDED,
    },
    left_out=("optimizer_kernel=apex",),
    settings={"dropout": 0.0, "stop_at_target": False},
    real_sizes=partial(noise.write, benchmark="transformer", entries=ENTRIES),
    programs={"optimizers": "benchmarks.common.checks.compare_optimizers"},
)
