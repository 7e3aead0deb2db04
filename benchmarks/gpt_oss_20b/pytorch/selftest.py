"""The checks of `encore selftest` for gpt-oss-20b in PyTorch; see benchmarks/common/checks/selftest.py."""

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite
from benchmarks.llama import noise

ROUNDED = Tolerance(0.005, 0.01)
# Rounding changes the routing of tokens with nearly equal router logits.
CHOSEN_ANEW = Tolerance(0.02, 0.05)
SUITE = Suite(
    module="benchmarks.gpt_oss_20b.pytorch",
    # Weights are initialized with the device's generator.
    device=Tolerance(0.05, 0.05),
    two_ranks=CHOSEN_ANEW,
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={
        "precision": CHOSEN_ANEW,
        "gradient_reduction": CHOSEN_ANEW,
        "recompute": ROUNDED,
        "loss_rows=96": ROUNDED,
    },
    # One epoch of few steps: a run counts samples.
    settings={"epochs": 1, "max_steps": 60, "eval_interval_samples": 1 << 40},
    real_sizes=noise.write,
    shares_gpu="Gloo cannot gather or scatter GPU tensors, and NCCL requires one GPU per rank",
)
