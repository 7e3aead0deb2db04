"""The checks of `encore selftest` for Llama 3.1 8B in PyTorch; see benchmarks/common/checks/selftest.py."""

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite
from benchmarks.llama import noise

ROUNDED = Tolerance(0.005, 0.01)
SUITE = Suite(
    module="benchmarks.llama31_8b.pytorch",
    # Weights are initialized with the device's generator.
    device=Tolerance(0.05, 0.05),
    two_ranks=ROUNDED,
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={
        "precision": Tolerance(0.01, 0.02),
        "gradient_reduction": Tolerance(0.01, 0.02),
        "attention=cudnn": Tolerance(0.02, 0.05),
        "fp8=scaled_mm": Tolerance(0.02, 0.05),
        "recompute": ROUNDED,
        "loss_rows=96": ROUNDED,
        "compile": ROUNDED,
    },
    # One epoch of few steps: a run counts samples.
    settings={"epochs": 1, "max_steps": 60, "eval_interval_samples": 1 << 40},
    real_sizes=noise.write,
    shares_gpu="Gloo cannot gather or scatter GPU tensors, and NCCL requires one GPU per rank",
)
