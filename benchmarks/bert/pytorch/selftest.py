"""The checks of `encore selftest` for BERT in PyTorch; see benchmarks/common/checks/selftest.py."""

from benchmarks.bert import noise
from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite

ROUNDED = Tolerance(0.005, 0.01)
SUITE = Suite(
    module="benchmarks.bert.pytorch",
    device=ROUNDED,
    two_ranks=ROUNDED,
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={
        "precision": Tolerance(0.01, 0.02),
        "attention": ROUNDED,
        "fp8=scaled_mm": Tolerance(0.02, 0.05),
        "optimizer_kernel": ROUNDED,
        "accumulation=4": ROUNDED,
        "compile": ROUNDED,
        "cuda_graph": ROUNDED,
        "split_optimizer": ROUNDED,
    },
    left_out=("optimizer_kernel=apex", "attention=flash", "attention=varlen"),
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
