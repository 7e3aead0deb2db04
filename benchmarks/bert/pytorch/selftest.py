"""The checks of `encore selftest` for BERT in PyTorch; see benchmarks/common/checks/selftest.py."""

from __future__ import annotations

from benchmarks.bert import noise
from benchmarks.bert.pytorch.config import Config
from benchmarks.common.checks import selftest
from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite

ROUNDED = Tolerance(0.005, 0.01)
SUITE = Suite(
    module="benchmarks.bert.pytorch",
    config_class=Config,
    device=ROUNDED,
    two_ranks=ROUNDED,
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={
        "precision": Tolerance(0.01, 0.02),
        "attention": ROUNDED,
        "optimizer_kernel": ROUNDED,
        "accumulation=4": ROUNDED,
        "compile": ROUNDED,
        "cuda_graph": ROUNDED,
        "split_optimizer": ROUNDED,
    },
    left_out=("optimizer_kernel=apex", "attention=flash"),
    # One epoch of few steps: a run counts samples.
    settings={
        "epochs": 1,
        "max_steps": 60,
        "max_samples": 1 << 40,
        "eval_start_samples": 1 << 40,
        "dropout": 0.0,
    },
    real_sizes=noise.write,
)

if __name__ == "__main__":
    raise SystemExit(selftest.main(SUITE))
